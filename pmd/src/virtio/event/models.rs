//! No wake-up is lost, whatever the interleaving: a sleeper asks, looks once more and sleeps, while a publisher publishes two
//! entries one by one and wakes it if it was asked to.
//!
//! loom models fences; it takes sequentially consistent accesses for acquire and release ones. The code relies on fences alone. Each
//! model fails when either fence is taken out.

use std::sync::Arc;

use loom::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use loom::thread;

use super::{PackedWish, SplitWish};
use crate::virtio::spec::PackedPos;

const ENTRIES: u16 = 2;

/// Entries that had been seen when the sleeper went to sleep, if it did; with those whose publication was to wake it, by the number
/// of entries that were there then.
fn judge(slept_after: Option<u16>, woken_at: &[u16]) {
    if let Some(seen) = slept_after.filter(|&seen| seen < ENTRIES) {
        assert!(
            woken_at.iter().any(|&at| at > seen),
            "asleep after {seen} of {ENTRIES} entries, woken at {woken_at:?}"
        );
    }
}

/// Sees what there is, asks, and looks once more: how many entries it had seen when it found nothing new.
fn sleep(mut seen: u16, look: impl Fn() -> u16, ask: impl Fn(u16)) -> Option<u16> {
    for _ in 0..=ENTRIES {
        ask(seen);
        let there = look();
        if there == seen {
            return Some(seen);
        }
        seen = there;
    }
    None
}

fn split(wish: for<'a> fn(&'a AtomicU16) -> SplitWish<'a>) {
    loom::model(move || {
        let (idx, word) = (Arc::new(AtomicU16::new(0)), Arc::new(AtomicU16::new(0)));
        wish(&word).refuse(0);
        let publisher = thread::spawn({
            let (idx, word) = (Arc::clone(&idx), Arc::clone(&word));
            move || {
                (0..ENTRIES)
                    .filter(|&old| wish(&word).publish(&idx, old, old + 1))
                    .map(|old| old + 1)
                    .collect::<Vec<_>>()
            }
        });
        let slept = sleep(0, || idx.load(Ordering::Acquire), |next| wish(&word).ask(next));
        judge(slept, &publisher.join().unwrap());
    });
}

#[test]
fn split_flags_lose_no_wake_up() {
    split(|word| SplitWish::Flags(word));
}

#[test]
fn split_event_index_loses_no_wake_up() {
    split(|word| SplitWish::Entry(word));
}

/// A ring of two descriptors, each of which says only whether it is there.
fn packed(by_place: bool) {
    const SIZE: u16 = 2;
    let place = |n: u16| PackedPos::START.advance(n, SIZE);
    loom::model(move || {
        let descs: Arc<[AtomicU16; ENTRIES as usize]> = Arc::new([AtomicU16::new(0), AtomicU16::new(0)]);
        let word = Arc::new(AtomicU32::new(0));
        PackedWish(&word).refuse();
        let publisher = thread::spawn({
            let (descs, word) = (Arc::clone(&descs), Arc::clone(&word));
            move || {
                let publish = |&old: &u16| {
                    descs[usize::from(old)].store(1, Ordering::Release);
                    PackedWish(&word).wanted(place(old), place(old + 1), SIZE)
                };
                (0..ENTRIES).filter(publish).map(|old| old + 1).collect::<Vec<_>>()
            }
        });
        let look = || descs.iter().take_while(|desc| desc.load(Ordering::Acquire) == 1).count() as u16;
        let slept = sleep(0, look, |next| PackedWish(&word).ask(place(next), by_place));
        judge(slept, &publisher.join().unwrap());
    });
}

#[test]
fn packed_flags_lose_no_wake_up() {
    packed(false);
}

#[test]
fn packed_places_lose_no_wake_up() {
    packed(true);
}
