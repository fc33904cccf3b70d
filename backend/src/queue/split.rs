//! Split rings, device end (virtio 1.3, 2.7).
//!
//! Descriptors, heads and indices are claims: each is read once, into a private copy, and checked before it is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use pmd::port::Fault;
use pmd::shared::{Circle, View};
use pmd::virtio::event::SplitWish;
use pmd::virtio::spec::{Desc, DescMeta, UsedElem, avail, feature, used};

use super::config::{Area, Notifier, Position, QueueConfig};
use super::{Buffer, DeviceRing, Head, Single};
use crate::error::Error;
use crate::memory::GuestMemory;
use crate::positions::Record;

/// A running split ring.
///
/// With `BATCHED` one used element completes all chains since the last flush: what `IN_ORDER` allows (2.7.9) where the driver
/// does not need each chain's length, which is so for chains that the device only reads.
pub struct SplitRing<const BATCHED: bool> {
    desc: View<Desc>,
    avail_words: View<AtomicU16>,
    avail: Circle<AtomicU16>,
    used_words: View<AtomicU16>,
    used: Circle<UsedElem>,
    memory: Arc<GuestMemory>,
    mask: u16,
    event_idx: bool,
    /// Chains taken and completed before this burst.
    done: u16,
    call: Option<Arc<Notifier>>,
    position: Position,
}

/// Where a burst on a split ring stands. Chains are counted as the ring's indexes count them, modulo 2^16.
#[derive(Clone, Copy)]
pub struct SplitCursor {
    /// Chains taken.
    avail: u16,
    /// Chains made available.
    end: u16,
    /// Chains completed.
    used: u16,
    /// The last completed chain.
    last_head: u16,
}

impl<const BATCHED: bool> SplitRing<BATCHED> {
    /// Starts to run the ring that `config` describes, at its position. Where it stops it leaves in `position`.
    ///
    /// # Errors
    /// [`Error`] if its size or its areas are impossible.
    pub fn activate(config: QueueConfig, position: Position) -> Result<Self, Error> {
        config.check_size()?;
        let size = config.size;
        let mut ring = Self {
            desc: config.view(Area::Desc, 0, size.into())?,
            avail_words: config.view(Area::Driver, 0, avail::words(size))?,
            avail: config.circle(Area::Driver, 2 * avail::RING as u64)?,
            used_words: config.view(Area::Device, 0, used::bytes(size) / 2)?,
            used: config.circle(Area::Device, used::RING as u64)?,
            mask: size - 1,
            event_idx: config.features & feature::EVENT_IDX != 0,
            done: 0,
            memory: config.memory,
            call: config.call,
            position,
        };
        let start = ring.start(config.position as u16);
        ring.done = start;
        if let Some(Record::Region(record)) = &config.record {
            record.begin(start.into());
        }
        // With `EVENT_IDX` the flags have to be 0 (2.7.10.1), whatever an earlier device left there.
        ring.used_words[used::FLAGS / 2].store(0, Ordering::Relaxed);
        // Until it is armed.
        ring.disarm();
        Ok(ring)
    }

    /// Where to go on in a ring whose front-end says `base`: at the ring's own used index, if that is possible.
    ///
    /// The base tells where to take the next chain; up to where chains are completed stands in the ring, and only there
    /// (vhost-user, "Vring state description"). A device that was told to stop, and completes what it has taken before it
    /// answers, leaves both the same. They differ after one that was never asked: a daemon that was killed. Then the base is from
    /// before (some front-ends say 0), and whatever lies between the two has never been completed, or the driver would see it as
    /// such. To go on behind would leave those buffers with the device for ever; to go on before would complete chains twice. With
    /// `IN_ORDER` this is exact; without it, the earlier device may have completed others than the first ones, which DPDK and we
    /// never do.
    ///
    /// An index with more chains behind it than the ring holds is nobody's position; then the base has to do.
    fn start(&self, base: u16) -> u16 {
        let used = self.used_words[used::IDX / 2].load(Ordering::Relaxed);
        let waiting = self.avail_words[avail::IDX].load(Ordering::Relaxed).wrapping_sub(used);
        if waiting <= self.mask + 1 { used } else { base }
    }

    /// Puts the next used element where the driver will see it, after the flush.
    #[inline(always)]
    fn put(&self, at: &mut SplitCursor, id: u16, written: u32) {
        if BATCHED {
            at.last_head = id;
        } else {
            let elem = self.used.at(at.used);
            elem.id.store(id.into(), Ordering::Relaxed);
            elem.len.store(written, Ordering::Relaxed);
        }
        at.used = at.used.wrapping_add(1);
    }

    /// Where the device says when it wants to be woken.
    #[inline(always)]
    fn wish(&self) -> SplitWish<'_> {
        if self.event_idx {
            SplitWish::Entry(&self.used_words[used::avail_event(self.mask + 1) / 2])
        } else {
            SplitWish::Flags(&self.used_words[used::FLAGS / 2])
        }
    }

    /// Where the driver does.
    #[inline(always)]
    fn driver_wish(&self) -> SplitWish<'_> {
        if self.event_idx {
            SplitWish::Entry(&self.avail_words[avail::used_event(self.mask + 1)])
        } else {
            SplitWish::Flags(&self.avail_words[avail::FLAGS])
        }
    }
}

impl<const BATCHED: bool> DeviceRing for SplitRing<BATCHED> {
    type Cursor = SplitCursor;
    const READS_WRITABLE_ENTRIES: bool = false;

    #[inline(always)]
    fn begin(&self) -> Result<SplitCursor, Fault> {
        // Acquire pairs with the driver's release of the index (2.7.13.3): entries and descriptors are written up to it.
        let end = self.avail_words[avail::IDX].load(Ordering::Acquire);
        let start = self.done;
        if end.wrapping_sub(start) > self.mask + 1 {
            return Err(Fault::BadIndex);
        }
        Ok(SplitCursor { avail: start, end, used: start, last_head: 0 })
    }

    #[inline(always)]
    fn pop(&self, at: &mut SplitCursor) -> Option<Head> {
        if at.avail == at.end {
            return None;
        }
        let id = self.avail.at(at.avail).load(Ordering::Relaxed);
        at.avail = at.avail.wrapping_add(1);
        Some(Head { id, descs: 1, buffer: self.table(id).ok_or(Fault::BadChain) })
    }

    #[inline(always)]
    fn complete(&self, at: &mut SplitCursor, head: &Head, written: u32) {
        self.put(at, head.id, written);
    }

    #[inline(always)]
    fn complete_group<const N: usize>(&self, at: &mut SplitCursor, group: &[Single; N], written: [u32; N]) {
        for (single, written) in group.iter().zip(written) {
            self.put(at, single.id, written);
        }
    }

    #[inline(always)]
    fn flush(&mut self, at: SplitCursor) -> Option<bool> {
        if at.used == self.done {
            return None;
        }
        if BATCHED {
            let elem = self.used.at(self.done);
            elem.id.store(at.last_head.into(), Ordering::Relaxed);
            elem.len.store(0, Ordering::Relaxed);
        }
        let old = std::mem::replace(&mut self.done, at.used);
        let wanted = self.driver_wish().publish(&self.used_words[used::IDX / 2], old, at.used);
        if wanted && let Some(call) = &self.call {
            call.signal();
        }
        Some(wanted)
    }

    fn arm(&mut self) {
        self.wish().ask(self.done);
    }

    fn disarm(&mut self) {
        self.wish().refuse(self.done);
    }

    #[inline(always)]
    fn memory(&self) -> &GuestMemory {
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
        self.position.leave(self.done.into());
    }
}
