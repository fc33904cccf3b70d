//! Packed rings, device end (virtio 1.3, 2.8).
//!
//! Descriptors are claims: each is read once, into a private copy, and checked before it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use pmd::port::Fault;
use pmd::shared::View;
use pmd::virtio::event::PackedWish;
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, PackedMeta, PackedPos, feature};

use super::config::{Area, Notifier, Position, QueueConfig};
use super::{Buffer, DeviceRing, Head, SHAPE, Single, shape};
use crate::error::Error;
use crate::memory::GuestMemory;
use crate::positions::Record;

/// The wrap counter in a half of the vring base (vhost-user, "Vring state description").
const BASE_WRAP: u32 = 1 << 15;

/// A running packed ring.
///
/// With `BATCHED` one used descriptor completes all chains since the last flush: what `IN_ORDER` allows (2.8.9) where the driver
/// does not need each chain's length, which is so for chains that the device only reads.
pub struct PackedRing<const BATCHED: bool> {
    desc: View<Desc>,
    driver_event: View<AtomicU32>,
    device_event: View<AtomicU32>,
    event_idx: bool,
    memory: Arc<GuestMemory>,
    size: u16,
    /// Where this burst takes its first chain.
    avail: PackedPos,
    /// Where it completes it.
    used: PackedPos,
    record: Option<Record>,
    call: Option<Arc<Notifier>>,
    position: Position,
}

/// Where a burst on a packed ring stands.
#[derive(Clone, Copy)]
pub struct PackedCursor {
    /// Where the next chain is taken.
    avail: PackedPos,
    /// Where the next chain is completed.
    used: PackedPos,
    /// What the burst's first descriptor will say: the id and the bytes of its first chain, or, `BATCHED`, its last.
    first: (u16, u32),
    /// Descriptors that have not been taken in this burst.
    left: u16,
}

/// A place in the ring from one half of a vring base.
fn place(half: u32, size: u16) -> PackedPos {
    // A slot that does not exist is the peer's error; the ring then begins at 0.
    let slot = (half & (BASE_WRAP - 1)) as u16;
    PackedPos::new(if slot < size { slot } else { 0 }, half & BASE_WRAP != 0)
}

/// One half of a vring base.
fn half(pos: PackedPos) -> u32 {
    u32::from(pos.slot()) | if pos.wrap() { BASE_WRAP } else { 0 }
}

/// The second word of a used descriptor at `pos`.
#[inline(always)]
fn used_meta(pos: PackedPos, id: u16, written: u32) -> u64 {
    let flags = pos.used_flags() | if written > 0 { DESC_F_WRITE } else { 0 };
    PackedMeta { len: written, id, flags }.pack()
}

/// Where an earlier process left this ring, if that is on record.
fn recorded(config: &QueueConfig, desc: &View<Desc>) -> Option<PackedPos> {
    let (from, to) = config.record.as_ref()?.find(config.desc_user_addr, config.size, config.position)?;
    let (from, to) = (place(from, config.size), place(to, config.size));
    // Still available, the first one: none of them was made known. Else all were; it is used, or by now available once more, in
    // the next lap.
    let first = PackedMeta::unpack(desc.get(usize::from(from.slot()))?.meta.load(Ordering::Acquire));
    Some(if first.is_avail(from) { from } else { to })
}

impl<const BATCHED: bool> PackedRing<BATCHED> {
    /// Starts to run the ring that `config` describes, at its position. Where it stops it leaves in `position`.
    ///
    /// # Errors
    /// [`Error`] if its size or its areas are impossible.
    pub fn activate(config: QueueConfig, position: Position) -> Result<Self, Error> {
        config.check_size()?;
        let known = place(config.position, config.size);
        // DPDK supplies the low half only; a ring at rest has twice the same. As a state of its own, 0 in the high half would mean
        // that all chains since slot 0 of this round are in flight, and a polling device does not stop like that.
        let used = config.position >> 16;
        let used = if used == 0 { known } else { place(used, config.size) };
        let desc = config.view::<Desc>(Area::Desc, 0, config.size.into())?;
        let (avail, used) = recorded(&config, &desc).map_or((known, used), |place| (place, place));
        if let Some(record) = &config.record {
            record.begin(config.desc_user_addr, config.size, half(used));
        }
        let mut ring = Self {
            desc,
            driver_event: config.view(Area::Driver, 0, 1)?,
            device_event: config.view(Area::Device, 0, 1)?,
            event_idx: config.features & feature::EVENT_IDX != 0,
            size: config.size,
            avail,
            used,
            record: config.record,
            memory: config.memory,
            call: config.call,
            position,
        };
        ring.give_back();
        // Until it is armed.
        ring.disarm();
        Ok(ring)
    }

    /// Completes, empty, what an earlier process was completing when it was killed: used descriptors behind one that is still
    /// available, for that is written last. The driver has seen none of them; but it would, as soon as it saw the first, while we
    /// would wait for them to be made available. What was in those buffers is lost, which is less than a burst.
    fn give_back(&mut self) {
        let slot = self.used.slot();
        let first = self.load(slot, Ordering::Acquire);
        if !first.is_avail(self.used) {
            return;
        }
        let (id, descs) = if first.flags & DESC_F_NEXT == 0 { (first.id, 1) } else { self.measure(slot) };
        let mut pos = self.used.advance(descs, self.size);
        let mut left = self.size - descs;
        let behind = pos;
        // What is written over does not tell how long its chain was: drivers make all chains of a receive ring alike.
        while left >= descs {
            let meta = self.load(pos.slot(), Ordering::Relaxed);
            if !meta.is_used(pos) {
                break;
            }
            self.write_used(pos, meta.id, 0);
            pos = pos.advance(descs, self.size);
            left -= descs;
        }
        if pos == behind {
            return;
        }
        if let Some(record) = &self.record {
            record.leave(half(self.used), half(pos));
        }
        self.write_used(self.used, id, 0);
        (self.avail, self.used) = (pos, pos);
    }

    #[inline(always)]
    fn load(&self, slot: u16, order: Ordering) -> PackedMeta {
        PackedMeta::unpack(self.desc[usize::from(slot)].meta.load(order))
    }

    /// The id of the chain whose first descriptor at `slot` has a next one, and how many descriptors it has (2.8.6): the id is
    /// in the last. A chain longer than the ring is as long as the ring.
    #[cold]
    fn measure(&self, slot: u16) -> (u16, u16) {
        let mut pos = PackedPos::new(slot, true);
        for descs in 1..=self.size {
            let meta = self.load(pos.slot(), Ordering::Relaxed);
            if meta.flags & DESC_F_NEXT == 0 {
                return (meta.id, descs);
            }
            pos = pos.advance(1, self.size);
        }
        (0, self.size)
    }

    /// Writes a used descriptor. Release: buffers, and the descriptor's own id and length, are visible with its flags (2.8.6).
    #[inline(always)]
    fn write_used(&self, pos: PackedPos, id: u16, written: u32) {
        self.desc[usize::from(pos.slot())].meta.store(used_meta(pos, id, written), Ordering::Release);
    }

    /// Completes what took `descs` descriptors.
    #[inline(always)]
    fn put(&self, at: &mut PackedCursor, id: u16, written: u32, descs: u16) {
        if BATCHED || at.used == self.used {
            at.first = (id, if BATCHED { 0 } else { written });
        } else {
            self.write_used(at.used, id, written);
        }
        at.used = at.used.advance(descs, self.size);
    }
}

impl<const BATCHED: bool> DeviceRing for PackedRing<BATCHED> {
    type Cursor = PackedCursor;
    const READS_WRITABLE_ENTRIES: bool = true;

    #[inline(always)]
    fn begin(&self) -> Result<PackedCursor, Fault> {
        Ok(PackedCursor { avail: self.avail, used: self.used, first: (0, 0), left: self.size })
    }

    #[inline(always)]
    fn pop(&self, at: &mut PackedCursor) -> Option<Head> {
        let slot = at.avail.slot();
        let desc = &self.desc[usize::from(slot)];
        // Acquire pairs with the driver's release of a head's flags (2.8.21.1): its whole chain is written.
        let meta = PackedMeta::unpack(desc.meta.load(Ordering::Acquire));
        if !meta.is_avail(at.avail) || at.left == 0 {
            return None;
        }
        let buffer = Ok(Self::buffer(desc.addr.load(Ordering::Relaxed), meta, slot));
        let (id, descs) = if meta.flags & DESC_F_NEXT == 0 { (meta.id, 1) } else { self.measure(slot) };
        let head = if descs <= at.left {
            Head { id, descs, buffer }
        } else {
            Head { id, descs: at.left, buffer: Err(Fault::BadChain) }
        };
        at.left -= head.descs;
        at.avail = at.avail.advance(head.descs, self.size);
        Some(head)
    }

    /// Side by side in the ring; a group that crosses the ring's end is taken one by one.
    #[inline(always)]
    fn pop_group<const N: usize>(&self, at: &mut PackedCursor, writable: bool) -> Option<[Single; N]> {
        let descs = at.avail.group::<N>(&self.desc)?;
        // Acquire as in `pop`, in the order in which the driver makes them available.
        let metas: [_; N] = std::array::from_fn(|i| descs[i].meta.load(Ordering::Acquire));
        let mask = u64::from(PackedPos::BOTH | SHAPE) << 48;
        let wanted = u64::from(at.avail.avail_flags() | shape(writable)) << 48;
        let different = metas.iter().fold(0, |different, meta| different | (meta ^ wanted));
        if different & mask != 0 || usize::from(at.left) < N {
            return None;
        }
        at.left -= N as u16;
        at.avail = at.avail.advance(N as u16, self.size);
        Some(std::array::from_fn(|i| {
            let PackedMeta { len, id, .. } = PackedMeta::unpack(metas[i]);
            Single { addr: descs[i].addr.load(Ordering::Relaxed), len, id }
        }))
    }

    /// The first descriptor of a burst is written at its end, behind all others: the driver looks no further before it sees it, so
    /// it sees all of a burst or nothing, even if the process ends in between (2.8.6; frames of several buffers, 5.1.6.4).
    #[inline(always)]
    fn complete(&self, at: &mut PackedCursor, head: &Head, written: u32) {
        self.put(at, head.id, written, head.descs);
    }

    #[inline(always)]
    fn complete_group<const N: usize>(&self, at: &mut PackedCursor, group: &[Single; N], written: [u32; N]) {
        if BATCHED {
            return self.put(at, group[N - 1].id, 0, N as u16);
        }
        self.put(at, group[0].id, written[0], 1);
        let rest = || group.iter().zip(written).skip(1);
        match self.desc.get(usize::from(at.used.slot())..).and_then(|descs| descs.get(..N - 1)) {
            Some(descs) => {
                for (desc, (single, written)) in descs.iter().zip(rest()) {
                    desc.meta.store(used_meta(at.used, single.id, written), Ordering::Release);
                }
                at.used = at.used.advance(N as u16 - 1, self.size);
            }
            None => rest().for_each(|(single, written)| self.put(at, single.id, written, 1)),
        }
    }

    #[inline(always)]
    fn flush(&mut self, at: PackedCursor) -> Option<bool> {
        if at.used == self.used {
            return None;
        }
        if let Some(record) = &self.record {
            record.leave(half(self.used), half(at.used));
        }
        self.write_used(self.used, at.first.0, at.first.1);
        let old = std::mem::replace(&mut self.used, at.used);
        self.avail = at.avail;
        let wanted = PackedWish(&self.driver_event[0]).wanted(old, at.used, self.size);
        if wanted && let Some(call) = &self.call {
            call.signal();
        }
        Some(wanted)
    }

    fn arm(&mut self) {
        PackedWish(&self.device_event[0]).ask(self.avail, self.event_idx);
    }

    fn disarm(&mut self) {
        PackedWish(&self.device_event[0]).refuse();
    }

    #[inline(always)]
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    #[inline(always)]
    fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn table(&self, index: u16) -> Option<Buffer> {
        let index = if index == self.size { 0 } else { index };
        let desc = self.desc.get(usize::from(index))?;
        let (addr, word) = (desc.addr.load(Ordering::Relaxed), desc.meta.load(Ordering::Relaxed));
        Some(Self::buffer(addr, PackedMeta::unpack(word), index))
    }

    /// Entries of a table follow each other to its end; of the flags only `WRITE` counts (2.8.7).
    #[inline(always)]
    fn entry(addr: u64, meta: u64, index: u16, entries: u16) -> Buffer {
        let PackedMeta { len, flags, .. } = PackedMeta::unpack(meta);
        let next = index + 1;
        let more = if next < entries { DESC_F_NEXT } else { 0 };
        Buffer { addr, len, flags: flags & (DESC_F_WRITE | DESC_F_INDIRECT) | more, next }
    }
}

impl<const BATCHED: bool> PackedRing<BATCHED> {
    /// A descriptor of the ring: its chain goes on in the next slot.
    #[inline(always)]
    fn buffer(addr: u64, meta: PackedMeta, slot: u16) -> Buffer {
        // Behind the last descriptor for the first one, see `table`.
        Buffer { addr, len: meta.len, flags: meta.flags, next: slot + 1 }
    }
}

impl<const BATCHED: bool> Drop for PackedRing<BATCHED> {
    fn drop(&mut self) {
        // All 32 bits. What was taken has been completed by the end of each burst, so both halves are the same.
        self.position.leave(half(self.used) | half(self.used) << 16);
    }
}
