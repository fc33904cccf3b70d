//! What the front-end has told us about one ring.
use std::sync::Arc;

use pmd::virtio::spec::feature;

use crate::memory::GuestMemory;
use crate::queue::config::{Notifier, QueueConfig};

/// Where the parts of a ring lie in the front-end's address space. Kept as they came: a new memory table gives them
/// another meaning, and DPDK and QEMU do not repeat them then.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addresses {
    pub(super) desc: u64,
    pub(super) avail: u64,
    pub(super) used: u64,
}

/// How the guest announces buffers. A ring is not started before it has said so (vhost-user, "Ring states").
#[derive(Debug, Default)]
pub(super) enum Kick {
    #[default]
    Unknown,
    /// Not at all: the ring is to be polled.
    Polled,
    Eventfd(Arc<Notifier>),
}

#[derive(Debug, Default)]
pub(super) struct Ring {
    pub(super) size: Option<u16>,
    pub(super) addresses: Option<Addresses>,
    pub(super) position: u32,
    /// Its position when it first ran since it was set up.
    pub(super) began: Option<u32>,
    pub(super) kick: Kick,
    pub(super) call: Option<Arc<Notifier>>,
    pub(super) enabled: bool,
    /// Whether the device runs it.
    pub(super) running: bool,
    /// Whether the device has run it: then its position is known, whatever an inflight region says.
    pub(super) ran: bool,
}

impl Ring {
    /// How to run ring `index`, if it has been set up completely, started, and enabled.
    pub(super) fn config(&self, index: u16, features: u64, memory: &Arc<GuestMemory>) -> Option<QueueConfig> {
        // Without PROTOCOL_FEATURES there is no SET_VRING_ENABLE: a ring is enabled as soon as it is started.
        if !self.enabled && features & feature::PROTOCOL_FEATURES != 0 {
            return None;
        }
        let kick = match &self.kick {
            Kick::Unknown => return None,
            Kick::Polled => None,
            Kick::Eventfd(notifier) => Some(Arc::clone(notifier)),
        };
        let (size, addresses) = (self.size?, self.addresses?);
        Some(QueueConfig {
            index,
            size,
            features: features & !feature::PROTOCOL_FEATURES,
            memory: Arc::clone(memory),
            desc_user_addr: addresses.desc,
            avail_user_addr: addresses.avail,
            used_user_addr: addresses.used,
            position: self.position,
            kick,
            call: self.call.clone(),
            record: None,
        })
    }
}
