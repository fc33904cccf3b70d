//! Frames out of a port and back into it, every byte checked.

use std::ops::Range;
use std::time::{Duration, Instant};

use pmd::mbuf::{Mbuf, MbufPool, PORT_NONE};
use pmd::port::{Burst, Port, PortError, RxHandle, TxHandle};

use crate::frame::{CheckError, FrameCheck, FrameGen, Macs, Report, Stream};
use crate::ledger::Ledger;
use crate::rings::{bytes_of, packet};

/// Packets at a time.
const BURST: usize = 32;
/// How long nothing may move before a run ends. Longer than a testpmd takes to carry out a command.
const STILL_MAX: Duration = Duration::from_secs(3);
/// Less headroom than any virtio header needs.
const LITTLE_HEADROOM: u16 = 4;

/// How frames are laid into mbufs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Into as few as they take, with room for a header before each.
    Whole,
    /// Into one each, with too little room for a header; frames too long for that as [`Whole`](Self::Whole).
    LittleHeadroom,
    /// Into segments of at most so many bytes.
    Segments(usize),
}

/// A queue pair's handles, and what went through them.
struct Lane {
    rx: RxHandle,
    tx: TxHandle,
    generator: FrameGen,
    check: FrameCheck,
    going: Burst,
    returned: u64,
    /// Frames that were under way when whoever held them went away.
    lost: u64,
}

/// Numbered frames out of every queue pair of a port, to a peer that sends them back to the same one.
pub struct Exchange {
    lanes: Vec<Lane>,
    pool: MbufPool,
    cut: Cut,
    coming: Burst,
    frame: Vec<u8>,
}

impl Exchange {
    /// Takes the handles of all queue pairs of `port`. Pair `n` sends `stream` under its id plus `n`, and expects it back with `macs`.
    ///
    /// # Errors
    /// [`PortError::HandleOut`] if a handle is out.
    pub fn new(port: &dyn Port, pool: &MbufPool, stream: &Stream, macs: Macs) -> Result<Self, PortError> {
        Self::on(port, 0..port.slots().rx.len() as u16, pool, stream, macs)
    }

    /// As [`Exchange::new`], of `queues` only.
    ///
    /// # Errors
    /// [`PortError`] if a handle is out, or there is no such queue.
    pub fn on(
        port: &dyn Port,
        queues: Range<u16>,
        pool: &MbufPool,
        stream: &Stream,
        macs: Macs,
    ) -> Result<Self, PortError> {
        let lane = |queue: u16| {
            let stream = stream.with_id(stream.id() + u32::from(queue));
            Ok(Lane {
                rx: port.rx(queue)?,
                tx: port.tx(queue)?,
                generator: FrameGen::new(stream.clone()),
                check: FrameCheck::new(stream, macs),
                going: Burst::new(BURST),
                returned: 0,
                lost: 0,
            })
        };
        Ok(Self {
            lanes: queues.map(lane).collect::<Result<_, _>>()?,
            pool: pool.clone(),
            cut: Cut::Whole,
            coming: Burst::new(BURST),
            frame: Vec::new(),
        })
    }

    /// Lays the frames to come into mbufs like this.
    pub fn cut(&mut self, cut: Cut) {
        self.cut = cut;
    }

    /// Sends `frames` more out of every queue pair, at most `window` of each at a time under way, until all are back or nothing
    /// has moved for three seconds; whether all came back.
    pub fn run(&mut self, frames: u64, window: u64) -> bool {
        let ends: Vec<_> = self.lanes.iter().map(|lane| lane.generator.made() + frames).collect();
        let mut still_since = Instant::now();
        while still_since.elapsed() < STILL_MAX {
            let mut moved = 0;
            let mut done = true;
            for (lane, &end) in self.lanes.iter_mut().zip(&ends) {
                let room = window.saturating_sub(lane.under_way()).min(end - lane.generator.made());
                lane.fill(&self.pool, self.cut, room, &mut self.frame);
                moved += lane.tx.tx_burst(&mut lane.going) + lane.receive(&mut self.coming);
                done &= lane.returned + lane.lost >= end;
            }
            if done {
                return true;
            }
            if moved > 0 {
                still_since = Instant::now();
            } else {
                std::thread::yield_now();
            }
        }
        false
    }

    /// Once round all queue pairs: sends what the window has room for, and receives; returns how many packets moved.
    pub fn round(&mut self, window: u64) -> usize {
        let mut moved = 0;
        for lane in &mut self.lanes {
            let room = window.saturating_sub(lane.under_way());
            lane.fill(&self.pool, self.cut, room, &mut self.frame);
            moved += lane.tx.tx_burst(&mut lane.going) + lane.receive(&mut self.coming);
        }
        moved
    }

    /// Takes the frames that a port has taken and that have not come back for lost; returns how many those are.
    pub fn write_off(&mut self) -> u64 {
        let mut lost = 0;
        for lane in &mut self.lanes {
            let gone = lane.under_way() - lane.going.len() as u64;
            lane.lost += gone;
            lost += gone;
        }
        lost
    }

    /// Sends `frames` from every queue pair without looking at what comes back; returns how many the port took.
    pub fn flood(&mut self, frames: u64) -> u64 {
        let mut taken = 0;
        let mut still_since = Instant::now();
        let ends: Vec<_> = self.lanes.iter().map(|lane| lane.generator.made() + frames).collect();
        while still_since.elapsed() < STILL_MAX {
            let mut moved = 0;
            for (lane, &end) in self.lanes.iter_mut().zip(&ends) {
                lane.fill(&self.pool, self.cut, end - lane.generator.made(), &mut self.frame);
                moved += lane.tx.tx_burst(&mut lane.going);
            }
            taken += moved as u64;
            let waiting = |(lane, end): (&Lane, &u64)| lane.generator.made() < *end || !lane.going.is_empty();
            if !self.lanes.iter().zip(&ends).any(waiting) {
                break;
            }
            if moved > 0 {
                still_since = Instant::now();
            }
        }
        taken
    }

    /// Offers the port one more frame from every queue pair, once; returns how many it took.
    pub fn offer(&mut self) -> usize {
        let mut taken = 0;
        for lane in &mut self.lanes {
            lane.fill(&self.pool, self.cut, 1, &mut self.frame);
            taken += lane.tx.tx_burst(&mut lane.going);
        }
        taken
    }

    /// Receives until nothing has come for `still`; returns how many frames came.
    pub fn drain(&mut self, still: Duration) -> u64 {
        let (mut came, mut still_since) = (0, Instant::now());
        while still_since.elapsed() < still {
            let n: usize = self.lanes.iter_mut().map(|lane| lane.receive(&mut self.coming)).sum();
            came += n as u64;
            if n > 0 {
                still_since = Instant::now();
            }
        }
        came
    }

    /// Frees the packets that the port has not taken, and those it is done with.
    pub fn let_go(&mut self) {
        for lane in &mut self.lanes {
            lane.going.free();
            lane.tx.reap();
        }
    }

    /// Frames made so far, of all queue pairs.
    #[must_use]
    pub fn made(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.generator.made()).sum()
    }

    /// Frames that came back so far, whatever is in them.
    #[must_use]
    pub fn returned(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.returned).sum()
    }

    /// What came back, by queue pair.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.lanes.iter().map(|lane| lane.check.report()).collect()
    }

    /// Checks that all frames of every queue pair came back, whole and in order, but those that were written off.
    ///
    /// # Errors
    /// [`CheckError`] of the first queue pair of which that is not so.
    pub fn finish(&self) -> Result<(), CheckError> {
        self.lanes.iter().try_for_each(|lane| lane.check.finish(lane.generator.made(), lane.lost))
    }

    /// A ledger of what was made and what came back right, for more entries.
    #[must_use]
    pub fn ledger(&self, title: impl Into<String>) -> Ledger {
        let mut ledger = Ledger::new(title);
        ledger.input("we sent", self.made() - self.lanes.iter().map(|lane| lane.going.len() as u64).sum::<u64>());
        ledger.output("came back, every byte right", self.reports().iter().map(|report| report.good).sum());
        match self.lanes.iter().map(|lane| lane.lost).sum() {
            0 => {}
            lost => ledger.dropped("gone with a peer", lost),
        }
        ledger
    }
}

impl Lane {
    fn under_way(&self) -> u64 {
        self.generator.made().saturating_sub(self.returned + self.lost)
    }

    /// Makes up to `room` more frames, as far as burst and pool go.
    fn fill(&mut self, pool: &MbufPool, cut: Cut, room: u64, frame: &mut Vec<u8>) {
        for _ in 0..room.min(self.going.room() as u64) {
            self.generator.write_next(frame);
            let Some(mbuf) = lay(pool, frame, cut) else {
                // The pool is empty: this frame is made again when the ring has given some mbufs back.
                self.generator.back();
                self.tx.reap();
                return;
            };
            // There is room, see the loop's bound.
            drop(self.going.push(mbuf));
        }
    }

    fn receive(&mut self, coming: &mut Burst) -> usize {
        let received = self.rx.rx_burst(coming);
        for mbuf in coming.take_front(received) {
            // A packet whose lengths contradict each other is none of ours.
            self.check.check(&bytes_of(&mbuf).unwrap_or_default());
        }
        self.returned += received as u64;
        received
    }
}

/// A packet of `frame`'s bytes; none if the pool is empty.
fn lay(pool: &MbufPool, frame: &[u8], cut: Cut) -> Option<Mbuf> {
    match cut {
        Cut::Segments(len) => packet(pool, frame, len),
        Cut::LittleHeadroom => {
            let mut mbuf = pool.alloc()?;
            if frame.len() > mbuf.tailroom() {
                return packet(pool, frame, usize::MAX);
            }
            mbuf.receive(LITTLE_HEADROOM, PORT_NONE, frame.len() as u16);
            mbuf.data().write(frame);
            Some(mbuf)
        }
        Cut::Whole => packet(pool, frame, usize::MAX),
    }
}
