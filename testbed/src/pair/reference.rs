//! The host, played by the reference backend on threads of this process.

use std::path::Path;
use std::thread;
use std::time::Instant;

use pmd::fwd::{Engine, Pages};
use pmd::sys::pin_thread;

use super::end::{Counts, End, Paths};
use super::{Cell, PairError, Plan, Side, Traffic};
use crate::frame::Stream;
use crate::peer::reference::{Config, Expect, Mode, Reference};

/// A running reference backend.
pub(super) struct ReferenceHost {
    backend: Reference,
    since: Instant,
}

impl ReferenceHost {
    /// Starts it. What it does with frames is settled by that.
    pub(super) fn launch(cell: &Cell, plan: &Plan, socket: &Path) -> Result<Self, PairError> {
        let mode = match cell.traffic {
            Traffic::RxOnly => {
                let stream = Stream::new(0, 0, cell.frame.into()..=cell.frame.into());
                Mode::Source { stream, count: None, returned: Expect::Anything }
            }
            Traffic::Io => Mode::Loop,
        };
        let config = Config {
            queues: cell.queues,
            mergeable: cell.mergeable,
            in_order: cell.in_order,
            ..Config::new(socket, mode)
        };
        let failed = |source| PairError::Start { side: Side::Host, source };
        // Its threads run where the one that starts them does.
        let cpu = plan.cpus.host;
        let starter = thread::Builder::new().name("reference-starter".into());
        let starter = starter.spawn(move || pin_thread(cpu).map(|()| Reference::spawn(config))).map_err(failed)?;
        let panicked = |_| std::io::Error::other("its starter panicked");
        let backend = starter.join().map_err(panicked).and_then(|started| started).map_err(failed)??;
        // A DPDK guest throws away, uncounted, what comes while it starts.
        backend.pause();
        Ok(Self { backend, since: Instant::now() })
    }
}

impl End for ReferenceHost {
    fn check(&mut self) -> Result<(), PairError> {
        Ok(())
    }

    fn link_is_up(&mut self) -> Result<bool, PairError> {
        Ok(self.backend.stats().connections > 0)
    }

    fn paths(&mut self) -> Result<Paths, PairError> {
        Ok(Paths::default())
    }

    fn pages(&self) -> Option<Pages> {
        None
    }

    fn start(&mut self, _: Engine, _: u32) -> Result<(), PairError> {
        self.backend.resume();
        Ok(())
    }

    fn stop(&mut self) -> Result<(), PairError> {
        self.backend.pause();
        Ok(())
    }

    fn counts(&mut self) -> Result<Counts, PairError> {
        let stats = self.backend.stats();
        let reasons = |lost: &[(&str, u64)]| {
            lost.iter().filter(|lost| lost.1 > 0).map(|&(name, frames)| (name.to_owned(), frames)).collect()
        };
        let bad = [("bad_length", stats.dropped_bad_length), ("bad_chain", stats.dropped_bad_chain)];
        Ok(Counts {
            time_s: self.since.elapsed().as_secs_f64(),
            received: stats.from_guest,
            sent: stats.to_guest + stats.dropped_too_long,
            unsent: stats.dropped_no_buffer,
            made: None,
            lost_rx: reasons(&bad),
            lost_tx: reasons(&[("too_long", stats.dropped_too_long)]),
        })
    }

    fn quit(self: Box<Self>) -> Result<Vec<String>, PairError> {
        let stats = self.backend.stop();
        let rings = (stats.bad_rings > 0).then(|| format!("{} looks at rings that made no sense", stats.bad_rings));
        Ok(stats.last_failure.into_iter().chain(rings).collect())
    }
}
