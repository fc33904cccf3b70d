//! Descriptors that nobody asked for: however many come, none is kept. Alone in its process, whose descriptors, memory and
//! mappings it counts.
mod support;

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};
use support::*;

const MESSAGES: u32 = 100_000;
/// From here on, memory is counted.
const WARM: u32 = 10_000;
/// Pages by which the process may grow after that: not even 8 bytes a message.
const PAGES_MAX: usize = 128;
/// Most descriptors that a message can have on Linux.
const DESCRIPTORS_MAX: usize = 253;

/// Descriptors, mappings, and pages in memory, of this process.
fn used() -> (usize, usize, usize) {
    let maps = fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    (fs::read_dir("/proc/self/fd").unwrap().count(), maps, pages)
}

/// Request, bytes of the body, and descriptors: for requests that take none, take fewer, or do not exist, and truncated lists.
/// The last two end the connection.
const KINDS: [(u32, usize, usize); 9] = [
    (GET_FEATURES, 0, 3),
    (SET_VRING_KICK, 8, 2),
    (99, 8, 5),
    (SET_MEM_TABLE, 40, 1),
    (SET_INFLIGHT_FD, 24, 2),
    (SET_MEM_TABLE, 1032, 32),
    (SET_VRING_CALL, 7, 1),
    (GET_FEATURES, 0, 33),
    (SET_MEM_TABLE, 40, DESCRIPTORS_MAX),
];

#[test]
fn a_hundred_thousand_messages_with_surplus_descriptors_leave_nothing_behind() {
    let server = Server::new();
    let events: Vec<OwnedFd> = (0..DESCRIPTORS_MAX).map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).collect();
    let borrowed: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    let mut client = Some(Client::connect_and_get_features(&server.path));
    let before = used();
    let mut warm = before;
    for i in 0..MESSAGES {
        let kinds = if i % 500 < 490 { &KINDS[..7] } else { &KINDS[..] };
        let (request, body_len, descriptors) = kinds[i as usize % kinds.len()];
        let mut bytes = message(request, NEED_REPLY, &vec![0xff; body_len]);
        let half = i % 500 == 499;
        bytes.truncate(bytes.len() - usize::from(half));
        let fresh = client.take().unwrap_or_else(|| Client::connect_and_get_features(&server.path));
        assert!(fresh.send_raw(&bytes, &borrowed[..descriptors]).is_ok());
        if !half {
            client = fresh.receive().map(|_| fresh);
        }
        if i == WARM {
            warm = used();
        }
    }
    drop(client);
    drop(Client::connect_and_get_features(&server.path));
    eventually("no descriptor is left", || used().0 < before.0);
    let (_, maps, pages) = used();
    assert!(maps <= warm.1 + 1, "{maps} mappings, {} after {WARM} messages", warm.1);
    assert!(pages <= warm.2 + PAGES_MAX, "{pages} pages, {} after {WARM} messages", warm.2);
}
