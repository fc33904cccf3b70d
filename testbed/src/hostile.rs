//! Peers that lie, by seed or as a fuzzer wants it: a device that the driver's end has to survive, and a driver that the device's
//! end has to survive.
//!
//! Both act one step at a time, between two bursts or from a thread of their own, and every step follows from the seed, or from the
//! fuzzer's bytes.

mod honest;
mod packed;
mod split;
mod whim;

use pmd::mem::{MemError, Span};
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, feature};

pub use self::honest::{judge, send};
pub use self::whim::Whim;
use crate::rings::{Guest, RingsError};

/// One end of a ring of either format.
trait Liar: Send {
    /// Does one thing, more often than not an honest one.
    fn act(&mut self);
}

/// A device that lies: indexes, wrap counters, ids, lengths, `num_buffers`, replays, and scribbling wherever it may write.
pub struct LyingDevice(Box<dyn Liar>);

impl LyingDevice {
    /// A device at the other end of `guest`'s ring.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn new(guest: &Guest, whim: impl Into<Whim>) -> Result<Self, RingsError> {
        let packed = guest.features() & feature::RING_PACKED != 0;
        Ok(Self(if packed {
            Box::new(packed::Device::new(guest, whim.into())?)
        } else {
            Box::new(split::Device::new(guest, whim.into())?)
        }))
    }

    /// Does one thing, more often than not an honest one.
    pub fn act(&mut self) {
        self.0.act();
    }
}

/// Bytes that a lying driver's chains may point into.
const WINDOW: u32 = 64 << 10;
/// Bytes that hold its indirect tables.
const TABLES: u32 = 16 << 10;
/// Bytes before both, which no chain points into.
const CANARY: usize = 64 << 10;
const CANARY_BYTE: u8 = 0x5c;

/// A driver that lies: indexes, wrap counters, heads, links, loops, lengths, addresses, flags and indirect tables.
pub struct LyingDriver {
    liar: Box<dyn Liar>,
    canary: Span,
}

impl LyingDriver {
    /// Scratch memory that the guest must have.
    pub const SCRATCH: usize = CANARY + (TABLES + WINDOW) as usize;

    /// A driver at the other end of `guest`'s ring.
    ///
    /// # Errors
    /// [`RingsError`].
    pub fn new(guest: &Guest, whim: impl Into<Whim>) -> Result<Self, RingsError> {
        let alloc = |len| -> Result<Span, MemError> { guest.arena().alloc(len, 4096) };
        let canary = alloc(CANARY)?;
        canary.bytes(0, CANARY).write(&vec![CANARY_BYTE; CANARY]);
        let (tables, window) = (alloc(TABLES as usize)?, alloc(WINDOW as usize)?);
        let lies = Lies { random: whim.into(), tables, window };
        let packed = guest.features() & feature::RING_PACKED != 0;
        let liar: Box<dyn Liar> = if packed {
            Box::new(packed::Driver::new(guest.raw_packed()?, lies))
        } else {
            Box::new(split::Driver::new(guest.raw()?, lies))
        };
        Ok(Self { liar, canary })
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
        self.liar.act();
    }
}

/// What a lying driver says of buffers.
struct Lies {
    random: Whim,
    tables: Span,
    /// At the end of memory, so that a length which is too long leads out of it and into nothing else.
    window: Span,
}

impl Lies {
    /// A plain buffer: address, length, flags.
    fn honest(&mut self) -> (u64, u32, u16) {
        let at = self.random.below(WINDOW - 2048) as usize;
        (self.window.iova(at), 26 + self.random.below(2000), if self.coin() { DESC_F_WRITE } else { 0 })
    }

    /// A buffer, or an indirect table, that says anything.
    fn buffer(&mut self) -> (u64, u32, u16) {
        let flags = self.flags();
        if flags & DESC_F_INDIRECT == 0 {
            return (self.addr(), self.len(), flags);
        }
        let odd = u32::from(self.random.below(8) == 0);
        let table = self.random.below(TABLES / 16) as usize * 16;
        (self.tables.iova(table), self.random.below(80) * 16 + odd, flags)
    }

    /// A few entries of an indirect table; `pack` makes the second word of length, flags and a small number.
    fn table(&mut self, pack: impl Fn(u32, u16, u16) -> u64) {
        let first = self.random.below(TABLES / 16 - 8) as usize;
        for i in 0..8 {
            let (len, flags, next) = (self.len(), self.flags(), self.random.below(10) as u16);
            let entry = [self.addr(), pack(len, flags, next)].map(u64::to_le_bytes).concat();
            self.tables.bytes((first + i) * size_of::<Desc>(), size_of::<Desc>()).write(&entry);
        }
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
