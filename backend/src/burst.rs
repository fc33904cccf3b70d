//! The two bursts of the device end: frames out of a guest's transmit ring, and into its receive ring. One copy each.

use std::sync::Arc;

use pmd::mbuf::{Chain, HEADROOM, Mbuf, MbufPool};
use pmd::port::{Burst, Fault, QueueStats, RxBurst, TxBurst};
use pmd::shared::{SharedBytes, prefetch};
use pmd::virtio::spec::{FRAME_LEN_MIN, HEADER_LEN_LEGACY, HEADER_LEN_MAX, HEADER_NUM_BUFFERS};

use crate::memory::GuestMemory;
use crate::queue::chain::Pieces;
use crate::queue::{DeviceRing, Head};

/// Chains looked at together, so that their data is fetched together.
const GROUP: usize = 8;
/// Mbufs got together.
const SPARE: usize = 32;
/// Bytes of a frame whose last line is worth fetching ahead.
const FRAME_LEN_SHORT: usize = 60;
/// The longest frame taken from a guest, in bytes.
const FRAME_LEN_MAX: usize = 65535;

/// The device end of a guest's transmit ring: frames come from the guest.
pub struct FromGuest<R> {
    ring: R,
    memory: Arc<GuestMemory>,
    hint: usize,
    copier: Copier,
    stats: Arc<QueueStats>,
}

/// Makes mbufs of a guest's frames.
struct Copier {
    pool: MbufPool,
    /// Mbufs to copy the next frames into.
    spare: Vec<Mbuf>,
    header_len: usize,
    port: u16,
}

impl<R: DeviceRing> FromGuest<R> {
    /// A queue on `ring` that copies frames into mbufs of `pool`, which will say they came from `port`.
    pub fn new(ring: R, pool: MbufPool, header_len: usize, port: u16, stats: Arc<QueueStats>) -> Self {
        let memory = Arc::clone(ring.memory());
        let copier = Copier { pool, spare: Vec::with_capacity(2 * SPARE), header_len, port };
        Self { ring, memory, hint: 0, copier, stats }
    }

    /// Takes `N` chains, copies their frames out, and completes them; false if there is no mbuf for one.
    #[inline(always)]
    fn take<const N: usize>(&mut self, tally: &mut Tally, burst: &mut Burst) -> bool {
        if self.copier.spare.len() < N && !self.copier.restock(N) {
            self.stats.fault(Fault::NoMbuf);
            return false;
        }
        let chains: [(Head, Option<SharedBytes<'_>>); N] = std::array::from_fn(|_| {
            let head = self.ring.pop();
            let data = head.plain(&self.memory, false, &mut self.hint);
            if let Some(data) = data {
                prefetch(data.as_ptr());
                prefetch(data.as_ptr().wrapping_add(self.copier.header_len + FRAME_LEN_SHORT));
            }
            (head, data)
        });
        for (head, data) in &chains {
            let copied = match data.and_then(|data| self.copier.copy_out(data)) {
                Some(mbuf) => Ok(mbuf),
                None => self.copier.gather(&self.ring, head),
            };
            match copied {
                Ok(mbuf) => {
                    tally.packets += 1;
                    tally.bytes += mbuf.pkt_len();
                    self.stats.size(mbuf.pkt_len());
                    // Never full: no more chains are taken than the burst has room for.
                    drop(burst.push(mbuf));
                }
                Err(fault) => self.stats.fault(fault),
            }
            self.ring.complete(head, 0);
        }
        true
    }
}

impl Copier {
    /// Gets spare mbufs, at least `needed`. If there are none the frames stay with the guest.
    #[cold]
    fn restock(&mut self, needed: usize) -> bool {
        self.pool.raw_alloc_bulk(&mut self.spare, SPARE).is_ok()
            || self.pool.raw_alloc_bulk(&mut self.spare, needed).is_ok()
    }

    /// The frame of a chain that is one piece, if it is a frame and fits into one mbuf.
    #[inline(always)]
    fn copy_out(&mut self, data: SharedBytes<'_>) -> Option<Mbuf> {
        let frame = data.sub(self.header_len, data.len().checked_sub(self.header_len)?)?;
        let fits = |mbuf: &mut Mbuf| (FRAME_LEN_MIN..=usize::from(mbuf.buf_len() - HEADROOM)).contains(&frame.len());
        let mut mbuf = self.spare.pop_if(fits)?;
        mbuf.receive(HEADROOM, self.port, frame.len() as u16);
        frame.copy_to(mbuf.data());
        Some(mbuf)
    }

    /// The frame of a chain of any shape: the header may end anywhere in it, and the frame may need several mbufs.
    #[cold]
    fn gather<R: DeviceRing>(&mut self, ring: &R, head: &Head) -> Result<Mbuf, Fault> {
        let mut skip = self.header_len;
        let mut frame: Option<Chain> = None;
        let (mut segment, mut filled) = (None, 0);
        let mut total = 0;
        for piece in Pieces::new(ring, head, false) {
            let piece = piece?;
            let skipped = skip.min(piece.len());
            skip -= skipped;
            let mut rest = piece.sub(skipped, piece.len() - skipped).ok_or(Fault::BadLength)?;
            total += rest.len();
            if total > FRAME_LEN_MAX {
                return Err(Fault::Long);
            }
            while !rest.is_empty() {
                let mut mbuf: Mbuf = match segment.take() {
                    Some(mbuf) => mbuf,
                    None => self.spare.pop().or_else(|| self.pool.raw_alloc()).ok_or(Fault::Starved)?,
                };
                let n = rest.len().min(usize::from(mbuf.buf_len() - HEADROOM) - filled);
                mbuf.receive(HEADROOM, self.port, (filled + n) as u16);
                rest.copy_to(mbuf.data().sub(filled, n).ok_or(Fault::BadLength)?);
                rest = rest.sub(n, rest.len() - n).ok_or(Fault::BadLength)?;
                filled += n;
                if filled < usize::from(mbuf.buf_len() - HEADROOM) {
                    segment = Some(mbuf);
                } else {
                    frame = Some(append(frame, mbuf)?);
                    filled = 0;
                }
            }
        }
        if total < FRAME_LEN_MIN {
            return Err(Fault::Short);
        }
        if let Some(mbuf) = segment {
            frame = Some(append(frame, mbuf)?);
        }
        frame.map(Chain::finish).ok_or(Fault::Short)
    }
}

fn append(frame: Option<Chain>, mbuf: Mbuf) -> Result<Chain, Fault> {
    match frame {
        None => Ok(Chain::new(mbuf)),
        Some(mut chain) => match chain.push(mbuf) {
            Ok(()) => Ok(chain),
            Err(_) => Err(Fault::Long),
        },
    }
}

/// What one burst moved.
#[derive(Default)]
struct Tally {
    packets: usize,
    bytes: usize,
}

impl<R: DeviceRing + 'static> RxBurst for FromGuest<R> {
    fn rx_burst(&mut self, burst: &mut Burst) -> usize {
        let ready = self.ring.ready(burst.room() as u16).unwrap_or_else(|fault| {
            self.stats.fault(fault);
            0
        });
        let mut left = usize::from(ready).min(burst.room());
        let mut tally = Tally::default();
        while left >= GROUP && self.take::<GROUP>(&mut tally, burst) {
            left -= GROUP;
        }
        while left > 0 && self.take::<1>(&mut tally, burst) {
            left -= 1;
        }
        self.stats.packets.add(tally.packets as u64);
        self.stats.bytes.add(tally.bytes as u64);
        flush(&mut self.ring, &self.stats);
        tally.packets
    }

    fn pending(&mut self) -> usize {
        usize::from(self.ring.ready(u16::MAX).unwrap_or(0))
    }

    fn arm(&mut self) -> bool {
        self.ring.arm();
        if self.pending() > 0 {
            self.ring.disarm();
            return false;
        }
        true
    }

    fn disarm(&mut self) {
        self.ring.disarm();
    }
}

/// One flush and one call test a burst.
#[inline(always)]
fn flush(ring: &mut impl DeviceRing, stats: &QueueStats) {
    match ring.flush() {
        Some(true) => stats.kicks.add(1),
        Some(false) => stats.kicks_suppressed.add(1),
        None => {}
    }
}

/// The device end of a guest's receive ring: frames go to the guest.
pub struct ToGuest<R, const MERGEABLE: bool> {
    ring: R,
    header_len: usize,
    hint: usize,
    stats: Arc<QueueStats>,
}

/// What became of a frame.
enum Put {
    /// It is in the guest.
    Done,
    /// The ring has no (or not enough) buffers for it now.
    NoRoom,
    /// It was refused.
    Dropped(Fault),
}

impl<R: DeviceRing, const MERGEABLE: bool> ToGuest<R, MERGEABLE> {
    /// A queue on `ring`.
    pub fn new(ring: R, header_len: usize, stats: Arc<QueueStats>) -> Self {
        Self { ring, header_len, hint: 0, stats }
    }

    /// Puts a frame into the next buffer, if it is a single piece on both sides; `ready` is how many chains there are.
    #[inline(always)]
    fn put(&mut self, mbuf: &Mbuf, ready: &mut u16) -> Put {
        if *ready == 0 {
            // Frames of several buffers have used up those looked for at first.
            *ready = self.ring.ready(GROUP as u16).unwrap_or(0);
            if *ready == 0 {
                return Put::NoRoom;
            }
        }
        let mark = self.ring.mark();
        let head = self.ring.pop();
        let memory = self.ring.memory();
        if mbuf.nb_segs() == 1
            && let Some(room) = head.plain(memory, true, &mut self.hint)
            && let Some(body) = room.sub(self.header_len, mbuf.data_len())
        {
            self.write_header(room);
            mbuf.data().copy_to(body);
            self.ring.complete(&head, (self.header_len + mbuf.data_len()) as u32);
            *ready -= 1;
            return Put::Done;
        }
        self.ring.rewind(mark);
        self.scatter(mbuf, ready)
    }

    /// Writes the header of a frame in one buffer.
    #[inline(always)]
    fn write_header(&self, room: SharedBytes<'_>) {
        if self.header_len == HEADER_LEN_MAX {
            room.put(header(1));
        } else {
            room.put([0; HEADER_LEN_LEGACY]);
        }
    }

    /// Spreads a frame over as many chains as it needs (one, unless `MERGEABLE`). Nothing is completed before all of it is
    /// written, so a frame that turns out not to fit leaves the ring as it was.
    #[cold]
    fn scatter(&mut self, mbuf: &Mbuf, ready: &mut u16) -> Put {
        let most = if MERGEABLE { self.ring.size() } else { 1 };
        let mark = self.ring.mark();
        let mut source = mbuf.segments().map(|segment| segment.data()).filter(|data| !data.is_empty());
        let mut rest = source.next();
        let mut chains: u16 = 0;
        let mut first: Option<Head> = None;
        while rest.is_some() {
            if chains == *ready && chains < most {
                // Those looked for so far may be fewer than there are.
                *ready += self.ring.ready(GROUP as u16).unwrap_or(0);
            }
            if chains == (*ready).min(most) {
                self.ring.rewind(mark);
                return if chains == most { Put::Dropped(Fault::Long) } else { Put::NoRoom };
            }
            let head = self.ring.pop();
            chains += 1;
            let skip = if first.is_none() { self.header_len } else { 0 };
            if let Err(fault) = fill(&self.ring, &head, skip, &mut rest, &mut source) {
                return self.discard(mark, chains, ready, fault);
            }
            first.get_or_insert(head);
        }
        let Some(head) = first else { return Put::Dropped(Fault::Short) };
        if let Err(fault) = write_header(&self.ring, &head, &header(chains)[..self.header_len]) {
            return self.discard(mark, chains, ready, fault);
        }
        self.ring.rewind(mark);
        self.complete_scattered(self.header_len + mbuf.pkt_len(), chains);
        *ready -= chains;
        Put::Done
    }

    /// Completes the next `chains` chains with what `scatter` wrote into each, `left` bytes in all.
    fn complete_scattered(&mut self, mut left: usize, chains: u16) {
        for i in 0..chains {
            let head = self.ring.pop();
            // The last one holds the rest, whatever the guest says by now of the capacities.
            let len = if i + 1 == chains { left } else { capacity(&self.ring, &head).min(left) };
            left -= len;
            self.ring.complete(&head, len as u32);
        }
    }

    /// Gives the guest back, empty, a false chain and those before it that this frame had begun to fill.
    fn discard(&mut self, mark: R::Mark, chains: u16, ready: &mut u16, fault: Fault) -> Put {
        self.ring.rewind(mark);
        for _ in 0..chains {
            let head = self.ring.pop();
            self.ring.complete(&head, 0);
        }
        *ready -= chains;
        Put::Dropped(fault)
    }
}

/// Fills one chain, behind `skip` bytes, from `rest` and what follows in `source`.
fn fill<'a, R: DeviceRing>(
    ring: &R,
    head: &Head,
    mut skip: usize,
    rest: &mut Option<SharedBytes<'a>>,
    source: &mut impl Iterator<Item = SharedBytes<'a>>,
) -> Result<(), Fault> {
    for piece in Pieces::new(ring, head, true) {
        let piece = piece?;
        let skipped = skip.min(piece.len());
        skip -= skipped;
        let mut room = piece.sub(skipped, piece.len() - skipped).ok_or(Fault::BadLength)?;
        while let Some(data) = *rest
            && !room.is_empty()
        {
            let n = data.copy_to(room);
            room = room.sub(n, room.len() - n).ok_or(Fault::BadLength)?;
            *rest = data.sub(n, data.len() - n).filter(|data| !data.is_empty()).or_else(|| source.next());
        }
    }
    if skip > 0 { Err(Fault::Short) } else { Ok(()) }
}

/// Writes the header at the start of a chain, over as many pieces as that takes.
fn write_header<R: DeviceRing>(ring: &R, head: &Head, mut header: &[u8]) -> Result<(), Fault> {
    for piece in Pieces::new(ring, head, true) {
        header = &header[piece?.write(header)..];
        if header.is_empty() {
            return Ok(());
        }
    }
    Err(Fault::Short)
}

/// Bytes that a chain can take.
fn capacity<R: DeviceRing>(ring: &R, head: &Head) -> usize {
    Pieces::new(ring, head, true).map_while(Result::ok).map(|piece| piece.len()).sum()
}

/// A header that asks for nothing, for a frame of so many buffers (5.1.6.4).
#[inline(always)]
fn header(buffers: u16) -> [u8; HEADER_LEN_MAX] {
    let mut header = [0; HEADER_LEN_MAX];
    header[HEADER_NUM_BUFFERS..].copy_from_slice(&buffers.to_le_bytes());
    header
}

impl<R: DeviceRing, const MERGEABLE: bool> TxBurst for ToGuest<R, MERGEABLE> {
    fn tx_burst(&mut self, burst: &mut Burst) -> usize {
        if burst.is_empty() {
            return 0;
        }
        let mut ready = self.ring.ready(burst.len() as u16).unwrap_or_else(|fault| {
            self.stats.fault(fault);
            0
        });
        let (mut taken, mut tally) = (0, Tally::default());
        for mbuf in burst.as_slice() {
            match self.put(mbuf, &mut ready) {
                Put::Done => {
                    tally.packets += 1;
                    tally.bytes += mbuf.pkt_len();
                    self.stats.size(mbuf.pkt_len());
                }
                Put::NoRoom => break,
                Put::Dropped(fault) => self.stats.fault(fault),
            }
            taken += 1;
        }
        self.stats.packets.add(tally.packets as u64);
        self.stats.bytes.add(tally.bytes as u64);
        flush(&mut self.ring, &self.stats);
        Mbuf::free_bulk(burst.take_front(taken));
        taken
    }

    fn reap(&mut self) -> usize {
        0
    }
}
