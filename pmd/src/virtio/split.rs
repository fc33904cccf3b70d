//! Split rings, driver end (virtio 1.3, 2.7).
//!
//! Nothing that lies in shared memory is ever read back: positions, free descriptors and what the rings hold are kept in
//! private copies. What the device writes (used index, ids, lengths) is checked here, once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use super::Doorbell;
use super::spec::{AVAIL_F_NO_INTERRUPT, DESC_F_WRITE, Desc, DescMeta, USED_F_NO_NOTIFY, UsedElem, avail, used};
use crate::mbuf::{HEADROOM, Mbuf};
use crate::mem::{Arena, MemError, Span, view};
use crate::port::Fault;
use crate::rx::{RxRing, Taken};
use crate::shared::{View, publish};

/// A ring's three areas, and where the device finds them.
#[derive(Debug)]
pub struct Layout {
    /// Number of descriptors, a power of two.
    pub size: u16,
    /// IOVA of the descriptor table.
    pub desc: u64,
    /// IOVA of the driver area (avail ring).
    pub avail: u64,
    /// IOVA of the device area (used ring).
    pub used: u64,
    span: Arc<Span>,
    offsets: [usize; 3],
}

impl Layout {
    /// Room in `arena` for a ring of `size` descriptors; each area begins on a cache line of its own (2.7 asks for 16, 2 and 4
    /// bytes).
    ///
    /// # Errors
    /// [`MemError::Full`].
    pub fn new(arena: &Arc<Arena>, size: u16) -> Result<Self, MemError> {
        let avail_at = (size_of::<Desc>() * usize::from(size)).next_multiple_of(64);
        let used_at = avail_at + (2 * avail::words(size)).next_multiple_of(64);
        let span = Arc::new(arena.alloc(used_at + used::bytes(size), 64)?);
        Ok(Self {
            size,
            desc: span.iova(0),
            avail: span.iova(avail_at),
            used: span.iova(used_at),
            offsets: [0, avail_at, used_at],
            span,
        })
    }
}

/// What receive and transmit rings have in common.
pub(super) struct Ring {
    pub desc: View<Desc>,
    avail: View<AtomicU16>,
    used_words: View<AtomicU16>,
    used: View<UsedElem>,
    /// What the avail ring's entries hold.
    entries: Box<[u16]>,
    pub mask: u16,
    /// Buffers made available, staged ones included.
    pub avail_idx: u16,
    /// Completions taken.
    pub used_idx: u16,
    /// The device's index as last seen.
    seen: u16,
    doorbell: Box<dyn Doorbell>,
}

impl Ring {
    pub fn new(layout: &Layout, doorbell: Box<dyn Doorbell>) -> Self {
        let (size, [desc, avail_at, used_at]) = (layout.size, layout.offsets);
        let ring = Self {
            desc: view(&layout.span, desc, size.into()),
            avail: view(&layout.span, avail_at, avail::words(size)),
            used_words: view(&layout.span, used_at, 2),
            used: view(&layout.span, used_at + used::RING, size.into()),
            entries: vec![0; size.into()].into(),
            mask: size - 1,
            avail_idx: 0,
            used_idx: 0,
            seen: 0,
            doorbell,
        };
        // A polling driver wants no interrupts (2.7.7.1).
        ring.avail[avail::FLAGS].store(AVAIL_F_NO_INTERRUPT, Ordering::Relaxed);
        ring
    }

    /// Completions that have not been taken; the index is checked against what was made available.
    #[inline(always)]
    pub fn ready(&mut self) -> Result<u16, Fault> {
        // Acquire pairs with the device's release of the index (2.7.8): elements and buffers are filled up to it.
        self.seen = self.used_words[used::IDX / 2].load(Ordering::Acquire);
        let ready = self.seen.wrapping_sub(self.used_idx);
        if ready > self.avail_idx.wrapping_sub(self.used_idx) {
            self.seen = self.used_idx;
            return Err(Fault::BadIndex);
        }
        Ok(ready)
    }

    /// Completions that are still to be taken of those last seen.
    #[inline(always)]
    pub fn left(&self) -> u16 {
        self.seen.wrapping_sub(self.used_idx)
    }

    /// The next completion: the device's id and length.
    #[inline(always)]
    pub fn pop(&mut self) -> (u32, u32) {
        let elem = &self.used[usize::from(self.used_idx & self.mask)];
        self.used_idx = self.used_idx.wrapping_add(1);
        // Relaxed: ordered by the Acquire in `ready`. Each word is read once.
        (elem.id.load(Ordering::Relaxed), elem.len.load(Ordering::Relaxed))
    }

    /// Makes the chain at `head` available, unpublished. The entry is stored only if it differs from the last round's, so that
    /// its cache line stays shared with the device.
    #[inline(always)]
    pub fn push(&mut self, head: u16) {
        let slot = usize::from(self.avail_idx & self.mask);
        if self.entries[slot] != head {
            self.entries[slot] = head;
            self.avail[avail::RING + slot].store(head, Ordering::Relaxed);
        }
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    /// Publishes what was pushed, and kicks if the device wants it; whether it did.
    #[inline(always)]
    pub fn publish(&self) -> bool {
        let flags = &self.used_words[used::FLAGS / 2];
        let kick = publish(&self.avail[avail::IDX], self.avail_idx, flags, USED_F_NO_NOTIFY);
        if kick {
            self.doorbell.ring();
        }
        kick
    }
}

/// A receive ring: one descriptor a buffer, headers in the headroom.
pub struct SplitRx<const IN_ORDER: bool, const MERGEABLE: bool> {
    ring: Ring,
    mbufs: Box<[Option<Mbuf>]>,
    /// Ids that came back, in the order in which they did (not `IN_ORDER`: there the n-th buffer always has id n).
    ids: Box<[u16]>,
    /// Buffers that came back.
    returned: u16,
    /// Descriptors in use.
    limit: u16,
    header_len: u16,
    /// Bytes of each buffer, header included.
    buffer_len: u32,
    port: u16,
    /// `IN_ORDER`: buffers to be taken as full before the one that a batched element named, and the length of that one.
    batch: (u16, u32),
}

/// What a receive ring needs to know beyond its layout.
#[derive(Clone, Copy, Debug)]
pub struct RxParams {
    /// Descriptors in use, at most the ring's size.
    pub limit: u16,
    /// Bytes of the virtio header.
    pub header_len: u16,
    /// Bytes of a data room, headroom included.
    pub room: u16,
    /// The port number that received mbufs carry.
    pub port: u16,
}

impl<const IN_ORDER: bool, const MERGEABLE: bool> SplitRx<IN_ORDER, MERGEABLE> {
    /// An empty ring.
    pub fn new(layout: &Layout, params: RxParams, doorbell: Box<dyn Doorbell>) -> Self {
        let mut ring = Ring::new(layout, doorbell);
        let buffer_len = u32::from(params.room - HEADROOM + params.header_len);
        for (i, desc) in ring.desc.iter().enumerate() {
            desc.meta.store(DescMeta { len: buffer_len, flags: DESC_F_WRITE, next: 0 }.pack(), Ordering::Relaxed);
            ring.entries[i] = i as u16;
            ring.avail[avail::RING + i].store(i as u16, Ordering::Relaxed);
        }
        Self {
            ring,
            mbufs: (0..layout.size).map(|_| None).collect(),
            ids: (0..layout.size).collect(),
            returned: 0,
            limit: params.limit.min(layout.size),
            header_len: params.header_len,
            buffer_len,
            port: params.port,
            batch: (0, 0),
        }
    }

    /// The length of an `IN_ORDER` buffer whose element names another: a device may complete a batch with one element, which
    /// names the last buffer; those skipped count as used in full (2.7.9).
    #[cold]
    fn batch_len(&mut self, id: u32, slot: u16, len: u32) -> u32 {
        let ahead = (id as u16).wrapping_sub(slot) & self.ring.mask;
        if id > u32::from(self.ring.mask) || ahead > self.ring.left() {
            return 0;
        }
        self.batch = (ahead, len);
        self.buffer_len
    }
}

impl<const IN_ORDER: bool, const MERGEABLE: bool> RxRing for SplitRx<IN_ORDER, MERGEABLE> {
    const SCATTER: bool = MERGEABLE;
    type Claim = u32;

    #[inline(always)]
    fn ready(&mut self) -> Result<u16, Fault> {
        self.ring.ready()
    }

    #[inline(always)]
    fn take(&mut self) -> Taken<u32> {
        let slot = self.ring.used_idx & self.ring.mask;
        let (id, mut len) = self.ring.pop();
        let index = if IN_ORDER {
            if self.batch.0 > 0 {
                self.batch.0 -= 1;
                len = if self.batch.0 == 0 { self.batch.1 } else { self.buffer_len };
            } else if id != u32::from(slot) {
                len = self.batch_len(id, slot, len);
            }
            usize::from(slot)
        } else {
            id as usize
        };
        let Some(mbuf) = self.mbufs.get_mut(index).and_then(Option::take) else { return Err(Fault::BadId) };
        if !IN_ORDER {
            self.ids[usize::from(self.returned & self.ring.mask)] = index as u16;
        }
        self.returned = self.returned.wrapping_add(1);
        Ok((mbuf, len))
    }

    #[inline(always)]
    fn open(&self, mbuf: &mut Mbuf, claim: u32) -> Result<u16, Fault> {
        if claim > self.buffer_len {
            return Err(Fault::BadLength);
        }
        let Some(len) = claim.checked_sub(self.header_len.into()) else { return Err(Fault::Short) };
        if !MERGEABLE && len < super::spec::FRAME_LEN_MIN as u32 {
            return Err(Fault::Short);
        }
        mbuf.receive(HEADROOM, self.port, len as u16);
        if !MERGEABLE {
            return Ok(0);
        }
        // The device's word, read once (5.1.6.4). 0 is taken for 1, as DPDK does.
        let buffers = mbuf.room(-2, 2).get().map_or(0, u16::from_le_bytes).max(1);
        if buffers > self.ring.mask.saturating_add(1) {
            return Err(Fault::BadSegments);
        }
        if buffers == 1 && len < super::spec::FRAME_LEN_MIN as u32 {
            return Err(Fault::Short);
        }
        Ok(buffers - 1)
    }

    #[inline(always)]
    fn extend(&self, mbuf: &mut Mbuf, claim: u32, left: u16) -> Result<u16, Fault> {
        if claim > self.buffer_len {
            return Err(Fault::BadLength);
        }
        // Only a frame's first buffer has a header (5.1.6.4).
        mbuf.receive(HEADROOM - self.header_len, self.port, claim as u16);
        Ok(left - 1)
    }

    #[inline(always)]
    fn room(&self) -> u16 {
        self.limit - self.ring.avail_idx.wrapping_sub(self.returned)
    }

    #[inline(always)]
    fn stage(&mut self, mbuf: Mbuf) {
        let slot = self.ring.avail_idx & self.ring.mask;
        let id = if IN_ORDER { slot } else { self.ids[usize::from(slot)] };
        // The header goes right before the data, so data begins where everybody expects it. Length and flags never change.
        let addr = mbuf.buf_iova(HEADROOM - self.header_len);
        self.ring.desc[usize::from(id)].addr.store(addr, Ordering::Relaxed);
        self.mbufs[usize::from(id)] = Some(mbuf);
        self.ring.push(id);
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        self.ring.publish()
    }
}
