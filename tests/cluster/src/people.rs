//! A cluster for people to play with: it outlives the commands that make and change it.
//!
//! There is one at a time on a machine, beside which a test may have one that goes with the test's
//! process at the latest: its `owner`. Its only processes besides its own are one that forwards ports
//! of loopback, and HAProxy in front of them if it is installed and there are as many nodes as its
//! configuration names.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use conman_linux::{ProcessIdentity, Signal};

use crate::builder::{Builder, begin, import, log_tail};
use crate::command::inside;
use crate::cut::{self, Cut};
use crate::etcd::{self, log_file};
use crate::forward::Forward;
use crate::layout::{AGENT_PORT, Host, Layout, find};
use crate::leftovers::{Leftover, leftovers, remove, sweep};
use crate::requirements::Ready;
use crate::{balancer, echo, network, node, process};

const TAG: &str = "play";
/// The first node's API on the machine: beside conman's own default, so that one may run as well.
const FIRST_PORT: u16 = 7710;
/// The same of a test's, whose numbers begin behind the last of people's.
const FIRST_PORT_OF_TESTS: u16 = 9_710;
/// Bound on the start of one process.
const PATIENCE: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(100);
/// A process takes a moment to be in its namespace; before, it looks like one that has ended.
const ENTERING: Duration = Duration::from_secs(10);
/// Lines of a log that a failed start shows.
const TAIL: usize = 30;

/// What a node or member is doing.
#[derive(Debug)]
pub struct HostStatus {
    pub host: Host,
    /// Where its API and sessions are reached; a member has none.
    pub machine: Option<[SocketAddr; 2]>,
    /// What runs there, by role.
    pub processes: Vec<(String, i32)>,
    /// What it answers to a probe.
    pub answer: String,
}

/// What tells people's cluster, or that of an owner, from others.
fn tag(owner: Option<i32>) -> String {
    owner.map_or_else(|| TAG.to_owned(), |pid| format!("{TAG}-{pid}"))
}

/// The cluster that is up.
///
/// # Errors
/// When none is.
pub fn current(owner: Option<i32>) -> Result<Layout> {
    let directory =
        find(&tag(owner)).context("no cluster is up; `cargo xtask cluster up` makes one")?;
    Layout::load(&directory)
}

/// Makes the cluster; `step` is told what it is doing.
///
/// # Errors
/// When there is one already, or something cannot be made. What was made is removed then.
pub fn up(
    owner: Option<i32>,
    builder: &Builder,
    ready: &Ready,
    witness: &Path,
    step: &mut dyn FnMut(&str),
) -> Result<Layout> {
    sweep()?;
    let tag = tag(owner);
    if find(&tag).is_some() {
        bail!(
            "a cluster is up already, or was left half made; `cargo xtask cluster down` removes it"
        );
    }
    let agent = format!("agent = \"127.0.0.1:{AGENT_PORT}\"");
    let builder = builder
        .clone()
        .set("listen", &agent)
        .toml(&echo::template());
    let builder = &builder;
    let (mut layout, _ids) = begin(builder, tag, builder.conman())?;
    layout.first_port = match owner {
        Some(_) => FIRST_PORT_OF_TESTS,
        None => FIRST_PORT,
    };
    let owner = owner.map(ProcessIdentity::of).transpose();
    layout.owner = owner.context("the owner does not run")?;
    layout.save()?;
    match fill(builder, ready, witness, &layout, step) {
        Ok(()) => Ok(layout),
        Err(error) => {
            remove(&layout).with_context(|| format!("cannot clean up after this: {error:#}"))?;
            Err(error)
        }
    }
}

fn fill(
    builder: &Builder,
    ready: &Ready,
    witness: &Path,
    layout: &Layout,
    step: &mut dyn FnMut(&str),
) -> Result<()> {
    step("making network namespaces and links");
    network::make(layout)?;
    let archive = builder.prepare(layout, &ready.native, witness)?;
    for host in layout.member_hosts() {
        step(&format!("starting etcd on {}", host.name));
        etcd::spawn(layout, &host, &builder.arguments(layout, &host))?;
    }
    for host in layout.member_hosts() {
        let what = format!("etcd on {} serves", host.name);
        until(&what, || Ok(is_healthy(layout, &host)))?;
    }
    start_forwarding(layout)?;
    for host in layout.node_hosts() {
        step(&format!("starting conman on {}", host.name));
        node::spawn(layout, &host.name)?;
    }
    for (index, host) in layout.node_hosts().iter().enumerate() {
        step(&format!("waiting for {}", host.name));
        let begun = Instant::now();
        let ready = until("it is ready", || {
            if begun.elapsed() > ENTERING && daemon(layout, &host.name).is_none() {
                bail!("its daemon has ended");
            }
            Ok(probe(layout, index) == "ready")
        });
        ready.with_context(|| {
            let tail = log_tail(layout, &host.name, TAIL);
            format!("{} did not start; its log ends with\n{tail}\n", host.name)
        })?;
        import(layout, &host.name, &archive)?;
    }
    if has_balancer(layout) {
        step("starting HAProxy");
        start_balancer(layout)?;
    }
    Ok(())
}

/// Whether HAProxy is in front of the nodes.
#[must_use]
pub fn has_balancer(layout: &Layout) -> bool {
    usize::from(layout.nodes) == balancer::NODES && balancer::has_haproxy()
}

fn start_balancer(layout: &Layout) -> Result<()> {
    let indexes = 0..balancer::NODES;
    let sessions: Vec<_> = indexes
        .clone()
        .map(|index| layout.machine_addresses(index)[1])
        .collect();
    let agents: Vec<_> = indexes.map(|index| layout.agent_address(index)).collect();
    let address = layout.balancer_address();
    let mut command = balancer::command(
        Command::new(balancer::program()?),
        &layout.directory,
        address,
        &sessions,
        &agents,
    )?;
    // It outlives this process, and its terminal.
    command.process_group(0);
    let mut child = command.spawn().context("cannot start haproxy")?;
    std::fs::write(balancer_file(layout), child.id().to_string())
        .context("cannot leave a process id")?;
    until("haproxy listens", || {
        if child
            .try_wait()
            .context("cannot look after haproxy")?
            .is_some()
        {
            let text = std::fs::read_to_string(layout.directory.join("haproxy.log"));
            bail!("{}", text.unwrap_or_default().trim());
        }
        Ok(TcpStream::connect(address).is_ok())
    })
}

/// Starts a node again after [`kill`].
///
/// # Errors
/// When it runs, or cannot be started.
pub fn start(layout: &Layout, name: &str) -> Result<()> {
    let host = layout.host(name)?;
    if !process::residents(&layout.namespace_path(name)).is_empty()
        && (is_member(layout, name) || daemon(layout, name).is_some())
    {
        bail!("{name} runs already");
    }
    if is_member(layout, name) {
        etcd::spawn(layout, &host, &[]).map(drop)
    } else {
        node::spawn(layout, name).map(drop)
    }
}

/// SIGKILL to a host's daemon alone, its shim alone, or all of the host as if its power had failed.
///
/// # Errors
/// When something does not die.
pub fn kill(layout: &Layout, name: &str, part: Part) -> Result<()> {
    layout.host(name)?;
    let residents = process::residents(&layout.namespace_path(name));
    let of = |role: &str| {
        let found = residents.iter().filter(|one| one.is_conman(role));
        found.map(|one| one.pid).collect::<Vec<_>>()
    };
    match part {
        Part::Daemon => process::kill(of("serve")),
        Part::Shim => process::kill(of("shim")),
        Part::Machine if is_member(layout, name) => {
            process::kill(residents.iter().map(|one| one.pid))
        }
        Part::Machine => node::lose(layout, name),
    }
}

/// What of a host dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Daemon,
    Shim,
    Machine,
}

/// Stops or continues a host's processes.
///
/// # Errors
/// When there is no such host.
pub fn pause(layout: &Layout, name: &str, stop: bool) -> Result<()> {
    layout.host(name)?;
    let signal = if stop {
        Signal::SIGSTOP
    } else {
        Signal::SIGCONT
    };
    for one in process::residents(&layout.namespace_path(name)) {
        process::signal(one.pid, signal)?;
    }
    Ok(())
}

/// Cuts a host off some hosts, or off all.
///
/// # Errors
/// When there is no such host.
pub fn cut(layout: &Layout, name: &str, from: &[String], one_way: bool) -> Result<()> {
    let host = layout.host(name)?;
    let others = if from.is_empty() {
        let all = layout.hosts().into_iter();
        all.filter(|other| other.name != name).collect()
    } else {
        let named = from.iter().map(|name| layout.host(name));
        named.collect::<Result<Vec<_>>>()?
    };
    for other in others {
        let cut = if one_way {
            Cut::OneWay {
                from: host.clone(),
                to: other,
            }
        } else {
            Cut::Between(host.clone(), other)
        };
        cut.make(layout)?;
    }
    Ok(())
}

/// Takes every cut back.
///
/// # Errors
/// When nftables refuses.
pub fn heal(layout: &Layout) -> Result<()> {
    cut::heal(layout)
}

/// A command on a host, where `conman` is that host's.
///
/// # Errors
/// When there is no such host.
pub fn command(layout: &Layout, name: &str, words: &[String]) -> Result<Command> {
    layout.host(name)?;
    let (program, arguments) = words.split_first().context("what is to be run?")?;
    let mut command = inside(&layout.namespace_path(name), program);
    command.args(arguments);
    command.env("CONMAN_SOCKET", layout.socket(name));
    command.env("CONMAN_CONFIG", node::config_path(layout, name));
    command.env_remove("CONMAN_URL");
    if let Some(folder) = layout.binary.parent() {
        let mut path = folder.as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        command.env("PATH", path);
    }
    if !layout.member_hosts().is_empty() {
        command.env("ETCDCTL_API", "3");
        command.env("ETCDCTL_ENDPOINTS", layout.endpoints().join(","));
    }
    Ok(command)
}

/// What every host is doing.
#[must_use]
pub fn status(layout: &Layout) -> Vec<HostStatus> {
    let nodes = layout.node_hosts().into_iter().enumerate();
    let nodes = nodes.map(|(index, host)| HostStatus {
        machine: Some(layout.machine_addresses(index)),
        processes: roles(layout, &host.name),
        answer: probe(layout, index),
        host,
    });
    let members = layout.member_hosts().into_iter().map(|host| HostStatus {
        machine: None,
        processes: roles(layout, &host.name),
        answer: if is_healthy(layout, &host) {
            "healthy".to_owned()
        } else {
            "does not answer".to_owned()
        },
        host,
    });
    nodes.chain(members).collect()
}

/// Removes the cluster, and those whose tests died.
///
/// # Errors
/// When something is left, with all that is.
pub fn down(owner: Option<i32>) -> Result<bool> {
    sweep()?;
    let Some(directory) = find(&tag(owner)) else {
        return Ok(false);
    };
    match Layout::load(&directory) {
        Ok(layout) => {
            remove(&layout)?;
            let left = leftovers(&layout);
            if !left.is_empty() {
                let left: Vec<String> = left.into_iter().map(|Leftover(what)| what).collect();
                bail!("this is left: {}", left.join("; "));
            }
        }
        // It was interrupted before it had anything but the directory.
        Err(_) => std::fs::remove_dir_all(&directory)
            .with_context(|| format!("cannot remove {}", directory.display()))?,
    }
    Ok(true)
}

/// Forwards ports of loopback to every node until the process is ended; what
/// `start_forwarding` runs.
///
/// # Errors
/// When a port is taken.
pub fn forward_for_ever(owner: Option<i32>) -> Result<()> {
    let layout = current(owner)?;
    let mut forwards = Vec::new();
    for (index, host) in layout.node_hosts().into_iter().enumerate() {
        let namespace = layout.namespace_path(&host.name);
        let [api, sessions] = node::forwarded(&layout, index);
        let agent = (Ipv4Addr::LOCALHOST, AGENT_PORT).into();
        let agent = (layout.agent_address(index), agent);
        forwards.push(Forward::open(&namespace, &[api, sessions, agent])?);
    }
    std::fs::write(forwarder_file(&layout), std::process::id().to_string())
        .context("cannot leave a process id")?;
    loop {
        std::thread::park();
    }
}

fn start_forwarding(layout: &Layout) -> Result<()> {
    let log = log_file(&layout.directory.join("forward.log"))?;
    let own = std::env::current_exe().context("cannot find the own program")?;
    let mut command = Command::new("setsid");
    command.arg(own);
    if let Some(owner) = &layout.owner {
        command.args(["--owner", &owner.pid.to_string()]);
    }
    let mut child = command
        .arg("forward")
        .stdin(Stdio::null())
        .stdout(log.try_clone().context("cannot share a log")?)
        .stderr(log)
        .spawn()
        .context("cannot start the forwarding of ports")?;
    until("ports are forwarded", || {
        if child
            .try_wait()
            .context("cannot look after a process")?
            .is_some()
        {
            let text = std::fs::read_to_string(layout.directory.join("forward.log"));
            bail!("{}", text.unwrap_or_default().trim());
        }
        Ok(forwarder_file(layout).exists())
    })
}

fn forwarder_file(layout: &Layout) -> std::path::PathBuf {
    layout.directory.join("forward.pid")
}

fn balancer_file(layout: &Layout) -> std::path::PathBuf {
    layout.directory.join("haproxy.pid")
}

/// Ends what runs for a cluster outside of its namespaces.
pub(crate) fn remove_helpers(layout: &Layout) -> Result<()> {
    let directory = layout.directory.to_string_lossy().into_owned();
    let is_forwarder = |words: &str| words.ends_with("\0forward\0");
    let is_balancer = |words: &str| words.contains("haproxy") && words.contains(&directory);
    end_helper(&forwarder_file(layout), is_forwarder)?;
    end_helper(&balancer_file(layout), is_balancer)
}

/// The kernel may have given the number in the file to another process.
fn end_helper(file: &Path, is_helper: impl Fn(&str) -> bool) -> Result<()> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let Ok(pid) = text.trim().parse::<i32>() else {
        return Ok(());
    };
    let words = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if is_helper(&words) {
        process::kill([pid])?;
    }
    Ok(())
}

fn roles(layout: &Layout, name: &str) -> Vec<(String, i32)> {
    let residents = process::residents(&layout.namespace_path(name));
    let role = |one: &process::Resident| {
        let role = if one.is_conman("serve") {
            "daemon"
        } else if one.is_conman("shim") {
            "shim"
        } else {
            one.words.first().map_or("?", String::as_str)
        };
        (role.to_owned(), one.pid)
    };
    residents.iter().map(role).collect()
}

fn daemon(layout: &Layout, name: &str) -> Option<i32> {
    let residents = process::residents(&layout.namespace_path(name));
    // Before nsenter has become conman it counts as such.
    let found = residents
        .iter()
        .find(|one| one.is_conman("serve") || one.words.iter().any(|word| word == "serve"));
    found.map(|one| one.pid)
}

fn is_member(layout: &Layout, name: &str) -> bool {
    layout.member_hosts().iter().any(|host| host.name == name)
}

/// What a node says of its readiness, through the port of the machine.
fn probe(layout: &Layout, index: usize) -> String {
    let [api, _] = layout.machine_addresses(index);
    match curl(&mut Command::new("curl"), &format!("http://{api}/readyz")) {
        Some((200, _)) => "ready".to_owned(),
        Some((status, text)) => format!("{status}: {}", text.trim()),
        None => "does not answer".to_owned(),
    }
}

fn is_healthy(layout: &Layout, host: &Host) -> bool {
    let mut curl = inside(&layout.namespace_path(&host.name), "curl");
    let answer = self::curl(&mut curl, &format!("http://{}/health", host.etcd()));
    answer.is_some_and(|(_, text)| text.contains("\"health\":\"true\""))
}

fn curl(curl: &mut Command, url: &str) -> Option<(u16, String)> {
    let output = curl
        .args([
            "--silent",
            "--max-time",
            "5",
            "--write-out",
            "\n%{http_code}",
            url,
        ])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let (body, status) = text.rsplit_once('\n')?;
    let status = status.parse().ok().filter(|status| *status != 0)?;
    Some((status, body.to_owned()))
}

fn until(what: &str, mut look: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !look()? {
        if Instant::now() > deadline {
            bail!("waited {PATIENCE:?} in vain for this: {what}");
        }
        std::thread::park_timeout(POLL);
    }
    Ok(())
}
