//! The rings of a queue pair, and frames through them.

use std::time::{Duration, Instant};

use pmd::mbuf::MbufPool;
use pmd::path::select;
use pmd::port::{Burst, QueueStats, RxBurst, TxBurst};
use pmd::virtio::Doorbell;
use pmd::virtio::paths::{RX_PATHS, RxParts, TX_PATHS, TxParts};
use pmd::virtio::receive::RxParams;
use pmd::virtio::ring::Layout;
use pmd::virtio::spec::{feature, header_len};
use pmd::virtio::transmit::TxParams;

use crate::frame::{FrameCheck, FrameGen, Macs, Report, Stream};
use crate::ports::{Memory, wait_until};
use crate::rings::{PACKED_BASE, bytes_of, packet};

/// Packets at a time.
const BURST: usize = 32;
/// How long nothing may move before a run ends.
const STILL_MAX: Duration = Duration::from_secs(3);

/// A backend that polls needs no kicks.
struct Polled;

impl Doorbell for Polled {
    fn ring(&self) {}
}

/// A queue pair's driver end, which knows of no transport, and a stream that is sent through it and expected back.
pub struct Driver {
    /// The receive ring, and the transmit ring: vrings 0 and 1.
    pub layouts: [Layout; 2],
    /// The features that the rings are made for.
    pub features: u64,
    /// Descriptors of each.
    pub size: u16,
    rx: Box<dyn RxBurst>,
    tx: Box<dyn TxBurst>,
    pool: MbufPool,
    generator: FrameGen,
    check: FrameCheck,
    going: Burst,
    coming: Burst,
    frame: Vec<u8>,
    returned: u64,
    /// Frames that were under way when a backend went away.
    lost: u64,
}

impl Driver {
    /// Rings of `size` in `memory` for `features`, and frames of `stream`.
    ///
    /// # Panics
    /// If the memory is too small, or no path fits.
    #[must_use]
    pub fn new(features: u64, size: u16, memory: &Memory, stream: Stream) -> Self {
        let layouts = [(); 2].map(|()| Layout::new(&memory.arena, size, features).expect("room for a ring"));
        let header_len = header_len(features) as u16;
        let free_thresh = (size / 4).clamp(1, 32);
        let rx = (select(RX_PATHS, features, None).expect("a path").make)(RxParts {
            layout: &layouts[0],
            params: RxParams { limit: size, header_len, room: memory.pool.room(), port: 0 },
            doorbell: Box::new(Polled),
            pool: memory.pool.clone(),
            free_thresh,
            stats: QueueStats::new(),
        });
        let tx = (select(TX_PATHS, features, None).expect("a path").make)(TxParts {
            layout: &layouts[1],
            params: TxParams { limit: size, header_len, indirect: features & feature::INDIRECT_DESC != 0 },
            doorbell: Box::new(Polled),
            arena: &memory.arena,
            free_thresh,
            stats: QueueStats::new(),
        });
        Self {
            layouts,
            features,
            size,
            rx,
            tx: tx.expect("room beside a ring"),
            pool: memory.pool.clone(),
            generator: FrameGen::new(stream.clone()),
            check: FrameCheck::new(stream, Macs::Kept),
            going: Burst::new(BURST),
            coming: Burst::new(BURST),
            frame: Vec::new(),
            returned: 0,
            lost: 0,
        }
    }

    /// Where fresh rings begin.
    #[must_use]
    pub fn fresh_base(&self) -> u32 {
        if self.features & feature::RING_PACKED != 0 { PACKED_BASE } else { 0 }
    }

    /// Sends `frames` more, at most `window` of them under way, until all are back or nothing has moved for three seconds;
    /// whether all came back. `interfere` is called before each round with its number.
    pub fn run(&mut self, frames: u64, window: u64, mut interfere: impl FnMut(u64)) -> bool {
        let end = self.generator.made() + frames;
        let (mut round, mut still_since) = (0, Instant::now());
        while still_since.elapsed() < STILL_MAX {
            interfere(round);
            round += 1;
            if self.round(end.min(self.returned + self.lost + window)) > 0 {
                still_since = Instant::now();
            } else {
                std::thread::yield_now();
            }
            if self.returned + self.lost >= end {
                return true;
            }
        }
        false
    }

    /// Sends up to frame `end`, and receives, once; returns how many packets moved.
    pub fn round(&mut self, end: u64) -> usize {
        while self.generator.made() < end && self.going.room() > 0 {
            self.generator.write_next(&mut self.frame);
            let Some(mbuf) = packet(&self.pool, &self.frame, usize::MAX) else {
                self.generator.back();
                break;
            };
            // There is room, see the condition.
            drop(self.going.push(mbuf));
        }
        let sent = self.tx.tx_burst(&mut self.going);
        self.tx.reap();
        let received = self.rx.rx_burst(&mut self.coming);
        for mbuf in self.coming.take_front(received) {
            self.check.check(&bytes_of(&mbuf).unwrap_or_default());
        }
        self.returned += received as u64;
        sent + received
    }

    /// Lets traffic flow for so long, with at most `window` frames under way, whether or not anything comes back.
    pub fn flow(&mut self, window: u64, duration: Duration) {
        let start = Instant::now();
        while start.elapsed() < duration {
            if self.round(self.returned + self.lost + window) == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Receives until no more than `most` frames are under way, or that takes too long, and then until nothing has come for `still`;
    /// takes what has not come back for lost, and returns how many frames those are.
    pub fn write_off(&mut self, most: u64, still: Duration) -> u64 {
        wait_until(|| self.round(0) == 0 && self.under_way() <= most);
        let mut still_since = Instant::now();
        while still_since.elapsed() < still {
            if self.round(0) > 0 {
                still_since = Instant::now();
            }
        }
        let lost = self.under_way();
        self.lost += lost;
        lost
    }

    /// Frames that the ring has taken and that have not come back.
    fn under_way(&self) -> u64 {
        (self.made() - self.going.len() as u64).saturating_sub(self.returned + self.lost)
    }

    /// What came back.
    #[must_use]
    pub fn report(&self) -> Report {
        self.check.report()
    }

    /// Frames made so far.
    #[must_use]
    pub fn made(&self) -> u64 {
        self.generator.made()
    }
}
