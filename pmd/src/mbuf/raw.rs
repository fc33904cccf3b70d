//! The mbuf's 128 bytes.
//!
//! | line 0 (receive writes nothing else) | line 1 (untouched while the packet has one segment) |
//! |---|---|
//! | 0 `buf_addr`, 8 `buf_iova`, 16 *rearm data*: `data_off`, `refcnt`, `nb_segs`, `port` | 64 `next`, 72 `tx_offload`, 80 `shinfo` |
//! | 24 `ol_flags`, 32 *descriptor fields*: `packet_type`, `pkt_len`, `data_len`, `vlan_tci`, `hash` | 88 `priv_size`, 92 `seqn`, 96 `timestamp` |
//! | 52 `vlan_tci_outer`, 54 `buf_len`, 56 `pool` | 104 `home_addr`, 112 `home_iova`, 120 `home_len` |
//!
//! The layout of line 0 is that of DPDK's `rte_mbuf`. The data room is not behind the header but in an arena; `home_*` says where.
//!
//! What changes is a `Cell`: a header is only ever borrowed shared, because another thread that frees an indirect mbuf may
//! count `refcnt` down at any moment. The cells are the handle's owner's alone.

use std::cell::Cell;
use std::ptr::{NonNull, null, null_mut};

use super::refcnt::Refcnt;
use crate::mempool::{Core, Object};

/// The header. Only this module's siblings ever see one.
#[repr(C, align(64))]
pub(super) struct RawMbuf {
    pub buf_addr: Cell<*mut u8>,
    pub buf_iova: Cell<u64>,
    pub data_off: Cell<u16>,
    pub refcnt: Refcnt,
    pub nb_segs: Cell<u16>,
    pub port: Cell<u16>,
    pub ol_flags: Cell<u64>,
    pub packet_type: Cell<u32>,
    pub pkt_len: Cell<u32>,
    pub data_len: Cell<u16>,
    pub vlan_tci: Cell<u16>,
    pub hash: [Cell<u32>; 2],
    pub vlan_tci_outer: Cell<u16>,
    pub buf_len: Cell<u16>,
    pub pool: *const Core,
    pub next: Cell<*mut RawMbuf>,
    pub tx_offload: Cell<u64>,
    /// External: one count of an `Arc<ExternalBuffer>`. Indirect: one reference to a direct header.
    pub shinfo: Cell<*const ()>,
    pub priv_size: u16,
    pub _spare: u16,
    pub seqn: Cell<u32>,
    pub timestamp: Cell<u64>,
    pub home_addr: *mut u8,
    pub home_iova: u64,
    pub home_len: u16,
    pub _reserved: [u16; 3],
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<RawMbuf>() == 128 && align_of::<RawMbuf>() == 64);
    assert!(offset_of!(RawMbuf, buf_addr) == 0 && offset_of!(RawMbuf, buf_iova) == 8);
    // Rearm data: four 16-bit fields, one aligned 8-byte store.
    assert!(offset_of!(RawMbuf, data_off) == 16 && offset_of!(RawMbuf, refcnt) == 18);
    assert!(offset_of!(RawMbuf, nb_segs) == 20 && offset_of!(RawMbuf, port) == 22);
    assert!(offset_of!(RawMbuf, ol_flags) == 24);
    // Descriptor fields: one aligned 16-byte store.
    assert!(offset_of!(RawMbuf, packet_type) == 32 && offset_of!(RawMbuf, pkt_len) == 36);
    assert!(offset_of!(RawMbuf, data_len) == 40 && offset_of!(RawMbuf, vlan_tci) == 42);
    assert!(offset_of!(RawMbuf, hash) == 44 && offset_of!(RawMbuf, vlan_tci_outer) == 52);
    assert!(offset_of!(RawMbuf, buf_len) == 54 && offset_of!(RawMbuf, pool) == 56);
    // Line 1.
    assert!(offset_of!(RawMbuf, next) == 64 && offset_of!(RawMbuf, tx_offload) == 72);
    assert!(offset_of!(RawMbuf, shinfo) == 80 && offset_of!(RawMbuf, priv_size) == 88);
    assert!(offset_of!(RawMbuf, seqn) == 92 && offset_of!(RawMbuf, timestamp) == 96);
    assert!(offset_of!(RawMbuf, home_addr) == 104 && offset_of!(RawMbuf, home_iova) == 112);
    assert!(offset_of!(RawMbuf, home_len) == 120);
};

/// Bytes left free before a received frame.
pub const HEADROOM: u16 = 128;
/// The port number of an mbuf that came from none.
pub const PORT_NONE: u16 = u16::MAX;
/// The usual data room, headroom included.
pub const ROOM_DEFAULT: u16 = 2048 + HEADROOM;
/// `ol_flags`: the data belongs to an [`ExternalBuffer`](super::ExternalBuffer).
pub(super) const EXTERNAL: u64 = 1 << 61;
/// `ol_flags`: the data belongs to another mbuf.
pub(super) const INDIRECT: u64 = 1 << 62;

impl RawMbuf {
    /// A header as it lies in its pool.
    pub fn at_home(pool: *const Core, addr: *mut u8, iova: u64, len: u16, priv_size: u16) -> Self {
        Self {
            buf_addr: Cell::new(addr),
            buf_iova: Cell::new(iova),
            data_off: Cell::new(HEADROOM.min(len)),
            refcnt: Refcnt::one(),
            nb_segs: Cell::new(1),
            port: Cell::new(PORT_NONE),
            ol_flags: Cell::new(0),
            packet_type: Cell::new(0),
            pkt_len: Cell::new(0),
            data_len: Cell::new(0),
            vlan_tci: Cell::new(0),
            hash: [Cell::new(0), Cell::new(0)],
            vlan_tci_outer: Cell::new(0),
            buf_len: Cell::new(len),
            pool,
            next: Cell::new(null_mut()),
            tx_offload: Cell::new(0),
            shinfo: Cell::new(null()),
            priv_size,
            _spare: 0,
            seqn: Cell::new(0),
            timestamp: Cell::new(0),
            home_addr: addr,
            home_iova: iova,
            home_len: len,
            _reserved: [0; 3],
        }
    }

    /// Whether the data belongs to somebody else.
    #[inline(always)]
    pub fn is_attached(&self) -> bool {
        self.ol_flags.get() & (INDIRECT | EXTERNAL) != 0
    }

    /// Whether it could go home just as it is: the pool's invariant, as far as line 0 tells.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.refcnt.is_one() && self.nb_segs.get() == 1 && !self.is_attached()
    }

    /// Free bytes behind the data.
    #[inline(always)]
    pub fn tailroom(&self) -> u16 {
        self.buf_len.get() - self.data_off.get() - self.data_len.get()
    }

    /// The mempool's object that this header is.
    #[inline(always)]
    pub fn object(this: NonNull<Self>) -> Object {
        this.cast()
    }
}
