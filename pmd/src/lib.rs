//! Twinring's poll-mode driver.
#[cfg(not(loom))]
pub mod mbuf;
#[cfg(not(loom))]
pub mod mem;
#[cfg(not(loom))]
pub mod mempool;
#[cfg(loom)]
#[path = "mempool/ring.rs"]
pub mod ring;
pub mod shared;
#[cfg(not(loom))]
pub mod virtio;
