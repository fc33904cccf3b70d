//! Another backend in place of one that is gone.

use std::net::Shutdown;

use super::{UserError, UserTransport, socket, wires};

impl UserTransport {
    /// Looks once for a backend in place of one that is gone, and negotiates the same features with it. `false` if there is none
    /// yet. Memory is to be shared and queues are to be set up again then; the kick descriptors stay the same.
    ///
    /// # Errors
    /// [`UserError::FeaturesLost`] if it cannot do what the rings rely on; else as [`UserTransport::connect`]. The transport is
    /// then unconnected, as before.
    pub fn reconnect(&mut self) -> Result<bool, UserError> {
        let stream = match &self.listener {
            Some(listener) => listener.poll(&self.path),
            None => match socket::connect(&self.path, self.timeout) {
                Err(UserError::NoSocket { .. } | UserError::Refused { .. }) => return Ok(false),
                other => other.map(Some),
            },
        };
        let Some(stream) = stream? else { return Ok(false) };
        let pairs = self.queues.len() as u16 / 2;
        let failed = |source| UserError::io(&self.path, "getting a descriptor or thread", source);
        (self.frontend, self.extra, self.watchdog) = wires(stream, pairs).map_err(failed)?;
        let agreed = self.features();
        let negotiated = self.negotiate_again(agreed, pairs);
        if negotiated.is_err() {
            // What the rings are made for.
            self.features = agreed;
            self.disconnect();
        }
        negotiated.map(|()| true)
    }

    /// Ends the connection. All requests fail until [`UserTransport::reconnect`] finds another backend.
    pub fn disconnect(&mut self) {
        // Fails only if it is closed already.
        let _ = self.extra.socket.shutdown(Shutdown::Both);
    }

    fn negotiate_again(&mut self, agreed: u64, pairs: u16) -> Result<(), UserError> {
        for queue in &mut self.queues {
            queue.call_sent = false;
        }
        self.introduce()?;
        self.check_queue_pairs(pairs, agreed)?;
        let missing = agreed & !self.features;
        if missing != 0 {
            return Err(UserError::FeaturesLost { path: self.path.clone(), missing });
        }
        self.negotiate(agreed)
    }
}
