//! The driver's end wakes, and is woken, as the `virtio-queue` crate has it, which has not read our code: split rings, by flags and
//! by entries.

use pmd::port::Burst;
use pmd::virtio::spec::feature;
use testbed::rings::{Guest, Setup, packet};
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};

const SIZE: u16 = 64;
const HEADER_LEN: u32 = 12;
const FRAME_LEN: u32 = 60;

/// The crate's device end of the guest's ring.
struct Device {
    queue: Queue,
    memory: GuestMemoryMmap,
}

impl Device {
    fn new(guest: &Guest) -> Self {
        let file = guest.arena().fd().try_clone_to_owned().unwrap().into();
        let range = (GuestAddress(guest.arena().iova()), guest.arena().size(), Some(FileOffset::new(file, 0)));
        let memory = GuestMemoryMmap::from_ranges_with_files([range]).unwrap();
        let mut queue = Queue::new(SIZE).unwrap();
        let halves = |addr: u64| (Some(addr as u32), Some((addr >> 32) as u32));
        let layout = guest.layout();
        let (low, high) = halves(layout.desc);
        queue.set_desc_table_address(low, high);
        let (low, high) = halves(layout.avail);
        queue.set_avail_ring_address(low, high);
        let (low, high) = halves(layout.used);
        queue.set_used_ring_address(low, high);
        queue.set_event_idx(guest.features() & feature::EVENT_IDX != 0);
        queue.set_ready(true);
        assert!(queue.is_valid(&memory));
        Self { queue, memory }
    }

    /// Completes the next chain, after writing a header and some data into it if it is to be written.
    fn complete(&mut self) {
        let mut chain = self.queue.pop_descriptor_chain(&self.memory).expect("a chain");
        let head = chain.head_index();
        let desc = chain.next().expect("a descriptor");
        let mut written = 0;
        if desc.is_write_only() {
            let mut bytes = [0; (HEADER_LEN + FRAME_LEN) as usize];
            bytes[10] = 1;
            self.memory.write_slice(&bytes, desc.addr()).unwrap();
            written = bytes.len() as u32;
        }
        self.queue.add_used(&self.memory, head, written).unwrap();
    }
}

#[test]
fn a_device_that_sleeps_is_kicked_by_the_next_burst() {
    for events in [0, feature::EVENT_IDX] {
        for order in [0, feature::IN_ORDER] {
            let guest = Guest::new(&Setup::new(feature::VERSION_1 | order | events).ring(SIZE, SIZE)).unwrap();
            let (mut tx, mut device) = (guest.driver_tx().unwrap(), Device::new(&guest));
            let mut send = |count: usize| {
                let mut burst = Burst::new(count);
                for _ in 0..count {
                    burst.push(packet(&guest.pool, &[1; FRAME_LEN as usize], 60).unwrap()).unwrap();
                }
                assert_eq!(tx.queue.tx_burst(&mut burst), count);
                tx.bell.take()
            };
            // More than a ring's index can count, so that it wraps.
            for round in 0..10_000 {
                let count = 1 + round % 5;
                assert!(!device.queue.enable_notification(&device.memory).unwrap(), "nothing is there");
                assert_eq!(send(count), 1, "asleep, round {round}");
                assert!(device.queue.enable_notification(&device.memory).unwrap(), "something is there");
                device.queue.disable_notification(&device.memory).unwrap();
                // With `EVENT_IDX` it has still named an entry, but that one has come.
                assert_eq!(send(count), 0, "awake, round {round}");
                (0..2 * count).for_each(|_| device.complete());
            }
        }
    }
}

#[test]
fn a_driver_that_is_armed_is_called_by_the_next_completion() {
    for order in [0, feature::IN_ORDER] {
        let features = feature::VERSION_1 | order | feature::EVENT_IDX;
        let guest = Guest::new(&Setup::new(features).ring(SIZE, SIZE)).unwrap();
        let (mut rx, mut device) = (guest.driver_rx().unwrap(), Device::new(&guest));
        let mut burst = Burst::new(32);
        for round in 0..20_000 {
            assert!(rx.queue.arm(), "nothing is there, round {round}");
            device.complete();
            assert!(device.queue.needs_notification(&device.memory).unwrap(), "armed, round {round}");
            device.complete();
            assert!(!device.queue.needs_notification(&device.memory).unwrap(), "called already, round {round}");
            assert!(!rx.queue.arm(), "two are there, round {round}");
            device.complete();
            assert!(!device.queue.needs_notification(&device.memory).unwrap(), "not armed, round {round}");
            assert_eq!(rx.queue.rx_burst(&mut burst), 3);
            burst.free();
        }
    }
}
