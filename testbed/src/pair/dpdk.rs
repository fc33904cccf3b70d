//! Either end, played by DPDK's testpmd.

use std::path::Path;
use std::time::Instant;

use pmd::fwd::{Engine, Pages};

use super::end::{Counts, End, Paths};
use super::{Cell, PairError, Plan, Ring, Side};
use crate::peer::dpdk::{Config, Forward, PortStats, Role, Testpmd, Vhost, VirtioUser};

/// Bytes of a frame that fit into one of testpmd's mbufs.
const SEGMENT_MAX: u16 = 2048;
/// Mbufs beyond those in the rings: caches and bursts.
const MBUFS_SPARE: u32 = 8192;
/// The least that testpmd gets, and what it gets for that, in MiB.
const MBUFS_MIN: u32 = 16384;
const MEMORY_MIB_MIN: u32 = 128;

/// A testpmd with one port.
pub(super) struct Dpdk {
    side: Side,
    testpmd: Testpmd,
    since: Instant,
    forward: Forward,
    /// Up to the last stop.
    unsent: u64,
}

impl Dpdk {
    /// Starts it, and waits until it takes commands.
    pub(super) fn launch(side: Side, cell: &Cell, plan: &Plan, socket: &Path) -> Result<Self, PairError> {
        let (role, cpu) = match side {
            Side::Host => (Role::Vhost(Vhost { queues: cell.queues, ..Vhost::new(socket) }), plan.cpus.host),
            Side::Guest => {
                let user = VirtioUser {
                    queues: cell.queues,
                    queue_size: cell.ring_size,
                    in_order: cell.in_order,
                    mrg_rxbuf: cell.mergeable,
                    packed_vq: cell.ring == Ring::Packed,
                    ..VirtioUser::new(socket)
                };
                (Role::VirtioUser(user), plan.cpus.guest)
            }
        };
        let mbufs = (2 * u32::from(cell.queues) * u32::from(cell.ring_size) + MBUFS_SPARE).max(MBUFS_MIN);
        let config = Config {
            root: plan.dpdk_root.clone(),
            burst: cell.burst,
            txpkts: segments(cell.frame),
            mbufs,
            memory_mib: MEMORY_MIB_MIN * mbufs.div_ceil(MBUFS_MIN),
            ..Config::new(role, cpu)
        };
        let testpmd = Testpmd::launch(&config)?;
        Ok(Self { side, testpmd, since: Instant::now(), forward: config.forward, unsent: 0 })
    }
}

/// The lengths of the segments of a frame.
fn segments(frame: u16) -> Vec<u16> {
    let full = usize::from(frame / SEGMENT_MAX);
    let rest = Some(frame % SEGMENT_MAX).filter(|&rest| rest > 0);
    std::iter::repeat_n(SEGMENT_MAX, full).chain(rest).collect()
}

impl End for Dpdk {
    fn check(&mut self) -> Result<(), PairError> {
        Ok(self.testpmd.check()?)
    }

    fn link_is_up(&mut self) -> Result<bool, PairError> {
        Ok(self.testpmd.command("show port info 0")?.contains("Link status: up"))
    }

    fn paths(&mut self) -> Result<Paths, PairError> {
        match self.side {
            // DPDK's vhost has no path names.
            Side::Host => Ok(Paths::default()),
            Side::Guest => Ok(Paths { rx: Some(self.testpmd.rx_path_name(0)?), tx: None }),
        }
    }

    fn pages(&self) -> Option<Pages> {
        None
    }

    fn start(&mut self, engine: Engine, tx_first: u32) -> Result<(), PairError> {
        let forward = match engine {
            Engine::Io => Forward::Io,
            Engine::RxOnly => Forward::RxOnly,
            Engine::TxOnly => Forward::TxOnly,
            Engine::Mac => Forward::Mac,
            Engine::MacSwap => Forward::MacSwap,
        };
        if forward != self.forward {
            self.testpmd.set_fwd(forward)?;
            self.forward = forward;
        }
        Ok(if tx_first > 0 { self.testpmd.start_tx_first(tx_first) } else { self.testpmd.start() }?)
    }

    fn stop(&mut self) -> Result<(), PairError> {
        let stats = self.testpmd.stop()?;
        if self.forward != Forward::TxOnly {
            self.unsent += stats.total.tx_dropped;
        }
        Ok(())
    }

    fn counts(&mut self) -> Result<Counts, PairError> {
        let stats = self.testpmd.port_stats()?;
        let time_s = self.since.elapsed().as_secs_f64();
        let PortStats { rx_packets, tx_packets, rx_errors, rx_missed, .. } = stats;
        let lost = [("errors", rx_errors), ("missed", rx_missed)];
        let lost = lost.iter().filter(|lost| lost.1 > 0).map(|&(name, frames)| (name.to_owned(), frames));
        Ok(Counts {
            time_s,
            received: rx_packets,
            sent: tx_packets,
            unsent: self.unsent,
            made: None,
            lost_rx: lost.collect(),
            lost_tx: Vec::new(),
        })
    }

    fn quit(self: Box<Self>) -> Result<Vec<String>, PairError> {
        drop(self);
        Ok(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_cut_into_segments_that_fit() {
        assert_eq!(segments(64), [64]);
        assert_eq!(segments(2048), [2048]);
        assert_eq!(segments(9000), [2048, 2048, 2048, 2048, 808]);
    }
}
