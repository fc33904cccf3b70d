//! The frame that `txonly` sends, and the bursts of it.

use crate::mbuf::{Chain, HEADROOM, Mbuf, MbufPool};
use crate::port::Burst;

/// Shortest frame, in bytes without FCS: the shortest that Ethernet allows.
pub const FRAME_MIN: usize = 60;
/// Longest frame, in bytes without FCS: a jumbo frame.
pub const FRAME_MAX: usize = 9000;

const ETHERNET: usize = 14;
const IPV4: usize = 20;
const UDP: usize = 8;
/// Where the sequence number stands, if there is one: 64 bits, big-endian, first in the payload.
const SEQUENCE_AT: usize = ETHERNET + IPV4 + UDP;

/// Makes bursts of one frame.
#[derive(Debug)]
pub(super) struct Generator {
    pool: MbufPool,
    frame: Box<[u8]>,
    /// What one mbuf holds, in bytes.
    room: usize,
    segments: usize,
    /// Mbufs that are to become segments; its capacity is for the largest burst.
    spare: Vec<Mbuf>,
    sequence: Option<u64>,
}

impl Generator {
    /// A generator of frames of `len` bytes, which begin with `macs` (destination and source), numbered from 0 if `sequence`.
    pub fn new(pool: &MbufPool, macs: [u8; 12], len: usize, burst: usize, sequence: bool) -> Self {
        let room = usize::from(pool.room() - HEADROOM);
        let segments = len.div_ceil(room);
        Self {
            pool: pool.clone(),
            frame: frame(macs, len),
            room,
            segments,
            spare: Vec::with_capacity(burst * segments),
            sequence: sequence.then_some(0),
        }
    }

    /// Fills the empty `burst`; returns the number of frames: none if the pool has not enough mbufs.
    #[inline(always)]
    pub fn fill(&mut self, burst: &mut Burst) -> usize {
        let count = burst.room();
        if self.segments > 1 {
            return self.fill_chains(burst, count);
        }
        if burst.fill(&self.pool, count).is_err() {
            return 0;
        }
        for mbuf in burst.as_mut_slice() {
            number(&mut self.sequence, &mut self.frame);
            put(mbuf, &self.frame);
        }
        count
    }

    /// As [`fill`](Self::fill), for frames that do not fit into one mbuf.
    fn fill_chains(&mut self, burst: &mut Burst, count: usize) -> usize {
        if self.pool.alloc_bulk(&mut self.spare, count * self.segments).is_err() {
            return 0;
        }
        let mut spare = self.spare.drain(..);
        for _ in 0..count {
            number(&mut self.sequence, &mut self.frame);
            // Parts first: a zip that ends asks its second iterator for nothing, so no mbuf is taken too many.
            let mut filled = self.frame.chunks(self.room).zip(spare.by_ref()).map(|(part, mut mbuf)| {
                put(&mut mbuf, part);
                mbuf
            });
            let Some(head) = filled.next() else { break };
            let mut chain = Chain::new(head);
            // `FRAME_MAX` bytes are far from the limits of a chain, and the burst was empty: nothing is refused here.
            filled.for_each(|mbuf| drop(chain.push(mbuf)));
            drop(burst.push(chain.finish()));
        }
        drop(spare);
        burst.len()
    }
}

/// Makes `mbuf`, which is empty and has the room, a segment with `part`.
#[inline(always)]
fn put(mbuf: &mut Mbuf, part: &[u8]) {
    let fits = mbuf.set_len(part.len());
    debug_assert!(fits, "a generated segment of {} bytes", part.len());
    mbuf.data().write(part);
}

/// Numbers the frame, if frames are numbered.
#[inline(always)]
fn number(sequence: &mut Option<u64>, frame: &mut [u8]) {
    if let Some(next) = sequence {
        frame[SEQUENCE_AT..SEQUENCE_AT + 8].copy_from_slice(&next.to_be_bytes());
        *next += 1;
    }
}

/// testpmd's frame: Ethernet, IPv4 198.18.0.1 to 198.18.0.2 (RFC 2544's test network), UDP from port 9 to port 9 (discard)
/// without a checksum, then zeros.
fn frame(macs: [u8; 12], len: usize) -> Box<[u8]> {
    let [total, udp] = [len - ETHERNET, len - ETHERNET - IPV4].map(|n| (n as u16).to_be_bytes());
    let mut ip = [0x45, 0, total[0], total[1], 0, 0, 0, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2];
    let checksum = checksum(&ip).to_be_bytes();
    ip[10..12].copy_from_slice(&checksum);
    let mut frame = Vec::with_capacity(len);
    frame.extend_from_slice(&macs);
    frame.extend_from_slice(&[0x08, 0x00]);
    frame.extend_from_slice(&ip);
    frame.extend_from_slice(&[0, 9, 0, 9, udp[0], udp[1], 0, 0]);
    frame.resize(len, 0);
    frame.into_boxed_slice()
}

/// The Internet checksum (RFC 1071) of a header of whole 16-bit words.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 = header.chunks_exact(2).map(|word| u32::from(u16::from_be_bytes([word[0], word[1]]))).sum();
    // Ten words: two folds take any carry in.
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_frame_is_testpmds() {
        let frame = frame([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], 64);
        let headers = [
            1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 0, // Ethernet
            0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17, 0xee, 0x93, 198, 18, 0, 1, 198, 18, 0, 2, // IPv4
            0, 9, 0, 9, 0, 30, 0, 0, // UDP
        ];
        assert_eq!(frame[..SEQUENCE_AT], headers);
        assert_eq!(frame[SEQUENCE_AT..], [0; 22]);
    }

    #[test]
    fn the_checksum_is_right_at_every_length() {
        for len in FRAME_MIN..=FRAME_MAX {
            let frame = frame([0; 12], len);
            // A header with its checksum in place sums up to all ones, so its checksum is 0 (RFC 1071).
            assert_eq!(checksum(&frame[ETHERNET..ETHERNET + IPV4]), 0, "length {len}");
            assert_eq!(frame.len(), len);
        }
    }
}
