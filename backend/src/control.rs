//! The control thread: one epoll loop over all sockets. It never waits for a peer, so that none can hold up another.
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tracing::error;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::session::Device;

/// How long a peer may take for one message, and for reading a reply, in milliseconds.
const MESSAGE_TIMEOUT_MS_MAX: u64 = 5000;
/// How often time limits, lost memory and reconnections are looked at, in milliseconds.
const TICK_MS: i32 = 100;
/// Events taken from the kernel at a time.
const EVENTS_MAX: usize = 64;
/// The token of `wake`; endpoints use their place in the list, twice (see `Endpoint::register`).
const WAKE: u64 = u64::MAX;

/// Which side makes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// We listen, and the front-end connects.
    Server,
    /// The front-end listens, and we connect, once a second until it works, and again after a disconnect.
    Client,
}

/// The control plane of any number of devices. Dropping it ends all connections, stops all rings and removes the
/// sockets.
#[derive(Debug)]
pub struct Control {
    line: Line,
    next: AtomicU64,
    thread: Option<JoinHandle<()>>,
}

/// What the control thread is told.
#[derive(Debug)]
enum Command {
    Add(u64, Box<Endpoint>),
    /// Ends it; what was promised by then is dropped with the sender.
    Remove(u64, Sender<()>),
    Quit,
}

/// The way to the control thread.
#[derive(Clone, Debug)]
struct Line {
    commands: Sender<Command>,
    wake: Arc<EventFd>,
}

impl Line {
    fn send(&self, command: Command) -> Result<(), Error> {
        let gone = |_| Error::System { step: "reaching the control thread", source: io::ErrorKind::BrokenPipe.into() };
        self.commands.send(command).map_err(gone)?;
        self.wake.write(1).map_err(|source| Error::System { step: "waking the control thread", source })
    }
}

/// A device that is being served: until [`end`](Self::end), or else as long as its [`Control`] lives.
#[derive(Debug)]
pub struct Served {
    line: Line,
    id: u64,
}

impl Served {
    /// Ends the connection, stops its rings and removes the socket; done when this returns.
    pub fn end(&self) {
        let (done, ended) = mpsc::channel();
        // A control thread that is gone has done it already; one that goes meanwhile drops `done`.
        if self.line.send(Command::Remove(self.id, done)).is_ok() {
            let _ = ended.recv();
        }
    }
}

impl Control {
    /// Starts the control thread.
    ///
    /// # Errors
    /// [`Error::System`] if there are no more descriptors or threads.
    pub fn new() -> Result<Self, Error> {
        Self::with_message_timeout(Duration::from_millis(MESSAGE_TIMEOUT_MS_MAX))
    }

    /// Starts the control thread with another limit for half messages and unread replies than 5 s.
    ///
    /// # Errors
    /// As [`Control::new`].
    pub fn with_message_timeout(message_timeout: Duration) -> Result<Self, Error> {
        let failed = |step| move |source| Error::System { step, source };
        let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map(Arc::new).map_err(failed("creating an eventfd"))?;
        let epoll = Epoll::new().map_err(failed("creating an epoll instance"))?;
        epoll
            .ctl(ControlOperation::Add, wake.as_raw_fd(), EpollEvent::new(EventSet::IN, WAKE))
            .map_err(failed("watching an eventfd"))?;
        let (commands, incoming) = mpsc::channel();
        let server = Server { epoll, wake: Arc::clone(&wake), incoming, endpoints: Vec::new(), message_timeout };
        let thread = thread::Builder::new().name("control".to_owned());
        let thread = thread.spawn(move || server.run()).map_err(failed("starting the control thread"))?;
        Ok(Self { line: Line { commands, wake }, next: AtomicU64::new(0), thread: Some(thread) })
    }

    /// Serves `device` at the socket `path`, one front-end at a time.
    ///
    /// # Errors
    /// One of [`Error`]'s `Socket…` variants if the path cannot be used; a client's missing server is none.
    pub fn add(&self, path: &Path, mode: Mode, device: Box<dyn Device>) -> Result<Served, Error> {
        let endpoint = Endpoint::new(path, mode, device)?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.line.send(Command::Add(id, Box::new(endpoint)))?;
        Ok(Served { line: self.line.clone(), id })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Fails only if the thread has ended.
        let _ = self.line.send(Command::Quit);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            error!("the control thread has panicked");
        }
    }
}

/// What the control thread owns.
struct Server {
    epoll: Epoll,
    wake: Arc<EventFd>,
    incoming: Receiver<Command>,
    /// By place; a place that was left is taken again.
    endpoints: Vec<Option<(u64, Box<Endpoint>)>>,
    message_timeout: Duration,
}

impl Server {
    fn run(mut self) {
        let mut events = [EpollEvent::default(); EVENTS_MAX];
        loop {
            let count = match self.epoll.wait(TICK_MS, &mut events) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return error!("the control thread ends: epoll_wait failed: {e}"),
            };
            for event in &events[..count] {
                if event.data() != WAKE {
                    let place = usize::try_from(event.data() / 2).unwrap_or(usize::MAX);
                    if let Some(Some((_, endpoint))) = self.endpoints.get_mut(place) {
                        endpoint.ready(&self.epoll, event.data());
                    }
                } else if !self.take_commands() {
                    return;
                }
            }
            for (_, endpoint) in self.endpoints.iter_mut().flatten() {
                endpoint.tick(&self.epoll, self.message_timeout);
            }
        }
    }

    /// Does as told; `false` if the thread is to end.
    fn take_commands(&mut self) -> bool {
        let _ = self.wake.read();
        while let Ok(command) = self.incoming.try_recv() {
            match command {
                Command::Add(id, mut endpoint) => {
                    let place = self.endpoints.iter().position(Option::is_none).unwrap_or(self.endpoints.len());
                    endpoint.register(&self.epoll, place as u64 * 2);
                    if place == self.endpoints.len() {
                        self.endpoints.push(None);
                    }
                    self.endpoints[place] = Some((id, endpoint));
                }
                Command::Remove(id, _done) => {
                    let served =
                        |place: &&mut Option<(u64, Box<Endpoint>)>| place.as_ref().is_some_and(|(i, _)| *i == id);
                    // Its descriptors leave the epoll instance as they are closed.
                    drop(self.endpoints.iter_mut().find(served).and_then(Option::take));
                }
                Command::Quit => return false,
            }
        }
        true
    }
}
