//! What can go wrong when a port is set up.

/// Why a port would not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum PortError {
    /// A number outside its limits.
    #[error("port {port}: {what} {value} is outside {min}..={max}")]
    Range {
        /// The port's address.
        port: String,
        /// What the number is.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The least allowed.
        min: u64,
        /// The most allowed.
        max: u64,
    },
    /// A number that is not a multiple of what it must be.
    #[error("port {port}: {what} {value} is not a multiple of {of}")]
    Multiple {
        /// The port's address.
        port: String,
        /// What the number is.
        what: &'static str,
        /// Its value.
        value: u64,
        /// What it must be a multiple of.
        of: u64,
    },
    /// A number that is not a power of two.
    #[error("port {port}: {what} {value} is not a power of two; use {} or {}", value.next_power_of_two() / 2, value.next_power_of_two())]
    PowerOfTwo {
        /// The port's address.
        port: String,
        /// What the number is.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The device lacks something that the address asks for.
    #[error("port {port}: the other side does not offer {features}; leave it out of the address, or enable it there")]
    Missing {
        /// The port's address.
        port: String,
        /// What is missing, as keys of the address.
        features: String,
    },
    /// The frame does not fit into one buffer, and may not fill several.
    #[error(
        "port {port}: frames of {frame} bytes do not fit into receive buffers of {buffer}; use larger mbufs, or mergeable buffers (mrg)"
    )]
    FrameTooLong {
        /// The port's address.
        port: String,
        /// The longest frame, in bytes.
        frame: u32,
        /// What one buffer holds, in bytes.
        buffer: u32,
    },
    /// Something was done out of turn.
    #[error("port {port}: cannot {action} while it is {state}; {remedy}")]
    State {
        /// The port's address.
        port: String,
        /// What was asked for.
        action: &'static str,
        /// The state it is in.
        state: &'static str,
        /// What to do first.
        remedy: &'static str,
    },
    /// A queue's only handle is with another worker.
    #[error("port {port}: the handle of {queue} is out already; drop it first")]
    HandleOut {
        /// The port's address.
        port: String,
        /// The queue.
        queue: String,
    },
    /// A worker did not let go of a queue in time.
    #[error("port {port}: a worker has held {queue} for {waited_ms} ms; end its burst first")]
    Busy {
        /// The port's address.
        port: String,
        /// The queue.
        queue: String,
        /// How long was waited, in milliseconds.
        waited_ms: u64,
    },
    /// No path fits, or none of that name.
    #[error("port {port}: {source}")]
    Path {
        /// The port's address.
        port: String,
        /// Which paths there are.
        source: crate::path::PathError,
    },
    /// The device or its transport failed.
    #[error("port {port}: {source}")]
    Device {
        /// The port's address.
        port: String,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No memory for the rings.
    #[error("port {port}: {source}")]
    Memory {
        /// The port's address.
        port: String,
        /// What was asked for.
        source: crate::mem::MemError,
    },
}

impl PortError {
    /// The error of `port`'s device or transport.
    pub fn device(port: &str, source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Device { port: port.to_owned(), source: Box::new(source) }
    }
}
