//! What the port API promises, on the PMD's port and on the backend's, joined by a socket.

use std::slice;

use backend::control::{Control, Mode};
use backend::port::vhost_user::VhostUserPort;
use pmd::mbuf::{Mbuf, MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;
use pmd::port::{BINS, Burst, Link, Port, PortConfig, PortError, RxQueueConfig, Stats, TxQueueConfig};
use pmd::virtio::port::VirtioPort;
use pmd::virtio::user;
use testbed::peer::turn;
use testbed::ports::{Memory, Shape, guest, guest_config, host, setup, wait_until};
use testbed::rings::packet;
use vmm_sys_util::tempdir::TempDir;

const MBUFS: u32 = 4096;
const RING: u16 = 256;

/// Both ends, and what they stand on. The guest goes first.
struct Pair {
    guest: VirtioPort,
    host: VhostUserPort,
    guest_memory: Memory,
    host_memory: Memory,
    control: Control,
    dir: TempDir,
}

impl Pair {
    /// Both ends, started.
    fn new(shape: Shape) -> Self {
        let mut pair = Self::opened(shape);
        pmd::fwd::open_port(&mut pair.guest, &setup(shape, &pair.guest_memory)).unwrap();
        pair
    }

    /// The host started, the guest not configured.
    fn opened(shape: Shape) -> Self {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        // However large the rings, they do not hold all of them.
        let guest_memory = Memory::new(MBUFS + u32::from(shape.size * shape.queues));
        let (host_memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
        let host = host(shape.queues, &socket, Mode::Server, &host_memory, &control).unwrap();
        let config = guest_config(shape, &socket, user::Mode::Client);
        let guest = VirtioPort::open(config, slice::from_ref(&guest_memory.arena)).unwrap();
        Self { guest, host, guest_memory, host_memory, control, dir }
    }

    /// Either end as sender, with its pool, and the other as receiver.
    fn both_ways(&self) -> [(&dyn Port, &MbufPool, &dyn Port); 2] {
        let (guest, host): (&dyn Port, &dyn Port) = (&self.guest, &self.host);
        [(guest, &self.guest_memory.pool, host), (host, &self.host_memory.pool, guest)]
    }
}

fn pool(room: u16, arena: &std::sync::Arc<Arena>) -> MbufPool {
    MbufPool::new(&MbufPoolConfig { count: 64, cache_size: 0, room, ..MbufPoolConfig::default() }, arena).unwrap()
}

fn rx(size: u16, free_thresh: u16, pool: &MbufPool) -> RxQueueConfig {
    RxQueueConfig { size, pool: pool.clone(), free_thresh, deferred_start: false }
}

fn tx(size: u16, free_thresh: u16) -> TxQueueConfig {
    TxQueueConfig { size, free_thresh, deferred_start: false }
}

/// What it says, or that it is well.
fn said(result: Result<(), PortError>) -> String {
    result.err().map_or("ok".into(), |error| error.to_string())
}

/// A packet of `len` bytes.
fn frame(pool: &MbufPool, len: usize) -> Mbuf {
    packet(pool, &vec![0x5a; len], usize::MAX).unwrap()
}

#[test]
fn queue_set_up_takes_what_the_rules_allow_and_names_what_they_do_not() {
    let mut pair = Pair::opened(Shape { size: 1024, ..Shape::PLAIN });
    let pool = pair.guest_memory.pool.clone();
    let port = &mut pair.guest;
    port.configure(&PortConfig { rx_queues: 1, tx_queues: 1, ..PortConfig::default() }).unwrap();

    for (size, free_thresh, expected) in [
        (0, 0, "ok"),
        (32, 0, "ok"),
        (31, 0, "queue size 31 is outside 32..=1024"),
        (1, 0, "queue size 1 is outside 32..=1024"),
        (100, 0, "ok"), // any number in between
        (1024, 0, "ok"),
        (1025, 0, "ok"), // as many as the ring has
        (65535, 0, "ok"),
        (1024, 4, "ok"),
        (1024, 3, "rx_free_thresh 3 is not a multiple of 4"),
        (1024, 1020, "ok"),
        (1024, 1024, "rx_free_thresh 1024 is outside 4..=1023"),
        (32, 64, "ok"), // thresholds are compared with the ring
    ] {
        let said = said(port.rx_queue_setup(0, &rx(size, free_thresh, &pool)));
        assert!(said.ends_with(expected), "{size}, {free_thresh}: {said}");
    }
    for (size, free_thresh, expected) in [
        (0, 0, "ok"),
        (31, 0, "queue size 31 is outside 32..=1024"),
        (65535, 0, "ok"),
        (1024, 1, "ok"), // no multiple of anything
        (1024, 1020, "ok"),
        (1024, 1021, "tx_free_thresh 1021 is outside 1..=1020"),
        (32, 1020, "ok"),
    ] {
        let said = said(port.tx_queue_setup(0, &tx(size, free_thresh)));
        assert!(said.ends_with(expected), "{size}, {free_thresh}: {said}");
    }
    port.start().unwrap();
}

#[test]
fn rings_have_two_to_32768_descriptors() {
    let _turn = turn();
    let (memory, dir) = (Memory::new(MBUFS), TempDir::new().unwrap());
    for (size, packed, expected) in [
        (0, false, "ring size 0 is outside 2..=32768"),
        (1, true, "ring size 1 is outside 2..=32768"),
        (32769, true, "ring size 32769 is outside 2..=32768"),
        (100, false, "ring size 100 is not a power of two; use 64 or 128"),
    ] {
        let shape = Shape { size, packed, ..Shape::PLAIN };
        let said = guest(shape, &dir.as_path().join("s"), user::Mode::Client, &memory).err().unwrap().to_string();
        assert!(said.ends_with(expected), "{said}");
    }
    for (size, packed) in [(2, false), (2, true), (100, true), (32768, false), (32768, true)] {
        let pair = Pair::new(Shape { size, packed, ..Shape::PLAIN });
        for (sender, pool, receiver) in pair.both_ways() {
            let (mut tx, mut rx, mut burst) = (sender.tx(0).unwrap(), receiver.rx(0).unwrap(), Burst::new(1));
            // More than once round the smaller ones.
            for _ in 0..300 {
                burst.push(frame(pool, 100)).unwrap();
                assert!(wait_until(|| tx.tx_burst(&mut burst) == 1), "{size} {packed}");
                assert!(wait_until(|| rx.rx_burst(&mut burst) == 1), "{size} {packed}");
                burst.free();
            }
        }
    }
}

#[test]
fn what_is_out_of_turn_or_out_of_place_is_one_sentence_and_changes_nothing() {
    let mut pair = Pair::opened(Shape { queues: 2, ..Shape::PLAIN });
    let pool = pair.guest_memory.pool.clone();
    let port = &mut pair.guest;
    let two = PortConfig { rx_queues: 2, tx_queues: 2, ..PortConfig::default() };
    let expect = |said: String, parts: &[&str]| {
        assert!(!said.contains('\n') && parts.iter().all(|part| said.contains(part)), "{parts:?}: {said}");
    };

    expect(said(port.rx_queue_setup(0, &rx(0, 0, &pool))), &["rx queue 0"]);
    expect(said(port.configure(&PortConfig { rx_queues: 3, ..two.clone() })), &["rx queues 3", "0..=2"]);
    expect(said(port.configure(&PortConfig { tx_queues: 3, ..two.clone() })), &["tx queues 3", "0..=2"]);
    let path = |name: &str| Some(name.to_owned());
    expect(said(port.configure(&PortConfig { rx_path: path("fast"), ..two.clone() })), &["no path is called fast"]);
    let unfit = PortConfig { tx_path: path("split-in-order"), ..two.clone() };
    expect(said(port.configure(&unfit)), &["path split-in-order does not fit", "fit: split"]);

    port.configure(&PortConfig { frame_max: 9000, ..two.clone() }).unwrap();
    expect(said(port.rx_queue_setup(0, &rx(0, 0, &pool))), &["frames of 9000 bytes", "2048", "mrg"]);
    port.configure(&two).unwrap();
    expect(said(port.rx_queue_setup(2, &rx(0, 0, &pool))), &["rx queue 2", "0..=1"]);
    expect(said(port.tx_queue_setup(2, &tx(0, 0))), &["tx queue 2", "0..=1"]);
    let elsewhere = Arena::new(1 << 20, &Pages::Plain).unwrap();
    let stranger = self::pool(2176, &elsewhere);
    expect(said(port.rx_queue_setup(0, &rx(0, 0, &stranger))), &["open it with the pool's arena"]);
    expect(said(port.start()), &["set the queue up first"]);
    expect(said(port.rx_queue_start(0)), &["stopped", "start it first"]);
    assert_eq!((port.link(), port.rx_path(0)), (Link::Down, None));

    for queue in 0..2 {
        port.rx_queue_setup(queue, &rx(0, 0, &pool)).unwrap();
        port.tx_queue_setup(queue, &tx(0, 0)).unwrap();
    }
    port.start().unwrap();
    for out_of_turn in [port.start(), port.configure(&two), port.rx_queue_setup(0, &rx(0, 0, &pool))] {
        expect(said(out_of_turn), &["started", "stop it first"]);
    }
    for nowhere in [port.rx_queue_start(2), port.rx_queue_stop(2), port.tx_queue_start(u16::MAX)] {
        expect(said(nowhere), &["queue", "0..=1"]);
    }
    let handle = port.rx(1).unwrap();
    expect(port.rx(1).err().unwrap().to_string(), &["rx queue 1", "drop it first"]);
    drop(handle);
    assert!(port.rx(1).is_ok());
    expect(port.tx(2).err().unwrap().to_string(), &["tx queue 2"]);
    assert_eq!((port.link(), port.rx_path(1), port.tx_path(1)), (Link::Up, Some("split"), Some("split")));
}

#[test]
fn memory_that_is_too_small_for_the_rings_leaves_the_port_stopped_and_usable() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (host_memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let _host = host(1, &socket, Mode::Server, &host_memory, &control).unwrap();
    // Room for 64 mbufs and two rings, but not for the transmit ring's indirect tables.
    let arena = Arena::new(64 * 2240 + (64 << 10), &Pages::Plain).unwrap();
    let memory = Memory { pool: pool(2176, &arena), arena };
    let said = guest(Shape { size: 1024, ..Shape::PLAIN }, &socket, user::Mode::Client, &memory).err().unwrap();
    assert!(said.to_string().contains("make the arena larger"), "{said}");
    assert_eq!(memory.out(), 0);
    let mut port = guest(Shape { size: 32, ..Shape::PLAIN }, &socket, user::Mode::Client, &memory).unwrap();
    assert_eq!((port.link(), memory.out()), (Link::Up, 32));
    port.stop().unwrap();
    assert_eq!(memory.out(), 0);
}

#[test]
fn a_queue_uses_as_many_descriptors_as_it_was_set_up_with() {
    let mut pair = Pair::opened(Shape { size: RING, ..Shape::PLAIN });
    let memory = &pair.guest_memory;
    pair.guest.configure(&PortConfig { rx_queues: 1, tx_queues: 1, ..PortConfig::default() }).unwrap();
    pair.guest.rx_queue_setup(0, &rx(64, 0, &memory.pool)).unwrap();
    pair.guest.tx_queue_setup(0, &tx(48, 0)).unwrap();
    pair.guest.start().unwrap();
    assert_eq!(memory.out(), 64);
    pair.host.stop().unwrap();
    let (mut handle, mut burst) = (pair.guest.tx(0).unwrap(), Burst::new(64));
    burst.fill(&memory.pool, 64).unwrap();
    assert!(burst.as_mut_slice().iter_mut().all(|mbuf| mbuf.set_len(100)));
    assert_eq!((handle.tx_burst(&mut burst), burst.len()), (48, 16));
}

#[test]
fn statistics_and_size_bins_are_what_was_injected_on_every_path() {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    for shape in Shape::all() {
        let pair = Pair::new(shape);
        // The edges of every bin, each a different number of times.
        let lengths = [14, 60, 63, 64, 65, 127, 128, 255, 256, 511, 512, 1023, 1024, 1518, 1519, 2048, 9000];
        let lengths = lengths.into_iter().filter(|&len| len <= shape.frame_max());
        let sent: Vec<usize> = lengths.enumerate().flat_map(|(i, len)| std::iter::repeat_n(len, i + 1)).collect();
        let mut expected =
            Stats { packets: sent.len() as u64, bytes: sent.iter().sum::<usize>() as u64, ..Stats::default() };
        for &len in &sent {
            expected.bins[BINS.iter().position(|bin| len as u32 <= bin.1).unwrap()] += 1;
        }
        for (sender, pool, receiver) in pair.both_ways() {
            let (mut tx, mut rx, mut burst) = (sender.tx(0).unwrap(), receiver.rx(0).unwrap(), Burst::new(32));
            for &len in &sent {
                burst.push(frame(pool, len)).unwrap();
                assert!(wait_until(|| tx.tx_burst(&mut burst) == 1));
                assert!(wait_until(|| rx.rx_burst(&mut burst) == 1));
                assert_eq!(burst.as_slice()[0].pkt_len(), len);
                burst.free();
            }
            for (what, stats) in [("sender", sender.tx_stats()), ("receiver", receiver.rx_stats())] {
                let counted = Stats { kicks: 0, kicks_suppressed: 0, slow_frees: 0, ..stats };
                assert_eq!(counted, expected, "{what} on {shape:?}");
            }
        }
    }
}

#[test]
fn the_rx_queue_count_is_what_waits() {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    for shape in Shape::all() {
        let pair = Pair::new(shape);
        for (sender, pool, receiver) in pair.both_ways() {
            let (mut tx, mut rx, mut burst) = (sender.tx(0).unwrap(), receiver.rx(0).unwrap(), Burst::new(32));
            assert_eq!(receiver.rx_queue_count(0), 0);
            for n in 1..=20 {
                burst.push(frame(pool, 100)).unwrap();
                assert_eq!(tx.tx_burst(&mut burst), 1);
                assert_eq!(receiver.rx_queue_count(0), n, "{shape:?}");
            }
            assert_eq!((rx.rx_burst(&mut burst), receiver.rx_queue_count(0)), (20, 0));
            assert_eq!(receiver.rx_queue_count(7), 0, "no such queue");
        }
    }
}

#[test]
fn a_deferred_queue_starts_when_told() {
    let mut pair = Pair::opened(Shape { queues: 2, ..Shape::PLAIN });
    let pool = pair.guest_memory.pool.clone();
    let port = &mut pair.guest;
    port.configure(&PortConfig { rx_queues: 2, tx_queues: 2, ..PortConfig::default() }).unwrap();
    for queue in 0..2 {
        let deferred_start = queue == 1;
        port.rx_queue_setup(queue, &RxQueueConfig { deferred_start, ..rx(0, 0, &pool) }).unwrap();
        port.tx_queue_setup(queue, &TxQueueConfig { deferred_start, ..tx(0, 0) }).unwrap();
    }
    let (mut rx, mut tx, mut burst) = (port.rx(1).unwrap(), port.tx(1).unwrap(), Burst::new(1));
    for _ in 0..2 {
        port.start().unwrap();
        assert_eq!([port.rx_path(0), port.rx_path(1), port.tx_path(1)], [Some("split"), None, None]);
        burst.push(frame(&pool, 100)).unwrap();
        assert_eq!((tx.tx_burst(&mut burst), rx.rx_burst(&mut burst), burst.free()), (0, 0, 1));

        port.rx_queue_start(1).unwrap();
        port.tx_queue_start(1).unwrap();
        assert_eq!([port.rx_path(1), port.tx_path(1)], [Some("split"); 2]);
        // The other end has got them, too.
        assert_eq!([pair.host.rx_path(1), pair.host.tx_path(1)], [Some("split"); 2]);
        burst.push(frame(&pool, 100)).unwrap();
        assert_eq!(tx.tx_burst(&mut burst), 1);
        let mut host_rx = pair.host.rx(1).unwrap();
        assert!(wait_until(|| host_rx.rx_burst(&mut burst) == 1));
        burst.free();
        port.stop().unwrap();
        assert_eq!(pair.guest_memory.out(), 0);
    }
}

#[test]
fn the_backends_port_keeps_the_same_rules_and_is_set_up_anew_under_a_connected_guest() {
    let _turn = turn();
    let mut pair = Pair::new(Shape { queues: 2, ..Shape::PLAIN });
    let pool = pair.host_memory.pool.clone();
    let port = &mut pair.host;
    let expect = |said: String, parts: &[&str]| {
        assert!(!said.contains('\n') && parts.iter().all(|part| said.contains(part)), "{parts:?}: {said}");
    };
    let both = |queues| PortConfig { rx_queues: queues, tx_queues: queues, ..PortConfig::default() };
    for queues in [0, 129] {
        let said = host(queues, &pair.dir.as_path().join("other"), Mode::Server, &pair.host_memory, &pair.control);
        expect(said.err().unwrap().to_string(), &[&format!("queue pairs {queues} is outside 1..=128")]);
    }
    for out_of_turn in [port.start(), port.configure(&both(2)), port.rx_queue_setup(0, &rx(0, 0, &pool))] {
        expect(said(out_of_turn), &["started", "stop it first"]);
    }
    for nowhere in [port.rx_queue_start(2), port.rx_queue_stop(2), port.tx_queue_start(u16::MAX)] {
        expect(said(nowhere), &["x queue", "0..=1"]);
    }
    assert!(wait_until(|| port.rx_path(1).is_some() && port.tx_path(1).is_some()));
    port.stop().unwrap();
    expect(said(port.configure(&both(3))), &["rx queues 3", "0..=2"]);

    // The guest has two pairs of rings, and the second one is not looked at for a while.
    for queues in [1, 2] {
        port.configure(&both(queues)).unwrap();
        expect(said(port.rx_queue_setup(queues, &rx(0, 0, &pool))), &["rx queue"]);
        for queue in 0..queues {
            expect(said(port.rx_queue_setup(queue, &rx(31, 0, &pool))), &["queue size 31"]);
            expect(said(port.tx_queue_setup(queue, &tx(31, 0))), &["queue size 31"]);
            port.rx_queue_setup(queue, &rx(0, 0, &pool)).unwrap();
            port.tx_queue_setup(queue, &tx(0, 0)).unwrap();
        }
        port.start().unwrap();
        let (mut tx, mut burst) = (pair.guest.tx(queues - 1).unwrap(), Burst::new(1));
        burst.push(frame(&pair.guest_memory.pool, 100)).unwrap();
        assert_eq!(tx.tx_burst(&mut burst), 1);
        let mut handle = port.rx(queues - 1).unwrap();
        assert!(wait_until(|| handle.rx_burst(&mut burst) == 1));
        burst.free();
        port.stop().unwrap();
        assert_eq!((port.link(), pair.host_memory.out()), (Link::Down, 0));
    }
}
