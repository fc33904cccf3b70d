//! Either end is killed, at any moment, and started again: the other one goes on with the next, whichever of the two listens.
//! What is lost is what the dead one held; nothing comes twice, out of order or broken.

mod life_support;

use std::path::Path;
use std::time::{Duration, Instant};

use backend::control::{self, Control};
use life_support::{BURST, Process};
use pmd::mempool::Worker;
use pmd::port::{Link, Port};
use pmd::virtio::user::Mode;
use testbed::frame::{Macs, Stream};
use testbed::peer::turn;
use testbed::ports::{Exchange, Memory, Shape, guest, host, paths, wait_until};
use vmm_sys_util::tempdir::TempDir;

const SEED: u64 = 41;
const MBUFS: u32 = 8192;
/// How often each is killed.
const KILLS: u32 = 3;

/// Lets traffic flow for so long, whether or not anything comes back.
fn flow(traffic: &mut Exchange, window: u64, duration: Duration) {
    let start = Instant::now();
    while start.elapsed() < duration {
        if traffic.round(window) == 0 {
            std::thread::yield_now();
        }
    }
}

/// Frames under way that fit into the rings, however long they are: the peer then never drops one for want of a buffer.
fn window(shape: Shape) -> u64 {
    if shape.mergeable { 40 } else { 200 }
}

/// Every shape, with the mode in which the PMD's end is.
fn cases() -> impl Iterator<Item = (Shape, Mode)> {
    Shape::all().into_iter().flat_map(|shape| [Mode::Client, Mode::Server].map(|mode| (shape, mode)))
}

fn backend_process(socket: &Path, mode: Mode) -> Process {
    let key = if mode == Mode::Server { ",client" } else { "" };
    Process::start("backend-role", &format!("vhost-user:{}{key}", socket.display()), &[])
}

#[test]
fn a_killed_backend_takes_no_more_with_it_than_one_burst() {
    let _turn = turn();
    for (shape, mode) in cases() {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let memory = Memory::new(MBUFS);
        let mut backend = Some(backend_process(&socket, mode));
        let mut opened = guest(shape, &socket, mode, &memory);
        assert!(wait_until(|| {
            // It may not listen yet.
            if opened.is_err() {
                opened = guest(shape, &socket, mode, &memory);
            }
            opened.is_ok()
        }));
        let mut port = opened.unwrap();
        let before = paths(&port);
        let worker = Worker::enter().unwrap();
        let stream = Stream::new(SEED, 0, 60..=shape.frame_max());
        let mut traffic = Exchange::new(&port, &memory.pool, &stream, Macs::Kept).unwrap();

        for kill in 0..KILLS {
            flow(&mut traffic, window(shape), Duration::from_millis(30 + u64::from(kill) * 7));
            drop(backend.take());
            // Nobody is there; the rings fill up.
            flow(&mut traffic, window(shape), Duration::from_millis(5));
            assert_eq!(port.recover().unwrap(), Link::Down, "{shape:?} {mode:?}");
            backend = Some(backend_process(&socket, mode));
            assert!(wait_until(|| port.recover().unwrap() == Link::Up), "{shape:?} {mode:?}");
            traffic.drain(Duration::from_millis(100));
            let lost = traffic.write_off();
            assert!(lost <= BURST, "{shape:?} {mode:?}: {lost} frames are gone; {:?}", traffic.reports());
        }
        assert!(traffic.run(500, window(shape)), "{shape:?} {mode:?}: {:?}", traffic.reports());
        port.recover().unwrap();
        assert_eq!(paths(&port), before);
        traffic.finish().unwrap();
        traffic.ledger(format!("{shape:?} {mode:?}")).balance().unwrap();

        // Stopped without a backend, everything comes home, too.
        drop(backend);
        flow(&mut traffic, window(shape), Duration::from_millis(5));
        traffic.let_go();
        drop((traffic, worker));
        port.stop().unwrap();
        assert_eq!(memory.out(), 0, "{shape:?} {mode:?}");
    }
}

#[test]
fn a_killed_driver_takes_no_more_with_it_than_its_rings() {
    let _turn = turn();
    for (shape, mode) in cases() {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let memory = Memory::new(MBUFS);
        let control = Control::new().unwrap();
        let ours = if mode == Mode::Client { control::Mode::Server } else { control::Mode::Client };
        let mut port = host(1, &socket, ours, &memory, &control).unwrap();
        let keys = [(shape.packed, ",packed"), (shape.in_order, ",in_order"), (shape.mergeable, ",mrg")];
        let keys: String = keys.iter().filter(|key| key.0).map(|key| key.1).collect();
        let server = if mode == Mode::Server { ",server" } else { "" };
        let address = format!("virtio-user:{},size=256{keys}{server}", socket.display());
        let worker = Worker::enter().unwrap();
        let stream = Stream::new(SEED, 0, 60..=shape.frame_max());
        let mut traffic = Exchange::new(&port, &memory.pool, &stream, Macs::Kept).unwrap();

        for kill in 0..KILLS {
            let driver = Process::start("guest-role", &address, &[]);
            assert!(wait_until(|| port.link() == Link::Up), "{shape:?} {mode:?}");
            assert!(traffic.run(500, window(shape)), "{shape:?} {mode:?}: {:?}", traffic.reports());
            flow(&mut traffic, window(shape), Duration::from_millis(20 + u64::from(kill) * 7));
            drop(driver);
            assert!(wait_until(|| port.link() == Link::Down), "{shape:?} {mode:?}");
            traffic.drain(Duration::from_millis(5));
            let lost = traffic.write_off();
            assert!(lost <= window(shape), "{shape:?} {mode:?}: {lost} frames are gone");
        }
        traffic.ledger(format!("{shape:?} {mode:?}")).balance().unwrap();
        traffic.let_go();
        let wrong = traffic.reports().iter().map(|r| r.duplicate + r.late + r.corrupt + r.foreign).sum::<u64>();
        assert_eq!(wrong, 0, "{shape:?} {mode:?}: {:?}", traffic.reports());
        drop((traffic, worker));
        port.stop().unwrap();
        assert_eq!(memory.out(), 0, "{shape:?} {mode:?}");
    }
}
