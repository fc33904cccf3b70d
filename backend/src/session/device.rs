//! What a session drives.
use crate::error::Error;
use crate::queue::config::QueueConfig;

/// Length of the network device's configuration, `struct virtio_net_config`, in bytes (virtio 1.3, 5.1.4).
pub const NET_CONFIG_LEN: usize = 24;

/// A network device as its control plane sees it: it says what it can do, and is told which rings run.
///
/// One device outlives many connections. All calls come from the one control thread, and none may wait for the peer.
pub trait Device: Send {
    /// The virtio features on offer, without the transport's `PROTOCOL_FEATURES` bit.
    fn features(&self) -> u64;

    /// How many queue pairs there are at most; the session caps it at [`queue_pairs_max`](pmd::virtio::spec::queue_pairs_max).
    fn queue_pairs_max(&self) -> u16;

    /// The configuration space (virtio 1.3, 5.1.4), little-endian.
    fn config(&self) -> [u8; NET_CONFIG_LEN];

    /// Runs a ring. It is not running yet, and its size and areas have been checked.
    ///
    /// # Errors
    /// If the ring cannot run with this configuration; then it does not.
    fn queue_start(&mut self, config: QueueConfig) -> Result<(), Error>;

    /// Stops a ring, once what it has taken is finished, and lets go of its memory and descriptors; returns the
    /// position to go on from, as [`QueueConfig::position`], or `None` if it was not running.
    fn queue_stop(&mut self, index: u16) -> Option<u32>;

    /// A ring's position is void: its front-end has been told, or is gone, or the device was reset. The ring has stopped.
    fn forget(&mut self, index: u16) {
        let _ = index;
    }

    /// The link is up while any ring runs. Called on changes only.
    fn link(&mut self, up: bool);
}
