//! A device is gone in the middle of its work, and another goes on at the position that the driver's ring tells: every frame
//! arrives once and in order, whatever the first one left in the ring.

use std::sync::atomic::Ordering;

use backend::queue::config::Position;
use pmd::mbuf::{Mbuf, MbufPool};
use pmd::port::{Burst, FAULTS};
use pmd::virtio::spec::{PackedMeta, PackedPos, feature};
use proptest::prelude::*;
use testbed::frame::Stream;
use testbed::rings::{Direction, Guest, Setup, bytes_of, packet};

/// Where a fresh ring begins.
fn fresh(features: u64) -> u32 {
    if features & feature::RING_PACKED != 0 { 0x8000_8000 } else { 0 }
}

fn frame(number: u64) -> Vec<u8> {
    let mut frame = Vec::new();
    Stream::new(5, 0, 60..=600).write(number, &mut frame);
    frame
}

/// `count` more packets in segments of up to 200 bytes.
fn fill(burst: &mut Burst, pool: &MbufPool, made: &mut u64, count: usize) {
    for _ in 0..count.min(burst.room()) {
        let Some(mbuf) = packet(pool, &frame(*made), 200) else { return };
        burst.push(mbuf).unwrap();
        *made += 1;
    }
}

fn numbers(packets: impl Iterator<Item = Mbuf>) -> impl Iterator<Item = Vec<u8>> {
    packets.map(|mbuf| bytes_of(&mbuf).unwrap())
}

fn setup(features: u64) -> Setup {
    Setup::new(features).ring(64, 64).rooms(700, 700)
}

fn host_pool() -> MbufPool {
    setup(0).host_pool().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn what_a_driver_sends_outlives_its_devices(
        features in prop::sample::select(Direction::FromGuest.feature_sets()),
        lives in prop::collection::vec(prop::collection::vec((0..20_usize, 0..20_usize), 0..8), 1..30),
    ) {
        let (guest, host) = (Guest::new(&setup(features)).unwrap(), host_pool());
        let mut tx = guest.driver_tx().unwrap();
        let (mut going, mut made, mut received, mut base) = (Burst::new(64), 0, 0, fresh(features));
        for steps in lives {
            let mut device = guest.device_from_guest_at(base, &Position::default(), &host).unwrap();
            for (sent, taken) in steps {
                fill(&mut going, &guest.pool, &mut made, sent);
                tx.queue.tx_burst(&mut going);
                let mut coming = Burst::new(taken.max(1));
                let count = if taken > 0 { device.queue.rx_burst(&mut coming) } else { 0 };
                for bytes in numbers(coming.take_front(count)) {
                    prop_assert_eq!(bytes, frame(received));
                    received += 1;
                }
            }
            drop(device);
            scribble(&guest, features);
            base = tx.queue.rewind().unwrap();
        }
        let mut device = guest.device_from_guest_at(base, &Position::default(), &host).unwrap();
        let mut coming = Burst::new(64);
        while device.queue.rx_burst(&mut coming) > 0 {
            let count = coming.len();
            for bytes in numbers(coming.take_front(count)) {
                prop_assert_eq!(bytes, frame(received));
                received += 1;
            }
        }
        prop_assert_eq!(received, made - going.len() as u64);
        prop_assert_eq!((tx.stats().faults, device.stats().faults), ([0; FAULTS], [0; FAULTS]));
        drop((tx, device, going));
        prop_assert_eq!(guest.pool.mempool().in_use() + host.mempool().in_use(), 0);
    }

    #[test]
    fn what_a_driver_receives_outlives_its_devices(
        features in prop::sample::select(Direction::ToGuest.feature_sets()),
        lives in prop::collection::vec(prop::collection::vec((0..20_usize, 0..20_usize), 0..8), 1..30),
    ) {
        // Mergeable, most frames take several buffers.
        let room = if features & feature::MRG_RXBUF != 0 { 200 } else { 700 };
        let (guest, host) = (Guest::new(&setup(features).rooms(room, 700)).unwrap(), host_pool());
        let mut rx = guest.driver_rx().unwrap();
        let (mut going, mut made, mut received, mut base) = (Burst::new(64), 0, 0, fresh(features));
        for steps in lives {
            let mut device = guest.device_to_guest_at(base, &Position::default()).unwrap();
            for (sent, taken) in steps {
                fill(&mut going, &host, &mut made, sent);
                device.queue.tx_burst(&mut going);
                let mut coming = Burst::new(taken.max(1));
                let count = if taken > 0 { rx.queue.rx_burst(&mut coming) } else { 0 };
                for bytes in numbers(coming.take_front(count)) {
                    prop_assert_eq!(bytes, frame(received));
                    received += 1;
                }
            }
            drop(device);
            let mut left = Vec::new();
            base = rx.queue.rewind(&mut left).unwrap();
            for bytes in numbers(left.into_iter()) {
                prop_assert_eq!(bytes, frame(received));
                received += 1;
            }
            prop_assert_eq!(rx.queue.pending(), 0);
        }
        prop_assert_eq!(received, made - going.len() as u64);
        prop_assert_eq!(rx.stats().faults, [0; FAULTS]);
        drop((rx, going));
        prop_assert_eq!(guest.pool.mempool().in_use() + host.mempool().in_use(), 0);
    }

    /// Nobody knows then which order the device kept, but every frame is there, once.
    #[test]
    fn completions_out_of_order_are_not_sent_again(
        features in prop::sample::select(Direction::FromGuest.split_sets()),
        completed in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let features = features & !feature::IN_ORDER;
        let (guest, host) = (Guest::new(&setup(features)).unwrap(), host_pool());
        let (raw, mut tx) = (guest.raw().unwrap(), guest.driver_tx().unwrap());
        let (mut going, mut made) = (Burst::new(64), 0);
        fill(&mut going, &guest.pool, &mut made, 16);
        let sent = tx.queue.tx_burst(&mut going);
        let mut offered: Vec<(u16, u64)> = (0..sent as u16).map(|i| (raw.offered(i), i.into())).collect();
        for index in completed {
            if !offered.is_empty() {
                raw.complete(offered.swap_remove(index.index(offered.len())).0, 0);
            }
        }
        let base = tx.queue.rewind().unwrap();
        let mut device = guest.device_from_guest_at(base, &Position::default(), &host).unwrap();
        let mut coming = Burst::new(64);
        let count = device.queue.rx_burst(&mut coming);
        let mut came: Vec<_> = numbers(coming.take_front(count)).collect();
        let mut expected: Vec<_> = offered.iter().map(|&(_, number)| frame(number)).collect();
        came.sort();
        expected.sort();
        prop_assert_eq!(came, expected);
        tx.queue.reap();
        prop_assert_eq!(tx.stats().faults, [0; FAULTS]);
    }
}

#[test]
fn a_false_index_goes_with_the_device_that_claimed_it() {
    for features in Direction::FromGuest.split_sets() {
        let (guest, host) = (Guest::new(&setup(features)).unwrap(), host_pool());
        let (raw, mut tx) = (guest.raw().unwrap(), guest.driver_tx().unwrap());
        let (mut going, mut made) = (Burst::new(64), 0);
        fill(&mut going, &guest.pool, &mut made, 8);
        tx.queue.tx_burst(&mut going);
        raw.set_used_idx(40_000);
        let base = tx.queue.rewind().unwrap();
        let mut device = guest.device_from_guest_at(base, &Position::default(), &host).unwrap();
        let mut coming = Burst::new(64);
        assert_eq!(device.queue.rx_burst(&mut coming) + going.len(), 8);
        assert!(tx.queue.reap() > 0);
    }
}

/// What a device may leave that ends in the middle of a write: in a packed ring, id and length of a used descriptor whose flags
/// still say that it is available.
fn scribble(guest: &Guest, features: u64) {
    if features & feature::RING_PACKED == 0 {
        return;
    }
    let raw = guest.raw().unwrap();
    for desc in &*raw.desc {
        let mut meta = PackedMeta::unpack(desc.meta.load(Ordering::Relaxed));
        if meta.is_avail(PackedPos::START) || meta.is_avail(PackedPos::START.other_round()) {
            (meta.id, meta.len) = (0xdead, 0xbeef);
            desc.meta.store(meta.pack(), Ordering::Relaxed);
        }
    }
}
