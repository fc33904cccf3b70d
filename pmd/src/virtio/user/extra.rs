//! The vhost-user requests that `vhost::vhost_user::Frontend` has not, or not wide enough, made by hand on the same socket.
//!
//! All of them carry one 64-bit word or nothing, and all are answered by one 64-bit word. Nothing here reads ancillary data,
//! so the kernel closes any descriptor that a reply brings along.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use vhost::vhost_user::Error;
use vhost::vhost_user::message::FrontendReq;

/// Header flags (vhost-user specification, "Header"): protocol version, "this is a reply", "send one".
const VERSION: u32 = 1;
const REPLY: u32 = 4;
const NEED_REPLY: u32 = 8;
/// Bytes of the one kind of payload.
const WORD_LEN: u32 = 8;

/// The hand-made requests on `socket`, on which no other request may be under way.
pub(super) struct Extra {
    /// A clone of the socket that `Frontend` uses.
    pub(super) socket: UnixStream,
    /// Whether `REPLY_ACK` was negotiated, so that a request without a reply of its own is acknowledged.
    pub(super) reply_ack: bool,
}

impl Extra {
    /// `GET_QUEUE_NUM`: how many queue pairs there are (protocol feature `MQ`).
    ///
    /// `Frontend`'s own version takes the answer for a number of rings, and from then on refuses every index above it.
    pub(super) fn queue_num(&self) -> Result<u64, Error> {
        self.send(FrontendReq::GET_QUEUE_NUM, 0, None)?;
        self.reply(FrontendReq::GET_QUEUE_NUM)
    }

    /// `SET_VRING_BASE` with all 32 bits: a packed ring needs those above the 16 that `Frontend` sends.
    pub(super) fn set_vring_base(&self, index: u16, base: u32) -> Result<(), Error> {
        self.set(FrontendReq::SET_VRING_BASE, u64::from(index) | u64::from(base) << 32)
    }

    /// `SET_STATUS` (protocol feature `STATUS`).
    pub(super) fn set_status(&self, status: u8) -> Result<(), Error> {
        self.set(FrontendReq::SET_STATUS, u64::from(status))
    }

    /// `GET_STATUS` (protocol feature `STATUS`).
    pub(super) fn status(&self) -> Result<u8, Error> {
        self.send(FrontendReq::GET_STATUS, 0, None)?;
        u8::try_from(self.reply(FrontendReq::GET_STATUS)?).map_err(|_| Error::InvalidMessage)
    }

    fn set(&self, request: FrontendReq, value: u64) -> Result<(), Error> {
        let need_reply = if self.reply_ack { NEED_REPLY } else { 0 };
        self.send(request, need_reply, Some(value))?;
        if self.reply_ack && self.reply(request)? != 0 {
            return Err(Error::BackendInternalError);
        }
        Ok(())
    }

    fn send(&self, request: FrontendReq, flags: u32, value: Option<u64>) -> Result<(), Error> {
        let size = value.map_or(0, |_| WORD_LEN);
        let header = [request.into(), VERSION | flags, size].map(u32::to_ne_bytes);
        // In one piece: many a backend reads a body by one call.
        let mut message = header.as_flattened().to_vec();
        message.extend(value.map(u64::to_ne_bytes).into_iter().flatten());
        (&self.socket).write_all(&message).map_err(broken)
    }

    fn reply(&self, request: FrontendReq) -> Result<u64, Error> {
        let mut header = [[0; 4]; 3];
        (&self.socket).read_exact(header.as_flattened_mut()).map_err(broken)?;
        let [id, flags, size] = header.map(u32::from_ne_bytes);
        // Some backends answer with the request's own flags: NEED_REPLY does not matter here.
        if id != u32::from(request) || flags & !NEED_REPLY != VERSION | REPLY || size != WORD_LEN {
            return Err(Error::InvalidMessage);
        }
        let mut value = [0; size_of::<u64>()];
        (&self.socket).read_exact(&mut value).map_err(broken)?;
        Ok(u64::from_ne_bytes(value))
    }
}

fn broken(error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::UnexpectedEof | ErrorKind::WriteZero => Error::Disconnected,
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => Error::SocketBroken(error),
        _ => Error::SocketError(error),
    }
}
