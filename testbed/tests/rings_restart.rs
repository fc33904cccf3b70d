//! A split ring whose device is new to it: what a killed daemon left goes on at the ring's own used index, whatever base the
//! front-end says, so that no chain is completed twice and none is forgotten.

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::port::{Burst, FAULTS};
use testbed::frame::Stream;
use testbed::rings::{Direction, Guest, Setup, bytes_of, packet};

/// Frames that go through the first device, and through the second.
const FRAMES: u64 = 20;

fn setup(features: u64) -> Setup {
    Setup::new(features).ring(64, 64)
}

fn host_pool() -> MbufPool {
    setup(0).host_pool().unwrap()
}

fn frame(number: u64) -> Vec<u8> {
    let mut frame = Vec::new();
    Stream::new(7, 0, 60..=600).write(number, &mut frame);
    frame
}

fn frames(pool: &MbufPool, numbers: std::ops::Range<u64>) -> Burst {
    let mut burst = Burst::new(64);
    for number in numbers {
        burst.push(packet(pool, &frame(number), 700).unwrap()).unwrap();
    }
    burst
}

/// The packets of `burst` are the frames `from..to`.
fn expect(burst: &mut Burst, from: u64, to: u64, why: &str) {
    let count = burst.len();
    let came: Vec<_> = burst.take_front(count).map(|mbuf| bytes_of(&mbuf).unwrap()).collect();
    assert_eq!(came, (from..to).map(frame).collect::<Vec<_>>(), "{why}");
}

/// Bases that a front-end may say when the ring's used index is `FRAMES`: right, none, from before, and that of a device which
/// had taken more than it completed.
const BASES: [u32; 4] = [FRAMES as u32, 0, 7, FRAMES as u32 + 5];

#[test]
fn frames_from_the_guest_are_taken_once_whatever_the_base() {
    for features in Direction::FromGuest.split_sets() {
        for base in BASES {
            let why = format!("features {features:#x}, base {base}");
            let (guest, host) = (Guest::new(&setup(features)).unwrap(), host_pool());
            let mut tx = guest.driver_tx().unwrap();
            let mut coming = Burst::new(64);

            tx.queue.tx_burst(&mut frames(&guest.pool, 0..FRAMES));
            let mut device = guest.device_from_guest_at(0, &Position::default(), &host).unwrap();
            device.queue.rx_burst(&mut coming);
            expect(&mut coming, 0, FRAMES, &why);
            tx.queue.tx_burst(&mut frames(&guest.pool, FRAMES..2 * FRAMES));
            drop(device);

            let mut device = guest.device_from_guest_at(base, &Position::default(), &host).unwrap();
            device.queue.rx_burst(&mut coming);
            expect(&mut coming, FRAMES, 2 * FRAMES, &why);
            tx.queue.reap();
            assert_eq!(guest.pool.mempool().in_use(), 0, "{why}: every buffer has come back");
            assert_eq!((tx.stats().faults, device.stats().faults), ([0; FAULTS], [0; FAULTS]), "{why}");
        }
    }
}

#[test]
fn frames_to_the_guest_fill_each_buffer_once_whatever_the_base() {
    for features in Direction::ToGuest.split_sets() {
        for base in BASES {
            let why = format!("features {features:#x}, base {base}");
            let (guest, host) = (Guest::new(&setup(features)).unwrap(), host_pool());
            let mut rx = guest.driver_rx().unwrap();
            let mut coming = Burst::new(64);
            for (base, from, to) in [(0, 0, FRAMES), (base, FRAMES, 2 * FRAMES)] {
                let mut device = guest.device_to_guest_at(base, &Position::default()).unwrap();
                device.queue.tx_burst(&mut frames(&host, from..to));
                drop(device);
                rx.queue.rx_burst(&mut coming);
                expect(&mut coming, from, to, &why);
            }
            assert_eq!(rx.stats().faults, [0; FAULTS], "{why}");
        }
    }
}

#[test]
fn an_impossible_used_index_leaves_the_base() {
    for features in Direction::FromGuest.split_sets() {
        for used in [1, 40_000, u16::MAX - 64] {
            let (guest, host) = (Guest::new(&setup(features)).unwrap(), host_pool());
            let (raw, mut tx) = (guest.raw().unwrap(), guest.driver_tx().unwrap());
            raw.set_used_idx(used);
            if used == 1 {
                // Nothing is available, so the used index is ahead of the driver's.
                assert_eq!(raw.avail_idx(), 0);
            }
            let mut device = guest.device_from_guest_at(0, &Position::default(), &host).unwrap();
            raw.set_used_idx(0);
            tx.queue.tx_burst(&mut frames(&guest.pool, 0..FRAMES));
            let mut coming = Burst::new(64);
            device.queue.rx_burst(&mut coming);
            expect(&mut coming, 0, FRAMES, &format!("features {features:#x}, used index {used}"));
        }
    }
}
