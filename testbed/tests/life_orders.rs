//! Front-ends differ: whatever order they set a queue pair up in, with descriptors for kicks and calls or without, with protocol
//! features or before those were invented, frames go round in the end; and whatever they do to it meanwhile, none is lost.

use std::os::fd::{AsFd, OwnedFd};

use backend::control::{Control, Mode};
use pmd::virtio::spec::{feature, status};
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use testbed::frame::Stream;
use testbed::frontend::{Driver, Frontend, Region};
use testbed::peer::turn;
use testbed::ports::{Echo, Memory, Shape, host, wait_until};
use vhost::vhost_user::message::FrontendReq as Request;
use vmm_sys_util::tempdir::TempDir;

const MBUFS: u32 = 1024;
const SIZE: u16 = 128;
/// Frames under way: their buffers fit into either ring.
const WINDOW: u64 = 16;
const REPLY_ACK: u64 = 1 << 3;
const STATUS: u64 = 1 << 16;
/// The status of a driver that is ready (virtio 1.3, 3.1.1).
const READY: u8 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;

/// What a front-end says, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Features,
    Ready,
    Memory,
    Num(u32),
    Base(u32),
    Place(u32),
    Kick(u32),
    Call(u32),
    Enable(u32),
}

/// How a front-end is.
#[derive(Clone, Debug)]
struct Kind {
    features: u64,
    protocol: bool,
    status: bool,
    /// Of either ring: whether there is a descriptor for kicks, and one for calls.
    notifiers: [(bool, bool); 2],
}

/// What a front-end does to a running pair.
#[derive(Clone, Debug)]
enum Deed {
    /// Disables a ring and enables it again.
    Pause(u32),
    /// Takes a ring back, and gives it again in this order.
    TakeBack(u32, Vec<Step>),
    /// Other descriptors for kicks and calls.
    Notifiers(u32, bool),
    /// The memory in so many regions, the first of them last.
    Memory(u64),
}

fn kinds() -> impl Strategy<Value = Kind> {
    let shapes = prop::sample::select(Shape::all().to_vec());
    (shapes, any::<(bool, bool)>(), any::<[(bool, bool); 2]>()).prop_map(|(shape, (protocol, status), notifiers)| {
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        let features = feature::VERSION_1
            | feature::INDIRECT_DESC
            | bit(shape.packed, feature::RING_PACKED)
            | bit(shape.in_order, feature::IN_ORDER)
            | bit(shape.mergeable, feature::MRG_RXBUF);
        Kind { features, protocol, status: protocol && status, notifiers }
    })
}

fn ring_steps(vring: u32) -> [Step; 5] {
    [Step::Num(vring), Step::Base(vring), Step::Place(vring), Step::Kick(vring), Step::Call(vring)]
}

/// Steps in any order; those that a kind of front-end does not know are left out later.
fn orders() -> impl Strategy<Value = Vec<Step>> {
    let mut steps = vec![Step::Features, Step::Ready, Step::Memory, Step::Enable(0), Step::Enable(1)];
    steps.extend([0, 1].into_iter().flat_map(ring_steps));
    Just(steps).prop_shuffle().prop_map(|mut steps| {
        // The driver is ready once it has agreed on features (virtio 1.3, 3.1.1).
        let place = |step| steps.iter().position(|s| *s == step);
        if let (Some(features), Some(ready)) = (place(Step::Features), place(Step::Ready))
            && ready < features
        {
            steps.swap(features, ready);
        }
        steps
    })
}

fn deeds() -> impl Strategy<Value = Vec<Deed>> {
    let vring = || 0..2_u32;
    let take_back = vring().prop_flat_map(|vring| {
        Just(ring_steps(vring).to_vec()).prop_shuffle().prop_map(move |steps| Deed::TakeBack(vring, steps))
    });
    let deed = prop_oneof![
        vring().prop_map(Deed::Pause),
        take_back,
        (vring(), any::<bool>()).prop_map(|(vring, with)| Deed::Notifiers(vring, with)),
        (1..6_u64).prop_map(Deed::Memory),
    ];
    prop::collection::vec(deed, 0..12)
}

/// A front-end with a queue pair.
struct Session {
    frontend: Frontend,
    kind: Kind,
    bases: [u32; 2],
    eventfd: OwnedFd,
}

impl Session {
    fn step(&self, driver: &Driver, memory: &[Region], step: Step) {
        let Kind { features, protocol, status, notifiers } = &self.kind;
        let (protocol, status) = (*protocol, *status);
        let eventfd = |with: bool| with.then(|| self.eventfd.as_fd());
        let done = match step {
            Step::Features => {
                let bit = if protocol { feature::PROTOCOL_FEATURES } else { 0 };
                self.frontend.tell_u64(Request::SET_FEATURES, features | bit)
            }
            Step::Ready => !status || self.frontend.tell_u64(Request::SET_STATUS, READY.into()),
            Step::Memory => self.frontend.share(memory),
            Step::Num(vring) => self.frontend.tell_ring(Request::SET_VRING_NUM, vring, SIZE.into()),
            Step::Base(vring) => self.frontend.tell_ring(Request::SET_VRING_BASE, vring, self.bases[vring as usize]),
            Step::Place(vring) => self.frontend.place(vring, &driver.layouts[vring as usize]),
            Step::Kick(vring) => {
                self.frontend.notify_by(Request::SET_VRING_KICK, vring, eventfd(notifiers[vring as usize].0))
            }
            Step::Call(vring) => {
                self.frontend.notify_by(Request::SET_VRING_CALL, vring, eventfd(notifiers[vring as usize].1))
            }
            Step::Enable(vring) => !protocol || self.frontend.tell_ring(Request::SET_VRING_ENABLE, vring, 1),
        };
        assert!(done, "{step:?} is refused");
    }

    /// Does something to the running rings of `driver`.
    fn interfere(&mut self, driver: &Driver, memory: &Memory, deed: &Deed) {
        match deed {
            Deed::Pause(vring) if self.kind.protocol => {
                for enable in [0, 1] {
                    assert!(self.frontend.tell_ring(Request::SET_VRING_ENABLE, *vring, enable));
                }
            }
            Deed::Pause(_) => {}
            Deed::TakeBack(vring, steps) => {
                self.bases[*vring as usize] = self.frontend.base(*vring);
                for step in steps {
                    self.step(driver, &[], *step);
                }
            }
            Deed::Notifiers(vring, with) => {
                self.kind.notifiers[*vring as usize] = (*with, *with);
                self.step(driver, &[], Step::Call(*vring));
                self.step(driver, &[], Step::Kick(*vring));
            }
            Deed::Memory(count) => self.step(driver, &regions(driver, memory, *count), Step::Memory),
        }
    }
}

/// The memory in `count` regions, which meet in front of the rings; not in the order of their addresses.
fn regions(driver: &Driver, memory: &Memory, count: u64) -> Vec<Region> {
    let rings = driver.layouts.iter().map(|layout| layout.desc).min().unwrap_or(0) - memory.arena.iova();
    let step = rings / count / 4096 * 4096;
    let mut rest = Region::whole(&memory.arena);
    let mut regions = Vec::new();
    for _ in 1..count {
        let [first, second] = rest.split(step);
        regions.push(first);
        rest = second;
    }
    regions.push(rest);
    regions.rotate_left(1);
    regions
}

#[test]
fn a_queue_pair_runs_whatever_the_order_it_is_set_up_in_and_whatever_is_done_to_it() {
    let _turn = turn();
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let (host_memory, control) = (Memory::new(MBUFS), Control::new().unwrap());
    let port = host(1, &socket, Mode::Server, &host_memory, &control).unwrap();
    let echo = Echo::start(&port).unwrap();

    proptest!(ProptestConfig::with_cases(96), |(kind in kinds(), order in orders(), deeds in deeds())| {
        let frame_max = if kind.features & feature::MRG_RXBUF != 0 { 9000 } else { 1518 };
        let memory = Memory::new(MBUFS);
        let mut driver = Driver::new(kind.features, SIZE, &memory, Stream::new(3, 0, 60..=frame_max));
        let frontend = Frontend::connect(&socket);
        if kind.protocol {
            let _ = frontend.ask_u64(Request::GET_PROTOCOL_FEATURES);
            let features = REPLY_ACK | if kind.status { STATUS } else { 0 };
            prop_assert!(frontend.tell_u64(Request::SET_PROTOCOL_FEATURES, features));
        }
        let bases = [driver.fresh_base(); 2];
        let mut session = Session { frontend, kind, bases, eventfd: eventfd(0, EventfdFlags::empty()).unwrap() };
        let whole = [Region::whole(&memory.arena)];
        for step in &order {
            session.step(&driver, &whole, *step);
        }

        prop_assert!(driver.run(40, WINDOW, |_| {}), "{:?}", driver.report());
        for deed in &deeds {
            for _ in 0..20 {
                driver.round(driver.made() + 1);
            }
            session.interfere(&driver, &memory, deed);
        }
        prop_assert!(driver.run(40, WINDOW, |_| {}), "{:?}", driver.report());
        let report = driver.report();
        prop_assert_eq!((report.good, report.missing), (driver.made(), 0), "{:?}", report);
        for vring in [0, 1] {
            let _ = session.frontend.base(vring);
        }
        drop(driver);
        prop_assert_eq!(memory.out(), 0);
    });
    drop(echo);
    assert!(wait_until(|| host_memory.out() == 0));
}
