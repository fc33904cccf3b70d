//! The real socket: whole messages in, replies out, never waiting, and nothing taken beyond a message's own bytes, so
//! that descriptors stay with the message they came with.
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use pmd::sys::descriptors_max;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use crate::error::Error;

/// Bytes of a header: request, flags, size, 32 bits each in native order (vhost-user, "Header").
pub(crate) const HEADER_LEN: usize = 12;
/// Longest body in bytes; the longest legal one, a memory table of 32 regions, takes 1,032.
pub(crate) const BODY_LEN_MAX: usize = 4096;
/// Most descriptors that may come with a message: one per memory region.
pub(crate) const DESCRIPTORS_MAX: usize = 32;

const VERSION: u32 = 1;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// The beginning of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Header {
    pub(crate) request: u32,
    flags: u32,
    size: u32,
}

impl Header {
    /// Parses and checks a request's header.
    fn parse(bytes: [u8; HEADER_LEN]) -> Result<Self, Error> {
        let word = |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let header = Self { request: word(0), flags: word(4), size: word(8) };
        // The version, and besides it nothing but NEED_REPLY: a reply, or flags of a later protocol, are no request
        // of ours.
        if header.flags & !FLAG_NEED_REPLY != VERSION || header.body_len() > BODY_LEN_MAX {
            let Self { request, flags, size } = header;
            return Err(Error::Header { request, flags, size, max: BODY_LEN_MAX });
        }
        Ok(header)
    }

    fn bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[..4].copy_from_slice(&self.request.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.size.to_ne_bytes());
        bytes
    }

    fn body_len(self) -> usize {
        self.size as usize
    }

    /// Whether the peer waits for an answer in any case.
    pub(crate) fn needs_reply(self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// A reply to this request that carries one 64-bit number.
    pub(crate) fn reply(self, value: u64) -> Reply {
        let header = Self { flags: VERSION | FLAG_REPLY, size: 8, ..self };
        Reply { bytes: [&header.bytes()[..], &value.to_ne_bytes()].concat(), descriptors: Vec::new() }
    }
}

/// A whole request.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) header: Header,
    pub(crate) body: Vec<u8>,
    pub(crate) descriptors: Vec<OwnedFd>,
}

impl Message {
    /// Sends the message on, descriptors included, without asking for an acknowledgement.
    pub(crate) fn forward(&self, socket: &UnixStream) -> Result<(), Errno> {
        let header = Header { flags: VERSION, ..self.header }.bytes();
        let sent = send(socket, &[IoSlice::new(&header), IoSlice::new(&self.body)], &self.descriptors)?;
        if sent == HEADER_LEN + self.body.len() { Ok(()) } else { Err(Errno::NOBUFS) }
    }
}

/// What goes back for a request.
#[derive(Debug, Default)]
pub(crate) struct Reply {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Reply {
    /// Takes what `socket` holds now, if anything.
    pub(crate) fn take(socket: &UnixStream) -> Result<Option<Self>, Errno> {
        let mut bytes = [0; HEADER_LEN + BODY_LEN_MAX];
        match receive(socket, &mut bytes) {
            Ok((0, _, _)) | Err(Errno::AGAIN) => Ok(None),
            // A descriptor more than this process may have.
            Ok((_, _, true)) => Err(Errno::MFILE),
            Ok((len, descriptors, false)) => Ok(Some(Self { bytes: bytes[..len].to_vec(), descriptors })),
            Err(e) => Err(e),
        }
    }
}

/// Receives what there is now: how many bytes, the descriptors that came with them, and whether there were more of those.
fn receive(socket: &UnixStream, bytes: &mut [u8]) -> Result<(usize, Vec<OwnedFd>, bool), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    Ok((received.bytes, descriptors, received.flags.contains(ReturnFlags::CTRUNC)))
}

/// Sends `parts` and `descriptors`, or as many bytes as there is room for; returns how many.
fn send(socket: &UnixStream, parts: &[IoSlice<'_>], descriptors: &[OwnedFd]) -> Result<usize, Errno> {
    let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(Errno::NOBUFS);
    }
    sendmsg(socket, parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
}

/// A connected socket, with the message that is coming in and the reply that is going out.
#[derive(Debug)]
pub(crate) struct Wire {
    socket: UnixStream,
    incoming: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    outgoing: Reply,
    /// Since when a message is half received, or a reply half sent; never both.
    waiting_since: Option<Instant>,
}

impl Wire {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self { socket, incoming: Vec::new(), descriptors: Vec::new(), outgoing: Reply::default(), waiting_since: None }
    }

    /// The next message, if all of it is here.
    ///
    /// # Errors
    /// If the connection cannot go on; all descriptors received are closed with `self`.
    pub(crate) fn receive(&mut self) -> Result<Option<Message>, Error> {
        loop {
            let header = self.incoming.first_chunk().map(|bytes| Header::parse(*bytes)).transpose()?;
            let wanted = HEADER_LEN + header.map_or(0, Header::body_len);
            match header {
                Some(header) if self.incoming.len() == wanted => {
                    self.waiting_since = None;
                    let body = self.incoming.split_off(HEADER_LEN);
                    self.incoming.clear();
                    return Ok(Some(Message { header, body, descriptors: std::mem::take(&mut self.descriptors) }));
                }
                // Each round adds a byte at least, so that there are at most as many as a message has bytes.
                _ if self.read(wanted - self.incoming.len())? => {}
                _ => return Ok(None),
            }
        }
    }

    /// Reads up to `len` bytes and what descriptors come with them; `false` if there is nothing now.
    fn read(&mut self, len: usize) -> Result<bool, Error> {
        let mut bytes = [0; HEADER_LEN + BODY_LEN_MAX];
        let (received, descriptors, cut_off) = match receive(&self.socket, &mut bytes[..len]) {
            Ok(received) if received.0 > 0 => received,
            Ok(_) | Err(Errno::CONNRESET) => return Err(Error::Disconnected),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(e) => return Err(Error::System { step: "receiving from a vhost-user socket", source: e.into() }),
        };
        self.descriptors.extend(descriptors);
        let count = self.descriptors.len();
        if cut_off && count < DESCRIPTORS_MAX {
            // There was room for one more in the message, but not in this process.
            return Err(Error::DescriptorLimit { limit: descriptors_max().unwrap_or_default() });
        }
        if cut_off || count > DESCRIPTORS_MAX {
            return Err(Error::DescriptorCount { count, max: DESCRIPTORS_MAX });
        }
        self.incoming.extend_from_slice(&bytes[..received]);
        self.waiting_since.get_or_insert_with(Instant::now);
        Ok(true)
    }

    /// Sends a reply, or as much of it as the socket takes now; the rest goes with [`Wire::flush`]. Nothing is to be
    /// received meanwhile, so that there is never more than one reply to keep.
    ///
    /// # Errors
    /// If the connection cannot go on.
    pub(crate) fn send(&mut self, reply: Reply) -> Result<(), Error> {
        self.outgoing = reply;
        self.waiting_since = Some(Instant::now());
        self.flush()
    }

    /// Whether a part of a reply is still to be sent.
    pub(crate) fn is_sending(&self) -> bool {
        !self.outgoing.bytes.is_empty()
    }

    /// Sends more of the reply.
    ///
    /// # Errors
    /// If the connection cannot go on.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        let Reply { bytes, descriptors } = &mut self.outgoing;
        match send(&self.socket, &[IoSlice::new(bytes)], descriptors) {
            Ok(sent) => {
                bytes.drain(..sent);
                // They go with the first byte.
                descriptors.clear();
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(Error::Disconnected),
            Err(e) => return Err(Error::System { step: "sending to a vhost-user socket", source: e.into() }),
        }
        if self.outgoing.bytes.is_empty() {
            self.waiting_since = None;
        }
        Ok(())
    }

    /// Checks that the peer has not kept us waiting for longer than `limit`.
    ///
    /// # Errors
    /// [`Error::Timeout`].
    pub(crate) fn check_time(&self, limit: Duration) -> Result<(), Error> {
        let Some(waited) = self.waiting_since.map(|since| since.elapsed()).filter(|waited| *waited > limit) else {
            return Ok(());
        };
        let what = if self.is_sending() { "leaving a reply unread" } else { "sending one message" };
        Err(Error::Timeout { what, ms: waited.as_millis() })
    }
}

impl AsRawFd for Wire {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
