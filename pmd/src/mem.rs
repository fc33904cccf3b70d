//! Arenas: memory that a device or another process may reach, one file descriptor each.
//!
//! Only data rooms and descriptor rings live in an arena; mbuf headers, mempools and software rings stay in private memory.
//! Wherever an address leaves this process it leaves as an *IOVA*, which is never one of our virtual addresses: see
//! [`Arena::iova`].
#![expect(unsafe_code, reason = "maps files, and hands out the mapped bytes")]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::shared::{Circle, Shared, SharedBytes, View};

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;
const GIB: usize = 1024 * MIB;

/// Which pages an arena is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// 2 MiB pages if enough are free, else plain ones (see [`Arena::advice`]).
    #[default]
    Auto,
    /// 1 GiB huge pages, or an error.
    Huge1G,
    /// 2 MiB huge pages, or an error.
    Huge2M,
    /// Pages of the hugetlbfs mounted at this directory, or an error.
    Hugetlbfs(PathBuf),
    /// Ordinary pages.
    Plain,
}

/// Why there is no arena, or no room in it.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// The kernel refused.
    #[error("memory arena of {mib} MiB on {pages}: {step} failed: {source}; {remedy}")]
    Refused {
        /// Size asked for, in MiB.
        mib: usize,
        /// The kind of page.
        pages: String,
        /// The call that failed.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// More than the machine has.
    #[error("memory arena of {mib} MiB: only {available_mib} MiB are available; ask for fewer or smaller mbufs")]
    TooLittle {
        /// Size asked for, in MiB.
        mib: usize,
        /// What `/proc/meminfo` calls available, in MiB.
        available_mib: usize,
    },
    /// The arena is full.
    #[error("{len} bytes do not fit into the arena: {free} of its {size} bytes are free; make the arena larger")]
    Full {
        /// Bytes asked for.
        len: usize,
        /// Bytes free (not necessarily in one piece).
        free: usize,
        /// The arena's size.
        size: usize,
    },
}

/// Memory shared with a device: mapped once, populated, of fixed size, never moved, gone with the last user.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    len: usize,
    page: usize,
    iova: u64,
    fd: OwnedFd,
    /// Free ranges `(offset, len)`, sorted, never adjacent.
    holes: Mutex<Vec<(usize, usize)>>,
}

// SAFETY: the mapping is plain memory that belongs to the arena; who uses which part is settled by `Span`s.
unsafe impl Send for Arena {}
// SAFETY: as above; `holes` is behind a lock.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps and populates at least `len` bytes.
    ///
    /// # Errors
    /// [`MemError`] if the pages cannot be had.
    pub fn new(len: usize, pages: &Pages) -> Result<Arc<Self>, MemError> {
        match pages {
            Pages::Plain => Self::memfd(len, 4 * KIB, 0),
            Pages::Huge2M => Self::memfd(len, 2 * MIB, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB),
            Pages::Huge1G => Self::memfd(len, GIB, libc::MFD_HUGETLB | libc::MFD_HUGE_1GB),
            Pages::Hugetlbfs(dir) => Self::hugetlbfs(len, dir),
            Pages::Auto => Self::new(len, &Pages::Huge2M).or_else(|_| Self::new(len, &Pages::Plain)),
        }
    }

    fn memfd(len: usize, page: usize, flags: libc::c_uint) -> Result<Arc<Self>, MemError> {
        let kind = if flags == 0 { "plain pages".to_owned() } else { format!("{} MiB huge pages", page / MIB) };
        let name = CString::from(c"twinring");
        // SAFETY: `name` is a C string; the call has no other precondition.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | flags) };
        if fd < 0 {
            return Err(refused(len, &kind, "memfd_create", io::Error::last_os_error()));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let arena = Self::map(len, page, &kind, fd)?;
        // The peer gets this descriptor, and may not shorten the file under us (that would be SIGBUS for everybody).
        // SAFETY: plain fcntl on our own descriptor.
        let sealed = unsafe {
            libc::fcntl(
                arena.fd.as_raw_fd(),
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
            )
        };
        if sealed < 0 {
            return Err(refused(len, &kind, "sealing", io::Error::last_os_error()));
        }
        Ok(Arc::new(arena))
    }

    fn hugetlbfs(len: usize, dir: &PathBuf) -> Result<Arc<Self>, MemError> {
        let kind = format!("hugetlbfs {}", dir.display());
        let refused = |step, e| refused(len, &kind, step, e);
        // O_TMPFILE: the file never has a name, so a crash leaves nothing behind.
        let file = File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).open(dir);
        let fd = OwnedFd::from(file.map_err(|e| refused("opening a file there", e))?);
        // SAFETY: `statfs` is plain old data that fstatfs fills.
        let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
        // SAFETY: `fs` is a live statfs.
        if unsafe { libc::fstatfs(fd.as_raw_fd(), &raw mut fs) } < 0 {
            return Err(refused("fstatfs", io::Error::last_os_error()));
        }
        if fs.f_type != libc::HUGETLBFS_MAGIC {
            return Err(refused("opening a file there", io::Error::other("not a hugetlbfs mount")));
        }
        let page = usize::try_from(fs.f_bsize).unwrap_or(2 * MIB);
        Self::map(len, page, &kind, fd).map(Arc::new)
    }

    fn map(len: usize, page: usize, kind: &str, fd: OwnedFd) -> Result<Self, MemError> {
        let len = len.max(1).next_multiple_of(page);
        if page == 4 * KIB
            && let Some(available) = available_bytes()
            && len > available
        {
            return Err(MemError::TooLittle { mib: len / MIB, available_mib: available / MIB });
        }
        let refused = |step| Err(refused(len, kind, step, io::Error::last_os_error()));
        let Ok(size) = libc::off_t::try_from(len) else { return refused("sizing the file") };
        // SAFETY: plain call on our own descriptor.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), size) } < 0 {
            return refused("sizing the file");
        }
        // Huge pages are reserved by mmap itself, so that running out is an error here and not SIGBUS later.
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return refused("mmap");
        }
        let Some(base) = NonNull::new(base.cast::<u8>()) else { return refused("mmap") };
        // SAFETY: advice on our own mapping; a core dump without the data rooms is wanted.
        unsafe { libc::madvise(base.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
        Ok(Self { base, len, page, iova: next_iova(len), fd, holes: Mutex::new(vec![(0, len)]) })
    }

    /// The file behind the arena, to be handed to the peer or mapped for a device. It cannot be resized.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Size in bytes, a multiple of the page size.
    #[must_use]
    pub fn size(&self) -> usize {
        self.len
    }

    /// Page size in bytes.
    #[must_use]
    pub fn page_size(&self) -> usize {
        self.page
    }

    /// The I/O virtual address of the arena's first byte: what the peer calls guest-physical address, what an IOMMU maps.
    ///
    /// Arenas of one process never overlap in IOVA space.
    #[must_use]
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// One line on what plain pages cost and how to get huge ones, if this arena had to fall back.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        (self.page == 4 * KIB).then(|| {
            let pages = self.len.div_ceil(2 * MIB);
            format!(
                "no free huge pages: using 4 KiB pages, which cost TLB misses (a few per cent of the rate); to get huge pages: echo {} | sudo tee /proc/sys/vm/nr_hugepages",
                2 * pages + 64
            )
        })
    }

    /// `len` zeroed bytes, aligned to `align` (a power of two, at most the page size), until the span is dropped.
    ///
    /// # Errors
    /// [`MemError::Full`].
    pub fn alloc(self: &Arc<Self>, len: usize, align: usize) -> Result<Span, MemError> {
        debug_assert!(align.is_power_of_two() && align <= self.page);
        let mut holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        for i in 0..holes.len() {
            let (start, size) = holes[i];
            let offset = start.next_multiple_of(align);
            let Some(rest) = (start + size).checked_sub(offset).and_then(|room| room.checked_sub(len)) else {
                continue;
            };
            let mut left = [(start, offset - start), (offset + len, rest)].into_iter().filter(|hole| hole.1 > 0);
            match left.next() {
                Some(hole) => holes[i] = hole,
                None => drop(holes.remove(i)),
            }
            if let Some(hole) = left.next() {
                holes.insert(i + 1, hole);
            }
            // SAFETY: the range is inside the mapping and was free until now, so nobody else uses it.
            unsafe { std::ptr::write_bytes(self.base.add(offset).as_ptr(), 0, len) };
            return Ok(Span { arena: Arc::clone(self), offset, len });
        }
        Err(MemError::Full { len, free: holes.iter().map(|hole| hole.1).sum(), size: self.len })
    }

    fn release(&self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let mut holes = self.holes.lock().unwrap_or_else(PoisonError::into_inner);
        let at = holes.partition_point(|hole| hole.0 < offset);
        holes.insert(at, (offset, len));
        if at + 1 < holes.len() && holes[at].0 + holes[at].1 == holes[at + 1].0 {
            holes[at].1 += holes.remove(at + 1).1;
        }
        if at > 0 && holes[at - 1].0 + holes[at - 1].1 == holes[at].0 {
            holes[at - 1].1 += holes.remove(at).1;
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: our own mapping; every `Span` and `View` of it holds an `Arc` of the arena, so there is none left.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A part of an arena, given back when dropped.
#[derive(Debug)]
pub struct Span {
    arena: Arc<Arena>,
    offset: usize,
    len: usize,
}

impl Span {
    /// Length in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.len
    }

    /// The arena it is part of.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// The device's address of byte `offset`.
    #[must_use]
    pub fn iova(&self, offset: usize) -> u64 {
        self.arena.iova + (self.offset + offset) as u64
    }

    /// Our own address of byte `offset`.
    ///
    /// # Panics
    /// If `offset` lies outside.
    #[must_use]
    pub fn addr(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.len, "offset {offset} of a span of {} bytes", self.len);
        // SAFETY: inside the arena's mapping, as `alloc` made it.
        unsafe { self.arena.base.add(self.offset + offset) }
    }

    /// `len` bytes from `offset`, as bytes the device may write at any time.
    ///
    /// # Panics
    /// If they lie outside.
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> SharedBytes<'_> {
        assert!(offset <= self.len && len <= self.len - offset, "bytes {offset}+{len} of a span of {}", self.len);
        // SAFETY: inside the span, which stays mapped while borrowed; only `Shared` views and bytes are ever made of it.
        unsafe { SharedBytes::new(self.addr(offset).as_ptr(), len) }
    }
}

/// `count` shared words of type `T` from byte `offset` of `span`, which the view keeps alive.
///
/// # Panics
/// If they lie outside, or are not aligned: sizes and offsets come from our own layout, not from a peer.
#[must_use]
pub fn view<T: Shared>(span: &Arc<Span>, offset: usize, count: usize) -> View<T> {
    assert!(offset <= span.len && count * size_of::<T>() <= span.len - offset, "view outside its span");
    let ptr = span.addr(offset).cast::<T>();
    assert!(ptr.is_aligned(), "view not aligned");
    // SAFETY: aligned, inside the span, which the view's owner keeps allocated and mapped; `T` is `Shared`.
    unsafe { View::new(ptr, count, Arc::clone(span) as _) }
}

/// As [`view`], for what is indexed round and round.
///
/// # Panics
/// As [`view`], and if `count` is not a power of two.
#[must_use]
pub fn circle<T: Shared>(span: &Arc<Span>, offset: usize, count: u16) -> Circle<T> {
    Circle::new(view(span, offset, count.into())).expect("a split ring has a power of two of descriptors")
}

impl Drop for Span {
    fn drop(&mut self) {
        self.arena.release(self.offset, self.len);
    }
}

/// Hands out IOVA ranges: from 4 GiB up, in steps of 1 GiB, so that no IOVA is by chance a small number or one of our virtual
/// addresses.
fn next_iova(len: usize) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(4 * GIB as u64);
    NEXT.fetch_add(len.next_multiple_of(GIB) as u64, Ordering::Relaxed)
}

fn refused(len: usize, pages: &str, step: &'static str, source: io::Error) -> MemError {
    let remedy = match source.raw_os_error() {
        Some(libc::ENOMEM | libc::ENODEV) => "reserve huge pages (/proc/sys/vm/nr_hugepages) or use plain pages",
        Some(libc::EACCES | libc::EPERM) => "run as a user who may use huge pages, or use plain pages",
        _ => "choose other pages",
    };
    MemError::Refused { mib: len / MIB, pages: pages.to_owned(), step, source, remedy }
}

/// `MemAvailable` in bytes, where the kernel tells.
fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().trim_end_matches(" kB").trim().parse::<usize>().ok()? * KIB)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn spans_come_back_and_coalesce() {
        let arena = Arena::new(64 * KIB, &Pages::Plain).unwrap();
        let a = arena.alloc(100, 64).unwrap();
        let b = arena.alloc(100, 64).unwrap();
        let c = arena.alloc(1000, 4096).unwrap();
        assert_eq!((a.iova(0), b.iova(0), c.iova(0)), (arena.iova(), arena.iova() + 128, arena.iova() + 4096));
        drop(b);
        drop(a);
        drop(c);
        assert_eq!(*arena.holes.lock().unwrap(), [(0, 64 * KIB)]);
        assert!(matches!(arena.alloc(64 * KIB + 1, 1), Err(MemError::Full { .. })));
    }

    #[test]
    fn a_reused_span_is_zero_again() {
        let arena = Arena::new(4 * KIB, &Pages::Plain).unwrap();
        let span = Arc::new(arena.alloc(64, 64).unwrap());
        view::<AtomicU32>(&span, 0, 16)[3].store(7, Ordering::Relaxed);
        drop(span);
        let span = Arc::new(arena.alloc(64, 64).unwrap());
        assert_eq!(view::<AtomicU32>(&span, 0, 16)[3].load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_peer_cannot_shorten_the_file() {
        let arena = Arena::new(4 * KIB, &Pages::Plain).unwrap();
        let file = File::from(arena.fd().try_clone_to_owned().unwrap());
        assert!(file.set_len(0).is_err());
    }

    #[test]
    fn too_much_memory_is_an_error_with_the_figure() {
        let error = Arena::new(1 << 46, &Pages::Plain).unwrap_err();
        assert!(matches!(error, MemError::TooLittle { .. }), "{error}");
    }
}
