//! What everything of a cluster is called, so that every process finds it.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use conman_linux::ProcessIdentity;
use serde::{Deserialize, Serialize};

/// In memory: what dies here are processes, never the machine, and a disk that others keep busy would
/// make leaders change and nodes late.
const MEMORY: &str = "/dev/shm";
/// Kernels from here on map owners of files in memory.
const MEMORY_SINCE: (u32, u32) = (6, 6);
/// Room that a cluster may take: each member allocates 64 MB segments of its log ahead.
const ROOM_BYTES: u64 = 2 << 30;

/// What the names of a cluster's directory and namespaces begin with.
pub(crate) const PREFIX: &str = "conman-cluster-";
/// Where named network namespaces are, as ip-netns(8) has them.
pub(crate) const NAMESPACES: &str = "/run/netns";

const FILE: &str = "cluster.json";
const SUBNET: [u8; 3] = [10, 77, 0];
/// Members' addresses begin here, nodes' at 1.
const FIRST_MEMBER: u8 = 101;
/// The bridge's own address.
pub(crate) const SWITCH_ADDRESS: Ipv4Addr = Ipv4Addr::new(SUBNET[0], SUBNET[1], SUBNET[2], 254);

const API_PORT: u16 = 7700;
const SESSIONS_PORT: u16 = 7701;
const PEERS_PORT: u16 = 7702;
/// Where a node's agent for balancers listens, in its namespace.
pub const AGENT_PORT: u16 = 7703;
/// Where members answer clients.
pub(crate) const ETCD_PORT: u16 = 2379;
const ETCD_PEER_PORT: u16 = 2380;
const ETCD_TLS_PORT: u16 = 2_381;

/// Most nodes, and most members.
pub(crate) const MOST: u8 = 100;

/// A cluster as its file tells of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Layout {
    /// Tells it from other clusters of the machine.
    pub tag: String,
    pub directory: PathBuf,
    pub nodes: u8,
    pub members: u8,
    /// The process that is to remove it; `None` for one that outlives its maker.
    pub owner: Option<ProcessIdentity>,
    /// The `conman` that its nodes run.
    pub binary: PathBuf,
    /// Those nodes that run another one.
    #[serde(default)]
    pub binaries: BTreeMap<String, PathBuf>,
    /// Whether its sessions are Docker's.
    #[serde(default)]
    pub docker: bool,
    /// Whether those of some templates are, by a daemon of the cluster's own.
    #[serde(default)]
    pub docker_too: bool,
    /// Whether each node has a Docker Engine, which runs its sessions.
    #[serde(default)]
    pub docker_each: bool,
    /// The port on the machine's loopback of the first node's API, the next one being its sessions',
    /// and ten further on for each node; 0 where every process makes its own.
    pub first_port: u16,
    /// The nodes' values of `node.id_range`, `n1`'s first.
    #[serde(default)]
    pub id_ranges: Vec<String>,
}

/// A machine of a cluster: a network namespace with one address.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Host {
    pub name: String,
    pub address: Ipv4Addr,
}

impl Layout {
    /// The nodes' hosts, `n1` first.
    #[must_use]
    pub fn node_hosts(&self) -> Vec<Host> {
        (1..=self.nodes).map(|n| host("n", n, n)).collect()
    }

    /// The etcd members' hosts, `e1` first.
    #[must_use]
    pub fn member_hosts(&self) -> Vec<Host> {
        (1..=self.members)
            .map(|n| host("e", n, FIRST_MEMBER - 1 + n))
            .collect()
    }

    /// All of them.
    #[must_use]
    pub fn hosts(&self) -> Vec<Host> {
        let mut hosts = self.node_hosts();
        hosts.append(&mut self.member_hosts());
        hosts
    }

    /// A host by its name.
    ///
    /// # Errors
    /// When there is none, with the names that there are.
    pub fn host(&self, name: &str) -> Result<Host> {
        let hosts = self.hosts();
        let found = hosts.iter().find(|host| host.name == name).cloned();
        found.with_context(|| {
            let names: Vec<String> = hosts.into_iter().map(|host| host.name).collect();
            format!("there is no host {name}, only {}", names.join(", "))
        })
    }

    /// The name of a host's network namespace; that of `switch` holds the bridge.
    #[must_use]
    pub fn namespace(&self, host: &str) -> String {
        format!("{PREFIX}{}-{host}", self.tag)
    }

    /// Where the namespace can be entered.
    #[must_use]
    pub fn namespace_path(&self, host: &str) -> PathBuf {
        Path::new(NAMESPACES).join(self.namespace(host))
    }

    /// A program on a host, which neither the end of a terminal nor Ctrl-C reaches.
    #[must_use]
    pub fn command(&self, host: &str, program: &Path) -> std::process::Command {
        crate::etcd::detached(&self.namespace_path(host), program)
    }

    /// A host's own directory.
    #[must_use]
    pub fn host_directory(&self, host: &str) -> PathBuf {
        self.directory.join(host)
    }

    /// A node's state directory.
    #[must_use]
    pub fn state_dir(&self, node: &str) -> PathBuf {
        self.host_directory(node).join("state")
    }

    /// What a node knows the others by, where that is a secret: the same on all of them, unless a
    /// test writes another one.
    #[must_use]
    pub fn secret(&self, node: &str) -> PathBuf {
        self.host_directory(node).join("fleet.key")
    }

    /// A node's admin socket.
    #[must_use]
    pub fn socket(&self, node: &str) -> PathBuf {
        self.host_directory(node).join("conman.sock")
    }

    /// A node's value of `node.id_range`.
    pub(crate) fn id_range(&self, host: &Host) -> &str {
        let own = self.node_hosts().iter().position(|node| node == host);
        &self.id_ranges[own.expect("a node")]
    }

    /// What a node runs.
    #[must_use]
    pub fn binary(&self, node: &str) -> &Path {
        self.binaries.get(node).unwrap_or(&self.binary)
    }

    /// A directory below which all sessions may bind, as if it were a shared file system.
    #[must_use]
    pub fn shared(&self) -> PathBuf {
        self.directory.join("shared")
    }

    /// A node's listeners within its namespace: API and sessions.
    #[must_use]
    pub fn listeners() -> [SocketAddr; 2] {
        [API_PORT, SESSIONS_PORT].map(|port| (Ipv4Addr::LOCALHOST, port).into())
    }

    /// Where they are reached from the machine itself; anywhere free unless ports were chosen.
    #[must_use]
    pub fn machine_addresses(&self, index: usize) -> [SocketAddr; 2] {
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        let first = match self.first_port {
            0 => [0, 0],
            first => [first + 10 * index, first + 10 * index + 1],
        };
        first.map(|port| (Ipv4Addr::LOCALHOST, port).into())
    }

    /// Where a node's agent for balancers is reached from the machine, if it has one and ports were
    /// chosen.
    #[must_use]
    pub fn agent_address(&self, index: usize) -> SocketAddr {
        let [_, sessions] = self.machine_addresses(index);
        (Ipv4Addr::LOCALHOST, sessions.port() + 1).into()
    }

    /// Where the machine reaches the balancer, where ports were chosen.
    #[must_use]
    pub fn balancer_address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.first_port - 1).into()
    }

    /// What of clients comes to members.
    #[must_use]
    pub fn endpoints(&self) -> Vec<String> {
        let urls = self.member_hosts().into_iter();
        urls.map(|host| format!("http://{}:{ETCD_PORT}", host.address))
            .collect()
    }

    /// Writes the file by which others know the cluster. It comes first of all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn save(&self) -> Result<()> {
        let path = self.directory.join(FILE);
        let text = serde_json::to_string_pretty(self).context("a layout is plain")?;
        // Renamed into place, since another process may be looking for dead ones right now.
        let partial = path.with_extension("new");
        std::fs::write(&partial, text)
            .and_then(|()| std::fs::rename(&partial, &path))
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Reads it.
    ///
    /// # Errors
    /// When it is not there or not understood.
    pub fn load(directory: &Path) -> Result<Self> {
        let path = directory.join(FILE);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("cannot understand {}", path.display()))
    }

    /// Where an etcd member keeps its data.
    #[must_use]
    pub fn etcd_directory(&self, member: &str) -> PathBuf {
        self.host_directory(member).join("data")
    }
}

/// Where clusters may have their directories, the best first.
#[must_use]
pub(crate) fn places() -> Vec<PathBuf> {
    let memory = Path::new(MEMORY);
    let roomy = rustix::fs::statvfs(memory)
        .is_ok_and(|room| room.f_bavail.saturating_mul(room.f_frsize) > ROOM_BYTES);
    let mut places = vec![std::env::temp_dir()];
    if roomy && kernel().is_some_and(|version| version >= MEMORY_SINCE) {
        places.insert(0, memory.to_owned());
    }
    places
}

/// The directory of the cluster with this tag, if there is one.
#[must_use]
pub(crate) fn find(tag: &str) -> Option<PathBuf> {
    let name = format!("{PREFIX}{tag}");
    let all = [PathBuf::from(MEMORY), std::env::temp_dir()];
    let mut directories = all.into_iter().map(|place| place.join(&name));
    directories.find(|directory| directory.exists())
}

fn kernel() -> Option<(u32, u32)> {
    let uname = rustix::system::uname();
    let mut numbers = uname.release().to_str().ok()?.split(['.', '-']);
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

impl Host {
    /// Where an etcd member listens for clients.
    #[must_use]
    pub fn etcd(&self) -> SocketAddr {
        (self.address, ETCD_PORT).into()
    }

    /// Where one that asks for certificates listens for nodes.
    pub(crate) fn etcd_url_with_tls(&self) -> String {
        format!("https://{}:{ETCD_TLS_PORT}", self.address)
    }

    /// Where an etcd member listens for other members.
    #[must_use]
    pub fn etcd_peer(&self) -> SocketAddr {
        (self.address, ETCD_PEER_PORT).into()
    }

    /// Where a node listens for other nodes.
    #[must_use]
    pub fn peers(&self) -> SocketAddr {
        (self.address, PEERS_PORT).into()
    }
}

fn host(kind: &str, number: u8, last: u8) -> Host {
    let [a, b, c] = SUBNET;
    Host {
        name: format!("{kind}{number}"),
        address: Ipv4Addr::new(a, b, c, last),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_names_and_addresses_of_their_own() {
        let layout = Layout {
            tag: "t".to_owned(),
            directory: PathBuf::from("/nowhere"),
            nodes: MOST,
            members: MOST,
            owner: None,
            binary: PathBuf::from("/nowhere/conman"),
            binaries: BTreeMap::new(),
            docker: false,
            docker_too: false,
            docker_each: false,
            first_port: 0,
            id_ranges: Vec::new(),
        };
        let hosts = layout.hosts();
        let names: std::collections::BTreeSet<_> = hosts.iter().map(|host| &host.name).collect();
        let addresses: std::collections::BTreeSet<_> =
            hosts.iter().map(|host| host.address).collect();
        assert_eq!((names.len(), addresses.len()), (200, 200));
        assert!(layout.host("n101").is_err());
    }
}
