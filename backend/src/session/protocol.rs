//! From a whole message to its answer.
//!
//! The `vhost` crate parses requests and builds replies. It reads them from a socket of its own, at the other end of
//! which we sit, in the same thread: it never waits, for a message is all there before it is called. Acknowledgements
//! are ours, so that there is one rule for all requests, known and unknown (as in DPDK's vhost): `NEED_REPLY` is
//! always answered, with 0 or 1 if the request has no reply of its own; a request that fails without it ends the
//! connection.
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use tracing::warn;
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::message::FrontendReq;

use super::Session;
use crate::error::Error;
use crate::wire::{DESCRIPTORS_MAX, Header, Message, Reply};

/// How many descriptors a request may come with; `None` for a request that is not supported.
fn descriptors_max(request: FrontendReq) -> Option<usize> {
    use FrontendReq as Req;
    match request {
        Req::GET_FEATURES
        | Req::SET_FEATURES
        | Req::SET_OWNER
        | Req::RESET_OWNER
        | Req::SET_VRING_NUM
        | Req::SET_VRING_ADDR
        | Req::SET_VRING_BASE
        | Req::GET_VRING_BASE
        | Req::GET_PROTOCOL_FEATURES
        | Req::SET_PROTOCOL_FEATURES
        | Req::GET_QUEUE_NUM
        | Req::SET_VRING_ENABLE
        | Req::GET_CONFIG
        | Req::RESET_DEVICE
        | Req::GET_INFLIGHT_FD
        | Req::GET_MAX_MEM_SLOTS
        | Req::SET_STATUS
        | Req::GET_STATUS => Some(0),
        // REM_MEM_REG: "the back-end MAY accept messages with one file descriptor", and must close it.
        Req::SET_VRING_KICK
        | Req::SET_VRING_CALL
        | Req::SET_VRING_ERR
        | Req::SET_INFLIGHT_FD
        | Req::ADD_MEM_REG
        | Req::REM_MEM_REG => Some(1),
        Req::SET_MEM_TABLE => Some(DESCRIPTORS_MAX),
        _ => None,
    }
}

/// The crate's handler and our end of its socket, for one connection.
pub(crate) struct Protocol {
    session: Arc<Mutex<Session>>,
    handler: BackendReqHandler<Mutex<Session>>,
    ours: UnixStream,
    /// Another handle of the crate's end, to clear away what it left unread.
    theirs: UnixStream,
}

impl Protocol {
    /// A fresh connection's protocol.
    ///
    /// # Errors
    /// [`Error::System`] if there are no more descriptors.
    pub(crate) fn new(session: Arc<Mutex<Session>>) -> Result<Self, Error> {
        let failed = |source| Error::System { step: "creating a socket pair", source };
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        let handler = BackendReqHandler::from_stream(theirs.try_clone().map_err(failed)?, Arc::clone(&session));
        Ok(Self { session, handler, ours, theirs })
    }

    /// Carries out a request; returns the reply to send, if any.
    ///
    /// # Errors
    /// If the connection has to end.
    pub(crate) fn answer(&mut self, message: Message) -> Result<Option<Reply>, Error> {
        let header = message.header;
        match self.carry_out(message) {
            Ok(None) if header.needs_reply() => Ok(Some(header.reply(0))),
            Ok(reply) => Ok(reply),
            Err(error) if header.needs_reply() => {
                warn!("{error}");
                Ok(Some(header.reply(1)))
            }
            Err(error) => Err(error),
        }
    }

    fn carry_out(&mut self, message: Message) -> Result<Option<Reply>, Error> {
        let request = FrontendReq::try_from(message.header.request).ok();
        let supported = request.filter(|r| descriptors_max(*r).is_some_and(|max| message.descriptors.len() <= max));
        match supported {
            Some(request) if Session::answers(request) => {
                let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(session.answer(request, &message)?.map(|value| message.header.reply(value)))
            }
            Some(_) => self.hand_over(message),
            None => {
                let descriptors = message.descriptors.len();
                Err(Error::Unsupported { request: message.header.request, descriptors })
            }
        }
    }

    /// Lets the crate handle a message. Our own descriptors of it are closed before the crate takes them from the socket: so it
    /// has the room that they had. If there were none, it would lose the message and wait for ever for another.
    fn hand_over(&mut self, message: Message) -> Result<Option<Reply>, Error> {
        let Message { header, .. } = message;
        let forwarded = message.forward(&self.ours);
        drop(message);
        let outcome = match forwarded {
            Ok(()) => self.handler.handle_request().map_err(|error| refusal(header, error)),
            Err(e) => Err(Error::System { step: "handing a message over", source: e.into() }),
        };
        let reply = pending(&self.ours)?;
        if outcome.is_err() {
            // The crate may have given up between header and body; the next message must not be read as this one's
            // rest.
            while pending(&self.theirs)?.is_some() {}
        }
        outcome.map(|()| reply)
    }
}

/// What `socket` holds now.
fn pending(socket: &UnixStream) -> Result<Option<Reply>, Error> {
    Reply::take(socket).map_err(|e| Error::System { step: "taking a reply over", source: e.into() })
}

/// Our own error, if the crate passes one through; else what the crate has to say.
fn refusal(header: Header, error: vhost::vhost_user::Error) -> Error {
    let refused = |source| Error::Refused { request: header.request, source };
    match error {
        vhost::vhost_user::Error::ReqHandlerError(inner) => match inner.downcast::<Error>() {
            Ok(ours) => refused(ours.into()),
            Err(other) => refused(other.into()),
        },
        other => refused(other.into()),
    }
}
