//! Guest memory: the regions of the peer's memory table, mapped here, and the translation of its addresses.
//!
//! A [`GuestMemory`] never changes: a new memory table makes a new one, and the old one stays mapped for as long as a
//! running queue holds it. Everything in it belongs to the guest, which may write it, and even shorten the file, at
//! any moment.
#![expect(unsafe_code, reason = "maps the peer's files, and hands out the mapped bytes")]

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use pmd::shared::{Shared, SharedBytes, View};
use rustix::fs::FileType;

use crate::error::Error;
use crate::sigbus::Watch;

/// Regions of one memory table: `SET_MEM_TABLE` cannot carry more descriptors, `GET_MAX_MEM_SLOTS` promises no more.
pub const REGIONS_MAX: usize = 32;
/// Every number of a region is a multiple of this.
const PAGE: u64 = 4096;

/// One region as the peer describes it (vhost-user, "Memory region description").
#[derive(Debug)]
pub struct RegionConfig {
    /// Address of its first byte in the guest.
    pub guest_phys_addr: u64,
    /// Length in bytes.
    pub size: u64,
    /// Address of its first byte in the front-end's address space.
    pub user_addr: u64,
    /// Offset of its first byte in `file`.
    pub mmap_offset: u64,
    /// What to map; may be closed afterwards.
    pub file: File,
}

/// A mapped file, unmapped when the last region made from it goes.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// `None` only while being dropped: the watch must end before the memory does.
    watch: Option<Watch>,
}

// SAFETY: shared memory, reached only as atomics and by copying (`View`, `SharedBytes`), from any thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn is_broken(&self) -> bool {
        self.watch.as_ref().is_some_and(Watch::is_broken)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.watch = None;
        // SAFETY: our own mapping, a multiple of its page size long; views and bytes of it keep or borrow the
        // `GuestMemory` that keeps `self`, so there is none left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[derive(Clone)]
struct Region {
    guest_phys_addr: u64,
    size: u64,
    /// Address of the first byte in this process, inside `mapping`, with `size` bytes behind it.
    host: NonNull<u8>,
    user_addr: u64,
    mapping: Arc<Mapping>,
}

// SAFETY: `host` points into `mapping`, which is `Send` and `Sync`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// The memory of one guest, as its memory table has it at this moment.
#[derive(Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

/// One region, for translating addresses in it: a few numbers, which a burst keeps in registers.
#[derive(Clone, Copy)]
pub struct Window<'a> {
    guest_phys_addr: u64,
    size: u64,
    host: *mut u8,
    region: usize,
    memory: PhantomData<&'a GuestMemory>,
}

impl Window<'_> {
    /// The region's number.
    #[must_use]
    pub fn region(&self) -> usize {
        self.region
    }
}

impl Default for Window<'_> {
    /// No region.
    fn default() -> Self {
        Self { guest_phys_addr: 0, size: 0, host: ptr::null_mut(), region: 0, memory: PhantomData }
    }
}

impl GuestMemory {
    /// Maps the regions of a `SET_MEM_TABLE` request, in any order.
    ///
    /// # Errors
    /// One of [`Error`]'s `Region…` variants, or [`Error::MappingCount`]; then nothing stays mapped.
    pub fn new(configs: &[RegionConfig]) -> Result<Arc<Self>, Error> {
        let mut memory = Self::default();
        for config in configs {
            memory.add(config)?;
        }
        Ok(Arc::new(memory))
    }

    /// This memory and one more region (`ADD_MEM_REG`).
    ///
    /// # Errors
    /// As [`GuestMemory::new`].
    pub fn with(&self, config: &RegionConfig) -> Result<Arc<Self>, Error> {
        let mut memory = Self { regions: self.regions.clone() };
        memory.add(config)?;
        Ok(Arc::new(memory))
    }

    /// This memory without one region (`REM_MEM_REG`), named by both its addresses and its size in bytes.
    ///
    /// # Errors
    /// [`Error::RegionUnknown`].
    pub fn without(&self, guest_phys_addr: u64, user_addr: u64, size: u64) -> Result<Arc<Self>, Error> {
        let named = |r: &Region| (r.guest_phys_addr, r.user_addr, r.size) == (guest_phys_addr, user_addr, size);
        let regions: Vec<_> = self.regions.iter().filter(|region| !named(region)).cloned().collect();
        if regions.len() == self.regions.len() {
            return Err(Error::RegionUnknown { guest_phys_addr, size });
        }
        Ok(Arc::new(Self { regions }))
    }

    /// Number of regions.
    #[must_use]
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// Whether the peer took memory away that it had given us. What was lost reads as zeros; the connection has to end.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_broken())
    }

    /// The bytes at guest address `guest_phys_addr`: `len` of them, or fewer where the region ends (go on with the
    /// rest, which may lie in another region); `None` if no region holds the first byte.
    ///
    /// `window` is the region of the last hit. Start with any, or none, and pass it on.
    #[inline(always)]
    pub fn translate<'a>(&'a self, guest_phys_addr: u64, len: u32, window: &mut Window<'a>) -> Option<SharedBytes<'a>> {
        // Below the region, the difference wraps to something larger than any size.
        if guest_phys_addr.wrapping_sub(window.guest_phys_addr) >= window.size {
            *window = self.search(guest_phys_addr)?;
        }
        let offset = guest_phys_addr - window.guest_phys_addr;
        let len = usize::try_from(u64::from(len).min(window.size - offset)).ok()?;
        let offset = usize::try_from(offset).ok()?;
        // SAFETY: `offset + len` is at most the region's size, all of which is mapped behind `host` (`map`) while the memory that the
        // window came from lives, and that is borrowed for `'a`. Only the window of no region is null, and that holds no address.
        Some(unsafe { SharedBytes::new(window.host.wrapping_add(offset), len) })
    }

    /// As [`translate`](Self::translate), for a single address.
    #[must_use]
    pub fn bytes(&self, guest_phys_addr: u64, len: u32) -> Option<SharedBytes<'_>> {
        self.translate(guest_phys_addr, len, &mut Window::default())
    }

    /// The region with this number, as [`Window::region`] tells it; empty if there is none.
    #[inline(always)]
    #[must_use]
    pub fn window(&self, region: usize) -> Window<'_> {
        match self.regions.get(region) {
            Some(&Region { guest_phys_addr, size, host, .. }) => {
                Window { guest_phys_addr, size, host: host.as_ptr(), region, memory: PhantomData }
            }
            None => Window::default(),
        }
    }

    #[cold]
    fn search(&self, guest_phys_addr: u64) -> Option<Window<'_>> {
        let holds = |region: &Region| guest_phys_addr.wrapping_sub(region.guest_phys_addr) < region.size;
        Some(self.window(self.regions.iter().position(holds)?))
    }

    /// `count` shared words of type `T` at the front-end's address `user_addr`, which is how rings are named; the
    /// view keeps them mapped. `None` if they are not aligned or do not lie in one region.
    #[must_use]
    pub fn view<T: Shared>(self: &Arc<Self>, user_addr: u64, count: usize) -> Option<View<T>> {
        let len = u64::try_from(count.checked_mul(size_of::<T>())?).ok()?;
        let (region, offset) = self.regions.iter().find_map(|region| {
            let offset = user_addr.checked_sub(region.user_addr)?;
            (offset <= region.size && len <= region.size - offset).then_some((region, offset))
        })?;
        // SAFETY: `offset` is at most `region.size`, and that much is mapped behind `host`.
        let ptr = unsafe { region.host.add(usize::try_from(offset).ok()?) }.cast::<T>();
        // SAFETY: aligned; `len` bytes from `offset` lie in the region, which `self`, the view's owner, keeps mapped;
        // guest memory is only ever handed out as `Shared` types and `SharedBytes`.
        ptr.is_aligned().then(|| unsafe { View::new(ptr, count, Arc::clone(self) as _) })
    }

    fn add(&mut self, config: &RegionConfig) -> Result<(), Error> {
        let RegionConfig { guest_phys_addr, size, user_addr, .. } = *config;
        if self.regions.len() == REGIONS_MAX {
            return Err(Error::RegionCount { count: REGIONS_MAX + 1, max: REGIONS_MAX });
        }
        check(config)?;
        // Front-end addresses may overlap: one piece of memory can appear at two guest addresses.
        let overlaps =
            |r: &&Region| guest_phys_addr < r.guest_phys_addr + r.size && r.guest_phys_addr < guest_phys_addr + size;
        if let Some(other) = self.regions.iter().find(overlaps) {
            return Err(Error::RegionOverlap { guest_phys_addr, other: other.guest_phys_addr });
        }
        let (mapping, host) = map(&config.file, config.mmap_offset, size).map_err(|why| why.of_region(config))?;
        self.regions.push(Region { guest_phys_addr, size, host, user_addr, mapping: Arc::new(mapping) });
        Ok(())
    }
}

/// Words of a file that somebody else may write, or shorten, at any moment: they stay mapped as long as this lives.
#[derive(Debug)]
pub(crate) struct FileWords {
    words: View<AtomicU64>,
    mapping: Arc<Mapping>,
}

impl FileWords {
    /// Maps `size` bytes of `file` from `offset` on, as many words as fit in there.
    ///
    /// # Errors
    /// What is wrong with the file or the numbers, or what the kernel says.
    pub(crate) fn map(file: &File, offset: u64, size: u64) -> io::Result<Self> {
        let word = size_of::<AtomicU64>() as u64;
        if !offset.is_multiple_of(word) || size < word {
            return Err(io::Error::other("it is empty, or does not begin at a multiple of 8"));
        }
        let (mapping, first) = map(file, offset, size).map_err(io::Error::other)?;
        let (mapping, count) = (Arc::new(mapping), (size / word) as usize);
        // SAFETY: aligned as `offset` is, for mappings begin with a page; `count` words lie in what was mapped, which the
        // view keeps; it is reached as atomics only.
        let words = unsafe { View::new(first.cast(), count, Arc::clone(&mapping) as _) };
        Ok(Self { words, mapping })
    }

    /// The words.
    #[inline(always)]
    pub(crate) fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    /// Whether the file was shortened; what was lost reads as zeros.
    pub(crate) fn is_broken(&self) -> bool {
        self.mapping.is_broken()
    }
}

/// Maps `len` bytes of `file` from `start` on, shared.
fn map_shared(file: &File, len: usize, start: libc::off_t) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), start) };
    let mapped = NonNull::new(base.cast::<u8>()).filter(|base| base.as_ptr().cast() != libc::MAP_FAILED);
    mapped.ok_or_else(io::Error::last_os_error)
}

impl std::fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let regions = self.regions.iter().map(|r| (r.guest_phys_addr, r.size));
        f.debug_map().entries(regions).finish()
    }
}

/// Checks a region's numbers.
fn check(config: &RegionConfig) -> Result<(), Error> {
    let RegionConfig { guest_phys_addr, size, user_addr, mmap_offset, .. } = *config;
    let invalid = |what| Error::RegionInvalid { guest_phys_addr, size, what };
    if size == 0 {
        return Err(invalid("it is empty"));
    }
    if [guest_phys_addr, size, user_addr, mmap_offset].iter().any(|n| n % PAGE != 0) {
        return Err(invalid("its addresses, size or offset are not multiples of 4096"));
    }
    if [guest_phys_addr, user_addr, mmap_offset].iter().any(|start| start.checked_add(size).is_none()) {
        return Err(invalid("it ends beyond the 64-bit address space"));
    }
    Ok(())
}

/// Why a part of a file cannot be mapped.
#[derive(Debug, thiserror::Error)]
enum Unmappable {
    #[error("not a file that can be shared: {0}")]
    NotShared(io::Error),
    #[error("it ends at byte {end} of a file of {file_size} bytes")]
    BeyondFile { end: u64, file_size: u64 },
    #[error("mapping it failed: {0}")]
    Refused(io::Error),
    #[error(transparent)]
    Unwatched(Error),
}

impl Unmappable {
    fn of_region(self, config: &RegionConfig) -> Error {
        let RegionConfig { guest_phys_addr, size, .. } = *config;
        match self {
            Self::NotShared(source) => Error::RegionNotShared { guest_phys_addr, source },
            Self::BeyondFile { end, file_size } => Error::RegionBeyondFile { guest_phys_addr, end, file_size },
            Self::Refused(source) => Error::RegionMap { guest_phys_addr, size, source },
            Self::Unwatched(error) => error,
        }
    }
}

/// Maps `size` bytes of `file` from `offset` on, if it holds as many; returns the mapping and the place of the first byte in it.
fn map(file: &File, offset: u64, size: u64) -> Result<(Mapping, NonNull<u8>), Unmappable> {
    let stat = rustix::fs::fstat(file).map_err(|e| Unmappable::NotShared(e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Unmappable::NotShared(io::Error::other("not a memfd, hugetlbfs or other regular file")));
    }
    let file_size = u64::try_from(stat.st_size).unwrap_or(0);
    let end = offset.saturating_add(size);
    if end > file_size {
        return Err(Unmappable::BeyondFile { end, file_size });
    }
    // The block size of hugetlbfs is its page size, and it maps and unmaps whole pages only.
    let page = u64::try_from(stat.st_blksize).ok().filter(|n| n.is_power_of_two() && *n > PAGE).unwrap_or(PAGE);
    let map_start = offset - offset % page;
    let too_large = || Unmappable::Refused(io::Error::from_raw_os_error(libc::ENOMEM));
    let len = (end - map_start).checked_next_multiple_of(page).ok_or_else(too_large)?;
    let len = usize::try_from(len).map_err(|_| too_large())?;
    let page = usize::try_from(page).map_err(|_| too_large())?;
    let inside = usize::try_from(offset - map_start).map_err(|_| too_large())?;
    let map_start = libc::off_t::try_from(map_start).map_err(|_| too_large())?;
    // Not populated: that would allocate a sparse guest's memory, and hold up all other connections meanwhile.
    let base = map_shared(file, len, map_start).map_err(|e| match e.raw_os_error() {
        // A read-only descriptor, or a sealed one.
        Some(libc::EACCES | libc::EPERM) => Unmappable::NotShared(e),
        _ => Unmappable::Refused(e),
    })?;
    let mut mapping = Mapping { base, len, watch: None };
    // SAFETY: advice on our own mapping; nobody wants a guest's memory in a core dump.
    unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
    // SAFETY: whole pages of a mapping that `Mapping::drop` unmaps after the watch; handed out only as shared memory.
    mapping.watch = Some(unsafe { Watch::new(base, len, page).map_err(Unmappable::Unwatched)? });
    // SAFETY: `inside + size` is at most `len`, for `map_start + inside + size` is `end`.
    Ok((mapping, unsafe { base.add(inside) }))
}
