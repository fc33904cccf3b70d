//! Workers: a thread each, parked while idle, in an engine's loop otherwise.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::engine::{Forward, RxOnly, SetMacs, Step, Stream, SwapMacs, TxOnly, Unchanged};
use super::{Engine, ForwardError};
use crate::mempool::Worker;
use crate::sys;

/// How long the control thread waits for all workers to take up an order.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// What the workers are to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Job {
    /// Park.
    Idle,
    /// Run an engine, after sending so many generated bursts on every stream.
    Run { engine: Engine, tx_first: u32 },
    /// End.
    Quit,
}

/// The present job, and who has taken it up.
#[derive(Debug)]
struct Order {
    job: Job,
    number: u64,
    taken_by: usize,
}

/// Where the control thread leaves orders for the workers.
#[derive(Debug)]
pub(super) struct Orders {
    /// The number of the present order: the one word that a running engine looks at, once a round.
    number: AtomicU64,
    order: Mutex<Order>,
    changed: Condvar,
}

impl Orders {
    pub fn new() -> Arc<Self> {
        let order = Order { job: Job::Idle, number: 0, taken_by: 0 };
        Arc::new(Self { number: AtomicU64::new(0), order: Mutex::new(order), changed: Condvar::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an order and waits until `workers` workers have left their engines and taken it up.
    ///
    /// # Errors
    /// [`ForwardError::Stuck`] if they do not in time.
    pub fn give(&self, job: Job, workers: usize) -> Result<(), ForwardError> {
        let mut order = self.lock();
        *order = Order { job, number: order.number + 1, taken_by: 0 };
        // Relaxed: it only says "look at the order", which is behind the lock.
        self.number.store(order.number, Ordering::Relaxed);
        self.changed.notify_all();
        let waiting = |order: &mut Order| order.taken_by < workers;
        let waited = self.changed.wait_timeout_while(order, ANSWER_MAX, waiting);
        let (order, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            let missing = workers - order.taken_by;
            return Err(ForwardError::Stuck { missing, workers, waited_ms: ANSWER_MAX.as_millis() });
        }
        Ok(())
    }

    /// Waits for an order newer than `seen`, and takes it up.
    fn next(&self, seen: &mut u64) -> Job {
        let waited = self.changed.wait_while(self.lock(), |order| order.number == *seen);
        let mut order = waited.unwrap_or_else(PoisonError::into_inner);
        *seen = order.number;
        order.taken_by += 1;
        self.changed.notify_all();
        order.job
    }

    /// Whether there is an order newer than `seen`.
    #[inline(always)]
    fn newer(&self, seen: u64) -> bool {
        self.number.load(Ordering::Relaxed) != seen
    }
}

/// What a worker's thread owns.
pub(super) struct Crew {
    pub streams: Vec<Stream>,
    pub orders: Arc<Orders>,
}

/// Pins the calling thread and gives it mempool caches.
pub(super) fn take_seat(cpu: Option<usize>) -> Result<Worker, ForwardError> {
    if let Some(cpu) = cpu {
        sys::pin_thread(cpu).map_err(|source| ForwardError::Pin { cpu, source })?;
    }
    Ok(Worker::enter()?)
}

impl Crew {
    /// Follows orders until told to quit.
    pub fn follow(mut self) {
        let mut seen = 0;
        loop {
            match self.orders.next(&mut seen) {
                Job::Quit => return,
                // With more workers than streams, some have nothing to do in any engine.
                Job::Run { engine, tx_first } if !self.streams.is_empty() => self.run(seen, engine, tx_first),
                Job::Run { .. } | Job::Idle => {}
            }
        }
    }

    fn run(&mut self, seen: u64, engine: Engine, tx_first: u32) {
        for _ in 0..tx_first {
            if self.orders.newer(seen) {
                return;
            }
            self.streams.iter_mut().for_each(Stream::send_first);
        }
        match engine {
            Engine::Io => self.rounds::<Forward<Unchanged>>(seen),
            Engine::RxOnly => self.rounds::<RxOnly>(seen),
            Engine::TxOnly => self.rounds::<TxOnly>(seen),
            Engine::Mac => self.rounds::<Forward<SetMacs>>(seen),
            Engine::MacSwap => self.rounds::<Forward<SwapMacs>>(seen),
        }
        self.streams.iter_mut().for_each(Stream::drop_unsent);
    }

    /// The packet loop: nothing in it allocates, locks or calls the kernel.
    fn rounds<S: Step>(&mut self, seen: u64) {
        while !self.orders.newer(seen) {
            for stream in &mut self.streams {
                S::round(stream);
            }
        }
    }
}
