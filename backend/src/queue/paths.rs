//! The path tables of the device end: which rings there are, best first.

use std::sync::Arc;

use pmd::mbuf::MbufPool;
use pmd::path::{Row, select};
use pmd::port::{QueueStats, RxBurst, TxBurst};
use pmd::virtio::spec::feature::{IN_ORDER, MRG_RXBUF, RING_PACKED};
use pmd::virtio::spec::header_len;

use super::config::{Position, QueueConfig};
use super::packed::PackedRing;
use super::split::SplitRing;
use crate::burst::{FromGuest, ToGuest};
use crate::error::Error;

/// What a queue that takes frames from a guest is made from.
pub struct FromGuestParts {
    /// The ring.
    pub config: QueueConfig,
    /// Where the queue leaves its position when it is dropped.
    pub position: Position,
    /// Where its mbufs come from.
    pub pool: MbufPool,
    /// The port number that they carry.
    pub port: u16,
    /// The queue's counters.
    pub stats: Arc<QueueStats>,
}

/// What a queue that brings frames to a guest is made from.
pub struct ToGuestParts {
    /// The ring.
    pub config: QueueConfig,
    /// Where the queue leaves its position when it is dropped.
    pub position: Position,
    /// The queue's counters.
    pub stats: Arc<QueueStats>,
}

/// Makes a queue that takes frames from a guest.
pub type MakeFromGuest = fn(FromGuestParts) -> Result<Box<dyn RxBurst>, Error>;
/// Makes a queue that brings frames to a guest.
pub type MakeToGuest = fn(ToGuestParts) -> Result<Box<dyn TxBurst>, Error>;

/// Paths that take frames from a guest.
pub static FROM_GUEST_PATHS: &[Row<MakeFromGuest>] = &[
    Row { name: "packed-in-order", with: RING_PACKED | IN_ORDER, without: 0, make: packed_from_guest::<true> },
    Row { name: "packed", with: RING_PACKED, without: IN_ORDER, make: packed_from_guest::<false> },
    Row { name: "split-in-order", with: IN_ORDER, without: RING_PACKED, make: split_from_guest::<true> },
    Row { name: "split", with: 0, without: RING_PACKED | IN_ORDER, make: split_from_guest::<false> },
];

/// Paths that bring frames to a guest.
pub static TO_GUEST_PATHS: &[Row<MakeToGuest>] = &[
    Row { name: "packed-mergeable", with: RING_PACKED | MRG_RXBUF, without: 0, make: packed_to_guest::<true> },
    Row { name: "packed", with: RING_PACKED, without: MRG_RXBUF, make: packed_to_guest::<false> },
    Row { name: "split-mergeable", with: MRG_RXBUF, without: RING_PACKED, make: split_to_guest::<true> },
    Row { name: "split", with: 0, without: RING_PACKED | MRG_RXBUF, make: split_to_guest::<false> },
];

/// The best queue for a guest's transmit ring, and its path's name.
///
/// # Errors
/// [`Error::Path`] if no path fits the features; [`Error::RingSize`] or [`Error::RingArea`] if the ring is impossible.
pub fn from_guest(parts: FromGuestParts) -> Result<(&'static str, Box<dyn RxBurst>), Error> {
    let row = select(FROM_GUEST_PATHS, parts.config.features, None)?;
    Ok((row.name, (row.make)(parts)?))
}

/// The best queue for a guest's receive ring, and its path's name.
///
/// # Errors
/// As [`from_guest`].
pub fn to_guest(parts: ToGuestParts) -> Result<(&'static str, Box<dyn TxBurst>), Error> {
    let row = select(TO_GUEST_PATHS, parts.config.features, None)?;
    Ok((row.name, (row.make)(parts)?))
}

fn split_from_guest<const BATCHED: bool>(parts: FromGuestParts) -> Result<Box<dyn RxBurst>, Error> {
    let header_len = header_len(parts.config.features);
    let ring = SplitRing::<BATCHED>::activate(parts.config, parts.position)?;
    Ok(Box::new(FromGuest::new(ring, parts.pool, header_len, parts.port, parts.stats)))
}

fn packed_from_guest<const BATCHED: bool>(parts: FromGuestParts) -> Result<Box<dyn RxBurst>, Error> {
    let header_len = header_len(parts.config.features);
    let ring = PackedRing::<BATCHED>::activate(parts.config, parts.position)?;
    Ok(Box::new(FromGuest::new(ring, parts.pool, header_len, parts.port, parts.stats)))
}

// Towards the guest, one completion a chain: the driver needs to know how much of each buffer was filled.

fn split_to_guest<const MERGEABLE: bool>(parts: ToGuestParts) -> Result<Box<dyn TxBurst>, Error> {
    let header_len = header_len(parts.config.features);
    let ring = SplitRing::<false>::activate(parts.config, parts.position)?;
    Ok(Box::new(ToGuest::<_, MERGEABLE>::new(ring, header_len, parts.stats)))
}

fn packed_to_guest<const MERGEABLE: bool>(parts: ToGuestParts) -> Result<Box<dyn TxBurst>, Error> {
    let header_len = header_len(parts.config.features);
    let ring = PackedRing::<false>::activate(parts.config, parts.position)?;
    Ok(Box::new(ToGuest::<_, MERGEABLE>::new(ring, header_len, parts.stats)))
}
