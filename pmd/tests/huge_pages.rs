//! Arenas on huge pages, and without. Tests named `on_huge_pages_...` need free pages of 2 MiB, `on_hugetlbfs_...` also root, and
//! `on_1g_pages_...` a free page of 1 GiB: `testbed/check` reserves them or says that it could not run them.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use pmd::mem::{Arena, Pages};

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// Tells a child where its hugetlbfs is mounted, and whether it is the one to be killed.
const MOUNT: &str = "TWINRING_HUGETLBFS";
const VICTIM: &str = "TWINRING_HUGETLBFS_VICTIM";

/// A number that the kernel keeps about pages of so many kB.
fn pages(kb: usize, what: &str) -> usize {
    let file = format!("/sys/kernel/mm/hugepages/hugepages-{kb}kB/{what}");
    std::fs::read_to_string(file).map_or(0, |text| text.trim().parse().unwrap())
}

#[test]
fn on_huge_pages_an_arena_needs_no_advice() {
    let arena = Arena::new(3 * MIB, &Pages::Auto).unwrap();
    assert_eq!((arena.page_size(), arena.size(), arena.advice()), (2 * MIB, 4 * MIB, None));
}

#[test]
fn on_1g_pages_an_arena_is_whole_pages() {
    let arena = Arena::new(1, &Pages::Huge1G).unwrap();
    assert_eq!((arena.page_size(), arena.size(), arena.advice()), (GIB, GIB, None));
    arena.alloc(2 * MIB, GIB).unwrap().bytes(0, 4).write(&[1; 4]);
}

#[test]
fn more_huge_pages_than_there_are_is_an_error_with_a_remedy() {
    for (kind, kb, size) in [(Pages::Huge2M, 2048, 2 * MIB), (Pages::Huge1G, 1 << 20, GIB)] {
        let len = (pages(kb, "nr_hugepages") + pages(kb, "nr_overcommit_hugepages") + 1) * size;
        let said = Arena::new(len, &kind).unwrap_err().to_string();
        let start = format!("memory arena of {} MiB on {} MiB huge pages: ", len / MIB, size / MIB);
        assert!(said.starts_with(&start), "{said}");
        assert!(said.ends_with("; reserve huge pages (/proc/sys/vm/nr_hugepages) or use plain pages"), "{said}");
    }
}

#[test]
fn without_enough_huge_pages_an_arena_falls_back_and_says_so() {
    let len = (pages(2048, "nr_hugepages") + pages(2048, "nr_overcommit_hugepages") + 1) * 2 * MIB;
    let arena = Arena::new(len, &Pages::Auto).unwrap();
    assert_eq!(arena.page_size(), 4096);
    let advice = arena.advice().unwrap();
    assert!(advice.starts_with("no free huge pages: ") && advice.contains("/proc/sys/vm/nr_hugepages"), "{advice}");
}

#[test]
fn a_directory_that_is_no_hugetlbfs_is_refused() {
    let said = Arena::new(1, &Pages::Hugetlbfs("/dev/shm".into())).unwrap_err().to_string();
    assert!(said.contains("hugetlbfs /dev/shm: opening a file there failed: not a hugetlbfs mount; "), "{said}");
}

#[test]
fn on_hugetlbfs_nothing_is_left_of_a_killed_process() {
    let this = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", "on_hugetlbfs_nothing_is_left_of_a_killed_process"]);
        command
    };
    let Some(mount) = std::env::var_os(MOUNT) else {
        // A mount of our own, of four pages, in a mount namespace that goes with the child.
        let dir = std::env::temp_dir().join(format!("twinring-hugetlbfs-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let script = r#"mount -t hugetlbfs -o pagesize=2M,size=8M none "$1" && shift && exec "$@""#;
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(&dir);
        let status = command.arg(this().get_program()).args(this().get_args()).env(MOUNT, &dir).status();
        std::fs::remove_dir(&dir).unwrap();
        assert!(status.unwrap().success(), "see above");
        return;
    };
    let mount = Path::new(&mount);
    if std::env::var_os(VICTIM).is_some() {
        let arena = Arena::new(6 * MIB, &Pages::Hugetlbfs(mount.into())).unwrap();
        assert_eq!((arena.page_size(), arena.size()), (2 * MIB, 6 * MIB));
        assert!(Arena::new(4 * MIB, &Pages::Hugetlbfs(mount.into())).is_err(), "three of four pages are taken");
        let killed = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
        unreachable!("a killed process goes on: {killed:?}");
    }
    let status = this().env(VICTIM, "1").status().unwrap();
    assert_eq!(status.signal(), Some(9), "{status}");
    assert_eq!(std::fs::read_dir(mount).unwrap().count(), 0, "a file is left");
    let all = Arena::new(8 * MIB, &Pages::Hugetlbfs(mount.into()));
    assert!(all.is_ok(), "pages are left in use: {}", all.unwrap_err());
}
