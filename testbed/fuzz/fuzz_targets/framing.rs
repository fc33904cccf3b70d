//! vhost-user messages of any order, size and number, with any number of descriptors, whole and in pieces: the daemon serves the
//! next front-end as if nothing had been, and neither a descriptor nor a mapping nor an mbuf is left.
#![no_main]

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::{LazyLock, Mutex};

use arbitrary::Arbitrary;
use pmd::virtio::spec::feature;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use testbed_fuzz::daemon::{Daemon, PAIRS};
use testbed_fuzz::message;

/// Descriptors with a message at most: more than the protocol ever allows.
const DESCRIPTORS_MAX: u8 = 34;
const PIECES_MAX: usize = 64;
const PLAIN: u32 = 1;
const NEED_REPLY: u32 = 1 | 8;
/// Where the front-end says that its memory lies.
const USER: u64 = 0x5500_0000_0000;
const PAGE: u64 = 4096;
const MEMORY_LEN: u64 = 16 * PAGE;
const RING_SIZE: u32 = 16;

/// A front-end's life.
#[derive(Arbitrary, Debug)]
struct Life {
    /// Features of rings that are set up first; none if they are not.
    rings: Option<u8>,
    pieces: Vec<Piece>,
    /// Whether it goes before its messages have been looked at.
    abrupt: bool,
}

#[derive(Arbitrary, Debug)]
enum Piece {
    /// A request as it should be, save for a byte, and descriptors that nobody asked for.
    Honest {
        step: u8,
        ring: u8,
        features: u8,
        change: Option<(u8, u8)>,
        surplus: u8,
    },
    Message {
        request: u8,
        need_reply: bool,
        body: Vec<u8>,
        descriptors: Descriptors,
    },
    /// A header that says another size than the body's.
    Lie {
        request: u8,
        size: u32,
        body: Vec<u8>,
        descriptors: Descriptors,
    },
    Bytes {
        bytes: Vec<u8>,
        descriptors: Descriptors,
    },
    /// The guest writes to its memory.
    Write {
        at: u16,
        bytes: Vec<u8>,
    },
}

#[derive(Arbitrary, Debug)]
struct Descriptors {
    events: u8,
    memory: bool,
}

/// The front-end's end of a connection.
struct FrontEnd {
    socket: UnixStream,
    memory: File,
}

/// Steps that set a ring up, in order.
const SET_UP: std::ops::Range<u8> = 0..8;

/// Request `step` for ring `ring`: its number, body, and descriptors.
fn honest(step: u8, ring: u8, features: u8) -> (u32, Vec<u8>, Descriptors) {
    let ring = u32::from(ring) % u32::from(2 * PAIRS);
    let longs = |values: &[u64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>();
    let words = |values: &[u32]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>();
    let region = longs(&[0, MEMORY_LEN, USER, 0]);
    let area = USER + u64::from(ring) * 3 * PAGE;
    let packed = features_of(features) & feature::RING_PACKED != 0;
    let base = if packed { 0x8000_8000 } else { 0 };
    // 2 queues, of 16 descriptors each: 192 bytes split, 576 packed.
    let inflight = [longs(&[2 * 1088, 0]), words(&[2 | RING_SIZE << 16])].concat();
    let none = Descriptors { events: 0, memory: false };
    let event = Descriptors { events: 1, memory: false };
    let memory = Descriptors { events: 0, memory: true };
    match step % 18 {
        0 => (2, longs(&[features_of(features)]), none),
        1 => (5, [words(&[1, 0]), region].concat(), memory),
        2 => (8, words(&[ring, RING_SIZE]), none),
        3 => (9, [words(&[ring, 0]), longs(&[area, area + PAGE, area + 2 * PAGE, 0])].concat(), none),
        4 => (10, words(&[ring, base]), none),
        5 => (12, longs(&[ring.into()]), event),
        6 => (13, longs(&[ring.into()]), event),
        7 => (18, words(&[ring, 1]), none),
        8 => (11, words(&[ring, 0]), none),
        // MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS; perhaps STATUS.
        9 => (16, longs(&[0xb209 | u64::from(features >> 7) << 16]), none),
        10 => (37, [longs(&[0]), longs(&[1 << 20, MEMORY_LEN, USER + (1 << 20), 0])].concat(), memory),
        11 => (38, [longs(&[0]), longs(&[1 << 20, MEMORY_LEN, USER + (1 << 20), 0])].concat(), none),
        12 => (31, inflight, none),
        13 => (32, inflight, memory),
        14 => (39, longs(&[0x0f]), none),
        15 => (34, Vec::new(), none),
        16 => (24, [words(&[0, 12, 0]), vec![0; 12]].concat(), none),
        _ => (4, Vec::new(), none),
    }
}

fn features_of(choice: u8) -> u64 {
    let chosen =
        [feature::RING_PACKED, feature::IN_ORDER, feature::MRG_RXBUF, feature::INDIRECT_DESC, feature::EVENT_IDX];
    let chosen = chosen.iter().enumerate().filter(|(bit, _)| choice >> bit & 1 != 0).map(|(_, feature)| feature);
    feature::VERSION_1 | feature::PROTOCOL_FEATURES | feature::MQ | chosen.sum::<u64>()
}

impl FrontEnd {
    fn new(socket: UnixStream) -> Self {
        let memory = File::from(memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("memory"));
        memory.set_len(MEMORY_LEN).expect("memory");
        Self { socket, memory }
    }

    /// Sets all rings up, each step acknowledged.
    fn set_up(&mut self, features: u8) {
        for ring in 0..2 * PAIRS as u8 {
            for step in SET_UP {
                let (request, body, descriptors) = honest(step, ring, features);
                // The first two concern all rings, and may not change once one runs.
                if ring == 0 || step > 1 {
                    assert!(self.send(&message(request, NEED_REPLY, &body), &descriptors));
                    let mut reply = [0; 20];
                    self.socket.read_exact(&mut reply).expect("an answer");
                    assert_eq!(reply[12..], [0; 8], "request {request} of ring {ring}");
                }
            }
        }
    }

    /// Whether the daemon still listens.
    fn tell(&self, piece: &Piece) -> bool {
        let flags = |need_reply| if need_reply { NEED_REPLY } else { PLAIN };
        match piece {
            Piece::Honest { step, ring, features, change, surplus } => {
                let (request, mut body, mut descriptors) = honest(*step, *ring, *features);
                if let Some((at, with)) = change
                    && !body.is_empty()
                {
                    let at = usize::from(*at) % body.len();
                    body[at] ^= with;
                }
                // Most come alone.
                descriptors.events += surplus.saturating_sub(128) % 4;
                self.send(&message(request, NEED_REPLY, &body), &descriptors)
            }
            Piece::Message { request, need_reply, body, descriptors } => {
                self.send(&message((request % 48).into(), flags(*need_reply), body), descriptors)
            }
            Piece::Lie { request, size, body, descriptors } => {
                let mut bytes = message((*request).into(), PLAIN, body);
                bytes[8..12].copy_from_slice(&size.to_ne_bytes());
                self.send(&bytes, descriptors)
            }
            Piece::Bytes { bytes, descriptors } => self.send(bytes, descriptors),
            Piece::Write { at, bytes } => {
                let room = usize::try_from(MEMORY_LEN).expect("small") - usize::from(*at);
                self.memory.write_all_at(&bytes[..bytes.len().min(room)], (*at).into()).is_ok()
            }
        }
    }

    fn send(&self, bytes: &[u8], descriptors: &Descriptors) -> bool {
        let events = 0..descriptors.events % DESCRIPTORS_MAX;
        let events: Vec<OwnedFd> = events.filter_map(|_| eventfd(0, EventfdFlags::CLOEXEC).ok()).collect();
        let memory = descriptors.memory.then(|| self.memory.as_fd());
        let borrowed: Vec<BorrowedFd<'_>> = memory.into_iter().chain(events.iter().map(AsFd::as_fd)).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX as usize + 1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
    }

    /// Says no more, and listens until the daemon has looked at all that was said: one that goes with replies unread takes its
    /// requests with it.
    fn hear_out(mut self) {
        // Fails if the daemon has hung up.
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut replies = [0; 4096];
        // Each piece is answered by a few hundred bytes at most.
        for _ in 0..=PIECES_MAX {
            match self.socket.read(&mut replies) {
                Ok(len) if len > 0 => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => panic!("the daemon neither answers nor hangs up"),
                // It has hung up.
                _ => return,
            }
        }
    }
}

libfuzzer_sys::fuzz_target!(|life: Life| {
    static DAEMON: LazyLock<Mutex<Daemon>> = LazyLock::new(|| Mutex::new(Daemon::start()));
    let mut daemon = DAEMON.lock().expect("nobody else");
    let mut front_end = FrontEnd::new(daemon.connect());
    if let Some(features) = life.rings {
        front_end.set_up(features);
    }
    for piece in life.pieces.iter().take(PIECES_MAX) {
        daemon.work();
        if !front_end.tell(piece) {
            break;
        }
    }
    daemon.work();
    if life.abrupt {
        drop(front_end);
    } else {
        front_end.hear_out();
    }
    daemon.check();
});
