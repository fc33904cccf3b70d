//! One device's socket: who is connected, and when to try again.
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tracing::{debug, info, warn};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use crate::control::Mode;
use crate::error::Error;
use crate::listener::{Listener, check_path, connect};
use crate::session::{Device, Protocol, Session};
use crate::wire::Wire;

/// Pause before connecting, or accepting after a failure, again.
const RETRY: Duration = Duration::from_secs(1);
/// Messages of one connection that are answered before others get their turn.
const MESSAGES_PER_TURN: usize = 16;

/// A front-end that is connected.
struct Connection {
    wire: Wire,
    protocol: Protocol,
}

impl Connection {
    /// Answers what has arrived; keeps off further requests while a reply is unread.
    fn serve(&mut self) -> Result<(), Error> {
        if self.wire.is_sending() {
            self.wire.flush()?;
        }
        for _ in 0..MESSAGES_PER_TURN {
            if self.wire.is_sending() {
                break;
            }
            let Some(message) = self.wire.receive()? else { break };
            if let Some(reply) = self.protocol.answer(message)? {
                self.wire.send(reply)?;
            }
        }
        Ok(())
    }

    fn interest(&self) -> EventSet {
        if self.wire.is_sending() { EventSet::OUT } else { EventSet::IN }
    }
}

/// A device at its address, with or without a front-end.
pub(crate) struct Endpoint {
    path: PathBuf,
    /// `None` in client mode.
    listener: Option<Listener>,
    session: Arc<Mutex<Session>>,
    connection: Option<Connection>,
    /// When to connect, or to listen again; `None` if there is nothing to do.
    retry_at: Option<Instant>,
    /// Whether a failure to connect has been reported since it last worked.
    complained: bool,
    /// The listener's epoll token; the connection's is one more.
    token: u64,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Prepares an address; a server's socket accepts connections from now on.
    ///
    /// # Errors
    /// As [`Listener::bind`].
    pub(crate) fn new(path: &Path, mode: Mode, device: Box<dyn Device>) -> Result<Self, Error> {
        check_path(path)?;
        let listener = match mode {
            Mode::Server => Some(Listener::bind(path)?),
            Mode::Client => None,
        };
        Ok(Self {
            path: path.to_owned(),
            listener,
            session: Arc::new(Mutex::new(Session::new(device))),
            connection: None,
            retry_at: None,
            complained: false,
            token: 0,
        })
    }

    /// Joins an epoll loop, with `token` for the listener and `token + 1` for the connection.
    pub(crate) fn register(&mut self, epoll: &Epoll, token: u64) {
        self.token = token;
        self.retry(epoll);
    }

    /// Something happened on the socket that `token` names.
    pub(crate) fn ready(&mut self, epoll: &Epoll, token: u64) {
        if token == self.token {
            self.accept(epoll);
        } else if let Some(connection) = &mut self.connection {
            let before = connection.interest();
            let outcome = connection.serve().and_then(|()| match connection.interest() {
                same if same == before => Ok(()),
                new => watch(epoll, ControlOperation::Modify, connection.wire.as_raw_fd(), new, token),
            });
            if let Err(reason) = outcome {
                self.end(epoll, &reason);
            }
        }
    }

    /// Looks at what has come due.
    pub(crate) fn tick(&mut self, epoll: &Epoll, message_timeout: Duration) {
        let late = self.connection.as_ref().map_or(Ok(()), |connection| connection.wire.check_time(message_timeout));
        let outcome = late.and_then(|()| self.session().check_memory());
        if let Err(reason) = outcome {
            self.end(epoll, &reason);
        }
        if self.retry_at.is_some_and(|due| due <= Instant::now()) {
            self.retry(epoll);
        }
    }

    fn session(&self) -> MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens, or tries to connect.
    fn retry(&mut self, epoll: &Epoll) {
        self.retry_at = None;
        if let Some(listener) = &self.listener {
            let listening = watch(epoll, ControlOperation::Add, listener.as_raw_fd(), EventSet::IN, self.token);
            return self.complain(listening);
        }
        match connect(&self.path) {
            Ok(socket) => self.begin(epoll, socket),
            Err(e) => self.complain(Err(connect_error(&self.path, e))),
        }
    }

    /// Reports an error, once until a connection works, and has it tried again.
    fn complain(&mut self, outcome: Result<(), Error>) {
        let Err(error) = outcome else { return };
        self.retry_at = Some(Instant::now() + RETRY);
        if std::mem::replace(&mut self.complained, true) {
            debug!("{}: {error}", self.path.display());
        } else {
            warn!("{error}; trying again every {} s", RETRY.as_secs());
        }
    }

    fn accept(&mut self, epoll: &Epoll) {
        let Some(listener) = &self.listener else { return };
        match listener.accept() {
            Ok(Some(socket)) if self.connection.is_none() => self.begin(epoll, socket),
            Ok(Some(_second)) => warn!("{}: refused a second front-end, one is connected", self.path.display()),
            Ok(None) => {}
            Err(source) => {
                // Most likely no more descriptors. It would be reported again at once: keep away from it for a while.
                let fd = listener.as_raw_fd();
                let paused = watch(epoll, ControlOperation::Delete, fd, EventSet::empty(), self.token);
                let error = Error::Socket { path: self.path.clone(), step: "accepting a connection", source };
                self.complain(paused.and(Err(error)));
            }
        }
    }

    fn begin(&mut self, epoll: &Epoll, socket: UnixStream) {
        let connection = Protocol::new(Arc::clone(&self.session)).and_then(|protocol| {
            let connection = Connection { wire: Wire::new(socket), protocol };
            let fd = connection.wire.as_raw_fd();
            watch(epoll, ControlOperation::Add, fd, connection.interest(), self.token + 1).map(|()| connection)
        });
        match connection {
            Ok(connection) => {
                info!("{}: front-end connected", self.path.display());
                self.connection = Some(connection);
                self.complained = false;
            }
            // A server just waits for the next connection.
            Err(error) if self.listener.is_some() => warn!("{}: {error}", self.path.display()),
            Err(error) => self.complain(Err(error)),
        }
    }

    /// Ends the connection; the next one may come.
    fn end(&mut self, epoll: &Epoll, reason: &Error) {
        if let Some(connection) = self.connection.take() {
            match reason {
                Error::Disconnected => info!("{}: front-end disconnected", self.path.display()),
                reason => warn!("{}: connection ended: {reason}", self.path.display()),
            }
            let fd = connection.wire.as_raw_fd();
            if let Err(error) = watch(epoll, ControlOperation::Delete, fd, EventSet::empty(), self.token + 1) {
                warn!("{}: {error}", self.path.display());
            }
        }
        self.session().disconnect(matches!(reason, Error::Disconnected));
        if self.listener.is_none() {
            self.retry_at = Some(Instant::now() + RETRY);
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.connection = None;
        self.session().disconnect(false);
    }
}

fn watch(epoll: &Epoll, what: ControlOperation, fd: RawFd, events: EventSet, token: u64) -> Result<(), Error> {
    let failed = |source| Error::System { step: "watching a socket", source };
    epoll.ctl(what, fd, EpollEvent::new(events, token)).map_err(failed)
}

fn connect_error(path: &Path, source: Errno) -> Error {
    let is_no_socket = |path: &Path| path.symlink_metadata().is_ok_and(|file| !file.file_type().is_socket());
    if source == Errno::CONNREFUSED && is_no_socket(path) {
        return Error::SocketNotASocket { path: path.to_owned() };
    }
    Error::Socket { path: path.to_owned(), step: "connecting", source: source.into() }
}
