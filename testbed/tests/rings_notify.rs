//! An end wakes the other exactly when that asks for it, be it by flags, by an entry or by a place (virtio 1.3, 2.7.7, 2.7.10 and
//! 2.8.10): in lock-step, with exact counts.

use pmd::virtio::spec::{
    AVAIL_F_NO_INTERRUPT, PACKED_EVENT_F_DESC, PACKED_EVENT_F_DISABLE, PACKED_EVENT_F_ENABLE, USED_F_NO_NOTIFY, feature,
};
use testbed::frame::Stream;
use testbed::rings::{Direction, PackedEvent, Pair, Setup, Traffic};

const BURST: usize = 32;
const SIZE: u16 = 256;

fn pairs(sets: impl Fn(Direction) -> Vec<u64>) -> impl Iterator<Item = Pair> {
    let sets = Direction::ALL.map(|direction| (direction, sets(direction)));
    let all =
        sets.into_iter().flat_map(|(direction, sets)| sets.into_iter().map(move |features| (direction, features)));
    all.map(|(direction, features)| {
        let pair = Pair::new(direction, &Setup::new(features).ring(SIZE, SIZE)).unwrap();
        // What a driver kicks before the device runs is not counted here.
        let _ = wakes(&pair);
        pair
    })
}

/// Wake-ups by the sender and by the receiver since the last call.
fn wakes(pair: &Pair) -> (u64, u64) {
    (pair.sender.bell.take(), pair.receiver.bell.take())
}

/// Wake-ups in one round of a burst of so many frames.
fn round(pair: &mut Pair, traffic: &mut Traffic, count: usize) -> (u64, u64) {
    assert_eq!((traffic.send(pair, count), traffic.receive(pair)), (count, count), "{pair}");
    wakes(pair)
}

fn traffic() -> Traffic {
    Traffic::new(&Stream::new(21, 1, 60..=60), 60, BURST)
}

fn is_packed(pair: &Pair) -> bool {
    pair.guest.features() & feature::RING_PACKED != 0
}

/// Says by flags whether each end wants to be woken.
fn ask(pair: &Pair, wanted: bool) {
    if is_packed(pair) {
        let flags = if wanted { PACKED_EVENT_F_ENABLE } else { PACKED_EVENT_F_DISABLE };
        let raw = pair.guest.raw_packed().unwrap();
        raw.set_driver_event(PackedEvent { place: 0, flags });
        raw.set_device_event(PackedEvent { place: 0, flags });
    } else {
        let raw = pair.guest.raw().unwrap();
        raw.set_avail_flags(if wanted { 0 } else { AVAIL_F_NO_INTERRUPT });
        raw.set_used_flags(if wanted { 0 } else { USED_F_NO_NOTIFY });
    }
}

/// Says that the receiver wants to be woken when the frame `number`, counted from the first, is there.
fn ask_for(pair: &Pair, number: u16) {
    if is_packed(pair) {
        let wrap = (number / SIZE).is_multiple_of(2);
        let event = PackedEvent { place: (number % SIZE) | (u16::from(wrap) << 15), flags: PACKED_EVENT_F_DESC };
        let raw = pair.guest.raw_packed().unwrap();
        match pair.direction {
            Direction::ToGuest => raw.set_driver_event(event),
            Direction::FromGuest => raw.set_device_event(event),
        }
    } else {
        let raw = pair.guest.raw().unwrap();
        match pair.direction {
            Direction::ToGuest => raw.set_used_event(number),
            Direction::FromGuest => raw.set_avail_event(number),
        }
    }
}

#[test]
fn two_polling_ends_never_wake_each_other() {
    for mut pair in pairs(Direction::event_sets) {
        let mut traffic = traffic();
        let before = (pair.sender.stats(), pair.receiver.stats());
        for _ in 0..100 {
            assert_eq!(round(&mut pair, &mut traffic, BURST), (0, 0), "{pair}");
        }
        let after = (pair.sender.stats(), pair.receiver.stats());
        assert_eq!((before.0.kicks, before.1.kicks), (after.0.kicks, after.1.kicks), "{pair}");
        assert_eq!(after.0.kicks_suppressed - before.0.kicks_suppressed, 100, "{pair}");
        assert_eq!(after.1.kicks_suppressed - before.1.kicks_suppressed, 100, "{pair}");
    }
}

#[test]
fn an_end_that_asks_by_flags_is_woken_once_a_burst() {
    for mut pair in pairs(Direction::feature_sets) {
        let mut traffic = traffic();
        for turn in 0..100 {
            let wanted = turn % 3 != 0;
            ask(&pair, wanted);
            assert_eq!(round(&mut pair, &mut traffic, BURST), (wanted.into(), wanted.into()), "{pair}, turn {turn}");
        }
    }
}

#[test]
fn a_burst_without_anything_new_wakes_nobody() {
    for mut pair in pairs(Direction::feature_sets) {
        let mut traffic = traffic();
        ask(&pair, true);
        for _ in 0..10 {
            assert_eq!(round(&mut pair, &mut traffic, 0), (0, 0), "{pair}");
        }
        // A full ring: nothing can be sent.
        while traffic.send(&mut pair, BURST) > 0 {}
        let _ = wakes(&pair);
        assert_eq!(traffic.send(&mut pair, BURST), 0);
        assert_eq!(pair.sender.bell.take(), 0, "{pair}");
    }
}

#[test]
fn an_end_that_waits_for_an_entry_is_woken_by_the_burst_that_has_it() {
    for mut pair in
        pairs(|direction| direction.event_sets().into_iter().filter(|f| f & feature::EVENT_IDX != 0).collect())
    {
        let mut traffic = traffic();
        // Far enough for the ring to go round a few times.
        for turn in 0..200_u16 {
            let (first, len, wait_for) = (traffic.made() as u16, 1 + turn % 7, turn % 23);
            ask_for(&pair, first + wait_for);
            let bursts = (0..=23 / len).map(|_| round(&mut pair, &mut traffic, len.into()).0).collect::<Vec<_>>();
            let expected = (0..=23 / len).map(|burst| u64::from(burst == wait_for / len)).collect::<Vec<_>>();
            assert_eq!(bursts, expected, "{pair}: entry {wait_for} of bursts of {len}");
        }
    }
}

#[test]
fn a_receiver_that_is_armed_is_woken_until_it_has_been() {
    for mut pair in pairs(Direction::event_sets) {
        let (mut traffic, by_entry) = (traffic(), pair.guest.features() & feature::EVENT_IDX != 0);
        for turn in 0..100 {
            assert!(pair.receiver.queue.arm(), "{pair}, turn {turn}");
            assert_eq!((traffic.send(&mut pair, 5), wakes(&pair).0), (5, 1), "{pair}, turn {turn}");
            // Flags are all or nothing; an entry was waited for, and has come.
            assert_eq!((traffic.send(&mut pair, 5), wakes(&pair).0), (5, u64::from(!by_entry)), "{pair}, turn {turn}");
            // With frames there it does not go to sleep, and is not woken for more.
            assert!(!pair.receiver.queue.arm(), "{pair}, turn {turn}");
            assert_eq!((traffic.send(&mut pair, 5), wakes(&pair).0), (5, 0), "{pair}, turn {turn}");
            assert_eq!(traffic.receive(&mut pair), 15);
            assert!(pair.receiver.queue.arm(), "{pair}, turn {turn}");
            pair.receiver.queue.disarm();
            assert_eq!(round(&mut pair, &mut traffic, 5).0, 0, "{pair}, turn {turn}");
        }
        traffic.finish(0).unwrap();
    }
}
