//! Receiving over a virtqueue: one descriptor a buffer, headers in the headroom (virtio 1.3, 5.1.6.3 and 5.1.6.4).

use std::array::from_fn;

use super::ring::{DriverRing, oldest_first, take_group};
use super::spec::{DESC_F_WRITE, FRAME_LEN_MIN};
use crate::mbuf::{HEADROOM, Mbuf};
use crate::port::Fault;
use crate::rx::{RxRing, Taken};

/// What a receive ring needs to know beyond its layout.
#[derive(Clone, Copy, Debug)]
pub struct RxParams {
    /// Descriptors in use, at most the ring's size.
    pub limit: u16,
    /// Bytes of the virtio header.
    pub header_len: u16,
    /// Bytes of a data room, headroom included.
    pub room: u16,
    /// The port number that received mbufs carry.
    pub port: u16,
}

/// A receive ring; `MERGEABLE` if a frame may fill several buffers.
pub struct VirtioRx<R, const MERGEABLE: bool> {
    ring: R,
    /// The buffer behind each id.
    mbufs: Box<[Option<Mbuf>]>,
    /// Free descriptors. Wide, like all counters that change per packet: beside a neighbour of 16 bits the compiler loads both
    /// at once, and each load then waits for the store before it.
    room: u32,
    header_len: u16,
    /// Bytes of each buffer, header included.
    buffer_len: u32,
    port: u16,
}

impl<R: DriverRing, const MERGEABLE: bool> VirtioRx<R, MERGEABLE> {
    /// Receives into `ring`, which is empty.
    pub fn new(ring: R, params: RxParams) -> Self {
        Self {
            mbufs: (0..ring.size()).map(|_| None).collect(),
            room: params.limit.min(ring.size()).into(),
            ring,
            header_len: params.header_len,
            buffer_len: u32::from(params.room - HEADROOM + params.header_len),
            port: params.port,
        }
    }

    /// Where the device finds a buffer. The header goes right before the data, so data begins where everybody expects it.
    #[inline(always)]
    fn buffer_iova(&self, mbuf: &Mbuf) -> u64 {
        mbuf.buf_iova(HEADROOM - self.header_len)
    }
}

impl<R: DriverRing, const MERGEABLE: bool> RxRing for VirtioRx<R, MERGEABLE> {
    const SCATTER: bool = MERGEABLE;
    type Claim = u32;

    #[inline(always)]
    fn ready(&mut self, max: u16) -> Result<u16, Fault> {
        self.ring.ready_singles(max)
    }

    #[inline(always)]
    fn take(&mut self) -> Taken<u32> {
        let (id, len) = self.ring.pop(self.buffer_len, |_| 1);
        let Some(mbuf) = self.mbufs.get_mut(id as usize).and_then(Option::take) else { return Err(Fault::BadId) };
        self.ring.reclaim(id as u16, id as u16, 1);
        self.room += 1;
        // After a false id the buffer is ours again, but nothing is known of what is in it.
        Ok((mbuf, len?))
    }

    #[inline(always)]
    fn take_group<const N: usize>(&mut self) -> [Taken<u32>; N] {
        if !R::GROUPS {
            return from_fn(|_| self.take());
        }
        let mut group = take_group::<_, N>(&mut self.ring, self.buffer_len, &mut self.mbufs, Option::is_some);
        self.room += group.count;
        from_fn(|i| Ok((group.taken[i].take().ok_or(Fault::BadId)?, group.claims[i].1?)))
    }

    #[inline(always)]
    fn open(&self, mbuf: &mut Mbuf, claim: u32) -> Result<u16, Fault> {
        if claim > self.buffer_len {
            return Err(Fault::BadLength);
        }
        let Some(len) = claim.checked_sub(self.header_len.into()) else { return Err(Fault::Short) };
        if !MERGEABLE && len < FRAME_LEN_MIN as u32 {
            return Err(Fault::Short);
        }
        mbuf.receive(HEADROOM, self.port, len as u16);
        if !MERGEABLE {
            return Ok(0);
        }
        // The device's word, read once. 0 is taken for 1, as DPDK does.
        let buffers = mbuf.room(-2, 2).get().map_or(0, u16::from_le_bytes).max(1);
        if buffers > self.ring.size() {
            return Err(Fault::BadSegments);
        }
        if buffers == 1 && len < FRAME_LEN_MIN as u32 {
            return Err(Fault::Short);
        }
        Ok(buffers - 1)
    }

    #[inline(always)]
    fn extend(&self, mbuf: &mut Mbuf, claim: u32, left: u16) -> Result<u16, Fault> {
        if claim > self.buffer_len {
            return Err(Fault::BadLength);
        }
        // Only a frame's first buffer has a header.
        mbuf.receive(HEADROOM - self.header_len, self.port, claim as u16);
        Ok(left - 1)
    }

    #[inline(always)]
    fn room(&self) -> u16 {
        self.room as u16
    }

    #[inline(always)]
    fn stage(&mut self, mbuf: Mbuf) {
        let id = self.ring.push_single(self.buffer_iova(&mbuf), self.buffer_len, DESC_F_WRITE);
        self.mbufs[usize::from(id)] = Some(mbuf);
        self.room -= 1;
    }

    #[inline(always)]
    fn stage_group<const N: usize>(&mut self, mbufs: [Mbuf; N]) {
        if !R::GROUPS {
            return mbufs.into_iter().for_each(|mbuf| self.stage(mbuf));
        }
        let mut buffers = [(0, self.buffer_len); N];
        for (buffer, mbuf) in buffers.iter_mut().zip(&mbufs) {
            buffer.0 = self.buffer_iova(mbuf);
        }
        let ids = self.ring.push_group(buffers, DESC_F_WRITE);
        for (id, mbuf) in ids.into_iter().zip(mbufs) {
            self.mbufs[usize::from(id)] = Some(mbuf);
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
            self.ring.reclaim(id, id, 1);
            self.room += 1;
            waiting.push(mbuf);
        }
        let base = self.ring.rewind();
        for mbuf in waiting {
            self.stage(mbuf);
        }
        self.ring.publish();
        Some(base)
    }

    fn arm(&mut self) {
        self.ring.arm();
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}
