//! Whatever runs short, frames are delivered or dropped under a name, the ring goes on when there is enough again, and every
//! mbuf is home once it is stopped, in whatever state.

use pmd::mbuf::Mbuf;
use pmd::port::{Burst, Fault};
use pmd::virtio::spec::feature;
use testbed::frame::Stream;
use testbed::ledger::Ledger;
use testbed::rings::{Direction, Guest, Pair, Setup, Traffic, packet};

fn on_every_path(test: impl Fn(Direction, Setup)) {
    for direction in Direction::ALL {
        for features in direction.split_sets() {
            test(direction, Setup::new(features));
        }
    }
}

/// In = out + dropped, the drops as both ends counted them.
fn assert_balanced(pair: &Pair) {
    let (sent, received) = (pair.sender.stats(), pair.receiver.stats());
    let mut ledger = Ledger::new(pair.to_string());
    ledger.input("sent", sent.packets);
    ledger.output("received", received.packets);
    for fault in Fault::ALL.into_iter().filter(|fault| fault.is_frame()) {
        ledger.dropped(fault.name(), received.fault(fault));
    }
    ledger.balance().unwrap();
}

#[test]
fn a_pool_smaller_than_the_ring_is_enough() {
    on_every_path(|direction, mut setup| {
        (setup.guest.count, setup.host.count) = (48, 48);
        (setup.guest.cache_size, setup.host.cache_size) = (0, 0);
        let mut pair = Pair::new(direction, &setup).unwrap();
        let mut traffic = Traffic::new(&Stream::new(31, 1, 60..=1000), 1000, 8);
        assert!(traffic.run(&mut pair, 5000), "{pair}: stands still");
        traffic.finish(0).unwrap();
        assert_eq!(pair.stop(), 0);
    });
}

#[test]
fn an_empty_pool_is_counted_and_loses_nothing() {
    on_every_path(|direction, setup| {
        let mut pair = Pair::new(direction, &setup).unwrap();
        let receiver_pool = match direction {
            Direction::ToGuest => pair.guest.pool.clone(),
            Direction::FromGuest => pair.host.clone(),
        };
        let mut traffic = Traffic::new(&Stream::new(32, 1, 60..=60), 60, 32);
        for round in 1..=5 {
            let mut hoard: Vec<Mbuf> = std::iter::from_fn(|| receiver_pool.alloc()).collect();
            for _ in 0..20 {
                traffic.send(&mut pair, 32);
                traffic.receive(&mut pair);
            }
            assert!(pair.receiver.stats().fault(Fault::NoMbuf) > 0, "{pair}: not counted in round {round}");
            Mbuf::free_bulk(hoard.drain(..));
            assert!(traffic.run(&mut pair, 500), "{pair}: stands still after round {round}");
        }
        traffic.finish(0).unwrap();
        assert_balanced(&pair);
        assert_eq!(pair.stop(), 0);
    });
}

#[test]
fn a_frame_of_many_mbufs_that_finds_too_few_is_dropped_and_counted() {
    for features in Direction::FromGuest.split_sets() {
        // A frame needs up to 9000 / 128 mbufs, and there are 64.
        let mut setup = Setup::new(features).rooms(9000, 128);
        (setup.host.count, setup.host.cache_size) = (64, 0);
        let mut pair = Pair::new(Direction::FromGuest, &setup).unwrap();
        let mut traffic = Traffic::new(&Stream::new(33, 1, 60..=9000), 9000, 1);
        assert!(traffic.run(&mut pair, 500), "{pair}: stands still");
        let starved = pair.receiver.stats().fault(Fault::Starved);
        assert!((1..500).contains(&starved), "{pair}: {starved} of 500 dropped");
        traffic.finish(starved).unwrap();
        assert_balanced(&pair);
        assert_eq!(pair.stop(), 0);
    }
}

#[test]
fn a_frame_longer_than_one_unmergeable_buffer_is_dropped_and_counted() {
    for features in Direction::ToGuest.split_sets().into_iter().filter(|f| f & feature::MRG_RXBUF == 0) {
        let mut pair = Pair::new(Direction::ToGuest, &Setup::new(features).rooms(1000, 9000)).unwrap();
        let mut traffic = Traffic::new(&Stream::new(34, 1, 60..=2000), 9000, 32);
        assert!(traffic.run(&mut pair, 2000), "{pair}: stands still");
        let long = pair.sender.stats().fault(Fault::Long);
        assert!((500..1500).contains(&long), "{pair}: {long} of 2000 dropped");
        assert_eq!(pair.sender.stats().packets, 2000 - long);
        traffic.finish(long).unwrap();
        assert_eq!(pair.stop(), 0);
    }
}

#[test]
fn a_frame_longer_than_all_mergeable_buffers_together_is_dropped_and_counted() {
    // 16 buffers of 128 bytes of data, and 12 of header each.
    const FIT: usize = 16 * 140 - 12;
    for features in Direction::ToGuest.split_sets().into_iter().filter(|f| f & feature::MRG_RXBUF != 0) {
        let mut pair = Pair::new(Direction::ToGuest, &Setup::new(features).ring(16, 16).rooms(128, 9000)).unwrap();
        for len in [FIT, FIT + 1, 9000, FIT] {
            let mut burst = Burst::new(1);
            burst.push(packet(&pair.host, &vec![1; len], 9000).unwrap()).unwrap();
            let mut received = Burst::new(16);
            assert_eq!(pair.sender.queue.tx_burst(&mut burst), 1, "{pair}, {len} bytes");
            assert_eq!(pair.receiver.queue.rx_burst(&mut received), usize::from(len <= FIT), "{pair}, {len} bytes");
        }
        assert_eq!(pair.sender.stats().fault(Fault::Long), 2, "{pair}");
        assert_eq!(pair.stop(), 0);
    }
}

#[test]
fn a_ring_may_be_stopped_in_any_state() {
    on_every_path(|direction, setup| {
        for (sends, receives) in [(0, 0), (1, 0), (1, 1), (20, 0), (20, 3), (20, 30)] {
            let mut pair = Pair::new(direction, &setup.clone().rooms(2048, 512)).unwrap();
            let mut traffic = Traffic::new(&Stream::new(35, 1, 60..=2000), 700, 30);
            for _ in 0..sends {
                traffic.send(&mut pair, 30);
            }
            for _ in 0..receives {
                traffic.receive(&mut pair);
            }
            drop(traffic);
            assert_eq!(pair.stop(), 0, "after {sends} bursts sent and {receives} received");
        }
    });
}

#[test]
fn a_half_received_frame_goes_home_when_the_ring_is_stopped() {
    for features in Direction::ToGuest.split_sets().into_iter().filter(|f| f & feature::MRG_RXBUF != 0) {
        let guest = Guest::new(&Setup::new(features)).unwrap();
        let (raw, mut rx) = (guest.raw().unwrap(), guest.driver_rx().unwrap());
        for i in 0..2 {
            // The first of three buffers, then the second; the third never comes.
            let head = raw.offered(i);
            let (addr, meta) = raw.described(head);
            guest.bytes(addr, meta.len).unwrap().write(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0]);
            raw.complete(head, 100);
            let mut burst = Burst::new(32);
            assert_eq!(rx.queue.rx_burst(&mut burst), 0);
        }
        assert!(guest.pool.mempool().in_use() > 0);
        drop(rx);
        assert_eq!(guest.pool.mempool().in_use(), 0);
    }
}
