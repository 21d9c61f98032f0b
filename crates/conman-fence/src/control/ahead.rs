//! Containers made ahead ([`Ahead`]).
//!
//! One is a start that is not finished yet, and everything that holds for those holds for it: it is recorded and under
//! the fence from its order on, a fence that closes ends it, and a later shim removes it. A start that takes it gives
//! it its name, client and call.
//!
//! ```text
//! made ─▶ waits ─▶ taken: it has the start's name ─▶ labelled by the launcher ─▶ running
//!           └────────────────┴─ it ends: the start begins again, the usual way
//! ```
//! Nothing of the start has reached it before it is labelled, and nobody else can find it by the start's name.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use conman_core::ownership::FenceEvent;
use conman_shim_protocol::{Ahead, CallError, LaunchError, LaunchSpec, Phases, Reply};

use super::Control;
use super::starts::bounded_logs;
use crate::fence::slot;
use crate::launcher_messages::{Order, Start};
use crate::launching::{MAX_AHEAD, MadeAhead, OwnResources, Pending, StartRemains, UsualStart};

/// What a start is as a container made ahead.
pub(super) fn ahead(spec: &LaunchSpec) -> Option<MadeAhead> {
    (spec.ahead == Ahead::Make).then(|| MadeAhead {
        kind: Box::new(spec.kind()),
        waits: false,
        is_ending: false,
    })
}

impl Control {
    /// Checks that one may be made. The last ranges of ids are left to sessions: as many as there may be containers made
    /// ahead, at most half of all.
    pub(super) fn admit_ahead(&self) -> Result<(), CallError> {
        let reserve = MAX_AHEAD.min(self.ids.all() / 2);
        let is_full = self.launching.ahead().count() >= MAX_AHEAD || self.ids.left() <= reserve;
        match is_full || self.launching.is_held_back() {
            true => Err(CallError::full("containers made ahead")),
            false => Ok(()),
        }
    }

    /// A container made ahead waits: its order is answered.
    pub(super) fn waits(&mut self, ticket: u64, phases: Phases) {
        let Some(start) = self.launching.waits(ticket) else {
            return;
        };
        let (client, call) = (start.client, start.call);
        let pid = self.containers.get(&start.name).map_or(0, |one| one.pid);
        self.reply(client, call, Reply::Launched { pid, phases }, None);
    }

    /// Begins a start with the container made ahead of this ticket. The fence has opened the start's slot.
    pub(super) fn begin_taken(
        &mut self,
        ticket: u64,
        (client, call): (u64, u64),
        spec: LaunchSpec,
        binds: Vec<OwnedFd>,
    ) -> Result<(), CallError> {
        let name = spec.name.clone();
        let failed = || CallError::host("launch", &name)(io::ErrorKind::NotFound.into());
        let made = self.launching.pending.get(&ticket).ok_or_else(failed)?;
        let ids = made.own.as_ref().ok_or_else(failed)?.ids;
        let before = made.name.clone();
        let copies: io::Result<_> = binds.iter().map(OwnedFd::try_clone).collect();
        let pending = Pending {
            client,
            call,
            name: name.clone(),
            own: Some(OwnResources {
                ids,
                scratch: spec.root.scratch.clone(),
                logs: bounded_logs(&spec),
            }),
            with_client: false,
            ahead: None,
            taken: Some(Rc::new(UsualStart {
                spec: spec.clone(),
                binds: copies.map_err(CallError::host("launch", &name))?,
            })),
            ..made.clone()
        };
        let mut fds = binds;
        self.open_terminal(&spec, ids, &mut fds)?;
        let order = Order::Complete(Box::new(Start { ticket, ids, spec }));
        // If the shim dies during the start, its successor must find the record.
        let taken = self.record_start(&pending).and_then(|()| {
            self.launching
                .complete(ticket, pending.clone(), fds, &order)
        });
        if let Err(error) = taken {
            // The container made ahead stays what it is.
            self.forget(&name);
            return Err(CallError::host("launch", &name)(error));
        }
        self.containers.take(&before, &name, pending.container());
        self.change(FenceEvent::Appeared(slot(&name)));
        self.change(FenceEvent::StartOver(slot(&before)));
        self.change(FenceEvent::Died(slot(&before)));
        self.change(FenceEvent::Forget(slot(&before)));
        self.forget(&before);
        self.bound_logs(&name);
        Ok(())
    }

    /// A container made ahead has ended before it was any start's. A start that has taken it goes the usual way.
    pub(super) fn not_taken(&mut self, ticket: u64, error: LaunchError, left: bool) {
        let Some(mut start) = self.launching.finish(ticket) else {
            return;
        };
        let Some(usual) = start.taken.take().and_then(Rc::into_inner) else {
            self.start_ended(start, error, left);
            return;
        };
        tracing::info!(
            name = start.name, %error,
            "a container made ahead ended when its start took it; making another one"
        );
        let name = start.name;
        if let Some(own) = start.own {
            match left {
                // First, so that a record of it exists at all times.
                true => self.sweep_later(StartRemains {
                    cgroup: start.cgroup,
                    scratch: own.scratch,
                    name: None,
                    ids: Some(own.ids),
                    killed: false,
                }),
                false => self.give_back(Some(own.ids)),
            }
        }
        self.containers.discard(&name);
        self.forget(&name);
        self.start_failed(name, false);
        let (client, call) = (start.client, start.call);
        if let Err(error) = self.begin_launch(client, call, usual.spec, usual.binds) {
            self.reply(client, call, Reply::Failed { error }, None);
        }
    }

    /// Only a container that is no start's yet changes how it ends.
    pub(super) fn about_to_kill(&mut self, name: &str) {
        if self.containers.get(name).is_none_or(|one| one.ahead) {
            self.launching.about_to_be_killed(name);
        }
    }

    /// Ends all containers made ahead: none is handed over to another program, and none has ids that a session needs.
    pub(super) fn end_all_ahead(&mut self) {
        let names: Vec<String> = self.launching.ahead().map(str::to_owned).collect();
        for name in names {
            self.end_with_client(name);
        }
    }
}
