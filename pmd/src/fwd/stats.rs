//! What is reported, under one set of names for text and JSON.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::port::{BINS, Fault, Stats};

/// Counters by name, in the order of their table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Named(pub Vec<(String, u64)>);

impl Named {
    fn new<'a>(counters: impl Iterator<Item = (&'a str, u64)>) -> Self {
        Self(counters.map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// The value of counter `name`; 0 if there is none.
    #[must_use]
    pub fn get(&self, name: &str) -> u64 {
        self.0.iter().find(|counter| counter.0 == name).map_or(0, |counter| counter.1)
    }
}

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let map = std::collections::BTreeMap::<String, u64>::deserialize(deserializer)?;
        Ok(Self(map.into_iter().collect()))
    }
}

/// One direction of a port: its queues' counters, added up.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Frames delivered (rx) or accepted (tx).
    pub packets: u64,
    /// Their bytes, without FCS.
    pub bytes: u64,
    /// Frames lost, whatever the reason.
    pub dropped: u64,
    /// Kicks or interrupts sent.
    pub kicks: u64,
    /// Kicks or interrupts that the peer did not want.
    pub kicks_suppressed: u64,
    /// Sent mbufs that went home one by one.
    pub slow_frees: u64,
    /// Frames by size in bytes, see [`BINS`].
    pub bins: Named,
    /// What was refused, by [`Fault::name`].
    pub faults: Named,
}

impl From<&Stats> for Counts {
    fn from(stats: &Stats) -> Self {
        Self {
            packets: stats.packets,
            bytes: stats.bytes,
            dropped: stats.dropped(),
            kicks: stats.kicks,
            kicks_suppressed: stats.kicks_suppressed,
            slow_frees: stats.slow_frees,
            bins: Named::new(BINS.iter().map(|bin| bin.0).zip(stats.bins)),
            faults: Named::new(Fault::ALL.iter().map(|&fault| (fault.name(), stats.fault(fault)))),
        }
    }
}

/// How a port stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortState {
    /// The address it was opened with.
    pub address: String,
    /// `up` if it can carry frames now, else `down`.
    pub link: String,
    /// The path its receive queues run on; none while they are stopped.
    pub rx_path: Option<String>,
    /// The path its transmit queues run on; none while they are stopped.
    pub tx_path: Option<String>,
}

/// What memory consists of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pages {
    /// Bytes a page.
    pub page_size: usize,
    /// One line on what such pages cost and how to get better ones, if they cost something.
    pub advice: Option<String>,
}

/// A port at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortStats {
    /// How it stands.
    #[serde(flatten)]
    pub state: PortState,
    /// What its receive queues counted.
    pub rx: Counts,
    /// What its transmit queues counted.
    pub tx: Counts,
}

/// A stream at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamStats {
    /// Number of the port it receives from.
    pub rx_port: usize,
    /// The receive queue there.
    pub rx_queue: u16,
    /// Number of the port it sends to.
    pub tx_port: usize,
    /// The transmit queue there.
    pub tx_queue: u16,
    /// The worker that runs it.
    pub worker: usize,
    /// Frames received.
    pub rx: u64,
    /// Frames that the transmit queue accepted.
    pub tx: u64,
    /// Frames that it did not accept, and that were freed.
    pub tx_dropped: u64,
    /// Frames made here.
    pub generated: u64,
}

/// A forwarder at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FwdStats {
    /// The moment, in seconds since the forwarder was made: a rate is a difference of counters over a difference of these.
    pub time_s: f64,
    /// Its ports, in the order of their numbers.
    pub ports: Vec<PortStats>,
    /// Its streams.
    pub streams: Vec<StreamStats>,
}

/// How a forwarder ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FinalReport {
    /// Nothing went wrong: workers and ports stopped, and every mbuf is home.
    pub ok: bool,
    /// What went wrong, a sentence each.
    pub errors: Vec<String>,
    /// What was counted.
    #[serde(flatten)]
    pub stats: FwdStats,
}

impl FwdStats {
    /// A line for each port: rates since `earlier`, and what went wrong so far.
    #[must_use]
    pub fn rates(&self, earlier: &FwdStats) -> Vec<String> {
        let seconds = (self.time_s - earlier.time_s).max(f64::MIN_POSITIVE);
        let line = |(number, (now, then)): (usize, (&PortStats, &PortStats))| {
            let mpps = |now: &Counts, then: &Counts| mega(now.packets.saturating_sub(then.packets)) / seconds;
            let (rx, tx) = (mpps(&now.rx, &then.rx), mpps(&now.tx, &then.tx));
            let tx_dropped: u64 = self.streams.iter().filter(|s| s.tx_port == number).map(|s| s.tx_dropped).sum();
            format!(
                "{:7.1} s  port {number} {}: rx {rx:.3} Mpps, tx {tx:.3} Mpps, tx_dropped {tx_dropped}{}{}",
                self.time_s,
                now.state.link,
                Counted(" rx ", &now.rx.faults),
                Counted(" tx ", &now.tx.faults),
            )
        };
        self.ports.iter().zip(&earlier.ports).enumerate().map(line).collect()
    }
}

/// In millions.
#[expect(clippy::cast_precision_loss, reason = "a rate for people: the 53 bits of a float are plenty")]
fn mega(count: u64) -> f64 {
    count as f64 / 1e6
}

/// The counters that are not 0, each after a comma and a prefix.
struct Counted<'a>(&'static str, &'a Named);

impl fmt::Display for Counted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(prefix, counters) = self;
        let mut counted = counters.0.iter().filter(|counter| counter.1 > 0);
        counted.try_for_each(|(name, value)| write!(f, ",{prefix}{name} {value}"))
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { packets, bytes, dropped, kicks, kicks_suppressed, slow_frees, bins, faults } = self;
        write!(f, "packets {packets}, bytes {bytes}, dropped {dropped}, kicks {kicks}")?;
        write!(f, ", kicks_suppressed {kicks_suppressed}, slow_frees {slow_frees}")?;
        write!(f, "{}{}", Counted(" ", faults), Counted(" size ", bins))
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PortState { address, link, rx_path, tx_path } = self;
        let [rx_path, tx_path] = [rx_path, tx_path].map(|path| path.as_deref().unwrap_or("none"));
        write!(f, "{address}: link {link}, rx_path {rx_path}, tx_path {tx_path}")
    }
}

impl fmt::Display for FwdStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, port) in self.ports.iter().enumerate() {
            writeln!(f, "port {number} {}", port.state)?;
            writeln!(f, "  rx {}\n  tx {}", port.rx, port.tx)?;
        }
        for stream in &self.streams {
            let StreamStats { rx_port, rx_queue, tx_port, tx_queue, worker, rx, tx, tx_dropped, generated } = stream;
            write!(f, "stream {rx_port}:{rx_queue} -> {tx_port}:{tx_queue} on worker {worker}: ")?;
            writeln!(f, "rx {rx}, tx {tx}, tx_dropped {tx_dropped}, generated {generated}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::QueueStats;

    fn counts() -> Counts {
        let stats = QueueStats::new();
        stats.packets.add(3);
        stats.bytes.add(300);
        stats.size(100);
        stats.fault(Fault::NoBuffer);
        Counts::from(&stats.snapshot())
    }

    #[test]
    fn text_and_json_use_the_same_names() {
        let json = serde_json::to_value(counts()).unwrap();
        let text = counts().to_string();
        for name in ["packets", "bytes", "dropped", "kicks", "kicks_suppressed", "slow_frees"] {
            assert!(text.contains(&format!("{name} {}", json[name])), "{name} in {text} and {json}");
        }
        assert_eq!((&json["faults"]["no_buffer"], &json["bins"]["65_127"]), (&1.into(), &1.into()));
        assert!(text.contains("no_buffer 1") && text.contains("size 65_127 1"), "{text}");
        assert_eq!(json["faults"].as_object().unwrap().len(), Fault::ALL.len());
    }

    #[test]
    fn json_is_read_back_as_it_was_written() {
        let up = PortState { address: "a".into(), link: "up".into(), rx_path: Some("p".into()), tx_path: None };
        let ports = vec![PortStats { state: up, rx: counts(), tx: Counts::default() }];
        let stats = FwdStats { time_s: 1.5, ports, streams: vec![StreamStats::default()] };
        let report = FinalReport { ok: false, errors: vec!["e".into()], stats };
        let read: FinalReport = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(read.stats.ports[0].rx.faults.get("no_buffer"), 1);
        assert_eq!((read.ok, read.stats.time_s, read.stats.streams), (false, 1.5, report.stats.streams));
    }
}
