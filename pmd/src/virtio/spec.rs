//! Virtio 1.3 layout: what both ends of a ring agree on, and nothing of how either works.
//!
//! All fields are little-endian (1.4); this crate is built for little-endian hosts only.
#![expect(unsafe_code, reason = "marks the ring layouts as `Shared`: structs of atomics without padding")]

use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::shared::Shared;

#[cfg(not(target_endian = "little"))]
compile_error!("ring layouts are little-endian (virtio 1.3, 1.4)");

/// The largest ring (2.7: a power of two up to 32768; 2.8: any size up to it).
pub const RING_SIZE_MAX: u16 = 32768;
/// Rings of a device at most: vhost-user names one in 8 bits where it hands over a kick or a call.
pub const RINGS_MAX: u16 = 256;

/// Queue pairs at most of a device with `features`: a control queue is a ring, too (5.1.2).
#[must_use]
pub const fn queue_pairs_max(features: u64) -> u16 {
    let control = features & feature::CTRL_VQ != 0;
    (RINGS_MAX - control as u16) / 2
}

/// Feature bits (5.1.3 and 6), as masks.
pub mod feature {
    /// Device handles packets with partial checksum.
    pub const CSUM: u64 = 1 << 0;
    /// Driver handles packets with partial checksum.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// Device maximum MTU is in its configuration.
    pub const MTU: u64 = 1 << 3;
    /// Device has given a MAC address.
    pub const MAC: u64 = 1 << 5;
    /// Driver can merge receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// Configuration status field is available.
    pub const STATUS: u64 = 1 << 16;
    /// Control channel is available.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// Multiple queue pairs.
    pub const MQ: u64 = 1 << 22;
    /// Legacy: any header layout (implied by `VERSION_1`).
    pub const ANY_LAYOUT: u64 = 1 << 27;
    /// Indirect descriptor tables (2.7.5.3).
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Used/avail event index (2.7.7, 2.7.10).
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user: `GET_PROTOCOL_FEATURES` exists. Not a virtio feature: never reaches a guest.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Modern device.
    pub const VERSION_1: u64 = 1 << 32;
    /// Device reaches memory through an IOMMU.
    pub const ACCESS_PLATFORM: u64 = 1 << 33;
    /// Packed rings (2.8).
    pub const RING_PACKED: u64 = 1 << 34;
    /// Buffers are used in the order in which they were made available (2.7.9).
    pub const IN_ORDER: u64 = 1 << 35;
}

/// Device status bits (2.1).
pub mod status {
    /// The driver has noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The driver knows how to drive it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u8 = 4;
    /// Feature negotiation is complete.
    pub const FEATURES_OK: u8 = 8;
    /// The device needs a reset.
    pub const NEEDS_RESET: u8 = 64;
    /// The driver gave up.
    pub const FAILED: u8 = 128;
}

/// Descriptor flag: the chain goes on at `next` (2.7.5).
pub const DESC_F_NEXT: u16 = 1;
/// Descriptor flag: the device writes this buffer.
pub const DESC_F_WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const DESC_F_INDIRECT: u16 = 4;
/// Avail ring flag: the driver wants no interrupts (2.7.6).
pub const AVAIL_F_NO_INTERRUPT: u16 = 1;
/// Used ring flag: the device wants no kicks (2.7.8).
pub const USED_F_NO_NOTIFY: u16 = 1;

/// A split-ring descriptor (2.7.5).
#[repr(C, align(16))]
#[derive(Debug, Default)]
pub struct Desc {
    /// Where the buffer lies, in the device's address space.
    pub addr: AtomicU64,
    /// Length, flags and next: a [`DescMeta`] in one word, so that it is read and written as one.
    pub meta: AtomicU64,
}
const _: () = assert!(size_of::<Desc>() == 16);
// SAFETY: two atomics, 16 bytes: no padding, any bits are valid.
unsafe impl Shared for Desc {}

/// The second half of a [`Desc`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DescMeta {
    /// The buffer's length in bytes.
    pub len: u32,
    /// `DESC_F_*`.
    pub flags: u16,
    /// The next descriptor of the chain, if `DESC_F_NEXT`.
    pub next: u16,
}

impl DescMeta {
    /// As it lies in memory.
    #[inline(always)]
    #[must_use]
    pub const fn pack(self) -> u64 {
        self.len as u64 | (self.flags as u64) << 32 | (self.next as u64) << 48
    }

    /// From memory.
    #[inline(always)]
    #[must_use]
    pub const fn unpack(word: u64) -> Self {
        Self { len: word as u32, flags: (word >> 32) as u16, next: (word >> 48) as u16 }
    }
}

/// Packed-ring descriptor flag: with [`PACKED_DESC_F_USED`] says whose the descriptor is (2.8.1).
pub const PACKED_DESC_F_AVAIL: u16 = 1 << 7;
/// Packed-ring descriptor flag: see [`PACKED_DESC_F_AVAIL`].
pub const PACKED_DESC_F_USED: u16 = 1 << 15;
/// Packed-ring event flags: notify always (2.8.10).
pub const PACKED_EVENT_F_ENABLE: u16 = 0;
/// Packed-ring event flags: notify never.
pub const PACKED_EVENT_F_DISABLE: u16 = 1;
/// Packed-ring event flags: notify when the descriptor at a place is there; takes `EVENT_IDX`.
pub const PACKED_EVENT_F_DESC: u16 = 2;

/// The second half of a packed ring's [`Desc`] (2.8.5): as [`DescMeta`], with a buffer id and the flags last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PackedMeta {
    /// The buffer's length in bytes; once used, how many were written.
    pub len: u32,
    /// The buffer's id.
    pub id: u16,
    /// `DESC_F_*` and `PACKED_DESC_F_*`.
    pub flags: u16,
}

impl PackedMeta {
    /// As it lies in memory.
    #[inline(always)]
    #[must_use]
    pub const fn pack(self) -> u64 {
        self.len as u64 | (self.id as u64) << 32 | (self.flags as u64) << 48
    }

    /// From memory.
    #[inline(always)]
    #[must_use]
    pub const fn unpack(word: u64) -> Self {
        Self { len: word as u32, id: (word >> 32) as u16, flags: (word >> 48) as u16 }
    }

    /// Whether the driver has made it available, in the round of `pos` (2.8.1).
    #[inline(always)]
    #[must_use]
    pub const fn is_avail(self, pos: PackedPos) -> bool {
        self.flags & PackedPos::BOTH == pos.avail_flags()
    }

    /// Whether the device has used it, in the round of `pos` (2.8.1).
    #[inline(always)]
    #[must_use]
    pub const fn is_used(self, pos: PackedPos) -> bool {
        self.flags & PackedPos::BOTH == pos.used_flags()
    }
}

/// A place in a packed ring: a descriptor, and in which round (2.8.1). In one word: it changes per packet, and the parts of a pair
/// would be stored one by one, loaded together, and wait for each other.
///
/// The lower half is the descriptor's number. The upper half is what its flags say once it is available, and stands for the wrap
/// counter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PackedPos(u32);

impl PackedPos {
    /// The flags that the two sides turn over in each round.
    pub const BOTH: u16 = PACKED_DESC_F_AVAIL | PACKED_DESC_F_USED;
    /// Where a fresh ring begins.
    pub const START: Self = Self::new(0, true);

    /// Descriptor `slot` in the round of the wrap counter `wrap`.
    #[inline(always)]
    #[must_use]
    pub const fn new(slot: u16, wrap: bool) -> Self {
        let flags = if wrap { PACKED_DESC_F_AVAIL } else { PACKED_DESC_F_USED };
        Self(slot as u32 | (flags as u32) << 16)
    }

    /// The descriptor.
    #[inline(always)]
    #[must_use]
    pub const fn slot(self) -> u16 {
        self.0 as u16
    }

    /// The wrap counter.
    #[inline(always)]
    #[must_use]
    pub const fn wrap(self) -> bool {
        self.avail_flags() == PACKED_DESC_F_AVAIL
    }

    /// The same descriptor in the round before or after.
    #[inline(always)]
    #[must_use]
    pub const fn other_round(self) -> Self {
        Self(self.0 ^ (Self::BOTH as u32) << 16)
    }

    /// `count` (at most `size`) descriptors further on a ring of `size`.
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, count: u16, size: u16) -> Self {
        let slot = self.slot() as u32 + count as u32;
        let here = self.0 & !(u16::MAX as u32);
        if slot >= size as u32 { Self(here | (slot - size as u32)).other_round() } else { Self(here | slot) }
    }

    /// This descriptor of `ring` and those behind it, `N` in all, unless the ring ends before.
    #[inline(always)]
    #[must_use]
    pub fn group<const N: usize>(self, ring: &[Desc]) -> Option<&[Desc; N]> {
        ring.get(usize::from(self.slot())..)?.first_chunk()
    }

    /// The flags that make a descriptor here available.
    #[inline(always)]
    #[must_use]
    pub const fn avail_flags(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// The flags that make a descriptor here used.
    #[inline(always)]
    #[must_use]
    pub const fn used_flags(self) -> u16 {
        if self.wrap() { Self::BOTH } else { 0 }
    }
}

impl std::fmt::Debug for PackedPos {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PackedPos({}, {})", self.slot(), self.wrap())
    }
}

/// One element of the used ring (2.7.8).
#[repr(C)]
#[derive(Debug, Default)]
pub struct UsedElem {
    /// Index of the head descriptor of the finished chain.
    pub id: AtomicU32,
    /// Bytes written into it.
    pub len: AtomicU32,
}
const _: () = assert!(size_of::<UsedElem>() == 8);
// SAFETY: two atomics, 8 bytes: no padding, any bits are valid.
unsafe impl Shared for UsedElem {}

/// Where the words of a split ring's driver area lie, in units of 16 bits (2.7.6): `flags`, `idx`, the ring, `used_event`.
pub mod avail {
    /// `flags`.
    pub const FLAGS: usize = 0;
    /// `idx`.
    pub const IDX: usize = 1;
    /// The first ring entry.
    pub const RING: usize = 2;
    /// `used_event`, the last word.
    #[must_use]
    pub const fn used_event(size: u16) -> usize {
        RING + size as usize
    }
    /// 16-bit words in the whole area.
    #[must_use]
    pub const fn words(size: u16) -> usize {
        used_event(size) + 1
    }
}

/// Where the parts of a split ring's device area lie, in bytes (2.7.8): `flags`, `idx`, the elements, `avail_event`.
pub mod used {
    /// `flags`, 16 bits.
    pub const FLAGS: usize = 0;
    /// `idx`, 16 bits.
    pub const IDX: usize = 2;
    /// The first element.
    pub const RING: usize = 4;
    /// `avail_event`, 16 bits, behind the elements.
    #[must_use]
    pub const fn avail_event(size: u16) -> usize {
        RING + 8 * size as usize
    }
    /// Bytes in the whole area.
    #[must_use]
    pub const fn bytes(size: u16) -> usize {
        avail_event(size) + 2
    }
}

/// Bytes of `struct virtio_net_hdr` before each frame (5.1.6): 10 for a legacy device without mergeable buffers, else 12.
#[must_use]
pub const fn header_len(features: u64) -> usize {
    if features & (feature::VERSION_1 | feature::MRG_RXBUF | feature::RING_PACKED) == 0 { 10 } else { 12 }
}
/// Offset of `num_buffers` in a 12-byte header.
pub const HEADER_NUM_BUFFERS: usize = 10;
/// The header of a legacy device without mergeable buffers.
pub const HEADER_LEN_LEGACY: usize = 10;
/// The longest header this crate handles.
pub const HEADER_LEN_MAX: usize = 12;
/// The shortest frame that is a frame: an Ethernet header.
pub const FRAME_LEN_MIN: usize = 14;
