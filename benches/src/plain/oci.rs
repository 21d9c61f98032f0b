//! Containers of an OCI runtime by itself.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};
use tokio::process::Command;

use super::{CPUS, MEMORY_BYTES, PIDS};
use crate::interruption::run_to_end;
use crate::needs;

/// Commands at a time that end many containers.
const PARALLEL: usize = 8;

/// Calls that the seccomp filter of crun's containers refuses, so that it has work to do.
const REFUSED_CALLS: [&str; 12] = [
    "add_key",
    "bpf",
    "delete_module",
    "init_module",
    "io_uring_setup",
    "kexec_load",
    "keyctl",
    "mount",
    "pivot_root",
    "ptrace",
    "reboot",
    "unshare",
];

/// An OCI runtime by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Oci {
    Crun,
    /// gVisor's.
    Runsc,
}

impl Oci {
    pub(crate) const fn program(self) -> &'static str {
        match self {
            Self::Crun => "crun",
            Self::Runsc => "runsc",
        }
    }

    /// Whether it is installed, or how it is.
    pub(crate) fn missing(self) -> Option<String> {
        match self {
            Self::Crun => needs::missing(&[("crun", "crun")]),
            Self::Runsc => needs::find("runsc").is_none().then(|| {
                "runsc is missing in PATH; install it from gVisor's own packages".to_owned()
            }),
        }
    }

    /// The settings that sessions have, too.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Crun => &[],
            // As in sessions. Without a network it would leave a mount behind.
            Self::Runsc => &["--network=host", "--ignore-cgroups", "--overlay2=none"],
        }
    }
}

/// The network of a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Network {
    None,
    /// That of this machine.
    Host,
}

/// Containers of one OCI runtime. Dropping this ends and removes those that are left.
#[derive(Debug)]
pub(crate) struct OciContainers {
    oci: Oci,
    network: Network,
    /// The root directory of all.
    root: PathBuf,
    directory: tempfile::TempDir,
    /// The cgroup above them, in every hierarchy; also the beginning of their names.
    mark: String,
    begun: usize,
}

impl OciContainers {
    pub(crate) fn new(oci: Oci, network: Network, root: &Path, what: &str) -> Result<Self> {
        if let Some(why) = oci.missing() {
            bail!("{why}");
        }
        let directory = tempfile::tempdir().context("making a temporary folder")?;
        fs::create_dir_all(directory.path().join("bundle")).context("making a bundle")?;
        let mark = format!("conman-bench-{what}-{}", std::process::id());
        fs::create_dir_all(entrance(&mark)?).context("making a cgroup")?;
        Ok(Self {
            oci,
            network,
            root: root.to_owned(),
            directory,
            mark,
            begun: 0,
        })
    }

    pub(crate) fn cgroup(&self) -> String {
        format!("/{}", self.mark)
    }

    /// Starts one more with this program.
    pub(crate) async fn run(&mut self, program: &[&str]) -> Result<()> {
        let number = self.begun;
        self.begun += 1;
        let bundle = self.directory.path().join("bundle");
        let spec = self.spec(number, program).to_string();
        fs::write(bundle.join("config.json"), spec).context("writing the spec")?;
        let log = bundle.join("log");
        let mut command = match self.oci {
            // It enters the cgroup of the specification.
            Oci::Crun => self.command(),
            Oci::Runsc => in_cgroup(self.command(), &entrance(&self.mark)?),
        };
        command.arg("--log").arg(&log);
        command.args(["run", "--detach", "--bundle"]).arg(&bundle);
        command.arg(self.name(number));
        let status = run_to_end(async move { command.status().await }).await;
        let status = status.with_context(|| format!("starting {}", self.oci.program()))?;
        if !status.success() {
            let said = fs::read_to_string(&log).unwrap_or_default();
            bail!(
                "{} run failed ({status}): {}",
                self.oci.program(),
                said.trim()
            );
        }
        Ok(())
    }

    /// Kills all, some at a time.
    pub(crate) async fn kill(&self) -> Result<()> {
        let kills = (0..self.begun).map(|number| async move {
            let mut command = self.command();
            let output = command.args(["kill", &self.name(number), "KILL"]).output();
            let output = output.await.context("starting a kill")?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                bail!("{} kill failed: {}", self.oci.program(), said.trim());
            }
            anyhow::Ok(())
        });
        let kills = stream::iter(kills).buffer_unordered(PARALLEL);
        kills.try_collect().await
    }

    /// Ends and removes all.
    pub(crate) async fn remove(&mut self) {
        let this = &*self;
        let removals = (0..this.begun).map(|number| async move {
            // Deleting a container that was never made fails; that is fine.
            let _ = this
                .command()
                .args(["delete", "--force", &this.name(number)])
                .status()
                .await;
        });
        let removals = stream::iter(removals).buffer_unordered(PARALLEL);
        removals.collect::<()>().await;
        self.begun = 0;
    }

    fn name(&self, number: usize) -> String {
        format!("{}-{number}", self.mark)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.oci.program());
        command
            .args(self.oci.arguments())
            .arg("--root")
            .arg(self.directory.path().join("state"))
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// As close to a session as an OCI runtime alone comes: the same namespaces, limits and program.
    /// Its root is a plain read-only directory, since its caller would make the overlay.
    fn spec(&self, number: usize, program: &[&str]) -> Value {
        let mut namespaces = vec!["pid", "ipc", "uts", "mount"];
        if self.network == Network::None {
            namespaces.push("network");
        }
        // gVisor makes its own on the host. A user namespace owns no network of the machine.
        let has_users = self.oci == Oci::Crun && self.network == Network::None;
        if has_users {
            namespaces.extend(["cgroup", "user"]);
        }
        let namespaces: Vec<Value> = namespaces
            .iter()
            .map(|kind| json!({ "type": kind }))
            .collect();
        let ids = match has_users {
            true => json!([{ "containerID": 0, "hostID": 0, "size": 65_536 }]),
            false => json!([]),
        };
        json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": { "uid": 0, "gid": 0 },
                "args": program,
                "env": ["PATH=/bin"],
                "cwd": "/",
                "noNewPrivileges": true,
                "capabilities": { "bounding": [], "effective": [], "permitted": [] },
            },
            "root": { "path": self.root, "readonly": true },
            "hostname": "bench",
            "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
            "linux": {
                "cgroupsPath": format!("/{}/{number}", self.mark),
                "namespaces": namespaces,
                "uidMappings": ids,
                "gidMappings": ids,
                "resources": {
                    "memory": { "limit": MEMORY_BYTES },
                    "cpu": { "period": 100_000, "quota": (CPUS * 100_000.0) as i64 },
                    "pids": { "limit": PIDS },
                },
                "maskedPaths": ["/proc/kcore", "/proc/keys"],
                "readonlyPaths": ["/proc/sys", "/proc/sysrq-trigger"],
                "seccomp": {
                    "defaultAction": "SCMP_ACT_ALLOW",
                    "syscalls": [{ "names": REFUSED_CALLS, "action": "SCMP_ACT_ERRNO" }],
                },
            },
        })
    }
}

impl Drop for OciContainers {
    /// An interruption leaves containers.
    fn drop(&mut self) {
        for number in 0..self.begun {
            let delete = ["delete", "--force", &self.name(number)];
            // As above.
            let _ = self.command().as_std_mut().args(delete).status();
        }
        super::remove_cgroups(&self.mark);
    }
}

/// The directory of a cgroup in the first hierarchy of this machine: the unified one, if there is one.
fn entrance(mark: &str) -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("reading the mounts")?;
    let of_kind = |kind: &str| {
        let mut lines = mounts.lines().map(|line| line.split(' '));
        let found = lines.find(|fields| fields.clone().nth(2) == Some(kind))?;
        found.clone().nth(1).map(Path::new)
    };
    let mount = of_kind("cgroup2").or_else(|| of_kind("cgroup"));
    Ok(mount.context("no cgroup is mounted")?.join(mark))
}

/// The same command, whose processes begin in a cgroup: runsc gets an option not to manage cgroups.
fn in_cgroup(command: Command, cgroup: &Path) -> Command {
    let plain = command.as_std();
    let mut inside = Command::new("sh");
    inside
        .args(["-c", "echo $$ >\"$0\" && exec \"$@\""])
        .arg(cgroup.join("cgroup.procs"))
        .arg(plain.get_program())
        .args(plain.get_args())
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    inside
}
