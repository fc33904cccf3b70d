//! The life of a session under traffic: memory slots that come and go, and drivers that reset the device and begin anew.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use backend::control::{Control, Mode};
use backend::port::vhost_user::VhostUserPort;
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;
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

fn stream(shape: Shape) -> Stream {
    Stream::new(9, 0, 60..=shape.frame_max())
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
        let mut driver = Driver::new(shape.features(), SIZE, &memory, stream(shape));
        let frontend = Frontend::agree(socket);
        // What is in use lies in front; behind it there is room to grow.
        let whole = Region::whole(&memory.arena);
        let [small, _] = whole.clone().split(whole.size - (8 << 20));
        let other = Region::whole(&Arena::new(1 << 20, &Pages::Plain).unwrap());
        assert!(frontend.add(&small));
        frontend.begin(&driver);

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
        let frontend = Frontend::agree(socket);
        let memory = Memory::new(MBUFS);
        assert!(frontend.share(&[Region::whole(&memory.arena)]));
        for reset in [Request::SET_STATUS, Request::RESET_DEVICE, Request::RESET_OWNER, Request::SET_STATUS] {
            // Each life has its own stream, for a burst that the backend still held may come in the next one.
            let stream = stream(shape).with_id(lives.fetch_add(1, Ordering::Relaxed));
            let mut driver = Driver::new(shape.features(), SIZE, &memory, stream);
            frontend.begin(&driver);
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
