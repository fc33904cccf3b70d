//! Mempools: equal objects, a shared ring of them, and a cache per worker.
//!
//! Objects come and go in bulk, all or nothing. The cache belongs to the *worker* (see [`Worker`]), not to a queue, so what a
//! transmit queue frees feeds what a receive queue allocates on the same core while it is still warm. The cache arithmetic is
//! DPDK 26.07's.
#![expect(unsafe_code, reason = "hands out addresses into its own memory and takes them back")]

mod cache;
pub mod ring;
#[cfg(test)]
mod tests;
mod worker;

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

pub use cache::CACHE_SIZE_MAX;
use cache::Cache;
use ring::{Ring, Sync as RingSync};
pub use worker::{WORKERS_MAX, Worker, WorkerError};

/// The address of an object.
pub type Object = NonNull<u8>;

/// Most objects in a pool.
pub const COUNT_MAX: u32 = 1 << 30;

/// What a pool is to be.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// For messages and statistics.
    pub name: String,
    /// Number of objects, 1..=2^30.
    pub count: u32,
    /// Bytes of each, rounded up to whole cache lines.
    pub object_size: usize,
    /// Objects in each worker's cache, 0 (none) to [`CACHE_SIZE_MAX`], and at most `count`.
    ///
    /// A cache smaller than twice the burst goes to the shared ring at nearly every call.
    pub cache_size: usize,
    /// Who puts into the shared ring.
    pub put: RingSync,
    /// Who gets from the shared ring.
    pub get: RingSync,
}

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A number outside its limits.
    #[error("mempool {name}: {what} {value} is outside {min}..={max}")]
    Range {
        /// The pool's name.
        name: String,
        /// What the number is.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The least allowed.
        min: usize,
        /// The most allowed.
        max: usize,
    },
    /// No memory for the objects.
    #[error("mempool {name}: no memory for {count} objects of {size} bytes: {source}; use fewer")]
    Memory {
        /// The pool's name.
        name: String,
        /// Number of objects.
        count: u32,
        /// Bytes of each.
        size: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// No memory for what the objects point at.
    #[error(transparent)]
    Arena(#[from] crate::mem::MemError),
}

/// A bulk get that could not be served in full; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the mempool has fewer objects left than asked for")]
pub struct Exhausted;

/// A pool of equal objects. Cloning gives another handle to the same pool.
///
/// A pool whose last handle is dropped while objects are out stays in memory until they are home; it is then freed when the
/// next pool is made or dropped, or the next [`Worker`] ends.
#[derive(Debug)]
pub struct Mempool {
    core: Arc<Core>,
}

/// What the objects' memory belongs to.
#[derive(Debug)]
pub(crate) struct Core {
    name: String,
    ring: Ring,
    caches: Box<[Cache]>,
    objects: Objects,
    count: u32,
    cache_size: usize,
    handles: AtomicUsize,
    uncached_puts: AtomicU64,
    uncached_gets: AtomicU64,
    /// Kept for as long as the objects, which point into it.
    _backing: Option<Arc<crate::mem::Span>>,
    #[cfg(debug_assertions)]
    states: Box<[std::sync::atomic::AtomicU8]>,
}

/// Private memory, cut into equal objects.
#[derive(Debug)]
struct Objects {
    base: NonNull<u8>,
    stride: usize,
    len: usize,
}

// SAFETY: plain memory; who uses which object is settled by get and put.
unsafe impl Send for Objects {}
// SAFETY: as above.
unsafe impl Sync for Objects {}

impl Objects {
    fn new(count: usize, stride: usize) -> std::io::Result<Self> {
        let len = count.checked_mul(stride).ok_or_else(|| std::io::Error::from(std::io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new private mapping at an address of the kernel's choice.
        let base = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: advice on our own mapping.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        let base = NonNull::new(base.cast()).ok_or_else(std::io::Error::last_os_error)?;
        Ok(Self { base, stride, len })
    }

    fn get(&self, index: usize) -> Object {
        debug_assert!(index * self.stride < self.len);
        // SAFETY: callers pass an index below the count, so this stays inside the mapping.
        unsafe { self.base.add(index * self.stride) }
    }

    /// The index of `object`, if it is one of ours.
    #[cfg(debug_assertions)]
    fn index(&self, object: Object) -> Option<usize> {
        let offset = (object.as_ptr() as usize).checked_sub(self.base.as_ptr() as usize)?;
        (offset < self.len && offset.is_multiple_of(self.stride)).then(|| offset / self.stride)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the pool is dropped only once every object is home.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Debug builds: an object's place.
#[cfg(debug_assertions)]
mod place {
    pub const HOME: u8 = 0;
    pub const OUT: u8 = 1;
}

/// What a pool has done so far, all workers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bulk puts by workers.
    pub put_bulks: u64,
    /// Objects put by workers.
    pub put_objects: u64,
    /// Bulk gets by workers.
    pub get_bulks: u64,
    /// Objects got by workers.
    pub get_objects: u64,
    /// Bulk gets by workers that could not be served.
    pub get_failures: u64,
    /// Puts that went to the shared ring.
    pub ring_puts: u64,
    /// Gets that went to the shared ring.
    pub ring_gets: u64,
    /// Bulk puts by threads without a cache.
    pub uncached_puts: u64,
    /// Bulk gets by threads without a cache.
    pub uncached_gets: u64,
}

/// All pools with caches, and those whose last handle went while objects were still out.
#[derive(Default)]
struct Registry {
    live: Vec<Weak<Core>>,
    orphans: Vec<Arc<Core>>,
}

static REGISTRY: Mutex<Registry> = Mutex::new(Registry { live: Vec::new(), orphans: Vec::new() });

impl Registry {
    /// The registry, after a look for orphans whose objects have come home since, which are freed.
    fn lock() -> MutexGuard<'static, Self> {
        let mut registry = REGISTRY.lock().unwrap_or_else(PoisonError::into_inner);
        registry.orphans.retain(|core| !core.all_home());
        registry.live.retain(|core| core.strong_count() > 0);
        registry
    }
}

/// Empties the caches of the worker that the current thread was, so that nothing is stranded in them.
///
/// # Safety
/// The current thread owns the number `worker`.
unsafe fn flush_caches(worker: usize) {
    let registry = Registry::lock();
    for core in registry.live.iter().filter_map(Weak::upgrade) {
        if let Some(cache) = core.caches.get(worker) {
            // SAFETY: the caller's contract.
            unsafe { cache.flush(&core.ring) };
        }
    }
    drop(registry);
    // What came home just now may have been the last of an orphan.
    drop(Registry::lock());
}

impl RingSync {
    /// One thread at a time on that side of a pool.
    ///
    /// # Safety
    /// The user sees to it that no two threads are on that side at the same moment. On the put side that includes every drop
    /// of an object's owner (an `Mbuf`), and the end of a [`Worker`], which empties its caches; on the get side every
    /// allocation. Breaking it hands one object to two owners.
    #[must_use]
    pub const unsafe fn single() -> Self {
        Self::Single(ring::Promise(()))
    }
}

impl Mempool {
    /// A pool of `config.count` objects, each prepared once by `init(index, object)`.
    ///
    /// # Errors
    /// [`PoolError`] for a number out of range or memory that cannot be had.
    pub fn new(config: &PoolConfig, init: impl FnMut(usize, Object)) -> Result<Self, PoolError> {
        Self::with_backing(config, None, init)
    }

    pub(crate) fn with_backing(
        config: &PoolConfig,
        backing: Option<Arc<crate::mem::Span>>,
        mut init: impl FnMut(usize, Object),
    ) -> Result<Self, PoolError> {
        let PoolConfig { name, count, object_size, cache_size, put, get } = config.clone();
        let range = |what, value, min, max| PoolError::Range { name: name.clone(), what, value, min, max };
        if count == 0 || count > COUNT_MAX {
            return Err(range("count", count as usize, 1, COUNT_MAX as usize));
        }
        let cache_max = CACHE_SIZE_MAX.min(count as usize);
        if cache_size > cache_max {
            return Err(range("cache size", cache_size, 0, cache_max));
        }
        if object_size == 0 || object_size > 1 << 30 {
            return Err(range("object size", object_size, 1, 1 << 30));
        }
        let stride = object_size.next_multiple_of(64);
        let objects = Objects::new(count as usize, stride).map_err(|source| PoolError::Memory {
            name: name.clone(),
            count,
            size: stride,
            source,
        })?;
        let ring = Ring::new(count, put, get);
        for i in 0..count as usize {
            init(i, objects.get(i));
        }
        let filled = ring.put(count as usize, |i| objects.get(i).as_ptr());
        debug_assert!(filled);
        let caches = if cache_size == 0 { 0 } else { WORKERS_MAX };
        let core = Arc::new(Core {
            ring,
            caches: (0..caches).map(|_| Cache::new(cache_size)).collect(),
            objects,
            count,
            cache_size,
            handles: AtomicUsize::new(1),
            uncached_puts: AtomicU64::new(0),
            uncached_gets: AtomicU64::new(0),
            _backing: backing,
            #[cfg(debug_assertions)]
            states: (0..count).map(|_| place::HOME.into()).collect(),
            name,
        });
        let mut registry = Registry::lock();
        if cache_size > 0 {
            registry.live.push(Arc::downgrade(&core));
        }
        Ok(Self { core })
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.core.name
    }

    /// How many objects it has in all.
    #[must_use]
    pub fn count(&self) -> usize {
        self.core.count as usize
    }

    /// Size of each worker's cache, in objects.
    #[must_use]
    pub fn cache_size(&self) -> usize {
        self.core.cache_size
    }

    /// Objects at home, in the ring and in all caches; exact only while nobody uses the pool.
    #[must_use]
    pub fn available(&self) -> usize {
        self.core.available()
    }

    /// Objects out; exact only while nobody uses the pool.
    #[must_use]
    pub fn in_use(&self) -> usize {
        self.count().saturating_sub(self.available())
    }

    /// Gets `out.len()` objects, or none.
    ///
    /// # Errors
    /// [`Exhausted`] if there are not as many; nothing was taken.
    #[inline(always)]
    pub fn get_bulk(&self, out: &mut [MaybeUninit<Object>]) -> Result<(), Exhausted> {
        if self.core.get(out) { Ok(()) } else { Err(Exhausted) }
    }

    /// Puts objects back.
    ///
    /// # Safety
    /// Each came from this pool's `get_bulk`, is not home already, and is not used any more.
    #[inline(always)]
    pub unsafe fn put_bulk(&self, objects: &[Object]) {
        // SAFETY: the caller's contract.
        unsafe { self.core.put(objects) };
    }

    /// What the pool has done so far.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let mut sum = PoolStats {
            uncached_puts: self.core.uncached_puts.load(Ordering::Relaxed),
            uncached_gets: self.core.uncached_gets.load(Ordering::Relaxed),
            ..PoolStats::default()
        };
        for cache in &self.core.caches {
            let s = &cache.stats;
            sum.put_bulks += s.put_bulks.get();
            sum.put_objects += s.put_objects.get();
            sum.get_bulks += s.get_bulks.get();
            sum.get_objects += s.get_objects.get();
            sum.get_failures += s.get_failures.get();
            sum.ring_puts += s.ring_puts.get();
            sum.ring_gets += s.ring_gets.get();
        }
        sum
    }
}

impl Clone for Mempool {
    fn clone(&self) -> Self {
        self.core.handles.fetch_add(1, Ordering::Relaxed);
        Self { core: Arc::clone(&self.core) }
    }
}

impl Drop for Mempool {
    fn drop(&mut self) {
        // AcqRel: the last one to leave sees what the others did.
        if self.core.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            let mut registry = Registry::lock();
            if !self.core.all_home() {
                registry.orphans.push(Arc::clone(&self.core));
            }
        }
    }
}

impl Core {
    fn available(&self) -> usize {
        // The ring first: what a cache flushes in between is then missing from the sum, not in it twice.
        let in_ring = self.ring.len();
        in_ring + self.caches.iter().map(Cache::len).sum::<usize>()
    }

    /// The object with number `index`, which is below the count.
    pub(crate) fn object(&self, index: usize) -> Object {
        self.objects.get(index)
    }

    /// Whether `object` lies in this pool's memory.
    #[inline(always)]
    pub(crate) fn contains(&self, object: Object) -> bool {
        object.addr().get().wrapping_sub(self.objects.base.addr().get()) < self.objects.len
    }

    /// Whether every object is home. Exact once no handle is left, for then objects only come home: never true too early.
    fn all_home(&self) -> bool {
        self.available() == self.count as usize
    }

    #[inline(always)]
    pub(crate) fn get(&self, out: &mut [MaybeUninit<Object>]) -> bool {
        let done = if let Some(cache) = self.caches.get(worker::current()) {
            // SAFETY: the cache of the current worker's number, which no other live thread has.
            unsafe { cache.get(out, &self.ring) }
        } else {
            self.uncached_gets.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the ring holds nothing but objects, which are not null.
            self.ring.get(out.len(), |i, object| unsafe {
                out[i].write(Object::new_unchecked(object));
            })
        };
        #[cfg(debug_assertions)]
        if done {
            for object in out {
                // SAFETY: a successful get initialised all of them.
                self.check_leaves(unsafe { object.assume_init() });
            }
        }
        done
    }

    /// # Safety
    /// As [`Mempool::put_bulk`].
    #[inline(always)]
    pub(crate) unsafe fn put(&self, objects: &[Object]) {
        #[cfg(debug_assertions)]
        for &object in objects {
            self.check_returns(object);
        }
        let done = if let Some(cache) = self.caches.get(worker::current()) {
            // SAFETY: the cache of the current worker's number, which no other live thread has.
            unsafe { cache.put(objects, &self.ring) }
        } else {
            self.uncached_puts.fetch_add(1, Ordering::Relaxed);
            self.ring.put(objects.len(), |i| objects[i].as_ptr())
        };
        debug_assert!(done, "mempool {}: more objects came back than it has", self.name);
    }
}

#[cfg(debug_assertions)]
impl Core {
    fn state(&self, object: Object, what: &str) -> &std::sync::atomic::AtomicU8 {
        match self.objects.index(object) {
            Some(index) => &self.states[index],
            None => panic!("mempool {}: foreign object {object:p} {what}", self.name),
        }
    }

    fn check_leaves(&self, object: Object) {
        let was = self.state(object, "got").swap(place::OUT, Ordering::Relaxed);
        assert!(was == place::HOME, "mempool {}: object {object:p} handed out twice", self.name);
    }

    fn check_returns(&self, object: Object) {
        let was = self.state(object, "freed").swap(place::HOME, Ordering::Relaxed);
        assert!(was == place::OUT, "mempool {}: double free of object {object:p}", self.name);
    }

    /// Names a use after free.
    pub(crate) fn check_out(&self, object: Object) {
        let state = self.state(object, "used").load(Ordering::Relaxed);
        assert!(state == place::OUT, "mempool {}: use after free of object {object:p}", self.name);
    }
}
