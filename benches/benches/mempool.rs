//! Bulk get and put. The bar: at most 1 ns an object for both together, in bulks of 32 through the cache.
#![expect(unsafe_code, reason = "objects that nobody owns are put back by address")]

use std::hint::black_box;
use std::mem::MaybeUninit;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pmd::mempool::ring::Sync;
use pmd::mempool::{Mempool, Object, PoolConfig, Worker};

fn pool(cache_size: usize) -> Mempool {
    let config = PoolConfig {
        name: "objects".into(),
        count: 4096,
        object_size: 128,
        cache_size,
        put: Sync::Multi,
        get: Sync::Multi,
    };
    Mempool::new(&config, |_, _| ()).expect("memory for a pool")
}

fn get_put(c: &mut Criterion) {
    let _worker = Worker::enter().expect("a free worker number");
    for (name, cache_size) in [("cache 512", 512), ("no cache", 0)] {
        let mut group = c.benchmark_group(format!("mempool get+put, {name}"));
        let pool = pool(cache_size);
        for bulk in [1, 4, 8, 32, 64, 128] {
            group.throughput(Throughput::Elements(bulk as u64));
            group.bench_function(BenchmarkId::from_parameter(bulk), |b| {
                let mut objects = vec![MaybeUninit::<Object>::uninit(); bulk];
                b.iter(|| {
                    pool.get_bulk(black_box(&mut objects)).expect("more objects than a bulk");
                    // SAFETY: initialised by the successful get.
                    let objects = unsafe { std::slice::from_raw_parts(objects.as_ptr().cast::<Object>(), bulk) };
                    // SAFETY: they were just got, and nobody uses them.
                    unsafe { pool.put_bulk(black_box(objects)) };
                });
            });
        }
    }
}

criterion_group! { name = mempool; config = benches::criterion(); targets = get_put }
criterion_main!(mempool);
