//! What the fuzz targets share. Of those of the rings: a liar at one end does what the input says, and the other end must neither
//! panic nor write where it must not nor lose an mbuf or count a frame wrong.

pub mod daemon;

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::port::{Burst, Stats, TxBurst};
use pmd::virtio::spec::feature;
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

/// A vhost-user message in native order (vhost-user, "Header").
#[must_use]
pub fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let header = [request, flags, body.len() as u32].map(u32::to_ne_bytes).concat();
    [&header, body].concat()
}

/// The device's end of a ring against a driver that lies.
///
/// # Panics
/// If it does not survive.
pub fn device_end(data: &[u8], sets: fn(Direction) -> Vec<u64>) {
    let Some(choice) = Choice::of(data, sets) else { return };
    let setup = choice.setup(2);
    let (guest, host) = (Guest::new(&setup).expect("memory"), setup.host_pool().expect("memory"));
    let mut driver = LyingDriver::new(&guest, choice.bytes).expect("scratch memory");
    let position = Position::default();
    match choice.direction {
        Direction::FromGuest => {
            let mut device = guest.device_from_guest(&position, &host).expect("a ring");
            let frames = receive(&choice, || driver.act(), |burst| device.queue.rx_burst(burst));
            assert_eq!(device.stats().packets, frames);
            check_completed(&guest, &device.stats());
        }
        Direction::ToGuest => {
            let mut device = guest.device_to_guest(&position).expect("a ring");
            let frames = transmit(&choice, || driver.act(), &mut *device.queue, &host);
            assert_eq!(device.stats().packets + device.stats().dropped(), frames);
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
            let frames = transmit(&choice, || device.act(), &mut *driver.queue, &guest.pool);
            assert_eq!(driver.stats().packets + driver.stats().dropped(), frames);
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

/// Lets the liar act and sends; how many frames were taken.
fn transmit(choice: &Choice, mut act: impl FnMut(), queue: &mut dyn TxBurst, pool: &MbufPool) -> u64 {
    let mut frames = 0;
    for turn in 0..choice.bursts() {
        (0..choice.steps).for_each(|_| act());
        frames += send(queue, pool, turn) as u64;
        queue.reap();
    }
    frames
}

/// Each chain that the device completed was a frame, delivered or counted. Split rings only: a packed one keeps no such number.
fn check_completed(guest: &Guest, stats: &Stats) {
    if guest.features() & feature::RING_PACKED == 0 {
        let completed = guest.raw().expect("a ring").used_idx();
        assert_eq!(completed, (stats.packets + stats.dropped()) as u16, "frames that nobody has counted");
    }
}
