//! What mempools promise: the cache's arithmetic against a plain model of DPDK 26.07's, and what a pool refuses.

mod threads;

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

fn config(count: u32, cache_size: usize) -> PoolConfig {
    let sync = RingSync::Multi;
    PoolConfig { name: "tested".into(), count, object_size: 64, cache_size, put: sync, get: sync }
}

/// Gets `count` objects.
fn get(pool: &Mempool, count: usize) -> Option<Vec<Object>> {
    let mut out = vec![MaybeUninit::uninit(); count];
    // SAFETY: a successful get initialises all of them.
    pool.get_bulk(&mut out).ok().map(|()| out.iter().map(|object| unsafe { object.assume_init() }).collect())
}

/// Puts `objects`, which came from `get`.
fn put(pool: &Mempool, objects: &[Object]) {
    // SAFETY: callers give up what they got.
    unsafe { pool.put_bulk(objects) };
}

/// Every object is home, in the pool once, and nothing else is.
fn audit(pool: &Mempool) {
    assert_eq!((pool.available(), pool.in_use()), (pool.count(), 0));
    let mut all = get(pool, pool.count()).expect("all of them can be had");
    assert!(get(pool, 1).is_none(), "more than all of them");
    put(pool, &all);
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), pool.count(), "the same object twice");
}

/// A pool of one worker: DPDK 26.07's `rte_mempool_do_generic_{put,get}`, in plain words.
struct Model {
    size: usize,
    /// Newest last.
    cache: Vec<Object>,
    /// Oldest first.
    ring: VecDeque<Object>,
    stats: PoolStats,
}

impl Model {
    fn put(&mut self, objects: &[Object]) {
        self.stats.put_bulks += 1;
        self.stats.put_objects += objects.len() as u64;
        if self.cache.len() + objects.len() <= self.size {
            self.cache.extend(objects);
            return;
        }
        self.stats.ring_puts += 1;
        if objects.len() > self.size / 2 {
            self.ring.extend(objects);
        } else {
            self.ring.extend(self.cache.drain(..self.size / 2));
            self.cache.extend(objects);
        }
    }

    fn get(&mut self, count: usize) -> Option<Vec<Object>> {
        let missing = count.saturating_sub(self.cache.len());
        let half = self.size / 2;
        self.stats.ring_gets += u64::from(missing > 0);
        if missing > self.ring.len() {
            self.stats.get_failures += 1;
            return None;
        }
        self.stats.get_bulks += 1;
        self.stats.get_objects += count as u64;
        let mut out: Vec<Object> = self.cache.drain(self.cache.len() - (count - missing)..).rev().collect();
        if missing > 0 && missing <= half && half <= self.ring.len() {
            self.cache.extend(self.ring.drain(..half));
            out.extend(self.cache.drain(half - missing..).rev());
        } else {
            out.extend(self.ring.drain(..missing));
        }
        Some(out)
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Get(usize),
    /// So many of those that are out, the oldest first.
    Put(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![(0..=24usize).prop_map(Step::Get), (0..=24usize).prop_map(Step::Put)];
    prop::collection::vec(step, 1..200)
}

proptest! {
    /// Which objects come, from where, in which order, and what is counted: with caches that are too small for the bulks, odd ones,
    /// and pools that run empty.
    #[test]
    fn the_cache_does_what_dpdks_does(size in 1..=16usize, more in 0..=40u32, steps in steps()) {
        let pool = Mempool::new(&config(size as u32 + more, size), |_, _| ()).unwrap();
        let _worker = Worker::enter().unwrap();
        let ring = (0..pool.count()).map(|i| pool.core.object(i)).collect();
        let mut model = Model { size, cache: Vec::new(), ring, stats: PoolStats::default() };
        let mut out = VecDeque::new();
        for step in steps {
            match step {
                Step::Get(count) => {
                    let got = get(&pool, count);
                    prop_assert_eq!(&got, &model.get(count), "{:?}", step);
                    out.extend(got.into_iter().flatten());
                }
                Step::Put(count) => {
                    let objects: Vec<_> = out.drain(..count.min(out.len())).collect();
                    put(&pool, &objects);
                    model.put(&objects);
                }
            }
            prop_assert_eq!(pool.stats(), model.stats, "after {:?}", step);
            prop_assert_eq!(pool.in_use(), out.len());
        }
        put(&pool, out.make_contiguous());
        audit(&pool);
    }

    #[test]
    fn a_thread_without_a_cache_is_served_by_the_ring_and_counted(count in 1..=40u32, steps in steps()) {
        let pool = Mempool::new(&config(count, 1), |_, _| ()).unwrap();
        let (mut out, mut expected) = (Vec::new(), PoolStats::default());
        for step in steps {
            match step {
                Step::Get(count) => {
                    let served = count <= pool.count() - out.len();
                    let got = get(&pool, count);
                    prop_assert_eq!(got.is_some(), served, "{:?} with {} out", step, out.len());
                    out.extend(got.into_iter().flatten());
                    expected.uncached_gets += 1;
                }
                Step::Put(count) => {
                    put(&pool, &out.split_off(out.len().saturating_sub(count)));
                    expected.uncached_puts += 1;
                }
            }
            prop_assert_eq!((pool.stats(), pool.in_use()), (expected, out.len()));
        }
        put(&pool, &out);
        audit(&pool);
    }
}

#[test]
fn a_pool_out_of_range_is_refused_in_one_sentence() {
    type Change = fn(&mut PoolConfig);
    let refused: [(Change, &str); 7] = [
        (|c| c.count = 0, "mempool tested: count 0 is outside 1..=1073741824"),
        (|c| c.count = COUNT_MAX + 1, "mempool tested: count 1073741825 is outside 1..=1073741824"),
        (|c| c.cache_size = 513, "mempool tested: cache size 513 is outside 0..=512"),
        (|c| (c.count, c.cache_size) = (64, 65), "mempool tested: cache size 65 is outside 0..=64"),
        (|c| c.object_size = 0, "mempool tested: object size 0 is outside 1..=1073741824"),
        (|c| c.object_size = (1 << 30) + 1, "mempool tested: object size 1073741825 is outside 1..=1073741824"),
        (
            |c| (c.count, c.object_size) = (COUNT_MAX, 1 << 30),
            "mempool tested: no memory for 1073741824 objects of 1073741824 bytes: Cannot allocate memory (os error 12); use fewer",
        ),
    ];
    for (change, sentence) in refused {
        let mut config = config(1024, 32);
        change(&mut config);
        assert_eq!(Mempool::new(&config, |_, _| ()).unwrap_err().to_string(), sentence);
    }
    for cache_size in [0, 1, CACHE_SIZE_MAX] {
        audit(&Mempool::new(&config(512, cache_size), |_, _| ()).unwrap());
    }
}
