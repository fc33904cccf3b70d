//! Two processes joined by a vhost-user socket: started, measured, drained, and every frame accounted for.
//!
//! ```text
//! Pair::start      host, then guest; the link is up
//!   begin          traffic flows, and is warm
//!   measure        rates, from differences of counters
//! finish           the source stops, the rings run dry, the ledger is closed, both processes end
//! ```

mod account;
mod cell;
mod child;
mod dpdk;
mod end;
mod error;
mod interrupt;
mod reference;
mod twinring;

pub use account::Account;
pub use cell::{Cell, Guest, Host, Ring, Simd, Traffic};
pub use end::{Counts, Paths, Side};
pub use error::PairError;
pub use interrupt::Interrupt;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use pmd::fwd::{Engine, Pages};
use vmm_sys_util::tempdir::TempDir;

use account::Station;
use dpdk::Dpdk;
use end::End;
use reference::ReferenceHost;
use twinring::Twinring;

/// The hidden subcommand that makes this program a backend.
pub const BACKEND_ROLE: &str = "backend-role";
/// The hidden subcommand that makes this program a guest.
pub const GUEST_ROLE: &str = "guest-role";

/// How long the link may take to come up once both ends are there.
const LINK_MAX: Duration = Duration::from_secs(10);
/// Traffic runs so long before it is measured.
pub const WARM_UP_MAX: Duration = Duration::from_millis(200);
/// Rates are taken over so many equal parts of the time.
pub const SAMPLES: u32 = 5;
/// How long the rings may take to run dry.
const DRAIN_MAX: Duration = Duration::from_secs(10);
/// Counters that stand still for so long will not move any more.
const STILL: Duration = Duration::from_secs(1);
/// Between two looks at something there is no event for.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long an end may be gone unnoticed.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// With [`Traffic::Io`] a quarter of each ring goes round: enough that neither end waits for the other, and room is left.
const CIRCULATING: u32 = 4;

/// The CPUs on which the two ends poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpus {
    /// The host's.
    pub host: usize,
    /// The guest's.
    pub guest: usize,
}

/// How cells are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The program that plays our roles; normally the one that runs.
    pub program: PathBuf,
    /// Time to measure.
    pub duration: Duration,
    /// Where to poll.
    pub cpus: Cpus,
    /// The receive path of our guest, by name; none: the best that fits.
    pub rx_path: Option<String>,
    /// The transmit path of our guest, by name; none: the best that fits.
    pub tx_path: Option<String>,
    /// The file system in which DPDK lies.
    pub dpdk_root: PathBuf,
}

/// Frames that the guest received in a second, in millions: of several samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// The median.
    pub mpps: f64,
    /// The lowest.
    pub low: f64,
    /// The highest.
    pub high: f64,
}

/// What came out of a cell.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was measured.
    pub cell: Cell,
    /// How fast it was.
    pub rate: Rate,
    /// The paths at the host.
    pub host_paths: Paths,
    /// The paths at the guest.
    pub guest_paths: Paths,
    /// What the memory of our ends consists of.
    pub pages: Vec<Pages>,
    /// Where the frames went.
    pub account: Account,
    /// What was wrong: frames that are not accounted for, mbufs that are not home. None if all was well.
    pub problem: Option<String>,
}

/// Measures one cell.
///
/// # Errors
/// [`PairError`] if there is no result. Both processes are gone then, and so is the socket's directory.
pub fn run(cell: &Cell, plan: &Plan, interrupt: &Interrupt) -> Result<Outcome, PairError> {
    let mut pair = Pair::start(cell, plan, interrupt)?;
    pair.begin()?;
    let rate = pair.measure(plan.duration)?;
    pair.finish(rate)
}

/// A running pair. Dropping it ends both processes and removes the directory of their socket.
pub struct Pair {
    cell: Cell,
    // The guest goes first, so that the host sees it leave.
    guest: Box<dyn End>,
    host: Box<dyn End>,
    host_paths: Paths,
    guest_paths: Paths,
    interrupt: Interrupt,
    warm_up: Duration,
    _directory: TempDir,
}

impl Pair {
    /// Starts the host, then the guest, and waits until frames can flow.
    ///
    /// # Errors
    /// [`PairError`]; nothing is left then.
    pub fn start(cell: &Cell, plan: &Plan, interrupt: &Interrupt) -> Result<Self, PairError> {
        let parent = std::env::temp_dir();
        let directory = TempDir::new_with_prefix(parent.join("twinring-"));
        let directory = directory.map_err(|e| PairError::Directory { parent, source: e.into() })?;
        let socket = directory.as_path().join("vhost.sock");
        let mut host = match cell.host {
            Host::Twinring => boxed(Twinring::launch(Side::Host, cell, plan, &socket, interrupt)?),
            Host::Dpdk => boxed(Dpdk::launch(Side::Host, cell, plan, &socket)?),
            Host::Reference => boxed(ReferenceHost::launch(cell, plan, &socket)?),
        };
        let guest = match cell.guest {
            Guest::Twinring => Twinring::launch(Side::Guest, cell, plan, &socket, interrupt).map(boxed),
            Guest::Dpdk => Dpdk::launch(Side::Guest, cell, plan, &socket).map(boxed),
        };
        // A guest does not come up without its host: then the host is what has failed.
        let guest = guest.map_err(|error| host.check().err().unwrap_or(error))?;
        let mut pair = Self {
            cell: *cell,
            guest,
            host,
            host_paths: Paths::default(),
            guest_paths: Paths::default(),
            interrupt: interrupt.clone(),
            warm_up: plan.duration.min(WARM_UP_MAX),
            _directory: directory,
        };
        pair.wait_for_link()?;
        pair.host_paths = pair.host.paths()?;
        pair.guest_paths = pair.guest.paths()?;
        Ok(pair)
    }

    fn wait_for_link(&mut self) -> Result<(), PairError> {
        let deadline = Instant::now() + LINK_MAX;
        loop {
            let side = match (self.host.link_is_up()?, self.guest.link_is_up()?) {
                (true, true) => return Ok(()),
                (true, false) => Side::Guest,
                (false, _) => Side::Host,
            };
            if Instant::now() >= deadline {
                return Err(PairError::LinkDown { side, timeout_ms: LINK_MAX.as_millis() });
            }
            self.pause(POLL_INTERVAL)?;
        }
    }

    /// Lets time pass, and both ends run.
    fn pause(&mut self, duration: Duration) -> Result<(), PairError> {
        let end = Instant::now() + duration;
        loop {
            self.host.check()?;
            self.guest.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            self.interrupt.sleep(left.min(CHECK_INTERVAL))?;
        }
    }

    /// The end that frames start from, and the other one. The reference backend only sends back what it gets.
    fn ends(&mut self) -> (&mut dyn End, &mut dyn End) {
        let (host, guest) = (self.host.as_mut(), self.guest.as_mut());
        if self.cell.host_is_source() { (host, guest) } else { (guest, host) }
    }

    /// Lets traffic flow, and waits until it is warm.
    ///
    /// # Errors
    /// [`PairError`] if an end does not start.
    pub fn begin(&mut self) -> Result<(), PairError> {
        let Cell { traffic, ring_size, burst, .. } = self.cell;
        let (source, sink) = self.ends();
        match traffic {
            Traffic::RxOnly => {
                sink.start(Engine::RxOnly, 0)?;
                source.start(Engine::TxOnly, 0)?;
            }
            Traffic::Io => {
                let bursts = u32::from(ring_size) / CIRCULATING / u32::from(burst);
                sink.start(Engine::Io, 0)?;
                source.start(Engine::Io, bursts.max(1))?;
            }
        }
        self.pause(self.warm_up)
    }

    /// The rate over `duration`, in equal parts.
    ///
    /// # Errors
    /// [`PairError`] if an end is gone.
    pub fn measure(&mut self, duration: Duration) -> Result<Rate, PairError> {
        let mut rates = Vec::new();
        let mut earlier = self.guest.counts()?;
        for _ in 0..SAMPLES {
            self.pause(duration / SAMPLES)?;
            let now = self.guest.counts()?;
            rates.push(mpps(&earlier, &now));
            earlier = now;
        }
        Ok(Rate::of(&mut rates))
    }

    /// Stops the source, lets the rings run dry, closes the ledger, and ends both processes.
    ///
    /// # Errors
    /// [`PairError`] if an end is gone; frames that are missing are no error, but a problem of the outcome.
    pub fn finish(mut self, rate: Rate) -> Result<Outcome, PairError> {
        let traffic = self.cell.traffic;
        let (source, _) = self.ends();
        source.stop()?;
        let received = source.counts()?.received;
        if traffic == Traffic::Io {
            // What still goes round ends here.
            source.start(Engine::RxOnly, 0)?;
        }
        let mut problems = Vec::from_iter(self.drain()?);
        let (source, sink) = self.ends();
        if traffic == Traffic::Io {
            source.stop()?;
        }
        sink.stop()?;
        let (source, sink) = (source.counts()?, sink.counts()?);
        let account = self.account(&source, &sink, source.received.saturating_sub(received));
        problems.extend(account.problem());

        let pages = [&self.host, &self.guest].into_iter().filter_map(|end| end.pages()).collect();
        for (side, end) in [(Side::Guest, self.guest), (Side::Host, self.host)] {
            problems.extend(end.quit()?.into_iter().map(|complaint| format!("the {side} says: {complaint}")));
        }
        let problem = (!problems.is_empty()).then(|| problems.join("\n"));
        let Self { cell, host_paths, guest_paths, .. } = self;
        Ok(Outcome { cell, rate, host_paths, guest_paths, pages, account, problem })
    }

    fn account(&self, source: &Counts, sink: &Counts, freed: u64) -> Account {
        let sides = if self.cell.host_is_source() { [Side::Host, Side::Guest] } else { [Side::Guest, Side::Host] };
        let [source, sink] = [(sides[0], source), (sides[1], sink)].map(|(side, counts)| Station { side, counts });
        Account::new(&self.cell, &source, &sink, freed)
    }

    /// Waits until the counters stand still: at once when they balance, else for a while. Returns what is wrong if they do not.
    fn drain(&mut self) -> Result<Option<String>, PairError> {
        let (start, mut earlier) = (Instant::now(), (Counts::default(), Counts::default()));
        let mut still_since = start;
        while start.elapsed() < DRAIN_MAX {
            let (source, sink) = self.ends();
            let (source, sink) = (source.counts()?, sink.counts()?);
            if source.same(&earlier.0) && sink.same(&earlier.1) {
                // How many were freed is not known yet, and is left out.
                let dry = self.account(&Counts { made: None, ..source.clone() }, &sink, 0).problem().is_none();
                if dry || still_since.elapsed() >= STILL {
                    return Ok(None);
                }
            } else {
                still_since = Instant::now();
            }
            earlier = (source, sink);
            self.pause(POLL_INTERVAL)?;
        }
        Ok(Some(format!("frames still flow {} ms after their source was stopped", DRAIN_MAX.as_millis())))
    }
}

fn boxed<'a>(end: impl End + 'a) -> Box<dyn End + 'a> {
    Box::new(end)
}

#[expect(clippy::cast_precision_loss, reason = "a rate: the 53 bits of a float are plenty")]
fn mpps(earlier: &Counts, now: &Counts) -> f64 {
    let frames = now.received.saturating_sub(earlier.received) as f64;
    frames / 1e6 / (now.time_s - earlier.time_s).max(f64::MIN_POSITIVE)
}

impl Rate {
    /// The rate of several samples; 0 of none. Of an even number the upper of the two in the middle is the median.
    pub(crate) fn of(samples: &mut [f64]) -> Self {
        samples.sort_by(f64::total_cmp);
        let middle = samples.len() / 2;
        let [mpps, low, high] =
            [samples.get(middle), samples.first(), samples.last()].map(|rate| rate.copied().unwrap_or(0.0));
        Self { mpps, low, high }
    }
}
