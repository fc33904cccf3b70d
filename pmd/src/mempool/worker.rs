//! Which per-worker cache a thread owns.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

/// Most threads that can be workers at the same time.
pub const WORKERS_MAX: usize = 128;

const NONE: usize = usize::MAX;

thread_local! {
    static ID: Cell<usize> = const { Cell::new(NONE) };
}
static TAKEN: [AtomicBool; WORKERS_MAX] = [const { AtomicBool::new(false) }; WORKERS_MAX];

/// Makes the current thread a worker: every mempool gives it a cache of its own, for as long as this lives.
///
/// A thread that is no worker can use any pool too; it then goes to the shared ring each time, which
/// [`PoolStats`](super::PoolStats) counts. When a worker ends, what is in its caches goes back to the shared rings, so nothing
/// is stranded.
#[derive(Debug)]
pub struct Worker {
    id: usize,
    _this_thread: PhantomData<*const ()>,
}

/// Why a thread cannot become a worker.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WorkerError {
    /// It is one.
    #[error("this thread is worker {0} already; keep that `Worker` instead of entering again")]
    Already(usize),
    /// All numbers are in use.
    #[error("{WORKERS_MAX} threads are workers already, the limit; end one first")]
    TooMany,
}

impl Worker {
    /// Takes the lowest free number.
    ///
    /// # Errors
    /// [`WorkerError`].
    pub fn enter() -> Result<Self, WorkerError> {
        let id = ID.get();
        if id != NONE {
            return Err(WorkerError::Already(id));
        }
        // Acquire pairs with the Release in `drop`: the caches of this number are then as its last worker left them.
        let free = |flag: &AtomicBool| flag.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let id = TAKEN.iter().position(free).ok_or(WorkerError::TooMany)?;
        ID.set(id);
        Ok(Self { id, _this_thread: PhantomData })
    }

    /// The worker's number, below [`WORKERS_MAX`].
    #[must_use]
    pub fn id(&self) -> usize {
        self.id
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Not `Send`, so this is the thread that entered.
        ID.set(NONE);
        // SAFETY: the number is ours until the store below.
        unsafe { super::flush_caches(self.id) };
        TAKEN[self.id].store(false, Ordering::Release);
    }
}

/// The current thread's number, or something that is at least [`WORKERS_MAX`].
#[inline(always)]
pub(super) fn current() -> usize {
    ID.get()
}
