//! Words two parties touch: views of shared memory, the baton between a worker and its control thread, counters.
//!
//! Everything another *process* can write is reached only through a [`View`] of [`Shared`] types: atomics, for which every
//! bit pattern is valid. Everything another *thread* can take away in mid-life sits in a [`Baton`].
#![expect(unsafe_code, reason = "the one place that turns raw shared memory into typed atomics")]

#[cfg(all(test, loom))]
mod models;

#[cfg(loom)]
pub use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

#[cfg(not(loom))]
pub use self::cell::UnsafeCell;
#[cfg(not(loom))]
pub use self::view::{Circle, SharedBytes, View};

/// A type that may lie in memory which another process writes at any time.
///
/// # Safety
/// The type consists of atomics only, has no padding, and every bit pattern of it is valid.
pub unsafe trait Shared: Sync {}

/// `std`'s cell with the closure interface of loom's, so that one source serves both.
#[cfg(not(loom))]
mod cell {
    /// A cell whose accesses are closures over a raw pointer.
    #[derive(Debug, Default)]
    pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// Wraps `value`.
        pub const fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Hands `f` the address of the value.
        #[inline(always)]
        pub fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }
}

#[cfg(not(loom))]
mod view {
    use std::any::Any;
    use std::ops::Deref;
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

    use super::Shared;

    // SAFETY: an atomic integer has no padding and no invalid bit pattern.
    unsafe impl Shared for AtomicU8 {}
    // SAFETY: as above.
    unsafe impl Shared for AtomicU16 {}
    // SAFETY: as above.
    unsafe impl Shared for AtomicU32 {}
    // SAFETY: as above.
    unsafe impl Shared for AtomicU64 {}

    /// A slice of shared words, together with whatever keeps its memory mapped.
    pub struct View<T: Shared> {
        ptr: NonNull<T>,
        len: usize,
        _owner: Arc<dyn Any + Send + Sync>,
    }

    // SAFETY: a `View` is a shared reference to `Sync` data plus a `Send + Sync` owner.
    unsafe impl<T: Shared> Send for View<T> {}
    // SAFETY: as above.
    unsafe impl<T: Shared> Sync for View<T> {}

    impl<T: Shared> View<T> {
        /// A view of `len` values at `ptr`, kept mapped by `owner`.
        ///
        /// # Safety
        /// `ptr` is aligned for `T`; `len` values of `T` stay mapped, readable and writable for as long as `owner` lives;
        /// and no Rust reference to anything but [`Shared`] types covers them.
        pub unsafe fn new(ptr: NonNull<T>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
            Self { ptr, len, _owner: owner }
        }
    }

    impl<T: Shared> Deref for View<T> {
        type Target = [T];
        #[inline(always)]
        fn deref(&self) -> &[T] {
            // SAFETY: `new`'s contract: mapped while the owner lives, which is as long as `self`; `Shared` types accept any
            // bits and any concurrent writer.
            unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
        }
    }

    /// A view whose length is a power of two, in which indexes go round: what a split ring's entries are.
    #[derive(Debug)]
    pub struct Circle<T: Shared> {
        view: View<T>,
        mask: usize,
    }

    impl<T: Shared> Circle<T> {
        /// Goes round `view`; `None` if its length is not a power of two.
        #[must_use]
        pub fn new(view: View<T>) -> Option<Self> {
            view.len.is_power_of_two().then(|| Self { mask: view.len - 1, view })
        }

        /// The value at `index`, modulo the length.
        #[inline(always)]
        #[must_use]
        pub fn at(&self, index: u16) -> &T {
            // SAFETY: the length is `mask + 1`, as `new` saw.
            unsafe { self.view.get_unchecked(usize::from(index) & self.mask) }
        }
    }

    /// A range of bytes that another party may be writing at this moment: a data room, a guest's buffer.
    ///
    /// It can only be copied from and to, never borrowed as `&[u8]`: what was read once may read differently next time, so
    /// copy what you decide on. `Copy`, and no larger than a slice.
    #[derive(Clone, Copy, Debug)]
    pub struct SharedBytes<'a> {
        ptr: NonNull<u8>,
        len: usize,
        _memory: std::marker::PhantomData<&'a AtomicU8>,
    }

    // SAFETY: as a `&[AtomicU8]`, which is `Send` and `Sync`.
    unsafe impl Send for SharedBytes<'_> {}
    // SAFETY: as above.
    unsafe impl Sync for SharedBytes<'_> {}

    impl<'a> SharedBytes<'a> {
        /// `len` bytes at `ptr`.
        ///
        /// # Safety
        /// They stay mapped, readable and writable for `'a`, and no Rust reference covers them. `ptr` is not null.
        #[inline(always)]
        pub unsafe fn new(ptr: *mut u8, len: usize) -> Self {
            // SAFETY: the caller's contract.
            let ptr = unsafe { NonNull::new_unchecked(ptr) };
            Self { ptr, len, _memory: std::marker::PhantomData }
        }

        /// Number of bytes.
        #[inline(always)]
        #[must_use]
        pub fn len(&self) -> usize {
            self.len
        }

        /// Whether there are none.
        #[inline(always)]
        #[must_use]
        pub fn is_empty(&self) -> bool {
            self.len == 0
        }

        /// The address of the first byte, for prefetching and for descriptors.
        #[inline(always)]
        #[must_use]
        pub fn as_ptr(&self) -> *const u8 {
            self.ptr.as_ptr()
        }

        /// `len` bytes from `offset`, if they lie inside.
        #[inline(always)]
        #[must_use]
        pub fn sub(&self, offset: usize, len: usize) -> Option<SharedBytes<'a>> {
            if offset > self.len || len > self.len - offset {
                return None;
            }
            // SAFETY: inside the range that `new` vouched for.
            Some(Self { ptr: unsafe { self.ptr.add(offset) }, len, ..*self })
        }

        /// Copies the first bytes out, as many as both hold; returns how many.
        #[inline(always)]
        pub fn read(&self, out: &mut [u8]) -> usize {
            let n = out.len().min(self.len);
            // SAFETY: both ranges hold `n` bytes; `out` is a Rust reference, which `new` promised not to cover ours.
            unsafe { copy_bytes(self.as_ptr(), out.as_mut_ptr(), n) };
            n
        }

        /// Copies the first bytes in, as many as both hold; returns how many.
        #[inline(always)]
        pub fn write(&self, data: &[u8]) -> usize {
            let n = data.len().min(self.len);
            // SAFETY: as in `read`.
            unsafe { copy_bytes(data.as_ptr(), self.ptr.as_ptr(), n) };
            n
        }

        /// The first `N` bytes, if there are as many.
        #[inline(always)]
        pub fn get<const N: usize>(&self) -> Option<[u8; N]> {
            // SAFETY: `N` readable bytes; a byte array has no alignment.
            (N <= self.len).then(|| unsafe { self.ptr.cast::<[u8; N]>().read() })
        }

        /// Stores to the first `N` bytes, if there are as many; whether there were.
        #[inline(always)]
        pub fn put<const N: usize>(&self, bytes: [u8; N]) -> bool {
            if N > self.len {
                return false;
            }
            // SAFETY: `N` writable bytes; a byte array has no alignment.
            unsafe { self.ptr.cast::<[u8; N]>().write(bytes) };
            true
        }

        /// Copies to `to`, as many bytes as both hold; returns how many. The ranges may overlap, for a peer may lie about
        /// its buffers; what they hold then is the peer's affair.
        #[inline(always)]
        pub fn copy_to(&self, to: SharedBytes<'_>) -> usize {
            let n = to.len.min(self.len);
            // SAFETY: both ranges hold `n` bytes.
            unsafe { copy_bytes(self.as_ptr(), to.ptr.as_ptr(), n) };
            n
        }
    }

    /// Copies `n` bytes; frames of up to 128 bytes inline, the rest by `memmove`.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for `n` bytes. They may overlap.
    #[inline(always)]
    unsafe fn copy_bytes(from: *const u8, to: *mut u8, n: usize) {
        // SAFETY: the caller's contract. Inline, the first and the last half meet or overlap, and all loads come before all
        // stores.
        unsafe {
            match n {
                32..=64 => copy_ends::<32>(from, to, n),
                65..=128 => copy_ends::<64>(from, to, n),
                _ => std::ptr::copy(from, to, n),
            }
        }
    }

    /// Copies the first and the last `HALF` of `n` bytes.
    ///
    /// # Safety
    /// As [`copy_bytes`], and `HALF <= n`.
    #[inline(always)]
    unsafe fn copy_ends<const HALF: usize>(from: *const u8, to: *mut u8, n: usize) {
        // SAFETY: `HALF <= n`, and byte arrays have no alignment.
        unsafe {
            let head = from.cast::<[u8; HALF]>().read();
            let tail = from.add(n - HALF).cast::<[u8; HALF]>().read();
            to.cast::<[u8; HALF]>().write(head);
            to.add(n - HALF).cast::<[u8; HALF]>().write(tail);
        }
    }

    impl<T: Shared> std::fmt::Debug for View<T> {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "View({:p}, {} x {} bytes)", self.ptr, self.len, size_of::<T>())
        }
    }
}

/// Asks the CPU to bring the line of `target` near; a hint, with no effect on what the program means.
#[cfg(not(loom))]
#[inline(always)]
pub fn prefetch<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching never faults, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(target.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = target;
}

/// As [`prefetch`], for a line that will be written: other cores give it up at once, and not only when the store waits for that.
#[cfg(not(loom))]
#[inline(always)]
pub fn prefetch_write<T>(target: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching never faults, whatever the address. By name, for the compiler takes it for an extension that not every
    // CPU has; those without it (Intel's before Broadwell) run it as a hint without effect.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) target, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = target;
}

const FREE: u8 = 0;
const HELD: u8 = 1;

/// A value that is handed to and fro between a polling worker and its control thread.
///
/// The worker [tries](Baton::try_claim) once a burst and never waits; the control thread [claims](Baton::claim) with a limit.
/// Whoever holds the claim owns the value, so a queue can be stopped, replaced or freed between two bursts, whether or not
/// anybody polls it.
#[derive(Debug, Default)]
pub struct Baton<T> {
    state: AtomicU8,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached only through a `Claim`, of which at most one exists at a time (`state`), so sharing the baton
// only ever moves access to the value between threads.
unsafe impl<T: Send> Sync for Baton<T> {}

impl<T> Baton<T> {
    /// A free baton.
    pub fn new(value: T) -> Self {
        Self { state: AtomicU8::new(FREE), value: UnsafeCell::new(value) }
    }

    /// The value, if nobody else holds it just now. Never waits.
    #[inline(always)]
    pub fn try_claim(&self) -> Option<Claim<'_, T>> {
        // Acquire pairs with the Release in `Claim::drop`: what the last holder did to the value happened before.
        match self.state.compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Claim { baton: self }),
            Err(_) => None,
        }
    }

    /// The value, waiting for the present holder to finish its burst; `None` after `tries` attempts, between which `pause`
    /// runs.
    pub fn claim(&self, tries: usize, mut pause: impl FnMut()) -> Option<Claim<'_, T>> {
        for _ in 0..tries {
            if let Some(claim) = self.try_claim() {
                return Some(claim);
            }
            pause();
        }
        None
    }
}

/// The right to use a [`Baton`]'s value; given back when dropped.
#[derive(Debug)]
pub struct Claim<'a, T> {
    baton: &'a Baton<T>,
}

impl<T> Claim<'_, T> {
    /// Runs `f` on the value.
    #[inline(always)]
    pub fn with<R>(&mut self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: `self` is the only claim (`state` is HELD), and it is borrowed mutably for as long as `f` runs.
        self.baton.value.with_mut(|value| f(unsafe { &mut *value }))
    }
}

impl<T> Drop for Claim<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // Release pairs with the Acquire of the next `try_claim`.
        self.baton.state.store(FREE, Ordering::Release);
    }
}

/// A statistic: one writer, any number of readers, no locked instruction.
#[cfg(not(loom))]
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

#[cfg(not(loom))]
impl Counter {
    /// Adds `n`. Only the owning thread may call it; a second writer can lose counts, nothing else.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        // Relaxed: a statistic orders nothing.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The present value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Starts again from 0.
    pub fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}
