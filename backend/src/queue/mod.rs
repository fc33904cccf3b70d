//! Device ends of virtqueues: `QueueConfig -> activate() -> running queue`.
pub mod chain;
pub mod config;
pub mod packed;
pub mod paths;
pub mod split;

use pmd::port::Fault;
use pmd::shared::SharedBytes;
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

use crate::memory::{GuestMemory, Window};

/// One descriptor, as the guest wrote it; read once.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// Where the chain goes on, if it does: the descriptor's number in its table.
    pub next: u16,
}

/// The beginning of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// What the driver will know it by when it is used.
    pub id: u16,
    /// Descriptors of the ring that it takes (split rings: of no interest, 1).
    pub descs: u16,
    /// Its first descriptor, or why there is none.
    pub buffer: Result<Buffer, Fault>,
}

/// The descriptor flags that tell a chain's shape.
const SHAPE: u16 = DESC_F_NEXT | DESC_F_INDIRECT | DESC_F_WRITE;

/// What those flags are of a chain that is one buffer.
#[inline(always)]
const fn shape(writable: bool) -> u16 {
    if writable { DESC_F_WRITE } else { 0 }
}

/// A chain that is just one buffer. Anything else, false chains included, is for [`chain::Pieces`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Single {
    /// Guest-physical address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// What the driver will know it by when it is used.
    pub id: u16,
}

impl Single {
    /// Its bytes, if they are in one piece.
    #[inline(always)]
    #[must_use]
    pub fn bytes<'a>(&self, memory: &'a GuestMemory, window: &mut Window<'a>) -> Option<SharedBytes<'a>> {
        memory.translate(self.addr, self.len, window).filter(|bytes| bytes.len() == self.len as usize)
    }
}

impl Head {
    /// The chain, if it is just one buffer, `writable` as it should be.
    #[inline(always)]
    fn single(&self, writable: bool) -> Option<Single> {
        let Buffer { addr, len, flags, .. } = self.buffer.ok()?;
        (flags & SHAPE == shape(writable)).then_some(Single { addr, len, id: self.id })
    }
}

/// A ring's device end.
///
/// Where a burst stands is a value of its own, the cursor: a burst begins with one, keeps it in a local, and so in registers, and
/// ends with `flush`. Kept in the ring, each step would wait for the store of the one before.
pub trait DeviceRing: Send {
    /// Where a burst stands. A copy is a place to go back to, as long as nothing that was taken since has been completed.
    type Cursor: Copy;

    /// Whether a chain to be read may go through a table whose entries are marked as writable: DPDK's driver leaves that mark on
    /// the header of what it sends from a packed ring, and to read what the guest could also let us write harms nobody.
    const READS_WRITABLE_ENTRIES: bool;

    /// Begins a burst.
    ///
    /// # Errors
    /// The fault, if the driver claims to have made available more than the ring can hold.
    fn begin(&self) -> Result<Self::Cursor, Fault>;

    /// Takes the next chain that the driver has made available; no more in a burst than the ring can hold.
    fn pop(&self, at: &mut Self::Cursor) -> Option<Head>;

    /// Takes the next `N` chains at once, if that many are there, each just one buffer, `writable` as it should be; else none.
    #[inline(always)]
    fn pop_group<const N: usize>(&self, at: &mut Self::Cursor, writable: bool) -> Option<[Single; N]> {
        let mut behind = *at;
        let mut group = [Single::default(); N];
        for single in &mut group {
            *single = self.pop(&mut behind)?.single(writable)?;
        }
        *at = behind;
        Some(group)
    }

    /// Completes a chain, into which `written` bytes were written; in the order in which chains were taken. The driver sees nothing
    /// of it before `flush`.
    fn complete(&self, at: &mut Self::Cursor, head: &Head, written: u32);

    /// Completes chains that were taken as a group, with the bytes that were written into each.
    fn complete_group<const N: usize>(&self, at: &mut Self::Cursor, group: &[Single; N], written: [u32; N]);

    /// Ends a burst: makes completions known and calls the driver if it wants that: whether it did; none if there was nothing to
    /// tell.
    fn flush(&mut self, at: Self::Cursor) -> Option<bool>;

    /// Asks the driver to wake us when it makes the next chain available. Look for it once more before sleeping.
    fn arm(&mut self);

    /// Asks the driver not to wake us.
    fn disarm(&mut self);

    /// The memory that descriptors point into.
    fn memory(&self) -> &GuestMemory;

    /// Number of descriptors.
    fn size(&self) -> u16;

    /// A descriptor of the ring's own table.
    fn table(&self, index: u16) -> Option<Buffer>;

    /// The descriptor of an indirect table of `entries` whose bytes are `addr` and `meta`, and which is number `index` there.
    fn entry(addr: u64, meta: u64, index: u16, entries: u16) -> Buffer;
}
