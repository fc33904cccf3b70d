//! Packets that outlived the device they came from.

use std::any::Any;
use std::vec;

use super::{Burst, RxBurst};
use crate::mbuf::Mbuf;

/// A receive queue that first delivers packets which a former device had left behind.
///
/// It stands in the queue's slot for as long as there are such packets, so that the queue itself, whose loop every packet goes
/// through, need not know about them.
pub struct Backlog {
    packets: vec::IntoIter<Mbuf>,
    queue: Box<dyn RxBurst>,
}

impl Backlog {
    /// `queue`, behind `packets`; just `queue` if there are none.
    #[must_use]
    pub fn wrap(packets: Vec<Mbuf>, queue: Box<dyn RxBurst>) -> Box<dyn RxBurst> {
        if packets.is_empty() { queue } else { Box::new(Self { packets: packets.into_iter(), queue }) }
    }

    /// The opposite of [`wrap`](Self::wrap).
    #[must_use]
    pub fn unwrap(queue: Box<dyn RxBurst>) -> (Vec<Mbuf>, Box<dyn RxBurst>) {
        if !(&*queue as &dyn Any).is::<Self>() {
            return (Vec::new(), queue);
        }
        let backlog = (queue as Box<dyn Any>).downcast::<Self>().unwrap_or_else(|_| unreachable!("just asked"));
        (backlog.packets.collect(), backlog.queue)
    }
}

impl RxBurst for Backlog {
    fn rx_burst(&mut self, burst: &mut Burst) -> usize {
        let mut count = 0;
        while burst.room() > 0
            && let Some(packet) = self.packets.next()
        {
            // There is room, see the condition.
            drop(burst.push(packet));
            count += 1;
        }
        count + self.queue.rx_burst(burst)
    }

    fn pending(&mut self) -> usize {
        self.packets.len() + self.queue.pending()
    }

    fn arm(&mut self) -> bool {
        self.packets.len() == 0 && self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}
