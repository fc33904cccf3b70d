//! The checker: every byte, and every sequence number.

use std::collections::BTreeMap;
use std::fmt;

use super::FRAME_LEN_MIN;
use super::generate::{SEQUENCE_AT, STREAM_AT, Stream};

/// Most gaps remembered at a time. What lies in older gaps is lost for good, and a frame of them that still comes counts as
/// a duplicate.
const GAPS_MAX: usize = 4096;

/// What a forwarder may do to the Ethernet addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Macs {
    /// Nothing (`io`).
    Kept,
    /// Exchange source and destination (`macswap`).
    Swapped,
    /// Write what it likes there (`mac`).
    Any,
}

/// What became of one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Every byte right, in its turn.
    Good,
    /// Every byte right, but later than a frame sent after it.
    Late,
    /// Seen before.
    Duplicate,
    /// Of this stream, but a byte is wrong, missing or too many: the offset of the first.
    Corrupt(usize),
    /// Not of this stream.
    Foreign,
}

/// Frames by verdict.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// [`Verdict::Good`].
    pub good: u64,
    /// [`Verdict::Late`].
    pub late: u64,
    /// [`Verdict::Duplicate`].
    pub duplicate: u64,
    /// [`Verdict::Corrupt`].
    pub corrupt: u64,
    /// [`Verdict::Foreign`].
    pub foreign: u64,
    /// Sequence numbers below the highest seen that have not come.
    pub missing: u64,
    /// The first corrupt frame, if there was one: its sequence number as it stands in it, and the first wrong byte.
    pub first_corrupt: Option<(u64, usize)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { good, late, duplicate, corrupt, foreign, missing, first_corrupt } = self;
        write!(
            f,
            "good {good}, late {late}, duplicate {duplicate}, corrupt {corrupt}, foreign {foreign}, missing {missing}"
        )?;
        match first_corrupt {
            Some((sequence, byte)) => write!(f, "; the first corrupt one is frame {sequence}, at byte {byte}"),
            None => Ok(()),
        }
    }
}

/// A stream that did not arrive as it was sent.
#[derive(Debug, Clone, thiserror::Error)]
#[error("stream {stream}: of {sent} frames sent and {dropped} counted as dropped, {report}")]
pub struct CheckError {
    /// The stream's id.
    pub stream: u32,
    /// Frames sent, as the caller said.
    pub sent: u64,
    /// Frames dropped, as the caller said.
    pub dropped: u64,
    /// What came.
    pub report: Report,
}

/// Verifies the frames of one [`Stream`] as they come back.
#[derive(Debug, Clone)]
pub struct FrameCheck {
    stream: Stream,
    macs: Macs,
    expected: Vec<u8>,
    /// One above the highest sequence number seen.
    next: u64,
    /// Sequence numbers below `next` not seen yet: from the key up to, not including, the value.
    gaps: BTreeMap<u64, u64>,
    report: Report,
}

impl FrameCheck {
    /// A checker that expects `stream` from sequence number 0 on.
    #[must_use]
    pub fn new(stream: Stream, macs: Macs) -> Self {
        Self { stream, macs, expected: Vec::new(), next: 0, gaps: BTreeMap::new(), report: Report::default() }
    }

    /// Checks one frame as received, without FCS.
    pub fn check(&mut self, frame: &[u8]) -> Verdict {
        let verdict = self.judge(frame);
        let report = &mut self.report;
        match verdict {
            Verdict::Good => report.good += 1,
            Verdict::Late => report.late += 1,
            Verdict::Duplicate => report.duplicate += 1,
            Verdict::Corrupt(_) => report.corrupt += 1,
            Verdict::Foreign => report.foreign += 1,
        }
        verdict
    }

    /// The counts so far.
    #[must_use]
    pub fn report(&self) -> Report {
        self.report
    }

    /// Checks that of `sent` frames all came, whole and in order, but `dropped` that somebody counted.
    ///
    /// # Errors
    /// [`CheckError`] with the counts, if not.
    pub fn finish(&self, sent: u64, dropped: u64) -> Result<(), CheckError> {
        let report = self.report;
        let wrong = report.late + report.duplicate + report.corrupt + report.foreign;
        if wrong == 0 && report.good.checked_add(dropped) == Some(sent) && self.next <= sent {
            return Ok(());
        }
        Err(CheckError { stream: self.stream.id(), sent, dropped, report })
    }

    fn judge(&mut self, frame: &[u8]) -> Verdict {
        let (Some(sequence), Some(stream)) = (field::<8>(frame, SEQUENCE_AT), field::<4>(frame, STREAM_AT)) else {
            return Verdict::Foreign;
        };
        if frame.len() < FRAME_LEN_MIN || u32::from_be_bytes(stream) != self.stream.id() {
            return Verdict::Foreign;
        }
        let sequence = u64::from_be_bytes(sequence);
        if let Some(at) = self.first_difference(sequence, frame) {
            self.report.first_corrupt.get_or_insert((sequence, at));
            return Verdict::Corrupt(at);
        }
        self.place(sequence)
    }

    fn first_difference(&mut self, sequence: u64, frame: &[u8]) -> Option<usize> {
        self.stream.write(sequence, &mut self.expected);
        match self.macs {
            Macs::Kept => {}
            Macs::Swapped => {
                let (destination, source) = self.expected[..12].split_at_mut(6);
                destination.swap_with_slice(source);
            }
            Macs::Any => self.expected[..12].copy_from_slice(&frame[..12]),
        }
        if self.expected == frame {
            return None;
        }
        let same = self.expected.iter().zip(frame).take_while(|(a, b)| a == b).count();
        Some(same)
    }

    /// Where a good frame stands among those seen.
    fn place(&mut self, sequence: u64) -> Verdict {
        if sequence >= self.next {
            if sequence > self.next {
                self.gaps.insert(self.next, sequence);
                self.report.missing += sequence - self.next;
                if self.gaps.len() > GAPS_MAX {
                    self.gaps.pop_first();
                }
            }
            self.next = sequence.saturating_add(1);
            return Verdict::Good;
        }
        let Some((&start, &end)) = self.gaps.range(..=sequence).next_back().filter(|&(_, &end)| sequence < end) else {
            return Verdict::Duplicate;
        };
        self.gaps.remove(&start);
        if start < sequence {
            self.gaps.insert(start, sequence);
        }
        if sequence + 1 < end {
            self.gaps.insert(sequence + 1, end);
        }
        self.report.missing -= 1;
        Verdict::Late
    }
}

fn field<const N: usize>(frame: &[u8], at: usize) -> Option<[u8; N]> {
    frame.get(at..at + N)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::FRAME_LEN_MAX;

    fn stream() -> Stream {
        Stream::new(42, 5, 60..=300)
    }

    fn frame(sequence: u64) -> Vec<u8> {
        let mut frame = Vec::new();
        stream().write(sequence, &mut frame);
        frame
    }

    fn checked(sequences: &[u64]) -> FrameCheck {
        let mut check = FrameCheck::new(stream(), Macs::Kept);
        for &sequence in sequences {
            check.check(&frame(sequence));
        }
        check
    }

    #[test]
    fn a_stream_that_arrives_whole_passes() {
        assert!(checked(&[0, 1, 2, 3]).finish(4, 0).is_ok());
    }

    #[test]
    fn loss_is_an_error_unless_it_was_counted() {
        let check = checked(&[0, 1, 4]);
        assert_eq!(check.report().missing, 2);
        assert!(check.finish(5, 0).is_err());
        assert!(check.finish(5, 2).is_ok());
        assert!(checked(&[0, 1]).finish(3, 0).is_err(), "the last frame is missing");
    }

    #[test]
    fn more_than_was_sent_is_an_error() {
        assert!(checked(&[0, 2]).finish(2, 0).is_err());
    }

    #[test]
    fn a_duplicate_is_not_a_late_frame() {
        let check = checked(&[0, 2, 1, 1]);
        assert_eq!(check.report(), Report { good: 2, late: 1, duplicate: 1, ..Report::default() });
        assert!(check.finish(3, 0).is_err());
    }

    #[test]
    fn a_gap_is_filled_from_its_middle() {
        let check = checked(&[0, 9, 5, 1, 8, 5]);
        assert_eq!(check.report(), Report { good: 2, late: 3, duplicate: 1, missing: 5, ..Report::default() });
    }

    #[test]
    fn memory_stays_bounded_under_endless_loss() {
        let check = checked(&(0..2 * GAPS_MAX as u64 + 10).map(|n| 2 * n).collect::<Vec<_>>());
        assert_eq!(check.gaps.len(), GAPS_MAX);
        assert_eq!(check.report().missing, 2 * GAPS_MAX as u64 + 9);
    }

    #[test]
    fn swapped_addresses_pass_only_where_they_are_expected() {
        let mut swapped = frame(0);
        swapped[..12].rotate_left(6);
        assert_eq!(FrameCheck::new(stream(), Macs::Swapped).check(&swapped), Verdict::Good);
        assert_eq!(FrameCheck::new(stream(), Macs::Any).check(&swapped), Verdict::Good);
        assert_eq!(FrameCheck::new(stream(), Macs::Kept).check(&swapped), Verdict::Corrupt(5));
        assert_eq!(FrameCheck::new(stream(), Macs::Swapped).check(&frame(0)), Verdict::Corrupt(5));
    }

    #[test]
    fn other_streams_and_other_frames_are_foreign() {
        let mut other = Vec::new();
        stream().with_id(6).write(0, &mut other);
        let mut check = FrameCheck::new(stream(), Macs::Kept);
        assert_eq!(check.check(&other), Verdict::Foreign);
        assert_eq!(check.check(&[]), Verdict::Foreign);
        assert_eq!(check.check(&frame(0)[..59]), Verdict::Foreign);
        assert_eq!(check.report().foreign, 3);
    }

    #[test]
    fn the_error_names_the_stream_and_every_count() {
        let mut check = checked(&[0]);
        let mut broken = frame(1);
        broken[58] ^= 0x80;
        check.check(&broken);
        let said = check.finish(2, 0).unwrap_err().to_string();
        assert!(said.starts_with("stream 5: of 2 frames sent"), "{said}");
        for part in ["good 1", "corrupt 1", "the first corrupt one is frame 1, at byte 58"] {
            assert!(said.contains(part), "{part:?} is not in {said}");
        }
    }

    proptest! {
        #[test]
        fn no_changed_byte_goes_unseen(
            seed: u64, sequence in 0..u64::MAX, len in FRAME_LEN_MIN..=FRAME_LEN_MAX, at: prop::sample::Index, bit in 0..8_u8
        ) {
            let stream = Stream::new(seed, 1, len..=len);
            let mut frame = Vec::new();
            stream.write(sequence, &mut frame);
            prop_assert_eq!(FrameCheck::new(stream.clone(), Macs::Kept).check(&frame), Verdict::Good);
            let at = at.index(len);
            frame[at] ^= 1 << bit;
            let verdict = FrameCheck::new(stream, Macs::Kept).check(&frame);
            prop_assert!(matches!(verdict, Verdict::Corrupt(_) | Verdict::Foreign), "{:?}", verdict);
        }

        #[test]
        fn no_cut_or_grown_frame_goes_unseen(sequence in 0..u64::MAX, cut in 0..300_usize, grown in 1..64_usize) {
            let mut frame = frame(sequence);
            let mut check = FrameCheck::new(stream(), Macs::Kept);
            if cut < frame.len() {
                prop_assert_ne!(check.check(&frame[..cut]), Verdict::Good);
            }
            frame.resize(frame.len() + grown, 0);
            prop_assert_ne!(check.check(&frame), Verdict::Good);
        }

        #[test]
        fn any_order_of_arrival_is_told_exactly(order in prop::collection::vec(0..40_u64, 0..120)) {
            let report = checked(&order).report();
            let mut seen = std::collections::BTreeSet::new();
            let (mut good, mut late, mut duplicate) = (0, 0, 0);
            for &sequence in &order {
                let highest = seen.last().copied();
                match (seen.insert(sequence), highest) {
                    (false, _) => duplicate += 1,
                    (true, Some(highest)) if sequence < highest => late += 1,
                    (true, _) => good += 1,
                }
            }
            let missing = seen.last().map_or(0, |&highest| highest + 1 - seen.len() as u64);
            prop_assert_eq!(report, Report { good, late, duplicate, missing, ..Report::default() });
        }
    }
}
