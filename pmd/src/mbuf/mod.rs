//! Mbufs: owned handles to packets, and the pools they come from.
//!
//! An [`Mbuf`] is the size of a pointer. Dropping it anywhere is correct: it goes home, through the current worker's cache or
//! the shared ring. While a packet has one segment, neither receiving nor freeing it writes the header's second cache line.
//!
//! **Received data may change under its reader.** The data room is shared with the peer, which may keep writing to it. So
//! [`data`](Mbuf::data) is a [`SharedBytes`], which can only be copied from and to: copy headers before deciding on them.
//!
//! | file | what it holds |
//! |---|---|
//! | `raw`, `refcnt` | the 128 bytes, and who counts as a holder |
//! | `pool`, `free`, `staged`, `drained` | from the pool and back, in bulk; without reading the header where that was proven before |
//! | `chain`, `copy` | segments; prepend, append, adj, trim; read, write, linearize, copy |
//! | `clone`, `external` | mbufs whose data belongs to another mbuf, or to somebody else |
//! | `fields`, `check` | flags, offloads, private area; the sanity check |
//!
//! # What holds for every handle
//! 1. It is the only way to its header and to those of the segments behind it.
//! 2. `nb_segs` is the number of segments; it is 1 exactly if `next` is null.
//! 3. `data_off + data_len <= buf_len` in each segment, and the buffer stays mapped for as long as the segment.
//! 4. `refcnt` is 1 plus the number of indirect mbufs attached to the data room; while it is more, the mbuf is direct.
//!
//! `pkt_len` is what its owner says: after [`raw_alloc`](MbufPool::raw_alloc) it is the last owner's. Nothing unsafe rests on it.
#![expect(unsafe_code, reason = "owns headers by address, as the mempool below hands them out")]

mod chain;
mod check;
mod clone;
mod copy;
mod drained;
mod external;
mod fields;
mod free;
mod pool;
mod raw;
mod refcnt;
mod staged;
#[cfg(test)]
mod tests;

use std::ptr::NonNull;

pub use chain::{Chain, Segment, Segments};
pub use check::MbufFault;
pub use clone::AttachError;
pub use drained::Drained;
pub use external::ExternalBuffer;
pub use fields::{TxOffload, flags};
pub use pool::{MbufPool, MbufPoolConfig};
use raw::RawMbuf;
pub use raw::{HEADROOM, PORT_NONE, ROOM_DEFAULT};
pub use staged::Staged;

use crate::shared::SharedBytes;

/// A packet: one segment, or the head of a chain.
#[repr(transparent)]
pub struct Mbuf(NonNull<RawMbuf>);

// SAFETY: the handle is the only way to its header's cells; data rooms are shared bytes; reference counts are atomic.
unsafe impl Send for Mbuf {}
// SAFETY: the cells change only through `&mut Mbuf`; a shared handle reads them.
unsafe impl Sync for Mbuf {}

impl Mbuf {
    /// The header. Only methods that take `&mut self` may set its cells.
    #[inline(always)]
    fn raw(&self) -> &RawMbuf {
        #[cfg(debug_assertions)]
        self.check_out();
        // SAFETY: a live header, which this handle owns; others touch no more than its `refcnt`.
        unsafe { self.0.as_ref() }
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
    ///
    /// What would lie outside the buffer is cut off; a receive path checks the device's claim before.
    #[inline(always)]
    #[expect(clippy::cast_ptr_alignment, reason = "the header is aligned to 64, and the offsets are asserted in `raw`")]
    pub fn receive(&mut self, data_off: u16, port: u16, len: u16) {
        const SINGLE: u64 = 1 << 16 | 1 << 32;
        let m = self.raw();
        let inside = u32::from(data_off) + u32::from(len) <= u32::from(m.buf_len.get());
        let line = self.0.as_ptr().cast::<u8>();
        let mut len = len;
        if inside && m.nb_segs.get() == 1 && m.refcnt.is_one() {
            // SAFETY: the handle owns the header, and alone, so that the count may be overwritten; rearm data is at 16.
            unsafe { line.add(16).cast::<u64>().write(u64::from(data_off) | SINGLE | u64::from(port) << 48) };
        } else {
            len = self.receive_uncommon(data_off, port, len);
        }
        let m = self.raw();
        m.ol_flags.set(m.ol_flags.get() & (raw::EXTERNAL | raw::INDIRECT));
        let fields = u128::from(len) << 32 | u128::from(len) << 64;
        // SAFETY: the handle owns the header, whose descriptor fields, plain integers all of them, are at 32.
        unsafe { line.add(32).cast::<u128>().write(fields) };
    }

    /// The rearm data of an mbuf that is a chain, whose tail is freed, or shared, whose references stay, or too small. Returns
    /// the length that fits.
    #[cold]
    fn receive_uncommon(&mut self, data_off: u16, port: u16, len: u16) -> u16 {
        // SAFETY: the handle owns the packet.
        unsafe { free::free_tail(self.0, &mut free::Group::new()) };
        let m = self.raw();
        m.data_off.set(data_off.min(m.buf_len.get()));
        m.port.set(port);
        len.min(m.buf_len.get() - m.data_off.get())
    }

    /// Bytes of the whole packet.
    #[inline(always)]
    #[must_use]
    pub fn pkt_len(&self) -> usize {
        self.raw().pkt_len.get() as usize
    }

    /// Bytes of the first segment.
    #[inline(always)]
    #[must_use]
    pub fn data_len(&self) -> usize {
        usize::from(self.raw().data_len.get())
    }

    /// Number of segments.
    #[inline(always)]
    #[must_use]
    pub fn nb_segs(&self) -> u16 {
        self.raw().nb_segs.get()
    }

    /// The port it came from, or [`PORT_NONE`].
    #[inline(always)]
    #[must_use]
    pub fn port(&self) -> u16 {
        self.raw().port.get()
    }

    /// Sets the port it came from.
    pub fn set_port(&mut self, port: u16) {
        self.raw().port.set(port);
    }

    /// Free bytes before the first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn headroom(&self) -> usize {
        usize::from(self.raw().data_off.get())
    }

    /// Free bytes behind the first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn tailroom(&self) -> usize {
        usize::from(self.raw().tailroom())
    }

    /// The whole buffer's length: headroom, data and tailroom of the first segment.
    #[inline(always)]
    #[must_use]
    pub fn buf_len(&self) -> u16 {
        self.raw().buf_len.get()
    }

    /// The first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn data(&self) -> SharedBytes<'_> {
        let m = self.raw();
        // SAFETY: inside the buffer, which lives as long as the mbuf; data rooms are only ever reached as shared bytes.
        unsafe { SharedBytes::new(m.buf_addr.get().add(m.data_off.get().into()), m.data_len.get().into()) }
    }

    /// `len` bytes from `offset` (which may be negative, into the headroom) relative to the first segment's data; empty if they
    /// do not lie inside its buffer.
    #[inline(always)]
    #[must_use]
    pub fn room(&self, offset: isize, len: usize) -> SharedBytes<'_> {
        let m = self.raw();
        let buf_len = usize::from(m.buf_len.get());
        let start = usize::from(m.data_off.get()).wrapping_add_signed(offset);
        let fits = start <= buf_len && len <= buf_len - start;
        let (start, len) = if fits { (start, len) } else { (0, 0) };
        // SAFETY: as in `data`.
        unsafe { SharedBytes::new(m.buf_addr.get().add(start), len) }
    }

    /// The device's address of the first segment's data.
    #[inline(always)]
    #[must_use]
    pub fn data_iova(&self) -> u64 {
        let m = self.raw();
        m.buf_iova.get() + u64::from(m.data_off.get())
    }

    /// The device's address of byte `offset` of the first segment's buffer, headroom included.
    #[inline(always)]
    #[must_use]
    pub fn buf_iova(&self, offset: u16) -> u64 {
        self.raw().buf_iova.get() + u64::from(offset)
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
        crate::shared::prefetch(self.raw().buf_addr.get().wrapping_add(usize::from(HEADROOM) - 1));
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
        let m = self.raw();
        if m.nb_segs.get() != 1 || len > usize::from(m.buf_len.get() - m.data_off.get()) {
            return false;
        }
        m.data_len.set(len as u16);
        m.pkt_len.set(len as u32);
        true
    }
}

impl std::fmt::Debug for Mbuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mbuf({} bytes, {} segments)", self.pkt_len(), self.nb_segs())
    }
}
