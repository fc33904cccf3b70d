//! The inflight region: the `vhost` crate's front-end gets one, and the next connection finds what was left in it; false ones are
//! refused, and what goes wrong with one is its connection's affair.
mod support;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use backend::queue::config::QueueConfig;
use pmd::virtio::spec::feature;
use support::*;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

const PACKED: u64 = feature::VERSION_1 | feature::RING_PACKED | feature::PROTOCOL_FEATURES;
const SIZE: u16 = 256;

/// A front-end that has negotiated all but `STATUS`, and shared `guest`.
fn connect(server: &Server, guest: &File) -> Frontend {
    let mut frontend = None;
    eventually("the socket takes a front-end", || {
        frontend = Frontend::connect(&server.path, 4).ok().filter(|frontend| frontend.get_features().is_ok());
        frontend.is_some()
    });
    let mut frontend = frontend.unwrap();
    frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(VhostUserProtocolFeatures::from_bits_truncate(P_ALL & !P_STATUS)).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_features(PACKED).unwrap();
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: 32 * PAGE,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: guest.as_raw_fd(),
    };
    frontend.set_mem_table(&[info]).unwrap();
    frontend
}

/// Gives `region` and runs ring 0 from `base`.
fn start(frontend: &mut Frontend, (shape, region): (&VhostUserInflight, &File), base: u16) {
    frontend.set_inflight_fd(shape, region.as_raw_fd()).unwrap();
    let addresses = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER,
        used_ring_addr: USER + 2 * PAGE,
        avail_ring_addr: USER + 3 * PAGE,
        log_addr: None,
    };
    frontend.set_vring_num(0, SIZE).unwrap();
    frontend.set_vring_base(0, base).unwrap();
    frontend.set_vring_addr(0, &addresses).unwrap();
    frontend.set_vring_kick(0, &EventFd::new(0).unwrap()).unwrap();
    frontend.set_vring_enable(0, true).unwrap();
}

/// One of them counts what the process has open.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the running ring 0 has been told.
fn running(server: &Server) -> QueueConfig {
    server.device.diary().running[&0].clone()
}

fn found(config: &QueueConfig) -> Option<(u32, u32)> {
    config.record.as_ref().unwrap().find(config.desc_user_addr, config.size, config.position)
}

#[test]
fn a_region_that_comes_again_tells_where_the_rings_were_left() {
    let _alone = alone();
    let (server, guest) = (Server::new(), memfd(32 * PAGE));
    let mut frontend = connect(&server, &guest);
    let (shape, region) = frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 4, SIZE)).unwrap();
    assert!(region.metadata().unwrap().len() >= shape.mmap_size && shape.num_queues == 4);
    start(&mut frontend, (&shape, &region), 0x8000);
    let config = running(&server);
    assert_eq!(found(&config), None, "a fresh region knows nothing");
    let record = config.record.clone().unwrap();
    record.begin(config.desc_user_addr, SIZE, 0x8000);
    record.leave(0x8000, 0x8020);
    // Paused and resumed, the ring goes on where it stopped.
    frontend.set_vring_enable(0, false).unwrap();
    frontend.set_vring_enable(0, true).unwrap();
    assert_eq!(found(&running(&server)), None);
    drop((config, record, frontend));

    // The front-end may say whatever it thinks the base is: it was not told the last one.
    for base in [0, 0x8000, 0x8001] {
        let mut frontend = connect(&server, &guest);
        start(&mut frontend, (&shape, &region), base);
        assert_eq!(found(&running(&server)), Some((0x8000, 0x8020)), "base {base:#x}");
    }
    // Told, it knows.
    let mut frontend = connect(&server, &guest);
    start(&mut frontend, (&shape, &region), 0);
    assert!(found(&running(&server)).is_some());
    frontend.get_vring_base(0).unwrap();
    drop(frontend);
    let mut frontend = connect(&server, &guest);
    start(&mut frontend, (&shape, &region), 0);
    assert_eq!(found(&running(&server)), None);
}

/// The body of both requests: size, offset, queues, their size, padding.
fn shape(size: u64, offset: u64, queues: u16, entries: u16) -> Vec<u8> {
    let mut body = longs(&[size, offset]);
    body.extend([queues, entries, 0, 0].iter().flat_map(|value| value.to_ne_bytes()));
    body
}

#[test]
fn false_regions_are_refused_and_nothing_of_them_stays() {
    let _alone = alone();
    let server = Server::new();
    let client = Client::connect(&server.path);
    client.negotiate(PACKED, P_ALL & !P_STATUS);
    let count = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps =
        || std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("memfd:")).count();
    let region = memfd(4 * PAGE);
    let before = (count(), maps());
    let refused = |body: &[u8], file: &File| assert!(!client.tell(SET_INFLIGHT_FD, body, &[file.as_fd()]), "{body:?}");
    for (queues, entries) in [(0, 1), (1, 0), (5, 1), (u16::MAX, u16::MAX), (1, 32769)] {
        refused(&shape(4 * PAGE, 0, queues, entries), &region);
        assert!(!client.tell(GET_INFLIGHT_FD, &shape(0, 0, queues, entries), &[]));
    }
    for (size, offset) in
        [(4 * PAGE + 8, 8), (0, 0), (PAGE, 4 * PAGE), (PAGE, u64::MAX - 7), (u64::MAX, PAGE), (PAGE, 4)]
    {
        refused(&shape(size, offset, 4, 256), &region);
    }
    let (directory, read_only) = (File::open("/").unwrap(), File::open("/proc/self/exe").unwrap());
    for file in [&directory, &read_only] {
        refused(&shape(PAGE, 0, 1, 16), file);
    }
    drop((directory, read_only));
    assert!(!client.tell(SET_INFLIGHT_FD, &shape(PAGE, 0, 1, 16), &[]), "without a descriptor");
    assert!(!client.tell(SET_INFLIGHT_FD, &shape(PAGE, 0, 1, 16), &[region.as_fd(), region.as_fd()]));
    assert_eq!((count(), maps()), before);

    // Too small for the ring, which then does not run.
    assert!(client.tell(SET_INFLIGHT_FD, &shape(PAGE, 0, 1, 64), &[region.as_fd()]));
    assert!(client.tell(SET_INFLIGHT_FD, &shape(PAGE, PAGE, 1, 64), &[region.as_fd()]), "in place of the first");
    assert_eq!((count(), maps()), (before.0, before.1 + 1), "one mapping, no descriptor");
    let guest = memfd(64 * PAGE);
    assert!(
        client.share(&guest, 0, 64 * PAGE) && client.place_ring(0, 128, 0) && client.no_descriptor(SET_VRING_KICK, 0)
    );
    assert!(!client.tell_ring(SET_VRING_ENABLE, 0, 1));
    assert!(client.place_ring(0, 64, 0), "it fits");
    eventually("it runs", || server.device.diary().running.contains_key(&0));
    drop((client, guest));
    eventually("the mapping is gone with the connection", || maps() == before.1);
}

#[test]
fn a_region_that_is_shortened_ends_its_connection_and_nothing_else() {
    let _alone = alone();
    let (server, guest) = (Server::new(), memfd(64 * PAGE));
    let client = Client::connect(&server.path);
    client.negotiate(PACKED, P_ALL & !P_STATUS);
    let region = memfd(PAGE);
    assert!(client.tell(SET_INFLIGHT_FD, &shape(PAGE, 0, 1, 64), &[region.as_fd()]));
    assert!(
        client.share(&guest, 0, 64 * PAGE) && client.place_ring(0, 64, 0) && client.no_descriptor(SET_VRING_KICK, 0)
    );
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    let record = running(&server).record.unwrap();
    region.set_len(0).unwrap();
    record.leave(0x8000, 0x8001);
    assert!(client.receive().is_none(), "the connection has ended");
    drop(record);
    Client::connect_and_get_features(&server.path);
}
