//! The driver's end of a packed ring never shows a chain that is half written, and copes with every order of completion that
//! virtio 1.3 allows: any order without `IN_ORDER` (2.8.6), and one used descriptor for a whole batch with it (2.8.9). The device
//! is played by the test.

use std::collections::BTreeMap;

use pmd::port::{Burst, FAULTS};
use pmd::virtio::Doorbell;
use pmd::virtio::packed::PackedRing;
use pmd::virtio::ring::DriverRing;
use pmd::virtio::spec::{DESC_F_NEXT, DESC_F_WRITE, PackedPos, feature};
use proptest::prelude::*;
use testbed::frame::Stream;
use testbed::rings::{Direction, Guest, PackedChain, RawPackedRing, Setup, bytes_of, packet};

const HEADER_LEN: usize = 12;

/// Frame `sequence` of the tests' stream.
fn frame(sequence: u64) -> Vec<u8> {
    let mut frame = Vec::new();
    Stream::new(62, 1, 60..=300).write(sequence, &mut frame);
    frame
}

/// A device that keeps what it is given until the test says what is done.
struct Device {
    raw: RawPackedRing,
    avail: PackedPos,
    used: PackedPos,
    held: Vec<PackedChain>,
    frames: u64,
}

impl Device {
    fn new(guest: &Guest) -> Self {
        let (avail, used) = (PackedPos::START, PackedPos::START);
        Self { raw: guest.raw_packed().unwrap(), avail, used, held: Vec::new(), frames: 0 }
    }

    /// Takes all new chains.
    fn take(&mut self, guest: &Guest) {
        while let Some(chain) = self.raw.offered(guest.memory(), self.avail).unwrap() {
            assert!(self.held.iter().all(|held| held.id != chain.id), "id {} twice", chain.id);
            self.avail = self.avail.advance(chain.descs, self.raw.size());
            self.held.push(chain);
            assert!(self.held.iter().map(|chain| chain.descs).sum::<u16>() <= self.raw.size());
        }
    }

    /// Takes all new chains; each holds the next frame.
    fn look(&mut self, guest: &Guest) {
        let known = self.held.len();
        self.take(guest);
        for chain in &self.held[known..] {
            let bytes: Vec<u8> = chain.buffers.iter().flat_map(|&(addr, len, _)| read(guest, addr, len)).collect();
            assert_eq!(&bytes[..HEADER_LEN], &[0; HEADER_LEN], "header of frame {}", self.frames);
            assert_eq!(&bytes[HEADER_LEN..], frame(self.frames), "frame {}", self.frames);
            self.frames += 1;
        }
    }

    /// Completes a chain that is held: a used descriptor goes where the oldest unused one is, and skips as many as the chain
    /// has.
    fn complete(&mut self, index: usize, len: u32) -> PackedChain {
        let chain = self.held.remove(index);
        self.raw.complete(self.used, chain.id, len);
        self.used = self.used.advance(chain.descs, self.raw.size());
        chain
    }

    /// Completes the `count` oldest chains by one used descriptor, in the batch's first place, with the last one's id.
    fn complete_batch(&mut self, count: usize, len: u32) -> Vec<PackedChain> {
        let batch: Vec<_> = self.held.drain(..count).collect();
        if let Some(last) = batch.last() {
            let at = self.used;
            self.used = batch.iter().fold(at, |pos, chain| pos.advance(chain.descs, self.raw.size()));
            self.raw.complete(at, last.id, len);
        }
        batch
    }
}

fn read(guest: &Guest, addr: u64, len: u32) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    guest.bytes(addr, len).expect("an address in guest memory").read(&mut bytes);
    bytes
}

/// Writes a header of so many buffers, or none, and data into a chain of one buffer; returns their length.
fn fill(guest: &Guest, chain: &PackedChain, buffers: Option<u16>, data: &[u8]) -> u32 {
    let header = buffers.map_or(vec![], |buffers| [&[0; 10], &buffers.to_le_bytes()[..]].concat());
    let bytes = [&header, data].concat();
    let (addr, len, flags) = chain.buffers[0];
    assert_eq!((chain.descs, flags & DESC_F_WRITE), (1, DESC_F_WRITE));
    assert_eq!(guest.bytes(addr, len).unwrap().write(&bytes), bytes.len());
    bytes.len() as u32
}

struct NoBell;

impl Doorbell for NoBell {
    fn ring(&self) {}
}

/// Writes chains of so many descriptors, and after each step of that looks what a device would see.
fn write_step_by_step<const IN_ORDER: bool>(size: u16, chains: &[u16]) {
    let features = feature::VERSION_1 | feature::RING_PACKED | if IN_ORDER { feature::IN_ORDER } else { 0 };
    let guest = Guest::new(&Setup::new(features).ring(size, size)).unwrap();
    let mut ring = PackedRing::<IN_ORDER>::new(guest.layout(), Box::new(NoBell));
    let (raw, mut pos, mut lens) = (guest.raw_packed().unwrap(), PackedPos::START, BTreeMap::new());
    for (number, descs) in chains.iter().map(|descs| 1 + descs % size).enumerate() {
        let id = ring.next_id();
        let addr = |i: u16| guest.layout().desc + u64::from(i);
        let mut last = 0;
        for i in 1..=descs {
            last = ring.desc(addr(i), number as u32, if i < descs { DESC_F_NEXT } else { 0 });
            assert_eq!(raw.offered(guest.memory(), pos), Ok(None), "{i} of {descs} descriptors at {pos:?}");
        }
        ring.push(id);
        assert_eq!(raw.offered(guest.memory(), pos), Ok(None), "before it is published");
        ring.publish();
        lens.insert(id, descs);
        let chain = raw.offered(guest.memory(), pos).unwrap().expect("a chain");
        assert_eq!((chain.id, chain.descs), (id, descs));
        let addrs: Vec<_> = chain.buffers.iter().map(|&(addr, len, _)| (addr, len)).collect();
        assert_eq!(addrs, (1..=descs).map(|i| (addr(i), number as u32)).collect::<Vec<_>>());
        // Completed at once, so the ring is empty when the next one begins.
        raw.complete(pos, id, 0);
        let len = |id: u16| lens.get(&id).copied().unwrap_or(0);
        assert_eq!(ring.ready(8, len), Ok(1));
        assert_eq!(ring.pop(0, len), (id.into(), Ok(0)));
        ring.reclaim(id, last, descs);
        pos = pos.advance(descs, size);
    }
}

#[test]
fn a_device_sees_all_chains_of_a_batch_or_none() {
    for group in [false, true] {
        let guest = Guest::new(&Setup::new(feature::VERSION_1 | feature::RING_PACKED).ring(8, 8)).unwrap();
        let mut ring = PackedRing::<false>::new(guest.layout(), Box::new(NoBell));
        let (raw, mut pos) = (guest.raw_packed().unwrap(), PackedPos::START);
        // The second batch crosses the ring's end.
        for _ in 0..2 {
            let buffers = [(0x1000, 100), (0x2000, 200), (0x3000, 300), (0x4000, 400), (0x5000, 500)];
            let ids = if group {
                ring.push_group(buffers, 0)
            } else {
                buffers.map(|(addr, len)| ring.push_single(addr, len, 0))
            };
            assert_eq!(raw.offered(guest.memory(), pos), Ok(None), "before it is published");
            ring.publish();
            for (id, (addr, len)) in ids.into_iter().zip(buffers) {
                let chain = raw.offered(guest.memory(), pos).unwrap().expect("a chain");
                assert_eq!((chain.id, chain.buffers.as_slice()), (id, [(addr, len, pos.avail_flags())].as_slice()));
                raw.complete(pos, id, 0);
                pos = pos.advance(1, 8);
            }
            assert_eq!(ring.ready_singles(8), Ok(5));
            let done = ring.pop_group::<5>(0).map(|(id, len)| (id as u16, len));
            assert_eq!(done, ids.map(|id| (id, Ok(0))));
            ring.reclaim_group(ids);
        }
    }
}

proptest! {
    #[test]
    fn a_device_never_sees_a_half_written_chain(
        size in 2..40_u16, in_order: bool, chains in prop::collection::vec(any::<u16>(), 1..100)
    ) {
        if in_order { write_step_by_step::<true>(size, &chains) } else { write_step_by_step::<false>(size, &chains) }
    }

    #[test]
    fn transmit_completions_may_come_in_any_order(
        features in prop::sample::select(Direction::FromGuest.packed_sets()),
        size in 10..40_u16,
        steps in prop::collection::vec((1..=9_usize, any::<prop::sample::Index>(), 0..4_usize), 1..200),
    ) {
        let guest = Guest::new(&Setup::new(features & !feature::IN_ORDER).ring(size, size)).unwrap();
        let (mut device, mut tx) = (Device::new(&guest), guest.driver_tx().unwrap());
        let (mut burst, mut made) = (Burst::new(1), 0);
        for (segments, victim, completions) in steps {
            if burst.is_empty() {
                let frame = frame(made);
                burst.push(packet(&guest.pool, &frame, frame.len().div_ceil(segments)).unwrap()).unwrap();
                made += 1;
            }
            tx.queue.tx_burst(&mut burst);
            device.look(&guest);
            for _ in 0..completions.min(device.held.len()) {
                device.complete(victim.index(device.held.len()), 0);
            }
        }
        while !device.held.is_empty() {
            device.complete(0, 0);
        }
        tx.queue.reap();
        prop_assert_eq!(guest.pool.mempool().in_use(), segments_in(&burst));
        prop_assert_eq!(tx.stats().faults, [0; FAULTS]);
    }

    #[test]
    fn an_in_order_device_may_complete_sent_packets_by_one_descriptor(
        indirect: bool,
        size in 20..64_u16,
        batches in prop::collection::vec((1..40_usize, any::<prop::sample::Index>()), 1..60),
    ) {
        let base = feature::VERSION_1 | feature::IN_ORDER | feature::RING_PACKED;
        let features = base | if indirect { feature::INDIRECT_DESC } else { 0 };
        let guest = Guest::new(&Setup::new(features).ring(size, size)).unwrap();
        let (mut device, mut tx) = (Device::new(&guest), guest.driver_tx().unwrap());
        let (mut burst, mut made) = (Burst::new(64), 0);
        for (count, done) in batches {
            while burst.len() < count {
                let frame = frame(made);
                let segments = 1 + made as usize % 3;
                burst.push(packet(&guest.pool, &frame, frame.len().div_ceil(segments)).unwrap()).unwrap();
                made += 1;
            }
            tx.queue.tx_burst(&mut burst);
            device.look(&guest);
            device.complete_batch(done.index(device.held.len() + 1), 0);
            tx.queue.reap();
        }
        device.complete_batch(device.held.len(), 0);
        tx.queue.reap();
        prop_assert_eq!(guest.pool.mempool().in_use(), segments_in(&burst));
        prop_assert_eq!(tx.stats().faults, [0; FAULTS]);
    }

    #[test]
    fn receive_completions_may_come_in_any_order(
        features in prop::sample::select(Direction::ToGuest.packed_sets()),
        size in 16..70_u16,
        steps in prop::collection::vec((any::<prop::sample::Index>(), 0..40_usize, 1..64_usize), 1..60),
    ) {
        let guest = Guest::new(&Setup::new(features & !feature::IN_ORDER).ring(size, size)).unwrap();
        let (mut device, mut rx) = (Device::new(&guest), guest.driver_rx().unwrap());
        let (mut sent, mut received) = (0, 0);
        for (victim, completions, room) in steps {
            device.take(&guest);
            for _ in 0..completions.min(device.held.len()) {
                let index = victim.index(device.held.len());
                let len = fill(&guest, &device.held[index], Some(1), &frame(sent));
                device.complete(index, len);
                sent += 1;
            }
            let mut burst = Burst::new(room);
            rx.queue.rx_burst(&mut burst);
            for mbuf in burst.as_slice() {
                prop_assert_eq!(bytes_of(mbuf), Some(frame(received)));
                received += 1;
            }
        }
        let mut burst = Burst::new(128);
        while rx.queue.rx_burst(&mut burst) > 0 {}
        prop_assert_eq!(received + burst.len() as u64, sent);
        prop_assert_eq!(rx.stats().faults, [0; FAULTS]);
        drop((rx, burst));
        prop_assert_eq!(guest.pool.mempool().in_use(), 0);
    }

    /// All but the last buffer of a batch count as full, so a batch is one frame of several buffers, or single.
    #[test]
    fn an_in_order_device_may_complete_a_frame_of_several_buffers_by_one_descriptor(
        size in 33..100_u16,
        frames in prop::collection::vec((60..=2000_usize, 1..64_usize), 1..60),
    ) {
        let features = feature::VERSION_1 | feature::IN_ORDER | feature::MRG_RXBUF | feature::RING_PACKED;
        let guest = Guest::new(&Setup::new(features).ring(size, size).rooms(128, 2048)).unwrap();
        let (mut device, mut rx) = (Device::new(&guest), guest.driver_rx().unwrap());
        for (len, room) in frames {
            device.take(&guest);
            let frame: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
            let buffers = (len + HEADER_LEN).div_ceil(140);
            let (first, rest) = frame.split_at(len.min(128));
            let mut last = fill(&guest, &device.held[0], Some(buffers as u16), first);
            for (chain, data) in device.held[1..].iter().zip(rest.chunks(140)) {
                last = fill(&guest, chain, None, data);
            }
            device.complete_batch(buffers, last);
            let mut burst = Burst::new(room);
            prop_assert!((0..64).any(|_| rx.queue.rx_burst(&mut burst) > 0));
            prop_assert_eq!(burst.as_slice().first().and_then(bytes_of), Some(frame));
        }
        prop_assert_eq!(rx.stats().faults, [0; FAULTS]);
    }
}

/// Mbufs that the packets of `burst` consist of.
fn segments_in(burst: &Burst) -> usize {
    burst.as_slice().iter().map(|mbuf| usize::from(mbuf.nb_segs())).sum()
}
