//! virtio-net: the device as a [`Port`](crate::port::Port), its rings, and the transport.
pub mod event;
pub mod packed;
pub mod paths;
pub mod port;
pub mod receive;
pub mod ring;
pub mod spec;
pub mod split;
pub mod transmit;
pub mod user;

pub use ring::Doorbell;
