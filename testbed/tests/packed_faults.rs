//! On a packed ring, too, each lie is counted under its own name, costs at most the frame it stands for, and the next honest
//! frame arrives.

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::mem::Span;
use pmd::port::{Burst, FAULTS, Fault, Stats};
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, PackedMeta, PackedPos, feature};
use testbed::rings::{Direction, Guest, RawPackedRing, Setup, bytes_of, packet};

const SIZE: u16 = 35;
const SCRATCH: usize = 64 << 10;
/// Where in the scratch memory indirect tables go.
const TABLE: usize = 32 << 10;

fn only(fault: Fault) -> [u64; FAULTS] {
    std::array::from_fn(|i| u64::from(i == fault as usize))
}

fn since(before: &Stats, after: &Stats) -> [u64; FAULTS] {
    std::array::from_fn(|i| after.faults[i] - before.faults[i])
}

/// A driver that a test plays.
struct Driver {
    guest: Guest,
    raw: RawPackedRing,
    scratch: Span,
    pos: PackedPos,
}

impl Driver {
    fn new(features: u64) -> Self {
        let setup = Setup { scratch: SCRATCH, ..Setup::new(features).ring(SIZE, SIZE) };
        let guest = Guest::new(&setup).unwrap();
        let scratch = guest.arena().alloc(SCRATCH, 64).unwrap();
        scratch.bytes(0, 2048).write(&[0; 2048]);
        Self { raw: guest.raw_packed().unwrap(), guest, scratch, pos: PackedPos::START }
    }

    /// Offers a chain of buffers (length, flags) that all lie at the beginning of the scratch memory.
    fn offer(&mut self, buffers: &[(u32, u16)]) {
        let buffers: Vec<_> = buffers.iter().map(|&(len, flags)| (self.scratch.iova(0), len, flags)).collect();
        self.pos = self.raw.offer(self.pos, 7, &buffers);
    }

    /// Offers an indirect table of `len` bytes, whose entries all have `flags`.
    fn offer_table(&mut self, len: u32, flags: u16, entry_flags: u16) {
        for i in 0..=usize::from(SIZE) {
            let meta = PackedMeta { len: 100, id: 0, flags: entry_flags }.pack();
            let entry = [self.scratch.iova(0), meta].map(u64::to_le_bytes).concat();
            self.scratch.bytes(TABLE + 16 * i, 16).write(&entry);
        }
        let table = (self.scratch.iova(TABLE), len, DESC_F_INDIRECT | flags);
        self.pos = self.raw.offer(self.pos, 7, &[table]);
    }

    /// Fills the ring with a chain that has no end.
    fn offer_endless(&mut self, flags: u16) {
        for _ in 0..SIZE {
            let flags = flags | DESC_F_NEXT | self.pos.avail_flags();
            self.raw.describe(self.pos.slot(), self.scratch.iova(0), PackedMeta { len: 100, id: 0, flags });
            self.pos = self.pos.advance(1, SIZE);
        }
    }
}

/// A lie to a peer `P`: what it counts as, what it is, and how it is told.
type Lie<P> = (Fault, &'static str, fn(&mut P, u16));

/// What a driver may do wrong; the lies are told the flags that are right.
fn lies() -> Vec<Lie<Driver>> {
    vec![
        (Fault::BadChain, "no end", |d, w| d.offer_endless(w)),
        (Fault::BadFlags, "the other direction", |d, w| d.offer(&[(100, w ^ DESC_F_WRITE)])),
        (Fault::BadFlags, "both directions", |d, w| d.offer(&[(8, w), (100, w ^ DESC_F_WRITE)])),
        (Fault::BadAddress, "nowhere", |d, w| d.pos = d.raw.offer(d.pos, 7, &[(1, 100, w)])),
        (Fault::BadAddress, "a buffer beyond memory", |d, w| {
            let end = d.guest.arena().iova() + d.guest.arena().size() as u64;
            d.pos = d.raw.offer(d.pos, 7, &[(end - 50, 2000, w)]);
        }),
        (Fault::Short, "less than a header", |d, w| d.offer(&[(11, w)])),
        (Fault::Short, "nothing", |d, w| d.offer(&[(0, w), (0, w)])),
        (Fault::BadIndirect, "a table that goes on", |d, w| {
            d.offer_table(32, 0, w);
            // The ring's own next descriptor belongs to the chain, as the flag says.
            let (addr, meta) = d.raw.described(d.pos.slot() + SIZE - 1);
            d.raw.describe(d.pos.slot(), addr, PackedMeta { flags: w | d.pos.avail_flags(), ..meta });
            d.raw.describe(d.pos.slot() + SIZE - 1, addr, PackedMeta { flags: meta.flags | DESC_F_NEXT, ..meta });
            d.pos = d.pos.advance(1, SIZE);
        }),
        (Fault::BadIndirect, "a table in a table", |d, w| d.offer_table(32, 0, w | DESC_F_INDIRECT)),
        (Fault::BadIndirect, "an empty table", |d, w| d.offer_table(0, 0, w)),
        (Fault::BadIndirect, "half an entry", |d, w| d.offer_table(40, 0, w)),
        (Fault::BadIndirect, "more entries than the ring", |d, w| d.offer_table(16 * (u32::from(SIZE) + 1), 0, w)),
        (Fault::BadAddress, "a table nowhere", |d, _| d.pos = d.raw.offer(d.pos, 7, &[(1, 32, DESC_F_INDIRECT)])),
    ]
}

fn host_pool() -> MbufPool {
    Setup::new(0).host_pool().unwrap()
}

#[test]
fn a_device_that_takes_frames_counts_each_lie() {
    for features in Direction::FromGuest.packed_sets() {
        let (mut driver, pool) = (Driver::new(features), host_pool());
        let mut device = driver.guest.device_from_guest(&Position::default(), &pool).unwrap();
        let mut burst = Burst::new(4);
        for round in 0..3 {
            for (fault, what, lie) in lies() {
                let (before, at) = (device.stats(), driver.pos);
                lie(&mut driver, 0);
                assert_eq!(device.queue.rx_burst(&mut burst), 0, "{what}");
                assert_eq!(since(&before, &device.stats()), only(fault), "{what}, round {round}");
                assert!(driver.raw.used(at).is_some(), "{what}: never used");
                driver.offer(&[(112, 0)]);
                assert_eq!(device.queue.rx_burst(&mut burst), 1, "after {what}");
                assert_eq!(bytes_of(&burst.as_slice()[0]), Some(vec![0; 100]));
                burst.free();
            }
        }
        drop(device);
        assert_eq!(pool.mempool().in_use(), 0);
    }
}

#[test]
fn a_device_that_brings_frames_counts_each_lie() {
    for features in Direction::ToGuest.packed_sets() {
        let (mut driver, pool) = (Driver::new(features), host_pool());
        let mut device = driver.guest.device_to_guest(&Position::default()).unwrap();
        let send = |queue: &mut dyn pmd::port::TxBurst| {
            let mut burst = Burst::new(1);
            burst.push(packet(&pool, &[5; 60], 60).unwrap()).unwrap();
            queue.tx_burst(&mut burst)
        };
        // A table to be read may be marked as writable, see `READS_WRITABLE_ENTRIES`; one to be written must be.
        let read_only: Lie<Driver> = (Fault::BadFlags, "a read-only table", |d, _| d.offer_table(32, 0, 0));
        for (fault, what, lie) in lies().into_iter().chain([read_only]) {
            let (before, at) = (device.stats(), driver.pos);
            lie(&mut driver, DESC_F_WRITE);
            assert_eq!(send(&mut *device.queue), 1, "{what}");
            assert_eq!(since(&before, &device.stats()), only(fault), "{what}");
            assert!(driver.raw.used(at).is_some(), "{what}: never used");
            let at = driver.pos;
            driver.offer(&[(112, DESC_F_WRITE)]);
            assert_eq!(send(&mut *device.queue), 1, "after {what}");
            assert_eq!(driver.raw.used(at).map(|meta| meta.len), Some(72), "after {what}");
        }
        drop(device);
        assert_eq!(pool.mempool().in_use(), 0);
    }
}

/// A device that a test plays.
struct Device {
    guest: Guest,
    raw: RawPackedRing,
    used: PackedPos,
}

impl Device {
    /// Completes the buffer at its place with a header of one buffer, so that it says it holds `len` bytes.
    fn honest(&mut self, len: u32) -> u16 {
        let (addr, meta) = self.raw.described(self.used.slot());
        self.guest.bytes(addr, meta.len).unwrap().write(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        self.complete(meta.id, len);
        meta.id
    }

    fn complete(&mut self, id: u16, len: u32) {
        self.raw.complete(self.used, id, len);
        self.used = self.used.advance(1, SIZE);
    }
}

#[test]
fn a_driver_counts_each_lie() {
    for features in Direction::ToGuest.packed_sets().into_iter().filter(|f| f & feature::IN_ORDER == 0) {
        let guest = Guest::new(&Setup::new(features).ring(SIZE, SIZE)).unwrap();
        let (mut rx, raw) = (guest.driver_rx().unwrap(), guest.raw_packed().unwrap());
        let mut device = Device { guest, raw, used: PackedPos::START };
        let lies: Vec<Lie<Device>> = vec![
            (Fault::BadId, "an id of no buffer", |d, _| d.complete(SIZE, 100)),
            (Fault::BadId, "the largest id", |d, _| d.complete(u16::MAX, 100)),
            (Fault::BadId, "a buffer twice", |d, last| d.complete(last, 100)),
            (Fault::BadLength, "more than the buffer holds", |d, _| {
                d.honest(1 << 20);
            }),
            (Fault::BadLength, "as much as a number can say", |d, _| {
                d.honest(u32::MAX);
            }),
            (Fault::Short, "less than a header", |d, _| {
                d.honest(11);
            }),
            (Fault::Short, "less than a frame", |d, _| {
                d.honest(25);
            }),
        ];
        let mut burst = Burst::new(4);
        for (fault, what, lie) in lies {
            let last = device.honest(112);
            assert_eq!(rx.queue.rx_burst(&mut burst), 1, "before {what}");
            burst.free();
            let before = rx.stats();
            lie(&mut device, last);
            assert_eq!(rx.queue.rx_burst(&mut burst), 0, "{what}");
            assert_eq!(since(&before, &rx.stats()), only(fault), "{what}");
        }
        let Device { guest, .. } = device;
        drop(rx);
        assert_eq!(guest.pool.mempool().in_use(), 0);
    }
}

#[test]
fn an_in_order_driver_waits_for_an_id_that_can_be() {
    let features = feature::VERSION_1 | feature::RING_PACKED | feature::IN_ORDER;
    let guest = Guest::new(&Setup::new(features).ring(SIZE, SIZE)).unwrap();
    let (mut rx, raw) = (guest.driver_rx().unwrap(), guest.raw_packed().unwrap());
    let mut burst = Burst::new(4);
    for id in [SIZE, u16::MAX] {
        raw.complete(PackedPos::START, id, 100);
        assert_eq!((rx.queue.rx_burst(&mut burst), rx.queue.pending()), (0, 0));
    }
    assert_eq!(rx.stats().fault(Fault::BadId), 2);
    raw.complete(PackedPos::START, 0, 100);
    assert_eq!(rx.queue.rx_burst(&mut burst), 1);
}
