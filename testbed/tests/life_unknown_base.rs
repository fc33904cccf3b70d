//! A front-end that does not know where its rings stand, and says 0 after its backend was killed: split rings go on at their used
//! index, packed ones at the position that the daemon left on record.

mod life_support;

use std::path::Path;
use std::time::Duration;

use life_support::{BURST, Process};
use pmd::mempool::Worker;
use pmd::virtio::spec::feature;
use testbed::frame::Stream;
use testbed::frontend::{Driver, Frontend, Region};
use testbed::peer::turn;
use testbed::ports::{Memory, Shape};
use vhost::vhost_user::message::FrontendReq as Request;
use vmm_sys_util::tempdir::TempDir;

const MBUFS: u32 = 4096;
const SIZE: u16 = 256;
const KILLS: u64 = 8;

fn backend(socket: &Path, state: &Path) -> Process {
    let port = format!("vhost-user:{}", socket.display());
    Process::start("backend-role", &port, &["--state-dir", &state.display().to_string()])
}

/// Sets the rings of `driver` up, from `base`.
fn begin(socket: &Path, driver: &Driver, memory: &Memory, base: u32) -> Frontend {
    let frontend = Frontend::connect(socket);
    assert!(frontend.tell_u64(Request::SET_FEATURES, driver.features));
    assert!(frontend.share(&[Region::whole(&memory.arena)]));
    for (vring, layout) in (0..).zip(&driver.layouts) {
        assert!(frontend.tell_ring(Request::SET_VRING_NUM, vring, SIZE.into()));
        assert!(frontend.tell_ring(Request::SET_VRING_BASE, vring, base));
        assert!(frontend.place(vring, layout));
        assert!(frontend.notify_by(Request::SET_VRING_KICK, vring, None));
    }
    frontend
}

#[test]
fn a_killed_backend_finds_its_rings_where_it_left_them() {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    for shape in Shape::all() {
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        let features = feature::VERSION_1
            | feature::INDIRECT_DESC
            | bit(shape.packed, feature::RING_PACKED)
            | bit(shape.in_order, feature::IN_ORDER)
            | bit(shape.mergeable, feature::MRG_RXBUF);
        // Few enough that the backend never drops a frame for want of a buffer, however long they are.
        let window = if shape.mergeable { 40 } else { 200 };
        let dir = TempDir::new().unwrap();
        let (socket, memory) = (dir.as_path().join("s"), Memory::new(MBUFS));
        let mut driver = Driver::new(features, SIZE, &memory, Stream::new(13, 0, 60..=shape.frame_max()));

        let mut process = backend(&socket, dir.as_path());
        let mut frontend = begin(&socket, &driver, &memory, driver.fresh_base());
        for kill in 0..KILLS {
            driver.flow(window, Duration::from_millis(10 + 3 * kill));
            drop(process);
            process = backend(&socket, dir.as_path());
            frontend = begin(&socket, &driver, &memory, 0);
            let lost = driver.write_off(Duration::from_millis(50));
            assert!(lost <= BURST, "{shape:?}: {lost} frames are gone; {}", driver.report());
        }
        assert!(driver.run(500, window, |_| {}), "{shape:?}: {}", driver.report());
        let report = driver.report();
        let wrong = report.duplicate + report.late + report.corrupt + report.foreign;
        assert_eq!((wrong, report.good + report.missing), (0, driver.made()), "{shape:?}: {report}");
        for vring in [0, 1] {
            let _ = frontend.base(vring);
        }
        drop(driver);
        assert_eq!(memory.out(), 0, "{shape:?}");
    }
}
