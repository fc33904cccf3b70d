//! Two ends that sleep whenever there is nothing to do never sleep while there is: messages go to and fro between two threads, each
//! of which asks to be woken, looks once more, and sleeps on an eventfd.

use pmd::mbuf::MbufPool;
use pmd::mempool::Worker;
use pmd::port::{Burst, RxBurst, TxBurst};
use pmd::virtio::spec::feature;
use testbed::rings::{Bell, Direction, Pair, Setup, bytes_of, packet};

/// How long one end may sleep while the other has something for it; only a lost wake-up, or a machine that stands still, takes as
/// long.
const STALL_MS: u16 = 10_000;

/// One end of a conversation.
struct Talker<'a> {
    name: &'static str,
    tx: &'a mut dyn TxBurst,
    rx: &'a mut dyn RxBurst,
    /// Where the other end wakes this one.
    bell: &'a Bell,
    pool: &'a MbufPool,
    sent: u64,
    received: u64,
    slept: u64,
}

impl Talker<'_> {
    fn say(&mut self, count: u64) {
        let mut burst = Burst::new(count as usize);
        for _ in 0..count {
            let mut frame = [0; 60];
            frame[..8].copy_from_slice(&self.sent.to_le_bytes());
            burst.push(packet(self.pool, &frame, 60).expect("an mbuf")).unwrap();
            self.sent += 1;
        }
        assert_eq!(self.tx.tx_burst(&mut burst), count as usize, "{}: no room for {count}", self.name);
    }

    /// Receives what there is, and sleeps until there is something; returns how many messages came.
    fn hear(&mut self) -> u64 {
        let mut burst = Burst::new(32);
        loop {
            let came = self.rx.rx_burst(&mut burst) as u64;
            if came > 0 {
                for mbuf in burst.as_slice() {
                    let bytes = bytes_of(mbuf).expect("a packet");
                    assert_eq!(bytes[..8], self.received.to_le_bytes(), "{}", self.name);
                    self.received += 1;
                }
                return came;
            }
            if self.rx.arm() {
                self.slept += 1;
                assert!(
                    self.bell.wait(STALL_MS),
                    "{} was not woken in {STALL_MS} ms: sent {}, received {}, pending {}",
                    self.name,
                    self.sent,
                    self.received,
                    self.rx.pending(),
                );
                self.rx.disarm();
            }
        }
    }
}

/// A guest that says one to three things at a time, and a host that answers each.
fn talk(features: u64, messages: u64) {
    let setup = Setup::new(features).ring(64, 64);
    let mut there = Pair::new(Direction::FromGuest, &setup).unwrap();
    let mut back = Pair::new(Direction::ToGuest, &setup).unwrap();
    let name = there.to_string();
    let new = |name, tx, rx, bell, pool| Talker { name, tx, rx, bell, pool, sent: 0, received: 0, slept: 0 };
    let (guest_pool, host_pool) = (&there.guest.pool, &back.host);
    let (guest_tx, host_rx) = (&mut there.sender, &mut there.receiver);
    let (host_tx, guest_rx) = (&mut back.sender, &mut back.receiver);
    let mut guest = new("the guest", &mut *guest_tx.queue, &mut *guest_rx.queue, &host_tx.bell, guest_pool);
    let mut host = new("the host", &mut *host_tx.queue, &mut *host_rx.queue, &guest_tx.bell, host_pool);
    let slept = std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let _worker = Worker::enter().unwrap();
            while guest.sent < messages / 2 {
                guest.say((1 + guest.sent % 3).min(messages / 2 - guest.sent));
                while guest.received < guest.sent {
                    guest.hear();
                }
            }
            guest.slept
        });
        let host = scope.spawn(|| {
            let _worker = Worker::enter().unwrap();
            while host.received < messages / 2 {
                let count = host.hear();
                host.say(count);
            }
            host.slept
        });
        [guest.join(), host.join()].map(|slept| slept.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    assert!(slept.iter().all(|&times| times > messages / 100), "{name}: slept only {slept:?} times in {messages}");
    assert_eq!(there.stop() + back.stop(), 0, "{name}");
}

fn talk_on_every_kind_of_ring(messages: u64) {
    for ring in [0, feature::RING_PACKED] {
        for order in [0, feature::IN_ORDER] {
            for events in [0, feature::EVENT_IDX] {
                talk(feature::VERSION_1 | ring | order | events, messages);
            }
        }
    }
}

#[test]
fn no_wake_up_is_lost_in_100_000_messages() {
    talk_on_every_kind_of_ring(100_000);
}

#[test]
#[ignore = "8 million messages; testbed/check --long runs it"]
fn no_wake_up_is_lost_in_1_000_000_messages() {
    talk_on_every_kind_of_ring(1_000_000);
}
