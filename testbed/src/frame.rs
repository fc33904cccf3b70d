//! Test frames that know who they are: every byte of one follows from its stream and its sequence number.
//!
//! [`FrameGen`] makes them, [`FrameCheck`] verifies every byte of what comes back and tells loss, duplicates, reordering and
//! corruption apart. On the wire a frame is Ethernet, IPv4 and UDP as testpmd's `txonly` sends them (198.18.0.1 to
//! 198.18.0.2, port 9), with valid checksums, then a sequence number, a stream id, a tag and a pattern.
//!
//! testpmd shows no frame contents, so to check what a DPDK end did with a frame, let this side be the generator and testpmd
//! the forwarder (`io` or `macswap`): every frame comes back, and [`FrameCheck`] sees each byte of it.

mod check;
mod generate;

pub use check::{CheckError, FrameCheck, Macs, Report, Verdict};
pub(crate) use generate::SplitMix;
pub use generate::{FrameGen, Stream};

use etherparse::{SlicedPacket, TransportSlice};

/// Shortest test frame in bytes, without FCS: the shortest Ethernet allows.
pub const FRAME_LEN_MIN: usize = 60;
/// Longest test frame in bytes, without FCS: a jumbo frame.
pub const FRAME_LEN_MAX: usize = 9000;

/// Who sends, and to whom: the addresses of RFC 2544 test traffic, as in testpmd's `txonly`.
const IP_SRC: [u8; 4] = [198, 18, 0, 1];
const IP_DST: [u8; 4] = [198, 18, 0, 2];
const UDP_PORT: u16 = 9;

/// Is `frame` one that testpmd's `txonly` sends: right addresses, ports, lengths and IPv4 checksum? Its payload is whatever
/// lay in the mbuf, so more cannot be said.
#[must_use]
pub fn is_txonly(frame: &[u8]) -> bool {
    let Ok(packet) = SlicedPacket::from_ethernet(frame) else { return false };
    let (Some(net), Some(TransportSlice::Udp(udp))) = (packet.net, packet.transport) else { return false };
    let Some(ip) = net.ipv4_ref().map(|ip| ip.header().to_header()) else { return false };
    ip.source == IP_SRC
        && ip.destination == IP_DST
        && ip.header_checksum == ip.calc_header_checksum()
        && usize::from(ip.total_len) + 14 == frame.len()
        && usize::from(udp.length()) + 34 == frame.len()
        && udp.source_port() == UDP_PORT
        && udp.destination_port() == UDP_PORT
}
