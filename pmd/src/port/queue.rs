//! Where control thread and worker meet: a slot per queue, which holds the running queue or nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Burst, PortError, QueueStats, RxBurst, Stats, TxBurst};
use crate::shared::Baton;

/// How long the control thread waits for a worker to finish a burst, in steps of [`PAUSE`].
const CLAIM_TRIES: usize = 50_000;
const PAUSE: Duration = Duration::from_micros(20);

/// One queue's place: the running queue, or nothing while it is stopped.
pub struct Slot<Q: ?Sized> {
    queue: Baton<Option<Box<Q>>>,
    path: Mutex<Option<&'static str>>,
    handle_out: AtomicBool,
    stats: Arc<QueueStats>,
}

/// A receive queue's place.
pub type RxSlot = Slot<dyn RxBurst>;
/// A transmit queue's place.
pub type TxSlot = Slot<dyn TxBurst>;

impl<Q: ?Sized> Default for Slot<Q> {
    fn default() -> Self {
        Self {
            queue: Baton::new(None),
            path: Mutex::new(None),
            handle_out: AtomicBool::new(false),
            stats: QueueStats::new(),
        }
    }
}

impl<Q: ?Sized> Slot<Q> {
    /// The queue's counters, which outlive the running queue.
    #[must_use]
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.stats
    }

    /// The path the queue runs on.
    #[must_use]
    pub fn path(&self) -> Option<&'static str> {
        *self.path.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a running queue in (or none), and takes out what was there. Waits for a burst to end.
    ///
    /// # Errors
    /// `queue`, if a worker held the slot for a second.
    pub fn replace(&self, path: Option<&'static str>, queue: Option<Box<Q>>) -> Result<Option<Box<Q>>, Option<Box<Q>>> {
        let Some(mut claim) = self.queue.claim(CLAIM_TRIES, || std::thread::sleep(PAUSE)) else { return Err(queue) };
        *self.path.lock().unwrap_or_else(PoisonError::into_inner) = path;
        Ok(claim.with(|slot| std::mem::replace(slot, queue)))
    }

    #[inline(always)]
    fn with<R: Default>(&self, f: impl FnOnce(&mut Q) -> R) -> R {
        let Some(mut claim) = self.queue.try_claim() else { return R::default() };
        claim.with(|queue| queue.as_deref_mut().map_or_else(R::default, f))
    }
}

/// How long [`Slot::replace`] waits at most, in milliseconds.
const CLAIM_MS: u64 = CLAIM_TRIES as u64 * PAUSE.as_micros() as u64 / 1000;

/// A worker's right to use a queue.
pub struct Handle<Q: ?Sized> {
    slot: Arc<Slot<Q>>,
}

/// A worker's right to poll a receive queue.
pub type RxHandle = Handle<dyn RxBurst>;
/// A worker's right to fill a transmit queue.
pub type TxHandle = Handle<dyn TxBurst>;

impl<Q: ?Sized> Handle<Q> {
    /// The handle of `slot`'s queue; none if it is out.
    fn take(slot: &Arc<Slot<Q>>) -> Option<Self> {
        (!slot.handle_out.swap(true, Ordering::AcqRel)).then(|| Self { slot: Arc::clone(slot) })
    }

    /// The queue's counters.
    #[must_use]
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.slot.stats
    }
}

impl<Q: ?Sized> Drop for Handle<Q> {
    fn drop(&mut self) {
        self.slot.handle_out.store(false, Ordering::Release);
    }
}

impl RxHandle {
    /// Appends received packets to `burst`; 0 if the queue is stopped. See [`RxBurst::rx_burst`].
    #[inline]
    pub fn rx_burst(&mut self, burst: &mut Burst) -> usize {
        self.slot.with(|queue| queue.rx_burst(burst))
    }

    /// Asks to be woken when there is something to receive; whether it is safe to sleep. A stopped queue wakes nobody: false. See
    /// [`RxBurst::arm`].
    pub fn arm(&mut self) -> bool {
        self.slot.with(RxBurst::arm)
    }

    /// Asks not to be woken any more. See [`RxBurst::disarm`].
    pub fn disarm(&mut self) {
        self.slot.with(RxBurst::disarm);
    }
}

impl TxHandle {
    /// Takes packets from the front of `burst`; 0 if the queue is stopped. See [`TxBurst::tx_burst`].
    #[inline]
    pub fn tx_burst(&mut self, burst: &mut Burst) -> usize {
        self.slot.with(|queue| queue.tx_burst(burst))
    }

    /// Frees packets whose transmission is finished. See [`TxBurst::reap`].
    pub fn reap(&mut self) -> usize {
        self.slot.with(TxBurst::reap)
    }
}

/// A port's queues.
#[derive(Clone, Default)]
pub struct Slots {
    /// The port's address, for messages.
    pub port: String,
    /// Receive queues.
    pub rx: Vec<Arc<RxSlot>>,
    /// Transmit queues.
    pub tx: Vec<Arc<TxSlot>>,
}

impl Slots {
    /// Stopped slots for so many queues.
    #[must_use]
    pub fn new(port: &str, rx: u16, tx: u16) -> Self {
        Self {
            port: port.to_owned(),
            rx: (0..rx).map(|_| Arc::default()).collect(),
            tx: (0..tx).map(|_| Arc::default()).collect(),
        }
    }

    /// The error for a queue that is not there.
    #[must_use]
    pub fn no_queue(&self, what: &'static str, queue: u16, count: usize) -> PortError {
        let max = (count as u64).saturating_sub(1);
        PortError::Range { port: self.port.clone(), what, value: u64::from(queue), min: 0, max }
    }

    /// See [`Port::rx`](super::Port::rx).
    pub(super) fn rx_handle(&self, queue: u16) -> Result<RxHandle, PortError> {
        let slot = self.rx.get(usize::from(queue));
        let slot = slot.ok_or_else(|| self.no_queue("rx queue", queue, self.rx.len()))?;
        Handle::take(slot).ok_or_else(|| self.handle_out(format!("rx queue {queue}")))
    }

    /// See [`Port::tx`](super::Port::tx).
    pub(super) fn tx_handle(&self, queue: u16) -> Result<TxHandle, PortError> {
        let slot = self.tx.get(usize::from(queue));
        let slot = slot.ok_or_else(|| self.no_queue("tx queue", queue, self.tx.len()))?;
        Handle::take(slot).ok_or_else(|| self.handle_out(format!("tx queue {queue}")))
    }

    /// See [`Port::rx_queue_count`](super::Port::rx_queue_count).
    pub(super) fn rx_pending(&self, queue: u16) -> usize {
        self.rx.get(usize::from(queue)).map_or(0, |slot| slot.with(RxBurst::pending))
    }

    /// All receive queues' counters.
    #[must_use]
    pub fn rx_stats(&self) -> Stats {
        sum(self.rx.iter().map(|slot| &slot.stats))
    }

    /// All transmit queues' counters.
    #[must_use]
    pub fn tx_stats(&self) -> Stats {
        sum(self.tx.iter().map(|slot| &slot.stats))
    }

    /// Puts a running receive queue into its slot (or empties it), and takes out what was there.
    ///
    /// # Errors
    /// [`PortError::Busy`] if a worker does not let go.
    pub fn swap_rx(
        &self,
        queue: u16,
        running: Option<(&'static str, Box<dyn RxBurst>)>,
    ) -> Result<Option<Box<dyn RxBurst>>, PortError> {
        let slot = self.rx.get(usize::from(queue));
        let slot = slot.ok_or_else(|| self.no_queue("rx queue", queue, self.rx.len()))?;
        let (path, running) = running.unzip();
        slot.replace(path, running).map_err(|_| self.busy(format!("rx queue {queue}")))
    }

    /// Puts a running transmit queue into its slot (or empties it), and takes out what was there.
    ///
    /// # Errors
    /// [`PortError::Busy`] if a worker does not let go.
    pub fn swap_tx(
        &self,
        queue: u16,
        running: Option<(&'static str, Box<dyn TxBurst>)>,
    ) -> Result<Option<Box<dyn TxBurst>>, PortError> {
        let slot = self.tx.get(usize::from(queue));
        let slot = slot.ok_or_else(|| self.no_queue("tx queue", queue, self.tx.len()))?;
        let (path, running) = running.unzip();
        slot.replace(path, running).map_err(|_| self.busy(format!("tx queue {queue}")))
    }

    fn handle_out(&self, queue: String) -> PortError {
        PortError::HandleOut { port: self.port.clone(), queue }
    }

    fn busy(&self, queue: String) -> PortError {
        PortError::Busy { port: self.port.clone(), queue, waited_ms: CLAIM_MS }
    }
}

fn sum<'a>(queues: impl Iterator<Item = &'a Arc<QueueStats>>) -> Stats {
    let mut sum = Stats::default();
    for stats in queues {
        sum.add(&stats.snapshot());
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue that receives one packet a burst, in words.
    struct One;

    impl RxBurst for One {
        fn rx_burst(&mut self, _: &mut Burst) -> usize {
            1
        }

        fn pending(&mut self) -> usize {
            1
        }
    }

    #[test]
    fn a_burst_does_not_wait_for_the_lock_on_the_paths_name() {
        let slots = Slots::new("tested", 1, 0);
        slots.swap_rx(0, Some(("one", Box::new(One)))).unwrap();
        let mut handle = slots.rx_handle(0).unwrap();
        let (done, finished) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let path = slots.rx[0].path.lock().unwrap();
            scope.spawn(move || done.send(handle.rx_burst(&mut Burst::new(1))).unwrap());
            assert_eq!(finished.recv_timeout(Duration::from_secs(60)), Ok(1));
            drop(path);
        });
    }
}
