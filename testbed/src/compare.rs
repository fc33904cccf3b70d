//! Our ends against DPDK's: the same cells, in rounds, and how many times as fast one pair of ends is as the other.
//!
//! A machine's speed changes from one minute to the next. So the pairs take turns at each cell, and what is compared are medians
//! over the rounds.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::frame::SplitMix;
use crate::pair::{Account, Cell, Guest, Host, Outcome, Plan, Rate, WARM_UP_MAX};

/// Who plays the two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Who serves the rings.
    pub host: Host,
    /// Who drives them.
    pub guest: Guest,
}

/// Our own pair.
pub const OURS: Ends = Ends { host: Host::Twinring, guest: Guest::Twinring };
/// DPDK's own pair, with which the others are compared.
pub const DPDK: Ends = Ends { host: Host::Dpdk, guest: Guest::Dpdk };
/// The pairs without a stranger.
pub const PURE: [Ends; 2] = [OURS, DPDK];
/// Each end with each other one.
pub const ALL: [Ends; 4] =
    [OURS, DPDK, Ends { host: Host::Dpdk, guest: Guest::Twinring }, Ends { host: Host::Twinring, guest: Guest::Dpdk }];

/// How often the rounds are drawn anew for an interval.
const RESAMPLES: usize = 10_000;
/// How many of those results lie outside the interval, at either side: 2.5 %.
const OUTSIDE: usize = RESAMPLES / 40;
/// The same draws each time: equal rates have equal intervals.
const SEED: u64 = 1;

/// About what a run takes besides its traffic: on a machine of two CPUs, to announce how long all of them will.
const START: Duration = Duration::from_millis(80);
const START_DPDK_HOST: Duration = Duration::from_millis(1250);
const START_DPDK_GUEST: Duration = Duration::from_millis(250);

/// How many times as fast as DPDK's pair: the ratio of the medians over the rounds, and its interval.
///
/// The interval is a paired bootstrap's: rounds are drawn with replacement, as many as there are, 10,000 times from a fixed seed;
/// each time the ratio of the medians is taken over the rounds drawn, and 95 % of those ratios lie in the interval. A round
/// is drawn with the rates of both pairs, which ran next to each other. Of a single round the interval is the ratio itself.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    /// The ratio of the medians.
    pub ratio: f64,
    /// The lower end of its interval.
    #[serde(rename = "ratio_low")]
    pub low: f64,
    /// The upper end.
    #[serde(rename = "ratio_high")]
    pub high: f64,
}

/// What came out of a cell with one pair of ends, in all rounds.
#[derive(Clone, Debug)]
pub struct Series {
    /// All rounds in one: the rate is the median, the lowest and the highest of theirs; frames are added up.
    pub outcome: Outcome,
    /// How many rounds: all, unless the run ended early.
    pub rounds: usize,
    /// How it compares with DPDK's pair. None for that one, and if no frame passed between DPDK's ends.
    pub ratio: Option<Ratio>,
}

/// The order of the runs: all cells in each round, each with all `ends` in a row, another one of which comes first in the next
/// round.
#[must_use]
pub fn schedule(cells: &[Cell], ends: &[Ends], rounds: u16) -> Vec<Cell> {
    let mut runs = Vec::new();
    for round in 0..usize::from(rounds) {
        for cell in cells {
            for turn in 0..ends.len() {
                let Ends { host, guest } = ends[(round + turn) % ends.len()];
                runs.push(Cell { guest, host, ..*cell });
            }
        }
    }
    runs
}

/// What is about to be run, and how long that takes.
#[must_use]
pub fn announcement(cells: usize, ends: usize, rounds: u16, schedule: &[Cell], plan: &Plan) -> String {
    let total: Duration = schedule.iter().map(|run| time(run, plan)).sum();
    let total = match total.as_secs() {
        seconds @ 0..120 => format!("{} s", seconds + 1),
        seconds => format!("{} minutes", seconds.div_ceil(60)),
    };
    let plural = |count, what| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let [cells, ends, rounds] =
        [(cells, "cell"), (ends, "pair"), (rounds.into(), "round")].map(|(n, what)| plural(n, what));
    let seconds = plan.duration.as_secs_f64();
    format!("{cells} x {ends} of ends x {rounds} of {seconds} s: about {total}")
}

fn time(run: &Cell, plan: &Plan) -> Duration {
    let host = if run.host == Host::Dpdk { START_DPDK_HOST } else { Duration::ZERO };
    let guest = if run.guest == Guest::Dpdk { START_DPDK_GUEST } else { Duration::ZERO };
    START + host + guest + plan.duration.min(WARM_UP_MAX) + plan.duration
}

/// The outcomes of a schedule, or of its first part, by cell and pair of ends.
#[must_use]
pub fn gather(outcomes: &[Outcome]) -> Vec<Series> {
    let mut groups: Vec<Vec<&Outcome>> = Vec::new();
    for outcome in outcomes {
        match groups.iter_mut().find(|group| group[0].cell == outcome.cell) {
            Some(group) => group.push(outcome),
            None => groups.push(vec![outcome]),
        }
    }
    let series = |group: &Vec<&Outcome>| {
        let yardstick = with_dpdk(&group[0].cell);
        let dpdk = groups.iter().find(|other| other[0].cell == yardstick && yardstick != group[0].cell);
        let ratio = dpdk.and_then(|dpdk| {
            let rounds: Vec<_> = group.iter().zip(dpdk).map(|(our, dpdk)| (our.rate.mpps, dpdk.rate.mpps)).collect();
            Ratio::of(&rounds)
        });
        Series { outcome: merge(group), rounds: group.len(), ratio }
    };
    groups.iter().map(series).collect()
}

/// The same cell between DPDK's ends.
#[must_use]
pub fn with_dpdk(cell: &Cell) -> Cell {
    Cell { host: DPDK.host, guest: DPDK.guest, ..*cell }
}

/// Several outcomes of one cell, at least one, as one.
fn merge(group: &[&Outcome]) -> Outcome {
    let mut account = Account { ledgers: Vec::new(), sent: 0, received: 0, dropped: BTreeMap::new() };
    for round in group {
        account.ledgers.extend(round.account.ledgers.iter().cloned());
        account.sent += round.account.sent;
        account.received += round.account.received;
        for (reason, frames) in &round.account.dropped {
            *account.dropped.entry(reason.clone()).or_default() += frames;
        }
    }
    let mut rates: Vec<_> = group.iter().map(|round| round.rate.mpps).collect();
    let problems: Vec<_> = group.iter().filter_map(|round| round.problem.as_deref()).collect();
    Outcome {
        rate: Rate::of(&mut rates),
        pages: group.iter().flat_map(|round| round.pages.iter().cloned()).collect(),
        account,
        problem: (!problems.is_empty()).then(|| problems.join("\n")),
        ..group[0].clone()
    }
}

impl Ratio {
    /// Of the rates of both pairs in each round, DPDK's second. None if there is no round, or one in which DPDK's pair stood
    /// still.
    fn of(rounds: &[(f64, f64)]) -> Option<Self> {
        if rounds.is_empty() || rounds.iter().any(|&(_, dpdk)| dpdk <= 0.0) {
            return None;
        }
        let mut random = SplitMix(SEED);
        // At most 99 rounds (`--rounds`).
        let count = rounds.len() as u32;
        let mut drawn = Vec::with_capacity(rounds.len());
        let mut ratios = Vec::with_capacity(RESAMPLES);
        for _ in 0..RESAMPLES {
            drawn.clear();
            drawn.extend(rounds.iter().map(|_| rounds[random.below(count) as usize]));
            ratios.push(ratio_of_medians(&drawn));
        }
        ratios.sort_by(f64::total_cmp);
        Some(Self { ratio: ratio_of_medians(rounds), low: ratios[OUTSIDE], high: ratios[RESAMPLES - 1 - OUTSIDE] })
    }
}

fn ratio_of_medians(rounds: &[(f64, f64)]) -> f64 {
    let (mut ours, mut dpdk): (Vec<_>, Vec<_>) = rounds.iter().copied().unzip();
    Rate::of(&mut ours).mpps / Rate::of(&mut dpdk).mpps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pair::{Paths, Ring, Simd, Traffic};

    fn cell(traffic: Traffic) -> Cell {
        let Ends { host, guest } = OURS;
        Cell {
            traffic,
            ring: Ring::Split,
            in_order: false,
            mergeable: false,
            simd: Simd::None,
            queues: 1,
            frame: 64,
            burst: 32,
            ring_size: 1024,
            guest,
            host,
        }
    }

    fn outcome(cell: Cell, mpps: f64) -> Outcome {
        let dropped = BTreeMap::from([("host_tx_long".to_owned(), 1)]);
        Outcome {
            cell,
            rate: Rate { mpps, low: mpps - 1.0, high: mpps + 1.0 },
            host_paths: Paths::default(),
            guest_paths: Paths::default(),
            pages: Vec::new(),
            account: Account { ledgers: Vec::new(), sent: 10, received: 9, dropped },
            problem: None,
        }
    }

    #[test]
    fn pairs_take_turns_at_each_cell_and_at_being_the_first() {
        let cells = [cell(Traffic::RxOnly), cell(Traffic::Io)];
        let runs = schedule(&cells, &PURE, 2);
        let dpdk = cells.each_ref().map(with_dpdk);
        assert_eq!(runs, [cells[0], dpdk[0], cells[1], dpdk[1], dpdk[0], cells[0], dpdk[1], cells[1]]);
        assert_eq!(schedule(&cells, &ALL, 7).len(), 56);
    }

    #[test]
    fn rounds_of_a_cell_become_one_with_their_median_and_the_sum_of_their_frames() {
        let ours = cell(Traffic::Io);
        let rates = [(ours, 20.0), (with_dpdk(&ours), 10.0), (with_dpdk(&ours), 12.0), (ours, 30.0), (ours, 22.0)];
        let mut outcomes: Vec<_> = rates.iter().map(|&(cell, mpps)| outcome(cell, mpps)).collect();
        outcomes[3].problem = Some("1 frames are missing".into());
        let series = gather(&outcomes);
        assert_eq!(series.iter().map(|series| series.rounds).collect::<Vec<_>>(), [3, 2]);
        let merged = &series[0].outcome;
        assert_eq!((merged.cell, merged.rate), (ours, Rate { mpps: 22.0, low: 20.0, high: 30.0 }));
        assert_eq!((merged.account.sent, merged.account.received, merged.account.dropped["host_tx_long"]), (30, 27, 3));
        assert_eq!(merged.problem.as_deref(), Some("1 frames are missing"));
        // The third round of DPDK's is not there yet, so ours does not count either.
        assert_eq!(series[0].ratio.map(|ratio| ratio.ratio), Some(30.0 / 12.0));
        assert_eq!((series[1].ratio, series[1].outcome.problem.as_deref()), (None, None));
    }

    #[test]
    fn one_round_has_a_ratio_without_an_interval_and_none_has_neither() {
        assert_eq!(Ratio::of(&[(30.0, 20.0)]), Some(Ratio { ratio: 1.5, low: 1.5, high: 1.5 }));
        assert_eq!(Ratio::of(&[]), None);
        assert_eq!(Ratio::of(&[(30.0, 20.0), (30.0, 0.0)]), None);
    }

    #[test]
    fn a_machine_that_slows_down_between_rounds_does_not_widen_the_interval() {
        let rounds: Vec<_> = (1..=7).map(f64::from).map(|speed| (2.0 * speed, speed)).collect();
        assert_eq!(Ratio::of(&rounds), Some(Ratio { ratio: 2.0, low: 2.0, high: 2.0 }));
    }

    #[test]
    fn one_round_out_of_seven_that_is_off_moves_neither_the_ratio_nor_much_of_the_interval() {
        let mut rounds = [(30.0, 20.0); 7];
        rounds[3] = (3.0, 20.0);
        // Four or more of seven draws hit it 1 time in 100: less often than what lies outside at either side.
        assert_eq!(Ratio::of(&rounds), Some(Ratio { ratio: 1.5, low: 1.5, high: 1.5 }));
    }

    proptest! {
        #[test]
        fn an_interval_lies_within_what_the_rates_allow(rounds in prop::collection::vec((1.0..90.0, 1.0..90.0), 1..12)) {
            let Ratio { ratio, low, high } = Ratio::of(&rounds).unwrap();
            let rates = |pick: fn(&(f64, f64)) -> f64| {
                let rates = rounds.iter().map(pick);
                (rates.clone().fold(f64::MAX, f64::min), rates.fold(0.0, f64::max))
            };
            let ((our_min, our_max), (dpdk_min, dpdk_max)) = (rates(|round| round.0), rates(|round| round.1));
            prop_assert!(our_min / dpdk_max <= low && low <= high && high <= our_max / dpdk_min);
            prop_assert!(our_min / dpdk_max <= ratio && ratio <= our_max / dpdk_min);
        }
    }
}
