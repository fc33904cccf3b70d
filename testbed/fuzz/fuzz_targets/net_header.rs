//! The header before each frame (virtio 1.3, 5.1.6): one that lies to the driver, and one that is spread over the pieces of a
//! chain to the device.
#![no_main]

use arbitrary::Arbitrary;
use backend::queue::config::Position;
use pmd::port::Burst;
use pmd::virtio::spec::{DESC_F_NEXT, DescMeta, header_len};
use testbed::hostile::judge;
use testbed::rings::{Direction, Guest, Setup, bytes_of};

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
    let sets = direction.split_sets();
    Setup { scratch: 1 << 16, ..testbed_fuzz::small(sets[usize::from(set) % sets.len()]) }
}

fn to_driver(set: u8, completions: &[Completion]) {
    let guest = Guest::new(&setup(set, Direction::ToGuest)).expect("memory");
    let raw = guest.raw().expect("a ring");
    let mut driver = guest.driver_rx().expect("memory");
    let mut burst = Burst::new(32);
    let mut seen = 0_u16;
    for completion in completions.iter().take(512) {
        if raw.avail_idx() != seen {
            let head = raw.offered(seen);
            seen = seen.wrapping_add(1);
            let (addr, meta) = raw.described(head);
            guest.bytes(addr, meta.len).expect("the driver's own buffer").write(&completion.header);
            raw.complete(head, completion.len.into());
        }
        if completion.poll {
            let came = driver.queue.rx_burst(&mut burst);
            assert_eq!(judge(&mut burst), came);
        }
    }
    drop(driver);
    assert_eq!(guest.pool.mempool().in_use(), 0, "mbufs are missing");
}

fn to_device(set: u8, bytes: &[u8], pieces: &[u8]) {
    let setup = setup(set, Direction::FromGuest);
    let (guest, host) = (Guest::new(&setup).expect("memory"), testbed_fuzz::host_pool(&setup));
    let raw = guest.raw().expect("a ring");
    let mut device = guest.device_from_guest(&Position::default(), &host).expect("a ring");
    let bytes = &bytes[..bytes.len().min(1 << 12)];
    let scratch = guest.arena().alloc(bytes.len().max(1), 64).expect("scratch memory");
    scratch.bytes(0, bytes.len()).write(bytes);
    // A chain of at most 16 pieces; the last one has the rest.
    let (mut at, mut index) = (0, 0_u16);
    for piece in pieces.iter().take(15).map(|&len| usize::from(len)) {
        let len = piece.min(bytes.len() - at);
        raw.describe(index, scratch.iova(at), DescMeta { len: len as u32, flags: DESC_F_NEXT, next: index + 1 });
        (at, index) = (at + len, index + 1);
    }
    raw.describe(index, scratch.iova(at), DescMeta { len: (bytes.len() - at) as u32, flags: 0, next: 0 });
    raw.offer(0);
    let mut burst = Burst::new(32);
    let came = device.queue.rx_burst(&mut burst);
    let frame = bytes.get(header_len(guest.features())..).filter(|frame| frame.len() >= 14);
    // A piece of no bytes may be refused.
    if came > 0 || pieces.is_empty() {
        assert_eq!(burst.as_slice().first().and_then(bytes_of).as_deref(), frame);
    }
    burst.free();
    drop(device);
    assert_eq!(host.mempool().in_use(), 0, "mbufs are missing");
}
