//! One vhost-user connection: its state, and the rules by which a ring runs.
mod device;

pub use device::{Device, NET_CONFIG_LEN};
