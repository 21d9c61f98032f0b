//! Freezing, thawing and killing containers by their cgroups. Only the kernel is asked here; no state.

use std::io;

use conman_linux::{CgroupLayout, Freezer, Interface, Signal};
use rustix::io::Errno;

use crate::containers::Container;
use crate::options::ShimOptions;

/// The freezer, and the cgroup above everything that the fence freezes.
#[derive(Debug)]
pub(super) struct CgroupOrders {
    pub(super) freezer: Freezer,
    parent: String,
}

impl CgroupOrders {
    pub(super) fn new(options: &ShimOptions) -> io::Result<Self> {
        let freezer = Freezer::of(&CgroupLayout::detect()?.part(options.cgroups))?;
        let freezer = if options.do_without.contains(&Interface::CgroupKill) {
            freezer.killing_one_by_one()
        } else {
            freezer
        };
        freezer.ensure(&options.fence_cgroup)?;
        Ok(Self {
            freezer,
            parent: options.fence_cgroup.clone(),
        })
    }

    /// Freezes everything with one order, before each container is ordered separately.
    pub(super) fn freeze_all(&self) -> io::Result<()> {
        match self.freezer.freeze(&self.parent) {
            // A daemon that ended with nothing in it has removed it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.freezer.ensure(&self.parent)?;
                self.freezer.freeze(&self.parent)
            }
            done => done,
        }
    }

    /// Undoes [`CgroupOrders::freeze_all`]: everything runs that is not frozen by its own cgroup.
    pub(super) fn thaw_all(&self) -> io::Result<()> {
        unless_gone(self.freezer.thaw(&self.parent))
    }

    /// Thaws the parent where frozen processes cannot be killed: a killed one could not be thawed alone
    /// below a frozen parent.
    pub(super) fn release_all(&self) -> io::Result<()> {
        if self.freezer.dies_frozen() {
            return Ok(());
        }
        self.thaw_all()
    }

    /// Whether it is frozen by its own cgroup, not only by the parent.
    pub(super) fn is_held_frozen(&self, cgroup: &str) -> bool {
        let is = |answer: io::Result<bool>| answer.unwrap_or(false);
        is(self.freezer.is_frozen(cgroup)) && is(self.freezer.is_ordered(cgroup))
    }

    pub(super) fn kill(&self, container: &Container, fence_armed: bool) -> io::Result<()> {
        if container.may_appear() {
            // A process that appears in it later never runs.
            let frozen = self.freezer.freeze(&container.cgroup);
            let killed = frozen.and_then(|()| self.freezer.kill_frozen(&container.cgroup));
            return killed.and(self.kill_strays(container));
        }
        // A frozen process dies only once thawed, and must not run then.
        let by_cgroup = !self.freezer.dies_frozen()
            && container.exec_in.is_none()
            && (container.frozen
                || fence_armed
                || self.freezer.is_frozen(&container.cgroup).unwrap_or(true));
        if by_cgroup || container.external {
            // A new process may not have joined its cgroup, and an external container's may never have.
            let signalled = container.signal(Signal::SIGKILL);
            return self.freezer.kill(&container.cgroup).and(signalled);
        }
        container.signal(Signal::SIGKILL)
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

    /// Whether freezing its cgroup freezes all of a container. Of an external one whose first process is
    /// not known, that is everything that its path contains in any hierarchy.
    pub(super) fn freezes_all_of(&self, container: &Container) -> bool {
        if !container.external {
            return true;
        }
        let reached = match &container.held {
            Some(process) => self.freezer.reaches(&container.cgroup, process.pid()),
            None => {
                let strays = self.freezer.strays(&container.cgroup);
                strays.map(|strays| strays.is_empty())
            }
        };
        reached.unwrap_or(false)
    }

    /// Checks that the process freezes with the cgroup. Docker's may be only in other hierarchies, or in a
    /// cgroup of the same path below another root. The cgroup here is empty then, and an empty cgroup
    /// reports that it is frozen.
    pub(super) fn check_reach(&self, cgroup: &str, pid: i32) -> io::Result<()> {
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
}

/// Ignores errors for a cgroup that does not exist yet, or any more: it holds nothing.
pub(super) fn unless_gone(done: io::Result<()>) -> io::Result<()> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // It was removed between its file's opening and the write.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(()),
        done => done,
    }
}
