//! A layer-2 forwarder, as DPDK's `l2fwd`: what comes in on one port leaves through the other with new MAC addresses.
//!
//! ```text
//! cargo run --release -p pmd --example l2fwd -- /tmp/a.sock /tmp/b.sock
//! ```
//! A vhost-user backend listens on both sockets. It ends when no frame has come for ten seconds.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pmd::mbuf::{Mbuf, MbufPool, MbufPoolConfig};
use pmd::mem::{Arena, Pages};
use pmd::mempool::Worker;
use pmd::port::{Burst, Port, PortConfig, RxHandle, RxQueueConfig, TxHandle, TxQueueConfig};
use pmd::virtio::port::{VirtioConfig, VirtioPort};
use pmd::virtio::user::Mode;

const RING_SIZE: u16 = 256;
const BURST: usize = 32;
const IDLE_MAX: Duration = Duration::from_secs(10);

/// A port with one queue pair, started.
fn open(path: &str, number: u8, arena: &Arc<Arena>, pool: &MbufPool) -> Result<VirtioPort, Box<dyn Error>> {
    let config = VirtioConfig {
        address: format!("virtio-user:{path}"),
        path: path.into(),
        mode: Mode::Client,
        queue_pairs: 1,
        ring_size: RING_SIZE,
        packed: false,
        in_order: false,
        event_idx: false,
        mergeable: false,
        port: number.into(),
        mac: [2, 0, 0, 0, 1, number],
        timeout: Duration::from_secs(5),
    };
    let mut port = VirtioPort::open(config, std::slice::from_ref(arena))?;
    port.configure(&PortConfig { rx_queues: 1, tx_queues: 1, ..PortConfig::default() })?;
    let rx = RxQueueConfig { size: RING_SIZE, pool: pool.clone(), free_thresh: 0, deferred_start: false };
    port.rx_queue_setup(0, &rx)?;
    port.tx_queue_setup(0, &TxQueueConfig { size: RING_SIZE, ..TxQueueConfig::default() })?;
    port.start()?;
    Ok(port)
}

/// Forwards one burst; returns how many frames came, and how many of them left.
fn forward(rx: &mut RxHandle, tx: &mut TxHandle, to: u8, burst: &mut Burst) -> (usize, usize) {
    let received = rx.rx_burst(burst);
    let rewrite = |mbuf: &Mbuf| mbuf.data().write(&[2, 0, 0, 0, 0, to, 2, 0, 0, 0, 1, to]);
    for mbuf in burst.as_slice() {
        rewrite(mbuf);
    }
    let sent = tx.tx_burst(burst);
    // What did not fit is dropped: a forwarder that waits would only drop later.
    burst.free();
    (received, sent)
}

fn main() -> Result<(), Box<dyn Error>> {
    let paths: Vec<_> = std::env::args().skip(1).collect();
    let [a, b] = &paths[..] else { return Err("usage: l2fwd SOCKET SOCKET".into()) };

    // Data rooms and rings lie in memory that the backend maps, too; mbuf headers do not.
    let config = MbufPoolConfig { count: 4096, ..MbufPoolConfig::default() };
    let arena = Arena::new(config.arena_bytes() + (1 << 20), &Pages::Auto)?;
    let pool = MbufPool::new(&config, &arena)?;
    let mut ports = [open(a, 0, &arena, &pool)?, open(b, 1, &arena, &pool)?];

    // This thread is a worker: what it frees is what it allocates next, still warm in its cache.
    let _worker = Worker::enter()?;
    let (mut rx, mut tx) = ([ports[0].rx(0)?, ports[1].rx(0)?], [ports[0].tx(0)?, ports[1].tx(0)?]);
    let (mut received, mut sent) = ([0; 2], [0; 2]);
    let mut burst = Burst::new(BURST);
    let mut last = Instant::now();
    while last.elapsed() < IDLE_MAX {
        for from in 0..2 {
            let to = 1 - from;
            let (came, left) = forward(&mut rx[from], &mut tx[to], to as u8, &mut burst);
            received[from] += came;
            sent[to] += left;
            if came > 0 {
                last = Instant::now();
            }
        }
    }
    for (number, port) in ports.iter_mut().enumerate() {
        port.stop()?;
        println!("port {number}: received {}, sent {}", received[number], sent[number]);
    }
    assert_eq!(pool.mempool().in_use(), 0, "every mbuf comes home when its port stops");
    Ok(())
}
