//! Ports in memory: two ends joined by bounded queues, so that a test sees and decides what an engine does.
#![allow(dead_code, reason = "each test binary uses its part of it")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use pmd::fwd::{FinalReport, ForwardConfig, Forwarder, FwdStats, PortSetup, open_port};
use pmd::mbuf::{Mbuf, MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::port::{
    Burst, Link, Port, PortConfig, PortError, PortInfo, QueueStats, RxBurst, RxHandle, RxQueueConfig, Slots, TxBurst,
    TxHandle, TxQueueConfig,
};

/// A direction of a queue pair. What does not fit is not accepted.
type Wire = Arc<Mutex<VecDeque<Mbuf>>>;

/// One end of a pair of ports.
pub struct MemPort {
    info: PortInfo,
    depth: usize,
    wires_in: Vec<Wire>,
    wires_out: Vec<Wire>,
    slots: Slots,
}

struct MemRx(Wire, Arc<QueueStats>);
struct MemTx(Wire, Arc<QueueStats>, usize);

/// A transmit queue whose frames go nowhere, and whose mbufs are kept until they are reaped.
struct Keeper(Vec<Mbuf>, Arc<QueueStats>);

impl TxBurst for Keeper {
    fn tx_burst(&mut self, burst: &mut Burst) -> usize {
        let count = burst.len();
        self.0.extend(burst.take_front(count));
        self.1.packets.add(count as u64);
        count
    }

    fn reap(&mut self) -> usize {
        self.0.drain(..).count()
    }
}

impl MemPort {
    /// Lets the started transmit queue 0 keep what it sends until it is reaped.
    pub fn keep_sent(&self) {
        let keeper = Keeper(Vec::new(), Arc::clone(self.slots.tx[0].stats()));
        drop(self.slots.swap_tx(0, Some(("keeper", Box::new(keeper)))).unwrap());
    }
}

impl RxBurst for MemRx {
    fn rx_burst(&mut self, burst: &mut Burst) -> usize {
        let mut wire = self.0.lock().unwrap();
        let count = wire.len().min(burst.room());
        for mbuf in wire.drain(..count) {
            self.1.size(mbuf.pkt_len());
            self.1.bytes.add(mbuf.pkt_len() as u64);
            burst.push(mbuf).unwrap();
        }
        self.1.packets.add(count as u64);
        count
    }

    fn pending(&mut self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl TxBurst for MemTx {
    fn tx_burst(&mut self, burst: &mut Burst) -> usize {
        let mut wire = self.0.lock().unwrap();
        let count = burst.len().min(self.2.saturating_sub(wire.len()));
        wire.extend(burst.take_front(count));
        self.1.packets.add(count as u64);
        count
    }

    fn reap(&mut self) -> usize {
        0
    }
}

/// Two ports; what one sends the other receives. Each queue holds up to `depth` frames.
pub fn pair(names: [&str; 2], queues: u16, depth: usize) -> [MemPort; 2] {
    let wires = || (0..queues).map(|_| Wire::default()).collect::<Vec<_>>();
    let (there, back) = (wires(), wires());
    let end = |name: &str, last: u8, wires_in: &[Wire], wires_out: &[Wire]| MemPort {
        info: PortInfo {
            driver: "memory",
            address: name.into(),
            queues_max: queues,
            queue_size_max: 1024,
            queue_size_default: 256,
            mac: [2, 0xaa, 0, 0, 0, last],
            scatter: true,
        },
        depth,
        wires_in: wires_in.to_vec(),
        wires_out: wires_out.to_vec(),
        slots: Slots::default(),
    };
    [end(names[0], 1, &back, &there), end(names[1], 2, &there, &back)]
}

impl Port for MemPort {
    fn info(&self) -> PortInfo {
        self.info.clone()
    }

    fn configure(&mut self, config: &PortConfig) -> Result<(), PortError> {
        if config.rx_queues > self.info.queues_max {
            let (port, value) = (self.info.address.clone(), u64::from(config.rx_queues));
            let max = u64::from(self.info.queues_max);
            return Err(PortError::Range { port, what: "number of queues", value, min: 1, max });
        }
        self.slots = Slots::new(&self.info.address, config.rx_queues, config.tx_queues);
        Ok(())
    }

    fn rx_queue_setup(&mut self, _: u16, _: &RxQueueConfig) -> Result<(), PortError> {
        Ok(())
    }

    fn tx_queue_setup(&mut self, _: u16, _: &TxQueueConfig) -> Result<(), PortError> {
        Ok(())
    }

    fn start(&mut self) -> Result<(), PortError> {
        (0..self.slots.rx.len() as u16).try_for_each(|queue| self.rx_queue_start(queue))?;
        (0..self.slots.tx.len() as u16).try_for_each(|queue| self.tx_queue_start(queue))
    }

    fn stop(&mut self) -> Result<(), PortError> {
        (0..self.slots.rx.len() as u16).try_for_each(|queue| self.rx_queue_stop(queue))?;
        (0..self.slots.tx.len() as u16).try_for_each(|queue| self.tx_queue_stop(queue))
    }

    fn rx_queue_start(&mut self, queue: u16) -> Result<(), PortError> {
        let i = usize::from(queue);
        let running = MemRx(Arc::clone(&self.wires_in[i]), Arc::clone(self.slots.rx[i].stats()));
        self.slots.swap_rx(queue, Some(("memory", Box::new(running)))).map(drop)
    }

    fn rx_queue_stop(&mut self, queue: u16) -> Result<(), PortError> {
        self.wires_in[usize::from(queue)].lock().unwrap().clear();
        self.slots.swap_rx(queue, None).map(drop)
    }

    fn tx_queue_start(&mut self, queue: u16) -> Result<(), PortError> {
        let i = usize::from(queue);
        let running = MemTx(Arc::clone(&self.wires_out[i]), Arc::clone(self.slots.tx[i].stats()), self.depth);
        self.slots.swap_tx(queue, Some(("memory", Box::new(running)))).map(drop)
    }

    fn tx_queue_stop(&mut self, queue: u16) -> Result<(), PortError> {
        self.slots.swap_tx(queue, None).map(drop)
    }

    fn link(&mut self) -> Link {
        if self.slots.rx.iter().any(|slot| slot.path().is_some()) { Link::Up } else { Link::Down }
    }

    fn slots(&self) -> Slots {
        self.slots.clone()
    }
}

/// A pool of `count` mbufs of the usual size.
pub fn pool(count: u32) -> MbufPool {
    let config = MbufPoolConfig { count, cache_size: 64, ..MbufPoolConfig::default() };
    let arena = Arena::new(config.arena_bytes(), &Pages::Plain).unwrap();
    MbufPool::new(&config, &arena).unwrap()
}

/// One worker, bursts of 32, frames of 64 bytes.
pub fn config(pool: &MbufPool) -> ForwardConfig {
    let pool = pool.clone();
    ForwardConfig { burst: 32, frame: 64, sequence: false, cpus: vec![], pool, more_pools: vec![] }
}

/// A pair of started ports.
pub fn open_pair(names: [&str; 2], queues: u16, depth: usize, pool: &MbufPool) -> [MemPort; 2] {
    let mut ports = pair(names, queues, depth);
    for port in &mut ports {
        let pool = pool.clone();
        let setup = PortSetup { queues, size: 0, pool, rx_path: None, tx_path: None, frame_max: 9000 };
        open_port(port, &setup).unwrap();
    }
    ports
}

/// A forwarder on one port of one queue, and the test's end of the wire.
pub struct Bench {
    pub forwarder: Forwarder,
    pub pool: MbufPool,
    pub rx: RxHandle,
    pub tx: TxHandle,
    far: MemPort,
}

impl Bench {
    pub fn new(depth: usize, change: impl FnOnce(&mut ForwardConfig)) -> Self {
        let pool = pool(4096);
        let mut config = config(&pool);
        change(&mut config);
        let [near, far] = open_pair(["near", "far"], 1, depth, &pool);
        let forwarder = Forwarder::new(vec![Box::new(near)], &config).unwrap();
        Self { forwarder, pool, rx: far.rx(0).unwrap(), tx: far.tx(0).unwrap(), far }
    }

    /// Puts frames on the wire, waiting for room.
    pub fn send(&mut self, frames: impl Iterator<Item = Vec<u8>>) {
        let mut burst = Burst::new(1);
        for frame in frames {
            let mut mbuf = self.pool.alloc().unwrap();
            assert!(mbuf.set_len(frame.len()));
            mbuf.data().write(&frame);
            burst.push(mbuf).unwrap();
            until("room on the wire", || self.tx.tx_burst(&mut burst) == 1);
        }
    }

    /// Takes what is on the wire.
    pub fn receive(&mut self) -> Vec<Mbuf> {
        let mut burst = Burst::new(512);
        self.rx.rx_burst(&mut burst);
        burst.take_front(512).collect()
    }

    /// Frames on the wire that the forwarder has sent.
    pub fn far_pending(&self) -> usize {
        self.far.rx_queue_count(0)
    }

    /// Takes `count` frames off the wire.
    pub fn receive_exactly(&mut self, count: usize) -> Vec<Mbuf> {
        let mut frames = Vec::new();
        until("frames", || {
            frames.extend(self.receive());
            frames.len() >= count
        });
        assert_eq!(frames.len(), count);
        frames
    }

    /// Waits until the forwarder's statistics are as wanted.
    pub fn until(&mut self, what: &str, wanted: impl Fn(&FwdStats) -> bool) -> FwdStats {
        until(what, || wanted(&self.forwarder.stats()));
        self.forwarder.stats()
    }

    /// Ends the run. What is on the wire must have been taken.
    pub fn end(mut self) -> FinalReport {
        let report = self.forwarder.shutdown();
        self.far.stop().unwrap();
        report
    }
}

/// All bytes of a packet.
pub fn bytes(mbuf: &Mbuf) -> Vec<u8> {
    let segment = |data: pmd::shared::SharedBytes<'_>| {
        let mut bytes = vec![0; data.len()];
        data.read(&mut bytes);
        bytes
    };
    mbuf.segments().flat_map(|s| segment(s.data())).collect()
}

/// Waits for `condition`; gives up after far longer than it can take.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        std::thread::sleep(Duration::from_micros(50));
    }
}
