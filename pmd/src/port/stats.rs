//! What a queue counts, under one set of names for text, JSON and library.

use std::sync::Arc;

use crate::shared::Counter;

/// Why a frame, or a claim of the peer, was refused. Each has its own counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Fault {
    /// No mbuf when one was wanted: buffers not offered to the device, or frames left with the guest for now.
    NoMbuf,
    /// A frame: the pool ran dry while its segments were copied.
    Starved,
    /// A frame: fewer bytes than its virtio header and an Ethernet header.
    Short,
    /// A frame: more bytes than the receiver can take.
    Long,
    /// A frame: the other side has no buffer for it.
    NoBuffer,
    /// A frame: more segments than the ring has descriptors.
    ManySegments,
    /// A frame: its `num_buffers` is impossible, or its buffers are not what it says.
    BadSegments,
    /// A frame: a buffer that the peer says holds more than it can.
    BadLength,
    /// A chain: it begins or goes on where there is no descriptor, loops, or is longer than the ring.
    BadChain,
    /// A chain: an address outside the peer's memory.
    BadAddress,
    /// A chain: a descriptor that may not be read (or written) where it must be.
    BadFlags,
    /// A chain: an indirect table that is nested, empty, too long, or not a whole number of descriptors.
    BadIndirect,
    /// A claim: a ring index ahead of anything that can be true.
    BadIndex,
    /// A claim: the id of a buffer that the peer does not hold.
    BadId,
}

/// Number of [`Fault`]s.
pub const FAULTS: usize = 14;

impl Fault {
    /// All of them.
    pub const ALL: [Fault; FAULTS] = [
        Fault::NoMbuf,
        Fault::Starved,
        Fault::Short,
        Fault::Long,
        Fault::NoBuffer,
        Fault::ManySegments,
        Fault::BadSegments,
        Fault::BadLength,
        Fault::BadChain,
        Fault::BadAddress,
        Fault::BadFlags,
        Fault::BadIndirect,
        Fault::BadIndex,
        Fault::BadId,
    ];

    /// Its name in statistics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Fault::NoMbuf => "no_mbuf",
            Fault::Starved => "starved",
            Fault::Short => "short",
            Fault::Long => "long",
            Fault::NoBuffer => "no_buffer",
            Fault::ManySegments => "many_segments",
            Fault::BadSegments => "bad_segments",
            Fault::BadLength => "bad_length",
            Fault::BadChain => "bad_chain",
            Fault::BadAddress => "bad_address",
            Fault::BadFlags => "bad_flags",
            Fault::BadIndirect => "bad_indirect",
            Fault::BadIndex => "bad_index",
            Fault::BadId => "bad_id",
        }
    }

    /// Whether one count is one frame lost. The others count claims that had no frame behind them, and mbufs that were missing
    /// without a frame being lost.
    #[must_use]
    pub const fn is_frame(self) -> bool {
        !matches!(self, Fault::NoMbuf | Fault::BadIndex | Fault::BadId)
    }
}

/// Frame sizes that are counted, each bin up to and including the length given (DPDK's bins).
pub const BINS: [(&str, u32); 8] = [
    ("undersize", 63),
    ("64", 64),
    ("65_127", 127),
    ("128_255", 255),
    ("256_511", 511),
    ("512_1023", 1023),
    ("1024_1518", 1518),
    ("1519_max", u32::MAX),
];

/// One queue's counters. The worker that polls the queue is the only writer.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct QueueStats {
    /// Frames delivered (Rx) or accepted (Tx).
    pub packets: Counter,
    /// Their bytes, without FCS and virtio header.
    pub bytes: Counter,
    /// Kicks or interrupts sent.
    pub kicks: Counter,
    /// Kicks or interrupts that the peer did not want.
    pub kicks_suppressed: Counter,
    /// Sent mbufs that went home one by one: chained, shared, attached, or of another pool than those beside them.
    pub slow_frees: Counter,
    /// Frames by size, see [`BINS`].
    pub bins: [Counter; 8],
    /// What was refused, indexed by [`Fault`].
    pub faults: [Counter; FAULTS],
}

impl QueueStats {
    /// A fresh set.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Counts one refusal.
    #[inline(always)]
    pub fn fault(&self, fault: Fault) {
        self.faults[fault as usize].add(1);
    }

    /// Counts one frame's size.
    #[inline(always)]
    pub fn size(&self, len: usize) {
        // 0..=63, 64, 65..=127, then powers of two up to 1023, and the two large bins.
        let bin = match len {
            64 => 1,
            0..64 => 0,
            65..1024 => (len.ilog2() as usize) - 4,
            1024..1519 => 6,
            _ => 7,
        };
        self.bins[bin].add(1);
    }

    /// The present values.
    #[must_use]
    pub fn snapshot(&self) -> Stats {
        Stats {
            packets: self.packets.get(),
            bytes: self.bytes.get(),
            kicks: self.kicks.get(),
            kicks_suppressed: self.kicks_suppressed.get(),
            slow_frees: self.slow_frees.get(),
            bins: std::array::from_fn(|i| self.bins[i].get()),
            faults: std::array::from_fn(|i| self.faults[i].get()),
        }
    }

    /// Starts again from 0. Counts of a burst that runs meanwhile may survive or vanish.
    pub fn reset(&self) {
        let QueueStats { packets, bytes, kicks, kicks_suppressed, slow_frees, bins, faults } = self;
        [packets, bytes, kicks, kicks_suppressed, slow_frees]
            .into_iter()
            .chain(bins)
            .chain(faults)
            .for_each(Counter::reset);
    }
}

/// A queue's, or several queues', counters at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// See [`QueueStats::packets`].
    pub packets: u64,
    /// See [`QueueStats::bytes`].
    pub bytes: u64,
    /// See [`QueueStats::kicks`].
    pub kicks: u64,
    /// See [`QueueStats::kicks_suppressed`].
    pub kicks_suppressed: u64,
    /// See [`QueueStats::slow_frees`].
    pub slow_frees: u64,
    /// See [`QueueStats::bins`].
    pub bins: [u64; 8],
    /// See [`QueueStats::faults`].
    pub faults: [u64; FAULTS],
}

impl Stats {
    /// How often `fault` was counted.
    #[must_use]
    pub fn fault(&self, fault: Fault) -> u64 {
        self.faults[fault as usize]
    }

    /// Frames lost, whatever the reason.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        Fault::ALL.iter().filter(|fault| fault.is_frame()).map(|&fault| self.fault(fault)).sum()
    }

    /// Adds another queue's.
    pub fn add(&mut self, other: &Stats) {
        self.packets += other.packets;
        self.bytes += other.bytes;
        self.kicks += other.kicks;
        self.kicks_suppressed += other.kicks_suppressed;
        self.slow_frees += other.slow_frees;
        for (sum, n) in self.bins.iter_mut().zip(other.bins) {
            *sum += n;
        }
        for (sum, n) in self.faults.iter_mut().zip(other.faults) {
            *sum += n;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_falls_into_the_first_bin_that_reaches_it() {
        for len in 0..9001 {
            let stats = QueueStats::new();
            stats.size(len);
            let expected = BINS.iter().position(|bin| len as u32 <= bin.1).unwrap();
            assert_eq!(stats.snapshot().bins[expected], 1, "length {len}");
        }
    }

    #[test]
    fn every_fault_has_its_own_name_and_counter() {
        for (i, fault) in Fault::ALL.iter().enumerate() {
            assert_eq!(*fault as usize, i);
            assert_eq!(Fault::ALL.iter().filter(|other| other.name() == fault.name()).count(), 1);
        }
    }
}
