//! Twinring's vhost-user backend: the device end of virtio-net.
//!
//! | module | what |
//! |---|---|
//! | [`control`] | one thread that serves all sockets: connections, messages, time limits |
//! | [`session`] | one connection: its state, and the rules by which a ring runs |
//! | [`memory`] | guest regions, mapped and translated |
//! | [`queue`] | device ends of rings |
//! | [`positions`] | where packed rings stand, for a daemon that comes after a killed one |
//! | [`inflight`] | the same in memory that the front-end keeps |
//!
//! Files that may hold `unsafe`: `memory.rs` (maps the peer's files and hands out their bytes), `sigbus.rs` (the
//! handler for a peer that shortens them).
pub mod burst;
mod cli;
pub mod control;
mod endpoint;
pub mod error;
pub mod inflight;
mod listener;
pub mod memory;
pub mod port;
pub mod positions;
pub mod queue;
pub mod session;
mod sigbus;
mod wire;

pub use cli::main;
