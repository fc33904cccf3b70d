//! Socket files: serving one, and connecting to one, without waiting.
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};

use crate::error::Error;

/// Longest path of a socket in bytes (`sun_path`, without its NUL).
const PATH_LEN_MAX: usize = 107;

/// A socket that we serve; its file goes with it.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of our socket file, to tell it from one that replaced it.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Serves `path`. A socket file that nobody listens on any more is removed first.
    ///
    /// # Errors
    /// One of [`Error`]'s `Socket…` variants.
    pub(crate) fn bind(path: &Path) -> Result<Self, Error> {
        check_path(path)?;
        remove_stale(path)?;
        let socket = UnixListener::bind(path).map_err(failed(path, "creating the socket"))?;
        let identity = identity(path).ok();
        let listener = Self { socket, path: path.to_owned(), identity };
        listener.socket.set_nonblocking(true).map_err(failed(path, "making the socket non-blocking"))?;
        Ok(listener)
    }

    /// The next connection, if one is waiting.
    ///
    /// # Errors
    /// What the kernel says, for instance that there are no more descriptors.
    pub(crate) fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.socket.accept() {
            Ok((socket, _)) => Ok(Some(socket)),
            Err(e) => match e.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => Ok(None),
                _ => Err(e),
            },
        }
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path).ok() == self.identity {
            // If it cannot be removed, the next daemon finds it stale.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Checks that a path fits into a socket address.
///
/// # Errors
/// [`Error::SocketPath`].
pub(crate) fn check_path(path: &Path) -> Result<(), Error> {
    let fits = (1..=PATH_LEN_MAX).contains(&path.as_os_str().len());
    if fits { Ok(()) } else { Err(Error::SocketPath { path: path.to_owned(), max: PATH_LEN_MAX }) }
}

/// Connects to the socket at `path`. Does not wait: a server whose queue of connections is full is [`Errno::AGAIN`].
///
/// # Errors
/// What the kernel says.
pub(crate) fn connect(path: &Path) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

fn remove_stale(path: &Path) -> Result<(), Error> {
    match fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => {}
        Ok(_) => return Err(Error::SocketNotASocket { path: path.to_owned() }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed(path, "looking at the path")(e)),
    }
    match connect(path) {
        Err(Errno::CONNREFUSED) => match fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(failed(path, "removing the stale socket")(e)),
            _ => Ok(()),
        },
        Err(Errno::NOENT) => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err(Error::SocketInUse { path: path.to_owned() }),
        Err(e) => Err(failed(path, "asking whether somebody listens")(e.into())),
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|file| (file.dev(), file.ino()))
}

fn failed(path: &Path, step: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Socket { path: path.to_owned(), step, source }
}
