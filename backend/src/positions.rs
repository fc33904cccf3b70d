//! Where packed rings stand, in a file that outlives the process (`--state-dir`).
//!
//! A split ring's position can be read off the ring, a packed one's cannot, and a front-end whose backend was killed may not
//! know it: QEMU says 0 then. So each packed ring keeps a record in a file that is mapped and shared, which the kernel has as
//! soon as it is stored: nothing is written or synced, and SIGKILL loses nothing. It does not outlive the machine, nor do guests.
//!
//! A record holds two places: where the completions begin that a burst makes known, and where they end, stored before the first of
//! them is. Which of the two is right, the first descriptor tells: still available, or used.
//!
//! ```text
//! word 0, 1        magic and version, number of records
//! record (8 words) descriptor area, size, check of these two (0: void), the two places as halves of a vring base
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tracing::warn;

use crate::error::Error;
use crate::inflight::RegionRecord;
use crate::memory::FileWords;

/// First word of the file; the last byte is the version.
const MAGIC: u64 = u64::from_be_bytes(*b"twinrng\x01");
/// Words before the first record.
const HEADER: usize = 8;
/// Words of a record: a cache line, for each ring's worker stores to its own.
const RECORD: usize = 8;
/// Longest name of a file, in bytes.
const NAME_MAX: usize = 255;

const DESC: usize = 0;
const SIZE: usize = 1;
const CHECK: usize = 2;
const PLACES: usize = 3;

/// The records of one device's rings. The file stays locked as long as this lives.
#[derive(Debug)]
pub struct Positions {
    words: Arc<FileWords>,
    _file: File,
}

impl Positions {
    /// Opens the records of the device at `socket` in the directory `dir`, for `rings` rings, or begins them.
    ///
    /// # Errors
    /// [`Error::State`] if the file cannot be had, for instance because another daemon has it.
    pub fn open(dir: &Path, socket: &Path, rings: u16) -> Result<Self, Error> {
        let path = dir.join(file_name(socket));
        let failed = |step| {
            let path = path.clone();
            move |source: io::Error| Error::State { path, step, source }
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        // Nobody else may lock it; nor may somebody who can write in the directory have us truncate another file.
        options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(&path).map_err(failed("opening it"))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|errno| match errno {
            Errno::WOULDBLOCK => failed("locking it")(io::Error::other("another process is using it")),
            errno => failed("locking it")(errno.into()),
        })?;
        let count = HEADER + RECORD * usize::from(rings);
        let len = (count * size_of::<u64>()) as u64;
        let found = file.metadata().map_err(failed("looking at it"))?.len();
        if found != len {
            if found > 0 {
                ignore(&path);
            }
            file.set_len(0).and_then(|()| file.set_len(len)).map_err(failed("giving it its length"))?;
        }
        let mapped = FileWords::map(&file, 0, len).map_err(failed("mapping it"))?;
        let words = mapped.words();
        if [MAGIC, rings.into()] != [words[0].load(Ordering::Relaxed), words[1].load(Ordering::Relaxed)] {
            if found == len {
                ignore(&path);
            }
            for word in &words[HEADER..] {
                word.store(0, Ordering::Relaxed);
            }
            words[0].store(MAGIC, Ordering::Relaxed);
            words[1].store(rings.into(), Ordering::Relaxed);
        }
        Ok(Self { words: Arc::new(mapped), _file: file })
    }

    /// The record of ring `index`, if there is such a ring.
    #[must_use]
    pub fn record(&self, index: u16) -> Option<FileRecord> {
        let at = HEADER + RECORD * usize::from(index);
        (at < self.words.words().len()).then(|| FileRecord { words: Arc::clone(&self.words), at })
    }
}

fn ignore(path: &Path) {
    warn!("{}: not the positions of this device's rings, and begun anew", path.display());
}

/// The socket's path as the name of a file: percent signs and slashes are written as in an address of the web.
fn file_name(socket: &Path) -> PathBuf {
    // However it is written, and from wherever.
    let socket = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    let mut name = socket.to_string_lossy().replace('%', "%25").replace('/', "%2F");
    while name.len() > NAME_MAX {
        // The end tells more.
        name.remove(0);
    }
    name.into()
}

/// Where a ring's position is kept for a process that comes after a killed one.
#[derive(Clone, Debug)]
pub enum Record {
    /// In our own file: packed rings only.
    File(FileRecord),
    /// In the front-end's inflight region.
    Region(RegionRecord),
}

impl Record {
    /// The two places that an earlier process left of the packed ring of `size` at `desc`, an address of the front-end's, which
    /// says the vring base `base`: halves of a base, where its last burst of completions began and ended. None if there are none
    /// that count.
    #[must_use]
    pub fn find(&self, desc: u64, size: u16, base: u32) -> Option<(u32, u32)> {
        match self {
            // 0 is what front-ends say that do not know.
            Self::File(record) => {
                if base == 0 {
                    record.find(desc, size)
                } else {
                    None
                }
            }
            // It was voided when the front-end was last told a position, so it is newer than what that may know.
            Self::Region(record) => record.find(),
        }
    }

    /// Begins the record of a packed ring that is at rest at `place`, a half of a vring base.
    pub fn begin(&self, desc: u64, size: u16, place: u32) {
        match self {
            Self::File(record) => record.begin(desc, size, place),
            Self::Region(record) => record.begin(place),
        }
    }

    /// Completions of a packed ring are about to be made known from `from` on, up to, not including, `to`.
    #[inline(always)]
    pub fn leave(&self, from: u32, to: u32) {
        match self {
            Self::File(record) => record.leave(from, to),
            Self::Region(record) => record.leave(from, to),
        }
    }
}

/// One ring's record in the file.
#[derive(Clone, Debug)]
pub struct FileRecord {
    words: Arc<FileWords>,
    at: usize,
}

impl FileRecord {
    fn word(&self, which: usize) -> &AtomicU64 {
        &self.words.words()[self.at + which]
    }

    /// The two places that an earlier process left, as halves of a vring base: where its last burst of completions began and
    /// ended. None if it left none, or those of another ring than the one of `size` at `desc`, an address of the front-end's.
    #[must_use]
    pub fn find(&self, desc: u64, size: u16) -> Option<(u32, u32)> {
        let [found_desc, found_size, found_check] = [DESC, SIZE, CHECK].map(|i| self.word(i).load(Ordering::Relaxed));
        let same = (desc, size.into(), check(desc, size)) == (found_desc, found_size, found_check);
        if !same && found_check != 0 {
            warn!("the position on record is that of another ring, and ignored");
        }
        let places = self.word(PLACES).load(Ordering::Relaxed);
        same.then_some((places as u32 & 0xffff, (places >> 16) as u32 & 0xffff))
    }

    /// Begins the record of a ring that is at rest at `place`.
    pub fn begin(&self, desc: u64, size: u16, place: u32) {
        self.forget();
        self.word(DESC).store(desc, Ordering::Relaxed);
        self.word(SIZE).store(size.into(), Ordering::Relaxed);
        self.leave(place, place);
        // Release: whoever finds a record finds all of it, wherever this process ends.
        self.word(CHECK).store(check(desc, size), Ordering::Release);
    }

    /// Completions are about to be made known from `from` on, up to, not including, `to`.
    #[inline(always)]
    pub fn leave(&self, from: u32, to: u32) {
        // Relaxed: the next process reads it when this one has ended; the release of the first completion's flags comes behind.
        self.word(PLACES).store(u64::from(from) | u64::from(to) << 16, Ordering::Relaxed);
    }

    /// The front-end knows the position by now, or there is none any more.
    pub fn forget(&self) {
        self.word(CHECK).store(0, Ordering::Release);
    }
}

/// Tells a record from whatever else may stand in a file; never 0.
fn check(desc: u64, size: u16) -> u64 {
    // Two odd constants from SplitMix64: any changed bit changes about half of them.
    let mixed = (desc ^ u64::from(size).wrapping_mul(0xbf58_476d_1ce4_e5b9)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ mixed >> 31) | 1
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use vmm_sys_util::tempdir::TempDir;

    use super::*;

    const SOCKET: &str = "/run/a%b/s";

    fn open(dir: &TempDir) -> Result<Positions, Error> {
        Positions::open(dir.as_path(), Path::new(SOCKET), 4)
    }

    fn file(dir: &TempDir) -> PathBuf {
        dir.as_path().join("%2Frun%2Fa%25b%2Fs")
    }

    #[test]
    fn a_record_outlives_its_process_and_belongs_to_one_ring() {
        let dir = TempDir::new().unwrap();
        let positions = open(&dir).unwrap();
        let record = positions.record(3).unwrap();
        assert!(positions.record(4).is_none());
        assert_eq!(record.find(0x1000, 256), None);
        record.begin(0x1000, 256, 0x8000);
        record.leave(0x8000, 0x8020);
        assert!(open(&dir).unwrap_err().to_string().contains("another process is using it"));
        drop((record, positions));

        let positions = open(&dir).unwrap();
        let record = positions.record(3).unwrap();
        assert_eq!(record.find(0x1000, 256), Some((0x8000, 0x8020)));
        assert_eq!((record.find(0x2000, 256), record.find(0x1000, 128)), (None, None));
        assert_eq!(positions.record(2).unwrap().find(0x1000, 256), None);
        record.forget();
        assert_eq!(record.find(0x1000, 256), None);
    }

    #[test]
    fn foreign_files_are_begun_anew() {
        let dir = TempDir::new().unwrap();
        let len = (HEADER + 4 * RECORD) * 8;
        for content in [vec![0x5a; len], vec![0; len], vec![0x5a; 7], vec![0x5a; len + 8]] {
            fs::write(file(&dir), &content).unwrap();
            let positions = open(&dir).unwrap();
            for index in 0..4 {
                assert_eq!(positions.record(index).unwrap().find(0x5a5a_5a5a_5a5a_5a5a, 0x5a5a), None);
            }
            positions.record(0).unwrap().begin(1, 2, 3);
            drop(positions);
            assert_eq!(open(&dir).unwrap().record(0).unwrap().find(1, 2), Some((3, 3)));
        }
        // As many rings as before, or nothing is known.
        let other = Positions::open(dir.as_path(), Path::new(SOCKET), 2).unwrap();
        assert_eq!(other.record(0).unwrap().find(1, 2), None);
    }

    #[test]
    fn the_file_is_ours_alone_and_a_link_is_not_followed() {
        let dir = TempDir::new().unwrap();
        drop(open(&dir).unwrap());
        assert_eq!(fs::metadata(file(&dir)).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_file(file(&dir)).unwrap();
        let other = dir.as_path().join("other");
        fs::write(&other, "of somebody else").unwrap();
        symlink(&other, file(&dir)).unwrap();
        let error = open(&dir).unwrap_err().to_string();
        assert!(error.contains("opening it failed"), "{error}");
        assert_eq!(fs::read(&other).unwrap(), b"of somebody else");
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = Positions::open(Path::new("/nonexistent"), Path::new("/s"), 2).unwrap_err();
        assert!(error.to_string().starts_with("/nonexistent/%2Fs: opening it failed: "), "{error}");
    }
}
