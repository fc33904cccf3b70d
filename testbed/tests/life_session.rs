//! The life of a session under traffic: memory slots that come and go, and drivers that reset the device and begin anew.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use backend::control::{Control, Mode};
use backend::port::vhost_user::VhostUserPort;
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;
use pmd::virtio::spec::{feature, status};
use testbed::frame::Stream;
use testbed::frontend::{Driver, Frontend, Region};
use testbed::peer::turn;
use testbed::ports::{Echo, Memory, Shape, host, wait_until};
use vhost::vhost_user::message::FrontendReq as Request;
use vmm_sys_util::tempdir::TempDir;

const MBUFS: u32 = 2048;
const SIZE: u16 = 256;
const WINDOW: u64 = 24;
/// Packets that the backend's end may hold.
const ECHO_BURST: u64 = 32;
/// `REPLY_ACK`, `RESET_DEVICE`, `CONFIGURE_MEM_SLOTS` and `STATUS`.
const PROTOCOL: u64 = 1 << 3 | 1 << 13 | 1 << 15 | 1 << 16;
const READY: u8 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;

fn features(shape: Shape) -> u64 {
    let bit = |on: bool, bit: u64| if on { bit } else { 0 };
    feature::VERSION_1
        | feature::INDIRECT_DESC
        | bit(shape.packed, feature::RING_PACKED)
        | bit(shape.in_order, feature::IN_ORDER)
        | bit(shape.mergeable, feature::MRG_RXBUF)
}

fn stream(shape: Shape) -> Stream {
    Stream::new(9, 0, 60..=shape.frame_max())
}

/// A connection that has agreed on how to talk.
fn connect(socket: &Path) -> Frontend {
    let frontend = Frontend::connect(socket);
    let _ = frontend.ask_u64(Request::GET_PROTOCOL_FEATURES);
    assert!(frontend.tell_u64(Request::SET_PROTOCOL_FEATURES, PROTOCOL));
    frontend
}

/// Sets the rings of `driver` up, from zero.
fn begin(frontend: &Frontend, driver: &Driver) {
    assert!(frontend.tell_u64(Request::SET_FEATURES, driver.features | feature::PROTOCOL_FEATURES));
    for (vring, layout) in (0..).zip(&driver.layouts) {
        assert!(frontend.tell_ring(Request::SET_VRING_NUM, vring, SIZE.into()));
        assert!(frontend.tell_ring(Request::SET_VRING_BASE, vring, driver.fresh_base()));
        assert!(frontend.place(vring, layout));
        assert!(frontend.notify_by(Request::SET_VRING_KICK, vring, None));
        assert!(frontend.tell_ring(Request::SET_VRING_ENABLE, vring, 1));
    }
    assert!(frontend.tell_u64(Request::SET_STATUS, READY.into()));
}

/// Runs `test` on every shape, against one backend that sends back what it gets.
fn on_every_shape(test: impl Fn(Shape, &Path)) {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (host_memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let port: VhostUserPort = host(1, &socket, Mode::Server, &host_memory, &control).unwrap();
    let echo = Echo::start(&port).unwrap();
    let _worker = Worker::enter().unwrap();
    for shape in Shape::all() {
        test(shape, &socket);
    }
    drop(echo);
    assert!(wait_until(|| host_memory.out() == 0), "the host's mbufs are home");
}

#[test]
fn memory_slots_that_come_go_grow_and_shrink_under_traffic_lose_nothing() {
    on_every_shape(|shape, socket| {
        let memory = Memory::new(MBUFS);
        let mut driver = Driver::new(features(shape), SIZE, &memory, stream(shape));
        let frontend = connect(socket);
        // What is in use lies in front; behind it there is room to grow.
        let whole = Region::whole(&memory.arena);
        let [small, _] = whole.clone().split(whole.size - (8 << 20));
        let other = Region::whole(&Arena::new(1 << 20, &Pages::Plain).unwrap());
        assert!(frontend.add(&small));
        begin(&frontend, &driver);

        let done = driver.run(2000, WINDOW, |round| match round % 200 {
            50 => assert!(frontend.add(&other)),
            100 => {
                // As QEMU does it: away, while the rings lie in it, and back again larger.
                assert!(frontend.remove(&small) && frontend.add(&whole));
            }
            150 => assert!(frontend.remove(&whole) && frontend.add(&small)),
            199 => assert!(frontend.remove(&other)),
            _ => {}
        });
        assert!(done, "{shape:?}: {:?}", driver.report());
        let report = driver.report();
        assert_eq!((report.good, report.missing), (driver.made(), 0), "{shape:?}: {report}");
        assert!(frontend.tell_u64(Request::SET_STATUS, 0));
        drop(driver);
        assert_eq!(memory.out(), 0, "{shape:?}");
    });
}

#[test]
fn a_driver_that_resets_the_device_under_traffic_begins_anew_from_zero() {
    let lives = AtomicU32::new(0);
    on_every_shape(|shape, socket| {
        let frontend = connect(socket);
        let memory = Memory::new(MBUFS);
        assert!(frontend.share(&[Region::whole(&memory.arena)]));
        for reset in [Request::SET_STATUS, Request::RESET_DEVICE, Request::RESET_OWNER, Request::SET_STATUS] {
            // Each life has its own stream, for a burst that the backend still held may come in the next one.
            let stream = stream(shape).with_id(lives.fetch_add(1, Ordering::Relaxed));
            let mut driver = Driver::new(features(shape), SIZE, &memory, stream);
            begin(&frontend, &driver);
            assert!(driver.run(300, WINDOW, |_| {}), "{shape:?} {reset:?}: {:?}", driver.report());
            while driver.made() < 400 {
                driver.round(driver.made() + 8);
            }
            if reset == Request::SET_STATUS {
                assert!(frontend.tell_u64(reset, 0));
            } else {
                assert!(frontend.tell(reset, &[], &[]));
            }
            // The device has let go: what it had delivered is there, and nothing moves any more.
            while driver.round(0) > 0 {}
            let report = driver.report();
            assert_eq!(report.duplicate + report.late + report.corrupt, 0, "{shape:?}: {report}");
            assert!(report.foreign <= ECHO_BURST, "{shape:?}: {report}");
            drop(driver);
            assert_eq!(memory.out(), 0, "{shape:?} {reset:?}");
            if reset == Request::RESET_OWNER {
                assert!(frontend.share(&[Region::whole(&memory.arena)]), "it has taken the memory as well");
            }
        }
    });
}
