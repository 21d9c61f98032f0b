//! Containers that another program starts, such as Docker: the fence covers each by a cgroup above all
//! of its cgroups.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::rc::Rc;

use conman_core::ownership::FenceEvent;
use conman_linux::{PidFd, ProcessIdentity};
use conman_shim_protocol::{CallError, ContainerState, Reply, check_name};

use super::Control;
use crate::containers::Container;
use crate::fence::slot;
use crate::ledger::Record;

/// Prefix of the first part of our cgroups' paths, so that no order freezes the host.
const OURS: &str = "/conman";

impl Control {
    /// Puts a container under the fence before its start is ordered.
    pub(super) fn guard(&mut self, name: &str, cgroup: &str) -> Result<Reply, CallError> {
        check_name(name).map_err(CallError::from)?;
        let ours = cgroup.strip_prefix(OURS);
        if !ours.is_some_and(|rest| rest.contains('/') && !rest.ends_with('/')) {
            return Err(CallError::host("guard", name)(io::Error::other(
                "its cgroup is not below conman's",
            )));
        }
        self.admit(name, None)?;
        // A process that is created in it after it was frozen never runs.
        let made = self.cgroups.freezer.ensure(cgroup);
        made.map_err(CallError::host("make the cgroup of", name))?;
        let name = name.to_owned();
        if !self.change(FenceEvent::Open(slot(&name))) {
            return Err(CallError::Fenced);
        }
        let mut container = Container::starting(cgroup, None, None, None);
        container.external = true;
        let line = Record::Put {
            name: name.as_str(),
            container: &container,
        };
        // The start is ordered after this answer, and a later shim must find it.
        if let Err(error) = self.ledger.append(&line) {
            self.change(FenceEvent::StartOver(slot(&name)));
            self.change(FenceEvent::Forget(slot(&name)));
            return Err(CallError::host("record the start of", &name)(error));
        }
        self.containers.adopt(name, container);
        Ok(Reply::Done)
    }

    /// Its first process is known. The process is held in any case. Refused if the fence could not freeze
    /// it: then the program that started it ends it, or the fence does, which kills what it cannot freeze. One
    /// that is to be killed need not freeze.
    pub(super) fn appeared(
        &mut self,
        name: &str,
        pid: i32,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, CallError> {
        let cgroup = self.external(name)?.cgroup.clone();
        let identified = fds
            .into_iter()
            .next()
            .ok_or_else(|| io::Error::other("no pidfd came with the request"))
            .and_then(|fd| identify(PidFd::received(fd, pid)));
        let (process, identity) =
            identified.map_err(CallError::host("open the process of", name))?;
        let watched = self.watch_adopted(name, &process);
        watched.map_err(CallError::host("watch", name))?;
        if let Some(container) = self.containers.get_mut(name) {
            container.pid = pid;
            container.start_ticks = identity.start_time_ticks;
            container.state = ContainerState::Running;
            container.held = Some(Rc::new(process));
        }
        self.record(name);
        self.change(FenceEvent::Appeared(slot(name)));
        let container = self.containers.get(name);
        if container.is_some_and(|one| one.kill_pending) {
            // Earlier kills may have moved it out of its cgroup, to let it die.
            self.kill_pending(name);
            return Ok(Reply::Done);
        }
        let reached = self.cgroups.check_reach(&cgroup, pid);
        if let Err(error) = &reached {
            tracing::error!(name, %error, "the fence cannot freeze this container");
        }
        reached.map_err(CallError::host("guard", name))?;
        Ok(Reply::Done)
    }

    /// It will never start. The client may be wrong, so the kernel must not show any process of it either.
    pub(super) fn not_started(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = &self.external(name)?.cgroup;
        let pids = self.cgroups.freezer.pids_below(cgroup);
        if !pids
            .map_err(CallError::host("look for the processes of", name))?
            .is_empty()
        {
            return Err(CallError::StillAlive {
                name: name.to_owned(),
            });
        }
        if let Some(container) = self.containers.get_mut(name) {
            container.state = ContainerState::Lost;
        }
        self.change(FenceEvent::StartOver(slot(name)));
        self.report_end(name);
        Ok(Reply::Done)
    }

    /// One that has not appeared yet.
    fn external(&self, name: &str) -> Result<&Container, CallError> {
        let container = self.living(name)?;
        if container.may_appear() {
            return Ok(container);
        }
        Err(CallError::Exists {
            name: name.to_owned(),
        })
    }
}

/// Returns the identity of a pidfd's process, if that process has the expected PID.
fn identify(process: PidFd) -> io::Result<(PidFd, ProcessIdentity)> {
    let is_it = || {
        let number = process.as_fd().as_raw_fd();
        let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}"))?;
        let pid = text.lines().find_map(|line| line.strip_prefix("Pid:"));
        if pid.and_then(|pid| pid.trim().parse().ok()) == Some(process.pid()) {
            return Ok(());
        }
        Err(io::Error::other(
            "the descriptor does not hold that process",
        ))
    };
    is_it()?;
    let identity = ProcessIdentity::of(process.pid()).map_err(io::Error::other)?;
    // The process had the PID all the time, since it has it now and had it before.
    is_it()?;
    Ok((process, identity))
}
