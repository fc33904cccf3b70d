//! A packed ring is stopped and goes on at every position: all 32 bits of the vring base (vhost-user, "Vring state
//! description"), or only the low half of it, which is all that DPDK knows.

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::port::Burst;
use pmd::virtio::spec::PackedPos;
use testbed::rings::{Direction, Guest, PACKED_BASE, Setup, bytes_of, packet};

/// The base of a ring at rest at `pos`.
fn base(pos: PackedPos) -> u32 {
    let half = u32::from(pos.slot()) | u32::from(pos.wrap()) << 15;
    half | half << 16
}

fn host_pool() -> MbufPool {
    Setup::new(0).host_pool().unwrap()
}

/// For each packed row and a few sizes: a fresh base and what is left of each base that the device leaves.
fn everywhere(direction: Direction, test: impl Fn(&Setup, &dyn Fn(u32) -> u32)) {
    for features in direction.packed_sets() {
        for size in [2, 5, 16, 33] {
            let setup = Setup::new(features).ring(size, size);
            test(&setup, &|base| base);
            test(&setup, &|base| base & 0xffff);
        }
    }
}

#[test]
fn a_device_that_takes_frames_goes_on_at_every_position() {
    everywhere(Direction::FromGuest, |setup, left_of| {
        let (guest, host) = (Guest::new(setup).unwrap(), host_pool());
        let (mut tx, position) = (guest.driver_tx().unwrap(), Position::default());
        let (mut pos, mut at) = (PackedPos::START, left_of(PACKED_BASE));
        for i in 0..4 * setup.size {
            let frame = vec![i as u8; 60];
            let (mut burst, mut received) = (Burst::new(1), Burst::new(1));
            burst.push(packet(&guest.pool, &frame, 60).unwrap()).unwrap();
            assert_eq!(tx.queue.tx_burst(&mut burst), 1, "{at:#x}");
            let mut device = guest.device_from_guest_at(at, &position, &host).unwrap();
            assert_eq!(device.queue.rx_burst(&mut received), 1, "{at:#x}");
            assert_eq!(bytes_of(&received.as_slice()[0]), Some(frame), "{at:#x}");
            drop(device);
            pos = pos.advance(1, setup.size);
            assert_eq!(position.get(), base(pos));
            at = left_of(base(pos));
        }
        tx.queue.reap();
        assert_eq!(guest.pool.mempool().in_use(), 0);
    });
}

#[test]
fn a_device_that_brings_frames_goes_on_at_every_position() {
    everywhere(Direction::ToGuest, |setup, left_of| {
        let (guest, host) = (Guest::new(setup).unwrap(), host_pool());
        let (mut rx, position) = (guest.driver_rx().unwrap(), Position::default());
        let (mut pos, mut at) = (PackedPos::START, left_of(PACKED_BASE));
        for i in 0..4 * setup.size {
            let frame = vec![i as u8; 60];
            let (mut burst, mut received) = (Burst::new(1), Burst::new(1));
            burst.push(packet(&host, &frame, 60).unwrap()).unwrap();
            let mut device = guest.device_to_guest_at(at, &position).unwrap();
            assert_eq!(device.queue.tx_burst(&mut burst), 1, "{at:#x}");
            drop(device);
            assert_eq!(rx.queue.rx_burst(&mut received), 1, "{at:#x}");
            assert_eq!(bytes_of(&received.as_slice()[0]), Some(frame), "{at:#x}");
            pos = pos.advance(1, setup.size);
            assert_eq!(position.get(), base(pos));
            at = left_of(base(pos));
        }
    });
}

#[test]
fn a_base_with_chains_in_flight_is_taken_as_it_is() {
    for features in Direction::ToGuest.packed_sets() {
        let setup = Setup::new(features).ring(8, 8);
        let (guest, host, position) = (Guest::new(&setup).unwrap(), host_pool(), Position::default());
        let _rx = guest.driver_rx().unwrap();
        let raw = guest.raw_packed().unwrap();
        let in_flight = PackedPos::new(3, true);
        let used = PackedPos::new(1, true);
        let mut device =
            guest.device_to_guest_at(base(in_flight) & 0xffff | base(used) & 0xffff_0000, &position).unwrap();
        let id = raw.described(3).1.id;
        let mut burst = Burst::new(1);
        burst.push(packet(&host, &[1; 60], 60).unwrap()).unwrap();
        assert_eq!(device.queue.tx_burst(&mut burst), 1);
        // The chain at 3 is completed where the driver looks, at 1.
        assert_eq!(raw.used(used).map(|meta| (meta.id, meta.len)), Some((id, 72)));
    }
}

#[test]
fn a_base_outside_the_ring_is_survived() {
    let setup = Setup::new(Direction::FromGuest.packed_sets()[0]).ring(5, 5);
    let (guest, host) = (Guest::new(&setup).unwrap(), host_pool());
    for at in [5, 0x7fff, 0xffff, 0x8005_8005, 0xffff_ffff, 0x0005_0000] {
        let mut device = guest.device_from_guest_at(at, &Position::default(), &host).unwrap();
        device.queue.rx_burst(&mut Burst::new(8));
    }
}

#[test]
fn what_a_killed_device_was_completing_is_given_back_empty() {
    for features in Direction::ToGuest.packed_sets() {
        for unfinished in 1..5 {
            let setup = Setup::new(features).ring(16, 16);
            let (guest, host) = (Guest::new(&setup).unwrap(), host_pool());
            let (mut rx, raw) = (guest.driver_rx().unwrap(), guest.raw_packed().unwrap());
            let mut received = Burst::new(16);
            // All but the first one, which would have come last.
            for slot in 1..=unfinished {
                raw.complete(PackedPos::new(slot, true), raw.described(slot).1.id, 500);
            }
            let mut device = guest.device_to_guest_at(PACKED_BASE, &Position::default()).unwrap();
            assert_eq!(rx.queue.rx_burst(&mut received), 0);
            assert_eq!(rx.stats().faults.iter().sum::<u64>(), u64::from(unfinished) + 1, "each buffer came back");
            for i in 0..3 * setup.size {
                let frame = vec![i as u8; 60];
                let mut burst = Burst::new(1);
                burst.push(packet(&host, &frame, 60).unwrap()).unwrap();
                assert_eq!(device.queue.tx_burst(&mut burst), 1, "{unfinished} unfinished, frame {i}");
                assert_eq!(rx.queue.rx_burst(&mut received), 1, "{unfinished} unfinished, frame {i}");
                assert_eq!(bytes_of(&received.take_front(1).next().unwrap()), Some(frame));
            }
        }
    }
}
