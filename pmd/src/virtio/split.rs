//! Split rings, driver end (virtio 1.3, 2.7).

use std::sync::atomic::{AtomicU16, Ordering};

use super::event::SplitWish;
use super::ring::{Doorbell, DriverRing, Layout, Wide};
use super::spec::{Desc, DescMeta, UsedElem, avail, used};
use crate::mem::{circle, view};
use crate::port::Fault;
use crate::shared::{Circle, View};

/// A split ring. With `IN_ORDER`, descriptors are used round and round, and the n-th completion is the n-th chain (2.7.9).
pub struct SplitRing<const IN_ORDER: bool> {
    desc: View<Desc>,
    avail_words: View<AtomicU16>,
    avail: Circle<AtomicU16>,
    used_words: View<AtomicU16>,
    used: Circle<UsedElem>,
    /// What the avail ring's entries hold.
    entries: Box<[u16]>,
    /// The descriptor after each: in its chain, or in the list of free ones. `IN_ORDER`: the next one round.
    next: Box<[u16]>,
    /// The first free descriptor, and the last.
    free: (Wide, Wide),
    free_count: u32,
    mask: u16,
    /// Chains made available.
    avail_idx: Wide,
    /// Those that the device has been told of.
    published: Wide,
    event_idx: bool,
    /// Completions popped.
    used_idx: Wide,
    /// The device's index as last seen.
    seen: Wide,
    /// `IN_ORDER`: the oldest chain.
    oldest: Wide,
    /// `IN_ORDER`: chains to be taken as full before the one that a batched element named, and the length of that one.
    batch: (u16, u32),
    doorbell: Box<dyn Doorbell>,
}

impl<const IN_ORDER: bool> SplitRing<IN_ORDER> {
    /// An empty ring.
    pub fn new(layout: &Layout, doorbell: Box<dyn Doorbell>) -> Self {
        let (size, [desc, avail_at, used_at]) = (layout.size, layout.offsets);
        let mask = size - 1;
        let mut ring = Self {
            desc: view(&layout.span, desc, size.into()),
            avail_words: view(&layout.span, avail_at, avail::words(size)),
            avail: circle(&layout.span, avail_at + 2 * avail::RING, size),
            used_words: view(&layout.span, used_at, used::bytes(size) / 2),
            used: circle(&layout.span, used_at + used::RING, size),
            entries: vec![0; size.into()].into(),
            next: (0..size).map(|i| i.wrapping_add(1) & mask).collect(),
            free: (Wide::new(0), Wide::new(mask)),
            free_count: size.into(),
            mask,
            avail_idx: Wide::new(0),
            published: Wide::new(0),
            event_idx: layout.event_idx,
            used_idx: Wide::new(0),
            seen: Wide::new(0),
            oldest: Wide::new(0),
            batch: (0, 0),
            doorbell,
        };
        // Until it is armed.
        ring.disarm();
        ring
    }

    /// Where the driver says when it wants to be woken.
    #[inline(always)]
    fn wish(&self) -> SplitWish<'_> {
        if self.event_idx {
            SplitWish::Entry(&self.avail_words[avail::used_event(self.mask + 1)])
        } else {
            SplitWish::Flags(&self.avail_words[avail::FLAGS])
        }
    }

    /// Where the device does.
    #[inline(always)]
    fn device_wish(&self) -> SplitWish<'_> {
        if self.event_idx {
            SplitWish::Entry(&self.used_words[used::avail_event(self.mask + 1) / 2])
        } else {
            SplitWish::Flags(&self.used_words[used::FLAGS / 2])
        }
    }

    /// The length of the oldest chain, whose element says `id` and `len`.
    #[inline(always)]
    fn ordered_len(&mut self, id: u32, len: u32, full: u32) -> Result<u32, Fault> {
        if self.batch.0 > 0 {
            self.batch.0 -= 1;
            return Ok(if self.batch.0 == 0 { self.batch.1 } else { full });
        }
        if id == u32::from(self.oldest.get()) { Ok(len) } else { self.batch_len(id, len, full) }
    }

    /// The length of a chain whose element names another: a device may complete a batch with one element, which names the last
    /// chain; those skipped count as used in full (2.7.9). Lengths matter where chains are single descriptors.
    #[cold]
    fn batch_len(&mut self, id: u32, len: u32, full: u32) -> Result<u32, Fault> {
        let ahead = (id as u16).wrapping_sub(self.oldest.get()) & self.mask;
        if id > u32::from(self.mask) || ahead > self.seen.since(self.used_idx) {
            return Err(Fault::BadId);
        }
        self.batch = (ahead, len);
        Ok(full)
    }
}

impl<const IN_ORDER: bool> DriverRing for SplitRing<IN_ORDER> {
    const GROUPS: bool = false;

    #[inline(always)]
    fn size(&self) -> u16 {
        self.mask + 1
    }

    #[inline(always)]
    fn ready(&mut self, _max: u16, _descs: impl Fn(u16) -> u16) -> Result<u16, Fault> {
        // Acquire pairs with the device's release of the index (2.7.8): elements and buffers are filled up to it.
        self.seen = Wide::new(self.used_words[used::IDX / 2].load(Ordering::Acquire));
        let ready = self.seen.since(self.used_idx);
        if ready > self.avail_idx.since(self.used_idx) {
            self.seen = self.used_idx;
            return Err(Fault::BadIndex);
        }
        Ok(ready)
    }

    #[inline(always)]
    fn pop(&mut self, full: u32, descs: impl Fn(u16) -> u16) -> (u32, Result<u32, Fault>) {
        let elem = self.used.at(self.used_idx.get());
        self.used_idx.add(1);
        // Relaxed: ordered by the Acquire in `ready`. Each word is read once.
        let (id, len) = (elem.id.load(Ordering::Relaxed), elem.len.load(Ordering::Relaxed));
        if !IN_ORDER {
            return (id, Ok(len));
        }
        let len = self.ordered_len(id, len, full);
        let id = self.oldest.get();
        self.oldest = Wide::new(id.wrapping_add(descs(id)) & self.mask);
        (id.into(), len)
    }

    #[inline(always)]
    fn next_id(&self) -> u16 {
        self.free.0.get()
    }

    #[inline(always)]
    fn desc(&mut self, addr: u64, len: u32, flags: u16) -> u16 {
        let id = self.free.0.get();
        let next = if IN_ORDER { id.wrapping_add(1) & self.mask } else { self.next[usize::from(id)] };
        let desc = &self.desc[usize::from(id)];
        desc.addr.store(addr, Ordering::Relaxed);
        desc.meta.store(DescMeta { len, flags, next }.pack(), Ordering::Relaxed);
        self.free.0 = Wide::new(next);
        self.free_count -= 1;
        id
    }

    /// The entry is stored only if it differs from the last round's, so that its cache line stays shared with the device.
    #[inline(always)]
    fn push(&mut self, id: u16) {
        let slot = usize::from(self.avail_idx.get() & self.mask);
        if self.entries[slot] != id {
            self.entries[slot] = id;
            self.avail.at(self.avail_idx.get()).store(id, Ordering::Relaxed);
        }
        self.avail_idx.add(1);
    }

    /// The chain's own links still hold; hung behind the free ones, descriptors go round and round.
    #[inline(always)]
    fn reclaim(&mut self, id: u16, last: u16, count: u16) {
        if !IN_ORDER {
            if self.free_count == 0 {
                self.free.0 = Wide::new(id);
            } else {
                self.next[usize::from(self.free.1.get())] = id;
            }
            self.free.1 = Wide::new(last);
        }
        self.free_count += u32::from(count);
    }

    #[cold]
    fn rewind(&mut self) -> u32 {
        self.avail_idx = self.used_idx;
        self.published = self.used_idx;
        self.seen = self.used_idx;
        self.batch = (0, 0);
        if IN_ORDER {
            self.free.0 = self.oldest;
        }
        // Of the device that is gone nothing stays: a false index, or that it wanted no kicks.
        self.used_words[used::IDX / 2].store(self.used_idx.get(), Ordering::Relaxed);
        self.used_words[used::FLAGS / 2].store(0, Ordering::Relaxed);
        self.used_idx.get().into()
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        let new = self.avail_idx.get();
        let old = std::mem::replace(&mut self.published, self.avail_idx).get();
        let kick = self.device_wish().publish(&self.avail_words[avail::IDX], old, new);
        if kick {
            self.doorbell.ring();
        }
        kick
    }

    fn arm(&mut self) {
        self.wish().ask(self.used_idx.get());
    }

    fn disarm(&mut self) {
        self.wish().refuse(self.used_idx.get());
    }

    #[inline(always)]
    fn table_meta(len: u32, flags: u16, index: u16) -> u64 {
        DescMeta { len, flags, next: index + 1 }.pack()
    }
}
