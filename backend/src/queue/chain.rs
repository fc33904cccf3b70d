//! Walking a chain of descriptors that a guest wrote: bounded, each descriptor read once, nothing believed.

use pmd::port::Fault;
use pmd::shared::SharedBytes;
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc};

use super::{Buffer, DeviceRing, Head};
use crate::memory::Window;

/// Pieces of guest memory that one chain may consist of (as DPDK's `BUF_VECTOR_MAX`).
const PIECES_MAX: usize = 256;

/// The chain's bytes, piece by piece.
pub struct Pieces<'a, R> {
    ring: &'a R,
    /// The descriptor that comes next.
    next: Option<Result<Buffer, Fault>>,
    /// The indirect table the walk is in: address and number of entries.
    table: Option<(u64, u16)>,
    /// Rest of the present descriptor's buffer.
    rest: (u64, u32),
    /// What the `WRITE` flag must be.
    writable: u16,
    /// Descriptors that may still come.
    ttl: u16,
    found: usize,
    window: Window<'a>,
}

impl<'a, R: DeviceRing> Pieces<'a, R> {
    /// The pieces of the chain that begins at `head`, all of which the guest must have marked as writable, or none.
    pub fn new(ring: &'a R, head: &Head, writable: bool) -> Self {
        Self {
            ring,
            next: Some(head.buffer),
            table: None,
            rest: (0, 0),
            writable: if writable { DESC_F_WRITE } else { 0 },
            ttl: ring.size(),
            found: 0,
            window: Window::default(),
        }
    }

    /// Goes to the next descriptor; false at the end of the chain.
    fn advance(&mut self) -> Result<bool, Fault> {
        let Some(buffer) = self.next.take() else { return Ok(false) };
        let mut buffer = buffer?;
        if buffer.flags & DESC_F_INDIRECT != 0 {
            buffer = self.enter(buffer)?;
        }
        self.ttl = self.ttl.checked_sub(1).ok_or(Fault::BadChain)?;
        let lax = R::READS_WRITABLE_ENTRIES && self.writable == 0 && self.table.is_some();
        if buffer.flags & DESC_F_WRITE != self.writable && !lax {
            return Err(Fault::BadFlags);
        }
        if buffer.flags & DESC_F_NEXT != 0 {
            let next = buffer.next;
            self.next = Some(match self.table {
                Some((table, entries)) => self.entry(table, entries, next),
                None => self.ring.table(next).ok_or(Fault::BadChain),
            });
        }
        self.rest = (buffer.addr, buffer.len);
        Ok(true)
    }

    /// Goes into an indirect table (2.7.5.3): the last descriptor of a chain may name one, which has no other in it.
    fn enter(&mut self, buffer: Buffer) -> Result<Buffer, Fault> {
        let Buffer { len, flags, .. } = buffer;
        let entry = size_of::<Desc>() as u32;
        let entries = u16::try_from(len / entry).unwrap_or(u16::MAX);
        let plain = flags & DESC_F_NEXT == 0 && self.table.is_none();
        if !plain || len % entry != 0 || entries == 0 || entries > self.ring.size() {
            return Err(Fault::BadIndirect);
        }
        self.table = Some((buffer.addr, entries));
        let first = self.entry(buffer.addr, entries, 0)?;
        if first.flags & DESC_F_INDIRECT != 0 { Err(Fault::BadIndirect) } else { Ok(first) }
    }

    /// An entry of an indirect table, which may lie across regions.
    fn entry(&mut self, table: u64, entries: u16, index: u16) -> Result<Buffer, Fault> {
        if index >= entries {
            return Err(Fault::BadIndirect);
        }
        let mut bytes = [0; size_of::<Desc>()];
        let mut addr = table.wrapping_add(u64::from(index) * bytes.len() as u64);
        let mut done = 0;
        while done < bytes.len() {
            let len = (bytes.len() - done) as u32;
            let piece = self.ring.memory().translate(addr, len, &mut self.window).ok_or(Fault::BadAddress)?;
            let n = piece.read(&mut bytes[done..]);
            done += n;
            addr = addr.wrapping_add(n as u64);
        }
        let words = u128::from_le_bytes(bytes);
        Ok(R::entry(words as u64, (words >> 64) as u64, index, entries))
    }

    fn step(&mut self) -> Result<Option<SharedBytes<'a>>, Fault> {
        while self.rest.1 == 0 {
            if !self.advance()? {
                return Ok(None);
            }
        }
        let (addr, len) = self.rest;
        let piece = self.ring.memory().translate(addr, len, &mut self.window).ok_or(Fault::BadAddress)?;
        self.rest = (addr.wrapping_add(piece.len() as u64), len - piece.len() as u32);
        self.found += 1;
        if self.found > PIECES_MAX { Err(Fault::BadChain) } else { Ok(Some(piece)) }
    }
}

impl<'a, R: DeviceRing> Iterator for Pieces<'a, R> {
    type Item = Result<SharedBytes<'a>, Fault>;

    fn next(&mut self) -> Option<Self::Item> {
        let step = self.step().transpose();
        if matches!(step, Some(Err(_))) {
            // A false chain has no more pieces.
            (self.next, self.rest) = (None, (0, 0));
        }
        step
    }
}
