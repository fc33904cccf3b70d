//! What engines need before they can run: ports with running queues, and enough mbufs.

use super::ForwardError;
use crate::mbuf::MbufPool;
use crate::mempool::CACHE_SIZE_MAX;
use crate::port::{Port, PortConfig, PortError, RxQueueConfig, TxQueueConfig};

/// Most ports of a forwarder: the number of a port is the last byte of its peer's MAC address.
pub const PORTS_MAX: usize = 32;

/// Mbufs beyond those that are counted, so that no bulk is refused for want of the last few.
const SLACK: usize = 512;

/// How [`open_port`] sets a port up: all its queues alike.
#[derive(Clone, Debug)]
pub struct PortSetup {
    /// Receive queues, and transmit queues.
    pub queues: u16,
    /// Descriptors of each; 0: the driver's default.
    pub size: u16,
    /// Where the receive queues' buffers come from.
    pub pool: MbufPool,
    /// The receive path by name; none: the best that fits.
    pub rx_path: Option<String>,
    /// The transmit path by name; none: the best that fits.
    pub tx_path: Option<String>,
    /// Longest frame to be received, in bytes without FCS; 0: one buffer's worth.
    pub frame_max: u32,
}

/// Configures `port`, sets its queues up and starts it.
///
/// # Errors
/// [`PortError`] of the step that failed; the port is then stopped.
pub fn open_port(port: &mut dyn Port, setup: &PortSetup) -> Result<(), PortError> {
    let PortSetup { queues, size, pool, rx_path, tx_path, frame_max } = setup;
    let size = if *size == 0 { port.info().queue_size_default } else { *size };
    port.configure(&PortConfig {
        rx_queues: *queues,
        tx_queues: *queues,
        frame_max: *frame_max,
        rx_path: rx_path.clone(),
        tx_path: tx_path.clone(),
    })?;
    for queue in 0..*queues {
        let config = RxQueueConfig { size, pool: pool.clone(), free_thresh: 0, deferred_start: false };
        port.rx_queue_setup(queue, &config)?;
        port.tx_queue_setup(queue, &TxQueueConfig { size, free_thresh: 0, deferred_start: false })?;
    }
    port.start()
}

/// The size of a worker's mempool cache that serves bursts of `burst` packets: 256, or twice the burst if that is more, as far
/// as a cache can grow.
#[must_use]
pub fn cache_size(burst: usize) -> usize {
    (2 * burst).clamp(256, CACHE_SIZE_MAX)
}

/// Mbufs that a pool must have so that its users never run out: what all rings together can hold, and for each of `workers` a full
/// cache of `cache` and two bursts of `burst` frames of `segments` mbufs.
///
/// # Errors
/// [`ForwardError::Range`] if that is more than a pool can have.
pub fn mbufs_needed(
    held: usize,
    workers: usize,
    cache: usize,
    burst: usize,
    segments: usize,
) -> Result<u32, ForwardError> {
    let count = held + workers * (cache + 2 * burst * segments) + SLACK;
    let max = crate::mempool::COUNT_MAX;
    u32::try_from(count).ok().filter(|&count| count <= max).ok_or(ForwardError::Range {
        what: "number of mbufs",
        value: count,
        min: 1,
        max: max as usize,
    })
}
