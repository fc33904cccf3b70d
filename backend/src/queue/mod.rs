//! Device ends of virtqueues: `QueueConfig -> activate() -> running queue`.
pub mod chain;
pub mod config;
pub mod paths;
pub mod split;

use std::sync::Arc;

use pmd::port::Fault;
use pmd::shared::SharedBytes;
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, DescMeta};

use crate::memory::GuestMemory;

/// One descriptor, as the guest wrote it; read once.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// Guest-physical address.
    pub addr: u64,
    /// Length, flags, next.
    pub meta: DescMeta,
}

/// The beginning of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// What the used ring will call it.
    pub id: u16,
    /// Its first descriptor; none if the guest named one that does not exist.
    pub buffer: Option<Buffer>,
}

impl Head {
    /// The chain's bytes, if it is just one buffer in one piece, and `writable` as it should be. Anything else, false chains
    /// included, is for [`chain::Pieces`].
    #[inline(always)]
    pub fn plain<'a>(&self, memory: &'a GuestMemory, writable: bool, hint: &mut usize) -> Option<SharedBytes<'a>> {
        let Buffer { addr, meta } = self.buffer?;
        let flags = if writable { DESC_F_WRITE } else { 0 };
        if meta.flags & (DESC_F_NEXT | DESC_F_INDIRECT | DESC_F_WRITE) != flags {
            return None;
        }
        memory.translate(addr, meta.len, hint).filter(|bytes| bytes.len() == meta.len as usize)
    }
}

/// A ring's device end. Dropped, it leaves its [`Position`](config::Position).
pub trait DeviceRing: Send {
    /// Chains that the driver has made available and that have not been taken.
    ///
    /// # Errors
    /// The fault, if the driver claims more than the ring can hold.
    fn ready(&mut self) -> Result<u16, Fault>;

    /// Takes the next chain. Called at most as often as `ready` said.
    fn pop(&mut self) -> Head;

    /// Puts the last `count` chains back that were taken and not completed.
    fn push_back(&mut self, count: u16);

    /// Completes the chain `head`, into which `written` bytes were written, in the order in which chains were taken. Not known
    /// to the driver before `flush`.
    fn complete(&mut self, head: u16, written: u32);

    /// Makes completions known and calls the driver if it wants that: whether it did; none if there was nothing to tell.
    fn flush(&mut self) -> Option<bool>;

    /// The memory that descriptors point into.
    fn memory(&self) -> &Arc<GuestMemory>;

    /// Number of descriptors.
    fn size(&self) -> u16;

    /// A descriptor of the ring's own table.
    fn table(&self, index: u16) -> Option<Buffer>;
}
