//! What may be at the path, and who may be behind it.

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use pmd::virtio::user::{Mode, UserConfig, UserError, UserTransport};
use socket2::{Domain, SockAddr, Socket, Type};

use super::{config, recorder, temp_dir};

fn failure(config: &UserConfig) -> UserError {
    UserTransport::connect(config).unwrap_err()
}

fn server(path: &Path) -> UserConfig {
    UserConfig { mode: Mode::Server, ..config(path) }
}

/// A socket whose server is gone.
fn stale(path: &Path) {
    drop(UnixListener::bind(path).unwrap());
    assert!(path.exists());
}

#[test]
fn a_missing_socket_and_a_missing_directory_are_named() {
    let dir = temp_dir();
    let path = dir.as_path().join("none/socket");
    let missing = failure(&config(&path)).to_string();
    assert_eq!(
        missing,
        format!("no vhost-user socket at {}: start the backend first, or correct the path", path.display())
    );
    assert!(matches!(failure(&server(&path)), UserError::NoDirectory { .. }));
}

#[test]
fn a_stale_socket_is_told_from_a_live_one() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    stale(&path);
    assert!(matches!(failure(&config(&path)), UserError::Refused { .. }));
    assert!(path.exists());
}

#[test]
fn a_path_that_no_socket_can_have_is_refused_with_the_limit() {
    for path in [String::new(), "x".repeat(108), "a\0b".to_owned()].map(PathBuf::from) {
        for error in [failure(&config(&path)), failure(&server(&path))] {
            assert!(matches!(error, UserError::Path { .. }) && error.to_string().contains("107"), "{error}");
        }
    }
}

#[test]
fn a_file_in_the_way_stays() {
    let dir = temp_dir();
    let path = dir.as_path().join("file");
    fs::write(&path, "precious").unwrap();
    assert!(matches!(failure(&config(&path)), UserError::NotASocket { .. }));
    assert!(matches!(failure(&server(&path)), UserError::NotASocket { .. }));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn a_server_replaces_a_stale_socket_and_takes_its_own_away() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    stale(&path);
    let backend = connect_when_there(&path);
    let transport = UserTransport::connect(&server(&path)).unwrap();
    assert!(transport.is_connected() && path.exists());
    drop(transport);
    assert!(!path.exists());
    assert_eq!(backend.join().unwrap().last().unwrap(), "SET_FEATURES 0x140008000");
}

#[test]
fn a_server_leaves_a_live_socket_and_a_successors_socket_alone() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let other = UnixListener::bind(&path).unwrap();
    assert!(matches!(failure(&server(&path)), UserError::InUse { .. }));
    assert!(path.exists());
    drop(other);

    let backend = connect_when_there(&path);
    let transport = UserTransport::connect(&server(&path)).unwrap();
    fs::remove_file(&path).unwrap();
    let _successor = UnixListener::bind(&path).unwrap();
    drop(transport);
    assert!(path.exists());
    backend.join().unwrap();
}

#[test]
fn a_server_that_nobody_comes_to_gives_up_and_leaves_nothing() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let error = failure(&UserConfig { timeout: Duration::from_millis(20), ..server(&path) });
    assert!(matches!(error, UserError::NoPeer { .. }), "{error}");
    assert!(!path.exists());
}

#[test]
fn a_backend_too_busy_to_accept_is_an_error_and_not_a_hang() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let address = SockAddr::unix(&path).unwrap();
    let busy = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    busy.bind(&address).unwrap();
    busy.listen(0).unwrap();
    let _first_in_line = UnixStream::connect(&path).unwrap();
    let error = failure(&UserConfig { timeout: Duration::from_millis(20), ..config(&path) });
    assert!(matches!(error, UserError::TimedOut { .. }), "{error}");
    assert!(matches!(failure(&server(&path)), UserError::InUse { .. }));
}

#[test]
fn a_backend_that_leaves_is_noticed() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let (ready, wait) = std::sync::mpsc::channel();
    let backend = thread::spawn(move || {
        let stream = listener.accept().unwrap().0;
        let end = stream.try_clone().unwrap();
        let served = thread::spawn(move || recorder().serve(stream));
        wait.recv().unwrap();
        end.shutdown(std::net::Shutdown::Both).unwrap();
        served.join().unwrap();
    });
    let mut transport = UserTransport::connect(&config(&path)).unwrap();
    assert!(transport.is_connected());
    ready.send(()).unwrap();
    backend.join().unwrap();
    assert!(!transport.is_connected());
    assert!(matches!(transport.queue_stop(0), Err(UserError::Closed { .. })));
}

#[test]
fn events_never_block_and_reach_both_holders() {
    let dir = temp_dir();
    let path = dir.as_path().join("socket");
    let backend = recorder().listen(&path);
    let transport = UserTransport::connect(&config(&path)).unwrap();
    let kick = transport.kick_fd(1).unwrap();
    kick.write(3).unwrap();
    assert_eq!(transport.kick_fd(1).unwrap().read().unwrap(), 3);
    assert!(kick.read().is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
    assert!(transport.call_fd(1).unwrap().read().is_err());
    assert!(matches!(transport.call_fd(2), Err(UserError::NoSuchQueue { index: 2, queues: 2, .. })));
    drop(transport);
    backend.join().unwrap();
    assert_eq!(kick.write(1).map_err(|error| error.kind()), Ok(()), "the worker's handle outlives the transport");
}

/// A backend in client mode.
fn connect_when_there(path: &Path) -> thread::JoinHandle<Vec<String>> {
    let path = path.to_owned();
    thread::spawn(move || {
        let end = std::time::Instant::now() + Duration::from_secs(10);
        loop {
            match UnixStream::connect(&path) {
                Ok(stream) => return recorder().serve(stream),
                Err(error) if std::time::Instant::now() > end => panic!("nobody listens: {error}"),
                Err(_) => thread::sleep(Duration::from_millis(2)),
            }
        }
    })
}
