//! What a machine must have.

use std::path::{Path, PathBuf};

/// A machine that can hold clusters.
#[derive(Debug)]
pub struct Ready {
    pub(crate) native: conman_e2e::Native,
}

/// `None`, with a line that says why, when the machine cannot hold clusters.
#[must_use]
pub fn requirements() -> Option<Ready> {
    // Tells by itself what it lacks.
    let native = conman_e2e::native()?;
    match missing() {
        None => Some(Ready { native }),
        Some(why) => {
            conman_e2e::lacks(&why);
            None
        }
    }
}

fn missing() -> Option<String> {
    let programs = [
        ("etcd", "etcd-server"),
        ("etcdctl", "etcd-client"),
        ("ip", "iproute2"),
        ("nft", "nftables"),
        ("nsenter", "util-linux"),
    ];
    programs.into_iter().find_map(|(program, package)| {
        let found = find(program).is_some();
        (!found).then(|| format!("{program} is missing (package {package})"))
    })
}

/// A program in PATH, or where systems have those for root.
#[must_use]
pub fn find(program: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&paths)
        .chain(system)
        .map(|directory| directory.join(program))
        .find(|path| Path::is_file(path))
}
