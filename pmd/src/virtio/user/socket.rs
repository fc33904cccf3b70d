//! The socket itself: connecting, or listening for one backend. Nothing here waits without a limit.

use std::fs;
use std::io::{self, ErrorKind};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use socket2::{Domain, SockAddr, SockRef, Socket, Type};

use super::{SOCKET_PATH_LEN_MAX, UserError};

/// Connects to the backend that listens at `path`.
pub(super) fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, UserError> {
    let failed = |source: io::Error| match source.kind() {
        ErrorKind::NotFound => UserError::NoSocket { path: path.to_owned() },
        // A backend that starts again removes the stale file just now: it is then as if it had never been there.
        ErrorKind::ConnectionRefused => match is_socket(path) {
            Some(true) => UserError::Refused { path: path.to_owned() },
            Some(false) => UserError::NotASocket { path: path.to_owned() },
            None => UserError::NoSocket { path: path.to_owned() },
        },
        // The listener's backlog stayed full.
        ErrorKind::WouldBlock => {
            UserError::TimedOut { path: path.to_owned(), request: "the connection".to_owned(), timeout }
        }
        _ => UserError::io(path, "connecting", source),
    };
    let address = address(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
    // For a Unix socket the send time-out is what limits connect(); the requests have their own limit, see `Watchdog`.
    socket.set_write_timeout(Some(timeout)).map_err(failed)?;
    socket.connect(&address).map_err(failed)?;
    socket.set_write_timeout(None).map_err(failed)?;
    Ok(socket.into())
}

/// Listens at `path` until one backend has connected.
pub(super) fn accept(path: &Path, timeout: Duration) -> Result<(UnixStream, Listener), UserError> {
    let listener = Listener::bind(path)?;
    let failed = |source: io::Error| match source.kind() {
        ErrorKind::WouldBlock => UserError::NoPeer { path: path.to_owned(), timeout },
        _ => UserError::io(path, "waiting for a backend", source),
    };
    let deadline = Instant::now() + timeout;
    let (stream, _) = loop {
        // The read time-out is what limits accept(), and each try has what is left; 0 would mean no limit.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        listener.socket.set_read_timeout(Some(left)).map_err(failed)?;
        match listener.socket.accept() {
            // A signal, or a backend that was gone before it was ours, ends the try and not the wait.
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted) => {}
            accepted => break accepted.map_err(failed)?,
        }
    };
    Ok((stream.into(), listener))
}

/// Whether the other end is still there; never waits.
pub(super) fn is_connected(stream: &UnixStream) -> bool {
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    match SockRef::from(stream).recv_with_flags(&mut [MaybeUninit::uninit()], flags) {
        Ok(bytes) => bytes > 0,
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted),
    }
}

/// The files of all sockets at which this process listens, and their identities.
static LISTENING: Mutex<Vec<(PathBuf, (u64, u64))>> = Mutex::new(Vec::new());

/// Removes the files of all sockets at which this process listens: for one that ends without unwinding.
pub fn remove_sockets() {
    let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
    for (path, file) in listening.drain(..) {
        remove_own(&path, file);
    }
}

/// Removes a socket file of ours. Whoever replaced it keeps theirs; one that cannot be removed is found stale, and removed, by the
/// next server.
fn remove_own(path: &Path, file: (u64, u64)) {
    if identity(path).is_ok_and(|now| now == file) {
        let _ = fs::remove_file(path);
    }
}

/// A listening socket, whose file goes with it. It lives as long as the connection, so that nobody takes the path meanwhile.
pub(super) struct Listener {
    socket: Socket,
    path: PathBuf,
    /// Device and inode of the file. As long as the socket is bound, no other file can have them.
    file: (u64, u64),
}

impl Listener {
    fn bind(path: &Path) -> Result<Self, UserError> {
        let address = address(path)?;
        remove_stale(path, &address)?;
        let failed = |source: io::Error| match source.kind() {
            ErrorKind::NotFound => UserError::NoDirectory { path: path.to_owned() },
            ErrorKind::AddrInUse => UserError::InUse { path: path.to_owned() },
            _ => UserError::io(path, "listening", source),
        };
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
        socket.bind(&address).map_err(failed)?;
        let file = identity(path).map_err(failed)?;
        LISTENING.lock().unwrap_or_else(PoisonError::into_inner).push((path.to_owned(), file));
        let listener = Self { socket, path: path.to_owned(), file };
        listener.socket.listen(1).map_err(failed)?;
        Ok(listener)
    }
}

impl Listener {
    /// The next backend, if one has connected; never waits.
    pub(super) fn poll(&self, path: &Path) -> Result<Option<UnixStream>, UserError> {
        let accepted = self.socket.set_nonblocking(true).and_then(|()| self.socket.accept());
        match accepted {
            Ok((stream, _)) => Ok(Some(stream.into())),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(UserError::io(path, "waiting for a backend", error)),
            },
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        remove_own(&self.path, self.file);
        let mut listening = LISTENING.lock().unwrap_or_else(PoisonError::into_inner);
        listening.retain(|(path, _)| *path != self.path);
    }
}

/// Removes the socket that a crashed server left at `path`; anything else there is an error.
fn remove_stale(path: &Path, address: &SockAddr) -> Result<(), UserError> {
    let failed = |source| UserError::io(path, "looking for a stale socket", source);
    match is_socket(path) {
        None => return Ok(()), // Then there is nothing there, or bind() will say what is wrong.
        Some(false) => return Err(UserError::NotASocket { path: path.to_owned() }),
        Some(true) => {}
    }
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    match socket.connect(address).map_err(|error| (error.kind(), error)) {
        Err((ErrorKind::ConnectionRefused, _)) => match fs::remove_file(path) {
            Err(source) if source.kind() != ErrorKind::NotFound => {
                Err(UserError::io(path, "removing the stale socket", source))
            }
            _ => Ok(()),
        },
        Err((ErrorKind::NotFound, _)) => Ok(()),
        Err((ErrorKind::PermissionDenied, source)) => Err(failed(source)),
        // A connection, a full backlog, a socket of another type: in every case somebody is there.
        Ok(()) | Err(_) => Err(UserError::InUse { path: path.to_owned() }),
    }
}

fn address(path: &Path) -> Result<SockAddr, UserError> {
    let bytes = path.as_os_str().as_bytes();
    let error = || UserError::Path { path: path.to_owned(), len: bytes.len() };
    if bytes.is_empty() || bytes.len() > SOCKET_PATH_LEN_MAX || bytes.contains(&0) {
        return Err(error());
    }
    SockAddr::unix(path).map_err(|_| error())
}

/// Whether the file at `path` is a socket; `None` if there is no such file.
fn is_socket(path: &Path) -> Option<bool> {
    fs::symlink_metadata(path).ok().map(|file| file.file_type().is_socket())
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}
