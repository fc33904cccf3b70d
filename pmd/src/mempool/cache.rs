//! A worker's cache of objects, with the arithmetic of DPDK 26.07: capacity = size, half flush, half refill.
#![expect(unsafe_code, reason = "a stack of addresses moved in bulk, without initialising or checking each")]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Object;
use super::ring::Ring;
use crate::shared::Counter;

/// Largest cache size, in objects.
pub const CACHE_SIZE_MAX: usize = 512;

/// What one worker did with one pool.
#[derive(Debug, Default)]
pub(super) struct CacheStats {
    pub put_bulks: Counter,
    pub put_objects: Counter,
    pub get_bulks: Counter,
    pub get_objects: Counter,
    pub get_failures: Counter,
    pub ring_puts: Counter,
    pub ring_gets: Counter,
}

/// One worker's cache of one pool. Aligned so that two workers never share a line, prefetched neighbours included.
#[repr(align(128))]
#[derive(Debug)]
pub(super) struct Cache {
    /// Objects inside. Written by the owner only; Release so that an audit which sees a count of "all home" also sees that the
    /// owner is done with the pool.
    len: AtomicUsize,
    size: usize,
    objects: UnsafeCell<Box<[MaybeUninit<Object>]>>,
    pub stats: CacheStats,
}

// SAFETY: `objects` is touched by the owning worker only (contract of `put` and `get`); the rest is atomics.
unsafe impl Sync for Cache {}
// SAFETY: object addresses may be used from any thread.
unsafe impl Send for Cache {}

impl Cache {
    pub fn new(size: usize) -> Self {
        Self {
            len: AtomicUsize::new(0),
            size,
            objects: UnsafeCell::new(vec![MaybeUninit::uninit(); size].into()),
            stats: CacheStats::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Puts `objects`: into the cache if they fit; if not and they are at most half a cache, after flushing the oldest half;
    /// else straight into `ring`. False if `ring` would not take them, which means that some do not belong here.
    ///
    /// # Safety
    /// The calling thread owns this cache.
    #[inline(always)]
    pub unsafe fn put(&self, objects: &[Object], ring: &Ring) -> bool {
        self.stats.put_bulks.add(1);
        self.stats.put_objects.add(objects.len() as u64);
        let len = self.len.load(Ordering::Relaxed);
        if objects.len() <= self.size - len {
            // SAFETY: the caller owns the cache; `len + objects.len() <= size`.
            unsafe { self.push(len, objects) };
            return true;
        }
        // SAFETY: the caller owns the cache.
        unsafe { self.put_overflow(len, objects, ring) }
    }

    #[cold]
    unsafe fn put_overflow(&self, len: usize, objects: &[Object], ring: &Ring) -> bool {
        self.stats.ring_puts.add(1);
        let half = self.size / 2;
        if objects.len() > half {
            return ring.put(objects.len(), |i| objects[i].as_ptr());
        }
        // The put did not fit, so len > size - half >= half: there is an oldest half to flush.
        // SAFETY: the caller owns the cache, and `half < len`.
        if !unsafe { self.flush_oldest(half, len, ring) } {
            return false;
        }
        // SAFETY: the caller owns the cache; `len - half + objects.len() <= len <= size`.
        unsafe { self.push(len - half, objects) };
        true
    }

    /// Moves the oldest `count` of `len` objects to `ring`, the others down.
    ///
    /// # Safety
    /// The calling thread owns this cache, whose first `len` entries are initialised, and `count <= len`.
    unsafe fn flush_oldest(&self, count: usize, len: usize, ring: &Ring) -> bool {
        // SAFETY: the caller owns the cache, so this is the only reference to its contents.
        let cached = unsafe { &mut *self.objects.get() };
        // They leave our count before they enter the ring's, so that whoever adds both up meanwhile finds too few objects at
        // home, never too many: an orphaned pool is freed when all are. Release is for the reader's Acquire of the ring.
        self.len.store(len - count, Ordering::Release);
        // SAFETY: the first `count <= len` entries are initialised.
        if !ring.put(count, |i| unsafe { cached[i].assume_init() }.as_ptr()) {
            self.len.store(len, Ordering::Release);
            return false;
        }
        cached.copy_within(count..len, 0);
        true
    }

    /// Moves everything to `ring`, for a worker that ends.
    ///
    /// # Safety
    /// The calling thread owns this cache.
    pub unsafe fn flush(&self, ring: &Ring) {
        let len = self.len.load(Ordering::Relaxed);
        if len > 0 {
            self.stats.ring_puts.add(1);
            // SAFETY: the caller owns the cache. The ring has room for every object, so this cannot fail.
            unsafe { self.flush_oldest(len, len, ring) };
        }
    }

    /// # Safety
    /// The calling thread owns this cache, and `len + objects.len() <= size`.
    #[inline(always)]
    unsafe fn push(&self, len: usize, objects: &[Object]) {
        // SAFETY: the room was checked by the caller; source and target are different allocations.
        unsafe {
            let top = (*self.objects.get()).as_mut_ptr().add(len);
            std::ptr::copy_nonoverlapping(objects.as_ptr(), top.cast::<Object>(), objects.len());
        }
        self.len.store(len + objects.len(), Ordering::Release);
    }

    /// Gets `out.len()` objects, the most recently put first: from the cache, and what is missing from `ring`, taking half a
    /// cache in reserve if that is more. All of them, or none and everything as before.
    ///
    /// # Safety
    /// The calling thread owns this cache.
    #[inline(always)]
    pub unsafe fn get(&self, out: &mut [MaybeUninit<Object>], ring: &Ring) -> bool {
        let len = self.len.load(Ordering::Relaxed);
        let done = if out.len() <= len {
            // SAFETY: the caller owns the cache; `out.len() <= len`.
            unsafe { self.pop(len, out) };
            self.len.store(len - out.len(), Ordering::Release);
            true
        } else {
            // SAFETY: the caller owns the cache; `out.len() > len`.
            unsafe { self.get_miss(len, out, ring) }
        };
        if done {
            self.stats.get_bulks.add(1);
            self.stats.get_objects.add(out.len() as u64);
        } else {
            self.stats.get_failures.add(1);
        }
        done
    }

    #[cold]
    unsafe fn get_miss(&self, len: usize, out: &mut [MaybeUninit<Object>], ring: &Ring) -> bool {
        self.stats.ring_gets.add(1);
        let half = self.size / 2;
        let missing = out.len() - len;
        let (cached, rest) = out.split_at_mut(len);
        if missing <= half {
            let reserve = self.objects.get();
            // The cached ones are popped first, so the half drawn from the ring can take their place.
            // SAFETY: the caller owns the cache; `cached.len() == len`.
            unsafe { self.pop(len, cached) };
            // SAFETY: the caller owns the cache; `i < half <= size`. A failing `get` never calls the sink, so the cached
            // objects are still where `len` says.
            if ring.get(half, |i, object| unsafe {
                (&mut *reserve)[i].write(Object::new_unchecked(object));
            }) {
                // SAFETY: `half` objects are initialised now; `missing <= half`.
                unsafe { self.pop(half, rest) };
                self.len.store(half - missing, Ordering::Release);
                return true;
            }
        }
        // SAFETY: the ring holds nothing but objects, which are not null.
        let done = ring.get(missing, |i, object| unsafe {
            rest[i].write(Object::new_unchecked(object));
        });
        if done {
            // SAFETY: the caller owns the cache; `cached.len() == len`.
            unsafe { self.pop(len, cached) };
            self.len.store(0, Ordering::Release);
        }
        done
    }

    /// Copies the top `out.len()` of `len` objects out, last in first.
    ///
    /// # Safety
    /// The calling thread owns this cache, whose first `len` entries are initialised, and `out.len() <= len`.
    #[inline(always)]
    unsafe fn pop(&self, len: usize, out: &mut [MaybeUninit<Object>]) {
        // SAFETY: the caller owns the cache.
        let top = unsafe { (*self.objects.get()).as_ptr().add(len) };
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: `i < out.len() <= len`.
            *out = unsafe { *top.sub(i + 1) };
        }
    }
}
