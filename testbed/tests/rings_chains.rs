//! The device's end takes a frame from a chain of any shape, and puts one into chains of any shape: cut anywhere, inside the
//! header too, direct, indirect or first one and then the other, with empty buffers in between, across memory regions, with
//! an indirect table across regions. The driver is played by the test.

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::mem::Span;
use pmd::port::{Burst, FAULTS, Fault};
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, DescMeta, feature, header_len};
use proptest::prelude::*;
use testbed::rings::{Direction, Guest, RawRing, Setup, bytes_of, packet};

const SIZE: u16 = 64;
const SCRATCH: usize = 256 << 10;

/// How a chain is built.
#[derive(Clone, Debug)]
struct Shape {
    /// Lengths of its buffers.
    lens: Vec<usize>,
    /// Bytes left unused before each of its buffers and its table.
    gap: usize,
    /// How many of its buffers the ring's own table names; the rest stand in an indirect one.
    direct: usize,
}

/// A driver that builds chains by hand.
struct Driver {
    guest: Guest,
    raw: RawRing,
    scratch: Span,
    used_bytes: usize,
    next_desc: u16,
}

impl Driver {
    fn new(features: u64, regions: usize) -> Self {
        let mut setup = Setup { scratch: SCRATCH, regions, ..Setup::new(features).ring(SIZE, SIZE) };
        (setup.guest.count, setup.guest.cache_size) = (8, 0);
        let guest = Guest::new(&setup).unwrap();
        let scratch = guest.arena().alloc(SCRATCH, 1).unwrap();
        Self { raw: guest.raw().unwrap(), guest, scratch, used_bytes: 0, next_desc: 0 }
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

    /// A free descriptor; neighbours in time are not neighbours in the table.
    fn desc(&mut self) -> u16 {
        self.next_desc = (self.next_desc + 29) % SIZE;
        self.next_desc
    }

    /// Builds a chain, fills its buffers from `bytes`, and offers it; returns its head, and where in the scratch memory its
    /// buffers lie.
    fn offer(&mut self, shape: &Shape, write: u16, mut bytes: &[u8]) -> (u16, Vec<(usize, usize)>) {
        let places: Vec<_> = shape.lens.iter().map(|&len| (self.place(len, shape.gap), len)).collect();
        for &(at, len) in &places {
            let n = self.scratch.bytes(at, len).write(bytes);
            bytes = &bytes[n..];
        }
        let (direct, indirect) = places.split_at(shape.direct.min(places.len()));
        let mut links: Vec<(u64, u32, u16)> =
            direct.iter().map(|&(at, len)| (self.scratch.iova(at), len as u32, write)).collect();
        if !indirect.is_empty() {
            let len = indirect.len() * size_of::<Desc>();
            let table = self.place(len, shape.gap);
            for (i, &(at, len)) in indirect.iter().enumerate() {
                let next = if i + 1 < indirect.len() { DESC_F_NEXT } else { 0 };
                let meta = DescMeta { len: len as u32, flags: write | next, next: i as u16 + 1 }.pack();
                let entry = [self.scratch.iova(at), meta].map(u64::to_le_bytes).concat();
                self.scratch.bytes(table + i * entry.len(), entry.len()).write(&entry);
            }
            links.push((self.scratch.iova(table), len as u32, DESC_F_INDIRECT));
        }
        let descs: Vec<u16> = links.iter().map(|_| self.desc()).collect();
        for (i, &(addr, len, flags)) in links.iter().enumerate() {
            let next = descs.get(i + 1).copied();
            let flags = flags | if next.is_some() { DESC_F_NEXT } else { 0 };
            self.raw.describe(descs[i], addr, DescMeta { len, flags, next: next.unwrap_or(0) });
        }
        self.raw.offer(descs[0]);
        (descs[0], places)
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
        features in prop::sample::select(Direction::FromGuest.split_sets()),
        regions in 1..12_usize,
        room in prop::sample::select(vec![64_u16, 200, 2048]),
        chains in prop::collection::vec((14..4000_usize, cuts(), 0..14_usize, 0..3000_usize, any::<bool>()), 1..40),
    ) {
        let mut driver = Driver::new(features, regions);
        let pool = host_pool(room);
        let mut device = driver.guest.device_from_guest(&Position::default(), &pool).unwrap();
        for (i, (len, cuts, direct, gap, small_cuts)) in chains.into_iter().enumerate() {
            let bytes = [vec![0; header_len(features)], frame(len, i as u8)].concat();
            // Half of the chains are cut near their beginning, where the header lies.
            let mut lens = cut(if small_cuts { 24 } else { bytes.len() }, &cuts);
            lens.push(bytes.len() - lens.iter().sum::<usize>());
            driver.offer(&Shape { lens, gap, direct }, 0, &bytes);

            let mut burst = Burst::new(32);
            prop_assert_eq!(device.queue.rx_burst(&mut burst), 1, "{:?}", device.stats());
            prop_assert_eq!(bytes_of(&burst.as_slice()[0]), Some(frame(len, i as u8)));
            prop_assert_eq!(driver.raw.used_idx(), i as u16 + 1);
        }
        prop_assert_eq!(device.stats().faults, [0; FAULTS]);
        drop(device);
        prop_assert_eq!(pool.mempool().in_use(), 0);
    }

    #[test]
    fn frames_are_put_into_chains_of_any_shape(
        features in prop::sample::select(Direction::ToGuest.split_sets()),
        regions in 1..12_usize,
        frames in prop::collection::vec((14..4000_usize, 1..2000_usize), 1..30),
        capacity in 12..6000_usize,
        cuts in cuts(),
        direct in 0..14_usize,
        gap in 0..300_usize,
    ) {
        let mergeable = features & feature::MRG_RXBUF != 0;
        let header = header_len(features);
        let mut driver = Driver::new(features, regions);
        let pool = host_pool(2048);
        let position = Position::default();
        let mut device = driver.guest.device_to_guest(&position).unwrap();
        let mut offered = std::collections::VecDeque::new();
        // More would use descriptors, or scratch memory, that the device still holds.
        let offered_max = usize::from(SIZE) / (direct + 1).min(cuts.len() + 2);
        let (mut used, mut long) = (0_u16, 0);
        for (i, (len, segment_len)) in frames.into_iter().enumerate() {
            // Enough for most frames; a few are too long if buffers cannot be merged.
            let shape = Shape { lens: cut(capacity, &cuts), gap, direct };
            while offered.len() < 3 {
                offered.push_back(driver.offer(&shape, DESC_F_WRITE, &[]));
            }
            let mut burst = Burst::new(1);
            burst.push(packet(&pool, &frame(len, i as u8), segment_len.max(len / 100)).unwrap()).unwrap();
            let needed = (header + len).div_ceil(capacity);
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
                let (head, places) = offered.pop_front().unwrap();
                let (id, written) = driver.raw.used(used);
                used = used.wrapping_add(1);
                prop_assert_eq!(id, u32::from(head));
                prop_assert!(written as usize <= capacity);
                bytes.extend_from_slice(&driver.read(&places)[..written as usize]);
            }
            let expected = [&[0; 10], &(needed as u16).to_le_bytes()[..]].concat();
            prop_assert_eq!(&bytes[..header], &expected[..header]);
            prop_assert_eq!(&bytes[header..], frame(len, i as u8));
            prop_assert_eq!(driver.raw.used_idx(), used);
        }
        prop_assert_eq!(device.stats().fault(Fault::Long), long);
        prop_assert_eq!(device.stats().dropped(), long);
        drop(device);
        prop_assert_eq!(position.get(), u32::from(used));
        prop_assert_eq!(pool.mempool().in_use(), 0);
    }
}

#[test]
fn a_stopped_ring_goes_on_where_it_was() {
    for features in Direction::FromGuest.split_sets() {
        let (mut driver, position) = (Driver::new(features, 1), Position::default());
        let pool = host_pool(2048);
        for i in 0..300_u16 {
            let mut device = driver.guest.device_from_guest(&position, &pool).unwrap();
            let bytes = [vec![0; header_len(features)], frame(60, i as u8)].concat();
            driver.offer(&Shape { lens: vec![bytes.len()], gap: 0, direct: 1 }, 0, &bytes);
            let mut burst = Burst::new(4);
            assert_eq!(device.queue.rx_burst(&mut burst), 1);
            assert_eq!(bytes_of(&burst.as_slice()[0]), Some(frame(60, i as u8)));
            drop(device);
            assert_eq!(position.get(), u32::from(i) + 1);
        }
        assert_eq!(pool.mempool().in_use(), 0);
    }
}
