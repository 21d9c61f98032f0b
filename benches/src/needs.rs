//! Programs of the distribution that benchmarks need.

use anyhow::{Result, bail};
pub(crate) use conman_cluster::find;

/// A program and the package that has it.
pub(crate) type Need = (&'static str, &'static str);

/// What a fleet on this machine is made of.
pub(crate) const FLEET: [Need; 7] = [
    ("busybox", "busybox-static"),
    ("etcd", "etcd-server"),
    ("etcdctl", "etcd-client"),
    ("haproxy", "haproxy"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("nsenter", "util-linux"),
];

/// A Docker Engine for each node.
pub(crate) const DOCKER: [Need; 2] = [("dockerd", "docker.io"), ("docker", "docker.io")];

/// What is missing, with the command that installs it.
pub(crate) fn missing(needs: &[Need]) -> Option<String> {
    let missing: Vec<&Need> = needs
        .iter()
        .filter(|(program, _)| find(program).is_none())
        .collect();
    let programs: Vec<&str> = missing.iter().map(|(program, _)| *program).collect();
    let mut packages: Vec<&str> = missing.iter().map(|(_, package)| *package).collect();
    packages.dedup();
    (!missing.is_empty()).then(|| {
        let (programs, packages) = (programs.join(", "), packages.join(" "));
        format!("{programs} missing; install: apt-get install --no-install-recommends {packages}")
    })
}

/// # Errors
/// When something is missing.
pub(crate) fn require(what: &str, needs: &[Need]) -> Result<()> {
    match missing(needs) {
        Some(missing) => bail!("{what} cannot be measured: {missing}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_the_command_that_installs_it() {
        assert_eq!(missing(&[("sh", "dash")]), None);
        let needs = [
            ("no-such-one", "some"),
            ("no-such-two", "some"),
            ("sh", "dash"),
        ];
        let why = missing(&needs).expect("two are missing");
        assert!(why.starts_with("no-such-one, no-such-two missing"), "{why}");
        assert!(
            why.ends_with("apt-get install --no-install-recommends some"),
            "{why}"
        );
    }
}
