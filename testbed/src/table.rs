//! Results as a table for people, and as JSON for programs.

pub mod compare;

use std::collections::BTreeMap;
use std::{fs, thread};

use serde::Serialize;
use serde_json::{Value, json};

use crate::pair::{Cell, Guest, Host, Outcome, Paths, Plan, Traffic};

/// Least width of a column of rates.
const COLUMN_MIN: usize = 6;

/// One cell's result.
#[derive(Serialize)]
struct Record<'a> {
    #[serde(flatten)]
    cell: &'a Cell,
    mpps: f64,
    mpps_low: f64,
    mpps_high: f64,
    rx_path: Option<&'a str>,
    tx_path: Option<&'a str>,
    sent: u64,
    received: u64,
    dropped: &'a BTreeMap<String, u64>,
}

/// Results as JSON: one object with all `cells`.
#[must_use]
pub fn json(outcomes: &[Outcome]) -> Value {
    json!({ "cells": outcomes.iter().map(Record::new).collect::<Vec<_>>() })
}

impl<'a> Record<'a> {
    fn new(outcome: &'a Outcome) -> Self {
        let Outcome { cell, rate, guest_paths: Paths { rx, tx }, account, .. } = outcome;
        Self {
            cell,
            mpps: thousandths(rate.mpps),
            mpps_low: thousandths(rate.low),
            mpps_high: thousandths(rate.high),
            rx_path: rx.as_deref(),
            tx_path: tx.as_deref(),
            sent: account.sent,
            received: account.received,
            dropped: &account.dropped,
        }
    }
}

/// Further digits mean nothing.
fn thousandths(mpps: f64) -> f64 {
    (mpps * 1000.0).round() / 1000.0
}

/// Tables: one for each pair of host and guest, with a row for each ring combination, columns for traffic and queue pairs, and
/// the paths that ran under it.
#[must_use]
pub fn render(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for (host, guest) in distinct(outcomes.iter().map(|outcome| (outcome.cell.host, outcome.cell.guest))) {
        let of_them: Vec<_> = outcomes.iter().filter(|o| (o.cell.host, o.cell.guest) == (host, guest)).collect();
        if !text.is_empty() {
            text.push('\n');
        }
        text += &[table(host, guest, &of_them), paths(&of_them)].join("\n");
    }
    text
}

fn table(host: Host, guest: Guest, outcomes: &[&Outcome]) -> String {
    let columns = distinct(outcomes.iter().map(|outcome| (outcome.cell.traffic, outcome.cell.queues)));
    let mut grid = vec![vec![format!("host {host}, guest {guest}")], vec!["queue pairs".to_owned()]];
    let mut above: Option<Traffic> = None;
    for &(traffic, queues) in &columns {
        grid[0].push(if above == Some(traffic) { String::new() } else { traffic.to_string() });
        grid[1].push(queues.to_string());
        above = Some(traffic);
    }
    for row in distinct(outcomes.iter().map(|outcome| outcome.cell.combination())) {
        let mut line = vec![row.clone()];
        for &column in &columns {
            let here = |o: &&&Outcome| o.cell.combination() == row && (o.cell.traffic, o.cell.queues) == column;
            line.push(outcomes.iter().find(here).map_or_else(String::new, |outcome| {
                let mark = if outcome.problem.is_some() { "!" } else { "" };
                format!("{:.2}{mark}", outcome.rate.mpps)
            }));
        }
        grid.push(line);
    }
    align(&grid, |column| if column == 0 { Align::Left } else { Align::Right })
}

/// The paths of each row, as far as they were told.
fn paths(outcomes: &[&Outcome]) -> String {
    let names = |Paths { rx, tx }: &Paths| match (rx, tx) {
        (None, None) => "-".to_owned(),
        (rx, tx) => [rx, tx].map(|name| name.as_deref().unwrap_or("-")).join(", "),
    };
    let row = |o: &&Outcome| vec![o.cell.combination(), names(&o.guest_paths), names(&o.host_paths)];
    let mut grid = vec![["paths: receive, transmit", "guest", "host"].map(str::to_owned).to_vec()];
    grid.extend(distinct(outcomes.iter().map(row)));
    align(&grid, |_| Align::Left)
}

/// How the results came about: the units, `how` they are made of samples, the machine, the command.
#[must_use]
pub fn conditions(outcomes: &[Outcome], plan: &Plan, how: &str, command: &str) -> String {
    let Some(Cell { frame, burst, ring_size, .. }) = outcomes.first().map(|outcome| outcome.cell) else {
        return String::new();
    };
    let sizes = distinct(outcomes.iter().flat_map(|outcome| &outcome.pages).map(|pages| pages.page_size));
    let sizes = sizes.iter().map(|size| format!("{} KiB", size / 1024)).collect::<Vec<_>>().join(" and ");
    let cpus = plan.cpus;
    let build = if cfg!(debug_assertions) { "; a debug build, whose rates mean nothing" } else { "" };
    format!(
        "\nMpps that the guest receives, {how}; frames of {frame} bytes, bursts of {burst}, \
         rings of {ring_size}\nmachine: {}; host on CPU {}, guest on CPU {}; our pages {}{build}\ncommand: {command}\n",
        machine(),
        cpus.host,
        cpus.guest,
        if sizes.is_empty() { "none" } else { &sizes },
    )
}

/// The processor, how many there are, and the kernel.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown CPU", |(_, name)| name.trim());
    let count = thread::available_parallelism().map_or(1, usize::from);
    format!("{count} x {model}, Linux {}", read("/proc/sys/kernel/osrelease").trim())
}

/// The side of its column to which a text is set.
#[derive(Clone, Copy, PartialEq)]
enum Align {
    Left,
    Right,
}

/// Columns as wide as they need to be, two blanks apart.
fn align(grid: &[Vec<String>], side: fn(usize) -> Align) -> String {
    let columns = grid.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| grid.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for row in grid {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match side(column) {
            Align::Left => format!("{cell:<width$}"),
            Align::Right => format!("{cell:>width$}", width = *width.max(&COLUMN_MIN)),
        });
        let line = cells.collect::<Vec<_>>().join("  ");
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// Each value once, in the order of first appearance.
fn distinct<T: PartialEq>(values: impl Iterator<Item = T>) -> Vec<T> {
    let mut seen = Vec::new();
    for value in values {
        if !seen.contains(&value) {
            seen.push(value);
        }
    }
    seen
}
