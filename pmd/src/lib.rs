//! Twinring's poll-mode driver: virtio-net over split and packed virtqueues, on an mbuf and mempool stack with DPDK's semantics.
//!
//! # The way of a packet
//!
//! ```text
//! application   handle.rx_burst(&mut burst)               port/queue.rs   claims the queue; one virtual call
//!   RxQueue<R>::rx_burst                                  rx.rs           loop: take -> check the claim -> open -> push; refill
//!     R::take()     a completed slot, its length          virtio/receive.rs over virtio/{split,packed}.rs
//!     R::open()     header -> mbuf metadata               virtio/receive.rs
//!   refill: bulk get from the mempool, R::stage() each, R::publish() once, at most one doorbell
//! ```
//!
//! Transmit mirrors it: reap -> stage -> publish (`tx.rs` over `virtio/transmit.rs`). Which instance runs is decided once, at
//! queue set-up, from the tables in `virtio/paths.rs`.
//!
//! # Modules, each using only those before it
//!
//! | module | what |
//! |---|---|
//! | [`shared`] | words two parties touch: views of shared memory, the baton between worker and control thread |
//! | [`mem`] | arenas: the memory a device may reach |
//! | [`mempool`] | equal objects, a shared ring of them, a cache per worker |
//! | [`mbuf`] | owned packets, pools of them |
//! | [`port`] | what an application sees: ports, queues, bursts, statistics |
//! | [`path`] | tables of named paths |
//! | [`rx`], [`tx`] | THE receive and THE transmit burst, over [`rx::RxRing`] and [`tx::TxRing`] |
//! | [`virtio`] | virtio-net: rings, transport, port |
//! | [`sys`] | affinity and signals |
//! | [`fwd`] | forwarding engines, and the command line of `twinring-fwd` |
//!
//! # Files that may hold `unsafe`
//!
//! `shared.rs` (typed views of shared memory), `mem.rs` (maps files), `mempool/mod.rs` with its tests, `mempool/cache.rs` and
//! `mempool/worker.rs` (hand out addresses, one cache a thread), `mbuf/*` (own headers by address), `sys.rs` (thin wrappers over
//! libc), and `virtio/spec.rs` (marks layouts as shareable). Lints deny it everywhere else in this crate.
#[cfg(not(loom))]
pub mod fwd;
#[cfg(not(loom))]
pub mod mbuf;
#[cfg(not(loom))]
pub mod mem;
#[cfg(not(loom))]
pub mod mempool;
#[cfg(not(loom))]
pub mod path;
#[cfg(not(loom))]
pub mod port;
#[cfg(loom)]
#[path = "mbuf/refcnt.rs"]
pub mod refcnt;
#[cfg(loom)]
#[path = "mempool/ring.rs"]
pub mod ring;
#[cfg(not(loom))]
pub mod rx;
pub mod shared;
#[cfg(not(loom))]
pub mod sys;
#[cfg(not(loom))]
pub mod tx;
#[cfg(not(loom))]
pub mod virtio;
#[cfg(loom)]
pub mod virtio {
    //! What of it is modelled.
    pub mod event;
    pub mod spec;
}
