//! From an address to a port.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use super::Address;
use crate::mem::Arena;
use crate::port::Port;
use crate::virtio::port::{VirtioConfig, VirtioPort};
use crate::virtio::user::Mode;

/// How long the other side may take to appear, and to answer each request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Opens the port of an address that a driver is to drive; it may reach `arenas`. The port comes back not yet configured.
///
/// # Errors
/// One sentence: why the device cannot be had.
pub fn open(address: &Address, arenas: &[Arc<Arena>]) -> anyhow::Result<Box<dyn Port>> {
    let port = next_port_number();
    let config = VirtioConfig {
        address: address.to_string(),
        path: address.path().into(),
        mode: if address.flag("server") { Mode::Server } else { Mode::Client },
        queue_pairs: address.queues(),
        ring_size: address.size(),
        in_order: address.flag("in_order"),
        event_idx: address.flag("event_idx"),
        packed: address.flag("packed"),
        mergeable: address.flag("mrg"),
        port,
        mac: mac(port),
        timeout: TIMEOUT,
    };
    if config.mode == Mode::Server {
        tracing::info!("{address}: listening for a backend, up to {} s", TIMEOUT.as_secs());
    }
    Ok(Box::new(VirtioPort::open(config, arenas)?))
}

/// Numbers for the ports of this process, in the order in which they are opened.
pub fn next_port_number() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A locally administered MAC address for port `port`.
#[must_use]
pub fn mac(port: u16) -> [u8; 6] {
    let [high, low] = port.to_be_bytes();
    [0x02, 0x00, 0x00, 0x54, high, low]
}
