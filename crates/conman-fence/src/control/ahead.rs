//! Containers made ahead ([`Ahead`]).
//!
//! One is a start that is not finished yet, and everything that holds for those holds for it: it is recorded and under
//! the fence from its order on, a fence that closes ends it, and a later shim removes it. A start that takes it gives
//! it its name, client and call.

use std::io;
use std::os::fd::OwnedFd;

use conman_core::ownership::FenceEvent;
use conman_shim_protocol::{Ahead, CallError, LaunchSpec, Phases, Reply};

use super::Control;
use super::starts::bounded_logs;
use crate::fence::slot;
use crate::launcher_messages::{Order, Start};
use crate::launching::{MadeAhead, OwnResources, Pending};

/// What a start is as a container made ahead.
pub(super) fn ahead(spec: &LaunchSpec) -> Option<MadeAhead> {
    (spec.ahead == Ahead::Make).then(|| MadeAhead {
        kind: Box::new(spec.kind()),
        waits: false,
    })
}

impl Control {
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

    /// Ends all containers made ahead: none is handed over to another program.
    pub(super) fn end_all_ahead(&mut self) {
        for name in self.launching.ahead() {
            self.end_with_client(name);
        }
    }
}
