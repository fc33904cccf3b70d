//! A process of ours that is steered over pipes (`--control`): one command a line, one line of JSON as the answer.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{self, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Interrupt, PairError, Side};

/// How long a process may take to come up, and to answer: opening a port includes waiting for its peer, for 10 s.
const ANSWER_MAX: Duration = Duration::from_secs(15);
/// How long it may take to end once it has nothing more to do.
const END_MAX: Duration = Duration::from_secs(5);
/// How often a wait looks whether it has been interrupted.
const SLICE: Duration = Duration::from_millis(20);
/// Longest answer, in bytes; one with 128 queues has less than a quarter of that.
const LINE_MAX: u64 = 1 << 18;
/// Answers that may wait to be read.
const LINES_MAX: usize = 16;
/// What is kept of standard error for a message: the last lines, each cut off there.
const SAID_LINES: usize = 4;
const SAID_LINE_MAX: u64 = 1024;

/// The command after which it ends, once it has answered with its final report.
pub(super) const QUIT: &str = "quit";

/// The process. It is killed when this value is dropped; and when we are gone, its input ends, and so does it.
#[derive(Debug)]
pub(super) struct Child {
    side: Side,
    process: process::Child,
    commands: Option<ChildStdin>,
    answers: Receiver<String>,
    /// What it said last on standard error; comes when it has ended.
    said: Receiver<String>,
    interrupt: Interrupt,
}

impl Child {
    /// Starts `command` as the `side` end.
    pub(super) fn spawn(side: Side, mut command: Command, interrupt: &Interrupt) -> Result<Self, PairError> {
        let failed = |source| PairError::Start { side, source };
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is for us alone: we end the children in order, or by closing their input.
        let mut process = command.process_group(0).spawn().map_err(failed)?;
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        let (answer, answers) = mpsc::sync_channel(LINES_MAX);
        let (say, said) = mpsc::channel();
        let child = Self { side, commands: process.stdin.take(), process, answers, said, interrupt: interrupt.clone() };
        let reader = |name: &str| thread::Builder::new().name(format!("{side}-{name}"));
        if let Some(stdout) = stdout {
            let read = move || each_line(stdout, LINE_MAX, |line| answer.send(line).is_ok());
            reader("answers").spawn(read).map_err(failed)?;
        }
        if let Some(stderr) = stderr {
            let read = move || say.send(last_lines(stderr)).unwrap_or_default();
            reader("errors").spawn(read).map_err(failed)?;
        }
        Ok(child)
    }

    /// Sends a command and returns its answer.
    pub(super) fn ask<T: DeserializeOwned>(&mut self, command: &str) -> Result<T, PairError> {
        let written = match &mut self.commands {
            Some(commands) => writeln!(commands, "{command}"),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        };
        // What it said when it ended tells more than the broken pipe.
        written.map_err(|_| self.ended(command))?;
        self.answer(command)
    }

    /// Waits for the next answer, to `asked`.
    pub(super) fn answer<T: DeserializeOwned>(&mut self, asked: &str) -> Result<T, PairError> {
        let line = self.line(asked)?;
        let (side, asked) = (self.side, asked.to_owned());
        let answer: Result<Value, _> = serde_json::from_str(&line);
        if asked != QUIT && answer.as_ref().is_ok_and(|answer| answer["event"] == "final") {
            // Somebody else told it to end.
            return Err(self.ended(&asked));
        }
        if let Ok(Some(error)) = answer.as_ref().map(|answer| answer.get("error").and_then(Value::as_str)) {
            return Err(PairError::Refused { side, asked, error: error.to_owned() });
        }
        answer.and_then(serde_json::from_value).map_err(|source| PairError::Garbled { side, asked, source })
    }

    fn line(&mut self, asked: &str) -> Result<String, PairError> {
        let deadline = Instant::now() + ANSWER_MAX;
        loop {
            match self.answers.recv_timeout(SLICE) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended(asked)),
                Err(RecvTimeoutError::Timeout) => self.interrupt.check()?,
            }
            if Instant::now() >= deadline {
                let timeout_ms = ANSWER_MAX.as_millis();
                return Err(PairError::Silent { side: self.side, asked: asked.to_owned(), timeout_ms });
            }
        }
    }

    /// An error if it has ended.
    pub(super) fn check(&mut self) -> Result<(), PairError> {
        match self.wait_until(Instant::now())? {
            Some(_) => Err(self.ended("work")),
            None => Ok(()),
        }
    }

    /// Closes its input and waits for its end.
    pub(super) fn wait(mut self) -> Result<ExitStatus, PairError> {
        self.commands = None;
        self.wait_until(Instant::now() + END_MAX)?.ok_or(PairError::Silent {
            side: self.side,
            asked: "end".into(),
            timeout_ms: END_MAX.as_millis(),
        })
    }

    fn wait_until(&mut self, deadline: Instant) -> Result<Option<ExitStatus>, PairError> {
        loop {
            let status = self.process.try_wait().map_err(|source| PairError::Wait { side: self.side, source })?;
            if status.is_some() || Instant::now() >= deadline {
                return Ok(status);
            }
            self.interrupt.sleep(SLICE)?;
        }
    }

    /// Why it is of no use any more: it has ended, or at least closed its end of a pipe.
    fn ended(&mut self, asked: &str) -> PairError {
        self.commands = None;
        let status = match self.wait_until(Instant::now() + END_MAX) {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "still running, but deaf".to_owned(),
            Err(error) => return error,
        };
        let said = self.said.recv_timeout(SLICE).ok().filter(|said| !said.is_empty());
        let said = said.unwrap_or_else(|| "it said nothing".to_owned());
        PairError::Ended { side: self.side, asked: asked.to_owned(), status, said }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Calls `take` with every line of `input`, until it is false; a line longer than `len_max` bytes comes in pieces.
fn each_line(input: impl Read, len_max: u64, mut take: impl FnMut(String) -> bool) {
    let mut input = BufReader::new(input);
    let mut line = Vec::new();
    while matches!(input.by_ref().take(len_max).read_until(b'\n', &mut line), Ok(1..)) {
        if !take(String::from_utf8_lossy(&line).trim_end().to_owned()) {
            return;
        }
        line.clear();
    }
}

/// The last lines of `input`, when it has ended.
fn last_lines(input: impl Read) -> String {
    let mut last = VecDeque::new();
    each_line(input, SAID_LINE_MAX, |line| {
        if !line.is_empty() {
            if last.len() == SAID_LINES {
                last.pop_front();
            }
            last.push_back(line);
        }
        true
    });
    last.make_contiguous().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Child::spawn(Side::Guest, command, &Interrupt::default()).unwrap()
    }

    #[test]
    fn a_command_is_a_line_and_so_is_its_answer() {
        let mut child = shell(r#"read line; echo "{\"asked\":\"$line\"}"; read line"#);
        assert_eq!(child.ask::<Value>("start io").unwrap(), serde_json::json!({"asked": "start io"}));
        assert!(child.wait().unwrap().code().is_some());
    }

    #[test]
    fn a_process_that_ends_is_told_with_its_last_words() {
        let mut child = shell("echo one >&2; echo two >&2; exit 3");
        let said = child.answer::<Value>("start-up").unwrap_err().to_string();
        assert_eq!(said, r#"the guest ended (exit status: 3) at "start-up": one; two"#);
        let mut child = shell("kill -9 $$");
        let said = child.ask::<Value>("stop").unwrap_err().to_string();
        assert_eq!(said, r#"the guest ended (signal: 9 (SIGKILL)) at "stop": it said nothing"#);
    }

    #[test]
    fn what_it_refuses_or_garbles_is_an_error() {
        let mut child = shell(r#"echo '{"error":"no"}'; echo nonsense; read line"#);
        assert_eq!(child.answer::<Value>("stop").unwrap_err().to_string(), r#"the guest refused "stop": no"#);
        let said = child.answer::<Value>("stop").unwrap_err().to_string();
        assert!(said.starts_with(r#"the guest did not answer to "stop" in JSON: "#), "{said}");
    }

    #[test]
    fn a_process_that_somebody_else_told_to_end_has_ended() {
        let mut child = shell(r#"echo '{"event":"final","ok":true}'"#);
        let said = child.ask::<Value>("stats").unwrap_err().to_string();
        assert_eq!(said, r#"the guest ended (exit status: 0) at "stats": it said nothing"#);
        assert!(child.check().is_err());
    }

    #[test]
    fn a_silent_process_is_waited_for_until_an_interruption_and_then_killed() {
        let mut child = shell("sleep 60");
        let pid = child.process.id();
        child.interrupt.set();
        assert!(matches!(child.ask::<Value>("stop"), Err(PairError::Interrupted)));
        drop(child);
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        assert_eq!(last_lines("1\n2\n\n3\n4\n\n5\n6\n".as_bytes()), "3; 4; 5; 6");
    }
}
