//! Split rings, the driver's transmit end (virtio 1.3, 2.7 and 5.1.6.2).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Doorbell;
use super::spec::{DESC_F_INDIRECT, DESC_F_NEXT, Desc, DescMeta, HEADER_LEN_LEGACY, HEADER_LEN_MAX};
use super::split::{Layout, Ring};
use crate::mbuf::{Mbuf, Segment};
use crate::mem::{Arena, MemError, Span, view};
use crate::port::Fault;
use crate::shared::View;
use crate::tx::TxRing;

/// Descriptors of an indirect table: a header and up to seven segments.
const TABLE: usize = 8;
/// Packets freed together.
const FREE_GROUP: usize = 64;

/// Where headers and indirect tables lie that do not fit into a packet's headroom: per descriptor a table, and one header of
/// zeros for all, for no offload is ever asked for.
struct Side {
    span: Arc<Span>,
    tables: View<Desc>,
    header_at: usize,
}

impl Side {
    fn new(arena: &Arc<Arena>, size: u16) -> Result<Self, MemError> {
        let header_at = usize::from(size) * TABLE * size_of::<Desc>();
        let span = Arc::new(arena.alloc(header_at + HEADER_LEN_MAX, 64)?);
        Ok(Self { tables: view(&span, 0, usize::from(size) * TABLE), span, header_at })
    }
}

/// What a transmit ring needs to know beyond its layout.
#[derive(Clone, Copy, Debug)]
pub struct TxParams {
    /// Descriptors in use, at most the ring's size.
    pub limit: u16,
    /// Bytes of the virtio header.
    pub header_len: u16,
    /// Whether indirect descriptors were negotiated.
    pub indirect: bool,
}

/// A packet in the ring.
#[derive(Clone, Copy, Default)]
struct Chain {
    /// Descriptors it takes.
    len: u16,
    /// The last of them.
    last: u16,
}

/// A transmit ring.
pub struct SplitTx<const IN_ORDER: bool> {
    ring: Ring,
    params: TxParams,
    side: Side,
    /// The packet whose chain begins at a descriptor.
    mbufs: Box<[Option<Mbuf>]>,
    chains: Box<[Chain]>,
    /// The descriptor after each: in its chain, or in the list of free ones. `IN_ORDER` uses them round and round (2.7.9).
    next: Box<[u16]>,
    /// The first free descriptor, and the last; if none is free, the first means nothing.
    free: (u16, u16),
    room: u16,
    /// `IN_ORDER`: the head of the oldest chain.
    oldest: u16,
}

impl<const IN_ORDER: bool> SplitTx<IN_ORDER> {
    /// An empty ring.
    ///
    /// # Errors
    /// [`MemError::Full`] if `arena` has no room for headers and indirect tables.
    pub fn new(
        layout: &Layout,
        params: TxParams,
        arena: &Arc<Arena>,
        doorbell: Box<dyn Doorbell>,
    ) -> Result<Self, MemError> {
        let ring = Ring::new(layout, doorbell);
        let (size, mask) = (layout.size, ring.mask);
        let limit = params.limit.min(size);
        Ok(Self {
            ring,
            params: TxParams { limit, ..params },
            side: Side::new(arena, size)?,
            mbufs: (0..size).map(|_| None).collect(),
            chains: vec![Chain::default(); size.into()].into(),
            next: (0..size).map(|i| i.wrapping_add(1) & mask).collect(),
            free: (0, mask),
            room: limit,
            oldest: 0,
        })
    }

    /// Takes the next free descriptor and writes it.
    #[inline(always)]
    fn push_desc(&mut self, addr: u64, len: u32, flags: u16) -> u16 {
        let id = self.free.0;
        let next = self.next[usize::from(id)];
        let desc = &self.ring.desc[usize::from(id)];
        desc.addr.store(addr, Ordering::Relaxed);
        desc.meta.store(DescMeta { len, flags, next }.pack(), Ordering::Relaxed);
        self.free.0 = next;
        id
    }

    /// A packet whose header cannot go before its data: an indirect table if that saves slots, else a chain.
    #[cold]
    fn stage_parts(&mut self, mbuf: &Mbuf, slots: u16) -> Chain {
        let header = self.side.span.iova(self.side.header_at);
        let header_len = u32::from(self.params.header_len);
        let mut parts = std::iter::once((header, header_len)).chain(mbuf.segments().map(part)).peekable();
        if slots == 1 {
            let (id, first) = (self.free.0, usize::from(self.free.0) * TABLE);
            let mut len = 0;
            while let Some((addr, bytes)) = parts.next() {
                let flags = if parts.peek().is_some() { DESC_F_NEXT } else { 0 };
                let desc = &self.side.tables[first + usize::from(len)];
                desc.addr.store(addr, Ordering::Relaxed);
                desc.meta.store(DescMeta { len: bytes, flags, next: len + 1 }.pack(), Ordering::Relaxed);
                len += 1;
            }
            let table = self.side.span.iova(first * size_of::<Desc>());
            self.push_desc(table, u32::from(len) * size_of::<Desc>() as u32, DESC_F_INDIRECT);
            return Chain { len: 1, last: id };
        }
        let mut last = self.free.0;
        while let Some((addr, bytes)) = parts.next() {
            last = self.push_desc(addr, bytes, if parts.peek().is_some() { DESC_F_NEXT } else { 0 });
        }
        Chain { len: slots, last }
    }

    /// Takes back the chain that begins at `head`.
    #[inline(always)]
    fn release(&mut self, head: u16) -> Option<Mbuf> {
        let mbuf = self.mbufs.get_mut(usize::from(head))?.take()?;
        let chain = self.chains[usize::from(head)];
        if IN_ORDER {
            self.oldest = head.wrapping_add(chain.len) & self.ring.mask;
        } else {
            // The chain's own links still hold; hang it behind the free ones, so that they are used round and round.
            if self.room == 0 && usize::from(self.params.limit) == self.next.len() {
                self.free.0 = head;
            } else {
                self.next[usize::from(self.free.1)] = head;
            }
            self.free.1 = chain.last;
        }
        self.room += chain.len;
        Some(mbuf)
    }
}

/// A segment's address and length.
fn part(segment: Segment<'_>) -> (u64, u32) {
    (segment.iova(), segment.data().len() as u32)
}

impl<const IN_ORDER: bool> TxRing for SplitTx<IN_ORDER> {
    fn size(&self) -> u16 {
        self.params.limit
    }

    #[inline(always)]
    fn room(&self) -> u16 {
        self.room
    }

    #[inline(always)]
    fn slots(&self, mbuf: &Mbuf) -> u16 {
        let segments = mbuf.nb_segs();
        if mbuf.can_push(self.params.header_len.into()) || self.params.indirect && usize::from(segments) < TABLE {
            1
        } else {
            segments.saturating_add(1)
        }
    }

    #[inline(always)]
    fn stage(&mut self, mbuf: Mbuf) {
        let head = self.free.0;
        let header_len = usize::from(self.params.header_len);
        let chain = if mbuf.can_push(header_len) {
            // The header goes right before the data (VERSION_1 implies ANY_LAYOUT, 5.1.6): one descriptor for both.
            let room = mbuf.room(-header_len.cast_signed(), header_len);
            if !room.put([0; HEADER_LEN_MAX]) {
                room.put([0; HEADER_LEN_LEGACY]);
            }
            let addr = mbuf.data_iova() - header_len as u64;
            let id = self.push_desc(addr, (mbuf.data_len() + header_len) as u32, 0);
            Chain { len: 1, last: id }
        } else {
            self.stage_parts(&mbuf, self.slots(&mbuf))
        };
        self.room -= chain.len;
        self.chains[usize::from(head)] = chain;
        self.mbufs[usize::from(head)] = Some(mbuf);
        self.ring.push(head);
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    #[inline]
    fn reap(&mut self) -> Result<usize, Fault> {
        let ready = self.ring.ready()?;
        let mut bad = 0;
        let mut freed = 0;
        let mut group: [Option<Mbuf>; FREE_GROUP] = [const { None }; FREE_GROUP];
        let mut left = usize::from(ready);
        while left > 0 {
            let n = left.min(FREE_GROUP);
            for out in &mut group[..n] {
                let (id, _) = self.ring.pop();
                // IN_ORDER: the element may name a later buffer; the n-th completion is the n-th packet all the same.
                let head = if IN_ORDER { u32::from(self.oldest) } else { id };
                *out = u16::try_from(head).ok().and_then(|head| self.release(head));
                bad += usize::from(out.is_none());
            }
            Mbuf::free_bulk(group[..n].iter_mut().filter_map(Option::take));
            freed += n;
            left -= n;
        }
        if bad > 0 { Err(Fault::BadId) } else { Ok(freed) }
    }
}
