//! The device's end of a packed ring takes a frame from a chain of any shape, and puts one into chains of any shape: cut
//! anywhere, inside the header too, direct, indirect or first one and then the other, with empty buffers in between, across the
//! ring's end, across memory regions. What it leaves is one used descriptor a chain (2.8.6), or one a batch (2.8.9). The driver is
//! played by the test.

use std::collections::VecDeque;

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::mem::Span;
use pmd::port::{Burst, FAULTS, Fault};
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, PackedMeta, PackedPos, feature};
use proptest::prelude::*;
use testbed::rings::{Direction, Guest, RawPackedRing, Setup, bytes_of, packet};

const SIZE: u16 = 61;
const HEADER_LEN: usize = 12;
const SCRATCH: usize = 256 << 10;

/// How a chain is built.
#[derive(Clone, Debug)]
struct Shape {
    /// Lengths of its buffers.
    lens: Vec<usize>,
    /// Bytes left unused before each of its buffers and its table.
    gap: usize,
    /// How many of its buffers stand in the ring itself; the rest in an indirect table.
    direct: usize,
}

/// A chain that was offered.
struct Offered {
    id: u16,
    pos: PackedPos,
    /// Where in the scratch memory its buffers lie, and their lengths.
    places: Vec<(usize, usize)>,
}

/// A driver that builds chains by hand.
struct Driver {
    guest: Guest,
    raw: RawPackedRing,
    scratch: Span,
    used_bytes: usize,
    pos: PackedPos,
    next_id: u16,
}

impl Driver {
    fn new(features: u64, regions: usize) -> Self {
        let mut setup = Setup { scratch: SCRATCH, regions, ..Setup::new(features).ring(SIZE, SIZE) };
        (setup.guest.count, setup.guest.cache_size) = (8, 0);
        let guest = Guest::new(&setup).unwrap();
        let scratch = guest.arena().alloc(SCRATCH, 1).unwrap();
        Self { raw: guest.raw_packed().unwrap(), guest, scratch, used_bytes: 0, pos: PackedPos::START, next_id: 0 }
    }

    /// Room for `len` bytes, `gap` bytes behind the last: offset in the scratch memory.
    fn place(&mut self, len: usize, gap: usize) -> usize {
        let mut at = self.used_bytes + gap;
        if at + len > SCRATCH {
            at = 0;
        }
        self.used_bytes = at + len;
        at
    }

    /// Builds a chain, fills its buffers from `bytes`, and offers it.
    fn offer(&mut self, shape: &Shape, write: u16, mut bytes: &[u8]) -> Offered {
        let places: Vec<_> = shape.lens.iter().map(|&len| (self.place(len, shape.gap), len)).collect();
        for &(at, len) in &places {
            let n = self.scratch.bytes(at, len).write(bytes);
            bytes = &bytes[n..];
        }
        let (direct, indirect) = places.split_at(shape.direct.min(places.len()));
        let mut buffers: Vec<_> = direct.iter().map(|&(at, len)| (self.scratch.iova(at), len as u32, write)).collect();
        if !indirect.is_empty() {
            let len = indirect.len() * 16;
            let table = self.place(len, shape.gap);
            for (i, &(at, len)) in indirect.iter().enumerate() {
                // Whatever else an entry says, it counts for nothing (2.8.7).
                let flags = write | if i % 2 == 0 { DESC_F_NEXT } else { 0 };
                let meta = PackedMeta { len: len as u32, id: i as u16 ^ 0x5555, flags }.pack();
                let entry = [self.scratch.iova(at), meta].map(u64::to_le_bytes).concat();
                self.scratch.bytes(table + i * 16, 16).write(&entry);
            }
            buffers.push((self.scratch.iova(table), len as u32, DESC_F_INDIRECT));
        }
        self.next_id = self.next_id.wrapping_add(29);
        let (id, pos) = (self.next_id, self.pos);
        self.pos = self.raw.offer(pos, id, &buffers);
        Offered { id, pos, places }
    }

    fn read(&self, places: &[(usize, usize)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(at, len) in places {
            let start = bytes.len();
            bytes.resize(start + len, 0);
            self.scratch.bytes(at, len).read(&mut bytes[start..]);
        }
        bytes
    }
}

fn host_pool(room: u16) -> MbufPool {
    let mut setup = Setup::new(0).rooms(room, room);
    setup.host.count = 256;
    setup.host_pool().unwrap()
}

/// Bytes that differ from frame to frame and from place to place.
fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i / 251 + i) as u8 ^ seed).collect()
}

/// The lengths of `len` bytes cut at `cuts`; two equal ones leave an empty buffer.
fn cut(len: usize, cuts: &[prop::sample::Index]) -> Vec<usize> {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(len + 1)).chain([len]).collect();
    at.sort_unstable();
    at.iter().scan(0, |from, &to| Some(to - std::mem::replace(from, to))).collect()
}

fn cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 0..14)
}

proptest! {
    #[test]
    fn frames_are_taken_from_chains_of_any_shape(
        features in prop::sample::select(Direction::FromGuest.packed_sets()),
        regions in 1..12_usize,
        room in prop::sample::select(vec![64_u16, 200, 2048]),
        chains in prop::collection::vec((14..4000_usize, cuts(), 0..14_usize, 0..3000_usize, any::<bool>()), 1..40),
    ) {
        let mut driver = Driver::new(features, regions);
        let pool = host_pool(room);
        let mut device = driver.guest.device_from_guest(&Position::default(), &pool).unwrap();
        for (i, (len, cuts, direct, gap, small_cuts)) in chains.into_iter().enumerate() {
            let bytes = [vec![0; HEADER_LEN], frame(len, i as u8)].concat();
            // Half of the chains are cut near their beginning, where the header lies.
            let mut lens = cut(if small_cuts { 24 } else { bytes.len() }, &cuts);
            lens.push(bytes.len() - lens.iter().sum::<usize>());
            let chain = driver.offer(&Shape { lens, gap, direct }, 0, &bytes);

            let mut burst = Burst::new(32);
            prop_assert_eq!(device.queue.rx_burst(&mut burst), 1, "{:?}", device.stats());
            prop_assert_eq!(bytes_of(&burst.as_slice()[0]), Some(frame(len, i as u8)));
            prop_assert_eq!(driver.raw.used(chain.pos).map(|meta| (meta.id, meta.len)), Some((chain.id, 0)));
        }
        prop_assert_eq!(device.stats().faults, [0; FAULTS]);
        drop(device);
        prop_assert_eq!(pool.mempool().in_use(), 0);
    }

    #[test]
    fn a_burst_of_chains_is_used_one_by_one_or_in_order_by_its_last(
        features in prop::sample::select(Direction::FromGuest.packed_sets()),
        bursts in prop::collection::vec(prop::collection::vec(1..7_usize, 1..9), 1..30),
    ) {
        let mut driver = Driver::new(features, 1);
        let pool = host_pool(2048);
        let mut device = driver.guest.device_from_guest(&Position::default(), &pool).unwrap();
        for descs in bursts {
            let bytes = [vec![0; HEADER_LEN], frame(84, 1)].concat();
            let offer = |&n: &usize| driver.offer(&Shape { lens: vec![96 / n; n], gap: 0, direct: n }, 0, &bytes[..96 / n * n]);
            let chains: Vec<Offered> = descs.iter().map(offer).collect();
            let mut burst = Burst::new(32);
            prop_assert_eq!(device.queue.rx_burst(&mut burst), chains.len());
            let used: Vec<_> = chains.iter().map(|chain| driver.raw.used(chain.pos).map(|meta| meta.id)).collect();
            let mut expected: Vec<_> = chains.iter().map(|chain| Some(chain.id)).collect();
            if features & feature::IN_ORDER != 0 {
                let last = expected.pop();
                expected = [last].into_iter().chain(expected.iter().map(|_| Some(None))).flatten().collect();
            }
            prop_assert_eq!(used, expected);
        }
    }

    #[test]
    fn frames_are_put_into_chains_of_any_shape(
        features in prop::sample::select(Direction::ToGuest.packed_sets()),
        regions in 1..12_usize,
        frames in prop::collection::vec((14..4000_usize, 1..2000_usize), 1..30),
        capacity in 12..6000_usize,
        cuts in cuts(),
        direct in 0..14_usize,
        gap in 0..300_usize,
    ) {
        let mergeable = features & feature::MRG_RXBUF != 0;
        let mut driver = Driver::new(features, regions);
        let pool = host_pool(2048);
        let mut device = driver.guest.device_to_guest(&Position::default()).unwrap();
        let mut offered: VecDeque<Offered> = VecDeque::new();
        // More would use descriptors, or scratch memory, that the device still holds.
        let offered_max = usize::from(SIZE) / (direct + 1).min(cuts.len() + 2);
        let mut long = 0;
        for (i, (len, segment_len)) in frames.into_iter().enumerate() {
            let shape = Shape { lens: cut(capacity, &cuts), gap, direct };
            while offered.len() < 3 {
                offered.push_back(driver.offer(&shape, DESC_F_WRITE, &[]));
            }
            let mut burst = Burst::new(1);
            burst.push(packet(&pool, &frame(len, i as u8), segment_len.max(len / 100)).unwrap()).unwrap();
            let needed = (HEADER_LEN + len).div_ceil(capacity);
            while mergeable && offered.len() < needed.min(offered_max) {
                prop_assert_eq!(device.queue.tx_burst(&mut burst), 0, "{} buffers are too few", offered.len());
                offered.push_back(driver.offer(&shape, DESC_F_WRITE, &[]));
            }
            if offered.len() < needed {
                break;
            }
            prop_assert_eq!(device.queue.tx_burst(&mut burst), 1);
            if !mergeable && needed > 1 {
                long += 1;
                continue;
            }
            let mut bytes = Vec::new();
            for _ in 0..needed {
                let chain = offered.pop_front().unwrap();
                let used = driver.raw.used(chain.pos).expect("a used descriptor");
                prop_assert_eq!((used.id, used.flags & DESC_F_WRITE), (chain.id, DESC_F_WRITE));
                prop_assert!(used.len as usize <= capacity);
                bytes.extend_from_slice(&driver.read(&chain.places)[..used.len as usize]);
            }
            let expected = [&[0; 10], &(needed as u16).to_le_bytes()[..]].concat();
            prop_assert_eq!(&bytes[..HEADER_LEN], &expected[..]);
            prop_assert_eq!(&bytes[HEADER_LEN..], frame(len, i as u8));
            prop_assert!(offered.iter().all(|chain| driver.raw.used(chain.pos).is_none()));
        }
        prop_assert_eq!(device.stats().fault(Fault::Long), long);
        prop_assert_eq!(device.stats().dropped(), long);
        drop(device);
        prop_assert_eq!(pool.mempool().in_use(), 0);
    }
}

/// A driver that finds the first buffer of a frame may count on the others (5.1.6.4), as Linux does.
#[test]
fn the_buffers_of_a_frame_are_used_together() {
    const BUFFERS: usize = 6;
    let features = feature::VERSION_1 | feature::RING_PACKED | feature::MRG_RXBUF;
    let mut driver = Driver::new(features, 1);
    let pool = host_pool(2048);
    let mut device = driver.guest.device_to_guest(&Position::default()).unwrap();
    let shape = Shape { lens: vec![100], gap: 0, direct: 1 };
    for round in 0..300 {
        let chains: Vec<_> = (0..BUFFERS).map(|_| driver.offer(&shape, DESC_F_WRITE, &[])).collect();
        let mut burst = Burst::new(1);
        burst.push(packet(&pool, &[1; 100 * BUFFERS - HEADER_LEN], 2048).unwrap()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(device.queue.tx_burst(&mut burst), 1));
            let used = |chain: &Offered| driver.raw.used(chain.pos).is_some();
            let waited = (0..50_000_000).find(|_| used(&chains[0]));
            assert!(waited.is_some(), "no frame in round {round}");
            assert_eq!(chains.iter().filter(|chain| used(chain)).count(), BUFFERS, "in round {round}");
        });
    }
}
