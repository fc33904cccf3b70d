//! Each end of a ring, alone: one end runs through the whole ring, burst by burst, on the clock; then the other, off it.
//!
//! The bars for the device's ring work (pop, translate, complete, flush; no copy), in ns a packet: split 2.5, packed 3.5,
//! packed and in order 2.5. The rows `split` and `split-mergeable`, same end, show that a plain path does not pay for
//! mergeable buffers.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend::queue::config::{Position, QueueConfig};
use backend::queue::{DeviceRing, packed, split};
use benches::{BURST, generate, pairs, setup};
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use pmd::mempool::Worker;
use pmd::port::Burst;
use pmd::virtio::Doorbell;
use pmd::virtio::packed::PackedRing;
use pmd::virtio::ring::DriverRing;
use pmd::virtio::spec::feature::{IN_ORDER, RING_PACKED};
use pmd::virtio::split::SplitRing;
use testbed::rings::{Direction, Guest, Pair};

/// Descriptors of the rings.
const RING: usize = 256;
/// Chains that the device's bursts take together.
const GROUP: usize = 8;

/// A device that polls is never kicked.
struct Mute;

impl Doorbell for Mute {
    fn ring(&self) {}
}

/// A group whose iterations are rounds of a whole ring.
fn group<'a>(c: &'a mut Criterion, name: &str) -> BenchmarkGroup<'a, WallTime> {
    let mut group = c.benchmark_group(name);
    group.throughput(Throughput::Elements(RING as u64));
    group
}

/// One round: the driver offers a ring full of buffers; the device's time to use them all up; the driver takes them back.
fn use_up(driver: &mut impl DriverRing, device: &mut impl DeviceRing, buffer: u64) -> Duration {
    for _ in 0..RING {
        let id = driver.next_id();
        driver.desc(buffer + 2048 * u64::from(id), 2048, 0);
        driver.push(id);
    }
    driver.publish();

    let start = Instant::now();
    for _ in 0..RING / BURST {
        let mut at = device.begin().expect("an honest driver");
        let memory = device.memory();
        let mut window = memory.window(0);
        for _ in 0..BURST / GROUP {
            let Some(chains) = device.pop_group::<GROUP>(&mut at, false) else { break };
            black_box::<[_; GROUP]>(std::array::from_fn(|i| chains[i].bytes(memory, &mut window)));
            device.complete_group(&mut at, &chains, [0; GROUP]);
        }
        device.flush(at);
    }
    let time = start.elapsed();

    // In order, a batch may be told at a time.
    let mut left = RING as u16;
    while left > 0 {
        let ready = driver.ready(left, |_| 1).map_or(0, |ready| ready.min(left));
        assert!(ready > 0, "a buffer was not used up");
        for _ in 0..ready {
            let (id, _) = driver.pop(0, |_| 1);
            driver.reclaim(id as u16, id as u16, 1);
        }
        left -= ready;
    }
    time
}

/// A guest with a buffer for each descriptor, and what its device is told of the ring.
fn guest(features: u64) -> (Guest, QueueConfig) {
    let mut setup = setup(features);
    setup.scratch = RING * 2048;
    let guest = Guest::new(&setup).expect("memory for a guest");
    let layout = guest.layout();
    let config = QueueConfig {
        index: 1,
        size: layout.size,
        features: guest.features(),
        memory: Arc::clone(guest.memory()),
        desc_user_addr: layout.desc,
        avail_user_addr: layout.avail,
        used_user_addr: layout.used,
        // Both wrap counters of a packed ring begin at 1.
        position: if features & RING_PACKED != 0 { 0x8000_8000 } else { 0 },
        kick: None,
        call: None,
        record: None,
    };
    (guest, config)
}

fn device_ring(c: &mut Criterion) {
    let mut group = group(c, "device ring work");
    let mut row = |name: &str, guest: &Guest, driver: &mut dyn FnMut(u64) -> Duration| {
        let span = guest.arena().alloc(RING * 2048, 64).expect("the scratch space");
        let buffer = span.iova(0);
        group.bench_function(name, |b| b.iter_custom(|iters| (0..iters).map(|_| driver(buffer)).sum()));
    };
    let position = Position::default;

    let (guest_of, config) = guest(0);
    let mut driver = SplitRing::<false>::new(guest_of.layout(), Box::new(Mute));
    let mut device = split::SplitRing::<false>::activate(config, position()).expect("a ring");
    row("split", &guest_of, &mut |buffer| use_up(&mut driver, &mut device, buffer));

    let (guest_of, config) = guest(IN_ORDER);
    let mut driver = SplitRing::<true>::new(guest_of.layout(), Box::new(Mute));
    let mut device = split::SplitRing::<true>::activate(config, position()).expect("a ring");
    row("split-in-order", &guest_of, &mut |buffer| use_up(&mut driver, &mut device, buffer));

    let (guest_of, config) = guest(RING_PACKED);
    let mut driver = PackedRing::<false>::new(guest_of.layout(), Box::new(Mute));
    let mut device = packed::PackedRing::<false>::activate(config, position()).expect("a ring");
    row("packed", &guest_of, &mut |buffer| use_up(&mut driver, &mut device, buffer));

    let (guest_of, config) = guest(RING_PACKED | IN_ORDER);
    let mut driver = PackedRing::<true>::new(guest_of.layout(), Box::new(Mute));
    let mut device = packed::PackedRing::<true>::activate(config, position()).expect("a ring");
    row("packed-in-order", &guest_of, &mut |buffer| use_up(&mut driver, &mut device, buffer));
}

/// One round: a ring full of frames is sent, then received, in bursts; the times that the ends take, mbufs' way to and from the
/// application not included.
fn round(pair: &mut Pair, bursts: &mut [Burst]) -> (Duration, Duration) {
    for burst in &mut *bursts {
        generate(burst, pair.sender_pool());
    }
    let start = Instant::now();
    for burst in &mut *bursts {
        pair.sender.queue.tx_burst(burst);
    }
    let sent = start.elapsed();
    assert!(bursts.iter().all(Burst::is_empty), "{pair}: full");

    let start = Instant::now();
    for burst in &mut *bursts {
        pair.receiver.queue.rx_burst(burst);
    }
    let received = start.elapsed();
    for burst in &mut *bursts {
        assert_eq!(burst.free(), BURST, "{pair}");
    }
    (sent, received)
}

/// Rows of one end for a direction: the path, and the time that this end takes of a round.
fn end(c: &mut Criterion, name: &str, direction: Direction, sender: bool) {
    let _worker = Worker::enter().expect("a free worker number");
    let mut group = group(c, name);
    let mut done: Vec<&str> = Vec::new();
    for mut pair in pairs(direction) {
        let path = if sender { pair.sender.path } else { pair.receiver.path };
        // The device has fewer paths towards the guest than the driver.
        if done.contains(&path) {
            continue;
        }
        done.push(path);
        let mut bursts: Vec<Burst> = (0..RING / BURST).map(|_| Burst::new(BURST)).collect();
        group.bench_function(path, |b| {
            b.iter_custom(|iters| {
                let rounds = (0..iters).map(|_| round(&mut pair, &mut bursts));
                rounds.map(|(sent, received)| if sender { sent } else { received }).sum()
            });
        });
    }
}

fn ends(c: &mut Criterion) {
    end(c, "driver receives", Direction::ToGuest, false);
    end(c, "driver transmits", Direction::FromGuest, true);
    end(c, "device to guest", Direction::ToGuest, true);
    end(c, "device from guest", Direction::FromGuest, false);
}

criterion_group! { name = rings; config = benches::criterion(); targets = device_ring, ends }
criterion_main!(rings);
