//! A daemon with one port, for the target of its sockets: the control thread is its own, the worker is whoever calls.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use backend::control::{Control, Mode};
use backend::port::vhost_user::{VhostUserConfig, VhostUserPort};
use pmd::mbuf::{MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::port::{Burst, Port, PortConfig, RxHandle, RxQueueConfig, TxHandle, TxQueueConfig};
use testbed::hostile::judge;
use testbed::rings::packet;
use vmm_sys_util::tempdir::TempDir;

use crate::message;

/// How long the daemon may take for anything.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Queue pairs of its port.
pub const PAIRS: u16 = 2;
const GET_FEATURES: u32 = 1;

/// What a connection may not leave behind.
#[derive(Debug, PartialEq, Eq)]
struct Open {
    /// Sockets, eventfds and memory; other files and pipes are the fuzzer's own.
    descriptors: Vec<PathBuf>,
    /// Mappings of memory files, by file.
    mappings: Vec<String>,
}

impl Open {
    fn now() -> Self {
        let ours = |name: &str| ["socket:", "anon_inode:", "/memfd:"].iter().any(|kind| name.starts_with(kind));
        let links = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
        let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
        let mut descriptors: Vec<_> = targets.filter(|target| ours(&target.to_string_lossy())).collect();
        descriptors.sort_unstable();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
        let mappings = maps.lines().filter(|line| line.contains("/memfd:")).map(str::to_owned).collect();
        Self { descriptors, mappings }
    }
}

/// The daemon.
pub struct Daemon {
    /// Its socket.
    pub path: PathBuf,
    /// What is open while nobody has ever been connected.
    at_rest: Open,
    rx: Vec<RxHandle>,
    tx: Vec<TxHandle>,
    burst: Burst,
    pool: MbufPool,
    _port: VhostUserPort,
    _control: Control,
    _dir: TempDir,
}

impl Daemon {
    /// A daemon that listens.
    ///
    /// # Panics
    /// If there cannot be one.
    #[must_use]
    pub fn start() -> Self {
        let dir = TempDir::new().expect("a folder");
        let path = dir.as_path().join("s");
        let config = MbufPoolConfig { count: 512, cache_size: 32, ..MbufPoolConfig::default() };
        let arena = Arena::new(config.arena_bytes(), &Pages::Plain).expect("memory");
        let pool = MbufPool::new(&config, &arena).expect("memory");
        let control = Control::with_message_timeout(Duration::from_millis(200)).expect("a control thread");
        let config = VhostUserConfig {
            address: "vhost-user:s".into(),
            path: path.clone(),
            mode: Mode::Server,
            queue_pairs: PAIRS,
            port: 0,
            mac: [2, 0, 0, 0, 0, 1],
            state_dir: None,
        };
        let mut port = VhostUserPort::open(config, &control).expect("a socket");
        port.configure(&PortConfig { rx_queues: PAIRS, tx_queues: PAIRS, ..PortConfig::default() }).expect("queues");
        for queue in 0..PAIRS {
            let rx = RxQueueConfig { size: 0, pool: pool.clone(), free_thresh: 0, deferred_start: false };
            port.rx_queue_setup(queue, &rx).expect("a queue");
            port.tx_queue_setup(queue, &TxQueueConfig::default()).expect("a queue");
        }
        port.start().expect("a port");
        let rx = (0..PAIRS).map(|queue| port.rx(queue).expect("a handle")).collect();
        let tx = (0..PAIRS).map(|queue| port.tx(queue).expect("a handle")).collect();
        let at_rest = Open::now();
        let burst = Burst::new(8);
        Self { path, at_rest, rx, tx, burst, pool, _port: port, _control: control, _dir: dir }
    }

    /// A connection; the one before is gone.
    ///
    /// # Panics
    /// If nobody listens.
    #[must_use]
    pub fn connect(&self) -> UnixStream {
        let client = UnixStream::connect(&self.path).expect("a listener");
        client.set_read_timeout(Some(PATIENCE)).expect("a socket");
        client
    }

    /// Does what a worker does, once: a burst in each direction of each queue, whether it runs or not.
    ///
    /// # Panics
    /// If a frame is not consistent, or there are no mbufs.
    pub fn work(&mut self) {
        for (rx, tx) in self.rx.iter_mut().zip(&mut self.tx) {
            rx.rx_burst(&mut self.burst);
            judge(&mut self.burst);
            let frame = packet(&self.pool, &[0xa5; 60], 60).expect("an mbuf");
            self.burst.push(frame).expect("room");
            tx.tx_burst(&mut self.burst);
            self.burst.free();
        }
    }

    /// The connection is gone: the next front-end is served, and when it has left as well, all is as if nobody had ever been there.
    ///
    /// # Panics
    /// If that is not so before long.
    pub fn check(&self) {
        eventually("an honest front-end is served", || {
            let mut client = self.connect();
            client.write_all(&message(GET_FEATURES, 1, &[])).is_ok() && client.read_exact(&mut [0; 20]).is_ok()
        });
        eventually("all is closed and unmapped", || Open::now() == self.at_rest);
        assert_eq!(self.pool.mempool().in_use(), 0, "mbufs are missing");
    }
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}; open: {:#?}", Open::now());
        std::thread::sleep(Duration::from_micros(200));
    }
}
