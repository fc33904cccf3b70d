//! Both ends of a ring in one process, without sockets: guest memory, a ring in it, the driver's end and the device's end.
//!
//! A [`Pair`] is made through the path tables, so that whatever a row of them makes is tested. [`Traffic`] sends frames that
//! know who they are through a pair and judges what arrives. A [`RawRing`] is the same ring without any logic: for peers that
//! a test plays itself.

mod direction;
mod raw;
mod raw_packed;
mod traffic;

use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;

use backend::memory::{GuestMemory, RegionConfig};
use backend::queue::config::{Notifier, Position, QueueConfig};
use backend::queue::paths::{FromGuestParts, ToGuestParts, from_guest, to_guest};
pub use direction::Direction;
use pmd::mbuf::{MbufPool, MbufPoolConfig, ROOM_DEFAULT};
use pmd::mem::{Arena, Pages};
use pmd::path::select;
use pmd::port::{QueueStats, RxBurst, Stats, TxBurst};
use pmd::shared::SharedBytes;
use pmd::virtio::Doorbell;
use pmd::virtio::paths::{RX_PATHS, RxParts, TX_PATHS, TxParts};
use pmd::virtio::receive::RxParams;
use pmd::virtio::ring::Layout;
use pmd::virtio::spec::{feature, header_len};
use pmd::virtio::transmit::TxParams;
pub use raw::{Link, RawRing};
pub use raw_packed::{PackedChain, PackedEvent, RawPackedRing};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
pub use traffic::{Traffic, bytes_of, packet};

/// The port number of mbufs that the driver received.
pub const GUEST_PORT: u16 = 1;
/// The port number of mbufs that the device received.
pub const HOST_PORT: u16 = 2;
/// The vring base of a fresh packed ring: both places 0, both wrap counters 1 (vhost-user, "Vring state description").
pub const PACKED_BASE: u32 = 0x8000_8000;
/// Arenas and regions consist of these.
const PAGE: usize = 4096;

/// Why there is no pair.
#[derive(Debug, thiserror::Error)]
pub enum RingsError {
    /// No memory for it.
    #[error(transparent)]
    Memory(#[from] pmd::mem::MemError),
    /// No pool.
    #[error(transparent)]
    Pool(#[from] pmd::mempool::PoolError),
    /// No path of the driver fits.
    #[error(transparent)]
    Path(#[from] pmd::path::PathError),
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] backend::error::Error),
    /// The kernel refuses.
    #[error("a descriptor for the pair: {0}")]
    System(#[from] std::io::Error),
}

/// What a pair is to be.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Negotiated features.
    pub features: u64,
    /// Descriptors.
    pub size: u16,
    /// Descriptors that the driver uses.
    pub limit: u16,
    /// See [`pmd::port::RxQueueConfig::free_thresh`] and its namesake for transmit.
    pub free_thresh: u16,
    /// The guest's pool.
    pub guest: MbufPoolConfig,
    /// The host's pool.
    pub host: MbufPoolConfig,
    /// Bytes of guest memory left over, for a test that writes its own buffers.
    pub scratch: usize,
    /// Number of regions that the guest's memory consists of; all but the first begin somewhere behind the ring.
    pub regions: usize,
}

impl Setup {
    /// A pair with `features`, a ring of 256 and plenty of mbufs.
    #[must_use]
    pub fn new(features: u64) -> Self {
        let pool =
            |name: &str| MbufPoolConfig { name: name.into(), count: 1024, cache_size: 64, ..MbufPoolConfig::default() };
        let (guest, host) = (pool("guest"), pool("host"));
        Self { features, size: 256, limit: 256, free_thresh: 32, guest, host, scratch: 0, regions: 1 }
    }

    /// With a ring of `size` descriptors, `limit` of which the driver uses.
    #[must_use]
    pub fn ring(self, size: u16, limit: u16) -> Self {
        // Both thresholds have to leave the ring a chance to fill.
        let free_thresh = if limit < 8 { (limit / 4).max(1) } else { self.free_thresh.min(limit / 8 * 4) };
        Self { size, limit, free_thresh, ..self }
    }

    /// With data rooms for `guest` and `host` bytes of a frame.
    #[must_use]
    pub fn rooms(mut self, guest: u16, host: u16) -> Self {
        let headroom = ROOM_DEFAULT - 2048;
        (self.guest.room, self.host.room) = (guest + headroom, host + headroom);
        self
    }

    /// The host's pool.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn host_pool(&self) -> Result<MbufPool, RingsError> {
        Ok(MbufPool::new(&self.host, &Arena::new(self.host.arena_bytes(), &Pages::Plain)?)?)
    }
}

/// A guest's memory: the ring, what the driver keeps beside it, and the data rooms of its pool.
pub struct Guest {
    setup: Setup,
    arena: Arc<Arena>,
    layout: Layout,
    memory: Arc<GuestMemory>,
    /// The guest's mbufs.
    pub pool: MbufPool,
}

/// One end of a ring.
pub struct End<Q: ?Sized> {
    /// The queue.
    pub queue: Box<Q>,
    /// The path it runs on.
    pub path: &'static str,
    /// Its counters.
    pub stats: Arc<QueueStats>,
    /// Where it wakes the other end.
    pub bell: Bell,
}

impl<Q: ?Sized> End<Q> {
    /// Its counters' present values.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats.snapshot()
    }
}

/// An eventfd by which one end of a ring wakes the other.
#[derive(Debug)]
pub struct Bell(File);

impl Bell {
    fn new() -> Result<Self, RingsError> {
        Ok(Self(File::from(eventfd(0, EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?)))
    }

    /// Wake-ups since the last call of this.
    #[must_use]
    pub fn take(&self) -> u64 {
        let (mut eventfd, mut count) = (&self.0, [0; 8]);
        // Non-blocking: an error says that there was none.
        eventfd.read_exact(&mut count).map_or(0, |()| u64::from_ne_bytes(count))
    }

    /// Sleeps until there is a wake-up, and takes it; false if none comes in time.
    #[must_use]
    pub fn wait(&self, timeout_ms_max: u16) -> bool {
        let (sec, ms) = (timeout_ms_max / 1000, timeout_ms_max % 1000);
        let timeout = Timespec { tv_sec: sec.into(), tv_nsec: i64::from(ms) * 1_000_000 };
        let ready = poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&timeout));
        ready.is_ok_and(|ready| ready > 0) && self.take() > 0
    }
}

/// A driver's end of a [`Bell`].
struct Kick(File);

impl Doorbell for Kick {
    fn ring(&self) {
        // Fails only if the counter is full: then the device has been woken.
        let _ = (&self.0).write(&1_u64.to_ne_bytes());
    }
}

impl Guest {
    /// Memory for a guest that is set up as `setup` says.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn new(setup: &Setup) -> Result<Self, RingsError> {
        // Per descriptor: itself, its ring entries, and the transmit end's indirect table.
        let ring_bytes = usize::from(setup.size) * 160 + PAGE;
        let arena = Arena::new(ring_bytes + setup.guest.arena_bytes() + setup.scratch + PAGE, &Pages::Plain)?;
        // First, so that it lies in the first region.
        let layout = Layout::new(&arena, setup.size, setup.features)?;
        let pool = MbufPool::new(&setup.guest, &arena)?;
        let memory = GuestMemory::new(&regions(&arena, ring_bytes.next_multiple_of(PAGE), setup.regions)?)?;
        Ok(Self { setup: setup.clone(), arena, layout, memory, pool })
    }

    /// The same memory with a fresh ring, as after a reset; both old ends have been dropped.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn reset(self) -> Result<Self, RingsError> {
        let Self { setup, arena, layout, memory, pool } = self;
        drop(layout);
        let layout = Layout::new(&arena, setup.size, setup.features)?;
        Ok(Self { setup, arena, layout, memory, pool })
    }

    /// The driver's receive end.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn driver_rx(&self) -> Result<End<dyn RxBurst>, RingsError> {
        let row = select(RX_PATHS, self.setup.features, None)?;
        let (stats, bell) = (QueueStats::new(), Bell::new()?);
        let queue = (row.make)(RxParts {
            layout: &self.layout,
            params: RxParams {
                limit: self.setup.limit,
                header_len: header_len(self.setup.features) as u16,
                room: self.pool.room(),
                port: GUEST_PORT,
            },
            doorbell: Box::new(Kick(bell.0.try_clone()?)),
            pool: self.pool.clone(),
            free_thresh: self.setup.free_thresh,
            stats: Arc::clone(&stats),
        });
        Ok(End { queue, path: row.name, stats, bell })
    }

    /// The driver's transmit end.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn driver_tx(&self) -> Result<End<dyn TxBurst>, RingsError> {
        let row = select(TX_PATHS, self.setup.features, None)?;
        let (stats, bell) = (QueueStats::new(), Bell::new()?);
        let queue = (row.make)(TxParts {
            layout: &self.layout,
            params: TxParams {
                limit: self.setup.limit,
                header_len: header_len(self.setup.features) as u16,
                indirect: self.setup.features & feature::INDIRECT_DESC != 0,
            },
            doorbell: Box::new(Kick(bell.0.try_clone()?)),
            arena: &self.arena,
            free_thresh: self.setup.free_thresh,
            stats: Arc::clone(&stats),
        })?;
        Ok(End { queue, path: row.name, stats, bell })
    }

    /// The device's end of the guest's receive ring, from `position` on.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn device_to_guest(&self, position: &Position) -> Result<End<dyn TxBurst>, RingsError> {
        self.device_to_guest_at(self.base(position), position)
    }

    /// The device's end of the guest's receive ring, from vring base `base` on; its position ends up in `position`.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn device_to_guest_at(&self, base: u32, position: &Position) -> Result<End<dyn TxBurst>, RingsError> {
        let (config, bell) = self.config(0, base)?;
        let stats = QueueStats::new();
        let parts = ToGuestParts { config, position: position.clone(), stats: Arc::clone(&stats) };
        let (path, queue) = to_guest(parts)?;
        Ok(End { queue, path, stats, bell })
    }

    /// The device's end of the guest's transmit ring, from `position` on; frames are copied into mbufs of `pool`.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn device_from_guest(&self, position: &Position, pool: &MbufPool) -> Result<End<dyn RxBurst>, RingsError> {
        self.device_from_guest_at(self.base(position), position, pool)
    }

    /// The device's end of the guest's transmit ring, from vring base `base` on; its position ends up in `position`.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn device_from_guest_at(
        &self,
        base: u32,
        position: &Position,
        pool: &MbufPool,
    ) -> Result<End<dyn RxBurst>, RingsError> {
        let (config, bell) = self.config(1, base)?;
        let stats = QueueStats::new();
        let (position, pool) = (position.clone(), pool.clone());
        let parts = FromGuestParts { config, position, pool, port: HOST_PORT, stats: Arc::clone(&stats) };
        let (path, queue) = from_guest(parts)?;
        Ok(End { queue, path, stats, bell })
    }

    /// The ring without any logic.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn raw(&self) -> Result<RawRing, RingsError> {
        Ok(RawRing::new(&self.config(0, 0)?.0)?)
    }

    /// The packed ring without any logic.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn raw_packed(&self) -> Result<RawPackedRing, RingsError> {
        Ok(RawPackedRing::new(&self.config(0, 0)?.0)?)
    }

    /// The vring base of `position`, which is a fresh ring's if it is 0: packed rings begin with both wrap counters set. Tests
    /// that stop a packed ring where its position is 0 name the base.
    fn base(&self, position: &Position) -> u32 {
        let packed = self.setup.features & feature::RING_PACKED != 0;
        if packed && position.get() == 0 { PACKED_BASE } else { position.get() }
    }

    fn config(&self, index: u16, position: u32) -> Result<(QueueConfig, Bell), RingsError> {
        let bell = Bell::new()?;
        let call = Notifier::new(bell.0.try_clone()?)?;
        let config = QueueConfig {
            index,
            size: self.setup.size,
            features: self.setup.features,
            memory: Arc::clone(&self.memory),
            desc_user_addr: self.layout.desc,
            avail_user_addr: self.layout.avail,
            used_user_addr: self.layout.used,
            position,
            kick: None,
            call: Some(Arc::new(call)),
            record: None,
        };
        Ok((config, bell))
    }

    /// The ring's areas, for a test that drives a ring step by step.
    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The features that its ring is for.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.setup.features
    }

    /// Its memory.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// `len` bytes at `addr`, if they lie in one region.
    #[must_use]
    pub fn bytes(&self, addr: u64, len: u32) -> Option<SharedBytes<'_>> {
        self.memory.bytes(addr, len).filter(|bytes| bytes.len() == len as usize)
    }

    /// The arena that its memory is.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

/// `arena` as so many regions, the first of which holds at least the `ring_bytes` at its start. Guest-physical and front-end
/// addresses are both IOVAs.
fn regions(arena: &Arena, ring_bytes: usize, count: usize) -> Result<Vec<RegionConfig>, RingsError> {
    let rest = arena.size() - ring_bytes;
    let step = (rest / count.max(1)).next_multiple_of(PAGE);
    let mut starts: Vec<usize> =
        (1..count).map(|i| ring_bytes + i * step).filter(|&start| start < arena.size()).collect();
    starts.insert(0, 0);
    let ends = starts.iter().skip(1).copied().chain([arena.size()]);
    let region = |(start, end): (usize, usize)| {
        let addr = arena.iova() + start as u64;
        Ok(RegionConfig {
            guest_phys_addr: addr,
            size: (end - start) as u64,
            user_addr: addr,
            mmap_offset: start as u64,
            file: File::from(arena.fd().try_clone_to_owned()?),
        })
    };
    starts.iter().copied().zip(ends).map(region).collect()
}

/// A ring with both its ends.
pub struct Pair {
    /// Which way it carries frames.
    pub direction: Direction,
    /// The guest.
    pub guest: Guest,
    /// The end that frames go into.
    pub sender: End<dyn TxBurst>,
    /// The end that they come out of.
    pub receiver: End<dyn RxBurst>,
    /// Where the device's end leaves its position.
    pub position: Position,
    /// The host's mbufs.
    pub host: MbufPool,
}

impl Pair {
    /// A pair set up as `setup` says.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn new(direction: Direction, setup: &Setup) -> Result<Self, RingsError> {
        Self::with(direction, Guest::new(setup)?, setup.host_pool()?)
    }

    /// A pair in `guest`'s memory, whose device has mbufs of `host`.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn with(direction: Direction, guest: Guest, host: MbufPool) -> Result<Self, RingsError> {
        let position = Position::default();
        let (sender, receiver) = match direction {
            Direction::ToGuest => {
                let receiver = guest.driver_rx()?;
                (guest.device_to_guest(&position)?, receiver)
            }
            Direction::FromGuest => (guest.driver_tx()?, guest.device_from_guest(&position, &host)?),
        };
        Ok(Self { direction, guest, sender, receiver, position, host })
    }

    /// The pool of the end that sends.
    #[must_use]
    pub fn sender_pool(&self) -> &MbufPool {
        match self.direction {
            Direction::ToGuest => &self.host,
            Direction::FromGuest => &self.guest.pool,
        }
    }

    /// Ends both queues; returns how many mbufs are not home then.
    #[must_use]
    pub fn stop(self) -> usize {
        let Pair { guest, sender, receiver, host, .. } = self;
        drop((sender, receiver));
        guest.pool.mempool().in_use() + host.mempool().in_use()
    }
}

impl std::fmt::Display for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Setup { features, size, limit, .. } = &self.guest.setup;
        let (direction, from, to) = (self.direction, self.sender.path, self.receiver.path);
        write!(f, "{direction:?}: {from} to {to}, features {features:#x}, ring {size} of which {limit}")
    }
}
