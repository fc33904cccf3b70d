//! The requests that we answer ourselves: `SET_STATUS` and `GET_STATUS`, which the `vhost` crate lacks, and
//! `SET_VRING_ENABLE`, for which it wants features first, though front-ends may enable a ring before they settle those.
use pmd::virtio::spec::{feature, status as bit};
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use super::Session;
use crate::error::Error;
use crate::wire::Message;

impl Session {
    /// Whether this file answers `request`.
    pub(super) fn answers(request: FrontendReq) -> bool {
        matches!(request, FrontendReq::SET_STATUS | FrontendReq::GET_STATUS | FrontendReq::SET_VRING_ENABLE)
    }

    /// Answers `message`, a request of this file; returns the reply's value, if it has one.
    pub(super) fn answer(&mut self, request: FrontendReq, message: &Message) -> Result<Option<u64>, Error> {
        let refused = |why: &'static str| Error::Refused { request: message.header.request, source: why.into() };
        if request == FrontendReq::SET_VRING_ENABLE {
            if self.features.is_some_and(|features| features & feature::PROTOCOL_FEATURES == 0) {
                return Err(refused("PROTOCOL_FEATURES was not negotiated, without which every ring is enabled"));
            }
        } else if !self.has(VhostUserProtocolFeatures::STATUS) {
            return Err(refused("protocol feature STATUS was not negotiated"));
        }
        match (request, <[u8; 8]>::try_from(&message.body[..]).map(u64::from_ne_bytes)) {
            (FrontendReq::SET_STATUS, Ok(status)) => self.set_status(status).map(|()| None),
            (FrontendReq::GET_STATUS, Err(_)) if message.body.is_empty() => Ok(Some(self.status.into())),
            (FrontendReq::SET_VRING_ENABLE, Ok(_)) => {
                // Index and state, 32 bits each in native order.
                let word = |at: usize| std::array::from_fn(|i| message.body[at + i]);
                let (index, state) = (u32::from_ne_bytes(word(0)), u32::from_ne_bytes(word(4)));
                match state {
                    0 | 1 => self.change(index, |ring| ring.enabled = state == 1).map(|()| None),
                    _ => Err(refused("a ring is disabled by 0 and enabled by 1")),
                }
            }
            _ => Err(refused("its body has the wrong length")),
        }
    }

    fn set_status(&mut self, status: u64) -> Result<(), Error> {
        let mut new = u8::try_from(status).map_err(|_| Error::Status { status })?;
        if new == 0 {
            self.reset();
            return Ok(());
        }
        // Features that were refused are not confirmed (virtio 1.3, 2.2.2): the driver reads the status back and sees
        // it.
        if self.features.is_none() {
            new &= !bit::FEATURES_OK;
        }
        self.change_all(|session| session.status = new)
    }
}
