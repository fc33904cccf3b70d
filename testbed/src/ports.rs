//! Our own two ends as a program uses them, in this process: ports on sockets, with traffic through them that is checked.
//!
//! [`guest`] opens the PMD's port, [`host`] the backend's. An [`Exchange`] sends numbered frames out of every queue pair of
//! either, to a peer that sends them back ([`Echo`], testpmd, the reference backend), and checks every byte that returns.

mod echo;
mod exchange;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend::control::{self, Control};
use backend::port::vhost_user::{VhostUserConfig, VhostUserPort};
use pmd::fwd::{PortSetup, open_port};
use pmd::mbuf::{MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::port::{Port, PortError};
use pmd::virtio::port::{VirtioConfig, VirtioPort};
use pmd::virtio::spec::feature;
use pmd::virtio::user;

pub use echo::Echo;
pub use exchange::{Cut, Exchange};

/// How long anything that is awaited may take.
pub const SOON: Duration = Duration::from_secs(20);
/// Memory of an arena beside its mbufs: rings, and what hangs on them.
const RINGS_BYTES: usize = 16 << 20;

/// An arena, and a pool in it.
#[derive(Clone, Debug)]
pub struct Memory {
    /// What a device gets to see.
    pub arena: Arc<Arena>,
    /// Where all mbufs come from.
    pub pool: MbufPool,
}

impl Memory {
    /// So many mbufs of the default size, on ordinary pages.
    ///
    /// # Panics
    /// If there is no memory.
    #[must_use]
    pub fn new(mbufs: u32) -> Self {
        let config = MbufPoolConfig { count: mbufs, ..MbufPoolConfig::default() };
        let arena = Arena::new(config.arena_bytes() + RINGS_BYTES, &Pages::Plain).expect("memory for a test");
        let pool = MbufPool::new(&config, &arena).expect("a pool that fits into its arena");
        Self { arena, pool }
    }

    /// Mbufs that are not at home.
    #[must_use]
    pub fn out(&self) -> usize {
        self.pool.mempool().in_use()
    }
}

/// What both ends of a link agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// `VIRTIO_F_RING_PACKED`.
    pub packed: bool,
    /// `VIRTIO_F_IN_ORDER`.
    pub in_order: bool,
    /// `VIRTIO_NET_F_MRG_RXBUF`.
    pub mergeable: bool,
    /// Queue pairs.
    pub queues: u16,
    /// Descriptors of each ring.
    pub size: u16,
}

impl Shape {
    /// The plainest: one pair of split rings of 256.
    pub const PLAIN: Self = Self { packed: false, in_order: false, mergeable: false, queues: 1, size: 256 };

    /// Every combination of ring, order and buffers, as [`PLAIN`](Self::PLAIN) otherwise.
    #[must_use]
    pub fn all() -> [Self; 8] {
        let bit = |n: usize, bit: usize| n & 1 << bit != 0;
        std::array::from_fn(|n| Self { packed: bit(n, 2), in_order: bit(n, 1), mergeable: bit(n, 0), ..Self::PLAIN })
    }

    /// What a driver of this shape asks for.
    #[must_use]
    pub fn features(self) -> u64 {
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        feature::VERSION_1
            | feature::INDIRECT_DESC
            | bit(self.packed, feature::RING_PACKED)
            | bit(self.in_order, feature::IN_ORDER)
            | bit(self.mergeable, feature::MRG_RXBUF)
    }

    /// The longest frame that one receive buffer of the default size holds, or several together.
    #[must_use]
    pub fn frame_max(self) -> usize {
        if self.mergeable { 9000 } else { 1518 }
    }

    /// The PMD's receive and transmit paths.
    #[must_use]
    pub fn guest_paths(self) -> (String, String) {
        let in_order = if self.in_order { "-in-order" } else { "" };
        (format!("{}{in_order}{}", self.ring(), self.suffix()), format!("{}{in_order}", self.ring()))
    }

    /// The backend's receive (`from_guest`) and transmit (`to_guest`) paths.
    #[must_use]
    pub fn host_paths(self) -> (String, String) {
        let in_order = if self.in_order { "-in-order" } else { "" };
        (format!("{}{in_order}", self.ring()), format!("{}{}", self.ring(), self.suffix()))
    }

    fn ring(self) -> &'static str {
        if self.packed { "packed" } else { "split" }
    }

    fn suffix(self) -> &'static str {
        if self.mergeable { "-mergeable" } else { "" }
    }
}

/// What [`VirtioPort::open`] needs for a port of `shape` on `socket`.
#[must_use]
pub fn guest_config(shape: Shape, socket: &Path, mode: user::Mode) -> VirtioConfig {
    VirtioConfig {
        address: format!("virtio-user:{}", socket.display()),
        path: socket.to_owned(),
        mode,
        queue_pairs: shape.queues,
        ring_size: shape.size,
        packed: shape.packed,
        in_order: shape.in_order,
        event_idx: false,
        mergeable: shape.mergeable,
        port: 0,
        mac: [2, 0, 0, 0, 0, 2],
        timeout: SOON,
    }
}

/// The PMD's port of `shape` on `socket`, started.
///
/// # Errors
/// [`PortError`].
pub fn guest(shape: Shape, socket: &Path, mode: user::Mode, memory: &Memory) -> Result<VirtioPort, PortError> {
    let mut port = VirtioPort::open(guest_config(shape, socket, mode), std::slice::from_ref(&memory.arena))?;
    open_port(&mut port, &setup(shape, memory))?;
    Ok(port)
}

/// The backend's port on `socket`, for up to `queues` queue pairs, started.
///
/// # Errors
/// [`PortError`].
pub fn host(
    queues: u16,
    socket: &Path,
    mode: control::Mode,
    memory: &Memory,
    control: &Control,
) -> Result<VhostUserPort, PortError> {
    let config = VhostUserConfig {
        address: format!("vhost-user:{}", socket.display()),
        path: socket.to_owned(),
        mode,
        queue_pairs: queues,
        port: 1,
        mac: [2, 0, 0, 0, 0, 1],
        state_dir: None,
    };
    let mut port = VhostUserPort::open(config, control)?;
    open_port(&mut port, &setup(Shape { queues, ..Shape::PLAIN }, memory))?;
    Ok(port)
}

/// How to set a port of `shape` up.
#[must_use]
pub fn setup(shape: Shape, memory: &Memory) -> PortSetup {
    PortSetup {
        queues: shape.queues,
        size: shape.size,
        pool: memory.pool.clone(),
        rx_path: None,
        tx_path: None,
        frame_max: shape.frame_max() as u32,
    }
}

/// Whether `done` within [`SOON`].
pub fn wait_until(mut done: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + SOON;
    while !done() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// The paths that queue 0 of `port` runs on.
#[must_use]
pub fn paths(port: &dyn Port) -> (String, String) {
    let name = |path: Option<&str>| path.unwrap_or("(stopped)").to_owned();
    (name(port.rx_path(0)), name(port.tx_path(0)))
}
