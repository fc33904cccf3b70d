//! What the benchmarks have in common. `cargo bench` runs all of them; `cargo bench -- --quick` in under 5 minutes.
//!
//! | benchmark | what it measures |
//! |---|---|
//! | `mempool` | bulk get and put, with and without a worker's cache |
//! | `mbuf` | bulk alloc and free; a generator's choices: one by one or bulk, small or large cache, one line or two |
//! | `rings` | the device's ring work without copying; each end of each path, alone |
//! | `pair` | both ends of each path, back to back on one core |
//!
//! Rates are per packet (or object), 64-byte frames, bursts of 32, everything in the nearest caches. `benches/mempool.rs` is the
//! one file here that may hold `unsafe`: it puts objects back without an owner.

use std::time::Duration;

use criterion::Criterion;
use pmd::mbuf::MbufPool;
use pmd::port::Burst;
use pmd::virtio::spec::feature::VERSION_1;
use testbed::rings::{Direction, Pair, Setup};

/// Packets in a burst.
pub const BURST: usize = 32;
/// Bytes of a frame.
pub const FRAME_LEN: usize = 64;

/// Short enough for all benchmarks to end in a few minutes.
#[must_use]
pub fn criterion() -> Criterion {
    Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1))
        .sample_size(30)
        .configure_from_args()
}

/// A ring of 256, and pools that neither run dry nor miss their caches.
#[must_use]
pub fn setup(features: u64) -> Setup {
    let mut setup = Setup::new(features | VERSION_1);
    for pool in [&mut setup.guest, &mut setup.host] {
        (pool.count, pool.cache_size) = (2048, 512);
    }
    setup
}

/// A pair for each row of the driver's path table for that direction.
///
/// # Panics
/// If there is no memory for them.
pub fn pairs(direction: Direction) -> impl Iterator<Item = Pair> {
    let rows: Vec<u64> = match direction {
        Direction::ToGuest => pmd::virtio::paths::RX_PATHS.iter().map(|row| row.with).collect(),
        Direction::FromGuest => pmd::virtio::paths::TX_PATHS.iter().map(|row| row.with).collect(),
    };
    rows.into_iter().map(move |features| Pair::new(direction, &setup(features)).expect("memory for a pair"))
}

/// Fills `burst` up with frames of `pool`.
///
/// # Panics
/// If the pool has run dry: something keeps mbufs.
#[inline(always)]
pub fn generate(burst: &mut Burst, pool: &MbufPool) {
    let start = burst.len();
    burst.fill(pool, burst.room()).expect("mbufs for a burst");
    for mbuf in &mut burst.as_mut_slice()[start..] {
        assert!(mbuf.set_len(FRAME_LEN));
    }
}
