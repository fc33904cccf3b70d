//! No packet blocks a transmit ring: one that needs many descriptors goes as soon as the device has freed as many, and one
//! that could never go is dropped and counted.

use pmd::port::{Burst, Fault};
use pmd::virtio::spec::feature;
use testbed::frame::Stream;
use testbed::rings::{Direction, Pair, Setup, Traffic, bytes_of, packet};

fn transmit_features() -> Vec<u64> {
    Direction::FromGuest.feature_sets()
}

/// Sends one packet of `segments` segments of 16 bytes, and receives whatever has come; returns what was sent and received.
fn send_one(pair: &mut Pair, segments: usize, received: &mut Burst) -> (usize, usize) {
    let mut burst = Burst::new(1);
    burst.push(packet(&pair.guest.pool, &vec![7; 16 * segments], 16).unwrap()).unwrap();
    (pair.sender.queue.tx_burst(&mut burst), pair.receiver.queue.rx_burst(received))
}

#[test]
fn a_packet_of_many_segments_goes_as_soon_as_the_device_is_done() {
    for features in transmit_features() {
        // Of 64 descriptors more are free than the threshold says, but fewer than the next packet needs.
        let mut pair = Pair::new(Direction::FromGuest, &Setup::new(features).ring(64, 64)).unwrap();
        let mut received = Burst::new(64);
        for round in 0..100 {
            let moved = send_one(&mut pair, 8 + round % 50, &mut received);
            assert_eq!(moved, (1, 1), "{pair}, round {round}");
            received.free();
        }
        assert_eq!(pair.stop(), 0);
    }
}

#[test]
fn a_packet_of_more_segments_than_descriptors_is_dropped_and_blocks_nothing() {
    for features in transmit_features() {
        let mut setup = Setup::new(features).ring(64, 40);
        setup.guest.count = 2048;
        let mut pair = Pair::new(Direction::FromGuest, &setup).unwrap();
        let mut burst = Burst::new(8);
        for segments in [1, 40, 39, 500, 500, 2, 64, 3] {
            burst.push(packet(&pair.guest.pool, &vec![segments as u8; 16 * segments], 16).unwrap()).unwrap();
        }
        let (mut taken, mut came) = (0, Vec::new());
        for _ in 0..16 {
            taken += pair.sender.queue.tx_burst(&mut burst);
            let mut received = Burst::new(8);
            pair.receiver.queue.rx_burst(&mut received);
            came.extend(received.as_slice().iter().map(|mbuf| bytes_of(mbuf).unwrap()));
        }
        assert_eq!((taken, burst.len()), (8, 0), "{pair}");
        let sizes = [1, 39, 2, 3];
        assert_eq!(came, sizes.map(|segments| vec![segments as u8; 16 * segments]), "{pair}");
        assert_eq!(pair.sender.stats().fault(Fault::ManySegments), 4, "{pair}");
        assert_eq!(pair.sender.stats().packets, 4, "{pair}");
        drop(burst);
        assert_eq!(pair.stop(), 0);
    }
}

#[test]
fn indirect_tables_save_descriptors() {
    let full = |features: u64| {
        let mut pair = Pair::new(Direction::FromGuest, &Setup::new(features).ring(64, 64)).unwrap();
        let sent = Traffic::new(&Stream::new(1, 1, 140..=140), 20, 64).send(&mut pair, 64);
        assert_eq!(pair.stop(), 0);
        sent
    };
    // 7 segments and a header: a table of 8, or a chain of 8.
    assert_eq!(full(feature::VERSION_1 | feature::INDIRECT_DESC), 64);
    assert_eq!(full(feature::VERSION_1), 8);
}

#[test]
fn sent_mbufs_go_home_together_and_those_that_cannot_are_counted() {
    for features in transmit_features() {
        let mut pair = Pair::new(Direction::FromGuest, &Setup::new(features).ring(64, 64)).unwrap();
        let mut received = Burst::new(64);
        let mut slow = 0;
        for segments in [1, 1, 2, 1, 3, 1, 1] {
            assert_eq!(send_one(&mut pair, segments, &mut received), (1, 1), "{pair}");
            slow += u64::from(segments > 1);
        }
        assert_eq!(pair.sender.queue.reap(), 7, "{pair}");
        assert_eq!(pair.sender.stats().slow_frees, slow, "{pair}");
        received.free();
        assert_eq!(pair.stop(), 0);
    }
}

#[test]
fn a_packet_never_takes_an_indirect_table_longer_than_the_ring() {
    for features in transmit_features() {
        for size in [2, 4, 8] {
            let mut pair = Pair::new(Direction::FromGuest, &Setup::new(features).ring(size, size)).unwrap();
            let mut received = Burst::new(8);
            for segments in 1..=9 {
                let moved = send_one(&mut pair, segments, &mut received);
                // Sent and received, or dropped and counted by the sender; never refused by the device.
                assert_eq!(moved.0, 1, "{pair}, {segments} segments");
                received.free();
            }
            let (sent, received) = (pair.sender.stats(), pair.receiver.stats());
            assert_eq!(sent.packets, received.packets, "{pair}, ring of {size}");
            assert_eq!(sent.packets + sent.fault(Fault::ManySegments), 9, "{pair}, ring of {size}");
            assert_eq!(received.faults, [0; 14], "{pair}, ring of {size}");
            assert_eq!(pair.stop(), 0);
        }
    }
}
