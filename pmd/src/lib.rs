//! Twinring's poll-mode driver.
#[cfg(not(loom))]
pub mod mem;
pub mod shared;
#[cfg(not(loom))]
pub mod virtio;
