//! The command line of `twinring`.

use std::ffi::OsString;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use pmd::fwd::parse;
use pmd::sys::cpus_allowed;

use crate::pair::{
    self, BACKEND_ROLE, Cell, Cpus, GUEST_ROLE, Guest, Host, Interrupt, Outcome, PairError, Plan, Ring, Simd, Traffic,
};
use crate::table;

/// The exit code of a process that SIGINT ends: 128 and the signal's number.
const INTERRUPTED: u8 = 130;
/// The exit code after a usage error.
const USAGE: u8 = 2;
/// Descriptors of a ring: from where bursts fit in, to the most that virtio has (virtio 1.3, 2.7).
const RING_SIZES: RangeInclusive<u16> = 64..=32768;
/// How long a cell may be measured, in seconds.
const SECONDS: RangeInclusive<f64> = 0.01..=3600.0;
/// How often the progress bar moves.
const TICK: Duration = Duration::from_millis(100);

#[derive(Parser)]
#[command(
    name = "twinring",
    version,
    about = "Runs a virtio-net driver and a vhost-user backend against each other",
    arg_required_else_help = false
)]
enum Cli {
    /// Measures the driver and the backend as two processes joined by a vhost-user socket, and accounts for every frame.
    /// Options that take lists select cells of the table
    Loop(LoopOptions),
}

/// Which cells to measure, and how.
#[derive(clap::Args)]
struct LoopOptions {
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
    /// Queue pairs, 1 to 128 each; all are polled by one CPU a side
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "1,2,3",
        value_parser = clap::value_parser!(u16).range(1..=128))]
    queues: Vec<u16>,
    /// Length of a frame, 60 to 9000 bytes without FCS
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(60..=9000))]
    frame: u16,
    /// Most packets at a time, 1 to 512
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=512))]
    burst: u16,
    /// Descriptors a ring: a power of two, 64 to 32768
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = ring_size)]
    ring_size: u16,
    /// How long each cell is measured, 0.01 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = duration)]
    seconds: Duration,
    /// The CPUs on which host and guest poll (default: 0,1, or the first two there are)
    #[arg(long, value_name = "HOST,GUEST", value_parser = cpus)]
    cpus: Option<Cpus>,
    /// Receive path of our guest, by name (default: the best that fits)
    #[arg(long, value_name = "NAME")]
    rx_path: Option<String>,
    /// Transmit path of our guest, by name (default: the best that fits)
    #[arg(long, value_name = "NAME")]
    tx_path: Option<String>,
    /// Who drives the rings
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "twinring")]
    guest: Vec<Guest>,
    /// Who serves the rings
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "twinring")]
    host: Vec<Host>,
    /// The file system in which DPDK's testpmd lies
    #[arg(long, value_name = "DIR", default_value = "/")]
    dpdk_root: PathBuf,
    /// Print the results as one line of JSON, and no table
    #[arg(long)]
    json: bool,
}

/// A feature that is there or not.
#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// `twinring`: parses `args` (program name first) and does what they say.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    // The roles are this program's own business, and have their own command lines.
    match args.get(1).and_then(|role| role.to_str()) {
        Some(BACKEND_ROLE) => return backend::main(args.into_iter().skip(1)),
        Some(GUEST_ROLE) => return pmd::fwd::main(args.into_iter().skip(1), &pmd::fwd::open),
        _ => {}
    }
    let command = args.iter().skip(1).map(|arg| arg.to_string_lossy()).collect::<Vec<_>>().join(" ");
    match parse::<Cli>(args) {
        Ok(Cli::Loop(options)) => run_loop(&options, &format!("twinring {command}")),
        Err(code) => code,
    }
}

/// `twinring loop`.
fn run_loop(options: &LoopOptions, command: &str) -> ExitCode {
    let complain = |sentence: &dyn fmt::Display| eprintln!("twinring loop: {sentence}");
    let (cells, plan) = match options.cells().and_then(|cells| Ok((cells, options.plan()?))) {
        Ok(chosen) => chosen,
        Err(sentence) => {
            complain(&sentence);
            return ExitCode::from(USAGE);
        }
    };
    let interrupt = match Interrupt::watch() {
        Ok(interrupt) => interrupt,
        Err(error) => {
            complain(&format!("cannot wait for Ctrl-C: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let (outcomes, failure) = measure(&cells, &plan, &interrupt);
    let mut advice = outcomes.iter().flat_map(|outcome| &outcome.pages).filter_map(|pages| pages.advice.as_ref());
    if let Some(advice) = advice.next_back() {
        eprintln!("{advice}");
    }
    if !options.json {
        print!("{}{}", table::render(&outcomes), table::conditions(&outcomes, &plan, command));
    } else if failure.is_none() {
        println!("{}", table::json(&outcomes));
    }
    match failure {
        Some((cell, error)) => {
            complain(&format!("{cell}: {error}"));
            if matches!(error, PairError::Interrupted) { ExitCode::from(INTERRUPTED) } else { ExitCode::FAILURE }
        }
        None if outcomes.iter().any(|outcome| outcome.problem.is_some()) => ExitCode::FAILURE,
        None => ExitCode::SUCCESS,
    }
}

/// Measures `cells` one after the other, with a progress bar on standard error if that is a terminal; what is wrong with one is
/// said there, too. Ends early at a cell that has no result, and returns that with the reason.
fn measure(cells: &[Cell], plan: &Plan, interrupt: &Interrupt) -> (Vec<Outcome>, Option<(Cell, PairError)>) {
    let mut outcomes = Vec::new();
    let bar = ProgressBar::new(cells.len() as u64);
    // The template is a constant, and right.
    if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg} ({eta} left)") {
        bar.set_style(style);
    }
    bar.enable_steady_tick(TICK);
    let mut failure = None;
    for cell in cells {
        bar.set_message(cell.to_string());
        match pair::run(cell, plan, interrupt) {
            Ok(outcome) => {
                if let Some(problem) = &outcome.problem {
                    bar.suspend(|| eprintln!("twinring loop: {cell}: {problem}"));
                }
                outcomes.push(outcome);
                bar.inc(1);
            }
            Err(error) => {
                failure = Some((*cell, error));
                break;
            }
        }
    }
    bar.finish_and_clear();
    (outcomes, failure)
}

impl LoopOptions {
    /// Every combination of the lists that there is; a sentence if there is none.
    fn cells(&self) -> Result<Vec<Cell>, String> {
        let mut cells = Vec::new();
        let Self { frame, burst, ring_size, .. } = *self;
        let on = |switch: &Switch| *switch == Switch::On;
        for (&host, &guest) in pairs(&self.host, &self.guest) {
            for (&ring, &simd) in pairs(&self.ring, &self.simd) {
                for (mergeable, in_order) in pairs(&self.mergeable, &self.in_order) {
                    let (mergeable, in_order) = (on(mergeable), on(in_order));
                    for (&traffic, &queues) in pairs(&self.engine, &self.queues) {
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
        }
        cells.retain(Cell::is_possible);
        if cells.is_empty() {
            return Err("the reference backend has split rings only; use --ring split".into());
        }
        Ok(cells)
    }

    /// How they are measured; a sentence if that is not possible.
    fn plan(&self) -> Result<Plan, String> {
        let paths = [("--rx-path", &self.rx_path), ("--tx-path", &self.tx_path)];
        if let Some((option, _)) = paths.iter().find(|path| path.1.is_some())
            && !self.guest.contains(&Guest::Twinring)
        {
            return Err(format!("{option} chooses a path of our guest, but no guest is ours; use --guest twinring"));
        }
        let program = std::env::current_exe().map_err(|error| format!("cannot find this program's file: {error}"))?;
        Ok(Plan {
            program,
            duration: self.seconds,
            cpus: self.choose_cpus()?,
            rx_path: self.rx_path.clone(),
            tx_path: self.tx_path.clone(),
            dpdk_root: self.dpdk_root.clone(),
        })
    }

    fn choose_cpus(&self) -> Result<Cpus, String> {
        let allowed = cpus_allowed().map_err(|error| format!("cannot find out which CPUs there are: {error}"))?;
        let cpus = match (self.cpus, &allowed[..]) {
            (Some(cpus), _) => cpus,
            (None, [host, guest, ..]) => Cpus { host: *host, guest: *guest },
            (None, [only]) => Cpus { host: *only, guest: *only },
            (None, []) => return Err("there is no CPU to run on".into()),
        };
        if let Some(cpu) = [cpus.host, cpus.guest].iter().find(|cpu| !allowed.contains(cpu)) {
            return Err(format!("--cpus: CPU {cpu} cannot be used; those that can are {}", list(&allowed)));
        }
        if cpus.host == cpus.guest {
            eprintln!("host and guest share CPU {}: rates are far below what a CPU each gives", cpus.host);
        }
        Ok(cpus)
    }
}

/// Every combination of two lists, the second one running faster.
fn pairs<'a, A, B>(a: &'a [A], b: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    a.iter().flat_map(move |a| b.iter().map(move |b| (a, b)))
}

fn list(numbers: &[usize]) -> String {
    numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
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
