//! The command line of `twinring`.

mod options;

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use pmd::fwd::{complain, parse, without_descriptors};

use self::options::{CompareOptions, LoopOptions};
use crate::pair::{self, BACKEND_ROLE, Cell, GUEST_ROLE, Interrupt, Outcome, PairError, Plan, SAMPLES};
use crate::peer::dpdk;
use crate::{compare, table};

/// The exit code of a process that SIGINT ends: 128 and the signal's number.
const INTERRUPTED: u8 = 130;
/// The exit code after a usage error.
const USAGE: u8 = 2;
/// The exit code after anything else that went wrong.
const FAILURE: u8 = 1;
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
    /// Measures cells with both ends ours and with both ends DPDK's, in rounds that alternate between them, and tells how many
    /// times as fast ours are
    Compare(CompareOptions),
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
        Ok(Cli::Compare(options)) => run_compare(&options, &format!("twinring {command}")),
        Err(code) => code,
    }
}

/// `twinring loop`.
fn run_loop(options: &LoopOptions, command: &str) -> ExitCode {
    let run = Run { name: "twinring loop", json: options.cells.json };
    let (cells, plan) = match options.cells().and_then(|cells| Ok((cells, options.plan()?))) {
        Ok(chosen) => chosen,
        Err(sentence) => return run.fails(USAGE, &sentence),
    };
    run.measure(&cells, &plan, |outcomes| {
        let how = format!("median of {SAMPLES} samples in {} s", plan.duration.as_secs_f64());
        let text = || table::render(outcomes) + &table::conditions(outcomes, &plan, &how, command);
        if options.cells.json { table::json(outcomes).to_string() + "\n" } else { text() }
    })
}

/// `twinring compare`.
fn run_compare(options: &CompareOptions, command: &str) -> ExitCode {
    let run = Run { name: "twinring compare", json: options.cells.json };
    let plan = match options.plan() {
        Ok(plan) => plan,
        Err(sentence) => return run.fails(USAGE, &sentence),
    };
    // Missing, it is to be missed before half of the cells are measured.
    let dpdk = match dpdk::available(&plan.dpdk_root) {
        Ok(version) => version,
        Err(error) => return run.fails(FAILURE, &error),
    };
    let (cells, ends) = (options.cells(), options.ends());
    let schedule = compare::schedule(&cells, ends, options.rounds);
    complain(&compare::announcement(cells.len(), ends.len(), options.rounds, &schedule, &plan));
    run.measure(&schedule, &plan, |outcomes| {
        let series = compare::gather(outcomes);
        let text = || table::compare::render(&series) + &table::compare::conditions(&series, &plan, dpdk, command);
        if options.cells.json { table::compare::json(&series).to_string() + "\n" } else { text() }
    })
}

/// A subcommand that measures cells.
struct Run {
    /// As it says who complains.
    name: &'static str,
    /// Whether its results are for programs, which want all of them or none.
    json: bool,
}

impl Run {
    fn fails(&self, code: u8, sentence: &dyn fmt::Display) -> ExitCode {
        complain(&format!("{}: {}", self.name, without_descriptors(sentence.to_string())));
        ExitCode::from(code)
    }

    /// Measures `cells`, prints what `show` makes of the outcomes, and says how it went.
    fn measure(&self, cells: &[Cell], plan: &Plan, show: impl FnOnce(&[Outcome]) -> String) -> ExitCode {
        let interrupt = match Interrupt::watch() {
            Ok(interrupt) => interrupt,
            Err(error) => return self.fails(FAILURE, &format!("cannot wait for Ctrl-C: {error}")),
        };
        let (outcomes, failure) = self.outcomes(cells, plan, &interrupt);
        let mut advice = outcomes.iter().flat_map(|outcome| &outcome.pages).filter_map(|pages| pages.advice.as_ref());
        if let Some(advice) = advice.next_back() {
            complain(advice);
        }
        if !self.json || failure.is_none() {
            let written = std::io::stdout().write_all(show(&outcomes).as_bytes());
            if let Err(error) = written {
                return self.fails(FAILURE, &format!("standard output cannot be written ({error}); send it elsewhere"));
            }
        }
        match failure {
            Some((cell, error)) => {
                let code = if matches!(error, PairError::Interrupted) { INTERRUPTED } else { FAILURE };
                self.fails(code, &format!("{cell}: {error}"))
            }
            None if outcomes.iter().any(|outcome| outcome.problem.is_some()) => ExitCode::FAILURE,
            None => ExitCode::SUCCESS,
        }
    }

    /// Measures `cells` one after the other, with a progress bar on standard error if that is a terminal; what is wrong with one
    /// is said there, too. Ends early at a cell that has no result, and returns that with the reason.
    fn outcomes(
        &self,
        cells: &[Cell],
        plan: &Plan,
        interrupt: &Interrupt,
    ) -> (Vec<Outcome>, Option<(Cell, PairError)>) {
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
                    let lost = outcome.account.lost_all();
                    for problem in outcome.problem.iter().chain(&lost) {
                        bar.suspend(|| complain(&format!("{}: {cell}: {problem}", self.name)));
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
}
