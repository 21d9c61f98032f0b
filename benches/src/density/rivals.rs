//! How long rivals take to start the same program, next to the live sessions.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::docker::image_name;
use crate::image;
use crate::kill::milliseconds;

/// Limits of every session and of every rival's container.
pub(super) const MEMORY_BYTES: u64 = 64 << 20;
pub(super) const CPUS: f64 = 0.5;
pub(super) const PIDS: u32 = 32;

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
pub(super) enum Oci {
    Crun,
    /// gVisor's.
    Runsc,
}

impl Oci {
    fn program(self) -> &'static str {
        match self {
            Self::Crun => "crun",
            Self::Runsc => "runsc",
        }
    }

    /// The settings that sessions have, too.
    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Crun => &[],
            Self::Runsc => &["--network=none", "--ignore-cgroups", "--overlay2=none"],
        }
    }
}

/// Starts `count` containers with `crun run` or `runsc run`, one after the other; milliseconds each.
pub(super) async fn run(oci: Oci, root: &Path, count: usize) -> Result<Vec<f64>> {
    let directory = tempfile::tempdir().context("making a temporary folder")?;
    let runtime = Runtime {
        oci,
        bundle: directory.path().join("bundle"),
        state: directory.path().join("state"),
        name: format!("conman-bench-{}", std::process::id()),
    };
    std::fs::create_dir_all(&runtime.bundle).context("making a bundle")?;
    let mut times = Vec::with_capacity(count);
    let mut failed = None;
    for number in 0..count {
        let spec = oci_spec(oci, root, &format!("{}-{number}", runtime.name)).to_string();
        std::fs::write(runtime.bundle.join("config.json"), spec).context("writing the spec")?;
        let begun = Instant::now();
        if let Err(error) = runtime.run(number).await {
            failed = Some(error);
            break;
        }
        times.push(milliseconds(begun.elapsed()));
    }
    for number in 0..times.len() + 1 {
        runtime.delete(number).await;
    }
    failed.map_or(Ok(times), Err)
}

struct Runtime {
    oci: Oci,
    bundle: PathBuf,
    state: PathBuf,
    name: String,
}

impl Runtime {
    async fn run(&self, number: usize) -> Result<()> {
        let program = self.oci.program();
        let log = self.bundle.join("log");
        let status = self
            .command()
            .arg("--log")
            .arg(&log)
            .args(["run", "--detach", "--bundle"])
            .arg(&self.bundle)
            .arg(format!("{}-{number}", self.name))
            .status()
            .await
            .with_context(|| format!("starting {program}; is it installed?"))?;
        if !status.success() {
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            bail!("{program} run failed ({status}): {}", said.trim());
        }
        Ok(())
    }

    /// Deleting a container that was never made fails; that is fine.
    async fn delete(&self, number: usize) {
        let _ = self
            .command()
            .args(["delete", "--force", &format!("{}-{number}", self.name)])
            .status()
            .await;
    }

    fn command(&self) -> Command {
        let mut command = Command::new(self.oci.program());
        command
            .args(self.oci.arguments())
            .arg("--root")
            .arg(&self.state)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        command
    }
}

/// As close to a session as an OCI runtime alone comes: the same namespaces, limits and program.
/// Its root is a plain read-only directory, since its caller would make the overlay.
fn oci_spec(oci: Oci, root: &Path, name: &str) -> Value {
    let namespaces: &[&str] = match oci {
        Oci::Crun => &["pid", "network", "ipc", "uts", "mount", "cgroup", "user"],
        // gVisor makes its own on the host.
        Oci::Runsc => &["pid", "network", "ipc", "uts", "mount"],
    };
    let namespaces: Vec<Value> = namespaces
        .iter()
        .map(|kind| json!({ "type": kind }))
        .collect();
    let ids = match oci {
        Oci::Crun => json!([{ "containerID": 0, "hostID": 0, "size": 65_536 }]),
        Oci::Runsc => json!([]),
    };
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": false,
            "user": { "uid": 0, "gid": 0 },
            "args": image::COMMAND,
            "env": ["PATH=/bin"],
            "cwd": "/",
            "noNewPrivileges": true,
            "capabilities": { "bounding": [], "effective": [], "permitted": [] },
        },
        "root": { "path": root, "readonly": true },
        "hostname": "bench",
        "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
        "linux": {
            "cgroupsPath": format!("/{name}"),
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

/// Starts `count` containers with `docker run`, one after the other; milliseconds each. Needs the
/// image in Docker.
pub(super) async fn docker_run(count: usize) -> Result<Vec<f64>> {
    let label = format!("dev.conman.bench=density-{}", std::process::id());
    let mut times = Vec::with_capacity(count);
    let mut failed = None;
    for _ in 0..count {
        let begun = Instant::now();
        let mut command = Command::new("docker");
        command
            .args(["run", "--detach", "--label", &label])
            .args(["--memory", &MEMORY_BYTES.to_string()])
            .args([
                "--cpus",
                &CPUS.to_string(),
                "--pids-limit",
                &PIDS.to_string(),
            ])
            .arg(image_name())
            .args(image::COMMAND);
        if let Err(error) = said(&mut command).await {
            failed = Some(error);
            break;
        }
        times.push(milliseconds(begun.elapsed()));
    }
    let filter = format!("label={label}");
    let mut list = Command::new("docker");
    list.args(["ps", "--all", "--quiet", "--filter", &filter]);
    if let Ok(ids) = said(&mut list).await
        && !ids.trim().is_empty()
    {
        let mut remove = Command::new("docker");
        remove.args(["rm", "--force"]).args(ids.split_whitespace());
        said(&mut remove).await.with_context(|| {
            format!("removing what is left; `docker rm -f $(docker ps -aq -f {filter})` does")
        })?;
    }
    failed.map_or(Ok(times), Err)
}

async fn said(command: &mut Command) -> Result<String> {
    let output = command
        .process_group(0)
        .stdin(Stdio::null())
        .output()
        .await
        .context("starting docker; is it installed?")?;
    if !output.status.success() {
        bail!(
            "docker failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
