//! Both ends run freely on threads of their own, and still every frame arrives, whole and in order.

use pmd::mempool::Worker;
use pmd::port::Burst;
use testbed::frame::{FrameCheck, FrameGen, Macs, Stream};
use testbed::rings::{Direction, Pair, Setup, bytes_of, packet};

const FRAMES: u64 = 10_000;
/// Polls in a row without a packet after which an end is taken to be stuck.
const IDLE_POLLS_MAX: usize = 10_000_000;

/// Calls `poll` until it has moved `FRAMES` packets in all.
fn poll_until_done(what: &str, mut poll: impl FnMut() -> usize) {
    let _worker = Worker::enter().unwrap();
    let (mut moved, mut idle) = (0, 0);
    while moved < FRAMES {
        let n = poll();
        moved += n as u64;
        idle = if n == 0 { idle + 1 } else { 0 };
        assert!(idle < IDLE_POLLS_MAX, "{what} is stuck after {moved} packets");
        if n == 0 {
            std::thread::yield_now();
        }
    }
    assert_eq!(moved, FRAMES, "{what}");
}

fn run(direction: Direction, setup: &Setup, stream: &Stream) {
    let mut pair = Pair::new(direction, setup).unwrap();
    let name = pair.to_string();
    let pool = pair.sender_pool().clone();
    let (sender, receiver) = (&mut pair.sender, &mut pair.receiver);
    let mut check = FrameCheck::new(stream.clone(), Macs::Kept);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut generator, mut frame) = (FrameGen::new(stream.clone()), Vec::new());
            let mut burst = Burst::new(32);
            poll_until_done("the sender", || {
                while generator.made() < FRAMES && burst.room() > 0 {
                    generator.write_next(&mut frame);
                    let Some(mbuf) = packet(&pool, &frame, 1000) else {
                        generator.back();
                        sender.queue.reap();
                        break;
                    };
                    burst.push(mbuf).unwrap();
                }
                sender.queue.tx_burst(&mut burst)
            });
        });
        scope.spawn(|| {
            let mut burst = Burst::new(32);
            poll_until_done("the receiver", || {
                let came = receiver.queue.rx_burst(&mut burst);
                for mbuf in burst.as_slice() {
                    check.check(&bytes_of(mbuf).unwrap_or_default());
                }
                burst.free();
                came
            });
        });
    });
    check.finish(FRAMES, 0).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(pair.stop(), 0, "{name}");
}

#[test]
fn two_threads_carry_every_frame_on_every_path() {
    for direction in Direction::ALL {
        for features in direction.feature_sets() {
            run(direction, &Setup::new(features).ring(128, 100), &Stream::new(41, 1, 60..=1500));
        }
    }
}
