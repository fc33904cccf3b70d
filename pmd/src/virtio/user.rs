//! The vhost-user transport: virtio without a bus, over a Unix socket (the vhost-user specification's *front-end*).
//!
//! It negotiates, shares memory and sets queues up; it never touches a ring. Every request has a time limit, so a backend
//! that stops answering is an error and not a hang.

mod error;
mod extra;
mod reconnect;
mod socket;
mod watchdog;

use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use vhost::vhost_user::message::{FrontendReq, VhostUserHeaderFlag};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

pub use self::error::UserError;
use self::extra::Extra;
use self::socket::Listener;
pub use self::socket::remove_sockets;
use self::watchdog::Watchdog;
use super::spec::{feature, queue_pairs_max, status};
use crate::mem::Arena;

/// The most queue pairs of one device, which then has no control queue.
pub const QUEUE_PAIRS_MAX: u16 = queue_pairs_max(0);
/// The most arenas that can be shared: what DPDK's and Linux's backends take.
pub const REGIONS_MAX: usize = 8;
/// The longest path of a Unix socket, in bytes (`sockaddr_un`, without its NUL).
pub const SOCKET_PATH_LEN_MAX: usize = 107;

/// The protocol features that this front-end has a use for.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures =
    VhostUserProtocolFeatures::MQ.union(VhostUserProtocolFeatures::REPLY_ACK).union(VhostUserProtocolFeatures::STATUS);
/// Virtio features that this transport cannot keep, whoever wants them: there is no IOTLB, and bit 30 is its own.
const UNSUPPORTED: u64 = feature::ACCESS_PLATFORM | feature::PROTOCOL_FEATURES;

/// Which end listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The backend listens.
    Client,
    /// This end listens, for one backend.
    Server,
}

/// What to connect to, and what for.
#[derive(Clone, Debug)]
pub struct UserConfig {
    /// The socket, at most [`SOCKET_PATH_LEN_MAX`] bytes.
    pub path: PathBuf,
    /// Which end listens.
    pub mode: Mode,
    /// Queue pairs, 1 to [`QUEUE_PAIRS_MAX`]; a pair is queue `2 n` (receive) and `2 n + 1` (transmit; virtio 1.3, 5.1.2).
    pub queue_pairs: u16,
    /// The virtio features ([`feature`]) that the driver can use; `VERSION_1` is always among them.
    pub wanted: u64,
    /// How long connecting, and the answer to each request, may take.
    pub timeout: Duration,
}

/// Where a ring lies.
#[derive(Clone, Copy, Debug)]
pub struct RingAddresses {
    /// Descriptors.
    pub size: u16,
    /// Where the ring starts: split, the avail index; packed, both indices with their wrap counters (vhost-user,
    /// "Vring state description").
    pub base: u32,
    /// IOVA of the descriptor area (virtio 1.3, 2.6).
    pub desc: u64,
    /// IOVA of the driver area.
    pub avail: u64,
    /// IOVA of the device area.
    pub used: u64,
}

/// A queue's events.
struct Queue {
    kick: Arc<EventFd>,
    call: Arc<EventFd>,
    /// Whether the backend has the call descriptor; it forgets it when the queue is stopped.
    call_sent: bool,
}

/// A connection to a vhost-user backend that has agreed on features.
///
/// Dropping it closes the connection, upon which the backend unmaps the memory. After any error but
/// [`UserError::Rejected`], and those about arguments, the connection is closed and every later request fails.
pub struct UserTransport {
    frontend: Frontend,
    extra: Extra,
    watchdog: Watchdog,
    /// In server mode, the socket that backends come through.
    listener: Option<Listener>,
    path: PathBuf,
    timeout: Duration,
    /// Features offered, then agreed on; with bit 30 if the backend has protocol features.
    features: u64,
    protocol: VhostUserProtocolFeatures,
    status: u8,
    queue_pairs_max: u16,
    queues: Vec<Queue>,
}

impl UserTransport {
    /// Connects and negotiates, up to where the queues are set up (virtio 1.3, 3.1.1 steps 1 to 6).
    ///
    /// # Errors
    /// [`UserError`]: no connection, no agreement, or no answer in time. Nothing is left behind then.
    pub fn connect(config: &UserConfig) -> Result<Self, UserError> {
        if !(1..=QUEUE_PAIRS_MAX).contains(&config.queue_pairs) {
            return Err(UserError::QueuePairs {
                path: config.path.clone(),
                asked: config.queue_pairs,
                limit: QUEUE_PAIRS_MAX,
            });
        }
        // The kernel takes a socket time-out of 0 for none.
        let timeout = config.timeout.max(Duration::from_millis(1));
        let (stream, listener) = match config.mode {
            Mode::Client => (socket::connect(&config.path, timeout)?, None),
            Mode::Server => socket::accept(&config.path, timeout).map(|(stream, listener)| (stream, Some(listener)))?,
        };
        let failed = |source| UserError::io(&config.path, "getting a descriptor or thread", source);
        let (frontend, extra, watchdog) = wires(stream, config.queue_pairs).map_err(failed)?;
        let queues = (0..2 * config.queue_pairs).map(|_| Queue::new()).collect::<Result<_, _>>();
        let queues = queues.map_err(|source| UserError::events(&config.path, config.queue_pairs, source))?;
        let mut transport = Self {
            frontend,
            extra,
            watchdog,
            listener,
            path: config.path.clone(),
            timeout,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            status: 0,
            queue_pairs_max: 1,
            queues,
        };
        transport.introduce()?;
        transport.check_queue_pairs(config.queue_pairs, config.wanted)?;
        transport.negotiate(config.wanted | feature::VERSION_1)?;
        Ok(transport)
    }

    /// Asks what there is: features, and how to talk (vhost-user, "Feature negotiation").
    fn introduce(&mut self) -> Result<(), UserError> {
        (self.protocol, self.queue_pairs_max) = (VhostUserProtocolFeatures::empty(), 1);
        self.request(FrontendReq::SET_OWNER, |t| t.frontend.set_owner())?;
        self.features = self.request(FrontendReq::GET_FEATURES, |t| t.frontend.get_features())?;
        if self.features & feature::PROTOCOL_FEATURES == 0 {
            return Ok(());
        }
        let offered = self.request(FrontendReq::GET_PROTOCOL_FEATURES, |t| t.frontend.get_protocol_features())?;
        let protocol = offered & PROTOCOL_FEATURES;
        self.request(FrontendReq::SET_PROTOCOL_FEATURES, |t| t.frontend.set_protocol_features(protocol))?;
        self.protocol = protocol;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
            self.extra.reply_ack = true;
        }
        Ok(())
    }

    /// Without `MQ` there is one queue pair (vhost-user, "Multiple queue support").
    fn check_queue_pairs(&mut self, asked: u16, wanted: u64) -> Result<(), UserError> {
        if self.protocol.contains(VhostUserProtocolFeatures::MQ) {
            let pairs = self.request(FrontendReq::GET_QUEUE_NUM, |t| Ok(t.extra.queue_num()?))?;
            self.queue_pairs_max =
                u16::try_from(pairs).unwrap_or(u16::MAX).min(queue_pairs_max(self.features & wanted));
        }
        if asked > self.queue_pairs_max {
            return Err(UserError::QueuePairs { path: self.path.clone(), asked, limit: self.queue_pairs_max });
        }
        Ok(())
    }

    /// Virtio 1.3, 3.1.1, steps 1 to 6. The features were read already, for it takes them to know about `SET_STATUS`.
    fn negotiate(&mut self, wanted: u64) -> Result<(), UserError> {
        if self.features & feature::VERSION_1 == 0 {
            let offered = self.features & !feature::PROTOCOL_FEATURES;
            return Err(UserError::NoCommonFeature { path: self.path.clone(), offered });
        }
        self.reset()?; // Step 1.
        self.add_status(status::ACKNOWLEDGE)?; // Step 2.
        self.add_status(status::DRIVER)?; // Step 3.
        // DPDK's backend allocates a queue upon its first message, and counts those it has when it looks at the features.
        for index in 0..self.queues.len() {
            self.send_call(index)?;
        }
        self.features &= (wanted & !UNSUPPORTED) | feature::PROTOCOL_FEATURES;
        self.request(FrontendReq::SET_FEATURES, |t| t.frontend.set_features(t.features))?; // Step 4.
        self.add_status(status::FEATURES_OK)?; // Step 5.
        match self.status()? {
            Some(status) if status & status::FEATURES_OK == 0 => {
                self.add_status(status::FAILED)?;
                Err(UserError::FeaturesNotOk { path: self.path.clone(), features: self.features() })
            }
            _ => Ok(()), // Step 6.
        }
    }

    /// The virtio features agreed on.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features & !feature::PROTOCOL_FEATURES
    }

    /// The most queue pairs that the backend has, up to [`QUEUE_PAIRS_MAX`]; one less with a control queue.
    #[must_use]
    pub fn queue_pairs_max(&self) -> u16 {
        self.queue_pairs_max
    }

    /// Shares `arenas`, and nothing else, with the backend, under their IOVAs (vhost-user, `SET_MEM_TABLE`).
    ///
    /// Our own virtual addresses never leave the process: what the protocol calls a user address is the IOVA, too.
    ///
    /// # Errors
    /// [`UserError::Regions`] unless there are 1 to [`REGIONS_MAX`]; else as every request.
    pub fn share(&mut self, arenas: &[Arc<Arena>]) -> Result<(), UserError> {
        if arenas.is_empty() || arenas.len() > REGIONS_MAX {
            return Err(UserError::Regions { path: self.path.clone(), asked: arenas.len() });
        }
        let region = |arena: &Arc<Arena>| VhostUserMemoryRegionInfo {
            guest_phys_addr: arena.iova(),
            memory_size: arena.size() as u64,
            userspace_addr: arena.iova(),
            mmap_offset: 0,
            mmap_handle: arena.fd().as_raw_fd(),
        };
        let regions: Vec<_> = arenas.iter().map(region).collect();
        self.request(FrontendReq::SET_MEM_TABLE, |t| t.frontend.set_mem_table(&regions).map(drop))
    }

    /// Hands queue `index` to the backend, which may use it once it is enabled (virtio 1.3, 3.1.1 step 7).
    ///
    /// # Errors
    /// [`UserError::NoSuchQueue`]; else as every request.
    pub fn queue_setup(&mut self, index: u16, ring: &RingAddresses) -> Result<(), UserError> {
        let at = self.queue_at(index)?;
        let config = VringConfigData {
            queue_max_size: ring.size,
            queue_size: ring.size,
            flags: 0,
            desc_table_addr: ring.desc,
            used_ring_addr: ring.used,
            avail_ring_addr: ring.avail,
            log_addr: None,
        };
        if !self.queues[at].call_sent {
            self.send_call(at)?;
        }
        self.request(FrontendReq::SET_VRING_NUM, |t| t.frontend.set_vring_num(at, ring.size))?;
        self.request(FrontendReq::SET_VRING_BASE, |t| Ok(t.extra.set_vring_base(index, ring.base)?))?;
        self.request(FrontendReq::SET_VRING_ADDR, |t| t.frontend.set_vring_addr(at, &config))?;
        // The kick descriptor starts the ring (vhost-user, "Ring states"), so it goes last.
        self.request(FrontendReq::SET_VRING_KICK, |t| t.frontend.set_vring_kick(at, &t.queues[at].kick))
    }

    /// Lets the backend use queue `index`, or not (vhost-user, "Ring states").
    ///
    /// A backend without protocol features has no such switch: its rings are enabled from set-up to stop.
    ///
    /// # Errors
    /// [`UserError::NoSuchQueue`]; else as every request.
    pub fn queue_enable(&mut self, index: u16, enable: bool) -> Result<(), UserError> {
        let at = self.queue_at(index)?;
        if self.features & feature::PROTOCOL_FEATURES == 0 {
            return Ok(());
        }
        self.request(FrontendReq::SET_VRING_ENABLE, |t| t.frontend.set_vring_enable(at, enable))
    }

    /// Takes queue `index` back, and returns where the backend left off (as [`RingAddresses::base`]). When it returns, the
    /// backend no longer touches the ring or its buffers.
    ///
    /// # Errors
    /// [`UserError::NoSuchQueue`]; else as every request.
    pub fn queue_stop(&mut self, index: u16) -> Result<u32, UserError> {
        let at = self.queue_at(index)?;
        self.queues[at].call_sent = false;
        self.request(FrontendReq::GET_VRING_BASE, |t| t.frontend.get_vring_base(at))
    }

    /// What tells the backend about new buffers in queue `index`: 8 bytes to write, never blocking.
    ///
    /// # Errors
    /// [`UserError::NoSuchQueue`].
    pub fn kick_fd(&self, index: u16) -> Result<Arc<EventFd>, UserError> {
        self.queue_at(index).map(|at| Arc::clone(&self.queues[at].kick))
    }

    /// What the backend tells about used buffers of queue `index` with: 8 bytes to read, never blocking.
    ///
    /// # Errors
    /// [`UserError::NoSuchQueue`].
    pub fn call_fd(&self, index: u16) -> Result<Arc<EventFd>, UserError> {
        self.queue_at(index).map(|at| Arc::clone(&self.queues[at].call))
    }

    /// Declares the driver ready (virtio 1.3, 3.1.1 step 8), if the backend wants to know.
    ///
    /// # Errors
    /// As every request.
    pub fn driver_ok(&mut self) -> Result<(), UserError> {
        self.add_status(status::DRIVER_OK)
    }

    /// Resets the device (virtio 1.3, 2.4), if the backend has a status; what is left is to drop the transport.
    ///
    /// # Errors
    /// As every request.
    pub fn reset(&mut self) -> Result<(), UserError> {
        self.status = 0;
        self.add_status(0)
    }

    /// The device's status (virtio 1.3, 2.1), if the backend has one.
    ///
    /// # Errors
    /// As every request.
    pub fn status(&mut self) -> Result<Option<u8>, UserError> {
        if !self.protocol.contains(VhostUserProtocolFeatures::STATUS) {
            return Ok(None);
        }
        self.request(FrontendReq::GET_STATUS, |t| Ok(t.extra.status()?)).map(Some)
    }

    /// Whether the backend still holds its end of the connection. Never waits.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        socket::is_connected(&self.extra.socket)
    }

    fn add_status(&mut self, bits: u8) -> Result<(), UserError> {
        self.status |= bits;
        if !self.protocol.contains(VhostUserProtocolFeatures::STATUS) {
            return Ok(());
        }
        self.request(FrontendReq::SET_STATUS, |t| Ok(t.extra.set_status(t.status)?))
    }

    fn send_call(&mut self, at: usize) -> Result<(), UserError> {
        self.request(FrontendReq::SET_VRING_CALL, |t| t.frontend.set_vring_call(at, &t.queues[at].call))?;
        self.queues[at].call_sent = true;
        Ok(())
    }

    fn queue_at(&self, index: u16) -> Result<usize, UserError> {
        let (at, queues) = (usize::from(index), self.queues.len());
        if at < queues { Ok(at) } else { Err(UserError::NoSuchQueue { path: self.path.clone(), index, queues }) }
    }

    /// Runs `call`, which makes `request`, within the time limit.
    fn request<T>(
        &mut self,
        request: FrontendReq,
        call: impl FnOnce(&mut Self) -> Result<T, vhost::Error>,
    ) -> Result<T, UserError> {
        self.watchdog.start(self.timeout);
        let result = call(self);
        let expired = self.watchdog.stop();
        result.map_err(|error| {
            let request = format!("{request:?}");
            let error = if expired {
                UserError::TimedOut { path: self.path.clone(), request, timeout: self.timeout }
            } else {
                UserError::wire(&self.path, request, error)
            };
            if !matches!(error, UserError::Rejected { .. }) {
                // Nobody knows where in the stream the next answer would begin. Fails only if closed already.
                let _ = self.extra.socket.shutdown(Shutdown::Both);
            }
            error
        })
    }
}

/// What requests go through, on a fresh connection.
fn wires(stream: UnixStream, queue_pairs: u16) -> io::Result<(Frontend, Extra, Watchdog)> {
    let extra = Extra { socket: stream.try_clone()?, reply_ack: false };
    let watchdog = Watchdog::new(stream.try_clone()?)?;
    Ok((Frontend::from_stream(stream, 2 * u64::from(queue_pairs)), extra, watchdog))
}

impl std::fmt::Debug for UserTransport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UserTransport")
            .field("path", &self.path)
            .field("features", &format_args!("{:#x}", self.features))
            .field("queues", &self.queues.len())
            .finish_non_exhaustive()
    }
}

impl Queue {
    fn new() -> io::Result<Self> {
        let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map(Arc::new);
        Ok(Self { kick: event()?, call: event()?, call_sent: false })
    }
}
