//! The PMD on the reference backend, in each of its modes: every frame is checked where it arrives.
//!
//! `pmd_on_reference.rs` has the way there and back through a PMD that forwards.

use std::path::Path;

use pmd::mempool::Worker;
use pmd::port::{Burst, Link, Port};
use pmd::virtio::port::VirtioPort;
use pmd::virtio::user::Mode;
use testbed::frame::{FrameCheck, Macs, Stream};
use testbed::ledger::Ledger;
use testbed::peer::reference::{Config, Expect, Mode as Traffic, Reference};
use testbed::peer::turn;
use testbed::ports::{Cut, Exchange, Memory, Shape, guest, paths, wait_until};
use testbed::rings::bytes_of;
use vmm_sys_util::tempdir::TempDir;

const SEED: u64 = 37;
const MBUFS: u32 = 4096;
const FRAMES: u64 = 1500;
const WINDOW: u64 = 24;

/// The four combinations that the reference has rings for.
fn shapes() -> impl Iterator<Item = Shape> {
    Shape::all().into_iter().filter(|shape| !shape.packed)
}

fn backend(shape: Shape, socket: &Path, mode: Traffic) -> Reference {
    let Shape { queues, in_order, mergeable, .. } = shape;
    Reference::spawn(Config { queues, in_order, mergeable, ..Config::new(socket, mode) }).unwrap()
}

fn stream(shape: Shape) -> Stream {
    Stream::new(SEED, 0, 60..=shape.frame_max())
}

fn exchange(port: &VirtioPort, memory: &Memory, shape: Shape) -> Exchange {
    Exchange::new(port, &memory.pool, &stream(shape), Macs::Kept).unwrap()
}

#[test]
fn every_byte_comes_back_from_the_loop_on_each_path() {
    let _turn = turn();
    for shape in shapes() {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let reference = backend(shape, &socket, Traffic::Loop);
        let memory = Memory::new(MBUFS);
        let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
        assert_eq!(paths(&port), shape.guest_paths());
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape);
        // 150 bytes make ten segments of a frame of 1500: too many for an indirect table.
        for cut in [Cut::Whole, Cut::LittleHeadroom, Cut::Segments(700), Cut::Segments(150)] {
            traffic.cut(cut);
            let window = if cut == Cut::Segments(150) { 3 } else { WINDOW };
            assert!(traffic.run(300, window), "{shape:?} {cut:?}: {:?}", reference.stats());
        }
        traffic.finish().unwrap();
        drop((traffic, worker));
        port.stop().unwrap();
        let stats = reference.stop();
        assert_eq!((memory.out(), stats.bad_rings, stats.last_failure), (0, 0, None), "{shape:?}");
    }
}

#[test]
fn every_byte_reaches_the_sink_on_each_path() {
    let _turn = turn();
    for shape in shapes() {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let expect = Expect::Stream(stream(shape), Macs::Kept);
        let reference = backend(shape, &socket, Traffic::Sink(expect));
        let memory = Memory::new(MBUFS);
        let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape);
        let sent = traffic.flood(FRAMES);
        assert!(wait_until(|| reference.stats().from_guest >= sent));
        drop((traffic, worker));
        let counted = port.tx_stats();
        port.stop().unwrap();

        let stats = reference.stop();
        let mut ledger = Ledger::new(format!("{shape:?} to the sink: {stats:?}"));
        ledger.input("PMD sent", counted.packets);
        ledger.output("reference received, every byte right", stats.checks[0].good);
        ledger.balance().unwrap();
        assert_eq!((counted.packets, counted.bytes), (FRAMES, stats.from_guest_bytes));
        assert_eq!(memory.out(), 0);
    }
}

#[test]
fn every_byte_of_the_source_reaches_the_pmd_on_each_path() {
    let _turn = turn();
    for shape in shapes() {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let mode = Traffic::Source { stream: stream(shape), count: Some(FRAMES), returned: Expect::Anything };
        let reference = backend(shape, &socket, mode);
        let memory = Memory::new(MBUFS);
        let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
        let worker = Worker::enter().unwrap();
        let mut rx = port.rx(0).unwrap();
        let (mut check, mut burst) = (FrameCheck::new(stream(shape), Macs::Kept), Burst::new(32));
        assert!(wait_until(|| {
            while rx.rx_burst(&mut burst) > 0 {
                for mbuf in burst.take_front(32) {
                    check.check(&bytes_of(&mbuf).unwrap());
                }
            }
            check.report().good == FRAMES
        }));
        check.finish(FRAMES, 0).unwrap();
        drop((rx, worker));
        port.stop().unwrap();
        assert_eq!(port.rx_stats().bytes, reference.stop().to_guest_bytes);
        assert_eq!(memory.out(), 0);
    }
}

#[test]
fn the_reference_connects_to_a_port_that_listens() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let shape = Shape { queues: 2, ..Shape::PLAIN };
    let config =
        Config { client: true, queues: 2, in_order: false, mergeable: false, ..Config::new(&socket, Traffic::Loop) };
    let reference = Reference::spawn(config).unwrap();
    let memory = Memory::new(MBUFS);
    let mut port = guest(shape, &socket, Mode::Server, &memory).unwrap();
    let _worker = Worker::enter().unwrap();
    let mut traffic = exchange(&port, &memory, shape);
    assert!(traffic.run(500, WINDOW), "{:?}", reference.stats());
    traffic.finish().unwrap();
    port.stop().unwrap();
    assert_eq!(memory.out(), 0);
}

#[test]
fn a_reference_that_goes_takes_no_mbuf_with_it() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    for shape in shapes() {
        let reference = backend(shape, &socket, Traffic::Loop);
        let memory = Memory::new(MBUFS);
        let mut port = guest(shape, &socket, Mode::Client, &memory).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape);
        assert!(traffic.run(100, WINDOW));
        traffic.flood(100);
        drop(reference);
        assert!(wait_until(|| port.link() == Link::Down));
        traffic.let_go();
        port.stop().unwrap();
        assert_eq!(memory.out(), 0, "{shape:?}");
    }
}

#[test]
fn what_the_other_side_lacks_is_named_as_the_address_names_it() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let _reference = backend(Shape::PLAIN, &socket, Traffic::Loop);
    let memory = Memory::new(MBUFS);
    for (shape, missing) in [
        (Shape { in_order: true, ..Shape::PLAIN }, "in_order"),
        (Shape { mergeable: true, ..Shape::PLAIN }, "mrg"),
        (Shape { packed: true, in_order: true, mergeable: true, ..Shape::PLAIN }, "packed, in_order, mrg"),
    ] {
        let said = guest(shape, &socket, Mode::Client, &memory).err().unwrap().to_string();
        assert!(said.contains(&format!("does not offer {missing}; leave it out")), "{said}");
    }
    // And the next one is served.
    assert_eq!(guest(Shape::PLAIN, &socket, Mode::Client, &memory).unwrap().link(), Link::Up);
}
