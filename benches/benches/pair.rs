//! Both ends of each path back to back on one core: `rxonly` (a generator, a ring, a sink) and `io` (a guest transmits, the host
//! forwards, another guest receives).

use benches::{BURST, generate, pairs, setup};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pmd::mempool::Worker;
use pmd::port::Burst;
use pmd::virtio::paths::RX_PATHS;
use testbed::rings::{Direction, Guest, Pair};

fn rxonly(c: &mut Criterion) {
    let _worker = Worker::enter().expect("a free worker number");
    for (name, direction) in [("to guest", Direction::ToGuest), ("from guest", Direction::FromGuest)] {
        let mut group = c.benchmark_group(format!("rxonly, {name}"));
        group.throughput(Throughput::Elements(BURST as u64));
        for mut pair in pairs(direction) {
            let driver = if direction == Direction::ToGuest { pair.receiver.path } else { pair.sender.path };
            let (mut going, mut coming) = (Burst::new(BURST), Burst::new(BURST));
            group.bench_function(BenchmarkId::from_parameter(driver), |b| {
                b.iter(|| {
                    generate(&mut going, pair.sender_pool());
                    pair.sender.queue.tx_burst(&mut going);
                    pair.receiver.queue.rx_burst(&mut coming);
                    assert_eq!(coming.free(), BURST);
                });
            });
        }
    }
}

fn io(c: &mut Criterion) {
    let _worker = Worker::enter().expect("a free worker number");
    let mut group = c.benchmark_group("io, guest to guest");
    group.throughput(Throughput::Elements(BURST as u64));
    for row in RX_PATHS {
        let setup = setup(row.with);
        let mut first = Pair::new(Direction::FromGuest, &setup).expect("memory for a pair");
        let guest = Guest::new(&setup).expect("memory for a guest");
        let mut second = Pair::with(Direction::ToGuest, guest, first.host.clone()).expect("memory for a pair");
        let mut burst = Burst::new(BURST);
        group.bench_function(row.name, |b| {
            b.iter(|| {
                generate(&mut burst, first.sender_pool());
                first.sender.queue.tx_burst(&mut burst);
                first.receiver.queue.rx_burst(&mut burst);
                second.sender.queue.tx_burst(&mut burst);
                second.receiver.queue.rx_burst(&mut burst);
                assert_eq!(burst.free(), BURST);
            });
        });
    }
}

criterion_group! { name = pair; config = benches::criterion(); targets = rxonly, io }
criterion_main!(pair);
