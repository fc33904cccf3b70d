//! The path tables: which rings there are, best first.

use std::sync::Arc;

use super::Doorbell;
use super::packed::PackedRing;
use super::receive::{RxParams, VirtioRx};
use super::ring::{DriverRing, Layout};
use super::spec::feature::{IN_ORDER, MRG_RXBUF, RING_PACKED};
use super::split::SplitRing;
use super::transmit::{TxParams, VirtioTx};
use crate::mbuf::MbufPool;
use crate::mem::{Arena, MemError};
use crate::path::Row;
use crate::port::{QueueStats, RxBurst, TxBurst};
use crate::rx::RxQueue;
use crate::tx::TxQueue;

/// What a receive path is made from.
pub struct RxParts<'a> {
    /// The ring's memory.
    pub layout: &'a Layout,
    /// Sizes and port number.
    pub params: RxParams,
    /// How to kick.
    pub doorbell: Box<dyn Doorbell>,
    /// Where buffers come from.
    pub pool: MbufPool,
    /// Free slots that make a refill worthwhile.
    pub free_thresh: u16,
    /// The queue's counters.
    pub stats: Arc<QueueStats>,
}

/// What a transmit path is made from.
pub struct TxParts<'a> {
    /// The ring's memory.
    pub layout: &'a Layout,
    /// Sizes.
    pub params: TxParams,
    /// How to kick.
    pub doorbell: Box<dyn Doorbell>,
    /// Where headers and indirect tables go.
    pub arena: &'a Arc<Arena>,
    /// Free descriptors below which finished packets are reaped.
    pub free_thresh: u16,
    /// The queue's counters.
    pub stats: Arc<QueueStats>,
}

/// Makes a receive queue.
pub type MakeRx = fn(RxParts<'_>) -> Box<dyn RxBurst>;
/// Makes a transmit queue.
pub type MakeTx = fn(TxParts<'_>) -> Result<Box<dyn TxBurst>, MemError>;

fn rx<R: DriverRing + 'static, const MERGEABLE: bool>(
    ring: R,
    params: RxParams,
    pool: MbufPool,
    free_thresh: u16,
    stats: Arc<QueueStats>,
) -> Box<dyn RxBurst> {
    Box::new(RxQueue::new(VirtioRx::<R, MERGEABLE>::new(ring, params), pool, free_thresh, stats))
}

fn split_rx<const ORDERED: bool, const MERGEABLE: bool>(parts: RxParts<'_>) -> Box<dyn RxBurst> {
    let ring = SplitRing::<ORDERED>::new(parts.layout, parts.doorbell);
    rx::<_, MERGEABLE>(ring, parts.params, parts.pool, parts.free_thresh, parts.stats)
}

fn packed_rx<const ORDERED: bool, const MERGEABLE: bool>(parts: RxParts<'_>) -> Box<dyn RxBurst> {
    let ring = PackedRing::<ORDERED>::new(parts.layout, parts.doorbell);
    rx::<_, MERGEABLE>(ring, parts.params, parts.pool, parts.free_thresh, parts.stats)
}

fn tx<R: DriverRing + 'static>(
    ring: R,
    params: TxParams,
    arena: &Arc<Arena>,
    free_thresh: u16,
    stats: Arc<QueueStats>,
) -> Result<Box<dyn TxBurst>, MemError> {
    Ok(Box::new(TxQueue::new(VirtioTx::new(ring, params, arena)?, free_thresh, stats)))
}

fn split_tx<const ORDERED: bool>(parts: TxParts<'_>) -> Result<Box<dyn TxBurst>, MemError> {
    let ring = SplitRing::<ORDERED>::new(parts.layout, parts.doorbell);
    tx(ring, parts.params, parts.arena, parts.free_thresh, parts.stats)
}

fn packed_tx<const ORDERED: bool>(parts: TxParts<'_>) -> Result<Box<dyn TxBurst>, MemError> {
    let ring = PackedRing::<ORDERED>::new(parts.layout, parts.doorbell);
    tx(ring, parts.params, parts.arena, parts.free_thresh, parts.stats)
}

/// Receive paths.
pub static RX_PATHS: &[Row<MakeRx>] = &[
    Row {
        name: "packed-in-order-mergeable",
        with: RING_PACKED | IN_ORDER | MRG_RXBUF,
        without: 0,
        make: packed_rx::<true, true>,
    },
    Row { name: "packed-in-order", with: RING_PACKED | IN_ORDER, without: MRG_RXBUF, make: packed_rx::<true, false> },
    Row { name: "packed-mergeable", with: RING_PACKED | MRG_RXBUF, without: IN_ORDER, make: packed_rx::<false, true> },
    Row { name: "packed", with: RING_PACKED, without: IN_ORDER | MRG_RXBUF, make: packed_rx::<false, false> },
    Row {
        name: "split-in-order-mergeable",
        with: IN_ORDER | MRG_RXBUF,
        without: RING_PACKED,
        make: split_rx::<true, true>,
    },
    Row { name: "split-in-order", with: IN_ORDER, without: RING_PACKED | MRG_RXBUF, make: split_rx::<true, false> },
    Row { name: "split-mergeable", with: MRG_RXBUF, without: RING_PACKED | IN_ORDER, make: split_rx::<false, true> },
    Row { name: "split", with: 0, without: RING_PACKED | IN_ORDER | MRG_RXBUF, make: split_rx::<false, false> },
];

/// Transmit paths.
pub static TX_PATHS: &[Row<MakeTx>] = &[
    Row { name: "packed-in-order", with: RING_PACKED | IN_ORDER, without: 0, make: packed_tx::<true> },
    Row { name: "packed", with: RING_PACKED, without: IN_ORDER, make: packed_tx::<false> },
    Row { name: "split-in-order", with: IN_ORDER, without: RING_PACKED, make: split_tx::<true> },
    Row { name: "split", with: 0, without: RING_PACKED | IN_ORDER, make: split_tx::<false> },
];
