//! Sets up a fresh Debian or Ubuntu machine: packages, Docker Engine, images.

mod docker;
mod floor_kernel;
mod gvisor;
mod images;
mod needs;
mod packages;
mod worker_vm;

use std::process::Command;

use anyhow::{Result, bail};

use crate::process::installed;

pub(crate) use images::{DEMO_IMAGE, IMAGES, demo_archive};
pub(crate) use needs::Needs;
pub(crate) use packages::installed_packages;

/// A machine that is set up; dropping it stops the Docker daemon that the set-up started.
#[derive(Debug)]
pub(crate) struct Machine {
    docker: docker::Docker,
}

impl Machine {
    /// Lets a Docker daemon that the set-up started continue.
    pub(crate) fn leave_running(self) {
        self.docker.leave_running();
    }
}

/// Sets up the demo; with Docker, if it shows Docker's sessions.
pub(crate) fn for_demo(docker: bool) -> Result<Option<Machine>> {
    if docker {
        return prepare(&["curl"]).map(Some);
    }
    require_root()?;
    packages::install(&["curl"])?;
    Ok(None)
}

const ETCD: &str = "etcd-server";
/// Packages that start a unit, of which only the programs are needed.
const STARTED: [(&str, &str); 5] = [
    (ETCD, "etcd.service"),
    ("mariadb-server", "mariadb.service"),
    ("nginx-light", "nginx.service"),
    ("prometheus", "prometheus.service"),
    ("redis-server", "redis-server.service"),
];

/// Packages for clusters, which also need root.
const CLUSTER: [&str; 8] = [
    "busybox-static",
    "curl",
    "etcd-client",
    ETCD,
    "haproxy",
    "iproute2",
    "nftables",
    "util-linux",
];

/// Sets up a fleet on this machine; without Docker.
pub(crate) fn for_clusters() -> Result<()> {
    require_root()?;
    install_stopped(&CLUSTER)
}

/// Installs packages, and stops what those that were missing have started.
fn install_stopped(packages: &[&str]) -> Result<()> {
    let is_new = |(package, _): &&(&str, &str)| {
        packages.contains(package) && !packages::is_installed(package)
    };
    let started: Vec<_> = STARTED.iter().filter(is_new).collect();
    packages::install(packages)?;
    for (_, unit) in started {
        // A machine without systemd has no such unit, and a running one does no harm.
        let _ = Command::new("systemctl")
            .args(["disable", "--now", unit])
            .output();
    }
    Ok(())
}

/// Sets up the hostile battery; without Docker.
pub(crate) fn for_hostile() -> Result<()> {
    require_root()?;
    packages::install(&["busybox-static", "python3"])
}

/// Additionally sets up fleets with Docker's sessions; without images.
pub(crate) fn for_docker() -> Result<Machine> {
    let docker = docker::ready()?;
    Ok(Machine { docker })
}

/// Sets up the tests of these packages, or of all.
pub(crate) fn for_tests(packages: &[String]) -> Result<Option<Machine>> {
    let needs = Needs::of(packages);
    if !needs.packages.is_empty() || needs.etcd || needs.images {
        require_root()?;
    }
    if needs.etcd {
        for_clusters()?;
    }
    packages::install(&needs.packages)?;
    // Other packages than the distribution's provide it, too.
    if needs.npm && !installed("npm") {
        packages::install(&["npm"])?;
    }
    let machine = match (needs.docker, needs.images) {
        (false, _) => None,
        (true, false) => Some(for_docker()?),
        (true, true) => Some(prepare(&[])?),
    };
    if needs.worker {
        worker_vm::make()?;
    }
    if needs.programs {
        images::shells_archive()?;
    }
    Ok(machine)
}

/// Sets up the benchmarks of one machine; without Docker.
pub(crate) fn for_figures() -> Result<()> {
    for_clusters()?;
    install_stopped(&[
        "fio",
        "hpcc",
        "mariadb-server",
        "redis-server",
        "redis-tools",
        "sysbench",
    ])
}

/// Sets up the tests of programs in sessions.
pub(crate) fn for_programs() -> Result<Machine> {
    for_clusters()?;
    let machine = prepare(&[
        "buildah",
        "chromium",
        "debootstrap",
        "g++",
        "libkrb5-dev",
        "make",
        "openssh-client",
        "python3-pip",
        "skopeo",
    ])?;
    install_stopped(&["nginx-light", "prometheus"])?;
    if !installed("npm") {
        packages::install(&["npm"])?;
    }
    images::shells_archive()?;
    images::slow_archives()?;
    Ok(machine)
}

/// Where tests find gVisor's program.
pub(crate) const RUNSC: &str = "CONMAN_RUNSC";

/// Sets up the tests of sessions with a kernel of their own, and returns gVisor's program.
pub(crate) fn for_gvisor() -> Result<std::path::PathBuf> {
    require_root()?;
    packages::install(&["busybox-static"])?;
    gvisor::make()
}

fn prepare(packages: &[&str]) -> Result<Machine> {
    require_root()?;
    packages::install(packages)?;
    let docker = docker::ready()?;
    images::make()?;
    Ok(Machine { docker })
}

fn require_root() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "conman makes namespaces and cgroups and needs root; run it as root, for example with \
             `sudo -E env \"PATH=$PATH\" cargo xtask …`"
        );
    }
    Ok(())
}
