//! What split and packed rings have in common for a driver: their memory, and the steps of which receiving and transmitting are
//! made.

use std::sync::Arc;

use super::spec::{Desc, avail, feature, used};
use crate::mem::{Arena, MemError, Span};
use crate::port::Fault;

/// Bytes of an event suppression structure (2.8.10).
const EVENT_LEN: usize = 4;

/// Wakes a device that does not poll.
pub trait Doorbell: Send {
    /// Tells it that the ring has something new.
    fn ring(&self);
}

/// A ring's three areas, and where the device finds them.
#[derive(Debug)]
pub struct Layout {
    /// Number of descriptors.
    pub size: u16,
    /// IOVA of the descriptor area.
    pub desc: u64,
    /// IOVA of the driver area: avail ring, or driver event suppression.
    pub avail: u64,
    /// IOVA of the device area: used ring, or device event suppression.
    pub used: u64,
    /// Whether either side may say by an entry when it wants to be woken (`EVENT_IDX`).
    pub(super) event_idx: bool,
    pub(super) span: Arc<Span>,
    pub(super) offsets: [usize; 3],
}

impl Layout {
    /// Room in `arena` for a ring of `size` descriptors, of the format that `features` say: split rings (2.7) have a power of
    /// two, packed ones (2.8) any number.
    ///
    /// Each area begins on a cache line of its own; 2.7 and 2.8 ask for 16, 2 (packed: 4) and 4 bytes.
    ///
    /// # Errors
    /// [`MemError::Full`].
    pub fn new(arena: &Arc<Arena>, size: u16, features: u64) -> Result<Self, MemError> {
        let packed = features & feature::RING_PACKED != 0;
        let (avail, used) = if packed { (EVENT_LEN, EVENT_LEN) } else { (2 * avail::words(size), used::bytes(size)) };
        let avail_at = (size_of::<Desc>() * usize::from(size)).next_multiple_of(64);
        let used_at = avail_at + avail.next_multiple_of(64);
        let span = Arc::new(arena.alloc(used_at + used, 64)?);
        Ok(Self {
            size,
            desc: span.iova(0),
            avail: span.iova(avail_at),
            used: span.iova(used_at),
            event_idx: features & feature::EVENT_IDX != 0,
            offsets: [0, avail_at, used_at],
            span,
        })
    }
}

/// A ring, driver end. Chains are written one at a time: `next_id`, `desc` for each descriptor, `push`.
///
/// Nothing that lies in shared memory is ever read back: positions, free descriptors and what the rings hold are kept in
/// private copies. What the device writes is checked here (indexes) and by the owner (ids, lengths).
///
/// A ring may offer the same for `N` chains of one descriptor each at once.
pub trait DriverRing: Send {
    /// Whether that is faster: where chains lie side by side, as in packed rings, they are checked and counted together.
    const GROUPS: bool;

    /// Number of descriptors.
    fn size(&self) -> u16;

    /// Completions that have not been popped, as far as they are of interest: `max` or more are told as `max` or more.
    /// `descs` is the number of descriptors of the chain with an id; if there is none, of no interest.
    ///
    /// # Errors
    /// The fault, if the device claims more than it can have completed.
    fn ready(&mut self, max: u16, descs: impl Fn(u16) -> u16) -> Result<u16, Fault>;

    /// The next completion: the id and the number of bytes written that the device claims. `IN_ORDER` rings tell the id that
    /// must be, and `full` bytes for chains that the device skipped; after a false id nothing is known of the bytes.
    fn pop(&mut self, full: u32, descs: impl Fn(u16) -> u16) -> (u32, Result<u32, Fault>);

    /// As [`ready`](Self::ready), if all chains are one descriptor each.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    fn ready_singles(&mut self, max: u16) -> Result<u16, Fault> {
        self.ready(max, |_| 1)
    }

    /// The next `N` completions, if all chains are one descriptor each. Called only if `ready` told as many.
    #[inline(always)]
    fn pop_group<const N: usize>(&mut self, full: u32) -> [(u32, Result<u32, Fault>); N] {
        std::array::from_fn(|_| self.pop(full, |_| 1))
    }

    /// The id that the chain which is written next will have.
    fn next_id(&self) -> u16;

    /// Writes the next descriptor of a chain: `flags` are `DESC_F_NEXT`, `DESC_F_WRITE` and `DESC_F_INDIRECT`. Returns its
    /// number.
    fn desc(&mut self, addr: u64, len: u32, flags: u16) -> u16;

    /// Makes the chain with id `id`, which was just written, available.
    fn push(&mut self, id: u16);

    /// Makes a chain of one descriptor available; its id.
    #[inline(always)]
    fn push_single(&mut self, addr: u64, len: u32, flags: u16) -> u16 {
        let id = self.next_id();
        self.desc(addr, len, flags);
        self.push(id);
        id
    }

    /// As [`push_single`](Self::push_single), `N` chains with these addresses and lengths.
    #[inline(always)]
    fn push_group<const N: usize>(&mut self, buffers: [(u64, u32); N], flags: u16) -> [u16; N] {
        std::array::from_fn(|i| self.push_single(buffers[i].0, buffers[i].1, flags))
    }

    /// Takes the `count` descriptors of a popped chain back: its id was `id`, and `last` is what `desc` returned last.
    fn reclaim(&mut self, id: u16, last: u16, count: u16);

    /// Takes the descriptors of `N` popped chains back, of one descriptor each.
    #[inline(always)]
    fn reclaim_group<const N: usize>(&mut self, ids: [u16; N]) {
        for id in ids {
            self.reclaim(id, id, 1);
        }
    }

    /// Goes back to the position behind the last popped chain, for a device that knows nothing of the ring and begins there:
    /// nothing is available then. All chains have been reclaimed. Returns the position, as [`RingAddresses::base`].
    ///
    /// [`RingAddresses::base`]: super::user::RingAddresses::base
    fn rewind(&mut self) -> u32;

    /// Publishes what was pushed, and kicks if the device wants it; whether it did.
    fn publish(&mut self) -> bool;

    /// Asks the device to wake us when it completes the chain that would be popped next. Look for it once more before sleeping.
    fn arm(&mut self);

    /// Asks the device not to wake us.
    fn disarm(&mut self);

    /// An entry of an indirect table, as it lies in memory: the second word of a descriptor.
    fn table_meta(len: u32, flags: u16, index: u16) -> u64;
}

/// What `N` completions gave back.
pub(super) struct Group<T, const N: usize> {
    /// What lay in the slot of each id; nothing where the id is false.
    pub taken: [T; N],
    /// How many were there, and so how many descriptors are free again.
    pub count: u32,
    /// Ids and lengths, as [`DriverRing::pop`] tells them.
    pub claims: [(u32, Result<u32, Fault>); N],
}

/// Takes the next `N` completions, of chains of one descriptor each, out of `slots`, which holds what belongs to each id, and gives
/// their descriptors back.
#[inline(always)]
pub(super) fn take_group<T: Default, const N: usize>(
    ring: &mut impl DriverRing,
    full: u32,
    slots: &mut [T],
    is_there: impl Fn(&T) -> bool,
) -> Group<T, N> {
    let claims = ring.pop_group::<N>(full);
    // Loops, for the compiler does not inline closures that change something into `from_fn` and `map`.
    let mut taken = std::array::from_fn(|_| T::default());
    for (taken, (id, _)) in taken.iter_mut().zip(&claims) {
        *taken = slots.get_mut(*id as usize).map(std::mem::take).unwrap_or_default();
    }
    let mut count = N as u32;
    if taken.iter().all(&is_there) {
        ring.reclaim_group::<N>(std::array::from_fn(|i| claims[i].0 as u16));
    } else {
        count = 0;
        for ((id, _), _) in claims.iter().zip(&taken).filter(|(_, taken)| is_there(taken)) {
            ring.reclaim(*id as u16, *id as u16, 1);
            count += 1;
        }
    }
    Group { taken, count, claims }
}

/// A number of 16 bits that changes per packet, in 32 bits of its own: of 16-bit neighbours, the compiler loads both at once, and
/// each such load waits for the store to one of them that came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wide(u32);

impl Wide {
    #[inline(always)]
    pub(super) const fn new(value: u16) -> Self {
        Self(value as u32)
    }

    #[inline(always)]
    pub(super) const fn get(self) -> u16 {
        self.0 as u16
    }

    /// Adds, modulo 2^16.
    #[inline(always)]
    pub(super) const fn add(&mut self, n: u16) {
        *self = Self::new(self.get().wrapping_add(n));
    }

    /// How far it is from `earlier` to here, modulo 2^16.
    #[inline(always)]
    pub(super) const fn since(self, earlier: Self) -> u16 {
        self.get().wrapping_sub(earlier.get())
    }
}

/// All ids of a ring of `size`, so that those of outstanding chains come in the order in which they were made available, if the
/// device completes in order: ids go round and round then, and `next` is the one that follows the last. A device that does not
/// keep an order cannot expect one.
pub(super) fn oldest_first(next: u16, size: usize) -> impl Iterator<Item = u16> {
    (0..size).map(move |i| ((usize::from(next) + i) % size) as u16)
}
