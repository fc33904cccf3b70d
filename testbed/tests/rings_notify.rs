//! An end wakes the other exactly when that asks for it: one kick or call for each burst that has something new, and none while
//! it is suppressed by flags (virtio 1.3, 2.7.7 and 2.7.10).

use pmd::virtio::spec::{AVAIL_F_NO_INTERRUPT, USED_F_NO_NOTIFY};
use testbed::frame::Stream;
use testbed::rings::{Direction, Pair, RawRing, Setup, Traffic};

const BURST: usize = 32;

fn pairs() -> impl Iterator<Item = Pair> {
    let sets = |direction: Direction| direction.split_sets().into_iter().map(move |f| (direction, f));
    let all = Direction::ALL.into_iter().flat_map(sets);
    all.map(|(direction, features)| {
        let pair = Pair::new(direction, &Setup::new(features)).unwrap();
        // What a driver kicks before the device runs is not counted here.
        let _ = (pair.sender.bell.take(), pair.receiver.bell.take());
        pair
    })
}

/// Wake-ups by the sender and by the receiver in one round of a full burst.
fn round(pair: &mut Pair, traffic: &mut Traffic) -> (u64, u64) {
    assert_eq!((traffic.send(pair, BURST), traffic.receive(pair)), (BURST, BURST), "{pair}");
    (pair.sender.bell.take(), pair.receiver.bell.take())
}

fn traffic() -> Traffic {
    Traffic::new(&Stream::new(21, 1, 60..=60), 60, BURST)
}

/// Says whether each end wants to be woken.
fn ask(raw: &RawRing, wanted: bool) {
    raw.set_avail_flags(if wanted { 0 } else { AVAIL_F_NO_INTERRUPT });
    raw.set_used_flags(if wanted { 0 } else { USED_F_NO_NOTIFY });
}

#[test]
fn two_polling_ends_never_wake_each_other() {
    for mut pair in pairs() {
        let mut traffic = traffic();
        let before = (pair.sender.stats(), pair.receiver.stats());
        for _ in 0..100 {
            assert_eq!(round(&mut pair, &mut traffic), (0, 0), "{pair}");
        }
        let after = (pair.sender.stats(), pair.receiver.stats());
        assert_eq!((before.0.kicks, before.1.kicks), (after.0.kicks, after.1.kicks), "{pair}");
        assert_eq!(after.0.kicks_suppressed - before.0.kicks_suppressed, 100, "{pair}");
        assert_eq!(after.1.kicks_suppressed - before.1.kicks_suppressed, 100, "{pair}");
    }
}

#[test]
fn an_end_that_asks_for_it_is_woken_once_a_burst() {
    for mut pair in pairs() {
        let (mut traffic, raw) = (traffic(), pair.guest.raw().unwrap());
        for turn in 0..100 {
            let wanted = turn % 3 != 0;
            ask(&raw, wanted);
            assert_eq!(round(&mut pair, &mut traffic), (wanted.into(), wanted.into()), "{pair}, turn {turn}");
        }
    }
}

#[test]
fn a_burst_without_anything_new_wakes_nobody() {
    for mut pair in pairs() {
        let mut traffic = traffic();
        ask(&pair.guest.raw().unwrap(), true);
        for _ in 0..10 {
            assert_eq!((traffic.send(&mut pair, 0), traffic.receive(&mut pair)), (0, 0));
            assert_eq!((pair.sender.bell.take(), pair.receiver.bell.take()), (0, 0), "{pair}");
        }
        // A full ring: nothing can be sent.
        while traffic.send(&mut pair, BURST) > 0 {}
        let _ = pair.sender.bell.take();
        assert_eq!(traffic.send(&mut pair, BURST), 0);
        assert_eq!(pair.sender.bell.take(), 0, "{pair}");
    }
}
