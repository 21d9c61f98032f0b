//! HAProxy in front of a cluster's nodes, with the configuration of `deploy/haproxy`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::node::Node;
use crate::requirements::find;

const CONFIG: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../deploy/haproxy/haproxy.cfg"
);
/// The nodes that the configuration names.
pub(crate) const NODES: usize = 3;
const STATS: &str = "haproxy.sock";
const POLL: Duration = Duration::from_millis(20);
/// Bound on one answer of HAProxy's own socket.
const ANSWER: Duration = Duration::from_secs(5);

/// A running HAProxy, killed when this is dropped.
#[derive(Debug)]
pub struct Balancer {
    process: Child,
    address: SocketAddr,
    stats: PathBuf,
}

impl Balancer {
    /// Starts one for three nodes, whose agents answer at `agents`.
    ///
    /// # Errors
    /// It is not installed, or does not start.
    pub fn start(directory: &Path, nodes: &[Node], agents: &[SocketAddr]) -> Result<Self> {
        let address = free_address()?;
        let stats = directory.join(STATS);
        let sessions: Vec<_> = nodes.iter().map(Node::sessions_address).collect();
        let mut haproxy = command(directory, address, &sessions, agents)?;
        let mut balancer = Self {
            process: haproxy.spawn().context("cannot start haproxy")?,
            address,
            stats,
        };
        while TcpStream::connect(address).is_err() {
            if let Some(status) = balancer.process.try_wait()? {
                let log = fs::read_to_string(directory.join("haproxy.log"));
                bail!("haproxy has ended ({status}): {}", log.unwrap_or_default());
            }
            std::thread::park_timeout(POLL);
        }
        Ok(balancer)
    }

    /// Where it listens for clients.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// What it takes a node for, such as `UP`, `NOLB` (no new clients) or `DRAIN`.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self, node: &str) -> Result<String> {
        let table = self.ask("show stat")?;
        let mut lines = table.lines();
        let header = lines.next().context("no table")?.trim_start_matches("# ");
        let columns: Vec<&str> = header.split(',').collect();
        let column = |name| columns.iter().position(|one| *one == name);
        let (name, status) = (column("svname"), column("status"));
        let (Some(name), Some(status)) = (name, status) else {
            bail!("no columns in {header}");
        };
        for line in lines {
            let fields: Vec<&str> = line.split(',').collect();
            if fields.get(name) == Some(&node) {
                let found = fields.get(status).context("a short line")?;
                return Ok((*found).to_owned());
            }
        }
        bail!("HAProxy knows no {node}")
    }

    /// Sends its socket a command.
    ///
    /// # Errors
    /// It does not answer.
    pub fn ask(&self, command: &str) -> Result<String> {
        let mut socket = UnixStream::connect(&self.stats).context("HAProxy's socket")?;
        socket.set_read_timeout(Some(ANSWER))?;
        writeln!(socket, "{command}")?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

/// An HAProxy that listens at `address`, with its files in the directory.
///
/// # Errors
/// It is not installed, or its files cannot be written.
pub(crate) fn command(
    directory: &Path,
    address: SocketAddr,
    sessions: &[SocketAddr],
    agents: &[SocketAddr],
) -> Result<Command> {
    let program = find("haproxy").context("haproxy is missing (package haproxy)")?;
    if sessions.len() != NODES || agents.len() != NODES {
        bail!("{CONFIG} names {NODES} nodes");
    }
    let own = directory.join("haproxy-tests.cfg");
    let stats = directory.join(STATS);
    let text = format!("global\n    stats socket {} level admin\n", stats.display());
    fs::write(&own, text).context("cannot write HAProxy's configuration")?;
    let mut haproxy = Command::new(program);
    haproxy.arg("-db").arg("-f").arg(CONFIG).arg("-f").arg(own);
    haproxy.env("CONMAN_LISTEN", address.to_string());
    for (index, (sessions, agent)) in sessions.iter().zip(agents).enumerate() {
        let number = index + 1;
        haproxy.env(format!("CONMAN_N{number}"), sessions.to_string());
        haproxy.env(format!("CONMAN_AGENT{number}"), agent.port().to_string());
    }
    let log = fs::File::create(directory.join("haproxy.log")).context("cannot log")?;
    haproxy
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot share a log")?)
        .stderr(log);
    Ok(haproxy)
}

impl Drop for Balancer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether it is installed.
#[must_use]
pub fn has_haproxy() -> bool {
    find("haproxy").is_some()
}

fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").context("no free port")?;
    listener.local_addr().context("a listener has an address")
}
