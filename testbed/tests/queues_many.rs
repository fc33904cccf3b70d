//! Up to 128 queue pairs, more of them than workers, and each started and stopped while the others carry traffic.

use std::fs;
use std::ops::Range;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;

use backend::control::{self, Control};
use backend::port::vhost_user::VhostUserPort;
use pmd::fwd::{Engine, ForwardConfig, Forwarder, FwdStats};
use pmd::mempool::Worker;
use pmd::port::{Link, Port, PortConfig, PortError, RxQueueConfig, Slots, TxQueueConfig};
use pmd::sys::{cpus_allowed, raise_descriptors_max};
use pmd::virtio::port::VirtioPort;
use pmd::virtio::user;
use testbed::frame::{Macs, Stream};
use testbed::peer::dpdk::{Config, Forward, Role, Testpmd, VIRTIO_USER_QUEUES_MAX, Vhost, VirtioUser};
use testbed::peer::turn;
use testbed::ports::{Echo, Exchange, Memory, SOON, Shape, guest, host, wait_until};
use vmm_sys_util::tempdir::TempDir;

const SEED: u64 = 31;
const MBUFS: u32 = 16384;
/// Queue pairs that a device has at most.
const ALL: u16 = 128;
/// Few descriptors a ring, so that every queue goes round its ring several times.
const SMALL: Shape = Shape { size: 32, ..Shape::PLAIN };
/// Frames under way on a queue pair.
const WINDOW: u64 = 16;

/// Descriptors that this process has open. Both ends of 128 pairs together need more than the usual limit of 1024.
fn descriptors() -> usize {
    raise_descriptors_max().unwrap();
    fs::read_dir("/proc/self/fd").unwrap().count()
}

fn stream() -> Stream {
    Stream::new(SEED, 0, 60..=300)
}

/// Waits until all queues of `port` run.
fn wait_up(port: &mut dyn Port) {
    let queues = port.slots().rx.len() as u16;
    assert!(wait_until(|| port.link() == Link::Up && (0..queues).all(|queue| runs(port, queue))));
}

fn runs(port: &dyn Port, queue: u16) -> bool {
    port.rx_path(queue).is_some() && port.tx_path(queue).is_some()
}

#[test]
fn each_of_128_queue_pairs_carries_its_own_frames_and_loses_none() {
    let _turn = turn();
    let before = descriptors();
    let packed = Shape { packed: true, in_order: true, mergeable: true, ..SMALL };
    for shape in [Shape { queues: ALL, ..SMALL }, Shape { queues: ALL, ..packed }] {
        all_pairs_carry(shape);
        assert_eq!(descriptors(), before);
    }
}

fn all_pairs_carry(shape: Shape) {
    let pair = Joined::new(shape);
    let echo = Echo::start(&pair.host).unwrap();
    let worker = Worker::enter();
    let mut traffic = pair.exchange(0..shape.queues);
    assert!(traffic.run(200, WINDOW), "{shape:?}: {:?}", traffic.reports());
    traffic.finish().unwrap();
    traffic.ledger(format!("{shape:?}")).balance().unwrap();
    for (queue, report) in traffic.reports().iter().enumerate() {
        let Slots { rx, tx, .. } = pair.host.slots();
        let (rx, tx) = (rx[queue].stats().snapshot(), tx[queue].stats().snapshot());
        assert_eq!((report.good, rx.packets, tx.packets), (200, 200, 200), "queue {queue}");
    }
    drop((traffic, worker, echo));
    pair.end();
}

#[test]
fn one_queue_pair_more_is_refused_with_the_limit() {
    let (memory, control, dir) = (Memory::new(MBUFS), Control::new().unwrap(), TempDir::new().unwrap());
    let socket = dir.as_path().join("s");
    let refused = host(ALL + 1, &socket, control::Mode::Server, &memory, &control).err().unwrap().to_string();
    assert!(refused.ends_with("queue pairs 129 is outside 1..=128"), "{refused}");
    let shape = Shape { queues: ALL + 1, ..SMALL };
    let refused = guest(shape, &socket, user::Mode::Client, &memory).err().unwrap().to_string();
    assert!(refused.contains("129 queue pairs asked") && refused.contains("at most 128 are possible"), "{refused}");
}

/// Both ends on a socket, started. The guest goes first.
struct Joined {
    guest: VirtioPort,
    host: VhostUserPort,
    ours: Memory,
    theirs: Memory,
    _control: Control,
    _dir: TempDir,
}

impl Joined {
    fn new(shape: Shape) -> Self {
        let dir = TempDir::new().unwrap();
        let socket = dir.as_path().join("s");
        let (ours, theirs, control) = (Memory::new(MBUFS), Memory::new(MBUFS), Control::new().unwrap());
        let mut host = host(shape.queues, &socket, control::Mode::Server, &theirs, &control).unwrap();
        let guest = guest(shape, &socket, user::Mode::Client, &ours).unwrap();
        wait_up(&mut host);
        Self { guest, host, ours, theirs, _control: control, _dir: dir }
    }

    /// An exchange on queue pairs `queues` of the guest.
    fn exchange(&self, queues: Range<u16>) -> Exchange {
        Exchange::on(&self.guest, queues, &self.ours.pool, &stream(), Macs::Kept).unwrap()
    }

    /// Waits until each of `queues` of the guest has received 50 packets more.
    fn goes_on(&self, queues: Range<u16>) {
        let received = |queue: u16| self.guest.slots().rx[usize::from(queue)].stats().snapshot().packets;
        let before: Vec<_> = queues.clone().map(received).collect();
        assert!(wait_until(|| queues.clone().zip(&before).all(|(queue, before)| received(queue) > before + 50)));
    }

    /// Ends both; every mbuf is home.
    fn end(mut self) {
        self.guest.stop().unwrap();
        self.host.stop().unwrap();
        assert_eq!((self.ours.out(), self.theirs.out()), (0, 0));
    }
}

/// A forwarder of one port on all CPUs, up to two.
fn forwarder(port: impl Port + 'static, memory: &Memory) -> Forwarder {
    let cpus = cpus_allowed().unwrap().into_iter().take(2).collect();
    let pool = memory.pool.clone();
    let config = ForwardConfig { burst: 8, frame: 64, sequence: true, cpus, pool, more_pools: Vec::new() };
    Forwarder::new(vec![Box::new(port)], &config).unwrap()
}

/// Frames by queue: what came in, and what went out.
fn by_queue(stats: &FwdStats) -> (Vec<u64>, Vec<u64>) {
    stats.streams.iter().map(|stream| (stream.rx, stream.tx)).unzip()
}

#[test]
fn workers_with_several_queues_each_serve_them_all() {
    let _turn = turn();
    for queues in [3, 7] {
        let Joined { guest, host, ours, theirs, _control, _dir } = Joined::new(Shape { queues, ..SMALL });
        let mut ends = [forwarder(host, &theirs), forwarder(guest, &ours)];
        for (source, sink) in [(0, 1), (1, 0)] {
            let before = by_queue(&ends[sink].stats()).0;
            ends[sink].start(Engine::RxOnly, 0).unwrap();
            ends[source].start(Engine::TxOnly, 0).unwrap();
            let has_come = |sink: &mut Forwarder| {
                let now = by_queue(&sink.stats()).0;
                now.iter().zip(&before).all(|(now, before)| now - before > 1000)
            };
            assert!(wait_until(|| has_come(&mut ends[sink])), "{:?}", ends[sink].stats().streams);
            ends[source].stop().unwrap();
            let sent = by_queue(&ends[source].stats()).1;
            assert!(wait_until(|| by_queue(&ends[sink].stats()).0 == sent), "{sent:?}: {:?}", ends[sink].stats());
            ends[sink].stop().unwrap();
        }
        for end in ends.into_iter().rev() {
            let report = end.shutdown();
            assert!(report.ok, "{:?}", report.errors);
        }
    }
}

/// Queue pairs of a port whose queues come and go.
const SOME: u16 = 12;

/// Sets `port` up anew, each queue to be started by itself.
fn defer(port: &mut dyn Port, memory: &Memory) {
    port.stop().unwrap();
    port.configure(&PortConfig { rx_queues: SOME, tx_queues: SOME, ..PortConfig::default() }).unwrap();
    let (size, free_thresh, deferred_start) = (SMALL.size, 0, true);
    for queue in 0..SOME {
        let pool = memory.pool.clone();
        port.rx_queue_setup(queue, &RxQueueConfig { size, pool, free_thresh, deferred_start }).unwrap();
        port.tx_queue_setup(queue, &TxQueueConfig { size, free_thresh, deferred_start }).unwrap();
    }
    port.start().unwrap();
}

fn start(port: &mut dyn Port, queue: u16) -> Result<(), PortError> {
    port.rx_queue_start(queue).and_then(|()| port.tx_queue_start(queue))
}

fn stop(port: &mut dyn Port, queue: u16) -> Result<(), PortError> {
    port.tx_queue_stop(queue).and_then(|()| port.rx_queue_stop(queue))
}

/// Keeps frames going on what comes in, until there will be no more of it; then sees every frame come back.
fn carry(incoming: &Receiver<Exchange>) -> Vec<Exchange> {
    let _worker = Worker::enter();
    let mut exchanges = Vec::new();
    loop {
        match incoming.try_recv() {
            Ok(exchange) => exchanges.push(exchange),
            Err(TryRecvError::Disconnected) => break,
            Err(TryRecvError::Empty) => {}
        }
        let moved: usize = exchanges.iter_mut().map(|exchange| exchange.round(WINDOW)).sum();
        if moved == 0 {
            thread::yield_now();
        }
    }
    assert!(exchanges.iter_mut().all(|exchange| exchange.run(0, WINDOW)));
    exchanges
}

/// Every frame of `exchanges` came back once, in order, every byte right.
fn must_be_whole(exchanges: Vec<Exchange>) {
    for exchange in exchanges {
        exchange.finish().unwrap();
        exchange.ledger("a queue pair").balance().unwrap();
    }
}

#[test]
fn queues_of_the_guest_start_one_by_one_while_others_carry_traffic() {
    let _turn = turn();
    for packed in [false, true] {
        let mut pair = Joined::new(Shape { queues: SOME, packed, ..SMALL });
        defer(&mut pair.guest, &pair.ours);
        let echo = Echo::start(&pair.host).unwrap();
        thread::scope(|scope| {
            let (more, incoming) = mpsc::channel();
            let carrier = scope.spawn(move || carry(&incoming));
            for queue in 0..SOME {
                assert!(!runs(&pair.guest, queue) && !runs(&pair.host, queue));
                start(&mut pair.guest, queue).unwrap();
                assert!(runs(&pair.guest, queue) && runs(&pair.host, queue));
                more.send(pair.exchange(queue..queue + 1)).unwrap();
                pair.goes_on(0..queue + 1);
            }
            drop(more);
            must_be_whole(carrier.join().unwrap());
        });
        drop(echo);
        pair.end();
    }
}

#[test]
fn queues_of_the_backends_port_start_and_stop_one_by_one_while_others_carry_traffic() {
    let _turn = turn();
    for packed in [false, true] {
        let mut pair = Joined::new(Shape { queues: SOME, packed, ..SMALL });
        defer(&mut pair.host, &pair.theirs);
        let echo = Echo::start(&pair.host).unwrap();
        thread::scope(|scope| {
            let (more, incoming) = mpsc::channel();
            let carrier = scope.spawn(move || carry(&incoming));
            for queue in 0..SOME {
                assert!(!runs(&pair.host, queue));
                // What is sent into a ring that nobody serves yet waits there.
                more.send(pair.exchange(queue..queue + 1)).unwrap();
                start(&mut pair.host, queue).unwrap();
                pair.goes_on(0..queue + 1);
            }
            for queue in 0..SOME {
                stop(&mut pair.host, queue).unwrap();
                assert!(!runs(&pair.host, queue));
                pair.goes_on(0..queue);
                pair.goes_on(queue + 1..SOME);
                start(&mut pair.host, queue).unwrap();
                pair.goes_on(0..SOME);
            }
            drop(more);
            must_be_whole(carrier.join().unwrap());
        });
        drop(echo);
        pair.end();
    }
}

#[test]
fn a_queue_of_the_guest_stops_and_starts_again_while_others_carry_traffic() {
    let _turn = turn();
    for packed in [false, true] {
        let mut pair = Joined::new(Shape { queues: SOME, packed, ..SMALL });
        let echo = Echo::start(&pair.host).unwrap();
        let (more, incoming) = mpsc::channel();
        more.send(pair.exchange(0..SOME - 1)).unwrap();
        thread::scope(|scope| {
            let carrier = scope.spawn(move || carry(&incoming));
            let worker = Worker::enter();
            let mut last = pair.exchange(SOME - 1..SOME);
            for _ in 0..10 {
                // With nothing under way, for what a guest takes from the device is gone.
                assert!(last.run(100, WINDOW));
                stop(&mut pair.guest, SOME - 1).unwrap();
                assert!(!runs(&pair.guest, SOME - 1) && !runs(&pair.host, SOME - 1));
                pair.goes_on(0..SOME - 1);
                start(&mut pair.guest, SOME - 1).unwrap();
            }
            drop((more, worker));
            must_be_whole(vec![last]);
            must_be_whole(carrier.join().unwrap());
        });
        drop(echo);
        pair.end();
    }
}

#[test]
fn dpdk_guest_uses_all_the_queue_pairs_it_can_have() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let mut port = host(ALL, &socket, control::Mode::Server, &memory, &control).unwrap();
    let queues = VIRTIO_USER_QUEUES_MAX;
    for packed_vq in [false, true] {
        let user = VirtioUser { queues, queue_size: 256, packed_vq, ..VirtioUser::new(&socket) };
        let mut testpmd = Testpmd::launch(&Config::new(Role::VirtioUser(user), 1)).unwrap();
        testpmd.start().unwrap();
        assert!(wait_until(|| port.link() == Link::Up && (0..queues).all(|queue| runs(&port, queue))));
        assert!(!runs(&port, queues));
        let worker = Worker::enter();
        let mut traffic = Exchange::on(&port, 0..queues, &memory.pool, &stream(), Macs::Kept).unwrap();
        assert!(traffic.run(500, WINDOW), "{:?}", traffic.reports());
        traffic.finish().unwrap();
        traffic.ledger("DPDK's virtio-user").balance().unwrap();
        drop((traffic, worker, testpmd));
        assert!(wait_until(|| port.link() == Link::Down));
    }
    let user = VirtioUser { queues: queues + 1, ..VirtioUser::new(&socket) };
    let refused = Testpmd::launch(&Config::new(Role::VirtioUser(user), 1)).unwrap_err().to_string();
    assert!(refused.contains("queues 9 exceeds the limit 8"), "{refused}");
    port.stop().unwrap();
    assert_eq!(memory.out(), 0);
}

#[test]
fn dpdk_host_serves_128_queue_pairs_of_ours() {
    let _turn = turn();
    descriptors();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let vhost = Vhost { queues: ALL, ..Vhost::new(&socket) };
    let config = Config { forward: Forward::Io, ..Config::new(Role::Vhost(vhost), 0) };
    let mut testpmd = Testpmd::launch(&config).unwrap();
    testpmd.start().unwrap();
    let memory = Memory::new(MBUFS);
    for packed in [false, true] {
        let mut port = guest(Shape { queues: ALL, packed, ..SMALL }, &socket, user::Mode::Client, &memory).unwrap();
        testpmd.wait_link_up(SOON).unwrap();
        let worker = Worker::enter();
        let mut traffic = Exchange::new(&port, &memory.pool, &stream(), Macs::Kept).unwrap();
        assert!(traffic.run(100, WINDOW), "packed {packed}: {:?}", traffic.reports());
        traffic.finish().unwrap();
        traffic.ledger("DPDK's vhost").balance().unwrap();
        drop((traffic, worker));
        port.stop().unwrap();
        assert_eq!(memory.out(), 0);
    }
}
