//! What a running forwarder is told, and by whom: signals, the clock, or commands on standard input.

use std::io::{BufRead, BufReader, Read, Write};
use std::process;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;

use super::cli::sentence;
use super::{Engine, FinalReport, Forwarder, FwdStats, Pages, PortState};
use crate::sys::Termination;
use crate::virtio::user::remove_sockets;

/// Longest command, in bytes.
const LINE_MAX: u64 = 256;
/// Events that may wait; more commands than that stay in the pipe.
const EVENTS_MAX: usize = 16;
/// From one line of live statistics to the next.
const INTERVAL: Duration = Duration::from_secs(1);
/// The exit code of a process that is interrupted before, or again while, it ends in order: 128 and the number of SIGINT.
const INTERRUPTED: i32 = 130;

/// Something that happens while engines run.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A signal asks the process to end.
    Terminate,
    /// A command.
    Line(String),
    /// There will be no more commands.
    InputEnded,
}

/// What is to be waited for, and a way to add to it.
pub(super) struct Events {
    sender: SyncSender<Event>,
    receiver: Receiver<Event>,
}

impl Events {
    pub fn new() -> Self {
        let (sender, receiver) = sync_channel(EVENTS_MAX);
        Self { sender, receiver }
    }

    /// The next event; none if there is none by then.
    fn by(&self, deadline: Instant) -> Option<Event> {
        match self.receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(event) => Some(event),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Event::Terminate),
        }
    }
}

/// SIGINT, SIGTERM and SIGHUP, which from now on come as events. Until somebody takes those, a signal ends the process at once, and so
/// does a second one later.
pub(super) struct Signals {
    taker: Arc<OnceLock<SyncSender<Event>>>,
}

impl Signals {
    pub fn watch() -> std::io::Result<Self> {
        let termination = Termination::catch()?;
        let taker = Arc::new(OnceLock::new());
        let told = Arc::clone(&taker);
        thread::Builder::new().name("signals".into()).spawn(move || {
            let mut first = true;
            loop {
                let waited = termination.wait().is_ok();
                let sent = told.get().is_some_and(|taker: &SyncSender<_>| taker.send(Event::Terminate).is_ok());
                if !(waited && first && sent) {
                    remove_sockets();
                    process::exit(INTERRUPTED);
                }
                first = false;
            }
        })?;
        Ok(Self { taker })
    }

    /// Where signals come as events from now on.
    pub fn forward(self) -> Events {
        let events = Events::new();
        // The first and only time.
        let _ = self.taker.set(events.sender.clone());
        events
    }
}

/// Lets every line of `input` come as an event.
pub(super) fn read_lines(input: impl Read + Send + 'static, events: &Events) -> std::io::Result<()> {
    let sender = events.sender.clone();
    thread::Builder::new().name("commands".into()).spawn(move || {
        let mut input = BufReader::new(input);
        let mut line = Vec::new();
        // A line that is too long comes in pieces, which are no commands.
        while matches!(input.by_ref().take(LINE_MAX).read_until(b'\n', &mut line), Ok(1..)) {
            let text = String::from_utf8_lossy(&line).trim().to_owned();
            line.clear();
            if sender.send(Event::Line(text)).is_err() {
                return;
            }
        }
        // Nobody listens any more if this fails.
        let _ = sender.send(Event::InputEnded);
    })?;
    Ok(())
}

/// Lets the engine run for so many seconds (0: until a signal), prints how the ports stand, live statistics once a second,
/// and the final ones; with `json` only the latter.
pub(super) fn watch(
    mut forwarder: Forwarder,
    seconds: u32,
    json: bool,
    events: &Events,
    out: &mut impl Write,
) -> anyhow::Result<FinalReport> {
    let mut earlier = forwarder.stats();
    if !json {
        for (number, port) in forwarder.ports().iter().enumerate() {
            writeln!(out, "port {number} {port}")?;
        }
        out.flush()?;
    }
    let mut tick = Instant::now() + INTERVAL;
    let end = (seconds > 0).then(|| Instant::now() + Duration::from_secs(u64::from(seconds)));
    while events.by(end.map_or(tick, |end| end.min(tick))).is_none() {
        let now = Instant::now();
        if end.is_some_and(|end| now >= end) {
            break;
        }
        if !json && now >= tick {
            let stats = forwarder.stats();
            for line in stats.rates(&earlier) {
                writeln!(out, "{line}")?;
            }
            out.flush()?;
            earlier = stats;
        }
        if now >= tick {
            tick += INTERVAL;
            forwarder.recover();
        }
    }
    let report = forwarder.shutdown();
    if json {
        reply(out, &Reply::Final(&report))?;
    } else {
        write!(out, "{}", report.stats)?;
        out.flush()?;
    }
    Ok(report)
}

/// An answer, one line of JSON.
#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Reply<'a> {
    Ready {
        #[serde(flatten)]
        pages: Pages,
        ports: Vec<PortState>,
    },
    Started {
        engine: Engine,
    },
    Stopped,
    Stats(FwdStats),
    Link {
        ports: Vec<PortState>,
    },
    Final(&'a FinalReport),
    #[serde(untagged)]
    Failed {
        error: String,
    },
}

fn reply(out: &mut impl Write, reply: &Reply<'_>) -> anyhow::Result<()> {
    serde_json::to_writer(&mut *out, reply)?;
    writeln!(out)?;
    Ok(out.flush()?)
}

/// Steers `forwarder` by the commands that come in on `input`, one a line: `start ENGINE [tx_first=N]`, `stop`, `stats`,
/// `link`, `quit`. Each is answered on `out` with one line of JSON, and so is the beginning. The end of the input is as good as
/// `quit`, after which the forwarder is shut down.
///
/// # Errors
/// Whatever is wrong with `input` or `out`; the forwarder has ended then, too. A bad command is only answered with an error.
pub fn serve(
    forwarder: Forwarder,
    input: impl Read + Send + 'static,
    out: &mut impl Write,
) -> anyhow::Result<FinalReport> {
    let events = Events::new();
    read_lines(input, &events)?;
    serve_events(forwarder, &events, out)
}

/// As [`serve`], with the commands among `events`; any other event is as good as `quit`.
pub(super) fn serve_events(
    mut forwarder: Forwarder,
    events: &Events,
    out: &mut impl Write,
) -> anyhow::Result<FinalReport> {
    reply(out, &Reply::Ready { pages: forwarder.pages(), ports: forwarder.ports() })?;
    let mut tick = Instant::now() + INTERVAL;
    loop {
        match events.by(tick) {
            Some(Event::Line(line)) => match obey(&mut forwarder, &line) {
                Ok(Some(answer)) => reply(out, &answer)?,
                Ok(None) => break,
                Err(error) => reply(out, &Reply::Failed { error: sentence(&error) })?,
            },
            Some(_) => break,
            None => {
                forwarder.recover();
                tick = Instant::now() + INTERVAL;
            }
        }
    }
    let report = forwarder.shutdown();
    reply(out, &Reply::Final(&report))?;
    Ok(report)
}

/// Carries out a command; no answer means the end.
fn obey(forwarder: &mut Forwarder, line: &str) -> anyhow::Result<Option<Reply<'static>>> {
    Ok(Some(match Command::parse(line).map_err(anyhow::Error::msg)? {
        Command::Start(engine, tx_first) => {
            forwarder.start(engine, tx_first)?;
            Reply::Started { engine }
        }
        Command::Stop => {
            forwarder.stop()?;
            Reply::Stopped
        }
        Command::Stats => Reply::Stats(forwarder.stats()),
        Command::Link => Reply::Link { ports: forwarder.ports() },
        Command::Quit => return Ok(None),
    }))
}

/// What can be asked for.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Start(Engine, u32),
    Stop,
    Stats,
    Link,
    Quit,
}

impl Command {
    fn parse(line: &str) -> Result<Self, String> {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["start", engine] => Ok(Self::Start(self::engine(engine)?, 0)),
            ["start", engine, first] => {
                let bursts = first.strip_prefix("tx_first=").and_then(|number| number.parse().ok());
                let bursts = bursts.ok_or_else(|| format!("{first} is not possible; write tx_first=N"))?;
                Ok(Self::Start(self::engine(engine)?, bursts))
            }
            ["stop"] => Ok(Self::Stop),
            ["stats"] => Ok(Self::Stats),
            ["link"] => Ok(Self::Link),
            ["quit"] => Ok(Self::Quit),
            _ => Err(format!("no command {line:?}; there are: start ENGINE [tx_first=N], stop, stats, link, quit")),
        }
    }
}

fn engine(name: &str) -> Result<Engine, String> {
    Engine::from_str(name, false).map_err(|_| {
        let names = Engine::value_variants().iter().filter_map(Engine::to_possible_value);
        let names = names.map(|value| value.get_name().to_owned()).collect::<Vec<_>>().join(", ");
        format!("no engine is called {name}; there are: {names}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_words() {
        assert_eq!(Command::parse("start  macswap"), Ok(Command::Start(Engine::MacSwap, 0)));
        assert_eq!(Command::parse("start io tx_first=3"), Ok(Command::Start(Engine::Io, 3)));
        assert_eq!(Command::parse("stats"), Ok(Command::Stats));
    }

    #[test]
    fn what_is_no_command_is_answered_with_what_is() {
        let engines = "no engine is called fast; there are: io, rxonly, txonly, mac, macswap";
        assert_eq!(Command::parse("start fast"), Err(engines.into()));
        assert_eq!(Command::parse("start io 3"), Err("3 is not possible; write tx_first=N".into()));
        assert_eq!(Command::parse("start io tx_first=x"), Err("tx_first=x is not possible; write tx_first=N".into()));
        for line in ["", "start", "stop now", "start io tx_first=1 x"] {
            let commands = "there are: start ENGINE [tx_first=N], stop, stats, link, quit";
            assert_eq!(Command::parse(line), Err(format!("no command {line:?}; {commands}")));
        }
    }

    #[test]
    fn lines_come_as_events_until_the_input_ends_and_long_ones_in_pieces() {
        let events = Events::new();
        let input = [b"one\n\xff\n".as_slice(), &[b'x'; 300]].concat();
        read_lines(std::io::Cursor::new(input), &events).unwrap();
        let lines = ["one".to_owned(), "\u{fffd}".into(), "x".repeat(256), "x".repeat(44)].map(Event::Line);
        for expected in lines.into_iter().chain([Event::InputEnded]) {
            assert_eq!(events.receiver.recv(), Ok(expected));
        }
    }
}
