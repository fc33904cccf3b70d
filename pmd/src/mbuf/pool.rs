//! Pools of mbufs: headers in private memory, data rooms in an arena.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use super::raw::{PORT_NONE, ROOM_DEFAULT, RawMbuf};
use super::{HEADROOM, Mbuf};
use crate::mem::{Arena, Span};
use crate::mempool::ring::Sync as RingSync;
use crate::mempool::{Exhausted, Mempool, PoolConfig, PoolError};

/// Objects handled at a time by loops over bulks.
pub(super) const CHUNK: usize = 64;

/// What a pool of mbufs is to be.
#[derive(Clone, Debug)]
pub struct MbufPoolConfig {
    /// For messages and statistics.
    pub name: String,
    /// Number of mbufs.
    pub count: u32,
    /// Mbufs in each worker's cache; at least twice the burst is wise.
    pub cache_size: usize,
    /// Bytes of each data room, headroom included: 192..=65535.
    pub room: u16,
    /// Bytes of application data kept beside each header.
    pub priv_size: u16,
    /// Who puts into the shared ring.
    pub put: RingSync,
    /// Who gets from the shared ring.
    pub get: RingSync,
}

impl Default for MbufPoolConfig {
    fn default() -> Self {
        Self {
            name: "mbufs".into(),
            count: 8192,
            cache_size: 256,
            room: ROOM_DEFAULT,
            priv_size: 0,
            put: RingSync::Multi,
            get: RingSync::Multi,
        }
    }
}

impl MbufPoolConfig {
    /// Bytes from one data room to the next: an odd number of cache lines, so that the rooms' first lines spread over all sets
    /// of a cache instead of falling on the same few.
    fn room_stride(&self) -> usize {
        (usize::from(self.room).div_ceil(64) | 1) * 64
    }

    /// Bytes the pool takes from its arena.
    #[must_use]
    pub fn arena_bytes(&self) -> usize {
        self.count as usize * self.room_stride()
    }
}

/// A pool of mbufs. Cloning gives another handle to the same pool.
#[derive(Clone, Debug)]
pub struct MbufPool {
    pool: Mempool,
    arena: Arc<Arena>,
    room: u16,
}

impl MbufPool {
    /// Makes the pool and its data rooms.
    ///
    /// # Errors
    /// [`PoolError`]: a number out of range, no memory, or an arena too small (see [`MbufPoolConfig::arena_bytes`]).
    pub fn new(config: &MbufPoolConfig, arena: &Arc<Arena>) -> Result<Self, PoolError> {
        let room_min = HEADROOM + 64;
        if config.room < room_min {
            let (value, min) = (usize::from(config.room), usize::from(room_min));
            let name = config.name.clone();
            return Err(PoolError::Range { name, what: "data room", value, min, max: usize::from(u16::MAX) });
        }
        let stride = config.room_stride();
        let rooms: Arc<Span> = Arc::new(arena.alloc(config.arena_bytes(), 64)?);
        let pool_config = PoolConfig {
            name: config.name.clone(),
            count: config.count,
            object_size: size_of::<RawMbuf>() + usize::from(config.priv_size),
            cache_size: config.cache_size,
            put: config.put,
            get: config.get,
        };
        let pool = Mempool::with_backing(&pool_config, Some(Arc::clone(&rooms)), |_, _| ())?;
        for i in 0..config.count as usize {
            let (addr, iova) = (rooms.addr(i * stride).as_ptr(), rooms.iova(i * stride));
            let raw = RawMbuf::at_home(pool.core(), addr, iova, config.room, config.priv_size);
            // SAFETY: an object of at least 128 bytes, aligned to a cache line; the pool has not been handed out yet.
            unsafe { pool.core().object(i).cast().write(raw) };
        }
        Ok(Self { pool, arena: Arc::clone(arena), room: config.room })
    }

    /// The mempool below.
    #[must_use]
    pub fn mempool(&self) -> &Mempool {
        &self.pool
    }

    /// The arena in which the data rooms lie.
    #[must_use]
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// Bytes of each data room, headroom included.
    #[must_use]
    pub fn room(&self) -> u16 {
        self.room
    }

    /// Whether `mbuf`'s header belongs to this pool.
    #[inline(always)]
    #[must_use]
    pub fn owns(&self, mbuf: &Mbuf) -> bool {
        std::ptr::eq(mbuf.raw().pool, self.pool.core())
    }

    /// An empty packet.
    #[inline]
    #[must_use]
    pub fn alloc(&self) -> Option<Mbuf> {
        let mut mbuf = self.raw_alloc()?;
        mbuf.reset();
        Some(mbuf)
    }

    /// An mbuf as its last user left it: of the fields only those of the pool's invariant (one reference, one segment, own data
    /// room) are known. For callers that set the rest themselves.
    #[inline]
    #[must_use]
    pub fn raw_alloc(&self) -> Option<Mbuf> {
        let mut out = [MaybeUninit::uninit()];
        // SAFETY: a successful get initialises `out` with a header of ours.
        self.pool.get_bulk(&mut out).ok().map(|()| Mbuf(unsafe { out[0].assume_init() }.cast()))
    }

    /// `N` mbufs, as [`raw_alloc`](Self::raw_alloc) gives them, or none.
    #[inline(always)]
    #[must_use]
    pub fn raw_alloc_array<const N: usize>(&self) -> Option<[Mbuf; N]> {
        let mut out = [const { MaybeUninit::<NonNull<u8>>::uninit() }; N];
        self.pool.get_bulk(&mut out).ok()?;
        // SAFETY: a successful get initialised all of `out` with headers of ours.
        Some(out.map(|object| Mbuf(unsafe { object.assume_init() }.cast())))
    }

    /// Appends `count` empty packets to `out`: all of them, or none.
    ///
    /// # Errors
    /// [`Exhausted`]; `out` is as before.
    #[inline]
    pub fn alloc_bulk(&self, out: &mut Vec<Mbuf>, count: usize) -> Result<(), Exhausted> {
        let start = out.len();
        self.raw_alloc_bulk(out, count)?;
        out[start..].iter_mut().for_each(Mbuf::reset);
        Ok(())
    }

    /// Appends `count` mbufs to `out`, as [`raw_alloc`](Self::raw_alloc) gives them: all of them, or none.
    ///
    /// # Errors
    /// [`Exhausted`]; `out` is as before.
    #[inline(always)]
    pub fn raw_alloc_bulk(&self, out: &mut Vec<Mbuf>, count: usize) -> Result<(), Exhausted> {
        out.reserve(count);
        let spare = &mut out.spare_capacity_mut()[..count];
        // SAFETY: `Mbuf` is a transparent address of a header, and headers are the objects of this pool.
        let spare = unsafe { &mut *(std::ptr::from_mut(spare) as *mut [MaybeUninit<NonNull<u8>>]) };
        self.pool.get_bulk(spare)?;
        // SAFETY: a successful get initialised `count` entries behind the present length.
        unsafe { out.set_len(out.len() + count) };
        Ok(())
    }
}

impl Mbuf {
    /// Makes it an empty packet: lengths, flags and port as new, headroom restored.
    ///
    /// Offload lengths and the like count only while `ol_flags` says so, hence line 0 is enough.
    #[inline(always)]
    pub fn reset(&mut self) {
        let headroom = HEADROOM.min(self.raw().buf_len.get());
        self.receive(headroom, PORT_NONE, 0);
    }
}
