//! Packets of several segments, and the ends of a packet.

use std::marker::PhantomData;
use std::ptr::NonNull;

use super::Mbuf;
use super::raw::RawMbuf;
use crate::shared::SharedBytes;

impl Mbuf {
    /// The segments, head first.
    #[inline(always)]
    #[must_use]
    pub fn segments(&self) -> Segments<'_> {
        Segments { next: Segment(self.0, PhantomData), left: self.nb_segs() }
    }

    /// Appends the segments of `tail`; both packets become one.
    ///
    /// # Errors
    /// `tail`, if the packet would have more than 65535 segments or 4 GiB.
    pub fn chain(&mut self, tail: Mbuf) -> Result<(), Mbuf> {
        let Some(sums) = self.sums_with(&tail) else { return Err(tail) };
        self.last().raw().next.set(tail.into_raw().as_ptr());
        self.set_sums(sums);
        Ok(())
    }

    /// Segments and bytes of `self` and `tail` together, if they can be told.
    #[inline(always)]
    fn sums_with(&self, tail: &Mbuf) -> Option<(u16, u32)> {
        let (head, tail) = (self.raw(), tail.raw());
        let segments = head.nb_segs.get().checked_add(tail.nb_segs.get())?;
        Some((segments, head.pkt_len.get().checked_add(tail.pkt_len.get())?))
    }

    #[inline(always)]
    fn set_sums(&mut self, (segments, bytes): (u16, u32)) {
        let head = self.raw();
        head.nb_segs.set(segments);
        head.pkt_len.set(bytes);
    }

    #[inline(always)]
    fn last(&self) -> Segment<'_> {
        let head = Segment(self.0, PhantomData);
        if self.nb_segs() == 1 { head } else { self.segments().last().unwrap_or(head) }
    }

    /// Makes room for `len` more bytes before the data, and returns it; `None`, and nothing changed, if the first segment's
    /// headroom is smaller.
    #[inline]
    pub fn prepend(&mut self, len: usize) -> Option<SharedBytes<'_>> {
        let m = self.raw();
        // Within the first segment's buffer, whose length has 16 bits.
        let bytes = u16::try_from(len).ok()?;
        let data_off = m.data_off.get().checked_sub(bytes)?;
        m.pkt_len.set(m.pkt_len.get().checked_add(u32::from(bytes))?);
        m.data_off.set(data_off);
        m.data_len.set(m.data_len.get() + bytes);
        Some(self.room(0, len))
    }

    /// Makes room for `len` more bytes behind the data, and returns it; `None`, and nothing changed, if the last segment's
    /// tailroom is smaller.
    #[inline]
    pub fn append(&mut self, len: usize) -> Option<SharedBytes<'_>> {
        let bytes = u16::try_from(len).ok()?;
        let last = self.last();
        if bytes > last.raw().tailroom() {
            return None;
        }
        let pkt_len = self.raw().pkt_len.get().checked_add(u32::from(bytes))?;
        let data_len = last.raw().data_len.get();
        last.raw().data_len.set(data_len + bytes);
        let room = last.data().sub(data_len.into(), len);
        self.raw().pkt_len.set(pkt_len);
        room
    }

    /// Cuts `len` bytes off the front; false, and nothing changed, if the first segment has fewer.
    #[inline]
    #[must_use]
    pub fn adj(&mut self, len: usize) -> bool {
        let m = self.raw();
        if len > self.data_len() {
            return false;
        }
        m.data_len.set(m.data_len.get() - len as u16);
        m.data_off.set(m.data_off.get() + len as u16);
        m.pkt_len.set(m.pkt_len.get().saturating_sub(len as u32));
        true
    }

    /// Cuts `len` bytes off the end; false, and nothing changed, if the last segment has fewer.
    #[inline]
    #[must_use]
    pub fn trim(&mut self, len: usize) -> bool {
        let last = self.last().raw();
        if len > usize::from(last.data_len.get()) {
            return false;
        }
        last.data_len.set(last.data_len.get() - len as u16);
        self.raw().pkt_len.set(self.raw().pkt_len.get().saturating_sub(len as u32));
        true
    }
}

/// A packet under construction, for receive paths: knows its last segment, so that appending does not walk.
#[derive(Debug)]
pub struct Chain {
    head: Mbuf,
    last: NonNull<RawMbuf>,
}

// SAFETY: `last` is a segment of `head`, which is `Send`.
unsafe impl Send for Chain {}

impl Chain {
    /// A chain that begins with `head`.
    #[inline(always)]
    #[must_use]
    pub fn new(head: Mbuf) -> Self {
        let last = head.last().0;
        Self { head, last }
    }

    /// Appends `segment`.
    ///
    /// # Errors
    /// `segment`, if the packet would have more than 65535 segments or 4 GiB.
    #[inline(always)]
    pub fn push(&mut self, segment: Mbuf) -> Result<(), Mbuf> {
        let Some(sums) = self.head.sums_with(&segment) else { return Err(segment) };
        let last = segment.last().0;
        // SAFETY: `self.last` is the last segment of the packet that `head` owns.
        unsafe { self.last.as_ref() }.next.set(segment.into_raw().as_ptr());
        self.last = last;
        self.head.set_sums(sums);
        Ok(())
    }

    /// The packet so far.
    #[inline(always)]
    #[must_use]
    pub fn head(&self) -> &Mbuf {
        &self.head
    }

    /// The finished packet.
    #[inline(always)]
    #[must_use]
    pub fn finish(self) -> Mbuf {
        self.head
    }
}

/// One segment of a packet.
#[derive(Clone, Copy)]
pub struct Segment<'a>(pub(super) NonNull<RawMbuf>, PhantomData<&'a Mbuf>);

impl<'a> Segment<'a> {
    #[inline(always)]
    pub(super) fn raw(&self) -> &'a RawMbuf {
        // SAFETY: part of a packet that is borrowed for `'a`.
        unsafe { &*self.0.as_ptr() }
    }

    /// Its data.
    #[inline(always)]
    #[must_use]
    pub fn data(&self) -> SharedBytes<'a> {
        let m = self.raw();
        // SAFETY: inside the buffer, which lives as long as the packet; data rooms are only ever reached as shared bytes.
        unsafe { SharedBytes::new(m.buf_addr.get().add(m.data_off.get().into()), m.data_len.get().into()) }
    }

    /// The device's address of its data.
    #[inline(always)]
    #[must_use]
    pub fn iova(&self) -> u64 {
        self.raw().buf_iova.get() + u64::from(self.raw().data_off.get())
    }
}

/// Iterator over a packet's segments. It goes by their number, so it does not read the second line of a single segment.
#[derive(Clone)]
pub struct Segments<'a> {
    next: Segment<'a>,
    left: u16,
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Segment<'a>> {
        self.left = self.left.checked_sub(1)?;
        let segment = self.next;
        if self.left > 0 {
            self.next = Segment(NonNull::new(segment.raw().next.get())?, PhantomData);
        }
        Some(segment)
    }

    #[inline(always)]
    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.into(), Some(self.left.into()))
    }
}

impl ExactSizeIterator for Segments<'_> {}
