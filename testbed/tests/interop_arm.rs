//! A worker that wants to sleep asks its queue, on either end of a socket, by flags and by entries.

use std::slice;

use backend::control::{Control, Mode};
use pmd::mempool::Worker;
use pmd::port::{Burst, Port};
use pmd::virtio::port::{VirtioConfig, VirtioPort};
use pmd::virtio::spec::feature;
use pmd::virtio::user;
use testbed::peer::turn;
use testbed::ports::{Memory, Shape, guest_config, host, setup, wait_until};
use testbed::rings::packet;
use vmm_sys_util::tempdir::TempDir;

/// `from` sends a frame to `to`, which is armed until it comes.
fn arm_and_send(from: &dyn Port, memory: &Memory, to: &dyn Port) {
    let (mut tx, mut rx) = (from.tx(0).unwrap(), to.rx(0).unwrap());
    let mut burst = Burst::new(1);
    for round in 0..100 {
        assert!(rx.arm(), "nothing is there, round {round}");
        burst.push(packet(&memory.pool, &[1; 60], 60).unwrap()).unwrap();
        assert!(wait_until(|| tx.tx_burst(&mut burst) == 1));
        assert!(!rx.arm(), "a frame is there, round {round}");
        rx.disarm();
        assert_eq!(rx.rx_burst(&mut burst), 1);
        burst.free();
    }
}

#[test]
fn a_queue_is_armed_while_there_is_nothing_and_it_runs() {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    for shape in [Shape::PLAIN, Shape { packed: true, ..Shape::PLAIN }] {
        for event_idx in [false, true] {
            let (dir, control) = (TempDir::new().unwrap(), Control::new().unwrap());
            let socket = dir.as_path().join("s");
            let (guest_memory, host_memory) = (Memory::new(2048), Memory::new(2048));
            let mut host = host(1, &socket, Mode::Server, &host_memory, &control).unwrap();
            let config = VirtioConfig { event_idx, ..guest_config(shape, &socket, user::Mode::Client) };
            let mut guest = VirtioPort::open(config, slice::from_ref(&guest_memory.arena)).unwrap();
            pmd::fwd::open_port(&mut guest, &setup(shape, &guest_memory)).unwrap();
            assert_eq!(guest.features() & feature::EVENT_IDX != 0, event_idx);

            arm_and_send(&guest, &guest_memory, &host);
            arm_and_send(&host, &host_memory, &guest);

            let (mut guest_rx, mut host_rx) = (guest.rx(0).unwrap(), host.rx(0).unwrap());
            guest.stop().unwrap();
            host.stop().unwrap();
            assert!(!guest_rx.arm() && !host_rx.arm(), "stopped queues wake nobody");
        }
    }
}
