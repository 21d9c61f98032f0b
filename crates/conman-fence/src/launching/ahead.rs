//! Starts that wait for a session: containers made ahead.

use std::io;
use std::os::fd::OwnedFd;

use conman_linux::PidFd;
use conman_shim_protocol::{Ahead, LaunchSpec, encode};

use super::{Launching, Pending, Waiting};
use crate::launcher_messages::Order;

/// Most containers made ahead.
pub(crate) const MAX_AHEAD: usize = 1_024;

/// A container made ahead, for a start that is not known yet.
#[derive(Debug, Clone)]
pub(crate) struct MadeAhead {
    /// [`LaunchSpec::kind`] of the starts that can take it.
    pub(crate) kind: Box<LaunchSpec>,
    /// It waits for a start.
    pub(crate) waits: bool,
    /// It is being killed.
    pub(crate) is_ending: bool,
}

/// What a start that has taken a container made ahead needs to go the usual way, if that one ends first.
#[derive(Debug)]
pub(crate) struct UsualStart {
    pub(crate) spec: LaunchSpec,
    pub(crate) binds: Vec<OwnedFd>,
}

impl Pending {
    /// Whether a start of this kind can take it.
    fn can_be_taken(&self, spec: &LaunchSpec) -> bool {
        let fits = |made: &MadeAhead| made.waits && !made.is_ending && *made.kind == spec.kind();
        !self.killed && self.ahead.as_ref().is_some_and(fits) && self.is_alive()
    }

    fn is_alive(&self) -> bool {
        let process = self.pidfd.as_ref().and_then(|fd| fd.try_clone().ok());
        let process = process.map(|fd| PidFd::received(fd, 0));
        process.is_some_and(|process| matches!(process.is_dead(), Ok(false)))
    }
}

impl Launching {
    /// The ticket of the container made ahead that this start takes.
    pub(crate) fn ahead_for(&self, spec: &LaunchSpec) -> Option<u64> {
        let Ahead::Take { name } = &spec.ahead else {
            return None;
        };
        let mut all = self.pending.iter().filter(|_| !self.held_back);
        let (ticket, start) = all.find(|(_, start)| start.name == *name)?;
        start.can_be_taken(spec).then_some(*ticket)
    }

    /// The names of all containers made ahead, or about to be.
    pub(crate) fn ahead(&self) -> impl Iterator<Item = &str> {
        let all = self.pending.values().filter(|start| start.ahead.is_some());
        all.map(|start| start.name.as_str())
    }

    /// A container under start is about to be killed: one made ahead is not taken any more, and a start that has taken
    /// one does not go the usual way when that one ends.
    pub(crate) fn about_to_be_killed(&mut self, name: &str) {
        let mut all = self.pending.values_mut();
        if let Some(start) = all.find(|start| start.name == name) {
            start.taken = None;
            if let Some(made) = &mut start.ahead {
                made.is_ending = true;
            }
        }
    }

    pub(crate) fn waits(&mut self, ticket: u64) -> Option<&Pending> {
        let start = self.pending.get_mut(&ticket)?;
        start.ahead.as_mut()?.waits = true;
        Some(start)
    }

    /// Queues the order that finishes a container made ahead as the one of this start.
    pub(crate) fn complete(
        &mut self,
        ticket: u64,
        start: Pending,
        fds: Vec<OwnedFd>,
        order: &Order,
    ) -> io::Result<()> {
        let bytes = encode(order).map_err(io::Error::other)?;
        self.waiting.push_back(Waiting {
            // It cannot be withdrawn.
            ticket: None,
            finishes: true,
            bytes,
            fds,
        });
        self.pending.insert(ticket, start);
        Ok(())
    }

    /// Whether a start waits for a report of the launcher.
    pub(crate) fn is_under_way(&self) -> bool {
        let waits = |start: &Pending| start.ahead.as_ref().is_some_and(|made| made.waits);
        self.pending.values().any(|start| !waits(start))
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::rc::Rc;

    use serde_json::json;

    use super::*;
    use crate::launcher_messages::Start;
    use crate::launching::{MAX_PENDING, OwnResources};

    const NAME: &str = "ahead_1";

    fn spec() -> LaunchSpec {
        let spec = json!({
            "name": "alice.1", "cgroup": "/conman-x/alice.1", "hostname": "alice", "limits": {},
            "root": {
                "store": "/store", "layers": ["a"], "scratch": "/s", "read_only": false,
                "shared_ids": false,
            },
            "program": {
                "argv": ["sh"], "env": [], "workdir": "/", "uid": 0, "gid": 0, "groups": [],
                "nofile": null,
            },
            "log": "/log", "log_bytes": null, "ptys": 0, "files": [], "binds": [], "terminal": null,
            "hardening": {
                "seccomp": true, "no_new_privileges": true, "masked_proc": true,
                "capabilities": null,
            },
            "ahead": { "take": { "name": NAME } },
        });
        serde_json::from_value(spec).expect("a spec")
    }

    /// One that lives and waits.
    fn waiting() -> Pending {
        let process = PidFd::open(nix::unistd::getpid().as_raw()).expect("a pidfd");
        Pending {
            client: 1,
            call: 1,
            name: NAME.to_owned(),
            cgroup: format!("/conman-x/{NAME}"),
            own: Some(OwnResources {
                ids: 65_536,
                scratch: PathBuf::from("/scratch"),
                logs: Vec::new(),
            }),
            exec_in: None,
            kept: None,
            with_client: true,
            killed: false,
            ahead: Some(MadeAhead {
                kind: Box::new(spec().kind()),
                waits: true,
                is_ending: false,
            }),
            taken: None,
            pidfd: Some(Rc::new(process.into())),
        }
    }

    fn launching() -> Launching {
        let mut launching = Launching::new(|_, _| Ok(()));
        launching.pending.insert(1, waiting());
        launching
    }

    #[test]
    fn one_that_is_being_killed_is_not_taken() {
        let mut launching = launching();
        launching.about_to_be_killed("another");
        assert_eq!(launching.ahead_for(&spec()), Some(1));
        launching.about_to_be_killed(NAME);
        assert_eq!(launching.ahead_for(&spec()), None);
    }

    #[test]
    fn a_start_that_is_killed_does_not_go_the_usual_way() {
        let mut launching = launching();
        let usual = UsualStart {
            spec: spec(),
            binds: Vec::new(),
        };
        let start = Pending {
            name: "alice.1".to_owned(),
            ahead: None,
            taken: Some(Rc::new(usual)),
            ..waiting()
        };
        launching.pending.insert(1, start);
        launching.about_to_be_killed("alice.1");
        assert!(launching.pending[&1].taken.is_none());
    }

    #[test]
    fn one_takes_no_place_of_a_start() {
        let mut launching = launching();
        let start = Pending {
            ahead: None,
            ..waiting()
        };
        for ticket in 2..=MAX_PENDING as u64 {
            launching.pending.insert(ticket, start.clone());
        }
        assert_eq!(launching.lacks_room(None), None);
        launching.pending.insert(0, start);
        assert!(launching.lacks_room(None).is_some());
    }

    #[test]
    fn orders_that_are_held_back_are_sent_up_to_the_last_that_finishes_one() {
        let mut launching = launching();
        let start = |ticket| Start {
            ticket,
            ids: 65_536,
            spec: spec(),
        };
        let usual = |ticket| Order::Launch(Box::new(start(ticket)));
        let other = Pending {
            ahead: None,
            ..waiting()
        };
        let order = |launching: &mut Launching| {
            launching
                .order(other.clone(), Vec::new(), usual)
                .expect("queued");
        };
        order(&mut launching);
        let finishing = Order::Complete(Box::new(start(1)));
        let taken = Pending {
            ahead: None,
            ..waiting()
        };
        launching
            .complete(1, taken, Vec::new(), &finishing)
            .expect("queued");
        order(&mut launching);
        launching.hold_back(true);
        for _ in 0..2 {
            assert!(launching.may_send());
            launching.waiting.pop_front();
        }
        assert!(!launching.may_send());
        launching.hold_back(false);
        assert!(launching.may_send());
    }
}
