//! A cell of a table: what runs between which two ends, over which ring.

use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

/// What flows between the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub enum Traffic {
    /// The host sends (`txonly`), the guest receives and frees.
    RxOnly,
    /// Frames go round: both ends forward what they receive.
    Io,
}

/// The format of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ring {
    /// Split virtqueues (virtio 1.3, 2.7).
    Split,
    /// Packed virtqueues (virtio 1.3, 2.8).
    Packed,
}

/// The widest vector instructions that the guest's paths may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Simd {
    /// Scalar code only.
    None,
}

/// Who drives the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Guest {
    /// Our poll-mode driver.
    Twinring,
    /// DPDK's testpmd on virtio-user.
    Dpdk,
}

/// Who serves the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Host {
    /// Our backend.
    Twinring,
    /// DPDK's testpmd on vhost.
    Dpdk,
    /// The reference backend, made of vhost-user-backend and virtio-queue.
    Reference,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cell {
    /// What flows.
    #[serde(rename = "engine")]
    pub traffic: Traffic,
    /// The format of the rings.
    pub ring: Ring,
    /// Whether `VIRTIO_F_IN_ORDER` is negotiated (virtio 1.3, 6).
    pub in_order: bool,
    /// Whether `VIRTIO_NET_F_MRG_RXBUF` is negotiated (virtio 1.3, 5.1.3).
    pub mergeable: bool,
    /// Vector instructions.
    pub simd: Simd,
    /// Queue pairs.
    pub queues: u16,
    /// Length of a frame, in bytes without FCS.
    pub frame: u16,
    /// Most packets at a time.
    pub burst: u16,
    /// Descriptors a ring.
    #[serde(skip)]
    pub ring_size: u16,
    /// Who drives the rings.
    pub guest: Guest,
    /// Who serves them.
    pub host: Host,
}

impl Cell {
    /// Whether there is such a thing: the reference backend has split rings only.
    #[must_use]
    pub fn is_possible(&self) -> bool {
        self.host != Host::Reference || self.ring == Ring::Split
    }

    /// Whether frames start at the host. The reference backend does not forward frames of its own.
    #[must_use]
    pub fn host_is_source(&self) -> bool {
        self.traffic == Traffic::RxOnly || self.host != Host::Reference
    }

    /// The combination of ring features, which is a row of the table.
    #[must_use]
    pub fn combination(&self) -> String {
        let mut text = self.ring.to_string();
        for (on, name) in [(self.in_order, ", in order"), (self.mergeable, ", mergeable")] {
            text += if on { name } else { "" };
        }
        text
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cell { traffic, queues, guest, host, .. } = self;
        let s = if *queues == 1 { "" } else { "s" };
        write!(f, "{traffic}, {}, {queues} queue pair{s}, host {host}, guest {guest}", self.combination())
    }
}

/// Shows a value by the name it has on the command line.
macro_rules! display_as_named {
    ($($name:ty),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.to_possible_value().map_or(Ok(()), |value| f.pad(value.get_name()))
            }
        }
    )*};
}

display_as_named!(Traffic, Ring, Simd, Guest, Host);
