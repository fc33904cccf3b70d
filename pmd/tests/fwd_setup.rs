//! How ports, queues and workers come together, and what is refused.

mod fwd_support;

use fwd_support::{Bench, config, open_pair, pair, pool};
use pmd::fwd::{Engine, ForwardConfig, ForwardError, Forwarder, PortSetup, cache_size, mbufs_needed, open_port};
use pmd::port::Port;

fn boxed(ports: impl IntoIterator<Item = impl Port + 'static>) -> Vec<Box<dyn Port>> {
    ports.into_iter().map(|port| Box::new(port) as Box<dyn Port>).collect()
}

/// `(rx port, rx queue, tx port, tx queue, worker)` of every stream of a forwarder on `ports` ports.
fn streams(ports: usize, queues: u16, cpus: usize) -> Vec<(usize, u16, usize, u16, usize)> {
    let pool = pool(2048);
    let pairs = (0..ports).map(|_| open_pair(["near", "far"], queues, 64, &pool).into_iter().next().unwrap());
    let cpus = pmd::sys::cpus_allowed().unwrap().into_iter().take(cpus).collect();
    let mut forwarder = Forwarder::new(boxed(pairs), &ForwardConfig { cpus, ..config(&pool) }).unwrap();
    let stats = forwarder.stats();
    stats.streams.iter().map(|s| (s.rx_port, s.rx_queue, s.tx_port, s.tx_queue, s.worker)).collect()
}

#[test]
fn a_single_port_forwards_to_itself_queue_by_queue() {
    assert_eq!(streams(1, 3, 1), [(0, 0, 0, 0, 0), (0, 1, 0, 1, 0), (0, 2, 0, 2, 0)]);
}

#[test]
fn ports_are_paired_and_an_odd_last_one_forwards_to_itself() {
    assert_eq!(streams(3, 1, 1), [(0, 0, 1, 0, 0), (1, 0, 0, 0, 0), (2, 0, 2, 0, 0)]);
}

#[test]
fn queues_are_dealt_to_the_workers_in_turn() {
    if pmd::sys::cpus_allowed().unwrap().len() < 2 {
        return;
    }
    let workers: Vec<_> = streams(1, 5, 2).iter().map(|stream| stream.4).collect();
    assert_eq!(workers, [0, 1, 0, 1, 0]);
}

#[test]
fn every_worker_runs_its_queues_and_one_without_any_just_waits() {
    let pool = pool(2048);
    let [near, far] = open_pair(["near", "far"], 1, 64, &pool);
    let cpus = pmd::sys::cpus_allowed().unwrap().into_iter().take(2).collect();
    let mut forwarder = Forwarder::new(boxed([near]), &ForwardConfig { cpus, ..config(&pool) }).unwrap();
    forwarder.start(Engine::TxOnly, 0).unwrap();
    fwd_support::until("frames", || far.rx_queue_count(0) == 64);
    forwarder.stop().unwrap();
    let mut far = far;
    far.stop().unwrap();
    let report = forwarder.shutdown();
    assert!(report.ok, "{:?}", report.errors);
}

#[test]
fn mbufs_that_are_not_home_at_the_end_are_named_with_their_number() {
    let bench = Bench::new(64, |_| ());
    let kept = [bench.pool.alloc().unwrap(), bench.pool.alloc().unwrap()];
    let report = bench.end();
    let problem = "2 of the 4096 mbufs of pool mbufs are not home; whoever holds them must free them";
    assert_eq!((report.ok, report.errors), (false, vec![problem.to_owned()]));
    drop(kept);
}

#[test]
fn a_dropped_forwarder_ends_its_workers() {
    let pool = pool(2048);
    let [near, far] = open_pair(["near", "far"], 1, 64, &pool);
    let mut forwarder = Forwarder::new(boxed([near]), &config(&pool)).unwrap();
    forwarder.start(Engine::TxOnly, 0).unwrap();
    drop(forwarder);
    drop(far);
    assert_eq!(pool.mempool().in_use(), 0);
}

#[test]
fn impossible_configurations_are_refused_with_the_limit() {
    let pool = pool(2048);
    let refused = |change: &dyn Fn(&mut ForwardConfig), ports: Vec<Box<dyn Port>>| {
        let mut config = config(&pool);
        change(&mut config);
        Forwarder::new(ports, &config).err().unwrap().to_string()
    };
    let one = || boxed(open_pair(["near", "far"], 1, 64, &pool).into_iter().take(1));
    assert_eq!(refused(&|_| (), vec![]), "number of ports 0 is outside 1..=32");
    assert_eq!(refused(&|c| c.burst = 0, one()), "burst 0 is outside 1..=512");
    assert_eq!(refused(&|c| c.burst = 513, one()), "burst 513 is outside 1..=512");
    assert_eq!(refused(&|c| c.frame = 59, one()), "frame length 59 is outside 60..=9000");
    assert_eq!(refused(&|c| c.frame = 9001, one()), "frame length 9001 is outside 60..=9000");
    let twice = refused(&|c| c.cpus = vec![0, 1, 0], one());
    assert_eq!(twice, "CPU 0 is named twice; name each CPU once, for a worker needs one of its own");
    let missing = refused(&|c| c.cpus = vec![1023], one());
    assert!(missing.starts_with("CPU 1023 cannot be used (Invalid argument"), "{missing}");
}

#[test]
fn paired_ports_with_different_numbers_of_queues_are_refused() {
    let pool = pool(2048);
    let [a, _] = open_pair(["a", "x"], 2, 64, &pool);
    let [b, _] = open_pair(["b", "y"], 1, 64, &pool);
    let error = Forwarder::new(boxed([a, b]), &config(&pool)).err().unwrap();
    assert_eq!(
        error.to_string(),
        "port a has 2 receive queues, but port b, to which it forwards, has 1 transmit queues; give both the same number (queues=N)"
    );
}

#[test]
fn a_queue_that_another_worker_has_is_refused() {
    let pool = pool(2048);
    let [near, _far] = open_pair(["near", "far"], 1, 64, &pool);
    let taken = near.rx(0).unwrap();
    assert!(matches!(Forwarder::new(boxed([near]), &config(&pool)), Err(ForwardError::Port(_))));
    drop(taken);
}

#[test]
fn more_queues_than_the_port_has_are_refused() {
    let [mut port, _] = pair(["near", "far"], 1, 64);
    let setup = PortSetup { queues: 2, size: 0, pool: pool(64), rx_path: None, tx_path: None, frame_max: 0 };
    assert_eq!(open_port(&mut port, &setup).unwrap_err().to_string(), "port near: number of queues 2 is outside 1..=1");
}

#[test]
fn pools_are_sized_for_full_rings_full_caches_and_bursts_in_hand() {
    assert_eq!([1, 32, 128, 200, 512].map(cache_size), [256, 256, 256, 400, 512]);
    assert_eq!(mbufs_needed(2048, 2, 256, 32, 5).unwrap(), 2048 + 2 * (256 + 320) + 512);
    assert!(matches!(mbufs_needed(1 << 31, 1, 256, 32, 1), Err(ForwardError::Range { .. })));
}
