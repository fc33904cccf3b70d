//! The PMD's vhost-user transport agrees with DPDK's vhost library, whichever of the two listens.

use std::path::Path;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use pmd::mem::{Arena, Pages, Span, view};
use pmd::virtio::spec::{avail, feature, status, used};
use pmd::virtio::user::{Mode, RingAddresses, UserConfig, UserTransport};
use testbed::peer::dpdk::{Config, Memory, Role, Testpmd, Vhost};
use vmm_sys_util::tempdir::TempDir;

const TIMEOUT: Duration = Duration::from_secs(20);
const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::IN_ORDER | feature::INDIRECT_DESC;
const SIZE: u16 = 256;

#[test]
fn dpdk_listens_and_the_pmd_connects() {
    check(false, 1);
}

#[test]
fn the_pmd_listens_and_dpdk_connects() {
    check(true, 2);
}

/// Takes one device of DPDK's through its life: negotiated, running, stopped, running again, closed.
fn check(server: bool, queue_pairs: u16) {
    let dir = TempDir::new_with_prefix("/tmp/twinring-user-").unwrap();
    let path = dir.as_path().join("socket");
    let vhost = Vhost { client: server, queues: queue_pairs, ..Vhost::new(&path) };
    let config = Config { memory: Memory::Plain, ..Config::new(Role::Vhost(vhost), 0) };
    let mut testpmd = Testpmd::launch(&config).unwrap();

    let mut transport = connect(&path, server, queue_pairs);
    assert_eq!(transport.features(), FEATURES);
    assert!(transport.queue_pairs_max() >= queue_pairs);
    let arena = Arena::new(4 << 20, &Pages::Plain).unwrap();
    transport.share(slice::from_ref(&arena)).unwrap();
    let rings: Vec<_> = (0..2 * queue_pairs).map(|index| Ring::new(&arena, 0x1230 + index)).collect();

    for _ in 0..2 {
        run(&mut transport, &rings);
        testpmd.wait_link_up(TIMEOUT).unwrap();
        let ready = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
        assert_eq!(transport.status().unwrap(), Some(ready));
        for (index, ring) in (0..).zip(&rings) {
            transport.queue_enable(index, false).unwrap();
            assert_eq!(transport.queue_stop(index).unwrap(), ring.addresses().base);
        }
        assert!(testpmd.command("show port info 0").unwrap().contains("Link status: down"));
    }
    transport.reset().unwrap();
    assert_eq!(transport.status().unwrap(), Some(0));
    drop(transport);
    assert_eq!(path.exists(), !server, "a socket goes with the end that made it");

    let transport = connect(&path, server, queue_pairs);
    assert!(transport.is_connected());
    drop(testpmd);
    assert!(!transport.is_connected());
}

fn connect(path: &Path, server: bool, queue_pairs: u16) -> UserTransport {
    let mode = if server { Mode::Server } else { Mode::Client };
    let config = UserConfig { path: path.to_owned(), mode, queue_pairs, wanted: FEATURES, timeout: TIMEOUT };
    UserTransport::connect(&config).unwrap()
}

fn run(transport: &mut UserTransport, rings: &[Ring]) {
    for (index, ring) in (0..).zip(rings) {
        transport.queue_setup(index, &ring.addresses()).unwrap();
        transport.queue_enable(index, true).unwrap();
    }
    transport.driver_ok().unwrap();
}

/// An empty split ring that has gone round for a while.
struct Ring {
    memory: Arc<Span>,
    base: u16,
}

impl Ring {
    const AVAIL: usize = 16 * SIZE as usize;
    const USED: usize = 2 * Self::AVAIL;

    fn new(arena: &Arc<Arena>, base: u16) -> Self {
        let memory = Arc::new(arena.alloc(Self::USED + used::bytes(SIZE), 4096).unwrap());
        view::<AtomicU16>(&memory, Self::AVAIL, avail::words(SIZE))[avail::IDX].store(base, Ordering::Relaxed);
        view::<AtomicU16>(&memory, Self::USED + used::IDX, 1)[0].store(base, Ordering::Relaxed);
        Self { memory, base }
    }

    fn addresses(&self) -> RingAddresses {
        let [desc, avail, used] = [0, Self::AVAIL, Self::USED].map(|offset| self.memory.iova(offset));
        RingAddresses { size: SIZE, base: self.base.into(), desc, avail, used }
    }
}
