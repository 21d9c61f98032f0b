//! The network namespaces of the benchmark, with addresses of the range for benchmarks (RFC 2544):
//!
//! ```text
//! machine 198.18.0.1 ─veth─ .0.2 wire .1.2 ─veth─ .1.1 router .2.1 ─veth─ .2.2 far        quiet
//! ```
//! `wire` is another machine, with one veth pair as its cable. `router` forwards and has no firewall.
//! `quiet` has only its loopback interface, as a session has.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

pub(super) const MACHINE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
pub(super) const WIRE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The address of `wire` on the way to `far`.
pub(super) const WIRE_TO_FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 1, 2);
pub(super) const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 2, 2);

/// Where ip-netns(8) keeps namespaces.
const FOLDER: &str = "/run/netns";

/// A network namespace in which a program is started.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// This process's.
    Machine,
    /// The namespace that this file refers to.
    Namespace(PathBuf),
}

impl Place {
    pub(super) fn of_process(pid: i32) -> Self {
        Self::Namespace(format!("/proc/{pid}/ns/net").into())
    }

    /// A command that runs `program` there.
    pub(super) fn command(&self, program: &Path) -> tokio::process::Command {
        let mut command = match self {
            Self::Machine => tokio::process::Command::new(program),
            Self::Namespace(file) => {
                let mut command = tokio::process::Command::new("nsenter");
                let mut option = std::ffi::OsString::from("--net=");
                option.push(file);
                command.arg(option).arg("--").arg(program);
                command
            }
        };
        command
            // The benchmark handles Ctrl-C at the terminal.
            .process_group(0)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }
}

/// The namespaces, which are removed with all their links when this is dropped.
#[derive(Debug)]
pub(super) struct Namespaces {
    prefix: String,
}

impl Namespaces {
    pub(super) fn new() -> Result<Self> {
        let namespaces = Self {
            prefix: format!("conman-bench-{}", std::process::id()),
        };
        for name in ["wire", "router", "far", "quiet"] {
            ip(&["netns", "add", &namespaces.name(name)], "")?;
            namespaces.batch(name, "link set lo up\n")?;
        }
        let [wire, far] = ["wire", "far"].map(|name| namespaces.name(name));
        let cable = namespaces.cable();
        let machine = format!(
            "link add {cable} type veth peer name eth0 netns {wire}\n\
             address add {MACHINE}/24 dev {cable}\n\
             link set {cable} up\n"
        );
        ip(&["-batch", "-"], &machine)?;
        let router = format!(
            "link add up0 type veth peer name eth1 netns {wire}\n\
             link add down0 type veth peer name eth0 netns {far}\n\
             address add 198.18.1.1/24 dev up0\n\
             address add 198.18.2.1/24 dev down0\n\
             link set up0 up\n\
             link set down0 up\n"
        );
        namespaces.batch("router", &router)?;
        let wire = format!(
            "address add {WIRE}/24 dev eth0\n\
             address add {WIRE_TO_FAR}/24 dev eth1\n\
             link set eth0 up\n\
             link set eth1 up\n\
             route add 198.18.2.0/24 via 198.18.1.1\n\
             route add default via {MACHINE}\n"
        );
        namespaces.batch("wire", &wire)?;
        let far = format!(
            "address add {FAR}/24 dev eth0\n\
             link set eth0 up\n\
             route add default via 198.18.2.1\n"
        );
        namespaces.batch("far", &far)?;
        namespaces.forward_in_router()?;
        Ok(namespaces)
    }

    pub(super) fn place(&self, name: &str) -> Place {
        Place::Namespace(Path::new(FOLDER).join(self.name(name)))
    }

    /// The name of a namespace for ip-netns(8) and HAProxy.
    pub(super) fn name(&self, name: &str) -> String {
        format!("{}-{name}", self.prefix)
    }

    /// The machine's end of its cable.
    pub(super) fn cable(&self) -> String {
        format!("cb{}", std::process::id())
    }

    fn batch(&self, name: &str, lines: &str) -> Result<()> {
        ip(&["-netns", &self.name(name), "-batch", "-"], lines)
    }

    fn forward_in_router(&self) -> Result<()> {
        let namespace = Path::new(FOLDER).join(self.name("router"));
        let status = Command::new("nsenter")
            .arg(format!("--net={}", namespace.display()))
            .args(["--", "sh", "-c"])
            .arg("echo 1 > /proc/sys/net/ipv4/ip_forward")
            .status()
            .context("starting nsenter")?;
        match status.success() {
            true => Ok(()),
            false => bail!("cannot switch forwarding on in a namespace"),
        }
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in ["wire", "router", "far", "quiet"] {
            // After a failed start some do not exist. Links disappear with their namespaces.
            let _ = Command::new("ip")
                .args(["netns", "delete", &self.name(name)])
                .stderr(Stdio::null())
                .status();
        }
    }
}

/// Runs `ip` with `lines` as its input.
pub(super) fn ip(arguments: &[&str], lines: &str) -> Result<()> {
    use std::io::Write as _;

    let mut child = Command::new("ip")
        .args(arguments)
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting ip; install the package iproute2")?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(lines.as_bytes()).context("writing to ip")?;
    }
    let output = child.wait_with_output().context("waiting for ip")?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        bail!("`ip {}` failed: {}", arguments.join(" "), why.trim());
    }
    Ok(())
}
