//! The inflight region: memory that the front-end keeps, and in which a back-end leaves, for the one that comes after it, what
//! it had taken and not completed when it was killed (vhost-user, "Inflight I/O tracking", for both layouts).
//!
//! Our queues take and complete chains in ring order and within one burst, so nothing has to be noted of single chains: their
//! marks stay clear, and those that were taken and not completed are the next ones behind the completed. Where these end, a
//! split ring's used index tells; of a packed ring the region keeps it, by one store a burst (`RegionRecord::leave`). After a
//! kill, chains of the unfinished burst are taken once more: none is completed twice, and no more than that burst is lost.
//!
//! ```text
//! ring (multiple of 64 bytes)
//! word 0, 1             features (0); version, entries, and split: last batch, used index; packed: free list, free list before
//! word 2, 3 (packed)    used position, position before, their wrap counters
//! entries (split: 2 words, packed: 4)  in-flight mark, next of the free list, and what else belongs to a chain in flight
//! ```

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pmd::virtio::spec::RING_SIZE_MAX;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;

use crate::error::Error;
use crate::memory::FileWords;

const VERSION: u64 = 1;
/// The word with the version; 0 there: nothing is recorded.
const VERSION_WORD: usize = 1;
/// The word with a packed ring's places.
const PLACES_WORD: usize = 2;
/// The wrap counter in a half of a vring base.
const WRAP: u32 = 1 << 15;
/// A ring's part begins at a multiple of so many words: as DPDK and libvhost-user have it.
const ALIGN_WORDS: usize = 8;
/// The mark of a chain in flight.
const MARK: u64 = 0xff;

/// How one kind of ring is recorded.
#[derive(Clone, Copy, Debug)]
struct Layout {
    packed: bool,
    /// Words before the entries.
    header: usize,
    /// Words of an entry.
    entry: usize,
}

impl Layout {
    fn of(packed: bool) -> Self {
        let (header, entry) = if packed { (4, 4) } else { (2, 2) };
        Self { packed, header, entry }
    }

    /// Words of a ring's part with so many entries.
    fn words(self, entries: u16) -> usize {
        (self.header + self.entry * usize::from(entries)).next_multiple_of(ALIGN_WORDS)
    }

    /// Bytes of a region.
    fn bytes(self, queues: u16, entries: u16) -> u64 {
        (usize::from(queues) * self.words(entries) * size_of::<u64>()) as u64
    }
}

/// A fresh region for a front-end with `queues` rings of up to `size` descriptors, of at most `rings` that there are.
///
/// # Errors
/// [`Error::InflightShape`] for numbers that cannot be, [`Error::System`] if the kernel refuses.
pub(crate) fn create(
    packed: bool,
    asked: &VhostUserInflight,
    rings: usize,
) -> Result<(VhostUserInflight, File), Error> {
    let VhostUserInflight { num_queues, queue_size, .. } = *asked;
    check_shape(asked, rings)?;
    let size = Layout::of(packed).bytes(num_queues, queue_size);
    let file = memfd_create("inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(io::Error::from);
    let sized = file.map(File::from).and_then(|file| {
        file.set_len(size)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    });
    let file = sized.map_err(|source| Error::System { step: "creating an inflight region", source })?;
    Ok((VhostUserInflight::new(size, 0, num_queues, queue_size), file))
}

fn check_shape(shape: &VhostUserInflight, rings: usize) -> Result<(), Error> {
    let VhostUserInflight { num_queues: queues, queue_size: size, .. } = *shape;
    let fits = (1..=rings).contains(&queues.into()) && (1..=RING_SIZE_MAX).contains(&size);
    if fits { Ok(()) } else { Err(Error::InflightShape { queues, size, rings }) }
}

/// The region of one connection.
#[derive(Debug)]
pub(crate) struct Inflight {
    words: Arc<FileWords>,
    queues: u16,
    entries: u16,
}

impl Inflight {
    /// Maps the region that `shape` describes.
    ///
    /// # Errors
    /// [`Error::InflightShape`] or [`Error::InflightRegion`] if that is not possible.
    pub(crate) fn new(shape: &VhostUserInflight, file: &File, rings: usize) -> Result<Self, Error> {
        check_shape(shape, rings)?;
        let VhostUserInflight { mmap_size: size, mmap_offset: offset, num_queues: queues, queue_size: entries } =
            *shape;
        // No more than the larger layout needs.
        let used = size.min(Layout::of(true).bytes(queues, entries));
        let words =
            FileWords::map(file, offset, used).map_err(|source| Error::InflightRegion { offset, size, source })?;
        Ok(Self { words: Arc::new(words), queues, entries })
    }

    /// Whether the front-end has shortened it.
    pub(crate) fn is_broken(&self) -> bool {
        self.words.is_broken()
    }

    /// The part of ring `index`, which has `size` descriptors; with `recall` it goes on where the region says.
    ///
    /// # Errors
    /// [`Error::InflightRing`] if the region has no room for the ring, [`Error::InflightForeign`] if another back-end left it with
    /// chains in flight.
    pub(crate) fn record(&self, index: u16, size: u16, packed: bool, recall: bool) -> Result<RegionRecord, Error> {
        let Self { queues, entries, .. } = *self;
        let layout = Layout::of(packed);
        let at = usize::from(index) * layout.words(entries);
        let room = self.words.words().len() >= at + layout.header + layout.entry * usize::from(entries);
        if index >= queues || size > entries || !room {
            return Err(Error::InflightRing { index, size, queues, entries });
        }
        let mut record = RegionRecord { words: Arc::clone(&self.words), at, layout, entries, recall: false };
        let valid = record.word(VERSION_WORD).load(Ordering::Acquire) as u32 == record.version() as u32;
        record.recall = recall && valid;
        let count = if record.recall { record.marked() } else { 0 };
        if count > 0 { Err(Error::InflightForeign { index, count }) } else { Ok(record) }
    }

    /// The front-end knows ring `index`'s position by now, or there is none any more.
    pub(crate) fn forget(&self, index: u16, packed: bool) {
        let at = usize::from(index) * Layout::of(packed).words(self.entries);
        if let Some(version) = self.words.words().get(at + VERSION_WORD)
            && index < self.queues
        {
            version.store(0, Ordering::Release);
        }
    }
}

/// One ring's part of a region. The front-end may write there at any time: what is read is a claim.
#[derive(Clone, Debug)]
pub struct RegionRecord {
    words: Arc<FileWords>,
    at: usize,
    layout: Layout,
    entries: u16,
    recall: bool,
}

impl RegionRecord {
    fn word(&self, which: usize) -> &AtomicU64 {
        &self.words.words()[self.at + which]
    }

    /// The version word of a ring with no chain in flight and all entries free.
    fn version(&self) -> u64 {
        VERSION | u64::from(self.entries) << 16
    }

    /// Entries whose chain is marked as in flight.
    fn marked(&self) -> usize {
        let marked = |entry: &usize| {
            self.word(self.layout.header + entry * self.layout.entry).load(Ordering::Relaxed) & MARK != 0
        };
        (0..usize::from(self.entries)).filter(marked).count()
    }

    /// The two places that an earlier back-end left of a packed ring, as halves of a vring base: where its last burst of
    /// completions began and ended.
    pub(crate) fn find(&self) -> Option<(u32, u32)> {
        let places = self.word(PLACES_WORD).load(Ordering::Relaxed);
        let half = |slot: u64, wrap: u64| slot as u32 & (WRAP - 1) | if wrap & 0xff != 0 { WRAP } else { 0 };
        (self.recall && self.layout.packed).then(|| (half(places >> 16, places >> 40), half(places, places >> 32)))
    }

    /// Begins the record of a ring that is at rest at `place`: split, its used index; packed, a half of a vring base.
    pub(crate) fn begin(&self, place: u32) {
        // Void until all of it is there.
        self.word(VERSION_WORD).store(0, Ordering::Release);
        self.word(0).store(0, Ordering::Relaxed);
        for entry in 0..usize::from(self.entries) {
            // The free list of a packed ring leads from each entry to the next.
            let next = if self.layout.packed { (entry as u64 + 1) << 16 } else { 0 };
            self.word(self.layout.header + entry * self.layout.entry).store(next, Ordering::Relaxed);
        }
        let used = if self.layout.packed { 0 } else { u64::from(place as u16) << 48 };
        if self.layout.packed {
            self.leave(place, place);
        }
        // Release: a successor that finds the version finds the rest, wherever this process ends.
        self.word(VERSION_WORD).store(self.version() | used, Ordering::Release);
    }

    /// Completions of a packed ring are about to be made known from `from` on, up to, not including, `to`.
    #[inline(always)]
    pub(crate) fn leave(&self, from: u32, to: u32) {
        let part = |half: u32| u64::from(half & (WRAP - 1)) | u64::from(half >> 15 & 1) << 32;
        // Used position and wrap counter in bits 0-15 and 32-39, those before in bits 16-31 and 40-47. One word, so never half
        // of it. Relaxed, as in `positions`.
        let old = part(from);
        let old = (old & 0xffff) << 16 | (old >> 32) << 40;
        self.word(PLACES_WORD).store(part(to) | old, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUEUES: u16 = 4;
    const ENTRIES: u16 = 256;

    fn region(packed: bool) -> (VhostUserInflight, File, Inflight) {
        let asked = VhostUserInflight::new(0, 0, QUEUES, ENTRIES);
        let (shape, file) = create(packed, &asked, 4).unwrap();
        let inflight = Inflight::new(&shape, &file, 4).unwrap();
        (shape, file, inflight)
    }

    fn bytes(file: &File, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, at).unwrap();
        bytes
    }

    #[test]
    fn a_packed_ring_is_recorded_as_the_specification_lays_it_out() {
        let (shape, file, inflight) = region(true);
        // struct QueueRegionPacked: 32 bytes, and 32 more a descriptor, in multiples of 64.
        let stride = (32 + 32 * 256_u64).next_multiple_of(64);
        assert_eq!((shape.mmap_size, shape.mmap_offset), (4 * stride, 0));
        let record = inflight.record(2, 256, true, true).unwrap();
        assert_eq!(record.find(), None, "a fresh region says nothing");
        record.begin(0x8003);
        record.leave(0x80fe, 0x0005);
        let found = bytes(&file, 2 * stride, 64);
        assert_eq!(found[..8], [0; 8], "features");
        assert_eq!(found[8..16], [1, 0, 0, 1, 0, 0, 0, 0], "version, desc_num, free_head, old_free_head");
        assert_eq!(found[16..20], [5, 0, 0xfe, 0], "used_idx, old_used_idx");
        assert_eq!(found[20..32], [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "wrap counters, padding");
        assert_eq!(found[32..36], [0, 0, 1, 0], "the first entry is free, and the next one follows");

        let again = Inflight::new(&shape, &file, 4).unwrap();
        assert_eq!(again.record(2, 256, true, true).unwrap().find(), Some((0x80fe, 0x0005)));
        assert_eq!(again.record(2, 256, true, false).unwrap().find(), None, "the ring has run here already");
        assert_eq!(again.record(1, 256, true, true).unwrap().find(), None);
        again.forget(2, true);
        assert_eq!(again.record(2, 256, true, true).unwrap().find(), None);
    }

    #[test]
    fn a_split_ring_is_recorded_as_the_specification_lays_it_out() {
        let (shape, file, inflight) = region(false);
        // struct QueueRegionSplit: 16 bytes, and 16 more a descriptor, in multiples of 64.
        let stride = (16 + 16 * 256_u64).next_multiple_of(64);
        assert_eq!(shape.mmap_size, 4 * stride);
        inflight.record(3, 256, false, true).unwrap().begin(0x1234);
        // version, desc_num, last_batch_head, used_idx.
        assert_eq!(bytes(&file, 3 * stride + 8, 8), [1, 0, 0, 1, 0, 0, 0x34, 0x12]);
    }

    #[test]
    fn chains_that_another_back_end_left_in_flight_are_refused() {
        for packed in [false, true] {
            let (_, file, inflight) = region(packed);
            let layout = Layout::of(packed);
            inflight.record(1, 256, packed, true).unwrap().begin(0);
            let mark = (layout.words(256) + layout.header + 7 * layout.entry) * 8;
            std::os::unix::fs::FileExt::write_all_at(&file, &[1], mark as u64).unwrap();
            let error = inflight.record(1, 256, packed, true).unwrap_err();
            assert!(matches!(error, Error::InflightForeign { index: 1, count: 1 }), "{error}");
            assert!(inflight.record(1, 256, packed, false).is_ok() && inflight.record(2, 256, packed, true).is_ok());
        }
    }

    #[test]
    fn a_region_is_as_large_as_it_is_said_to_be() {
        let (shape, file, inflight) = region(true);
        for (index, size) in [(4, 256), (0, 257)] {
            assert!(matches!(inflight.record(index, size, true, true), Err(Error::InflightRing { .. })));
        }
        let VhostUserInflight { mmap_size: size, .. } = shape;
        for (offset, size) in [(8, size), (4, size - 8), (0, size + 1), (0, 0), (u64::MAX - 7, size), (8, u64::MAX)] {
            let claim = VhostUserInflight::new(size, offset, QUEUES, ENTRIES);
            let outcome = Inflight::new(&claim, &file, 4);
            // More than any layout needs is not mapped, and does not matter.
            let fits = offset == 0 && size == shape.mmap_size + 1;
            assert_eq!(outcome.is_ok(), fits, "{size} bytes at {offset}");
        }
        for (queues, entries) in [(0, 1), (1, 0), (5, 256), (4, 32769)] {
            let claim = VhostUserInflight::new(size, 0, queues, entries);
            assert!(matches!(Inflight::new(&claim, &file, 4), Err(Error::InflightShape { .. })));
            assert!(matches!(create(true, &claim, 4), Err(Error::InflightShape { .. })));
        }
        // Shorter than its rings: those that fit may run.
        let short = Inflight::new(&VhostUserInflight::new(size / 2, 0, QUEUES, ENTRIES), &file, 4).unwrap();
        assert!(short.record(1, 256, true, true).is_ok() && short.record(2, 256, true, true).is_err());
    }
}
