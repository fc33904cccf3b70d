//! Mbufs from the pool and back, and what a generator pays for its choices (the study that followed DPDK's split of the mbuf
//! into two cache lines): one by one or in bulk, a cache of half a burst or of two, one line reset or both.

use std::collections::VecDeque;

use benches::BURST;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pmd::mbuf::{Mbuf, MbufPool, MbufPoolConfig, TxOffload};
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;

/// Packets in a generator's burst.
const GENERATED: usize = 64;
/// Packets that a transmit ring holds before it gives any back.
const IN_FLIGHT: usize = 512;

fn pool(cache_size: usize) -> MbufPool {
    let config = MbufPoolConfig { count: 8192, cache_size, ..MbufPoolConfig::default() };
    let arena = Arena::new(config.arena_bytes(), &Pages::Plain).expect("memory for an arena");
    MbufPool::new(&config, &arena).expect("memory for a pool")
}

fn alloc_free(c: &mut Criterion) {
    let _worker = Worker::enter().expect("a free worker number");
    let (pool, mut mbufs) = (pool(512), Vec::with_capacity(BURST));
    let mut group = c.benchmark_group("mbuf alloc+free");
    group.throughput(Throughput::Elements(BURST as u64));
    group.bench_function("bulk", |b| {
        b.iter(|| {
            pool.alloc_bulk(&mut mbufs, BURST).expect("more mbufs than a burst");
            Mbuf::free_bulk(mbufs.drain(..));
        });
    });
    group.bench_function("raw bulk", |b| {
        b.iter(|| {
            pool.raw_alloc_bulk(&mut mbufs, BURST).expect("more mbufs than a burst");
            Mbuf::free_bulk(mbufs.drain(..));
        });
    });
    group.bench_function("one by one", |b| {
        b.iter(|| {
            mbufs.extend((0..BURST).map_while(|_| pool.alloc()));
            mbufs.drain(..).for_each(drop);
        });
    });
}

/// A transmit queue whose device is infinitely fast, but whose mbufs come back late and cold.
struct NullTx(VecDeque<Mbuf>);

impl NullTx {
    fn send(&mut self, mbufs: &mut Vec<Mbuf>) {
        self.0.extend(mbufs.drain(..));
        if self.0.len() > IN_FLIGHT {
            Mbuf::free_bulk(self.0.drain(..GENERATED));
        }
    }
}

fn generator(c: &mut Criterion) {
    let _worker = Worker::enter().expect("a free worker number");
    let mut group = c.benchmark_group("generator into a null Tx, bursts of 64");
    group.throughput(Throughput::Elements(GENERATED as u64));
    for cache_size in [GENERATED / 2, 2 * GENERATED] {
        let pool = pool(cache_size);
        for (lines, both) in [("one line", false), ("two lines", true)] {
            for (name, bulk) in [("one by one", false), ("bulk", true)] {
                let id = BenchmarkId::new(name, format!("cache {cache_size}, {lines}"));
                group.bench_function(id, |b| {
                    let mut tx = NullTx(VecDeque::with_capacity(IN_FLIGHT + GENERATED));
                    let mut mbufs = Vec::with_capacity(GENERATED);
                    b.iter(|| {
                        if bulk {
                            pool.alloc_bulk(&mut mbufs, GENERATED).expect("more mbufs than are in flight");
                        } else {
                            mbufs.extend((0..GENERATED).map_while(|_| pool.alloc()));
                        }
                        for mbuf in &mut mbufs {
                            assert!(mbuf.set_len(60));
                            if both {
                                // Its lengths lie in the second line.
                                mbuf.set_tx_offload(TxOffload::default());
                            }
                        }
                        tx.send(&mut mbufs);
                    });
                });
            }
        }
    }
}

criterion_group! { name = mbuf; config = benches::criterion(); targets = alloc_free, generator }
criterion_main!(mbuf);
