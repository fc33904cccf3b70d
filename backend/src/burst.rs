//! The two bursts of the device end: frames out of a guest's transmit ring, and into its receive ring. One copy each.

use std::array::from_fn;
use std::sync::Arc;

use pmd::mbuf::{Chain, HEADROOM, Mbuf, MbufPool};
use pmd::port::{Burst, Fault, QueueStats, RxBurst, TxBurst};
use pmd::shared::{SharedBytes, prefetch, prefetch_write};
use pmd::virtio::spec::{FRAME_LEN_MIN, HEADER_LEN_LEGACY, HEADER_LEN_MAX, HEADER_NUM_BUFFERS};

use crate::memory::Window;
use crate::queue::chain::Pieces;
use crate::queue::{DeviceRing, Head, Single};

/// Chains looked at together, so that their data is fetched together.
const GROUP: usize = 8;
/// Mbufs got together.
const SPARE: usize = 32;
/// Bytes of a frame whose last line is worth fetching ahead.
const FRAME_LEN_SHORT: usize = 60;
/// The longest frame taken from a guest, in bytes.
const FRAME_LEN_MAX: usize = 65535;

/// A burst on a ring, in the locals of whoever runs it.
struct Walk<'a, R: DeviceRing> {
    ring: &'a R,
    at: R::Cursor,
    window: Window<'a>,
}

impl<'a, R: DeviceRing> Walk<'a, R> {
    /// Begins; `region` is where the last burst ended. None if the driver's claim is false, which is counted.
    #[inline(always)]
    fn begin(ring: &'a R, region: usize, stats: &QueueStats) -> Option<Self> {
        match ring.begin() {
            Ok(at) => Some(Self { ring, at, window: ring.memory().window(region) }),
            Err(fault) => {
                stats.fault(fault);
                None
            }
        }
    }

    /// The next `N` chains and their bytes, if that many are there, each just one buffer in one piece; else none are taken.
    #[inline(always)]
    fn next_group<const N: usize>(&mut self, writable: bool) -> Option<([Single; N], [SharedBytes<'a>; N])> {
        let mut at = self.at;
        let chains = self.ring.pop_group::<N>(&mut at, writable)?;
        let bytes = from_fn(|i| chains[i].bytes(self.ring.memory(), &mut self.window));
        let bytes = all(bytes)?;
        self.at = at;
        Some((chains, bytes))
    }

    #[inline(always)]
    fn complete_group<const N: usize>(&mut self, chains: &[Single; N], written: [usize; N]) {
        self.ring.complete_group(&mut self.at, chains, from_fn(|i| written[i] as u32));
    }
}

/// All `N` of them, or none.
#[inline(always)]
fn all<T: Copy, const N: usize>(parts: [Option<T>; N]) -> Option<[T; N]> {
    let first = parts[0]?;
    parts.iter().all(Option::is_some).then(|| from_fn(|i| parts[i].unwrap_or(first)))
}

/// Chains that wait at `at`, at most `max`.
fn waiting<R: DeviceRing>(ring: &R, mut at: R::Cursor, max: u16) -> usize {
    (0..max).take_while(|_| ring.pop(&mut at).is_some()).count()
}

/// The device end of a guest's transmit ring: frames come from the guest.
pub struct FromGuest<R> {
    ring: R,
    /// Where in the guest's memory the last frame was.
    region: usize,
    copier: Copier,
    stats: Arc<QueueStats>,
}

/// Makes mbufs of a guest's frames.
struct Copier {
    pool: MbufPool,
    /// Mbufs to copy the next frames into.
    spare: Vec<Mbuf>,
    header_len: usize,
    /// The longest frame that one mbuf can hold, in bytes.
    frame_len_max: usize,
    port: u16,
}

impl<R: DeviceRing> FromGuest<R> {
    /// A queue on `ring` that copies frames into mbufs of `pool`, which will say they came from `port`.
    pub fn new(ring: R, pool: MbufPool, header_len: usize, port: u16, stats: Arc<QueueStats>) -> Self {
        let frame_len_max = usize::from(pool.room() - HEADROOM);
        let copier = Copier { pool, spare: Vec::with_capacity(2 * SPARE), header_len, frame_len_max, port };
        Self { ring, region: 0, copier, stats }
    }
}

impl Copier {
    /// Takes `N` chains, copies their frames out, and completes them, if that many are there, each a frame in one piece that fits
    /// into one mbuf; else nothing is done, and false. There are `N` spare mbufs, and room for as many in `burst`.
    #[inline(always)]
    fn take_group<'a, const N: usize>(
        &mut self,
        walk: &mut Walk<'a, impl DeviceRing>,
        tally: &mut Tally<'_>,
        burst: &mut Burst,
    ) -> bool {
        let start = walk.at;
        let Some((chains, data)) = walk.next_group::<N>(false) else { return false };
        for data in &data {
            prefetch(data.as_ptr());
            prefetch(data.as_ptr().wrapping_add(self.header_len + FRAME_LEN_SHORT));
        }
        let fits = |frame: &SharedBytes<'_>| (FRAME_LEN_MIN..=self.frame_len_max).contains(&frame.len());
        let frame =
            |data: SharedBytes<'a>| data.sub(self.header_len, data.len().checked_sub(self.header_len)?).filter(fits);
        let Some(frames) = all::<_, N>(from_fn(|i| frame(data[i]))) else {
            walk.at = start;
            return false;
        };
        for frame in frames {
            let Some(mut mbuf) = self.spare.pop() else { break };
            mbuf.receive(HEADROOM, self.port, frame.len() as u16);
            frame.copy_to(mbuf.data());
            tally.count(Ok(frame.len()));
            // Never full: no more chains are taken than the burst has room for.
            drop(burst.push(mbuf));
        }
        walk.complete_group(&chains, [0; N]);
        true
    }

    /// Takes one chain of any shape, copies its frame out, and completes it; false if there is none.
    #[cold]
    fn take_odd(&mut self, walk: &mut Walk<'_, impl DeviceRing>, tally: &mut Tally<'_>, burst: &mut Burst) -> bool {
        let Some(head) = walk.ring.pop(&mut walk.at) else { return false };
        tally.count(self.gather(walk.ring, &head).map(|mbuf| {
            let len = mbuf.pkt_len();
            drop(burst.push(mbuf));
            len
        }));
        walk.ring.complete(&mut walk.at, &head, 0);
        true
    }

    /// Whether there are `needed` spare mbufs by now.
    #[inline(always)]
    fn has(&mut self, needed: usize) -> bool {
        self.spare.len() >= needed || self.restock(needed)
    }

    /// Gets spare mbufs, at least `needed`. If there are none the frames stay with the guest.
    #[cold]
    fn restock(&mut self, needed: usize) -> bool {
        self.pool.raw_alloc_bulk(&mut self.spare, SPARE).is_ok()
            || self.pool.raw_alloc_bulk(&mut self.spare, needed).is_ok()
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
struct Tally<'a> {
    packets: usize,
    bytes: usize,
    stats: &'a QueueStats,
}

impl<'a> Tally<'a> {
    fn new(stats: &'a QueueStats) -> Self {
        Self { packets: 0, bytes: 0, stats }
    }

    /// Counts a frame's length in bytes, or why it was dropped.
    #[inline(always)]
    fn count(&mut self, frame: Result<usize, Fault>) {
        match frame {
            Ok(len) => {
                self.packets += 1;
                self.bytes += len;
                self.stats.size(len);
            }
            Err(fault) => self.stats.fault(fault),
        }
    }

    /// Adds the burst to the statistics; its packets.
    #[inline(always)]
    fn settle(&self) -> usize {
        self.stats.packets.add(self.packets as u64);
        self.stats.bytes.add(self.bytes as u64);
        self.packets
    }
}

impl<R: DeviceRing + 'static> RxBurst for FromGuest<R> {
    fn rx_burst(&mut self, burst: &mut Burst) -> usize {
        let Some(mut walk) = Walk::begin(&self.ring, self.region, &self.stats) else { return 0 };
        let mut tally = Tally::new(&self.stats);
        let copier = &mut self.copier;
        'burst: while burst.room() > 0 {
            if burst.room() >= GROUP && copier.has(GROUP) && copier.take_group::<GROUP>(&mut walk, &mut tally, burst) {
                continue;
            }
            // The last few, or some that are not plain: one by one.
            for _ in 0..burst.room().min(GROUP) {
                if !copier.has(1) {
                    if waiting(walk.ring, walk.at, 1) > 0 {
                        self.stats.fault(Fault::NoMbuf);
                    }
                    break 'burst;
                }
                if !copier.take_group::<1>(&mut walk, &mut tally, burst)
                    && !copier.take_odd(&mut walk, &mut tally, burst)
                {
                    break 'burst;
                }
            }
        }
        let packets = tally.settle();
        let at = walk.at;
        self.region = walk.window.region();
        flush(&mut self.ring, at, &self.stats);
        packets
    }

    fn pending(&mut self) -> usize {
        self.ring.begin().map_or(0, |at| waiting(&self.ring, at, self.ring.size()))
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
fn flush<R: DeviceRing>(ring: &mut R, at: R::Cursor, stats: &QueueStats) {
    match ring.flush(at) {
        Some(true) => stats.kicks.add(1),
        Some(false) => stats.kicks_suppressed.add(1),
        None => {}
    }
}

/// The device end of a guest's receive ring: frames go to the guest.
pub struct ToGuest<R, const MERGEABLE: bool> {
    ring: R,
    header_len: usize,
    /// Where in the guest's memory the last buffer was.
    region: usize,
    stats: Arc<QueueStats>,
}

impl<R: DeviceRing, const MERGEABLE: bool> ToGuest<R, MERGEABLE> {
    /// A queue on `ring`.
    pub fn new(ring: R, header_len: usize, stats: Arc<QueueStats>) -> Self {
        Self { ring, header_len, region: 0, stats }
    }

    /// Puts `N` frames into the next `N` buffers, if each is a single piece on both sides; else nothing is done, and false.
    #[inline(always)]
    fn put_group<const N: usize>(&self, walk: &mut Walk<'_, R>, mbufs: &[Mbuf; N], tally: &mut Tally<'_>) -> bool {
        let start = walk.at;
        let Some((chains, rooms)) = walk.next_group::<N>(true) else { return false };
        let lens = from_fn(|i| self.header_len + mbufs[i].data_len());
        for (room, len) in rooms.iter().zip(lens) {
            // The guest has read both lines since we wrote them last.
            prefetch_write(room.as_ptr());
            prefetch_write(room.as_ptr().wrapping_add(len - 1));
        }
        let fits = rooms.iter().zip(lens).all(|(room, len)| len <= room.len());
        if !fits || mbufs.iter().any(|mbuf| mbuf.nb_segs() > 1) {
            walk.at = start;
            return false;
        }
        for (room, mbuf) in rooms.iter().zip(mbufs) {
            self.write_header(*room);
            if let Some(body) = room.sub(self.header_len, mbuf.data_len()) {
                mbuf.data().copy_to(body);
            }
            tally.count(Ok(mbuf.data_len()));
        }
        walk.complete_group(&chains, lens);
        true
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

    /// Spreads a frame over as many chains as it needs (one, unless `MERGEABLE`); none if there are too few now. Nothing is
    /// completed before all of it is written, so a frame that turns out not to fit leaves the ring as it was.
    #[cold]
    fn scatter(&self, start: R::Cursor, mbuf: &Mbuf) -> Option<(R::Cursor, Result<usize, Fault>)> {
        let (ring, mut at) = (&self.ring, start);
        let most = if MERGEABLE { ring.size() } else { 1 };
        let mut source = mbuf.segments().map(|segment| segment.data()).filter(|data| !data.is_empty());
        let mut rest = source.next();
        let mut chains: u16 = 0;
        let mut first: Option<Head> = None;
        while rest.is_some() {
            if chains == most {
                return Some((start, Err(Fault::Long)));
            }
            let head = ring.pop(&mut at)?;
            chains += 1;
            let skip = if first.is_none() { self.header_len } else { 0 };
            if let Err(fault) = fill(ring, &head, skip, &mut rest, &mut source) {
                return Some((discard(ring, start, chains), Err(fault)));
            }
            first.get_or_insert(head);
        }
        let Some(head) = first else { return Some((start, Err(Fault::Short))) };
        if let Err(fault) = write_header(ring, &head, &header(chains)[..self.header_len]) {
            return Some((discard(ring, start, chains), Err(fault)));
        }
        Some((complete_scattered(ring, start, self.header_len + mbuf.pkt_len(), chains), Ok(mbuf.pkt_len())))
    }
}

/// Completes the `chains` chains from `at` on with what `scatter` wrote into each, `left` bytes in all.
fn complete_scattered<R: DeviceRing>(ring: &R, mut at: R::Cursor, mut left: usize, chains: u16) -> R::Cursor {
    for i in 0..chains {
        let Some(head) = ring.pop(&mut at) else { break };
        // The last one holds the rest, whatever the guest says by now of the capacities.
        let len = if i + 1 == chains { left } else { capacity(ring, &head).min(left) };
        left -= len;
        ring.complete(&mut at, &head, len as u32);
    }
    at
}

/// Gives the guest back, empty, the `chains` chains from `at` on: a false one, and those before it that a frame had begun to fill.
fn discard<R: DeviceRing>(ring: &R, mut at: R::Cursor, chains: u16) -> R::Cursor {
    for _ in 0..chains {
        let Some(head) = ring.pop(&mut at) else { break };
        ring.complete(&mut at, &head, 0);
    }
    at
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
        let Some(mut walk) = Walk::begin(&self.ring, self.region, &self.stats) else { return 0 };
        let mut tally = Tally::new(&self.stats);
        let mut rest = burst.as_slice();
        'burst: while !rest.is_empty() {
            if let Some((group, behind)) = rest.split_first_chunk::<GROUP>()
                && self.put_group(&mut walk, group, &mut tally)
            {
                rest = behind;
                continue;
            }
            // The last few, or some that are not plain: one by one.
            for mbuf in &rest[..rest.len().min(GROUP)] {
                if !self.put_group(&mut walk, std::array::from_ref(mbuf), &mut tally) {
                    // If the ring has too few buffers for it now, it stays with the caller, and those behind it as well.
                    let Some((at, put)) = self.scatter(walk.at, mbuf) else { break 'burst };
                    walk.at = at;
                    tally.count(put);
                }
                rest = &rest[1..];
            }
        }
        let taken = burst.len() - rest.len();
        tally.settle();
        let at = walk.at;
        self.region = walk.window.region();
        flush(&mut self.ring, at, &self.stats);
        Mbuf::free_bulk(burst.take_front(taken));
        taken
    }

    fn reap(&mut self) -> usize {
        0
    }
}
