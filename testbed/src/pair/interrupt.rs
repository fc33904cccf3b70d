//! Ctrl-C, as something every wait looks at: so that processes and files are gone when we are.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pmd::sys::Termination;

use super::PairError;

/// How often a sleep looks whether it is to end.
const SLICE: Duration = Duration::from_millis(20);

/// Whether the user wants us to end.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes SIGINT and SIGTERM over, for good.
    ///
    /// # Errors
    /// If there is no thread to be had.
    pub fn watch() -> std::io::Result<Self> {
        let interrupt = Self::default();
        let (told, signals) = (interrupt.clone(), Termination::catch()?);
        thread::Builder::new().name("signals".into()).spawn(move || {
            while signals.wait().is_ok() {
                told.set();
            }
        })?;
        Ok(interrupt)
    }

    pub(super) fn set(&self) {
        // Relaxed: it guards nothing.
        self.0.store(true, Ordering::Relaxed);
    }

    /// # Errors
    /// [`PairError::Interrupted`] if the user wants us to end.
    pub(super) fn check(&self) -> Result<(), PairError> {
        if self.0.load(Ordering::Relaxed) { Err(PairError::Interrupted) } else { Ok(()) }
    }

    /// Sleeps for so long.
    ///
    /// # Errors
    /// [`PairError::Interrupted`], at once, if the user wants us to end.
    pub(super) fn sleep(&self, duration: Duration) -> Result<(), PairError> {
        let end = Instant::now() + duration;
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(SLICE));
        }
    }
}
