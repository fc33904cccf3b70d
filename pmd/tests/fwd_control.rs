//! A forwarder that is steered by commands over a pipe.

mod fwd_support;

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Write, pipe};
use std::thread::JoinHandle;

use fwd_support::{config, open_pair, pool};
use pmd::fwd::{FinalReport, Forwarder, FwdStats, serve};
use pmd::mbuf::MbufPool;
use pmd::port::Port;
use serde_json::Value;

/// The other end of the pipes.
struct Steered {
    commands: PipeWriter,
    answers: BufReader<PipeReader>,
    pool: MbufPool,
    thread: JoinHandle<anyhow::Result<FinalReport>>,
}

impl Steered {
    /// A forwarder on two joined ports, and what it says when it is ready.
    fn new() -> (Self, Value) {
        let pool = pool(4096);
        let ports = open_pair(["a", "b"], 1, 64, &pool).into_iter().map(|port| Box::new(port) as Box<dyn Port>);
        let forwarder = Forwarder::new(ports.collect(), &config(&pool)).unwrap();
        let (input, commands) = pipe().unwrap();
        let (answers, mut out) = pipe().unwrap();
        let thread = std::thread::spawn(move || serve(forwarder, input, &mut out));
        let mut steered = Self { commands, answers: BufReader::new(answers), pool, thread };
        let ready = steered.answer();
        (steered, ready)
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, command: &str) -> Value {
        writeln!(self.commands, "{command}").unwrap();
        self.answer()
    }

    /// Closes the commands' pipe and returns the last answer.
    fn end(self) -> FinalReport {
        let Self { commands, mut answers, pool, thread } = self;
        drop(commands);
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        let report: FinalReport = serde_json::from_str(&line).unwrap();
        assert_eq!(report.ok, thread.join().unwrap().unwrap().ok);
        assert_eq!(pool.mempool().in_use(), 0);
        report
    }
}

#[test]
fn it_says_what_it_is_ready_on() {
    let (steered, mut ready) = Steered::new();
    assert!(ready["advice"].take().as_str().unwrap().contains("nr_hugepages"));
    let port = |name: &str| format!(r#"{{"address":"{name}","link":"up","rx_path":"memory","tx_path":"memory"}}"#);
    let expected =
        format!(r#"{{"event":"ready","page_size":4096,"advice":null,"ports":[{},{}]}}"#, port("a"), port("b"));
    assert_eq!(ready, serde_json::from_str::<Value>(&expected).unwrap());
    assert!(steered.end().ok);
}

#[test]
fn engines_start_stop_and_count_as_told() {
    let (mut steered, _) = Steered::new();
    assert_eq!(steered.ask("start io tx_first=2"), serde_json::json!({"event": "started", "engine": "io"}));
    let mut counted = 0;
    fwd_support::until("frames", || {
        let answer = steered.ask("stats");
        assert_eq!(answer["event"], "stats");
        let stats: FwdStats = serde_json::from_value(answer).unwrap();
        counted = stats.streams[0].rx;
        counted > 1000
    });
    assert_eq!(steered.ask("start rxonly")["engine"], "rxonly");
    assert_eq!(steered.ask("stop"), serde_json::json!({"event": "stopped"}));
    assert_eq!(steered.ask("link")["ports"][1]["link"], "up");
    writeln!(steered.commands, "quit").unwrap();
    let report = steered.end();
    assert!(report.ok && report.errors.is_empty() && report.stats.streams[0].rx >= counted);
    // Two bursts each; with the wire as deep as that, nothing is dropped.
    assert_eq!(report.stats.streams[0].generated, 64);
}

#[test]
fn a_bad_command_is_answered_with_a_sentence_and_changes_nothing() {
    let (mut steered, _) = Steered::new();
    steered.ask("start io tx_first=1");
    let engines = "no engine is called warp; there are: io, rxonly, txonly, mac, macswap";
    assert_eq!(steered.ask("start warp"), serde_json::json!({"error": engines}));
    let commands = "there are: start ENGINE [tx_first=N], stop, stats, link, quit";
    assert_eq!(steered.ask("halt"), serde_json::json!({"error": format!("no command \"halt\"; {commands}")}));
    let stats: FwdStats = serde_json::from_value(steered.ask("stats")).unwrap();
    let earlier = stats.streams[0].rx;
    fwd_support::until("more frames", || steered.ask("stats")["streams"][0]["rx"].as_u64().unwrap() > earlier);
    assert!(steered.end().ok);
}

#[test]
fn mbufs_that_are_out_at_the_end_make_the_report_a_bad_one() {
    let (steered, _) = Steered::new();
    let kept = steered.pool.alloc().unwrap();
    let Steered { commands, mut answers, thread, .. } = steered;
    drop(commands);
    let mut line = String::new();
    answers.read_line(&mut line).unwrap();
    let answer: Value = serde_json::from_str(&line).unwrap();
    assert_eq!((&answer["event"], &answer["ok"]), (&"final".into(), &false.into()));
    assert!(answer["errors"][0].as_str().unwrap().starts_with("1 of the 4096 mbufs"), "{answer}");
    assert!(!thread.join().unwrap().unwrap().ok);
    drop(kept);
}
