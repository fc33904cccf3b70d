//! The mempool's ring under every interleaving: nothing is lost, nothing is handed out twice, a bulk is served in full or not at
//! all, and what was done to an object before it was put happened before it was got.
//!
//! Objects are small numbers; what one holds is a cell of loom's, which reports accesses that nothing orders. All cursors start
//! just before their end, so that they and the slots wrap.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::*;

const SINGLE: Sync = Sync::Single(Promise(()));

struct Pool {
    ring: Ring,
    contents: Vec<UnsafeCell<()>>,
}

impl Pool {
    /// `count` objects, of which the first `inside` are in a ring of `capacity`.
    fn new(capacity: u32, count: usize, inside: usize, (put, get): (Sync, Sync)) -> Arc<Self> {
        let ring = Ring::new(capacity, put, get);
        for cursor in [&ring.put, &ring.get] {
            cursor.head.store(u32::MAX, Ordering::Relaxed);
            cursor.tail.store(u32::MAX, Ordering::Relaxed);
        }
        let pool = Arc::new(Self { ring, contents: (0..count).map(|_| UnsafeCell::new(())).collect() });
        assert!(inside == 0 || pool.put(&(0..inside).collect::<Vec<_>>()));
        pool
    }

    /// Uses each object, which must be nobody else's.
    fn touch(&self, objects: &[usize]) {
        for &object in objects {
            // An access as loom sees it: it reports one that is not ordered with that of the last user.
            self.contents[object].with_mut(|_| ());
        }
    }

    /// Uses the objects and puts them.
    fn put(&self, objects: &[usize]) -> bool {
        self.touch(objects);
        // An address that is not null.
        self.ring.put(objects.len(), |i| std::ptr::without_provenance_mut(objects[i] + 1))
    }

    /// Gets `count` objects and uses them.
    fn get(&self, count: usize) -> Option<Vec<usize>> {
        let mut objects = Vec::new();
        if !self.ring.get(count, |_, object| objects.push(object.addr().checked_sub(1).expect("an empty slot"))) {
            assert!(objects.is_empty(), "part of a bulk");
            return None;
        }
        assert_eq!(objects.len(), count);
        self.touch(&objects);
        Some(objects)
    }

    /// Every object is in the ring or in `outside`, once.
    fn audit(&self, outside: impl IntoIterator<Item = usize>) {
        let mut all: Vec<usize> = outside.into_iter().chain(self.get(self.ring.len()).unwrap()).collect();
        all.sort_unstable();
        assert!(all.iter().copied().eq(0..self.contents.len()), "not every object once: {all:?}");
        assert!(self.ring.is_empty() && self.get(1).is_none());
    }
}

fn spawn<T: 'static>(pool: &Arc<Pool>, run: impl Fn(&Pool) -> T + 'static) -> thread::JoinHandle<T> {
    let pool = Arc::clone(pool);
    thread::spawn(move || run(&pool))
}

#[test]
fn two_workers_get_and_put_at_once() {
    loom::model(|| {
        let pool = Pool::new(2, 2, 2, (Sync::Multi, Sync::Multi));
        let turn = |pool: &Pool| {
            let got = pool.get(1).expect("one for each");
            assert!(pool.put(&got), "there is room for every object");
        };
        let other = spawn(&pool, turn);
        turn(&pool);
        other.join().unwrap();
        pool.audit([]);
    });
}

#[test]
fn an_empty_bulk_disturbs_nobody() {
    loom::model(|| {
        let pool = Pool::new(2, 2, 1, (Sync::Multi, Sync::Multi));
        let other = spawn(&pool, |pool| assert!(pool.put(&[]) && pool.get(0).is_some()));
        let got = pool.get(1).expect("there is one");
        assert!(pool.put(&[1]));
        other.join().unwrap();
        pool.audit(got);
    });
}

#[test]
fn a_bulk_from_two_producers_is_complete() {
    loom::model(|| {
        let pool = Pool::new(2, 2, 0, (Sync::Multi, Sync::Multi));
        let producers = [0, 1].map(|object| spawn(&pool, move |pool| assert!(pool.put(&[object]))));
        let got = pool.get(2);
        for producer in producers {
            producer.join().unwrap();
        }
        pool.audit(got.into_iter().flatten());
    });
}

#[test]
fn one_object_goes_to_one_of_two_consumers() {
    loom::model(|| {
        let pool = Pool::new(2, 1, 0, (Sync::Multi, Sync::Multi));
        let consumers = [(); 2].map(|()| spawn(&pool, |pool| pool.get(1)));
        assert!(pool.put(&[0]));
        let got = consumers.map(|consumer| consumer.join().unwrap());
        pool.audit(got.into_iter().flatten().flatten());
    });
}

#[test]
fn one_place_goes_to_one_of_two_producers() {
    loom::model(|| {
        let pool = Pool::new(1, 3, 1, (Sync::Multi, Sync::Multi));
        let producers =
            [1, 2].map(|object| spawn(&pool, move |pool| if pool.put(&[object]) { None } else { Some(object) }));
        let got = pool.get(1);
        let left = producers.map(|producer| producer.join().unwrap());
        pool.audit(left.into_iter().flatten().chain(got.into_iter().flatten()));
    });
}

#[test]
fn of_two_bulks_that_do_not_both_fit_one_is_served() {
    loom::model(|| {
        let pool = Pool::new(4, 3, 3, (Sync::Multi, Sync::Multi));
        let other = spawn(&pool, |pool| pool.get(2));
        let got = [pool.get(2), other.join().unwrap()];
        assert_eq!(got.iter().flatten().count(), 1);
        pool.audit(got.into_iter().flatten().flatten());
    });
}

#[test]
fn one_producer_and_one_consumer_need_no_turns() {
    loom::model(|| {
        let pool = Pool::new(2, 3, 2, (SINGLE, SINGLE));
        let consumer = spawn(&pool, |pool| [pool.get(1), pool.get(2)]);
        let left = if pool.put(&[2]) { None } else { Some(2) };
        let got = consumer.join().unwrap();
        pool.audit(got.into_iter().flatten().flatten().chain(left));
    });
}
