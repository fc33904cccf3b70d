//! The control thread: one epoll loop over all sockets. It never waits for a peer, so that none can hold up another.
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, mpsc::TryRecvError};
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
    commands: Sender<Endpoint>,
    wake: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
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
        Ok(Self { commands, wake, thread: Some(thread) })
    }

    /// Serves `device` at the socket `path`, one front-end at a time.
    ///
    /// # Errors
    /// One of [`Error`]'s `Socket…` variants if the path cannot be used; a client's missing server is none.
    pub fn add(&self, path: &Path, mode: Mode, device: Box<dyn Device>) -> Result<(), Error> {
        let endpoint = Endpoint::new(path, mode, device)?;
        let gone = |_| Error::System { step: "reaching the control thread", source: io::ErrorKind::BrokenPipe.into() };
        self.commands.send(endpoint).map_err(gone)?;
        self.wake.write(1).map_err(|source| Error::System { step: "waking the control thread", source })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // The thread ends when it wakes up and finds the other end of the channel gone.
        self.commands = mpsc::channel().0;
        let _ = self.wake.write(1);
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
    incoming: Receiver<Endpoint>,
    endpoints: Vec<Endpoint>,
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
                    if let Some(endpoint) = self.endpoints.get_mut(place) {
                        endpoint.ready(&self.epoll, event.data());
                    }
                } else if !self.take_incoming() {
                    return;
                }
            }
            for endpoint in &mut self.endpoints {
                endpoint.tick(&self.epoll, self.message_timeout);
            }
        }
    }

    /// Takes new endpoints; `false` if the thread is to end.
    fn take_incoming(&mut self) -> bool {
        let _ = self.wake.read();
        loop {
            match self.incoming.try_recv() {
                Ok(mut endpoint) => {
                    endpoint.register(&self.epoll, self.endpoints.len() as u64 * 2);
                    self.endpoints.push(endpoint);
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }
}
