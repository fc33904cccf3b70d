//! The reference backend: a vhost-user host of rust-vmm's `vhost-user-backend` and `virtio-queue` alone, slow and independent.
//!
//! Where it and our backend agree about a guest, our driver end has two judges that share no line of ring code. Split rings;
//! `IN_ORDER` and `MRG_RXBUF` as asked for; indirect descriptors always. What the crates ask of their user:
//!
//! - a daemon serves one connection (it never forgets its owner), so each connection gets a new one;
//! - without an exit event, dropping a daemon waits for ever;
//! - the STATUS protocol feature ends the connection, so it is not offered;
//! - the vrings are only shown to an event handler, so the first event of a ring hands them to the polling thread;
//! - `add_used` publishes one buffer at a time, but drivers drop a frame whose buffers are not all there at once (Linux; DPDK
//!   in order), so a whole burst is completed here by one store.

mod device;
mod pump;
mod ring;

pub use pump::Stats;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vhost::vhost_user::{Error as ProtocolError, Listener};
use vhost_user_backend::{Error as DaemonError, ShutdownHandle, VhostUserDaemon};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::frame::{Macs, Stream};
use device::Device;
use pump::{Pump, Work};

/// How long a stop may go unnoticed while nobody is connected.
const STOP_LATENCY_MS: i32 = 20;

/// A reference backend to be run.
#[derive(Debug, Clone)]
pub struct Config {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Connect to the socket instead of listening on it.
    pub client: bool,
    /// Queue pairs.
    pub queues: u16,
    /// Offer `VIRTIO_NET_F_MRG_RXBUF`.
    pub mergeable: bool,
    /// Offer `VIRTIO_F_IN_ORDER`.
    pub in_order: bool,
    /// What it does with frames.
    pub mode: Mode,
}

/// What the reference backend does with frames. Frames from the guest are always taken and counted.
#[derive(Debug, Clone)]
pub enum Mode {
    /// Takes the guest's frames.
    Sink(Expect),
    /// Sends frames to the guest as fast as it offers buffers.
    Source {
        /// Which; queue pair `n` sends the stream with id `n`.
        stream: Stream,
        /// How many on each queue pair; endless if none.
        count: Option<u64>,
        /// What is expected to come back, from a guest that forwards.
        returned: Expect,
    },
    /// Sends each frame from the guest back into the receive ring of the same queue pair.
    Loop,
}

/// What frames are expected from the guest.
#[derive(Debug, Clone)]
pub enum Expect {
    /// Any: they are counted.
    Anything,
    /// Those of testpmd's `txonly`; others count as foreign.
    Txonly,
    /// Those of a [`Stream`], on queue pair `n` that with id `n`; every byte is checked.
    Stream(Stream, Macs),
}

/// What goes wrong with a reference backend itself; what goes wrong with a connection is in its [`Stats`].
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The socket cannot be listened on.
    #[error("the reference backend cannot listen on {}: {reason}; remove the file if nobody listens there", socket.display())]
    Listen {
        /// The socket.
        socket: PathBuf,
        /// Why not.
        reason: ProtocolError,
    },
    /// A thread or an event could not be set up.
    #[error("the reference backend on {} cannot {what}: {source}", socket.display())]
    Setup {
        /// The socket.
        socket: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

impl Config {
    /// A backend with one queue pair that listens on `socket` and offers everything it has.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>, mode: Mode) -> Self {
        Self { socket: socket.into(), client: false, queues: 1, mergeable: true, in_order: true, mode }
    }
}

/// A reference backend on threads of this process. It stops when this value is dropped.
#[derive(Debug)]
pub struct Reference {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
}

/// What the handle and the running backend share.
struct Control {
    stop: AtomicBool,
    connection: Mutex<Option<ShutdownHandle>>,
    work: Mutex<Work>,
}

impl Reference {
    /// Starts a backend; when this returns, the socket is there. Its threads inherit the affinity of the caller.
    ///
    /// # Errors
    /// [`ReferenceError`] if it cannot listen.
    pub fn spawn(config: Config) -> Result<Self, ReferenceError> {
        let control = Arc::new(Control {
            stop: AtomicBool::new(false),
            connection: Mutex::new(None),
            work: Mutex::new(Work::new(&config)),
        });
        let setup = |what| {
            let socket = config.socket.clone();
            move |source| ReferenceError::Setup { socket, what, source }
        };
        let spawn_failed = setup("start its thread");
        let door = if config.client {
            Door::Connect(config.socket.clone())
        } else {
            Door::listen(&config.socket)?.map_err(setup("watch its socket"))?
        };
        let shared = Arc::clone(&control);
        let thread = thread::Builder::new()
            .name("reference".into())
            .spawn(move || shared.serve(&config, door))
            .map_err(spawn_failed)?;
        Ok(Self { control, thread: Some(thread) })
    }

    /// The counts so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.control.work.lock().unwrap_or_else(PoisonError::into_inner).stats()
    }

    /// Sends no frames of its own until [`resume`](Self::resume); what comes is still taken.
    pub fn pause(&self) {
        self.control.work.lock().unwrap_or_else(PoisonError::into_inner).set_paused(true);
    }

    /// Goes on sending.
    pub fn resume(&self) {
        self.control.work.lock().unwrap_or_else(PoisonError::into_inner).set_paused(false);
    }

    /// Ends the connection, if there is one, and the backend; returns the final counts.
    #[must_use]
    pub fn stop(mut self) -> Stats {
        self.end();
        self.stats()
    }

    fn end(&mut self) {
        self.control.stop.store(true, Ordering::SeqCst);
        if let Some(connection) = &*self.control.connection.lock().unwrap_or_else(PoisonError::into_inner) {
            connection.shutdown();
        }
        if let Some(thread) = self.thread.take() {
            // It has nothing to return; a panic in it has been printed already.
            let _ = thread.join();
        }
    }
}

impl Drop for Reference {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("stop", &self.stop).finish_non_exhaustive()
    }
}

/// How connections come about.
enum Door {
    Listen(Listener, Epoll),
    Connect(PathBuf),
}

impl Door {
    fn listen(socket: &Path) -> Result<io::Result<Self>, ReferenceError> {
        let listener =
            Listener::new(socket, false).map_err(|reason| ReferenceError::Listen { socket: socket.into(), reason })?;
        let watch = || {
            let epoll = Epoll::new()?;
            let descriptor = std::os::fd::AsRawFd::as_raw_fd(&listener);
            epoll.ctl(ControlOperation::Add, descriptor, EpollEvent::new(EventSet::IN, 0))?;
            Ok(epoll)
        };
        Ok(watch().map(|epoll| Self::Listen(listener, epoll)))
    }

    /// Starts `daemon` on the next connection; `false` if there is none yet, after a short wait.
    fn open(&mut self, daemon: &mut VhostUserDaemon<Arc<Device>>) -> Result<bool, DaemonError> {
        match self {
            // The daemon's own accept cannot be stopped, so it is called only when somebody is there.
            Self::Listen(listener, epoll) => match epoll.wait(STOP_LATENCY_MS, &mut [EpollEvent::default()]) {
                Ok(1..) => daemon.start(listener).map(|()| true),
                Ok(0) => Ok(false),
                Err(e) => Err(DaemonError::StartDaemon(e)),
            },
            Self::Connect(socket) => match daemon.start_client(&socket.to_string_lossy()) {
                Err(DaemonError::CreateBackendReqHandler(_)) => {
                    thread::sleep(Duration::from_millis(STOP_LATENCY_MS.unsigned_abs().into()));
                    Ok(false)
                }
                other => other.map(|()| true),
            },
        }
    }
}

impl Control {
    /// One connection after the other, until told to stop.
    fn serve(&self, config: &Config, mut door: Door) {
        while !self.stopping() {
            if let Err(reason) = self.connection(config, &mut door) {
                self.work.lock().unwrap_or_else(PoisonError::into_inner).failed(&reason);
            }
        }
    }

    fn connection(&self, config: &Config, door: &mut Door) -> Result<(), DaemonError> {
        let memory = GuestMemoryAtomic::new(GuestMemoryMmap::new());
        let device = Arc::new(Device::new(config));
        let mut daemon = VhostUserDaemon::new("reference-session".into(), Arc::clone(&device), memory.clone())?;
        while !door.open(&mut daemon)? {
            if self.stopping() {
                return Ok(());
            }
        }
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = daemon.shutdown_handle();
        if self.stopping() {
            // Told to stop before the handle was there to be shut down.
            daemon.request_shutdown();
        }
        let hung_up = AtomicBool::new(false);
        let ended = thread::scope(|scope| {
            scope.spawn(|| Pump::new(&self.work, &device, &memory).run(&hung_up));
            let ended = daemon.wait();
            hung_up.store(true, Ordering::SeqCst);
            ended
        });
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = None;
        match ended {
            // A guest that quits hangs up.
            Err(DaemonError::HandleRequest(ProtocolError::Disconnected | ProtocolError::PartialMessage)) => Ok(()),
            ended => ended,
        }
    }

    fn stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}
