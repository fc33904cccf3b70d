//! The sanity check, for tests and for hunting a driver that breaks mbufs.

use super::raw::RawMbuf;
use super::{Mbuf, MbufPool};

/// What is wrong with an mbuf.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MbufFault {
    /// It belongs to no pool.
    #[error("segment {segment} belongs to no pool")]
    NoPool {
        /// Which segment, from 0.
        segment: usize,
    },
    /// Its buffer has no address.
    #[error("the buffer of segment {segment} has no address")]
    NoAddress {
        /// Which segment, from 0.
        segment: usize,
    },
    /// Its buffer has no device address.
    #[error("the buffer of segment {segment} has no IOVA")]
    NoIova {
        /// Which segment, from 0.
        segment: usize,
    },
    /// It has no reference, or more than there can be.
    #[error("segment {segment} has {refcnt} references, not 1 to 32767")]
    Refcnt {
        /// Which segment, from 0.
        segment: usize,
        /// References counted.
        refcnt: u16,
    },
    /// Its data does not lie inside its buffer.
    #[error("segment {segment} has {len} bytes at {offset} of a buffer of {buf_len}")]
    Outside {
        /// Which segment, from 0.
        segment: usize,
        /// Bytes of data.
        len: u16,
        /// Where they begin.
        offset: u16,
        /// Bytes of buffer.
        buf_len: u16,
    },
    /// The number of segments is not what the head says.
    #[error("the head says {said} segments, and there are {found}")]
    Segments {
        /// What the head says.
        said: u16,
        /// How many there are; counting stops behind what the head says.
        found: usize,
    },
    /// The segments' lengths do not add up to the packet's.
    #[error("the head says {said} bytes, and the segments have {found}")]
    Length {
        /// What the head says.
        said: usize,
        /// How many there are.
        found: usize,
    },
    /// It is not as an mbuf lies in its pool.
    #[error("the mbuf is shared, attached, or has a tail, so it is not fit for its pool")]
    NotPlain,
    /// It belongs to another pool.
    #[error("the mbuf belongs to another pool")]
    Foreign,
}

impl Mbuf {
    /// Whether the packet is in order: every segment, and the head's sums.
    ///
    /// # Errors
    /// The first [`MbufFault`].
    pub fn check(&self) -> Result<(), MbufFault> {
        let head = self.raw();
        let (mut m, mut found, mut len) = (head, 0usize, 0usize);
        loop {
            check_segment(m, found)?;
            found += 1;
            len += usize::from(m.data_len.get());
            // SAFETY: segments of a packet that is borrowed.
            match unsafe { m.next.get().as_ref() } {
                Some(next) if found <= usize::from(head.nb_segs.get()) => m = next,
                _ => break,
            }
        }
        if found != usize::from(head.nb_segs.get()) {
            return Err(MbufFault::Segments { said: head.nb_segs.get(), found });
        }
        if len != self.pkt_len() {
            return Err(MbufFault::Length { said: self.pkt_len(), found: len });
        }
        Ok(())
    }
}

fn check_segment(m: &RawMbuf, segment: usize) -> Result<(), MbufFault> {
    if m.pool.is_null() {
        return Err(MbufFault::NoPool { segment });
    }
    if m.buf_addr.get().is_null() {
        return Err(MbufFault::NoAddress { segment });
    }
    if m.buf_iova.get() == 0 {
        return Err(MbufFault::NoIova { segment });
    }
    let refcnt = m.refcnt.get();
    if !(1..=i16::MAX as u16).contains(&refcnt) {
        return Err(MbufFault::Refcnt { segment, refcnt });
    }
    let (len, offset, buf_len) = (m.data_len.get(), m.data_off.get(), m.buf_len.get());
    if u32::from(offset) + u32::from(len) > u32::from(buf_len) {
        return Err(MbufFault::Outside { segment, len, offset, buf_len });
    }
    Ok(())
}

impl MbufPool {
    /// Whether `mbuf` could go home to this pool just as it is: as [`raw_alloc`](Self::raw_alloc) gives it and
    /// [`raw_free`](Mbuf::raw_free) takes it.
    ///
    /// # Errors
    /// The [`MbufFault`].
    pub fn check_raw(&self, mbuf: &Mbuf) -> Result<(), MbufFault> {
        let m = mbuf.raw();
        check_segment(m, 0)?;
        if !self.owns(mbuf) {
            return Err(MbufFault::Foreign);
        }
        let home = m.buf_addr.get() == m.home_addr && m.buf_len.get() == m.home_len;
        if !m.is_plain() || !m.next.get().is_null() || !m.shinfo.get().is_null() || !home {
            return Err(MbufFault::NotPlain);
        }
        Ok(())
    }
}
