//! Each layer of protection with the others off: containers of a shim of its own, which takes weaker
//! specs than the daemon ever sends. What only one layer holds back shows what that layer is for; what
//! none of them has to hold back is held by the namespaces, the ids and the cgroups below them.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use conman_linux::{CgroupLimits, Cgroups, PidFd};
use conman_shim::{
    Ahead, Client, Hardening, LaunchSpec, NetworkSpec, ProgramSpec, Reply, Request, RootKind,
    RootSpec,
};
use tempfile::TempDir;

use crate::image;
use crate::probes::{How, Probe};
use crate::world::wait_for;

/// Bound on one probe, and on the start of the shim.
const PATIENCE: Duration = Duration::from_secs(60);

/// A layer that can be on alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Layer {
    SystemCalls,
    Capabilities,
    MaskedFiles,
    NoNewPrivileges,
}

const LAYERS: [Layer; 4] = [
    Layer::SystemCalls,
    Layer::Capabilities,
    Layer::MaskedFiles,
    Layer::NoNewPrivileges,
];

use Layer::{Capabilities, MaskedFiles, NoNewPrivileges, SystemCalls};

/// The probes that succeed when all these layers are off, and each layer that holds them back alone.
#[rustfmt::skip]
const HELD_BY: &[(&str, &[Layer])] = &[
    ("new_user_namespace", &[SystemCalls]),
    ("new_namespaces", &[SystemCalls, Capabilities]),
    ("join_namespaces", &[SystemCalls]),
    ("mounts", &[SystemCalls, Capabilities]),
    ("remounts", &[SystemCalls]),
    ("mounts_by_descriptor", &[SystemCalls, Capabilities]),
    ("cve_2022_0185", &[SystemCalls]),
    ("cve_2022_0492", &[SystemCalls]),
    ("file_handles", &[SystemCalls]),
    ("locked_memory", &[SystemCalls]),
    ("asynchronous_io", &[SystemCalls]),
    ("keys", &[SystemCalls]),
    ("masked_files", &[MaskedFiles]),
    ("kernel_settings", &[MaskedFiles]),
    ("bpf", &[SystemCalls]),
    ("user_faults", &[SystemCalls]),
    ("io_uring", &[SystemCalls]),
    ("power", &[SystemCalls, Capabilities]),
    ("swap_accounting_quotas", &[SystemCalls]),
    ("clocks", &[SystemCalls]),
    ("host_name", &[SystemCalls, Capabilities]),
    ("io_ports", &[SystemCalls]),
    ("personalities", &[SystemCalls]),
    ("fanotify", &[SystemCalls]),
    ("memory_policies", &[SystemCalls]),
    ("foreign_entries", &[SystemCalls]),
    ("socket_families", &[SystemCalls]),
    ("raw_sockets", &[Capabilities]),
    ("netlink_families", &[SystemCalls]),
    ("network_administration", &[Capabilities]),
    ("netfilter", &[Capabilities]),
    ("capabilities", &[Capabilities]),
    ("set_user_id_programs", &[SystemCalls, NoNewPrivileges]),
    ("memory_of_others", &[SystemCalls]),
    ("kernel_triggers", &[MaskedFiles]),
    ("pressure_triggers", &[MaskedFiles]),
    ("huge_pages", &[SystemCalls]),
    ("core_handlers", &[SystemCalls]),
    ("socket_filters", &[SystemCalls]),
    ("own_filters", &[SystemCalls]),
    ("socket_protocols", &[SystemCalls]),
];

impl Layer {
    fn name(self) -> &'static str {
        match self {
            SystemCalls => "system calls",
            Capabilities => "capabilities",
            MaskedFiles => "masked files",
            NoNewPrivileges => "no new privileges",
        }
    }
}

/// Every capability, over what belongs to the container, and none of the layers but this one.
fn only(layer: Option<Layer>) -> Hardening {
    let all = [
        "CHOWN",
        "DAC_OVERRIDE",
        "DAC_READ_SEARCH",
        "FOWNER",
        "FSETID",
        "KILL",
        "SETGID",
        "SETUID",
        "SETPCAP",
        "LINUX_IMMUTABLE",
        "NET_BIND_SERVICE",
        "NET_BROADCAST",
        "NET_ADMIN",
        "NET_RAW",
        "IPC_LOCK",
        "IPC_OWNER",
        "SYS_MODULE",
        "SYS_RAWIO",
        "SYS_CHROOT",
        "SYS_PTRACE",
        "SYS_PACCT",
        "SYS_ADMIN",
        "SYS_BOOT",
        "SYS_NICE",
        "SYS_RESOURCE",
        "SYS_TIME",
        "SYS_TTY_CONFIG",
        "MKNOD",
        "LEASE",
        "AUDIT_WRITE",
        "AUDIT_CONTROL",
        "SETFCAP",
        "MAC_OVERRIDE",
        "MAC_ADMIN",
        "SYSLOG",
        "WAKE_ALARM",
        "BLOCK_SUSPEND",
        "AUDIT_READ",
        "PERFMON",
        "BPF",
        "CHECKPOINT_RESTORE",
    ];
    Hardening {
        seccomp: layer == Some(SystemCalls),
        no_new_privileges: layer == Some(NoNewPrivileges),
        own_filters: false,
        without_ipc: false,
        masked_proc: layer == Some(MaskedFiles),
        runtime_files: Vec::new(),
        capabilities: (layer != Some(Capabilities)).then(|| all.map(str::to_owned).to_vec()),
    }
}

/// A shim and the image of the attacks as the only layer of its store.
#[derive(Debug)]
struct Shim {
    process: Child,
    directory: TempDir,
    cgroup: String,
}

impl Shim {
    async fn start() -> (Self, Client) {
        let directory = tempfile::Builder::new()
            .prefix("conman-layers-")
            .tempdir()
            .expect("a directory");
        image::attacks(directory.path());
        for name in ["scratch", "logs"] {
            fs::create_dir(directory.path().join(name)).expect("made");
        }
        let program = std::env::current_exe().expect("known");
        let cgroup = format!("/conman-layers-{}", std::process::id());
        let process = Command::new(program.with_file_name("conman-shim"))
            .arg(directory.path().join("shim.sock"))
            .arg(&cgroup)
            .arg(directory.path())
            .spawn()
            .expect("the shim starts");
        let shim = Self {
            process,
            directory,
            cgroup,
        };
        let connected = wait_for(PATIENCE, async || {
            Client::connect(&shim.directory.path().join("shim.sock"), PATIENCE).ok()
        });
        let client = connected.await.expect("the shim takes a connection");
        (shim, client)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn spec(&self, name: &str, probe: &str, hardening: Hardening) -> LaunchSpec {
        LaunchSpec {
            ptys: 16,
            ptys_when_asked: false,
            sys: true,
            init: true,
            name: name.to_owned(),
            cgroup: format!("{}/{name}", self.cgroup),
            limits: CgroupLimits {
                memory_bytes: Some(crate::world::MEMORY_BYTES),
                pids: Some(64),
                ..CgroupLimits::default()
            },
            root: RootSpec {
                kind: RootKind::Overlay,
                store: self.directory.path().to_owned(),
                layers: vec![PathBuf::from("attacks")],
                scratch: self.path("scratch").join(name),
                read_only: false,
                durable: false,
                shared_ids: false,
            },
            hostname: "inside".to_owned(),
            program: ProgramSpec {
                argv: ["python3", "/inside.py", "try", probe]
                    .map(str::to_owned)
                    .to_vec(),
                env: vec![
                    ("PATH".to_owned(), "/bin:/usr/bin".to_owned()),
                    (
                        "HOSTILE_STATE_DIR".to_owned(),
                        self.directory.path().display().to_string(),
                    ),
                    ("HOSTILE_PORTS".to_owned(), "1".to_owned()),
                    ("HOSTILE_SOCKET".to_owned(), "conman-layers".to_owned()),
                ],
                workdir: "/".to_owned(),
                uid: 0,
                gid: 0,
                groups: Vec::new(),
                nofile: None,
            },
            log: self.path("logs").join(name),
            log_bytes: None,
            log_stderr: None,
            files: Vec::new(),
            binds: Vec::new(),
            terminal: None,
            network: NetworkSpec::Loopback,
            hardening,
            ahead: Ahead::No,
        }
    }

    /// What the probe reached with this layer alone.
    async fn reached(
        &self,
        client: &mut Client,
        probe: &'static str,
        layer: Option<Layer>,
    ) -> Option<String> {
        let name = format!("{probe}.{}", layer.map_or(0, |layer| 1 + layer as u8));
        let launch = Request::Launch(Box::new(self.spec(&name, probe, only(layer))));
        let process = match client.ask(launch) {
            // None is left if it has ended already.
            Ok(Reply::Launched { pid, .. }) => PidFd::open(pid).ok(),
            answer => panic!("{name}: {answer:?}"),
        };
        let log = self.path("logs").join(&name);
        let line = wait_for(PATIENCE, async || {
            let ended = process.as_ref().is_none_or(|process| {
                process
                    .wait_dead(Duration::ZERO)
                    .expect("the kernel answers")
            });
            let text = fs::read_to_string(&log).unwrap_or_default();
            let told = text.lines().find_map(|line| line.strip_prefix(probe));
            told.filter(|_| text.contains("tried all") || ended)
                .map(|told| told.trim().to_owned())
                .or_else(|| ended.then(|| format!("broken: it ended early: {text}")))
        });
        let line = line.await.unwrap_or_else(|| "broken: no answer".to_owned());
        if let Some(process) = process {
            process.kill().expect("killed");
            process.wait_dead(PATIENCE).expect("waited");
        }
        match line.split_once(": ") {
            Some(("held", _)) => None,
            Some(("reached", what)) => Some(what.to_owned()),
            _ => Some(line),
        }
    }
}

impl Drop for Shim {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Ok(cgroups) = Cgroups::detect() {
            let _ = cgroups.remove_tree(&self.cgroup);
        }
    }
}

/// Runs the probes that need nothing but a container and prints what each layer holds back alone:
/// whether this is exactly what the table says.
pub(crate) async fn alone(selected: &[&'static Probe]) -> bool {
    let (shim, mut client) = Shim::start().await;
    let probes = selected
        .iter()
        .filter(|probe| matches!(probe.how, How::Inside) && probe.area != "terminals");
    let listed: BTreeMap<&str, &[Layer]> = HELD_BY.iter().copied().collect();
    let mut as_listed = true;
    for probe in probes {
        let open = shim.reached(&mut client, probe.name, None).await;
        let mut held = Vec::new();
        if open.is_some() {
            for layer in LAYERS {
                if shim
                    .reached(&mut client, probe.name, Some(layer))
                    .await
                    .is_none()
                {
                    held.push(layer);
                }
            }
        }
        let names: Vec<&str> = held.iter().map(|layer| layer.name()).collect();
        match &open {
            None => println!("{:<26} held by namespaces, ids and cgroups", probe.name),
            Some(what) => println!(
                "{:<26} held by {}; without: {what}",
                probe.name,
                names.join(", ")
            ),
        }
        let expected = listed.get(probe.name).copied();
        if open.is_some() != expected.is_some() || expected.is_some_and(|layers| layers != held) {
            println!("{:<26} is listed otherwise: {expected:?}", probe.name);
            as_listed = false;
        }
    }
    as_listed
}
