//! The way home. Every path restores the pool's invariant: one reference, one segment, no next, own data room.

use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::Mbuf;
use super::pool::CHUNK;
use super::raw::{EXTERNAL, HEADROOM, INDIRECT, RawMbuf};
use crate::mempool::{Core, Object};

/// A local array of objects of one pool, put back together.
struct Group {
    pool: *const Core,
    len: usize,
    objects: [Object; CHUNK],
}

impl Group {
    #[inline(always)]
    fn new() -> Self {
        Self { pool: std::ptr::null(), len: 0, objects: [Object::dangling(); CHUNK] }
    }

    /// # Safety
    /// `raw` satisfies the invariant, and nobody uses it any more.
    #[inline(always)]
    unsafe fn push(&mut self, raw: NonNull<RawMbuf>) {
        // SAFETY: a live header.
        let pool = unsafe { (*raw.as_ptr()).pool };
        if self.len == CHUNK || !std::ptr::eq(pool, self.pool) {
            self.flush();
            self.pool = pool;
        }
        self.objects[self.len] = RawMbuf::object(raw);
        self.len += 1;
    }

    #[inline(always)]
    fn flush(&mut self) {
        if self.len > 0 {
            // SAFETY: a pool outlives its objects, and these came through `push`, which wants them fit to go home.
            unsafe { (*self.pool).put(&self.objects[..self.len]) };
            self.len = 0;
        }
    }
}

/// Takes one reference off a segment without a `next`; `Some` if it was the last: it then satisfies the pool's invariant.
///
/// # Safety
/// The caller gives up its reference.
#[inline(always)]
unsafe fn prefree(raw: NonNull<RawMbuf>) -> Option<NonNull<RawMbuf>> {
    let m = raw.as_ptr();
    // SAFETY: a live header until its last reference is gone, and ours is not gone yet.
    unsafe {
        // Acquire: what other holders did before they let go happened before we hand the mbuf on. A count of 1 is ours
        // alone, so no locked instruction is needed.
        if (*m).refcnt.load(Ordering::Acquire) != 1 {
            // Release: our accesses happened before whoever is last reuses it.
            if (*m).refcnt.fetch_sub(1, Ordering::Release) != 1 {
                return None;
            }
            fence(Ordering::Acquire);
            (*m).refcnt.store(1, Ordering::Relaxed);
        }
        if (*m).ol_flags & (INDIRECT | EXTERNAL) != 0 {
            detach(raw);
        }
    }
    Some(raw)
}

/// Gives a borrowed buffer back and restores the mbuf's own.
///
/// # Safety
/// The caller is the only user of `raw`.
#[cold]
#[expect(clippy::cast_ptr_alignment, reason = "an indirect mbuf's `shinfo` was made from an aligned header")]
pub(super) unsafe fn detach(raw: NonNull<RawMbuf>) {
    let m = raw.as_ptr();
    // SAFETY: the caller is the only user. An external mbuf owns one count of its buffer's `Arc`, an indirect one owns one
    // reference to the direct mbuf in `shinfo` (which `attach` put there).
    unsafe {
        if (*m).ol_flags & EXTERNAL != 0 {
            drop(Arc::from_raw((*m).shinfo));
        } else if let Some(direct) = NonNull::new((*m).shinfo.cast_mut().cast::<RawMbuf>())
            && let Some(direct) = prefree(direct)
        {
            (*(*direct.as_ptr()).pool).put(&[RawMbuf::object(direct)]);
        }
        (*m).shinfo = std::ptr::null();
        (*m).buf_addr = (*m).home_addr;
        (*m).buf_iova = (*m).home_iova;
        (*m).buf_len = (*m).home_len;
        (*m).data_off = HEADROOM.min((*m).home_len);
        (*m).data_len = 0;
        (*m).ol_flags &= !(INDIRECT | EXTERNAL);
    }
}

/// Frees every segment of a chain into `group`.
///
/// # Safety
/// The caller gives up the chain.
#[inline(always)]
unsafe fn free_chain(head: NonNull<RawMbuf>, group: &mut Group) {
    // SAFETY: the chain is the caller's, so each of its segments is live until its `prefree`.
    unsafe {
        // A head with one segment has no next, so its second line stays untouched.
        if (*head.as_ptr()).nb_segs != 1 {
            free_tail(head, group);
        }
        if let Some(raw) = prefree(head) {
            group.push(raw);
        }
    }
}

/// Frees what follows `head`, which becomes a single segment.
///
/// # Safety
/// The caller gives up the rest of the chain.
unsafe fn free_tail(head: NonNull<RawMbuf>, group: &mut Group) {
    // SAFETY: as in `free_chain`.
    unsafe {
        (*head.as_ptr()).nb_segs = 1;
        let mut segment = NonNull::new(std::mem::replace(&mut (*head.as_ptr()).next, null_mut()));
        while let Some(raw) = segment {
            // Once a head, now in the middle: nested chains leave any count there.
            (*raw.as_ptr()).nb_segs = 1;
            segment = NonNull::new(std::mem::replace(&mut (*raw.as_ptr()).next, null_mut()));
            if let Some(raw) = prefree(raw) {
                group.push(raw);
            }
        }
    }
}

impl Drop for Mbuf {
    #[inline]
    fn drop(&mut self) {
        let mut group = Group::new();
        // SAFETY: the handle owns its chain and is going.
        unsafe { free_chain(self.0, &mut group) };
        group.flush();
    }
}

impl Mbuf {
    /// Frees packets in bulk: chains are walked, groups of one pool go home together.
    #[inline]
    pub fn free_bulk(mbufs: impl IntoIterator<Item = Mbuf>) {
        let mut group = Group::new();
        for mbuf in mbufs {
            // SAFETY: the handle owns its chain, and is forgotten here.
            unsafe { free_chain(mbuf.into_raw(), &mut group) };
        }
        group.flush();
    }

    /// Takes this handle's reference off one segment: `None` if others still use its data, else the segment fit for
    /// [`raw_free`](Self::raw_free): direct, one reference, one segment.
    #[inline]
    #[must_use]
    pub fn prefree_seg(self) -> Option<Mbuf> {
        let raw = self.into_raw();
        // SAFETY: the handle owned the segment; `next` is cut off first, so the rest of a chain is not lost but freed.
        unsafe {
            if let Some(next) = NonNull::new(std::mem::replace(&mut (*raw.as_ptr()).next, null_mut())) {
                drop(Mbuf(next));
            }
            prefree(raw).map(Mbuf)
        }
    }

    /// Puts a segment home without looking at it.
    ///
    /// # Safety
    /// It satisfies the pool's invariant, as [`prefree_seg`](Self::prefree_seg) and
    /// [`raw_alloc`](super::MbufPool::raw_alloc) leave it.
    #[inline]
    pub unsafe fn raw_free(self) {
        debug_assert!(
            self.raw().is_plain() && self.raw().next.is_null(),
            "raw free of an mbuf that is not fit for the pool"
        );
        let raw = self.into_raw();
        // SAFETY: the pool outlives its mbufs; the caller vouches for the rest.
        unsafe { (*(*raw.as_ptr()).pool).put(&[RawMbuf::object(raw)]) };
    }
}
