//! Peers that lie, by seed: a device that the driver's end has to survive, and a driver that the device's end has to survive.
//!
//! Both act one step at a time, between two bursts or from a thread of their own, and every step follows from the seed.

use std::sync::Arc;

use pmd::mem::{MemError, Span};
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, DescMeta};

use crate::frame::SplitMix;
use crate::rings::{Guest, RawRing, RingsError};

/// A device that lies: indexes, ids, lengths, `num_buffers`, replays, and scribbling wherever it may write.
pub struct LyingDevice {
    raw: RawRing,
    memory: Arc<backend::memory::GuestMemory>,
    random: SplitMix,
    /// Chains looked at, and the heads of those that are not completed.
    seen: u16,
    held: Vec<u16>,
    /// Where it would be if it were honest.
    idx: u16,
    last: (u32, u32),
}

impl LyingDevice {
    /// A device at the other end of `guest`'s ring.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn new(guest: &Guest, seed: u64) -> Result<Self, RingsError> {
        let (raw, memory) = (guest.raw()?, Arc::clone(guest.memory()));
        Ok(Self { raw, memory, random: SplitMix(seed), seen: 0, held: Vec::new(), idx: 0, last: (0, 0) })
    }

    /// Does one thing, more often than not an honest one.
    pub fn act(&mut self) {
        while self.seen != self.raw.avail_idx() && self.held.len() < self.raw.desc.len() {
            self.held.push(self.raw.offered(self.seen));
            self.seen = self.seen.wrapping_add(1);
        }
        let size = self.raw.desc.len() as u32;
        match self.random.below(128) {
            0..=79 => {
                let (head, len) = (self.take(), 26 + self.random.below(1400));
                self.fill(head, 1);
                self.complete(head.into(), len);
            }
            80..=95 => {
                let (head, len) = (self.take(), 12 + self.random.below(200));
                let buffers = self.any() as u16;
                self.fill(head, buffers);
                self.complete(head.into(), len);
            }
            96..=105 => {
                let (head, len) = (self.take(), self.any());
                self.complete(head.into(), len);
            }
            106 => {
                let (id, len) = (self.any(), self.any());
                self.complete(id, len);
            }
            107 => self.complete(self.last.0, self.last.1),
            108 => {
                let id = self.random.below(2 * size);
                self.complete(id, 100);
            }
            109 => self.raw.set_used_idx(self.random.next() as u16),
            110 => self.raw.set_used_idx(self.idx.wrapping_add(self.random.below(2 * size) as u16)),
            _ => self.scribble(),
        }
    }

    /// Takes a chain that is held, or makes one up.
    fn take(&mut self) -> u16 {
        if self.held.is_empty() {
            return self.random.next() as u16;
        }
        // Mostly the oldest, as a device with `IN_ORDER` has to.
        let any = self.random.below(self.held.len() as u32) as usize;
        self.held.remove(if self.random.below(16) == 0 { any } else { 0 })
    }

    /// Writes a header into a chain's first buffer.
    fn fill(&self, head: u16, buffers: u16) {
        let (addr, meta) = self.raw.described(head);
        if let Some(room) = self.memory.translate(addr, meta.len, &mut 0) {
            room.write(&[&[0; 10], &buffers.to_le_bytes()[..]].concat());
        }
    }

    fn complete(&mut self, id: u32, len: u32) {
        self.raw.set_used(self.idx, id, len);
        self.idx = self.idx.wrapping_add(1);
        self.raw.set_used_idx(self.idx);
        self.last = (id, len);
    }

    fn any(&mut self) -> u32 {
        self.random.next() as u32 >> self.random.below(32)
    }

    /// Overwrites a word of the ring, also of the parts that belong to the driver.
    fn scribble(&mut self) {
        let (index, value) = (self.random.next() as u16, self.random.next());
        match self.random.below(4) {
            0 => self.raw.describe(index, value, DescMeta::unpack(self.random.next())),
            1 => self.raw.set_used(index, value as u32, (value >> 32) as u32),
            2 => self.raw.set_used_flags(value as u16),
            _ => self.raw.scribble_avail(index, value as u16),
        }
    }
}

/// Bytes that a lying driver's chains may point into.
const WINDOW: u32 = 64 << 10;
/// Bytes that hold its indirect tables.
const TABLES: u32 = 16 << 10;
/// Bytes before both, which no chain points into.
const CANARY: usize = 64 << 10;
const CANARY_BYTE: u8 = 0x5c;

/// A driver that lies: indexes, heads, links, loops, lengths, addresses, flags and indirect tables.
pub struct LyingDriver {
    raw: RawRing,
    random: SplitMix,
    canary: Span,
    tables: Span,
    /// At the end of memory, so that a length which is too long leads out of it and into nothing else.
    window: Span,
}

impl LyingDriver {
    /// Scratch memory that the guest must have.
    pub const SCRATCH: usize = CANARY + (TABLES + WINDOW) as usize;

    /// A driver at the other end of `guest`'s ring.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn new(guest: &Guest, seed: u64) -> Result<Self, RingsError> {
        let alloc = |len| -> Result<Span, MemError> { guest.arena().alloc(len, 4096) };
        let canary = alloc(CANARY)?;
        canary.bytes(0, CANARY).write(&vec![CANARY_BYTE; CANARY]);
        let (tables, window) = (alloc(TABLES as usize)?, alloc(WINDOW as usize)?);
        Ok(Self { raw: guest.raw()?, random: SplitMix(seed), canary, tables, window })
    }

    /// Whether nobody has written where no chain ever pointed.
    #[must_use]
    pub fn canary_lives(&self) -> bool {
        let mut bytes = vec![0; CANARY];
        self.canary.bytes(0, CANARY).read(&mut bytes);
        bytes.iter().all(|&byte| byte == CANARY_BYTE)
    }

    /// Does one thing, half of the time an honest one.
    pub fn act(&mut self) {
        // What lies too far ahead is refused whole, so a lie about the index does not last.
        let ahead = self.raw.avail_idx().wrapping_sub(self.raw.used_idx());
        if usize::from(ahead) >= self.raw.desc.len() && self.coin() {
            self.raw.set_avail_idx(self.raw.used_idx());
        }
        match self.random.below(128) {
            0..=63 => self.honest(),
            64..=95 => self.chain(),
            96..=119 => self.table(),
            120 => self.raw.offer(self.random.next() as u16),
            121 => self.raw.set_avail_idx(self.random.next() as u16),
            122 => {
                let ahead = self.random.below(2 * self.raw.desc.len() as u32) as u16;
                self.raw.set_avail_idx(self.raw.used_idx().wrapping_add(ahead));
            }
            _ => self.scribble(),
        }
    }

    /// A plain chain of one buffer.
    fn honest(&mut self) {
        let (head, at) = (self.desc(), self.random.below(WINDOW - 2048));
        let (len, flags) = (26 + self.random.below(2000), if self.coin() { DESC_F_WRITE } else { 0 });
        self.raw.describe(head, self.window.iova(at as usize), DescMeta { len, flags, next: 0 });
        self.raw.offer(head);
    }

    /// A chain of descriptors that say anything.
    fn chain(&mut self) {
        let head = self.desc();
        let mut index = head;
        for _ in 0..=self.random.below(6) {
            let next = if self.random.below(8) == 0 { self.random.next() as u16 } else { self.desc() };
            let meta = DescMeta { len: self.len(), flags: self.flags(), next };
            let (addr, meta) = if meta.flags & DESC_F_INDIRECT != 0 {
                let odd = u32::from(self.random.below(8) == 0);
                let table = self.random.below(TABLES / 16) as usize * 16;
                (self.tables.iova(table), DescMeta { len: self.random.below(80) * 16 + odd, ..meta })
            } else {
                (self.addr(), meta)
            };
            self.raw.describe(index, addr, meta);
            index = next;
        }
        self.raw.offer(head);
    }

    /// A few entries of an indirect table.
    fn table(&mut self) {
        let first = self.random.below(TABLES / 16 - 8) as usize;
        for i in 0..8 {
            let (len, flags, next) = (self.len(), self.flags(), self.random.below(10) as u16);
            let entry = [self.addr(), DescMeta { len, flags, next }.pack()].map(u64::to_le_bytes).concat();
            self.tables.bytes((first + i) * size_of::<Desc>(), size_of::<Desc>()).write(&entry);
        }
    }

    fn scribble(&mut self) {
        let (index, value) = (self.random.next() as u16, self.random.next());
        match self.random.below(3) {
            0 => self.raw.set_used(index, value as u32, (value >> 32) as u32),
            1 => self.raw.set_avail_flags(value as u16),
            _ => self.raw.scribble_avail(index, value as u16),
        }
    }

    fn desc(&mut self) -> u16 {
        self.random.below(self.raw.desc.len() as u32) as u16
    }

    fn coin(&mut self) -> bool {
        self.random.below(2) == 0
    }

    fn flags(&mut self) -> u16 {
        [0, DESC_F_WRITE, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_NEXT | DESC_F_WRITE, self.random.next() as u16]
            [self.random.below(6) as usize]
    }

    fn len(&mut self) -> u32 {
        match self.random.below(8) {
            0 => 0,
            1 => self.random.below(15),
            2 => self.random.next() as u32,
            3 => u32::MAX - self.random.below(16),
            4 => self.random.below(1 << 20),
            _ => self.random.below(2000),
        }
    }

    /// An address inside the window, or far outside of all memory.
    fn addr(&mut self) -> u64 {
        match self.random.below(10) {
            0 => u64::from(self.random.below(4096)),
            1 => u64::MAX - u64::from(self.random.below(4096)),
            2 => self.window.iova((WINDOW - 1 - self.random.below(16)) as usize),
            _ => self.window.iova(self.random.below(WINDOW) as usize),
        }
    }
}
