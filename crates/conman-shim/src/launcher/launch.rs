//! One start, from the order to the program's exec or to the removal of its remains.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use conman_fence::{ShimOptions, Start};
use conman_linux::{
    CgroupLayout, CgroupLimits, CgroupMaker, Cgroups, CloneOptions, Features, Freezer, InitProgram,
    Interface, MakeCgroupError, Mount, Namespaces, PidFd, SessionCgroup, SoleThread, clone_process,
    unshare_namespaces,
};
use conman_shim_protocol::{
    Ahead, LaunchError, LaunchSpec, NetworkSpec, Phases, RANGE_SIZE, RootKind, seqpacket,
};

use super::bind_owners::BindOwners;
use super::cgroup_view::CgroupView;
use super::child::{Child, ProcPaths};
use super::completing::label;
use super::handed::Go;
use super::places::Places;
use super::rootfs::{self, Scratch};
use super::steps::namespace_step;
use super::sweeping::Sweeping;
use super::under_way::{Clock, Failure, UnderWay, last_words};
use crate::seccomp_filter::Filters;

/// Bound on the death of a child that was killed during its setup: other starts wait meanwhile. It takes
/// a millisecond; one that takes longer, for example because it is frozen, is left to the sweeper.
const DEATH_TIMEOUT: Duration = Duration::from_millis(100);

/// Namespaces that a container is created in. It creates the network namespace, which takes longest,
/// itself while the launcher continues, and the cgroup namespace once it has joined its cgroups. An IPC namespace
/// only where it has its own.
const NAMESPACES: Namespaces = Namespaces::NEWUSER
    .union(Namespaces::NEWPID)
    .union(Namespaces::NEWNS)
    .union(Namespaces::NEWUTS);

/// Least limit of processor time that does not delay the rest of a start: that takes a millisecond or two of it, and may
/// take a fifth of a period at once.
const SETUP_CPU_MILLIS: u64 = 200;

/// Controls the dumpable attribute of a process that changes its user; proc_sys_fs(5).
const SUID_DUMPABLE: &str = "/proc/sys/fs/suid_dumpable";

/// The common state of all starts.
#[derive(Debug)]
pub(super) struct Launcher {
    pub(super) sole: SoleThread,
    features: Features,
    /// For all containers together; no container may have more.
    total_cpu_millis: Option<u64>,
    pub(super) cgroups: CgroupMaker,
    all_cgroups: Cgroups,
    freezer: Freezer,
    pub(super) sweeping: Sweeping,
    pub(super) places: Places,
    view: CgroupView,
    pub(super) filters: Filters,
    proc_paths: ProcPaths,
    /// The greatest number of a container's superblock: about as many were on the host at once.
    pub(super) superblocks: u32,
    init: InitProgram,
}

/// What a start has made so far; undone unless it succeeds. Fields are dropped in order.
#[derive(Debug, Default)]
pub(super) struct Made {
    process: Option<PidFd>,
    pub(super) cgroup: Option<SessionCgroup>,
    pub(super) scratch: Option<Scratch>,
    /// Logs that did not exist before.
    pub(super) logs: Vec<PathBuf>,
    /// Its process's.
    pub(super) user_namespace: Option<File>,
}

impl Made {
    /// Undoes everything, continuing after failures, which are logged. Returns whether something of it may
    /// still live.
    pub(super) fn take_back(self) -> bool {
        let dead = self.process.as_ref().is_none_or(|process| {
            let dead = process
                .kill()
                .map_err(io::Error::other)
                .and_then(|_| process.wait_dead(DEATH_TIMEOUT));
            matches!(dead, Ok(true))
        });
        // If something may still write, the sweeper removes both.
        if dead {
            if let Some(cgroup) = &self.cgroup {
                cgroup.take_back();
            }
            if let Some(scratch) = &self.scratch {
                scratch.take_back();
            }
        }
        for log in &self.logs {
            if let Err(error) = std::fs::remove_file(log) {
                tracing::warn!(path = %log.display(), %error, "cannot remove a failed start's log");
            }
        }
        !dead
    }
}

impl Launcher {
    pub(super) fn new(sole: SoleThread, options: &ShimOptions) -> Result<Self, LaunchError> {
        let step = |name: &'static str| move |error: io::Error| LaunchError::step(name, &error);
        std::fs::read_to_string(SUID_DUMPABLE)
            .and_then(|setting| check_dumpable(&setting))
            .map_err(step("keep sessions from tracing processes that enter them"))?;
        let features = Features::probe().map_err(step("probe the kernel"))?;
        let features = features.without(&options.do_without);
        // Empty, for the containers that have none of their own.
        unshare_namespaces(Namespaces::NEWIPC).map_err(step("make an IPC namespace"))?;
        let proc_paths = ProcPaths::probe();
        let filters = Filters::compile();
        let init = InitProgram::make().map_err(step("make the containers' init"))?;
        let places = Places::make(&sole, &options.roots)?;
        // Only now: cgroups' paths are valid in the workshop.
        let layout = CgroupLayout::detect().map_err(step("find the cgroups"))?;
        let layout = layout.part(options.cgroups);
        let cgroups = CgroupMaker::of(&layout);
        let freezer = Freezer::of(&layout).map_err(step("find the freezer"))?;
        let view = CgroupView::new(&cgroups);
        places
            .make_sys(view.places())
            .map_err(step("make the containers' /sys"))?;
        if let Some(millis) = options.total_cpu_millis
            && let Err(error) = cgroups.limit_total_cpu(&options.fence_cgroup, millis)
        {
            tracing::warn!(%error, millis, "cannot limit the processor time of all containers");
        }
        Ok(Self {
            total_cpu_millis: options.total_cpu_millis,
            cgroups,
            all_cgroups: Cgroups::of(&layout),
            freezer,
            sweeping: Sweeping::default(),
            sole,
            features,
            places,
            view,
            filters,
            proc_paths,
            superblocks: 0,
            init,
        })
    }

    pub(super) fn features(&self) -> &Features {
        &self.features
    }

    /// Carries out the launcher's part of an order. `cloned` is called with the PID before the process can
    /// do anything.
    pub(super) fn launch(
        &mut self,
        order: &Start,
        binds: Vec<OwnedFd>,
        cloned: &mut dyn FnMut(i32) -> io::Result<()>,
    ) -> Result<UnderWay, Failure> {
        let mut made = Made::default();
        let mut phases = Phases::default();
        let mut clock = Clock::start();
        match self.attempt(order, binds, cloned, (&mut made, &mut phases, &mut clock)) {
            Ok(socket) => Ok(UnderWay::container(
                order.ticket,
                made,
                socket,
                clock,
                phases,
            )),
            Err(error) => Err(Failure {
                left: made.take_back(),
                error,
            }),
        }
    }

    /// Sets up a process, and returns the socket to it.
    fn attempt(
        &mut self,
        order: &Start,
        mut binds: Vec<OwnedFd>,
        cloned: &mut dyn FnMut(i32) -> io::Result<()>,
        (made, phases, clock): (&mut Made, &mut Phases, &mut Clock),
    ) -> Result<OwnedFd, LaunchError> {
        let spec = &order.spec;
        let cgroup = self.cgroups.begin(&spec.cgroup);
        let cgroup = made.cgroup.insert(cgroup.map_err(cgroup_failed)?);
        if spec.ahead == Ahead::Make {
            label(cgroup, "")?;
        }
        phases.cgroup_us = clock.lap();
        let link = (spec.network == NetworkSpec::Linked).then(|| binds.pop());
        let link = link.flatten();
        let snapshot = match spec.root.kind {
            RootKind::Overlay => None,
            RootKind::Snapshot => binds.pop().map(Mount::from_fd),
        };
        let runtime_files = spec.hardening.runtime_files.len();
        let runtime = binds.split_off(binds.len().saturating_sub(runtime_files));
        let (process, socket) = self.clone_child(order, cgroup, link.as_ref())?;
        // When the child ends, the client must read the socket's end.
        drop(link);
        let process = made.process.insert(process);
        cloned(process.pid()).map_err(|error| LaunchError::step("report", &error))?;
        phases.clone_us = clock.lap();
        // From here on the child creates its network namespace on another processor.
        let limits = self.within_total(spec.limits);
        self.cgroups.limit(cgroup, &limits).map_err(cgroup_failed)?;
        let is_enough = limits
            .cpu_millis
            .is_some_and(|millis| millis >= SETUP_CPU_MILLIS);
        if spec.ahead == Ahead::Make && is_enough {
            // Nobody waits for it, as the start would.
            let set = cgroup.set_cpu_quota();
            set.map_err(|error| LaunchError::step("set the limit of processor time", &error))?;
        }
        phases.cgroup_us += clock.lap();
        if let Ahead::Take { .. } = spec.ahead {
            // Of a container made ahead that has ended.
            conman_linux::remove_tree(&spec.root.scratch)
                .map_err(|error| LaunchError::step("remove a directory made ahead", &error))?;
        }
        let scratch = made.scratch.insert(Scratch::make(&spec.root)?);
        phases.files_us = clock.lap();
        let mapped = offer_to_oom_killer(process).and_then(|()| map_ids(process, 0, order.ids));
        let user_namespace = mapped.map_err(|error| match process.is_dead() {
            // It has ended, and may have sent the reason. Only then: reading would wait for a living one.
            Ok(true) => last_words(&socket),
            _ => error,
        })?;
        let root = rootfs::make(
            &self.features,
            &spec.root,
            snapshot,
            scratch,
            user_namespace.as_fd(),
            order.ids,
        )?;
        if let Ok(number) = root.mount.superblock_number() {
            self.superblocks = self.superblocks.max(number);
        }
        let dev = self
            .places
            .devices(order.ids)
            .map_err(|error| LaunchError::step("make the container's devices", &error))?;
        let runtime_root = spec
            .hardening
            .has_runtime()
            .then(|| scratch.runtime_root(order.ids));
        let runtime_root = runtime_root
            .transpose()
            .map_err(|error| LaunchError::step("make the root of the OCI runtime", &error))?;
        let view = spec.sys.then(|| self.view.of(&self.places, cgroup));
        let view = view.transpose()?.unwrap_or_default();
        let first = [&root.mount, &dev].into_iter().chain(&runtime_root);
        let first = first.map(AsFd::as_fd);
        let first = first.chain(runtime.iter().map(AsFd::as_fd));
        let go = Go {
            places: view.places(),
        };
        let views = view.mounts().map(AsFd::as_fd);
        go.hand_over(&socket, cgroup, first.chain(views))?;
        made.user_namespace = Some(user_namespace);
        phases.root_us = clock.lap();
        if spec.ahead != Ahead::Make {
            self.hand_over_rest(order, binds, made, (&socket, false))?;
        }
        phases.files_us += clock.lap();
        // From now on only the child's copies keep them open.
        drop((root, dev, runtime, view));
        Ok(socket)
    }

    /// Does one step of the sweeps. Returns the ticket of one that is finished.
    pub(super) fn sweep_a_little(&mut self) -> Option<u64> {
        self.sweeping.step(&self.all_cgroups, &self.freezer)
    }

    /// Lifts a container's CPU limit if it has throttled the container.
    pub(super) fn lift_cpu_limit(&self, cgroup: &str) {
        if let Some(limit) = self.all_cgroups.cpu_limit(cgroup)
            && limit.throttled() > 0
            && let Err(error) = limit.lift()
        {
            tracing::warn!(cgroup, %error, "cannot lift the CPU limit of a killed container");
        }
    }

    /// Waits until nothing of an earlier start uses this one's place; calls `swept` for finished sweeps.
    pub(super) fn make_room(
        &mut self,
        order: &Start,
        swept: &mut dyn FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let (cgroup, scratch) = (&order.spec.cgroup, &order.spec.root.scratch);
        self.sweeping
            .clear(cgroup, scratch, &self.all_cgroups, &self.freezer, swept)
    }

    /// A v1 hierarchy accepts no limit of a container above the limit of all containers.
    fn within_total(&self, limits: CgroupLimits) -> CgroupLimits {
        let most = self.total_cpu_millis.unwrap_or(u64::MAX);
        CgroupLimits {
            cpu_millis: limits.cpu_millis.map(|millis| millis.min(most)),
            ..limits
        }
    }

    /// Maps the owners of the binds' files.
    pub(super) fn own_binds(
        &self,
        spec: &LaunchSpec,
        binds: Vec<OwnedFd>,
        user_namespace: BorrowedFd<'_>,
        ids: u32,
    ) -> Result<Vec<Mount>, LaunchError> {
        let mut owners = BindOwners {
            sole: &self.sole,
            supported: self.features.has(Interface::MountAttributes),
            container: user_namespace,
            ids,
            namespace: None,
        };
        let binds = binds.into_iter().zip(&spec.binds);
        binds.map(|(fd, bind)| owners.map(fd, bind)).collect()
    }

    fn clone_child(
        &self,
        order: &Start,
        cgroup: &SessionCgroup,
        link: Option<&OwnedFd>,
    ) -> Result<(PidFd, OwnedFd), LaunchError> {
        let step = |name: &'static str| move |error: io::Error| LaunchError::step(name, &error);
        let spec = &order.spec;
        let capabilities = spec.hardening.capability_set();
        let capabilities = capabilities.map_err(|error| LaunchError::Spec { error })?;
        let (ours, theirs) = seqpacket::pair().map_err(step("make a socket"))?;
        // All other descriptors of the launcher are closed: the session must not reach them, and the
        // launcher's death must close the socket for the child.
        let init = spec.init.then_some(&self.init);
        let sockets = [&theirs].into_iter().chain(link).map(AsFd::as_fd);
        let keep: Vec<_> = sockets.chain(init.map(AsFd::as_fd)).collect();
        let namespaces = match spec.hardening.shares_ipc() {
            true => NAMESPACES,
            false => NAMESPACES | Namespaces::NEWIPC,
        };
        let options = CloneOptions {
            namespaces: Some(namespaces),
            sibling: true,
            into_cgroup: cgroup.unified(),
            keep_only: Some(&keep),
            owner: Some(order.ids),
        };
        self.places
            .enter_launchpad()
            .map_err(step("enter the launchpad"))?;
        let process = clone_process(&self.sole, &options, || {
            let child = Child {
                spec,
                features: &self.features,
                capabilities,
                filter: self.filters.of(&spec.hardening),
                proc_paths: &self.proc_paths,
                view: &self.view,
                socket: &theirs,
                link,
                init,
                sole: &self.sole,
            };
            child.run()
        });
        self.places
            .enter_workshop()
            .map_err(step("leave the launchpad"))?;
        let process = process.map_err(namespace_step(
            "make the container's namespaces",
            "one of user.max_*_namespaces",
        ))?;
        Ok((process, ours))
    }
}

pub(super) fn cgroup_failed(error: MakeCgroupError) -> LaunchError {
    let source = match &error {
        MakeCgroupError::Io { source, .. } => Some(source),
        _ => None,
    };
    LaunchError::Step {
        step: "make the cgroup".to_owned(),
        errno: source.and_then(io::Error::raw_os_error).unwrap_or(0),
        reason: match source {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        },
    }
}

/// A command's process becomes a user of its container before it is confined. With setting 1 the kernel
/// would let the session trace it from then on.
fn check_dumpable(setting: &str) -> io::Result<()> {
    if setting.trim() != "1" {
        return Ok(());
    }
    Err(io::Error::other(
        "fs.suid_dumpable is 1, by which processes that change their user can be traced; set it \
         to 0 or 2",
    ))
}

/// The `oom_score_adj` of a session's processes, which they cannot lower: when the host's memory is short
/// they are killed before the host's processes. It counts like half of the memory.
const OOM_SCORE: &str = "500";

/// Makes the OOM killer prefer a process that waits for this one, and all its descendants.
pub(super) fn offer_to_oom_killer(process: &PidFd) -> Result<(), LaunchError> {
    std::fs::write(format!("/proc/{}/oom_score_adj", process.pid()), OOM_SCORE)
        .map_err(|error| LaunchError::step("set the OOM score", &error))
}

/// Sets the ids of a child's user namespace, `inside` being the first inside and `ids` on the host, and
/// returns the namespace.
pub(super) fn map_ids(process: &PidFd, inside: u32, ids: u32) -> Result<File, LaunchError> {
    let map = format!("{inside} {ids} {RANGE_SIZE}\n");
    let pid = process.pid();
    let write = |name: &str| std::fs::write(format!("/proc/{pid}/{name}"), &map);
    let opened = write("uid_map")
        .and_then(|()| write("gid_map"))
        .and_then(|()| File::open(format!("/proc/{pid}/ns/user")));
    // If it lives now, it lived then, and the PID was not reused.
    match process.is_dead() {
        Ok(false) => opened.map_err(|error| LaunchError::step("map the container's ids", &error)),
        _ => Err(LaunchError::EndedEarly),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_lets_processes_be_traced_that_change_their_user_is_refused() {
        assert!(check_dumpable("0\n").is_ok() && check_dumpable("2\n").is_ok());
        let error = check_dumpable("1\n").expect_err("unsafe");
        assert!(error.to_string().contains("fs.suid_dumpable"), "{error}");
    }
}
