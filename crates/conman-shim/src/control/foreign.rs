//! Containers that another program starts, such as Docker: the fence covers each by a cgroup above all
//! of its cgroups.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use conman_core::ownership::FenceEvent;
use conman_linux::{PidFd, ProcessIdentity};

use super::{Control, host_error, spec_error};
use crate::containers::Container;
use crate::fence::slot;
use crate::protocol::{CallError, ContainerState, Reply};
use crate::spec::check_name;

/// Prefix of the first part of our cgroups' paths, so that no order freezes the host.
const OURS: &str = "/conman";

/// Pause between two checks for processes of condemned starts.
const DOOMED_LOOK_NS: u64 = 20_000_000;

impl Control {
    /// Puts a container under the fence before its start is ordered.
    pub(super) fn guard(&mut self, name: &str, cgroup: &str) -> Result<Reply, CallError> {
        check_name(name).map_err(spec_error)?;
        let ours = cgroup.strip_prefix(OURS);
        if !ours.is_some_and(|rest| rest.contains('/') && !rest.ends_with('/')) {
            return Err(host_error("guard", name)(io::Error::other(
                "its cgroup is not below conman's",
            )));
        }
        self.admit(name, None)?;
        // A process that is created in it after it was frozen never runs.
        let made = self.freezer.ensure(cgroup);
        made.map_err(host_error("make the cgroup of", name))?;
        let name = name.to_owned();
        if !self.change(FenceEvent::Open(slot(&name))) {
            return Err(CallError::Fenced);
        }
        let mut container = Container::starting(cgroup, None, None, None);
        container.foreign = true;
        self.containers.adopt(name.clone(), container);
        self.keep(&name);
        Ok(Reply::Done)
    }

    /// Its first process is known. The process is held in any case. Refused if the fence could not freeze
    /// it: then the program that started it ends it, or the fence does, which kills what it cannot freeze.
    pub(super) fn appeared(
        &mut self,
        name: &str,
        pid: i32,
        fds: Vec<OwnedFd>,
    ) -> Result<Reply, CallError> {
        let cgroup = self.foreign(name)?.cgroup.clone();
        let identified = fds
            .into_iter()
            .next()
            .ok_or_else(|| io::Error::other("no pidfd came with the request"))
            .and_then(|fd| identify(PidFd::received(fd, pid)));
        let (process, identity) = identified.map_err(host_error("open the process of", name))?;
        let watched = self.watch_adopted(name, &process);
        watched.map_err(host_error("watch", name))?;
        if let Some(container) = self.containers.get_mut(name) {
            container.pid = pid;
            container.start_ticks = identity.start_time_ticks;
            container.state = ContainerState::Running;
            container.held = Some(process);
        }
        self.keep(name);
        self.change(FenceEvent::Appeared(slot(name)));
        if let Some(container) = self.containers.get(name)
            && container.doomed
            && let Err(error) = self.kill(container)
        {
            tracing::error!(name, %error, "cannot kill a condemned start");
        }
        self.set_timer();
        let reached = self.check_reach(&cgroup, pid);
        if let Err(error) = &reached {
            tracing::error!(name, %error, "the fence cannot freeze this container");
        }
        reached.map_err(host_error("guard", name))?;
        Ok(Reply::Done)
    }

    /// Checks that the process freezes with the cgroup. Docker's may be only in other hierarchies, or in a
    /// cgroup of the same path below another root. The cgroup here is empty then, and an empty cgroup
    /// reports that it is frozen.
    fn check_reach(&self, cgroup: &str, pid: i32) -> io::Result<()> {
        if self.freezer.reaches(cgroup, pid)? {
            return Ok(());
        }
        let place = self.freezer.place_of(pid)?;
        let means = self.freezer.means();
        Err(io::Error::other(format!(
            "process {pid} is not in {cgroup} but in {} of {means}, by which this host freezes, so \
             nothing would stop it when this node is cut off; on a host with both cgroups v1 and \
             v2, mount v2 on /sys/fs/cgroup/unified, use runc 1.1 or later, and give conman and \
             Docker the same cgroup namespace",
            place.as_deref().unwrap_or("no cgroup"),
        )))
    }

    /// Whether freezing its cgroup freezes all of a foreign container. While its first process is not known,
    /// that is everything that its path contains in any hierarchy.
    pub(super) fn is_within_reach(&self, name: &str) -> bool {
        let container = self.containers.get(name);
        let Some(container) = container.filter(|one| one.foreign) else {
            return true;
        };
        let reached = match &container.held {
            Some(process) => self.freezer.reaches(&container.cgroup, process.pid()),
            None => {
                let strays = self.freezer.strays(&container.cgroup);
                strays.map(|strays| strays.is_empty())
            }
        };
        reached.unwrap_or(false)
    }

    /// Kills its processes that freezing does not reach, as nothing else would stop them.
    pub(super) fn kill_strays(&self, container: &Container) -> io::Result<()> {
        let mut killed = Ok(());
        for stray in self.freezer.strays(&container.cgroup)? {
            tracing::warn!(
                container.cgroup,
                pid = stray.pid(),
                "killing a process that cannot be frozen"
            );
            let sent = stray.kill().map_err(io::Error::other);
            killed = killed.and(sent.map(|_| ()));
        }
        killed
    }

    /// Records, also for later shims, that it must be killed: by the fence, if it is armed, and every process
    /// that appears of it, if another program starts it and has not reported the outcome.
    pub(super) fn doom(&mut self, name: &str) {
        let Some(container) = self.containers.get_mut(name) else {
            return;
        };
        let may_appear = container.may_appear();
        if container.doomed || !(may_appear || self.fence.is_armed()) {
            return;
        }
        container.doomed = true;
        self.keep(name);
        if may_appear {
            self.doomed.insert(name.to_owned());
            self.set_timer();
        }
    }

    /// Kills new processes of condemned starts. The program that starts them waits for it.
    pub(super) fn kill_doomed(&mut self) {
        let Self {
            containers, doomed, ..
        } = self;
        doomed.retain(|name| containers.get(name).is_some_and(Container::may_appear));
        for name in &self.doomed {
            let Some(container) = self.containers.get(name) else {
                continue;
            };
            match self.kill(container) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(name, %error, "cannot kill a condemned start");
                }
                _ => {}
            }
        }
    }

    pub(super) fn next_kill_ns(&self, now_ns: u64) -> Option<u64> {
        let waits = !self.doomed.is_empty();
        waits.then(|| now_ns.saturating_add(DOOMED_LOOK_NS))
    }

    /// It will never start. The client may be wrong, so the kernel must not show any process of it either.
    pub(super) fn not_started(&mut self, name: &str) -> Result<Reply, CallError> {
        let cgroup = &self.foreign(name)?.cgroup;
        let pids = self.freezer.pids_below(cgroup);
        if !pids
            .map_err(host_error("look for the processes of", name))?
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
        self.tell_end(name);
        Ok(Reply::Done)
    }

    /// A foreign container that has not appeared yet.
    fn foreign(&self, name: &str) -> Result<&Container, CallError> {
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
