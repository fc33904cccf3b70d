//! Each lie is counted under its own name, costs at most the frame it stands for, and the next honest frame arrives: one case
//! for each check on a guest's or a device's input.

use backend::queue::config::Position;
use pmd::mbuf::MbufPool;
use pmd::mem::Span;
use pmd::port::{Burst, FAULTS, Fault, Stats};
use pmd::virtio::spec::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Desc, DescMeta, feature, header_len};
use testbed::rings::{Direction, Guest, RawRing, Setup, bytes_of, packet};

const SIZE: u16 = 512;
const SCRATCH: usize = 128 << 10;
/// Where in the scratch memory indirect tables go; buffers go to its beginning.
const TABLE: usize = 96 << 10;

/// A driver that a test plays.
struct Driver {
    guest: Guest,
    raw: RawRing,
    scratch: Span,
    /// What a descriptor of the right kind says.
    write: u16,
}

impl Driver {
    fn new(features: u64, write: u16) -> Self {
        let mut setup = Setup { scratch: SCRATCH, ..Setup::new(features).ring(SIZE, SIZE) };
        (setup.guest.count, setup.guest.cache_size) = (8, 0);
        let guest = Guest::new(&setup).unwrap();
        let scratch = guest.arena().alloc(SCRATCH, 64).unwrap();
        Self { raw: guest.raw().unwrap(), guest, scratch, write }
    }

    /// Describes a buffer of `len` bytes of scratch memory.
    fn buffer(&self, index: u16, len: u32, flags: u16, next: u16) {
        self.raw.describe(index, self.scratch.iova(0), DescMeta { len, flags: self.write ^ flags, next });
    }

    /// Describes an indirect table that says it has `len` bytes.
    fn indirect(&self, index: u16, len: u32) {
        self.raw.describe(index, self.scratch.iova(TABLE), DescMeta { len, flags: DESC_F_INDIRECT, next: 0 });
    }

    /// Writes an entry of the indirect table.
    fn entry(&self, index: usize, len: u32, flags: u16, next: u16) {
        let meta = DescMeta { len, flags: self.write ^ flags, next }.pack();
        let bytes = [self.scratch.iova(0), meta].map(u64::to_le_bytes).concat();
        self.scratch.bytes(TABLE + index * size_of::<Desc>(), bytes.len()).write(&bytes);
    }

    /// Describes a buffer anywhere.
    fn at(&self, addr: u64, len: u32) {
        self.raw.describe(0, addr, DescMeta { len, flags: self.write, next: 0 });
    }

    fn end_of_memory(&self) -> u64 {
        self.guest.arena().iova() + self.guest.arena().size() as u64
    }
}

/// What a chain is and how it is to be counted; the case makes the chain and returns its head.
type Case = (&'static str, Fault, fn(&Driver) -> u16);

/// Lies that concern either kind of ring (facts on hostile guests: heads, links, loops, tables, addresses, flags).
const CASES: &[Case] = &[
    ("a head beyond the table", Fault::BadChain, |_| SIZE),
    ("the largest head", Fault::BadChain, |_| u16::MAX),
    ("a link beyond the table", Fault::BadChain, |d| {
        d.buffer(0, 100, DESC_F_NEXT, SIZE);
        0
    }),
    ("a descriptor that follows itself", Fault::BadChain, |d| {
        d.buffer(0, 1, DESC_F_NEXT, 0);
        0
    }),
    ("a loop of empty buffers", Fault::BadChain, |d| {
        d.buffer(0, 0, DESC_F_NEXT, 1);
        d.buffer(1, 0, DESC_F_NEXT, 0);
        0
    }),
    ("a chain of more pieces than are looked at", Fault::BadChain, |d| {
        (0..300).for_each(|i| d.buffer(i, 1, if i < 299 { DESC_F_NEXT } else { 0 }, i + 1));
        0
    }),
    ("an empty indirect table", Fault::BadIndirect, |d| {
        d.indirect(0, 0);
        0
    }),
    ("an indirect table of a descriptor and a half", Fault::BadIndirect, |d| {
        d.entry(0, 100, 0, 0);
        d.indirect(0, 24);
        0
    }),
    ("an indirect table longer than the ring", Fault::BadIndirect, |d| {
        d.entry(0, 100, 0, 0);
        d.indirect(0, 16 * (u32::from(SIZE) + 1));
        0
    }),
    ("an indirect table of 4 GiB", Fault::BadIndirect, |d| {
        d.indirect(0, u32::MAX - 15);
        0
    }),
    ("an indirect table in an indirect table", Fault::BadIndirect, |d| {
        d.entry(0, 16, DESC_F_INDIRECT, 0);
        d.indirect(0, 32);
        0
    }),
    ("an indirect table behind an indirect buffer", Fault::BadIndirect, |d| {
        d.entry(0, 100, DESC_F_NEXT, 1);
        d.entry(1, 16, DESC_F_INDIRECT, 0);
        d.indirect(0, 32);
        0
    }),
    ("an indirect table that is not the last descriptor", Fault::BadIndirect, |d| {
        d.entry(0, 100, 0, 0);
        d.raw.describe(0, d.scratch.iova(TABLE), DescMeta { len: 16, flags: DESC_F_INDIRECT | DESC_F_NEXT, next: 1 });
        d.buffer(1, 100, 0, 0);
        0
    }),
    ("a link beyond the indirect table", Fault::BadIndirect, |d| {
        d.entry(0, 10, DESC_F_NEXT, 2);
        d.indirect(0, 32);
        0
    }),
    ("a loop in an indirect table", Fault::BadChain, |d| {
        d.entry(0, 0, DESC_F_NEXT, 1);
        d.entry(1, 0, DESC_F_NEXT, 0);
        d.indirect(0, 32);
        0
    }),
    ("an indirect table outside of memory", Fault::BadAddress, |d| {
        d.raw.describe(0, 4096, DescMeta { len: 32, flags: DESC_F_INDIRECT, next: 0 });
        0
    }),
    ("an indirect table across the end of memory", Fault::BadAddress, |d| {
        d.raw.describe(0, d.end_of_memory() - 8, DescMeta { len: 32, flags: DESC_F_INDIRECT, next: 0 });
        0
    }),
    ("address 0", Fault::BadAddress, |d| {
        d.at(0, 100);
        0
    }),
    ("a buffer across the end of memory", Fault::BadAddress, |d| {
        d.at(d.end_of_memory() - 50, 100);
        0
    }),
    ("a buffer of 4 GiB", Fault::BadAddress, |d| {
        d.at(d.end_of_memory() - 50, u32::MAX);
        0
    }),
    ("a buffer across the end of the address space", Fault::BadAddress, |d| {
        d.at(u64::MAX - 10, 100);
        0
    }),
    ("a buffer of the other direction", Fault::BadFlags, |d| {
        d.buffer(0, 100, DESC_F_WRITE, 0);
        0
    }),
    ("a chain of both directions", Fault::BadFlags, |d| {
        d.buffer(0, 20, DESC_F_NEXT, 1);
        d.buffer(1, 100, DESC_F_WRITE, 0);
        0
    }),
    ("an indirect buffer of the other direction", Fault::BadFlags, |d| {
        d.entry(0, 100, DESC_F_WRITE, 0);
        d.indirect(0, 16);
        0
    }),
    ("an empty chain", Fault::Short, |d| {
        d.buffer(0, 0, 0, 0);
        0
    }),
    ("a chain of less than a header", Fault::Short, |d| {
        d.buffer(0, 9, 0, 0);
        0
    }),
];

/// Lies that concern a transmit ring.
const FROM_GUEST_CASES: &[Case] = &[
    ("a header and nothing else", Fault::Short, |d| {
        d.buffer(0, header_len(0) as u32, 0, 0);
        0
    }),
    ("a frame of 13 bytes", Fault::Short, |d| {
        // 12 + 13 with the long header; with the short one that would be a frame.
        d.buffer(0, 23, 0, 0);
        0
    }),
    ("a frame of more than 65535 bytes", Fault::Long, |d| {
        d.buffer(0, 40_000, DESC_F_NEXT, 1);
        d.buffer(1, 40_000, 0, 0);
        0
    }),
];

fn host_pool() -> MbufPool {
    Setup::new(0).host_pool().unwrap()
}

/// One of `fault`, and nothing else.
fn only(fault: Fault) -> [u64; FAULTS] {
    std::array::from_fn(|i| u64::from(i == fault as usize))
}

#[test]
fn each_lie_of_a_sending_driver_has_its_name() {
    for features in Direction::FromGuest.split_sets() {
        let header = header_len(features);
        for (name, fault, chain) in CASES.iter().chain(FROM_GUEST_CASES) {
            let (driver, pool) = (Driver::new(features, 0), host_pool());
            let mut device = driver.guest.device_from_guest(&Position::default(), &pool).unwrap();
            let mut burst = Burst::new(8);
            driver.raw.offer(chain(&driver));
            assert_eq!(device.queue.rx_burst(&mut burst), 0, "{name}");
            assert_eq!(device.stats().faults, only(*fault), "{name}, {features:#x}");
            assert_eq!(driver.raw.used_idx(), 1, "{name}: the chain was not given back");
            assert_eq!(device.stats().dropped(), 1, "{name}: a chain that nobody has counted");

            let frame: Vec<u8> = (0..100).collect();
            driver.scratch.bytes(0, header + 100).write(&[&vec![0; header], &frame[..]].concat());
            driver.buffer(3, (header + 100) as u32, 0, 0);
            driver.raw.offer(3);
            assert_eq!(device.queue.rx_burst(&mut burst), 1, "after {name}");
            assert_eq!(bytes_of(&burst.as_slice()[0]), Some(frame), "after {name}");
            assert_eq!(driver.raw.used(1).0, 3, "after {name}");
            drop((device, burst));
            assert_eq!(pool.mempool().in_use(), 0, "{name}");
        }
    }
}

#[test]
fn each_lie_of_a_receiving_driver_has_its_name() {
    for features in Direction::ToGuest.split_sets() {
        let header = header_len(features);
        for (name, fault, chain) in CASES {
            let (driver, pool) = (Driver::new(features, DESC_F_WRITE), host_pool());
            let mut device = driver.guest.device_to_guest(&Position::default()).unwrap();
            let mut send = |len: usize| {
                let mut burst = Burst::new(1);
                burst.push(packet(&pool, &vec![0x77; len], 2048).unwrap()).unwrap();
                device.queue.tx_burst(&mut burst)
            };
            // Longer than what honest parts of the chains above could hold.
            driver.raw.offer(chain(&driver));
            assert_eq!(send(1000), 1, "{name}");
            assert_eq!(driver.raw.used_idx(), 1, "{name}: the chain was not given back");
            assert_eq!(driver.raw.used(0).1, 0, "{name}: bytes written");

            driver.buffer(3, 1100, 0, 0);
            driver.raw.offer(3);
            assert_eq!(send(1000), 1, "after {name}");
            assert_eq!(driver.raw.used(1), (3, (header + 1000) as u32), "after {name}");
            assert_eq!(device.stats().faults, only(*fault), "{name}, {features:#x}");
            assert_eq!(device.stats().packets, 1, "after {name}");
            assert_eq!(device.stats().dropped(), 1, "{name}: a frame that nobody has counted");
            drop(device);
            assert_eq!(pool.mempool().in_use(), 0, "{name}");
        }
    }
}

#[test]
fn an_index_that_is_too_far_ahead_is_refused_until_it_is_true() {
    for features in Direction::FromGuest.split_sets() {
        let (driver, pool) = (Driver::new(features, 0), host_pool());
        let mut device = driver.guest.device_from_guest(&Position::default(), &pool).unwrap();
        driver.buffer(0, 112, 0, 0);
        for idx in [SIZE + 1, u16::MAX, 0x8000] {
            driver.raw.set_avail_idx(idx);
            assert_eq!((device.queue.pending(), device.queue.rx_burst(&mut Burst::new(8))), (0, 0));
        }
        assert_eq!(device.stats().fault(Fault::BadIndex), 3);
        driver.raw.set_avail_idx(2);
        assert_eq!(device.queue.rx_burst(&mut Burst::new(8)), 2);
    }
    for features in Direction::ToGuest.split_sets() {
        let (driver, pool) = (Driver::new(features, DESC_F_WRITE), host_pool());
        let mut device = driver.guest.device_to_guest(&Position::default()).unwrap();
        let mut burst = Burst::new(1);
        burst.push(packet(&pool, &[1; 60], 60).unwrap()).unwrap();
        driver.raw.set_avail_idx(SIZE + 1);
        assert_eq!(device.queue.tx_burst(&mut burst), 0);
        assert_eq!(device.stats().faults, only(Fault::BadIndex));
    }
}

/// A receiving driver, and a lying device played by the test: what it says of the first buffer and how that is counted.
fn receive(features: u64, buffers: u16, id: impl Fn(u16) -> u32, len: u32) -> (usize, Stats) {
    let guest = Guest::new(&Setup::new(features).ring(64, 64)).unwrap();
    let (raw, mut rx) = (guest.raw().unwrap(), guest.driver_rx().unwrap());
    let mut complete = |n: u16, buffers: u16, id: u32, len: u32| {
        let (addr, meta) = raw.described(raw.offered(n));
        let header = [&[0; 10], &buffers.to_le_bytes()[..]].concat();
        guest.bytes(addr, meta.len).unwrap().write(&header[..header_len(features)]);
        raw.set_used(n, id, len);
        raw.set_used_idx(n + 1);
        let mut burst = Burst::new(8);
        rx.queue.rx_burst(&mut burst)
    };
    let lied = complete(0, buffers, id(raw.offered(0)), len);
    // The next one is honest.
    assert_eq!(complete(1, 1, raw.offered(1).into(), 100), 1, "after id {}, length {len}", id(raw.offered(0)));
    let stats = rx.stats();
    drop(rx);
    assert_eq!(guest.pool.mempool().in_use(), 0);
    (lied, stats)
}

#[test]
fn each_lie_of_a_sending_device_has_its_name() {
    for features in Direction::ToGuest.split_sets() {
        let header = header_len(features) as u32;
        let honest = |head: u16| u32::from(head);
        let expect = |what: &str, fault: Fault, (lied, stats): (usize, Stats)| {
            assert_eq!((lied, stats.faults), (0, only(fault)), "{what}, {features:#x}");
        };
        expect("an id beyond the ring", Fault::BadId, receive(features, 1, |_| 64, 100));
        expect("the largest id", Fault::BadId, receive(features, 1, |_| u32::MAX, 100));
        expect(
            "an id that is right but for its high half",
            Fault::BadId,
            receive(features, 1, |id| 1 << 16 | u32::from(id), 100),
        );
        expect("a length beyond the buffer", Fault::BadLength, receive(features, 1, honest, 2048 + header + 1));
        expect("the largest length", Fault::BadLength, receive(features, 1, honest, u32::MAX));
        expect("length 0", Fault::Short, receive(features, 1, honest, 0));
        expect("less than a header", Fault::Short, receive(features, 1, honest, header - 1));
        expect("a frame of 13 bytes", Fault::Short, receive(features, 1, honest, header + 13));
        if features & feature::MRG_RXBUF != 0 {
            expect("more buffers than the ring has", Fault::BadSegments, receive(features, 65, honest, 100));
            expect("the most buffers", Fault::BadSegments, receive(features, u16::MAX, honest, 100));
        }
        // No buffers at all are taken for one, as DPDK does.
        let (taken, stats) = receive(features, 0, honest, 100);
        assert_eq!((taken, stats.faults), (1, [0; FAULTS]));
        let (taken, _) = receive(features, 1, honest, 2048 + header);
        assert_eq!(taken, 1, "a full buffer");
    }
}

#[test]
fn a_lie_about_a_further_buffer_discards_that_frame_only() {
    for features in Direction::ToGuest.split_sets().into_iter().filter(|f| f & feature::MRG_RXBUF != 0) {
        // Which of a frame's three buffers is lied about, in what way, and how that is counted.
        for (liar, id, len, fault) in [
            (1, 0, 2061, Fault::BadLength),
            (2, 0, u32::MAX, Fault::BadLength),
            (1, 7000, 100, Fault::BadId),
            (2, 7000, 100, Fault::BadId),
        ] {
            let guest = Guest::new(&Setup::new(features).ring(64, 64)).unwrap();
            let (raw, mut rx) = (guest.raw().unwrap(), guest.driver_rx().unwrap());
            let mut burst = Burst::new(8);
            for n in 0..6 {
                let (addr, meta) = raw.described(raw.offered(n));
                guest.bytes(addr, meta.len).unwrap().write(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0]);
                let lie = n == liar;
                raw.set_used(n, u32::from(raw.offered(n)) + if lie { id } else { 0 }, if lie { len } else { 100 });
                raw.set_used_idx(n + 1);
                rx.queue.rx_burst(&mut burst);
            }
            assert_eq!(burst.len(), 1, "buffer {liar}, id {id}, length {len}, {features:#x}");
            assert_eq!((burst.as_slice()[0].nb_segs(), burst.as_slice()[0].pkt_len()), (3, 288));
            assert_eq!(rx.stats().faults, only(fault), "buffer {liar}, id {id}, length {len}, {features:#x}");
            drop((rx, burst));
            assert_eq!(guest.pool.mempool().in_use(), 0);
        }
    }
}

#[test]
fn an_index_or_id_of_nothing_that_was_sent_is_refused() {
    for features in Direction::FromGuest.split_sets() {
        let guest = Guest::new(&Setup::new(features).ring(64, 64)).unwrap();
        let (raw, mut tx) = (guest.raw().unwrap(), guest.driver_tx().unwrap());
        let mut send = |count: usize| {
            let mut burst = Burst::new(8);
            (0..count).for_each(|_| burst.push(packet(&guest.pool, &[1; 60], 60).unwrap()).unwrap());
            assert_eq!(tx.queue.tx_burst(&mut burst), count);
            tx.queue.reap()
        };
        send(6);
        raw.set_used_idx(7);
        assert_eq!(send(0), 0);
        // An element of an `IN_ORDER` ring may name any buffer of its batch, so ids say nothing there.
        if features & feature::IN_ORDER == 0 {
            let heads = [raw.offered(0), raw.offered(3)].map(u32::from);
            for (n, id) in [64, u32::MAX, 40, heads[0] + (1 << 16), heads[1], heads[1]].into_iter().enumerate() {
                raw.set_used(n as u16, id, 0);
            }
            raw.set_used_idx(6);
            for _ in 0..6 {
                send(0);
            }
            assert_eq!(tx.stats().fault(Fault::BadId), 5, "{features:#x}");
            assert_eq!(guest.pool.mempool().in_use(), 5, "only one id was true");
        }
        assert_eq!(tx.stats().fault(Fault::BadIndex), 1, "{features:#x}");
        drop(tx);
        assert_eq!(guest.pool.mempool().in_use(), 0);
    }
}
