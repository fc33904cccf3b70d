//! The mbuf's 128 bytes.
//!
//! | line 0 (receive writes nothing else) | line 1 (untouched while the packet has one segment) |
//! |---|---|
//! | 0 `buf_addr`, 8 `buf_iova`, 16 *rearm data*: `data_off`, `refcnt`, `nb_segs`, `port` | 64 `next`, 72 `tx_offload`, 80 `shinfo` |
//! | 24 `ol_flags`, 32 *descriptor fields*: `packet_type`, `pkt_len`, `data_len`, `vlan_tci`, `hash` | 88 `priv_size`, 92 `seqn`, 96 `timestamp` |
//! | 52 `vlan_tci_outer`, 54 `buf_len`, 56 `pool` | 104 `home_addr`, 112 `home_iova`, 120 `home_len` |
//!
//! The layout of line 0 is that of DPDK's `rte_mbuf`. The data room is not behind the header but in an arena; `home_*` says where.

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU16, Ordering};

use super::external::ExternalBuffer;
use crate::mempool::Core;

/// The header. Only this module's siblings ever see one.
#[repr(C, align(64))]
pub(super) struct RawMbuf {
    pub buf_addr: *mut u8,
    pub buf_iova: u64,
    pub data_off: u16,
    pub refcnt: AtomicU16,
    pub nb_segs: u16,
    pub port: u16,
    pub ol_flags: u64,
    pub packet_type: u32,
    pub pkt_len: u32,
    pub data_len: u16,
    pub vlan_tci: u16,
    pub hash: [u32; 2],
    pub vlan_tci_outer: u16,
    pub buf_len: u16,
    pub pool: *const Core,
    pub next: *mut RawMbuf,
    pub tx_offload: u64,
    pub shinfo: *const ExternalBuffer,
    pub priv_size: u16,
    pub _spare: u16,
    pub seqn: u32,
    pub timestamp: u64,
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
/// `ol_flags`: the data belongs to an [`ExternalBuffer`].
pub(super) const EXTERNAL: u64 = 1 << 61;
/// `ol_flags`: the data belongs to another mbuf.
pub(super) const INDIRECT: u64 = 1 << 62;

impl RawMbuf {
    /// A header as it lies in its pool.
    pub fn at_home(pool: *const Core, addr: *mut u8, iova: u64, len: u16, priv_size: u16) -> Self {
        Self {
            buf_addr: addr,
            buf_iova: iova,
            data_off: HEADROOM.min(len),
            refcnt: AtomicU16::new(1),
            nb_segs: 1,
            port: PORT_NONE,
            ol_flags: 0,
            packet_type: 0,
            pkt_len: 0,
            data_len: 0,
            vlan_tci: 0,
            hash: [0; 2],
            vlan_tci_outer: 0,
            buf_len: len,
            pool,
            next: null_mut(),
            tx_offload: 0,
            shinfo: std::ptr::null(),
            priv_size,
            _spare: 0,
            seqn: 0,
            timestamp: 0,
            home_addr: addr,
            home_iova: iova,
            home_len: len,
            _reserved: [0; 3],
        }
    }

    /// Whether it could go home just as it is: the pool's invariant, as far as line 0 tells.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        // Relaxed: 1 means that nobody else holds a reference, so nobody can change it.
        self.refcnt.load(Ordering::Relaxed) == 1 && self.nb_segs == 1 && self.ol_flags & (INDIRECT | EXTERNAL) == 0
    }

    /// The pool's address, as an object's.
    #[inline(always)]
    pub fn object(this: NonNull<Self>) -> crate::mempool::Object {
        this.cast()
    }
}
