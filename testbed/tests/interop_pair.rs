//! The PMD and the backend, over a real socket: every byte goes there and back, and nothing is left when either goes away.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use backend::control::{Control, Mode};
use backend::port::vhost_user::VhostUserPort;
use pmd::fwd::open_port;
use pmd::mempool::Worker;
use pmd::port::{Link, Port};
use pmd::virtio::port::VirtioPort;
use pmd::virtio::user;
use testbed::frame::{Macs, Stream};
use testbed::peer::turn;
use testbed::ports::{Cut, Echo, Exchange, Memory, Shape, guest, host, paths, setup, wait_until};
use vmm_sys_util::tempdir::TempDir;

const SEED: u64 = 31;
const MBUFS: u32 = 4096;
/// Frames under way on a queue pair: with nine descriptors each for the longest they fit into a ring of 256.
const WINDOW: u64 = 24;

/// The host's end: a control thread, a port of up to three queue pairs, and somewhere to put sockets.
struct Host {
    port: VhostUserPort,
    memory: Memory,
    control: Control,
    socket: PathBuf,
    _dir: TempDir,
}

impl Host {
    fn new(queues: u16, mode: Mode) -> Self {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let (memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
        let port = host(queues, &socket, mode, &memory, &control).unwrap();
        Self { port, memory, control, socket, _dir: dir }
    }

    fn guest(&self, shape: Shape, memory: &Memory) -> VirtioPort {
        guest(shape, &self.socket, user::Mode::Client, memory).unwrap()
    }
}

fn exchange(port: &dyn Port, memory: &Memory, frame_max: usize) -> Exchange {
    Exchange::new(port, &memory.pool, &Stream::new(SEED, 0, 60..=frame_max), Macs::Kept).unwrap()
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn every_byte_comes_back_on_each_path_whatever_the_mbufs_look_like() {
    let _turn = turn();
    let mut host = Host::new(1, Mode::Server);
    let before = descriptors();
    for shape in Shape::all() {
        let memory = Memory::new(MBUFS);
        let mut port = host.guest(shape, &memory);
        let echo = Echo::start(&host.port).unwrap();
        assert_eq!((port.link(), host.port.link()), (Link::Up, Link::Up));
        assert_eq!((paths(&port), paths(&host.port)), (shape.guest_paths(), shape.host_paths()));

        let worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape.frame_max());
        // 150 bytes make ten segments of a frame of 1500: too many for an indirect table.
        for (cut, frames, window) in [
            (Cut::Whole, 2000, WINDOW),
            (Cut::LittleHeadroom, 500, WINDOW),
            (Cut::Segments(700), 300, WINDOW),
            (Cut::Segments(150), 300, 3),
        ] {
            traffic.cut(cut);
            assert!(traffic.run(frames, window), "{shape:?} {cut:?}: {:?}", traffic.reports());
        }
        traffic.finish().unwrap();
        assert_eq!(echo.forwarded(), traffic.made());
        drop((traffic, worker));
        port.stop().unwrap();
        drop((port, echo));
        assert!(wait_until(|| host.port.link() == Link::Down));
        assert_eq!((memory.out(), host.memory.out()), (0, 0), "{shape:?}");
        drop(memory);
        assert_eq!(descriptors(), before);
    }
}

#[test]
fn each_queue_pair_keeps_to_its_own_stream() {
    let _turn = turn();
    let host = Host::new(3, Mode::Server);
    for queues in 1..=3 {
        for packed in [false, true] {
            let memory = Memory::new(MBUFS);
            let mut port = host.guest(Shape { queues, packed, in_order: true, ..Shape::PLAIN }, &memory);
            let echo = Echo::start(&host.port).unwrap();
            let _worker = Worker::enter().unwrap();
            let mut traffic = exchange(&port, &memory, 300);
            assert!(traffic.run(1000, WINDOW), "{:?}", traffic.reports());
            traffic.finish().unwrap();
            port.stop().unwrap();
            drop((port, echo));
            assert_eq!(memory.out(), 0);
        }
    }
}

#[test]
fn the_backend_connects_to_a_port_that_listens_and_comes_again() {
    let _turn = turn();
    let mut host = Host::new(2, Mode::Client);
    for mergeable in [false, true] {
        let memory = Memory::new(MBUFS);
        let shape = Shape { queues: 2, mergeable, ..Shape::PLAIN };
        let mut port = guest(shape, &host.socket, user::Mode::Server, &memory).unwrap();
        let echo = Echo::start(&host.port).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape.frame_max());
        assert!(traffic.run(300, WINDOW), "{:?}", traffic.reports());
        traffic.finish().unwrap();
        port.stop().unwrap();
        drop((port, echo));
        assert!(!host.socket.exists(), "a socket goes with the port that made it");
        assert!(wait_until(|| host.port.link() == Link::Down));
    }
}

#[test]
fn either_end_stops_and_goes_on_and_single_queues_do() {
    let _turn = turn();
    let mut host = Host::new(2, Mode::Server);
    for packed in [false, true] {
        let memory = Memory::new(MBUFS);
        let shape = Shape { packed, queues: 2, in_order: true, mergeable: true, ..Shape::PLAIN };
        let mut port = host.guest(shape, &memory);
        let echo = Echo::start(&host.port).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, 3000);
        for queue in [0, 1] {
            assert!(traffic.run(200, WINDOW), "{:?}", traffic.reports());
            port.stop().unwrap();
            assert_eq!((port.link(), memory.out()), (Link::Down, 0));
            assert_eq!((traffic.offer(), traffic.drain(Duration::ZERO)), (0, 0));
            port.start().unwrap();
            assert!(traffic.run(200, WINDOW), "{:?}", traffic.reports());
            port.rx_queue_stop(queue).unwrap();
            port.tx_queue_stop(queue).unwrap();
            port.rx_queue_start(queue).unwrap();
            port.tx_queue_start(queue).unwrap();
            assert!(traffic.run(200, WINDOW), "{:?}", traffic.reports());
            // The other end: frames wait in the rings, and none is lost.
            traffic.flood(20);
            host.port.stop().unwrap();
            assert_eq!(host.port.link(), Link::Down);
            host.port.start().unwrap();
            assert!(traffic.run(200, WINDOW), "{:?}", traffic.reports());
        }
        traffic.finish().unwrap();
        drop(traffic);
        port.stop().unwrap();
        open_port(&mut port, &setup(Shape { queues: 1, ..shape }, &memory)).unwrap();
        let mut traffic = exchange(&port, &memory, 3000);
        assert!(traffic.run(200, WINDOW), "{:?}", traffic.reports());
        traffic.finish().unwrap();
        drop((port, echo));
        assert_eq!(memory.out(), 0);
    }
}

#[test]
fn a_guest_that_goes_in_mid_traffic_leaves_nothing_and_the_next_one_is_served() {
    let _turn = turn();
    let mut host = Host::new(1, Mode::Server);
    let before = descriptors();
    for shape in Shape::all() {
        let memory = Memory::new(MBUFS);
        let port = host.guest(shape, &memory);
        let echo = Echo::start(&host.port).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape.frame_max());
        assert!(traffic.run(100, WINDOW), "{shape:?}: {:?}", traffic.reports());
        traffic.flood(100);
        drop(port);
        traffic.let_go();
        assert_eq!(memory.out(), 0, "{shape:?}");
        assert!(wait_until(|| host.port.link() == Link::Down));
        drop((traffic, memory, echo));
        assert_eq!((host.memory.out(), descriptors()), (0, before), "{shape:?}");
    }
}

#[test]
fn a_host_that_goes_in_mid_traffic_takes_no_mbuf_with_it() {
    let _turn = turn();
    for shape in Shape::all() {
        let host = Host::new(1, Mode::Server);
        let memory = Memory::new(MBUFS);
        let mut port = host.guest(shape, &memory);
        let echo = Echo::start(&host.port).unwrap();
        let _worker = Worker::enter().unwrap();
        let mut traffic = exchange(&port, &memory, shape.frame_max());
        assert!(traffic.run(100, WINDOW), "{shape:?}: {:?}", traffic.reports());
        traffic.flood(100);
        drop(host.port);
        assert!(wait_until(|| port.link() == Link::Down));
        assert!(!host.socket.exists());
        traffic.drain(Duration::ZERO);
        let report = traffic.reports()[0];
        assert_eq!(report.corrupt + report.duplicate + report.late, 0, "{report:?}");
        traffic.let_go();
        port.rx_queue_stop(0).unwrap();
        port.stop().unwrap();
        drop(echo);
        assert_eq!((memory.out(), host.memory.out()), (0, 0), "{shape:?}");
        let said = port.start().unwrap_err().to_string();
        assert!(said.contains("closed the connection"), "{said}");
        assert_eq!(memory.out(), 0);
        drop(host.control);
    }
}

/// One sentence, which names what is wrong and what to do.
fn is_sentence(said: &str, parts: &[&str]) {
    assert!(!said.contains('\n') && said.len() < 700, "{said}");
    for part in parts {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

#[test]
fn a_bad_address_is_one_sentence_with_its_remedy_and_leaves_nothing() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.as_path().join(name);
    let (memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let guest = |path: &Path, mode| guest(Shape::PLAIN, path, mode, &memory).err().unwrap().to_string();
    let serve = |path: &Path| host(1, path, Mode::Server, &memory, &control);
    let host = |path: &Path| serve(path).err().unwrap().to_string();
    let before = descriptors();

    is_sentence(&guest(&at("missing"), user::Mode::Client), &["missing", "start the backend first"]);
    is_sentence(&guest(&at("no/directory"), user::Mode::Server), &["no/directory", "create it"]);
    is_sentence(&host(&at("no/directory")), &["no/directory"]);
    is_sentence(&guest(&at(&"x".repeat(200)), user::Mode::Client), &["bytes", "107"]);
    is_sentence(&host(&at(&"x".repeat(200))), &["107", "choose a shorter one"]);

    fs::write(at("file"), "kept").unwrap();
    is_sentence(&guest(&at("file"), user::Mode::Client), &["file", "not a socket"]);
    is_sentence(&guest(&at("file"), user::Mode::Server), &["file", "not a socket"]);
    is_sentence(&host(&at("file")), &["file", "not a socket"]);
    assert_eq!(fs::read(at("file")).unwrap(), b"kept");

    drop(std::os::unix::net::UnixListener::bind(at("stale")).unwrap());
    is_sentence(&guest(&at("stale"), user::Mode::Client), &["stale", "nobody listens"]);
    // A server takes a stale socket's place.
    drop(serve(&at("stale")).unwrap());
    assert!(!at("stale").exists());

    let live = serve(&at("live")).unwrap();
    is_sentence(&guest(&at("live"), user::Mode::Server), &["live", "another process listens"]);
    is_sentence(&host(&at("live")), &["live"]);
    let shape = Shape { queues: 2, ..Shape::PLAIN };
    let said = testbed::ports::guest(shape, &at("live"), user::Mode::Client, &memory).err().unwrap().to_string();
    is_sentence(&said, &["2 queue pairs", "at most 1"]);
    drop(live);
    assert_eq!((descriptors(), memory.out()), (before, 0));
}
