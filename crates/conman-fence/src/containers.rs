//! The containers part: from the order to start each until its end is acknowledged.
//!
//! ```text
//!             cloned                  its program runs                reaped, or explained
//! launching ─────────▶ child ───────────────────────────▶ running ───────────────────────▶ ended
//!     │                  └── its start fails: discarded, reaped without a report             │
//!     └── another program reports its process: running                 acknowledged: forgotten ◀┘
//! ```
//! A child that ends before the launcher's report of its beginning is kept until that report.

mod adopted;
mod container;
mod kills;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use conman_linux::{Ended, PidFd};
use conman_shim_protocol::{ContainerState, ContainerView, KEPT_SEPARATOR, PAGE};

use crate::effect::Effect;
pub(crate) use container::{Container, KeptCommand};

use adopted::Adopted;
use kills::PendingKills;

/// Ends that came before the launcher's report of the beginning. Each belongs to a start under way, so
/// the number of starts bounds them.
type Unclaimed = BTreeMap<i32, Ended>;

/// Maximum of containers, living or not acknowledged: the number of ranges of ids.
pub(crate) const MAX_CONTAINERS: usize = 16_384;

/// The shim's children, and the containers that it took over from an earlier shim.
#[derive(Debug, Default)]
pub(crate) struct Containers {
    by_name: BTreeMap<String, Container>,
    names: HashMap<i32, String>,
    unclaimed: Unclaimed,
    /// PIDs of helpers and of failed starts: reaped and ignored.
    only_reaped: BTreeSet<i32>,
    adopted: Adopted,
    kills: PendingKills,
}

/// The child that ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Reaped {
    Container(String),
    /// A helper, or a failed start's.
    Ignored,
    /// A child that is not known yet.
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
        self.insert(name, container);
        self.unclaimed.remove(&pid)
    }

    fn insert(&mut self, name: String, container: Container) {
        if let Some(deadline_ns) = container.deadline_ns() {
            self.kills.add_deadline(&name, deadline_ns);
        }
        self.by_name.insert(name, container);
    }

    fn remove(&mut self, name: &str) -> Option<Container> {
        let container = self.by_name.remove(name)?;
        if let Some(deadline_ns) = container.deadline_ns() {
            self.kills.remove_deadline(name, deadline_ns);
        }
        Some(container)
    }

    /// Adds a container that is no child, or has ended.
    pub(crate) fn adopt(&mut self, name: String, container: Container) {
        self.insert(name, container);
    }

    /// Adds a container that is still a child, since only the program was replaced.
    pub(crate) fn keep_child(&mut self, name: String, container: Container) {
        if container.is_alive() {
            self.names.insert(container.pid, name.clone());
        }
        self.insert(name, container);
    }

    /// Children that are only reaped.
    pub(crate) fn only_reaped(&self) -> impl Iterator<Item = i32> {
        self.only_reaped.iter().copied()
    }

    /// A child that only helps to begin another one.
    pub(crate) fn helper(&mut self, pid: i32) {
        if self.unclaimed.remove(&pid).is_none() {
            self.only_reaped.insert(pid);
        }
    }

    /// A child was reaped; its PID may be reused from now on.
    pub(crate) fn reaped(&mut self, pid: i32, ended: Ended) -> Reaped {
        if self.only_reaped.remove(&pid) {
            return Reaped::Ignored;
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

    /// A container made ahead becomes the one of a start.
    pub(crate) fn take(&mut self, ahead: &str, name: &str, start: Container) {
        if let Some(made) = self.remove(ahead) {
            self.names.insert(made.pid, name.to_owned());
            let taken = start.begun(made.pid, made.start_ticks);
            self.insert(name.to_owned(), taken);
        }
    }

    /// Removes a container whose start has failed; its end is not reported.
    pub(crate) fn discard(&mut self, name: &str) -> Option<Container> {
        let container = self.remove(name)?;
        if container.held.is_none() && self.names.remove(&container.pid).is_some() {
            self.only_reaped.insert(container.pid);
        }
        Some(container)
    }

    /// Forgets one that has ended.
    pub(crate) fn forget(&mut self, name: &str) -> Option<Container> {
        if self.by_name.get(name).is_some_and(Container::is_alive) {
            return None;
        }
        self.remove(name)
    }

    /// The commands that are kept in a container, by name.
    pub(crate) fn kept_in(&self, container: &str) -> impl Iterator<Item = (&String, &Container)> {
        let first = format!("{container}{KEPT_SEPARATOR}");
        let after = self.by_name.range(first.clone()..);
        after.take_while(move |(name, _)| name.starts_with(&first))
    }

    /// The names of commands that live and end with this client's connection.
    pub(crate) fn with_client(&self, client: u64) -> impl Iterator<Item = &str> {
        let all = self.by_name.iter();
        let with_it = all.filter(move |(_, one)| one.client == Some(client) && one.is_alive());
        with_it.map(|(name, _)| name.as_str())
    }

    /// Pidfds of containers that are no children, by name.
    pub(crate) fn held(&self) -> impl Iterator<Item = (&String, &PidFd)> {
        let all = self.by_name.iter();
        all.filter_map(|(name, one)| Some((name, one.held.as_deref()?)))
    }

    /// Returns the number under which the pidfd of one that is no child is to be polled.
    pub(crate) fn number_pidfd(&mut self, name: &str) -> u64 {
        self.adopted.add(name)
    }

    /// The pidfd of one that is no child is readable. Returns the pidfd: it stays readable.
    pub(crate) fn adopted_died(&mut self, number: u64, now_ns: u64) -> Option<&PidFd> {
        let name = self.adopted.died(number, now_ns)?;
        self.by_name.get(&name)?.held.as_deref()
    }

    /// Determines how those that are dead ended, by `how_ended`, which may know it later.
    pub(crate) fn end_adopted(
        &mut self,
        now_ns: u64,
        how_ended: impl Fn(&Container) -> Option<Ended>,
    ) -> Vec<Effect> {
        let mut effects = Vec::new();
        for death in self.adopted.due(now_ns) {
            if let Some(container) = self.by_name.get_mut(&death.name) {
                container.state = match how_ended(container) {
                    Some(ended) => ended.into(),
                    // Its new parent may be reaping it now.
                    None if !death.is_last => continue,
                    None => ContainerState::Lost,
                };
                container.held = None;
                effects.push(Effect::ReportEnd(death.name.clone()));
            }
            self.adopted.ended(&death.name);
        }
        effects
    }

    /// Whether no start by another program has to be killed.
    pub(crate) fn has_no_pending_kills(&self) -> bool {
        self.kills.is_empty()
    }

    /// Kills every process that appears of a start by another program.
    pub(crate) fn kill_as_it_appears(&mut self, name: &str) {
        self.kills.add_appearing(name);
    }

    /// A client ordered its death. Under an armed fence the kill is repeated until it is dead, and of a start
    /// by another program everything is killed that appears; a later shim continues both. Returns whether that
    /// is to be recorded.
    pub(crate) fn kill_ordered(&mut self, name: &str, fence_armed: bool) -> bool {
        let Some(container) = self.by_name.get_mut(name) else {
            return false;
        };
        let may_appear = container.may_appear();
        if container.kill_pending || !(may_appear || fence_armed) {
            return false;
        }
        container.kill_pending = true;
        if may_appear {
            self.kills.add_appearing(name);
        }
        true
    }

    /// The fence kills it. Returns whether only the fence does, which is to be recorded so that even a later
    /// shim reports its end as such: not one whose death a client ordered, nor one that is dead already.
    pub(crate) fn killed_by_fence(&mut self, name: &str) -> bool {
        let is_dead = self.adopted.is_dead(name);
        let Some(container) = self.by_name.get_mut(name) else {
            return false;
        };
        if is_dead || !container.is_alive() || container.kill_pending || container.fenced {
            return false;
        }
        container.fenced = true;
        true
    }

    /// SIGKILL was sent to it: its CPU limit is lifted unless it dies soon. A command stays under its
    /// container's limit.
    pub(crate) fn kill_sent(&mut self, name: &str, now_ns: u64) {
        let Some(container) = self.by_name.get_mut(name) else {
            return;
        };
        if container.exec_in.is_some() || container.external || container.is_lifted {
            return;
        }
        container.is_lifted = true;
        self.kills.lift_cpu_limit_later(name, now_ns);
    }

    /// What is due of the kills under way.
    pub(crate) fn continue_kills(&mut self, now_ns: u64) -> Vec<Effect> {
        let containers = &self.by_name;
        let may_appear = |name: &str| containers.get(name).is_some_and(Container::may_appear);
        let appearing = self.kills.appearing(now_ns, may_appear).iter();
        let mut effects: Vec<Effect> = appearing.cloned().map(Effect::KillAppeared).collect();
        while let Some(name) = self.kills.next_cpu_limit(now_ns) {
            if let Some(container) = containers.get(&name)
                && container.is_alive()
            {
                let cgroup = container.cgroup.clone();
                effects.push(Effect::LiftCpuLimit { cgroup });
            }
        }
        while let Some(name) = self.kills.next_timed_out(now_ns) {
            effects.push(Effect::TimedOut(name));
        }
        effects
    }

    /// When [`Containers::end_adopted`] or [`Containers::continue_kills`] is due.
    pub(crate) fn next_due_ns(&self) -> Option<u64> {
        let due = [self.adopted.next_due_ns(), self.kills.next_due_ns()];
        due.into_iter().flatten().min()
    }

    /// One page in the order of names, and whether there are more.
    pub(crate) fn page(&self, after: Option<&str>) -> (Vec<ContainerView>, bool) {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let rest = self.by_name.range::<str, _>((from, Bound::Unbounded));
        let mut rest = rest.filter(|(_, container)| !container.ahead);
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
        assert_eq!(all.reaped(7, Ended::Exited(1)), Reaped::Ignored);
        assert_eq!(all.reaped(7, Ended::Exited(1)), Reaped::Unknown);
    }

    #[test]
    fn one_that_is_no_child_ends_with_its_status_or_lost_at_last() {
        let mut all = Containers::default();
        for name in ["a", "b"] {
            let number = all.number_pidfd(name);
            all.adopt(name.to_owned(), container(7));
            assert!(all.adopted_died(number, 0).is_none(), "a test has no pidfd");
        }
        all.get_mut("a").expect("known").pid = 1;
        let exited = |container: &Container| (container.pid == 1).then_some(Ended::Exited(3));
        let ended = |name: &str| vec![Effect::ReportEnd(name.to_owned())];
        assert_eq!(all.end_adopted(0, exited), ended("a"));
        let mut effects = Vec::new();
        while let Some(now_ns) = all.next_due_ns() {
            effects.extend(all.end_adopted(now_ns, exited));
        }
        assert_eq!(effects, ended("b"));
        assert_eq!(all.by_name["a"].state, ContainerState::Exited { code: 3 });
        assert_eq!(all.by_name["b"].state, ContainerState::Lost);
    }

    #[test]
    fn a_start_by_another_program_is_killed_as_it_appears_and_recorded_once() {
        let mut all = Containers::default();
        let mut start = Container::starting("/conman-x/a", None, None, None);
        start.external = true;
        all.adopt("a".to_owned(), start);
        assert!(all.kill_ordered("a", false));
        assert!(!all.kill_ordered("a", false));
        let kill = [Effect::KillAppeared("a".to_owned())];
        assert_eq!(all.continue_kills(0), kill);
        all.get_mut("a").expect("known").state = ContainerState::Lost;
        assert_eq!(all.continue_kills(1), []);
        assert!(all.has_no_pending_kills());
    }

    #[test]
    fn the_fence_claims_only_kills_that_no_client_ordered() {
        let mut all = Containers::default();
        for (pid, name) in [(7, "a"), (8, "b")] {
            let _ = all.begin(name.to_owned(), container(pid));
        }
        assert!(all.kill_ordered("a", true));
        assert!(!all.killed_by_fence("a"));
        assert!(all.killed_by_fence("b"));
        assert!(!all.killed_by_fence("b"));
        all.kill_sent("b", 0);
        let due_ns = all.next_due_ns().expect("its limit is lifted later");
        let cgroup = "/conman-x/a".to_owned();
        assert_eq!(
            all.continue_kills(due_ns),
            [Effect::LiftCpuLimit { cgroup }]
        );
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
