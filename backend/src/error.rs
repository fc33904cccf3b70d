//! What can go wrong on the control plane: one enum for the crate.
use std::io;
use std::path::PathBuf;

use crate::queue::config::Area;

/// Why something could not be set up, or why a connection ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A region of the memory table is not a file that two processes can share.
    #[error(
        "memory region at guest address {guest_phys_addr:#x} is not a file that can be shared: {source}; give the \
         guest shared memory (QEMU: share=on)"
    )]
    RegionNotShared {
        /// Where the region begins in the guest.
        guest_phys_addr: u64,
        /// What the kernel said of the descriptor.
        source: io::Error,
    },
    /// A region's numbers are impossible.
    #[error(
        "memory region at guest address {guest_phys_addr:#x}, {size} bytes: {what}; the front-end has to send \
         page-aligned, non-empty regions"
    )]
    RegionInvalid {
        /// Where the region begins in the guest.
        guest_phys_addr: u64,
        /// Its size in bytes.
        size: u64,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A region overlaps another one.
    #[error(
        "memory region at guest address {guest_phys_addr:#x} overlaps the one at {other:#x}; a guest address can \
         mean one place only"
    )]
    RegionOverlap {
        /// Where the region begins in the guest.
        guest_phys_addr: u64,
        /// Where the other one begins.
        other: u64,
    },
    /// A region is longer than its file: touching its end would be SIGBUS.
    #[error(
        "memory region at guest address {guest_phys_addr:#x} ends at byte {end} of a file of {file_size} bytes; the \
         file has to hold the whole region"
    )]
    RegionBeyondFile {
        /// Where the region begins in the guest.
        guest_phys_addr: u64,
        /// Offset of its end in the file.
        end: u64,
        /// The file's size in bytes.
        file_size: u64,
    },
    /// The kernel would not map a region.
    #[error("memory region at guest address {guest_phys_addr:#x}, {size} bytes, cannot be mapped: {source}")]
    RegionMap {
        /// Where the region begins in the guest.
        guest_phys_addr: u64,
        /// Its size in bytes.
        size: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// No region with these numbers.
    #[error("no memory region of {size} bytes at guest address {guest_phys_addr:#x} to remove")]
    RegionUnknown {
        /// Where the region was said to begin in the guest.
        guest_phys_addr: u64,
        /// Its size in bytes.
        size: u64,
    },
    /// Too many regions in one memory table.
    #[error("{count} memory regions; at most {max} are supported")]
    RegionCount {
        /// How many there would be.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// Too many regions in the whole process.
    #[error("all {max} memory mappings of this process are in use; run fewer ports in one process")]
    MappingCount {
        /// The limit.
        max: usize,
    },
    /// The peer shortened a file that it had given us as memory.
    #[error("the peer shortened the file behind its memory; it has to keep it until it disconnects")]
    MemoryBroken,

    /// No such ring.
    #[error("ring {index}: this device has {count} rings; connect with fewer queues or give the port more")]
    RingIndex {
        /// The index asked for.
        index: u32,
        /// How many rings there are.
        count: usize,
    },
    /// A ring size that virtio 1.3 (2.7, 2.8) rules out.
    #[error("ring {index}: size {size} is not from 1 to 32768, or not a power of two for a split ring")]
    RingSize {
        /// The ring.
        index: u32,
        /// The size asked for.
        size: u32,
    },
    /// A part of a ring lies outside guest memory, crosses two regions or is misaligned.
    #[error("ring {index}: {area} at user address {user_addr:#x} does not lie aligned in one memory region")]
    RingArea {
        /// The ring.
        index: u16,
        /// Which part of it.
        area: Area,
        /// Where it was said to be, in the front-end's address space.
        user_addr: u64,
    },
    /// No path runs a ring with these features.
    #[error(transparent)]
    Path(#[from] pmd::path::PathError),
    /// A kick or call descriptor that is no eventfd.
    #[error("ring {index}: the notification descriptor is not an eventfd")]
    RingNotifier {
        /// The ring.
        index: u16,
    },
    /// Feature bits that were never offered.
    #[error("features {features:#x} contain {unknown:#x}, which {kind} was not offered")]
    Features {
        /// What the peer asked for.
        features: u64,
        /// The bits of it that were not offered.
        unknown: u64,
        /// `of the device` or `of the protocol`.
        kind: &'static str,
    },
    /// Features may not change under a running ring.
    #[error("features {features:#x} differ from {present:#x}, with which rings are running; stop the rings first")]
    FeaturesWhileRunning {
        /// What the peer asked for.
        features: u64,
        /// What is in force.
        present: u64,
    },
    /// A status that is no byte (virtio 1.3, 2.1).
    #[error("device status {status:#x} is more than 8 bits")]
    Status {
        /// What the peer wrote.
        status: u64,
    },
    /// A part of the configuration space that does not exist.
    #[error("configuration space: {size} bytes at offset {offset} are outside its {max} bytes")]
    ConfigRange {
        /// First byte asked for.
        offset: u32,
        /// How many.
        size: u32,
        /// Size of the space.
        max: usize,
    },

    /// A message header that cannot be the beginning of a request.
    #[error(
        "message header with request {request}, flags {flags:#x}, size {size} is not a vhost-user request of at \
         most {max} bytes"
    )]
    Header {
        /// Request id.
        request: u32,
        /// Flags.
        flags: u32,
        /// Body size in bytes.
        size: u32,
        /// Largest body in bytes.
        max: usize,
    },
    /// More descriptors than a message may carry.
    #[error("message with {count} file descriptors or more; at most {max} are accepted")]
    DescriptorCount {
        /// How many arrived.
        count: usize,
        /// The limit.
        max: usize,
    },
    /// This process may not have a descriptor that came with a message.
    #[error(
        "a descriptor that the front-end sent is one more than the {limit} that this process may have (ulimit -n); raise \
         that, or connect with fewer queues: each needs two"
    )]
    DescriptorLimit {
        /// The limit.
        limit: u64,
    },
    /// The peer closed the connection.
    #[error("the peer disconnected")]
    Disconnected,
    /// The peer sent half a message, or does not read its answer.
    #[error("the peer has been {what} for {ms} ms")]
    Timeout {
        /// What it has been doing.
        what: &'static str,
        /// For how long.
        ms: u128,
    },
    /// A request that this backend does not support.
    #[error("request {request} with {descriptors} file descriptors is not supported")]
    Unsupported {
        /// Request id.
        request: u32,
        /// How many descriptors came with it.
        descriptors: usize,
    },
    /// A request that makes no sense at this point, or is malformed.
    #[error("request {request} refused: {source}")]
    Refused {
        /// Request id.
        request: u32,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// An inflight region for rings that there are not.
    #[error("an inflight region for {queues} rings of {size} descriptors: there are 1 to {rings} rings, of 1 to 32768")]
    InflightShape {
        /// Rings asked for.
        queues: u16,
        /// Descriptors of each.
        size: u16,
        /// How many rings there are.
        rings: usize,
    },
    /// An inflight region that cannot be mapped.
    #[error(
        "inflight region of {size} bytes at byte {offset} of its file: {source}; send what GET_INFLIGHT_FD returned"
    )]
    InflightRegion {
        /// Where it was said to begin in the file.
        offset: u64,
        /// Its size in bytes.
        size: u64,
        /// What is wrong.
        source: io::Error,
    },
    /// A ring that has no part in the inflight region.
    #[error(
        "ring {index} of {size} descriptors does not fit into the inflight region for {queues} rings of {entries}; ask \
         for a larger one by GET_INFLIGHT_FD"
    )]
    InflightRing {
        /// The ring.
        index: u16,
        /// Its size.
        size: u16,
        /// Rings that the region is for.
        queues: u16,
        /// Descriptors of each.
        entries: u16,
    },
    /// An inflight region from another back-end.
    #[error(
        "ring {index}: the inflight region says that {count} chains are in flight, which only another kind of back-end \
         leaves; reset the device"
    )]
    InflightForeign {
        /// The ring.
        index: u16,
        /// How many chains are marked.
        count: usize,
    },

    /// The file of ring positions cannot be used.
    #[error("{}: {step} failed: {source}; it keeps where packed rings stand: check --state-dir", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// The step.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A path too long for a socket.
    #[error("{}: a socket path can have {max} bytes; choose a shorter one", path.display())]
    SocketPath {
        /// The path.
        path: PathBuf,
        /// The limit in bytes.
        max: usize,
    },
    /// Somebody else serves this socket.
    #[error("{}: another process is listening there; stop it or choose another path", path.display())]
    SocketInUse {
        /// The path.
        path: PathBuf,
    },
    /// The path exists and is something else.
    #[error("{}: exists and is not a socket; remove it or choose another path", path.display())]
    SocketNotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The kernel refused something about a socket.
    #[error("{}: {step} failed: {source}; check that the directory exists and may be written", path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// The step.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel refused something else.
    #[error("{step} failed: {source}")]
    System {
        /// The step.
        step: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The port would not run the queue.
    #[error(transparent)]
    Port(Box<pmd::port::PortError>),
}
