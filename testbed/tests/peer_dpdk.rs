//! The module that drives testpmd, tried on two of them: what one counts as sent, the other has received.

use std::time::Duration;

use testbed::ledger::Ledger;
use testbed::peer::dpdk::{Config, Forward, Memory, Role, Testpmd, Vhost, VirtioUser};
use testbed::peer::turn;
use vmm_sys_util::tempdir::TempDir;

const SOON: Duration = Duration::from_secs(20);

/// A host and a guest of DPDK's on the same socket, up and linked. The guest goes first at the end of a test.
struct Pair {
    guest: Testpmd,
    host: Testpmd,
    _dir: TempDir,
}

fn pair(host: Forward, guest: Forward, shape: impl FnOnce(&mut VirtioUser)) -> Pair {
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let vhost = Role::Vhost(Vhost::new(&socket));
    let mut user = VirtioUser::new(&socket);
    shape(&mut user);

    let mut host = Testpmd::launch(&Config { forward: host, ..Config::new(vhost, 0) }).unwrap();
    let mut guest = Testpmd::launch(&Config { forward: guest, ..Config::new(Role::VirtioUser(user), 1) }).unwrap();
    host.wait_link_up(SOON).unwrap();
    guest.wait_link_up(SOON).unwrap();
    Pair { guest, host, _dir: dir }
}

#[test]
fn every_frame_the_host_sends_reaches_the_guest_on_each_split_path() {
    let _turn = turn();
    for (in_order, mrg_rxbuf, path) in [
        (false, false, "standard"),
        (true, false, "inorder"),
        (false, true, "mergeable buffer"),
        (true, true, "inorder"), // DPDK's name for this one too
    ] {
        let mut pair = pair(Forward::TxOnly, Forward::RxOnly, |user| {
            user.in_order = in_order;
            user.mrg_rxbuf = mrg_rxbuf;
        });
        pair.guest.start().unwrap();
        pair.host.start().unwrap();
        assert!(pair.guest.wait_rx(100_000, SOON).unwrap().rx_packets >= 100_000, "{path}");
        let sent = pair.host.stop().unwrap().total;
        let arrived = pair.guest.wait_rx(sent.tx_packets, SOON).unwrap();
        let received = pair.guest.stop().unwrap().total;

        let mut ledger = Ledger::new(format!("txonly to rxonly, {path}"));
        ledger.input("host sent", sent.tx_packets);
        ledger.output("guest received", received.rx_packets);
        ledger.balance().unwrap();
        assert_eq!(arrived.rx_packets, received.rx_packets);
        assert_eq!(arrived.rx_bytes, 64 * received.rx_packets);
        assert_eq!(pair.guest.xstats().unwrap()["rx_q0_size_64_packets"], received.rx_packets);
        assert_eq!(pair.guest.rx_path_name(0).unwrap(), path);
    }
}

#[test]
fn a_burst_sent_first_goes_round_for_ever() {
    let _turn = turn();
    let mut pair = pair(Forward::Io, Forward::Io, |user| user.in_order = true);
    pair.guest.start().unwrap();
    pair.host.start_tx_first(8).unwrap();
    // 8 x 32 frames: a thousand times as many received means that they came back again and again.
    assert!(pair.host.wait_rx(256_000, SOON).unwrap().rx_packets >= 256_000);
    let host = pair.host.stop().unwrap();
    let guest = pair.guest.stop().unwrap();
    assert_eq!(host.total.tx_dropped + guest.total.tx_dropped, 0, "{host:?} {guest:?}");
    assert_eq!(host.ports[&0].rx_packets, host.total.rx_packets);
}

#[test]
fn multi_segment_frames_arrive_in_as_many_buffers_as_they_need() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let host = Config {
        forward: Forward::TxOnly,
        txpkts: vec![1500, 1500, 1000],
        ..Config::new(Role::Vhost(Vhost::new(&socket)), 0)
    };
    let user = VirtioUser { mrg_rxbuf: true, ..VirtioUser::new(&socket) };
    let guest = Config { forward: Forward::RxOnly, ..Config::new(Role::VirtioUser(user), 1) };
    let mut host = Testpmd::launch(&host).unwrap();
    let mut guest = Testpmd::launch(&guest).unwrap();
    host.wait_link_up(SOON).unwrap();
    guest.start().unwrap();
    host.start().unwrap();
    guest.wait_rx(1000, SOON).unwrap();
    let sent = host.stop().unwrap().total.tx_packets;
    let arrived = guest.wait_rx(sent, SOON).unwrap();
    assert!(sent >= 1000);
    assert_eq!((arrived.rx_packets, arrived.rx_bytes), (sent, 4000 * sent));
}

#[test]
fn a_guest_that_listens_is_ready_once_the_host_has_come() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let user = VirtioUser { server: true, ..VirtioUser::new(&socket) };
    let vhost = Vhost { client: true, ..Vhost::new(&socket) };
    let mut guest = Testpmd::launch(&Config::new(Role::VirtioUser(user), 1)).unwrap();
    let mut host = Testpmd::launch(&Config::new(Role::Vhost(vhost), 0)).unwrap();
    guest.wait_ready(SOON).unwrap();
    host.wait_link_up(SOON).unwrap();
    guest.wait_link_up(SOON).unwrap();
}

#[test]
fn the_engine_changes_while_it_stands_still() {
    let _turn = turn();
    let mut pair = pair(Forward::Io, Forward::Io, |_| {});
    pair.guest.set_fwd(Forward::MacSwap).unwrap();
    pair.guest.start().unwrap();
    let said = pair.guest.start().unwrap_err().to_string();
    assert!(said.contains("already started"), "{said}");
}

#[test]
fn an_error_carries_what_testpmd_said() {
    let _turn = turn();
    let user = VirtioUser::new("/nonexistent/s");
    let said = Testpmd::launch(&Config::new(Role::VirtioUser(user), 0)).unwrap_err().to_string();
    assert!(said.contains("virtio-user on /nonexistent/s ended"), "{said}");
    assert!(said.contains("virtio_user") && said.lines().count() > 3, "{said}");
}

#[test]
fn ordinary_memory_serves_both_ends_and_nothing_is_left_of_them() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let plain = |role, cpu| Config { memory: Memory::Plain, ..Config::new(role, cpu) };
    let host = Config { forward: Forward::TxOnly, ..plain(Role::Vhost(Vhost::new(&socket)), 0) };
    let guest = Config { forward: Forward::RxOnly, ..plain(Role::VirtioUser(VirtioUser::new(&socket)), 1) };
    let mut host = Testpmd::launch(&host).unwrap();
    let mut guest = Testpmd::launch(&guest).unwrap();
    let left = [&host, &guest].map(|testpmd| (format!("/proc/{}", testpmd.pid()), testpmd.runtime_dir().to_path_buf()));
    host.wait_link_up(SOON).unwrap();
    guest.start().unwrap();
    host.start().unwrap();
    assert!(guest.wait_rx(1000, SOON).unwrap().rx_packets >= 1000);

    drop(guest);
    drop(host);
    for (process, directory) in left {
        assert!(!std::path::Path::new(&process).exists(), "{process}");
        assert!(!directory.exists(), "{}", directory.display());
    }
}

#[test]
fn a_missing_dpdk_is_named_with_its_remedy() {
    let root = TempDir::new().unwrap();
    let said = testbed::peer::dpdk::available(root.as_path()).unwrap_err().to_string();
    assert!(said.contains(root.as_path().to_str().unwrap()) && said.contains("testbed/check"), "{said}");
}
