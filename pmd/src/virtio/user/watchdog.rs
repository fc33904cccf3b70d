//! A time limit for requests.
//!
//! The `vhost` crate retries a read that timed out, for ever, so a socket time-out cannot limit it. Shutting the socket down
//! from another thread does: the read then ends as if the peer had closed.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

enum State {
    /// No request is under way.
    Idle,
    /// A request is under way until then.
    Until(Instant),
    /// It took longer, and the socket is shut down.
    Fired,
    /// The watchdog is no longer needed.
    Over,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, socket: &UnixStream) {
        let mut state = self.state();
        loop {
            state = match *state {
                State::Over => return,
                State::Idle | State::Fired => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                State::Until(end) => match end.checked_duration_since(Instant::now()) {
                    Some(left) if !left.is_zero() => {
                        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                    }
                    _ => {
                        // It fails only on a socket that is shut already.
                        let _ = socket.shutdown(Shutdown::Both);
                        *state = State::Fired;
                        state
                    }
                },
            };
        }
    }
}

/// The thread that ends what takes too long.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// A watchdog over `socket`.
    pub(super) fn new(socket: UnixStream) -> io::Result<Self> {
        let shared = Arc::new(Shared { state: Mutex::new(State::Idle), changed: Condvar::new() });
        let of_thread = Arc::clone(&shared);
        let builder = thread::Builder::new().name("vhost-user-limit".to_owned());
        let thread = builder.spawn(move || of_thread.run(&socket))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// From now on, and until [`Watchdog::stop`], the socket lives for `limit`.
    pub(super) fn start(&self, limit: Duration) {
        // A limit beyond the clock's range is none.
        *self.shared.state() = Instant::now().checked_add(limit).map_or(State::Idle, State::Until);
        self.shared.changed.notify_one();
    }

    /// Ends the limit; whether it was reached.
    pub(super) fn stop(&self) -> bool {
        matches!(std::mem::replace(&mut *self.shared.state(), State::Idle), State::Fired)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        *self.shared.state() = State::Over;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It cannot have panicked; if it had, there would be nothing left to do about it.
            let _ = thread.join();
        }
    }
}
