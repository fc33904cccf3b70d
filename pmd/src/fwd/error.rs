//! What can go wrong around the engines.

use crate::mempool::{PoolError, WorkerError};
use crate::port::PortError;

/// Why a forwarder does not run, or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    /// A number outside its limits.
    #[error("{what} {value} is outside {min}..={max}")]
    Range {
        /// What the number is.
        what: &'static str,
        /// Its value.
        value: usize,
        /// The least allowed.
        min: usize,
        /// The most allowed.
        max: usize,
    },
    /// Two ports that are to forward to each other do not have the queues for it.
    #[error(
        "port {from} has {rx_queues} receive queues, but port {to}, to which it forwards, has {tx_queues} transmit queues; give both the same number (queues=N)"
    )]
    Queues {
        /// The address of the port that receives.
        from: String,
        /// Its receive queues.
        rx_queues: usize,
        /// The address of the port that sends.
        to: String,
        /// Its transmit queues.
        tx_queues: usize,
    },
    /// A worker cannot run on the CPU it was given.
    #[error("CPU {cpu} cannot be used ({source}); choose from those in /proc/self/status, Cpus_allowed_list")]
    Pin {
        /// The CPU's number.
        cpu: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// The same CPU for two workers.
    #[error("CPU {0} is named twice; name each CPU once, for a worker needs one of its own")]
    CpuTwice(usize),
    /// No thread for a worker.
    #[error("worker {worker} could not be started: {source}; end other threads, or use fewer CPUs")]
    Thread {
        /// The worker's number.
        worker: usize,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// No mempool caches for a worker.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// Workers that do not take up an order.
    #[error(
        "{missing} of {workers} workers did not answer within {waited_ms} ms; they have died, or their CPUs are not theirs"
    )]
    Stuck {
        /// How many did not.
        missing: usize,
        /// How many there are.
        workers: usize,
        /// How long was waited, in milliseconds.
        waited_ms: u128,
    },
    /// A worker panicked.
    #[error("worker {0} panicked; that is a defect of this program: please report what it printed")]
    Panicked(usize),
    /// Mbufs that are not at home although everything has stopped.
    #[error("{out} of the {count} mbufs of pool {pool} are not home; whoever holds them must free them")]
    MbufsOut {
        /// The pool's name.
        pool: String,
        /// Mbufs missing.
        out: usize,
        /// Mbufs it has.
        count: usize,
    },
    /// A port refused.
    #[error(transparent)]
    Port(#[from] PortError),
    /// No pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
}
