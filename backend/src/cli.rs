//! The daemon's command line: the forwarder's, with ports that serve sockets.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use pmd::fwd::{Address, Options, exit_code, mac, next_port_number, parse, start};
use pmd::mem::Arena;
use pmd::port::Port;

use crate::control::{Control, Mode};
use crate::port::vhost_user::{VhostUserConfig, VhostUserPort};

const PORT_HELP: &str = "Port, as vhost-user:PATH[,KEY]...; repeatable: 0 and 1, 2 and 3 and so on forward to each other, an \
    odd last one to itself. Keys: queues=N pairs (1; 1 to 128), client (connect to a front-end that listens at PATH)";

/// The path options are the driver's: here every path follows from the features that a guest has chosen.
#[derive(Parser)]
#[command(
    name = "twinring-backend",
    version,
    about = "Serves virtio-net devices over vhost-user, and forwards between them",
    mut_arg("ports", |arg| arg.help(PORT_HELP)),
    mut_arg("rx_path", |arg| arg.hide(true).value_parser(no_path)),
    mut_arg("tx_path", |arg| arg.hide(true).value_parser(no_path))
)]
struct Cli {
    #[command(flatten)]
    options: Options,
    /// Directory in which packed rings leave their positions, for a daemon that is started after this one was killed: best one
    /// that does not outlive the machine, such as /run/twinring
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

fn no_path(_: &str) -> Result<String, &'static str> {
    Err("the features that each guest chooses settle the path; leave the option out")
}

/// `twinring-backend`: parses `args` (program name first), serves the ports and runs until told to end.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    match parse::<Cli>(args) {
        Ok(cli) => serve(&cli),
        Err(code) => code,
    }
}

fn serve(cli: &Cli) -> ExitCode {
    match Control::new() {
        Ok(control) => start("twinring-backend", "vhost-user", &cli.options, &|address, _: &[Arc<Arena>]| {
            open(address, &control, cli.state_dir.as_ref())
        }),
        Err(error) => exit_code("twinring-backend", &Err(error.into())),
    }
}

/// Opens the port of an address that the backend serves. It comes back not yet configured.
fn open(address: &Address, control: &Control, state_dir: Option<&PathBuf>) -> anyhow::Result<Box<dyn Port>> {
    let port = next_port_number();
    let config = VhostUserConfig {
        address: address.to_string(),
        path: address.path().into(),
        mode: if address.flag("client") { Mode::Client } else { Mode::Server },
        queue_pairs: address.number("queues").unwrap_or(1) as u16,
        port,
        mac: mac(port),
        state_dir: state_dir.cloned(),
    };
    Ok(Box::new(VhostUserPort::open(config, control)?))
}
