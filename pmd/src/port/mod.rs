//! What an application sees: ports, queues, bursts.
//!
//! A [`Port`] belongs to the control thread: it is configured, its queues are set up, it is started and stopped. A worker
//! polls a queue through an [`RxHandle`] or [`TxHandle`], one virtual call a burst. Handles stay valid while the port is
//! stopped or reconfigured; their bursts are then empty.

mod backlog;
mod burst;
mod error;
mod queue;
mod stats;
pub mod validate;

pub use backlog::Backlog;
pub use burst::{BURST_MAX, Burst};
pub use error::PortError;
pub use queue::{RxHandle, RxSlot, Slots, TxHandle, TxSlot};
pub use stats::{BINS, FAULTS, Fault, QueueStats, Stats};

use std::any::Any;

use crate::mbuf::{Mbuf, MbufPool};

/// Queue-set-up limits of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// The driver's name.
    pub driver: &'static str,
    /// The address the port was opened with.
    pub address: String,
    /// Most receive (and transmit) queues.
    pub queues_max: u16,
    /// Most descriptors of a queue.
    pub queue_size_max: u16,
    /// Descriptors of a queue if nothing else is asked for.
    pub queue_size_default: u16,
    /// The port's MAC address.
    pub mac: [u8; 6],
    /// Whether a frame may fill several receive buffers.
    pub scatter: bool,
}

/// How a port is to be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortConfig {
    /// Receive queues.
    pub rx_queues: u16,
    /// Transmit queues.
    pub tx_queues: u16,
    /// Longest frame to be received, in bytes without FCS; 0: one buffer's worth.
    pub frame_max: u32,
    /// The receive path by name; none: the best that fits.
    pub rx_path: Option<String>,
    /// The transmit path by name; none: the best that fits.
    pub tx_path: Option<String>,
}

/// How a receive queue is to be set up.
#[derive(Clone, Debug)]
pub struct RxQueueConfig {
    /// Descriptors in use; 0: all the ring has; more than that: as many as it has.
    pub size: u16,
    /// Where its buffers come from.
    pub pool: MbufPool,
    /// Free descriptors that make a refill worthwhile: a multiple of 4, less than the ring; 0: a quarter of the ring, at most
    /// 32.
    pub free_thresh: u16,
    /// Leave it stopped when the port starts.
    pub deferred_start: bool,
}

/// How a transmit queue is to be set up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TxQueueConfig {
    /// Descriptors in use; 0: all the ring has; more than that: as many as it has.
    pub size: u16,
    /// Free descriptors below which finished packets are reaped: less than the ring minus 3; 0: a quarter of the ring, at
    /// most 32.
    pub free_thresh: u16,
    /// Leave it stopped when the port starts.
    pub deferred_start: bool,
}

/// Whether the port can carry frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// It can.
    Up,
    /// It cannot: not started, no peer, or the peer says so.
    Down,
}

/// A receive queue, as a worker drives it.
pub trait RxBurst: Send + Any {
    /// Appends received packets to `burst`, as many as are there and fit; returns how many.
    fn rx_burst(&mut self, burst: &mut Burst) -> usize;
    /// Buffers that are filled and wait to be received.
    fn pending(&mut self) -> usize;
    /// Prepares for a device that takes the place of one that is gone: packets that this one had delivered go to `received`, and
    /// the buffers that it had not used are made available anew. Returns the position (as the transport tells it) from which the
    /// new device goes on; none if the device cannot be replaced.
    fn rewind(&mut self, received: &mut Vec<Mbuf>) -> Option<u32> {
        let _ = received;
        None
    }
    /// Asks the other end to wake us when there is something to receive (virtio 1.3, 2.7.7 and 2.8.10). True if it was asked and there
    /// is nothing yet, so that it is safe to sleep; once awake, [`disarm`](Self::disarm). False if something has come, or if this kind
    /// of queue wakes nobody.
    fn arm(&mut self) -> bool {
        false
    }
    /// Asks the other end not to wake us, as at the beginning.
    fn disarm(&mut self) {}
}

/// A transmit queue, as a worker drives it.
pub trait TxBurst: Send {
    /// Takes packets from the front of `burst`, as many as fit; returns how many. The rest stays in `burst`.
    fn tx_burst(&mut self, burst: &mut Burst) -> usize;
    /// Frees packets whose transmission is finished; returns how many.
    fn reap(&mut self) -> usize;
    /// As [`RxBurst::rewind`]: packets that the device is done with are freed, the others are made available anew, in order.
    fn rewind(&mut self) -> Option<u32> {
        None
    }
}

/// A port, as its control thread sees it.
pub trait Port: Send {
    /// Its limits.
    fn info(&self) -> PortInfo;

    /// Sets the number of queues and the paths. The port is stopped and its queues are set up anew afterwards.
    ///
    /// # Errors
    /// [`PortError`]; the port is then as it was.
    fn configure(&mut self, config: &PortConfig) -> Result<(), PortError>;

    /// Sets a receive queue up.
    ///
    /// # Errors
    /// [`PortError`]; the queue is then as it was.
    fn rx_queue_setup(&mut self, queue: u16, config: &RxQueueConfig) -> Result<(), PortError>;

    /// Sets a transmit queue up.
    ///
    /// # Errors
    /// [`PortError`]; the queue is then as it was.
    fn tx_queue_setup(&mut self, queue: u16, config: &TxQueueConfig) -> Result<(), PortError>;

    /// Starts all queues that are not deferred.
    ///
    /// # Errors
    /// [`PortError`]; the port is then stopped.
    fn start(&mut self) -> Result<(), PortError>;

    /// Stops all queues. Every mbuf in them goes home.
    ///
    /// # Errors
    /// [`PortError`] if a worker keeps hold of a queue.
    fn stop(&mut self) -> Result<(), PortError>;

    /// Starts one receive queue of a started port.
    ///
    /// # Errors
    /// [`PortError`].
    fn rx_queue_start(&mut self, queue: u16) -> Result<(), PortError>;

    /// Stops one receive queue. Its mbufs go home.
    ///
    /// # Errors
    /// [`PortError`].
    fn rx_queue_stop(&mut self, queue: u16) -> Result<(), PortError>;

    /// Starts one transmit queue of a started port.
    ///
    /// # Errors
    /// [`PortError`].
    fn tx_queue_start(&mut self, queue: u16) -> Result<(), PortError>;

    /// Stops one transmit queue. Its mbufs go home.
    ///
    /// # Errors
    /// [`PortError`].
    fn tx_queue_stop(&mut self, queue: u16) -> Result<(), PortError>;

    /// Whether it can carry frames now.
    fn link(&mut self) -> Link;

    /// Looks after the peer, and tells whether the port can carry frames: one that is gone is looked for, once, and if there is
    /// one it takes over where the other left off. To be called now and then, say every 100 ms to 1 s; it waits no longer than
    /// the peer may take to answer. Until then bursts are empty or fill the rings, no more.
    ///
    /// # Errors
    /// [`PortError`] if there is a peer, but none that can take over; the port is then as it was without one.
    fn recover(&mut self) -> Result<Link, PortError> {
        Ok(self.link())
    }

    /// The queues, for the provided methods.
    fn slots(&self) -> Slots;

    /// The handle through which a worker polls a receive queue; there is one at a time.
    ///
    /// # Errors
    /// [`PortError`] if there is no such queue, or its handle is out.
    fn rx(&self, queue: u16) -> Result<RxHandle, PortError> {
        self.slots().rx_handle(queue)
    }

    /// The handle through which a worker fills a transmit queue; there is one at a time.
    ///
    /// # Errors
    /// [`PortError`] if there is no such queue, or its handle is out.
    fn tx(&self, queue: u16) -> Result<TxHandle, PortError> {
        self.slots().tx_handle(queue)
    }

    /// Buffers of a receive queue that are filled and wait to be received; 0 if it is stopped or busy.
    fn rx_queue_count(&self, queue: u16) -> usize {
        self.slots().rx_pending(queue)
    }

    /// The path a receive queue runs on, once it is started.
    fn rx_path(&self, queue: u16) -> Option<&'static str> {
        self.slots().rx.get(usize::from(queue)).and_then(|slot| slot.path())
    }

    /// The path a transmit queue runs on, once it is started.
    fn tx_path(&self, queue: u16) -> Option<&'static str> {
        self.slots().tx.get(usize::from(queue)).and_then(|slot| slot.path())
    }

    /// The receive queues' statistics, added up.
    fn rx_stats(&self) -> Stats {
        self.slots().rx_stats()
    }

    /// The transmit queues' statistics, added up.
    fn tx_stats(&self) -> Stats {
        self.slots().tx_stats()
    }
}
