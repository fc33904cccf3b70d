//! A driver's end copes with every order of completion that virtio 1.3 allows: any order without `IN_ORDER` (2.7.8), and one
//! element for a whole batch with it (2.7.9). The device is played by the test.

use std::collections::BTreeMap;

use pmd::port::{Burst, FAULTS};
use pmd::virtio::spec::{DESC_F_INDIRECT, feature, header_len};
use proptest::prelude::*;
use testbed::frame::Stream;
use testbed::rings::{Direction, Guest, RawRing, Setup, bytes_of, packet};

/// Frame `sequence` of the tests' stream.
fn frame(sequence: u64) -> Vec<u8> {
    let mut frame = Vec::new();
    Stream::new(11, 1, 60..=300).write(sequence, &mut frame);
    frame
}

/// The bytes of the chain at `head`, and the ring's descriptors that it takes.
fn read_chain(guest: &Guest, raw: &RawRing, head: u16) -> (Vec<u8>, Vec<u16>) {
    let links = raw.chain(guest.memory(), head).expect("a chain that ends");
    let mut bytes = Vec::new();
    for link in links.iter().filter(|link| link.meta.flags & DESC_F_INDIRECT == 0) {
        let start = bytes.len();
        bytes.resize(start + link.meta.len as usize, 0);
        guest.bytes(link.addr, link.meta.len).expect("an address in guest memory").read(&mut bytes[start..]);
    }
    (bytes, links.iter().filter_map(|link| link.index).collect())
}

/// A device that keeps what it is sent until the test says which packet is done.
#[derive(Default)]
struct Device {
    seen: u16,
    /// Per head: the descriptors of its chain.
    held: BTreeMap<u16, Vec<u16>>,
    frames: u64,
}

impl Device {
    /// Looks at all new chains: each holds the next frame, and no descriptor of a chain that is still held.
    fn look(&mut self, guest: &Guest, raw: &RawRing, header_len: usize) {
        while self.seen != raw.avail_idx() {
            let head = raw.offered(self.seen);
            let (bytes, descs) = read_chain(guest, raw, head);
            assert_eq!(&bytes[..header_len], &[0; 12][..header_len], "header of frame {}", self.frames);
            assert_eq!(&bytes[header_len..], frame(self.frames), "frame {}", self.frames);
            assert!(self.held.values().flatten().all(|held| !descs.contains(held)), "descriptors of {head} in use");
            self.held.insert(head, descs);
            self.seen = self.seen.wrapping_add(1);
            self.frames += 1;
        }
    }
}

proptest! {
    #[test]
    fn transmit_completions_may_come_in_any_order(
        features in prop::sample::select(Direction::FromGuest.split_sets()),
        limit in 12..=16_u16,
        steps in prop::collection::vec((1..=9_usize, any::<prop::sample::Index>(), 0..4_usize), 1..200),
    ) {
        let setup = Setup::new(features & !feature::IN_ORDER).ring(16, limit);
        let guest = Guest::new(&setup).unwrap();
        let (raw, mut tx) = (guest.raw().unwrap(), guest.driver_tx().unwrap());
        let (mut device, mut burst, mut made) = (Device::default(), Burst::new(1), 0);
        for (segments, victim, completions) in steps {
            if burst.is_empty() {
                let frame = frame(made);
                burst.push(packet(&guest.pool, &frame, frame.len().div_ceil(segments)).unwrap()).unwrap();
                made += 1;
            }
            tx.queue.tx_burst(&mut burst);
            device.look(&guest, &raw, header_len(features));
            for _ in 0..completions.min(device.held.len()) {
                let head = *device.held.keys().nth(victim.index(device.held.len())).unwrap();
                device.held.remove(&head);
                raw.complete(head, 0);
            }
        }
        for head in std::mem::take(&mut device.held).into_keys() {
            raw.complete(head, 0);
        }
        tx.queue.reap();
        prop_assert_eq!(guest.pool.mempool().in_use(), segments_in(&burst));
        prop_assert_eq!(tx.stats().faults, [0; FAULTS]);
    }

    #[test]
    fn an_in_order_device_may_complete_sent_packets_by_one_element(
        indirect: bool,
        batches in prop::collection::vec(1..40_usize, 1..60),
    ) {
        let features = feature::VERSION_1 | feature::IN_ORDER | if indirect { feature::INDIRECT_DESC } else { 0 };
        let guest = Guest::new(&Setup::new(features).ring(64, 64)).unwrap();
        let (raw, mut tx) = (guest.raw().unwrap(), guest.driver_tx().unwrap());
        let (mut device, mut burst, mut made) = (Device::default(), Burst::new(64), 0);
        for count in batches {
            while burst.len() < count {
                let segments = 1 + made as usize % 3;
                let frame = frame(made);
                burst.push(packet(&guest.pool, &frame, frame.len().div_ceil(segments)).unwrap()).unwrap();
                made += 1;
            }
            let sent = tx.queue.tx_burst(&mut burst);
            device.look(&guest, &raw, 12);
            let idx = raw.used_idx();
            device.held.clear();
            // One element, in the batch's first slot, names the batch's last chain.
            raw.set_used(idx, raw.offered(device.seen.wrapping_sub(1)).into(), 0);
            raw.set_used_idx(device.seen);
            tx.queue.reap();
            prop_assert!(sent > 0);
            prop_assert_eq!(guest.pool.mempool().in_use(), segments_in(&burst));
        }
        prop_assert_eq!(tx.stats().faults, [0; FAULTS]);
    }

    #[test]
    fn receive_completions_may_come_in_any_order(
        features in prop::sample::select(Direction::ToGuest.split_sets()),
        steps in prop::collection::vec((any::<prop::sample::Index>(), 0..40_usize, 1..64_usize), 1..60),
    ) {
        let features = features & !feature::IN_ORDER;
        let guest = Guest::new(&Setup::new(features).ring(64, 50)).unwrap();
        let (raw, mut rx) = (guest.raw().unwrap(), guest.driver_rx().unwrap());
        let (mut seen, mut held, mut sent, mut received) = (0_u16, Vec::new(), 0, 0);
        for (victim, completions, room) in steps {
            while seen != raw.avail_idx() {
                held.push(raw.offered(seen));
                seen = seen.wrapping_add(1);
            }
            for _ in 0..completions.min(held.len()) {
                let head = held.swap_remove(victim.index(held.len()));
                fill(&guest, &raw, head, header_len(features), &frame(sent));
                raw.complete(head, (header_len(features) + frame(sent).len()) as u32);
                sent += 1;
            }
            let mut burst = Burst::new(room);
            rx.queue.rx_burst(&mut burst);
            for mbuf in burst.as_slice() {
                prop_assert_eq!(bytes_of(mbuf), Some(frame(received)));
                received += 1;
            }
        }
        let mut burst = Burst::new(64);
        rx.queue.rx_burst(&mut burst);
        prop_assert_eq!(received + burst.len() as u64, sent);
        prop_assert_eq!(rx.stats().faults, [0; FAULTS]);
        drop((rx, burst));
        prop_assert_eq!(guest.pool.mempool().in_use(), 0);
    }

    /// All but the last buffer of a batch count as full (2.7.9), so a batch is one frame of several buffers, or single.
    #[test]
    fn an_in_order_device_may_complete_a_frame_of_several_buffers_by_one_element(
        frames in prop::collection::vec((60..=2000_usize, 1..64_usize), 1..60),
    ) {
        let features = feature::VERSION_1 | feature::IN_ORDER | feature::MRG_RXBUF;
        let guest = Guest::new(&Setup::new(features).ring(64, 64).rooms(128, 2048)).unwrap();
        let (raw, mut rx) = (guest.raw().unwrap(), guest.driver_rx().unwrap());
        for (len, room) in frames {
            let idx = raw.used_idx();
            let frame: Vec<u8> = (0..len).map(|i| (i * 7 + len) as u8).collect();
            let buffers = (len + 12).div_ceil(140) as u16;
            let mut bytes = [&[0; 10], &buffers.to_le_bytes()[..], &frame].concat();
            for i in 0..buffers {
                let rest = bytes.split_off(bytes.len().min(140));
                fill(&guest, &raw, raw.offered(idx.wrapping_add(i)), 0, &bytes);
                if i + 1 == buffers {
                    raw.set_used(idx, raw.offered(idx.wrapping_add(i)).into(), bytes.len() as u32);
                }
                bytes = rest;
            }
            raw.set_used_idx(idx.wrapping_add(buffers));
            let mut burst = Burst::new(room);
            let mut rounds = 0;
            while rx.queue.rx_burst(&mut burst) == 0 && rounds < 64 {
                rounds += 1;
            }
            prop_assert_eq!(burst.as_slice().first().and_then(bytes_of), Some(frame));
        }
        prop_assert_eq!(rx.stats().faults, [0; FAULTS]);
    }
}

/// Writes a header of one buffer and `frame` into the buffer at `head`.
fn fill(guest: &Guest, raw: &RawRing, head: u16, header_len: usize, frame: &[u8]) {
    let (addr, meta) = raw.described(head);
    let header = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];
    let bytes = [&header[..header_len], frame].concat();
    assert_eq!(guest.bytes(addr, meta.len).unwrap().write(&bytes), bytes.len());
}

/// Mbufs that the packets of `burst` consist of.
fn segments_in(burst: &Burst) -> usize {
    burst.as_slice().iter().map(|mbuf| usize::from(mbuf.nb_segs())).sum()
}
