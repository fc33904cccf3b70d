//! What `twinring compare` found out, as tables and as JSON.

use serde::Serialize;
use serde_json::{Value, json};

use super::{Align, Record, align, distinct, thousandths};
use crate::compare::{Ratio, Series, with_dpdk};
use crate::pair::{Outcome, Plan};
use crate::peer::dpdk::Version;

/// Columns of words; those behind them are numbers.
const WORDS: usize = 2;

/// One cell's result with one pair of ends.
#[derive(Serialize)]
struct Compared<'a> {
    #[serde(flatten)]
    record: Record<'a>,
    #[serde(flatten)]
    ratio: Option<Ratio>,
}

/// Results as JSON: one object with all `cells`, each once for each pair of ends; what is not DPDK's own pair also has its ratio
/// to that.
#[must_use]
pub fn json(series: &[Series]) -> Value {
    let compared = |Series { outcome, ratio, .. }: &Series| {
        let round = |Ratio { ratio, low, high }: Ratio| Ratio {
            ratio: thousandths(ratio),
            low: thousandths(low),
            high: thousandths(high),
        };
        json!(Compared { record: Record::new(outcome), ratio: ratio.map(round) })
    };
    json!({ "cells": series.iter().map(compared).collect::<Vec<_>>() })
}

/// Tables: one for each pair of ends that is not DPDK's own, with a row for each cell.
#[must_use]
pub fn render(series: &[Series]) -> String {
    let ends = |series: &Series| (series.outcome.cell.host, series.outcome.cell.guest);
    let rated = || series.iter().filter(|series| series.outcome.cell != with_dpdk(&series.outcome.cell));
    let tables = distinct(rated().map(ends)).into_iter().map(|(host, guest)| {
        let mut grid = vec![
            ["engine", "rings", "queue pairs", "Mpps", "of DPDK's pair", "ratio", "from", "to"]
                .map(str::to_owned)
                .to_vec(),
        ];
        grid.extend(rated().filter(|series| ends(series) == (host, guest)).map(|of_them| row(of_them, series)));
        let side = |column| if column < WORDS { Align::Left } else { Align::Right };
        format!("host {host}, guest {guest}\n{}", align(&grid, side))
    });
    tables.collect::<Vec<_>>().join("\n")
}

fn row(Series { outcome, ratio, .. }: &Series, all: &[Series]) -> Vec<String> {
    let cell = &outcome.cell;
    let dpdk = all.iter().find(|other| other.outcome.cell == with_dpdk(cell));
    let mpps =
        |outcome: &Outcome| format!("{:.2}{}", outcome.rate.mpps, if outcome.problem.is_some() { "!" } else { "" });
    let mut row = vec![cell.traffic.to_string(), cell.combination(), cell.queues.to_string(), mpps(outcome)];
    row.push(dpdk.map_or_else(|| "-".to_owned(), |dpdk| mpps(&dpdk.outcome)));
    let ratio = ratio.map(|Ratio { ratio, low, high }| [ratio, low, high]);
    row.extend(ratio.map_or_else(|| ["-"; 3].map(str::to_owned), |ratio| ratio.map(|ratio| format!("{ratio:.2}"))));
    row
}

/// How the results came about: what the numbers are, DPDK's version, the machine, the command.
#[must_use]
pub fn conditions(series: &[Series], plan: &Plan, dpdk: Version, command: &str) -> String {
    let outcomes: Vec<_> = series.iter().map(|series| series.outcome.clone()).collect();
    // Cells differ by a round where the run ended early.
    let rounds = series.iter().map(|series| series.rounds);
    let (least, most) = (rounds.clone().min().unwrap_or(0), rounds.max().unwrap_or(0));
    let rounds = if least == most { most.to_string() } else { format!("{least} to {most}") };
    let s = if most == 1 { "" } else { "s" };
    let how = format!("median of {rounds} round{s} of {} s", plan.duration.as_secs_f64());
    let conditions = super::conditions(&outcomes, plan, &how, command);
    if conditions.is_empty() {
        return conditions;
    }
    format!(
        "{conditions}ratio: of the medians; from, to: its 95 % interval, by a bootstrap over the rounds\nDPDK: {dpdk} in {}\n",
        plan.dpdk_root.display(),
    )
}
