//! What can go wrong with a vhost-user backend, one sentence each.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vhost::vhost_user::Error as Wire;

use super::{REGIONS_MAX, SOCKET_PATH_LEN_MAX};
use crate::sys::descriptors_max;
use crate::virtio::spec::feature;

/// Why there is no vhost-user backend, or none that can be used.
#[derive(Debug, thiserror::Error)]
pub enum UserError {
    /// The path does not fit into a socket address.
    #[error("vhost-user socket path {path:?} has {len} bytes: it needs 1 to {SOCKET_PATH_LEN_MAX}, none of them NUL")]
    Path {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
    /// Client mode: there is no such file.
    #[error("no vhost-user socket at {path}: start the backend first, or correct the path")]
    NoSocket {
        /// The socket.
        path: PathBuf,
    },
    /// Server mode: there is no such directory.
    #[error("vhost-user socket {path} cannot be created: its directory does not exist; create it, or correct the path")]
    NoDirectory {
        /// The socket.
        path: PathBuf,
    },
    /// The path belongs to something else, which stays as it is.
    #[error("{path} is not a socket: choose another path for the vhost-user socket")]
    NotASocket {
        /// What is in the way.
        path: PathBuf,
    },
    /// Client mode: the socket is stale.
    #[error("nobody listens at vhost-user socket {path}: start the backend first, or use server mode at this end")]
    Refused {
        /// The socket.
        path: PathBuf,
    },
    /// Server mode: the path is taken.
    #[error("another process listens at vhost-user socket {path}: stop it, choose another path, or use client mode")]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// The file's or its directory's permissions forbid it.
    #[error("vhost-user socket {path}: no permission for {step}: run as its owner, or change its mode")]
    Permission {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
    },
    /// Anything else that the kernel said.
    #[error("vhost-user socket {path}: {step} failed: {source}")]
    Io {
        /// The socket.
        path: PathBuf,
        /// What was tried.
        step: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// Server mode: nobody came.
    #[error(
        "no backend connected to vhost-user socket {path} within {timeout:?}: start one in client mode on this path"
    )]
    NoPeer {
        /// The socket.
        path: PathBuf,
        /// How long it was open.
        timeout: Duration,
    },
    /// The backend went away.
    #[error("the vhost-user backend at {path} closed the connection at {request}: its own log says why")]
    Closed {
        /// The socket.
        path: PathBuf,
        /// The request that was not answered.
        request: String,
    },
    /// The backend does not answer.
    #[error(
        "the vhost-user backend at {path} did not answer {request} within {timeout:?}: is it stopped, or serving another connection?"
    )]
    TimedOut {
        /// The socket.
        path: PathBuf,
        /// The request that was not answered.
        request: String,
        /// How long an answer may take.
        timeout: Duration,
    },
    /// The backend said no (vhost-user, `REPLY_ACK`).
    #[error("the vhost-user backend at {path} refused {request}: its own log says why")]
    Rejected {
        /// The socket.
        path: PathBuf,
        /// The refused request.
        request: String,
    },
    /// The backend's answer is not an answer.
    #[error(
        "the vhost-user backend at {path} sent something else than an answer to {request}: is it a vhost-user backend?"
    )]
    Malformed {
        /// The socket.
        path: PathBuf,
        /// The request.
        request: String,
    },
    /// The one feature that there must be is missing.
    #[error("the vhost-user backend at {path} has no VERSION_1, only {}: use one that speaks virtio 1.0 or later", names(*.offered))]
    NoCommonFeature {
        /// The socket.
        path: PathBuf,
        /// The features offered.
        offered: u64,
    },
    /// The device cleared `FEATURES_OK` (virtio 1.3, 3.1.1 step 6).
    #[error("the vhost-user backend at {path} does not work with just {}: ask for more features, or fewer", names(*.features))]
    FeaturesNotOk {
        /// The socket.
        path: PathBuf,
        /// The features asked for.
        features: u64,
    },
    /// A backend that took the place of another lacks what that one had.
    #[error(
        "the vhost-user backend that is now at {path} does not offer {}, with which the rings are running: start it as the one before, or close the port and open it anew",
        names(*.missing)
    )]
    FeaturesLost {
        /// The socket.
        path: PathBuf,
        /// The features that were agreed on and are not offered any more.
        missing: u64,
    },
    /// More queue pairs than there are.
    #[error(
        "{asked} queue pairs asked of the vhost-user backend at {path}: at least 1 and at most {limit} are possible; write queues={limit} or fewer"
    )]
    QueuePairs {
        /// The socket.
        path: PathBuf,
        /// Queue pairs asked for.
        asked: u16,
        /// Queue pairs possible: [`QUEUE_PAIRS_MAX`](super::QUEUE_PAIRS_MAX), or what the backend said.
        limit: u16,
    },
    /// Each queue pair has four descriptors, and this process may not have so many.
    #[error(
        "{pairs} queue pairs of the vhost-user backend at {path} need {} file descriptors, and this process may have {limit} in all (ulimit -n): raise that, or use fewer queue pairs",
        4 * pairs
    )]
    Descriptors {
        /// The socket.
        path: PathBuf,
        /// Queue pairs asked for.
        pairs: u16,
        /// Descriptors that this process may have.
        limit: u64,
    },
    /// A queue beyond the ones set up.
    #[error("queue {index} of the vhost-user backend at {path}: only {queues} were asked for")]
    NoSuchQueue {
        /// The socket.
        path: PathBuf,
        /// The queue's index.
        index: u16,
        /// How many there are.
        queues: usize,
    },
    /// More memory regions than a backend takes.
    #[error(
        "{asked} memory arenas for the vhost-user backend at {path}: it takes 1 to {REGIONS_MAX}; use fewer, larger ones"
    )]
    Regions {
        /// The socket.
        path: PathBuf,
        /// Arenas given.
        asked: usize,
    },
}

impl UserError {
    /// What the failed system call `step` on `path` means.
    pub(super) fn io(path: &Path, step: &'static str, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Permission { path, step },
            _ => Self::Io { path, step: step.to_owned(), source },
        }
    }

    /// What it means that `pairs` queue pairs did not get their events.
    pub(super) fn events(path: &Path, pairs: u16, source: io::Error) -> Self {
        match descriptors_max() {
            Ok(limit) if source.raw_os_error() == Some(libc::EMFILE) => {
                Self::Descriptors { path: path.to_owned(), pairs, limit }
            }
            _ => Self::io(path, "creating an eventfd", source),
        }
    }

    /// What the failed `request` means.
    pub(super) fn wire(path: &Path, request: String, error: vhost::Error) -> Self {
        let path = path.to_owned();
        let source = match error {
            vhost::Error::VhostUserProtocol(Wire::Disconnected | Wire::PartialMessage | Wire::SocketBroken(_)) => {
                return Self::Closed { path, request };
            }
            vhost::Error::VhostUserProtocol(Wire::BackendInternalError) => return Self::Rejected { path, request },
            vhost::Error::VhostUserProtocol(Wire::InvalidMessage | Wire::IncorrectFds | Wire::OversizedMsg) => {
                return Self::Malformed { path, request };
            }
            vhost::Error::VhostUserProtocol(Wire::SocketError(source)) => source,
            other => io::Error::other(other.to_string()),
        };
        Self::Io { path, step: request, source }
    }
}

/// The features' names, for people: `MRG_RXBUF, VERSION_1, bit 38`.
fn names(features: u64) -> String {
    const NAMES: [(u64, &str); 14] = [
        (feature::CSUM, "CSUM"),
        (feature::GUEST_CSUM, "GUEST_CSUM"),
        (feature::MTU, "MTU"),
        (feature::MAC, "MAC"),
        (feature::MRG_RXBUF, "MRG_RXBUF"),
        (feature::STATUS, "STATUS"),
        (feature::CTRL_VQ, "CTRL_VQ"),
        (feature::MQ, "MQ"),
        (feature::ANY_LAYOUT, "ANY_LAYOUT"),
        (feature::INDIRECT_DESC, "INDIRECT_DESC"),
        (feature::EVENT_IDX, "EVENT_IDX"),
        (feature::VERSION_1, "VERSION_1"),
        (feature::RING_PACKED, "RING_PACKED"),
        (feature::IN_ORDER, "IN_ORDER"),
    ];
    let name = |bit: u32| match NAMES.iter().find(|(mask, _)| *mask == 1 << bit) {
        Some((_, name)) => (*name).to_owned(),
        None => format!("bit {bit}"),
    };
    let bits: Vec<_> = (0..u64::BITS).filter(|bit| features & (1 << bit) != 0).map(name).collect();
    if bits.is_empty() { "no feature at all".to_owned() } else { bits.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_named_and_unknown_ones_numbered() {
        assert_eq!(names(feature::MRG_RXBUF | feature::PROTOCOL_FEATURES | 1 << 63), "MRG_RXBUF, bit 30, bit 63");
        assert_eq!(names(0), "no feature at all");
    }

    #[test]
    fn no_permission_is_told_from_other_errors() {
        let error = UserError::io(Path::new("/x"), "connecting", io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(
            error.to_string(),
            "vhost-user socket /x: no permission for connecting: run as its owner, or change its mode"
        );
    }
}
