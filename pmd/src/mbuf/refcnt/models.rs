//! Holders of one mbuf let go at the same time: exactly one is told that it was the last, and what the others did to the mbuf
//! happened before that; loom reports accesses that nothing orders.

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread;

use super::Refcnt;

struct Shared {
    refcnt: Refcnt,
    /// What each holder writes; the last one alone writes all of them.
    parts: Vec<UnsafeCell<()>>,
}

impl Shared {
    /// An mbuf of `holders`.
    fn new(holders: usize) -> Arc<Self> {
        let refcnt = Refcnt::one();
        assert!((1..holders).all(|_| refcnt.add()));
        Arc::new(Self { refcnt, parts: (0..holders).map(|_| UnsafeCell::new(())).collect() })
    }

    /// Uses the mbuf.
    fn write(&self, holder: usize) {
        // An access as loom sees it.
        self.parts[holder].with_mut(|_| ());
    }

    /// Uses the mbuf and lets go; whether that was the last holder, who then reuses all of it.
    fn release(&self, holder: usize) -> bool {
        self.write(holder);
        let last = self.refcnt.release();
        if last {
            (0..self.parts.len()).for_each(|part| self.write(part));
            assert!(self.refcnt.is_one(), "as a header lies in its pool");
        }
        last
    }
}

fn one_of_them_is_last(holders: usize) {
    loom::model(move || {
        let mbuf = Shared::new(holders);
        let others: Vec<_> = (1..holders)
            .map(|holder| {
                let mbuf = Arc::clone(&mbuf);
                thread::spawn(move || mbuf.release(holder))
            })
            .collect();
        let mut last = usize::from(mbuf.release(0));
        for other in others {
            last += usize::from(other.join().unwrap());
        }
        assert_eq!(last, 1);
    });
}

#[test]
fn of_two_holders_exactly_one_is_the_last() {
    one_of_them_is_last(2);
}

#[test]
fn of_three_holders_exactly_one_is_the_last() {
    one_of_them_is_last(3);
}

#[test]
fn whoever_finds_itself_alone_may_write_what_others_used() {
    loom::model(|| {
        let mbuf = Shared::new(2);
        let other = thread::spawn({
            let mbuf = Arc::clone(&mbuf);
            move || mbuf.release(1)
        });
        if mbuf.refcnt.is_one() {
            mbuf.write(1);
        }
        let last = mbuf.release(0);
        assert!(last ^ other.join().unwrap());
    });
}
