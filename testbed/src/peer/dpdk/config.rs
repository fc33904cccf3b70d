//! What testpmd is asked to be, and the command line that makes it so.

use std::env;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicU32, Ordering};

/// A testpmd to be started: [`Testpmd::launch`](super::Testpmd::launch).
#[derive(Debug, Clone)]
pub struct Config {
    /// `/`, or a directory that holds another DPDK and is entered by `chroot` (as root). The caller mounts `/proc`, `/sys`,
    /// `/dev` and the sockets' directory in it.
    pub root: PathBuf,
    /// Which end it plays.
    pub role: Role,
    /// The CPU it polls on; its prompt runs there too.
    pub cpu: usize,
    /// The forwarding engine.
    pub forward: Forward,
    /// Frames a burst (1..=512).
    pub burst: u16,
    /// `txonly`: bytes of each segment of a frame, without FCS; none for one segment of 64.
    pub txpkts: Vec<u16>,
    /// Mbufs in its pool.
    pub mbufs: u32,
    /// Bytes of an mbuf's data room, headroom included; none for DPDK's 2176.
    pub mbuf_size: Option<u16>,
    /// Where its memory comes from.
    pub memory: Memory,
    /// How much of it, in MiB; `mbufs` times data room has to fit.
    pub memory_mib: u32,
    /// More testpmd options, as they are.
    pub options: Vec<String>,
}

/// Queues of `net_vhost` whose counters its port adds up (`RTE_ETHDEV_QUEUE_STAT_CNTRS`, in 22.11). It serves more.
pub const VHOST_QUEUES_MAX: u16 = 16;
/// Queue pairs that `net_virtio_user` has at most (22.11: "arg queues 9 exceeds the limit 8").
pub const VIRTIO_USER_QUEUES_MAX: u16 = 8;

/// Which end of the ring testpmd plays.
#[derive(Debug, Clone)]
pub enum Role {
    /// The host.
    Vhost(Vhost),
    /// The guest.
    VirtioUser(VirtioUser),
}

/// testpmd's `net_vhost`.
#[derive(Debug, Clone)]
pub struct Vhost {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Connect to the socket instead of listening on it.
    pub client: bool,
    /// Queue pairs.
    pub queues: u16,
}

/// testpmd's `net_virtio_user`.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is a devarg of DPDK's, under its name there")]
pub struct VirtioUser {
    /// The vhost-user socket.
    pub socket: PathBuf,
    /// Listen on the socket instead of connecting to it.
    pub server: bool,
    /// Queue pairs.
    pub queues: u16,
    /// Descriptors a ring.
    pub queue_size: u16,
    /// Offer `VIRTIO_F_IN_ORDER`.
    pub in_order: bool,
    /// Offer `VIRTIO_NET_F_MRG_RXBUF`.
    pub mrg_rxbuf: bool,
    /// Offer `VIRTIO_F_RING_PACKED`.
    pub packed_vq: bool,
    /// Let it choose its vector paths (a packed one needs `in_order` and AVX-512).
    pub vectorized: bool,
    /// Its Ethernet address.
    pub mac: [u8; 6],
}

/// testpmd's forwarding engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forward {
    /// Forward unchanged.
    Io,
    /// Receive and free.
    RxOnly,
    /// Send 198.18.0.1 to 198.18.0.2, UDP port 9.
    TxOnly,
    /// Forward with new Ethernet addresses.
    Mac,
    /// Forward with the Ethernet addresses exchanged.
    MacSwap,
}

/// Where testpmd's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Huge pages if enough are free, else ordinary ones.
    Auto,
    /// Huge pages of 2 MiB.
    Huge,
    /// Ordinary pages, in one memfd.
    Plain,
}

impl Config {
    /// A testpmd in `role` on `cpu`: engine `io`, bursts of 32, 16384 mbufs in 128 MiB, from the root that the environment
    /// variable `TWINRING_DPDK_ROOT` names, or `/`.
    #[must_use]
    pub fn new(role: Role, cpu: usize) -> Self {
        Self {
            root: env::var_os("TWINRING_DPDK_ROOT").map_or_else(|| "/".into(), PathBuf::from),
            role,
            cpu,
            forward: Forward::Io,
            burst: 32,
            txpkts: Vec::new(),
            mbufs: 16384,
            mbuf_size: None,
            memory: Memory::Auto,
            memory_mib: 128,
            options: Vec::new(),
        }
    }

    pub(super) fn command(&self, runtime_dir: &Path) -> Command {
        let mut command = testpmd_in(&self.root);
        command.env("RUNTIME_DIRECTORY", runtime_dir);
        // The main lcore only waits at the prompt, so it may share the CPU of the one that forwards.
        command.args(["--lcores", &format!("0@{cpu},1@{cpu}", cpu = self.cpu), "--no-pci", "--no-telemetry"]);
        command.args(["-m", &self.memory_mib.to_string(), "--log-level=pmd.net.virtio.init:info"]);
        if self.memory == Memory::Huge || self.memory == Memory::Auto && huge_pages_free_mib() >= self.memory_mib {
            // One file for all of it: virtio-user passes at most 8 descriptors (VHOST_USER_SET_MEM_TABLE).
            command.args(["--in-memory", "--single-file-segments"]);
        } else {
            command.args(["--no-huge", "--no-shconf"]);
        }
        if matches!(&self.role, Role::VirtioUser(VirtioUser { packed_vq: true, vectorized: true, .. })) {
            command.arg("--force-max-simd-bitwidth=512");
        }
        command.args(["--vdev", &self.role.vdev(), "--", "-i", "--nb-cores=1"]);
        self.testpmd_options(&mut command);
        command
    }

    fn testpmd_options(&self, command: &mut Command) {
        let (queues, size) = match &self.role {
            Role::Vhost(vhost) => (vhost.queues, 1024),
            Role::VirtioUser(user) => (user.queues, user.queue_size),
        };
        command.args([format!("--rxq={queues}"), format!("--txq={queues}")]);
        command.args([format!("--rxd={size}"), format!("--txd={size}"), format!("--burst={}", self.burst)]);
        command.args([format!("--forward-mode={}", self.forward), format!("--total-num-mbufs={}", self.mbufs)]);
        // Frames that wait at the start are traffic like any other; and no peer yet is no reason to wait nine seconds.
        command.args(["--no-flush-rx", "--disable-link-check"]);
        if !self.txpkts.is_empty() {
            let lengths: Vec<String> = self.txpkts.iter().map(u16::to_string).collect();
            command.arg(format!("--txpkts={}", lengths.join(",")));
        }
        if let Some(size) = self.mbuf_size {
            command.arg(format!("--mbuf-size={size}"));
        }
        command.args(&self.options);
    }
}

impl Role {
    fn vdev(&self) -> String {
        match self {
            Self::Vhost(Vhost { socket, client, queues }) => {
                format!("net_vhost0,iface={},queues={queues},client={}", socket.display(), u8::from(*client))
            }
            Self::VirtioUser(user) => {
                let mac: Vec<String> = user.mac.iter().map(|byte| format!("{byte:02x}")).collect();
                let flag = u8::from;
                format!(
                    "net_virtio_user0,mac={},path={},server={},queues={},queue_size={},in_order={},mrg_rxbuf={},packed_vq={},vectorized={}",
                    mac.join(":"),
                    user.socket.display(),
                    flag(user.server),
                    user.queues,
                    user.queue_size,
                    flag(user.in_order),
                    flag(user.mrg_rxbuf),
                    flag(user.packed_vq),
                    flag(user.vectorized),
                )
            }
        }
    }

    /// The socket on which it listens before it takes commands, if it does.
    pub(super) fn server_socket(&self) -> Option<&Path> {
        match self {
            Self::VirtioUser(VirtioUser { server: true, socket, .. }) => Some(socket),
            _ => None,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Vhost(vhost) => write!(f, "vhost on {}", vhost.socket.display()),
            Self::VirtioUser(user) => write!(f, "virtio-user on {}", user.socket.display()),
        }
    }
}

impl fmt::Display for Forward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Io => "io",
            Self::RxOnly => "rxonly",
            Self::TxOnly => "txonly",
            Self::Mac => "mac",
            Self::MacSwap => "macswap",
        })
    }
}

impl Vhost {
    /// A host with one queue pair that listens on `socket`.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), client: false, queues: 1 }
    }
}

impl VirtioUser {
    /// A guest with one pair of split rings of 1024 that connects to `socket`; neither in order nor mergeable.
    #[must_use]
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            server: false,
            queues: 1,
            queue_size: 1024,
            in_order: false,
            mrg_rxbuf: false,
            packed_vq: false,
            vectorized: false,
            mac: [0x00, 0x01, 0x02, 0x03, 0x04, 0x05],
        }
    }
}

/// A directory, as seen inside any root, that no other testpmd uses.
pub(super) fn runtime_dir() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("/tmp/twinring-testpmd-{}-{number}", process::id()).into()
}

/// The command that starts testpmd in `root`: killed when the thread that started it is gone (so that a killed test leaves no
/// testpmd behind), and printing line by line into a pipe.
pub(super) fn testpmd_in(root: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if root != Path::new("/") {
        command.arg("chroot").arg(root);
    }
    command.args(["stdbuf", "-oL", "dpdk-testpmd"]);
    command
}

/// Where `path`, as seen inside `root`, lies for us.
pub(super) fn in_root(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// How much memory free huge pages of the default size hold, in MiB.
fn huge_pages_free_mib() -> u32 {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| -> u64 {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    let free_kib = field("HugePages_Free:").saturating_sub(field("HugePages_Rsvd:")) * field("Hugepagesize:");
    u32::try_from(free_kib / 1024).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(config: &Config) -> String {
        let command = config.command(Path::new("/tmp/x"));
        command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_field_of_a_guest_reaches_the_command_line() {
        let user = VirtioUser {
            server: true,
            queues: 2,
            queue_size: 256,
            in_order: true,
            mrg_rxbuf: true,
            packed_vq: true,
            vectorized: true,
            ..VirtioUser::new("/tmp/s")
        };
        let config = Config {
            forward: Forward::TxOnly,
            burst: 16,
            txpkts: vec![64, 1000],
            mbufs: 4096,
            mbuf_size: Some(1024),
            memory: Memory::Plain,
            memory_mib: 64,
            options: vec!["--txonly-multi-flow".into()],
            ..Config::new(Role::VirtioUser(user), 3)
        };
        let line = line(&config);
        for part in [
            "--lcores 0@3,1@3",
            "-m 64",
            "--no-huge --no-shconf",
            "--force-max-simd-bitwidth=512",
            "mac=00:01:02:03:04:05,path=/tmp/s,server=1,queues=2,queue_size=256,in_order=1,mrg_rxbuf=1,packed_vq=1,vectorized=1",
            "--rxq=2 --txq=2 --rxd=256 --txd=256 --burst=16 --forward-mode=txonly --total-num-mbufs=4096",
            "--txpkts=64,1000 --mbuf-size=1024 --txonly-multi-flow",
        ] {
            assert!(line.contains(part), "{part:?} is not in {line}");
        }
    }

    #[test]
    fn a_host_on_huge_pages_in_another_root() {
        let vhost = Vhost { client: true, queues: 3, ..Vhost::new("/tmp/s") };
        let config = Config { root: "/srv/forky".into(), memory: Memory::Huge, ..Config::new(Role::Vhost(vhost), 0) };
        let line = line(&config);
        assert!(
            line.starts_with("--pdeathsig KILL chroot /srv/forky stdbuf -oL dpdk-testpmd --lcores 0@0,1@0"),
            "{line}"
        );
        assert!(
            line.contains("--in-memory --single-file-segments --vdev net_vhost0,iface=/tmp/s,queues=3,client=1 -- -i")
        );
        assert_eq!(in_root(&config.root, Path::new("/tmp/x")), Path::new("/srv/forky/tmp/x"));
    }
}
