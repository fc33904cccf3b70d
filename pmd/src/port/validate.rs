//! Queue-set-up rules (DPDK's virtio PMD, with a maximum of 32768 descriptors).

use super::{PortError, RxQueueConfig, TxQueueConfig};
use crate::rx::STAGE_GROUP_MIN;

/// The least number of descriptors that may be asked for, unless the ring is smaller.
pub const QUEUE_SIZE_MIN: u16 = 32;

/// Checks `size` against a ring of `ring` descriptors: 0 is all, more than all is all.
fn size(port: &str, size: u16, ring: u16) -> Result<u16, PortError> {
    let min = QUEUE_SIZE_MIN.min(ring);
    match size {
        0 => Ok(ring),
        size if size < min => Err(range(port, "queue size", size, min, ring)),
        size => Ok(size.min(ring)),
    }
}

fn range(port: &str, what: &'static str, value: u16, min: u16, max: u16) -> PortError {
    PortError::Range { port: port.to_owned(), what, value: value.into(), min: min.into(), max: max.into() }
}

/// A quarter of the ring, 1 to 32.
fn default_thresh(ring: u16) -> u16 {
    (ring / 4).clamp(1, 32)
}

/// Descriptors and refill threshold of a receive queue on a ring of `ring` descriptors. The threshold is judged by the ring, as in
/// DPDK, but never more than the descriptors in use, for more are never free.
///
/// # Errors
/// [`PortError`] for a number outside its limits.
pub fn rx(port: &str, config: &RxQueueConfig, ring: u16) -> Result<(u16, u16), PortError> {
    let size = size(port, config.size, ring)?;
    let thresh = config.free_thresh;
    if thresh == 0 {
        return Ok((size, default_thresh(ring)));
    }
    // On a ring that has no group of buffers to spare, any number will do.
    let of = if usize::from(ring) > STAGE_GROUP_MIN { STAGE_GROUP_MIN as u16 } else { 1 };
    if thresh >= ring {
        return Err(range(port, "rx_free_thresh", thresh, of, ring - 1));
    }
    if !thresh.is_multiple_of(of) {
        let (value, of) = (thresh.into(), of.into());
        return Err(PortError::Multiple { port: port.to_owned(), what: "rx_free_thresh", value, of });
    }
    Ok((size, thresh.min(size)))
}

/// Descriptors and reap threshold of a transmit queue on a ring of `ring` descriptors.
///
/// # Errors
/// [`PortError`] for a number outside its limits.
pub fn tx(port: &str, config: &TxQueueConfig, ring: u16) -> Result<(u16, u16), PortError> {
    let size = size(port, config.size, ring)?;
    // Below the ring less 3; the smallest rings have 1.
    let max = ring.saturating_sub(4).max(1);
    match config.free_thresh {
        0 => Ok((size, default_thresh(ring))),
        thresh if thresh > max => Err(range(port, "tx_free_thresh", thresh, 1, max)),
        thresh => Ok((size, thresh)),
    }
}
