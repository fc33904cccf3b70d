//! THE receive burst: one loop for every ring.

use std::sync::Arc;

use crate::mbuf::{Chain, Mbuf, MbufPool};
use crate::port::{BURST_MAX, Burst, Fault, QueueStats, RxBurst};
use crate::virtio::spec::FRAME_LEN_MIN;

/// Completed slots looked for in a burst: more than a burst takes, so that frames of several buffers come whole.
const READY_MAX: u16 = 64;
/// Slots taken together, so that their headers are fetched together.
const TAKE_GROUP: usize = 8;
/// Mbufs allocated and staged together while that many slots are free.
const STAGE_GROUP: usize = 32;
/// Mbufs staged together when few are free; `free_thresh` is a multiple of it, save on the smallest rings.
pub const STAGE_GROUP_MIN: usize = 4;

/// A taken slot: its buffer and what the device says of it, or the fault if there is no buffer of ours behind the claim.
pub type Taken<C> = Result<(Mbuf, C), Fault>;

/// A receive ring's driver end.
pub trait RxRing: Send {
    /// Whether one frame may fill several buffers. A constant, so that a ring which says no pays nothing for those that do.
    const SCATTER: bool;
    /// What the device says of a completed slot; not believed until `open` or `extend` has checked it.
    type Claim: Copy;

    /// Completed slots that have not been taken, as far as they are of interest: rings that would have to look for more stop
    /// at `max`.
    ///
    /// # Errors
    /// The fault, if the device claims more than it can have completed.
    fn ready(&mut self, max: u16) -> Result<u16, Fault>;

    /// Takes the next completed slot. Called at most as often as `ready` said.
    ///
    /// # Errors
    /// The fault, if there is no buffer of ours behind the claim.
    fn take(&mut self) -> Taken<Self::Claim>;

    /// Takes `N` completed slots at once.
    #[inline(always)]
    fn take_group<const N: usize>(&mut self) -> [Taken<Self::Claim>; N] {
        std::array::from_fn(|_| self.take())
    }

    /// Checks the claim on a frame's first buffer and turns it into mbuf metadata; returns how many more buffers the frame has
    /// (rings that learn it from the last buffer only: 1 until then).
    ///
    /// # Errors
    /// The fault, if the claim is false.
    fn open(&self, mbuf: &mut Mbuf, claim: Self::Claim) -> Result<u16, Fault>;

    /// As [`open`](Self::open), for a further buffer of a frame that still lacked `left`.
    ///
    /// # Errors
    /// The fault, if the claim is false.
    fn extend(&self, mbuf: &mut Mbuf, claim: Self::Claim, left: u16) -> Result<u16, Fault>;

    /// Free slots.
    fn room(&self) -> u16;

    /// Puts a buffer into the next free slot. Called at most as often as `room` said, before `publish`.
    fn stage(&mut self, mbuf: Mbuf);

    /// Stages `N` buffers at once.
    #[inline(always)]
    fn stage_group<const N: usize>(&mut self, mbufs: [Mbuf; N]) {
        for mbuf in mbufs {
            self.stage(mbuf);
        }
    }

    /// Lets the device see what was staged; true if it had to be kicked.
    fn publish(&mut self) -> bool;

    /// Makes what the device has not completed available anew, see [`RxBurst::rewind`]. All that it has completed was taken.
    fn rewind(&mut self) -> Option<u32> {
        None
    }

    /// Asks the device to wake us when it completes the next slot. Look for it once more before sleeping.
    fn arm(&mut self);

    /// Asks the device not to wake us.
    fn disarm(&mut self);
}

/// A frame whose last buffer has not been seen.
struct Partial {
    /// What there is of it; none if it is to be discarded.
    chain: Option<Chain>,
    /// Buffers still to come.
    left: u16,
}

/// A receive queue: a ring, and where its buffers come from.
pub struct RxQueue<R> {
    ring: R,
    pool: MbufPool,
    free_thresh: u16,
    partial: Option<Partial>,
    stats: Arc<QueueStats>,
}

impl<R: RxRing> RxQueue<R> {
    /// A queue on `ring`, filled from `pool` as far as that goes.
    pub fn new(ring: R, pool: MbufPool, free_thresh: u16, stats: Arc<QueueStats>) -> Self {
        let mut queue = Self { ring, pool, free_thresh, partial: None, stats };
        queue.refill();
        queue
    }

    #[inline(always)]
    fn refill(&mut self) {
        if self.ring.room() < self.free_thresh {
            return;
        }
        let mut staged = self.refill_by::<STAGE_GROUP>() | self.refill_by::<STAGE_GROUP_MIN>();
        if usize::from(self.free_thresh) < STAGE_GROUP_MIN {
            staged |= self.refill_by::<1>();
        }
        if staged {
            let stats = &self.stats;
            if self.ring.publish() { stats.kicks.add(1) } else { stats.kicks_suppressed.add(1) }
        }
    }

    /// Stages groups of `N` while they fit; whether there were any.
    #[inline(always)]
    fn refill_by<const N: usize>(&mut self) -> bool {
        let mut any = false;
        while usize::from(self.ring.room()) >= N {
            let Some(mbufs) = self.pool.raw_alloc_array::<N>() else {
                self.stats.faults[Fault::NoMbuf as usize].add(N as u64);
                break;
            };
            self.ring.stage_group(mbufs);
            any = true;
        }
        any
    }

    /// Handles one taken slot: checks the claim, and delivers the frame that it completes, if any.
    #[inline(always)]
    fn place(&self, slot: Taken<R::Claim>, partial: &mut Option<Partial>, tally: &mut Tally, burst: &mut Burst) {
        let placed = match slot {
            Err(fault) => {
                lose(partial);
                Err(fault)
            }
            Ok((mbuf, claim)) if R::SCATTER && partial.is_some() => self.extend(mbuf, claim, partial),
            Ok((mut mbuf, claim)) => match self.ring.open(&mut mbuf, claim) {
                Ok(0) => Ok(Some(mbuf)),
                Ok(left) if R::SCATTER => {
                    *partial = Some(Partial { chain: Some(Chain::new(mbuf)), left });
                    Ok(None)
                }
                Ok(_) => Err(Fault::BadSegments),
                Err(fault) => Err(fault),
            },
        };
        match placed {
            Ok(Some(mbuf)) => {
                tally.packets += 1;
                tally.bytes += mbuf.pkt_len();
                self.stats.size(mbuf.pkt_len());
                // Never full: no more slots are taken than the burst has room for.
                drop(burst.push(mbuf));
            }
            Ok(None) => {}
            Err(fault) => self.stats.fault(fault),
        }
    }

    /// A further buffer of a frame. A frame that turns out false is discarded whole, counted once.
    #[inline]
    fn extend(&self, mut mbuf: Mbuf, claim: R::Claim, partial: &mut Option<Partial>) -> Result<Option<Mbuf>, Fault> {
        let Some(mut frame) = partial.take() else { return Ok(None) };
        let extended = self.ring.extend(&mut mbuf, claim, frame.left);
        frame.left = extended.unwrap_or(frame.left - 1);
        let mut fault = Ok(());
        if let Some(mut chain) = frame.chain.take() {
            fault = extended.and_then(|_| chain.push(mbuf).map_err(|_| Fault::BadSegments));
            frame.chain = fault.is_ok().then_some(chain);
        }
        if frame.left > 0 {
            *partial = Some(frame);
            return fault.map(|()| None);
        }
        fault?;
        match frame.chain.map(Chain::finish) {
            Some(mbuf) if mbuf.pkt_len() < FRAME_LEN_MIN => Err(Fault::Short),
            frame => Ok(frame),
        }
    }
}

/// A buffer that is not to be had was one of a half-received frame: what is left of that is discarded, so that the next frame
/// does not end up in it.
#[cold]
fn lose(partial: &mut Option<Partial>) {
    if let Some(frame) = partial.take().filter(|frame| frame.left > 1) {
        *partial = Some(Partial { chain: None, left: frame.left - 1 });
    }
}

/// What one burst delivered.
#[derive(Default)]
struct Tally {
    packets: usize,
    bytes: usize,
}

impl<R: RxRing + 'static> RxBurst for RxQueue<R> {
    fn rx_burst(&mut self, burst: &mut Burst) -> usize {
        let ready = self.ring.ready(READY_MAX).unwrap_or_else(|fault| {
            self.stats.fault(fault);
            0
        });
        let mut left = usize::from(ready);
        let mut tally = Tally::default();
        // A half-received frame is kept in a local while the burst runs: through `self` it costs 4 to 6 ns a packet.
        let mut partial = if R::SCATTER { self.partial.take() } else { None };
        while left.min(burst.room()) >= TAKE_GROUP {
            let group = self.ring.take_group::<TAKE_GROUP>();
            for (mbuf, _) in group.iter().flatten() {
                mbuf.prefetch();
                if R::SCATTER {
                    mbuf.prefetch_headroom();
                }
            }
            for slot in group {
                self.place(slot, &mut partial, &mut tally, burst);
            }
            left -= TAKE_GROUP;
        }
        while left > 0 && burst.room() > 0 {
            let slot = self.ring.take();
            self.place(slot, &mut partial, &mut tally, burst);
            left -= 1;
        }
        self.partial = partial;
        if tally.packets > 0 {
            self.stats.packets.add(tally.packets as u64);
            self.stats.bytes.add(tally.bytes as u64);
        }
        self.refill();
        tally.packets
    }

    fn pending(&mut self) -> usize {
        usize::from(self.ring.ready(u16::MAX).unwrap_or(0))
    }

    fn rewind(&mut self, received: &mut Vec<Mbuf>) -> Option<u32> {
        let mut burst = Burst::new(BURST_MAX);
        // Each round takes a slot at least, and a device that is gone completes no more than it had.
        for _ in 0..=u16::MAX {
            if self.pending() == 0 {
                break;
            }
            let count = self.rx_burst(&mut burst);
            received.extend(burst.take_front(count));
        }
        if self.partial.take().is_some() {
            // The rest of this frame went with the device.
            self.stats.fault(Fault::BadSegments);
        }
        self.ring.rewind()
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
