//! The rules by which a ring runs, request by request, from a client written by hand.
mod support;

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use pmd::virtio::spec::{feature, status};
use rustix::event::{EventfdFlags, eventfd};
use support::*;

const FEATURES: u64 = feature::VERSION_1 | feature::PROTOCOL_FEATURES;

fn event() -> File {
    File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap())
}

/// A client with 64 pages of shared memory at guest address 0, and what its rings need except the rings.
fn set_up(server: &Server, features: u64, protocol_features: u64) -> (Client, File) {
    let client = Client::connect(&server.path);
    client.negotiate(features, protocol_features);
    let guest = memfd(64 * PAGE);
    assert!(client.share(&guest, 0, 64 * PAGE));
    (client, guest)
}

#[test]
fn a_ring_starts_with_the_last_thing_it_needs_in_whatever_order_they_come() {
    type Step = fn(&Client, &File) -> bool;
    let steps: [Step; 5] = [
        |client, _| client.tell_ring(SET_VRING_NUM, 1, 128),
        |client, _| client.tell(SET_VRING_ADDR, &addresses(1, 0), &[]),
        |client, _| client.no_descriptor(SET_VRING_KICK, 1),
        |client, _| client.tell_ring(SET_VRING_ENABLE, 1, 1),
        |client, guest| client.share(guest, 0, 64 * PAGE),
    ];
    for first in 0..steps.len() {
        let server = Server::new();
        let client = Client::connect(&server.path);
        client.negotiate(FEATURES, P_REPLY_ACK);
        let guest = memfd(64 * PAGE);
        for i in 0..steps.len() {
            assert_eq!(server.device.news(), [], "order {first}: nothing runs before step {i}");
            assert!(steps[(first + i) % steps.len()](&client, &guest));
        }
        assert_eq!(server.device.news(), [Entry::Start(1, 128, 0), Entry::Link(true)], "order {first}");
    }
}

#[test]
fn without_protocol_features_a_ring_runs_once_it_is_kicked() {
    let server = Server::new();
    let client = Client::connect(&server.path);
    assert!(client.tell_u64(SET_FEATURES, feature::VERSION_1));
    let guest = memfd(64 * PAGE);
    assert!(client.share(&guest, 0, 64 * PAGE));
    assert!(client.place_ring(0, 256, 0));
    assert_eq!(server.device.news(), []);
    let kick = event();
    assert!(!client.tell_u64(SET_VRING_KICK, 0), "a kick with neither descriptor nor the no-descriptor flag");
    assert!(client.tell(SET_VRING_KICK, &0u64.to_ne_bytes(), &[kick.as_fd()]));
    assert_eq!(server.device.news(), [Entry::Start(0, 256, 0), Entry::Link(true)]);
    assert_eq!(server.device.diary().running[&0].features, feature::VERSION_1);
    assert!(!client.tell_ring(SET_VRING_ENABLE, 0, 0), "SET_VRING_ENABLE belongs to PROTOCOL_FEATURES");
}

#[test]
fn with_status_a_ring_runs_only_while_the_driver_is_ready() {
    let server = Server::new();
    let (client, _guest) = set_up(&server, FEATURES, P_ALL);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    let ready = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
    assert!(client.tell_u64(SET_STATUS, ready.into()));
    assert_eq!(server.device.news(), []);
    assert!(client.tell_u64(SET_STATUS, (ready | status::DRIVER_OK).into()));
    assert_eq!(server.device.news(), [Entry::Start(0, 256, 0), Entry::Link(true)]);
    assert_eq!(client.ask_u64(GET_STATUS), u64::from(ready | status::DRIVER_OK));
    assert!(!client.tell_u64(SET_STATUS, 0x100), "more than 8 bits");
    assert!(client.tell_u64(SET_STATUS, 0));
    assert_eq!(server.device.news(), [Entry::Stop(0), Entry::Link(false)], "status 0 is a reset");
    assert_eq!(client.ask_u64(GET_STATUS), 0);
}

#[test]
fn refused_features_are_not_confirmed_by_the_status() {
    let server = Server::new();
    let client = Client::connect(&server.path);
    client.negotiate(FEATURES, P_ALL);
    assert!(!client.tell_u64(SET_FEATURES, FEATURES | 1 << 55));
    assert!(client.tell_u64(SET_STATUS, (status::DRIVER | status::FEATURES_OK).into()));
    assert_eq!(client.ask_u64(GET_STATUS), u64::from(status::DRIVER));
    assert!(client.tell_u64(SET_FEATURES, FEATURES));
    assert!(client.tell_u64(SET_STATUS, (status::DRIVER | status::FEATURES_OK).into()));
    assert_eq!(client.ask_u64(GET_STATUS), u64::from(status::DRIVER | status::FEATURES_OK));
}

#[test]
fn status_requests_need_their_protocol_feature() {
    let server = Server::new();
    let client = Client::connect(&server.path);
    client.negotiate(FEATURES, P_REPLY_ACK);
    assert!(!client.tell_u64(SET_STATUS, 1));
    assert!(!client.tell(GET_STATUS, &[], &[]));
}

#[test]
fn features_may_not_change_under_a_running_ring() {
    let server = Server::new();
    let (client, _guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    server.device.news();
    assert!(client.tell_u64(SET_FEATURES, FEATURES));
    assert!(!client.tell_u64(SET_FEATURES, FEATURES | feature::MRG_RXBUF));
    assert_eq!(server.device.news(), [], "the ring runs on with what was negotiated");
}

#[test]
fn a_new_memory_table_moves_rings_without_new_addresses_and_they_go_on_where_they_were() {
    let server = Server::new();
    let (client, _guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.tell_ring(SET_VRING_BASE, 0, 100));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    server.device.news();
    let before = Arc::downgrade(&server.device.diary().running[&0].memory);

    let larger = memfd(128 * PAGE);
    assert!(client.share(&larger, 0, 128 * PAGE));
    assert_eq!(server.device.news(), [Entry::Stop(0), Entry::Start(0, 256, 100 + PROGRESS)]);
    assert!(before.upgrade().is_none(), "the old memory is gone");

    // A table that no longer holds the ring stops it; one that holds it again lets it go on.
    assert!(client.share(&larger, 1 << 30, 128 * PAGE));
    assert_eq!(server.device.news(), [Entry::Stop(0), Entry::Link(false)]);
    assert!(client.share(&larger, 0, 128 * PAGE));
    assert_eq!(server.device.news(), [Entry::Start(0, 256, 100 + 2 * PROGRESS), Entry::Link(true)]);
}

#[test]
fn a_refused_memory_table_leaves_everything_as_it_was() {
    let server = Server::new();
    let (client, guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    server.device.news();
    assert!(!client.share(&guest, 0, 65 * PAGE), "longer than the file");
    let pipe = std::io::pipe().unwrap();
    let mut body = words(&[1, 0]);
    body.extend(longs(&[0, PAGE, USER, 0]));
    assert!(!client.tell(SET_MEM_TABLE, &body, &[pipe.0.as_fd()]), "not a file");
    assert!(!client.tell(SET_MEM_TABLE, &body, &[]), "no descriptor");
    assert_eq!(server.device.news(), []);
}

#[test]
fn memory_slots_are_added_and_removed_under_a_running_ring() {
    let server = Server::new();
    let client = Client::connect(&server.path);
    client.negotiate(FEATURES, P_ALL & !P_STATUS);
    assert_eq!(client.ask_u64(GET_MAX_MEM_SLOTS), 32);
    let guest = memfd(64 * PAGE);
    let slot = |gpa: u64, pages: u64| longs(&[0, gpa, pages * PAGE, USER + gpa, 0]);
    assert!(client.tell(ADD_MEM_REG, &slot(0, 32), &[guest.as_fd()]));
    assert!(client.place_ring(0, 256, 0));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    assert_eq!(server.device.news(), [Entry::Start(0, 256, 0), Entry::Link(true)]);
    assert!(!client.tell(ADD_MEM_REG, &slot(16 * PAGE, 32), &[guest.as_fd()]), "overlaps");
    assert!(!client.tell(ADD_MEM_REG, &slot(32 * PAGE, 32), &[]), "no descriptor");
    assert!(!client.tell(REM_MEM_REG, &slot(0, 31), &[]), "no such slot");
    assert_eq!(server.device.news(), []);
    // As QEMU does when a region grows: away, and back again larger.
    assert!(client.tell(REM_MEM_REG, &slot(0, 32), &[guest.as_fd()]), "the one descriptor too many is just closed");
    assert!(client.tell(ADD_MEM_REG, &slot(0, 64), &[guest.as_fd()]));
    let again = [Entry::Stop(0), Entry::Link(false), Entry::Start(0, 256, PROGRESS), Entry::Link(true)];
    assert_eq!(server.device.news(), again);
}

#[test]
fn get_vring_base_ends_a_ring_until_it_is_set_up_again() {
    let server = Server::new();
    let (client, _guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    let (kick, call) = (event(), event());
    // Calls may come before all else, as DPDK sends them.
    assert!(client.tell(SET_VRING_CALL, &1u64.to_ne_bytes(), &[call.as_fd()]));
    assert!(client.place_ring(1, 256, 0));
    assert!(client.tell_ring(SET_VRING_BASE, 1, 0x8003_8005));
    assert!(client.tell(SET_VRING_KICK, &1u64.to_ne_bytes(), &[kick.as_fd()]));
    assert!(client.tell_ring(SET_VRING_ENABLE, 1, 1));
    assert_eq!(server.device.news(), [Entry::Start(1, 256, 0x8003_8005), Entry::Link(true)], "all 32 bits of the base");
    let config = Arc::downgrade(server.device.diary().running[&1].call.as_ref().unwrap());
    assert_eq!(client.base(1), 0x8003_8005 + PROGRESS);
    assert_eq!(server.device.news(), [Entry::Stop(1), Entry::Link(false)]);
    assert!(config.upgrade().is_none(), "the call descriptor is closed");
    assert_eq!(client.base(1), 0x8003_8005 + PROGRESS, "asking again is harmless");

    assert!(client.no_descriptor(SET_VRING_KICK, 1));
    assert_eq!(server.device.news(), [], "its addresses have been forgotten");
    assert!(client.tell(SET_VRING_ADDR, &addresses(1, 8 * PAGE), &[]));
    assert_eq!(server.device.news(), [Entry::Start(1, 256, 0x8003_8005 + PROGRESS), Entry::Link(true)]);
}

#[test]
fn a_base_that_comes_after_a_ring_has_moved_does_not_take_it_back() {
    let server = Server::new();
    let (client, _guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.tell_ring(SET_VRING_BASE, 0, 100));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    server.device.news();
    assert!(client.tell_ring(SET_VRING_BASE, 0, 100));
    assert_eq!(server.device.news(), [Entry::Stop(0), Entry::Start(0, 256, 100 + PROGRESS)]);
    // A ring that was taken back begins wherever the front-end says.
    assert_eq!(client.base(0), 100 + 2 * PROGRESS);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.tell_ring(SET_VRING_BASE, 0, 7));
    server.device.news();
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert_eq!(server.device.news(), [Entry::Start(0, 256, 7), Entry::Link(true)]);
}

#[test]
fn disabling_pauses_a_ring_and_resets_stop_all() {
    let server = Server::new();
    let (client, guest) = set_up(&server, FEATURES, P_ALL & !P_STATUS);
    let set_up_rings = || {
        for index in 0..4 {
            assert!(client.place_ring(index, 16, u64::from(index) * 4 * PAGE));
            assert!(client.no_descriptor(SET_VRING_KICK, index));
            assert!(client.tell_ring(SET_VRING_ENABLE, index, 1));
        }
        server.device.news();
    };
    set_up_rings();
    assert!(client.tell_ring(SET_VRING_ENABLE, 2, 0));
    assert!(!client.tell_ring(SET_VRING_ENABLE, 2, 2), "neither on nor off");
    assert!(client.tell_ring(SET_VRING_ENABLE, 2, 1));
    assert_eq!(server.device.news(), [Entry::Stop(2), Entry::Start(2, 16, PROGRESS)]);

    let stopped = [Entry::Stop(0), Entry::Stop(1), Entry::Stop(2), Entry::Stop(3), Entry::Link(false)];
    assert!(client.tell(RESET_DEVICE, &[], &[]));
    assert_eq!(server.device.news(), stopped);
    assert!(client.tell_u64(SET_FEATURES, FEATURES));
    set_up_rings();
    assert!(client.tell(RESET_OWNER, &[], &[]));
    assert_eq!(server.device.news(), stopped);
    assert!(client.tell_u64(SET_FEATURES, FEATURES));
    assert!(client.share(&guest, 0, 64 * PAGE), "RESET_OWNER has taken the memory as well");
    set_up_rings();
    drop(client);
    eventually("a disconnect stops all rings", || server.device.diary().running.is_empty());
    assert_eq!(server.device.news(), stopped);
}

#[test]
fn sizes_and_indexes_are_checked() {
    let server = Server::new();
    let client = Client::connect(&server.path);
    client.negotiate(FEATURES, P_ALL);
    assert_eq!(client.ask_u64(GET_QUEUE_NUM), u64::from(PAIRS), "pairs, not rings");
    for (size, fine) in [(0, false), (1, true), (2, true), (3, false), (250, false), (32768, true), (65536, false)] {
        assert_eq!(client.tell_ring(SET_VRING_NUM, 0, size), fine, "split, size {size}");
    }
    assert!(client.tell_u64(SET_FEATURES, FEATURES | feature::RING_PACKED));
    for (size, fine) in [(0, false), (1, true), (250, true), (32768, true), (32769, false), (1 << 20, false)] {
        assert_eq!(client.tell_ring(SET_VRING_NUM, 0, size), fine, "packed, size {size}");
    }
    for request in [SET_VRING_NUM, SET_VRING_BASE, GET_VRING_BASE, SET_VRING_ENABLE] {
        assert!(!client.tell_ring(request, 4, 1), "request {request}, ring 4 of 4");
        assert!(!client.tell_ring(request, u32::MAX, 1), "request {request}");
    }
    assert!(!client.tell(SET_VRING_ADDR, &addresses(4, 0), &[]));
    for request in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
        assert!(!client.no_descriptor(request, 4));
        assert!(client.no_descriptor(request, 3));
    }
}

#[test]
fn a_ring_that_lies_outside_memory_or_crooked_is_not_started() {
    let server = Server::new();
    let (client, _guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    assert!(client.tell_ring(SET_VRING_NUM, 0, 256));
    let place = |desc: u64, used: u64, avail: u64| {
        let mut body = words(&[0, 0]);
        body.extend(longs(&[desc, used, avail, 0]));
        client.tell(SET_VRING_ADDR, &body, &[])
    };
    let (desc, avail, used, end) = (USER, USER + PAGE, USER + 2 * PAGE, USER + 64 * PAGE);
    for (desc, used, avail) in
        [(end - 16, used, avail), (desc, end - 8, avail), (desc, used, end - 2), (0, used, avail)]
    {
        assert!(place(desc, used, avail), "may become right with the next memory table");
        assert_eq!(server.device.news(), []);
    }
    for (desc, used, avail) in [(desc + 8, used, avail), (desc, used + 2, avail), (desc, used, avail + 1)] {
        assert!(!place(desc, used, avail), "never right (virtio 1.3, 2.7)");
    }
    assert!(place(desc, used, avail));
    assert_eq!(server.device.news(), [Entry::Start(0, 256, 0), Entry::Link(true)]);
}

#[test]
fn the_configuration_space_is_read_in_parts() {
    let server = Server::new();
    let client = Client::connect(&server.path);
    client.negotiate(FEATURES, P_ALL);
    let read = |offset: u32, size: u32| {
        let mut body = words(&[offset, size, 0]);
        body.resize(12 + size as usize, 0);
        client.ask(GET_CONFIG, &body)
    };
    assert_eq!(read(0, 6)[12..], [1, 2, 3, 4, 5, 6]);
    assert_eq!(read(22, 4)[12..], [23, 24, 0, 0], "zeros behind the device's own part");
    assert_eq!(read(250, 7), words(&[250, 0, 0]), "outside: a reply of no bytes");
}

#[test]
fn a_peer_that_shortens_its_memory_is_disconnected_and_the_next_one_is_served() {
    let server = Server::new();
    let (client, guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    assert!(client.place_ring(0, 256, 0));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    let memory = Arc::clone(&server.device.diary().running[&0].memory);
    guest.set_len(0).unwrap();
    memory.bytes(PAGE, 1).unwrap().write(&[1]);
    assert!(client.receive().is_none(), "the connection ends");
    eventually("its ring is stopped", || server.device.diary().running.is_empty());
    Client::connect_and_get_features(&server.path);
}

#[test]
fn a_call_descriptor_is_an_eventfd_that_never_blocks() {
    let server = Server::new();
    let (client, guest) = set_up(&server, FEATURES, P_REPLY_ACK);
    let (_reader, writer) = std::io::pipe().unwrap();
    assert!(!client.tell(SET_VRING_CALL, &0u64.to_ne_bytes(), &[writer.as_fd()]), "a pipe");
    assert!(!client.tell(SET_VRING_KICK, &0u64.to_ne_bytes(), &[guest.as_fd()]), "a file");
    let full = event();
    rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    assert!(client.tell(SET_VRING_CALL, &0u64.to_ne_bytes(), &[full.as_fd()]));
    assert!(client.place_ring(0, 256, 0));
    assert!(client.no_descriptor(SET_VRING_KICK, 0));
    assert!(client.tell_ring(SET_VRING_ENABLE, 0, 1));
    server.device.diary().running[&0].call.as_ref().unwrap().signal();
}
