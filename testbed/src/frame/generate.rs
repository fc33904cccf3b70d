//! The generator, and the rule by which a frame follows from its stream and sequence number.

use std::ops::RangeInclusive;

use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv4Header, UdpHeader};

use super::{FRAME_LEN_MAX, FRAME_LEN_MIN, IP_DST, IP_SRC, UDP_PORT};

const IP_AT: usize = Ethernet2Header::LEN;
const UDP_AT: usize = IP_AT + Ipv4Header::MIN_LEN;
const PAYLOAD_AT: usize = UDP_AT + UdpHeader::LEN;
/// Sequence number, 64 bits.
pub(super) const SEQUENCE_AT: usize = PAYLOAD_AT;
/// Stream id, 32 bits.
pub(super) const STREAM_AT: usize = SEQUENCE_AT + 8;
/// 32 bits that follow from seed, stream and sequence: tells our frames from anybody else's.
const TAG_AT: usize = STREAM_AT + 4;
const PATTERN_AT: usize = TAG_AT + 4;
const _: () = assert!(PATTERN_AT <= FRAME_LEN_MIN);

const MAC_DST: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];
const MAC_SRC: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
const TTL: u8 = 64;

/// What both ends of a test agree on: from it and a sequence number follows every byte of a frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stream {
    seed: u64,
    id: u32,
    len_min: usize,
    len_max: usize,
}

impl Stream {
    /// The stream `id`, whose frames have one of `lengths` (bytes without FCS), chosen by `seed` and sequence number.
    /// Lengths are clamped to [`FRAME_LEN_MIN`]`..=`[`FRAME_LEN_MAX`].
    #[must_use]
    pub fn new(seed: u64, id: u32, lengths: RangeInclusive<usize>) -> Self {
        let len_min = (*lengths.start()).clamp(FRAME_LEN_MIN, FRAME_LEN_MAX);
        Self { seed, id, len_min, len_max: (*lengths.end()).clamp(len_min, FRAME_LEN_MAX) }
    }

    /// The id it was made with.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// The same rule under the id `id`: one stream a queue.
    #[must_use]
    pub fn with_id(&self, id: u32) -> Self {
        Self { id, ..self.clone() }
    }

    /// Puts frame `sequence` into `frame`, replacing what was there.
    #[expect(clippy::missing_panics_doc, reason = "lengths are clamped to 9000, far below the 65535 of IPv4 and UDP")]
    pub fn write(&self, sequence: u64, frame: &mut Vec<u8>) {
        let mut random = SplitMix(self.seed ^ u64::from(self.id).rotate_left(32) ^ mix(sequence));
        let choices = (self.len_max - self.len_min + 1) as u64;
        let len = self.len_min + usize::try_from(random.next() % choices).unwrap_or(0);

        frame.clear();
        frame.resize(len, 0);
        frame[SEQUENCE_AT..STREAM_AT].copy_from_slice(&sequence.to_be_bytes());
        frame[STREAM_AT..TAG_AT].copy_from_slice(&self.id.to_be_bytes());
        frame[TAG_AT..PATTERN_AT].copy_from_slice(&random.next().to_be_bytes()[..4]);
        for chunk in frame[PATTERN_AT..].chunks_mut(8) {
            chunk.copy_from_slice(&random.next().to_be_bytes()[..chunk.len()]);
        }

        let ethernet = Ethernet2Header { source: MAC_SRC, destination: MAC_DST, ether_type: EtherType::IPV4 };
        let mut ip = Ipv4Header {
            total_len: u16::try_from(len - IP_AT).expect("at most 9000"),
            // The low half of the sequence number, so that a capture shows at a glance what is missing.
            identification: (sequence & 0xffff) as u16,
            dont_fragment: false,
            time_to_live: TTL,
            protocol: IpNumber::UDP,
            source: IP_SRC,
            destination: IP_DST,
            ..Ipv4Header::default()
        };
        ip.header_checksum = ip.calc_header_checksum();
        let udp = UdpHeader::with_ipv4_checksum(UDP_PORT, UDP_PORT, &ip, &frame[PAYLOAD_AT..]).expect("at most 9000");
        frame[..IP_AT].copy_from_slice(&ethernet.to_bytes());
        frame[IP_AT..UDP_AT].copy_from_slice(&ip.to_bytes());
        frame[UDP_AT..PAYLOAD_AT].copy_from_slice(&udp.to_bytes());
    }
}

/// Makes the frames of a [`Stream`], one after the other.
#[derive(Debug, Clone)]
pub struct FrameGen {
    stream: Stream,
    next: u64,
}

impl FrameGen {
    /// A generator that starts at sequence number 0.
    #[must_use]
    pub fn new(stream: Stream) -> Self {
        Self { stream, next: 0 }
    }

    /// Puts the next frame into `frame`, replacing what was there, and returns its sequence number.
    pub fn write_next(&mut self, frame: &mut Vec<u8>) -> u64 {
        let sequence = self.next;
        self.stream.write(sequence, frame);
        self.next += 1;
        sequence
    }

    /// Makes the last frame again next time: it was not used.
    pub fn back(&mut self) {
        self.next = self.next.saturating_sub(1);
    }

    /// How many frames it has made.
    #[must_use]
    pub fn made(&self) -> u64 {
        self.next
    }
}

/// Steele, Lea and Flood's `SplitMix64`: small, and the same numbers everywhere from the same seed.
pub(crate) struct SplitMix(pub(crate) u64);

impl SplitMix {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `n`, or 0 if there is none.
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        ((u64::from(n) * (self.next() >> 32)) >> 32) as u32
    }
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_and_lengths_are_valid_at_every_size() {
        let mut frame = Vec::new();
        for len in [60, 61, 64, 128, 1500, 1501, 8999, 9000] {
            Stream::new(7, 1, len..=len).write(3, &mut frame);
            assert_eq!(frame.len(), len);
            assert!(super::super::is_txonly(&frame), "length {len}");

            let packet = etherparse::PacketHeaders::from_ethernet_slice(&frame).unwrap();
            let udp = packet.transport.unwrap().udp().unwrap();
            let ip = packet.net.unwrap();
            let sum = udp.calc_checksum_ipv4(ip.ipv4_ref().unwrap().0, &frame[PAYLOAD_AT..]).unwrap();
            assert_eq!(udp.checksum, sum, "length {len}");
        }
    }

    #[test]
    fn lengths_out_of_range_are_clamped() {
        let mut frame = Vec::new();
        Stream::new(0, 0, 0..=0).write(0, &mut frame);
        assert_eq!(frame.len(), FRAME_LEN_MIN);
        Stream::new(0, 0, 100_000..=200_000).write(0, &mut frame);
        assert_eq!(frame.len(), FRAME_LEN_MAX);
    }

    #[test]
    fn a_range_of_lengths_is_covered_end_to_end() {
        let stream = Stream::new(1, 0, 60..=63);
        let mut generator = FrameGen::new(stream);
        let mut seen = std::collections::BTreeSet::new();
        let mut frame = Vec::new();
        for _ in 0..200 {
            generator.write_next(&mut frame);
            seen.insert(frame.len());
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [60, 61, 62, 63]);
        assert_eq!(generator.made(), 200);
    }

    #[test]
    fn a_foreign_frame_is_not_txonly() {
        let mut frame = Vec::new();
        Stream::new(7, 1, 64..=64).write(3, &mut frame);
        for at in [12, 14, 17, 24, 26, 30, 34, 36, 38] {
            let mut other = frame.clone();
            other[at] ^= 1;
            assert!(!super::super::is_txonly(&other), "byte {at}");
        }
        assert!(!super::super::is_txonly(&frame[..63]));
        assert!(!super::super::is_txonly(&[]));
    }
}
