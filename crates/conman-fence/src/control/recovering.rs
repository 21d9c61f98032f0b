//! Recovery when an earlier shim's state file is lost, damaged, or of another version.
//!
//! It is unknown then whether the fence was armed, and whether it had fired. So if anything lives, the
//! fence begins closed, with everything frozen, and only an order opens it. Living containers are found
//! by their cgroups: name (that of a cgroup made ahead is its label), first process, ids. Their directories are not found, so nothing of them is
//! removed here; the client that created them removes them.

use std::io;
use std::path::PathBuf;
use std::rc::Rc;

use conman_core::naming::parse_slice;
use conman_linux::{CgroupLayout, Cgroups, PidFd, ProcessIdentity, is_namespace_init};
use conman_shim_protocol::{ContainerState, RANGE_SIZE, check_name};

use super::{Control, boottime_ns};
use crate::containers::Container;
use crate::fence::{KeptFence, whole_ms};
use crate::launching::StartRemains;

impl Control {
    /// Takes over unknown living containers, and closes the fence if anything lives.
    pub(super) fn recover(&mut self, doubt: &str) {
        let mut dead = Vec::new();
        self.recover_living(doubt, &mut dead);
        dead.into_iter().for_each(|cgroup| self.sweep_ahead(cgroup));
    }

    /// `dead` gets the cgroups of containers made ahead that have ended.
    fn recover_living(&mut self, doubt: &str, dead: &mut Vec<String>) {
        let found = match self.recover_unknown(dead) {
            Ok(found) => found,
            Err(error) => {
                tracing::error!(
                    %error,
                    "cannot search for living containers; the fence begins closed"
                );
                true
            }
        };
        // A container whose end has not been determined yet may be dead.
        let is_dead = |process: &PidFd| process.is_dead().unwrap_or(false);
        let lives = |one: &Container| one.is_alive() && !one.held.as_deref().is_some_and(is_dead);
        let lives = found || self.containers.iter().any(|(_, one)| lives(one));
        if !lives && self.launching.sweeps().next().is_none() {
            return;
        }
        tracing::error!(
            doubt,
            "the shim's state file cannot be trusted, and containers live: all are frozen until a \
             client opens the fence"
        );
        let now_ms = whole_ms(boottime_ns());
        let deadline_ms = self.fence.kept().map_or(0, |kept| kept.deadline_ms);
        self.arm(Some(KeptFence {
            deadline_ms: deadline_ms.min(now_ms),
            fired_ms: Some(now_ms),
            freeze_ms: None,
        }));
    }

    /// Takes over unknown living containers. Returns whether there were any.
    fn recover_unknown(&mut self, dead: &mut Vec<String>) -> io::Result<bool> {
        let layout = CgroupLayout::detect()?.part(self.options.cgroups);
        let cgroups = Cgroups::of(&layout);
        let mut found = false;
        for (name, cgroup) in self.cgroups_of_ours(&cgroups) {
            let pids = cgroups.try_pids_below(&cgroup)?;
            if name.is_empty() {
                // Made ahead: it ends with its launcher, and no client removes its cgroup.
                match pids.is_empty() {
                    true => dead.push(cgroup),
                    false => self.sweep_ahead(cgroup),
                }
                continue;
            }
            if pids.is_empty() {
                continue;
            }
            found = true;
            if check_name(&name).is_err()
                || self.containers.get(&name).is_some()
                || self.launching.is_starting(&name)
            {
                continue;
            }
            let init = pids.into_iter().find(|pid| is_namespace_init(*pid));
            let container = match init.map(|init| self.recovered(&cgroup, init)) {
                Some(Ok((container, process))) => {
                    self.watch_adopted(&name, &process)?;
                    Container {
                        held: Some(Rc::new(process)),
                        ..container
                    }
                }
                // Another program is starting it, or it is ending.
                Some(Err(_)) | None => Container {
                    external: true,
                    ..Container::starting(&cgroup, None, None, None)
                },
            };
            tracing::warn!(name, pid = container.pid, "recovered a container");
            self.containers.adopt(name, container);
        }
        Ok(found)
    }

    fn sweep_ahead(&mut self, cgroup: String) {
        self.sweep_later(StartRemains {
            cgroup,
            scratch: PathBuf::new(),
            name: None,
            ids: None,
            killed: false,
        });
    }

    /// Every cgroup that may hold a container, with the container's name.
    fn cgroups_of_ours(&self, cgroups: &Cgroups) -> Vec<(String, String)> {
        let (own, slice) = (&self.options.fence_cgroup, &self.options.fence_slice);
        let children = |above: &str| cgroups.children(above).into_iter();
        let own = children(own).map(|name| {
            let cgroup = format!("{own}/{name}");
            (cgroups.label(&cgroup).unwrap_or(name), cgroup)
        });
        let slices = children(slice).map(|child| {
            let cgroup = format!("{slice}/{child}");
            let name = parse_slice(slice, &child).map(|(id, number)| format!("{id}.{number}"));
            (name.unwrap_or(child), cgroup)
        });
        own.chain(slices).collect()
    }

    /// A running container, by its first process.
    fn recovered(&mut self, cgroup: &str, init: i32) -> io::Result<(Container, PidFd)> {
        let identity = ProcessIdentity::of(init).map_err(io::Error::other)?;
        let process = PidFd::open_verified(&identity).map_err(io::Error::other)?;
        let ids = first_id(init).filter(|ids| self.ids.reserve(*ids));
        let started = Container::starting(cgroup, ids, None, None);
        let container = Container {
            state: ContainerState::Running,
            // External containers have no range of ids.
            external: ids.is_none(),
            ..started.begun(init, identity.start_time_ticks)
        };
        Ok((container, process))
    }
}

/// The first of a container's own ids, if it has a whole range.
fn first_id(pid: i32) -> Option<u32> {
    let map = std::fs::read_to_string(format!("/proc/{pid}/uid_map")).ok()?;
    let numbers: Vec<u32> = map
        .split_ascii_whitespace()
        .map_while(|number| number.parse().ok())
        .collect();
    match numbers[..] {
        [0, first, RANGE_SIZE] => Some(first),
        _ => None,
    }
}
