//! A worker that wants to sleep asks its queue, on either end of a socket, by flags and by entries.

use std::slice;

use backend::control::{Control, Mode};
use pmd::mempool::Worker;
use pmd::port::{Burst, Port};
use pmd::virtio::port::{VirtioConfig, VirtioPort};
use pmd::virtio::spec::feature;
use pmd::virtio::user;
use testbed::frame::{Macs, Stream};
use testbed::peer::dpdk::{Config, Forward, Role, Testpmd, Vhost};
use testbed::peer::turn;
use testbed::ports::{Exchange, Memory, SOON, Shape, guest_config, host, setup, wait_until};
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

#[test]
fn dpdk_host_that_was_offered_entries_to_wait_for_returns_every_byte() {
    let _turn = turn();
    let _worker = Worker::enter().unwrap();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let role = Role::Vhost(Vhost::new(&socket));
    let mut testpmd = Testpmd::launch(&Config { forward: Forward::Io, ..Config::new(role, 0) }).unwrap();
    testpmd.start().unwrap();
    let memory = Memory::new(2048);
    for shape in Shape::all() {
        let config = VirtioConfig { event_idx: true, ..guest_config(shape, &socket, user::Mode::Client) };
        let mut port = VirtioPort::open(config, slice::from_ref(&memory.arena)).unwrap();
        pmd::fwd::open_port(&mut port, &setup(shape, &memory)).unwrap();
        assert_ne!(port.features() & feature::EVENT_IDX, 0);
        testpmd.wait_link_up(SOON).unwrap();
        let mut traffic = Exchange::new(&port, &memory.pool, &Stream::new(24, 0, 60..=300), Macs::Kept).unwrap();
        // More than the 16 bits of a split ring's entries, so that whatever is waited for comes round.
        assert!(traffic.run(70_000, 24), "{shape:?}: {:?}", traffic.reports());
        traffic.finish().unwrap();
        drop(traffic);
        port.stop().unwrap();
        assert_eq!(memory.out(), 0, "{shape:?}");
    }
}
