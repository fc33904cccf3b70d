//! Several threads on one pool: no object is lost, none has two owners, and what a worker leaves behind is not stranded.

use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::mpsc::channel;

use super::*;

const SINGLE: RingSync = {
    // SAFETY: the tests that use it have one thread on that side, and say which.
    unsafe { RingSync::single() }
};

/// Who has which object: 0 if it is home.
struct Ledger(HashMap<Object, AtomicUsize>);

// SAFETY: the addresses are only compared.
unsafe impl Sync for Ledger {}

impl Ledger {
    fn new(pool: &Mempool) -> Self {
        Self((0..pool.count()).map(|i| (pool.core.object(i), AtomicUsize::new(0))).collect())
    }

    fn pass(&self, objects: &[Object], from: usize, to: usize) {
        for object in objects {
            assert_eq!(
                self.0[object].swap(to, Ordering::AcqRel),
                from,
                "{object:?} belongs to somebody else than {from}"
            );
        }
    }
}

/// Gets and puts bulks of changing size, `turns` times, and puts everything home.
fn churn(pool: &Mempool, ledger: &Ledger, me: usize, turns: usize) {
    let mut mine = Vec::new();
    for turn in 0..turns {
        // A walk through all sizes, another one for each thread.
        let size = turn * (2 * me + 1) % 41;
        if turn % 3 < 2
            && let Some(got) = get(pool, size)
        {
            ledger.pass(&got, 0, me);
            mine.extend(got);
        }
        if turn % 3 > 0 {
            let back = mine.split_off(mine.len().saturating_sub(size));
            ledger.pass(&back, me, 0);
            put(pool, &back);
        }
    }
    ledger.pass(&mine, me, 0);
    put(pool, &mine);
}

#[test]
fn threads_with_and_without_a_cache_share_a_pool() {
    // Too few for all at once, and no power of two.
    let pool = Mempool::new(&config(100, 16), |_, _| ()).unwrap();
    let (ledger, start) = (Ledger::new(&pool), Barrier::new(4));
    std::thread::scope(|scope| {
        for me in 1..=4 {
            let (pool, ledger, start) = (&pool, &ledger, &start);
            scope.spawn(move || {
                let _worker = (me < 3).then(|| Worker::enter().unwrap());
                start.wait();
                churn(pool, ledger, me, 20_000);
            });
        }
    });
    let stats = pool.stats();
    assert!(
        stats.get_objects > 0 && stats.uncached_gets > 0 && stats.ring_gets > 0 && stats.ring_puts > 0,
        "{stats:?}"
    );
    audit(&pool);
}

#[test]
fn objects_come_and_go_while_the_list_of_pools_is_locked() {
    let pool = Mempool::new(&config(100, 16), |_, _| ()).unwrap();
    let (ledger, (done, finished)) = (Ledger::new(&pool), channel());
    std::thread::scope(|scope| {
        let registry = Registry::lock();
        scope.spawn(|| {
            churn(&pool, &ledger, 1, 200);
            // Its end takes the lock, and waits for it.
            let _worker = Worker::enter().unwrap();
            churn(&pool, &ledger, 1, 2000);
            done.send(()).unwrap();
        });
        finished.recv_timeout(std::time::Duration::from_secs(60)).expect("the packet path waits for the lock");
        drop(registry);
    });
    audit(&pool);
}

#[test]
fn one_thread_gets_and_another_puts() {
    for (put_sync, get_sync) in [(SINGLE, SINGLE), (RingSync::Multi, SINGLE), (SINGLE, RingSync::Multi)] {
        for cache_size in [0, 16] {
            let config = PoolConfig { put: put_sync, get: get_sync, ..config(100, cache_size) };
            let pool = Mempool::new(&config, |_, _| ()).unwrap();
            let ledger = Ledger::new(&pool);
            let (to_putter, from_getter) = channel::<Vec<usize>>();
            // The getter is this thread. It ends, and empties its cache, after the putter.
            let worker = Worker::enter().unwrap();
            std::thread::scope(|scope| {
                let (pool, ledger) = (&pool, &ledger);
                scope.spawn(move || {
                    let _worker = Worker::enter().unwrap();
                    for addresses in from_getter {
                        let objects: Vec<_> =
                            ledger.0.keys().copied().filter(|o| addresses.contains(&o.addr().get())).collect();
                        ledger.pass(&objects, 1, 0);
                        put(pool, &objects);
                    }
                });
                for turn in 0..2000 {
                    if let Some(got) = get(pool, turn % 41) {
                        ledger.pass(&got, 0, 1);
                        to_putter.send(got.iter().map(|object| object.addr().get()).collect()).unwrap();
                    }
                }
                drop(to_putter);
            });
            drop(worker);
            audit(&pool);
        }
    }
}

#[test]
fn a_worker_that_ends_strands_nothing() {
    let pool = Mempool::new(&config(64, 32), |_, _| ()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _worker = Worker::enter().unwrap();
            put(&pool, &get(&pool, 20).unwrap());
            assert!(pool.core.ring.len() < pool.count(), "some are in the cache");
        });
    });
    assert_eq!(pool.core.ring.len(), pool.count());
    audit(&pool);
}

#[test]
fn a_worker_that_panics_strands_nothing() {
    let mbufs = crate::mbuf::MbufPoolConfig { count: 64, cache_size: 32, ..Default::default() };
    let arena = crate::mem::Arena::new(mbufs.arena_bytes(), &crate::mem::Pages::Plain).unwrap();
    let mbufs = crate::mbuf::MbufPool::new(&mbufs, &arena).unwrap();
    // The worker goes before its mbufs, or after them.
    for worker_first in [true, false] {
        let pool = mbufs.clone();
        let fate = std::thread::spawn(move || {
            let mut outlive_it = Vec::new();
            let _worker = Worker::enter().unwrap();
            let mut go_first = Vec::new();
            pool.alloc_bulk(if worker_first { &mut outlive_it } else { &mut go_first }, 20).unwrap();
            panic!("the worker's own mistake");
        })
        .join();
        assert!(fate.is_err());
        assert_eq!(mbufs.mempool().core.ring.len(), 64, "worker first: {worker_first}");
        audit(mbufs.mempool());
    }
}
