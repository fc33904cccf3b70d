//! Front-ends that lie, stall, or send nonsense: only their own connection suffers, and nothing is left of it.
mod support;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use backend::control::Mode;
use pmd::virtio::spec::feature;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestRunner};
use rustix::event::{EventfdFlags, eventfd};
use support::*;

/// Tests that count descriptors, which belong to the whole process, take turns.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn descriptors_open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// A server that has served somebody before, and how many descriptors are open then.
fn warm_server() -> (Server, usize) {
    let server = Server::new();
    drop(Client::connect_and_get_features(&server.path));
    eventually("the first front-end is gone", || {
        let count = descriptors_open();
        std::thread::sleep(Duration::from_millis(20));
        count == descriptors_open()
    });
    let count = descriptors_open();
    (server, count)
}

fn send_all(client: &Client, bytes: &[u8], descriptors: &[OwnedFd]) -> bool {
    let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    client.send_raw(bytes, &borrowed).is_ok()
}

fn events(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect()
}

#[test]
fn a_message_may_come_byte_by_byte_and_its_descriptor_with_any_of_them() {
    let _alone = alone();
    let server = Server::new();
    let client = Client::connect(&server.path);
    let call = message(SET_VRING_CALL, NEED_REPLY, &1u64.to_ne_bytes());
    for with_descriptor in 0..call.len() {
        for i in 0..call.len() {
            assert!(send_all(&client, &call[i..=i], &events(usize::from(i == with_descriptor))));
        }
        assert_eq!(client.receive(), Some((SET_VRING_CALL, longs(&[0]))), "descriptor with byte {with_descriptor}");
    }
    // Two messages in one piece, the descriptor belonging to the first one.
    let both = [call, message(GET_FEATURES, PLAIN, &[])].concat();
    assert!(send_all(&client, &both, &events(1)));
    assert_eq!(client.receive(), Some((SET_VRING_CALL, longs(&[0]))));
    assert_eq!(client.receive(), Some((GET_FEATURES, longs(&[OFFERED | feature::PROTOCOL_FEATURES]))));
}

#[test]
fn every_request_with_need_reply_is_answered_and_the_next_one_too() {
    let _alone = alone();
    let server = Server::new();
    for negotiated in [false, true] {
        let client = Client::connect_and_get_features(&server.path);
        if negotiated {
            client.negotiate(feature::VERSION_1 | feature::PROTOCOL_FEATURES, P_ALL);
        }
        for request in 0..=60 {
            for (body_len, descriptors) in [(0, 0), (8, 0), (8, 1), (40, 1), (3, 0), (4096, 0), (1032, 32)] {
                let bytes = message(request, NEED_REPLY, &vec![0; body_len]);
                assert!(send_all(&client, &bytes, &events(descriptors)));
                let (answered, _) = client.receive().expect("the connection goes on");
                assert_eq!(answered, request, "{body_len} bytes, {descriptors} descriptors");
            }
        }
    }
}

#[test]
fn an_unsupported_request_is_refused_and_without_need_reply_ends_the_connection() {
    let _alone = alone();
    let server = Server::new();
    for request in [0, 6, 7, 19, 20, 21, 22, 23, 25, 26, 28, 33, 35, 41, 42, 43, 44, 45, 60, u32::MAX] {
        let client = Client::connect_and_get_features(&server.path);
        client.negotiate(feature::VERSION_1 | feature::PROTOCOL_FEATURES, P_ALL);
        assert!(!client.tell(request, &[0; 8], &[]), "request {request}");
        client.send(request, PLAIN, &[0; 8], &[]).unwrap();
        assert!(client.receive().is_none(), "request {request}");
    }
}

#[test]
fn a_header_that_is_none_ends_the_connection() {
    let _alone = alone();
    let (server, before) = warm_server();
    for (flags, size) in [(0, 0), (2, 0), (1 | 4, 0), (1 | 16, 0), (u32::MAX, 0), (9, 4097), (1, u32::MAX)] {
        let client = Client::connect_and_get_features(&server.path);
        assert!(send_all(&client, &words(&[GET_FEATURES, flags, size]), &events(2)));
        assert!(client.receive().is_none(), "flags {flags:#x}, size {size}");
    }
    eventually("no descriptor is left", || descriptors_open() <= before);
}

#[test]
fn half_a_message_and_unread_replies_end_their_own_connection_and_stall_no_other() {
    let _alone = alone();
    let server = Server::with_timeout(Duration::from_millis(300));
    let other = server.path.with_extension("other");
    server.control.add(&other, Mode::Server, Box::new(Mock::default())).unwrap();
    let neighbour = Client::connect(&other);
    let offered = OFFERED | feature::PROTOCOL_FEATURES;

    let half = Client::connect(&server.path);
    assert!(send_all(&half, &message(SET_FEATURES, PLAIN, &[0; 8])[..15], &[]));
    assert_eq!(neighbour.ask_u64(GET_FEATURES), offered, "served meanwhile");
    assert!(half.receive().is_none(), "given up");

    let deaf = Client::connect_and_get_features(&server.path);
    // Until neither its requests nor our replies find room; the last send fails when we have given up.
    let mut sent = 0;
    while deaf.send(GET_FEATURES, PLAIN, &[], &[]).is_ok() {
        sent += 1;
        if sent % 256 == 0 {
            assert_eq!(neighbour.ask_u64(GET_FEATURES), offered, "served meanwhile");
        }
    }
    assert_eq!(neighbour.ask_u64(GET_FEATURES), offered, "an idle connection has no time limit");
    Client::connect_and_get_features(&server.path);
}

/// One message of a confused or hostile front-end.
#[derive(Clone, Debug)]
struct Nonsense {
    request: u32,
    flags: u32,
    body: Vec<u32>,
    /// Bytes cut off, or sent twice if negative.
    cut: i8,
    events: usize,
    files: usize,
}

fn nonsense() -> impl Strategy<Value = Nonsense> {
    let (user_low, user_high) = (0, u32::try_from(USER >> 32).unwrap());
    let page = u32::try_from(PAGE).unwrap();
    let interesting = [0, 1, 2, 3, 4, 8, 16, 256, 257, page, 2 * page, 64 * page, user_low, user_high, u32::MAX];
    let word = prop_oneof![8 => proptest::sample::select(interesting.to_vec()), 1 => any::<u32>()];
    let request = prop_oneof![12 => 1..=18u32, 6 => 34..=40u32, 2 => 0..=60u32, 1 => any::<u32>()];
    let flags = prop_oneof![10 => Just(NEED_REPLY), 4 => Just(PLAIN), 1 => any::<u32>()];
    let body = prop_oneof![
        2 => Just(Vec::new()),
        6 => proptest::collection::vec(word.clone(), 2),
        4 => proptest::collection::vec(word.clone(), 10),
        1 => proptest::collection::vec(word, 0..40)
    ];
    let cut = prop_oneof![20 => Just(0i8), 1 => any::<i8>()];
    let events = prop_oneof![4 => Just(0usize), 4 => Just(1), 1 => 0..40usize];
    let files = prop_oneof![6 => Just(0usize), 4 => Just(1), 1 => 0..3usize];
    (request, flags, body, cut, events, files).prop_map(|(request, flags, body, cut, events, files)| Nonsense {
        request,
        flags,
        body,
        cut,
        events,
        files,
    })
}

#[test]
fn no_sequence_of_messages_harms_the_daemon_or_the_next_front_end() {
    let _alone = alone();
    let (server, before) = warm_server();
    let seed = std::env::var("PROPTEST_RNG_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs());
    println!("PROPTEST_RNG_SEED={seed}");
    let config = Config { cases: 300, rng_seed: RngSeed::Fixed(seed), failure_persistence: None, ..Config::default() };
    let sequence = (any::<bool>(), proptest::collection::vec(nonsense(), 1..40));
    let outcome = TestRunner::new(config).run(&sequence, |(set_up, messages)| {
        let client = Client::connect_and_get_features(&server.path);
        let file = memfd(64 * PAGE);
        if set_up {
            client.negotiate(feature::VERSION_1 | feature::PROTOCOL_FEATURES, P_ALL & !P_STATUS);
            prop_assert!(client.share(&file, 0, 64 * PAGE));
            prop_assert!(client.place_ring(0, 16, 0) && client.no_descriptor(SET_VRING_KICK, 0));
            prop_assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
        }
        for Nonsense { request, flags, body, cut, events: event_count, files } in messages {
            let mut bytes = message(request, flags, &words(&body));
            match usize::try_from(cut) {
                Ok(cut) => bytes.truncate(bytes.len().saturating_sub(cut).max(1)),
                Err(_) => bytes.extend_from_within(..bytes.len().min(usize::from(cut.unsigned_abs()))),
            }
            let mut descriptors = events(event_count);
            descriptors.extend((0..files).map(|_| OwnedFd::from(file.try_clone().unwrap())));
            if !send_all(&client, &bytes, &descriptors) {
                break;
            }
        }
        drop((client, file));
        eventually("all its rings are stopped", || server.device.diary().running.is_empty());
        eventually("no descriptor is left", || descriptors_open() <= before);
        Ok(())
    });
    outcome.unwrap();
    assert_eq!(
        Client::connect_and_get_features(&server.path).ask_u64(GET_FEATURES),
        OFFERED | feature::PROTOCOL_FEATURES
    );
}
