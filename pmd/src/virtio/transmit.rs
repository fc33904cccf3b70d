//! Transmitting over a virtqueue (virtio 1.3, 5.1.6.2).

use std::array::from_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::ring::{DriverRing, oldest_first, take_group};
use super::spec::{DESC_F_INDIRECT, DESC_F_NEXT, Desc, HEADER_LEN_LEGACY, HEADER_LEN_MAX};
use crate::mbuf::{Mbuf, Segment, Staged};
use crate::mem::{Arena, MemError, Span, view};
use crate::port::{Fault, QueueStats};
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

/// Packets looked at together when they are reaped.
const REAP_GROUP: usize = 8;

/// A packet's descriptors, if it has more than one.
#[derive(Clone, Copy, Default)]
struct Chain {
    /// How many; 0 for one.
    len: u16,
    /// The last of them.
    last: u16,
}

/// A transmit ring.
pub struct VirtioTx<R> {
    ring: R,
    params: TxParams,
    side: Side,
    /// The packet behind each id, and its descriptors.
    mbufs: Box<[Staged]>,
    chains: Box<[Chain]>,
    /// Packets with the device that have more than one. While there are none, nobody looks at `chains`.
    long: u32,
    /// Free descriptors. Wide, like all counters that change per packet, see `VirtioRx`.
    room: u32,
}

impl<R: DriverRing> VirtioTx<R> {
    /// Transmits through `ring`, which is empty.
    ///
    /// # Errors
    /// [`MemError::Full`] if `arena` has no room for headers and indirect tables.
    pub fn new(ring: R, params: TxParams, arena: &Arc<Arena>) -> Result<Self, MemError> {
        let size = ring.size();
        let limit = params.limit.min(size);
        Ok(Self {
            ring,
            params: TxParams { limit, ..params },
            side: Side::new(arena, size)?,
            mbufs: (0..size).map(|_| Staged::EMPTY).collect(),
            chains: vec![Chain::default(); size.into()].into(),
            long: 0,
            room: limit.into(),
        })
    }

    /// Completions, as [`DriverRing::ready`].
    #[inline(always)]
    fn ready(&mut self, max: u16) -> Result<u16, Fault> {
        if self.long == 0 { self.ring.ready_singles(max) } else { self.ring.ready(max, |id| descs(&self.chains, id)) }
    }

    /// Writes the header right before the data (`VERSION_1` implies `ANY_LAYOUT`, 5.1.6): address and length of both.
    #[inline(always)]
    fn push_header(&self, mbuf: &Mbuf) -> (u64, u32) {
        let header_len = usize::from(self.params.header_len);
        let room = mbuf.room(-header_len.cast_signed(), header_len);
        if !room.put([0; HEADER_LEN_MAX]) {
            room.put([0; HEADER_LEN_LEGACY]);
        }
        (mbuf.data_iova() - header_len as u64, (mbuf.data_len() + header_len) as u32)
    }

    /// A packet without room for the header before the data.
    #[cold]
    fn stage_odd(&mut self, mbuf: Mbuf) {
        let id = self.ring.next_id();
        let chain = self.stage_parts(&mbuf, self.slots(&mbuf));
        self.room -= u32::from(chain.len);
        if chain.len > 1 {
            self.chains[usize::from(id)] = chain;
            self.long += 1;
        }
        self.mbufs[usize::from(id)] = Staged::new(mbuf);
        self.ring.push(id);
    }

    /// A packet whose header cannot go before its data: an indirect table if that saves descriptors, else a chain.
    fn stage_parts(&mut self, mbuf: &Mbuf, slots: u16) -> Chain {
        let header = self.side.span.iova(self.side.header_at);
        let header_len = u32::from(self.params.header_len);
        let mut parts = std::iter::once((header, header_len)).chain(mbuf.segments().map(part)).peekable();
        if slots == 1 {
            let first = usize::from(self.ring.next_id()) * TABLE;
            let mut len = 0;
            while let Some((addr, bytes)) = parts.next() {
                let flags = if parts.peek().is_some() { DESC_F_NEXT } else { 0 };
                let desc = &self.side.tables[first + usize::from(len)];
                desc.addr.store(addr, Ordering::Relaxed);
                desc.meta.store(R::table_meta(bytes, flags, len), Ordering::Relaxed);
                len += 1;
            }
            let table = self.side.span.iova(first * size_of::<Desc>());
            let last = self.ring.desc(table, u32::from(len) * size_of::<Desc>() as u32, DESC_F_INDIRECT);
            return Chain { len: 1, last };
        }
        let mut last = 0;
        while let Some((addr, bytes)) = parts.next() {
            last = self.ring.desc(addr, bytes, if parts.peek().is_some() { DESC_F_NEXT } else { 0 });
        }
        Chain { len: slots, last }
    }

    /// The packet behind the next completion; nothing if there is none.
    #[inline(always)]
    fn take(&mut self) -> Staged {
        let (id, _) = self.ring.pop(0, |id| descs(&self.chains, id));
        let Some(mbuf) = self.mbufs.get_mut(id as usize).map(std::mem::take).filter(Staged::is_full) else {
            return Staged::EMPTY;
        };
        self.reclaim(id as u16);
        mbuf
    }

    /// As [`take`](Self::take), `N` completions.
    #[inline(always)]
    fn take_group<const N: usize>(&mut self) -> [Staged; N] {
        if !R::GROUPS || self.long > 0 {
            return from_fn(|_| self.take());
        }
        let group = take_group::<_, N>(&mut self.ring, 0, &mut self.mbufs, Staged::is_full);
        self.room += group.count;
        group.taken
    }

    /// Takes the descriptors of the packet with this id back.
    #[inline(always)]
    fn reclaim(&mut self, id: u16) {
        let chain = std::mem::take(&mut self.chains[usize::from(id)]);
        if chain.len == 0 {
            self.ring.reclaim(id, id, 1);
            self.room += 1;
        } else {
            self.ring.reclaim(id, chain.last, chain.len);
            self.room += u32::from(chain.len);
            self.long -= 1;
        }
    }
}

#[inline(always)]
fn descs(chains: &[Chain], id: u16) -> u16 {
    chains.get(usize::from(id)).map_or(1, |chain| chain.len.max(1))
}

/// A segment's address and length.
fn part(segment: Segment<'_>) -> (u64, u32) {
    (segment.iova(), segment.data().len() as u32)
}

impl<R: DriverRing> TxRing for VirtioTx<R> {
    fn size(&self) -> u16 {
        self.params.limit
    }

    #[inline(always)]
    fn room(&self) -> u16 {
        self.room as u16
    }

    #[inline(always)]
    fn slots(&self, mbuf: &Mbuf) -> u16 {
        let segments = mbuf.nb_segs();
        // A table must not be longer than the ring (2.7.5.3.1).
        let table = TABLE.min(self.ring.size().into());
        if mbuf.can_push(self.params.header_len.into()) || self.params.indirect && usize::from(segments) < table {
            1
        } else {
            segments.saturating_add(1)
        }
    }

    #[inline(always)]
    fn stage(&mut self, mbuf: Mbuf) {
        if !mbuf.can_push(self.params.header_len.into()) {
            return self.stage_odd(mbuf);
        }
        let (addr, len) = self.push_header(&mbuf);
        let id = self.ring.push_single(addr, len, 0);
        self.mbufs[usize::from(id)] = Staged::new(mbuf);
        self.room -= 1;
    }

    #[inline(always)]
    fn stage_group<const N: usize>(&mut self, mbufs: [Mbuf; N]) {
        if !R::GROUPS || mbufs.iter().any(|mbuf| !mbuf.can_push(self.params.header_len.into())) {
            return mbufs.into_iter().for_each(|mbuf| self.stage(mbuf));
        }
        let mut buffers = [(0, 0); N];
        for (buffer, mbuf) in buffers.iter_mut().zip(&mbufs) {
            *buffer = self.push_header(mbuf);
        }
        let ids = self.ring.push_group(buffers, 0);
        for (id, mbuf) in ids.into_iter().zip(mbufs) {
            self.mbufs[usize::from(id)] = Staged::new(mbuf);
        }
        self.room -= N as u32;
    }

    #[inline(always)]
    fn publish(&mut self) -> bool {
        self.ring.publish()
    }

    #[cold]
    fn rewind(&mut self) -> Option<u32> {
        let size = self.mbufs.len();
        let mut waiting = Vec::with_capacity(size);
        for id in oldest_first(self.ring.next_id(), size) {
            let Some(mbuf) = self.mbufs[usize::from(id)].take() else { continue };
            self.reclaim(id);
            waiting.push(mbuf);
        }
        let base = self.ring.rewind();
        for mbuf in waiting {
            // It takes what it took before, unless somebody has come to share it since.
            if self.slots(&mbuf) <= self.room() {
                self.stage(mbuf);
            }
        }
        self.ring.publish();
        Some(base)
    }

    #[inline]
    fn reap(&mut self, stats: &QueueStats) -> usize {
        let mut freed = 0;
        let mut group = [const { Staged::EMPTY }; FREE_GROUP];
        // At most once round the ring, however fast the device is.
        let mut limit = self.ring.size();
        while limit > 0 {
            let max = limit.min(FREE_GROUP as u16);
            let ready = self.ready(max).unwrap_or_else(|fault| {
                stats.fault(fault);
                0
            });
            let ready = ready.min(max);
            if ready == 0 {
                break;
            }
            let group = &mut group[..usize::from(ready)];
            let (groups, rest) = group.as_chunks_mut::<REAP_GROUP>();
            for out in groups {
                *out = self.take_group();
            }
            for out in rest {
                *out = self.take();
            }
            let full = group.iter().filter(|out| out.is_full()).count();
            freed += full;
            for _ in full..group.len() {
                stats.fault(Fault::BadId);
            }
            let slowly = Staged::free_bulk(group);
            if slowly > 0 {
                stats.slow_frees.add(slowly as u64);
            }
            limit -= ready;
        }
        freed
    }
}
