//! The packet path neither allocates nor enters the kernel, so it never waits for a lock either: on every path of both ends,
//! with frames in one segment and in several, rings that run full, and pools that run dry.
//!
//! A thread that may make no system call cannot report one, so each path runs in a process of its own: this test again, which
//! is told by its environment which path it is.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use pmd::mempool::Worker;
use pmd::port::Burst;
use pmd::virtio::spec::feature::MRG_RXBUF;
use testbed::rings::{Direction, Pair, Setup, packet};
use testbed::sys::{CountingAllocator, SIGSYS, exit, forbid_system_calls};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Tells a child its path: direction and features.
const PATH: &str = "TWINRING_PACKET_PATH";
/// Rounds; the rings' 16-bit indexes wrap several times.
const ROUNDS: usize = 20_000;
/// Rounds that warm up: software rings fill, caches fill.
const ROUNDS_WARM: usize = 1000;

/// What a child's exit code says.
const CLEAN: i32 = 0;
const ALLOCATED: i32 = 10;
const STOOD_STILL: i32 = 11;

#[test]
fn a_burst_neither_allocates_nor_enters_the_kernel() {
    if let Ok(path) = std::env::var(PATH) {
        let (direction, features) = path.split_once(' ').unwrap();
        let direction = Direction::ALL[direction.parse::<usize>().unwrap()];
        confined(direction, features.parse().unwrap());
    }
    for (number, direction) in Direction::ALL.into_iter().enumerate() {
        for features in direction.feature_sets() {
            let mut child = Command::new(std::env::current_exe().unwrap());
            let child = child.env(PATH, format!("{number} {features}")).arg("--exact").arg("--nocapture");
            let output = child.arg("a_burst_neither_allocates_nor_enters_the_kernel").output().unwrap();
            let what = match (output.status.code(), output.status.signal()) {
                (Some(CLEAN), _) => continue,
                (Some(ALLOCATED), _) => "allocates",
                (Some(STOOD_STILL), _) => "moves no packets",
                (_, Some(SIGSYS)) => "makes a system call",
                _ => "cannot be run",
            };
            let said = String::from_utf8_lossy(&output.stderr);
            panic!("{direction:?}, features {features:#x}: {what}: {} {said}", output.status);
        }
    }
}

/// Runs a path without the right to make system calls, and ends the process before anything is unmapped.
fn confined(direction: Direction, features: u64) -> ! {
    let _worker = Worker::enter().unwrap();
    // The long frame needs several buffers of each end that may use several.
    let guest_room = if features & MRG_RXBUF != 0 { 1024 } else { 4096 };
    let mut setup = Setup::new(features).rooms(guest_room, 1024);
    // A little more than the ring takes, so that both pools run dry now and then.
    (setup.guest.count, setup.host.count) = (280, 280);
    let mut pair = Pair::new(direction, &setup).unwrap();
    let (mut going, mut coming) = (Burst::new(32), Burst::new(64));
    for turn in 0..ROUNDS_WARM {
        round(&mut pair, &mut going, &mut coming, turn);
    }
    forbid_system_calls().unwrap();

    let (before, mut received) = (CountingAllocator::count(), 0);
    for turn in 0..ROUNDS {
        received += round(&mut pair, &mut going, &mut coming, turn);
    }
    let allocated = CountingAllocator::count() != before;
    exit(match (allocated, received < ROUNDS) {
        (true, _) => ALLOCATED,
        (false, true) => STOOD_STILL,
        (false, false) => CLEAN,
    })
}

/// Sends up to a burst, some frames of which are long, and receives what came; every hundredth time only when nothing more
/// can be sent. Returns how many came.
fn round(pair: &mut Pair, going: &mut Burst, coming: &mut Burst, turn: usize) -> usize {
    let until_full = turn.is_multiple_of(100);
    loop {
        let count = if until_full { 32 } else { turn % 33 };
        for i in going.len()..count {
            let frame = &[0; 2500][..if (turn + i).is_multiple_of(16) { 2500 } else { 60 }];
            match packet(pair.sender_pool(), frame, 900) {
                // There is room: `count` is at most the burst's.
                Some(mbuf) => drop(going.push(mbuf)),
                None => break,
            }
        }
        if pair.sender.queue.tx_burst(going) == 0 || !until_full {
            break;
        }
    }
    pair.sender.queue.reap();
    let mut received = 0;
    while pair.receiver.queue.rx_burst(coming) > 0 {
        received += coming.free();
    }
    received
}
