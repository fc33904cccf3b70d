//! Bytes of a packet, wherever its segments begin and end.

use super::{Chain, HEADROOM, Mbuf, MbufPool, Segments, free};
use crate::shared::SharedBytes;

/// Where one is in a packet.
struct Cursor<'a> {
    piece: SharedBytes<'a>,
    rest: Segments<'a>,
}

impl<'a> Cursor<'a> {
    /// Byte `offset` of `mbuf`, if the packet reaches that far.
    fn new(mbuf: &'a Mbuf, mut offset: usize) -> Option<Self> {
        let mut rest = mbuf.segments();
        loop {
            let data = rest.next()?.data();
            // Its end counts as inside: that is where a packet of `offset` bytes ends.
            if let Some(left) = data.len().checked_sub(offset) {
                return Some(Self { piece: data.sub(offset, left)?, rest });
            }
            offset -= data.len();
        }
    }

    /// The next bytes, at most `limit`, all in one segment; none if the packet is at its end.
    fn next(&mut self, limit: usize) -> Option<SharedBytes<'a>> {
        while self.piece.is_empty() {
            self.piece = self.rest.next()?.data();
        }
        let (all, len) = (self.piece, self.piece.len().min(limit));
        self.piece = all.sub(len, all.len() - len)?;
        all.sub(0, len)
    }

    /// Whether `len` bytes are left.
    fn has(&self, len: usize) -> bool {
        let mut left = self.piece.len();
        let mut rest = self.rest.clone();
        while left < len {
            let Some(segment) = rest.next() else { return false };
            left += segment.data().len();
        }
        true
    }

    /// Copies the next bytes to `to`, as many as both hold; returns how many.
    fn copy_to(&mut self, to: SharedBytes<'_>) -> usize {
        let mut done = 0;
        while done < to.len() {
            let Some(piece) = self.next(to.len() - done) else { break };
            let Some(target) = to.sub(done, piece.len()) else { break };
            done += piece.copy_to(target);
        }
        done
    }
}

impl Mbuf {
    /// Copies `out.len()` bytes from `offset` of the packet, across segments; false, and nothing copied, if it has fewer.
    #[must_use]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        let Some(mut cursor) = Cursor::new(self, offset).filter(|cursor| cursor.has(out.len())) else { return false };
        let mut out = out;
        while let Some(piece) = cursor.next(out.len()).filter(|piece| !piece.is_empty()) {
            let done = piece.read(out);
            out = &mut out[done..];
        }
        true
    }

    /// Overwrites `data.len()` bytes from `offset` of the packet, across segments; false, and nothing written, if it has fewer.
    #[must_use]
    pub fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let Some(mut cursor) = Cursor::new(self, offset).filter(|cursor| cursor.has(data.len())) else { return false };
        let mut data = data;
        while let Some(piece) = cursor.next(data.len()).filter(|piece| !piece.is_empty()) {
            data = &data[piece.write(data)..];
        }
        true
    }

    /// Brings all bytes into the first segment; false, and nothing changed, if its tailroom is too small.
    #[must_use]
    pub fn linearize(&mut self) -> bool {
        if self.nb_segs() == 1 {
            return true;
        }
        let len = self.segments().map(|segment| segment.data().len()).sum::<usize>();
        let first = self.data_len();
        if len - first > self.tailroom() {
            return false;
        }
        if let Some(mut tail) = Cursor::new(self, first) {
            tail.copy_to(self.room(first.cast_signed(), len - first));
        }
        // SAFETY: the handle owns the packet.
        unsafe { free::free_tail(self.0, &mut free::Group::new()) };
        self.set_len(len)
    }

    /// A packet of its own with `len` bytes from `offset` of this one (fewer if it ends before), in as many mbufs of `pool` as
    /// that takes, with its flags and offloads. `None` if `offset` is behind the end (at the end is fine), or `pool` has too
    /// few.
    #[must_use]
    pub fn copy(&self, pool: &MbufPool, offset: usize, len: usize) -> Option<Mbuf> {
        let mut left = len.min(self.pkt_len().checked_sub(offset)?);
        let mut cursor = Cursor::new(self, offset)?;
        let mut fill = || {
            let mut segment = pool.alloc()?;
            let len = left.min(usize::from(pool.room() - HEADROOM));
            left -= len;
            (cursor.copy_to(segment.room(0, len)) == len && segment.set_len(len)).then_some((segment, left))
        };
        let (head, mut left) = fill()?;
        head.raw().copy_metadata(self.raw());
        let mut copy = Chain::new(head);
        while left > 0 {
            let segment;
            (segment, left) = fill()?;
            copy.push(segment).ok()?;
        }
        Some(copy.finish())
    }
}
