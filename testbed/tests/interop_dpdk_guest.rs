//! The backend as a host of DPDK's virtio-user: testpmd sends back what the backend sends, and every byte is checked.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use backend::control::{Control, Mode};
use backend::port::vhost_user::VhostUserPort;
use pmd::mempool::Worker;
use pmd::port::{BINS, Link, Port};
use testbed::frame::{Macs, Stream};
use testbed::peer::dpdk::{self, Config, Forward, Role, Testpmd, VirtioUser};
use testbed::peer::turn;
use testbed::ports::{Exchange, Memory, Shape, host, paths, wait_until};
use vmm_sys_util::tempdir::TempDir;

const SEED: u64 = 29;
const MBUFS: u32 = 8192;
/// Descriptors of the guest's rings.
const SIZE: u16 = 256;
/// Frames under way on a queue pair: with six descriptors each for the longest they fit into the guest's rings.
const WINDOW: u64 = 32;

/// A testpmd of `shape` on `socket` that sends back what it gets.
fn guest(shape: Shape, socket: &Path, server: bool, forward: Forward) -> Testpmd {
    let mut guest = Testpmd::launch(&config(shape, socket, server, forward)).unwrap();
    guest.start().unwrap();
    guest
}

fn config(shape: Shape, socket: &Path, server: bool, forward: Forward) -> Config {
    let Shape { packed, in_order, mergeable, queues, .. } = shape;
    let user = VirtioUser {
        server,
        queues,
        queue_size: SIZE,
        in_order,
        mrg_rxbuf: mergeable,
        packed_vq: packed,
        ..VirtioUser::new(socket)
    };
    // A frame of 9000 bytes takes five of DPDK's mbufs.
    let jumbo = vec!["--max-pkt-len=9018".into(), "--enable-scatter".into()];
    let options = if mergeable { jumbo } else { Vec::new() };
    Config { forward, options, ..Config::new(Role::VirtioUser(user), 1) }
}

/// The longest frame that testpmd takes, in `shape`.
fn frame_max(shape: Shape) -> usize {
    if shape.mergeable { 9000 } else { 1514 }
}

fn exchange(port: &VhostUserPort, memory: &Memory, frame_max: usize, macs: Macs) -> Exchange {
    Exchange::new(port, &memory.pool, &Stream::new(SEED, 0, 60..=frame_max), macs).unwrap()
}

/// Waits until all queues of `port` run.
fn wait_up(port: &mut VhostUserPort) {
    let queues = port.slots().rx.len() as u16;
    let runs = |port: &VhostUserPort, queue| port.rx_path(queue).is_some() && port.tx_path(queue).is_some();
    assert!(wait_until(|| port.link() == Link::Up && (0..queues).all(|queue| runs(port, queue))));
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn dpdk_guest_returns_every_byte_on_each_path_and_the_socket_takes_the_next_one() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(1, &socket, Mode::Server, &memory, &control).unwrap();
    let before = descriptors();
    for shape in Shape::all() {
        let testpmd = guest(shape, &socket, false, Forward::MacSwap);
        wait_up(&mut port);
        assert_eq!(paths(&port), shape.host_paths());
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, frame_max(shape), Macs::Swapped);
        assert!(traffic.run(4000, WINDOW), "{shape:?}: {:?}", traffic.reports());
        traffic.finish().unwrap();
        traffic.ledger(format!("{shape:?}")).balance().unwrap();
        drop((traffic, worker, testpmd));
        assert!(wait_until(|| port.link() == Link::Down));
        assert_eq!((memory.out(), descriptors()), (0, before), "{shape:?}");
    }
}

#[test]
fn dpdk_guest_keeps_each_queue_pair_to_its_own_stream() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(3, &socket, Mode::Server, &memory, &control).unwrap();
    let testpmd = guest(Shape { queues: 3, in_order: true, ..Shape::PLAIN }, &socket, false, Forward::Io);
    wait_up(&mut port);
    let _worker = Worker::enter().unwrap();
    let mut traffic = exchange(&port, &memory, 300, Macs::Kept);
    assert!(traffic.run(2000, WINDOW), "{:?}", traffic.reports());
    traffic.finish().unwrap();
    port.stop().unwrap();
    drop(testpmd);
    assert_eq!(memory.out(), 0);
}

#[test]
fn dpdk_guest_with_fewer_queue_pairs_than_there_are_uses_those_it_has() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(3, &socket, Mode::Server, &memory, &control).unwrap();
    let testpmd = guest(Shape { queues: 1, ..Shape::PLAIN }, &socket, false, Forward::RxOnly);
    assert!(wait_until(|| port.tx_path(0).is_some() && port.rx_path(0).is_some()));
    assert_eq!((port.link(), port.tx_path(1), port.rx_path(2)), (Link::Up, None, None));
    drop(testpmd);
    port.stop().unwrap();
    assert_eq!(memory.out(), 0);
}

#[test]
fn dpdk_guest_that_listens_is_found_and_found_again() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    // Before anybody listens.
    let mut port = host(1, &socket, Mode::Client, &memory, &control).unwrap();
    for mergeable in [false, true] {
        let shape = Shape { mergeable, ..Shape::PLAIN };
        let testpmd = guest(shape, &socket, true, Forward::Io);
        wait_up(&mut port);
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, frame_max(shape), Macs::Kept);
        assert!(traffic.run(500, WINDOW), "{:?}", traffic.reports());
        traffic.finish().unwrap();
        drop((traffic, worker, testpmd));
        assert!(wait_until(|| port.link() == Link::Down));
        assert_eq!(memory.out(), 0);
        let _ = fs::remove_file(&socket); // testpmd leaves it
    }
}

#[test]
fn dpdk_guest_that_stops_and_starts_its_port_loses_nothing() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(2, &socket, Mode::Server, &memory, &control).unwrap();
    for packed in [false, true] {
        let shape = Shape { packed, queues: 2, in_order: true, mergeable: true, ..Shape::PLAIN };
        let mut testpmd = guest(shape, &socket, false, Forward::Io);
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, 9000, Macs::Kept);
        for _ in 0..3 {
            wait_up(&mut port);
            assert!(traffic.run(300, WINDOW), "{shape:?}: {:?}", traffic.reports());
            testpmd.stop().unwrap();
            testpmd.command("port stop 0").unwrap();
            testpmd.command("port start 0").unwrap();
            testpmd.start().unwrap();
        }
        traffic.finish().unwrap();
        drop((traffic, worker, testpmd));
        assert!(wait_until(|| port.link() == Link::Down));
    }
}

#[test]
fn dpdk_guest_waits_while_the_port_or_one_queue_is_stopped_and_loses_nothing() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(1, &socket, Mode::Server, &memory, &control).unwrap();
    for packed in [false, true] {
        let testpmd = guest(Shape { packed, ..Shape::PLAIN }, &socket, false, Forward::Io);
        wait_up(&mut port);
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, 1000, Macs::Kept);
        for _ in 0..3 {
            traffic.flood(20);
            port.stop().unwrap();
            assert_eq!(port.link(), Link::Down);
            assert_eq!((traffic.offer(), traffic.drain(Duration::ZERO)), (0, 0));
            port.start().unwrap();
            traffic.flood(20);
            port.rx_queue_stop(0).unwrap();
            assert_eq!((port.rx_path(0), traffic.drain(Duration::ZERO)), (None, 0));
            port.rx_queue_start(0).unwrap();
            traffic.flood(20);
            port.tx_queue_stop(0).unwrap();
            assert_eq!((port.tx_path(0), traffic.offer()), (None, 0));
            port.tx_queue_start(0).unwrap();
            assert!(traffic.run(200, WINDOW), "{:?}", traffic.reports());
        }
        traffic.finish().unwrap();
        drop((traffic, worker, testpmd));
        assert!(wait_until(|| port.link() == Link::Down));
        assert_eq!(memory.out(), 0);
    }
}

#[test]
fn dpdk_guest_killed_in_mid_traffic_leaves_nothing_behind() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(1, &socket, Mode::Server, &memory, &control).unwrap();
    let before = descriptors();
    for packed in [false, true] {
        let testpmd = guest(Shape { packed, ..Shape::PLAIN }, &socket, false, Forward::Io);
        wait_up(&mut port);
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, 300, Macs::Kept);
        assert!(traffic.run(100, WINDOW));
        traffic.flood(100);
        assert!(Command::new("kill").args(["-KILL", &testpmd.pid().to_string()]).status().unwrap().success());
        assert!(wait_until(|| {
            traffic.drain(Duration::ZERO);
            port.link() == Link::Down
        }));
        let report = traffic.reports()[0];
        assert_eq!(report.corrupt + report.duplicate + report.late, 0, "{report:?}");
        traffic.let_go();
        drop((traffic, worker, testpmd));
        assert_eq!((memory.out(), descriptors()), (0, before));
    }
}

/// Bytes of guests' memory that this process has mapped.
fn mapped() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let bytes = |line: &str| {
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        Some(usize::from_str_radix(end, 16).ok()? - usize::from_str_radix(start, 16).ok()?)
    };
    maps.lines().filter(|line| line.contains("seg_")).filter_map(bytes).sum()
}

/// Only DPDK's memory on huge pages grows; `testbed/check` reserves them, or says that it could not run this.
#[test]
fn dpdk_guest_on_huge_pages_that_plugs_memory_in_under_traffic_loses_nothing() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let (socket, second) = (dir.as_path().join("s"), dir.as_path().join("second"));
    let memory = Memory::new(MBUFS);
    let control = Control::new().unwrap();
    let mut port = host(1, &socket, Mode::Server, &memory, &control).unwrap();
    let _other = host(8, &second, Mode::Server, &memory, &control).unwrap();
    let config = config(Shape::PLAIN, &socket, false, Forward::Io);
    // Less than it needs from the start, so that it takes no more than it needs and has to ask again for every large thing.
    let mut testpmd = Testpmd::launch(&Config { memory: dpdk::Memory::Huge, memory_mib: 16, ..config }).unwrap();
    testpmd.start().unwrap();
    wait_up(&mut port);
    let before = mapped();

    let _worker = Worker::enter().unwrap();
    let mut traffic = exchange(&port, &memory, 1000, Macs::Kept);
    let attach = format!("port attach net_virtio_user1,path={},queues=8,queue_size=4096", second.display());
    std::thread::scope(|scope| {
        let attached = scope.spawn(|| testpmd.command(&attach).unwrap());
        let mut rounds = 0;
        while !attached.is_finished() || rounds < 3 {
            assert!(traffic.run(300, WINDOW), "{:?}", traffic.reports());
            rounds += 1;
        }
        assert!(attached.join().unwrap().contains("Port 1 is attached"));
    });
    traffic.finish().unwrap();
    // Each of the two ports has a table of its own of the same, by now larger, memory.
    assert!(mapped() > 2 * before, "{before} bytes were mapped, and now {} by two", mapped());
}

#[test]
fn dpdk_guest_counts_the_same_frames_bytes_and_sizes() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let mut port = host(1, &socket, Mode::Server, &memory, &control).unwrap();
    let mut testpmd = guest(Shape { mergeable: true, ..Shape::PLAIN }, &socket, false, Forward::Io);
    wait_up(&mut port);
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
