//! The path tables: which rings there are, best first.

use std::sync::Arc;

use super::Doorbell;
use super::spec::feature::{IN_ORDER, MRG_RXBUF, RING_PACKED};
use super::split::{Layout, RxParams, SplitRx};
use super::split_tx::{SplitTx, TxParams};
use crate::mbuf::MbufPool;
use crate::mem::{Arena, MemError};
use crate::path::Row;
use crate::port::{QueueStats, RxBurst, TxBurst};
use crate::rx::{RxQueue, RxRing};
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

fn split_rx<const ORDERED: bool, const MERGEABLE: bool>(parts: RxParts<'_>) -> Box<dyn RxBurst>
where
    SplitRx<ORDERED, MERGEABLE>: RxRing,
{
    let ring = SplitRx::<ORDERED, MERGEABLE>::new(parts.layout, parts.params, parts.doorbell);
    Box::new(RxQueue::new(ring, parts.pool, parts.free_thresh, parts.stats))
}

fn split_tx<const ORDERED: bool>(parts: TxParts<'_>) -> Result<Box<dyn TxBurst>, MemError> {
    let ring = SplitTx::<ORDERED>::new(parts.layout, parts.params, parts.arena, parts.doorbell)?;
    Ok(Box::new(TxQueue::new(ring, parts.free_thresh, parts.stats)))
}

/// Receive paths.
pub static RX_PATHS: &[Row<MakeRx>] = &[
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
    Row { name: "split-in-order", with: IN_ORDER, without: RING_PACKED, make: split_tx::<true> },
    Row { name: "split", with: 0, without: RING_PACKED | IN_ORDER, make: split_tx::<false> },
];
