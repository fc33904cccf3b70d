//! A front-end that does not know where its rings stand after its backend was killed: split rings go on at their used index,
//! packed ones at the position that the daemon left in its own file, for one that says base 0, or in the front-end's inflight
//! region, for one that says anything.

mod life_support;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
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

/// `REPLY_ACK` and `INFLIGHT_SHMFD`.
const PROTOCOL: u64 = 1 << 3 | 1 << 12;

/// A front-end's side of a life: where its backend listens, and what it has for it.
struct Guest {
    socket: PathBuf,
    memory: Memory,
    driver: Driver,
    /// The inflight region, once there is one, if the front-end keeps that.
    region: Option<(Vec<u8>, OwnedFd)>,
}

impl Guest {
    /// Sets the rings up, from `base`.
    fn begin(&self, base: u32) -> Frontend {
        let frontend = Frontend::connect(&self.socket);
        let mut features = self.driver.features;
        if let Some((shape, region)) = &self.region {
            features |= feature::PROTOCOL_FEATURES;
            assert!(frontend.tell_u64(Request::SET_PROTOCOL_FEATURES, PROTOCOL));
            assert!(frontend.tell(Request::SET_INFLIGHT_FD, shape, &[region.as_fd()]));
        }
        assert!(frontend.tell_u64(Request::SET_FEATURES, features));
        assert!(frontend.share(&[Region::whole(&self.memory.arena)]));
        for (vring, layout) in (0..).zip(&self.driver.layouts) {
            assert!(frontend.tell_ring(Request::SET_VRING_NUM, vring, SIZE.into()));
            assert!(frontend.tell_ring(Request::SET_VRING_BASE, vring, base));
            assert!(frontend.place(vring, layout));
            assert!(frontend.notify_by(Request::SET_VRING_KICK, vring, None));
            assert!(self.region.is_none() || frontend.tell_ring(Request::SET_VRING_ENABLE, vring, 1));
        }
        frontend
    }

    /// Gets a region for its rings from the backend.
    fn get_region(&mut self) {
        let frontend = Frontend::connect(&self.socket);
        assert!(frontend.tell_u64(Request::SET_PROTOCOL_FEATURES, PROTOCOL));
        assert!(frontend.tell_u64(Request::SET_FEATURES, self.driver.features | feature::PROTOCOL_FEATURES));
        self.region = Some(frontend.inflight(2, SIZE));
    }
}

/// Kills the backend of every shape of guest, again and again; `region` says whether there is one, and with which bases the
/// front-end then begins.
fn kill_and_begin(region: bool, bases: &[u32]) {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    for shape in Shape::all() {
        // Few enough that the backend never drops a frame for want of a buffer, however long they are.
        let window = if shape.mergeable { 40 } else { 200 };
        let (dir, memory) = (TempDir::new().unwrap(), Memory::new(MBUFS));
        let driver = Driver::new(shape.features(), SIZE, &memory, Stream::new(13, 0, 60..=shape.frame_max()));
        let mut guest = Guest { socket: dir.as_path().join("s"), memory, driver, region: None };
        let state = ["--state-dir", &dir.as_path().display().to_string()];
        let arguments = if region { &[][..] } else { &state };
        let port = format!("vhost-user:{}", guest.socket.display());
        let backend = || Process::start("backend-role", &port, arguments);

        let mut process = backend();
        if region {
            guest.get_region();
        }
        let mut frontend = guest.begin(guest.driver.fresh_base());
        for (kill, base) in (0..KILLS).zip(bases.iter().cycle()) {
            guest.driver.flow(window, Duration::from_millis(10 + 3 * kill));
            drop(process);
            process = backend();
            frontend = guest.begin(*base);
            let lost = guest.driver.write_off(BURST, Duration::from_millis(20));
            assert!(lost <= BURST, "{shape:?}: {lost} frames are gone; {}", guest.driver.report());
        }
        assert!(guest.driver.run(500, window, |_| {}), "{shape:?}: {}", guest.driver.report());
        guest.driver.write_off(0, Duration::ZERO);
        let report = guest.driver.report();
        let wrong = report.duplicate + report.late + report.corrupt + report.foreign;
        assert_eq!((wrong, report.good + report.missing), (0, guest.driver.made()), "{shape:?}: {report}");
        for vring in [0, 1] {
            let _ = frontend.base(vring);
        }
        let Guest { memory, driver, .. } = guest;
        drop(driver);
        assert_eq!(memory.out(), 0, "{shape:?}");
    }
}

#[test]
fn a_killed_backend_finds_its_rings_where_it_left_them() {
    kill_and_begin(false, &[0]);
}

#[test]
fn a_killed_backend_finds_its_rings_where_the_front_ends_region_says() {
    kill_and_begin(true, &[0, 0x8000, 0x0007_0007]);
}
