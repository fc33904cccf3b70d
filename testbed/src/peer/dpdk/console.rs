//! testpmd's output: read by a thread of its own, searched by whoever waits for a part of it.

use std::io::{self, Read};
use std::process::{Child, Command};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How much output is kept: far more than one command prints.
const KEPT_BYTES_MAX: usize = 1 << 20;
/// How many lines of it an error shows.
const TAIL_LINES: usize = 12;

/// Why a wait ended without what it waited for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    TimedOut,
    Closed,
}

#[derive(Debug, Default)]
struct Output {
    text: String,
    /// How many bytes were dropped in front of `text`.
    dropped: usize,
    closed: bool,
}

#[derive(Debug, Default)]
struct Shared {
    output: Mutex<Output>,
    grew: Condvar,
}

/// The reading end. `seen` is how far the waits have come, counted from the beginning of the output.
#[derive(Debug)]
pub(super) struct Console {
    shared: Arc<Shared>,
    seen: usize,
}

impl Console {
    /// Starts `command` with both its outputs in one pipe, so that they stay in order.
    ///
    /// The reading thread is also the one that starts the process: `setpriv --pdeathsig` ties its life to that of the thread
    /// that forked it, and this one lives as long as the pipe is open.
    pub(super) fn spawn(mut command: Command) -> io::Result<(Child, Self)> {
        let (reader, writer) = io::pipe()?;
        command.stdout(writer.try_clone()?).stderr(writer);
        let shared = Arc::new(Shared::default());
        let console = Self { shared: Arc::clone(&shared), seen: 0 };
        let (started, child) = mpsc::channel();
        thread::Builder::new().name("testpmd-output".into()).spawn(move || {
            let spawned = command.spawn();
            drop(command); // and with it our copies of the writing ends, or the pipe would never end
            if started.send(spawned).is_ok() {
                shared.fill(reader);
            }
        })?;
        let child = child.recv().map_err(io::Error::other)??;
        Ok((child, console))
    }

    pub(super) fn expect(&mut self, pattern: &str, timeout: Duration) -> Result<String, Stopped> {
        let deadline = Instant::now() + timeout;
        let mut output = self.shared.lock();
        loop {
            let from = self.seen.saturating_sub(output.dropped);
            let unseen = output.text.get(from..).unwrap_or_default();
            if let Some(at) = unseen.find(pattern) {
                let found = unseen[..at + pattern.len()].to_string();
                self.seen = output.dropped + from + found.len();
                return Ok(found);
            }
            if output.closed {
                return Err(Stopped::Closed);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stopped::TimedOut);
            }
            output = self.shared.grew.wait_timeout(output, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The last lines, for an error.
    pub(super) fn tail(&self) -> String {
        self.with_text(|text| {
            let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
            lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
        })
    }

    /// Looks at all that is kept.
    pub(super) fn with_text<T>(&self, look: impl FnOnce(&str) -> T) -> T {
        look(&self.shared.lock().text)
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fill(&self, mut reader: impl Read) {
        let mut buffer = [0; 4096];
        // A character cut in two by a read becomes two replacement characters: testpmd prints ASCII.
        while let Ok(count @ 1..) = reader.read(&mut buffer) {
            let mut output = self.lock();
            output.text.push_str(&String::from_utf8_lossy(&buffer[..count]).replace('\r', ""));
            output.forget_old();
            self.grew.notify_all();
        }
        self.lock().closed = true;
        self.grew.notify_all();
    }
}

impl Output {
    fn forget_old(&mut self) {
        if self.text.len() <= KEPT_BYTES_MAX {
            return;
        }
        // Half of it at once, so that the move is rare.
        let mut cut = self.text.len() - KEPT_BYTES_MAX / 2;
        while !self.text.is_char_boundary(cut) {
            cut += 1;
        }
        self.text.drain(..cut);
        self.dropped += cut;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Console {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let (mut child, console) = Console::spawn(command).unwrap();
        child.wait().unwrap();
        console
    }

    const SOON: Duration = Duration::from_secs(10);

    #[test]
    fn each_wait_goes_on_where_the_last_one_ended() {
        let mut console = shell("printf 'one two '; printf 'two three' >&2");
        assert_eq!(console.expect("two", SOON).unwrap(), "one two");
        assert_eq!(console.expect("two", SOON).unwrap(), " two");
        assert_eq!(console.expect("two", SOON), Err(Stopped::Closed));
        assert_eq!(console.expect("three", SOON).unwrap(), " three");
    }

    #[test]
    fn a_wait_ends_in_time() {
        let mut command = Command::new("sleep");
        command.arg("60");
        let (mut child, mut console) = Console::spawn(command).unwrap();
        assert_eq!(console.expect("anything", Duration::from_millis(10)), Err(Stopped::TimedOut));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn old_output_is_forgotten_and_new_output_still_found() {
        let mut console = shell("yes 'a line of nothing' | head -c 3000000; echo the end");
        assert!(console.expect("the end", SOON).unwrap().len() <= KEPT_BYTES_MAX);
        assert!(console.with_text(str::len) <= KEPT_BYTES_MAX);
        assert!(console.tail().ends_with("the end"));
        assert_eq!(console.tail().lines().count(), TAIL_LINES);
    }

    #[test]
    fn a_command_that_does_not_exist_is_an_error() {
        assert!(Console::spawn(Command::new("/nonexistent/testpmd")).is_err());
    }
}
