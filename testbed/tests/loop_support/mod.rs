//! `twinring loop` as a process, and what it leaves behind.
#![allow(dead_code, reason = "each test file uses its part of this")]

use std::fs;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use vmm_sys_util::tempdir::TempDir;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A run, with a directory of its own for temporary files.
pub struct Run {
    process: Option<Child>,
    directory: TempDir,
    command_line: String,
}

/// Starts `twinring` with `args`, which stand there with blanks between them.
pub fn start(args: &str) -> Run {
    let directory = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_twinring"));
    command.args(args.split_whitespace()).env("TMPDIR", directory.as_path());
    let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    Run { process: Some(process), directory, command_line: format!("twinring {args}") }
}

/// Runs `twinring` with `args` to its end; nothing may be left of it.
pub fn run(args: &str) -> Output {
    let mut run = start(args);
    let output = run.end();
    run.must_leave_nothing();
    output
}

impl Run {
    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// Waits for its end.
    pub fn end(&mut self) -> Output {
        let mut process = self.process.take().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while process.try_wait().unwrap().is_none() {
            if Instant::now() >= deadline {
                process.kill().unwrap();
                panic!("{} does not end", self.command_line);
            }
            sleep(POLL_INTERVAL);
        }
        process.wait_with_output().unwrap()
    }

    /// Its process in `role`, as soon as there is one.
    pub fn child(&self, role: &str) -> u32 {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(pid) = self.processes().into_iter().find(|pid| arguments(*pid).contains(role)) {
                return pid;
            }
            sleep(POLL_INTERVAL);
        }
        panic!("{} starts no {role}", self.command_line);
    }

    /// Processes with its directory in their command line: those of its pairs, whoever their parent is by now.
    pub fn processes(&self) -> Vec<u32> {
        let directory = self.directory.as_path().to_str().unwrap();
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| arguments(*pid).contains(directory)).collect()
    }

    pub fn must_leave_nothing(&self) {
        let left = self.processes();
        assert!(left.is_empty(), "{} left processes: {left:?}", self.command_line);
        let left: Vec<_> = fs::read_dir(self.directory.as_path()).unwrap().flatten().map(|e| e.path()).collect();
        assert!(left.is_empty(), "{} left files: {left:?}", self.command_line);
    }
}

/// CPU time that a process has used in its own code, in ticks of 10 ms.
pub fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // proc(5): the name ends with the last bracket, and utime is field 14, the 12th behind it.
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    behind_name.split_whitespace().nth(11).map_or(0, |ticks| ticks.parse().unwrap())
}

fn arguments(pid: u32) -> String {
    String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).replace('\0', " ")
}

/// Sends a signal, by the name that `kill` knows.
pub fn signal(pid: u32, name: &str) {
    assert!(Command::new("kill").args(["-s", name, &pid.to_string()]).status().unwrap().success());
}

/// Waits until `done`.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "no {what}");
        sleep(POLL_INTERVAL);
    }
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}
