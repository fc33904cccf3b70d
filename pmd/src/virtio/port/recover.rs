//! A backend that is gone, and another that takes over from it.
//!
//! Rings and buffers are ours, so they outlive a backend. When another one comes, each ring goes on behind the last completion:
//! what had been made available and was not completed is written anew, in order, and waits there for the new backend. So no
//! frame is sent or received twice, and what is lost is what the old backend had taken over: frames that it had completed and
//! not passed on. Our own knowledge is enough for that, and nothing that stands in the ring is believed: a device that ends in
//! the middle of a write leaves a packed descriptor half changed, and one that completed out of order leaves gaps.

use super::{VirtioPort, rx_vring};
use crate::port::{Backlog, PortError, RxBurst, TxBurst};

/// A running queue that is out of its slot.
enum Parked {
    Rx(Box<dyn RxBurst>),
    Tx(Box<dyn TxBurst>),
}

/// A queue out of its slot, and what belongs to it.
struct Place {
    vring: u16,
    path: &'static str,
    queue: Parked,
}

impl VirtioPort {
    /// One step towards a backend: none needed, none there, or one that takes over.
    pub(super) fn find_backend(&mut self) -> Result<(), PortError> {
        if self.transport.is_connected() {
            return self.clear_backlogs();
        }
        if !self.transport.reconnect().map_err(|e| self.failed(e))? {
            return Ok(());
        }
        let taken_over = self.transport.share(&self.arenas).map_err(|e| self.failed(e)).and_then(|()| self.resume());
        if taken_over.is_err() {
            self.transport.disconnect();
        }
        taken_over
    }

    /// Hands the rings of a started port to a new backend. Queues are out of their slots while that happens, and back in them
    /// whatever happens.
    fn resume(&mut self) -> Result<(), PortError> {
        if !self.started {
            return Ok(());
        }
        let mut places = Vec::new();
        // Virtio 1.3, 3.1.1 step 7.
        let mut result = (0..self.rings.len() as u16).try_for_each(|vring| self.resume_ring(vring, &mut places));
        result = result.and_then(|()| self.transport.driver_ok().map_err(|e| self.failed(e))); // Step 8.
        let vrings: Vec<u16> = places.iter().map(|place| place.vring).collect();
        for place in places {
            result = result.and(self.put_back(place));
        }
        result?;
        for vring in vrings {
            // For what was made available when nobody was there to see it.
            self.doorbell(vring)?.ring();
        }
        Ok(())
    }

    /// Takes a queue from its worker, rewinds it, and tells the device of its ring.
    fn resume_ring(&mut self, vring: u16, places: &mut Vec<Place>) -> Result<(), PortError> {
        let Some(Place { vring, path, queue }) = self.take_out(vring)? else { return Ok(()) };
        let (queue, base) = match queue {
            Parked::Tx(mut queue) => {
                let base = queue.rewind();
                (Parked::Tx(queue), base)
            }
            Parked::Rx(queue) => {
                let (mut received, mut queue) = Backlog::unwrap(queue);
                let base = queue.rewind(&mut received);
                if !received.is_empty() && !self.backlogs.contains(&vring) {
                    self.backlogs.push(vring);
                }
                (Parked::Rx(Backlog::wrap(received, queue)), base)
            }
        };
        places.push(Place { vring, path, queue });
        base.map_or(Ok(()), |base| self.announce(vring, base))
    }

    /// Takes backlogs that have been delivered out of the packets' way.
    fn clear_backlogs(&mut self) -> Result<(), PortError> {
        for vring in std::mem::take(&mut self.backlogs) {
            let Some(Place { vring, path, queue: Parked::Rx(queue) }) = self.take_out(vring)? else { continue };
            let (packets, queue) = Backlog::unwrap(queue);
            if !packets.is_empty() {
                self.backlogs.push(vring);
            }
            self.put_back(Place { vring, path, queue: Parked::Rx(Backlog::wrap(packets, queue)) })?;
        }
        Ok(())
    }

    /// Takes a queue out of its slot; none if it is not running.
    fn take_out(&self, vring: u16) -> Result<Option<Place>, PortError> {
        let queue = vring / 2;
        let (path, running) = if vring == rx_vring(queue) {
            let Some(slot) = self.slots.rx.get(usize::from(queue)) else { return Ok(None) };
            (slot.path(), self.slots.swap_rx(queue, None)?.map(Parked::Rx))
        } else {
            let Some(slot) = self.slots.tx.get(usize::from(queue)) else { return Ok(None) };
            (slot.path(), self.slots.swap_tx(queue, None)?.map(Parked::Tx))
        };
        Ok(path.zip(running).map(|(path, queue)| Place { vring, path, queue }))
    }

    fn put_back(&self, Place { vring, path, queue }: Place) -> Result<(), PortError> {
        match queue {
            Parked::Rx(queue) => self.slots.swap_rx(vring / 2, Some((path, queue))).map(drop),
            Parked::Tx(queue) => self.slots.swap_tx(vring / 2, Some((path, queue))).map(drop),
        }
    }
}
