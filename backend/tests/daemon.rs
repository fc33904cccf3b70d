//! The daemon as a user meets it: exit codes, what it says, and what it leaves behind.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use pmd::fwd::FinalReport;
use vhost::VhostBackend;
use vhost::vhost_user::Frontend;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::tempdir::TempDir;

fn daemon(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_twinring-backend"));
    command.args(args.split_whitespace()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &str) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = daemon(args).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

fn terminate(pid: u32) {
    assert!(Command::new("kill").args(["-TERM", &pid.to_string()]).status().unwrap().success());
}

#[test]
fn what_it_cannot_do_is_one_sentence() {
    for (args, code, sentence) in [
        ("", 2, "the following required arguments were not provided: --port <ADDRESS>"),
        ("--port vhost-user:", 2, "address vhost-user: has no path; write vhost-user:PATH"),
        ("--port vhost-user:s,size=4", 2, "vhost-user has no key size; it takes queues=1..=128, client"),
        ("--port vhost-user:s,queues=129", 2, "queues=129 is not possible; write queues=1..=128"),
        ("--port vhost-user:s --engine warp", 2, "[possible values: io, rxonly, txonly, mac, macswap]"),
        ("--port vhost-user:s --rx-path split", 2, "the features that each guest chooses settle the path"),
        ("--port virtio-user:s", 2, "a virtio-user port is driven by twinring-fwd; serve vhost-user:PATH here"),
        ("--port vhost-user:/nonexistent/s", 1, "check that the directory exists and may be written"),
        ("--port vhost-user:/etc/passwd", 1, "exists and is not a socket; remove it or choose another path"),
        ("--port vhost-user:/tmp/s --cpus 1023", 2, "CPU 1023 cannot be used"),
    ] {
        let (ended, stdout, stderr) = run(args);
        assert_eq!((ended, stdout.as_str()), (Some(code), ""), "{args}: {stderr}");
        assert!(stderr.contains(sentence) && stderr.lines().count() == 1, "{args}: {stderr}");
    }
}

#[test]
fn its_help_shows_what_it_takes() {
    let (code, help, _) = run("--help");
    assert_eq!(code, Some(0));
    for part in ["vhost-user:PATH[,KEY]", "queues=N", "--engine", "--cpus", "--json"] {
        assert!(help.contains(part), "{part}");
    }
    for part in ["virtio-user", "--rx-path", "--control"] {
        assert!(!help.contains(part), "{part}");
    }
}

#[test]
fn a_signal_ends_it_with_statistics_and_without_its_sockets() {
    let dir = TempDir::new().unwrap();
    let sockets = ["a", "b"].map(|name| dir.as_path().join(name));
    let ports = sockets.each_ref().map(|socket| format!("--port vhost-user:{},queues=2", socket.display())).join(" ");
    let mut child = daemon(&format!("{ports} --engine macswap")).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert!(line.starts_with("port 0 vhost-user:") && line.contains("link down"), "{line}");
    // A front-end that comes and goes does not matter.
    drop(UnixStream::connect(&sockets[1]).unwrap());
    terminate(child.id());
    let rest: Vec<_> = out.lines().map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line.starts_with("stream 1:1 -> 0:1 on worker 0")), "{rest:?}");
    assert!(child.wait().unwrap().success());
    assert!(sockets.iter().all(|socket| !socket.exists()));
}

#[test]
fn too_few_descriptors_end_one_connection_with_a_sentence() {
    let dir = TempDir::new().unwrap();
    let socket = dir.as_path().join("s");
    let port = format!("--port vhost-user:{},queues=128", socket.display());
    let mut command = Command::new("sh");
    // A hard limit: the soft one is raised to it.
    let script = format!("ulimit -n 100; exec {} {port}", env!("CARGO_BIN_EXE_twinring-backend"));
    command.args(["-c", &script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let connect = || {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            // It comes up, or clears the last connection away.
            let frontend = Frontend::connect(&socket, 256).ok().filter(|frontend| frontend.get_features().is_ok());
            if let Some(frontend) = frontend {
                return frontend;
            }
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    let call = EventFd::new(0).unwrap();
    let frontend = connect();
    let sent = (0..256).take_while(|&ring| frontend.set_vring_call(ring, &call).is_ok()).count();
    assert!(frontend.get_features().is_err(), "{sent} calls");
    let sentence = said.find(|line| line.contains("connection ended")).unwrap();
    assert!(
        sentence.contains("one more than the 100 that this process may have (ulimit -n); raise that"),
        "{sentence}"
    );
    // What fits is served.
    let frontend = connect();
    (0..8).for_each(|ring| frontend.set_vring_call(ring, &call).unwrap());
    frontend.get_features().unwrap();
    terminate(child.id());
    assert!(child.wait().unwrap().success());
}

#[test]
fn json_is_one_report() {
    let dir = TempDir::new().unwrap();
    let (code, stdout, stderr) = run(&format!("--port vhost-user:{}/s --json --seconds 1", dir.as_path().display()));
    assert_eq!(code, Some(0), "{stderr}");
    let report: FinalReport = serde_json::from_str(&stdout).unwrap();
    assert!(report.ok && report.stats.ports[0].state.link == "down");
}
