//! A front-end by hand: every vhost-user request, in any order, for tests of what our own front-end never does.
//!
//! A [`Frontend`] talks, a [`Driver`] has the rings and sends numbered frames through them.

mod driver;

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use pmd::mem::Arena;
use pmd::virtio::ring::Layout;
use pmd::virtio::spec::{feature, status};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use vhost::vhost_user::message::FrontendReq;

use crate::ports::{SOON, wait_until};

pub use driver::Driver;

/// Header flags (vhost-user, "Header"): version 1, a reply, one is wanted.
const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// `REPLY_ACK`, `INFLIGHT_SHMFD`, `RESET_DEVICE`, `CONFIGURE_MEM_SLOTS` and `STATUS`.
const PROTOCOL: u64 = 1 << 3 | 1 << 12 | 1 << 13 | 1 << 15 | 1 << 16;
/// The status of a driver that is ready (virtio 1.3, 3.1.1).
const READY: u8 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
/// Bytes of a header.
const HEADER_LEN: usize = 12;
/// "There is no descriptor" in `SET_VRING_KICK` and `SET_VRING_CALL`.
const NO_DESCRIPTOR: u64 = 0x100;
/// From a guest address to the front-end's own of the same byte.
const USER: u64 = 1 << 45;
/// Most descriptors of a message.
const DESCRIPTORS_MAX: usize = 32;

/// A part of an arena, under its IOVA as guest address.
#[derive(Clone, Debug)]
pub struct Region {
    /// The arena.
    pub arena: Arc<Arena>,
    /// Where it begins there, in bytes, a multiple of 4096.
    pub offset: u64,
    /// Its length in bytes, likewise.
    pub size: u64,
}

impl Region {
    /// All of `arena`.
    #[must_use]
    pub fn whole(arena: &Arc<Arena>) -> Self {
        Self { arena: Arc::clone(arena), offset: 0, size: arena.size() as u64 }
    }

    /// Its two parts, the second of which begins at `at`.
    #[must_use]
    pub fn split(self, at: u64) -> [Self; 2] {
        let second = Self { arena: Arc::clone(&self.arena), offset: self.offset + at, size: self.size - at };
        [Self { size: at, ..self }, second]
    }

    /// Guest address, size, front-end address, offset in the file (vhost-user, "Memory region description").
    fn words(&self) -> [u64; 4] {
        let guest = self.arena.iova() + self.offset;
        [guest, self.size, guest + USER, self.offset]
    }
}

/// A connection to a backend. Every request without a reply of its own asks for an acknowledgement.
#[derive(Debug)]
pub struct Frontend {
    socket: UnixStream,
}

impl Frontend {
    /// Connects to the backend that listens at `path`, once it serves us.
    ///
    /// # Panics
    /// If it does not in time.
    #[must_use]
    pub fn connect(path: &Path) -> Self {
        let mut served = None;
        let came = wait_until(|| {
            // One whose last front-end is not cleared away yet hangs up.
            served = UnixStream::connect(path).ok().map(|socket| Self { socket });
            served.as_ref().is_some_and(|frontend| frontend.try_ask(FrontendReq::GET_FEATURES, &[]).is_some())
        });
        served.filter(|_| came).expect("a backend that serves us")
    }

    /// As [`connect`](Self::connect); then agrees on all of the protocol that this module speaks.
    ///
    /// # Panics
    /// If the backend does not.
    #[must_use]
    pub fn agree(path: &Path) -> Self {
        let frontend = Self::connect(path);
        let _ = frontend.ask_u64(FrontendReq::GET_PROTOCOL_FEATURES);
        assert!(frontend.tell_u64(FrontendReq::SET_PROTOCOL_FEATURES, PROTOCOL));
        frontend
    }

    /// Sets the rings of `driver` up, from zero, and says that it is ready.
    ///
    /// # Panics
    /// If a request is refused.
    pub fn begin(&self, driver: &Driver) {
        assert!(self.tell_u64(FrontendReq::SET_FEATURES, driver.features | feature::PROTOCOL_FEATURES));
        for (vring, layout) in (0..).zip(&driver.layouts) {
            assert!(self.tell_ring(FrontendReq::SET_VRING_NUM, vring, driver.size.into()));
            assert!(self.tell_ring(FrontendReq::SET_VRING_BASE, vring, driver.fresh_base()));
            assert!(self.place(vring, layout));
            assert!(self.notify_by(FrontendReq::SET_VRING_KICK, vring, None));
            assert!(self.tell_ring(FrontendReq::SET_VRING_ENABLE, vring, 1));
        }
        assert!(self.tell_u64(FrontendReq::SET_STATUS, READY.into()));
    }

    fn send(&self, request: FrontendReq, flags: u32, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> Option<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return None;
        }
        let message = [&words(&[request.into(), VERSION | flags, body.len() as u32])[..], body].concat();
        let sent = sendmsg(&self.socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).ok()?;
        (sent == message.len()).then_some(())
    }

    fn receive(&self, request: FrontendReq) -> Option<Vec<u8>> {
        let mut socket = &self.socket;
        socket.set_read_timeout(Some(SOON)).ok()?;
        let mut header = [[0; 4]; 3];
        socket.read_exact(header.as_flattened_mut()).ok()?;
        let [id, flags, size] = header.map(u32::from_ne_bytes);
        if id != u32::from(request) || flags != VERSION | REPLY {
            return None;
        }
        let mut body = vec![0; size as usize];
        socket.read_exact(&mut body).ok()?;
        Some(body)
    }

    /// `GET_INFLIGHT_FD` for so many rings of `size`: the body that `SET_INFLIGHT_FD` takes, and the region's file.
    ///
    /// # Panics
    /// If it is not answered.
    #[must_use]
    pub fn inflight(&self, queues: u16, size: u16) -> (Vec<u8>, OwnedFd) {
        let mut body = longs(&[0, 0]);
        body.extend([queues, size, 0, 0].iter().flat_map(|value| value.to_ne_bytes()));
        self.send(FrontendReq::GET_INFLIGHT_FD, 0, &body, &[]).expect("a connection");
        let mut answer = vec![0; HEADER_LEN + body.len()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(&self.socket, &mut [IoSliceMut::new(&mut answer)], &mut control, RecvFlags::CMSG_CLOEXEC);
        assert_eq!(received.expect("an answer").bytes, answer.len());
        let region = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        (answer.split_off(HEADER_LEN), region.expect("a descriptor"))
    }

    fn try_ask(&self, request: FrontendReq, body: &[u8]) -> Option<Vec<u8>> {
        self.send(request, 0, body, &[])?;
        self.receive(request)
    }

    /// A request with a reply of its own.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn ask(&self, request: FrontendReq, body: &[u8]) -> Vec<u8> {
        self.try_ask(request, body).unwrap_or_else(|| panic!("{request:?} is not answered"))
    }

    /// A request that is answered by a number.
    ///
    /// # Panics
    /// If it is not.
    #[must_use]
    pub fn ask_u64(&self, request: FrontendReq) -> u64 {
        u64::from_ne_bytes(self.ask(request, &[]).try_into().expect("64 bits"))
    }

    /// A request without a reply of its own; whether it was carried out.
    ///
    /// # Panics
    /// If it is not acknowledged.
    pub fn tell(&self, request: FrontendReq, body: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        let answer = self.send(request, NEED_REPLY, body, descriptors).and_then(|()| self.receive(request));
        let answer = answer.unwrap_or_else(|| panic!("{request:?} is not acknowledged"));
        u64::from_ne_bytes(answer.try_into().expect("64 bits")) == 0
    }

    /// As [`tell`](Self::tell), with one number.
    pub fn tell_u64(&self, request: FrontendReq, value: u64) -> bool {
        self.tell(request, &value.to_ne_bytes(), &[])
    }

    /// As [`tell`](Self::tell), about ring `index`.
    pub fn tell_ring(&self, request: FrontendReq, index: u32, value: u32) -> bool {
        self.tell(request, &words(&[index, value]), &[])
    }

    /// `SET_VRING_KICK` or `SET_VRING_CALL`, with a descriptor or without one.
    pub fn notify_by(&self, request: FrontendReq, index: u32, eventfd: Option<BorrowedFd<'_>>) -> bool {
        let value = u64::from(index) | if eventfd.is_none() { NO_DESCRIPTOR } else { 0 };
        self.tell(request, &value.to_ne_bytes(), eventfd.as_slice())
    }

    /// `GET_VRING_BASE`.
    ///
    /// # Panics
    /// If it is not answered.
    #[must_use]
    pub fn base(&self, index: u32) -> u32 {
        let answer = self.ask(FrontendReq::GET_VRING_BASE, &words(&[index, 0]));
        u32::from_ne_bytes(answer[4..].try_into().expect("32 bits"))
    }

    /// `SET_VRING_ADDR`.
    pub fn place(&self, index: u32, layout: &Layout) -> bool {
        let mut body = words(&[index, 0]);
        body.extend(longs(&[layout.desc + USER, layout.used + USER, layout.avail + USER, 0]));
        self.tell(FrontendReq::SET_VRING_ADDR, &body, &[])
    }

    /// `SET_MEM_TABLE`.
    pub fn share(&self, regions: &[Region]) -> bool {
        let mut body = words(&[regions.len() as u32, 0]);
        body.extend(regions.iter().flat_map(|region| longs(&region.words())));
        let files: Vec<_> = regions.iter().map(|region| region.arena.fd()).collect();
        self.tell(FrontendReq::SET_MEM_TABLE, &body, &files)
    }

    /// `ADD_MEM_REG`.
    pub fn add(&self, region: &Region) -> bool {
        let body = [longs(&[0]), longs(&region.words())].concat();
        self.tell(FrontendReq::ADD_MEM_REG, &body, &[region.arena.fd()])
    }

    /// `REM_MEM_REG`.
    pub fn remove(&self, region: &Region) -> bool {
        self.tell(FrontendReq::REM_MEM_REG, &[longs(&[0]), longs(&region.words())].concat(), &[])
    }
}

impl AsFd for Frontend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
