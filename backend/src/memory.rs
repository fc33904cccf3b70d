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
        self.regions.iter().any(|region| region.mapping.watch.as_ref().is_some_and(Watch::is_broken))
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
        // SAFETY: `offset + len` is at most the region's size, all of which is mapped behind `host` (`map`) while `self` lives.
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
        let file_end = check(config)?;
        // Front-end addresses may overlap: one piece of memory can appear at two guest addresses.
        let overlaps =
            |r: &&Region| guest_phys_addr < r.guest_phys_addr + r.size && r.guest_phys_addr < guest_phys_addr + size;
        if let Some(other) = self.regions.iter().find(overlaps) {
            return Err(Error::RegionOverlap { guest_phys_addr, other: other.guest_phys_addr });
        }
        let (mapping, host) = map(config, file_end)?;
        self.regions.push(Region { guest_phys_addr, size, host, user_addr, mapping: Arc::new(mapping) });
        Ok(())
    }
}

/// `count` words of a file of our own, which holds at least as many. They stay mapped as long as the view.
///
/// # Errors
/// [`Error::System`] if the kernel refuses, [`Error::MappingCount`].
pub(crate) fn file_words(file: &File, count: usize) -> Result<View<AtomicU64>, Error> {
    let page = PAGE as usize;
    let len = (count * size_of::<AtomicU64>()).next_multiple_of(page);
    let failed = |source| Error::System { step: "mapping the file of ring positions", source };
    let base = map_shared(file, len, 0).map_err(failed)?;
    let mut mapping = Mapping { base, len, watch: None };
    // SAFETY: whole pages of a mapping that `Mapping::drop` unmaps after the watch; reached as atomics only.
    mapping.watch = Some(unsafe { Watch::new(base, len, page)? });
    // SAFETY: page-aligned; `count` words lie in the mapping, which the view keeps; nothing else refers to them.
    Ok(unsafe { View::new(base.cast(), count, Arc::new(mapping)) })
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

/// Checks a region's numbers; returns the offset of its end in the file.
fn check(config: &RegionConfig) -> Result<u64, Error> {
    let RegionConfig { guest_phys_addr, size, user_addr, mmap_offset, .. } = *config;
    let invalid = |what| Error::RegionInvalid { guest_phys_addr, size, what };
    if size == 0 {
        return Err(invalid("it is empty"));
    }
    if [guest_phys_addr, size, user_addr, mmap_offset].iter().any(|n| n % PAGE != 0) {
        return Err(invalid("its addresses, size or offset are not multiples of 4096"));
    }
    let ends = [guest_phys_addr, user_addr, mmap_offset].map(|start| start.checked_add(size));
    let [Some(_), Some(_), Some(file_end)] = ends else {
        return Err(invalid("it ends beyond the 64-bit address space"));
    };
    Ok(file_end)
}

/// Maps a checked region; returns the mapping and the place of the region's first byte in it.
fn map(config: &RegionConfig, file_end: u64) -> Result<(Mapping, NonNull<u8>), Error> {
    let RegionConfig { guest_phys_addr, size, mmap_offset, ref file, .. } = *config;
    let not_shared = |source| Error::RegionNotShared { guest_phys_addr, source };
    let stat = rustix::fs::fstat(file).map_err(|e| not_shared(e.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(not_shared(io::Error::other("not a memfd, hugetlbfs or other regular file")));
    }
    let file_size = u64::try_from(stat.st_size).unwrap_or(0);
    if file_end > file_size {
        return Err(Error::RegionBeyondFile { guest_phys_addr, end: file_end, file_size });
    }
    // The block size of hugetlbfs is its page size, and it maps and unmaps whole pages only.
    let page = u64::try_from(stat.st_blksize).ok().filter(|n| n.is_power_of_two() && *n > PAGE).unwrap_or(PAGE);
    let map_start = mmap_offset - mmap_offset % page;
    let refused = |source| Error::RegionMap { guest_phys_addr, size, source };
    let too_large = || refused(io::Error::from_raw_os_error(libc::ENOMEM));
    let len = (file_end - map_start).checked_next_multiple_of(page).ok_or_else(too_large)?;
    let len = usize::try_from(len).map_err(|_| too_large())?;
    let page = usize::try_from(page).map_err(|_| too_large())?;
    let inside = usize::try_from(mmap_offset - map_start).map_err(|_| too_large())?;
    let map_start = libc::off_t::try_from(map_start).map_err(|_| too_large())?;
    // Not populated: that would allocate a sparse guest's memory, and hold up all other connections meanwhile.
    let base = map_shared(file, len, map_start).map_err(|e| match e.raw_os_error() {
        // A read-only descriptor, or a sealed one.
        Some(libc::EACCES | libc::EPERM) => not_shared(e),
        _ => refused(e),
    })?;
    let mut mapping = Mapping { base, len, watch: None };
    // SAFETY: advice on our own mapping; nobody wants a guest's memory in a core dump.
    unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
    // SAFETY: whole pages of a mapping that `Mapping::drop` unmaps after the watch; handed out only as shared memory.
    mapping.watch = Some(unsafe { Watch::new(base, len, page)? });
    // SAFETY: `inside + size` is at most `len`, for `map_start + inside + size` is `file_end`.
    Ok((mapping, unsafe { base.add(inside) }))
}
