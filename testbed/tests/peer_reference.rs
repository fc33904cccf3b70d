//! The reference backend, tried on DPDK's virtio-user: two that know nothing of each other and nothing of our rings.

use std::time::{Duration, Instant};

use testbed::frame::{Macs, Stream};
use testbed::ledger::Ledger;
use testbed::peer::dpdk::{Config, Forward, Role, Testpmd, VirtioUser};
use testbed::peer::reference::{self, Expect, Mode, Reference, Stats};
use testbed::peer::turn;
use vmm_sys_util::tempdir::TempDir;

const SOON: Duration = Duration::from_secs(20);
const SEED: u64 = 7;

/// `IN_ORDER`, `MRG_RXBUF`.
const COMBINATIONS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

/// A DPDK guest on a reference backend, up and linked.
struct Pair {
    guest: Testpmd,
    backend: Reference,
    _dir: TempDir,
}

fn pair(mode: Mode, forward: Forward, queues: u16, (in_order, mrg_rxbuf): (bool, bool)) -> Pair {
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let config = reference::Config { queues, in_order, mergeable: mrg_rxbuf, ..reference::Config::new(&socket, mode) };
    let backend = Reference::spawn(config).unwrap();
    let user = VirtioUser { queues, in_order, mrg_rxbuf, ..VirtioUser::new(&socket) };
    // A frame of 9000 bytes takes five of DPDK's mbufs.
    let options = vec!["--max-pkt-len=9018".into(), "--enable-scatter".into()];
    let options = if mrg_rxbuf { options } else { Vec::new() };
    let guest = Config { forward, options, ..Config::new(Role::VirtioUser(user), 1) };
    let mut guest = Testpmd::launch(&guest).unwrap();
    guest.wait_link_up(SOON).unwrap();
    Pair { guest, backend, _dir: dir }
}

fn wait(backend: &Reference, what: &str, done: impl Fn(&Stats) -> bool) -> Stats {
    let deadline = Instant::now() + SOON;
    loop {
        let stats = backend.stats();
        if done(&stats) {
            return stats;
        }
        assert!(Instant::now() < deadline, "no {what} within {SOON:?}: {stats:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn longest(mrg_rxbuf: bool) -> usize {
    if mrg_rxbuf { 9000 } else { 1514 }
}

#[test]
fn every_frame_of_the_source_reaches_the_guest() {
    let _turn = turn();
    for combination in COMBINATIONS {
        let stream = Stream::new(SEED, 0, 60..=longest(combination.1));
        let mode = Mode::Source { stream, count: Some(20_000), returned: Expect::Anything };
        let mut pair = pair(mode, Forward::RxOnly, 1, combination);
        pair.guest.start().unwrap();
        let sent = wait(&pair.backend, "20000 frames", |stats| stats.to_guest == 20_000);
        let arrived = pair.guest.wait_rx(20_000, SOON).unwrap();
        let received = pair.guest.stop().unwrap().total;

        let mut ledger = Ledger::new(format!("source to rxonly, {combination:?}"));
        ledger.input("reference sent", sent.to_guest);
        ledger.output("guest received", received.rx_packets);
        ledger.balance().unwrap();
        assert_eq!(arrived.rx_bytes, sent.to_guest_bytes, "{combination:?}");
    }
}

#[test]
fn every_frame_of_the_guest_reaches_the_sink() {
    let _turn = turn();
    for combination in COMBINATIONS {
        let mut pair = pair(Mode::Sink(Expect::Txonly), Forward::TxOnly, 1, combination);
        pair.guest.start().unwrap();
        wait(&pair.backend, "20000 frames", |stats| stats.from_guest >= 20_000);
        let sent = pair.guest.stop().unwrap().total.tx_packets;
        let received = wait(&pair.backend, "end of the ring", |stats| stats.from_guest >= sent);

        let mut ledger = Ledger::new(format!("txonly to sink, {combination:?}"));
        ledger.input("guest sent", sent);
        ledger.output("reference received", received.from_guest);
        ledger.balance().unwrap();
        assert_eq!(received.checks[0].good, sent, "{combination:?}: {received:?}");
        assert_eq!(received.from_guest_bytes, 64 * sent);
    }
}

#[test]
fn every_byte_comes_back_from_a_guest_that_forwards() {
    let _turn = turn();
    for combination in COMBINATIONS {
        let stream = Stream::new(SEED, 0, 60..=longest(combination.1));
        let returned = Expect::Stream(stream.clone(), Macs::Swapped);
        let mode = Mode::Source { stream, count: Some(20_000), returned };
        let mut pair = pair(mode, Forward::MacSwap, 1, combination);
        pair.guest.start().unwrap();
        pair.guest.wait_rx(20_000, SOON).unwrap();
        let forwarded = pair.guest.stop().unwrap().total;
        let stats = wait(&pair.backend, "return", |stats| stats.from_guest >= forwarded.tx_packets);

        let mut ledger = Ledger::new(format!("source to macswap and back, {combination:?}"));
        ledger.input("reference sent", stats.to_guest);
        ledger.output("reference received, every byte right", stats.checks[0].good);
        ledger.dropped("guest's transmit ring full", forwarded.tx_dropped);
        ledger.balance().unwrap();
    }
}

#[test]
fn a_burst_goes_round_and_round_in_the_loop() {
    let _turn = turn();
    for combination in COMBINATIONS {
        let mut pair = pair(Mode::Loop, Forward::Io, 1, combination);
        pair.guest.start_tx_first(8).unwrap();
        wait(&pair.backend, "20000 frames", |stats| stats.from_guest >= 20_000);
        let guest = pair.guest.stop().unwrap().total;
        let stats = wait(&pair.backend, "end of the ring", |stats| stats.from_guest >= guest.tx_packets);
        assert_eq!((stats.from_guest, stats.dropped_no_buffer), (guest.tx_packets, 0), "{combination:?}");
        assert_eq!(stats.to_guest, stats.from_guest);
    }
}

#[test]
fn each_queue_pair_has_its_own_stream() {
    let _turn = turn();
    let stream = Stream::new(SEED, 0, 60..=200);
    let returned = Expect::Stream(stream.clone(), Macs::Kept);
    let mut pair = pair(Mode::Source { stream, count: Some(5000), returned }, Forward::Io, 3, (true, true));
    pair.guest.start().unwrap();
    let stats = wait(&pair.backend, "all frames of three streams", |stats| stats.from_guest == 15_000);
    assert_eq!(stats.checks.iter().map(|check| check.good).collect::<Vec<_>>(), [5000; 3], "{stats:?}");
}

#[test]
fn a_frame_longer_than_the_buffer_is_dropped_and_counted() {
    let _turn = turn();
    let mode = Mode::Source { stream: Stream::new(SEED, 0, 4000..=4000), count: Some(10), returned: Expect::Anything };
    let pair = pair(mode, Forward::RxOnly, 1, (false, false));
    let stats = wait(&pair.backend, "ten drops", |stats| stats.dropped_too_long == 10);
    assert_eq!(stats.to_guest, 0);
}

#[test]
fn the_socket_takes_the_next_guest_after_one_has_gone() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let backend = Reference::spawn(reference::Config::new(&socket, Mode::Sink(Expect::Txonly))).unwrap();
    for connections in 1..=2 {
        let user = VirtioUser { in_order: true, ..VirtioUser::new(&socket) };
        let guest = Config { forward: Forward::TxOnly, ..Config::new(Role::VirtioUser(user), 1) };
        let mut guest = Testpmd::launch(&guest).unwrap();
        let before = backend.stats().from_guest;
        guest.start().unwrap();
        let stats = wait(&backend, "1000 frames", |stats| stats.from_guest > before + 1000);
        assert_eq!(stats.connections, connections);
    }
    let stats = backend.stop();
    assert_eq!(stats.last_failure, None);
    assert_eq!(stats.checks[0].foreign, 0);
    assert!(!socket.exists());
}

#[test]
fn a_backend_that_connects_finds_a_guest_that_listens() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let config = reference::Config::new(&socket, Mode::Sink(Expect::Txonly));
    let backend = Reference::spawn(reference::Config { client: true, ..config }).unwrap();
    let user = VirtioUser { server: true, ..VirtioUser::new(&socket) };
    let guest = Config { forward: Forward::TxOnly, ..Config::new(Role::VirtioUser(user), 1) };
    let mut guest = Testpmd::launch(&guest).unwrap();
    guest.start().unwrap();
    wait(&backend, "1000 frames", |stats| stats.from_guest > 1000);
}

#[test]
fn it_stops_with_nobody_connected_and_names_a_socket_it_cannot_have() {
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let backend = Reference::spawn(reference::Config::new(&socket, Mode::Loop)).unwrap();
    let said = Reference::spawn(reference::Config::new(&socket, Mode::Loop)).unwrap_err().to_string();
    assert!(said.contains(socket.to_str().unwrap()) && said.contains("remove the file"), "{said}");
    assert_eq!(backend.stop(), Stats::default());
}
