//! virtio-net: the device as a [`Port`](crate::port::Port), its rings, and the transport.
pub mod paths;
pub mod port;
pub mod spec;
pub mod split;
pub mod split_tx;
pub mod user;

/// Wakes a device that does not poll.
pub trait Doorbell: Send {
    /// Tells it that the ring has something new.
    fn ring(&self);
}
