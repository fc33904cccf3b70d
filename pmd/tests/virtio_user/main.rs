//! The vhost-user transport against an independent backend that writes everything down, and against sockets of every kind.

mod recorder;
mod sockets;

use std::os::fd::AsRawFd;
use std::path::Path;
use std::slice;
use std::time::Duration;

use pmd::mem::{Arena, Pages};
use pmd::virtio::spec::feature;
use pmd::virtio::user::{Mode, REGIONS_MAX, RingAddresses, UserConfig, UserError, UserTransport};
use recorder::Recorder;
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use vmm_sys_util::tempdir::TempDir;

const OFFERED: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::EVENT_IDX | feature::PROTOCOL_FEATURES;
const WANTED: u64 = feature::MRG_RXBUF | feature::IN_ORDER;

fn temp_dir() -> TempDir {
    TempDir::new_with_prefix("/tmp/twinring-user-").unwrap()
}

fn config(path: &Path) -> UserConfig {
    let timeout = Duration::from_secs(10);
    UserConfig { path: path.to_owned(), mode: Mode::Client, queue_pairs: 1, wanted: WANTED, timeout }
}

fn recorder() -> Recorder {
    Recorder { offered: OFFERED, protocol: Protocol::MQ, queue_pairs: 4, refused: "", log: Vec::new() }
}

#[test]
fn a_transport_may_move_to_another_thread() {
    fn check<T: Send + Sync>() {}
    check::<UserTransport>();
}

#[test]
fn a_backend_is_asked_for_everything_in_the_order_it_relies_on() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = recorder().listen(&path);

    let mut transport = UserTransport::connect(&config(&path)).unwrap();
    assert_eq!(transport.features(), feature::VERSION_1 | feature::MRG_RXBUF);
    assert_eq!(transport.queue_pairs_max(), 4);
    let arena = Arena::new(4 << 20, &Pages::Plain).unwrap();
    transport.share(slice::from_ref(&arena)).unwrap();
    let iova = arena.iova();
    let ring = RingAddresses { size: 256, base: 0x8007_8007, desc: iova, avail: iova + 0x1000, used: iova + 0x2000 };
    transport.queue_setup(0, &ring).unwrap();
    transport.queue_enable(0, true).unwrap();
    transport.driver_ok().unwrap();
    assert_eq!(transport.status().unwrap(), None);
    transport.queue_enable(0, false).unwrap();
    assert_eq!(transport.queue_stop(0).unwrap(), 0x8123_8456);
    transport.queue_setup(0, &RingAddresses { base: 3, ..ring }).unwrap();
    transport.reset().unwrap();
    assert!(transport.is_connected());
    drop(transport);

    let mem = format!("SET_MEM_TABLE gpa {iova:#x} user {iova:#x} offset 0 size 4194304 in file true");
    let addr = format!("SET_VRING_ADDR 0 flags 0 desc {iova:#x} avail {:#x} used {:#x}", iova + 0x1000, iova + 0x2000);
    let expected = [
        "SET_OWNER",
        "GET_FEATURES",
        "GET_PROTOCOL_FEATURES",
        "SET_PROTOCOL_FEATURES 0x9", // MQ, and REPLY_ACK, which `vhost` always offers.
        "GET_QUEUE_NUM",
        "SET_VRING_CALL 0 fd true",
        "SET_VRING_CALL 1 fd true",
        "SET_FEATURES 0x140008000",
        &mem,
        "SET_VRING_NUM 0 256",
        "SET_VRING_BASE 0 0x80078007",
        &addr,
        "SET_VRING_KICK 0 fd true",
        "SET_VRING_ENABLE 0 true",
        "SET_VRING_ENABLE 0 false",
        "GET_VRING_BASE 0",
        "SET_VRING_CALL 0 fd true", // Forgotten by the backend at GET_VRING_BASE.
        "SET_VRING_NUM 0 256",
        "SET_VRING_BASE 0 0x3",
        &addr,
        "SET_VRING_KICK 0 fd true",
    ];
    assert_eq!(backend.join().unwrap(), expected);
}

#[test]
fn every_queue_can_be_set_up_though_the_backend_counts_pairs() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = Recorder { queue_pairs: 3, ..recorder() }.listen(&path);
    let mut transport = UserTransport::connect(&UserConfig { queue_pairs: 3, ..config(&path) }).unwrap();
    for index in 0..6 {
        transport.queue_setup(index, &RingAddresses { size: 64, base: 0, desc: 0, avail: 0, used: 0 }).unwrap();
        assert_eq!(transport.queue_stop(index).unwrap(), 0x8123_8456 + u32::from(index));
    }
    assert!(matches!(transport.queue_stop(6), Err(UserError::NoSuchQueue { index: 6, queues: 6, .. })));
    drop(transport);
    assert!(backend.join().unwrap().contains(&"GET_VRING_BASE 5".to_owned()));
}

#[test]
fn a_backend_without_protocol_features_has_one_queue_pair_that_is_always_enabled() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let offered = OFFERED & !feature::PROTOCOL_FEATURES;
    let backend = Recorder { offered, ..recorder() }.listen(&path);
    let mut transport = UserTransport::connect(&config(&path)).unwrap();
    assert_eq!(transport.queue_pairs_max(), 1);
    transport.queue_enable(0, true).unwrap();
    drop(transport);
    let expected = [
        "SET_OWNER",
        "GET_FEATURES",
        "SET_VRING_CALL 0 fd true",
        "SET_VRING_CALL 1 fd true",
        "SET_FEATURES 0x100008000",
    ];
    assert_eq!(backend.join().unwrap(), expected);
}

#[test]
fn more_queue_pairs_than_the_backend_has_are_refused_with_its_limit() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = recorder().listen(&path);
    let error = UserTransport::connect(&UserConfig { queue_pairs: 5, ..config(&path) }).unwrap_err();
    let text = format!(
        "5 queue pairs asked of the vhost-user backend at {}: at least 1 and at most 4 are possible; write queues=4 or fewer",
        path.display()
    );
    assert_eq!(error.to_string(), text);
    backend.join().unwrap();

    for queue_pairs in [0, 129] {
        let error = UserTransport::connect(&UserConfig { queue_pairs, ..config(&path) }).unwrap_err();
        assert!(matches!(error, UserError::QueuePairs { limit: 128, .. }), "{error}");
    }
}

#[test]
fn a_control_queue_leaves_room_for_127_queue_pairs() {
    let dir = temp_dir();
    let offered = OFFERED | feature::CTRL_VQ;
    for (wanted, queue_pairs, limit) in [(WANTED, 128, 128), (WANTED | feature::CTRL_VQ, 127, 127)] {
        let path = dir.as_path().join(format!("{limit}"));
        let backend = Recorder { offered, queue_pairs: 128, ..recorder() }.listen(&path);
        let transport = UserTransport::connect(&UserConfig { queue_pairs, wanted, ..config(&path) }).unwrap();
        assert_eq!(transport.queue_pairs_max(), limit);
        drop(transport);
        backend.join().unwrap();
    }
    let path = dir.as_path().join("128 and one");
    let backend = Recorder { offered, queue_pairs: 128, ..recorder() }.listen(&path);
    let wanted = WANTED | feature::CTRL_VQ;
    let error = UserTransport::connect(&UserConfig { queue_pairs: 128, wanted, ..config(&path) }).unwrap_err();
    assert!(error.to_string().contains("at most 127 are possible; write queues=127 or fewer"), "{error}");
    backend.join().unwrap();
}

#[test]
fn a_backend_before_virtio_1_is_refused_with_the_features_it_has() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = Recorder { offered: OFFERED & !feature::VERSION_1, ..recorder() }.listen(&path);
    let error = UserTransport::connect(&config(&path)).unwrap_err();
    assert!(error.to_string().contains("has no VERSION_1, only MRG_RXBUF, EVENT_IDX: "), "{error}");
    backend.join().unwrap();
}

#[test]
fn a_refused_request_is_named() {
    let dir = temp_dir();
    for refused in ["SET_FEATURES", "SET_VRING_CALL", "SET_MEM_TABLE", "SET_VRING_BASE", "SET_VRING_KICK"] {
        let path = dir.as_path().join(refused);
        let backend = Recorder { refused, ..recorder() }.listen(&path);
        let error = set_up(&config(&path)).unwrap_err();
        assert!(matches!(&error, UserError::Rejected { request, .. } if request == refused), "{error}");
        backend.join().unwrap();
    }
}

#[test]
fn one_to_eight_arenas_can_be_shared() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = recorder().listen(&path);
    let mut transport = UserTransport::connect(&config(&path)).unwrap();
    let arenas: Vec<_> = (0..=REGIONS_MAX).map(|_| Arena::new(4096, &Pages::Plain).unwrap()).collect();
    assert!(matches!(transport.share(&[]), Err(UserError::Regions { asked: 0, .. })));
    assert!(matches!(transport.share(&arenas), Err(UserError::Regions { asked: 9, .. })));
    transport.share(&arenas[1..]).unwrap();
    drop(transport);
    let log = backend.join().unwrap();
    assert_eq!(log.last().unwrap().matches("in file true").count(), REGIONS_MAX);
}

#[test]
fn another_backend_may_take_over_if_it_has_what_was_agreed_on() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = recorder().listen(&path);
    let mut transport = UserTransport::connect(&config(&path)).unwrap();
    let kick = transport.kick_fd(0).unwrap();
    transport.disconnect();
    backend.join().unwrap();
    assert!(!transport.is_connected());
    assert!(matches!(transport.queue_stop(0), Err(UserError::Closed { .. })));
    assert!(!transport.reconnect().unwrap(), "a stale socket");
    std::fs::remove_file(&path).unwrap();
    assert!(!transport.reconnect().unwrap(), "none");

    let poorer = Recorder { offered: OFFERED & !feature::MRG_RXBUF, ..recorder() }.listen(&path);
    let error = transport.reconnect().unwrap_err();
    assert!(error.to_string().contains("does not offer MRG_RXBUF, with which the rings are running"), "{error}");
    assert!(!poorer.join().unwrap().iter().any(|request| request.starts_with("SET_FEATURES")));
    assert!(!transport.is_connected());

    std::fs::remove_file(&path).unwrap();
    let richer = Recorder { offered: OFFERED | feature::IN_ORDER, ..recorder() }.listen(&path);
    assert!(transport.reconnect().unwrap());
    assert_eq!(transport.features(), feature::VERSION_1 | feature::MRG_RXBUF, "no more than before");
    assert_eq!(kick.as_raw_fd(), transport.kick_fd(0).unwrap().as_raw_fd());
    drop(transport);
    assert!(richer.join().unwrap().contains(&"SET_FEATURES 0x140008000".to_owned()));
}

/// Connects and sets up both rings of one queue pair, in an arena of 4 MiB.
fn set_up(config: &UserConfig) -> Result<UserTransport, UserError> {
    let mut transport = UserTransport::connect(config)?;
    let arena = Arena::new(4 << 20, &Pages::Plain).unwrap();
    transport.share(slice::from_ref(&arena))?;
    for index in 0..2 {
        let at = arena.iova() + u64::from(index) * 0x10000;
        let ring = RingAddresses { size: 256, base: 0, desc: at, avail: at + 0x1000, used: at + 0x2000 };
        transport.queue_setup(index, &ring)?;
        transport.queue_enable(index, true)?;
    }
    transport.driver_ok()?;
    Ok(transport)
}
