//! The header before each frame (virtio 1.3, 5.1.6): one that lies to the driver, and one that is spread over the pieces of a
//! chain to the device.
#![no_main]

use arbitrary::Arbitrary;
use backend::queue::config::Position;
use pmd::port::{Burst, Fault};
use pmd::virtio::spec::{DESC_F_NEXT, DescMeta, FRAME_LEN_MIN, PackedPos, feature, header_len};
use testbed::hostile::judge;
use testbed::rings::{Direction, Guest, RawPackedRing, RawRing, Setup, bytes_of};

/// A buffer as the device completes it.
#[derive(Arbitrary, Debug)]
struct Completion {
    header: [u8; 12],
    len: u16,
    poll: bool,
}

#[derive(Arbitrary, Debug)]
enum Input {
    Driver { set: u8, completions: Vec<Completion> },
    Device { set: u8, bytes: Vec<u8>, pieces: Vec<u8> },
}

libfuzzer_sys::fuzz_target!(|input: Input| match input {
    Input::Driver { set, completions } => to_driver(set, &completions),
    Input::Device { set, bytes, pieces } => to_device(set, &bytes, &pieces),
});

fn setup(set: u8, direction: Direction) -> Setup {
    let sets = direction.feature_sets();
    Setup { scratch: 1 << 16, ..testbed_fuzz::small(sets[usize::from(set) % sets.len()]) }
}

/// The other end of the ring, and where in it that is.
enum Raw {
    Split(RawRing, u16),
    Packed(RawPackedRing, PackedPos),
}

impl Raw {
    fn of(guest: &Guest) -> Self {
        if guest.features() & feature::RING_PACKED == 0 {
            Self::Split(guest.raw().expect("a ring"), 0)
        } else {
            Self::Packed(guest.raw_packed().expect("a ring"), PackedPos::START)
        }
    }

    /// Completes the driver's next buffer, if there is one, as `completion` says; its length.
    fn complete(&mut self, guest: &Guest, completion: &Completion) -> Option<u32> {
        let fill = |addr, len| guest.bytes(addr, len).expect("the driver's own buffer").write(&completion.header);
        match self {
            Self::Split(raw, at) if raw.avail_idx() != *at => {
                let head = raw.offered(*at);
                *at = at.wrapping_add(1);
                let (addr, meta) = raw.described(head);
                fill(addr, meta.len);
                raw.complete(head, completion.len.into());
                Some(meta.len)
            }
            Self::Packed(raw, at) if raw.described(at.slot()).1.is_avail(*at) => {
                let (addr, meta) = raw.described(at.slot());
                fill(addr, meta.len);
                raw.complete(*at, meta.id, completion.len.into());
                *at = at.advance(1, raw.size());
                Some(meta.len)
            }
            _ => None,
        }
    }

    /// Offers a chain of buffers, addresses and lengths, to a device.
    fn offer(&self, buffers: &[(u64, u32)]) {
        match self {
            Self::Split(raw, _) => {
                for (index, &(addr, len)) in (0_u16..).zip(buffers) {
                    let flags = if usize::from(index) + 1 < buffers.len() { DESC_F_NEXT } else { 0 };
                    raw.describe(index, addr, DescMeta { len, flags, next: index + 1 });
                }
                raw.offer(0);
            }
            Self::Packed(raw, at) => {
                let buffers: Vec<_> = buffers.iter().map(|&(addr, len)| (addr, len, 0)).collect();
                raw.offer(*at, 0, &buffers);
            }
        }
    }
}

fn to_driver(set: u8, completions: &[Completion]) {
    let guest = Guest::new(&setup(set, Direction::ToGuest)).expect("memory");
    let mut driver = guest.driver_rx().expect("memory");
    let mut raw = Raw::of(&guest);
    let mut burst = Burst::new(32);
    let (mut true_claims, mut false_claims) = (0, 0);
    for completion in completions.iter().take(512) {
        if let Some(buffer_len) = raw.complete(&guest, completion) {
            let frame = header_len(guest.features()) as u32 + FRAME_LEN_MIN as u32..=buffer_len;
            *if frame.contains(&completion.len.into()) { &mut true_claims } else { &mut false_claims } += 1;
        }
        if completion.poll {
            let came = driver.queue.rx_burst(&mut burst);
            assert_eq!(judge(&mut burst), came);
        }
    }
    // The rest: no more than the ring holds.
    for _ in 0..64 {
        driver.queue.rx_burst(&mut burst);
        judge(&mut burst);
    }
    let ledger = (driver.stats().packets, driver.stats().dropped());
    if guest.features() & feature::MRG_RXBUF == 0 {
        assert_eq!(ledger, (true_claims, false_claims));
    } else {
        // A frame may have had several of them.
        assert!(ledger.0 + ledger.1 <= true_claims + false_claims, "{ledger:?}");
    }
    drop(driver);
    assert_eq!(guest.pool.mempool().in_use(), 0, "mbufs are missing");
}

fn to_device(set: u8, bytes: &[u8], pieces: &[u8]) {
    let setup = setup(set, Direction::FromGuest);
    let (guest, host) = (Guest::new(&setup).expect("memory"), setup.host_pool().expect("memory"));
    let mut device = guest.device_from_guest(&Position::default(), &host).expect("a ring");
    let bytes = &bytes[..bytes.len().min(1 << 12)];
    let scratch = guest.arena().alloc(bytes.len().max(1), 64).expect("scratch memory");
    scratch.bytes(0, bytes.len()).write(bytes);
    // A chain of at most 16 pieces, empty ones among them; the last one has the rest.
    let (mut buffers, mut at) = (Vec::new(), 0);
    for piece in pieces.iter().take(15).map(|&len| usize::from(len)) {
        let len = piece.min(bytes.len() - at);
        buffers.push((scratch.iova(at), len as u32));
        at += len;
    }
    buffers.push((scratch.iova(at), (bytes.len() - at) as u32));
    Raw::of(&guest).offer(&buffers);
    let mut burst = Burst::new(32);
    let came = device.queue.rx_burst(&mut burst);
    let frame = bytes.get(header_len(guest.features())..).filter(|frame| frame.len() >= FRAME_LEN_MIN);
    assert_eq!(burst.as_slice().first().and_then(bytes_of).as_deref(), frame);
    assert_eq!((came as u64, device.stats().fault(Fault::Short)), if frame.is_some() { (1, 0) } else { (0, 1) });
    burst.free();
    drop(device);
    assert_eq!(host.mempool().in_use(), 0, "mbufs are missing");
}
