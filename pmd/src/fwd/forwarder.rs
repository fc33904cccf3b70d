//! The forwarder: ports, workers, and the thread that tells them what to do.

use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use tracing::info;

use super::engine::{Macs, Stream, StreamCounters};
use super::generate::Generator;
use super::stats::{Counts, FinalReport, FwdStats, Pages, PortState, PortStats, StreamStats};
use super::worker::{Crew, Job, Orders, take_seat};
use super::{Engine, FRAME_MAX, FRAME_MIN, ForwardError, PORTS_MAX};
use crate::mbuf::MbufPool;
use crate::mempool::WORKERS_MAX;
use crate::port::{BURST_MAX, Burst, Link, Port};

/// How a forwarder is to work.
#[derive(Clone, Debug)]
pub struct ForwardConfig {
    /// Most packets at a time, 1..=[`BURST_MAX`].
    pub burst: usize,
    /// Length of generated frames, in bytes without FCS, [`FRAME_MIN`]..=[`FRAME_MAX`].
    pub frame: usize,
    /// Whether each generated frame carries its number within its stream: 64 bits, big-endian, first in the UDP payload.
    pub sequence: bool,
    /// The CPUs, one worker each; empty: one worker, wherever the kernel puts it.
    pub cpus: Vec<usize>,
    /// Where generated frames come from. It must be empty-handed at the end.
    pub pool: MbufPool,
    /// Other pools that the ports use, which must be so, too.
    pub more_pools: Vec<MbufPool>,
}

/// Streams between ports, and the workers that run them.
///
/// It belongs to the control thread. If it is dropped without [`shutdown`](Self::shutdown), its workers end, too.
pub struct Forwarder {
    ports: Vec<Box<dyn Port>>,
    pools: Vec<MbufPool>,
    pages: Pages,
    streams: Vec<(StreamStats, Arc<StreamCounters>)>,
    orders: Arc<Orders>,
    workers: Vec<JoinHandle<()>>,
    /// What was last told about each port.
    told: Vec<String>,
    since: Instant,
}

impl Forwarder {
    /// Starts the workers, which wait. The ports are started already (see [`open_port`](super::open_port)).
    ///
    /// # Errors
    /// [`ForwardError`]; no worker is left then.
    pub fn new(ports: Vec<Box<dyn Port>>, config: &ForwardConfig) -> Result<Self, ForwardError> {
        check(config, ports.len())?;
        let workers = config.cpus.len().max(1);
        let mut pools = config.more_pools.clone();
        pools.push(config.pool.clone());
        let arena = config.pool.arena();
        let mut forwarder = Self {
            told: vec![String::new(); ports.len()],
            ports,
            pools,
            pages: Pages { page_size: arena.page_size(), advice: arena.advice() },
            streams: Vec::new(),
            orders: Orders::new(),
            workers: Vec::new(),
            since: Instant::now(),
        };
        let mut dealt: Vec<Vec<Stream>> = (0..workers).map(|_| Vec::new()).collect();
        for (number, mut place) in forwarder.places()?.into_iter().enumerate() {
            place.worker = number % workers;
            let stream = forwarder.stream(&place, config)?;
            forwarder.streams.push((place, Arc::clone(&stream.counters)));
            dealt[number % workers].push(stream);
        }
        for streams in dealt {
            forwarder.spawn(config, streams)?;
        }
        Ok(forwarder)
    }

    /// Where streams go from and to.
    fn places(&self) -> Result<Vec<StreamStats>, ForwardError> {
        let mut places = Vec::new();
        for (rx_port, from) in self.ports.iter().enumerate() {
            let tx_port = Some(rx_port ^ 1).filter(|&port| port < self.ports.len()).unwrap_or(rx_port);
            let to = &self.ports[tx_port];
            let (rx_queues, tx_queues) = (from.slots().rx.len(), to.slots().tx.len());
            if rx_queues > tx_queues {
                let (from, to) = (from.info().address, to.info().address);
                return Err(ForwardError::Queues { from, rx_queues, to, tx_queues });
            }
            for queue in 0..rx_queues as u16 {
                let place =
                    StreamStats { rx_port, rx_queue: queue, tx_port, tx_queue: queue, ..StreamStats::default() };
                places.push(place);
            }
        }
        Ok(places)
    }

    fn stream(&self, place: &StreamStats, config: &ForwardConfig) -> Result<Stream, ForwardError> {
        let to = &self.ports[place.tx_port];
        let macs = Macs::new(place.tx_port, to.info().mac);
        Ok(Stream {
            rx: self.ports[place.rx_port].rx(place.rx_queue)?,
            tx: to.tx(place.tx_queue)?,
            burst: Burst::new(config.burst),
            macs,
            generator: Generator::new(&config.pool, macs.header, config.frame, config.burst, config.sequence),
            idle: 0,
            counters: Arc::default(),
        })
    }

    /// Starts the next worker, and waits until it has its CPU and its caches.
    fn spawn(&mut self, config: &ForwardConfig, streams: Vec<Stream>) -> Result<(), ForwardError> {
        let number = self.workers.len();
        let cpu = config.cpus.get(number).copied();
        let crew = Crew { streams, orders: Arc::clone(&self.orders) };
        let (answer, answered) = mpsc::channel();
        let body = move || match take_seat(cpu) {
            Ok(_seat) => {
                // The one who waits for the answer does so until it comes.
                let _ = answer.send(Ok(()));
                crew.follow();
            }
            Err(error) => {
                let _ = answer.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name(format!("worker-{number}")).spawn(body);
        let thread = thread.map_err(|source| ForwardError::Thread { worker: number, source })?;
        answered.recv().unwrap_or(Err(ForwardError::Panicked(number)))?;
        self.workers.push(thread);
        Ok(())
    }

    /// Lets every worker run `engine`, in place of the present one, after it has sent `tx_first` generated bursts on each of
    /// its streams. Returns when all have left their present engine.
    ///
    /// # Errors
    /// [`ForwardError::Stuck`].
    pub fn start(&mut self, engine: Engine, tx_first: u32) -> Result<(), ForwardError> {
        self.orders.give(Job::Run { engine, tx_first }, self.workers.len())
    }

    /// Ends the engine. Returns when every worker is parked; frames that waited to be sent are freed and counted.
    ///
    /// # Errors
    /// [`ForwardError::Stuck`].
    pub fn stop(&mut self) -> Result<(), ForwardError> {
        self.orders.give(Job::Idle, self.workers.len())
    }

    /// What the memory of generated frames consists of.
    pub fn pages(&self) -> Pages {
        self.pages.clone()
    }

    /// Looks after the ports' peers, see [`Port::recover`]; to be called once a second or so. What has changed is logged.
    pub fn recover(&mut self) {
        for (port, told) in self.ports.iter_mut().zip(&mut self.told) {
            let news = match port.recover() {
                Ok(Link::Up) => "the link is up".to_owned(),
                Ok(Link::Down) => "the link is down".to_owned(),
                Err(error) => error.to_string(),
            };
            if *told != news {
                info!("port {}: {news}", port.info().address);
                *told = news;
            }
        }
    }

    /// How the ports stand.
    pub fn ports(&mut self) -> Vec<PortState> {
        self.ports.iter_mut().map(|port| state(port.as_mut())).collect()
    }

    /// What was counted so far. While an engine runs, the counters are from slightly different moments.
    pub fn stats(&mut self) -> FwdStats {
        let ports = self.ports.iter_mut().map(|port| PortStats {
            state: state(port.as_mut()),
            rx: Counts::from(&port.rx_stats()),
            tx: Counts::from(&port.tx_stats()),
        });
        let ports = ports.collect();
        let streams = self.streams.iter().map(|(place, counters)| StreamStats {
            rx: counters.rx.get(),
            tx: counters.tx.get(),
            tx_dropped: counters.tx_dropped.get(),
            generated: counters.generated.get(),
            ..place.clone()
        });
        FwdStats { time_s: self.since.elapsed().as_secs_f64(), ports, streams: streams.collect() }
    }

    /// Ends the workers, stops the ports, and looks whether every mbuf is home.
    #[must_use]
    pub fn shutdown(mut self) -> FinalReport {
        let mut errors = self.end_workers();
        // While the ports are up, so that their state is that of the run.
        let mut stats = self.stats();
        for (port, stats) in self.ports.iter_mut().zip(&mut stats.ports) {
            errors.extend(port.stop().err().map(ForwardError::from));
            // Stopping counts, too: what was on its way is reaped or dropped.
            (stats.rx, stats.tx) = (Counts::from(&port.rx_stats()), Counts::from(&port.tx_stats()));
        }
        for pool in &self.pools {
            let (out, count, name) = (pool.mempool().in_use(), pool.mempool().count(), pool.mempool().name());
            if out > 0 {
                errors.push(ForwardError::MbufsOut { pool: name.to_owned(), out, count });
            }
        }
        let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
        FinalReport { ok: errors.is_empty(), errors, stats }
    }

    fn end_workers(&mut self) -> Vec<ForwardError> {
        if self.workers.is_empty() {
            return Vec::new();
        }
        let stuck = self.orders.give(Job::Quit, self.workers.len()).err();
        let mut errors = Vec::new();
        for (number, worker) in self.workers.drain(..).enumerate() {
            // One that did not take up the order is not waited for.
            if (stuck.is_none() || worker.is_finished()) && worker.join().is_err() {
                errors.push(ForwardError::Panicked(number));
            }
        }
        errors.extend(stuck);
        errors
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.end_workers();
    }
}

fn state(port: &mut dyn Port) -> PortState {
    PortState {
        address: port.info().address,
        link: if port.link() == Link::Up { "up" } else { "down" }.to_owned(),
        rx_path: port.rx_path(0).map(str::to_owned),
        tx_path: port.tx_path(0).map(str::to_owned),
    }
}

fn check(config: &ForwardConfig, ports: usize) -> Result<(), ForwardError> {
    for (what, value, min, max) in [
        ("number of ports", ports, 1, PORTS_MAX),
        ("burst", config.burst, 1, BURST_MAX),
        ("frame length", config.frame, FRAME_MIN, FRAME_MAX),
        ("number of CPUs", config.cpus.len(), 0, WORKERS_MAX),
    ] {
        if !(min..=max).contains(&value) {
            return Err(ForwardError::Range { what, value, min, max });
        }
    }
    let twice = |(i, cpu): &(usize, &usize)| config.cpus[..*i].contains(cpu);
    match config.cpus.iter().enumerate().find(twice) {
        Some((_, &cpu)) => Err(ForwardError::CpuTwice(cpu)),
        None => Ok(()),
    }
}
