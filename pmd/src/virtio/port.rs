//! A virtio-net device as a [`Port`], over a vhost-user socket.

mod recover;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::Doorbell;
use super::paths::{RX_PATHS, RxParts, TX_PATHS, TxParts};
use super::receive::RxParams;
use super::ring::Layout;
use super::spec::{RING_SIZE_MAX, feature, header_len, status};
use super::transmit::TxParams;
use super::user::{Mode, RingAddresses, UserConfig, UserTransport};
use crate::mbuf::HEADROOM;
use crate::mem::Arena;
use crate::path;
use crate::port::{Link, Port, PortConfig, PortError, PortInfo, RxQueueConfig, Slots, TxQueueConfig, validate};

/// What device to open, and how to use it.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a feature, asked for by name or not")]
pub struct VirtioConfig {
    /// The address as the user wrote it, for messages.
    pub address: String,
    /// The socket.
    pub path: PathBuf,
    /// Which end listens.
    pub mode: Mode,
    /// Queue pairs that can be used at most.
    pub queue_pairs: u16,
    /// Descriptors of each ring; split rings: a power of two.
    pub ring_size: u16,
    /// Ask for buffers to be used in order.
    pub in_order: bool,
    /// Ask that each side may say by an entry when it wants to be woken (`EVENT_IDX`). Of use only to sides that sleep.
    pub event_idx: bool,
    /// Ask for packed rings.
    pub packed: bool,
    /// Ask for frames that may fill several buffers.
    pub mergeable: bool,
    /// The number that received mbufs carry.
    pub port: u16,
    /// The port's MAC address.
    pub mac: [u8; 6],
    /// How long connecting, and each request, may take.
    pub timeout: Duration,
}

/// A queue that has been set up.
struct Queue<C> {
    config: C,
    /// Descriptors in use.
    size: u16,
    free_thresh: u16,
}

/// A virtio-net port.
pub struct VirtioPort {
    config: VirtioConfig,
    arenas: Vec<Arc<Arena>>,
    transport: UserTransport,
    paths: (Option<String>, Option<String>),
    frame_max: u32,
    rx: Vec<Option<Queue<RxQueueConfig>>>,
    tx: Vec<Option<Queue<TxQueueConfig>>>,
    /// By vring: the rings that the device has.
    rings: Vec<Option<Layout>>,
    /// Vrings of receive queues that stand behind a backlog.
    backlogs: Vec<u16>,
    started: bool,
    slots: Slots,
}

/// Kicks through an eventfd.
struct Kick(Arc<EventFd>);

impl Doorbell for Kick {
    fn ring(&self) {
        // Fails only if the counter is full: then the device has been told.
        let _ = self.0.write(1);
    }
}

/// Where a fresh packed ring begins: both indices 0, both wrap counters 1 (vhost-user, "Vring state description").
const PACKED_BASE: u32 = 0x8000_8000;

/// The vring of a receive queue (virtio 1.3, 5.1.2).
const fn rx_vring(queue: u16) -> u16 {
    queue.saturating_mul(2)
}

/// The vring of a transmit queue.
const fn tx_vring(queue: u16) -> u16 {
    queue.saturating_mul(2).saturating_add(1)
}

impl VirtioPort {
    /// Connects and negotiates. The device gets to see `arenas`, and nothing else: rings lie in the first, every mbuf that is
    /// received into or sent must have its data in one of them.
    ///
    /// # Errors
    /// [`PortError`]: a ring size that cannot be, or no connection or agreement with the device.
    pub fn open(config: VirtioConfig, arenas: &[Arc<Arena>]) -> Result<Self, PortError> {
        let port = &config.address;
        if config.ring_size < 2 || config.ring_size > RING_SIZE_MAX {
            let (value, max) = (config.ring_size.into(), RING_SIZE_MAX.into());
            return Err(PortError::Range { port: port.clone(), what: "ring size", value, min: 2, max });
        }
        if !config.packed && !config.ring_size.is_power_of_two() {
            return Err(PortError::PowerOfTwo {
                port: port.clone(),
                what: "ring size",
                value: config.ring_size.into(),
            });
        }
        let wants = [
            (config.packed, feature::RING_PACKED, "packed"),
            (config.in_order, feature::IN_ORDER, "in_order"),
            (config.event_idx, feature::EVENT_IDX, "event_idx"),
            (config.mergeable, feature::MRG_RXBUF, "mrg"),
        ];
        let asked = wants.iter().filter(|want| want.0).map(|want| want.1).sum::<u64>();
        let user = UserConfig {
            path: config.path.clone(),
            mode: config.mode,
            queue_pairs: config.queue_pairs,
            wanted: feature::VERSION_1 | feature::INDIRECT_DESC | feature::MQ | asked,
            timeout: config.timeout,
        };
        let failed = |source| PortError::device(port, source);
        let mut transport = UserTransport::connect(&user).map_err(failed)?;
        let missing = asked & !transport.features();
        if missing != 0 {
            let names: Vec<_> = wants.iter().filter(|want| missing & want.1 != 0).map(|want| want.2).collect();
            return Err(PortError::Missing { port: port.clone(), features: names.join(", ") });
        }
        transport.share(arenas).map_err(failed)?;
        let rings = (0..2 * config.queue_pairs).map(|_| None).collect();
        Ok(Self {
            slots: Slots::new(port, 0, 0),
            rings,
            backlogs: Vec::new(),
            config,
            arenas: arenas.to_vec(),
            transport,
            paths: (None, None),
            frame_max: 0,
            rx: Vec::new(),
            tx: Vec::new(),
            started: false,
        })
    }

    /// The negotiated features.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.transport.features()
    }

    fn failed<E: std::error::Error + Send + Sync + 'static>(&self, source: E) -> PortError {
        PortError::device(&self.config.address, source)
    }

    fn state(&self, action: &'static str, state: &'static str, remedy: &'static str) -> PortError {
        PortError::State { port: self.config.address.clone(), action, state, remedy }
    }

    fn must_be_stopped(&self, action: &'static str) -> Result<(), PortError> {
        if self.started { Err(self.state(action, "started", "stop it first")) } else { Ok(()) }
    }

    fn exists(&self, what: &'static str, queue: u16, count: usize) -> Result<(), PortError> {
        if usize::from(queue) < count { Ok(()) } else { Err(self.slots.no_queue(what, queue, count)) }
    }

    /// Bytes of a frame that fit into one receive buffer.
    fn check_frame(&self, room: u16) -> Result<(), PortError> {
        let buffer = u32::from(room - HEADROOM);
        if self.frame_max > buffer && self.features() & feature::MRG_RXBUF == 0 {
            let (port, frame) = (self.config.address.clone(), self.frame_max);
            return Err(PortError::FrameTooLong { port, frame, buffer });
        }
        Ok(())
    }

    /// Makes a ring and hands it to the device, still empty.
    fn hand_over(&mut self, vring: u16) -> Result<(), PortError> {
        let memory = |source| PortError::Memory { port: self.config.address.clone(), source };
        let layout = Layout::new(&self.arenas[0], self.config.ring_size, self.features()).map_err(memory)?;
        // From here on the device may have it, so it stays until it is withdrawn, whatever fails.
        self.rings[usize::from(vring)] = Some(layout);
        let packed = self.features() & feature::RING_PACKED != 0;
        self.announce(vring, if packed { PACKED_BASE } else { 0 })
    }

    /// Tells the device of a ring, in which it is to begin at `base`.
    fn announce(&mut self, vring: u16, base: u32) -> Result<(), PortError> {
        let Some(&Layout { size, desc, avail, used, .. }) = self.ring(vring) else { return Ok(()) };
        let addresses = RingAddresses { size, base, desc, avail, used };
        self.transport.queue_setup(vring, &addresses).map_err(|e| self.failed(e))?;
        self.transport.queue_enable(vring, true).map_err(|e| self.failed(e))
    }

    /// Takes a queue from its worker, then its ring from the device; only then do its buffers go home. A device that is gone
    /// has stopped.
    fn withdraw(&mut self, vring: u16) -> Result<(), PortError> {
        if self.ring(vring).is_none() {
            return Ok(());
        }
        let queue = vring / 2;
        let running = if vring == rx_vring(queue) {
            (self.slots.swap_rx(queue, None)?, None)
        } else {
            (None, self.slots.swap_tx(queue, None)?)
        };
        let stopped = match self.transport.queue_stop(vring) {
            Err(e) if self.transport.is_connected() => Err(self.failed(e)),
            _ => Ok(()),
        };
        self.rings[usize::from(vring)] = None;
        drop(running);
        stopped
    }

    /// Withdraws one ring of several. DPDK's `net_vhost` takes that for the end of the whole device, and goes on with a ring
    /// only when it is enabled once more.
    fn withdraw_one(&mut self, vring: u16) -> Result<(), PortError> {
        if self.ring(vring).is_none() {
            return Ok(());
        }
        self.withdraw(vring)?;
        let others: Vec<u16> = (0..self.rings.len() as u16).filter(|&other| self.ring(other).is_some()).collect();
        for (other, enable) in others.into_iter().flat_map(|other| [(other, false), (other, true)]) {
            match self.transport.queue_enable(other, enable) {
                Err(e) if self.transport.is_connected() => return Err(self.failed(e)),
                _ => {}
            }
        }
        Ok(())
    }

    /// The ring of `vring`, if the device has it.
    fn ring(&self, vring: u16) -> Option<&Layout> {
        self.rings.get(usize::from(vring))?.as_ref()
    }

    fn doorbell(&self, vring: u16) -> Result<Box<dyn Doorbell>, PortError> {
        self.transport.kick_fd(vring).map(|fd| Box::new(Kick(fd)) as _).map_err(|e| self.failed(e))
    }

    fn unset(&self, queue: &'static str) -> PortError {
        self.state("start", queue, "set the queue up first")
    }

    /// Runs a receive queue on its ring, which the device has.
    fn run_rx(&mut self, queue: u16) -> Result<(), PortError> {
        let doorbell = self.doorbell(rx_vring(queue))?;
        let features = self.features();
        let row = path::select(RX_PATHS, features, self.paths.0.as_deref())
            .map_err(|source| PortError::Path { port: self.config.address.clone(), source })?;
        let (Some(Some(setup)), Some(layout)) = (self.rx.get(usize::from(queue)), self.ring(rx_vring(queue))) else {
            return Err(self.unset("without that receive queue"));
        };
        let pool = setup.config.pool.clone();
        let params = RxParams {
            limit: setup.size,
            header_len: header_len(features) as u16,
            room: pool.room(),
            port: self.config.port,
        };
        let stats = Arc::clone(self.slots.rx[usize::from(queue)].stats());
        let free_thresh = setup.free_thresh;
        let running = (row.make)(RxParts { layout, params, doorbell, pool, free_thresh, stats });
        self.slots.swap_rx(queue, Some((row.name, running))).map(drop)
    }

    /// Runs a transmit queue on its ring, which the device has.
    fn run_tx(&mut self, queue: u16) -> Result<(), PortError> {
        let doorbell = self.doorbell(tx_vring(queue))?;
        let features = self.features();
        let row = path::select(TX_PATHS, features, self.paths.1.as_deref())
            .map_err(|source| PortError::Path { port: self.config.address.clone(), source })?;
        let (Some(Some(setup)), Some(layout)) = (self.tx.get(usize::from(queue)), self.ring(tx_vring(queue))) else {
            return Err(self.unset("without that transmit queue"));
        };
        let params = TxParams {
            limit: setup.size,
            header_len: header_len(features) as u16,
            indirect: features & feature::INDIRECT_DESC != 0,
        };
        let stats = Arc::clone(self.slots.tx[usize::from(queue)].stats());
        let parts = TxParts { layout, params, doorbell, arena: &self.arenas[0], free_thresh: setup.free_thresh, stats };
        let running =
            (row.make)(parts).map_err(|source| PortError::Memory { port: self.config.address.clone(), source })?;
        self.slots.swap_tx(queue, Some((row.name, running))).map(drop)
    }

    fn start_all(&mut self) -> Result<(), PortError> {
        if self.rx.iter().any(Option::is_none) || self.tx.iter().any(Option::is_none) {
            return Err(self.unset("without all its queues"));
        }
        let rx = numbers(&self.rx, |config| !config.deferred_start);
        let tx = numbers(&self.tx, |config| !config.deferred_start);
        // Virtio 1.3, 3.1.1: queues are set up (step 7), then DRIVER_OK (step 8), and only then is anything made available, for
        // that may kick.
        for vring in rx.iter().map(|&queue| rx_vring(queue)).chain(tx.iter().map(|&queue| tx_vring(queue))) {
            self.hand_over(vring)?;
        }
        self.transport.driver_ok().map_err(|e| self.failed(e))?;
        rx.iter().try_for_each(|&queue| self.run_rx(queue))?;
        tx.iter().try_for_each(|&queue| self.run_tx(queue))
    }
}

/// The numbers of the queues that are set up as `wanted`.
fn numbers<C>(queues: &[Option<Queue<C>>], wanted: impl Fn(&C) -> bool) -> Vec<u16> {
    let is_wanted = |queue: &Option<Queue<C>>| queue.as_ref().is_some_and(|queue| wanted(&queue.config));
    (0..).zip(queues).filter(|(_, queue)| is_wanted(queue)).map(|(number, _)| number).collect()
}

impl Port for VirtioPort {
    fn info(&self) -> PortInfo {
        PortInfo {
            driver: "virtio-user",
            address: self.config.address.clone(),
            queues_max: self.config.queue_pairs,
            queue_size_max: self.config.ring_size,
            queue_size_default: self.config.ring_size,
            mac: self.config.mac,
            scatter: self.features() & feature::MRG_RXBUF != 0,
        }
    }

    fn configure(&mut self, config: &PortConfig) -> Result<(), PortError> {
        self.must_be_stopped("be configured")?;
        let (port, max) = (&self.config.address, u64::from(self.config.queue_pairs));
        for (what, queues) in [("rx queues", config.rx_queues), ("tx queues", config.tx_queues)] {
            if u64::from(queues) > max {
                return Err(PortError::Range { port: port.clone(), what, value: queues.into(), min: 0, max });
            }
        }
        let no_path = |source| PortError::Path { port: port.clone(), source };
        path::select(RX_PATHS, self.features(), config.rx_path.as_deref()).map_err(no_path)?;
        path::select(TX_PATHS, self.features(), config.tx_path.as_deref()).map_err(no_path)?;
        self.paths = (config.rx_path.clone(), config.tx_path.clone());
        self.frame_max = config.frame_max;
        self.slots = Slots::new(&self.config.address, config.rx_queues, config.tx_queues);
        self.rx = (0..config.rx_queues).map(|_| None).collect();
        self.tx = (0..config.tx_queues).map(|_| None).collect();
        Ok(())
    }

    fn rx_queue_setup(&mut self, queue: u16, config: &RxQueueConfig) -> Result<(), PortError> {
        self.must_be_stopped("set a queue up")?;
        let (size, free_thresh) = validate::rx(&self.config.address, config, self.config.ring_size)?;
        self.check_frame(config.pool.room())?;
        if !self.arenas.iter().any(|arena| Arc::ptr_eq(arena, config.pool.arena())) {
            return Err(self.state("receive into that pool", "sharing other arenas", "open it with the pool's arena"));
        }
        self.exists("rx queue", queue, self.rx.len())?;
        self.rx[usize::from(queue)] = Some(Queue { config: config.clone(), size, free_thresh });
        Ok(())
    }

    fn tx_queue_setup(&mut self, queue: u16, config: &TxQueueConfig) -> Result<(), PortError> {
        self.must_be_stopped("set a queue up")?;
        let (size, free_thresh) = validate::tx(&self.config.address, config, self.config.ring_size)?;
        self.exists("tx queue", queue, self.tx.len())?;
        self.tx[usize::from(queue)] = Some(Queue { config: config.clone(), size, free_thresh });
        Ok(())
    }

    fn start(&mut self) -> Result<(), PortError> {
        self.must_be_stopped("start")?;
        self.started = true;
        self.start_all().inspect_err(|_| {
            // The first error is the one to tell.
            let _ = self.stop();
        })
    }

    fn stop(&mut self) -> Result<(), PortError> {
        let mut result = Ok(());
        for vring in 0..self.rings.len() as u16 {
            result = result.and(self.withdraw(vring));
        }
        // A queue that a worker holds on to is not stopped, and may be tried again.
        self.started = self.rings.iter().any(Option::is_some);
        result
    }

    fn rx_queue_start(&mut self, queue: u16) -> Result<(), PortError> {
        self.exists("rx queue", queue, self.rx.len())?;
        if self.ring(rx_vring(queue)).is_some() {
            return Ok(());
        }
        if !self.started {
            return Err(self.state("start a queue", "stopped", "start it first"));
        }
        let started = self.hand_over(rx_vring(queue)).and_then(|()| self.run_rx(queue));
        if started.is_err() {
            // The first error is the one to tell.
            let _ = self.withdraw(rx_vring(queue));
        }
        started
    }

    fn rx_queue_stop(&mut self, queue: u16) -> Result<(), PortError> {
        self.exists("rx queue", queue, self.rx.len())?;
        self.withdraw_one(rx_vring(queue))
    }

    fn tx_queue_start(&mut self, queue: u16) -> Result<(), PortError> {
        self.exists("tx queue", queue, self.tx.len())?;
        if self.ring(tx_vring(queue)).is_some() {
            return Ok(());
        }
        if !self.started {
            return Err(self.state("start a queue", "stopped", "start it first"));
        }
        let started = self.hand_over(tx_vring(queue)).and_then(|()| self.run_tx(queue));
        if started.is_err() {
            // The first error is the one to tell.
            let _ = self.withdraw(tx_vring(queue));
        }
        started
    }

    fn tx_queue_stop(&mut self, queue: u16) -> Result<(), PortError> {
        self.exists("tx queue", queue, self.tx.len())?;
        self.withdraw_one(tx_vring(queue))
    }

    fn link(&mut self) -> Link {
        let ok = |status: Option<u8>| status.is_none_or(|status| status & status::NEEDS_RESET == 0);
        let up = self.started && self.transport.is_connected() && self.transport.status().is_ok_and(ok);
        if up { Link::Up } else { Link::Down }
    }

    fn recover(&mut self) -> Result<Link, PortError> {
        self.find_backend()?;
        Ok(self.link())
    }

    fn slots(&self) -> Slots {
        self.slots.clone()
    }
}

impl Drop for VirtioPort {
    fn drop(&mut self) {
        // Nothing is left to tell an error to.
        let _ = self.stop();
        let _ = self.transport.reset();
    }
}
