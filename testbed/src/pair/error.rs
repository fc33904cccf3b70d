//! What goes wrong with a pair of processes.

use std::io;
use std::path::PathBuf;

use super::Side;
use crate::peer::dpdk::DpdkError;
use crate::peer::reference::ReferenceError;

/// Why a cell has no result.
#[derive(Debug, thiserror::Error)]
pub enum PairError {
    /// The user wants us to end.
    #[error("interrupted; the cells that were not measured are missing")]
    Interrupted,
    /// No directory for the socket.
    #[error("cannot create a directory in {} for the socket: {source}; set TMPDIR to one where that is possible", parent.display())]
    Directory {
        /// Where it was to be.
        parent: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A process could not be started.
    #[error("the {side} could not be started: {source}; end other processes, or raise the limit on them (ulimit -u)")]
    Start {
        /// Which end.
        side: Side,
        /// Why not.
        source: io::Error,
    },
    /// A process cannot be waited for.
    #[error("the {side} cannot be waited for: {source}")]
    Wait {
        /// Which end.
        side: Side,
        /// Why not.
        source: io::Error,
    },
    /// A process ended, or closed a pipe, before its time.
    #[error("the {side} ended ({status}) at {asked:?}: {said}")]
    Ended {
        /// Which end.
        side: Side,
        /// The command, or what else it was doing.
        asked: String,
        /// Its exit status.
        status: String,
        /// The last that it said.
        said: String,
    },
    /// A process did not answer.
    #[error("the {side} did not answer to {asked:?} within {timeout_ms} ms; is its CPU free?")]
    Silent {
        /// Which end.
        side: Side,
        /// The command, or what else it was doing.
        asked: String,
        /// How long was waited, in milliseconds.
        timeout_ms: u128,
    },
    /// A process did not do as told.
    #[error("the {side} refused {asked:?}: {error}")]
    Refused {
        /// Which end.
        side: Side,
        /// The command, or what else it was doing.
        asked: String,
        /// What it said.
        error: String,
    },
    /// An answer that is none.
    #[error("the {side} did not answer to {asked:?} in JSON: {source}")]
    Garbled {
        /// Which end.
        side: Side,
        /// The command, or what else it was doing.
        asked: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The two ends did not find each other.
    #[error("the link of the {side} is still down after {timeout_ms} ms, though host and guest are both there")]
    LinkDown {
        /// Which end.
        side: Side,
        /// How long was waited, in milliseconds.
        timeout_ms: u128,
    },
    /// DPDK at one end.
    #[error(transparent)]
    Dpdk(#[from] DpdkError),
    /// The reference backend.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
}
