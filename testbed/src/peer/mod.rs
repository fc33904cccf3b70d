//! Peers that are not ours: whoever disagrees with them about a ring is probably wrong.
//!
//! | peer | plays | made of |
//! |---|---|---|
//! | [`dpdk`] | host (vhost) or guest (virtio-user) | DPDK's `testpmd`, as a process |
//! | [`mod@reference`] | host, on threads of this process | rust-vmm's `vhost-user-backend` and `virtio-queue` |

pub mod dpdk;
pub mod reference;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Holds the machine for one busy-polling test of this process: two at a time on two cores measure each other.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed while it held the turn leaves nothing behind that the next one could trip over.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
