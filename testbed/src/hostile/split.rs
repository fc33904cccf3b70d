//! Lies on split rings.

use std::sync::Arc;

use pmd::virtio::spec::DescMeta;

use super::{Liar, Lies, Whim};
use crate::rings::{Guest, RawRing, RingsError};

/// A split ring's device.
pub(super) struct Device {
    raw: RawRing,
    memory: Arc<backend::memory::GuestMemory>,
    random: Whim,
    /// Chains looked at, and the heads of those that are not completed.
    seen: u16,
    held: Vec<u16>,
    /// Where it would be if it were honest.
    idx: u16,
    last: (u32, u32),
}

impl Device {
    pub(super) fn new(guest: &Guest, random: Whim) -> Result<Self, RingsError> {
        let (raw, memory) = (guest.raw()?, Arc::clone(guest.memory()));
        Ok(Self { raw, memory, random, seen: 0, held: Vec::new(), idx: 0, last: (0, 0) })
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
        if let Some(room) = self.memory.bytes(addr, meta.len) {
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

impl Liar for Device {
    fn act(&mut self) {
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
}

/// A split ring's driver.
pub(super) struct Driver {
    raw: RawRing,
    lies: Lies,
}

impl Driver {
    pub(super) fn new(raw: RawRing, lies: Lies) -> Self {
        Self { raw, lies }
    }

    /// A plain chain of one buffer.
    fn honest(&mut self) {
        let (head, (addr, len, flags)) = (self.desc(), self.lies.honest());
        self.raw.describe(head, addr, DescMeta { len, flags, next: 0 });
        self.raw.offer(head);
    }

    /// A chain of descriptors that say anything.
    fn chain(&mut self) {
        let head = self.desc();
        let mut index = head;
        for _ in 0..=self.lies.random.below(6) {
            let next = if self.lies.random.below(8) == 0 { self.lies.random.next() as u16 } else { self.desc() };
            let (addr, len, flags) = self.lies.buffer();
            self.raw.describe(index, addr, DescMeta { len, flags, next });
            index = next;
        }
        self.raw.offer(head);
    }

    fn scribble(&mut self) {
        let (index, value) = (self.lies.random.next() as u16, self.lies.random.next());
        match self.lies.random.below(3) {
            0 => self.raw.set_used(index, value as u32, (value >> 32) as u32),
            1 => self.raw.set_avail_flags(value as u16),
            _ => self.raw.scribble_avail(index, value as u16),
        }
    }

    fn desc(&mut self) -> u16 {
        self.lies.random.below(self.raw.desc.len() as u32) as u16
    }
}

impl Liar for Driver {
    fn act(&mut self) {
        // What lies too far ahead is refused whole, so a lie about the index does not last.
        let ahead = self.raw.avail_idx().wrapping_sub(self.raw.used_idx());
        if usize::from(ahead) >= self.raw.desc.len() && self.lies.coin() {
            self.raw.set_avail_idx(self.raw.used_idx());
        }
        match self.lies.random.below(128) {
            0..=63 => self.honest(),
            64..=95 => self.chain(),
            96..=119 => self.lies.table(|len, flags, next| DescMeta { len, flags, next }.pack()),
            120 => self.raw.offer(self.lies.random.next() as u16),
            121 => self.raw.set_avail_idx(self.lies.random.next() as u16),
            122 => {
                let ahead = self.lies.random.below(2 * self.raw.desc.len() as u32) as u16;
                self.raw.set_avail_idx(self.raw.used_idx().wrapping_add(ahead));
            }
            _ => self.scribble(),
        }
    }
}
