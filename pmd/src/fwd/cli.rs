//! The command line that both binaries share: options, ports and memory, how a process ends.

use std::ffi::OsString;
use std::fmt;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use clap::Parser;
use clap::error::ErrorKind;
use tracing_subscriber::EnvFilter;

use super::steer::{self, Signals};
use super::{
    Address, Engine, FRAME_MAX, FinalReport, ForwardConfig, Forwarder, PortSetup, cache_size, mbufs_needed, open_port,
};
use crate::mbuf::{HEADROOM, MbufPool, MbufPoolConfig, ROOM_DEFAULT};
use crate::mem::{Arena, Pages};
use crate::port::Port;
use crate::sys::{cpus_allowed, descriptors_max, raise_descriptors_max};
use crate::virtio::paths::{RX_PATHS, TX_PATHS};

/// Opens the port of an address; what devices are to reach lies in the arenas. The port comes back not yet configured.
pub type Opener<'a> = &'a dyn Fn(&Address, &[Arc<Arena>]) -> anyhow::Result<Box<dyn Port>>;

/// Bytes of arena for each descriptor, beside its mbuf: the rings, an indirect table, a header.
const DESCRIPTOR_BYTES: usize = 256;
/// Bytes of arena for each queue, for what is rounded up to whole pages.
const QUEUE_BYTES: usize = 64 << 10;
/// The exit code after a usage error.
const USAGE: u8 = 2;
/// Highest CPU number that can be named.
const CPU_MAX: usize = 1023;

const PORT_HELP: &str = "Port, as virtio-user:PATH[,KEY]...; repeatable: 0 and 1, 2 and 3 and so on forward to each other, an \
    odd last one to itself. Keys: queues=N pairs (1; 1 to 128), size=N descriptors a ring (1024; 2 to 32768), packed rings, \
    in_order use of buffers, mrg (a frame may fill several buffers), event_idx (kicks by index), server (listen at PATH for the \
    backend, up to 10 s)";

/// What can be said on the command line.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The ports: 0 and 1, 2 and 3 and so on forward to each other, an odd last one to itself.
    #[arg(long = "port", value_name = "ADDRESS", required = true, help = PORT_HELP)]
    pub ports: Vec<Address>,
    /// What to do with frames
    #[arg(long, value_name = "NAME", value_enum, default_value_t)]
    pub engine: Engine,
    /// Receive path, by name (default: the best that fits)
    #[arg(long, value_name = "NAME")]
    pub rx_path: Option<String>,
    /// Transmit path, by name (default: the best that fits)
    #[arg(long, value_name = "NAME")]
    pub tx_path: Option<String>,
    /// Most packets at a time, 1 to 512
    #[arg(long, value_name = "N", default_value_t = 32, allow_negative_numbers = true, value_parser = whole(1_u16, 512))]
    pub burst: u16,
    /// Length of generated frames, 60 to 9000 bytes without FCS
    #[arg(long, value_name = "BYTES", default_value_t = 64, allow_negative_numbers = true, value_parser = whole(60_u16, 9000))]
    pub frame: u16,
    /// CPUs to run on, one worker each, like 0,2-3 (default: one worker, wherever the kernel puts it)
    #[arg(long, value_name = "LIST")]
    pub cpus: Option<CpuList>,
    /// Seconds to run, up to 4294967295 (0: until Ctrl-C)
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = whole(0_u32, u32::MAX))]
    pub seconds: u32,
    /// Print the final statistics as one line of JSON, and nothing else
    #[arg(long)]
    pub json: bool,
    /// Number generated frames, so that whoever receives them can tell loss from reordering
    #[arg(long, hide = true)]
    pub sequence: bool,
    /// Take commands from standard input, and answer each with one line of JSON
    #[arg(long, hide = true, conflicts_with_all = ["engine", "seconds", "json"])]
    pub control: bool,
}

/// Takes whole numbers from `min` to `max`.
pub fn whole<N>(min: N, max: N) -> impl Fn(&str) -> Result<N, String> + Clone + Send + Sync + 'static
where
    N: FromStr + PartialOrd + fmt::Display + Copy + Send + Sync + 'static,
{
    move |text: &str| {
        let number = text.parse().ok().filter(|n| (min..=max).contains(n));
        number.ok_or_else(|| format!("write a whole number, {min} to {max}"))
    }
}

impl Options {
    /// Checks what can be known before anything is opened: the ports are of `scheme`, no two at one path, and the CPUs can be had.
    ///
    /// # Errors
    /// What is wrong, in one sentence.
    pub fn check(&self, scheme: &str) -> Result<(), String> {
        for (i, address) in self.ports.iter().enumerate() {
            if address.scheme() != scheme {
                let (done, here) = match scheme {
                    "virtio-user" => ("served by twinring-backend", "drive"),
                    _ => ("driven by twinring-fwd", "serve"),
                };
                let other = address.scheme();
                return Err(format!("address {address}: a {other} port is {done}; {here} {scheme}:PATH here"));
            }
            if self.ports[..i].iter().any(|other| other.path() == address.path()) {
                return Err(format!("address {address}: two ports have this path; give each its own"));
            }
        }
        let cpus = self.cpus.clone().unwrap_or_default().0;
        if let Some((_, cpu)) = cpus.iter().enumerate().find(|(i, cpu)| cpus[..*i].contains(cpu)) {
            return Err(format!("--cpus: CPU {cpu} is named twice; a worker needs one of its own"));
        }
        usable(&cpus, &allowed()?)?;
        named("--rx-path", self.rx_path.as_ref(), RX_PATHS.iter().map(|row| row.name))?;
        named("--tx-path", self.tx_path.as_ref(), TX_PATHS.iter().map(|row| row.name))
    }
}

/// The CPUs that this process may run on.
///
/// # Errors
/// A sentence with what the kernel says.
pub fn allowed() -> Result<Vec<usize>, String> {
    cpus_allowed().map_err(|error| format!("cannot find out which CPUs there are: {error}"))
}

/// Checks that all of `cpus`, named by `--cpus`, are among those `allowed`.
///
/// # Errors
/// A sentence that names the first one which is not, and those that are.
pub fn usable(cpus: &[usize], allowed: &[usize]) -> Result<(), String> {
    let list = || allowed.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    match cpus.iter().find(|cpu| !allowed.contains(cpu)) {
        Some(cpu) => Err(format!("--cpus: CPU {cpu} cannot be used; those that can are {}", list())),
        None => Ok(()),
    }
}

/// Checks that `option`, if it is there, names one of `known`.
///
/// # Errors
/// A sentence with the names there are.
pub fn named<'a>(option: &str, name: Option<&String>, known: impl Iterator<Item = &'a str>) -> Result<(), String> {
    let known: Vec<_> = known.collect();
    match name {
        Some(name) if !known.contains(&name.as_str()) => {
            Err(format!("{option}: no path is called {name}; there are {}", known.join(", ")))
        }
        _ => Ok(()),
    }
}

/// A list of CPU numbers, like `0,2-3`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

impl FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|&cpu: &usize| cpu <= CPU_MAX);
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (Some(first), Some(last)) = (number(first), number(last)) else {
                return Err(format!("{part:?} is no CPU number or range, 0 to {CPU_MAX}; write a list like 0,2-3"));
            };
            if first > last {
                return Err(format!("range {part} ends before it begins; write {last}-{first}"));
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }
}

#[derive(Parser)]
#[command(name = "twinring-fwd", version, about = "Forwards frames between ports, as testpmd does")]
struct Cli {
    #[command(flatten)]
    options: Options,
}

/// `twinring-fwd`: parses `args` (program name first), opens the ports with `opener` and runs until told to end.
pub fn main(args: impl IntoIterator<Item = OsString>, opener: Opener<'_>) -> ExitCode {
    match parse::<Cli>(args) {
        Ok(cli) => start("twinring-fwd", "virtio-user", &cli.options, opener),
        Err(code) => code,
    }
}

/// Checks the options of `program`, whose ports are of `scheme`, and runs; the exit code.
pub fn start(program: &str, scheme: &str, options: &Options, opener: Opener<'_>) -> ExitCode {
    match options.check(scheme) {
        Ok(()) => exit_code(program, &run(options, opener)),
        Err(sentence) => {
            complain(&format!("{program}: {sentence}"));
            ExitCode::from(USAGE)
        }
    }
}

/// Parses a command line. What is wrong with it is said in one sentence on standard error.
///
/// # Errors
/// The exit code: 2 for a usage error, 0 after `--help` and `--version`.
pub fn parse<P: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<P, ExitCode> {
    P::try_parse_from(args).map_err(|error| {
        if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
            return error.print().map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
        }
        let text = error.render().to_string();
        // clap goes on with usage and hints in further paragraphs.
        let first = text.split("\n\n").next().unwrap_or_default();
        let sentence = first.split_whitespace().collect::<Vec<_>>().join(" ");
        complain(&format!("{sentence}; see --help"));
        ExitCode::from(USAGE)
    })
}

/// Says a sentence on standard error. If nobody is there to hear it, that is no reason to end.
pub fn complain(sentence: &str) {
    let _ = writeln!(std::io::stderr(), "{sentence}");
}

/// The exit code of a run; an error is said in one sentence on standard error.
pub fn exit_code(program: &str, result: &anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("{program}: {}", sentence(error)));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, but for those that it names itself.
pub(super) fn sentence(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            text += if text.is_empty() { "" } else { ": " };
            text += &cause;
        }
    }
    without_descriptors(text)
}

/// A process without descriptors fails in whatever it tries, and the remedy is always the same.
#[must_use]
pub fn without_descriptors(text: String) -> String {
    let said = std::io::Error::from_raw_os_error(libc::EMFILE).to_string();
    let Some(at) = text.find(&said) else { return text };
    let limit = descriptors_max().map_or_else(|_| "a few".to_owned(), |limit| limit.to_string());
    let what = &text[..at + said.len()];
    format!(
        "{what}; this process may have {limit} file descriptors (ulimit -n): raise that, or use fewer ports or queues"
    )
}

/// Lets events go to standard error, from level `info` on or as `RUST_LOG` says.
fn log_events() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let colours = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    // Fails if the program has its own way to log.
    let _ = log.without_time().with_target(false).try_init();
}

/// Opens the ports with `opener`, and forwards until time is up, a signal arrives, or `--control` says so.
///
/// It takes SIGINT and SIGTERM over, for good.
///
/// # Errors
/// Whatever kept it from starting, or from ending well.
fn run(options: &Options, opener: Opener<'_>) -> anyhow::Result<()> {
    log_events();
    // Should that not be possible, the port that lacks descriptors says so.
    let _ = raise_descriptors_max();
    let signals = Signals::watch()?;
    let mut forwarder = open(options, opener)?;
    let events = signals.forward();
    let mut out = std::io::stdout().lock();
    let report = if options.control {
        steer::read_lines(std::io::stdin(), &events)?;
        steer::serve_events(forwarder, &events, &mut out)?
    } else {
        forwarder.start(options.engine, 0)?;
        steer::watch(forwarder, options.seconds, options.json, &events, &mut out)?
    };
    finish(&report)
}

/// An error if the end was not clean.
fn finish(report: &FinalReport) -> anyhow::Result<()> {
    anyhow::ensure!(report.ok, "{}", report.errors.join("; "));
    Ok(())
}

/// Memory, ports, and the forwarder on them.
fn open(options: &Options, opener: Opener<'_>) -> anyhow::Result<Forwarder> {
    let cpus = options.cpus.clone().unwrap_or_default().0;
    let (burst, frame) = (usize::from(options.burst), usize::from(options.frame));
    let segments = |len: usize| len.div_ceil(usize::from(ROOM_DEFAULT - HEADROOM));
    let (mut queues, mut descriptors, mut held) = (0, 0, 0);
    for address in &options.ports {
        let (pairs, size) = (usize::from(address.queues()), usize::from(address.size()));
        (queues, descriptors) = (queues + 2 * pairs, descriptors + 2 * pairs * size);
        // A sent frame may take one descriptor, an indirect one, for all its segments.
        held += pairs * size * (1 + segments(if address.flag("mrg") { FRAME_MAX } else { frame }));
    }
    let cache_size = cache_size(burst);
    let count = mbufs_needed(held, cpus.len().max(1), cache_size, burst, segments(frame))?;
    let pool = MbufPoolConfig { count, cache_size, ..MbufPoolConfig::default() };

    let ring_bytes = queues * QUEUE_BYTES + descriptors * DESCRIPTOR_BYTES;
    let arena = Arena::new(pool.arena_bytes() + ring_bytes, &Pages::Auto)?;
    let advice = arena.advice();
    let pool = MbufPool::new(&pool, &arena)?;

    let arenas = [arena];
    let mut ports = Vec::new();
    for address in &options.ports {
        let mut port = opener(address, &arenas)?;
        let setup = PortSetup {
            queues: address.queues(),
            size: address.size(),
            pool: pool.clone(),
            rx_path: options.rx_path.clone(),
            tx_path: options.tx_path.clone(),
            frame_max: if port.info().scatter { FRAME_MAX as u32 } else { 0 },
        };
        open_port(port.as_mut(), &setup)?;
        ports.push(port);
    }
    let config = ForwardConfig { burst, frame, sequence: options.sequence, cpus, pool, more_pools: Vec::new() };
    let forwarder = Forwarder::new(ports, &config)?;
    // Not before, so that a failure is all that is said.
    if let Some(advice) = advice {
        complain(&advice);
    }
    if cache_size < 2 * burst {
        complain(&format!(
            "burst {burst}: a mempool cache of {cache_size}, the largest, holds less than two bursts, so that every burst pays for the shared ring; bursts of up to {} do not",
            cache_size / 2
        ));
    }
    Ok(forwarder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_list_is_numbers_and_ranges() {
        assert_eq!("0,2-3".parse(), Ok(CpuList(vec![0, 2, 3])));
        assert_eq!("1023".parse(), Ok(CpuList(vec![1023])));
        for (text, part) in [("", ""), ("x", "x"), ("1,", ""), ("1024", "1024"), ("0-9999999999", "0-9999999999")] {
            let problem = format!("{part:?} is no CPU number or range, 0 to 1023; write a list like 0,2-3");
            assert_eq!(text.parse::<CpuList>(), Err(problem));
        }
        assert_eq!("3-2".parse::<CpuList>(), Err("range 3-2 ends before it begins; write 2-3".into()));
    }

    #[test]
    fn the_ranges_of_options_are_those_of_the_library() {
        let parse = |option: &str, value: usize| {
            Cli::try_parse_from(["fwd", "--port", "virtio-user:s", option, &value.to_string()]).is_ok()
        };
        for (option, min, max) in
            [("--burst", 1, crate::port::BURST_MAX), ("--frame", super::super::FRAME_MIN, FRAME_MAX)]
        {
            let outcome = [min - 1, min, max, max + 1].map(|value| parse(option, value));
            assert_eq!(outcome, [false, true, true, false], "{option}");
        }
    }

    #[test]
    fn causes_that_an_error_names_itself_are_not_repeated() {
        let cause = std::io::Error::other("no such thing");
        let error = anyhow::Error::new(cause).context("port a: no such thing").context("opening failed");
        assert_eq!(sentence(&error), "opening failed: port a: no such thing");
    }
}
