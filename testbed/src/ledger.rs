//! The ledger of a run: every frame that goes in comes out, or is dropped under a name.

use std::fmt;

/// Which column of the ledger an entry stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    In,
    Out,
    Dropped,
}

#[derive(Debug, Clone)]
struct Entry {
    side: Side,
    name: String,
    frames: u64,
}

/// What went in, what came out and what was dropped, by name, in frames.
///
/// ```
/// let mut ledger = testbed::ledger::Ledger::new("txonly to rxonly");
/// ledger.input("guest sent", 100);
/// ledger.dropped("host: no buffer", 3);
/// ledger.output("host received", 97);
/// assert!(ledger.balance().is_ok());
/// ```
#[derive(Debug, Clone)]
pub struct Ledger {
    title: String,
    entries: Vec<Entry>,
}

/// A ledger that does not balance.
#[derive(Clone, thiserror::Error)]
#[error("{missing} frames {sense}; every frame must come out or be counted as dropped:\n{ledger}")]
pub struct LedgerError {
    /// How many frames the two sides differ by.
    pub missing: u128,
    sense: &'static str,
    /// The ledger as it stood.
    pub ledger: Ledger,
}

/// As it displays: `unwrap` in a test then shows the ledger, not its fields.
impl fmt::Debug for LedgerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Ledger {
    /// An empty ledger; `title` says which run it is of.
    #[must_use]
    pub fn new(title: impl Into<String>) -> Self {
        Self { title: title.into(), entries: Vec::new() }
    }

    /// Enters `frames` that were put in at `name`.
    pub fn input(&mut self, name: impl Into<String>, frames: u64) {
        self.enter(Side::In, name, frames);
    }

    /// Enters `frames` that arrived where they should, at `name`.
    pub fn output(&mut self, name: impl Into<String>, frames: u64) {
        self.enter(Side::Out, name, frames);
    }

    /// Enters `frames` that somebody dropped and counted as `name`.
    pub fn dropped(&mut self, name: impl Into<String>, frames: u64) {
        self.enter(Side::Dropped, name, frames);
    }

    /// Checks that in = out + dropped.
    ///
    /// # Errors
    /// [`LedgerError`], which prints the whole ledger, if the two differ.
    pub fn balance(&self) -> Result<(), LedgerError> {
        let came_in = self.total(Side::In);
        let accounted = self.total(Side::Out) + self.total(Side::Dropped);
        if came_in == accounted {
            return Ok(());
        }
        let sense = if came_in > accounted { "are missing" } else { "came out of nowhere" };
        Err(LedgerError { missing: came_in.abs_diff(accounted), sense, ledger: self.clone() })
    }

    fn enter(&mut self, side: Side, name: impl Into<String>, frames: u64) {
        self.entries.push(Entry { side, name: name.into(), frames });
    }

    /// In 128 bits, so that no number of entries overflows it.
    fn total(&self, side: Side) -> u128 {
        self.entries.iter().filter(|e| e.side == side).map(|e| u128::from(e.frames)).sum()
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "ledger of {}", self.title)?;
        for (side, heading) in [(Side::In, "in"), (Side::Out, "out"), (Side::Dropped, "dropped")] {
            writeln!(f, "  {heading:<44}{:>20}", self.total(side))?;
            for entry in self.entries.iter().filter(|e| e.side == side) {
                writeln!(f, "    {:<42}{:>20}", entry.name, entry.frames)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(sent: u64, received: u64, dropped: u64) -> Ledger {
        let mut ledger = Ledger::new("a run");
        ledger.input("guest sent", sent);
        ledger.output("host received", received);
        ledger.dropped("host: no buffer", dropped);
        ledger
    }

    #[test]
    fn balances_when_every_frame_came_out_or_was_dropped() {
        assert!(run(10, 7, 3).balance().is_ok());
        assert!(Ledger::new("nothing").balance().is_ok());
        assert!(run(u64::MAX, u64::MAX, 0).balance().is_ok());
    }

    #[test]
    fn a_missing_frame_is_named_with_the_whole_ledger() {
        let said = run(10, 6, 3).balance().unwrap_err().to_string();
        for part in ["1 frames are missing", "a run", "guest sent", "host received", "host: no buffer", "10", "6", "3"]
        {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
    }

    #[test]
    fn a_frame_too_many_is_an_error_too() {
        let said = run(10, 11, 0).balance().unwrap_err().to_string();
        assert!(said.contains("1 frames came out of nowhere"), "{said}");
    }

    #[test]
    fn sums_do_not_wrap() {
        let mut ledger = run(u64::MAX, u64::MAX, 0);
        ledger.input("again", 1);
        assert_eq!(ledger.balance().unwrap_err().missing, 1);
    }
}
