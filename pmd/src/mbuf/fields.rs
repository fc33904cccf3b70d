//! What an mbuf says of its packet besides the data: flags, offloads, marks, the application's private bytes.

use super::Mbuf;
use super::raw::{EXTERNAL, INDIRECT, RawMbuf};

/// Bits of [`Mbuf::ol_flags`], at DPDK's positions. Bits 23 to 38 are the application's.
pub mod flags {
    /// The frame has a VLAN tag; its TCI is in `vlan_tci`.
    pub const RX_VLAN: u64 = 1 << 0;
    /// The device computed an RSS hash.
    pub const RX_RSS_HASH: u64 = 1 << 1;
    /// A flow-director rule matched.
    pub const RX_FDIR: u64 = 1 << 2;
    /// The L4 checksum is wrong.
    pub const RX_L4_CKSUM_BAD: u64 = 1 << 3;
    /// The IPv4 header checksum is wrong.
    pub const RX_IP_CKSUM_BAD: u64 = 1 << 4;
    /// The outer IPv4 header checksum is wrong.
    pub const RX_OUTER_IP_CKSUM_BAD: u64 = 1 << 5;
    /// The device took the VLAN tag out of the frame; comes with [`RX_VLAN`].
    pub const RX_VLAN_STRIPPED: u64 = 1 << 6;
    /// The IPv4 header checksum is right.
    pub const RX_IP_CKSUM_GOOD: u64 = 1 << 7;
    /// The L4 checksum is right.
    pub const RX_L4_CKSUM_GOOD: u64 = 1 << 8;
    /// Both L4 bits: not checked, not even filled in, but the data is intact (it never left the host).
    pub const RX_L4_CKSUM_NONE: u64 = RX_L4_CKSUM_BAD | RX_L4_CKSUM_GOOD;
    /// An IEEE 1588 frame.
    pub const RX_IEEE1588_PTP: u64 = 1 << 9;
    /// An IEEE 1588 frame that the device time-stamped.
    pub const RX_IEEE1588_TMST: u64 = 1 << 10;
    /// The flow-director rule's id is known.
    pub const RX_FDIR_ID: u64 = 1 << 13;
    /// The outer VLAN tag was taken out; its TCI is in `vlan_tci_outer`.
    pub const RX_QINQ_STRIPPED: u64 = 1 << 15;
    /// Several segments of a TCP stream, put together; `tso_segsz` says how long each was.
    pub const RX_LRO: u64 = 1 << 16;
    /// The frame has two VLAN tags.
    pub const RX_QINQ: u64 = 1 << 20;
    /// Send as UDP fragments of `tso_segsz` bytes each.
    pub const TX_UDP_SEG: u64 = 1 << 42;
    /// Insert both VLAN tags.
    pub const TX_QINQ: u64 = 1 << 49;
    /// Send as TCP segments of `tso_segsz` bytes each.
    pub const TX_TCP_SEG: u64 = 1 << 50;
    /// Time-stamp the frame when it leaves.
    pub const TX_IEEE1588_TMST: u64 = 1 << 51;
    /// Compute the TCP checksum.
    pub const TX_TCP_CKSUM: u64 = 1 << 52;
    /// Compute the SCTP checksum.
    pub const TX_SCTP_CKSUM: u64 = 2 << 52;
    /// Compute the UDP checksum.
    pub const TX_UDP_CKSUM: u64 = 3 << 52;
    /// The two bits that choose the L4 checksum.
    pub const TX_L4_MASK: u64 = 3 << 52;
    /// Compute the IPv4 header checksum.
    pub const TX_IP_CKSUM: u64 = 1 << 54;
    /// The packet is IPv4.
    pub const TX_IPV4: u64 = 1 << 55;
    /// The packet is IPv6.
    pub const TX_IPV6: u64 = 1 << 56;
    /// Insert the VLAN tag in `vlan_tci`.
    pub const TX_VLAN: u64 = 1 << 57;
    /// Compute the outer IPv4 header checksum.
    pub const TX_OUTER_IP_CKSUM: u64 = 1 << 58;
    /// The outer packet is IPv4.
    pub const TX_OUTER_IPV4: u64 = 1 << 59;
    /// The outer packet is IPv6.
    pub const TX_OUTER_IPV6: u64 = 1 << 60;
}

/// `ol_flags`: `tx_offload` is this packet's. So an empty packet has no lengths, without a write to line 1.
const LENGTHS: u64 = 1 << 40;
/// `ol_flags`: `timestamp` is this packet's.
const TIMESTAMP: u64 = 1 << 39;
/// Flags that [`Mbuf::set_ol_flags`] leaves alone.
const OWN: u64 = EXTERNAL | INDIRECT | LENGTHS | TIMESTAMP;

/// Header lengths in bytes, for offloads. Values that do not fit their field are cut to its width, as in DPDK's bit fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxOffload {
    /// L2 header, 7 bits (for a tunnel: from the outer L4 header to the end of the inner L2 header).
    pub l2_len: u8,
    /// L3 header, 9 bits.
    pub l3_len: u16,
    /// L4 header, 8 bits.
    pub l4_len: u8,
    /// Payload of each segment that TSO makes, 16 bits.
    pub tso_segsz: u16,
    /// Outer L3 header, 9 bits.
    pub outer_l3_len: u16,
    /// Outer L2 header, 7 bits.
    pub outer_l2_len: u8,
}

impl TxOffload {
    fn pack(self) -> u64 {
        u64::from(self.l2_len & 0x7f)
            | u64::from(self.l3_len & 0x1ff) << 7
            | u64::from(self.l4_len) << 16
            | u64::from(self.tso_segsz) << 24
            | u64::from(self.outer_l3_len & 0x1ff) << 40
            | u64::from(self.outer_l2_len & 0x7f) << 49
    }

    fn unpack(word: u64) -> Self {
        Self {
            l2_len: word as u8 & 0x7f,
            l3_len: (word >> 7) as u16 & 0x1ff,
            l4_len: (word >> 16) as u8,
            tso_segsz: (word >> 24) as u16,
            outer_l3_len: (word >> 40) as u16 & 0x1ff,
            outer_l2_len: (word >> 49) as u8 & 0x7f,
        }
    }
}

impl RawMbuf {
    /// Takes over what `from` says of its packet, apart from whose the data is.
    pub fn copy_metadata(&self, from: &RawMbuf) {
        const DATA: u64 = EXTERNAL | INDIRECT;
        let flags = from.ol_flags.get();
        self.ol_flags.set(self.ol_flags.get() & DATA | flags & !DATA);
        self.port.set(from.port.get());
        self.packet_type.set(from.packet_type.get());
        self.vlan_tci.set(from.vlan_tci.get());
        self.vlan_tci_outer.set(from.vlan_tci_outer.get());
        self.hash[0].set(from.hash[0].get());
        self.hash[1].set(from.hash[1].get());
        self.tx_offload.set(from.tx_offload.get());
        self.timestamp.set(from.timestamp.get());
        self.seqn.set(from.seqn.get());
    }

    fn set_flag(&self, flag: u64) {
        self.ol_flags.set(self.ol_flags.get() | flag);
    }

    fn has(&self, flag: u64) -> bool {
        self.ol_flags.get() & flag != 0
    }
}

impl Mbuf {
    /// The [`flags`] that are set.
    #[inline(always)]
    #[must_use]
    pub fn ol_flags(&self) -> u64 {
        self.raw().ol_flags.get() & !OWN
    }

    /// Sets all [`flags`] anew. Bits 39, 40, 61 and 62 are the mbuf's own and stay.
    #[inline(always)]
    pub fn set_ol_flags(&mut self, flags: u64) {
        let m = self.raw();
        m.ol_flags.set(m.ol_flags.get() & OWN | flags & !OWN);
    }

    /// Header lengths for offloads; all 0 unless they were set since the packet was received or allocated.
    #[inline(always)]
    #[must_use]
    pub fn tx_offload(&self) -> TxOffload {
        let m = self.raw();
        if m.has(LENGTHS) { TxOffload::unpack(m.tx_offload.get()) } else { TxOffload::default() }
    }

    /// Sets the header lengths for offloads.
    #[inline(always)]
    pub fn set_tx_offload(&mut self, lengths: TxOffload) {
        let m = self.raw();
        m.set_flag(LENGTHS);
        m.tx_offload.set(lengths.pack());
    }

    /// What kind of packet it is (DPDK's `RTE_PTYPE_*`), 0 if nobody looked.
    #[inline(always)]
    #[must_use]
    pub fn packet_type(&self) -> u32 {
        self.raw().packet_type.get()
    }

    /// Sets the kind of packet.
    #[inline(always)]
    pub fn set_packet_type(&mut self, packet_type: u32) {
        self.raw().packet_type.set(packet_type);
    }

    /// The VLAN tag control information, if [`flags`] say that there is one.
    #[inline(always)]
    #[must_use]
    pub fn vlan_tci(&self) -> u16 {
        self.raw().vlan_tci.get()
    }

    /// Sets the VLAN tag control information.
    #[inline(always)]
    pub fn set_vlan_tci(&mut self, tci: u16) {
        self.raw().vlan_tci.set(tci);
    }

    /// The outer VLAN tag control information, if [`flags`] say that there is one.
    #[inline(always)]
    #[must_use]
    pub fn vlan_tci_outer(&self) -> u16 {
        self.raw().vlan_tci_outer.get()
    }

    /// Sets the outer VLAN tag control information.
    #[inline(always)]
    pub fn set_vlan_tci_outer(&mut self, tci: u16) {
        self.raw().vlan_tci_outer.set(tci);
    }

    /// The device's RSS hash, if it computed one.
    #[inline(always)]
    #[must_use]
    pub fn rss_hash(&self) -> Option<u32> {
        let m = self.raw();
        m.has(flags::RX_RSS_HASH).then(|| m.hash[0].get())
    }

    /// Sets the RSS hash and its flag.
    #[inline(always)]
    pub fn set_rss_hash(&mut self, hash: u32) {
        let m = self.raw();
        m.hash[0].set(hash);
        m.set_flag(flags::RX_RSS_HASH);
    }

    /// The id of the flow-director rule that matched, if one did.
    #[inline(always)]
    #[must_use]
    pub fn fdir_id(&self) -> Option<u32> {
        let m = self.raw();
        m.has(flags::RX_FDIR_ID).then(|| m.hash[1].get())
    }

    /// Sets the id of the flow-director rule that matched, and its flags.
    #[inline(always)]
    pub fn set_fdir_id(&mut self, id: u32) {
        let m = self.raw();
        m.hash[1].set(id);
        m.set_flag(flags::RX_FDIR | flags::RX_FDIR_ID);
    }

    /// When it was received, in the device's or application's unit, if that was noted.
    #[must_use]
    pub fn timestamp(&self) -> Option<u64> {
        let m = self.raw();
        m.has(TIMESTAMP).then(|| m.timestamp.get())
    }

    /// Notes when it was received.
    pub fn set_timestamp(&mut self, timestamp: u64) {
        let m = self.raw();
        m.timestamp.set(timestamp);
        m.set_flag(TIMESTAMP);
    }

    /// The application's sequence number, as set last: allocating and receiving leave it alone.
    #[must_use]
    pub fn seqn(&self) -> u32 {
        self.raw().seqn.get()
    }

    /// Sets the application's sequence number.
    pub fn set_seqn(&mut self, seqn: u32) {
        self.raw().seqn.set(seqn);
    }

    /// The application's bytes beside the first segment's header, as many as the pool was made with: zero at first, then as
    /// the last user left them.
    #[must_use]
    pub fn private(&self) -> &[u8] {
        let len = usize::from(self.raw().priv_size);
        // SAFETY: an object is a header and `priv_size` bytes, zeroed when it was mapped, which only the handle reaches.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().add(1).cast(), len) }
    }

    /// The same bytes, to be changed.
    pub fn private_mut(&mut self) -> &mut [u8] {
        let len = usize::from(self.raw().priv_size);
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr().add(1).cast(), len) }
    }
}
