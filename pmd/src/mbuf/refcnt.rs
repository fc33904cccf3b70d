//! An mbuf's reference count: its handle, and every indirect mbuf attached to its data room.

#[cfg(all(test, loom))]
#[path = "refcnt/models.rs"]
mod models;

use crate::shared::{AtomicU16, Ordering, fence};

/// Most references: far below the counter's end, so that threads racing past the limit cannot wrap it.
const MAX: u16 = i16::MAX as u16;

/// Starts at 1, and is 1 again once the last holder let go: that is how a header lies in its pool.
#[repr(transparent)]
pub struct Refcnt(AtomicU16);

impl Refcnt {
    /// One holder.
    pub fn one() -> Self {
        Self(AtomicU16::new(1))
    }

    /// Whether the asker, who must be a holder, is the only one.
    #[inline(always)]
    pub fn is_one(&self) -> bool {
        // Acquire pairs with the Release in `release`: what former holders did happened before the asker has it to itself.
        self.0.load(Ordering::Acquire) == 1
    }

    /// Adds a holder, on behalf of one; false if there are too many.
    pub fn add(&self) -> bool {
        // Relaxed: the new holder learns of the mbuf from the old one.
        let fits = self.0.fetch_add(1, Ordering::Relaxed) < MAX;
        if !fits {
            self.0.fetch_sub(1, Ordering::Relaxed);
        }
        fits
    }

    /// Takes a holder off. True if it was the last: the count is 1 again, and all that the others did happened before.
    #[inline(always)]
    pub fn release(&self) -> bool {
        // A count of 1 is the caller's alone and cannot change, so no locked instruction is needed.
        if self.is_one() {
            return true;
        }
        // Release: our accesses happened before whoever is last reuses the mbuf.
        if self.0.fetch_sub(1, Ordering::Release) != 1 {
            return false;
        }
        // Acquire: pairs with the others' Release.
        fence(Ordering::Acquire);
        self.0.store(1, Ordering::Relaxed);
        true
    }

    /// The count as it is just now, for checks and messages.
    #[cfg(not(loom))]
    pub fn get(&self) -> u16 {
        self.0.load(Ordering::Relaxed)
    }

    /// Makes the count wrong.
    #[cfg(all(test, not(loom)))]
    pub fn corrupt(&self, count: u16) {
        self.0.store(count, Ordering::Relaxed);
    }
}
