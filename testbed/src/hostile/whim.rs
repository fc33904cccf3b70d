//! Where a liar's decisions come from.

use crate::frame::SplitMix;

/// Numbers from a seed, or from the bytes that a fuzzer chose.
pub struct Whim(Source);

enum Source {
    Seed(SplitMix),
    /// The last byte comes first. Behind the end all numbers are 0.
    Bytes(Vec<u8>),
}

impl From<u64> for Whim {
    fn from(seed: u64) -> Self {
        Self(Source::Seed(SplitMix(seed)))
    }
}

impl From<&[u8]> for Whim {
    fn from(bytes: &[u8]) -> Self {
        Self(Source::Bytes(bytes.iter().rev().copied().collect()))
    }
}

impl Whim {
    pub(super) fn next(&mut self) -> u64 {
        match &mut self.0 {
            Source::Seed(random) => random.next(),
            Source::Bytes(bytes) => number(bytes, 8),
        }
    }

    /// A number below `n`, or 0 if there is none.
    pub(super) fn below(&mut self, n: u32) -> u32 {
        match &mut self.0 {
            Source::Seed(random) => random.below(n),
            // As few bytes as it takes, so that a change of one is a change of one decision.
            Source::Bytes(bytes) => {
                let len = n.saturating_sub(1).checked_ilog2().map_or(0, |bits| bits as usize / 8 + 1);
                (number(bytes, len) % u64::from(n.max(1))) as u32
            }
        }
    }
}

/// The next `len` bytes as a number.
fn number(bytes: &mut Vec<u8>, len: usize) -> u64 {
    (0..len).fold(0, |number, _| number << 8 | u64::from(bytes.pop().unwrap_or(0)))
}
