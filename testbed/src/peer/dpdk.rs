//! DPDK's testpmd as the other end of a ring: a vhost host or a virtio-user guest, driven through its prompt.
//!
//! It runs with `--in-memory` on huge pages, or with `--no-huge` when too few are free (virtio-user shares that memory just as
//! well, through one memfd; it is only slower). Either way nothing of it is left in the file system.
//!
//! testpmd counts frames but shows no contents. To check contents, generate the frames on our side and let testpmd forward
//! them back ([`Forward::Io`], [`Forward::MacSwap`]); see [`crate::frame`].

mod config;
mod console;
mod stats;

pub use config::{Config, Forward, Memory, Role, VHOST_QUEUES_MAX, VIRTIO_USER_QUEUES_MAX, Vhost, VirtioUser};
pub use stats::{Counts, ForwardStats, PortStats};

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use console::{Console, Stopped};

/// A port number far above any testpmd has.
const MARK_FIRST: u16 = 10_000;
/// How long a command may take, and testpmd to come up: it maps and zeroes its memory first.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);
/// How long testpmd may take to quit before it is killed.
const QUIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks at something testpmd has no event for.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long nothing may arrive before [`Testpmd::wait_rx`] believes that nothing more will.
const STILL_MAX: Duration = Duration::from_secs(3);
/// The beginnings of what testpmd says instead of doing as told.
const REFUSALS: [&str; 6] =
    ["Bad arguments", "Command not found", "Ambiguous command", "Packet forwarding", "Not all ports", "Invalid"];

/// What goes wrong with testpmd. Each carries the last lines it printed, where it printed any.
#[derive(thiserror::Error)]
pub enum DpdkError {
    /// It is not there.
    #[error("dpdk-testpmd does not run in {}: {reason}; install the package dpdk (dpdk-dev from DPDK 25 on), or run testbed/check, which does", root.display())]
    Missing {
        /// Where it was looked for.
        root: PathBuf,
        /// What the system or testpmd said.
        reason: String,
    },
    /// The process could not be started or fed.
    #[error("testpmd as {role}: cannot {what}: {source}")]
    Io {
        /// vhost or virtio-user, and its socket.
        role: String,
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// It ended by itself.
    #[error("testpmd as {role} ended ({status}) while {pattern:?} was awaited; it printed last:\n{tail}")]
    Exited {
        /// vhost or virtio-user, and its socket.
        role: String,
        /// Its exit status, if known.
        status: String,
        /// What was awaited.
        pattern: String,
        /// The last lines it printed.
        tail: String,
    },
    /// It did not say in time what it should.
    #[error("testpmd as {role} did not show {pattern:?} within {timeout_ms} ms; it printed last:\n{tail}")]
    Timeout {
        /// vhost or virtio-user, and its socket.
        role: String,
        /// What was awaited.
        pattern: String,
        /// For how long, in milliseconds.
        timeout_ms: u128,
        /// The last lines it printed.
        tail: String,
    },
    /// It did not do as told, or said something else than expected.
    #[error("testpmd as {role} answered {command:?} with:\n{answer}")]
    Refused {
        /// vhost or virtio-user, and its socket.
        role: String,
        /// The command.
        command: String,
        /// What it said.
        answer: String,
    },
}

/// As it displays: `unwrap` in a test then shows what testpmd printed line by line.
impl fmt::Debug for DpdkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A DPDK release.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Year, two digits.
    pub year: u16,
    /// Month.
    pub month: u16,
    /// Stable release; 0 is the first.
    pub patch: u16,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}.{}", self.year, self.month, self.patch)
    }
}

/// Which DPDK lies in `root` (`/`, or a directory to `chroot` into).
///
/// # Errors
/// [`DpdkError::Missing`] if none does, or it does not run.
pub fn available(root: &Path) -> Result<Version, DpdkError> {
    let missing = |reason: String| DpdkError::Missing { root: root.into(), reason };
    // `-v` prints the version on the way to a device that does not exist, which ends it. (`-h` would, but from 25.11 on it comes
    // before `-v`.)
    let output = config::testpmd_in(root)
        .args(["-v", "--no-huge", "-m", "16", "--no-pci", "--no-shconf", "--no-telemetry", "--vdev", "net_none0"])
        .stdin(Stdio::null())
        .output()
        .map_err(|e| missing(e.to_string()))?;
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    stats::version(&said).ok_or_else(|| missing(said.lines().take(3).collect::<Vec<_>>().join(" ")))
}

/// A running testpmd. It ends with this value, and with the thread of ours that reads its output, whatever happens to us.
#[derive(Debug)]
pub struct Testpmd {
    role: String,
    child: Child,
    stdin: Option<ChildStdin>,
    console: Console,
    ready: bool,
    /// How many marks were sent; see [`Self::send_mark`].
    marks: u16,
    runtime_dir: PathBuf,
}

impl Testpmd {
    /// Starts testpmd and waits until it takes commands; or, in virtio-user's server mode, in which it waits for its peer
    /// first, until it listens.
    ///
    /// # Errors
    /// [`DpdkError`] if it is missing, cannot be started, or does not come up.
    pub fn launch(config: &Config) -> Result<Self, DpdkError> {
        let role = config.role.to_string();
        available(&config.root)?;
        let runtime = config::runtime_dir();
        let on_host = config::in_root(&config.root, &runtime);
        let failed = |what, source| DpdkError::Io { role: role.clone(), what, source };
        fs::create_dir_all(&on_host).map_err(|e| failed("create its runtime directory", e))?;

        let mut command: Command = config.command(&runtime);
        command.stdin(Stdio::piped());
        let (mut child, console) = Console::spawn(command).map_err(|e| {
            let _ = fs::remove_dir(&on_host); // empty still
            failed("start it", e)
        })?;
        let stdin = child.stdin.take();
        let mut testpmd = Self { role, child, stdin, console, ready: false, marks: 0, runtime_dir: on_host };
        // Typed ahead: it answers as soon as it takes commands.
        testpmd.send_mark()?;
        match config.role.server_socket() {
            Some(socket) => testpmd.wait_socket(socket)?,
            None => testpmd.wait_ready(COMMAND_TIMEOUT)?,
        }
        Ok(testpmd)
    }

    /// Waits until it takes commands. Every command does this by itself; only virtio-user's server mode makes it worth calling.
    ///
    /// # Errors
    /// [`DpdkError::Timeout`], [`DpdkError::Exited`].
    pub fn wait_ready(&mut self, timeout: Duration) -> Result<(), DpdkError> {
        if !self.ready {
            self.expect_mark(timeout)?;
            self.ready = true;
        }
        Ok(())
    }

    /// Sends one line, waits until testpmd has done it, and returns what it said in between.
    ///
    /// # Errors
    /// [`DpdkError::Refused`] if it says so; [`DpdkError::Timeout`], [`DpdkError::Exited`], [`DpdkError::Io`].
    pub fn command(&mut self, line: &str) -> Result<String, DpdkError> {
        self.wait_ready(COMMAND_TIMEOUT)?;
        self.send(line)?;
        self.send_mark()?;
        let answer = self.expect_mark(COMMAND_TIMEOUT)?;
        if answer.lines().any(|said| REFUSALS.iter().any(|refusal| said.trim_start().starts_with(refusal))) {
            return Err(self.refused(line, answer));
        }
        Ok(answer)
    }

    /// Waits until testpmd has printed `pattern` and returns everything from where the last wait ended up to its end.
    ///
    /// # Errors
    /// [`DpdkError::Timeout`] after `timeout`, [`DpdkError::Exited`] if testpmd ends first.
    pub fn expect(&mut self, pattern: &str, timeout: Duration) -> Result<String, DpdkError> {
        self.console.expect(pattern, timeout).map_err(|stopped| match stopped {
            Stopped::TimedOut => DpdkError::Timeout {
                role: self.role.clone(),
                pattern: pattern.into(),
                timeout_ms: timeout.as_millis(),
                tail: self.console.tail(),
            },
            Stopped::Closed => self.exited(pattern),
        })
    }

    /// Starts forwarding.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn start(&mut self) -> Result<(), DpdkError> {
        self.command("start").map(drop)
    }

    /// Sends `bursts` bursts from every transmit queue, then starts forwarding.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn start_tx_first(&mut self, bursts: u32) -> Result<(), DpdkError> {
        self.command(&format!("start tx_first {bursts}")).map(drop)
    }

    /// Stops forwarding. The counts are those since the start.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn stop(&mut self) -> Result<ForwardStats, DpdkError> {
        let answer = self.command("stop")?;
        ForwardStats::parse(&answer).ok_or_else(|| self.refused("stop", answer))
    }

    /// The counters of port 0; its rates are means since the last call.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn port_stats(&mut self) -> Result<PortStats, DpdkError> {
        let answer = self.command("show port stats 0")?;
        PortStats::parse(&answer).ok_or_else(|| self.refused("show port stats 0", answer))
    }

    /// The extended counters of port 0 by name.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn xstats(&mut self) -> Result<BTreeMap<String, u64>, DpdkError> {
        Ok(stats::xstats(&self.command("show port xstats 0")?))
    }

    /// Changes the engine; testpmd has to be stopped.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn set_fwd(&mut self, forward: Forward) -> Result<(), DpdkError> {
        let line = format!("set fwd {forward}");
        let answer = self.command(&line)?;
        if answer.contains(&format!("Set {forward} packet forwarding mode")) {
            return Ok(());
        }
        Err(self.refused(&line, answer))
    }

    /// The receive path that runs on `queue` of port 0, as DPDK calls it: what the virtio driver logged at start, else what
    /// `show rxq info` tells, which for virtio is nothing (22.11) or no more than `Scalar` (25.11).
    ///
    /// # Errors
    /// [`DpdkError::Refused`] if neither tells; else as [`Self::command`].
    pub fn rx_path_name(&mut self, queue: u16) -> Result<String, DpdkError> {
        if let Some(name) = self.console.with_text(stats::logged_rx_path) {
            return Ok(name);
        }
        let line = format!("show rxq info 0 {queue}");
        let answer = self.command(&line)?;
        stats::burst_mode(&answer).ok_or_else(|| self.refused(&line, answer))
    }

    /// Waits until the link of port 0 is up: the peer is there and its rings run.
    ///
    /// # Errors
    /// [`DpdkError::Timeout`] if it is not by then; else as [`Self::command`].
    pub fn wait_link_up(&mut self, timeout: Duration) -> Result<(), DpdkError> {
        let deadline = Instant::now() + timeout;
        let wanted = "Link status: up";
        while !self.command("show port info 0")?.contains(wanted) {
            if Instant::now() >= deadline {
                return Err(DpdkError::Timeout {
                    role: self.role.clone(),
                    pattern: wanted.into(),
                    timeout_ms: timeout.as_millis(),
                    tail: self.console.tail(),
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits until `frames` frames have reached port 0, and returns its counters; earlier, with what there is, if none came
    /// for three seconds. Returns at the deadline at the latest.
    ///
    /// # Errors
    /// As [`Self::command`].
    pub fn wait_rx(&mut self, frames: u64, timeout: Duration) -> Result<PortStats, DpdkError> {
        let deadline = Instant::now() + timeout;
        let mut stats = self.port_stats()?;
        let mut still_since = Instant::now();
        while stats.rx_packets < frames && Instant::now() < deadline && still_since.elapsed() < STILL_MAX {
            thread::sleep(POLL_INTERVAL);
            let now = self.port_stats()?;
            if now.rx_packets != stats.rx_packets {
                still_since = Instant::now();
            }
            stats = now;
        }
        Ok(stats)
    }

    /// Whether it still runs.
    ///
    /// # Errors
    /// [`DpdkError::Exited`] if it does not.
    pub fn check(&mut self) -> Result<(), DpdkError> {
        if self.child.try_wait().is_ok_and(|status| status.is_some()) {
            Err(self.exited("the next command"))
        } else {
            Ok(())
        }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The directory it keeps its own files in, removed with it.
    #[must_use]
    pub fn runtime_dir(&self) -> &Path {
        &self.runtime_dir
    }

    /// Asks for a port that does not exist. The complaint about it marks the end of what the commands before it print; the prompt
    /// cannot, because it is written letter by letter and the lines of other threads get between its letters.
    fn send_mark(&mut self) -> Result<(), DpdkError> {
        self.marks = (self.marks + 1) % MARK_FIRST;
        self.send(&format!("show port info {}", MARK_FIRST + self.marks))
    }

    /// Waits for the last mark sent and returns what was printed before it.
    fn expect_mark(&mut self, timeout: Duration) -> Result<String, DpdkError> {
        let mark = format!("Invalid port {}\n", MARK_FIRST + self.marks);
        let answer = self.expect(&mark, timeout)?;
        Ok(answer.strip_suffix(&mark).unwrap_or(&answer).to_string())
    }

    fn send(&mut self, line: &str) -> Result<(), DpdkError> {
        let written = match &mut self.stdin {
            Some(stdin) => stdin.write_all(format!("{line}\n").as_bytes()).and_then(|()| stdin.flush()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        match written {
            // It ended: what it printed says why, the broken pipe does not.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(self.exited(line)),
            written => {
                written.map_err(|source| DpdkError::Io { role: self.role.clone(), what: "write to its prompt", source })
            }
        }
    }

    fn wait_socket(&mut self, socket: &Path) -> Result<(), DpdkError> {
        let deadline = Instant::now() + COMMAND_TIMEOUT;
        while !socket.exists() {
            if self.child.try_wait().is_ok_and(|status| status.is_some()) {
                return Err(self.exited("its socket"));
            }
            if Instant::now() >= deadline {
                return Err(DpdkError::Timeout {
                    role: self.role.clone(),
                    pattern: socket.display().to_string(),
                    timeout_ms: COMMAND_TIMEOUT.as_millis(),
                    tail: self.console.tail(),
                });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn exited(&mut self, pattern: &str) -> DpdkError {
        let status = self.end().map_or_else(|e| e.to_string(), |status| status.to_string());
        DpdkError::Exited { role: self.role.clone(), status, pattern: pattern.into(), tail: self.console.tail() }
    }

    fn refused(&self, command: &str, answer: String) -> DpdkError {
        DpdkError::Refused { role: self.role.clone(), command: command.into(), answer }
    }

    /// Waits for the process to end, and kills it if it does not.
    fn end(&mut self) -> io::Result<ExitStatus> {
        let deadline = Instant::now() + QUIT_TIMEOUT;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            thread::sleep(POLL_INTERVAL);
        }
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for Testpmd {
    fn drop(&mut self) {
        // Errors are of no use here: a testpmd that does not take the command gets the end of its input, then the signal.
        if let Some(mut stdin) = self.stdin.take().filter(|_| self.ready) {
            let _ = stdin.write_all(b"quit\n");
        } else {
            // Still waiting for its peer, it would not read the command.
            let _ = self.child.kill();
        }
        let _ = self.end();
        let _ = fs::remove_dir_all(&self.runtime_dir);
    }
}
