//! Which way a ring carries frames, and the features under which it does.

use backend::queue::paths::{FROM_GUEST_PATHS, TO_GUEST_PATHS};
use pmd::path::Row;
use pmd::virtio::paths::{RX_PATHS, TX_PATHS};
use pmd::virtio::spec::feature;

/// Which way a ring carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the device to the driver.
    ToGuest,
    /// From the driver to the device.
    FromGuest,
}

impl Direction {
    /// Both.
    pub const ALL: [Direction; 2] = [Direction::ToGuest, Direction::FromGuest];

    /// Feature sets that between them choose every row of the path tables, with each header length and, where it matters,
    /// with and without indirect descriptors.
    #[must_use]
    pub fn feature_sets(self) -> Vec<u64> {
        let (driver, device): (Vec<u64>, Vec<u64>) = match self {
            Direction::ToGuest => (needs(RX_PATHS), needs(TO_GUEST_PATHS)),
            Direction::FromGuest => (needs(TX_PATHS), needs(FROM_GUEST_PATHS)),
        };
        let extras: &[u64] = match self {
            Direction::ToGuest => &[0, feature::VERSION_1],
            Direction::FromGuest => &[0, feature::VERSION_1, feature::VERSION_1 | feature::INDIRECT_DESC],
        };
        let mut sets: Vec<u64> =
            driver.iter().chain(&device).flat_map(|with| extras.iter().map(move |e| with | e)).collect();
        sets.sort_unstable();
        sets.dedup();
        sets
    }

    /// Each of them without and with `EVENT_IDX`.
    #[must_use]
    pub fn event_sets(self) -> Vec<u64> {
        self.feature_sets().into_iter().flat_map(|features| [features, features | feature::EVENT_IDX]).collect()
    }

    /// Those of split rings, for tests that build such a ring by hand.
    #[must_use]
    pub fn split_sets(self) -> Vec<u64> {
        self.feature_sets().into_iter().filter(|features| features & feature::RING_PACKED == 0).collect()
    }

    /// Those of packed rings, likewise.
    #[must_use]
    pub fn packed_sets(self) -> Vec<u64> {
        self.feature_sets().into_iter().filter(|features| features & feature::RING_PACKED != 0).collect()
    }
}

fn needs<M>(rows: &[Row<M>]) -> Vec<u64> {
    rows.iter().map(|row| row.with).collect()
}
