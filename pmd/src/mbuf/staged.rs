//! Home without reading the header: what a Tx queue keeps of the mbufs it has handed to the device.

use std::mem::MaybeUninit;
use std::ptr::{NonNull, null_mut};

use super::Mbuf;
use super::pool::CHUNK;
use super::raw::RawMbuf;
use crate::mempool::Object;

/// The address's lowest bit, free since headers are aligned: the mbuf satisfies the pool's invariant.
const PLAIN: usize = 1;

/// A slot of a Tx software ring: an mbuf or nothing, the size of a pointer.
///
/// Whether the mbuf may go home as it is (DPDK's promise for `FAST_FREE`) is found out when it is staged, while its first line
/// is hot, and remembered in the address. Nobody can reach the mbuf while it is here, so that stays true, and
/// [`Staged::free_bulk`] need not read the mbuf again, cold by then. Nobody has to promise anything.
#[repr(transparent)]
pub struct Staged(*mut RawMbuf);

// SAFETY: owns an mbuf, which is `Send`.
unsafe impl Send for Staged {}
// SAFETY: a shared slot tells only about its own address.
unsafe impl Sync for Staged {}

impl Staged {
    /// An empty slot.
    pub const EMPTY: Self = Self(null_mut());

    /// A slot with `mbuf` in it.
    #[inline(always)]
    #[must_use]
    pub fn new(mbuf: Mbuf) -> Self {
        let plain = usize::from(mbuf.raw().is_plain());
        Self(mbuf.into_raw().as_ptr().map_addr(|address| address | (plain * PLAIN)))
    }

    /// Whether it holds an mbuf that may go home as it is.
    #[inline(always)]
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.0.addr() & PLAIN != 0
    }

    /// Whether it holds an mbuf.
    #[inline(always)]
    #[must_use]
    pub fn is_full(&self) -> bool {
        !self.0.is_null()
    }

    /// Takes the mbuf out.
    #[inline(always)]
    #[must_use]
    pub fn take(&mut self) -> Option<Mbuf> {
        let raw = std::mem::replace(&mut self.0, null_mut());
        NonNull::new(raw.map_addr(|address| address & !PLAIN)).map(Mbuf)
    }
}

impl Default for Staged {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl Drop for Staged {
    #[inline(always)]
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl std::fmt::Debug for Staged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Staged({:p})", self.0)
    }
}

impl Staged {
    /// Empties `slots`. In each chunk, the plain mbufs of the first one's pool go home together, without being read; the others
    /// are freed one by one. Returns how many others there were.
    #[inline]
    pub fn free_bulk(slots: &mut [Staged]) -> usize {
        slots.chunks_mut(CHUNK).map(Self::free_chunk).sum()
    }

    #[inline(always)]
    fn free_chunk(slots: &mut [Staged]) -> usize {
        let Some(first) = slots.iter().find(|slot| slot.is_plain()) else {
            return slots.iter_mut().filter_map(Staged::take).count();
        };
        let first = first.0.map_addr(|address| address & !PLAIN);
        // SAFETY: a live header, for a slot owns its mbuf; and a pool outlives its objects, of which that mbuf is one until the
        // `put` below, the last use of the pool.
        let core = unsafe { &*(*first).pool };
        let mut objects = [const { MaybeUninit::<Object>::uninit() }; CHUNK];
        let (mut len, mut others) = (0, 0);
        for slot in slots {
            let plain = slot.is_plain();
            let Some(mbuf) = slot.take() else { continue };
            if plain && core.contains(RawMbuf::object(mbuf.0)) {
                objects[len].write(RawMbuf::object(mbuf.into_raw()));
                len += 1;
            } else {
                others += 1;
            }
        }
        // SAFETY: the first `len` are written.
        let objects = unsafe { std::slice::from_raw_parts(objects.as_ptr().cast::<Object>(), len) };
        // SAFETY: handles of ours that nobody could reach since they were found plain; given up here.
        unsafe { core.put(objects) };
        others
    }
}
