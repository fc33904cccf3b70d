//! A ring's three areas as plain words.

use std::sync::atomic::{AtomicU16, Ordering};

use backend::error::Error;
use backend::memory::GuestMemory;
use backend::queue::config::{Area, QueueConfig};
use pmd::shared::View;
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, Desc, DescMeta, UsedElem, avail, used};

/// A split ring without any logic: a test that plays one of its ends writes what it likes (virtio 1.3, 2.7).
pub struct RawRing {
    /// The descriptor table.
    pub desc: View<Desc>,
    /// The driver area, see [`avail`].
    pub avail: View<AtomicU16>,
    /// `flags` and `idx` of the device area.
    pub used_words: View<AtomicU16>,
    /// The used ring's elements.
    pub used: View<UsedElem>,
    avail_event: View<AtomicU16>,
}

impl RawRing {
    pub(super) fn new(config: &QueueConfig) -> Result<Self, Error> {
        Ok(Self {
            desc: config.view(Area::Desc, 0, config.size.into())?,
            avail: config.view(Area::Driver, 0, avail::words(config.size))?,
            used_words: config.view(Area::Device, 0, 2)?,
            used: config.view(Area::Device, used::RING as u64, config.size.into())?,
            avail_event: config.view(Area::Device, used::avail_event(config.size) as u64, 1)?,
        })
    }

    fn slot(&self, index: u16) -> usize {
        usize::from(index) % self.desc.len()
    }

    /// Writes descriptor `index`.
    pub fn describe(&self, index: u16, addr: u64, meta: DescMeta) {
        let desc = &self.desc[self.slot(index)];
        desc.addr.store(addr, Ordering::Relaxed);
        desc.meta.store(meta.pack(), Ordering::Relaxed);
    }

    /// Descriptor `index`: address, length, flags and next.
    #[must_use]
    pub fn described(&self, index: u16) -> (u64, DescMeta) {
        let desc = &self.desc[self.slot(index)];
        (desc.addr.load(Ordering::Relaxed), DescMeta::unpack(desc.meta.load(Ordering::Relaxed)))
    }

    /// As a driver: makes the chain at `head` available.
    pub fn offer(&self, head: u16) {
        let idx = self.avail_idx();
        self.avail[avail::RING + self.slot(idx)].store(head, Ordering::Relaxed);
        self.set_avail_idx(idx.wrapping_add(1));
    }

    /// The driver's index.
    #[must_use]
    pub fn avail_idx(&self) -> u16 {
        self.avail[avail::IDX].load(Ordering::Acquire)
    }

    /// Sets the driver's index.
    pub fn set_avail_idx(&self, idx: u16) {
        self.avail[avail::IDX].store(idx, Ordering::Release);
    }

    /// What the avail ring holds at `idx`.
    #[must_use]
    pub fn offered(&self, idx: u16) -> u16 {
        self.avail[avail::RING + self.slot(idx)].load(Ordering::Relaxed)
    }

    /// Writes the used element at `idx`.
    pub fn set_used(&self, idx: u16, id: u32, len: u32) {
        let elem = &self.used[self.slot(idx)];
        elem.id.store(id, Ordering::Relaxed);
        elem.len.store(len, Ordering::Relaxed);
    }

    /// The used element at `idx`: id and length.
    #[must_use]
    pub fn used(&self, idx: u16) -> (u32, u32) {
        let elem = &self.used[self.slot(idx)];
        (elem.id.load(Ordering::Relaxed), elem.len.load(Ordering::Relaxed))
    }

    /// As a device: completes the chain at `head`, with one element of its own.
    pub fn complete(&self, head: u16, len: u32) {
        let idx = self.used_idx();
        self.set_used(idx, head.into(), len);
        self.set_used_idx(idx.wrapping_add(1));
    }

    /// The device's index.
    #[must_use]
    pub fn used_idx(&self) -> u16 {
        self.used_words[used::IDX / 2].load(Ordering::Acquire)
    }

    /// Sets the device's index.
    pub fn set_used_idx(&self, idx: u16) {
        self.used_words[used::IDX / 2].store(idx, Ordering::Release);
    }

    /// Overwrites any word of the driver area but its index.
    pub fn scribble_avail(&self, word: u16, value: u16) {
        match usize::from(word) % self.avail.len() {
            avail::IDX => {}
            word => self.avail[word].store(value, Ordering::Relaxed),
        }
    }

    /// Sets the driver's flags (`AVAIL_F_*`).
    pub fn set_avail_flags(&self, flags: u16) {
        self.avail[avail::FLAGS].store(flags, Ordering::Relaxed);
    }

    /// Sets the device's flags (`USED_F_*`).
    pub fn set_used_flags(&self, flags: u16) {
        self.used_words[used::FLAGS / 2].store(flags, Ordering::Relaxed);
    }

    /// Sets the entry by which the driver says when it wants to be called (`used_event`).
    pub fn set_used_event(&self, entry: u16) {
        self.avail[avail::used_event(self.desc.len() as u16)].store(entry, Ordering::Relaxed);
    }

    /// Sets the entry by which the device says when it wants to be kicked (`avail_event`).
    pub fn set_avail_event(&self, entry: u16) {
        self.avail_event[0].store(entry, Ordering::Relaxed);
    }

    /// As a naive device: the descriptors of the chain at `head`, those of the table and those of an indirect one, as far as
    /// that has any; none if the chain goes astray.
    #[must_use]
    pub fn chain(&self, memory: &GuestMemory, head: u16) -> Option<Vec<Link>> {
        let mut links = Vec::new();
        let (mut index, mut table) = (Some(head), None);
        while let Some(i) = index {
            let place = table.is_none().then_some(i);
            let (addr, meta) = match table {
                None => self.described(i),
                Some(table) => entry(memory, table, i)?,
            };
            index = (meta.flags & DESC_F_NEXT != 0).then_some(meta.next);
            if meta.flags & DESC_F_INDIRECT != 0 {
                (index, table) = (Some(0), Some(addr));
            }
            links.push(Link { index: place, addr, meta });
            if links.len() > self.desc.len() + 1 {
                return None;
            }
        }
        Some(links)
    }
}

/// A descriptor of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Its place in the ring's table; none if it stands in an indirect one.
    pub index: Option<u16>,
    /// See [`Desc`].
    pub addr: u64,
    /// See [`Desc`].
    pub meta: DescMeta,
}

fn entry(memory: &GuestMemory, table: u64, index: u16) -> Option<(u64, DescMeta)> {
    let addr = table.checked_add(u64::from(index) * size_of::<Desc>() as u64)?;
    let words = u128::from_le_bytes(memory.bytes(addr, size_of::<Desc>() as u32)?.get()?);
    Some((words as u64, DescMeta::unpack((words >> 64) as u64)))
}
