//! The network step of a launch: what a container's first process does with its network.
//!
//! A container has a network namespace with a loopback interface, unless it shares the host's. If it is to
//! have a link as well, the client makes it meanwhile ([`conman_shim_protocol::link_socket`]).

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use conman_linux::{Mount, Namespaces, bring_loopback_up, unshare_namespaces};
use conman_shim_protocol::{LaunchError, LaunchSpec, NetworkSpec, link_socket};
use rustix::fs::{Mode, OFlags, openat};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use super::steps::{namespace_step, step};

/// Groups whose processes may make sockets for echo requests; below /proc.
const PING_GROUPS: &str = "sys/net/ipv4/ping_group_range";
/// All of a container's.
const ALL_GROUPS: &[u8] = b"0 65535";

/// First port that needs no capability, in the container's own network namespace; below /proc.
const UNPRIVILEGED_PORTS: &str = "sys/net/ipv4/ip_unprivileged_port_start";

/// The calling process's network namespace; below /proc.
const OWN_NAMESPACE: &str = "self/ns/net";

/// Makes the network namespace of the calling process, unless it is to stay in the host's. It takes the
/// longest of all namespaces, so the launcher works on the container's other parts meanwhile.
pub(super) fn set_up(network: NetworkSpec) -> Result<(), LaunchError> {
    if network == NetworkSpec::Host {
        return Ok(());
    }
    unshare_namespaces(Namespaces::NEWNET).map_err(namespace_step(
        "make a network namespace",
        "user.max_net_namespaces",
    ))?;
    bring_loopback_up().map_err(step("bring the loopback interface up"))
}

/// Sends the client the network namespace of the calling process, by the container's procfs.
pub(super) fn offer(link: &OwnedFd, proc: &Mount) -> Result<(), LaunchError> {
    let file = openat(
        proc,
        OWN_NAMESPACE,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let flags = SocketFlags::CLOEXEC;
    let netlink = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None);
    file.and_then(|file| Ok((file, netlink?)))
        .map_err(io::Error::from)
        .and_then(|(file, netlink)| link_socket::offer(link, file.as_fd(), netlink.as_fd()))
        .map_err(step("offer its network namespace"))
}

/// Waits until the client has made the link.
pub(super) fn wait_for_link(link: &OwnedFd) -> Result<(), LaunchError> {
    link_socket::wait(link).map_err(step("connect it to the network"))
}

/// Opens all ports of the container's network namespace to the program's user, by the container's procfs.
/// Root has the capability; others would need to know which ports are privileged.
pub(super) fn open_ports(spec: &LaunchSpec, proc: &Mount) -> Result<(), LaunchError> {
    if spec.program.uid == 0 || spec.network == NetworkSpec::Host {
        return Ok(());
    }
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    openat(proc, UNPRIVILEGED_PORTS, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| File::from(file).write_all(b"0"))
        .map_err(step("open all ports to its user"))
}

/// Lets programs without capabilities send echo requests (ICMP), as Docker does: each user gets answers to its own
/// requests alone.
pub(super) fn allow_ping(spec: &LaunchSpec, proc: &Mount) -> Result<(), LaunchError> {
    if spec.network == NetworkSpec::Host {
        return Ok(());
    }
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    match openat(proc, PING_GROUPS, flags, Mode::empty()) {
        Ok(file) => File::from(file)
            .write_all(ALL_GROUPS)
            .map_err(step("let its programs ping")),
        // A kernel without them.
        Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(errno) => Err(step("let its programs ping")(errno.into())),
    }
}
