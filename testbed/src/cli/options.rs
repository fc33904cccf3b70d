//! What the subcommands can be told, and what they make of it.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use pmd::fwd::{allowed, complain, named, usable, whole};
use pmd::virtio::paths::{RX_PATHS, TX_PATHS};

use crate::compare::{self, Ends};
use crate::pair::{Cell, Cpus, Guest, Host, Plan, Ring, Simd, Traffic};
use crate::peer::dpdk::VHOST_QUEUES_MAX;

/// Descriptors of a ring: from where bursts fit in, to the most that virtio has (virtio 1.3, 2.7).
const RING_SIZES: RangeInclusive<u16> = 64..=32768;
/// How long a cell may be measured, in seconds.
const SECONDS: RangeInclusive<f64> = 0.01..=3600.0;

/// Which cells to measure, and how.
#[derive(clap::Args)]
pub(super) struct LoopOptions {
    #[command(flatten)]
    pub(super) cells: CellOptions,
    /// Queue pairs, 1 to 128 each; all are polled by one CPU a side
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,3",
        allow_negative_numbers = true, value_parser = whole(1_u16, 128))]
    queues: Vec<u16>,
    /// How long each cell is measured, 0.01 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", allow_negative_numbers = true, value_parser = duration)]
    seconds: Duration,
    /// Who drives the rings
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "twinring")]
    guest: Vec<Guest>,
    /// Who serves the rings
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "twinring")]
    host: Vec<Host>,
}

/// What to compare, and how.
#[derive(clap::Args)]
pub(super) struct CompareOptions {
    /// What to compare
    #[arg(value_name = "WHAT", value_delimiter = ',', default_value = "loop")]
    what: Vec<What>,
    #[command(flatten)]
    pub(super) cells: CellOptions,
    /// Queue pairs, 1 to 16 each, for DPDK counts no more; all are polled by one CPU a side
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1",
        allow_negative_numbers = true, value_parser = whole(1_u16, VHOST_QUEUES_MAX))]
    queues: Vec<u16>,
    /// How long each cell is measured in each round, 0.01 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "0.5", allow_negative_numbers = true, value_parser = duration)]
    seconds: Duration,
    /// How often each cell is measured with each pair of ends, 1 to 99
    #[arg(long, value_name = "N", default_value_t = 7, allow_negative_numbers = true, value_parser = whole(1_u16, 99))]
    pub(super) rounds: u16,
    /// Also the pairs of which one end is ours and the other one DPDK's
    #[arg(long)]
    all: bool,
}

/// What can be compared.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum What {
    /// The cells of `twinring loop`
    Loop,
}

/// What all commands that measure cells can be told.
#[derive(clap::Args)]
pub(super) struct CellOptions {
    /// What flows: rxonly (the host sends, the guest receives), io (frames go round)
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "rxonly,io")]
    engine: Vec<Traffic>,
    /// Ring formats
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "split,packed")]
    ring: Vec<Ring>,
    /// Whether buffers are used in order
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "off,on")]
    in_order: Vec<Switch>,
    /// Whether a frame may fill several receive buffers
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "off,on")]
    mergeable: Vec<Switch>,
    /// Vector instructions that the guest's paths may use
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "none")]
    simd: Vec<Simd>,
    /// Length of a frame, 60 to 9000 bytes without FCS
    #[arg(long, value_name = "BYTES", default_value_t = 64, allow_negative_numbers = true, value_parser = whole(60_u16, 9000))]
    frame: u16,
    /// Most packets at a time, 1 to 512
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true, value_parser = whole(1_u16, 512))]
    burst: u16,
    /// Descriptors a ring: a power of two, 64 to 32768
    #[arg(long, value_name = "N", default_value_t = 1024, allow_negative_numbers = true, value_parser = ring_size)]
    ring_size: u16,
    /// The CPUs on which host and guest poll (default: 0,1, or the first two there are)
    #[arg(long, value_name = "HOST,GUEST", value_parser = cpus)]
    cpus: Option<Cpus>,
    /// Receive path of our guest, by name (default: the best that fits)
    #[arg(long, value_name = "NAME")]
    rx_path: Option<String>,
    /// Transmit path of our guest, by name (default: the best that fits)
    #[arg(long, value_name = "NAME")]
    tx_path: Option<String>,
    /// The file system in which DPDK's testpmd lies
    #[arg(long, value_name = "DIR", default_value = "/")]
    dpdk_root: PathBuf,
    /// Print the results as one line of JSON, and no table
    #[arg(long)]
    pub(super) json: bool,
}

/// A feature that is there or not.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl LoopOptions {
    /// Every combination of the lists that there is; a sentence if there is none.
    pub(super) fn cells(&self) -> Result<Vec<Cell>, String> {
        let ends = pairs(&self.host, &self.guest).map(|(&host, &guest)| Ends { host, guest });
        let mut cells: Vec<_> = ends.flat_map(|ends| self.cells.cells(ends, &self.queues)).collect();
        if let Some(cell) = cells.iter().find(|cell| cell.host == Host::Dpdk && cell.queues > VHOST_QUEUES_MAX) {
            return Err(format!(
                "{} queue pairs with --host dpdk: it adds up the counters of its first {VHOST_QUEUES_MAX} queues only, so \
                 that no frame beyond could be accounted for; use --queues {VHOST_QUEUES_MAX} or fewer",
                cell.queues
            ));
        }
        cells.retain(Cell::is_possible);
        if cells.is_empty() {
            return Err("the reference backend has split rings only; use --ring split".into());
        }
        Ok(cells)
    }

    /// How they are measured; a sentence if that is not possible.
    pub(super) fn plan(&self) -> Result<Plan, String> {
        let paths = [("--rx-path", &self.cells.rx_path), ("--tx-path", &self.cells.tx_path)];
        if let Some((option, _)) = paths.iter().find(|path| path.1.is_some())
            && !self.guest.contains(&Guest::Twinring)
        {
            return Err(format!("{option} chooses a path of our guest, but no guest is ours; use --guest twinring"));
        }
        self.cells.plan(self.seconds)
    }
}

impl CompareOptions {
    /// Every combination of the lists, between two ends of ours.
    pub(super) fn cells(&self) -> Vec<Cell> {
        let cells = |what: &What| match what {
            What::Loop => self.cells.cells(compare::OURS, &self.queues),
        };
        self.what.iter().flat_map(cells).collect()
    }

    /// Who plays the two ends in each of the cells.
    pub(super) fn ends(&self) -> &'static [Ends] {
        if self.all { &compare::ALL } else { &compare::PURE }
    }

    /// How they are measured; a sentence if that is not possible.
    pub(super) fn plan(&self) -> Result<Plan, String> {
        self.cells.plan(self.seconds)
    }
}

impl CellOptions {
    fn cells(&self, ends: Ends, queues: &[u16]) -> Vec<Cell> {
        let mut cells = Vec::new();
        let Self { frame, burst, ring_size, .. } = *self;
        let Ends { host, guest } = ends;
        let on = |switch: &Switch| *switch == Switch::On;
        for (&ring, &simd) in pairs(&self.ring, &self.simd) {
            for (mergeable, in_order) in pairs(&self.mergeable, &self.in_order) {
                let (mergeable, in_order) = (on(mergeable), on(in_order));
                for (&traffic, &queues) in pairs(&self.engine, queues) {
                    cells.push(Cell {
                        traffic,
                        ring,
                        in_order,
                        mergeable,
                        simd,
                        queues,
                        frame,
                        burst,
                        ring_size,
                        guest,
                        host,
                    });
                }
            }
        }
        cells
    }

    fn plan(&self, duration: Duration) -> Result<Plan, String> {
        named("--rx-path", self.rx_path.as_ref(), RX_PATHS.iter().map(|row| row.name))?;
        named("--tx-path", self.tx_path.as_ref(), TX_PATHS.iter().map(|row| row.name))?;
        let program = std::env::current_exe().map_err(|error| format!("cannot find this program's file: {error}"))?;
        Ok(Plan {
            program,
            duration,
            cpus: self.choose_cpus()?,
            rx_path: self.rx_path.clone(),
            tx_path: self.tx_path.clone(),
            dpdk_root: self.dpdk_root.clone(),
        })
    }

    fn choose_cpus(&self) -> Result<Cpus, String> {
        let allowed = allowed()?;
        let cpus = match (self.cpus, &allowed[..]) {
            (Some(cpus), _) => cpus,
            (None, [host, guest, ..]) => Cpus { host: *host, guest: *guest },
            (None, [only]) => Cpus { host: *only, guest: *only },
            (None, []) => return Err("there is no CPU to run on".into()),
        };
        usable(&[cpus.host, cpus.guest], &allowed)?;
        if cpus.host == cpus.guest {
            complain(&format!("host and guest share CPU {}: rates are far below what a CPU each gives", cpus.host));
        }
        Ok(cpus)
    }
}

/// Every combination of two lists, the second one running faster.
fn pairs<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    a.iter().flat_map(move |a| b.iter().map(move |b| (a, b)))
}

fn ring_size(text: &str) -> Result<u16, String> {
    let size = text.parse().ok().filter(|size: &u16| size.is_power_of_two() && RING_SIZES.contains(size));
    let (min, max) = (RING_SIZES.start(), RING_SIZES.end());
    size.ok_or_else(|| format!("a ring has a power of two of descriptors, {min} to {max}"))
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| SECONDS.contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| format!("write {} to {} seconds", SECONDS.start(), SECONDS.end()))
}

fn cpus(text: &str) -> Result<Cpus, String> {
    let pair = text.split_once(',').and_then(|(host, guest)| Some((host.parse().ok()?, guest.parse().ok()?)));
    let (host, guest) = pair.ok_or("write the host's CPU and the guest's, like 0,1")?;
    Ok(Cpus { host, guest })
}
