//! The shared part of a mempool: a bounded multi-producer multi-consumer ring of object addresses, bulk and all-or-nothing.
//!
//! Each side has a head, reserved by compare-and-swap, and a tail, published in the order of the reservations. A thread that
//! is preempted between the two delays the others of its side, so waiting for one's turn yields after a while.

#[cfg(loom)]
use loom::{
    hint::spin_loop,
    sync::atomic::{AtomicPtr, AtomicU32, Ordering},
    thread::yield_now,
};
#[cfg(not(loom))]
use std::{
    hint::spin_loop,
    sync::atomic::{AtomicPtr, AtomicU32, Ordering},
    thread::yield_now,
};

#[cfg(all(test, loom))]
#[path = "ring/models.rs"]
mod models;

/// Who may call one side of a ring at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sync {
    /// Any number of threads.
    #[default]
    Multi,
    /// One thread at a time, by the promise of [`Sync::single`]: saves the compare-and-swap and the wait for one's turn.
    Single(Promise),
}

/// That somebody answers for [`Sync::Single`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promise(pub(super) ());

#[derive(Debug, Default)]
#[repr(align(128))]
struct Cursor {
    head: AtomicU32,
    tail: AtomicU32,
}

/// A ring of object addresses.
#[derive(Debug)]
pub struct Ring {
    put: Cursor,
    get: Cursor,
    put_sync: Sync,
    get_sync: Sync,
    capacity: u32,
    mask: u32,
    slots: Box<[AtomicPtr<u8>]>,
}

impl Ring {
    /// A ring for up to `capacity` objects (at most 2^30).
    #[must_use]
    pub fn new(capacity: u32, put_sync: Sync, get_sync: Sync) -> Self {
        let size = capacity.max(1).next_power_of_two();
        Self {
            put: Cursor::default(),
            get: Cursor::default(),
            put_sync,
            get_sync,
            capacity,
            mask: size - 1,
            slots: (0..size).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect(),
        }
    }

    /// Objects inside, exact only while nobody else uses the ring.
    #[must_use]
    pub fn len(&self) -> usize {
        let taken = self.get.tail.load(Ordering::Acquire);
        self.put.tail.load(Ordering::Acquire).wrapping_sub(taken).min(self.capacity) as usize
    }

    /// Whether it holds no object.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts `count` objects, the i-th being `object(i)`: all of them, or none if they do not fit.
    #[inline]
    pub fn put(&self, count: usize, object: impl Fn(usize) -> *mut u8) -> bool {
        if count == 0 {
            // It has no turn of its own: publishing it could take back what another thread published meanwhile.
            return true;
        }
        let Some(head) = reserve(&self.put, &self.get.tail, self.capacity, count, self.put_sync) else { return false };
        for i in 0..count {
            // Relaxed: published by the Release store of the tail in `publish`.
            self.slots[(head.wrapping_add(i as u32) & self.mask) as usize].store(object(i), Ordering::Relaxed);
        }
        publish(&self.put, head, count, self.put_sync);
        true
    }

    /// Takes `count` objects, passing the i-th to `sink(i, object)`: all of them, or none if there are not as many.
    #[inline]
    pub fn get(&self, count: usize, mut sink: impl FnMut(usize, *mut u8)) -> bool {
        if count == 0 {
            // As in `put`.
            return true;
        }
        let Some(head) = reserve(&self.get, &self.put.tail, 0, count, self.get_sync) else { return false };
        for i in 0..count {
            // Relaxed: `reserve` acquired the putter's tail, which was stored after this slot.
            sink(i, self.slots[(head.wrapping_add(i as u32) & self.mask) as usize].load(Ordering::Relaxed));
        }
        publish(&self.get, head, count, self.get_sync);
        true
    }
}

/// Reserves `count` slots of one side; `lead` is what that side may be ahead of the `other` side's tail.
#[inline]
fn reserve(side: &Cursor, other: &AtomicU32, lead: u32, count: usize, sync: Sync) -> Option<u32> {
    let n = u32::try_from(count).ok()?;
    // Acquire pairs with the Release below: whoever moved the head to this value had seen the other tail at least where it
    // covers it, so our load of that tail cannot be older.
    let mut head = side.head.load(Ordering::Acquire);
    loop {
        // Acquire pairs with the Release in `publish` of the other side: its slot accesses are over.
        let room = lead.wrapping_add(other.load(Ordering::Acquire)).wrapping_sub(head);
        if n > room {
            return None;
        }
        let next = head.wrapping_add(n);
        if let Sync::Single(_) = sync {
            side.head.store(next, Ordering::Release);
            return Some(head);
        }
        match side.head.compare_exchange_weak(head, next, Ordering::Release, Ordering::Acquire) {
            Ok(_) => return Some(head),
            Err(now) => head = now,
        }
    }
}

/// Publishes a reservation, after those before it.
#[inline]
fn publish(side: &Cursor, head: u32, count: usize, sync: Sync) {
    if sync == Sync::Multi {
        let mut spins = 0u32;
        // Acquire: our Release below then also publishes what the earlier ones wrote.
        while side.tail.load(Ordering::Acquire) != head {
            spins += 1;
            if cfg!(loom) || spins.is_multiple_of(64) {
                yield_now();
            } else {
                spin_loop();
            }
        }
    }
    side.tail.store(head.wrapping_add(count as u32), Ordering::Release);
}
