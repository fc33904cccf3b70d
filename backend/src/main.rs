//! `twinring-backend`: the host daemon.

use std::process::ExitCode;

fn main() -> ExitCode {
    backend::main(std::env::args_os())
}
