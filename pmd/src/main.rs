//! `twinring-fwd`: forwards frames between ports that our drivers drive.

use std::process::ExitCode;

fn main() -> ExitCode {
    pmd::fwd::main(std::env::args_os(), &pmd::fwd::open)
}
