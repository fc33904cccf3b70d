//! Split rings, device end (virtio 1.3, 2.7).
//!
//! Descriptors, heads and indices are claims: each is read once, into a private copy, and checked before it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use pmd::port::Fault;
use pmd::shared::{View, publish};
use pmd::virtio::spec::{AVAIL_F_NO_INTERRUPT, Desc, DescMeta, USED_F_NO_NOTIFY, UsedElem, avail, used};

use super::config::{Area, Notifier, Position, QueueConfig};
use super::{Buffer, DeviceRing, Head};
use crate::error::Error;
use crate::memory::GuestMemory;

/// A running split ring.
///
/// With `BATCHED` one used element completes all chains since the last flush: what `IN_ORDER` allows (2.7.9) where the driver
/// does not need each chain's length, which is so for chains that the device only reads.
pub struct SplitRing<const BATCHED: bool> {
    desc: View<Desc>,
    avail: View<AtomicU16>,
    used_words: View<AtomicU16>,
    used: View<UsedElem>,
    memory: Arc<GuestMemory>,
    mask: u16,
    /// Chains taken.
    avail_idx: u16,
    /// Chains completed.
    used_idx: u16,
    /// Chains completed and made known.
    flushed: u16,
    /// The last completed chain.
    last_head: u16,
    call: Option<Arc<Notifier>>,
    position: Position,
}

impl<const BATCHED: bool> SplitRing<BATCHED> {
    /// Starts to run the ring that `config` describes, at its position. Where it stops it leaves in `position`.
    ///
    /// # Errors
    /// [`Error`] if its size or its areas are impossible.
    pub fn activate(config: QueueConfig, position: Position) -> Result<Self, Error> {
        config.check_size()?;
        let size = config.size;
        let ring = Self {
            desc: config.view(Area::Desc, 0, size.into())?,
            avail: config.view(Area::Driver, 0, avail::words(size))?,
            used_words: config.view(Area::Device, 0, 2)?,
            used: config.view(Area::Device, used::RING as u64, size.into())?,
            mask: size - 1,
            avail_idx: config.position as u16,
            used_idx: config.position as u16,
            flushed: config.position as u16,
            last_head: 0,
            memory: config.memory,
            call: config.call,
            position,
        };
        // A polling device wants no kicks (2.7.10).
        ring.used_words[used::FLAGS / 2].store(USED_F_NO_NOTIFY, Ordering::Relaxed);
        Ok(ring)
    }
}

impl<const BATCHED: bool> DeviceRing for SplitRing<BATCHED> {
    type Mark = u16;
    const READS_WRITABLE_ENTRIES: bool = false;

    #[inline(always)]
    fn ready(&mut self, _max: u16) -> Result<u16, Fault> {
        // Acquire pairs with the driver's release of the index (2.7.13.3): entries and descriptors are written up to it.
        let idx = self.avail[avail::IDX].load(Ordering::Acquire);
        let ready = idx.wrapping_sub(self.avail_idx);
        if ready > self.mask + 1 { Err(Fault::BadIndex) } else { Ok(ready) }
    }

    #[inline(always)]
    fn pop(&mut self) -> Head {
        let slot = usize::from(self.avail_idx & self.mask);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        let id = self.avail[avail::RING + slot].load(Ordering::Relaxed);
        Head { id, descs: 1, buffer: self.table(id).ok_or(Fault::BadId) }
    }

    #[inline(always)]
    fn mark(&self) -> u16 {
        self.avail_idx
    }

    #[inline(always)]
    fn rewind(&mut self, mark: u16) {
        self.avail_idx = mark;
    }

    #[inline(always)]
    fn complete(&mut self, head: &Head, written: u32) {
        if BATCHED {
            self.last_head = head.id;
        } else {
            let elem = &self.used[usize::from(self.used_idx & self.mask)];
            elem.id.store(head.id.into(), Ordering::Relaxed);
            elem.len.store(written, Ordering::Relaxed);
        }
        self.used_idx = self.used_idx.wrapping_add(1);
    }

    #[inline(always)]
    fn flush(&mut self) -> Option<bool> {
        if self.used_idx == self.flushed {
            return None;
        }
        if BATCHED {
            let elem = &self.used[usize::from(self.flushed & self.mask)];
            elem.id.store(self.last_head.into(), Ordering::Relaxed);
            elem.len.store(0, Ordering::Relaxed);
        }
        self.flushed = self.used_idx;
        let idx = &self.used_words[used::IDX / 2];
        let wanted = publish(idx, self.used_idx, &self.avail[avail::FLAGS], AVAIL_F_NO_INTERRUPT);
        if wanted && let Some(call) = &self.call {
            call.signal();
        }
        Some(wanted)
    }

    #[inline(always)]
    fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    #[inline(always)]
    fn size(&self) -> u16 {
        self.mask + 1
    }

    #[inline(always)]
    fn table(&self, index: u16) -> Option<Buffer> {
        let desc = self.desc.get(usize::from(index))?;
        // Relaxed: ordered by the Acquire in `ready`. Each word is read once.
        Some(Self::entry(desc.addr.load(Ordering::Relaxed), desc.meta.load(Ordering::Relaxed), index, 0))
    }

    #[inline(always)]
    fn entry(addr: u64, meta: u64, _index: u16, _entries: u16) -> Buffer {
        let DescMeta { len, flags, next } = DescMeta::unpack(meta);
        Buffer { addr, len, flags, next }
    }
}

impl<const BATCHED: bool> Drop for SplitRing<BATCHED> {
    fn drop(&mut self) {
        // What was taken has been completed by the end of each burst, so this is the next avail index as well.
        self.position.leave(self.used_idx.into());
    }
}
