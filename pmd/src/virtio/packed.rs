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
    /// Not `IN_ORDER`: free ids, round and round, from the first of `free` to the second.
    ids: Box<[u16]>,
    free: (Wide, Wide),
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
    head: (PackedPos, u64),
    /// Whether it has been written.
    begun: bool,
    /// The second word of the descriptor at `published`, if there is one behind: it is stored when the batch is published, so that
    /// the device takes a batch whole, and does not read the lines that are being written.
    held: u64,
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
            ids: (0..size).collect(),
            free: (Wide::new(0), Wide::new(0)),
            size,
            avail: PackedPos::START,
            published: PackedPos::START,
            used: PackedPos::START,
            outstanding: Wide::new(0),
            head: (PackedPos::START, 0),
            begun: false,
            held: 0,
            batch: (0, 0),
            doorbell,
        };
        // Until it is armed.
        ring.disarm();
        ring
    }

    /// The ids that the next `N` chains of one descriptor will have, unless the array of ids ends before.
    #[inline(always)]
    fn next_ids<const N: usize>(&self) -> Option<[u16; N]> {
        if IN_ORDER {
            return Some(std::array::from_fn(|i| self.avail.slot() + i as u16));
        }
        self.ids.get(usize::from(self.free.0.get())..)?.first_chunk().copied()
    }

    /// The place `count` (at most `size`) behind `place` in `ids`.
    #[inline(always)]
    fn further(&self, place: Wide, count: u16) -> Wide {
        let further = u32::from(place.get()) + u32::from(count);
        let size = u32::from(self.size);
        Wide::new(if further >= size { further - size } else { further } as u16)
    }

    #[inline(always)]
    fn load(&self, slot: u16, order: Ordering) -> PackedMeta {
        PackedMeta::unpack(self.desc[usize::from(slot)].meta.load(order))
    }

    /// Makes the chain that begins at `pos` available: stores its head's second word, or holds it back if it is the batch's first.
    #[inline(always)]
    fn store_head(&mut self, pos: PackedPos, meta: u64) {
        if pos == self.published {
            self.held = meta;
        } else {
            // Release: the rest of the chain is visible before its head is available (2.8.13.1, 2.8.21.1).
            self.desc[usize::from(pos.slot())].meta.store(meta, Ordering::Release);
        }
    }

    /// Chains of one descriptor that are used, from `pos` on, at most `max`, and not beyond the ring's end.
    #[inline(always)]
    fn run(&self, pos: PackedPos, max: u16) -> u16 {
        let descs = self.desc.get(usize::from(pos.slot())..).unwrap_or_default();
        let mask = PackedMeta { len: 0, id: if IN_ORDER { u16::MAX } else { 0 }, flags: PackedPos::BOTH }.pack();
        let first = PackedMeta { len: 0, id: pos.slot(), flags: pos.used_flags() }.pack();
        let next = PackedMeta { len: 0, id: 1, flags: 0 }.pack();
        // Acquire pairs with the device's release of the flags (2.8.6): id, length and buffer are filled.
        let used = |(i, desc): &(u64, &Desc)| (desc.meta.load(Ordering::Acquire) ^ (first + i * next)) & mask == 0;
        (0..max.into()).zip(descs).take_while(used).count() as u16
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
    const GROUPS: bool = true;

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
    fn ready_singles(&mut self, max: u16) -> Result<u16, Fault> {
        if IN_ORDER && self.batch.0 > 0 {
            return Ok(self.batch.0);
        }
        let max = max.min(self.outstanding.get());
        let mut ready = self.run(self.used, max);
        if self.used.slot() + ready == self.size {
            ready += self.run(self.used.advance(ready, self.size), max - ready);
        }
        // In order, a batch is popped by itself.
        if IN_ORDER && ready == 0 { self.ready(max, |_| 1) } else { Ok(ready) }
    }

    #[inline(always)]
    fn pop_group<const N: usize>(&mut self, full: u32) -> [(u32, Result<u32, Fault>); N] {
        let first = self.used.slot();
        let Some(descs) = self.used.group::<N>(&self.desc).filter(|_| !IN_ORDER || self.batch.0 == 0) else {
            return std::array::from_fn(|_| self.pop(full, |_| 1));
        };
        self.outstanding.add((N as u16).wrapping_neg());
        self.used = self.used.advance(N as u16, self.size);
        let mut done = [(0, Ok(0)); N];
        for ((out, desc), slot) in done.iter_mut().zip(descs).zip(first..) {
            // Relaxed: ordered by the Acquire in `ready_singles`.
            let meta = PackedMeta::unpack(desc.meta.load(Ordering::Relaxed));
            *out = (u32::from(if IN_ORDER { slot } else { meta.id }), Ok(meta.len));
        }
        done
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
        if IN_ORDER { self.avail.slot() } else { self.ids[usize::from(self.free.0.get())] }
    }

    /// All of a chain's descriptors carry its id (2.8.6 wants it in the last). The head's second word waits for `push`.
    #[inline(always)]
    fn desc(&mut self, addr: u64, len: u32, flags: u16) -> u16 {
        let slot = self.avail.slot();
        let id = if IN_ORDER && self.begun { self.head.0.slot() } else { self.next_id() };
        let desc = &self.desc[usize::from(slot)];
        desc.addr.store(addr, Ordering::Relaxed);
        let meta = PackedMeta { len, id, flags: flags | self.avail.avail_flags() }.pack();
        if self.begun {
            desc.meta.store(meta, Ordering::Relaxed);
        } else {
            (self.head, self.begun) = ((self.avail, meta), true);
        }
        self.avail = self.avail.advance(1, self.size);
        slot
    }

    #[inline(always)]
    fn push(&mut self, _id: u16) {
        self.store_head(self.head.0, self.head.1);
        self.begun = false;
        self.outstanding.add(1);
        if !IN_ORDER {
            self.free.0 = self.further(self.free.0, 1);
        }
    }

    #[inline(always)]
    fn push_group<const N: usize>(&mut self, buffers: [(u64, u32); N], flags: u16) -> [u16; N] {
        let pos = self.avail;
        let (Some(ids), Some(descs)) = (self.next_ids::<N>(), pos.group::<N>(&self.desc)) else {
            return std::array::from_fn(|i| self.push_single(buffers[i].0, buffers[i].1, flags));
        };
        let flags = flags | pos.avail_flags();
        let metas: [_; N] = std::array::from_fn(|i| PackedMeta { len: buffers[i].1, id: ids[i], flags }.pack());
        for (desc, (addr, _)) in descs.iter().zip(buffers) {
            desc.addr.store(addr, Ordering::Relaxed);
        }
        for (desc, meta) in descs.iter().zip(metas).skip(1) {
            // Release as in `store_head`.
            desc.meta.store(meta, Ordering::Release);
        }
        self.store_head(pos, metas[0]);
        self.avail = pos.advance(N as u16, self.size);
        self.outstanding.add(N as u16);
        if !IN_ORDER {
            self.free.0 = self.further(self.free.0, N as u16);
        }
        ids
    }

    #[inline(always)]
    fn reclaim(&mut self, id: u16, _last: u16, _count: u16) {
        if !IN_ORDER {
            self.ids[usize::from(self.free.1.get())] = id;
            self.free.1 = self.further(self.free.1, 1);
        }
    }

    #[inline(always)]
    fn reclaim_group<const N: usize>(&mut self, ids: [u16; N]) {
        if IN_ORDER {
            return;
        }
        match self.ids.get_mut(usize::from(self.free.1.get())..).and_then(|slots| slots.first_chunk_mut()) {
            Some(slots) => {
                *slots = ids;
                self.free.1 = self.further(self.free.1, N as u16);
            }
            None => ids.into_iter().for_each(|id| self.reclaim(id, id, 1)),
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
        if old != self.avail {
            // Release as in `store_head`, and the batch behind it is there.
            self.desc[usize::from(old.slot())].meta.store(self.held, Ordering::Release);
        }
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
