//! Every frame that goes into a ring comes out, whole and in order: on every path, of any size, cut in any way, in bursts of
//! any size, while the 16-bit indexes wrap, with the ring exactly full, and with only part of it in use.

use testbed::frame::Stream;
use testbed::rings::{Direction, Pair, Setup, Traffic};

/// Runs `test` on every row of both ends' path tables.
fn on_every_path(test: impl Fn(Direction, Setup)) {
    for direction in Direction::ALL {
        for features in direction.feature_sets() {
            test(direction, Setup::new(features));
        }
    }
}

/// Sends `count` frames of `stream` in lock-step; every one arrives, and every mbuf is home afterwards.
fn deliver(direction: Direction, setup: &Setup, stream: &Stream, segment_len: usize, burst: usize, count: u64) {
    let mut pair = Pair::new(direction, setup).unwrap();
    let name = format!("{pair}; segments of {segment_len}, bursts of {burst}");
    let mut traffic = Traffic::new(stream, segment_len, burst);
    assert!(traffic.run(&mut pair, count), "{name}: stands still after {} frames", traffic.made());
    traffic.finish(0).unwrap_or_else(|e| panic!("{name}: {e}"));

    let (sent, received) = (pair.sender.stats(), pair.receiver.stats());
    assert_eq!((sent.packets, received.packets), (count, count), "{name}");
    assert_eq!((sent.bytes, sent.bins), (received.bytes, received.bins), "{name}");
    assert_eq!((sent.faults, received.faults), Default::default(), "{name}");
    assert_eq!(pair.stop(), 0, "{name}: mbufs missing");
}

#[test]
fn every_path_of_both_ends_is_chosen_by_some_feature_set() {
    use backend::queue::paths::{FROM_GUEST_PATHS, TO_GUEST_PATHS};
    use pmd::virtio::paths::{RX_PATHS, TX_PATHS};

    let ran = |direction: Direction| {
        let pairs = direction.feature_sets().into_iter().map(move |f| Pair::new(direction, &Setup::new(f)).unwrap());
        pairs.map(|pair| (pair.sender.path, pair.receiver.path)).unzip::<_, _, Vec<_>, Vec<_>>()
    };
    let (device, driver) = ran(Direction::ToGuest);
    assert!(RX_PATHS.iter().all(|row| driver.contains(&row.name)), "{driver:?}");
    assert!(TO_GUEST_PATHS.iter().all(|row| device.contains(&row.name)), "{device:?}");
    let (driver, device) = ran(Direction::FromGuest);
    assert!(TX_PATHS.iter().all(|row| driver.contains(&row.name)), "{driver:?}");
    assert!(FROM_GUEST_PATHS.iter().all(|row| device.contains(&row.name)), "{device:?}");
}

#[test]
fn frames_of_one_segment_arrive() {
    on_every_path(|direction, setup| deliver(direction, &setup, &Stream::new(1, 0, 60..=1514), 2048, 32, 2000));
}

#[test]
fn frames_up_to_9000_bytes_arrive_cut_into_segments() {
    on_every_path(|direction, setup| {
        // A frame may fill several buffers only if they are mergeable; otherwise one has to hold it.
        let setup = setup.rooms(9000, 2048);
        for segment_len in [700, 1500, 9000] {
            deliver(direction, &setup, &Stream::new(2, 0, 60..=9000), segment_len, 32, 300);
        }
    });
}

#[test]
fn frames_up_to_9000_bytes_fill_several_mergeable_buffers() {
    use pmd::virtio::spec::feature::MRG_RXBUF;

    for features in Direction::ToGuest.feature_sets().into_iter().filter(|features| features & MRG_RXBUF != 0) {
        for room in [128, 512, 1500, 2048] {
            let setup = Setup::new(features).rooms(room, 2048);
            deliver(Direction::ToGuest, &setup, &Stream::new(3, 0, 60..=9000), 2048, 32, 300);
        }
    }
}

#[test]
fn bursts_of_every_size_arrive() {
    on_every_path(|direction, setup| {
        for burst in 1..=64 {
            deliver(direction, &setup, &Stream::new(4, 0, 60..=200), 2048, burst, 300);
        }
    });
}

#[test]
fn indexes_wrap() {
    on_every_path(|direction, setup| {
        deliver(direction, &setup.ring(64, 64), &Stream::new(5, 0, 60..=60), 64, 31, 66_000);
    });
}

#[test]
fn rings_of_every_size_carry_frames_also_with_part_of_them_in_use() {
    on_every_path(|direction, setup| {
        for size in [8, 16, 64, 1024, 32768] {
            for limit in [size, size - 1, size / 2 + 1, 8] {
                let mut setup = setup.clone().ring(size, limit.max(8)).rooms(128, 128);
                setup.guest.count = u32::from(size) + 512;
                deliver(direction, &setup, &Stream::new(6, 0, 60..=100), 100, 32, 200 + u64::from(size.min(512)));
            }
        }
    });
}

#[test]
fn a_ring_is_filled_to_the_last_descriptor() {
    on_every_path(|direction, setup| {
        for limit in [64_u16, 60, 37] {
            let mut pair = Pair::new(direction, &setup.clone().ring(64, limit)).unwrap();
            let name = pair.to_string();
            // The receiver fills its ring in groups of 4.
            let full = usize::from(if direction == Direction::ToGuest { limit / 4 * 4 } else { limit });
            let mut traffic = Traffic::new(&Stream::new(7, 0, 60..=60), 64, 64);
            for _ in 0..5 {
                let mut sent = 0;
                while sent < full {
                    let count = (full - sent - traffic.waiting()).min(7);
                    let taken = traffic.send(&mut pair, count);
                    assert!(taken > 0, "{name}: full after {sent}");
                    sent += taken;
                }
                assert_eq!(traffic.send(&mut pair, 1), 0, "{name}: more than fit");
                assert_eq!(pair.receiver.queue.pending(), full, "{name}");
                while traffic.receive(&mut pair) > 0 {}
            }
            assert!(traffic.run(&mut pair, 0), "{name}: stands still");
            traffic.finish(0).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(pair.stop(), 0, "{name}");
        }
    });
}
