//! One vhost-user connection: its state, and the rules by which a ring runs.
//!
//! A ring runs exactly while all of this holds: its size, addresses and kick are known; it is enabled (or there are
//! no protocol features, see `Ring::config`); features are negotiated; the driver is ready (`DRIVER_OK`, if `STATUS`
//! is negotiated); and the memory table holds its three parts. Whatever changes one of these stops the ring first and
//! starts it again, where it stopped, if all of it still holds. So there is no order of requests that a front-end
//! must keep.
mod device;
mod own;
mod protocol;
mod requests;
mod ring;

use std::sync::Arc;

use pmd::virtio::spec::{feature, queue_pairs_max, status as bit};
use tracing::debug;
use vhost::vhost_user::message::VhostUserProtocolFeatures;

pub use device::{Device, NET_CONFIG_LEN};
pub(crate) use protocol::Protocol;

use crate::error::Error;
use crate::inflight::Inflight;
use crate::memory::GuestMemory;
use crate::positions::Record;
use ring::{Kick, Ring};

/// A device and what its present front-end has negotiated; between connections, nothing.
pub(crate) struct Session {
    device: Box<dyn Device>,
    rings: Vec<Ring>,
    memory: Arc<GuestMemory>,
    inflight: Option<Inflight>,
    features: Option<u64>,
    protocol_features: VhostUserProtocolFeatures,
    status: u8,
    link_up: bool,
}

impl Session {
    pub(crate) fn new(device: Box<dyn Device>) -> Self {
        let count = 2 * device.queue_pairs_max().min(queue_pairs_max(device.features()));
        Self {
            device,
            rings: (0..count).map(|_| Ring::default()).collect(),
            memory: Arc::default(),
            inflight: None,
            features: None,
            protocol_features: VhostUserProtocolFeatures::empty(),
            status: 0,
            link_up: false,
        }
    }

    /// Ends what the connection has negotiated: rings stop, memory and descriptors go. A front-end that has hung up is gone for
    /// good, its rings too; one that was hung up on may come again.
    pub(crate) fn disconnect(&mut self, gone: bool) {
        self.clear(gone);
        for ring in &mut self.rings {
            *ring = Ring::default();
        }
        self.memory = Arc::default();
        // Not forgotten: it is the front-end's, which knows what became of its rings.
        self.inflight = None;
        self.protocol_features = VhostUserProtocolFeatures::empty();
    }

    /// Checks that the peer has not taken its memory away.
    ///
    /// # Errors
    /// [`Error::MemoryBroken`].
    pub(crate) fn check_memory(&self) -> Result<(), Error> {
        let broken = self.memory.is_broken() || self.inflight.as_ref().is_some_and(Inflight::is_broken);
        if broken { Err(Error::MemoryBroken) } else { Ok(()) }
    }

    fn offered(&self) -> u64 {
        self.device.features() | feature::PROTOCOL_FEATURES
    }

    /// Device reset (virtio 1.3, 2.4; vhost-user `RESET_DEVICE`): rings forget all but the calls, which are the
    /// front-end's own and may have been sent long before.
    fn reset(&mut self) {
        for index in 0..self.rings.len() {
            self.forget_inflight(index);
        }
        self.clear(true);
    }

    /// Whether rings are packed, as far as that is settled.
    fn is_packed(&self) -> Option<bool> {
        self.features.map(|features| features & feature::RING_PACKED != 0)
    }

    fn forget_inflight(&self, index: usize) {
        if let (Some(inflight), Some(packed)) = (&self.inflight, self.is_packed()) {
            inflight.forget(index as u16, packed);
        }
    }

    /// Stops all rings, and forgets features and status; the rings' positions, too, if they are `void`.
    fn clear(&mut self, void: bool) {
        for index in 0..self.rings.len() {
            self.stop(index);
            let call = self.rings[index].call.take();
            self.rings[index] = Ring { call, ..Ring::default() };
            if void {
                self.device.forget(index as u16);
            }
        }
        self.features = None;
        self.status = 0;
        self.update_link();
    }

    /// The place of a ring in `rings`.
    fn place(&self, index: u32) -> Result<usize, Error> {
        let count = self.rings.len();
        usize::try_from(index).ok().filter(|i| *i < count).ok_or(Error::RingIndex { index, count })
    }

    /// Changes one ring, which stops for it, and goes on if it may.
    fn change(&mut self, index: u32, change: impl FnOnce(&mut Ring)) -> Result<(), Error> {
        let index = self.place(index)?;
        self.stop(index);
        change(&mut self.rings[index]);
        let outcome = self.start(index);
        self.update_link();
        outcome
    }

    /// Changes what concerns all rings. The first error is returned, but every ring that can run does.
    fn change_all(&mut self, change: impl FnOnce(&mut Self)) -> Result<(), Error> {
        for index in 0..self.rings.len() {
            self.stop(index);
        }
        change(self);
        let mut outcome = Ok(());
        for index in 0..self.rings.len() {
            outcome = outcome.and(self.start(index));
        }
        self.update_link();
        outcome
    }

    fn stop(&mut self, index: usize) {
        let ring = &mut self.rings[index];
        if std::mem::take(&mut ring.running)
            && let Ok(index) = u16::try_from(index)
            && let Some(position) = self.device.queue_stop(index)
        {
            ring.position = position;
        }
    }

    fn start(&mut self, index: usize) -> Result<(), Error> {
        let driver_ready = !self.has(VhostUserProtocolFeatures::STATUS) || self.status & bit::DRIVER_OK != 0;
        let (Some(features), true, Ok(number)) = (self.features, driver_ready, u16::try_from(index)) else {
            return Ok(());
        };
        let Some(mut config) = self.rings[index].config(number, features, &self.memory) else { return Ok(()) };
        config.check_size()?;
        // Not an error: QEMU removes a region and adds it again, larger, under a running ring.
        if let Err(outside) = config.check_areas() {
            debug!("not started: {outside}");
            return Ok(());
        }
        if let Some(inflight) = &self.inflight {
            let record = inflight.record(number, config.size, config.is_packed(), !self.rings[index].ran)?;
            config.record = Some(Record::Region(record));
        }
        self.device.queue_start(config)?;
        let ring = &mut self.rings[index];
        (ring.running, ring.ran) = (true, true);
        ring.began.get_or_insert(ring.position);
        Ok(())
    }

    fn update_link(&mut self) {
        let up = self.rings.iter().any(|ring| ring.running);
        if up != self.link_up {
            self.link_up = up;
            self.device.link(up);
        }
    }

    fn has(&self, feature: VhostUserProtocolFeatures) -> bool {
        self.protocol_features.contains(feature)
    }

    /// `GET_VRING_BASE`: stops the ring for good, until it is set up again, and returns where it stopped.
    fn finish(&mut self, index: u32) -> Result<u32, Error> {
        self.change(index, |ring| {
            ring.kick = Kick::Unknown;
            ring.call = None;
            ring.addresses = None;
            ring.began = None;
        })?;
        let place = self.place(index)?;
        self.device.forget(place as u16);
        self.forget_inflight(place);
        Ok(self.rings[place].position)
    }
}
