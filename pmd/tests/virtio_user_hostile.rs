//! Backends that lie, stall or leave, at every answer they owe: the vhost-user transport reports each within its time limit,
//! names the request, and leaks no descriptor.
//!
//! A binary of its own, and one test at a time, for it counts descriptors.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::slice;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use pmd::mem::{Arena, Pages};
use pmd::virtio::spec::feature;
use pmd::virtio::user::{Mode, RingAddresses, UserConfig, UserError, UserTransport};
use vhost::vhost_user::VhostUserProtocolFeatures as Protocol;
use vhost::vhost_user::message::FrontendReq as Request;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use vmm_sys_util::tempdir::TempDir;

const FEATURES: u64 = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
/// Long enough for an honest answer on a busy machine; the silent backends cost it once a table row.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What is wrong with one answer, and what is to come of it.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Only the first bytes come.
    Silence(usize),
    /// The connection ends after the first bytes.
    Close(usize),
    /// Another word of the header: the id, the flags, or the size with as many bytes after it.
    Word(usize, u32),
    /// It comes twice.
    Twice,
    /// It brings descriptors.
    Descriptors(usize),
    /// Another value.
    Value(u64),
}

impl Lie {
    /// The answer to `request` with the lie in it, and how many descriptors go along; none at all for the end.
    fn tell(self, request: u32, value: u64) -> (Vec<u8>, usize) {
        let mut message = answer(request, value);
        match self {
            Self::Silence(bytes) | Self::Close(bytes) => message.truncate(bytes),
            Self::Word(at, word) => {
                message[4 * at..][..4].copy_from_slice(&word.to_ne_bytes());
                if at == SIZE {
                    message.resize(12 + usize::try_from(word).unwrap().min(4096), 0);
                }
            }
            Self::Twice => message = message.repeat(2),
            Self::Descriptors(count) => return (message, count),
            Self::Value(value) => message = answer(request, value),
        }
        (message, 0)
    }
}

const ID: usize = 0;
const FLAGS: usize = 1;
const SIZE: usize = 2;

fn answer(request: u32, value: u64) -> Vec<u8> {
    let mut message = [request, 5, 8].map(u32::to_ne_bytes).concat();
    message.extend(value.to_ne_bytes());
    message
}

/// What a backend has seen.
#[derive(Default)]
struct Seen {
    /// The requests, with their first 8 bytes.
    asked: Vec<(Request, u64)>,
    /// Those that it owed an answer.
    owed: Vec<Request>,
}

/// A backend that keeps to the protocol until the answer with number `at`.
fn serve(mut stream: UnixStream, at: usize, lie: Lie) -> Seen {
    let mut seen = Seen::default();
    let mut status = 0;
    let mut header = [[0; 4]; 3];
    while stream.read_exact(header.as_flattened_mut()).is_ok() {
        let [id, flags, size] = header.map(u32::from_ne_bytes);
        let request = Request::try_from(id).unwrap();
        // Descriptors that come along are closed by the kernel, as nobody asks for them.
        let mut payload = vec![0; size as usize];
        stream.read_exact(&mut payload).unwrap();
        payload.resize(8, 0);
        let argument = u64::from_ne_bytes(payload.try_into().unwrap());
        seen.asked.push((request, argument));
        let value = match request {
            Request::GET_FEATURES => FEATURES,
            Request::GET_PROTOCOL_FEATURES => (Protocol::MQ | Protocol::REPLY_ACK | Protocol::STATUS).bits(),
            Request::GET_QUEUE_NUM => 1,
            Request::GET_STATUS => status,
            Request::GET_VRING_BASE => argument,
            _ if flags & 8 != 0 => 0,
            _ => continue,
        };
        if request == Request::SET_STATUS {
            status = argument;
        }
        let lying = seen.owed.len() == at;
        seen.owed.push(request);
        let (message, descriptors) = if lying { lie.tell(id, value) } else { (answer(id, value), 0) };
        let file = File::open("/dev/null").unwrap();
        let sent = if descriptors > 0 {
            stream.send_with_fds(&[message.as_slice()], &vec![file.as_raw_fd(); descriptors]).is_ok()
        } else {
            stream.write_all(&message).is_ok()
        };
        if !sent || (lying && matches!(lie, Lie::Close(_))) {
            break;
        }
    }
    seen
}

/// A whole life of a transport.
fn live(path: &Path) -> Result<(), UserError> {
    let config =
        UserConfig { path: path.into(), mode: Mode::Client, queue_pairs: 1, wanted: FEATURES, timeout: TIMEOUT };
    let mut transport = UserTransport::connect(&config)?;
    let arena = Arena::new(4096, &Pages::Plain).unwrap();
    transport.share(slice::from_ref(&arena))?;
    for index in 0..2 {
        let ring = RingAddresses { size: 16, base: 0, desc: 0, avail: 0, used: 0 };
        transport.queue_setup(index, &ring)?;
        transport.queue_enable(index, true)?;
    }
    transport.driver_ok()?;
    for index in 0..2 {
        transport.queue_enable(index, false)?;
        assert_eq!(transport.queue_stop(index)?, 0);
    }
    transport.reset()
}

/// What comes of `lie` in the answer number `at`: the outcome here, and what the backend was asked.
fn meet(at: usize, lie: Lie) -> (Result<(), UserError>, Seen) {
    let dir = TempDir::new_with_prefix("/tmp/twinring-hostile-").unwrap();
    let path = dir.as_path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let backend = thread::spawn(move || serve(listener.accept().unwrap().0, at, lie));
    let outcome = live(&path);
    // The backend ends when the connection does: that it can be joined shows that an error closes it.
    (outcome, backend.join().unwrap())
}

static ALONE: Mutex<()> = Mutex::new(());

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn every_lie_in_every_answer_is_reported_and_leaks_nothing() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let before = open_descriptors();
    let (outcome, Seen { asked, owed }) = meet(usize::MAX, Lie::Twice);
    outcome.expect("an honest backend");
    let statuses: Vec<_> =
        asked.iter().filter(|(request, _)| *request == Request::SET_STATUS).map(|ask| ask.1).collect();
    assert_eq!(statuses, [0, 1, 3, 11, 15, 0], "virtio 1.3, 3.1.1");

    for lie in [
        Lie::Silence(0),
        Lie::Silence(10),
        Lie::Silence(19),
        Lie::Close(0),
        Lie::Close(10),
        Lie::Close(19),
        Lie::Word(ID, 99),
        Lie::Word(ID, Request::GET_CONFIG.into()),
        Lie::Word(FLAGS, 1),
        Lie::Word(FLAGS, 6),
        Lie::Word(SIZE, 0),
        Lie::Word(SIZE, 4),
        Lie::Word(SIZE, 16),
        Lie::Word(SIZE, u32::MAX),
        Lie::Twice,
        Lie::Descriptors(1),
        Lie::Descriptors(40),
    ] {
        thread::scope(|scope| {
            for (at, &request) in owed.iter().enumerate() {
                let last = at + 1 == owed.len();
                scope.spawn(move || judge(lie, request, last, meet(at, lie).0));
            }
        });
    }
    assert_eq!(open_descriptors(), before);
}

fn judge(lie: Lie, request: Request, last: bool, outcome: Result<(), UserError>) {
    let error = match outcome {
        Err(error) => error,
        // Bytes after the last answer are never read, and descriptors that nobody takes do no harm.
        Ok(()) if last && matches!(lie, Lie::Twice | Lie::Word(SIZE, 16 | u32::MAX)) => return,
        Ok(()) if matches!(lie, Lie::Descriptors(_)) => return,
        Ok(()) => panic!("{lie:?} in the answer to {request:?} went unnoticed"),
    };
    let expected = match (&lie, &error) {
        (Lie::Silence(_), UserError::TimedOut { request, .. })
        | (Lie::Close(_), UserError::Closed { request, .. })
        | (Lie::Word(ID | FLAGS, _) | Lie::Descriptors(1), UserError::Malformed { request, .. }) => Some(request),
        // `vhost` reads as many bytes as the answer ought to have, whatever size it claims: too few are waited for, and
        // too many are found in the place of the next answer.
        (
            Lie::Word(SIZE, _) | Lie::Twice | Lie::Descriptors(_),
            UserError::TimedOut { .. } | UserError::Malformed { .. },
        ) => None,
        _ => panic!("{lie:?} in the answer to {request:?}: {error}"),
    };
    if let Some(named) = expected {
        assert_eq!(*named, format!("{request:?}"), "{lie:?}: {error}");
    }
}

#[test]
fn absurd_values_are_refused_or_cut_to_size() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let honest = meet(usize::MAX, Lie::Twice).1;
    let number = |request| honest.owed.iter().position(|&owed| owed == request).unwrap();

    // All features, and all protocol features: what this end cannot do is not taken.
    for request in [Request::GET_FEATURES, Request::GET_PROTOCOL_FEATURES] {
        let (outcome, Seen { asked, .. }) = meet(number(request), Lie::Value(u64::MAX));
        outcome.unwrap();
        let taken = |request| asked.iter().find(|ask| ask.0 == request).unwrap().1;
        assert_eq!(taken(Request::SET_FEATURES), FEATURES);
        let protocol = Protocol::MQ | Protocol::REPLY_ACK | Protocol::STATUS;
        assert_eq!(taken(Request::SET_PROTOCOL_FEATURES), protocol.bits());
    }
    let outcome = meet(number(Request::GET_QUEUE_NUM), Lie::Value(u64::MAX)).0;
    outcome.unwrap();
    let outcome = meet(number(Request::GET_QUEUE_NUM), Lie::Value(0)).0;
    assert!(matches!(outcome, Err(UserError::QueuePairs { asked: 1, limit: 0, .. })), "{outcome:?}");
    let outcome = meet(number(Request::GET_STATUS), Lie::Value(0x108)).0;
    assert!(matches!(outcome, Err(UserError::Malformed { .. })), "{outcome:?}");
    // A device that takes FEATURES_OK back is told that the driver gives up (virtio 1.3, 3.1.1).
    let (outcome, Seen { asked, .. }) = meet(number(Request::GET_STATUS), Lie::Value(3));
    assert!(matches!(outcome, Err(UserError::FeaturesNotOk { .. })), "{outcome:?}");
    assert_eq!(*asked.last().unwrap(), (Request::SET_STATUS, 128 | 8 | 2 | 1));
}
