//! The packet path takes no lock, not even one that nobody holds: `packet_path.rs` would see a system call, but a free lock makes
//! none. So the files of the path may not name any. Two files also hold control-plane code and name theirs here; that the packet
//! path gets along while these are held is tested beside them.

use std::path::{Path, PathBuf};

/// The packet path: files, and folders with all that is in them.
const PATHS: [&str; 17] = [
    "pmd/src/rx.rs",
    "pmd/src/tx.rs",
    "pmd/src/shared.rs",
    "pmd/src/mbuf",
    "pmd/src/mempool",
    "pmd/src/port/queue.rs",
    "pmd/src/port/burst.rs",
    "pmd/src/port/stats.rs",
    "pmd/src/virtio/ring.rs",
    "pmd/src/virtio/event.rs",
    "pmd/src/virtio/spec.rs",
    "pmd/src/virtio/receive.rs",
    "pmd/src/virtio/transmit.rs",
    "pmd/src/virtio/split.rs",
    "pmd/src/virtio/packed.rs",
    "backend/src/burst.rs",
    "backend/src/queue",
];
/// What waits, or can.
const LOCKS: [&str; 10] =
    ["Mutex", "RwLock", "Condvar", "Once::", "OnceLock", "LazyLock", "Barrier", "mpsc", "parking_lot", "pthread"];
/// Lines with locks of the control plane, by file: the list of pools, and the name of a slot's path.
const EXCEPTIONS: [(&str, &[&str]); 2] = [
    (
        "pmd/src/mempool/mod.rs",
        &[
            "use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};",
            "static REGISTRY: Mutex<Registry> = Mutex::new(Registry { live: Vec::new(), orphans: Vec::new() });",
            "fn lock() -> MutexGuard<'static, Self> {",
        ],
    ),
    (
        "pmd/src/port/queue.rs",
        &["use std::sync::{Arc, Mutex, PoisonError};", "path: Mutex<Option<&'static str>>,", "path: Mutex::new(None),"],
    ),
];

/// The Rust files at `path`, without tests.
fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = std::fs::read_dir(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let entries = entries.map(|entry| entry.unwrap().path());
    entries.filter(|path| path.file_stem().is_none_or(|name| name != "tests")).flat_map(|path| sources(&path)).collect()
}

#[test]
fn no_file_of_the_packet_path_names_a_lock() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut unused: Vec<(&str, &str)> =
        EXCEPTIONS.iter().flat_map(|(file, lines)| lines.iter().map(move |line| (*file, *line))).collect();
    for path in PATHS {
        for file in sources(&root.join(path)) {
            let name = file.strip_prefix(root).unwrap().to_str().unwrap();
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            for line in code.lines().map(str::trim) {
                if line.starts_with("//") || !LOCKS.iter().any(|lock| line.contains(lock)) {
                    continue;
                }
                let known = unused.iter().position(|&exception| exception == (name, line));
                unused.remove(known.unwrap_or_else(|| panic!("{name} is on the packet path and has a lock: {line}")));
            }
        }
    }
    assert!(unused.is_empty(), "exceptions that are none any more: {unused:?}");
}
