//! Queues of every size that virtio knows run between the PMD's port and the backend's, the smallest packed rings included, with what
//! is asked for by default.

use std::slice;

use backend::control::{Control, Mode};
use pmd::mempool::Worker;
use pmd::port::{Burst, Port, PortConfig, RxQueueConfig, TxQueueConfig};
use pmd::virtio::port::VirtioPort;
use pmd::virtio::user;
use testbed::peer::turn;
use testbed::ports::{Memory, Shape, guest_config, host, wait_until};
use testbed::rings::{bytes_of, packet};
use vmm_sys_util::tempdir::TempDir;

/// Sends `count` frames one by one, each of which arrives.
fn send(from: &dyn Port, memory: &Memory, to: &dyn Port, count: u16) {
    let (mut tx, mut rx) = (from.tx(0).unwrap(), to.rx(0).unwrap());
    let (mut going, mut coming) = (Burst::new(1), Burst::new(1));
    for i in 0..count {
        let frame = vec![i as u8; 60];
        going.push(packet(&memory.pool, &frame, 60).unwrap()).unwrap();
        assert!(wait_until(|| tx.tx_burst(&mut going) == 1), "frame {i} is not sent");
        assert!(wait_until(|| rx.rx_burst(&mut coming) == 1), "frame {i} does not come");
        assert_eq!(coming.as_slice().first().and_then(bytes_of), Some(frame));
        coming.free();
    }
}

#[test]
fn a_pair_of_ports_runs_on_rings_of_every_size() {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    let packed = [2, 3, 4, 5, 7, 31, 250, 32768].map(|size| (true, size));
    let split = [2, 4, 8, 32, 256, 32768].map(|size| (false, size));
    for (packed, size) in packed.into_iter().chain(split) {
        for in_order in [false, true] {
            let shape = Shape { packed, in_order, size, ..Shape::PLAIN };
            let (dir, control) = (TempDir::new().unwrap(), Control::new().unwrap());
            let socket = dir.as_path().join("s");
            let (guest_memory, host_memory) = (Memory::new(2 * u32::from(size) + 512), Memory::new(512));
            let host = host(1, &socket, Mode::Server, &host_memory, &control).unwrap();
            let config = guest_config(shape, &socket, user::Mode::Client);
            let mut guest = VirtioPort::open(config, slice::from_ref(&guest_memory.arena)).unwrap();
            guest.configure(&PortConfig { rx_queues: 1, tx_queues: 1, ..PortConfig::default() }).unwrap();
            let pool = guest_memory.pool.clone();
            guest.rx_queue_setup(0, &RxQueueConfig { size: 0, pool, free_thresh: 0, deferred_start: false }).unwrap();
            guest.tx_queue_setup(0, &TxQueueConfig::default()).unwrap();
            guest.start().unwrap();
            // A few times round the smaller rings.
            send(&guest, &guest_memory, &host, 70);
            send(&host, &host_memory, &guest, 70);
            guest.stop().unwrap();
            assert_eq!(guest_memory.out(), 0, "{shape:?}");
        }
    }
}
