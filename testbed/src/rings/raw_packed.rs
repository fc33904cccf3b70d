//! A packed ring's three areas as plain words.

use std::sync::atomic::{AtomicU16, Ordering};

use backend::error::Error;
use backend::memory::GuestMemory;
use backend::queue::config::{Area, QueueConfig};
use pmd::shared::View;
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, Desc, PackedMeta, PackedPos};

/// A packed ring without any logic: a test that plays one of its ends writes what it likes (virtio 1.3, 2.8).
pub struct RawPackedRing {
    /// The descriptor ring.
    pub desc: View<Desc>,
    driver_event: View<AtomicU16>,
    device_event: View<AtomicU16>,
}

/// A chain, as a naive device sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedChain {
    /// Its id: the last descriptor's.
    pub id: u16,
    /// Descriptors of the ring that it takes.
    pub descs: u16,
    /// Its buffers: address, length and flags. Of an indirect table, its entries.
    pub buffers: Vec<(u64, u32, u16)>,
}

/// An event suppression structure (2.8.10).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedEvent {
    /// Offset in bits 0 to 14, wrap counter in bit 15.
    pub place: u16,
    /// `PACKED_EVENT_F_*`.
    pub flags: u16,
}

impl RawPackedRing {
    pub(super) fn new(config: &QueueConfig) -> Result<Self, Error> {
        Ok(Self {
            desc: config.view(Area::Desc, 0, config.size.into())?,
            driver_event: config.view(Area::Driver, 0, 2)?,
            device_event: config.view(Area::Device, 0, 2)?,
        })
    }

    /// Number of descriptors.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.desc.len() as u16
    }

    /// Writes a descriptor, its flags last.
    pub fn describe(&self, slot: u16, addr: u64, meta: PackedMeta) {
        let desc = &self.desc[usize::from(slot % self.size())];
        desc.addr.store(addr, Ordering::Relaxed);
        desc.meta.store(meta.pack(), Ordering::Release);
    }

    /// A descriptor.
    #[must_use]
    pub fn described(&self, slot: u16) -> (u64, PackedMeta) {
        let desc = &self.desc[usize::from(slot % self.size())];
        let meta = PackedMeta::unpack(desc.meta.load(Ordering::Acquire));
        (desc.addr.load(Ordering::Relaxed), meta)
    }

    /// As a driver: makes a chain of `buffers` (address, length, flags without `NEXT`) available at `pos`, its head last;
    /// returns where the next one goes.
    pub fn offer(&self, pos: PackedPos, id: u16, buffers: &[(u64, u32, u16)]) -> PackedPos {
        let mut places = Vec::new();
        let mut next = pos;
        for _ in buffers {
            places.push(next);
            next = next.advance(1, self.size());
        }
        let last = buffers.len() - 1;
        for (i, (&(addr, len, flags), place)) in buffers.iter().zip(&places).enumerate().rev() {
            let more = if i < last { DESC_F_NEXT } else { 0 };
            // Only the last one's id counts (2.8.6).
            let id = if i == last { id } else { !id };
            self.describe(place.slot(), addr, PackedMeta { len, id, flags: flags | more | place.avail_flags() });
        }
        next
    }

    /// As a device: the chain available at `pos`, if there is one; every descriptor of it has to be available.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn offered(&self, memory: &GuestMemory, pos: PackedPos) -> Result<Option<PackedChain>, String> {
        if !self.described(pos.slot()).1.is_avail(pos) {
            return Ok(None);
        }
        let (mut place, mut buffers) = (pos, Vec::new());
        for descs in 1..=self.size() {
            let (addr, meta) = self.described(place.slot());
            if !meta.is_avail(place) {
                return Err(format!("descriptor {descs} of the chain at {pos:?} is not available: {meta:?}"));
            }
            if meta.flags & DESC_F_INDIRECT == 0 {
                buffers.push((addr, meta.len, meta.flags));
            } else {
                buffers.extend(table(memory, addr, meta.len).ok_or("an indirect table that cannot be read")?);
            }
            if meta.flags & DESC_F_NEXT == 0 {
                return Ok(Some(PackedChain { id: meta.id, descs, buffers }));
            }
            place = place.advance(1, self.size());
        }
        Err(format!("the chain at {pos:?} is longer than the ring"))
    }

    /// As a device: writes a used descriptor.
    pub fn complete(&self, pos: PackedPos, id: u16, len: u32) {
        let desc = &self.desc[usize::from(pos.slot())];
        desc.meta.store(PackedMeta { len, id, flags: pos.used_flags() }.pack(), Ordering::Release);
    }

    /// As a driver: the used descriptor at `pos`, if there is one.
    #[must_use]
    pub fn used(&self, pos: PackedPos) -> Option<PackedMeta> {
        Some(self.described(pos.slot()).1).filter(|meta| meta.is_used(pos))
    }

    /// Says which calls the driver wants.
    pub fn set_driver_event(&self, event: PackedEvent) {
        store(&self.driver_event, event);
    }

    /// Says which kicks the device wants.
    pub fn set_device_event(&self, event: PackedEvent) {
        store(&self.device_event, event);
    }
}

fn store(area: &View<AtomicU16>, event: PackedEvent) {
    area[0].store(event.place, Ordering::Relaxed);
    area[1].store(event.flags, Ordering::Release);
}

/// The entries of an indirect table, in order (2.8.7).
fn table(memory: &GuestMemory, addr: u64, len: u32) -> Option<Vec<(u64, u32, u16)>> {
    let entry = size_of::<Desc>() as u32;
    let read = |i: u32| {
        let at = addr.checked_add(u64::from(i * entry))?;
        let words = u128::from_le_bytes(memory.bytes(at, entry)?.get()?);
        let meta = PackedMeta::unpack((words >> 64) as u64);
        Some((words as u64, meta.len, meta.flags))
    };
    (0..len / entry).map(read).collect()
}
