//! Device ends of virtqueues: `QueueConfig -> activate() -> running queue`.
pub mod config;
