//! Guest memory: what is accepted, what is refused, and what happens when the peer takes it away.
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use backend::error::Error;
use backend::memory::{GuestMemory, REGIONS_MAX, RegionConfig};
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

const PAGE: u64 = 4096;
const HUGE: u64 = 2 << 20;
/// Where the test front-end pretends to have its memory, relative to guest addresses.
const USER: u64 = 0x7f00_0000_0000;

fn memfd(size: u64, flags: MemfdFlags) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC | flags).unwrap());
    file.set_len(size).unwrap();
    file
}

fn region(guest_phys_addr: u64, size: u64, mmap_offset: u64, file: &File) -> RegionConfig {
    let file = file.try_clone().unwrap();
    RegionConfig { guest_phys_addr, size, user_addr: USER + guest_phys_addr, mmap_offset, file }
}

#[test]
fn addresses_of_an_unsorted_table_reach_the_right_bytes() {
    let file = memfd(8 * PAGE, MemfdFlags::empty());
    let memory = GuestMemory::new(&[
        region(0x10_0000, 2 * PAGE, 4 * PAGE, &file),
        region(0x2000, PAGE, 0, &file),
        region(0x3000, PAGE, PAGE, &file),
    ])
    .unwrap();
    let mut window = memory.window(7);
    for (gpa, offset) in [(0x2000, 0), (0x3010, PAGE + 0x10), (0x10_0000, 4 * PAGE), (0x10_1ff8, 6 * PAGE - 8)] {
        let bytes = memory.translate(gpa, 8, &mut window).unwrap();
        assert_eq!((bytes.len(), bytes.write(&gpa.to_le_bytes())), (8, 8));
        let mut seen = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, offset).unwrap();
        assert_eq!(u64::from_le_bytes(seen), gpa, "written to the wrong place of the file");
    }
    for outside in [0, 0x1fff, 0x4000, 0x10_2000, u64::MAX] {
        assert!(memory.translate(outside, 1, &mut window).is_none(), "{outside:#x} is in no region");
    }
}

#[test]
fn a_translation_stops_where_the_region_ends() {
    let file = memfd(2 * PAGE, MemfdFlags::empty());
    let memory = GuestMemory::new(&[region(0, PAGE, 0, &file), region(PAGE, PAGE, PAGE, &file)]).unwrap();
    assert_eq!(memory.bytes(PAGE - 10, 100).unwrap().len(), 10);
    assert_eq!(memory.bytes(PAGE, 90).unwrap().len(), 90);
    assert_eq!(memory.bytes(0, u32::MAX).unwrap().len(), 4096);
}

#[test]
fn a_view_is_aligned_and_inside_one_region() {
    let file = memfd(2 * PAGE, MemfdFlags::empty());
    let memory = GuestMemory::new(&[region(0, PAGE, 0, &file), region(PAGE, PAGE, PAGE, &file)]).unwrap();
    let view = memory.view::<AtomicU64>(USER + 8, 2).unwrap();
    view[1].store(0x0102_0304, Ordering::Relaxed);
    assert_eq!(memory.view::<AtomicU16>(USER + 18, 1).unwrap()[0].load(Ordering::Relaxed), 0x0102);
    assert_eq!(memory.view::<AtomicU64>(USER, 512).unwrap().len(), 512);
    assert!(memory.view::<AtomicU64>(USER + 4, 1).is_none(), "not aligned");
    assert!(memory.view::<AtomicU64>(USER + 8, 512).is_none(), "crosses two regions");
    assert!(memory.view::<AtomicU64>(USER - 8, 1).is_none(), "below the first region");
    assert!(memory.view::<AtomicU64>(USER, usize::MAX / 4).is_none(), "longer than any memory");
}

#[test]
fn impossible_regions_are_refused_by_name() {
    let file = memfd(4 * PAGE, MemfdFlags::empty());
    let refusal = |config: RegionConfig| GuestMemory::new(&[config]).unwrap_err();
    assert!(matches!(refusal(region(0, 0, 0, &file)), Error::RegionInvalid { what: "it is empty", .. }));
    assert!(matches!(refusal(region(0, PAGE + 1, 0, &file)), Error::RegionInvalid { .. }));
    assert!(matches!(refusal(region(1, PAGE, 0, &file)), Error::RegionInvalid { .. }));
    assert!(matches!(refusal(region(0, PAGE, 512, &file)), Error::RegionInvalid { .. }));
    assert!(matches!(refusal(region(0, u64::MAX - PAGE + 1, PAGE, &file)), Error::RegionInvalid { .. }));
    assert!(matches!(refusal(region(0, 4 * PAGE, PAGE, &file)), Error::RegionBeyondFile { file_size: 16384, .. }));

    let (reader, _writer) = std::io::pipe().unwrap();
    let pipe = File::from(std::os::fd::OwnedFd::from(reader));
    let error = refusal(region(0, PAGE, 0, &pipe)).to_string();
    assert!(error.contains("share=on"), "{error}");
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let error = refusal(region(0, PAGE, 0, &File::open(path).unwrap())).to_string();
    assert!(error.contains("share=on"), "a read-only file: {error}");
}

#[test]
fn overlapping_or_too_many_regions_are_refused() {
    let file = memfd(64 * PAGE, MemfdFlags::empty());
    for (start, pages) in [(8, 4), (9, 1), (7, 2), (11, 2), (4, 16)] {
        let configs = [region(8 * PAGE, 4 * PAGE, 0, &file), region(start * PAGE, pages * PAGE, 0, &file)];
        assert!(matches!(GuestMemory::new(&configs).unwrap_err(), Error::RegionOverlap { other: 0x8000, .. }));
    }
    let many: Vec<_> = (0..=REGIONS_MAX as u64).map(|i| region(i * PAGE, PAGE, 0, &file)).collect();
    assert!(GuestMemory::new(&many[..REGIONS_MAX]).is_ok());
    assert!(matches!(GuestMemory::new(&many).unwrap_err(), Error::RegionCount { .. }));
}

#[test]
fn regions_come_and_go_one_by_one() {
    let file = memfd(2 * PAGE, MemfdFlags::empty());
    let first = GuestMemory::default().with(&region(0, PAGE, 0, &file)).unwrap();
    first.bytes(0, 1).unwrap().write(&[9]);
    let both = first.with(&region(PAGE, PAGE, PAGE, &file)).unwrap();
    drop(first);
    let mut byte = [0];
    both.bytes(0, 1).unwrap().read(&mut byte);
    assert_eq!(byte, [9], "the first region is still the same memory");
    assert!(matches!(both.without(0, USER, 2 * PAGE).unwrap_err(), Error::RegionUnknown { .. }));
    let second = both.without(0, USER, PAGE).unwrap();
    assert_eq!(second.region_count(), 1);
    assert!(second.bytes(0, 1).is_none());
    assert!(second.bytes(PAGE, 1).is_some());
}

/// Shortens the file under one memory while another lives, and looks at both.
fn truncated_memory_reads_as_zeros(page: u64, flags: MemfdFlags) {
    let (file, other_file) = (memfd(4 * page, flags), memfd(PAGE, MemfdFlags::empty()));
    let memory = GuestMemory::new(&[region(0, 4 * page, 0, &file)]).unwrap();
    let other = GuestMemory::new(&[region(0, PAGE, 0, &other_file)]).unwrap();
    let byte = |memory: &GuestMemory, gpa| {
        let mut byte = [0xee];
        memory.bytes(gpa, 1).unwrap().read(&mut byte);
        byte[0]
    };
    for i in 0..4 {
        memory.bytes(i * page + 100, 1).unwrap().write(&[7]);
    }
    file.set_len(page).unwrap();
    assert!(!memory.is_broken(), "nobody has touched it yet");
    assert_eq!(byte(&memory, 2 * page + 100), 0);
    assert!(memory.is_broken());
    assert_eq!((byte(&memory, 100), byte(&memory, page + 100), byte(&memory, 3 * page + 100)), (7, 0, 0));
    memory.bytes(3 * page, 4).unwrap().write(&[1, 2, 3, 4]);
    assert_eq!(byte(&memory, 3 * page + 3), 4, "what replaces the pages can be written");
    assert!(!other.is_broken(), "somebody else's memory");
}

#[test]
fn a_peer_that_shortens_its_file_breaks_its_own_memory_only() {
    truncated_memory_reads_as_zeros(PAGE, MemfdFlags::empty());
}

/// Needs 5 free pages of 2 MiB: `testbed/check` reserves them, or says that it could not run this.
#[test]
fn on_huge_pages_a_peer_that_shortens_its_file_breaks_its_own_memory_only() {
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    truncated_memory_reads_as_zeros(HUGE, flags);
    // A region in the middle of a huge page: mapped from the page's start, unmapped whole.
    let file = memfd(2 * HUGE, flags);
    let memory = GuestMemory::new(&[region(0, HUGE / 2, HUGE + PAGE, &file)]).unwrap();
    memory.bytes(0, 3).unwrap().write(b"abc");
    let direct = MmapRegion::<()>::from_file(FileOffset::new(file, 0), 4 << 20).unwrap();
    let mut seen = [0; 3];
    let at = usize::try_from(HUGE + PAGE).unwrap();
    direct.get_slice(at, 3).unwrap().read_slice(&mut seen, 0).unwrap();
    assert_eq!(&seen, b"abc");
}

#[test]
fn a_sigbus_that_is_not_ours_still_kills() {
    const CHILD: &str = "TWINRING_TEST_FOREIGN_SIGBUS";
    if std::env::var_os(CHILD).is_none() {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "a_sigbus_that_is_not_ours_still_kills", "--nocapture"]).env(CHILD, "1");
        assert_eq!(child.output().unwrap().status.signal(), Some(libc::SIGBUS));
        return;
    }
    // In the child: the handler is installed, because there is guest memory; but the fault is in a mapping of another
    // kind.
    let file = memfd(PAGE, MemfdFlags::empty());
    let _memory = GuestMemory::new(&[region(0, PAGE, 0, &file)]).unwrap();
    let foreign = memfd(PAGE, MemfdFlags::empty());
    let mapping = MmapRegion::<()>::from_file(FileOffset::new(foreign.try_clone().unwrap(), 0), 4096).unwrap();
    foreign.set_len(0).unwrap();
    let mut byte = [0];
    mapping.get_slice(0, 1).unwrap().read_slice(&mut byte, 0).unwrap();
}
