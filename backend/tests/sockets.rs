//! Socket files, and who may connect when.
mod support;

use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use backend::control::{Control, Mode};
use backend::error::Error;
use pmd::virtio::spec::feature;
use support::{Client, GET_FEATURES, Mock, OFFERED, Server};
use vmm_sys_util::tempdir::TempDir;

fn refusal(control: &Control, path: &std::path::Path) -> Error {
    control.add(path, Mode::Server, Box::new(Mock::default())).unwrap_err()
}

#[test]
fn a_stale_socket_is_replaced_and_a_served_one_is_not() {
    let dir = TempDir::new().unwrap();
    let path = dir.as_path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "stale: the file outlives its listener");
    let control = Control::new().unwrap();
    control.add(&path, Mode::Server, Box::new(Mock::default())).unwrap();
    let error = refusal(&Control::new().unwrap(), &path);
    assert!(matches!(error, Error::SocketInUse { .. }), "{error}");
    Client::connect_and_get_features(&path);
}

#[test]
fn what_is_not_a_usable_socket_path_is_refused_and_left_alone() {
    let dir = TempDir::new().unwrap();
    let control = Control::new().unwrap();
    let file = dir.as_path().join("file");
    std::fs::write(&file, "precious").unwrap();
    assert!(matches!(refusal(&control, &file), Error::SocketNotASocket { .. }));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    let error = refusal(&control, &dir.as_path().join("no/such/directory"));
    assert!(matches!(error, Error::Socket { .. }), "{error}");
    let error = refusal(&control, &dir.as_path().join("x".repeat(120)));
    assert!(error.to_string().contains("107"), "{error}");
    assert!(matches!(refusal(&control, &PathBuf::new()), Error::SocketPath { .. }));
}

#[test]
fn the_socket_file_goes_with_the_daemon_unless_it_is_somebody_elses_by_then() {
    let dir = TempDir::new().unwrap();
    let (ours, theirs) = (dir.as_path().join("ours"), dir.as_path().join("theirs"));
    let control = Control::new().unwrap();
    control.add(&ours, Mode::Server, Box::new(Mock::default())).unwrap();
    control.add(&theirs, Mode::Server, Box::new(Mock::default())).unwrap();
    std::fs::remove_file(&theirs).unwrap();
    let _other = UnixListener::bind(&theirs).unwrap();
    drop(control);
    assert!(!ours.exists());
    assert!(theirs.exists());
}

#[test]
fn a_second_front_end_is_refused_while_one_is_connected() {
    let server = Server::new();
    let first = Client::connect_and_get_features(&server.path);
    let second = Client::connect(&server.path);
    assert!(second.receive().is_none(), "closed without a word");
    assert_eq!(first.ask_u64(GET_FEATURES), OFFERED | feature::PROTOCOL_FEATURES, "the first one goes on");
    drop(first);
    Client::connect_and_get_features(&server.path);
}

#[test]
fn a_client_connects_when_its_server_appears_and_again_after_a_disconnect() {
    let dir = TempDir::new().unwrap();
    let path = dir.as_path().join("socket");
    let control = Control::new().unwrap();
    control.add(&path, Mode::Client, Box::new(Mock::default())).unwrap();
    let listener = UnixListener::bind(&path).unwrap();
    for round in 0..2 {
        let client = Client::over(listener.accept().unwrap().0);
        assert_eq!(client.ask_u64(GET_FEATURES), OFFERED | feature::PROTOCOL_FEATURES, "round {round}");
    }
}

#[test]
fn one_thread_serves_many_sockets_and_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let control = Control::new().unwrap();
    let paths: Vec<_> = (0..20).map(|i| dir.as_path().join(format!("socket{i}"))).collect();
    for path in &paths {
        control.add(path, Mode::Server, Box::new(Mock::default())).unwrap();
    }
    let clients: Vec<_> = paths.iter().map(|path| Client::connect(path)).collect();
    for client in &clients {
        assert_eq!(client.ask_u64(GET_FEATURES), OFFERED | feature::PROTOCOL_FEATURES);
    }
    drop(control);
    for (client, path) in clients.iter().zip(&paths) {
        assert!(client.receive().is_none(), "connections end with the control plane");
        assert!(!path.exists());
    }
}

#[test]
fn a_server_without_descriptors_for_a_moment_serves_again() {
    // In a process of its own, because the limit is the whole process's.
    const CHILD: &str = "TWINRING_TEST_FEW_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "a_server_without_descriptors_for_a_moment_serves_again"]).env(CHILD, "1");
        assert!(child.output().unwrap().status.success());
        return;
    }
    let server = Server::new();
    let mut hoard = Vec::new();
    let limit = rustix::process::Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        hoard.push(file);
    }
    hoard.pop();
    let client = Client::connect(&server.path);
    std::thread::sleep(std::time::Duration::from_millis(300));
    drop(hoard);
    drop(client);
    Client::connect_and_get_features(&server.path);
}
