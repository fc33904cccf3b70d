//! The PMD as a guest of DPDK's vhost: testpmd sends back what the PMD sends, and every byte is checked.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use pmd::fwd::open_port;
use pmd::mempool::Worker;
use pmd::port::{BINS, Link, Port};
use pmd::virtio::user::Mode;
use testbed::frame::{Macs, Stream};
use testbed::peer::dpdk::{Config, Forward, Role, Testpmd, Vhost};
use testbed::peer::turn;
use testbed::ports::{Cut, Exchange, Memory, SOON, Shape, guest, paths, setup, wait_until};
use vmm_sys_util::tempdir::TempDir;

const SEED: u64 = 23;
const MBUFS: u32 = 8192;
/// Frames under way on a queue pair: with nine descriptors each for the longest they fit into a ring of 256.
const WINDOW: u64 = 24;

/// A testpmd that serves `socket` and sends back what it gets.
fn host(socket: &Path, queues: u16, client: bool, forward: Forward) -> Testpmd {
    let vhost = Vhost { client, queues, ..Vhost::new(socket) };
    let mut host = Testpmd::launch(&Config { forward, ..Config::new(Role::Vhost(vhost), 0) }).unwrap();
    host.start().unwrap();
    host
}

fn exchange(port: &dyn Port, memory: &Memory, frame_max: usize, macs: Macs) -> Exchange {
    Exchange::new(port, &memory.pool, &Stream::new(SEED, 0, 60..=frame_max), macs).unwrap()
}

#[test]
fn dpdk_host_returns_every_byte_on_each_path_whatever_the_mbufs_look_like() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let mut testpmd = host(&socket, 1, false, Forward::MacSwap);
    let memory = Memory::new(MBUFS);
    for shape in Shape::all() {
        let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
        testpmd.wait_link_up(SOON).unwrap();
        assert_eq!(port.link(), Link::Up);
        assert_eq!(paths(&port), shape.guest_paths());

        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape.frame_max(), Macs::Swapped);
        // 150 bytes make ten segments of a frame of 1500: too many for an indirect table.
        for cut in [Cut::Whole, Cut::LittleHeadroom, Cut::Segments(700), Cut::Segments(150)] {
            traffic.cut(cut);
            let frames = if cut == Cut::Whole { 4000 } else { 500 };
            assert!(
                traffic.run(frames, if cut == Cut::Segments(150) { 3 } else { WINDOW }),
                "{shape:?} {cut:?}: {:?}",
                traffic.reports()
            );
        }
        traffic.finish().unwrap();
        traffic.ledger(format!("{shape:?}")).balance().unwrap();
        assert_eq!(port.tx_stats().packets, port.rx_stats().packets);
        drop((traffic, worker));
        port.stop().unwrap();
        assert_eq!(memory.out(), 0, "{shape:?}");
    }
}

#[test]
fn dpdk_host_keeps_each_queue_pair_to_its_own_stream() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let mut testpmd = host(&socket, 3, false, Forward::Io);
    let memory = Memory::new(MBUFS);
    for queues in [2, 3] {
        for in_order in [false, true] {
            let shape = Shape { queues, in_order, ..Shape::PLAIN };
            let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
            testpmd.wait_link_up(SOON).unwrap();
            let worker = Worker::enter().unwrap();
            let mut traffic = exchange(&port, &memory, 300, Macs::Kept);
            assert!(traffic.run(2000, WINDOW), "{shape:?}: {:?}", traffic.reports());
            traffic.finish().unwrap();
            drop((traffic, worker));
            port.stop().unwrap();
            assert_eq!(memory.out(), 0);
        }
    }
}

#[test]
fn dpdk_host_connects_to_a_port_that_listens_and_comes_again() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let mut testpmd = host(&socket, 2, true, Forward::Io);
    let memory = Memory::new(MBUFS);
    for mergeable in [true, false] {
        let shape = Shape { queues: 2, mergeable, ..Shape::PLAIN };
        let mut port = guest(shape, &socket, Mode::Server, &memory).unwrap();
        testpmd.wait_link_up(SOON).unwrap();
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape.frame_max(), Macs::Kept);
        assert!(traffic.run(500, WINDOW), "{:?}", traffic.reports());
        traffic.finish().unwrap();
        drop((traffic, worker));
        port.stop().unwrap();
        drop(port);
        assert!(!socket.exists(), "a socket goes with the port that made it");
        assert_eq!(memory.out(), 0);
    }
}

#[test]
fn dpdk_host_goes_on_after_the_port_was_stopped_or_set_up_anew() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let mut testpmd = host(&socket, 2, false, Forward::Io);
    let memory = Memory::new(MBUFS);
    let shape = Shape { queues: 2, in_order: true, mergeable: true, ..Shape::PLAIN };
    let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
    let _worker = Worker::enter().unwrap();

    let mut traffic = exchange(&port, &memory, 3000, Macs::Kept);
    for _ in 0..3 {
        testpmd.wait_link_up(SOON).unwrap();
        assert!(traffic.run(300, WINDOW), "{:?}", traffic.reports());
        port.stop().unwrap();
        assert_eq!((port.link(), memory.out()), (Link::Down, 0));
        // The handles stay valid: nothing comes through them, and nothing goes.
        assert_eq!((traffic.offer(), traffic.drain(Duration::ZERO)), (0, 0));
        port.start().unwrap();
    }
    assert!(traffic.run(300, WINDOW), "{:?}", traffic.reports());
    traffic.finish().unwrap();
    drop(traffic);
    port.stop().unwrap();

    for queues in [1, 2] {
        open_port(&mut port, &setup(Shape { queues, ..shape }, &memory)).unwrap();
        testpmd.wait_link_up(SOON).unwrap();
        let mut traffic = exchange(&port, &memory, 3000, Macs::Kept);
        assert!(traffic.run(300, WINDOW), "{queues} queues: {:?}", traffic.reports());
        traffic.finish().unwrap();
        drop(traffic);
        port.stop().unwrap();
        assert_eq!(memory.out(), 0);
    }
}

#[test]
fn dpdk_host_goes_on_after_single_queues_were_stopped() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let mut testpmd = host(&socket, 2, false, Forward::Io);
    let memory = Memory::new(MBUFS);
    let mut port = guest(Shape { queues: 2, ..Shape::PLAIN }, &socket, Mode::Client, &memory).unwrap();
    let _worker = Worker::enter().unwrap();
    let mut traffic = exchange(&port, &memory, 1000, Macs::Kept);
    for queue in [1, 0, 1] {
        testpmd.wait_link_up(SOON).unwrap();
        assert!(traffic.run(300, WINDOW), "{:?}", traffic.reports());
        port.rx_queue_stop(queue).unwrap();
        assert_eq!((port.rx_path(queue), port.tx_path(queue)), (None, Some("split")));
        port.rx_queue_start(queue).unwrap();
        port.tx_queue_stop(queue).unwrap();
        assert_eq!((port.rx_path(queue), port.tx_path(queue)), (Some("split"), None));
        port.tx_queue_start(queue).unwrap();
    }
    testpmd.wait_link_up(SOON).unwrap();
    assert!(traffic.run(300, WINDOW), "{:?}", traffic.reports());
    traffic.finish().unwrap();
    port.stop().unwrap();
    assert_eq!(memory.out(), 0);
}

#[test]
fn dpdk_host_counts_what_a_full_ring_of_ours_cannot_take() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    for in_order in [false, true] {
        let mut testpmd = host(&socket, 1, false, Forward::Io);
        let memory = Memory::new(MBUFS);
        let port = guest(Shape { in_order, ..Shape::PLAIN }, &socket, Mode::Client, &memory).unwrap();
        testpmd.wait_link_up(SOON).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, 200, Macs::Kept);
        let sent = traffic.flood(5000);
        assert_eq!(testpmd.wait_rx(sent, SOON).unwrap().rx_packets, sent);
        let dropped = testpmd.stop().unwrap().total.tx_dropped;
        traffic.drain(Duration::from_millis(100));

        let mut ledger = traffic.ledger("a flood");
        ledger.dropped("testpmd: ring full", dropped);
        ledger.balance().unwrap();
        assert!(dropped > 0);
    }
}

#[test]
fn dpdk_host_killed_in_mid_traffic_takes_no_mbuf_with_it() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let packed = Shape { packed: true, ..Shape::PLAIN };
    for shape in [Shape::PLAIN, Shape { in_order: true, mergeable: true, ..Shape::PLAIN }, packed] {
        let testpmd = host(&socket, 1, false, Forward::Io);
        let memory = Memory::new(MBUFS);
        let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, 300, Macs::Kept);
        assert!(traffic.run(100, WINDOW));
        traffic.flood(1000);
        assert!(Command::new("kill").args(["-KILL", &testpmd.pid().to_string()]).status().unwrap().success());
        assert!(wait_until(|| port.link() == Link::Down), "{shape:?}");
        traffic.drain(Duration::ZERO);
        let report = traffic.reports()[0];
        assert_eq!(report.corrupt + report.duplicate + report.late, 0, "{report:?}");
        traffic.let_go();
        port.stop().unwrap();
        assert_eq!(memory.out(), 0, "{shape:?}");
        drop(testpmd);
        let said = port.start().unwrap_err().to_string();
        assert!(said.contains("closed the connection"), "{said}");
        // What a killed DPDK leaves is in the way of the next one.
        std::fs::remove_file(&socket).unwrap();
    }
}

#[test]
fn dpdk_host_counts_the_same_frames_bytes_and_sizes() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let mut testpmd = host(&socket, 1, false, Forward::Io);
    let memory = Memory::new(MBUFS);
    let port = guest(Shape { mergeable: true, ..Shape::PLAIN }, &socket, Mode::Client, &memory).unwrap();
    testpmd.wait_link_up(SOON).unwrap();
    let _worker = Worker::enter().unwrap();
    for frame_max in [70, 700, 9000] {
        let mut traffic = exchange(&port, &memory, frame_max, Macs::Kept);
        assert!(traffic.run(500, WINDOW), "{:?}", traffic.reports());
    }
    let theirs = testpmd.xstats().unwrap();
    for (stats, side) in [(port.tx_stats(), "rx"), (port.rx_stats(), "tx")] {
        let their = |name: &str| theirs[&format!("{side}_q0_{name}")];
        assert_eq!((stats.packets, stats.bytes), (their("good_packets"), their("good_bytes")));
        for ((bin, _), count) in BINS.into_iter().zip(stats.bins) {
            let name = if bin == "undersize" { "undersize_packets".into() } else { format!("size_{bin}_packets") };
            assert_eq!(count, their(&name), "{side} {name}");
        }
    }
}
