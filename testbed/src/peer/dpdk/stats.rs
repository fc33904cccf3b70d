//! What testpmd prints, as numbers. Fields are found by name, so that one more or one less in another release does no harm.

use std::collections::BTreeMap;

use super::Version;

/// One block of forwarding statistics, in frames.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Received and forwarded, or freed by `rxonly`.
    pub rx_packets: u64,
    /// Missed by the port (`imissed`).
    pub rx_dropped: u64,
    /// Sum of the two.
    pub rx_total: u64,
    /// Taken by the port.
    pub tx_packets: u64,
    /// Not taken by the port, and freed.
    pub tx_dropped: u64,
    /// Sum of the two.
    pub tx_total: u64,
    /// Frames with errors.
    pub rx_error: u64,
    /// Failures to get an mbuf.
    pub rx_nombufs: u64,
}

/// What `stop` prints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ForwardStats {
    /// By port.
    pub ports: BTreeMap<u16, Counts>,
    /// Accumulated for all ports.
    pub total: Counts,
}

/// What `show port stats` prints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Frames received.
    pub rx_packets: u64,
    /// Frames missed.
    pub rx_missed: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Frames with errors.
    pub rx_errors: u64,
    /// Failures to get an mbuf.
    pub rx_nombuf: u64,
    /// Frames sent.
    pub tx_packets: u64,
    /// Frames not sent.
    pub tx_errors: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Frames received a second, mean since the last look.
    pub rx_pps: u64,
    /// Frames sent a second, mean since the last look.
    pub tx_pps: u64,
}

impl ForwardStats {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (ports, total) = text.split_once("Accumulated forward statistics")?;
        let ports = ports.split("Forward statistics for port ").skip(1).filter_map(|block| {
            let (port, _) = block.split_once(|c: char| !c.is_ascii_digit())?;
            Some((port.parse().ok()?, Counts::parse(block)?))
        });
        Some(Self { ports: ports.collect(), total: Counts::parse(total)? })
    }
}

impl Counts {
    fn parse(block: &str) -> Option<Self> {
        Some(Self {
            rx_packets: number(block, "RX-packets:")?,
            rx_dropped: number(block, "RX-dropped:")?,
            rx_total: number(block, "RX-total:")?,
            tx_packets: number(block, "TX-packets:")?,
            tx_dropped: number(block, "TX-dropped:")?,
            tx_total: number(block, "TX-total:")?,
            // Printed only if there were any.
            rx_error: number(block, "RX-error:").unwrap_or(0),
            rx_nombufs: number(block, "RX-nombufs:").unwrap_or(0),
        })
    }
}

impl PortStats {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (_, block) = text.split_once("NIC statistics for port ")?;
        Some(Self {
            rx_packets: number(block, "RX-packets:")?,
            rx_missed: number(block, "RX-missed:")?,
            rx_bytes: number(block, "RX-bytes:")?,
            rx_errors: number(block, "RX-errors:")?,
            rx_nombuf: number(block, "RX-nombuf:")?,
            tx_packets: number(block, "TX-packets:")?,
            tx_errors: number(block, "TX-errors:")?,
            tx_bytes: number(block, "TX-bytes:")?,
            rx_pps: number(block, "Rx-pps:")?,
            tx_pps: number(block, "Tx-pps:")?,
        })
    }
}

/// `name: number` lines.
pub(super) fn xstats(text: &str) -> BTreeMap<String, u64> {
    let pair = |line: &str| {
        let (name, value) = line.trim().split_once(": ")?;
        Some((name.to_string(), value.trim().parse().ok()?))
    };
    text.lines().filter_map(pair).collect()
}

/// `RTE Version: 'DPDK 22.11.11'`, with or without a release candidate behind it.
pub(super) fn version(text: &str) -> Option<Version> {
    let (_, rest) = text.split_once("RTE Version: 'DPDK ")?;
    let mut parts = rest.split(|c: char| !c.is_ascii_digit());
    let mut part = || parts.next()?.parse().ok();
    Some(Version { year: part()?, month: part()?, patch: part().unwrap_or(0) })
}

/// The burst mode in `show rxq info`, where the driver has one to tell.
pub(super) fn burst_mode(text: &str) -> Option<String> {
    let (_, rest) = text.split_once("Burst mode:")?;
    Some(rest.lines().next()?.trim().to_string())
}

/// The last receive path that the virtio driver logged: `virtio: using inorder Rx path on port 0`.
pub(super) fn logged_rx_path(text: &str) -> Option<String> {
    let line = text.lines().rev().find(|line| line.contains("virtio: using ") && line.contains(" Rx path"))?;
    let (_, rest) = line.split_once("virtio: using ")?;
    let (name, _) = rest.split_once(" Rx path")?;
    Some(name.to_string())
}

/// The first number behind `name`.
fn number(text: &str, name: &str) -> Option<u64> {
    let (_, rest) = text.split_once(name)?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STOP: &str = "
Telling cores to stop...
Waiting for lcores to finish...

  ---------------------- Forward statistics for port 0  ----------------------
  RX-packets: 83900864       RX-dropped: 1             RX-total: 83900865
  RX-error: 7
  RX-nombufs: 8
  TX-packets: 112268928      TX-dropped: 217116288     TX-total: 329385216
  ----------------------------------------------------------------------------

  +++++++++++++++ Accumulated forward statistics for all ports+++++++++++++++
  RX-packets: 83900864       RX-dropped: 1             RX-total: 83900865
  TX-packets: 112268928      TX-dropped: 217116288     TX-total: 329385216
  ++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++

Done.
";

    #[test]
    fn stop_is_read_by_port_and_in_sum() {
        let stats = ForwardStats::parse(STOP).unwrap();
        let total = Counts {
            rx_packets: 83_900_864,
            rx_dropped: 1,
            rx_total: 83_900_865,
            tx_packets: 112_268_928,
            tx_dropped: 217_116_288,
            tx_total: 329_385_216,
            rx_error: 0,
            rx_nombufs: 0,
        };
        assert_eq!(stats.total, total);
        assert_eq!(stats.ports, BTreeMap::from([(0, Counts { rx_error: 7, rx_nombufs: 8, ..total })]));
    }

    #[test]
    fn port_statistics_are_read_whole() {
        let text = "
  ######################## NIC statistics for port 0  ########################
  RX-packets: 1          RX-missed: 2          RX-bytes:  3
  RX-errors: 4
  RX-nombuf:  5         
  TX-packets: 6          TX-errors: 7          TX-bytes:  8

  Throughput (since last show)
  Rx-pps:            9          Rx-bps:            0
  Tx-pps:           10          Tx-bps:            0
";
        let stats = PortStats::parse(text).unwrap();
        let PortStats { rx_packets, rx_missed, rx_bytes, rx_errors, rx_nombuf, .. } = stats;
        assert_eq!([rx_packets, rx_missed, rx_bytes, rx_errors, rx_nombuf], [1, 2, 3, 4, 5]);
        assert_eq!([stats.tx_packets, stats.tx_errors, stats.tx_bytes, stats.rx_pps, stats.tx_pps], [6, 7, 8, 9, 10]);
    }

    #[test]
    fn names_and_versions_are_found() {
        let log = "set_rxtx_funcs(): virtio: using inorder Tx path on port 0\nset_rxtx_funcs(): virtio: using mergeable buffer Rx path on port 0\n";
        assert_eq!(logged_rx_path(log).unwrap(), "mergeable buffer");
        assert_eq!(burst_mode("RX drop packets: off\nBurst mode: Vector AVX2\nNumber").unwrap(), "Vector AVX2");
        let version = |text| version(text).map(|v| v.to_string());
        assert_eq!(version("EAL: RTE Version: 'DPDK 22.11.11'\n").unwrap(), "22.11.11");
        assert_eq!(version("EAL: RTE Version: 'DPDK 26.03.0-rc2'\n").unwrap(), "26.03.0");
        assert_eq!(version("chroot: failed to run command"), None);
        assert_eq!(xstats("rx_good_packets: 5\nrubbish\n")["rx_good_packets"], 5);
    }

    #[test]
    fn what_is_no_statistics_is_none() {
        for text in ["", "Packet forwarding not started\n", "Accumulated forward statistics RX-packets: x"] {
            assert_eq!(ForwardStats::parse(text), None);
            assert_eq!(PortStats::parse(text), None);
        }
    }
}
