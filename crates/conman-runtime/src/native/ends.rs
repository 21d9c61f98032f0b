//! How containers and commands ended, as the shim reports it, and the callers that wait for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use conman_net::Plane;
use conman_shim_protocol::{ContainerState, ContainerView};
use tokio::sync::oneshot;

use super::kept_commands::is_kept;
use crate::shim_link::NotificationHandler;

/// An end, with the exit code if it is known, in a shell's encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessEnd(pub(super) Option<i32>);

/// Ends of containers are stored until they are forgotten. Ends of commands are only sent to waiting
/// callers; the shim knows those of kept commands.
#[derive(Debug, Default)]
pub(super) struct Ends {
    state: Mutex<EndsState>,
    /// Told when a container has ended.
    plane: Option<Arc<Plane>>,
}

#[derive(Debug, Default)]
struct EndsState {
    ended: HashMap<String, ProcessEnd>,
    waiting: HashMap<String, Vec<oneshot::Sender<ProcessEnd>>>,
}

impl Ends {
    pub(super) fn new(plane: Option<Arc<Plane>>) -> Self {
        Self {
            state: Mutex::default(),
            plane,
        }
    }

    /// A panic while the lock is held cannot leave half a change: each is a few map operations.
    fn lock(&self) -> MutexGuard<'_, EndsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an end that the shim reports. Returns whether a caller waited for it.
    pub(super) fn record(&self, container: &ContainerView) -> bool {
        let Some(end) = end(container.state).filter(|_| !container.foreign) else {
            return false;
        };
        if let (None, Some(plane)) = (&container.exec_in, &self.plane) {
            plane.end(&container.name);
        }
        let mut state = self.lock();
        if container.exec_in.is_none() {
            state.ended.insert(container.name.clone(), end);
        }
        let waiting = state.waiting.remove(&container.name).unwrap_or_default();
        let mut waited = false;
        for waiting in waiting {
            waited |= waiting.send(end).is_ok();
        }
        waited
    }

    /// The end of a container that has ended.
    pub(super) fn of(&self, name: &str) -> Option<ProcessEnd> {
        self.lock().ended.get(name).copied()
    }

    /// Receives the end of a container or command, at once if it is known. A kept command may have ended
    /// before.
    pub(super) fn wait(&self, name: &str) -> oneshot::Receiver<ProcessEnd> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        if let Some(end) = state.ended.get(name) {
            // The receiver still exists.
            let _ = sender.send(*end);
        } else {
            let waiting = state.waiting.entry(name.to_owned()).or_default();
            waiting.retain(|waiting| !waiting.is_closed());
            waiting.push(sender);
        }
        receiver
    }

    pub(super) fn forget(&self, name: &str) {
        let mut state = self.lock();
        state.ended.remove(name);
        state.waiting.remove(name);
    }
}

impl NotificationHandler for Ends {
    /// The end of an earlier daemon's command, which no caller waits for, may be forgotten.
    fn on_container_end(&self, container: &ContainerView) -> bool {
        let waited = self.record(container);
        waited || container.exec_in.is_none() || is_kept(&container.name)
    }
}

/// `None` if it has not ended.
pub(super) fn end(state: ContainerState) -> Option<ProcessEnd> {
    match state {
        ContainerState::Launching | ContainerState::Running => None,
        ContainerState::Exited { code } => Some(ProcessEnd(Some(code))),
        ContainerState::Signalled { signal } => Some(ProcessEnd(Some(128 + signal))),
        ContainerState::Lost => Some(ProcessEnd(None)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(name: &str, exec_in: Option<&str>, state: ContainerState) -> ContainerView {
        ContainerView {
            name: name.to_owned(),
            pid: 7,
            state,
            exec_in: exec_in.map(str::to_owned),
            foreign: false,
            fenced: false,
        }
    }

    #[test]
    fn an_end_is_told_to_who_waited_and_to_who_asks_later() {
        let ends = Ends::default();
        let mut before = ends.wait("a.1");
        assert!(!ends.record(&view("a.1", None, ContainerState::Running)));
        assert_eq!((before.try_recv().ok(), ends.of("a.1")), (None, None));
        assert!(ends.record(&view("a.1", None, ContainerState::Signalled { signal: 9 })));
        assert_eq!(before.try_recv(), Ok(ProcessEnd(Some(137))));
        assert_eq!(ends.wait("a.1").try_recv(), Ok(ProcessEnd(Some(137))));
        ends.forget("a.1");
        assert_eq!(ends.of("a.1"), None);
        assert!(!ends.record(&view("a.1", None, ContainerState::Lost)));
        assert_eq!(ends.of("a.1"), Some(ProcessEnd(None)));
    }

    #[test]
    fn a_commands_end_is_nobodys_who_did_not_wait_for_it() {
        let ends = Ends::default();
        let mut waiting = ends.wait("exec.1.1");
        let ended = ContainerState::Exited { code: 3 };
        assert!(ends.record(&view("exec.1.1", Some("a.1"), ended)));
        assert!(!ends.record(&view("exec.1.2", Some("a.1"), ended)));
        assert_eq!(waiting.try_recv(), Ok(ProcessEnd(Some(3))));
        assert_eq!(ends.of("exec.1.1"), None);
    }
}
