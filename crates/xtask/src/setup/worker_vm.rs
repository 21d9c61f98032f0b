//! The disk of a worker machine as users have them: systemd, pure cgroup v2, the distribution's
//! own kernel. Tests boot it in an emulator; no hardware virtualization is asked.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::packages;
use crate::process::{output, target_dir};
use crate::progress::Step;

/// Raised whenever the way the disk is made changes, so that an older one is made anew.
const RECIPE: &str = "1";
/// Sparse; room for a debug build of conman and its images.
const DISK_SIZE: &str = "6G";
/// What a worker has beyond the distribution's smallest set.
const PACKAGES: &str = "systemd-sysv,dbus,openssh-server,iproute2,curl";
/// The emulated machine is of this architecture.
const ARCHITECTURE: &str = "x86_64";
/// Needed to make the disk and to boot it.
const TOOLS: [&str; 4] = [
    "qemu-system-x86",
    "mmdebstrap",
    "e2fsprogs",
    "openssh-client",
];

/// Makes the disk, its kernel and the key to log in with, unless they are there.
pub(crate) fn make() -> Result<()> {
    if std::env::consts::ARCH != ARCHITECTURE {
        return Ok(());
    }
    packages::install(&TOOLS)?;
    let directory = target_dir().join("worker-vm");
    let recipe = directory.join("recipe");
    if fs::read_to_string(&recipe).is_ok_and(|made| made == RECIPE) {
        return Ok(());
    }
    let step = Step::start("making the disk of a worker machine");
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).context("removing the former worker machine");
        }
        _ => {}
    }
    // The private key lies there.
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&directory)
        .with_context(|| format!("making {}", directory.display()))?;
    let work = tempfile::tempdir_in(&directory).context("making a temporary folder")?;
    let rootfs = work.path().join("rootfs");
    install(&step, &rootfs)?;
    let key = directory.join("key");
    step.run(
        Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "worker-vm", "-f"])
            .arg(&key),
    )?;
    furnish(&rootfs, &key.with_extension("pub"))?;
    for (name, prefix) in [("kernel", "vmlinuz-"), ("initrd", "initrd.img-")] {
        let found = in_boot(&rootfs, prefix)?;
        fs::copy(&found, directory.join(name))
            .with_context(|| format!("copying {}", found.display()))?;
    }
    step.note("writing the disk");
    step.run(
        Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-d"])
            .args([&rootfs, &directory.join("disk")])
            .arg(DISK_SIZE),
    )?;
    fs::write(&recipe, RECIPE).with_context(|| format!("writing {}", recipe.display()))?;
    step.done();
    Ok(())
}

/// The host's own distribution, from where the host has its packages.
fn install(step: &Step, rootfs: &Path) -> Result<()> {
    let (codename, archive, kernel) = distribution()?;
    let mut command = Command::new("mmdebstrap");
    command.args(["--variant=minbase", "--format=directory"]);
    command.arg(format!("--include={PACKAGES},{kernel}"));
    for path in ["doc", "man", "locale"] {
        command.arg(format!("--dpkgopt=path-exclude=/usr/share/{path}/*"));
    }
    command.arg(codename).arg(rootfs).arg(archive);
    step.run(&mut command)
}

/// Codename, archive and the name of the kernel package for virtual machines.
fn distribution() -> Result<(String, String, &'static str)> {
    let targets = output(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(ORIGIN) $(CODENAME) $(REPO_URI) $(COMPONENT)",
        "Created-By: Packages",
    ]))?;
    let targets = String::from_utf8(targets.stdout).context("reading apt-get's answer")?;
    let release = fs::read_to_string("/etc/os-release").context("reading /etc/os-release")?;
    let codename = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .context("/etc/os-release names no VERSION_CODENAME")?;
    for target in targets.lines() {
        let fields: Vec<&str> = target.split(' ').collect();
        let (kernel, archive) = match fields[..] {
            ["Debian", name, archive, "main"] if name == codename => {
                ("linux-image-cloud-amd64", archive)
            }
            ["Ubuntu", name, archive, "main"] if name == codename => {
                ("linux-image-virtual", archive)
            }
            _ => continue,
        };
        return Ok((codename.to_owned(), archive.to_owned(), kernel));
    }
    bail!(
        "apt knows no archive of {codename} with a component `main`; add the distribution's own to \
         /etc/apt/sources.list.d and run `apt-get update`"
    )
}

fn furnish(rootfs: &Path, public_key: &Path) -> Result<()> {
    let ssh = rootfs.join("root/.ssh");
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&ssh)
        .context("making /root/.ssh")?;
    fs::copy(public_key, ssh.join("authorized_keys")).context("authorizing the key")?;
    let network = rootfs.join("etc/systemd/network");
    fs::create_dir_all(&network).context("making /etc/systemd/network")?;
    fs::write(
        network.join("80-dhcp.network"),
        "[Match]\nName=e*\n[Network]\nDHCP=yes\n",
    )
    .context("writing the network's configuration")?;
    for (path, content) in [
        ("etc/fstab", "/dev/vda / ext4 rw 0 1\n"),
        ("etc/hostname", "worker\n"),
    ] {
        fs::write(rootfs.join(path), content).with_context(|| format!("writing /{path}"))?;
    }
    let wants = rootfs.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wants).context("making the wants of multi-user.target")?;
    symlink(
        "/lib/systemd/system/systemd-networkd.service",
        wants.join("systemd-networkd.service"),
    )
    .context("enabling systemd-networkd")
}

fn in_boot(rootfs: &Path, prefix: &str) -> Result<PathBuf> {
    fs::read_dir(rootfs.join("boot"))
        .context("listing /boot")?
        .filter_map(Result::ok)
        .find(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .with_context(|| format!("the kernel's package left no {prefix}* in /boot"))
}
