//! Twinring's poll-mode driver.
#[cfg(not(loom))]
pub mod fwd;
#[cfg(not(loom))]
pub mod mbuf;
#[cfg(not(loom))]
pub mod mem;
#[cfg(not(loom))]
pub mod mempool;
#[cfg(not(loom))]
pub mod path;
#[cfg(not(loom))]
pub mod port;
#[cfg(loom)]
#[path = "mempool/ring.rs"]
pub mod ring;
#[cfg(not(loom))]
pub mod rx;
pub mod shared;
#[cfg(not(loom))]
pub mod sys;
#[cfg(not(loom))]
pub mod tx;
#[cfg(not(loom))]
pub mod virtio;
