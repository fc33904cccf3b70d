//! The container that packets travel in between an application and a queue.

use crate::mbuf::{Drained, Mbuf, MbufPool};
use crate::mempool::Exhausted;

/// Most packets in a burst.
pub const BURST_MAX: usize = 512;

/// Up to `limit` packets, in order. Allocated once; nothing on the packet path makes it grow.
#[derive(Debug)]
pub struct Burst {
    mbufs: Vec<Mbuf>,
    limit: usize,
}

impl Burst {
    /// An empty burst for up to `limit` packets (1 to [`BURST_MAX`]; other values are brought into that range).
    #[must_use]
    pub fn new(limit: usize) -> Self {
        let limit = limit.clamp(1, BURST_MAX);
        Self { mbufs: Vec::with_capacity(limit), limit }
    }

    /// Packets inside.
    #[inline(always)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.mbufs.len()
    }

    /// Whether there are none.
    #[inline(always)]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.mbufs.is_empty()
    }

    /// Packets that still fit.
    #[inline(always)]
    #[must_use]
    pub fn room(&self) -> usize {
        self.limit - self.mbufs.len()
    }

    /// Appends a packet.
    ///
    /// # Errors
    /// The packet, if the burst is full.
    #[inline(always)]
    pub fn push(&mut self, mbuf: Mbuf) -> Result<(), Mbuf> {
        if self.room() == 0 {
            return Err(mbuf);
        }
        self.mbufs.push(mbuf);
        Ok(())
    }

    /// Appends `count` empty packets of `pool`, or none.
    ///
    /// # Errors
    /// [`Exhausted`] if the pool has not as many, or the burst no room.
    #[inline]
    pub fn fill(&mut self, pool: &MbufPool, count: usize) -> Result<(), Exhausted> {
        if count > self.room() {
            return Err(Exhausted);
        }
        pool.alloc_bulk(&mut self.mbufs, count)
    }

    /// The packets.
    #[inline(always)]
    #[must_use]
    pub fn as_slice(&self) -> &[Mbuf] {
        &self.mbufs
    }

    /// The packets, to be changed.
    #[inline(always)]
    pub fn as_mut_slice(&mut self) -> &mut [Mbuf] {
        &mut self.mbufs
    }

    /// Takes the first `count` packets out, in order; those behind move up.
    #[inline(always)]
    pub fn take_front(&mut self, count: usize) -> Drained<'_> {
        let count = count.min(self.mbufs.len());
        Drained::new(self.mbufs.drain(..count))
    }

    /// Frees all packets, in bulk; returns how many there were.
    #[inline]
    pub fn free(&mut self) -> usize {
        let count = self.mbufs.len();
        Mbuf::free_bulk(self.mbufs.drain(..));
        count
    }
}

impl Drop for Burst {
    fn drop(&mut self) {
        self.free();
    }
}
