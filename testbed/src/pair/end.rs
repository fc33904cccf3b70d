//! What a pair needs of either end, whoever plays it.

use std::fmt;

use pmd::fwd::{Engine, Pages};

use super::PairError;

/// Which end of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The device end.
    Host,
    /// The driver end.
    Guest,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Side::Host => "host",
            Side::Guest => "guest",
        })
    }
}

/// The paths that run, by name, as far as the end tells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    /// The receive path.
    pub rx: Option<String>,
    /// The transmit path.
    pub tx: Option<String>,
}

/// What an end counted since it came up. A frame that was received has been forwarded (and is then sent, or unsent) or freed;
/// one that was sent has been received at the other end, or is lost at one of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// The moment, in seconds of the end's own clock.
    pub time_s: f64,
    /// Frames taken from the rings.
    pub received: u64,
    /// Frames that the rings took.
    pub sent: u64,
    /// Frames that they did not take, and that the engine freed. Those of DPDK's generator are not among them: it makes frames
    /// in vain.
    pub unsent: u64,
    /// Frames made here, if the end tells.
    pub made: Option<u64>,
    /// Frames that were lost on the way in, by reason.
    pub lost_rx: Vec<(String, u64)>,
    /// Frames that were lost on the way out, after the rings took them, by reason.
    pub lost_tx: Vec<(String, u64)>,
}

impl Counts {
    /// Whether nothing has happened since `earlier`.
    #[must_use]
    pub fn same(&self, earlier: &Counts) -> bool {
        Counts { time_s: earlier.time_s, ..self.clone() } == *earlier
    }
}

/// One end.
pub(super) trait End {
    /// An error if it has ended.
    fn check(&mut self) -> Result<(), PairError>;

    /// Whether frames can flow.
    fn link_is_up(&mut self) -> Result<bool, PairError>;

    /// The paths that run.
    fn paths(&mut self) -> Result<Paths, PairError>;

    /// What its memory consists of, if it tells.
    fn pages(&self) -> Option<Pages>;

    /// Runs `engine`, after sending so many bursts of new frames on each queue.
    fn start(&mut self, engine: Engine, tx_first: u32) -> Result<(), PairError>;

    /// Ends the engine.
    fn stop(&mut self) -> Result<(), PairError>;

    /// What it has counted so far. [`Counts::unsent`] may be that of the last stop.
    fn counts(&mut self) -> Result<Counts, PairError>;

    /// Ends it. What went wrong without keeping it from ending comes as sentences.
    fn quit(self: Box<Self>) -> Result<Vec<String>, PairError>;
}
