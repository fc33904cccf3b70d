//! Packed rings, driver end (virtio 1.3, 2.8).

use std::sync::atomic::{AtomicU32, Ordering};

use super::event::PackedWish;
use super::ring::{Doorbell, DriverRing, Layout, Wide};
use super::spec::{DESC_F_WRITE, Desc, PackedMeta, PackedPos};
use crate::mem::view;
use crate::port::Fault;
use crate::shared::View;

/// A packed ring. With `IN_ORDER`, a chain's id is the number of its first descriptor, and the n-th completion is the n-th chain
/// (2.8.9).
pub struct PackedRing<const IN_ORDER: bool> {
    desc: View<Desc>,
    device_event: View<AtomicU32>,
    driver_event: View<AtomicU32>,
    event_idx: bool,
    /// Not `IN_ORDER`: the free id after each.
    next: Box<[u16]>,
    /// The first free id, and the last.
    free: (Wide, Wide),
    free_count: u32,
    size: u16,
    /// Where the next descriptor is written.
    avail: PackedPos,
    /// Where those begin that the device has not been told of.
    published: PackedPos,
    /// Where the next completion is written.
    used: PackedPos,
    /// Chains made available and not popped.
    outstanding: Wide,
    /// The first descriptor of the chain that is being written, and its second word, which is stored last.
    head: (u16, u64),
    /// Whether it has been written.
    begun: bool,
    /// `IN_ORDER`: chains still to be popped of a batch completed by one descriptor, and the length of the last.
    batch: (u16, u32),
    doorbell: Box<dyn Doorbell>,
}

impl<const IN_ORDER: bool> PackedRing<IN_ORDER> {
    /// An empty ring.
    pub fn new(layout: &Layout, doorbell: Box<dyn Doorbell>) -> Self {
        let (size, [desc, driver_at, device_at]) = (layout.size, layout.offsets);
        let mut ring = Self {
            desc: view(&layout.span, desc, size.into()),
            device_event: view(&layout.span, device_at, 1),
            driver_event: view(&layout.span, driver_at, 1),
            event_idx: layout.event_idx,
            next: (1..=size).collect(),
            free: (Wide::new(0), Wide::new(size - 1)),
            free_count: size.into(),
            size,
            avail: PackedPos::START,
            published: PackedPos::START,
            used: PackedPos::START,
            outstanding: Wide::new(0),
            head: (0, 0),
            begun: false,
            batch: (0, 0),
            doorbell,
        };
        // Until it is armed.
        ring.disarm();
        ring
    }

    #[inline(always)]
    fn load(&self, slot: u16, order: Ordering) -> PackedMeta {
        PackedMeta::unpack(self.desc[usize::from(slot)].meta.load(order))
    }

    /// Chains that the used descriptor at `self.used` completes: those from there to the one it names (2.8.9).
    #[cold]
    fn batch(&mut self, meta: PackedMeta, descs: impl Fn(u16) -> u16) -> Result<u16, Fault> {
        let mut pos = self.used;
        for count in 1..=self.outstanding.get() {
            if pos.slot() == meta.id {
                self.batch = (count, meta.len);
                return Ok(count);
            }
            pos = pos.advance(descs(pos.slot()).clamp(1, self.size), self.size);
        }
        Err(Fault::BadId)
    }
}

impl<const IN_ORDER: bool> DriverRing for PackedRing<IN_ORDER> {
    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn ready(&mut self, max: u16, descs: impl Fn(u16) -> u16) -> Result<u16, Fault> {
        if IN_ORDER && self.batch.0 > 0 {
            return Ok(self.batch.0);
        }
        let max = max.min(self.outstanding.get());
        let mut pos = self.used;
        let mut ready = 0;
        while ready < max {
            // Acquire pairs with the device's release of the flags (2.8.6): id, length and buffer are filled.
            let meta = self.load(pos.slot(), Ordering::Acquire);
            if !meta.is_used(pos) {
                break;
            }
            if IN_ORDER && meta.id != pos.slot() {
                // A batch is popped by itself.
                return if ready > 0 { Ok(ready) } else { self.batch(meta, descs) };
            }
            ready += 1;
            // A false id is found out by `pop`'s caller; it counts as one descriptor.
            pos = pos.advance(descs(meta.id).clamp(1, self.size), self.size);
        }
        Ok(ready)
    }

    #[inline(always)]
    fn pop(&mut self, full: u32, descs: impl Fn(u16) -> u16) -> (u32, Result<u32, Fault>) {
        let (id, len) = if IN_ORDER && self.batch.0 > 0 {
            self.batch.0 -= 1;
            (self.used.slot(), if self.batch.0 == 0 { self.batch.1 } else { full })
        } else {
            // Relaxed: ordered by the Acquire in `ready`.
            let meta = self.load(self.used.slot(), Ordering::Relaxed);
            (if IN_ORDER { self.used.slot() } else { meta.id }, meta.len)
        };
        self.outstanding.add(u16::MAX);
        self.used = self.used.advance(descs(id).clamp(1, self.size), self.size);
        (id.into(), Ok(len))
    }

    #[inline(always)]
    fn next_id(&self) -> u16 {
        if IN_ORDER { self.avail.slot() } else { self.free.0.get() }
    }

    /// All of a chain's descriptors carry its id (2.8.6 wants it in the last). The head's second word waits for `push`.
    #[inline(always)]
    fn desc(&mut self, addr: u64, len: u32, flags: u16) -> u16 {
        let slot = self.avail.slot();
        let id = if IN_ORDER && self.begun { self.head.0 } else { self.next_id() };
        let desc = &self.desc[usize::from(slot)];
        desc.addr.store(addr, Ordering::Relaxed);
        let meta = PackedMeta { len, id, flags: flags | self.avail.avail_flags() }.pack();
        if self.begun {
            desc.meta.store(meta, Ordering::Relaxed);
        } else {
            (self.head, self.begun) = ((slot, meta), true);
        }
        self.avail = self.avail.advance(1, self.size);
        slot
    }

    #[inline(always)]
    fn push(&mut self, id: u16) {
        // Release: the rest of the chain is visible before its head is available (2.8.13.1, 2.8.21.1).
        self.desc[usize::from(self.head.0)].meta.store(self.head.1, Ordering::Release);
        self.begun = false;
        self.outstanding.add(1);
        if !IN_ORDER {
            self.free.0 = Wide::new(self.next[usize::from(id)]);
            self.free_count -= 1;
        }
    }

    #[inline(always)]
    fn reclaim(&mut self, id: u16, _last: u16, _count: u16) {
        if !IN_ORDER {
            if self.free_count == 0 {
                self.free.0 = Wide::new(id);
            } else {
                self.next[usize::from(self.free.1.get())] = id;
            }
            self.free.1 = Wide::new(id);
            self.free_count += 1;
        }
    }

    #[cold]
    fn rewind(&mut self) -> u32 {
        let mut pos = self.used;
        for _ in 0..self.size {
            // As the lap before left it: neither available in this lap, nor used (2.8.1).
            let flags = pos.other_round().used_flags();
            let meta = PackedMeta { len: 0, id: 0, flags }.pack();
            self.desc[usize::from(pos.slot())].meta.store(meta, Ordering::Relaxed);
            pos = pos.advance(1, self.size);
        }
        (self.avail, self.published) = (self.used, self.used);
        (self.outstanding, self.begun, self.batch) = (Wide::new(0), false, (0, 0));
        // The device that is gone may have wanted no kicks.
        self.device_event[0].store(0, Ordering::Relaxed);
        // Both halves of the base are the same: nothing is in flight (vhost-user, "Vring state description").
        let half = u32::from(self.used.slot()) | u32::from(self.used.wrap()) << 15;
        half | half << 16
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.avail);
        let kick = PackedWish(&self.device_event[0]).wanted(old, self.avail, self.size);
        if kick {
            self.doorbell.ring();
        }
        kick
    }

    fn arm(&mut self) {
        PackedWish(&self.driver_event[0]).ask(self.used, self.event_idx);
    }

    fn disarm(&mut self) {
        PackedWish(&self.driver_event[0]).refuse();
    }

    /// Entries of a table follow each other; of the flags only `WRITE` counts (2.8.7).
    #[inline(always)]
    fn table_meta(len: u32, flags: u16, _index: u16) -> u64 {
        PackedMeta { len, id: 0, flags: flags & DESC_F_WRITE }.pack()
    }
}
