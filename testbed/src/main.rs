//! `twinring`: runs the two ends against each other, and against everybody else's.

use std::process::ExitCode;

fn main() -> ExitCode {
    testbed::cli::main(std::env::args_os())
}
