//! A worker that sends back what comes in.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use pmd::mempool::Worker;
use pmd::port::{Burst, Port, PortError, RxHandle, TxHandle};

/// Packets at a time.
const BURST: usize = 32;

/// A thread that sends back what a port receives, queue by queue, and drops nothing: it offers a packet until it is taken.
#[derive(Debug)]
pub struct Echo {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    forwarded: AtomicU64,
}

impl Echo {
    /// Starts it on all queue pairs of `port`.
    ///
    /// # Errors
    /// [`PortError::HandleOut`] if a handle is out.
    pub fn start(port: &dyn Port) -> Result<Self, PortError> {
        let queues = port.slots().rx.len() as u16;
        let pair = |queue| Ok((port.rx(queue)?, port.tx(queue)?, Burst::new(BURST)));
        let mut pairs: Vec<(RxHandle, TxHandle, Burst)> = (0..queues).map(pair).collect::<Result<_, PortError>>()?;
        let shared = Arc::<Shared>::default();
        let ours = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            // With all numbers taken it works without a cache.
            let _worker = Worker::enter();
            while !ours.stop.load(Ordering::Relaxed) {
                let mut moved = 0;
                for (rx, tx, burst) in &mut pairs {
                    rx.rx_burst(burst);
                    moved += tx.tx_burst(burst);
                }
                ours.forwarded.fetch_add(moved as u64, Ordering::Relaxed);
                if moved == 0 {
                    thread::yield_now();
                }
            }
        });
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Packets sent back so far.
    #[must_use]
    pub fn forwarded(&self) -> u64 {
        self.shared.forwarded.load(Ordering::Relaxed)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed already.
            let _ = thread.join();
        }
    }
}
