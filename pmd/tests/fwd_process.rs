//! The program as a user meets it: exit codes, what it says, and how it ends.

#[path = "virtio_user/recorder.rs"]
mod recorder;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use pmd::fwd::FinalReport;
use pmd::virtio::spec::feature;
use recorder::Recorder;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vmm_sys_util::tempdir::TempDir;

fn fwd(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_twinring-fwd"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// A backend that agrees to everything and never touches a ring, and the address of a port on it.
fn backend(dir: &TempDir) -> String {
    let path = dir.as_path().join("s");
    let offered = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
    let protocol = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
    Recorder { offered, protocol, queue_pairs: 1, refused: "", log: Vec::new() }.listen(&path);
    format!("virtio-user:{},size=64", path.display())
}

fn terminate(child: &Child) {
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
}

/// The final report that `output`, of a clean end, consists of.
fn report(output: &Output) -> FinalReport {
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_usage_error_is_one_sentence_and_exit_code_2() {
    let port = ["--port", "virtio-user:s"];
    for (args, problem) in [
        (&[][..], "error: the following required arguments were not provided: --port <ADDRESS>; see --help"),
        (
            &["--port", "virtio-user:"],
            "error: invalid value 'virtio-user:' for '--port <ADDRESS>': address virtio-user: has no path; write virtio-user:PATH; see --help",
        ),
        (
            &[port[0], port[1], "--engine", "warp"],
            "error: invalid value 'warp' for '--engine <NAME>' [possible values: io, rxonly, txonly, mac, macswap]; see --help",
        ),
        (
            &[port[0], port[1], "--burst", "513"],
            "error: invalid value '513' for '--burst <N>': write a whole number, 1 to 512; see --help",
        ),
        (
            &[port[0], port[1], "--frame", "59"],
            "error: invalid value '59' for '--frame <BYTES>': write a whole number, 60 to 9000; see --help",
        ),
        (
            &[port[0], port[1], "--cpus", "1-"],
            "error: invalid value '1-' for '--cpus <LIST>': \"1-\" is no CPU number or range, 0 to 1023; write a list like 0,2-3; see --help",
        ),
        (
            &[port[0], port[1], "--seconds", "x"],
            "error: invalid value 'x' for '--seconds <N>': write a whole number, 0 to 4294967295; see --help",
        ),
        (
            &[port[0], port[1], "--control", "--json"],
            "error: the argument '--control' cannot be used with '--json'; see --help",
        ),
        (
            &["--port", "virtio-user:s,queues=129"],
            "error: invalid value 'virtio-user:s,queues=129' for '--port <ADDRESS>': address virtio-user:s,queues=129: queues=129 is not possible; write queues=1..=128; see --help",
        ),
        (
            &["--port", "vhost-user:s"],
            "twinring-fwd: address vhost-user:s: a vhost-user port is served by twinring-backend; drive virtio-user:PATH here",
        ),
        (
            &[port[0], port[1], port[0], port[1]],
            "twinring-fwd: address virtio-user:s: two ports have this path; give each its own",
        ),
        (
            &[port[0], port[1], "--cpus", "0,0"],
            "twinring-fwd: --cpus: CPU 0 is named twice; a worker needs one of its own",
        ),
        (&[port[0], port[1], "--warp"], "error: unexpected argument '--warp' found; see --help"),
    ] {
        let output = fwd(args).output().unwrap();
        assert_eq!(text(&output.stderr), format!("{problem}\n"));
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(2), ""));
    }
}

#[test]
fn what_cannot_be_opened_is_one_sentence_and_exit_code_1() {
    let dir = TempDir::new().unwrap();
    let missing = dir.as_path().join("missing");
    let missing = missing.display();
    for (address, problem) in [
        (
            format!("virtio-user:{missing}"),
            format!(
                "port virtio-user:{missing}: no vhost-user socket at {missing}: start the backend first, or correct the path"
            ),
        ),
        (
            "virtio-user:s,size=100".into(),
            "port virtio-user:s,size=100: ring size 100 is not a power of two; use 64 or 128".into(),
        ),
    ] {
        let output = fwd(&["--port", &address]).output().unwrap();
        assert_eq!(text(&output.stderr), format!("twinring-fwd: {problem}\n"));
        assert_eq!((output.status.code(), text(&output.stdout)), (Some(1), ""));
    }
}

#[test]
fn it_takes_the_descriptors_it_may_have_and_names_the_limit_if_they_are_too_few() {
    let dir = TempDir::new().unwrap();
    let limited = |ulimit: &str, socket: &str| {
        let path = dir.as_path().join(socket);
        let offered = feature::VERSION_1 | feature::PROTOCOL_FEATURES;
        let protocol = VhostUserProtocolFeatures::MQ;
        Recorder { offered, protocol, queue_pairs: 128, refused: "", log: Vec::new() }.listen(&path);
        let fwd = env!("CARGO_BIN_EXE_twinring-fwd");
        let port = format!("virtio-user:{},queues=128,size=64", path.display());
        let script = format!("ulimit {ulimit}; exec {fwd} --port {port} --engine rxonly --seconds 1 --json");
        Command::new("sh").args(["-c", &script]).output().unwrap()
    };
    // The soft limit only.
    report(&limited("-Sn 300", "soft"));
    let output = limited("-n 300", "hard");
    let sentence =
        "need 512 file descriptors, and this process may have 300 in all (ulimit -n): raise that, or use fewer";
    assert!(text(&output.stderr).contains(sentence), "{output:?}");
    assert_eq!((output.status.code(), text(&output.stderr).lines().count()), (Some(1), 1));
}

#[test]
fn when_its_time_is_up_it_prints_the_final_statistics_and_nothing_else_as_json() {
    let dir = TempDir::new().unwrap();
    let output = fwd(&["--port", &backend(&dir), "--engine", "txonly", "--seconds", "1", "--json"]).output().unwrap();
    let report = report(&output);
    // The backend takes nothing, so the ring fills up, and the next burst waits until the end.
    let stream = &report.stats.streams[0];
    assert_eq!((stream.generated, stream.tx, stream.tx_dropped), (96, 64, 32));
}

#[test]
fn a_signal_ends_it_in_order() {
    let dir = TempDir::new().unwrap();
    let mut child = fwd(&["--port", &backend(&dir), "--engine", "rxonly"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.ends_with("link up, rx_path split, tx_path split"), "{first}");
    terminate(&child);
    let last = lines.last().unwrap().unwrap();
    assert_eq!(last, "stream 0:0 -> 0:0 on worker 0: rx 0, tx 0, tx_dropped 0, generated 0");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_signal_before_there_is_anything_to_end_ends_it_at_once() {
    let dir = TempDir::new().unwrap();
    let path = dir.as_path().join("s");
    let child = fwd(&["--port", &format!("virtio-user:{},server", path.display())]).spawn().unwrap();
    while !Path::exists(&path) {
        std::thread::yield_now();
    }
    terminate(&child);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(130));
}

#[test]
fn with_control_the_end_of_the_input_ends_it() {
    let dir = TempDir::new().unwrap();
    let output = fwd(&["--port", &backend(&dir), "--control"]).output().unwrap();
    assert!(output.status.success());
    let answers: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.iter().map(|answer| &answer["event"]).collect::<Vec<_>>(), ["ready", "final"]);
}
