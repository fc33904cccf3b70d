//! The requests that the `vhost` crate lacks: `SET_STATUS` and `GET_STATUS` (vhost-user, protocol feature `STATUS`).
use pmd::virtio::spec::status as bit;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures};

use super::Session;
use crate::error::Error;
use crate::wire::Message;

impl Session {
    /// Answers `message`, a request of this file; returns the reply's value, if it has one.
    pub(super) fn answer_status(&mut self, request: FrontendReq, message: &Message) -> Result<Option<u64>, Error> {
        let number = message.header.request;
        let malformed = |why: &'static str| Error::Refused { request: number, source: why.into() };
        if !self.has(VhostUserProtocolFeatures::STATUS) {
            return Err(malformed("protocol feature STATUS was not negotiated"));
        }
        match (request, <[u8; 8]>::try_from(&message.body[..])) {
            (FrontendReq::SET_STATUS, Ok(status)) => self.set_status(u64::from_ne_bytes(status)).map(|()| None),
            (FrontendReq::GET_STATUS, Err(_)) if message.body.is_empty() => Ok(Some(self.status.into())),
            _ => Err(malformed("its body has the wrong length")),
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
