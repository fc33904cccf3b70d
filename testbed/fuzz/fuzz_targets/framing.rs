//! vhost-user messages of any order, size and number, with any number of descriptors, whole and in pieces: the daemon serves the
//! next front-end as if nothing had been, and no descriptor is left.
#![no_main]

use std::collections::BTreeMap;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use arbitrary::Arbitrary;
use backend::control::{Control, Mode};
use backend::error::Error;
use backend::queue::config::QueueConfig;
use backend::session::{Device, NET_CONFIG_LEN};
use pmd::virtio::spec::feature;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use vmm_sys_util::tempdir::TempDir;

/// How long the daemon may take to let go of a connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// Descriptors with a message at most: more than the protocol ever allows.
const DESCRIPTORS_MAX: u8 = 34;
const GET_FEATURES: u32 = 1;

/// What is sent at once.
#[derive(Arbitrary, Debug)]
enum Piece {
    Message {
        request: u8,
        flags: u8,
        body: Vec<u8>,
        descriptors: u8,
    },
    /// A message whose header says another size.
    Lie {
        request: u8,
        size: u32,
        body: Vec<u8>,
        descriptors: u8,
    },
    Bytes {
        bytes: Vec<u8>,
        descriptors: u8,
    },
}

/// A device without a packet path, which holds what its rings were given.
#[derive(Default)]
struct Holder(BTreeMap<u16, QueueConfig>);

impl Device for Holder {
    fn features(&self) -> u64 {
        feature::VERSION_1 | feature::MRG_RXBUF | feature::IN_ORDER | feature::MQ | feature::RING_PACKED
    }

    fn queue_pairs_max(&self) -> u16 {
        4
    }

    fn config(&self) -> [u8; NET_CONFIG_LEN] {
        [0; NET_CONFIG_LEN]
    }

    fn queue_start(&mut self, config: QueueConfig) -> Result<(), Error> {
        assert!(self.0.insert(config.index, config).is_none(), "started twice");
        Ok(())
    }

    fn queue_stop(&mut self, index: u16) -> Option<u32> {
        self.0.remove(&index).map(|config| config.position)
    }

    fn link(&mut self, _up: bool) {}
}

struct Server {
    path: PathBuf,
    /// Descriptors that are open while nobody is connected.
    descriptors: usize,
    _control: Control,
    _dir: TempDir,
}

/// Sockets and eventfds, whatever is ours or was sent to us; files and pipes are the fuzzer's own.
fn descriptors_open() -> Vec<PathBuf> {
    let links = std::fs::read_dir("/proc/self/fd").expect("/proc").flatten();
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    let ours = |target: &PathBuf| {
        let name = target.to_string_lossy();
        name.starts_with("socket:") || name.starts_with("anon_inode:")
    };
    targets.filter(ours).collect()
}

impl Server {
    fn start() -> Self {
        let dir = TempDir::new().expect("a folder");
        let path = dir.as_path().join("s");
        let control = Control::with_message_timeout(Duration::from_millis(200)).expect("a control thread");
        control.add(&path, Mode::Server, Box::new(Holder::default())).expect("a socket");
        serve_honestly(&path);
        // Until the first one is gone.
        std::thread::sleep(Duration::from_secs(1));
        Self { path, descriptors: descriptors_open().len(), _control: control, _dir: dir }
    }
}

/// Asks one thing, and gets an answer, as soon as the front-end before is gone: there is one at a time.
fn serve_honestly(path: &PathBuf) {
    eventually("an honest front-end is served", || {
        let Ok(mut client) = UnixStream::connect(path) else { return false };
        client.set_read_timeout(Some(PATIENCE)).expect("a socket");
        client.write_all(&message(GET_FEATURES, 1, 0, &[])).is_ok() && client.read_exact(&mut [0; 20]).is_ok()
    });
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}; open: {:?}", descriptors_open());
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn message(request: u32, flags: u32, size: u32, body: &[u8]) -> Vec<u8> {
    [&request.to_ne_bytes()[..], &flags.to_ne_bytes(), &size.to_ne_bytes(), body].concat()
}

/// Whether the daemon still listens to this connection.
fn send(client: &UnixStream, piece: &Piece) -> bool {
    let (bytes, descriptors) = match piece {
        Piece::Message { request, flags, body, descriptors } => {
            // Version 1, and whether an answer is wanted.
            let flags = 1 | u32::from(flags & 8);
            (message((request % 48).into(), flags, body.len() as u32, body), descriptors)
        }
        Piece::Lie { request, size, body, descriptors } => (message((*request).into(), 1, *size, body), descriptors),
        Piece::Bytes { bytes, descriptors } => (bytes.clone(), descriptors),
    };
    let events: Vec<OwnedFd> =
        (0..descriptors % DESCRIPTORS_MAX).filter_map(|_| eventfd(0, EventfdFlags::CLOEXEC).ok()).collect();
    let borrowed: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX as usize))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    sendmsg(client, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
}

libfuzzer_sys::fuzz_target!(|pieces: Vec<Piece>| {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let server = SERVER.get_or_init(Server::start);
    let client = UnixStream::connect(&server.path).expect("a listener");
    for piece in pieces.iter().take(64) {
        if !send(&client, piece) {
            break;
        }
    }
    drop(client);
    serve_honestly(&server.path);
    eventually("no descriptor is left", || descriptors_open().len() <= server.descriptors);
});
