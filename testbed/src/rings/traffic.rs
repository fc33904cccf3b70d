//! Frames through a pair, and the judgement of what arrives.

use pmd::mbuf::{Mbuf, MbufPool};
use pmd::port::Burst;

use super::Pair;
use crate::frame::{CheckError, FrameCheck, FrameGen, Macs, Stream};

/// A packet of `frame`'s bytes, in segments of at most `segment_len` bytes (or of what an mbuf holds); none if the pool is
/// empty.
#[must_use]
pub fn packet(pool: &MbufPool, frame: &[u8], segment_len: usize) -> Option<Mbuf> {
    let mut head: Option<Mbuf> = None;
    let mut rest = frame;
    while head.is_none() || !rest.is_empty() {
        let mut segment = pool.alloc()?;
        let (data, behind) = rest.split_at(rest.len().min(segment_len.max(1)).min(segment.tailroom()));
        if !segment.set_len(data.len()) {
            return None;
        }
        segment.data().write(data);
        rest = behind;
        match &mut head {
            None => head = Some(segment),
            Some(head) => head.chain(segment).ok()?,
        }
    }
    head
}

/// The bytes of a packet, and whether its lengths agree with its segments'.
#[must_use]
pub fn bytes_of(mbuf: &Mbuf) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(mbuf.pkt_len());
    let mut segments = 0;
    for segment in mbuf.segments() {
        let start = bytes.len();
        bytes.resize(start + segment.data().len(), 0);
        segment.data().read(&mut bytes[start..]);
        segments += 1;
    }
    (bytes.len() == mbuf.pkt_len() && segments == usize::from(mbuf.nb_segs())).then_some(bytes)
}

/// A stream of frames that is sent through a [`Pair`] and checked byte by byte where it comes out.
pub struct Traffic {
    generator: FrameGen,
    check: FrameCheck,
    segment_len: usize,
    frame: Vec<u8>,
    going: Burst,
    coming: Burst,
}

impl Traffic {
    /// Frames of `stream`, each cut into segments of at most `segment_len` bytes, sent and received in bursts of up to
    /// `burst`.
    #[must_use]
    pub fn new(stream: &Stream, segment_len: usize, burst: usize) -> Self {
        Self {
            generator: FrameGen::new(stream.clone()),
            check: FrameCheck::new(stream.clone(), Macs::Kept),
            segment_len,
            frame: Vec::new(),
            going: Burst::new(burst),
            coming: Burst::new(burst),
        }
    }

    /// Fills the burst to go with up to `count` new frames and sends it; returns how many packets the sender took. What it
    /// left goes first next time.
    pub fn send(&mut self, pair: &mut Pair, count: usize) -> usize {
        for _ in 0..count.min(self.going.room()) {
            self.generator.write_next(&mut self.frame);
            let Some(mbuf) = packet(pair.sender_pool(), &self.frame, self.segment_len) else {
                // The pool is empty: this frame is made again when the ring has given some mbufs back.
                self.generator.back();
                pair.sender.queue.reap();
                break;
            };
            // There is room, see the loop's bound.
            drop(self.going.push(mbuf));
        }
        pair.sender.queue.tx_burst(&mut self.going)
    }

    /// Receives one burst and checks every frame; returns how many came.
    pub fn receive(&mut self, pair: &mut Pair) -> usize {
        let received = pair.receiver.queue.rx_burst(&mut self.coming);
        for mbuf in self.coming.take_front(received) {
            // A packet whose lengths contradict each other is none of ours.
            self.check.check(&bytes_of(&mbuf).unwrap_or_default());
        }
        received
    }

    /// Frames made that the sender has not taken yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.going.len()
    }

    /// Frames made so far.
    #[must_use]
    pub fn made(&self) -> u64 {
        self.generator.made()
    }

    /// Sends `count` frames, receiving after each burst, until all are sent and nothing more comes; false if that does not end.
    #[must_use]
    pub fn run(&mut self, pair: &mut Pair, count: u64) -> bool {
        let end = self.made() + count;
        let mut idle = 0;
        while idle < IDLE_ROUNDS_MAX {
            let left = usize::try_from(end - self.made()).unwrap_or(usize::MAX);
            let moved = self.send(pair, left) + self.receive(pair);
            if moved == 0 && self.made() == end && self.waiting() == 0 {
                return true;
            }
            idle = if moved == 0 { idle + 1 } else { 0 };
        }
        false
    }

    /// Checks that all frames made came, whole and in order, but `dropped` that somebody counted.
    ///
    /// # Errors
    /// [`CheckError`] with the counts, if not.
    pub fn finish(&self, dropped: u64) -> Result<(), CheckError> {
        self.check.finish(self.made(), dropped)
    }
}

/// Rounds without progress after which [`Traffic::run`] gives up.
const IDLE_ROUNDS_MAX: usize = 1000;
