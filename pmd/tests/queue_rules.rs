//! What may be asked of a queue: DPDK's rules for its virtio driver, and what they come to on rings too small for them.

use std::sync::Arc;

use pmd::mbuf::{MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::port::{RxQueueConfig, TxQueueConfig, validate};

fn pool() -> MbufPool {
    let config = MbufPoolConfig { name: "rules".into(), count: 1, cache_size: 0, ..MbufPoolConfig::default() };
    let arena: Arc<Arena> = Arena::new(config.arena_bytes(), &Pages::Plain).unwrap();
    MbufPool::new(&config, &arena).unwrap()
}

/// Descriptors and threshold, for (ring, size asked for, threshold asked for); none if refused.
fn rx(pool: &MbufPool, ring: u16, size: u16, free_thresh: u16) -> Option<(u16, u16)> {
    let config = RxQueueConfig { size, free_thresh, pool: pool.clone(), deferred_start: false };
    validate::rx("port", &config, ring).ok()
}

fn tx(ring: u16, size: u16, free_thresh: u16) -> Option<(u16, u16)> {
    validate::tx("port", &TxQueueConfig { size, free_thresh, ..TxQueueConfig::default() }, ring).ok()
}

#[test]
fn the_default_threshold_is_a_quarter_of_the_ring_1_to_32() {
    let pool = pool();
    for (ring, thresh) in [(2, 1), (3, 1), (5, 1), (8, 2), (31, 7), (127, 31), (128, 32), (250, 32), (32768, 32)] {
        assert_eq!(rx(&pool, ring, 0, 0), Some((ring, thresh)), "rx, ring {ring}");
        assert_eq!(tx(ring, 0, 0), Some((ring, thresh)), "tx, ring {ring}");
    }
}

#[test]
fn a_queue_has_32_descriptors_or_the_whole_of_a_smaller_ring() {
    let pool = pool();
    for (ring, size, expected) in [
        (256, 32, Some(32)),
        (256, 31, None),
        (256, 1000, Some(256)),
        (32, 32, Some(32)),
        (20, 20, Some(20)),
        (20, 19, None),
        (2, 2, Some(2)),
        (2, 1, None),
        (2, 32, Some(2)),
    ] {
        assert_eq!(rx(&pool, ring, size, 0).map(|(size, _)| size), expected, "rx, {size} of {ring}");
        assert_eq!(tx(ring, size, 0).map(|(size, _)| size), expected, "tx, {size} of {ring}");
    }
}

#[test]
fn an_rx_threshold_is_a_multiple_of_4_below_the_ring() {
    let pool = pool();
    for (ring, thresh, expected) in
        [(256, 252, Some(252)), (256, 256, None), (256, 6, None), (8, 4, Some(4)), (8, 8, None), (5, 4, Some(4))]
    {
        assert_eq!(rx(&pool, ring, 0, thresh).map(|(_, thresh)| thresh), expected, "{thresh} of {ring}");
    }
    // Rings too small for that.
    for (ring, thresh, expected) in [(4, 3, Some(3)), (4, 4, None), (2, 1, Some(1)), (2, 2, None)] {
        assert_eq!(rx(&pool, ring, 0, thresh).map(|(_, thresh)| thresh), expected, "{thresh} of {ring}");
    }
}

#[test]
fn an_rx_threshold_above_the_descriptors_in_use_comes_down_to_them() {
    // Otherwise the queue would wait for more free descriptors than it has, and never be filled.
    assert_eq!(rx(&pool(), 1024, 32, 100), Some((32, 32)));
}

#[test]
fn a_tx_threshold_is_below_the_ring_less_3() {
    for (ring, thresh, expected) in [
        (256, 252, Some(252)),
        (256, 253, None),
        (6, 2, Some(2)),
        (6, 3, None),
        (4, 1, Some(1)),
        (4, 2, None),
        (2, 1, Some(1)),
        (2, 2, None),
    ] {
        assert_eq!(tx(ring, 0, thresh).map(|(_, thresh)| thresh), expected, "{thresh} of {ring}");
    }
}
