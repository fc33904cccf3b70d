//! Mbufs: owned handles to packets, and the pools they come from.
//!
//! An [`Mbuf`] is the size of a pointer. Dropping it anywhere is correct: it goes home, through the current worker's cache or
//! the shared ring. While a packet has one segment, neither receiving nor freeing it writes the header's second cache line.
//!
//! **Received data may change under its reader.** The data room is shared with the peer, which may keep writing to it. So
//! [`data`](Mbuf::data) is a [`SharedBytes`], which can only be copied from and to: copy headers before deciding on them.
#![expect(unsafe_code, reason = "owns headers by address, as the mempool below hands them out")]

mod external;
mod free;
mod pool;
mod raw;

use std::marker::PhantomData;
use std::ptr::NonNull;

pub use external::ExternalBuffer;
pub use pool::{MbufPool, MbufPoolConfig};
use raw::RawMbuf;
pub use raw::{HEADROOM, PORT_NONE, ROOM_DEFAULT};

use crate::shared::SharedBytes;

/// A packet: one segment, or the head of a chain.
#[repr(transparent)]
pub struct Mbuf(NonNull<RawMbuf>);

// SAFETY: the handle is the only way to its header's plain fields; data rooms are shared bytes; reference counts are atomic.
unsafe impl Send for Mbuf {}
// SAFETY: through a shared handle everything but the reference count is only read.
unsafe impl Sync for Mbuf {}

impl Mbuf {
    #[inline(always)]
    fn raw(&self) -> &RawMbuf {
        #[cfg(debug_assertions)]
        self.check_out();
        // SAFETY: a live header, which this handle owns.
        unsafe { self.0.as_ref() }
    }

    #[inline(always)]
    fn raw_mut(&mut self) -> &mut RawMbuf {
        #[cfg(debug_assertions)]
        self.check_out();
        // SAFETY: a live header, which this handle owns.
        unsafe { self.0.as_mut() }
    }

    #[cfg(debug_assertions)]
    fn check_out(&self) {
        // SAFETY: headers stay mapped while their pool lives, and a pool outlives handles to its mbufs; a header that went
        // home behind the handle's back is what this looks for.
        unsafe { (*(*self.0.as_ptr()).pool).check_out(RawMbuf::object(self.0)) };
    }

    #[inline(always)]
    fn into_raw(self) -> NonNull<RawMbuf> {
        let raw = self.0;
        std::mem::forget(self);
        raw
    }

    /// What a receive path knows of a single-segment frame: one 8-byte store (`data_off`, one reference, one segment, `port`),
    /// one 16-byte store (no packet type, both lengths, no VLAN, no hash) and the flags. Writes line 0 only.
    #[inline(always)]
    #[expect(clippy::cast_ptr_alignment, reason = "the header is aligned to 64, and the offsets are asserted in `raw`")]
    pub fn receive(&mut self, data_off: u16, port: u16, len: u16) {
        const SINGLE: u64 = 1 << 16 | 1 << 32;
        const REFCNT_AND_SEGS: u64 = 0xffff_ffff << 16;
        let m = std::ptr::from_mut(self.raw_mut()).cast::<u8>();
        let fields = u128::from(len) << 32 | u128::from(len) << 64;
        // SAFETY: the handle owns the header; the layout is asserted in `raw`: rearm data at 16, flags at 24, descriptor
        // fields at 32. Other holders of a reference (if any) change `refcnt` only, and then it is not rewritten.
        unsafe {
            let rearm = m.add(16).cast::<u64>();
            if *rearm & REFCNT_AND_SEGS == SINGLE {
                rearm.write(u64::from(data_off) | SINGLE | u64::from(port) << 48);
            } else {
                self.receive_uncommon(data_off, port);
            }
            let flags = m.add(24).cast::<u64>();
            flags.write(*flags & (raw::EXTERNAL | raw::INDIRECT));
            m.add(32).cast::<u128>().write(fields);
        }
    }

    /// The rearm data of an mbuf that is a chain, whose tail is freed, or shared, whose references stay.
    #[cold]
    fn receive_uncommon(&mut self, data_off: u16, port: u16) {
        let m = self.raw_mut();
        let tail = NonNull::new(std::mem::replace(&mut m.next, std::ptr::null_mut()));
        (m.data_off, m.nb_segs, m.port) = (data_off, 1, port);
        drop(tail.map(Mbuf));
    }

    /// Bytes of the whole packet.
    #[inline(always)]
    #[must_use]
    pub fn pkt_len(&self) -> usize {
        self.raw().pkt_len as usize
    }

    /// Bytes of the first segment.
    #[inline(always)]
    #[must_use]
    pub fn data_len(&self) -> usize {
        usize::from(self.raw().data_len)
    }

    /// Number of segments.
    #[inline(always)]
    #[must_use]
    pub fn nb_segs(&self) -> u16 {
        self.raw().nb_segs
    }

    /// The port it came from, or [`PORT_NONE`].
    #[inline(always)]
    #[must_use]
    pub fn port(&self) -> u16 {
        self.raw().port
    }

    /// Sets the port it came from.
    pub fn set_port(&mut self, port: u16) {
        self.raw_mut().port = port;
    }

    /// Free bytes before the first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn headroom(&self) -> usize {
        usize::from(self.raw().data_off)
    }

    /// Free bytes behind the first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn tailroom(&self) -> usize {
        let m = self.raw();
        usize::from(m.buf_len).saturating_sub(usize::from(m.data_off) + usize::from(m.data_len))
    }

    /// The whole buffer's length: headroom, data and tailroom of the first segment.
    #[inline(always)]
    #[must_use]
    pub fn buf_len(&self) -> u16 {
        self.raw().buf_len
    }

    /// The first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn data(&self) -> SharedBytes<'_> {
        self.room(0, self.data_len())
    }

    /// `len` bytes from `offset` (which may be negative, into the headroom) relative to the first segment's data; empty if they
    /// do not lie inside its buffer.
    #[inline(always)]
    #[must_use]
    pub fn room(&self, offset: isize, len: usize) -> SharedBytes<'_> {
        let m = self.raw();
        let start = usize::from(m.data_off).wrapping_add_signed(offset);
        let fits = start <= usize::from(m.buf_len) && len <= usize::from(m.buf_len) - start;
        let (start, len) = if fits { (start, len) } else { (0, 0) };
        // SAFETY: inside the buffer, which lives as long as the mbuf; data rooms are only ever reached as shared bytes.
        unsafe { SharedBytes::new(m.buf_addr.add(start), len) }
    }

    /// The device's address of the first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn data_iova(&self) -> u64 {
        let m = self.raw();
        m.buf_iova + u64::from(m.data_off)
    }

    /// The device's address of byte `offset` of the first segment's buffer, headroom included.
    #[inline(always)]
    #[must_use]
    pub fn buf_iova(&self, offset: u16) -> u64 {
        self.raw().buf_iova + u64::from(offset)
    }

    /// Whether a header of `len` bytes may be written before the data: nobody else sees this buffer, and there is room.
    #[inline(always)]
    #[must_use]
    pub fn can_push(&self, len: usize) -> bool {
        self.raw().is_plain() && self.headroom() >= len
    }

    /// Asks the CPU to bring the line before the usual start of data near, where a device's header lies.
    #[inline(always)]
    pub fn prefetch_headroom(&self) {
        crate::shared::prefetch(self.raw().buf_addr.wrapping_add(usize::from(HEADROOM) - 1));
    }

    /// Asks the CPU to bring the header near.
    #[inline(always)]
    pub fn prefetch(&self) {
        crate::shared::prefetch(self.0.as_ptr());
    }

    /// Sets the lengths of a single-segment packet; false, and nothing changed, if `len` does not fit behind the headroom.
    #[inline(always)]
    #[must_use]
    pub fn set_len(&mut self, len: usize) -> bool {
        let m = self.raw_mut();
        if m.nb_segs != 1 || len > usize::from(m.buf_len) - usize::from(m.data_off) {
            return false;
        }
        m.data_len = len as u16;
        m.pkt_len = len as u32;
        true
    }

    /// The segments, head first.
    #[inline(always)]
    #[must_use]
    pub fn segments(&self) -> Segments<'_> {
        Segments { next: Some(self.0), _chain: PhantomData }
    }

    /// Appends the segments of `tail`; both packets become one.
    ///
    /// # Errors
    /// `tail`, if the packet would have more than 65535 segments or 4 GiB.
    pub fn chain(&mut self, tail: Mbuf) -> Result<(), Mbuf> {
        let Some((segs, len)) = self.sums_with(&tail) else { return Err(tail) };
        // SAFETY: the last segment of a chain that this handle owns.
        unsafe { (*self.last().as_ptr()).next = tail.into_raw().as_ptr() };
        let head = self.raw_mut();
        (head.nb_segs, head.pkt_len) = (segs, len);
        Ok(())
    }

    /// Segments and bytes of `self` and `tail` together, if they can be told.
    #[inline(always)]
    fn sums_with(&self, tail: &Mbuf) -> Option<(u16, u32)> {
        let (head, tail) = (self.raw(), tail.raw());
        Some((head.nb_segs.checked_add(tail.nb_segs)?, head.pkt_len.checked_add(tail.pkt_len)?))
    }

    fn last(&self) -> NonNull<RawMbuf> {
        self.segments().last().map_or(self.0, |segment| segment.0)
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
        let mut last = head.0;
        if head.nb_segs() != 1 {
            last = head.last();
        }
        Self { head, last }
    }

    /// Appends `segment`.
    ///
    /// # Errors
    /// `segment`, if the packet would have more than 65535 segments or 4 GiB.
    #[inline(always)]
    pub fn push(&mut self, segment: Mbuf) -> Result<(), Mbuf> {
        let sums = self.head.sums_with(&segment);
        let Some((segs, len)) = sums else { return Err(segment) };
        let last = if segment.nb_segs() == 1 { segment.0 } else { segment.last() };
        // SAFETY: `self.last` is the last segment of a chain that `head` owns.
        unsafe { (*self.last.as_ptr()).next = segment.into_raw().as_ptr() };
        self.last = last;
        let head = self.head.raw_mut();
        (head.nb_segs, head.pkt_len) = (segs, len);
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

impl std::fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mbuf({} bytes, {} segments)", self.pkt_len(), self.nb_segs())
    }
}

/// One segment of a packet.
#[derive(Clone, Copy)]
pub struct Segment<'a>(NonNull<RawMbuf>, PhantomData<&'a Mbuf>);

impl<'a> Segment<'a> {
    #[inline(always)]
    fn raw(&self) -> &'a RawMbuf {
        // SAFETY: part of a chain that is borrowed for `'a`.
        unsafe { &*self.0.as_ptr() }
    }

    /// Its data.
    #[inline(always)]
    #[must_use]
    pub fn data(&self) -> SharedBytes<'a> {
        let m = self.raw();
        let off = usize::from(m.data_off).min(usize::from(m.buf_len));
        let len = usize::from(m.data_len).min(usize::from(m.buf_len) - off);
        // SAFETY: inside the buffer, which lives as long as the chain.
        unsafe { SharedBytes::new(m.buf_addr.add(off), len) }
    }

    /// The device's address of its data.
    #[inline(always)]
    #[must_use]
    pub fn iova(&self) -> u64 {
        self.raw().buf_iova + u64::from(self.raw().data_off)
    }
}

/// Iterator over a packet's segments.
#[derive(Clone)]
pub struct Segments<'a> {
    next: Option<NonNull<RawMbuf>>,
    _chain: PhantomData<&'a Mbuf>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = Segment<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Segment<'a>> {
        let segment = Segment(self.next?, PhantomData);
        self.next = NonNull::new(segment.raw().next);
        Some(segment)
    }
}
