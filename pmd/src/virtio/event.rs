//! Who is woken when: notification suppression, for both ends of a ring (virtio 1.3, 2.7.7 and 2.7.10 for split rings, 2.8.10 for
//! packed ones).
//!
//! One side *asks* to be woken and then looks at the ring once more before it sleeps; the other *publishes* and then looks whether
//! it has been asked. Each has a full fence between the two, so at least one of them sees what the other stored, and no wake-up is
//! lost. A side that polls asks for nothing, and pays for nothing of this but the fence.

#[cfg(all(test, loom))]
mod models;

use super::spec::{
    AVAIL_F_NO_INTERRUPT, PACKED_EVENT_F_DESC, PACKED_EVENT_F_DISABLE, PACKED_EVENT_F_ENABLE, PackedPos,
    USED_F_NO_NOTIFY,
};
use crate::shared::{AtomicU16, AtomicU32, Ordering, fence};

/// The bit of either side's `flags` that means "do not wake me".
const SUPPRESS: u16 = AVAIL_F_NO_INTERRUPT;
const _: () = assert!(SUPPRESS == USED_F_NO_NOTIFY);

/// Whether an index that went from `old` to `new` passed `event` (2.7.7.2 and 2.7.10.1): true if the entry numbered `event` is one
/// of those in between.
#[inline(always)]
#[must_use]
pub const fn need_event(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// As [`need_event`], for places in a packed ring of `size` descriptors (2.8.10): `old` is at most one round behind `new`.
#[inline(always)]
#[must_use]
pub const fn need_event_packed(event: PackedPos, new: PackedPos, old: PackedPos, size: u16) -> bool {
    let behind = descs_between(event, new, size);
    behind > 0 && behind <= descs_between(old, new, size)
}

/// Descriptors from `pos` to `end`; none or fewer if it is not before that.
#[inline(always)]
const fn descs_between(pos: PackedPos, end: PackedPos, size: u16) -> i32 {
    let round = if pos.wrap() == end.wrap() { 0 } else { size as i32 };
    end.slot() as i32 - pos.slot() as i32 + round
}

/// Where one side of a split ring says when it wants to be woken.
#[derive(Clone, Copy, Debug)]
pub enum SplitWish<'a> {
    /// In its `flags` (2.7.6, 2.7.8).
    Flags(&'a AtomicU16),
    /// With `EVENT_IDX` in `used_event` or `avail_event`, by the entry that it waits for (2.7.7.1, 2.7.10.1).
    Entry(&'a AtomicU16),
}

impl SplitWish<'_> {
    /// Asks to be woken once the entry `next` is there. Look for it once more before going to sleep.
    #[inline(always)]
    pub fn ask(self, next: u16) {
        match self {
            SplitWish::Flags(flags) => flags.store(0, Ordering::Relaxed),
            SplitWish::Entry(event) => event.store(next, Ordering::Relaxed),
        }
        // Between our wish and our last look at the ring. Partner: `publish`.
        fence(Ordering::SeqCst);
    }

    /// Asks not to be woken. An entry cannot say that, but the one before `next` does not come for another 65535.
    #[inline(always)]
    pub fn refuse(self, next: u16) {
        match self {
            SplitWish::Flags(flags) => flags.store(SUPPRESS, Ordering::Relaxed),
            SplitWish::Entry(event) => event.store(next.wrapping_sub(1), Ordering::Relaxed),
        }
    }

    /// As the other side: moves `idx` from `old` to `new`, then tells whether this side wants to be woken for that (2.7.13.4,
    /// 2.7.14).
    #[inline(always)]
    pub fn publish(self, idx: &AtomicU16, old: u16, new: u16) -> bool {
        // Release: the ring entries are visible before the index that covers them.
        idx.store(new, Ordering::Release);
        // Between our entries and our look at the wish. Partner: `ask`.
        fence(Ordering::SeqCst);
        match self {
            SplitWish::Flags(flags) => flags.load(Ordering::Relaxed) & SUPPRESS == 0,
            SplitWish::Entry(event) => need_event(event.load(Ordering::Relaxed), new, old),
        }
    }
}

/// Where one side of a packed ring says when it wants to be woken: its event suppression structure (2.8.10), which is read and
/// written as one word, so that flags and place belong together.
#[derive(Clone, Copy, Debug)]
pub struct PackedWish<'a>(pub &'a AtomicU32);

impl PackedWish<'_> {
    /// Asks to be woken once the descriptor at `next` is there: only then if `by_place`, which takes `EVENT_IDX`, else for whatever
    /// comes. Look for it once more before going to sleep.
    #[inline(always)]
    pub fn ask(self, next: PackedPos, by_place: bool) {
        let flags = if by_place { PACKED_EVENT_F_DESC } else { PACKED_EVENT_F_ENABLE };
        let place = next.slot() | u16::from(next.wrap()) << 15;
        self.0.store(u32::from(place) | u32::from(flags) << 16, Ordering::Relaxed);
        // Between our wish and our last look at the ring. Partner: `wanted`.
        fence(Ordering::SeqCst);
    }

    /// Asks not to be woken.
    #[inline(always)]
    pub fn refuse(self) {
        self.0.store(u32::from(PACKED_EVENT_F_DISABLE) << 16, Ordering::Relaxed);
    }

    /// As the other side, which has made the descriptors from `old` to `new` available or used in a ring of `size`: tells whether
    /// this side wants to be woken for that (2.8.21.3, 2.8.22).
    #[inline(always)]
    #[must_use]
    pub fn wanted(self, old: PackedPos, new: PackedPos, size: u16) -> bool {
        // Between our descriptors and our look at the wish. Partner: `ask`.
        fence(Ordering::SeqCst);
        let word = self.0.load(Ordering::Relaxed);
        match (word >> 16) as u16 & 0b11 {
            PACKED_EVENT_F_DISABLE => false,
            PACKED_EVENT_F_DESC => {
                let event = PackedPos::new(word as u16 & 0x7fff, word & 0x8000 != 0);
                need_event_packed(event, new, old, size)
            }
            // 3 is reserved; to wake too often loses nothing.
            _ => true,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_waited_for_by_its_number() {
        // (event, old, new): the entries old, old + 1, … new - 1 are new.
        for (event, old, new, expected) in [
            (0, 0, 1, true),
            (0, 0, 0, false),
            (1, 0, 1, false),
            (1, 0, 2, true),
            (5, 3, 5, false),
            (5, 3, 6, true),
            (5, 5, 6, true),
            (5, 6, 7, false),
            (65535, 65535, 0, true),
            (65535, 65534, 65535, false),
            (0, 65530, 1, true),
            (0, 65530, 0, false),
            (65535, 0, 65535, false),
            (0, 0, 65535, true),
        ] {
            assert_eq!(need_event(event, new, old), expected, "{event} in {old}..{new}");
        }
    }

    /// All of it, by counting: descriptors are numbered without end, and a place is a number modulo two rounds.
    #[test]
    fn a_place_in_a_packed_ring_is_waited_for_as_an_entry_is() {
        for size in [1_u16, 2, 3, 5, 8] {
            let place = |n: u16| PackedPos::new(n % size, (n / size).is_multiple_of(2));
            for old in 2 * size..4 * size {
                for new in old..=old + size {
                    // A side waits for what comes next, or for what it has waited for up to one round ago.
                    for event in old.saturating_sub(size) + 1..=new {
                        let expected = (old..new).contains(&event);
                        let got = need_event_packed(place(event), place(new), place(old), size);
                        assert_eq!(got, expected, "{event} in {old}..{new} of {size}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_largest_packed_ring_has_room_for_the_wrap_counter_beside_the_place() {
        let word = AtomicU32::new(0);
        let last = PackedPos::new(32767, true);
        let end = last.advance(1, 32768);
        PackedWish(&word).ask(last, true);
        assert_eq!(word.load(Ordering::Relaxed), 0x0002_ffff);
        assert!(PackedWish(&word).wanted(last, end, 32768));
        PackedWish(&word).ask(end, true);
        assert_eq!(word.load(Ordering::Relaxed), 0x0002_0000);
        assert!(!PackedWish(&word).wanted(last, end, 32768));
        PackedWish(&word).refuse();
        assert!(!PackedWish(&word).wanted(end, end.advance(1, 32768), 32768));
        PackedWish(&word).ask(end, false);
        assert!(PackedWish(&word).wanted(end, end.advance(1, 32768), 32768));
    }
}
