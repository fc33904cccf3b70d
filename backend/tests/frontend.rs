//! The `vhost` crate's front-end, written by others, negotiates and runs rings with us.
mod support;

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use backend::control::{Control, Mode};
use backend::error::Error;
use backend::queue::config::QueueConfig;
use backend::session::{Device, NET_CONFIG_LEN};
use pmd::virtio::spec::feature;
use support::{Entry, OFFERED, P_ALL, PAGE, PROGRESS, Server, USER, eventually, memfd};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::tempdir::TempDir;

#[test]
fn the_rust_vmm_frontend_runs_every_ring_and_gets_the_positions_back() {
    let server = Server::new();
    let mut frontend = Frontend::connect(&server.path, 4).unwrap();
    frontend.set_owner().unwrap();
    assert_eq!(frontend.get_features().unwrap(), OFFERED | feature::PROTOCOL_FEATURES);
    assert_eq!(frontend.get_protocol_features().unwrap().bits(), P_ALL);
    frontend.set_protocol_features(VhostUserProtocolFeatures::from_bits_truncate(P_ALL & !support::P_STATUS)).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_features(feature::VERSION_1 | feature::IN_ORDER | feature::PROTOCOL_FEATURES).unwrap();
    assert_eq!(frontend.get_max_mem_slots().unwrap(), 32);
    let (_, config) = frontend.get_config(1, 4, VhostUserConfigFlags::empty(), &[0; 4]).unwrap();
    assert_eq!(config, [2, 3, 4, 5]);

    let guest = memfd(32 * PAGE);
    let info = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0x10_0000,
        memory_size: 32 * PAGE,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: guest.as_raw_fd(),
    };
    frontend.set_mem_table(&[info]).unwrap();
    let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
    for index in 0..4 {
        let offset = 4 * PAGE * index as u64;
        frontend.set_vring_num(index, 256).unwrap();
        frontend.set_vring_base(index, 10).unwrap();
        let addresses = VringConfigData {
            queue_max_size: 256,
            queue_size: 256,
            flags: 0,
            desc_table_addr: USER + offset,
            avail_ring_addr: USER + offset + PAGE,
            used_ring_addr: USER + offset + 2 * PAGE,
            log_addr: None,
        };
        frontend.set_vring_addr(index, &addresses).unwrap();
        frontend.set_vring_call(index, &call).unwrap();
        frontend.set_vring_kick(index, &kick).unwrap();
        frontend.set_vring_enable(index, true).unwrap();
    }
    {
        let diary = server.device.diary();
        assert_eq!(diary.running.keys().copied().collect::<Vec<_>>(), [0, 1, 2, 3]);
        let config = &diary.running[&3];
        assert_eq!(config.features, feature::VERSION_1 | feature::IN_ORDER);
        config.call.as_ref().unwrap().signal();
        assert_eq!(call.read().unwrap(), 1, "the call reaches the front-end");
        let word = &config.memory.view::<AtomicU64>(USER + 13 * PAGE, 1).unwrap()[0];
        word.store(u64::from_le_bytes(*b"hi guest"), Ordering::Relaxed);
    }
    let mut seen = [0; 8];
    std::os::unix::fs::FileExt::read_exact_at(&guest, &mut seen, 13 * PAGE).unwrap();
    assert_eq!(&seen, b"hi guest");
    for index in 0..4 {
        assert_eq!(frontend.get_vring_base(index).unwrap(), 10 + PROGRESS);
    }
    assert_eq!(server.device.news().last(), Some(&Entry::Link(false)));
    drop(frontend);
    let mut again = None;
    eventually("the socket takes the next front-end", || {
        again = Frontend::connect(&server.path, 4).ok().filter(|frontend| frontend.get_features().is_ok());
        again.is_some()
    });
}

/// A device with more queue pairs than there can be.
struct Wide {
    features: u64,
}

impl Device for Wide {
    fn features(&self) -> u64 {
        self.features
    }
    fn queue_pairs_max(&self) -> u16 {
        u16::MAX / 2
    }
    fn config(&self) -> [u8; NET_CONFIG_LEN] {
        [0; NET_CONFIG_LEN]
    }
    fn queue_start(&mut self, _: QueueConfig) -> Result<(), Error> {
        Ok(())
    }
    fn queue_stop(&mut self, _: u16) -> Option<u32> {
        None
    }
    fn link(&mut self, _: bool) {}
}

#[test]
fn there_are_128_queue_pairs_at_most_or_127_with_a_control_queue() {
    let dir = TempDir::new().unwrap();
    let control = Control::new().unwrap();
    for (features, pairs) in [(OFFERED, 128), (OFFERED | feature::CTRL_VQ, 127)] {
        let path = dir.as_path().join(format!("{pairs}"));
        let _served = control.add(&path, Mode::Server, Box::new(Wide { features })).unwrap();
        let mut frontend = Frontend::connect(&path, 256).unwrap();
        frontend.get_features().unwrap();
        frontend.get_protocol_features().unwrap();
        frontend.set_protocol_features(VhostUserProtocolFeatures::MQ).unwrap();
        assert_eq!(frontend.get_queue_num().unwrap(), pairs);
    }
}

#[test]
fn a_refused_request_is_told_and_the_connection_goes_on() {
    let server = Server::new();
    let mut frontend = Frontend::connect(&server.path, 8).unwrap();
    frontend.get_features().unwrap();
    frontend.get_protocol_features().unwrap();
    frontend.set_protocol_features(VhostUserProtocolFeatures::REPLY_ACK).unwrap();
    frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    frontend.set_features(1 << 50).unwrap_err();
    frontend.set_vring_num(7, 256).unwrap_err();
    frontend.set_features(feature::VERSION_1 | feature::PROTOCOL_FEATURES).unwrap();
    frontend.set_vring_num(3, 256).unwrap();
    frontend.set_vring_num(3, 255).unwrap_err();
    frontend.set_vring_num(3, 0).unwrap_err();
}
