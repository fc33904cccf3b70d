//! Lies on packed rings.

use std::collections::VecDeque;
use std::sync::Arc;

use backend::memory::GuestMemory;
use pmd::virtio::spec::{DESC_F_NEXT, PackedMeta, PackedPos, feature};

use super::{Liar, Lies, Whim};
use crate::rings::{Guest, PackedEvent, RawPackedRing, RingsError};

/// A chain that the device has.
struct Held {
    id: u16,
    descs: u16,
    /// Its first buffer.
    addr: u64,
    len: u32,
}

/// A packed ring's device.
pub(super) struct Device {
    raw: RawPackedRing,
    memory: Arc<GuestMemory>,
    random: Whim,
    in_order: bool,
    avail: PackedPos,
    used: PackedPos,
    held: VecDeque<Held>,
    last: (u16, u32),
}

impl Device {
    pub(super) fn new(guest: &Guest, random: Whim) -> Result<Self, RingsError> {
        Ok(Self {
            raw: guest.raw_packed()?,
            memory: Arc::clone(guest.memory()),
            random,
            in_order: guest.features() & feature::IN_ORDER != 0,
            avail: PackedPos::START,
            used: PackedPos::START,
            held: VecDeque::new(),
            last: (0, 0),
        })
    }

    /// Takes what the driver has made available.
    fn look(&mut self) {
        let size = self.raw.size();
        while self.held.len() < size.into() && self.raw.described(self.avail.slot()).1.is_avail(self.avail) {
            let (addr, PackedMeta { len, .. }) = self.raw.described(self.avail.slot());
            let mut descs = 1;
            let mut at = self.avail;
            while descs < size && self.raw.described(at.slot()).1.flags & DESC_F_NEXT != 0 {
                descs += 1;
                at = at.advance(1, size);
            }
            let id = self.raw.described(at.slot()).1.id;
            self.held.push_back(Held { id, descs, addr, len });
            self.avail = self.avail.advance(descs, size);
        }
    }

    /// Completes a chain that is held, mostly the oldest; all those before it as well if that is how it has to be.
    fn complete(&mut self, buffers: u16, len: u32) {
        let any = self.random.below(self.held.len() as u32) as usize;
        let index = if self.random.below(16) == 0 { any } else { 0 };
        let skipped = if self.in_order { self.held.drain(..index).map(|held| held.descs).sum() } else { 0 };
        let Some(held) = self.held.remove(if self.in_order { 0 } else { index }) else { return };
        if let Some(room) = self.memory.bytes(held.addr, held.len) {
            room.write(&[&[0; 10], &buffers.to_le_bytes()[..]].concat());
        }
        self.raw.complete(self.used, held.id, len);
        self.last = (held.id, len);
        self.used = self.used.advance((skipped + held.descs).min(self.raw.size()), self.raw.size());
    }

    /// Completes something that the driver knows nothing of, in place of a chain that is never completed.
    fn claim(&mut self, id: u16, len: u32) {
        if self.held.is_empty() {
            return;
        }
        if self.in_order {
            // The driver stands still until this is taken back.
            return self.raw.complete(self.used, id | 0x8000, len);
        }
        self.held.pop_back();
        self.raw.complete(self.used, id, len);
        // The driver takes what it does not know for one descriptor.
        self.used = self.used.advance(1, self.raw.size());
    }

    fn any(&mut self) -> u32 {
        self.random.next() as u32 >> self.random.below(32)
    }

    /// Overwrites a word of the ring, also of the parts that belong to the driver; of descriptors only those that the driver has
    /// made available, so that the device itself does not get lost.
    fn scribble(&mut self) {
        let (value, descs) = (self.random.next(), self.held.iter().map(|held| u32::from(held.descs)).sum::<u32>());
        let event = PackedEvent { place: value as u16, flags: (value >> 16) as u16 };
        match self.random.below(4) {
            0 if descs > 1 => {
                let ahead = 1 + self.random.below(descs.min(self.raw.size().into()) - 1) as u16;
                let slot = self.used.advance(ahead, self.raw.size()).slot();
                self.raw.describe(slot, value, PackedMeta::unpack(self.random.next()));
            }
            1 => self.raw.set_device_event(event),
            2 => self.raw.set_driver_event(event),
            // The other round's flags.
            _ => {
                self.raw.complete(self.used.other_round(), value as u16, (value >> 32) as u32);
            }
        }
    }
}

impl Liar for Device {
    fn act(&mut self) {
        self.look();
        let len = 26 + self.random.below(1400);
        match self.random.below(128) {
            0..=79 => self.complete(1, len),
            80..=95 => {
                let buffers = self.any() as u16;
                self.complete(buffers, 12 + len % 200);
            }
            96..=115 => {
                let len = self.any();
                self.complete(1, len);
            }
            116 | 117 => {
                let (id, len) = (self.any() as u16, self.any());
                self.claim(id, len);
            }
            118 => self.claim(self.last.0, self.last.1),
            119 => {
                let id = self.random.below(2 * u32::from(self.raw.size())) as u16;
                self.claim(id, len);
            }
            _ => self.scribble(),
        }
    }
}

/// A packed ring's driver.
pub(super) struct Driver {
    raw: RawPackedRing,
    lies: Lies,
    pos: PackedPos,
    /// Where the chains begin that are not used, and how many descriptors they have.
    offered: VecDeque<(PackedPos, u16)>,
}

impl Driver {
    pub(super) fn new(raw: RawPackedRing, lies: Lies) -> Self {
        Self { raw, lies, pos: PackedPos::START, offered: VecDeque::new() }
    }

    fn offer(&mut self, buffers: &[(u64, u32, u16)]) {
        self.offered.push_back((self.pos, buffers.len() as u16));
        let id = self.lies.random.next() as u16;
        self.pos = self.raw.offer(self.pos, id, buffers);
    }

    /// A chain of descriptors that say anything.
    fn chain(&mut self) {
        let buffers: Vec<_> = (0..=self.lies.random.below(6)).map(|_| self.lies.buffer()).collect();
        self.offer(&buffers);
    }

    /// A chain that goes on all round the ring, and has no end.
    fn endless(&mut self) {
        for _ in 0..self.raw.size() {
            let (addr, len, flags) = self.lies.honest();
            let flags = flags | DESC_F_NEXT | self.pos.avail_flags();
            self.raw.describe(self.pos.slot(), addr, PackedMeta { len, id: 0, flags });
            self.pos = self.pos.advance(1, self.raw.size());
        }
    }

    fn scribble(&mut self) {
        let (slot, value) = (self.lies.random.next() as u16, self.lies.random.next());
        let event = PackedEvent { place: value as u16, flags: (value >> 16) as u16 };
        let (addr, mut meta) = self.raw.described(slot);
        match self.lies.random.below(4) {
            0 => meta.flags ^= 1 << self.lies.random.below(16),
            1 => meta = PackedMeta::unpack(value),
            2 => return self.raw.set_device_event(event),
            _ => return self.raw.set_driver_event(event),
        }
        self.raw.describe(slot, addr, meta);
    }
}

impl Liar for Driver {
    fn act(&mut self) {
        while let Some((pos, _)) = self.offered.front()
            && self.raw.used(*pos).is_some()
        {
            self.offered.pop_front();
        }
        let full = self.offered.iter().map(|(_, descs)| u32::from(*descs)).sum::<u32>() + 7 > self.raw.size().into();
        if full {
            // An honest one would wait, and wait for ever where a lie has led the device astray.
            if self.lies.coin() {
                self.offered.clear();
            }
            return;
        }
        match self.lies.random.below(128) {
            0..=63 => {
                let buffer = self.lies.honest();
                self.offer(&[buffer]);
            }
            64..=95 => self.chain(),
            96..=115 => self.lies.table(|len, flags, id| PackedMeta { len, id, flags }.pack()),
            116 => self.endless(),
            _ => self.scribble(),
        }
    }
}
