//! The session side: what is offered, what was accepted, and the rings once they run.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::{VhostUserBackend, VringMutex};
use vm_memory::{GuestMemoryAtomic, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;
use vmm_sys_util::event::{EventConsumer, EventFlag, EventNotifier, new_event_consumer_and_notifier};

use super::Config;

/// Feature bits (virtio 1.3, 5.1.3 and 6; vhost-user, "Feature bits"), typed in here and not taken from `pmd`: a wrong one
/// there must not be wrong here too.
pub(super) const MRG_RXBUF: u64 = 1 << 15;
const MQ: u64 = 1 << 22;
const INDIRECT_DESC: u64 = 1 << 28;
const PROTOCOL_FEATURES: u64 = 1 << 30;
pub(super) const VERSION_1: u64 = 1 << 32;
const IN_ORDER: u64 = 1 << 35;

/// The longest split ring (virtio 1.3, 2.7).
const RING_SIZE_MAX: usize = 32768;

/// The device of one connection.
pub(super) struct Device {
    offered: u64,
    vring_count: usize,
    accepted: AtomicU64,
    /// Empty until the first ring runs.
    vrings: Mutex<Vec<VringMutex>>,
}

impl Device {
    pub(super) fn new(config: &Config) -> Self {
        let optional = [(config.mergeable, MRG_RXBUF), (config.in_order, IN_ORDER), (config.queues > 1, MQ)];
        let chosen = optional.iter().filter(|(on, _)| *on).fold(0, |bits, (_, bit)| bits | bit);
        Self {
            offered: VERSION_1 | INDIRECT_DESC | PROTOCOL_FEATURES | chosen,
            vring_count: 2 * usize::from(config.queues),
            accepted: AtomicU64::new(0),
            vrings: Mutex::new(Vec::new()),
        }
    }

    /// The features that the guest accepted.
    pub(super) fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Acquire)
    }

    /// All rings, even indexes for receive and odd ones for transmit (virtio 1.3, 5.1.2), or none before the first one runs.
    pub(super) fn vrings(&self) -> Vec<VringMutex> {
        self.vrings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl VhostUserBackend for Device {
    type Bitmap = ();
    type Vring = VringMutex;

    fn num_queues(&self) -> usize {
        self.vring_count
    }

    fn max_queue_size(&self) -> usize {
        RING_SIZE_MAX
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn acked_features(&self, features: u64) {
        self.accepted.store(features, Ordering::Release);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK
    }

    fn set_event_idx(&self, _enabled: bool) {
        // Not offered.
    }

    fn update_memory(&self, _memory: GuestMemoryAtomic<GuestMemoryMmap>) -> io::Result<()> {
        // The pump holds the same `GuestMemoryAtomic` and looks into it once a burst.
        Ok(())
    }

    fn exit_event(&self, _thread: usize) -> Option<(EventConsumer, EventNotifier)> {
        new_event_consumer_and_notifier(EventFlag::NONBLOCK | EventFlag::CLOEXEC).ok()
    }

    fn handle_event(&self, _event: u16, _set: EventSet, vrings: &[VringMutex], _thread: usize) -> io::Result<()> {
        let mut known = self.vrings.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_empty() {
            known.extend_from_slice(vrings);
        }
        Ok(())
    }
}
