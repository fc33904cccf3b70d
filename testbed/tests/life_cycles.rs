//! A thousand of each event in a session's life, all shapes in turn: no frame comes twice, and no mbuf, descriptor, mapping or page
//! stays behind. Both ends live in this process, so that everything either keeps is counted.

use std::fs;
use std::path::Path;
use std::time::Duration;

use backend::control::{Control, Mode};
use backend::port::vhost_user::VhostUserPort;
use pmd::mempool::Worker;
use pmd::port::{Link, Port};
use pmd::virtio::user;
use testbed::frame::{Macs, Report, Stream};
use testbed::frontend::{Driver, Frontend, Region};
use testbed::peer::turn;
use testbed::ports::{Echo, Exchange, Memory, Shape, guest, host, wait_until};
use vhost::vhost_user::message::FrontendReq as Request;
use vmm_sys_util::tempdir::TempDir;

const CYCLES: u32 = 1000;
/// From here on, what the process uses is counted.
const WARM: u32 = 100;
const MBUFS: u32 = 1024;
const SIZE: u16 = 128;
const WINDOW: u64 = 16;
/// Packets that the backend's end may hold when a life ends; they come in the next one, or go with the backend.
const ECHO_BURST: u64 = 32;

/// What the process uses after a few cycles.
#[derive(Default)]
struct Usage {
    descriptors: usize,
    mappings: usize,
    pages: usize,
}

impl Usage {
    fn now() -> Self {
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        Self {
            descriptors: fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
            pages: statm.split_whitespace().nth(1).unwrap().parse().unwrap(),
        }
    }

    /// Checks that nothing has come to stay since: not one descriptor or mapping in ten cycles, nor a page in each.
    fn check(&self) {
        // Connections are cleared away a little later.
        assert!(wait_until(|| Self::now().descriptors <= self.descriptors), "{} descriptors", self.descriptors);
        let Self { mappings, pages, .. } = Self::now();
        assert!(mappings < self.mappings + 90, "{mappings} mappings, {} before", self.mappings);
        assert!(pages < self.pages + 900, "{pages} pages, {} before", self.pages);
    }
}

/// Runs `cycle` a thousand times, with its number and a shape, and checks what the process uses then.
fn cycles(mut cycle: impl FnMut(u32, Shape)) {
    let mut usage = Usage::default();
    for n in 0..CYCLES {
        if n == WARM {
            usage = Usage::now();
        }
        cycle(n, Shape { size: SIZE, ..Shape::all()[n as usize % 8] });
    }
    usage.check();
}

/// A backend that sends back what it gets.
struct Host {
    echo: Option<Echo>,
    port: VhostUserPort,
}

impl Host {
    fn start(socket: &Path, memory: &Memory, control: &Control) -> Self {
        let port = host(1, socket, Mode::Server, memory, control).unwrap();
        Self { echo: Some(Echo::start(&port).unwrap()), port }
    }

    fn stop(mut self) {
        drop(self.echo.take());
        self.port.stop().unwrap();
    }
}

/// Runs `cycle` against one backend, and checks that the backend's mbufs come home.
fn with_one_host(mut cycle: impl FnMut(&Path, u32, Shape)) {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let host = Host::start(&socket, &memory, &control);
    let _worker = Worker::enter().unwrap();
    cycles(|n, shape| cycle(&socket, n, shape));
    host.stop();
    assert!(wait_until(|| memory.out() == 0), "the host's mbufs are home");
}

/// Each life has a stream of its own.
fn stream(life: u32, shape: Shape) -> Stream {
    Stream::new(17, life, 60..=shape.frame_max())
}

/// Frames of the last life may come in this one, and nothing else is wrong.
fn check(report: Report, n: u32, shape: Shape) {
    assert_eq!(report.duplicate + report.late + report.corrupt, 0, "{n} {shape:?}: {report}");
    assert!(report.foreign <= ECHO_BURST, "{n} {shape:?}: {report}");
}

/// A front-end that sends a few frames, and what is then to be done to it: all of its mbufs come home.
fn life(frontend: Frontend, n: u32, shape: Shape, end: impl FnOnce(Frontend)) {
    let memory = Memory::new(MBUFS);
    assert!(frontend.share(&[Region::whole(&memory.arena)]));
    let mut driver = Driver::new(shape.features(), SIZE, &memory, stream(n, shape));
    frontend.begin(&driver);
    assert!(driver.run(20, WINDOW, |_| {}), "{n} {shape:?}: {}", driver.report());
    driver.round(driver.made() + 8);
    end(frontend);
    while driver.round(0) > 0 {}
    check(driver.report(), n, shape);
    drop(driver);
    assert_eq!(memory.out(), 0, "{n} {shape:?}");
}

#[test]
#[ignore = "long: a thousand connections"]
fn a_thousand_connections_leave_nothing_behind() {
    with_one_host(|socket, n, shape| life(Frontend::agree(socket), n, shape, drop));
}

#[test]
#[ignore = "long: a thousand driver resets"]
fn a_thousand_driver_resets_leave_nothing_behind() {
    let mut connected = None;
    with_one_host(|socket, n, shape| {
        let frontend = connected.take().unwrap_or_else(|| Frontend::agree(socket));
        life(frontend, n, shape, |frontend| {
            let how = [Request::SET_STATUS, Request::RESET_DEVICE, Request::RESET_OWNER][n as usize % 3];
            let body = if how == Request::SET_STATUS { &[0; 8][..] } else { &[] };
            assert!(frontend.tell(how, body, &[]));
            connected = Some(frontend);
        });
    });
}

#[test]
#[ignore = "long: a thousand memory tables"]
fn a_thousand_memory_tables_under_traffic_lose_and_leave_nothing() {
    let shape = Shape { packed: true, mergeable: true, size: SIZE, ..Shape::PLAIN };
    let memory = Memory::new(MBUFS);
    let mut life = None;
    with_one_host(|socket, n, _| {
        let (frontend, driver) = life.get_or_insert_with(|| {
            let frontend = Frontend::agree(socket);
            let driver = Driver::new(shape.features(), SIZE, &memory, stream(0, shape));
            frontend.begin(&driver);
            (frontend, driver)
        });
        let whole = Region::whole(&memory.arena);
        // Whole, or in two regions that meet between data rooms and rings.
        let middle = driver.layouts.iter().map(|ring| ring.desc).min().unwrap() - memory.arena.iova();
        let mut regions = whole.split(middle / 4096 * 4096).to_vec();
        regions.rotate_left(1);
        let table = if n % 2 == 0 { vec![Region::whole(&memory.arena)] } else { regions };
        assert!(frontend.share(&table));
        assert!(driver.run(20, WINDOW, |_| {}), "{n}: {}", driver.report());
        let report = driver.report();
        assert_eq!((report.good, report.missing), (driver.made(), 0), "{n}: {report}");
        if n + 1 == CYCLES {
            let (frontend, driver) = life.take().unwrap();
            assert!(frontend.tell_u64(Request::SET_STATUS, 0));
            drop(driver);
            assert_eq!(memory.out(), 0);
            drop(frontend);
        }
    });
}

#[test]
#[ignore = "long: a thousand backends"]
fn a_thousand_backends_that_come_and_go_repeat_and_leave_nothing() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let shapes = Shape::all().map(|shape| Shape { size: SIZE, ..shape });
    let (memories, host_memory) = (shapes.map(|_| Memory::new(MBUFS)), Memory::new(MBUFS));
    let _worker = Worker::enter().unwrap();
    let mut lives: Option<(usize, u64, _, Exchange)> = None;
    let mut control = Control::new().unwrap();
    let mut backend = Some(Host::start(&socket, &host_memory, &control));
    cycles(|n, _| {
        // A hundred and twenty-five backends for each shape of guest.
        let which = n as usize / 125;
        if lives.as_ref().is_none_or(|life| life.0 != which) {
            lives = None;
            let memory = &memories[which];
            let port = guest(shapes[which], &socket, user::Mode::Client, memory).unwrap();
            let traffic = Exchange::new(&port, &memory.pool, &stream(n, shapes[which]), Macs::Kept).unwrap();
            lives = Some((which, 0, port, traffic));
        }
        let Some((_, lost, port, traffic)) = &mut lives else { return };
        assert!(traffic.run(20, WINDOW), "{n}: {:?}", traffic.reports());
        traffic.round(WINDOW);
        backend.take().unwrap().stop();
        control = Control::new().unwrap();
        assert!(wait_until(|| port.recover().unwrap() == Link::Down), "{n}");
        backend = Some(Host::start(&socket, &host_memory, &control));
        assert!(wait_until(|| port.recover().unwrap() == Link::Up), "{n}");
        traffic.drain(Duration::from_millis(5));
        // Some of them may still come: they are late then, and not lost.
        *lost += traffic.write_off();
        if n % 125 == 124 {
            assert!(traffic.run(20, WINDOW), "{n}: {:?}", traffic.reports());
            let report = traffic.reports()[0];
            let wrong = report.duplicate + report.late + report.corrupt + report.foreign;
            assert!(wrong == 0 && report.missing <= *lost && *lost <= 125 * WINDOW, "{lost} lost: {report}");
            traffic.let_go();
        }
    });
    drop(lives);
    backend.take().unwrap().stop();
    assert!(wait_until(|| memories.iter().chain([&host_memory]).all(|memory| memory.out() == 0)), "all mbufs are home");
}

#[test]
#[ignore = "long: a thousand drivers"]
fn a_thousand_drivers_that_come_and_go_leave_nothing_behind() {
    with_one_host(|socket, n, shape| {
        let memory = Memory::new(MBUFS);
        let mut opened = None;
        assert!(wait_until(|| {
            // The last one may not be cleared away yet.
            opened = guest(shape, socket, user::Mode::Client, &memory).ok();
            opened.is_some()
        }));
        let mut port = opened.unwrap();
        let mut traffic = Exchange::new(&port, &memory.pool, &stream(n, shape), Macs::Kept).unwrap();
        assert!(traffic.run(20, WINDOW), "{n} {shape:?}: {:?}", traffic.reports());
        traffic.round(WINDOW);
        for report in traffic.reports() {
            check(report, n, shape);
        }
        traffic.let_go();
        drop(traffic);
        port.stop().unwrap();
        drop(port);
        assert_eq!(memory.out(), 0, "{n} {shape:?}");
    });
}
