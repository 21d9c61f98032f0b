//! A start, from its request to its answer.
//!
//! ```text
//! request ─▶ the fence opens its slot ─▶ ids, terminal ─▶ recorded ─▶ ordered ─▶ cloned ─▶ running
//!                   │                        │               │           │          │
//!                   └────────── refused ◀────┴───────────────┘           └─ failed ─┴─▶ swept
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use conman_core::ownership::FenceEvent;
use conman_linux::inner_pid;
use conman_shim_protocol::{
    Ahead, CallError, ContainerState, ContainerView, ExecSpec, KeptCommandSpec, KeptStreamsSpec,
    LOG_BYTES, LaunchError, LaunchSpec, Message, Reply, SHARED_IDS,
};

use super::ahead::ahead;
use super::recording::start_ticks;
use super::{Control, boottime_ns, open_child};
use crate::containers::{Container, KeptCommand, MAX_CONTAINERS};
use crate::fence::slot;
use crate::launcher_messages::{Command, Order, Start};
use crate::launching::{OwnResources, Pending, StartRemains};
use crate::log_bounds::BoundedLog;
use crate::shim_parts::StreamsUser;

/// Kept commands of one container, including those that have ended; each has some kept output.
const MAX_KEPT_COMMANDS: usize = 128;

const TOO_MANY_KEPT: &str = "commands that have not ended";

fn kept_command(spec: &KeptCommandSpec) -> KeptCommand {
    let after_ns = |timeout_ms: u64| timeout_ms.saturating_mul(1_000_000);
    let timeout_ns = spec.timeout_ms.map(after_ns);
    KeptCommand {
        label: spec.label.clone(),
        inner_pid: None,
        deadline_ns: timeout_ns.map(|timeout_ns| boottime_ns().saturating_add(timeout_ns)),
        timed_out: false,
    }
}

impl Control {
    pub(super) fn begin_launch(
        &mut self,
        client: u64,
        call: u64,
        spec: LaunchSpec,
        binds: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let checked = spec.check().and_then(|()| spec.check_fds(binds.len()));
        checked.map_err(CallError::from)?;
        let below = spec.cgroup.strip_prefix(&self.options.fence_cgroup);
        if !below.is_some_and(|rest| rest.starts_with('/')) {
            return Err(CallError::host("launch", &spec.name)(io::Error::other(
                "its cgroup is not below the fence's",
            )));
        }
        self.admit(&spec.name, None)?;
        if spec.ahead == Ahead::Make {
            self.admit_ahead()?;
        }
        let name = spec.name.clone();
        if !self.change(FenceEvent::Open(slot(&name))) {
            return Err(CallError::Fenced);
        }
        let begun = match self.launching.ahead_for(&spec) {
            Some(ticket) => self.begin_taken(ticket, (client, call), spec, binds),
            None => self.begin_admitted(client, call, spec, binds),
        };
        if begun.is_err() {
            self.change(FenceEvent::StartOver(slot(&name)));
            self.change(FenceEvent::Forget(slot(&name)));
        }
        begun
    }

    /// The fence has opened its slot.
    fn begin_admitted(
        &mut self,
        client: u64,
        call: u64,
        spec: LaunchSpec,
        binds: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let ids = if spec.root.shared_ids {
            Some(SHARED_IDS)
        } else {
            self.ids.take()
        };
        let Some(ids) = ids else {
            self.end_all_ahead();
            return Err(CallError::full("ranges of ids"));
        };
        let mut fds = binds;
        if let Err(error) = self.open_terminal(&spec, ids, &mut fds) {
            self.ids.give_back(ids);
            return Err(error);
        }
        let own = OwnResources {
            ids,
            scratch: spec.root.scratch.clone(),
            logs: bounded_logs(&spec),
        };
        let name = spec.name.clone();
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            cgroup: spec.cgroup.clone(),
            own: Some(own),
            exec_in: None,
            kept: None,
            with_client: spec.ahead == Ahead::Make,
            killed: false,
            ahead: ahead(&spec),
            taken: None,
            pidfd: None,
        };
        let order = |ticket| Order::Launch(Box::new(Start { ticket, ids, spec }));
        // If the shim dies during the start, its successor must find the record.
        let taken = self
            .record_start(&pending)
            .and_then(|()| self.launching.order(pending, fds, order));
        if let Err(error) = taken {
            self.ids.give_back(ids);
            self.forget(&name);
            return Err(CallError::host("launch", &name)(error));
        }
        Ok(())
    }

    /// Its slave is the first descriptor.
    pub(super) fn open_terminal(
        &mut self,
        spec: &LaunchSpec,
        ids: u32,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let Some(size) = spec.terminal else {
            return Ok(());
        };
        let owner = (ids + spec.program.uid, ids + spec.program.gid);
        let terminal = KeptStreamsSpec::Terminal(size);
        let streams = &mut self.streams;
        let opened = streams.open(&spec.name, terminal, Some(owner), StreamsUser::Container);
        let [slave, ..] = opened?;
        fds.insert(0, slave);
        Ok(())
    }

    pub(super) fn begin_exec(
        &mut self,
        client: u64,
        call: u64,
        mut spec: ExecSpec,
        mut streams: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let checked = spec
            .check()
            .and_then(|()| spec.check_streams(streams.len()));
        checked.map_err(CallError::from)?;
        self.admit(&spec.name, Some(&spec.container))?;
        let container = self.container(&spec.container)?;
        if container.frozen {
            // The process that enters it would freeze.
            return Err(CallError::host("execute", &spec.name)(io::Error::other(
                "its container is frozen",
            )));
        }
        let cgroup = container.cgroup.clone();
        let owner = container.ids;
        let owner = owner.map(|ids| (ids + spec.program.uid, ids + spec.program.gid));
        let (_, init) = self.hold(&spec.container)?;
        let name = spec.name.clone();
        let kept = match &spec.kept {
            Some(kept) => {
                self.make_room(&spec.container)?;
                let user = StreamsUser::Command;
                streams.extend(self.streams.open(&name, kept.streams, owner, user)?);
                spec.terminal = matches!(kept.streams, KeptStreamsSpec::Terminal(_));
                Some(kept_command(kept))
            }
            None => None,
        };
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            cgroup: cgroup.clone(),
            own: None,
            exec_in: Some(spec.container.clone()),
            kept,
            with_client: spec.with_client,
            killed: false,
            ahead: None,
            taken: None,
            pidfd: None,
        };
        let fds = std::iter::once(init).chain(streams).collect();
        let order = |ticket| {
            Order::Exec(Box::new(Command {
                ticket,
                cgroup,
                owner,
                spec,
            }))
        };
        let taken = self.launching.order(pending, fds, order);
        if taken.is_err() {
            self.streams.close(&name);
        }
        taken.map_err(CallError::host("execute", &name))
    }

    /// Makes room for one more kept command of a container: the oldest that has ended is forgotten.
    fn make_room(&mut self, container: &str) -> Result<(), CallError> {
        let starting = self.launching.kept_in(container);
        let kept = self.containers.kept_in(container);
        // Those that have begun are among both until their start is answered.
        let begun = kept.filter(|(_, one)| one.state != ContainerState::Launching);
        if begun.count() + starting < MAX_KEPT_COMMANDS {
            return Ok(());
        }
        let kept = self.containers.kept_in(container);
        let oldest = kept
            .filter(|(name, one)| !one.is_alive() && !self.launching.is_starting(name))
            .min_by_key(|(_, one)| one.start_ticks)
            .map(|(name, _)| name.clone());
        let oldest = oldest.ok_or_else(|| CallError::full(TOO_MANY_KEPT))?;
        self.forget_kept(&oldest);
        Ok(())
    }

    /// Forgets a kept command that has ended.
    pub(super) fn forget_kept(&mut self, name: &str) {
        if self
            .containers
            .get(name)
            .is_some_and(|one| one.kept.is_some())
            && self.containers.forget(name).is_some()
        {
            self.forget(name);
        }
    }

    /// Kills a kept command whose time is over.
    pub(super) fn timed_out(&mut self, name: &str) {
        let Some(command) = self.containers.get_mut(name) else {
            return;
        };
        if !command.is_alive() {
            return;
        }
        if let Some(kept) = &mut command.kept {
            kept.timed_out = true;
        }
        if let Err(error) = command.kill_group() {
            tracing::error!(name, %error, "cannot kill a command whose time is over");
        }
        self.record(name);
    }

    /// Checks that a container of this name may begin, or a command in a container.
    pub(super) fn admit(&mut self, name: &str, exec_in: Option<&str>) -> Result<(), CallError> {
        if self.fence.is_closed() {
            return Err(CallError::Fenced);
        }
        if self.containers.get(name).is_some() || self.launching.is_starting(name) {
            return Err(CallError::Exists {
                name: name.to_owned(),
            });
        }
        if let Some(what) = self.launching.lacks_room(exec_in) {
            return Err(CallError::full(what));
        }
        let ahead = self.launching.ahead().count();
        if self.containers.len().saturating_sub(ahead) >= MAX_CONTAINERS {
            return Err(CallError::full("containers"));
        }
        self.ensure_launcher()
            .map_err(CallError::host("launch", name))
    }

    pub(super) fn cloned(&mut self, ticket: u64, pid: i32) {
        let Some(start) = self.launching.pending.get_mut(&ticket) else {
            return;
        };
        // It is not reaped yet, unless it died at once; then there is nothing to open.
        start.pidfd = open_child(pid).ok().map(Rc::new);
        let name = start.name.clone();
        let is_command = start.own.is_none();
        let killed = start.killed;
        // Not needed for one that has been reaped already.
        let start_ticks = start_ticks(pid);
        let mut container = start.container().begun(pid, start_ticks);
        if let Some(kept) = &mut container.kept {
            kept.inner_pid = inner_pid(pid);
        }
        if let Some(ended) = self.containers.begin(name.clone(), container) {
            let _ = self.containers.reaped(pid, ended);
        }
        if !is_command {
            self.change(FenceEvent::Appeared(slot(&name)));
            self.bound_logs(&name);
        }
        if killed && self.containers.get(&name).is_some_and(Container::is_alive) {
            self.kill_pending(&name);
        }
        if is_command {
            // A container whose start is interrupted is found by its cgroup, a command by this record.
            self.record(&name);
        }
    }

    /// Answers a failed start, and forgets the container.
    pub(super) fn fail(&mut self, start: Pending, error: LaunchError) {
        if start.own.is_none()
            && let Some(command) = self.containers.get(&start.name)
            && command.is_alive()
            && let Err(error) = self.kill(command)
        {
            tracing::error!(name = start.name, %error, "cannot kill a failed command");
        }
        let report_end = self.awaits_end(&start);
        self.containers.discard(&start.name);
        self.forget(&start.name);
        if let Some(own) = start.own {
            self.give_back(Some(own.ids));
            self.start_failed(start.name, report_end);
        }
        let error = CallError::Launch { error };
        self.reply(start.client, start.call, Reply::Failed { error }, None);
    }

    /// Whether a client ordered its death and waits for a notification.
    fn awaits_end(&self, start: &Pending) -> bool {
        let container = self.containers.get(&start.name);
        start.killed && start.ahead.is_none() && container.is_none_or(Container::is_alive)
    }

    /// A start has ended without its program.
    pub(super) fn start_ended(&mut self, start: Pending, error: LaunchError, left: bool) {
        match left {
            true => self.interrupted(start, error),
            false => self.fail(start, error),
        }
    }

    /// Nothing of a start exists or can appear any more. The client that ordered it gets the failure; a
    /// client that ordered its death gets a notification.
    pub(super) fn start_failed(&mut self, name: String, report_end: bool) {
        for event in [
            FenceEvent::StartOver(slot(&name)),
            FenceEvent::Died(slot(&name)),
            FenceEvent::Forget(slot(&name)),
        ] {
            self.change(event);
        }
        if report_end {
            let container = ContainerView {
                name,
                pid: 0,
                state: ContainerState::Lost,
                exec_in: None,
                foreign: false,
                fenced: false,
            };
            self.publish(&Message::Ended { container });
        }
    }

    /// Ends everything of a start that has begun; it may have reached its program.
    pub(super) fn interrupted(&mut self, mut start: Pending, error: LaunchError) {
        let Some(own) = start.own.take() else {
            self.fail(start, error);
            return;
        };
        let killed = match self.containers.get(&start.name) {
            // It may not have joined its cgroup yet.
            Some(container) if container.is_alive() => self.kill(container),
            _ => self.cgroups.freezer.kill(&start.cgroup),
        };
        if let Err(error) = killed
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::error!(name = start.name, %error, "cannot kill an interrupted start");
        }
        // First, so that a record of it exists at all times.
        self.sweep_later(StartRemains {
            cgroup: start.cgroup.clone(),
            scratch: own.scratch,
            name: Some(start.name.clone()),
            ids: Some(own.ids),
            killed: self.awaits_end(&start),
        });
        self.containers.discard(&start.name);
        self.forget(&start.name);
        let error = CallError::Launch { error };
        self.reply(start.client, start.call, Reply::Failed { error }, None);
    }

    /// Fails the starts under way: no launcher can answer them.
    pub(super) fn interrupt_starts(&mut self) {
        for start in self.launching.died().into_values() {
            self.interrupted(start, LaunchError::LauncherDied);
        }
    }

    pub(super) fn give_back(&mut self, ids: Option<u32>) {
        if let Some(ids) = ids {
            self.ids.give_back(ids);
        }
    }
}

/// A terminal has no log, and a container made ahead none yet.
pub(super) fn bounded_logs(spec: &LaunchSpec) -> Vec<BoundedLog> {
    let has_log = spec.terminal.is_none() && spec.ahead != Ahead::Make;
    let paths = has_log.then_some(&spec.log);
    let paths = paths.into_iter().chain(&spec.log_stderr);
    let bytes = spec.log_bytes.unwrap_or(LOG_BYTES);
    paths
        .map(|path| BoundedLog {
            path: path.clone(),
            bytes,
        })
        .collect()
}
