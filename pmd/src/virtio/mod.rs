//! virtio-net.
pub mod spec;
