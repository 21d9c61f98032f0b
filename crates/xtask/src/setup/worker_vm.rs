//! The disk of a typical worker machine: systemd, pure cgroup v2, the distribution's kernel.
//! Tests boot it in an emulator, without hardware virtualization.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::{floor_kernel, packages};
use crate::process::{output, target_dir};
use crate::progress::Step;

/// Raised with every change of how the disk is made, so that an older one is rebuilt.
const RECIPE: &str = "3";
/// Sparse; room for a debug build of conman and its images.
const DISK_SIZE: &str = "6G";
/// Packages of a worker in addition to the distribution's smallest set.
const PACKAGES: &str = "systemd-sysv,dbus,openssh-server,iproute2,curl,e2fsprogs,xfsprogs";
/// The emulated machine is of this architecture.
const ARCHITECTURE: &str = "x86_64";
/// Needed to make the disk and to boot it.
const TOOLS: [&str; 4] = [
    "qemu-system-x86",
    "mmdebstrap",
    "e2fsprogs",
    "openssh-client",
];

/// Makes the disk, its kernels and the login key, unless they exist. If that fails, it records
/// the reason for the tests that need them.
pub(crate) fn make() -> Result<()> {
    if std::env::consts::ARCH != ARCHITECTURE {
        return Ok(());
    }
    let directory = target_dir().join("worker-vm");
    let is_made = fs::read_to_string(directory.join("recipe")).is_ok_and(|made| made == RECIPE);
    if !is_made {
        clear(&directory)?;
    }
    let Err(error) = make_in(&directory, is_made) else {
        return Ok(());
    };
    let why = format!("{error:#}");
    eprintln!("warning: tests on a worker machine are skipped: {why}");
    fs::write(directory.join("none"), why).context("recording why there is no worker machine")
}

/// Makes an empty folder that only this user can enter: it will hold the private key.
fn clear(directory: &Path) -> Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).context("removing the former worker machine");
        }
        _ => {}
    }
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .with_context(|| format!("making {}", directory.display()))
}

fn make_in(directory: &Path, is_made: bool) -> Result<()> {
    packages::install(&TOOLS)?;
    let without_floor = directory.join("no-floor-kernel");
    if is_made && !without_floor.exists() {
        return Ok(());
    }
    let work = tempfile::tempdir_in(target_dir()).context("making a temporary folder")?;
    let host = distribution()?;
    let floor = floor_kernel::fetch(&host, work.path());
    if is_made && floor.is_err() {
        return Ok(());
    }
    clear(directory)?;
    let step = Step::start("making the disk of a worker machine");
    if let Err(error) = &floor {
        let why = format!("{error:#}");
        eprintln!("  without Linux {}: {why}", floor_kernel::RELEASE);
        fs::write(&without_floor, why)
            .with_context(|| format!("writing {}", without_floor.display()))?;
    }
    let rootfs = work.path().join("rootfs");
    install(&step, &rootfs, &host, floor.ok().as_deref())?;
    let key = directory.join("key");
    step.run(
        Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-C", "worker-vm", "-f"])
            .arg(&key),
    )?;
    furnish(&rootfs, &key.with_extension("pub"))?;
    copy_kernels(&rootfs, directory)?;
    step.note("writing the disk");
    step.run(
        Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-d"])
            .args([&rootfs, &directory.join("disk")])
            .arg(DISK_SIZE),
    )?;
    // Last: it means that everything else is there.
    fs::write(directory.join("recipe"), RECIPE).context("recording which recipe was followed")?;
    step.done();
    Ok(())
}

/// Installs the host's distribution, from the host's package source, and optionally another
/// kernel.
fn install(step: &Step, rootfs: &Path, host: &Distribution, kernel: Option<&Path>) -> Result<()> {
    // Its mounts disappear with the namespace, even if this process is killed.
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "--", "mmdebstrap"]);
    command.args(["--variant=minbase", "--format=directory"]);
    command.arg(format!("--include={PACKAGES},{}", host.kernel));
    for path in ["doc", "man", "locale"] {
        command.arg(format!("--dpkgopt=path-exclude=/usr/share/{path}/*"));
    }
    if let Some(package) = kernel {
        let package = package.display();
        for hook in [
            &*format!("cp '{package}' \"$1\"/kernel.deb"),
            "chroot \"$1\" dpkg --install /kernel.deb",
            "rm \"$1\"/kernel.deb",
        ] {
            command.arg(format!("--customize-hook={hook}"));
        }
    }
    command.arg(&host.codename).arg(rootfs).arg(&host.archive);
    step.run(&mut command)
}

/// The host's distribution.
#[derive(Debug)]
pub(super) struct Distribution {
    pub(super) origin: String,
    codename: String,
    /// Its package source.
    pub(super) archive: String,
    /// The package of the kernel for virtual machines.
    kernel: &'static str,
}

fn distribution() -> Result<Distribution> {
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
        let (origin, kernel, archive) = match fields[..] {
            [origin @ "Debian", name, archive, "main"] if name == codename => {
                (origin, "linux-image-cloud-amd64", archive)
            }
            [origin @ "Ubuntu", name, archive, "main"] if name == codename => {
                (origin, "linux-image-virtual", archive)
            }
            _ => continue,
        };
        return Ok(Distribution {
            origin: origin.to_owned(),
            codename: codename.to_owned(),
            archive: archive.to_owned(),
            kernel,
        });
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

/// Copies each kernel with its initial file system, under names that tests know.
fn copy_kernels(rootfs: &Path, directory: &Path) -> Result<()> {
    for entry in fs::read_dir(rootfs.join("boot")).context("listing /boot")? {
        let entry = entry.context("listing /boot")?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let (name, release) = match (
            name.strip_prefix("vmlinuz-"),
            name.strip_prefix("initrd.img-"),
        ) {
            (Some(release), _) => ("kernel", release),
            (_, Some(release)) => ("initrd", release),
            _ => continue,
        };
        let name = if release.starts_with(floor_kernel::RELEASE) {
            format!("floor-{name}")
        } else {
            name.to_owned()
        };
        fs::copy(entry.path(), directory.join(name))
            .with_context(|| format!("copying {}", entry.path().display()))?;
    }
    for name in ["kernel", "initrd"] {
        if !directory.join(name).exists() {
            bail!("the kernel's package left no {name} in /boot");
        }
    }
    Ok(())
}
