//! The PMD, judged by the reference backend: neither has read the other's ring code.

use std::slice;
use std::time::{Duration, Instant};

use pmd::mbuf::{MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;
use pmd::port::{Burst, Port, PortConfig, RxQueueConfig, TxQueueConfig};
use pmd::virtio::port::{VirtioConfig, VirtioPort};
use pmd::virtio::user::Mode;
use testbed::frame::{Macs, Stream};
use testbed::ledger::Ledger;
use testbed::peer::reference::{Config, Expect, Mode as Traffic, Reference};
use testbed::peer::turn;
use vmm_sys_util::tempdir::TempDir;

const SOON: Duration = Duration::from_secs(30);
const SEED: u64 = 11;
const RING_SIZE: u16 = 256;

#[test]
fn every_byte_comes_back_through_the_pmd_on_each_split_path() {
    let _turn = turn();
    for (in_order, mergeable) in [(false, false), (true, false), (false, true), (true, true)] {
        // More frames than a ring's index can count, so that it wraps; fewer of the long ones, which take five buffers.
        let (frames, longest) = if mergeable { (10_000, 9000) } else { (70_000, 300) };
        forward(in_order, mergeable, 1, frames, longest);
    }
}

#[test]
fn each_queue_pair_keeps_to_its_own_stream() {
    let _turn = turn();
    forward(true, true, 3, 5000, 300);
}

/// The reference sends `frames` on each queue pair, the PMD sends back what it receives, and the reference checks every byte.
fn forward(in_order: bool, mergeable: bool, queues: u16, frames: u64, longest: usize) {
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let stream = Stream::new(SEED, 0, 60..=longest);
    let returned = Expect::Stream(stream.clone(), Macs::Kept);
    let mode = Traffic::Source { stream, count: Some(frames), returned };
    let config = Config { queues, in_order, mergeable, ..Config::new(&socket, mode) };
    let reference = Reference::spawn(config).unwrap();

    let pool_config = MbufPoolConfig { count: 8192, ..MbufPoolConfig::default() };
    let arena = Arena::new(pool_config.arena_bytes() + (4 << 20), &Pages::Plain).unwrap();
    let pool = MbufPool::new(&pool_config, &arena).unwrap();
    let config = VirtioConfig {
        address: format!("virtio-user:{}", socket.display()),
        path: socket.clone(),
        mode: Mode::Client,
        queue_pairs: queues,
        ring_size: RING_SIZE,
        packed: false,
        in_order,
        event_idx: false,
        mergeable,
        port: 0,
        mac: [2, 0, 0, 0, 0, 2],
        timeout: SOON,
    };
    let mut port = VirtioPort::open(config, slice::from_ref(&arena)).unwrap();
    port.configure(&PortConfig { rx_queues: queues, tx_queues: queues, ..PortConfig::default() }).unwrap();
    for queue in 0..queues {
        let rx = RxQueueConfig { size: RING_SIZE, pool: pool.clone(), free_thresh: 0, deferred_start: false };
        port.rx_queue_setup(queue, &rx).unwrap();
        port.tx_queue_setup(queue, &TxQueueConfig { size: RING_SIZE, ..TxQueueConfig::default() }).unwrap();
    }
    port.start().unwrap();

    let worker = Worker::enter().unwrap();
    let mut pairs: Vec<_> = (0..queues).map(|queue| (port.rx(queue).unwrap(), port.tx(queue).unwrap())).collect();
    let expected = frames * u64::from(queues);
    let deadline = Instant::now() + SOON;
    let mut burst = Burst::new(32);
    let mut forwarded = 0;
    while forwarded < expected && Instant::now() < deadline {
        for (rx, tx) in &mut pairs {
            rx.rx_burst(&mut burst);
            while !burst.is_empty() && Instant::now() < deadline {
                forwarded += tx.tx_burst(&mut burst) as u64;
            }
        }
    }
    while reference.stats().from_guest < forwarded && Instant::now() < deadline {
        std::thread::yield_now();
    }
    drop(pairs);
    drop(worker);
    port.stop().unwrap();
    let stats = reference.stop();

    let mut ledger =
        Ledger::new(format!("in_order {in_order}, mergeable {mergeable}, {queues} queue pairs: {stats:?}"));
    ledger.input("reference sends", expected);
    ledger.output("reference received, every byte right", stats.checks.iter().map(|check| check.good).sum());
    ledger.balance().unwrap();
    assert_eq!((stats.from_guest, stats.bad_rings, stats.last_failure), (expected, 0, None));
}
