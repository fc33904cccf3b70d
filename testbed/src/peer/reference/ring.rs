//! Bursts out of and into one ring, all ring work by `virtio-queue`, all memory accesses by `vm-memory`.

use std::io::{Read, Write};
use std::sync::atomic::{Ordering, fence};

use vhost_user_backend::VringState;
use virtio_queue::{DescriptorChain, Error as QueueError, Queue, QueueOwnedT, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryMmap};

use super::device::{MRG_RXBUF, VERSION_1};

/// The longest frame taken from a guest, in bytes: more than any it has a right to send without segmentation offload.
const FRAME_LEN_MAX: usize = 65535;
/// The shortest: an Ethernet header.
const FRAME_LEN_MIN: usize = 14;
/// Where `num_buffers` lies in the header (virtio 1.3, 5.1.6).
const NUM_BUFFERS_AT: usize = 10;
/// The avail flag by which the driver asks for no interrupts (virtio 1.3, 2.7.6).
const NO_INTERRUPT: u16 = 1;

/// What the guest accepted, as far as frames are concerned.
#[derive(Debug, Clone, Copy)]
pub(super) struct Format {
    mergeable: bool,
    /// Bytes of `struct virtio_net_hdr`: `num_buffers` is part of it with either feature (virtio 1.3, 5.1.6.1).
    header_len: usize,
}

impl Format {
    pub(super) fn of(accepted: u64) -> Self {
        let header_len = if accepted & (VERSION_1 | MRG_RXBUF) == 0 { NUM_BUFFERS_AT } else { NUM_BUFFERS_AT + 2 };
        Self { mergeable: accepted & MRG_RXBUF != 0, header_len }
    }
}

/// What [`take`] found.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) frames: usize,
    pub(super) bad_chain: u64,
    pub(super) bad_length: u64,
    pub(super) bad_ring: bool,
}

/// Why a frame was not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    NoBuffer,
    TooLong,
    BadRing,
}

/// Takes up to `frames.len()` frames from a running ring, without their headers, and completes their chains.
pub(super) fn take(state: &mut VringState, memory: &GuestMemoryMmap, format: Format, frames: &mut [Vec<u8>]) -> Taken {
    let mut taken = Taken::default();
    if !running(state) {
        return taken;
    }
    let Ok(chains) = state.get_queue_mut().iter(memory).map(|chains| chains.take(frames.len()).collect::<Vec<_>>())
    else {
        taken.bad_ring = true;
        return taken;
    };
    let mut used = Vec::with_capacity(chains.len());
    for chain in chains {
        used.push((chain.head_index(), 0));
        match read_frame(chain, memory, format.header_len, &mut frames[taken.frames]) {
            Ok(true) => taken.frames += 1,
            Ok(false) => taken.bad_length += 1,
            Err(_) => taken.bad_chain += 1,
        }
    }
    taken.bad_ring = complete(state, memory, &used).is_err();
    taken
}

/// Reads what the chain holds behind the header; `false` if that is no frame.
fn read_frame(
    chain: DescriptorChain<&GuestMemoryMmap>,
    memory: &GuestMemoryMmap,
    header_len: usize,
    frame: &mut Vec<u8>,
) -> Result<bool, QueueError> {
    let mut reader = chain.reader(memory)?;
    let Some(len) = reader.available_bytes().checked_sub(header_len) else { return Ok(false) };
    if !(FRAME_LEN_MIN..=FRAME_LEN_MAX).contains(&len) {
        return Ok(false);
    }
    frame.resize(header_len + len, 0);
    reader.read_exact(frame).map_err(|_| QueueError::InvalidChain)?;
    frame.drain(..header_len);
    Ok(true)
}

/// Gives frames to one ring; [`Self::finish`] completes them all at once.
pub(super) struct Giver<'a> {
    state: &'a mut VringState,
    memory: &'a GuestMemoryMmap,
    format: Format,
    /// Head and bytes written of each buffer filled.
    used: Vec<(u16, u32)>,
}

impl<'a> Giver<'a> {
    pub(super) fn new(state: &'a mut VringState, memory: &'a GuestMemoryMmap, format: Format) -> Self {
        Self { state, memory, format, used: Vec::new() }
    }

    /// Lays header and frame into one buffer, or into as many as it takes with `MRG_RXBUF`. If it does not fit, the ring stays
    /// as it was.
    pub(super) fn give(&mut self, frame: &[u8]) -> Result<(), Refusal> {
        if !running(self.state) {
            return Err(Refusal::NoBuffer);
        }
        let Format { mergeable, header_len } = self.format;
        let needed = header_len + frame.len();
        let queue = self.state.get_queue_mut();
        let ring_size = usize::from(queue.size());
        let mut buffers = Vec::new();
        let mut room = 0;
        let mut refusal = None;
        for chain in queue.iter(self.memory).map_err(|_| Refusal::BadRing)? {
            let head = chain.head_index();
            let Ok(writer) = chain.writer(self.memory) else {
                refusal = Some(Refusal::BadRing);
                queue_back(queue, 1);
                break;
            };
            room += writer.available_bytes();
            buffers.push((head, writer));
            if room >= needed || !mergeable || buffers.len() == ring_size {
                break;
            }
        }
        if room < needed {
            queue_back(queue, buffers.len());
            let all = buffers.len() == if mergeable { ring_size } else { 1 };
            return Err(refusal.unwrap_or(if all { Refusal::TooLong } else { Refusal::NoBuffer }));
        }

        let mut header = [0; NUM_BUFFERS_AT + 2];
        let count = u16::try_from(buffers.len()).unwrap_or(u16::MAX); // at most the ring's size, 32768
        header[NUM_BUFFERS_AT..].copy_from_slice(&count.to_le_bytes());
        let bytes = [&header[..header_len], frame].concat();
        let mut rest = &bytes[..];
        for (head, mut writer) in buffers {
            let (here, later) = rest.split_at(rest.len().min(writer.available_bytes()));
            writer.write_all(here).map_err(|_| Refusal::BadRing)?;
            self.used.push((head, u32::try_from(here.len()).unwrap_or(u32::MAX)));
            rest = later;
        }
        Ok(())
    }

    /// Completes what was given.
    pub(super) fn finish(self) -> Result<(), QueueError> {
        complete(self.state, self.memory, &self.used)
    }
}

/// Gives the last `count` chains back to the queue, as if they had not been taken.
fn queue_back(queue: &mut Queue, count: usize) {
    for _ in 0..count {
        queue.go_to_previous_position();
    }
}

fn running(state: &VringState) -> bool {
    state.is_enabled() && state.get_queue().ready()
}

/// Puts `used` into the used ring and publishes all of it by one store of the index (virtio 1.3, 2.7.8), then interrupts the
/// driver unless it asked for none. `Queue::add_used` would show the driver the first buffers of a frame without the last.
fn complete(state: &mut VringState, memory: &GuestMemoryMmap, used: &[(u16, u32)]) -> Result<(), QueueError> {
    if used.is_empty() {
        return Ok(());
    }
    let queue = state.get_queue_mut();
    let ring = GuestAddress(queue.used_ring());
    let offset = |bytes| ring.checked_add(bytes).ok_or(QueueError::AddressOverflow);
    let mut index = queue.next_used();
    for &(head, len) in used {
        let slot = u64::from(index % queue.size());
        let element = u64::from(head) | u64::from(len) << 32;
        memory.write_obj(element.to_le(), offset(4 + 8 * slot)?).map_err(QueueError::GuestMemory)?;
        index = index.wrapping_add(1);
    }
    queue.set_next_used(index);
    memory.store(index.to_le(), offset(2)?, Ordering::Release).map_err(QueueError::GuestMemory)?;

    // The driver clears its flag, then looks at the index; we store the index, then look at the flag (2.7.7).
    fence(Ordering::SeqCst);
    let flags: u16 =
        memory.load(GuestAddress(queue.avail_ring()), Ordering::Relaxed).map_err(QueueError::GuestMemory)?;
    if u16::from_le(flags) & NO_INTERRUPT == 0 {
        // A driver that does not drain its eventfd loses nothing but this interrupt.
        let _ = state.signal_used_queue();
    }
    Ok(())
}
