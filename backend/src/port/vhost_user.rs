//! A vhost-user socket as a [`Port`], so that every engine runs on it.
//!
//! Two sides set a queue going: the application, which sets it up and starts it, and the session, which hands over a ring. A
//! queue runs while both want it to; between, its ring is parked with its position.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pmd::mbuf::MbufPool;
use pmd::port::{
    Link, Port, PortConfig, PortError, PortInfo, RxBurst, RxQueueConfig, Slots, TxBurst, TxQueueConfig, validate,
};
use pmd::virtio::spec::{RING_SIZE_MAX, feature, queue_pairs_max};

use crate::control::{Control, Mode, Served};
use crate::error::Error;
use crate::positions::{Positions, Record};
use crate::queue::config::{Position, QueueConfig};
use crate::queue::paths::{FromGuestParts, ToGuestParts, from_guest, to_guest};
use crate::session::{Device, NET_CONFIG_LEN};

/// What the backend offers every guest.
const FEATURES: u64 = feature::VERSION_1
    | feature::ANY_LAYOUT
    | feature::MRG_RXBUF
    | feature::IN_ORDER
    | feature::RING_PACKED
    | feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::MQ
    | feature::MAC;
/// Descriptors a queue is said to have before a guest has chosen.
const QUEUE_SIZE_DEFAULT: u16 = 1024;

/// Which socket to serve, and how.
#[derive(Clone, Debug)]
pub struct VhostUserConfig {
    /// The address as the user wrote it, for messages.
    pub address: String,
    /// The socket.
    pub path: PathBuf,
    /// Which side makes the connection.
    pub mode: Mode,
    /// Queue pairs that a guest may use at most, 1 to 128.
    pub queue_pairs: u16,
    /// The number that mbufs from this port carry.
    pub port: u16,
    /// The MAC address that a guest is given.
    pub mac: [u8; 6],
    /// Where the positions of packed rings are kept for a process that comes after this one; see [`positions`](crate::positions).
    pub state_dir: Option<PathBuf>,
}

/// A vhost-user port. Dropping it ends the connection and removes the socket.
pub struct VhostUserPort {
    config: VhostUserConfig,
    shared: Arc<Shared>,
    served: Served,
    started: bool,
}

/// What the port and its session both reach.
struct Shared {
    config: VhostUserConfig,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: Slots,
    /// One a vring: even ones take frames `to_guest`, odd ones bring them `from_guest`.
    rings: Vec<Ring>,
    link_up: bool,
}

/// One vring: what either side wants of it, and whether it runs.
#[derive(Default)]
struct Ring {
    /// The session's part: the ring, at the position at which it was parked.
    config: Option<QueueConfig>,
    /// The application's part: `from_guest` queues need a pool.
    pool: Option<MbufPool>,
    /// Whether the application has it started.
    started: bool,
    deferred: bool,
    set_up: bool,
    running: Option<Position>,
}

impl VhostUserPort {
    /// Serves a socket. A front-end may connect at once; its rings run once the port has started.
    ///
    /// # Errors
    /// [`PortError::Range`] for a number of queue pairs that cannot be; [`PortError::Device`] if the socket cannot be had.
    pub fn open(config: VhostUserConfig, control: &Control) -> Result<Self, PortError> {
        let (value, max) = (config.queue_pairs.into(), queue_pairs_max(FEATURES).into());
        if !(1..=max).contains(&value) {
            let port = config.address.clone();
            return Err(PortError::Range { port, what: "queue pairs", value, min: 1, max });
        }
        let rings = (0..2 * config.queue_pairs).map(|_| Ring::default()).collect();
        let slots = Slots::new(&config.address, 0, 0);
        let state = Mutex::new(State { slots, rings, link_up: false });
        let shared = Arc::new(Shared { config: config.clone(), state });
        let failed = |e| PortError::device(&config.address, e);
        let open = |dir: &PathBuf| Positions::open(dir, &config.path, 2 * config.queue_pairs);
        let positions = config.state_dir.as_ref().map(open).transpose().map_err(failed)?;
        let device = Box::new(VhostDevice { shared: Arc::clone(&shared), positions });
        let served = control.add(&config.path, config.mode, device);
        let served = served.map_err(failed)?;
        Ok(Self { config, shared, served, started: false })
    }

    fn range(&self, what: &'static str, value: u16, max: u16) -> PortError {
        PortError::Range { port: self.config.address.clone(), what, value: value.into(), min: 0, max: max.into() }
    }

    /// The vring that brings frames `from_guest` to receive queue `queue`.
    fn rx_vring(&self, queue: u16) -> Result<u16, PortError> {
        self.exists("rx queue", queue).map(|()| 2 * queue + 1)
    }

    /// The vring that takes frames `to_guest` from transmit queue `queue`.
    fn tx_vring(&self, queue: u16) -> Result<u16, PortError> {
        self.exists("tx queue", queue).map(|()| 2 * queue)
    }

    fn exists(&self, what: &'static str, queue: u16) -> Result<(), PortError> {
        let max = self.config.queue_pairs - 1;
        if queue <= max { Ok(()) } else { Err(self.range(what, queue, max)) }
    }

    fn must_be_stopped(&self, action: &'static str) -> Result<(), PortError> {
        let port = self.config.address.clone();
        if self.started {
            return Err(PortError::State { port, action, state: "started", remedy: "stop it first" });
        }
        Ok(())
    }

    /// Sets one vring's queue up.
    fn set_up(&self, vring: u16, pool: Option<MbufPool>, deferred: bool) -> Result<(), PortError> {
        self.must_be_stopped("set a queue up")?;
        let mut state = self.shared.lock();
        let queue = vring / 2;
        let (what, count) = match pool {
            Some(_) => ("rx queue", state.slots.rx.len()),
            None => ("tx queue", state.slots.tx.len()),
        };
        if usize::from(queue) >= count {
            return Err(state.slots.no_queue(what, queue, count));
        }
        let ring = &mut state.rings[usize::from(vring)];
        (ring.pool, ring.deferred, ring.set_up) = (pool, deferred, true);
        Ok(())
    }

    /// Tells whether the application wants one vring to run.
    fn want(&self, vring: u16, started: bool) -> Result<(), PortError> {
        let mut state = self.shared.lock();
        let Some(ring) = state.rings.get_mut(usize::from(vring)) else { return Ok(()) };
        if started && !(ring.set_up && self.started) {
            let (port, action, remedy) = (self.config.address.clone(), "start", "set the queue up and start the port");
            return Err(PortError::State { port, action, state: "without that queue", remedy });
        }
        ring.started = started;
        state.apply(vring, self.config.port)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Runs or parks vring `vring`, as both sides want it now.
    fn apply(&mut self, vring: u16, port: u16) -> Result<(), PortError> {
        let Some(ring) = self.rings.get_mut(usize::from(vring)) else { return Ok(()) };
        let wanted = ring.started && ring.config.is_some();
        if wanted == ring.running.is_some() {
            return Ok(());
        }
        if !wanted {
            return self.park(vring);
        }
        let Some(config) = ring.config.clone() else { return Ok(()) };
        let (queue, position) = (vring / 2, Position::default());
        let device = |slots: &Slots, e| PortError::device(&slots.port, e);
        if vring.is_multiple_of(2) {
            let stats = Arc::clone(self.slots.tx[usize::from(queue)].stats());
            let parts = ToGuestParts { config, position: position.clone(), stats };
            let running = to_guest(parts).map_err(|e| device(&self.slots, e))?;
            self.slots.swap_tx(queue, Some(running))?;
        } else {
            let Some(pool) = ring.pool.clone() else { return Ok(()) };
            let stats = Arc::clone(self.slots.rx[usize::from(queue)].stats());
            let parts = FromGuestParts { config, position: position.clone(), pool, port, stats };
            let running = from_guest(parts).map_err(|e| device(&self.slots, e))?;
            self.slots.swap_rx(queue, Some(running))?;
        }
        self.rings[usize::from(vring)].running = Some(position);
        Ok(())
    }

    /// Takes a running queue from its worker, between two bursts; what it had taken is finished. Its ring keeps its position.
    fn park(&mut self, vring: u16) -> Result<(), PortError> {
        let queue = vring / 2;
        if vring.is_multiple_of(2) {
            let running: Option<Box<dyn TxBurst>> = self.slots.swap_tx(queue, None)?;
            drop(running);
        } else {
            let running: Option<Box<dyn RxBurst>> = self.slots.swap_rx(queue, None)?;
            drop(running);
        }
        let ring = &mut self.rings[usize::from(vring)];
        if let (Some(position), Some(config)) = (ring.running.take(), &mut ring.config) {
            config.position = position.get();
        }
        Ok(())
    }
}

impl Port for VhostUserPort {
    fn info(&self) -> PortInfo {
        PortInfo {
            driver: "vhost-user",
            address: self.config.address.clone(),
            queues_max: self.config.queue_pairs,
            queue_size_max: RING_SIZE_MAX,
            queue_size_default: QUEUE_SIZE_DEFAULT,
            mac: self.config.mac,
            scatter: true,
        }
    }

    fn configure(&mut self, config: &PortConfig) -> Result<(), PortError> {
        self.must_be_stopped("be configured")?;
        for (what, queues) in [("rx queues", config.rx_queues), ("tx queues", config.tx_queues)] {
            if queues > self.config.queue_pairs {
                return Err(self.range(what, queues, self.config.queue_pairs));
            }
        }
        let mut state = self.shared.lock();
        state.slots = Slots::new(&self.config.address, config.rx_queues, config.tx_queues);
        for ring in &mut state.rings {
            (ring.set_up, ring.started) = (false, false);
        }
        Ok(())
    }

    fn rx_queue_setup(&mut self, queue: u16, config: &RxQueueConfig) -> Result<(), PortError> {
        validate::rx(&self.config.address, config, RING_SIZE_MAX)?;
        self.set_up(self.rx_vring(queue)?, Some(config.pool.clone()), config.deferred_start)
    }

    fn tx_queue_setup(&mut self, queue: u16, config: &TxQueueConfig) -> Result<(), PortError> {
        validate::tx(&self.config.address, config, RING_SIZE_MAX)?;
        self.set_up(self.tx_vring(queue)?, None, config.deferred_start)
    }

    fn start(&mut self) -> Result<(), PortError> {
        self.must_be_stopped("start")?;
        self.started = true;
        let wanted: Vec<u16> = {
            let state = self.shared.lock();
            (0..).zip(&state.rings).filter(|(_, ring)| ring.set_up && !ring.deferred).map(|(vring, _)| vring).collect()
        };
        wanted.into_iter().try_for_each(|vring| self.want(vring, true)).inspect_err(|_| {
            // The first error is the one to tell.
            let _ = self.stop();
        })
    }

    fn stop(&mut self) -> Result<(), PortError> {
        let mut result = Ok(());
        for vring in 0..2 * self.config.queue_pairs {
            result = result.and(self.want(vring, false));
        }
        self.started = false;
        result
    }

    fn rx_queue_start(&mut self, queue: u16) -> Result<(), PortError> {
        self.want(self.rx_vring(queue)?, true)
    }

    fn rx_queue_stop(&mut self, queue: u16) -> Result<(), PortError> {
        self.want(self.rx_vring(queue)?, false)
    }

    fn tx_queue_start(&mut self, queue: u16) -> Result<(), PortError> {
        self.want(self.tx_vring(queue)?, true)
    }

    fn tx_queue_stop(&mut self, queue: u16) -> Result<(), PortError> {
        self.want(self.tx_vring(queue)?, false)
    }

    fn link(&mut self) -> Link {
        if self.started && self.shared.lock().link_up { Link::Up } else { Link::Down }
    }

    fn slots(&self) -> Slots {
        self.shared.lock().slots.clone()
    }
}

impl Drop for VhostUserPort {
    fn drop(&mut self) {
        // Nothing is left to tell an error to.
        let _ = self.stop();
        self.served.end();
    }
}

/// The session's end of the port.
struct VhostDevice {
    shared: Arc<Shared>,
    positions: Option<Positions>,
}

impl Device for VhostDevice {
    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_pairs_max(&self) -> u16 {
        self.shared.config.queue_pairs
    }

    fn config(&self) -> [u8; NET_CONFIG_LEN] {
        const LINK_UP: u16 = 1;
        let mut config = [0; NET_CONFIG_LEN];
        // struct virtio_net_config (5.1.4): mac, status, max_virtqueue_pairs.
        config[..6].copy_from_slice(&self.shared.config.mac);
        config[6..8].copy_from_slice(&LINK_UP.to_le_bytes());
        config[8..10].copy_from_slice(&self.shared.config.queue_pairs.to_le_bytes());
        config
    }

    fn queue_start(&mut self, mut config: QueueConfig) -> Result<(), Error> {
        let vring = config.index;
        let own = self.positions.as_ref().and_then(|positions| positions.record(vring));
        match (&config.record, own) {
            // The front-end keeps it; what an earlier connection left here is void.
            (Some(_), Some(own)) => own.forget(),
            (None, own) => config.record = own.map(Record::File),
            (Some(_), None) => {}
        }
        let mut state = self.shared.lock();
        let Some(ring) = state.rings.get(usize::from(vring)) else { return Ok(()) };
        if ring.running.is_some() {
            // A worker did not let go of it when it was to stop: it must not go on in the memory of then.
            state.park(vring).map_err(|source| Error::Port(Box::new(source)))?;
        }
        state.rings[usize::from(vring)].config = Some(config);
        state.apply(vring, self.shared.config.port).map_err(|source| {
            // Not running, so it will not be stopped: let go of its memory now.
            state.rings[usize::from(vring)].config = None;
            Error::Port(Box::new(source))
        })
    }

    fn queue_stop(&mut self, index: u16) -> Option<u32> {
        let mut state = self.shared.lock();
        let ring = state.rings.get_mut(usize::from(index))?;
        if ring.running.is_some()
            && let Err(error) = state.park(index)
        {
            tracing::error!("{error}");
        }
        state.rings[usize::from(index)].config.take().map(|config| config.position)
    }

    fn forget(&mut self, index: u16) {
        if let Some(record) = self.positions.as_ref().and_then(|positions| positions.record(index)) {
            record.forget();
        }
    }

    fn link(&mut self, up: bool) {
        self.shared.lock().link_up = up;
    }
}
