//! A backend whose front-end interferes while frames go round: rings are taken back where they stand and given back, memory
//! tables change, and no frame is lost, doubled or overtaken.

use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::time::Instant;

use backend::control::{Control, Mode};
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;
use pmd::path::select;
use pmd::port::{Burst, QueueStats, RxBurst, TxBurst};
use pmd::virtio::Doorbell;
use pmd::virtio::paths::{RX_PATHS, RxParts, TX_PATHS, TxParts};
use pmd::virtio::receive::RxParams;
use pmd::virtio::ring::Layout;
use pmd::virtio::spec::{feature, header_len};
use pmd::virtio::transmit::TxParams;
use pmd::virtio::user::{self, RingAddresses, UserConfig, UserTransport};
use testbed::frame::{FrameCheck, FrameGen, Macs, Stream};
use testbed::peer::turn;
use testbed::ports::{Echo, Memory, SOON, Shape, host, wait_until};
use testbed::rings::{bytes_of, packet};
use vmm_sys_util::tempdir::TempDir;

const MBUFS: u32 = 4096;
const FRAMES: u64 = 3000;
/// Frames under way: their buffers fit into either ring.
const WINDOW: u64 = 24;
/// Rounds between two interferences.
const ROUNDS: u64 = 40;
/// Where a fresh packed ring begins (vhost-user, "Vring state description").
const PACKED_BASE: u32 = 0x8000_8000;

/// A backend that polls needs no kicks.
struct Polled;

impl Doorbell for Polled {
    fn ring(&self) {}
}

/// The driver's end, in pieces: a transport, and a pair of queues that know nothing of it.
struct Guest {
    transport: UserTransport,
    layouts: [Layout; 2],
    rx: Box<dyn RxBurst>,
    tx: Box<dyn TxBurst>,
}

impl Guest {
    fn new(shape: Shape, socket: &Path, memory: &Memory) -> Self {
        let asked = [
            (shape.packed, feature::RING_PACKED),
            (shape.in_order, feature::IN_ORDER),
            (shape.mergeable, feature::MRG_RXBUF),
        ];
        let asked: u64 = asked.iter().filter(|(on, _)| *on).map(|(_, bit)| bit).sum();
        let wanted = feature::VERSION_1 | feature::INDIRECT_DESC | asked;
        let config =
            UserConfig { path: socket.to_owned(), mode: user::Mode::Client, queue_pairs: 1, wanted, timeout: SOON };
        let mut transport = UserTransport::connect(&config).unwrap();
        assert_eq!(transport.features(), wanted);
        transport.share(slice::from_ref(&memory.arena)).unwrap();
        let layouts = [(); 2].map(|()| Layout::new(&memory.arena, shape.size, wanted).unwrap());
        let (rx, tx) = queues(&layouts, wanted, shape.size, memory);
        let mut guest = Self { transport, layouts, rx, tx };
        for vring in [0, 1] {
            guest.give(vring, if shape.packed { PACKED_BASE } else { 0 });
        }
        guest.transport.driver_ok().unwrap();
        guest
    }

    /// Gives a ring to the backend, to go on at `base`.
    fn give(&mut self, vring: u16, base: u32) {
        let Layout { size, desc, avail, used, .. } = self.layouts[usize::from(vring)];
        self.transport.queue_setup(vring, &RingAddresses { size, base, desc, avail, used }).unwrap();
        self.transport.queue_enable(vring, true).unwrap();
    }

    /// Sends `FRAMES` frames through the echo at the other end, interfering now and then; returns what came back.
    fn run(&mut self, memory: &Memory, frame_max: usize, mut interfere: impl FnMut(&mut Self, u64)) -> FrameCheck {
        let stream = Stream::new(41, 0, 60..=frame_max);
        let (mut generator, mut check) = (FrameGen::new(stream.clone()), FrameCheck::new(stream, Macs::Kept));
        let (mut going, mut coming, mut frame) = (Burst::new(32), Burst::new(32), Vec::new());
        let (mut back, mut round) = (0, 0);
        let deadline = Instant::now() + SOON;
        while back < FRAMES && Instant::now() < deadline {
            while generator.made() < FRAMES.min(back + WINDOW) && going.room() > 0 {
                generator.write_next(&mut frame);
                going.push(packet(&memory.pool, &frame, usize::MAX).unwrap()).unwrap();
            }
            self.tx.tx_burst(&mut going);
            self.tx.reap();
            let received = self.rx.rx_burst(&mut coming);
            for mbuf in coming.take_front(received) {
                check.check(&bytes_of(&mbuf).unwrap());
            }
            back += received as u64;
            round += 1;
            if round % ROUNDS == 0 {
                interfere(self, round / ROUNDS);
            }
        }
        check
    }
}

/// The queues of two rings, as the path tables have them.
fn queues(layouts: &[Layout; 2], features: u64, limit: u16, memory: &Memory) -> (Box<dyn RxBurst>, Box<dyn TxBurst>) {
    let header_len = header_len(features) as u16;
    let Memory { arena, pool } = memory;
    let rx = (select(RX_PATHS, features, None).unwrap().make)(RxParts {
        layout: &layouts[0],
        params: RxParams { limit, header_len, room: pool.room(), port: 0 },
        doorbell: Box::new(Polled),
        pool: pool.clone(),
        free_thresh: 32,
        stats: QueueStats::new(),
    });
    let tx = (select(TX_PATHS, features, None).unwrap().make)(TxParts {
        layout: &layouts[1],
        params: TxParams { limit, header_len, indirect: true },
        doorbell: Box::new(Polled),
        arena,
        free_thresh: 32,
        stats: QueueStats::new(),
    });
    (rx, tx.unwrap())
}

/// Runs `interfere` under traffic on every combination.
fn under_traffic(mut interfere: impl FnMut(&mut Guest, &Arc<Arena>, u64)) {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (host_memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let port = host(1, &socket, Mode::Server, &host_memory, &control).unwrap();
    let _worker = Worker::enter().unwrap();
    for shape in Shape::all() {
        let memory = Memory::new(MBUFS);
        let echo = Echo::start(&port).unwrap();
        let mut guest = Guest::new(shape, &socket, &memory);
        let mut times = 0;
        let check = guest.run(&memory, shape.frame_max(), |guest, time| {
            times = time;
            interfere(guest, &memory.arena, time);
        });
        assert!(times >= 3, "{shape:?}: only {times} times");
        check.finish(FRAMES, 0).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
        drop((guest, echo));
        // The backend lets go once it has noticed.
        assert!(wait_until(|| (memory.out(), host_memory.out()) == (0, 0)), "{shape:?}");
    }
}

#[test]
fn a_ring_that_is_taken_back_and_given_again_under_traffic_loses_nothing() {
    under_traffic(|guest, _, time| {
        let vring = (time % 2) as u16;
        let base = guest.transport.queue_stop(vring).unwrap();
        guest.give(vring, base);
    });
}

#[test]
fn a_ring_that_is_disabled_and_enabled_under_traffic_loses_nothing() {
    under_traffic(|guest, _, time| {
        for enable in [false, true] {
            guest.transport.queue_enable((time % 2) as u16, enable).unwrap();
        }
    });
}

#[test]
fn a_memory_table_that_changes_under_traffic_loses_nothing() {
    let other = Arena::new(4 << 20, &Pages::Plain).unwrap();
    under_traffic(|guest, arena, time| {
        let arenas = [Arc::clone(arena), Arc::clone(&other)];
        guest.transport.share(&arenas[..=(time % 2) as usize]).unwrap();
    });
}
