//! THE transmit burst: one loop for every ring.

use std::sync::Arc;

use crate::mbuf::Mbuf;
use crate::port::{Burst, Fault, QueueStats, TxBurst};

/// Packets staged together.
const STAGE_GROUP: usize = 8;

/// A transmit ring's driver end.
pub trait TxRing: Send {
    /// Descriptors of the ring.
    fn size(&self) -> u16;

    /// Free descriptors.
    fn room(&self) -> u16;

    /// Descriptors that `mbuf` takes; more than [`size`](Self::size) if it can never be sent.
    fn slots(&self, mbuf: &Mbuf) -> u16;

    /// Puts a packet into the next free slots. Called only while `slots` fit into `room`, before `publish`.
    fn stage(&mut self, mbuf: Mbuf);

    /// Stages `N` packets at once.
    #[inline(always)]
    fn stage_group<const N: usize>(&mut self, mbufs: [Mbuf; N]) {
        for mbuf in mbufs {
            self.stage(mbuf);
        }
    }

    /// Lets the device see what was staged; true if it had to be kicked.
    fn publish(&mut self) -> bool;

    /// Makes what the device has not completed available anew, see [`TxBurst::rewind`]. All that it has completed was reaped.
    fn rewind(&mut self) -> Option<u32> {
        None
    }

    /// Frees packets that the device is done with; returns how many. False claims of the device are counted in `stats`.
    fn reap(&mut self, stats: &QueueStats) -> usize;
}

/// A transmit queue.
pub struct TxQueue<R> {
    ring: R,
    free_thresh: u16,
    stats: Arc<QueueStats>,
}

impl<R: TxRing> TxQueue<R> {
    /// A queue on `ring`, which is reaped when fewer than `free_thresh` descriptors, or too few for a burst, are free.
    pub fn new(ring: R, free_thresh: u16, stats: Arc<QueueStats>) -> Self {
        Self { ring, free_thresh, stats }
    }

    /// Stages packets from the front of `burst` while they fit; returns how many, and how many bytes.
    #[inline(always)]
    fn stage_front(&mut self, burst: &mut Burst) -> (usize, usize) {
        let mut room = self.ring.room();
        let (mut packets, mut bytes) = (0, 0);
        for mbuf in burst.as_slice() {
            let Some(rest) = room.checked_sub(self.ring.slots(mbuf)) else { break };
            room = rest;
            packets += 1;
            bytes += mbuf.pkt_len();
            self.stats.size(mbuf.pkt_len());
        }
        let mut front = burst.take_front(packets);
        while let Some(group) = front.next_group::<STAGE_GROUP>() {
            self.ring.stage_group(group);
        }
        for mbuf in front {
            self.ring.stage(mbuf);
        }
        (packets, bytes)
    }
}

impl<R: TxRing> TxBurst for TxQueue<R> {
    fn tx_burst(&mut self, burst: &mut Burst) -> usize {
        if burst.is_empty() {
            return 0;
        }
        let mut reaped = usize::from(self.ring.room()) < burst.len().max(self.free_thresh.into());
        if reaped {
            self.reap();
        }
        let (mut packets, mut bytes) = self.stage_front(burst);
        let mut dropped = 0;
        // What stays may need more descriptors than most packets do, so look once whether there are more by now; or it could
        // never be sent, and must not block those behind it. Each round drops one packet or is the one that reaps, so this
        // ends.
        while let Some(mbuf) = burst.as_slice().first() {
            if self.ring.slots(mbuf) > self.ring.size() {
                dropped += burst.take_front(1).count();
                self.stats.fault(Fault::ManySegments);
            } else if !reaped {
                self.reap();
                reaped = true;
            } else {
                break;
            }
            let more = self.stage_front(burst);
            packets += more.0;
            bytes += more.1;
        }
        if packets > 0 {
            self.stats.packets.add(packets as u64);
            self.stats.bytes.add(bytes as u64);
            if self.ring.publish() { self.stats.kicks.add(1) } else { self.stats.kicks_suppressed.add(1) }
        }
        packets + dropped
    }

    fn reap(&mut self) -> usize {
        self.ring.reap(&self.stats)
    }

    fn rewind(&mut self) -> Option<u32> {
        self.reap();
        self.ring.rewind()
    }
}
