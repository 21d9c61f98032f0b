//! The signals of a preemption: the warning that a spec names, and SIGKILL.

use std::sync::Arc;

use conman_core::Closing;
use conman_core::ownership::Slot;
use conman_core::preemption::{Event, KillResult};
use conman_linux::PidFd;
use conman_proto::Generation;
use conman_runtime::ContainerKey;

use super::{Execution, Session};
use crate::container_kill::kill_container;
use crate::throttled::{self, Killed};

impl Session {
    pub(super) fn key(&self, slot: &Slot) -> Option<ContainerKey> {
        let generation = Generation::new(slot.generation)?;
        Some(ContainerKey::new(self.id.clone(), generation))
    }
}

impl Execution {
    /// Kills what there is of a start that was not answered.
    pub(super) fn search(&mut self, slot: Slot) -> Option<Event> {
        let session = self.sessions.get_mut(&slot.session)?;
        let (runtime, key) = (session.entry.runtime.clone()?, session.key(&slot)?);
        let found = kill_container(&*runtime, &key);
        let init = found.init.is_some();
        session.process = session.process.take().or(found.init);
        Some(Event::Searched {
            slot,
            killed: found.killed > 0,
            init,
        })
    }

    /// Sends the signal that the session's spec names.
    pub(super) fn warn(&mut self, slot: Slot) -> Option<Event> {
        let warned = self.session(&slot).is_some_and(|session| {
            session.entry.leaving.signal();
            let runtime = session.entry.runtime.as_ref();
            if !runtime.is_none_or(|runtime| runtime.runs_programs_itself()) {
                return false;
            }
            match (session.entry.warning, &session.process) {
                (Some((signal, _)), Some(process)) => process.signal(signal).is_ok(),
                _ => false,
            }
        });
        (!warned).then_some(Event::NotWarned(slot))
    }

    /// Kills all of them before anything else.
    pub(super) fn kill(&mut self, slots: Vec<Slot>) -> Vec<Event> {
        let to_kill: Vec<(Slot, Arc<PidFd>)> = slots
            .into_iter()
            .filter_map(|slot| {
                let process = self.session(&slot)?.process.clone()?;
                Some((slot, process))
            })
            .collect();
        // Before the kill, so that clients can distinguish it from an end of the program.
        for session in to_kill.iter().filter_map(|(slot, _)| self.session(slot)) {
            let closing = Closing::service_restart("session is moving");
            session.entry.closing.send_replace(Some(closing));
        }
        self.namespaces
            .keep(to_kill.iter().map(|(_, process)| &**process));
        let results: Vec<_> = to_kill.iter().map(|(_, process)| process.kill()).collect();
        self.release_processors(&to_kill);
        let results = results.into_iter().map(|result| match result {
            Ok(true) => KillResult::Sent,
            Ok(false) => KillResult::DeadAlready,
            Err(error) => {
                let why = conman_core::error_chain(&error);
                KillResult::Failed(format!("SIGKILL could not be sent: {why}"))
            }
        });
        let slots = to_kill.into_iter().map(|(slot, _)| slot);
        let sent = slots.zip(results);
        sent.map(|(slot, result)| Event::KillSent { slot, result })
            .collect()
    }

    /// Lifts the CPU limits that keep killed sessions from dying soon.
    fn release_processors(&self, to_kill: &[(Slot, Arc<PidFd>)]) {
        let killed = to_kill.iter().filter_map(|(slot, process)| {
            let session = self.session(slot)?;
            Some(Killed {
                runtime: session.entry.runtime.clone()?,
                key: session.key(slot)?,
                process: Arc::clone(process),
            })
        });
        throttled::release(killed.collect());
    }
}
