//! Packets on their way out of a burst.

use std::vec::Drain;

use super::Mbuf;

/// The first packets of a burst, being taken out one by one or in groups; those not taken are freed.
#[derive(Debug)]
pub struct Drained<'a>(Drain<'a, Mbuf>);

impl<'a> Drained<'a> {
    pub(crate) fn new(mbufs: Drain<'a, Mbuf>) -> Self {
        Self(mbufs)
    }

    /// The next `N` packets, if there are as many.
    #[inline(always)]
    pub fn next_group<const N: usize>(&mut self) -> Option<[Mbuf; N]> {
        if self.0.len() < N {
            return None;
        }
        // SAFETY: `N` items are left, and an array takes as many.
        Some(std::array::from_fn(|_| unsafe { self.0.next().unwrap_unchecked() }))
    }
}

impl Iterator for Drained<'_> {
    type Item = Mbuf;

    #[inline(always)]
    fn next(&mut self) -> Option<Mbuf> {
        self.0.next()
    }

    #[inline(always)]
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for Drained<'_> {}
