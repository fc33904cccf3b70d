//! What the fuzz targets of the rings share: a liar at one end does what the input says, and the other end must neither panic nor
//! write where it must not nor lose an mbuf.

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::mem::{Arena, Pages};
use pmd::port::Burst;
use testbed::hostile::{LyingDevice, LyingDriver, judge, send};
use testbed::rings::{Direction, Guest, Setup};

/// Bytes of an input that are looked at.
const INPUT_MAX: usize = 2048;

/// What an input's first bytes choose; the rest are the liar's decisions.
struct Choice<'a> {
    direction: Direction,
    features: u64,
    /// What the liar does between two bursts.
    steps: usize,
    bytes: &'a [u8],
}

impl<'a> Choice<'a> {
    fn of(data: &'a [u8], sets: fn(Direction) -> Vec<u64>) -> Option<Self> {
        let [first, second, bytes @ ..] = data else { return None };
        let direction = Direction::ALL[usize::from(*first) % Direction::ALL.len()];
        let sets = sets(direction);
        let features = sets[usize::from(first / 2) % sets.len()];
        Some(Self {
            direction,
            features,
            steps: 1 + usize::from(second % 32),
            bytes: &bytes[..bytes.len().min(INPUT_MAX)],
        })
    }

    fn setup(&self, regions: usize) -> Setup {
        Setup { scratch: LyingDriver::SCRATCH, regions, ..small(self.features) }
    }

    /// Bursts until the input is used up: each step takes a byte at least.
    fn bursts(&self) -> usize {
        1 + self.bytes.len() / self.steps
    }
}

/// A ring of 64, and as few mbufs as that needs: most of the time goes into making them.
#[must_use]
pub fn small(features: u64) -> Setup {
    let mut setup = Setup::new(features).ring(64, 64);
    (setup.guest.count, setup.host.count) = (256, 256);
    (setup.guest.cache_size, setup.host.cache_size) = (32, 32);
    setup
}

/// A pool for the host's end.
///
/// # Panics
/// Without memory.
#[must_use]
pub fn host_pool(setup: &Setup) -> MbufPool {
    let arena = Arena::new(setup.host.arena_bytes(), &Pages::Plain).expect("memory");
    MbufPool::new(&setup.host, &arena).expect("memory")
}

/// The device's end of a ring against a driver that lies.
///
/// # Panics
/// If it does not survive.
pub fn device_end(data: &[u8], sets: fn(Direction) -> Vec<u64>) {
    let Some(choice) = Choice::of(data, sets) else { return };
    let setup = choice.setup(2);
    let (guest, host) = (Guest::new(&setup).expect("memory"), host_pool(&setup));
    let mut driver = LyingDriver::new(&guest, choice.bytes).expect("scratch memory");
    let position = Position::default();
    match choice.direction {
        Direction::FromGuest => {
            let mut device = guest.device_from_guest(&position, &host).expect("a ring");
            let frames = receive(&choice, || driver.act(), |burst| device.queue.rx_burst(burst));
            assert_eq!(device.stats().packets, frames);
        }
        Direction::ToGuest => {
            let mut device = guest.device_to_guest(&position).expect("a ring");
            for turn in 0..choice.bursts() {
                (0..choice.steps).for_each(|_| driver.act());
                send(&mut *device.queue, &host, turn);
            }
        }
    }
    assert!(driver.canary_lives(), "the device wrote where no chain ever pointed");
    assert_eq!(host.mempool().in_use(), 0, "mbufs are missing");
}

/// The driver's end of a ring against a device that lies.
///
/// # Panics
/// If it does not survive.
pub fn driver_end(data: &[u8], sets: fn(Direction) -> Vec<u64>) {
    let Some(choice) = Choice::of(data, sets) else { return };
    let guest = Guest::new(&choice.setup(1)).expect("memory");
    let mut device = LyingDevice::new(&guest, choice.bytes).expect("a ring");
    match choice.direction {
        Direction::ToGuest => {
            let mut driver = guest.driver_rx().expect("memory");
            let frames = receive(&choice, || device.act(), |burst| driver.queue.rx_burst(burst));
            assert_eq!(driver.stats().packets, frames);
        }
        Direction::FromGuest => {
            let mut driver = guest.driver_tx().expect("memory");
            for turn in 0..choice.bursts() {
                (0..choice.steps).for_each(|_| device.act());
                send(&mut *driver.queue, &guest.pool, turn);
                driver.queue.reap();
            }
        }
    }
    assert_eq!(guest.pool.mempool().in_use(), 0, "mbufs are missing");
}

/// Lets the liar act and receives what comes of it; how many frames.
fn receive(choice: &Choice, mut act: impl FnMut(), mut poll: impl FnMut(&mut Burst) -> usize) -> u64 {
    let (mut burst, mut frames) = (Burst::new(32), 0);
    for _ in 0..choice.bursts() {
        (0..choice.steps).for_each(|_| act());
        let came = poll(&mut burst);
        assert_eq!(judge(&mut burst), came);
        frames += came as u64;
    }
    frames
}
