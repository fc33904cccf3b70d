//! Either end, played by us: this program again, in one of its hidden roles.

use std::path::Path;
use std::process::Command;

use clap::ValueEnum;
use pmd::fwd::{Engine, FinalReport, FwdStats, Named, Pages, PortState};
use pmd::port::Fault;
use serde::Deserialize;

use super::child::{Child, QUIT};
use super::end::{Counts, End, Paths};
use super::{BACKEND_ROLE, Cell, GUEST_ROLE, Interrupt, PairError, Plan, Ring, Side};

/// A process with one port.
pub(super) struct Twinring {
    child: Child,
    pages: Pages,
}

/// The answer to `link`.
#[derive(Deserialize)]
struct Links {
    ports: Vec<PortState>,
}

impl Twinring {
    /// Starts it, and waits until its port is there.
    pub(super) fn launch(
        side: Side,
        cell: &Cell,
        plan: &Plan,
        socket: &Path,
        interrupt: &Interrupt,
    ) -> Result<Self, PairError> {
        let mut child = Child::spawn(side, command(side, cell, plan, socket), interrupt)?;
        let pages = child.answer("start-up")?;
        Ok(Self { child, pages })
    }

    fn port(&mut self) -> Result<Option<PortState>, PairError> {
        let links: Links = self.child.ask("link")?;
        Ok(links.ports.into_iter().next())
    }
}

fn command(side: Side, cell: &Cell, plan: &Plan, socket: &Path) -> Command {
    let Cell { queues, ring_size, .. } = cell;
    let socket = socket.display();
    let mut command = Command::new(&plan.program);
    // The last that it says is to be why it ended, and not who came and went.
    command.env("RUST_LOG", "warn");
    let (cpu, port) = match side {
        Side::Host => {
            command.arg(BACKEND_ROLE);
            (plan.cpus.host, format!("vhost-user:{socket},queues={queues}"))
        }
        Side::Guest => {
            command.arg(GUEST_ROLE);
            let keys = [(cell.ring == Ring::Packed, ",packed"), (cell.in_order, ",in_order"), (cell.mergeable, ",mrg")];
            let keys: String = keys.iter().filter(|key| key.0).map(|key| key.1).collect();
            (plan.cpus.guest, format!("virtio-user:{socket},queues={queues},size={ring_size}{keys}"))
        }
    };
    command.args(["--control", "--port", &port, "--cpus", &cpu.to_string()]);
    command.args(["--burst", &cell.burst.to_string(), "--frame", &cell.frame.to_string()]);
    if side == Side::Guest {
        for (option, path) in [("--rx-path", &plan.rx_path), ("--tx-path", &plan.tx_path)] {
            command.args(path.iter().flat_map(|path| [option, path]));
        }
    }
    command
}

impl End for Twinring {
    fn check(&mut self) -> Result<(), PairError> {
        self.child.check()
    }

    fn link_is_up(&mut self) -> Result<bool, PairError> {
        Ok(self.port()?.is_some_and(|port| port.link == "up"))
    }

    fn paths(&mut self) -> Result<Paths, PairError> {
        let port = self.port()?;
        Ok(port.map_or_else(Paths::default, |port| Paths { rx: port.rx_path, tx: port.tx_path }))
    }

    fn pages(&self) -> Option<Pages> {
        Some(self.pages.clone())
    }

    fn start(&mut self, engine: Engine, tx_first: u32) -> Result<(), PairError> {
        let name = engine.to_possible_value();
        let engine = name.as_ref().map_or("", |name| name.get_name());
        let first = if tx_first > 0 { format!(" tx_first={tx_first}") } else { String::new() };
        self.child.ask::<serde_json::Value>(&format!("start {engine}{first}")).map(drop)
    }

    fn stop(&mut self) -> Result<(), PairError> {
        self.child.ask::<serde_json::Value>("stop").map(drop)
    }

    fn counts(&mut self) -> Result<Counts, PairError> {
        Ok(counts(&self.child.ask("stats")?))
    }

    fn quit(mut self: Box<Self>) -> Result<Vec<String>, PairError> {
        let report: FinalReport = self.child.ask(QUIT)?;
        let status = self.child.wait()?;
        let mut complaints = report.errors;
        if complaints.is_empty() && !status.success() {
            complaints.push(format!("it ended with {status} although all was well"));
        }
        Ok(complaints)
    }
}

fn counts(stats: &FwdStats) -> Counts {
    let lost = |faults: &Named| {
        let frames = Fault::ALL.iter().filter(|fault| fault.is_frame()).map(|fault| fault.name());
        frames.map(|name| (name.to_owned(), faults.get(name))).filter(|lost| lost.1 > 0).collect::<Vec<_>>()
    };
    let mut counts = Counts { time_s: stats.time_s, ..Counts::default() };
    for port in &stats.ports {
        counts.received += port.rx.packets;
        // What the rings took includes what they then lost.
        counts.sent += port.tx.packets + port.tx.dropped;
        counts.lost_rx.extend(lost(&port.rx.faults));
        counts.lost_tx.extend(lost(&port.tx.faults));
    }
    counts.unsent = stats.streams.iter().map(|stream| stream.tx_dropped).sum();
    counts.made = Some(stats.streams.iter().map(|stream| stream.generated).sum());
    counts
}
