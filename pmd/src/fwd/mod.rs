//! Forwarding engines, as testpmd has them, on any [`Port`](crate::port::Port): in a guest over virtio, on a host over vhost-user.
//!
//! A *stream* leads from a receive queue to a transmit queue. Ports are paired (0 with 1, 2 with 3, an odd last one with
//! itself), queue with queue of the same number. Streams are dealt to workers in turn, and no queue belongs to two of them.
//!
//! ```text
//! open_port(..)            configure, set queues up, start
//! Forwarder::new(..)       workers are started, pinned, and parked
//!   start(engine)  stop()  stats()
//! shutdown()               workers end, ports stop, and every mbuf must be home
//! ```

mod address;
mod cli;
mod engine;
mod error;
mod forwarder;
mod generate;
mod open;
mod setup;
mod stats;
mod steer;
mod worker;

pub use address::{Address, AddressError};
pub use cli::{
    CpuList, Opener, Options, allowed, complain, exit_code, main, named, parse, start, usable, whole,
    without_descriptors,
};
pub use error::ForwardError;
pub use forwarder::{ForwardConfig, Forwarder};
pub use generate::{FRAME_MAX, FRAME_MIN};
pub use open::{mac, next_port_number, open};
pub use setup::{PORTS_MAX, PortSetup, cache_size, mbufs_needed, open_port};
pub use stats::{Counts, FinalReport, FwdStats, Named, Pages, PortState, PortStats, StreamStats};
pub use steer::serve;

/// The engines, by the names testpmd gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub enum Engine {
    /// Sends what was received, as it is.
    #[default]
    Io,
    /// Receives and frees.
    RxOnly,
    /// Sends a frame over and over.
    TxOnly,
    /// As `io`, to 02:00:00:00:00:(number of the port), from that port's MAC address.
    Mac,
    /// As `io`, with the MAC addresses swapped.
    MacSwap,
}
