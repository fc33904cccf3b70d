//! Whatever a peer writes, the other end neither panics nor hangs nor touches what it must not, every mbuf is home at the end,
//! and honest traffic flows again after a reset. A failure prints the seed.

use std::sync::atomic::{AtomicBool, Ordering};

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::port::{Burst, Fault, Stats};
use proptest::prelude::*;
use testbed::frame::Stream;
use testbed::hostile::{LyingDevice, LyingDriver, judge, send};
use testbed::rings::{Direction, Guest, Pair, Setup, Traffic};

const BURSTS: usize = 100;

fn setup(features: u64, regions: usize) -> Setup {
    Setup { scratch: LyingDriver::SCRATCH, regions, ..Setup::new(features).ring(64, 64) }
}

fn assert_traffic_flows(direction: Direction, guest: Guest, host: MbufPool) {
    let mut pair = Pair::with(direction, guest.reset().unwrap(), host).unwrap();
    let mut traffic = Traffic::new(&Stream::new(51, 1, 60..=1500), 1000, 32);
    assert!(traffic.run(&mut pair, 500), "stands still after the reset");
    traffic.finish(0).unwrap();
    assert_eq!(pair.stop(), 0);
}

/// Faults of every kind, for the tests' own sake: lies that nobody notices are no test.
fn assert_noticed(stats: &Stats) {
    assert!(Fault::ALL.iter().any(|&fault| stats.fault(fault) > 0), "no lie was noticed: {stats:?}");
}

proptest! {
    #[test]
    fn the_driver_survives_any_device_receiving(
        seed: u64, features in prop::sample::select(Direction::ToGuest.feature_sets()), steps in 1..30_usize
    ) {
        let setup = setup(features, 1);
        let guest = Guest::new(&setup).unwrap();
        let (mut rx, mut device) = (guest.driver_rx().unwrap(), LyingDevice::new(&guest, seed).unwrap());
        let mut burst = Burst::new(32);
        for _ in 0..BURSTS {
            (0..steps).for_each(|_| device.act());
            let came = rx.queue.rx_burst(&mut burst);
            prop_assert_eq!(judge(&mut burst), came);
            rx.queue.pending();
        }
        assert_noticed(&rx.stats());
        drop(rx);
        prop_assert_eq!(guest.pool.mempool().in_use(), 0);
        assert_traffic_flows(Direction::ToGuest, guest, setup.host_pool().unwrap());
    }

    #[test]
    fn the_driver_survives_any_device_sending(
        seed: u64, features in prop::sample::select(Direction::FromGuest.feature_sets()), steps in 1..30_usize
    ) {
        let setup = setup(features, 1);
        let guest = Guest::new(&setup).unwrap();
        let (mut tx, mut device) = (guest.driver_tx().unwrap(), LyingDevice::new(&guest, seed).unwrap());
        for turn in 0..BURSTS {
            (0..steps).for_each(|_| device.act());
            send(&mut *tx.queue, &guest.pool, turn);
            tx.queue.reap();
        }
        drop(tx);
        prop_assert_eq!(guest.pool.mempool().in_use(), 0);
        assert_traffic_flows(Direction::FromGuest, guest, setup.host_pool().unwrap());
    }

    #[test]
    fn the_device_survives_any_driver_sending(
        seed: u64, features in prop::sample::select(Direction::FromGuest.feature_sets()), regions in 1..8_usize, steps in 1..30_usize
    ) {
        let setup = setup(features, regions);
        let (guest, host) = (Guest::new(&setup).unwrap(), setup.host_pool().unwrap());
        let mut driver = LyingDriver::new(&guest, seed).unwrap();
        let mut device = guest.device_from_guest(&Position::default(), &host).unwrap();
        let mut burst = Burst::new(32);
        for _ in 0..BURSTS {
            (0..steps).for_each(|_| driver.act());
            let came = device.queue.rx_burst(&mut burst);
            prop_assert_eq!(judge(&mut burst), came);
        }
        // One that does little may do all of it where nobody looks.
        if steps >= 10 {
            assert_noticed(&device.stats());
        }
        prop_assert!(driver.canary_lives());
        drop((device, driver));
        prop_assert_eq!(host.mempool().in_use(), 0);
        assert_traffic_flows(Direction::FromGuest, guest, host);
    }

    #[test]
    fn the_device_survives_any_driver_receiving(
        seed: u64, features in prop::sample::select(Direction::ToGuest.feature_sets()), regions in 1..8_usize, steps in 1..30_usize
    ) {
        let setup = setup(features, regions);
        let (guest, host) = (Guest::new(&setup).unwrap(), setup.host_pool().unwrap());
        let mut driver = LyingDriver::new(&guest, seed).unwrap();
        let mut device = guest.device_to_guest(&Position::default()).unwrap();
        for turn in 0..BURSTS {
            (0..steps).for_each(|_| driver.act());
            send(&mut *device.queue, &host, turn);
        }
        // One that does little may do all of it where nobody looks.
        if steps >= 10 {
            assert_noticed(&device.stats());
        }
        prop_assert!(driver.canary_lives());
        drop((device, driver));
        prop_assert_eq!(host.mempool().in_use(), 0);
        assert_traffic_flows(Direction::ToGuest, guest, host);
    }
}

/// Runs `poll` so many times while `act` runs on another thread.
fn meanwhile(mut act: impl FnMut() + Send, mut poll: impl FnMut()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                act();
            }
        });
        (0..50 * BURSTS).for_each(|_| poll());
        done.store(true, Ordering::Relaxed);
    });
}

#[test]
fn the_device_survives_a_driver_that_changes_its_mind_between_two_looks() {
    for direction in Direction::ALL {
        for features in direction.feature_sets() {
            let setup = setup(features, 2);
            let (guest, host) = (Guest::new(&setup).unwrap(), setup.host_pool().unwrap());
            let mut driver = LyingDriver::new(&guest, features).unwrap();
            let position = Position::default();
            if direction == Direction::FromGuest {
                let mut device = guest.device_from_guest(&position, &host).unwrap();
                let mut burst = Burst::new(32);
                meanwhile(
                    || driver.act(),
                    || {
                        device.queue.rx_burst(&mut burst);
                        judge(&mut burst);
                    },
                );
            } else {
                let mut device = guest.device_to_guest(&position).unwrap();
                let mut turn = 0;
                meanwhile(
                    || driver.act(),
                    || {
                        send(&mut *device.queue, &host, turn);
                        turn += 1;
                    },
                );
            }
            assert!(driver.canary_lives());
            drop(driver);
            assert_eq!(host.mempool().in_use(), 0);
            assert_traffic_flows(direction, guest, host);
        }
    }
}

#[test]
fn the_driver_survives_a_device_that_changes_its_mind_between_two_looks() {
    for direction in Direction::ALL {
        for features in direction.feature_sets() {
            let setup = setup(features, 1);
            let guest = Guest::new(&setup).unwrap();
            let mut device = LyingDevice::new(&guest, features).unwrap();
            if direction == Direction::ToGuest {
                let (mut rx, mut burst) = (guest.driver_rx().unwrap(), Burst::new(32));
                meanwhile(
                    || device.act(),
                    || {
                        rx.queue.rx_burst(&mut burst);
                        // The device may be writing to these frames: only their lengths are sure.
                        judge(&mut burst);
                    },
                );
            } else {
                let (mut tx, mut turn) = (guest.driver_tx().unwrap(), 0);
                meanwhile(
                    || device.act(),
                    || {
                        send(&mut *tx.queue, &guest.pool, turn);
                        turn += 1;
                    },
                );
            }
            drop(device);
            assert_eq!(guest.pool.mempool().in_use(), 0);
            assert_traffic_flows(direction, guest, setup.host_pool().unwrap());
        }
    }
}
