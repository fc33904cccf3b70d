//! Packed rings have any size up to 32768, and carry chains of any length that fits: one that fills the ring exactly, two that
//! do so together, and one that crosses its end, from every slot (virtio 1.3, 2.8.1).

use pmd::port::{Burst, FAULTS};
use pmd::virtio::spec::feature;
use testbed::frame::Stream;
use testbed::rings::{Direction, Pair, Setup, Traffic, bytes_of, packet};

#[test]
fn packed_rings_of_any_size_carry_frames() {
    for direction in Direction::ALL {
        for features in direction.packed_sets() {
            for size in [2, 3, 4, 5, 7, 33, 250, 1023, 32767, 32768] {
                let mut setup = Setup::new(features).ring(size, size).rooms(128, 128);
                setup.guest.count = u32::from(size) + 512;
                let mut pair = Pair::new(direction, &setup).unwrap();
                let mut traffic = Traffic::new(&Stream::new(61, 1, 60..=100), 100, 32);
                assert!(traffic.run(&mut pair, 300 + u64::from(size)), "{pair}: stands still after {}", traffic.made());
                traffic.finish(0).unwrap_or_else(|e| panic!("{pair}: {e}"));
                let faults = (pair.sender.stats().faults, pair.receiver.stats().faults);
                assert_eq!(faults, Default::default(), "{pair}");
                assert_eq!(pair.stop(), 0);
            }
        }
    }
}

/// A pair whose sender makes a chain of one descriptor a segment, and one for the header if there are several.
struct Chains {
    pair: Pair,
    size: u16,
    /// Where the next chain begins.
    slot: u16,
    sent: u8,
}

impl Chains {
    fn new(features: u64, size: u16) -> Self {
        let setup = Setup::new(features).ring(size, size);
        Self { pair: Pair::new(Direction::FromGuest, &setup).unwrap(), size, slot: 0, sent: 0 }
    }

    /// Sends chains of so many descriptors in one burst; they arrive, whole.
    fn send(&mut self, descs: &[u16]) {
        let (mut burst, mut frames) = (Burst::new(descs.len()), Vec::new());
        for &descs in descs {
            self.sent = self.sent.wrapping_add(1);
            let frame = vec![self.sent; 16 * usize::from(descs - 1).max(1)];
            burst.push(packet(&self.pair.guest.pool, &frame, 16).unwrap()).unwrap();
            frames.push(frame);
            self.slot = (self.slot + descs) % self.size;
        }
        let mut received = Burst::new(descs.len());
        assert_eq!(self.pair.sender.queue.tx_burst(&mut burst), descs.len(), "{}: {descs:?}", self.pair);
        assert_eq!(self.pair.receiver.queue.rx_burst(&mut received), descs.len(), "{}: {descs:?}", self.pair);
        let came: Vec<_> = received.as_slice().iter().map(|mbuf| bytes_of(mbuf).unwrap()).collect();
        assert_eq!(came, frames, "{}", self.pair);
    }

    /// Sends single descriptors until the next chain begins at `slot`.
    fn go_to(&mut self, slot: u16) {
        while self.slot != slot {
            self.send(&[1]);
        }
    }

    fn finish(self) {
        let faults = (self.pair.sender.stats().faults, self.pair.receiver.stats().faults);
        assert_eq!(faults, ([0; FAULTS], [0; FAULTS]));
        assert_eq!(self.pair.stop(), 0);
    }
}

fn direct_sets() -> impl Iterator<Item = u64> {
    Direction::FromGuest.packed_sets().into_iter().filter(|features| features & feature::INDIRECT_DESC == 0)
}

#[test]
fn a_chain_of_every_length_starts_at_every_slot() {
    for features in direct_sets() {
        for size in [3, 5, 8, 13] {
            let mut chains = Chains::new(features, size);
            // A packet of one segment is a single descriptor, one of two is a chain of three.
            for descs in 3..=size {
                for slot in 0..size {
                    chains.go_to(slot);
                    chains.send(&[descs]);
                }
            }
            chains.finish();
        }
    }
}

#[test]
fn two_chains_fill_the_ring_exactly_from_every_slot() {
    for features in direct_sets() {
        for size in [4, 5, 8, 13] {
            let mut chains = Chains::new(features, size);
            for first in (1..size).filter(|&first| first != 2 && size - first != 2) {
                for slot in 0..size {
                    chains.go_to(slot);
                    chains.send(&[first, size - first]);
                }
            }
            chains.finish();
        }
    }
}

#[test]
fn a_frame_of_several_buffers_starts_at_every_slot() {
    for features in Direction::ToGuest.packed_sets().into_iter().filter(|f| f & feature::MRG_RXBUF != 0) {
        for size in [2, 3, 5, 7] {
            let mut pair =
                Pair::new(Direction::ToGuest, &Setup::new(features).ring(size, size).rooms(128, 2048)).unwrap();
            // A frame moves the next one's first buffer by its own number, and `i` by one after each round of that.
            for i in 0..2 * u32::from(size) {
                for buffers in (1..=usize::from(size)).chain([1]) {
                    // Each buffer holds 140 bytes, of which the first one's 12 are the header.
                    let frame = vec![i as u8; 140 * buffers - 12];
                    let (mut burst, mut received) = (Burst::new(1), Burst::new(1));
                    burst.push(packet(&pair.host, &frame, 2048).unwrap()).unwrap();
                    assert_eq!(pair.sender.queue.tx_burst(&mut burst), 1, "{pair}, {buffers} buffers");
                    assert_eq!(pair.receiver.queue.rx_burst(&mut received), 1, "{pair}, {buffers} buffers");
                    let mbuf = &received.as_slice()[0];
                    assert_eq!((usize::from(mbuf.nb_segs()), bytes_of(mbuf)), (buffers, Some(frame)), "{pair}");
                }
            }
            assert_eq!(pair.stop(), 0);
        }
    }
}
