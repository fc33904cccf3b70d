//! The polling side: what a connection's frames come from and go to, and the counts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use vhost_user_backend::{VringMutex, VringT};
use vm_memory::{GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap};

use super::device::Device;
use super::ring::{Format, Giver, Refusal, take};
use super::{Config, Expect, Mode};
use crate::frame::{FrameCheck, FrameGen, Report, is_txonly};

/// Frames taken from or given to a ring at a time.
const BURST: usize = 32;

/// Frames by what became of them, over all connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Connections served or being served.
    pub connections: u64,
    /// What ended the last connection that did not end well.
    pub last_failure: Option<String>,
    /// Frames from guests.
    pub from_guest: u64,
    /// Bytes in them.
    pub from_guest_bytes: u64,
    /// Frames to guests.
    pub to_guest: u64,
    /// Bytes in them.
    pub to_guest_bytes: u64,
    /// `Loop`: frames for which the guest had no buffer, or whose ring made no sense.
    pub dropped_no_buffer: u64,
    /// Frames that did not fit the guest's buffer without `MRG_RXBUF`, or all its buffers with it.
    pub dropped_too_long: u64,
    /// Frames from guests shorter than an Ethernet header or longer than 65535 bytes.
    pub dropped_bad_length: u64,
    /// Frames from guests in chains that could not be read.
    pub dropped_bad_chain: u64,
    /// Looks at a guest's ring that found it making no sense; a ring is looked at again and again.
    pub bad_rings: u64,
    /// What the frames from guests were, by queue pair; empty with [`Expect::Anything`].
    pub checks: Vec<Report>,
}

/// What lasts longer than a connection.
pub(super) struct Work {
    stats: Stats,
    looping: bool,
    /// Whether sources are to wait.
    paused: bool,
    /// Frames that each pair has to send at most.
    to_send: u64,
    pairs: Vec<Pair>,
}

/// What one queue pair sends and expects.
struct Pair {
    source: Option<FrameGen>,
    /// The next frame of `source`, until the guest has a buffer for it.
    pending: Vec<u8>,
    expect: Check,
}

enum Check {
    Anything,
    Txonly(Report),
    Stream(Box<FrameCheck>),
}

impl Work {
    pub(super) fn new(config: &Config) -> Self {
        let pair = |id: u32| {
            let (source, expect) = match &config.mode {
                Mode::Sink(expect) => (None, expect),
                Mode::Source { stream, returned, .. } => (Some(FrameGen::new(stream.with_id(id))), returned),
                Mode::Loop => (None, &Expect::Anything),
            };
            let expect = match expect {
                Expect::Anything => Check::Anything,
                Expect::Txonly => Check::Txonly(Report::default()),
                Expect::Stream(stream, macs) => Check::Stream(Box::new(FrameCheck::new(stream.with_id(id), *macs))),
            };
            Pair { source, pending: Vec::new(), expect }
        };
        let to_send = if let Mode::Source { count, .. } = config.mode { count.unwrap_or(u64::MAX) } else { 0 };
        Self {
            stats: Stats::default(),
            looping: matches!(config.mode, Mode::Loop),
            paused: false,
            to_send,
            pairs: (0..u32::from(config.queues)).map(pair).collect(),
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let report = |pair: &Pair| match &pair.expect {
            Check::Anything => None,
            Check::Txonly(report) => Some(*report),
            Check::Stream(check) => Some(check.report()),
        };
        Stats { checks: self.pairs.iter().filter_map(report).collect(), ..self.stats.clone() }
    }

    pub(super) fn set_paused(&mut self, paused: bool) {
        self.paused = paused;
    }

    pub(super) fn failed(&mut self, reason: &impl ToString) {
        self.stats.last_failure = Some(reason.to_string());
    }
}

impl Check {
    fn see(&mut self, frame: &[u8]) {
        match self {
            Self::Anything => {}
            Self::Txonly(report) if is_txonly(frame) => report.good += 1,
            Self::Txonly(report) => report.foreign += 1,
            Self::Stream(check) => {
                check.check(frame);
            }
        }
    }
}

/// The polling thread of one connection.
pub(super) struct Pump<'a> {
    work: &'a Mutex<Work>,
    device: &'a Device,
    memory: &'a GuestMemoryAtomic<GuestMemoryMmap>,
    /// The frames of the current burst, each in a buffer that is used again.
    frames: Vec<Vec<u8>>,
}

impl<'a> Pump<'a> {
    pub(super) fn new(
        work: &'a Mutex<Work>,
        device: &'a Device,
        memory: &'a GuestMemoryAtomic<GuestMemoryMmap>,
    ) -> Self {
        Self { work, device, memory, frames: vec![Vec::new(); BURST] }
    }

    /// Polls until the connection has hung up.
    pub(super) fn run(mut self, hung_up: &AtomicBool) {
        let work = self.work;
        let lock = || work.lock().unwrap_or_else(PoisonError::into_inner);
        lock().stats.connections += 1;
        let mut vrings = Vec::new();
        while !hung_up.load(Ordering::Relaxed) {
            if vrings.is_empty() {
                vrings = self.device.vrings();
            }
            let format = Format::of(self.device.accepted());
            let mut work = lock();
            for (index, rings) in vrings.chunks_exact(2).enumerate() {
                self.round(&mut work, index, &rings[0], &rings[1], format);
            }
            drop(work);
            // Lets the session and whoever asks for statistics have the locks, and others the CPU.
            thread::yield_now();
        }
    }

    fn round(&mut self, work: &mut Work, index: usize, receive: &VringMutex, transmit: &VringMutex, format: Format) {
        let Work { stats, looping, paused, to_send, pairs } = work;
        let Some(pair) = pairs.get_mut(index) else { return };
        let memory = self.memory.memory();

        let taken = take(&mut transmit.get_mut(), &memory, format, &mut self.frames);
        stats.bad_rings += u64::from(taken.bad_ring);
        stats.dropped_bad_chain += taken.bad_chain;
        stats.dropped_bad_length += taken.bad_length;
        let frames = &self.frames[..taken.frames];
        for frame in frames {
            stats.from_guest += 1;
            stats.from_guest_bytes += frame.len() as u64;
            pair.expect.see(frame);
        }

        let mut state = receive.get_mut();
        let mut ring = Giver::new(&mut state, &memory, format);
        if *looping {
            for frame in frames {
                stats.given(frame.len(), ring.give(frame));
            }
        } else if !*paused {
            pair.send(&mut ring, stats, *to_send);
        }
        stats.bad_rings += u64::from(ring.finish().is_err());
    }
}

impl Pair {
    /// Sends up to a burst of the source's frames, as long as the guest has buffers.
    fn send(&mut self, ring: &mut Giver<'_>, stats: &mut Stats, to_send: u64) {
        let Some(source) = &mut self.source else { return };
        for _ in 0..BURST {
            if self.pending.is_empty() {
                if source.made() == to_send {
                    return;
                }
                source.write_next(&mut self.pending);
            }
            let given = ring.give(&self.pending);
            if matches!(given, Err(Refusal::NoBuffer | Refusal::BadRing)) {
                return; // it stays pending
            }
            stats.given(self.pending.len(), given);
            self.pending.clear();
        }
    }
}

impl Stats {
    fn given(&mut self, bytes: usize, result: Result<(), Refusal>) {
        match result {
            Ok(()) => {
                self.to_guest += 1;
                self.to_guest_bytes += bytes as u64;
            }
            Err(Refusal::NoBuffer | Refusal::BadRing) => self.dropped_no_buffer += 1,
            Err(Refusal::TooLong) => self.dropped_too_long += 1,
        }
    }
}
