//! A device that only keeps a diary, and a vhost-user client written by hand.
#![allow(dead_code, reason = "every test binary uses another part")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use backend::control::{Control, Mode};
use backend::error::Error;
use backend::queue::config::QueueConfig;
use backend::session::{Device, NET_CONFIG_LEN};
use pmd::virtio::spec::feature;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vmm_sys_util::tempdir::TempDir;

pub const OFFERED: u64 = feature::VERSION_1
    | feature::MRG_RXBUF
    | feature::IN_ORDER
    | feature::INDIRECT_DESC
    | feature::MQ
    | feature::RING_PACKED;
pub const PAIRS: u16 = 2;
/// How far a mock queue has come when it is stopped.
pub const PROGRESS: u32 = 7;

/// What happened to the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A ring was started: index, size, position.
    Start(u16, u16, u32),
    /// A ring was stopped.
    Stop(u16),
    /// The link went up or down.
    Link(bool),
}

#[derive(Debug, Default)]
pub struct Diary {
    pub entries: Vec<Entry>,
    pub running: BTreeMap<u16, QueueConfig>,
}

/// A device without a packet path.
#[derive(Clone, Debug, Default)]
pub struct Mock(Arc<Mutex<Diary>>);

impl Mock {
    pub fn diary(&self) -> MutexGuard<'_, Diary> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has happened since the last call.
    pub fn news(&self) -> Vec<Entry> {
        std::mem::take(&mut self.diary().entries)
    }
}

impl Device for Mock {
    fn features(&self) -> u64 {
        OFFERED
    }

    fn queue_pairs_max(&self) -> u16 {
        PAIRS
    }

    fn config(&self) -> [u8; NET_CONFIG_LEN] {
        std::array::from_fn(|i| u8::try_from(i).unwrap() + 1)
    }

    fn queue_start(&mut self, config: QueueConfig) -> Result<(), Error> {
        let mut diary = self.diary();
        diary.entries.push(Entry::Start(config.index, config.size, config.position));
        assert!(diary.running.insert(config.index, config).is_none(), "started twice");
        Ok(())
    }

    fn queue_stop(&mut self, index: u16) -> Option<u32> {
        let mut diary = self.diary();
        diary.entries.push(Entry::Stop(index));
        diary.running.remove(&index).map(|config| config.position.wrapping_add(PROGRESS))
    }

    fn link(&mut self, up: bool) {
        self.diary().entries.push(Entry::Link(up));
    }
}

/// A control thread with one mock device behind one server socket.
pub struct Server {
    pub control: Control,
    pub device: Mock,
    pub path: PathBuf,
    _dir: TempDir,
}

impl Server {
    pub fn new() -> Self {
        Self::with_timeout(Duration::from_secs(60))
    }

    pub fn with_timeout(message_timeout: Duration) -> Self {
        let dir = TempDir::new().unwrap();
        let path = dir.as_path().join("vhost.sock");
        let control = Control::with_message_timeout(message_timeout).unwrap();
        let device = Mock::default();
        control.add(&path, Mode::Server, Box::new(device.clone())).unwrap();
        Self { control, device, path, _dir: dir }
    }
}

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const RESET_OWNER: u32 = 4;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const GET_QUEUE_NUM: u32 = 17;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_CONFIG: u32 = 24;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const RESET_DEVICE: u32 = 34;
pub const GET_MAX_MEM_SLOTS: u32 = 36;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;
pub const SET_STATUS: u32 = 39;
pub const GET_STATUS: u32 = 40;

/// Protocol features, as bits.
pub const P_MQ: u64 = 1;
pub const P_REPLY_ACK: u64 = 1 << 3;
pub const P_CONFIG: u64 = 1 << 9;
pub const P_INFLIGHT: u64 = 1 << 12;
pub const P_RESET_DEVICE: u64 = 1 << 13;
pub const P_MEM_SLOTS: u64 = 1 << 15;
pub const P_STATUS: u64 = 1 << 16;
pub const P_ALL: u64 = P_MQ | P_REPLY_ACK | P_CONFIG | P_INFLIGHT | P_RESET_DEVICE | P_MEM_SLOTS | P_STATUS;

pub const PLAIN: u32 = 1;
pub const NEED_REPLY: u32 = 1 | 8;
/// The client's address of guest address 0.
pub const USER: u64 = 0x5500_0000_0000;
pub const PAGE: u64 = 4096;

/// A reply: request id and body.
pub type Reply = (u32, Vec<u8>);

pub struct Client {
    pub socket: UnixStream,
}

impl Client {
    pub fn connect(path: &Path) -> Self {
        Self::over(UnixStream::connect(path).unwrap())
    }

    pub fn over(socket: UnixStream) -> Self {
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { socket }
    }

    /// Connects until it is served: the last connection may not be cleared away yet.
    pub fn connect_and_get_features(path: &Path) -> Self {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let client = Self::connect(path);
            if client.send(GET_FEATURES, PLAIN, &[], &[]).is_ok() && client.receive().is_some() {
                return client;
            }
            assert!(Instant::now() < deadline, "nobody serves {}", path.display());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn send_raw(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    }

    pub fn send(
        &self,
        request: u32,
        flags: u32,
        body: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<usize> {
        self.send_raw(&message(request, flags, body), descriptors)
    }

    /// The next reply; `None` once the connection has ended.
    pub fn receive(&self) -> Option<Reply> {
        let mut header = [0; 12];
        match (&self.socket).read_exact(&mut header) {
            Ok(()) => {}
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => panic!("no answer within 20 s"),
            Err(_) => return None,
        }
        let word = |i: usize| u32::from_ne_bytes(header[i..i + 4].try_into().unwrap());
        assert_eq!(word(4), 1 | 4, "version 1, and a reply");
        let mut body = vec![0; word(8) as usize];
        (&self.socket).read_exact(&mut body).unwrap();
        Some((word(0), body))
    }

    /// A request with a reply of its own.
    pub fn ask(&self, request: u32, body: &[u8]) -> Vec<u8> {
        self.send(request, PLAIN, body, &[]).unwrap();
        let (answered, body) = self.receive().expect("connection ended");
        assert_eq!(answered, request);
        body
    }

    pub fn ask_u64(&self, request: u32) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).try_into().unwrap())
    }

    /// Whether a request without a reply of its own is acknowledged as carried out.
    pub fn tell(&self, request: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        self.send(request, NEED_REPLY, body, descriptors).unwrap();
        let (answered, body) = self.receive().expect("connection ended");
        assert_eq!((answered, body.len()), (request, 8));
        u64::from_ne_bytes(body.try_into().unwrap()) == 0
    }

    pub fn tell_u64(&self, request: u32, value: u64) -> bool {
        self.tell(request, &value.to_ne_bytes(), &[])
    }

    pub fn tell_ring(&self, request: u32, index: u32, value: u32) -> bool {
        self.tell(request, &words(&[index, value]), &[])
    }

    pub fn base(&self, index: u32) -> u32 {
        let body = self.ask(GET_VRING_BASE, &words(&[index, 0]));
        assert_eq!(body[..4], index.to_ne_bytes());
        u32::from_ne_bytes(body[4..].try_into().unwrap())
    }

    pub fn negotiate(&self, features: u64, protocol_features: u64) {
        assert_eq!(self.ask_u64(GET_FEATURES), OFFERED | feature::PROTOCOL_FEATURES);
        assert_eq!(self.ask_u64(GET_PROTOCOL_FEATURES), P_ALL);
        assert!(self.tell_u64(SET_PROTOCOL_FEATURES, protocol_features));
        assert!(self.tell_u64(SET_FEATURES, features));
    }

    /// `SET_MEM_TABLE` with one region of `file`, from guest address `guest_phys_addr`.
    pub fn share(&self, file: &File, guest_phys_addr: u64, size: u64) -> bool {
        let mut body = words(&[1, 0]);
        body.extend(longs(&[guest_phys_addr, size, USER + guest_phys_addr, 0]));
        self.tell(SET_MEM_TABLE, &body, &[file.as_fd()])
    }

    /// A split ring of `size` in the first pages after `USER + offset`: descriptors, then avail, then used.
    pub fn place_ring(&self, index: u32, size: u32, offset: u64) -> bool {
        self.tell_ring(SET_VRING_NUM, index, size) && self.tell(SET_VRING_ADDR, &addresses(index, offset), &[])
    }

    /// `SET_VRING_KICK` or `SET_VRING_CALL` without a descriptor.
    pub fn no_descriptor(&self, request: u32, index: u32) -> bool {
        self.tell_u64(request, u64::from(index) | 0x100)
    }
}

pub fn addresses(index: u32, offset: u64) -> Vec<u8> {
    let mut body = words(&[index, 0]);
    body.extend(longs(&[USER + offset, USER + offset + 2 * PAGE, USER + offset + PAGE, 0]));
    body
}

pub fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = words(&[request, flags, u32::try_from(body.len()).unwrap()]);
    bytes.extend(body);
    bytes
}

pub fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

pub fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

pub fn memfd(size: u64) -> File {
    let file = File::from(memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    file
}

/// Waits until `condition` holds.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
