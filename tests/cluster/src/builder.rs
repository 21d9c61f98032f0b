//! What a cluster is to be like, and the files of its nodes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use conman_core::ownership::Timing;
use conman_e2e::{IdRange, NATIVE_TEMPLATES};

use crate::certificates::{self, Authority};
use crate::layout::{self, Host, Layout, PREFIX};
use crate::node::{config_path, fleet_config_path};
use crate::slots::QUIET_MACHINE;
use crate::{cluster, command, docker, engine, image, node, overlap, timing};

/// A fence that closes long after a takeover.
const UNFENCED_MS: u64 = 600_000;
/// When the nodes' first certificates end.
const FIRST_YEAR: i32 = 2_090;

/// What a cluster is to be like. Without a word it has three nodes and one member of etcd, or
/// three members where figures are judged.
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    pub(crate) nodes: u8,
    pub(crate) members: u8,
    etcd_arguments: Vec<String>,
    /// The `conman` of all nodes, unless it is that of the tests.
    binary: Option<PathBuf>,
    binaries: BTreeMap<String, PathBuf>,
    /// Whether the nodes are hosts without conman.
    pub(crate) bare: bool,
    timing: Timing,
    /// Whether the configuration leaves the time-outs to the nodes.
    derived: bool,
    /// Whether the nodes share etcd, or each has a registry of its own.
    joined: bool,
    /// The node that begins with a registry of its own nevertheless.
    alone_at_first: Option<String>,
    unfenced: Option<String>,
    /// Who signs the nodes' certificates, where they have those instead of a secret.
    authority: Option<Arc<Authority>>,
    /// Who signs those that nodes and etcd know each other by, where etcd asks for some.
    etcd_authority: Option<Arc<Authority>>,
    docker: bool,
    docker_first: bool,
    docker_too: bool,
    docker_each: bool,
    sections: Vec<(Option<String>, String, String)>,
    toml: String,
}

/// One is enough for tests that do not disturb it, and three keep a processor busier than the nodes do.
fn members() -> u8 {
    match std::env::var_os(QUIET_MACHINE) {
        Some(_) => 3,
        None => 1,
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            nodes: 3,
            members: members(),
            etcd_arguments: Vec::new(),
            binary: None,
            binaries: BTreeMap::new(),
            bare: false,
            timing: Timing::default(),
            derived: false,
            joined: true,
            alone_at_first: None,
            unfenced: None,
            authority: None,
            etcd_authority: None,
            docker: false,
            docker_first: false,
            docker_too: false,
            docker_each: false,
            sections: Vec::new(),
            toml: String::new(),
        }
    }
}

impl Builder {
    pub fn nodes(mut self, nodes: u8) -> Self {
        self.nodes = nodes;
        self
    }

    pub fn members(mut self, members: u8) -> Self {
        self.members = members;
        self
    }

    /// Has all nodes run this `conman`.
    pub fn binary(mut self, binary: &Path) -> Self {
        self.binary = Some(binary.to_owned());
        self
    }

    /// The `conman` of all nodes.
    pub(crate) fn conman(&self) -> &Path {
        match &self.binary {
            Some(binary) => binary,
            None => conman_e2e::binary(),
        }
    }

    /// Without conman: hosts for another program.
    pub fn bare(mut self) -> Self {
        self.bare = true;
        self
    }

    /// With [a Docker Engine on each node](crate::Engine), which runs its sessions.
    pub fn docker_each(mut self) -> Self {
        self.docker_each = true;
        self
    }

    /// Has a node run another `conman`.
    pub fn binary_on(mut self, node: &str, binary: &Path) -> Self {
        self.binaries.insert(node.to_owned(), binary.to_owned());
        self
    }

    /// With time-outs that tests can wait for.
    pub fn short(mut self) -> Self {
        self.timing = timing::short();
        self
    }

    /// With a fence that a loaded machine keeps open while etcd elects a leader.
    pub fn patient(mut self) -> Self {
        self.timing = timing::patient();
        self
    }

    /// With the time-outs that nodes derive from their hosts when their configuration has none.
    pub fn derived(mut self) -> Self {
        self.derived = true;
        self
    }

    /// Nodes that know nothing of each other, each with a registry of its own.
    pub fn apart(mut self) -> Self {
        self.joined = false;
        self
    }

    /// Has a node believe that nobody takes it over for ten minutes: its fence is of no use then.
    pub fn unfenced(mut self, node: &str) -> Self {
        self.unfenced = Some(node.to_owned());
        self
    }

    /// Has the nodes know each other by certificates of this authority, and by nothing else.
    pub fn certified(mut self, by: &Arc<Authority>) -> Self {
        self.authority = Some(Arc::clone(by));
        self
    }

    /// Has etcd and the nodes know each other by certificates of this authority.
    pub fn etcd_certified(mut self, by: &Arc<Authority>) -> Self {
        self.etcd_authority = Some(Arc::clone(by));
        self
    }

    /// Has the nodes run their sessions by Docker, which must answer on this machine.
    pub fn docker(mut self) -> Self {
        self.docker = true;
        self
    }

    /// The same, with the cluster's own Docker for the first node and the machine's for all others,
    /// so that the first node's may be stopped: nobody else's containers are its.
    pub fn docker_of_the_first(mut self) -> Self {
        self.docker_first = true;
        self.docker()
    }

    /// Has a node be alone until [it joins](crate::Node::join_fleet).
    pub fn alone_at_first(mut self, node: &str) -> Self {
        self.alone_at_first = Some(node.to_owned());
        self
    }

    /// Has the nodes run those of [a template](overlap::DOCKERS) by a Docker of the cluster's own:
    /// see [`has_docker`](crate::has_docker).
    pub fn docker_too(mut self) -> Self {
        self.docker_too = true;
        self
    }

    /// Whether the nodes share etcd.
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// The fleet's time-outs.
    #[must_use]
    pub fn timing(&self) -> &Timing {
        &self.timing
    }

    /// Further arguments of every etcd member.
    pub fn etcd_arguments(mut self, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned());
        self.etcd_arguments.extend(arguments);
        self
    }

    /// Adds a line to a table of every node's configuration.
    pub fn set(mut self, table: &str, line: &str) -> Self {
        self.sections
            .push((None, table.to_owned(), line.to_owned()));
        self
    }

    /// The same of one node.
    pub fn set_on(mut self, node: &str, table: &str, line: &str) -> Self {
        let section = (Some(node.to_owned()), table.to_owned(), line.to_owned());
        self.sections.push(section);
        self
    }

    /// Adds whole tables, for example templates, to every node's configuration.
    pub fn toml(mut self, text: &str) -> Self {
        self.toml.push_str(text);
        self.toml.push('\n');
        self
    }

    /// Makes directories and configurations, and the image's archive: its path.
    pub(crate) fn prepare(
        &self,
        layout: &Layout,
        native: &conman_e2e::Native,
        witness: &Path,
    ) -> Result<PathBuf> {
        for host in layout.hosts() {
            make_private(&layout.host_directory(&host.name))?;
        }
        for host in layout.member_hosts() {
            // etcd wants its own to itself.
            make_private(&layout.etcd_directory(&host.name))?;
        }
        if let Some(authority) = &self.etcd_authority {
            for host in layout.hosts() {
                certificates::trust_for_etcd(layout, &host, &[authority])?;
                authority.certify_for_etcd(layout, &host, FIRST_YEAR)?;
            }
        }
        overlap::make_journal(layout)?;
        let secret = secret()?;
        for host in layout.node_hosts() {
            write_secret(&layout.secret(&host.name), &secret)?;
            if let Some(authority) = &self.authority {
                authority.trusted_by(layout, &host)?;
                authority.certify(layout, &host, FIRST_YEAR)?;
            }
            let is_alone = self.alone_at_first.as_ref() == Some(&host.name);
            let path = config_path(layout, &host.name);
            write(&path, &self.config(layout, &host, self.joined && !is_alone))?;
            if is_alone {
                let path = fleet_config_path(layout, &host.name);
                write(&path, &self.config(layout, &host, true))?;
            }
        }
        let archive = image::archive(native, witness, &layout.directory)?;
        if layout.docker || layout.docker_too {
            docker::begin(layout, &archive)?;
        }
        if layout.docker_each {
            engine::begin(layout, &archive)?;
        }
        Ok(archive)
    }

    fn docker_table(&self, layout: &Layout, host: &Host) -> String {
        if self.docker_each {
            let socket = engine::socket(layout, &host.name);
            return format!("socket = \"{}\"\n", socket.display());
        }
        let first = layout.node_hosts().first() == Some(host);
        if self.docker_too || self.docker && first == self.docker_first {
            return format!("socket = \"{}\"\n", docker::own(layout).display());
        }
        String::new()
    }

    /// What a member is started with besides what all are.
    pub(crate) fn arguments(&self, layout: &Layout, host: &Host) -> Vec<String> {
        let mut arguments = match &self.etcd_authority {
            Some(_) => certificates::etcd_arguments(layout, host),
            None => Vec::new(),
        };
        arguments.extend_from_slice(&self.etcd_arguments);
        arguments
    }

    fn registry(&self, layout: &Layout, host: &Host) -> String {
        let (endpoints, known_by) = match &self.etcd_authority {
            Some(_) => {
                let members = layout.member_hosts().into_iter();
                let endpoints = members.map(|host| host.etcd_url_with_tls()).collect();
                (endpoints, certificates::etcd_lines(layout, host))
            }
            None => (layout.endpoints(), String::new()),
        };
        format!("kind = \"etcd\"\nendpoints = {endpoints:?}\n{known_by}")
    }

    fn fleet(&self, layout: &Layout, host: &Host) -> String {
        let known_by = match &self.authority {
            Some(_) => certificates::line(layout, host),
            None => {
                let secret = layout.secret(&host.name);
                format!("secret_file = \"{}\"\n", secret.display())
            }
        };
        let mut own = self.timing;
        let mut unsafe_switch = "";
        if self.unfenced.as_ref() == Some(&host.name) {
            own.fence_ms = UNFENCED_MS;
            unsafe_switch = "unsafe_timing = true\n";
        }
        let timing = match self.derived {
            true => String::new(),
            false => timing::lines(&own) + unsafe_switch,
        };
        // By its label somebody can say which node is meant, whatever the load.
        format!(
            "{known_by}labels = {{ host = \"{}\" }}\n{timing}",
            host.name
        )
    }

    fn config(&self, layout: &Layout, host: &Host, is_joined: bool) -> String {
        let of_fleet = |text: &dyn Fn() -> String| match is_joined {
            true => text(),
            false => String::new(),
        };
        let [api, sessions] = Layout::listeners();
        let mut text = String::new();
        let tables = [
            (
                "node",
                format!(
                    "name = \"{}\"\nstate_dir = \"{}\"\nruntime = \"{}\"\nid_range = {}\n",
                    host.name,
                    layout.state_dir(&host.name).display(),
                    if self.docker || self.docker_each {
                        "docker"
                    } else {
                        "native"
                    },
                    layout.id_range(host)
                ),
            ),
            (
                "listen",
                format!(
                    "api = \"{api}\"\nsessions = \"{sessions}\"\nadmin = \"{}\"\n{}{}",
                    layout.socket(&host.name).display(),
                    url(layout, host),
                    of_fleet(&|| format!("peers = \"{}\"\n", host.peers()))
                ),
            ),
            ("auth", "loopback = \"open\"\n".to_owned()),
            ("docker", self.docker_table(layout, host)),
            ("registry", of_fleet(&|| self.registry(layout, host))),
            ("fleet", of_fleet(&|| self.fleet(layout, host))),
            ("net", String::new()),
            ("net.fabric", String::new()),
            ("limits", String::new()),
            ("preempt", String::new()),
            (
                "binds",
                format!("allow = [\"{}\"]\n", layout.shared().display()),
            ),
        ];
        for (table, own) in tables {
            let added = self.sections.iter().filter(|(node, of, _)| {
                of == table && node.as_ref().is_none_or(|node| *node == host.name)
            });
            let added: String = added.map(|(_, _, line)| format!("{line}\n")).collect();
            if !own.is_empty() || !added.is_empty() {
                let _ = write!(text, "[{table}]\n{own}{added}");
            }
        }
        text.push_str(NATIVE_TEMPLATES);
        text.push_str(&overlap::template(layout, &host.name));
        text.push_str(&self.toml);
        text
    }
}

/// How a node shows its sessions' addresses: as the machine reaches them, where that is settled.
fn url(layout: &Layout, host: &Host) -> String {
    let hosts = layout.node_hosts();
    let index = hosts.iter().position(|other| other == host);
    match index.map(|index| layout.machine_addresses(index)) {
        Some([_, sessions]) if sessions.port() != 0 => {
            format!("url = \"http://{sessions}/s/{{id}}/\"\n")
        }
        _ => String::new(),
    }
}

/// A cluster's description and its directory, with nothing in it yet.
pub(crate) fn begin(
    builder: &Builder,
    tag: String,
    binary: &Path,
) -> Result<(Layout, Vec<IdRange>)> {
    ensure!(
        (1..=crate::layout::MOST).contains(&builder.nodes)
            && builder.members <= crate::layout::MOST,
        "a cluster has 1 to {most} nodes and up to {most} members",
        most = crate::layout::MOST
    );
    let place = layout::places().into_iter().next().context("a place")?;
    let directory = place.join(format!("{PREFIX}{tag}"));
    fs::DirBuilder::new()
        .mode(0o755)
        .create(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let ids: Vec<IdRange> = (0..builder.nodes).map(|_| IdRange::claim()).collect();
    let layout = Layout {
        tag,
        directory,
        nodes: builder.nodes,
        members: builder.members,
        owner: None,
        binary: binary.to_owned(),
        binaries: builder.binaries.clone(),
        docker: builder.docker,
        docker_too: builder.docker_too,
        docker_each: builder.docker_each,
        first_port: 0,
        id_ranges: ids.iter().map(IdRange::value).collect(),
    };
    Ok((layout, ids))
}

/// Has a node know the image, unless Docker knows it for all.
pub(crate) fn import(layout: &Layout, node: &str, archive: &Path) -> Result<()> {
    if layout.docker || layout.docker_each {
        return Ok(());
    }
    let mut import = Command::new(layout.binary(node));
    import.arg("--socket").arg(layout.socket(node));
    import
        .args(["image", "import"])
        .arg(archive)
        .arg(conman_e2e::ROOT);
    for variable in cluster::CLIENT_VARIABLES {
        import.env_remove(variable);
    }
    command::run(&mut import).map(drop)
}

/// The last lines of a node's log.
pub(crate) fn log_tail(layout: &Layout, node: &str, lines: usize) -> String {
    let text = fs::read_to_string(node::log_path(layout, node)).unwrap_or_default();
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

fn secret() -> Result<String> {
    let mut random = [0; 32];
    File::open("/dev/urandom")
        .and_then(|mut source| source.read_exact(&mut random))
        .context("cannot get random numbers")?;
    Ok(random.map(|byte| format!("{byte:02x}")).concat())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

fn write_secret(path: &Path, text: &str) -> Result<()> {
    let file = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn make_private(directory: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("cannot make {}", directory.display()))
}
