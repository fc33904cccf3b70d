//! Where every frame of a cell went.

use std::collections::BTreeMap;

use super::{Cell, Counts, Side, Traffic};
use crate::ledger::Ledger;

/// The ledgers of a cell, and their sum.
#[derive(Clone, Debug)]
pub struct Account {
    /// From station to station.
    pub ledgers: Vec<Ledger>,
    /// Frames that went out at the source.
    pub sent: u64,
    /// Frames that reached the last station: the other end, or with [`Traffic::Io`] the source again.
    pub received: u64,
    /// Frames lost between the two, by end, direction and reason.
    pub dropped: BTreeMap<String, u64>,
}

/// What one end counted.
pub(super) struct Station<'a> {
    pub side: Side,
    pub counts: &'a Counts,
}

impl Account {
    /// What became of the frames, if none arrived: a rate of 0 does not tell.
    #[must_use]
    pub fn lost_all(&self) -> Option<String> {
        if self.received > 0 || self.dropped.is_empty() {
            return None;
        }
        let reasons = self.dropped.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>();
        let hint = if self.dropped.keys().any(|reason| reason.ends_with("_long")) {
            "; only mergeable buffers hold such frames: use --mergeable on, or a shorter --frame"
        } else {
            ""
        };
        Some(format!("no frame arrived, all were dropped: {}{hint}", reasons.join(", ")))
    }

    /// The account of a cell: frames started at `source`; `freed` is how many it took out of circulation at the end.
    pub(super) fn new(cell: &Cell, source: &Station<'_>, sink: &Station<'_>, freed: u64) -> Self {
        let mut account = Self {
            ledgers: Vec::new(),
            sent: source.counts.sent,
            received: sink.counts.received,
            dropped: BTreeMap::new(),
        };
        account.hop(source, sink);
        if cell.traffic == Traffic::Io {
            account.forwarder(sink);
            account.hop(sink, source);
            account.received = source.counts.received;
            account.circulation(source, freed);
        }
        account
    }

    /// What is wrong with it, with the ledgers that show it.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        let errors: Vec<_> = self.ledgers.iter().filter_map(|ledger| ledger.balance().err()).collect();
        (!errors.is_empty()).then(|| errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }

    /// Through a ring, from one end to the other.
    fn hop(&mut self, from: &Station<'_>, to: &Station<'_>) {
        let mut ledger = Ledger::new(format!("the ring from {} to {}", from.side, to.side));
        ledger.input(format!("{} sent", from.side), from.counts.sent);
        ledger.output(format!("{} received", to.side), to.counts.received);
        for (side, direction, lost) in [(from.side, "tx", &from.counts.lost_tx), (to.side, "rx", &to.counts.lost_rx)] {
            for (reason, frames) in lost {
                ledger.dropped(format!("{side} {direction} {reason}"), *frames);
                *self.dropped.entry(format!("{side}_{direction}_{reason}")).or_default() += frames;
            }
        }
        self.ledgers.push(ledger);
    }

    /// Through an end that forwards.
    fn forwarder(&mut self, station: &Station<'_>) {
        let Station { side, counts } = station;
        let mut ledger = Ledger::new(format!("the {side}, which forwards"));
        ledger.input(format!("{side} received"), counts.received);
        ledger.output(format!("{side} sent"), counts.sent);
        ledger.dropped(format!("{side} unsent"), counts.unsent);
        self.ledgers.push(ledger);
        if counts.unsent > 0 {
            self.dropped.insert(format!("{side}_unsent"), counts.unsent);
        }
    }

    /// Frames that were made to go round, and taken out again.
    fn circulation(&mut self, source: &Station<'_>, freed: u64) {
        let Station { side, counts } = source;
        let Some(made) = counts.made else { return };
        let mut ledger = Ledger::new("the frames that went round");
        ledger.input(format!("{side} made"), made);
        ledger.output(format!("{side} freed in the end"), freed);
        ledger.dropped(format!("{side} unsent"), counts.unsent);
        for (reason, frames) in &self.dropped {
            ledger.dropped(reason.replace('_', " "), *frames);
        }
        self.ledgers.push(ledger);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Guest, Host, Ring, Simd};
    use super::*;

    fn cell(traffic: Traffic) -> Cell {
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
            guest: Guest::Twinring,
            host: Host::Twinring,
        }
    }

    fn account(traffic: Traffic, host: &Counts, guest: &Counts, freed: u64) -> Account {
        let host = Station { side: Side::Host, counts: host };
        Account::new(&cell(traffic), &host, &Station { side: Side::Guest, counts: guest }, freed)
    }

    #[test]
    fn one_way_every_frame_sent_is_received_or_dropped_for_a_reason() {
        let host = Counts { sent: 10, lost_tx: vec![("long".into(), 1)], ..Counts::default() };
        let guest = Counts { received: 7, lost_rx: vec![("bad_id".into(), 2)], ..Counts::default() };
        let balanced = account(Traffic::RxOnly, &host, &guest, 0);
        assert_eq!((balanced.sent, balanced.received, balanced.problem()), (10, 7, None));
        assert_eq!(balanced.dropped, BTreeMap::from([("guest_rx_bad_id".into(), 2), ("host_tx_long".into(), 1)]));

        let guest = Counts { received: 6, ..guest };
        let problem = account(Traffic::RxOnly, &host, &guest, 0).problem().unwrap();
        for part in ["1 frames are missing", "from host to guest", "host tx long", "guest rx bad_id"] {
            assert!(problem.contains(part), "{part} is not in {problem}");
        }
    }

    /// 8 frames go round until the guest has dropped one and the host freed the others.
    fn round() -> (Counts, Counts) {
        let host = Counts { sent: 100, received: 99, made: Some(8), ..Counts::default() };
        (host, Counts { received: 100, sent: 99, unsent: 1, ..Counts::default() })
    }

    #[test]
    fn a_round_trip_balances_at_every_station() {
        let (host, guest) = round();
        let account = account(Traffic::Io, &host, &guest, 7);
        assert_eq!((account.sent, account.received, account.problem()), (100, 99, None));
        assert_eq!(account.dropped, BTreeMap::from([("guest_unsent".into(), 1)]));
        assert_eq!(account.ledgers.len(), 4);
    }

    #[test]
    fn a_frame_lost_at_any_station_of_a_round_trip_is_missed_there() {
        let (host, guest) = round();
        let wrong = |host: &Counts, guest: &Counts, freed| account(Traffic::Io, host, guest, freed).problem().unwrap();
        assert!(wrong(&host, &guest, 6).contains("frames that went round"));
        assert!(wrong(&Counts { received: 98, ..host.clone() }, &guest, 7).contains("from guest to host"));
        assert!(wrong(&host, &Counts { received: 99, unsent: 0, ..guest.clone() }, 7).contains("from host to guest"));
        assert!(wrong(&host, &Counts { unsent: 0, ..guest }, 7).contains("the guest, which forwards"));
    }

    #[test]
    fn frames_put_into_circulation_are_only_checked_where_they_were_counted() {
        let (host, guest) = round();
        let account = account(Traffic::Io, &Counts { made: None, ..host }, &guest, 0);
        assert_eq!((account.ledgers.len(), account.problem()), (3, None));
    }
}
