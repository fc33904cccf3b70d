//! What the engines do to frames, and that each frame is accounted for.

mod fwd_support;

use fwd_support::{Bench, bytes, config, open_pair, pool, until};
use pmd::fwd::{Engine, FRAME_MAX, FRAME_MIN, FinalReport, Forwarder, StreamStats};
use pmd::port::{Burst, Port};

/// Frame number `i`: 64 bytes that begin with two addresses.
fn frame(i: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..64).map(|at| at ^ 0x55).collect();
    frame[60..].copy_from_slice(&(i as u32).to_be_bytes());
    frame
}

fn frames(count: usize) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(frame)
}

/// The report of a clean end, and its only stream.
fn clean(report: &FinalReport) -> &StreamStats {
    assert!(report.ok && report.errors.is_empty(), "{:?}", report.errors);
    assert_eq!(report.stats.streams.len(), 1);
    &report.stats.streams[0]
}

#[test]
fn rxonly_counts_and_frees_every_frame() {
    let mut bench = Bench::new(64, |_| ());
    bench.forwarder.start(Engine::RxOnly, 0).unwrap();
    bench.send(frames(1000));
    bench.until("all frames", |stats| stats.streams[0].rx == 1000);
    assert!(bench.receive().is_empty());
    let report = bench.end();
    let stream = clean(&report);
    assert_eq!((stream.rx, stream.tx, stream.tx_dropped, stream.generated), (1000, 0, 0, 0));
    let rx = &report.stats.ports[0].rx;
    assert_eq!((rx.packets, rx.bytes, rx.bins.get("64")), (1000, 64_000, 1000));
}

#[test]
fn io_passes_frames_on_unchanged_and_in_order() {
    let mut bench = Bench::new(64, |_| ());
    bench.forwarder.start(Engine::Io, 0).unwrap();
    for round in 0..40 {
        bench.send((0..50).map(|i| frame(round * 50 + i)));
        for (i, mbuf) in bench.receive_exactly(50).iter().enumerate() {
            assert_eq!(bytes(mbuf), frame(round * 50 + i));
        }
    }
    let report = bench.end();
    let stream = clean(&report);
    assert_eq!((stream.rx, stream.tx, stream.tx_dropped), (2000, 2000, 0));
}

#[test]
fn what_io_cannot_send_is_dropped_and_counted() {
    let mut bench = Bench::new(64, |_| ());
    bench.forwarder.start(Engine::Io, 0).unwrap();
    bench.send(frames(500));
    bench.until("all frames", |stats| stats.streams[0].rx == 500);
    bench.forwarder.stop().unwrap();
    let received = bench.receive();
    // The wire holds 64; whoever comes late is lost.
    let expected: Vec<_> = frames(64).collect();
    assert_eq!(received.iter().map(bytes).collect::<Vec<_>>(), expected);
    drop(received);
    let report = bench.end();
    let stream = clean(&report);
    assert_eq!((stream.rx, stream.tx, stream.tx_dropped), (500, 64, 436));
}

#[test]
fn mac_sets_both_addresses_and_nothing_else() {
    let mut bench = Bench::new(64, |_| ());
    bench.forwarder.start(Engine::Mac, 0).unwrap();
    bench.send(frames(40));
    for (i, mbuf) in bench.receive_exactly(40).iter().enumerate() {
        let mut expected = frame(i);
        expected[..12].copy_from_slice(&[2, 0, 0, 0, 0, 0, 2, 0xaa, 0, 0, 0, 1]);
        assert_eq!(bytes(mbuf), expected);
    }
    assert_eq!(clean(&bench.end()).tx, 40);
}

#[test]
fn macswap_swaps_the_addresses_and_leaves_the_rest() {
    let mut bench = Bench::new(64, |_| ());
    bench.forwarder.start(Engine::MacSwap, 0).unwrap();
    // The last one ends within its addresses.
    bench.send(frames(40).chain([vec![7, 8, 9]]));
    let received = bench.receive_exactly(41);
    for (i, mbuf) in received[..40].iter().enumerate() {
        let mut expected = frame(i);
        expected[..12].rotate_left(6);
        assert_eq!(bytes(mbuf), expected);
    }
    assert_eq!(bytes(&received[40]), [7, 8, 9]);
    drop(received);
    assert_eq!(clean(&bench.end()).tx, 41);
}

#[test]
fn txonly_sends_numbered_frames_without_a_gap_and_drops_only_what_waits_at_the_end() {
    let mut bench = Bench::new(64, |config| config.sequence = true);
    bench.forwarder.start(Engine::TxOnly, 0).unwrap();
    let mut numbers = Vec::new();
    until("frames", || {
        let received = bench.receive();
        numbers.extend(received.iter().map(|m| u64::from_be_bytes(bytes(m)[42..50].try_into().unwrap())));
        numbers.len() >= 10_000
    });
    bench.forwarder.stop().unwrap();
    let rest = bench.receive();
    numbers.extend(rest.iter().map(|m| u64::from_be_bytes(bytes(m)[42..50].try_into().unwrap())));
    drop(rest);
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64));

    let report = bench.end();
    let stream = clean(&report);
    assert_eq!(stream.tx, numbers.len() as u64);
    assert_eq!(stream.generated, stream.tx + stream.tx_dropped);
    assert!(stream.tx_dropped <= 32, "{stream:?}");
}

#[test]
fn generated_frames_of_every_length_are_whole_whatever_number_of_mbufs_they_need() {
    for (len, segments) in
        [(FRAME_MIN, 1), (64, 1), (1518, 1), (2048, 1), (2049, 2), (4096, 2), (4097, 3), (FRAME_MAX, 5)]
    {
        let mut bench = Bench::new(8, |config| config.frame = len);
        bench.forwarder.start(Engine::TxOnly, 0).unwrap();
        until("frames", || bench.far_pending() >= 8);
        bench.forwarder.stop().unwrap();
        for mbuf in bench.receive_exactly(8) {
            let frame = bytes(&mbuf);
            assert_eq!((frame.len(), mbuf.pkt_len(), mbuf.nb_segs()), (len, len, segments));
            let word = |at: usize| usize::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
            assert_eq!((word(12), word(16), word(38)), (0x0800, len - 14, len - 34));
            assert_eq!(frame[..12], [2, 0, 0, 0, 0, 0, 2, 0xaa, 0, 0, 0, 1]);
            assert_eq!(frame[26..38], [198, 18, 0, 1, 198, 18, 0, 2, 0, 9, 0, 9]);
            assert!(frame[42..].iter().all(|&byte| byte == 0));
        }
        let report = bench.end();
        let stream = clean(&report);
        assert_eq!(stream.generated, stream.tx + stream.tx_dropped);
    }
}

#[test]
fn a_generator_without_mbufs_sends_less_and_recovers() {
    let mut bench = Bench::new(1024, |_| ());
    let mut hoard = Vec::new();
    while bench.pool.alloc_bulk(&mut hoard, 1).is_ok() {}
    bench.forwarder.start(Engine::TxOnly, 0).unwrap();
    assert!(bench.receive().is_empty());
    hoard.clear();
    bench.until("frames", |stats| stats.streams[0].tx == 1024);
    bench.forwarder.stop().unwrap();
    let received = bench.receive().len() + bench.receive().len();
    let report = bench.end();
    let stream = clean(&report);
    assert_eq!((stream.tx, received), (1024, 1024));
    assert_eq!(stream.generated, stream.tx + stream.tx_dropped);
}

#[test]
fn engines_change_at_run_time_and_no_frame_is_lost_between_them() {
    let mut bench = Bench::new(64, |_| ());
    bench.forwarder.start(Engine::TxOnly, 0).unwrap();
    let mut received = 0;
    until("generated frames", || {
        received += bench.receive().len();
        received >= 500
    });
    bench.forwarder.start(Engine::RxOnly, 0).unwrap();
    received += bench.receive().len();
    bench.send(frames(100));
    bench.until("frames to be freed", |stats| stats.streams[0].rx == 100);
    bench.forwarder.start(Engine::Io, 0).unwrap();
    bench.send(frames(20));
    received += bench.receive_exactly(20).len();
    bench.forwarder.stop().unwrap();

    // Stopped: frames stay on the wire.
    bench.send(frames(7));
    bench.forwarder.start(Engine::MacSwap, 0).unwrap();
    received += bench.receive_exactly(7).len();

    let report = bench.end();
    let stream = clean(&report);
    assert_eq!((stream.rx, stream.tx), (127, received as u64));
    assert_eq!(stream.generated + 27, stream.tx + stream.tx_dropped);
}

#[test]
fn tx_first_sends_so_many_bursts_before_the_engine_starts() {
    let mut bench = Bench::new(512, |config| config.burst = 16);
    bench.forwarder.start(Engine::RxOnly, 3).unwrap();
    assert_eq!(bench.receive_exactly(48).len(), 48);
    bench.send(frames(10));
    bench.until("frames", |stats| stats.streams[0].rx == 10);
    assert!(bench.receive().is_empty());
    let report = bench.end();
    let stream = clean(&report);
    assert_eq!((stream.generated, stream.tx, stream.tx_dropped), (48, 48, 0));
}

#[test]
fn frames_circle_between_two_joined_ports_and_come_home() {
    let pool = pool(4096);
    let ports = open_pair(["a", "b"], 2, 64, &pool);
    let ports = ports.into_iter().map(|port| Box::new(port) as Box<dyn Port>).collect();
    let cpus = pmd::sys::cpus_allowed().unwrap().into_iter().take(2).collect();
    let mut forwarder = Forwarder::new(ports, &pmd::fwd::ForwardConfig { cpus, ..config(&pool) }).unwrap();
    forwarder.start(Engine::Io, 1).unwrap();
    until("a thousand rounds", || forwarder.stats().streams.iter().all(|stream| stream.rx > 32_000));
    let report = forwarder.shutdown();
    assert!(report.ok, "{:?}", report.errors);
    let sum = |count: fn(&StreamStats) -> u64| report.stats.streams.iter().map(count).sum::<u64>();
    assert_eq!(sum(|s| s.generated), 4 * 32);
    // Whatever was generated or received was sent or dropped.
    assert_eq!(sum(|s| s.generated + s.rx), sum(|s| s.tx + s.tx_dropped));
}

#[test]
fn mbufs_that_a_transmit_queue_has_finished_with_come_back_before_they_are_missed() {
    // Neither engine would ever go on if only a full transmit queue were reaped.
    let pool = pool(256);
    let [near, far] = open_pair(["near", "far"], 1, 64, &pool);
    near.keep_sent();
    let mut forwarder = Forwarder::new(vec![Box::new(near)], &config(&pool)).unwrap();
    forwarder.start(Engine::TxOnly, 0).unwrap();
    until("more frames than there are mbufs", || forwarder.stats().streams[0].tx > 1000);

    forwarder.start(Engine::Io, 0).unwrap();
    until("the generated frames", || pool.mempool().in_use() == 0);
    let (mut tx, mut burst) = (far.tx(0).unwrap(), Burst::new(20));
    burst.fill(&pool, 20).unwrap();
    assert_eq!(tx.tx_burst(&mut burst), 20);
    until("the forwarded frames", || forwarder.stats().streams[0].rx == 20 && pool.mempool().in_use() == 0);
    assert!(forwarder.shutdown().ok);
}
