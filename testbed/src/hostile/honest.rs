//! What the other end does meanwhile.

use pmd::mbuf::MbufPool;
use pmd::port::{Burst, TxBurst};
use pmd::virtio::spec::FRAME_LEN_MIN;

use crate::rings::packet;

/// Checks that received packets are consistent, whatever the peer said, and frees them; returns how many there were.
///
/// # Panics
/// If one is not.
pub fn judge(burst: &mut Burst) -> usize {
    for mbuf in burst.as_slice() {
        mbuf.check().expect("a packet in order");
        assert!(mbuf.pkt_len() >= FRAME_LEN_MIN, "a frame of {} bytes", mbuf.pkt_len());
    }
    burst.free()
}

/// Sends a burst of packets of one to three segments, of bytes that make no valid address; what is not taken is freed.
/// Returns how many were taken.
///
/// # Panics
/// If `pool` is empty.
pub fn send(queue: &mut dyn TxBurst, pool: &MbufPool, turn: usize) -> usize {
    let mut burst = Burst::new(8);
    for i in 0..8 {
        let len = 60 + (turn * 8 + i) * 37 % 2900;
        burst.push(packet(pool, &vec![0xa5; len], len / (1 + i % 3) + 1).expect("mbufs")).expect("room for 8");
    }
    queue.tx_burst(&mut burst)
}
