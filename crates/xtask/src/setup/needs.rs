//! What the tests of each package need of a machine.

/// A package's entry in [`NEEDS`].
#[derive(Debug, Clone, Copy)]
enum Need {
    /// A package of the distribution.
    Package(&'static str),
    /// etcd and what else fleets need.
    Etcd,
    /// A Docker daemon.
    Docker,
    /// The images of the tests in it.
    Images,
    /// npm, of the distribution or another source.
    Npm,
    /// The image of OpenSSH, tmux and a terminal in a web page.
    Programs,
    /// The disk of a worker machine, and an emulator.
    Worker,
    /// The daemon, as a program.
    Conman,
}

use Need::{Conman, Docker, Etcd, Images, Npm, Package, Programs, Worker};

const BTRFS: Need = Package("btrfs-progs");
const BUSYBOX: Need = Package("busybox-static");
const CRUN: Need = Package("crun");
const CURL: Need = Package("curl");
const GIT: Need = Package("git");
const IPROUTE: Need = Package("iproute2");
const NFTABLES: Need = Package("nftables");
const PIP: Need = Package("python3-pip");
const PYTHON: Need = Package("python3");
const REGISTRY: Need = Package("docker-registry");
const SSH: Need = Package("openssh-client");

/// A package that is not listed needs nothing.
const NEEDS: &[(&str, &[Need])] = &[
    (
        "conman-bench",
        &[
            Etcd,
            Docker,
            Images,
            BUSYBOX,
            Package("fio"),
            IPROUTE,
            NFTABLES,
            Conman,
        ],
    ),
    (
        "conman-cluster",
        &[Etcd, Docker, Images, Programs, SSH, Conman],
    ),
    ("conman-doctor", &[IPROUTE, NFTABLES]),
    (
        "conman-e2e",
        &[
            Etcd,
            Docker,
            Images,
            Npm,
            Programs,
            Conman,
            Package("chromium"),
            CRUN,
            GIT,
            PIP,
            PYTHON,
            Package("python3-venv"),
            Package("prometheus"),
            Package("python3-websockets"),
            REGISTRY,
            SSH,
            Package("tmux"),
        ],
    ),
    ("conman-etcd", &[Etcd]),
    ("conman-fence", &[PYTHON]),
    ("conman-hostile", &[BUSYBOX, PYTHON, Conman]),
    ("conman-image", &[BUSYBOX, Docker, Images, REGISTRY]),
    ("conman-linux", &[BUSYBOX]),
    (
        "conman-net",
        &[
            BUSYBOX,
            CURL,
            GIT,
            IPROUTE,
            NFTABLES,
            Npm,
            PIP,
            PYTHON,
            Package("python3-httpx"),
        ],
    ),
    ("conman-node", &[BUSYBOX, Package("dbus-daemon")]),
    ("conman-proxy", &[BUSYBOX]),
    (
        "conman-runtime",
        &[BTRFS, BUSYBOX, CRUN, IPROUTE, NFTABLES, Docker, Images],
    ),
    ("conman-shim", &[BUSYBOX, IPROUTE, PYTHON, Docker, Images]),
    ("conman-sim", &[GIT]),
    ("conman-testkit", &[BUSYBOX]),
    ("conman-vm", &[Etcd, BUSYBOX, SSH, Worker, Conman]),
];

/// What some packages need together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    pub(super) packages: Vec<&'static str>,
    pub(super) etcd: bool,
    pub(super) docker: bool,
    pub(super) images: bool,
    pub(super) npm: bool,
    pub(super) programs: bool,
    pub(super) worker: bool,
    pub(crate) conman: bool,
}

impl Needs {
    /// Of these packages, or of all.
    pub(crate) fn of(names: &[String]) -> Self {
        let mut all = Self::default();
        let listed = NEEDS.iter();
        let named = listed.filter(|(name, _)| names.is_empty() || names.iter().any(|n| n == name));
        for need in named.flat_map(|(_, needs)| needs.iter()) {
            match need {
                Package(name) if all.packages.contains(name) => {}
                Package(name) => all.packages.push(name),
                Etcd => all.etcd = true,
                Docker => all.docker = true,
                Images => all.images = true,
                Npm => all.npm = true,
                Programs => all.programs = true,
                Worker => all.worker = true,
                Conman => all.conman = true,
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_of_decisions_needs_nothing_and_all_packages_need_everything() {
        assert_eq!(Needs::of(&["conman-core".to_owned()]), Needs::default());
        let all = Needs::of(&[]);
        assert!(all.etcd && all.docker && all.images && all.npm && all.programs);
        assert!(all.worker && all.conman);
    }
}
