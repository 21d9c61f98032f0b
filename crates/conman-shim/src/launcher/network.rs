//! The network step of a launch: what a container's first process does with its network.
//!
//! There is one network mode: a network namespace with only a loopback interface. Another mode needs a
//! field in [`crate::LaunchSpec`] and its steps here.

use std::fs::File;
use std::io::{self, Write};

use conman_linux::{Mount, Namespaces, bring_loopback_up, unshare_namespaces};
use rustix::fs::{Mode, OFlags, openat};

use super::child::step;
use crate::protocol::LaunchError;
use crate::spec::ProgramSpec;

/// First port that needs no capability, in the container's own network namespace; below /proc.
const UNPRIVILEGED_PORTS: &str = "sys/net/ipv4/ip_unprivileged_port_start";

/// Makes the network namespace of the calling process. It takes the longest of all namespaces, so the
/// launcher works on the container's other parts meanwhile.
pub(super) fn set_up() -> Result<(), LaunchError> {
    unshare_namespaces(Namespaces::NEWNET).map_err(step("make a network namespace"))?;
    bring_loopback_up().map_err(step("bring the loopback interface up"))
}

/// Opens all ports to the program's user, by the container's procfs. Root has the capability; others
/// would need to know which ports are privileged.
pub(super) fn open_ports(program: &ProgramSpec, proc: &Mount) -> Result<(), LaunchError> {
    if program.uid == 0 {
        return Ok(());
    }
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    openat(proc, UNPRIVILEGED_PORTS, flags, Mode::empty())
        .map_err(io::Error::from)
        .and_then(|file| File::from(file).write_all(b"0"))
        .map_err(step("open all ports to its user"))
}
