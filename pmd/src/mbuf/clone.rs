//! Mbufs whose data belongs to somebody else: to another mbuf (indirect), or to an [`ExternalBuffer`].

use std::ptr::NonNull;
use std::sync::Arc;

use super::raw::{EXTERNAL, INDIRECT, RawMbuf};
use super::{Chain, ExternalBuffer, Mbuf, MbufPool, Segment, free};

/// Why an mbuf cannot be attached; it is then as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    /// It has a tail, is attached already, or other mbufs are attached to it.
    #[error("the mbuf to attach is a chain, is attached already, or is itself attached to; take a new one")]
    NotPlain,
    /// The other mbuf has as many references as it can count.
    #[error("the mbuf to attach to has 32767 references, the limit; copy it instead")]
    TooMany,
}

impl Mbuf {
    /// Another packet with the same data, of headers from `pool`: an indirect mbuf for each segment, nothing copied. `None` if
    /// `pool` has too few, or a segment too many references.
    ///
    /// Both packets see what is written to the data of either.
    #[must_use]
    pub fn clone(&self, pool: &MbufPool) -> Option<Mbuf> {
        let mut segments = self.segments();
        let mut clone = Chain::new(attached(pool, segments.next()?)?);
        for segment in segments {
            clone.push(attached(pool, segment)?).ok()?;
        }
        Some(clone.finish())
    }

    /// Makes this mbuf carry the data of the first segment of `to`, with its flags and offloads, in place of its own data
    /// room. If that data belongs to a third mbuf, it is attached to the third; if to an external buffer, it shares that.
    ///
    /// # Errors
    /// [`AttachError`].
    pub fn attach(&mut self, to: &Mbuf) -> Result<(), AttachError> {
        self.attach_segment(to.segments().next().ok_or(AttachError::NotPlain)?)
    }

    fn attach_segment(&mut self, to: Segment<'_>) -> Result<(), AttachError> {
        let (m, source) = (self.raw(), to.raw());
        if !m.is_plain() {
            return Err(AttachError::NotPlain);
        }
        let flag = if source.ol_flags.get() & EXTERNAL != 0 {
            // SAFETY: an external mbuf owns a count of its buffer's `Arc`; here is one more, which the flag below records.
            unsafe { Arc::increment_strong_count(source.shinfo.get().cast::<ExternalBuffer>()) };
            m.shinfo.set(source.shinfo.get());
            EXTERNAL
        } else {
            let owner = source.shinfo.get().cast_mut().cast::<RawMbuf>();
            let root = if source.is_attached() { NonNull::new(owner) } else { Some(to.0) };
            let root = root.ok_or(AttachError::NotPlain)?;
            // SAFETY: live, for `to` is a holder or the mbuf itself. Only the count is touched.
            if !unsafe { root.as_ref() }.refcnt.add() {
                return Err(AttachError::TooMany);
            }
            m.shinfo.set(root.as_ptr().cast_const().cast());
            INDIRECT
        };
        m.buf_addr.set(source.buf_addr.get());
        m.buf_iova.set(source.buf_iova.get());
        m.buf_len.set(source.buf_len.get());
        m.data_off.set(source.data_off.get());
        m.data_len.set(source.data_len.get());
        m.pkt_len.set(source.data_len.get().into());
        m.ol_flags.set(flag);
        m.copy_metadata(source);
        Ok(())
    }

    /// Makes this mbuf carry an empty packet at the start of `buffer` in place of its own data room. The buffer is kept until
    /// the last mbuf that carries it is free.
    ///
    /// # Errors
    /// [`AttachError::NotPlain`].
    pub fn attach_external(&mut self, buffer: &Arc<ExternalBuffer>) -> Result<(), AttachError> {
        let m = self.raw();
        if !m.is_plain() {
            return Err(AttachError::NotPlain);
        }
        m.shinfo.set(Arc::into_raw(Arc::clone(buffer)).cast());
        m.buf_addr.set(buffer.addr);
        m.buf_iova.set(buffer.iova);
        m.buf_len.set(buffer.len);
        m.data_off.set(0);
        m.data_len.set(0);
        m.pkt_len.set(0);
        m.ol_flags.set(m.ol_flags.get() | EXTERNAL);
        Ok(())
    }

    /// Gives the first segment its own data room back, empty; false if it has it.
    #[must_use]
    pub fn detach(&mut self) -> bool {
        let m = self.raw();
        if !m.is_attached() {
            return false;
        }
        m.pkt_len.set(m.pkt_len.get().saturating_sub(m.data_len.get().into()));
        // SAFETY: the handle is the only user: an attached mbuf is never attached to.
        unsafe { free::detach(self.0) };
        true
    }

    /// Whether the first segment's data belongs to another mbuf.
    #[must_use]
    pub fn is_indirect(&self) -> bool {
        self.raw().ol_flags.get() & INDIRECT != 0
    }

    /// Whether the first segment's data belongs to an [`ExternalBuffer`].
    #[must_use]
    pub fn is_external(&self) -> bool {
        self.raw().ol_flags.get() & EXTERNAL != 0
    }

    /// References to the first segment's header: this handle and the indirect mbufs attached to it.
    #[must_use]
    pub fn refcnt(&self) -> u16 {
        self.raw().refcnt.get()
    }
}

/// A header from `pool`, attached to `segment`.
fn attached(pool: &MbufPool, segment: Segment<'_>) -> Option<Mbuf> {
    let mut mbuf = pool.raw_alloc()?;
    mbuf.attach_segment(segment).ok()?;
    Some(mbuf)
}
