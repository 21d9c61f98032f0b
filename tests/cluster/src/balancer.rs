//! HAProxy in front of a cluster's nodes, with the configuration of `deploy/haproxy`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::command::inside;
use crate::forward::Forward;
use crate::layout::{AGENT_PORT, Layout};
use crate::network::SWITCH;
use crate::requirements::find;

const CONFIG: &str = include_str!("../../../deploy/haproxy/haproxy.cfg");
/// How the line of a node begins in it.
const SERVER: &str = "    server n";
/// The nodes that the configuration names.
pub(crate) const NODES: usize = 3;
/// Where it listens at the switch.
const FRONT_PORT: u16 = 8_080;
const STATS: &str = "haproxy.sock";
const POLL: Duration = Duration::from_millis(20);
/// Bound on one answer of HAProxy's own socket.
const ANSWER: Duration = Duration::from_secs(5);

/// A running HAProxy, killed when this is dropped. It is at the switch, so that a node whose link is taken away
/// becomes silent for it.
#[derive(Debug)]
pub struct Balancer {
    process: Child,
    /// From the machine to HAProxy.
    front: Forward,
    /// On each node, from its address to its listeners, which are on its loopback.
    _doors: Vec<Forward>,
    stats: PathBuf,
}

impl Balancer {
    /// Starts one for all nodes, whose agents listen at `AGENT_PORT` of their loopback.
    ///
    /// # Errors
    /// It is not installed, or does not start.
    pub fn start(layout: &Layout) -> Result<Self> {
        let directory = &layout.directory;
        let switch = layout.namespace_path(SWITCH);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, FRONT_PORT));
        let [_, sessions] = Layout::listeners();
        let agent = SocketAddr::from((Ipv4Addr::LOCALHOST, AGENT_PORT));
        let (mut doors, mut outside) = (Vec::new(), Vec::new());
        for host in layout.node_hosts() {
            let door = |to: SocketAddr| (SocketAddr::from((host.address, to.port())), to);
            let pairs = [door(sessions), door(agent)];
            doors.push(Forward::within(&layout.namespace_path(&host.name), &pairs)?);
            outside.push(pairs.map(|(address, _)| address));
        }
        let sessions: Vec<_> = outside.iter().map(|node| node[0]).collect();
        let agents: Vec<_> = outside.iter().map(|node| node[1]).collect();
        let program = inside(&switch, program()?);
        let mut haproxy = command(program, directory, address, &sessions, &agents)?;
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let mut balancer = Self {
            process: haproxy.spawn().context("cannot start haproxy")?,
            front: Forward::open(&switch, &[(any, address)])?,
            _doors: doors,
            stats: directory.join(STATS),
        };
        while balancer.ask("show info").is_err() {
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
        self.front.addresses()[0]
    }

    /// What it takes a node for, such as `UP`, `NOLB` (no new clients) or `DRAIN`.
    ///
    /// # Errors
    /// It does not answer.
    pub fn status(&self, node: &str) -> Result<String> {
        self.statistic(node, "status")
    }

    /// Its open connections to a node, over which clients are served.
    ///
    /// # Errors
    /// It does not answer.
    pub fn connections(&self, node: &str) -> Result<u64> {
        let count = self.statistic(node, "scur")?;
        count
            .parse()
            .with_context(|| format!("`{count}` is no number"))
    }

    /// A column of its table of servers.
    fn statistic(&self, node: &str, column: &str) -> Result<String> {
        let table = self.ask("show stat")?;
        let mut lines = table.lines();
        let header = lines.next().context("no table")?.trim_start_matches("# ");
        let columns: Vec<&str> = header.split(',').collect();
        let index = |name: &str| columns.iter().position(|one| *one == name);
        let (Some(name), Some(wanted)) = (index("svname"), index(column)) else {
            bail!("no columns in {header}");
        };
        for line in lines {
            let fields: Vec<&str> = line.split(',').collect();
            if fields.get(name) == Some(&node) {
                let found = fields.get(wanted).context("a short line")?;
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

/// The path of HAProxy's program.
///
/// # Errors
/// It is not installed.
pub(crate) fn program() -> Result<PathBuf> {
    find("haproxy").context("haproxy is missing (package haproxy)")
}

/// An HAProxy that listens at `address`, with its files in the directory. `haproxy` starts its program.
///
/// # Errors
/// Its files cannot be written.
pub(crate) fn command(
    mut haproxy: Command,
    directory: &Path,
    address: SocketAddr,
    sessions: &[SocketAddr],
    agents: &[SocketAddr],
) -> Result<Command> {
    let [config, own] = ["haproxy.cfg", "haproxy-tests.cfg"].map(|name| directory.join(name));
    let stats = directory.join(STATS);
    let text = format!("global\n    stats socket {} level admin\n", stats.display());
    fs::write(&config, config_for(sessions.len()))
        .and_then(|()| fs::write(&own, text))
        .context("cannot write HAProxy's configuration")?;
    haproxy.arg("-db").arg("-f").arg(config).arg("-f").arg(own);
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

/// The configuration with as many nodes.
fn config_for(nodes: usize) -> String {
    let (mut text, mut servers) = (String::new(), Vec::new());
    for line in CONFIG.lines() {
        if line.starts_with(SERVER) {
            servers.push(line.to_owned());
        } else {
            text.push_str(line);
            text.push('\n');
        }
    }
    let known = servers.len();
    servers.truncate(nodes);
    let further = (known + 1..=nodes)
        .map(|n| format!("{SERVER}{n} \"${{CONMAN_N{n}}}\" agent-port \"${{CONMAN_AGENT{n}}}\""));
    servers.extend(further);
    text + &servers.join("\n") + "\n"
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
