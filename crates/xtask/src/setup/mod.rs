//! Makes a fresh Debian or Ubuntu machine ready: packages, Docker Engine, images.

mod docker;
mod floor_kernel;
mod images;
mod packages;
mod worker_vm;

use std::process::Command;

use anyhow::{Result, bail};

pub(crate) use images::{BUSYBOX_IMAGE, DEMO_IMAGE};

/// A machine that is ready; dropping it stops the Docker daemon that the set-up started.
#[derive(Debug)]
pub(crate) struct Machine {
    docker: docker::Docker,
}

impl Machine {
    /// Lets a Docker daemon that the set-up started run on.
    pub(crate) fn leave_running(self) {
        self.docker.leave_running();
    }
}

/// What the demo needs.
pub(crate) fn for_demo() -> Result<Machine> {
    prepare(&["curl"])
}

const ETCD: &str = "etcd-server";
/// What its package starts.
const ETCD_UNIT: &str = "etcd.service";

/// What clusters need besides root.
const CLUSTER: [&str; 7] = [
    "busybox-static",
    "curl",
    "etcd-client",
    ETCD,
    "iproute2",
    "nftables",
    "util-linux",
];

/// What a fleet on this machine needs; no Docker.
pub(crate) fn for_clusters() -> Result<()> {
    require_root()?;
    let had_etcd = packages::is_installed(ETCD);
    packages::install(&CLUSTER)?;
    if !had_etcd {
        // Only its program is wanted. A machine without systemd has no such unit, and no harm is
        // done where it runs all the same.
        let _ = Command::new("systemctl")
            .args(["disable", "--now", ETCD_UNIT])
            .output();
    }
    Ok(())
}

/// What the hostile battery needs; no Docker.
pub(crate) fn for_hostile() -> Result<()> {
    require_root()?;
    packages::install(&["busybox-static", "python3"])
}

/// What fleets with sessions of Docker need besides; no images.
pub(crate) fn for_docker() -> Result<Machine> {
    let docker = docker::ready()?;
    Ok(Machine { docker })
}

/// What the test suite needs.
pub(crate) fn for_tests() -> Result<Machine> {
    for_clusters()?;
    let machine = prepare(&[
        "curl",
        "python3",
        "python3-venv",
        "python3-websockets",
        "chromium",
        "docker-registry",
        "etcd-client",
        "etcd-server",
        "iproute2",
        "util-linux",
    ])?;
    worker_vm::make()?;
    Ok(machine)
}

fn prepare(packages: &[&str]) -> Result<Machine> {
    require_root()?;
    packages::install(packages)?;
    let docker = docker::ready()?;
    images::make()?;
    Ok(Machine { docker })
}

fn require_root() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "conman makes namespaces and cgroups and needs root; run it as root, for example with \
             `sudo -E env \"PATH=$PATH\" cargo xtask …`"
        );
    }
    Ok(())
}
