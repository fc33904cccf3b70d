//! The way home. Every path restores the pool's invariant: one reference, one segment, no next, own data room.

use std::mem::MaybeUninit;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

use super::pool::CHUNK;
use super::raw::{EXTERNAL, HEADROOM, INDIRECT, RawMbuf};
use super::{ExternalBuffer, Mbuf};
use crate::mempool::{Core, Object};

/// A local array of objects of one pool, put back together; the last of them when it is dropped.
pub(super) struct Group {
    pool: *const Core,
    len: usize,
    objects: [MaybeUninit<Object>; CHUNK],
}

impl Group {
    #[inline(always)]
    pub fn new() -> Self {
        Self { pool: null(), len: 0, objects: [const { MaybeUninit::uninit() }; CHUNK] }
    }

    /// # Safety
    /// `raw` satisfies the invariant, and nobody uses it any more.
    #[inline(always)]
    pub unsafe fn push(&mut self, raw: NonNull<RawMbuf>) {
        // SAFETY: a live header.
        let pool = unsafe { raw.as_ref() }.pool;
        if self.len == CHUNK || !std::ptr::eq(pool, self.pool) {
            self.flush();
            self.pool = pool;
        }
        self.objects[self.len].write(RawMbuf::object(raw));
        self.len += 1;
    }

    #[inline(always)]
    fn flush(&mut self) {
        let len = std::mem::take(&mut self.len);
        if len > 0 {
            // SAFETY: `push` wrote the first `len` objects.
            let objects = unsafe { std::slice::from_raw_parts(self.objects.as_ptr().cast::<Object>(), len) };
            // SAFETY: a pool outlives its objects, and these came through `push`, which wants them fit to go home.
            unsafe { (*self.pool).put(objects) };
        }
    }
}

impl Drop for Group {
    #[inline(always)]
    fn drop(&mut self) {
        self.flush();
    }
}

/// Takes one reference off a segment without a `next`; `Some` if it was the last: it then satisfies the pool's invariant.
///
/// # Safety
/// The caller gives up its reference.
#[inline(always)]
unsafe fn prefree(raw: NonNull<RawMbuf>) -> Option<NonNull<RawMbuf>> {
    // SAFETY: a live header until its last reference is gone, and ours is not gone yet.
    let m = unsafe { raw.as_ref() };
    if !m.refcnt.release() {
        return None;
    }
    if m.is_attached() {
        // SAFETY: ours was the last reference.
        unsafe { detach(raw) };
    }
    Some(raw)
}

/// Gives a borrowed buffer back and restores the mbuf's own.
///
/// # Safety
/// The caller is the only user of `raw`, which is attached.
#[cold]
pub(super) unsafe fn detach(raw: NonNull<RawMbuf>) {
    // SAFETY: a live header.
    let m = unsafe { raw.as_ref() };
    let flags = m.ol_flags.get();
    let owner = m.shinfo.replace(null());
    m.ol_flags.set(flags & !(INDIRECT | EXTERNAL));
    m.buf_addr.set(m.home_addr);
    m.buf_iova.set(m.home_iova);
    m.buf_len.set(m.home_len);
    m.data_off.set(HEADROOM.min(m.home_len));
    m.data_len.set(0);
    if flags & EXTERNAL != 0 {
        // SAFETY: an external mbuf owns one count of its buffer's `Arc`, which `attach` put into `shinfo`.
        drop(unsafe { Arc::from_raw(owner.cast::<ExternalBuffer>()) });
    } else if let Some(root) = NonNull::new(owner.cast_mut().cast::<RawMbuf>()) {
        // SAFETY: an indirect mbuf owns one reference to the direct mbuf that `attach` put into `shinfo`. Attaching to an
        // indirect mbuf goes to its root, so this never nests.
        unsafe { free_segment(root, &mut Group::new()) };
    }
}

/// Frees a segment without a `next` into `group`, unless it has other holders.
///
/// # Safety
/// The caller gives up its reference.
#[inline(always)]
unsafe fn free_segment(raw: NonNull<RawMbuf>, group: &mut Group) {
    // SAFETY: the caller's contract; after its last reference is gone nobody uses the header.
    unsafe {
        if let Some(raw) = prefree(raw) {
            group.push(raw);
        }
    }
}

/// Frees every segment of a packet into `group`.
///
/// # Safety
/// The caller gives up the packet that begins with `head`.
#[inline(always)]
unsafe fn free_packet(head: NonNull<RawMbuf>, group: &mut Group) {
    // SAFETY: the packet is the caller's, so the head is live until its `free_segment`. A head with one segment has no
    // `next`, so its second line stays untouched.
    unsafe {
        if head.as_ref().nb_segs.get() != 1 {
            free_tail(head, group);
        }
        free_segment(head, group);
    }
}

/// Frees what follows `head`, which becomes a single segment.
///
/// # Safety
/// The caller owns the packet that begins with `head`.
#[cold]
pub(super) unsafe fn free_tail(head: NonNull<RawMbuf>, group: &mut Group) {
    let cut = |raw: NonNull<RawMbuf>| {
        // SAFETY: a segment of the caller's packet, live until its `free_segment`.
        let m = unsafe { raw.as_ref() };
        // A segment that was a head once has any count: nested chains leave it.
        m.nb_segs.set(1);
        NonNull::new(m.next.replace(null_mut()))
    };
    let mut next = cut(head);
    while let Some(segment) = next {
        next = cut(segment);
        // SAFETY: cut off, and nobody else's.
        unsafe { free_segment(segment, group) };
    }
}

impl Drop for Mbuf {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the handle owns its packet and is going.
        unsafe { free_packet(self.0, &mut Group::new()) };
    }
}

impl Mbuf {
    /// Frees packets in bulk: chains are walked, groups of one pool go home together.
    #[inline]
    pub fn free_bulk(mbufs: impl IntoIterator<Item = Mbuf>) {
        let mut group = Group::new();
        for mbuf in mbufs {
            // SAFETY: the handle owns its packet, and is forgotten here.
            unsafe { free_packet(mbuf.into_raw(), &mut group) };
        }
    }

    /// Takes this handle's reference off the first segment (and frees those behind it): `None` if others still use its data,
    /// else the segment fit for [`raw_free`](Self::raw_free): direct, one reference, one segment.
    #[inline]
    #[must_use]
    pub fn prefree_seg(self) -> Option<Mbuf> {
        let raw = self.into_raw();
        // SAFETY: the handle owned the packet; the tail goes first, so the rest is a single segment.
        unsafe {
            if raw.as_ref().nb_segs.get() != 1 {
                free_tail(raw, &mut Group::new());
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
            self.raw().is_plain() && self.raw().next.get().is_null(),
            "raw free of an mbuf that is not fit for the pool"
        );
        let raw = self.into_raw();
        // SAFETY: the pool outlives its mbufs; the caller vouches for the rest.
        unsafe { (*raw.as_ref().pool).put(&[RawMbuf::object(raw)]) };
    }
}
