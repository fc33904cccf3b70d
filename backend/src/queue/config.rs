//! What a session knows of a ring at the moment it starts: plain data, handed over by value.
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use pmd::shared::{Circle, Shared, View};
use pmd::virtio::spec::{Desc, RING_SIZE_MAX, UsedElem, avail, feature, used};
use rustix::fs::{FileType, OFlags};
use rustix::io::FdFlags;

use crate::error::Error;
use crate::memory::GuestMemory;
use crate::positions::Record;

/// The three parts of a ring (virtio 1.3, 2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    /// Descriptor table (split, 2.7.5) or descriptor ring (packed, 2.8.1).
    Desc,
    /// Driver area: available ring (2.7.6) or driver event suppression (2.8.10).
    Driver,
    /// Device area: used ring (2.7.8) or device event suppression (2.8.10).
    Device,
}

impl fmt::Display for Area {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Area::Desc => "descriptor area",
            Area::Driver => "driver area (avail ring)",
            Area::Device => "device area (used ring)",
        })
    }
}

/// A ring that is ready to run: its size, its place in guest memory, and where in it to go on.
#[derive(Clone, Debug)]
pub struct QueueConfig {
    /// Ring index: even rings take frames `to_guest`, odd ones bring them `from_guest` (virtio 1.3, 5.1.2).
    pub index: u16,
    /// Number of descriptors.
    pub size: u16,
    /// Negotiated virtio features, without the transport's `PROTOCOL_FEATURES` bit.
    pub features: u64,
    /// The memory table in force; the queue keeps it mapped.
    pub memory: Arc<GuestMemory>,
    /// [`Area::Desc`], as an address of the front-end's address space.
    pub desc_user_addr: u64,
    /// [`Area::Driver`], likewise.
    pub avail_user_addr: u64,
    /// [`Area::Device`], likewise.
    pub used_user_addr: u64,
    /// The vring base, all 32 bits (vhost-user, "Vring state descriptor"): split: next avail index, unless the ring's used
    /// index says otherwise; packed: bits 0-15 avail index and wrap counter, bits 16-31 used index and wrap counter.
    pub position: u32,
    /// Where the guest notifies us. Never waited for, because the backend polls.
    pub kick: Option<Arc<Notifier>>,
    /// Where to notify the guest; `None` if it polls.
    pub call: Option<Arc<Notifier>>,
    /// Where the ring leaves its position for a process that comes after; `None` if that is not wanted.
    pub record: Option<Record>,
}

impl QueueConfig {
    /// Whether the ring is packed (virtio 1.3, 2.8).
    #[must_use]
    pub fn is_packed(&self) -> bool {
        self.features & feature::RING_PACKED != 0
    }

    /// `count` words of type `T`, from byte `offset` of one part of the ring.
    ///
    /// # Errors
    /// [`Error::RingArea`] if they do not lie aligned in one memory region.
    pub fn view<T: Shared>(&self, area: Area, offset: u64, count: usize) -> Result<View<T>, Error> {
        let user_addr = match area {
            Area::Desc => self.desc_user_addr,
            Area::Driver => self.avail_user_addr,
            Area::Device => self.used_user_addr,
        };
        user_addr.checked_add(offset).and_then(|addr| self.memory.view(addr, count)).ok_or(Error::RingArea {
            index: self.index,
            area,
            user_addr,
        })
    }

    /// As [`view`](Self::view), one value for each descriptor of a split ring.
    ///
    /// # Errors
    /// [`Error::RingArea`], and [`Error::RingSize`] if the size is no power of two.
    pub fn circle<T: Shared>(&self, area: Area, offset: u64) -> Result<Circle<T>, Error> {
        let view = self.view(area, offset, self.size.into())?;
        Circle::new(view).ok_or(Error::RingSize { index: self.index.into(), size: self.size.into() })
    }

    /// Checks the size: 1 to 32768, a power of two if split (virtio 1.3, 2.7; 2.8).
    ///
    /// # Errors
    /// [`Error::RingSize`].
    pub fn check_size(&self) -> Result<(), Error> {
        let fits = (1..=RING_SIZE_MAX).contains(&self.size) && (self.is_packed() || self.size.is_power_of_two());
        if fits { Ok(()) } else { Err(Error::RingSize { index: self.index.into(), size: self.size.into() }) }
    }

    /// Checks that all three parts lie, whole and aligned, in guest memory (virtio 1.3, 2.7 and 2.8 for sizes and
    /// alignments).
    ///
    /// # Errors
    /// [`Error::RingArea`].
    pub fn check_areas(&self) -> Result<(), Error> {
        self.view::<Desc>(Area::Desc, 0, self.size.into())?;
        if self.is_packed() {
            self.view::<AtomicU32>(Area::Driver, 0, 1)?;
            self.view::<AtomicU32>(Area::Device, 0, 1)?;
        } else {
            self.view::<AtomicU16>(Area::Driver, 0, avail::words(self.size))?;
            self.view::<AtomicU16>(Area::Device, 0, used::bytes(self.size) / 2)?;
            self.view::<UsedElem>(Area::Device, used::RING as u64, self.size.into())?;
        }
        Ok(())
    }
}

/// Where a running ring leaves its position, as [`QueueConfig::position`], when it is dropped: whoever stops a ring
/// reads there what `GET_VRING_BASE` has to answer, and running costs nothing.
#[derive(Clone, Debug, Default)]
pub struct Position(Arc<AtomicU32>);

impl Position {
    /// The position that was left; 0 while the ring lives.
    #[must_use]
    pub fn get(&self) -> u32 {
        // Acquire pairs with the Release in `leave`; usually the same thread has just dropped the ring.
        self.0.load(Ordering::Acquire)
    }

    pub(super) fn leave(&self, position: u32) {
        self.0.store(position, Ordering::Release);
    }
}

/// An eventfd that the front-end gave us for kicks or calls.
#[derive(Debug)]
pub struct Notifier(OwnedFd);

impl Notifier {
    /// Takes over `file`, if it is something like an eventfd, and makes it non-blocking: a peer may fill its counter,
    /// and a worker that signals it must not wait.
    ///
    /// # Errors
    /// If it is a file, pipe, socket or device, or the kernel refuses.
    pub fn new(file: File) -> io::Result<Self> {
        // An eventfd is an anonymous inode, the one kind without a file type. The others of that kind refuse an
        // 8-byte write.
        if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Unknown {
            return Err(io::Error::other("not an eventfd"));
        }
        // It came through a receive without MSG_CMSG_CLOEXEC, the `vhost` crate's.
        rustix::io::fcntl_setfd(&file, FdFlags::CLOEXEC)?;
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags | OFlags::NONBLOCK)?;
        Ok(Self(file.into()))
    }

    /// Notifies the other side. A failure needs no action: the counter is full, so it has been notified already.
    pub fn signal(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}
