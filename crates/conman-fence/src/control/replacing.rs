//! Handing the parts' states over to another program, and executing that.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use conman_shim_protocol::CallError;

use super::ending::IS_ENDING;
use super::replacement::CANNOT_REPLACE;
use super::{Control, boottime_ns};
use crate::handover::{Handover, Sealed, number};
use crate::ledger::Record;
use crate::shim_parts::HandedOverStreams;

impl Control {
    pub(super) fn begin_replacing(
        &mut self,
        caller: Option<(u64, u64)>,
        program: Option<PathBuf>,
    ) -> Result<(), CallError> {
        let refused = self.is_ending().then_some(IS_ENDING);
        let candidate = self.replacement.admit(program, refused)?;
        let state = self.hand_over(None);
        let (sole, poller, now_ns) = (&self.sole, &self.poller, boottime_ns());
        let begun = self
            .replacement
            .begin(candidate, caller, state, sole, poller, now_ns);
        self.containers.helper(begun?);
        Ok(())
    }

    /// After waiting for another shim: replaces this program by the file at its path if that has changed, as
    /// after an upgrade. Otherwise an older shim would succeed a newer one permanently. Containers are
    /// adopted first: the other program's file may be on a disk that hangs.
    pub(super) fn replace_if_upgraded(&mut self) {
        let program = self.replacement.program();
        // The kernel reports a removed or renamed file without reading the disk.
        if std::env::current_exe().is_ok_and(|own| own == program) {
            return;
        }
        tracing::info!(
            program = %program.display(),
            "the shim's program was replaced while it stood by; switching to the new one"
        );
        if let Err(error) = self.begin_replacing(None, None) {
            tracing::error!(%error, "{}", CANNOT_REPLACE);
        }
    }

    /// The last step. Returns only after a failure.
    pub(super) fn replace_when_idle(&mut self) {
        if !self.replacement.is_draining() || !self.launching.is_idle() {
            return;
        }
        // The launcher has answered everything; the new program starts another one.
        self.launching.stop();
        self.sweeper.stop();
        let error = match self.execute_replacement() {
            Ok(never) => match never {},
            Err(error) => error,
        };
        let effects = self.replacement.give_up(&error.to_string());
        self.carry_out(effects);
        if let Err(error) = self.ensure_launcher() {
            tracing::error!(%error, "cannot start a launcher; the next start tries again");
        }
        self.sweeper_died();
        self.launching.flush();
    }

    fn execute_replacement(&mut self) -> io::Result<Infallible> {
        let candidate = self.replacement.candidate()?;
        self.clients.drop_waiting();
        let memory = self.hand_over(self.replacement.caller())?.write()?;
        candidate.execute(&memory, &self.kept_fds(&memory))
    }

    fn hand_over(&self, caller: Option<(u64, u64)>) -> io::Result<Sealed> {
        let begun = self.containers.iter().map(|(name, container)| Record::Put {
            name: name.clone(),
            container: container.clone(),
        });
        let fence = Record::Fence {
            state: self.fence.kept(),
        };
        let mut handover = Handover {
            lines: std::iter::once(fence).chain(begun).collect(),
            listener: number(&self.listener),
            lock: number(&self.lock),
            adopted: self
                .containers
                .held()
                .map(|(name, process)| (name.clone(), number(process)))
                .collect(),
            doomed: self.containers.only_reaped().collect(),
            condemned: self.forbidden_starts.iter().map(str::to_owned).collect(),
            asked_by: caller,
            freeze_ms: Some(self.fence.freeze_ms()),
            ..Handover::default()
        };
        self.launching.hand_over(&mut handover)?;
        self.clients.hand_over(&mut handover);
        let HandedOverStreams {
            streams,
            watchers,
            blobs,
        } = self.streams.hand_over();
        (handover.streams, handover.watchers) = (streams, watchers);
        Ok(Sealed { handover, blobs })
    }

    /// Every descriptor that a handover names, and the handover's.
    fn kept_fds<'a>(&'a self, memory: &'a OwnedFd) -> Vec<BorrowedFd<'a>> {
        let own = [memory.as_fd(), self.listener.as_fd(), self.lock.as_fd()];
        own.into_iter()
            .chain(self.clients.fds())
            .chain(self.containers.held().map(|(_, process)| process.as_fd()))
            .chain(self.streams.fds())
            .chain(self.launching.waiting_fds())
            .collect()
    }
}
