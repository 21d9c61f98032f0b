use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::ops::Bound;
use std::path::PathBuf;

use conman_linux::{Ended, PidFd, Signal};
use serde::{Deserialize, Serialize};

use crate::protocol::{ContainerState, ContainerView, PAGE};
use crate::sweeper::BoundedLog;

/// Ends that came before the launcher's report of the beginning. Each belongs to a start under way, so
/// the number of starts bounds them.
type Unclaimed = BTreeMap<i32, Ended>;

/// Maximum of containers, living or not acknowledged: the number of ranges of ids.
pub(crate) const MAX_CONTAINERS: usize = 16_384;

/// A container from the order to start it until its end is acknowledged. Serialized in this form for a
/// later shim.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Container {
    pub(crate) cgroup: String,
    /// 0 before its clone.
    pub(crate) pid: i32,
    /// With the PID and the boot, identifies the process.
    pub(crate) start_ticks: u64,
    /// First of its range of ids; `None` for a command.
    pub(crate) ids: Option<u32>,
    /// Its directory, removed when its start is interrupted; `None` for a command.
    pub(crate) scratch: Option<PathBuf>,
    /// The container it is a command in.
    pub(crate) exec_in: Option<String>,
    pub(crate) state: ContainerState,
    /// The log to bound; `None` for a command, or with a terminal.
    pub(crate) log: Option<BoundedLog>,
    /// Whether a client ordered its freezing.
    pub(crate) frozen: bool,
    /// Another program starts it.
    pub(crate) foreign: bool,
    /// It must be killed, with every process that appears of a start by another program.
    pub(crate) doomed: bool,
    /// The fence kills it; no client ordered that.
    pub(crate) fenced: bool,
    /// Its CPU limit is lifted, or will be.
    #[serde(skip)]
    pub(crate) is_lifted: bool,
    /// Set if an earlier shim started it, so that it is no child.
    #[serde(skip)]
    pub(crate) held: Option<PidFd>,
}

impl Container {
    /// A container whose start is ordered.
    pub(crate) fn starting(
        cgroup: &str,
        ids: Option<u32>,
        scratch: Option<PathBuf>,
        exec_in: Option<String>,
    ) -> Self {
        Self {
            cgroup: cgroup.to_owned(),
            pid: 0,
            start_ticks: 0,
            ids,
            scratch,
            exec_in,
            log: None,
            state: ContainerState::Launching,
            frozen: false,
            foreign: false,
            doomed: false,
            fenced: false,
            is_lifted: false,
            held: None,
        }
    }

    /// Its process was created.
    pub(crate) fn begun(self, pid: i32, start_ticks: u64) -> Self {
        Self {
            pid,
            start_ticks,
            ..self
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.state.is_alive()
    }

    /// Whether another program may start it, or has, without having reported it.
    pub(crate) fn may_appear(&self) -> bool {
        self.foreign && self.state == ContainerState::Launching
    }

    /// A copy for the program that replaces this one; the pidfd is passed separately.
    pub(crate) fn copy(&self) -> Self {
        Self {
            cgroup: self.cgroup.clone(),
            pid: self.pid,
            start_ticks: self.start_ticks,
            ids: self.ids,
            scratch: self.scratch.clone(),
            exec_in: self.exec_in.clone(),
            log: self.log.clone(),
            state: self.state,
            frozen: self.frozen,
            foreign: self.foreign,
            doomed: self.doomed,
            fenced: self.fenced,
            is_lifted: self.is_lifted,
            held: None,
        }
    }

    /// Sends a signal to its first process only.
    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match &self.held {
            Some(process) => {
                process.signal(signal).map_err(io::Error::other)?;
                Ok(())
            }
            // A child that has not been reaped keeps its PID.
            None => signal_child(self.pid, signal),
        }
    }

    pub(crate) fn view(&self, name: &str) -> ContainerView {
        ContainerView {
            name: name.to_owned(),
            cgroup: self.cgroup.clone(),
            pid: self.pid,
            state: self.state,
            exec_in: self.exec_in.clone(),
            foreign: self.foreign,
            // One that was about to exit may have been first.
            fenced: self.fenced
                && match self.state {
                    ContainerState::Launching | ContainerState::Running | ContainerState::Lost => {
                        true
                    }
                    ContainerState::Signalled { signal } => signal == Signal::KILL.as_raw(),
                    ContainerState::Exited { .. } => false,
                },
        }
    }
}

/// Only for a child that has not been reaped: its PID is not reused.
pub(crate) fn signal_child(pid: i32, signal: Signal) -> io::Result<()> {
    let pid = Some(pid).filter(|pid| *pid > 0);
    let pid = pid.and_then(rustix::process::Pid::from_raw);
    let pid = pid.ok_or(io::Error::from(rustix::io::Errno::SRCH))?;
    Ok(rustix::process::kill_process(pid, signal)?)
}

/// The shim's children, and the containers that it took over from an earlier shim.
#[derive(Debug, Default)]
pub(crate) struct Containers {
    by_name: BTreeMap<String, Container>,
    names: HashMap<i32, String>,
    unclaimed: Unclaimed,
    /// PIDs of failed starts: reaped and ignored.
    doomed: BTreeSet<i32>,
}

/// Whose end it was.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reaped {
    Container(String),
    /// A failed start's.
    Doomed,
    /// Of a child that is not known yet.
    Unknown,
}

impl Containers {
    pub(crate) fn get(&self, name: &str) -> Option<&Container> {
        self.by_name.get(name)
    }

    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Container> {
        self.by_name.get_mut(name)
    }

    /// A child that has not been reaped.
    pub(crate) fn by_pid(&self, pid: i32) -> Option<&Container> {
        self.by_name.get(self.names.get(&pid)?)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&String, &Container)> {
        self.by_name.iter()
    }

    /// A child has begun. Returns its end if that came first.
    pub(crate) fn begin(&mut self, name: String, container: Container) -> Option<Ended> {
        let pid = container.pid;
        self.names.insert(pid, name.clone());
        self.by_name.insert(name, container);
        self.unclaimed.remove(&pid)
    }

    /// Adds a container that is no child, or has ended.
    pub(crate) fn adopt(&mut self, name: String, container: Container) {
        self.by_name.insert(name, container);
    }

    /// Adds a container that is still a child, since only the program was replaced.
    pub(crate) fn keep_child(&mut self, name: String, container: Container) {
        if container.is_alive() {
            self.names.insert(container.pid, name.clone());
        }
        self.by_name.insert(name, container);
    }

    /// Children that are only reaped.
    pub(crate) fn doomed(&self) -> impl Iterator<Item = i32> {
        self.doomed.iter().copied()
    }

    /// A child that only helps to begin another one.
    pub(crate) fn helper(&mut self, pid: i32) {
        if self.unclaimed.remove(&pid).is_none() {
            self.doomed.insert(pid);
        }
    }

    /// A child was reaped; its PID may be reused from now on.
    pub(crate) fn reaped(&mut self, pid: i32, ended: Ended) -> Reaped {
        if self.doomed.remove(&pid) {
            return Reaped::Doomed;
        }
        let Some(name) = self.names.remove(&pid) else {
            return Reaped::Unknown;
        };
        if let Some(container) = self.by_name.get_mut(&name) {
            container.state = ended.into();
        }
        Reaped::Container(name)
    }

    /// Keeps the end of a child whose beginning has not been reported.
    pub(crate) fn keep_unclaimed(&mut self, pid: i32, ended: Ended) {
        self.unclaimed.insert(pid, ended);
    }

    /// No start is under way, so these ends are not needed.
    pub(crate) fn forget_unclaimed(&mut self) {
        self.unclaimed.clear();
    }

    /// Removes a container whose start has failed; its end is not reported.
    pub(crate) fn discard(&mut self, name: &str) -> Option<Container> {
        let container = self.by_name.remove(name)?;
        if container.held.is_none() && self.names.remove(&container.pid).is_some() {
            self.doomed.insert(container.pid);
        }
        Some(container)
    }

    /// Forgets one that has ended.
    pub(crate) fn forget(&mut self, name: &str) -> Option<Container> {
        if self.by_name.get(name).is_some_and(Container::is_alive) {
            return None;
        }
        self.by_name.remove(name)
    }

    /// One page in the order of names, and whether there are more.
    pub(crate) fn page(&self, after: Option<&str>) -> (Vec<ContainerView>, bool) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = self.by_name.range::<str, _>((from, Bound::Unbounded));
        let page = rest.by_ref().take(PAGE);
        let page = page.map(|(name, container)| container.view(name)).collect();
        (page, rest.next().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(pid: i32) -> Container {
        let mut container = Container::starting("/conman-x/a", None, None, None).begun(pid, 1);
        container.state = ContainerState::Running;
        container
    }

    #[test]
    fn what_ended_before_the_fence_killed_it_is_not_told_as_killed_by_it() {
        let mut container = container(7);
        container.fenced = true;
        for (state, fenced) in [
            (ContainerState::Running, true),
            (ContainerState::Signalled { signal: 9 }, true),
            (ContainerState::Lost, true),
            (ContainerState::Signalled { signal: 11 }, false),
            (ContainerState::Exited { code: 0 }, false),
        ] {
            container.state = state;
            assert_eq!(container.view("a").fenced, fenced, "{state:?}");
        }
    }

    #[test]
    fn an_end_that_comes_before_the_begin_is_not_lost() {
        let mut all = Containers::default();
        assert_eq!(all.reaped(7, Ended::Exited(3)), Reaped::Unknown);
        all.keep_unclaimed(7, Ended::Exited(3));
        assert_eq!(
            all.begin("a".to_owned(), container(7)),
            Some(Ended::Exited(3))
        );
    }

    #[test]
    fn the_living_are_not_forgotten_and_the_dead_stay_until_they_are() {
        let mut all = Containers::default();
        assert_eq!(all.begin("a".to_owned(), container(7)), None);
        assert!(all.forget("a").is_none());
        assert_eq!(
            all.reaped(7, Ended::Signalled(9)),
            Reaped::Container("a".to_owned())
        );
        assert_eq!(
            all.get("a").map(|one| one.state),
            Some(ContainerState::Signalled { signal: 9 })
        );
        assert!(all.forget("a").is_some());
        assert_eq!(all.len(), 0);
    }

    #[test]
    fn a_failed_starts_process_is_reaped_without_a_word() {
        let mut all = Containers::default();
        let _ = all.begin("a".to_owned(), container(7));
        assert!(all.discard("a").is_some());
        assert_eq!(all.reaped(7, Ended::Exited(1)), Reaped::Doomed);
        assert_eq!(all.reaped(7, Ended::Exited(1)), Reaped::Unknown);
    }

    #[test]
    fn pages_cover_everything_once() {
        let mut all = Containers::default();
        let wanted: Vec<String> = (0..PAGE + 3).map(|n| format!("c{n:05}")).collect();
        for (pid, name) in (1..).zip(&wanted) {
            let _ = all.begin(name.clone(), container(pid));
        }
        let (first, more) = all.page(None);
        assert!(more);
        let (second, more) = all.page(first.last().map(|view| view.name.as_str()));
        assert!(!more);
        let seen: Vec<String> = first
            .into_iter()
            .chain(second)
            .map(|view| view.name)
            .collect();
        assert_eq!(seen, wanted);
    }
}
