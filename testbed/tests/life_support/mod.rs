//! Processes of ours that are killed.

use std::process::{Child, Command, Stdio};

/// Packets that such a process takes at a time.
pub const BURST: u64 = 32;

/// A process that sends back what it gets; killed when dropped.
pub struct Process(Child);

impl Process {
    /// This program in its hidden `role`, with one port and further arguments.
    pub fn start(role: &str, port: &str, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_twinring"));
        command.args([role, "--engine", "io", "--burst", &BURST.to_string(), "--port", port]).args(more);
        command.env("RUST_LOG", "error").stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL: it has no say in what it leaves behind.
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}
