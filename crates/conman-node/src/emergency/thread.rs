//! The thread: it begins with the notice sources, and preempts once it has a node.

use std::future::{Future, pending};
use std::io;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use conman_linux::KeptNamespaces;
use conman_proto::{EventKind, PreemptReport};
use conman_registry::NewEvent;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::handle::PreemptionHandle;
use super::kill_priority::{self, Weight};
use super::log::Log;
use super::notice_source::{NoticeSender, NoticeSourceOptions};
use super::preemption::{self, Preemption};
use super::preemption_state::{OnNotice, OnReadmit, Origin, PreemptionState, run_time};
use super::{Command, Means, Notice};
use crate::error::NodeStartError;
use crate::leave::LeaveCause;

/// Commands that wait for the loop, which handles each in microseconds. They come from a person, a
/// signal handler and the notice sources.
const COMMANDS: usize = 64;

/// The emergency thread before it has a node. Its notice sources run already; their notices wait, and are
/// acted on when the node has taken over what runs. Dropping it ends the thread.
#[derive(Debug)]
pub struct EmergencyThread {
    commands: mpsc::Sender<Command>,
    runtime: runtime::Handle,
    means: oneshot::Sender<Means>,
    caught_up: oneshot::Receiver<()>,
}

impl EmergencyThread {
    /// Starts the thread and its notice sources. A node that joins a fleet does this before it joins, so that
    /// no notice is missed.
    pub fn start(sources: &[NoticeSourceOptions]) -> Result<Self, NodeStartError> {
        let mut opened = Vec::new();
        for NoticeSourceOptions { kind, endpoint } in sources {
            let source = (kind.open)(endpoint).map_err(|rule| NodeStartError::Endpoint {
                name: kind.name,
                endpoint: endpoint.clone(),
                rule,
            })?;
            opened.push((kind.name, source));
        }
        let failed = |source: io::Error| NodeStartError::Thread {
            action: "start the emergency thread",
            source,
        };
        let runtime = runtime::Builder::new_current_thread()
            .thread_name("conman-emergency-blocking")
            .enable_all()
            .build()
            .map_err(failed)?;
        let (commands, queue) = mpsc::channel(COMMANDS);
        let log = Log::start().map_err(failed)?;
        let (means, given) = oneshot::channel();
        let (caught, caught_up) = oneshot::channel();
        for (source, watcher) in opened {
            runtime.spawn(watcher.watch(NoticeSender {
                source,
                commands: commands.clone(),
                log: log.clone(),
            }));
        }
        let thread = Self {
            commands,
            runtime: runtime.handle().clone(),
            means,
            caught_up,
        };
        thread::Builder::new()
            .name("conman-emergency".to_owned())
            .spawn(move || {
                kill_priority::be_quick();
                let work = async {
                    // Without a node there is nothing to preempt.
                    if let Ok(means) = given.await {
                        EmergencyLoop::new(means, log).run(queue, caught).await;
                    }
                };
                runtime.block_on(conman_vitals::essential("emergency", work));
                // No task that the thread runs may keep the daemon from ending.
                runtime.shutdown_background();
            })
            .map_err(failed)?;
        Ok(thread)
    }

    /// Gives the thread a node, whose sessions are all in the kill table. Notices that arrived before are
    /// taken before this returns. The thread ends with [`PreemptionHandle::stop`].
    pub(crate) async fn attach(self, means: Means) -> PreemptionHandle {
        let handle = PreemptionHandle {
            commands: self.commands,
            runtime: self.runtime,
            means: means.clone(),
        };
        // If the thread has ended, every command says so.
        let _ = self.means.send(means);
        let _ = self.caught_up.await;
        handle
    }
}

/// The commands from before the node was up, without the notices that their source has withdrawn since.
fn queued(queue: &mut mpsc::Receiver<Command>) -> Vec<Command> {
    let mut commands: Vec<Command> = Vec::new();
    while let Ok(command) = queue.try_recv() {
        if let Command::Readmit(by, _) = &command {
            commands.retain(
                |earlier| !matches!(earlier, Command::Preempt(notice) if notice.origin == *by),
            );
        }
        commands.push(command);
    }
    commands
}

/// The preemption under way.
struct Running {
    work: Pin<Box<dyn Future<Output = preemption::Outcome> + Send>>,
    waiting: Vec<oneshot::Sender<PreemptReport>>,
    noticed_at: Instant,
    deadline: watch::Sender<Instant>,
}

/// The thread's loop.
pub(super) struct EmergencyLoop {
    pub(super) means: Means,
    log: Log,
    weight: Weight,
    state: PreemptionState,
    running: Option<Running>,
    /// Of the sessions that the last preemption killed.
    namespaces: KeptNamespaces,
    began: Instant,
}

impl EmergencyLoop {
    pub(super) fn new(means: Means, log: Log) -> Self {
        Self {
            weight: Weight::of(&means.instance),
            means,
            log,
            state: PreemptionState::default(),
            running: None,
            namespaces: KeptNamespaces::default(),
            began: Instant::now(),
        }
    }

    async fn run(mut self, mut queue: mpsc::Receiver<Command>, caught_up: oneshot::Sender<()>) {
        for command in queued(&mut queue) {
            if self.obey(command).is_break() {
                return;
            }
        }
        // The receiver waits only while the node starts.
        let _ = caught_up.send(());
        loop {
            tokio::select! {
                // Cancel safe: a command is taken or stays in the queue.
                command = queue.recv() => match command {
                    Some(command) => {
                        if self.obey(command).is_break() {
                            return;
                        }
                    }
                    None => return,
                },
                // Cancel safe: the work is kept and polled again.
                outcome = finished(&mut self.running) => self.finish(outcome),
            }
        }
    }

    fn obey(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Preempt(notice) => self.take(notice),
            Command::Readmit(by, reply) => {
                self.readmit(by);
                // The sender of the order may have stopped waiting.
                let _ = reply.map(|reply| reply.send(()));
            }
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    pub(super) fn take(&mut self, notice: Notice) {
        if notice.outlives_daemon() {
            self.means.file.set(Some(notice.reason.clone()));
        }
        let budget_ms = notice.budget_ms.unwrap_or(self.means.budget_ms);
        // A notice from before the node was up leaves as much time for releases as any.
        let deadline =
            notice.at.max(self.began) + run_time(Duration::from_millis(budget_ms.into()));
        match self.state.on_notice(notice.origin) {
            OnNotice::Start => {
                self.means.table.close(notice.reason.clone());
                self.means.leave.announce(LeaveCause::Preemption);
                let (deadline, ends) = watch::channel(deadline);
                let work = Preemption::new(&self.means, &self.weight, &notice, ends);
                self.running = Some(Running {
                    work: Box::pin(work.run()),
                    waiting: vec![notice.reply],
                    noticed_at: notice.at,
                    deadline,
                });
            }
            OnNotice::Join => {
                if let Some(running) = &mut self.running {
                    running.waiting.push(notice.reply);
                    running.deadline.send_if_modified(|present| {
                        let sooner = deadline < *present;
                        *present = deadline.min(*present);
                        sooner
                    });
                }
            }
            OnNotice::Answer(report) => {
                // The sender of the notice may have stopped waiting.
                let _ = notice.reply.send(*report);
            }
        }
    }

    pub(super) fn readmit(&mut self, by: Origin) {
        match self.state.on_readmit(by) {
            OnReadmit::Reopen => {
                self.means.file.set(None);
                self.reopen();
            }
            // At once: this daemon may end before the preemption is finished.
            OnReadmit::Later => {
                self.means.file.set(None);
            }
            OnReadmit::Ignore => {}
        }
    }

    fn reopen(&mut self) {
        let namespaces = std::mem::take(&mut self.namespaces);
        // Not on this thread, which may have to kill, unless there can be no other.
        let _ = thread::Builder::new()
            .name("namespaces".to_owned())
            .spawn(|| drop(namespaces));
        self.means.table.reopen();
        self.means.leave.stay(LeaveCause::Preemption);
        let message =
            "readmitted: unless the node is being drained, sessions are admitted again".to_owned();
        let event = NewEvent::of_node(EventKind::NodeReadmitted, message.clone());
        self.means.journal.append(vec![event]);
        self.log.info(message);
    }

    fn finish(&mut self, outcome: preemption::Outcome) {
        let preemption::Outcome {
            report,
            events,
            namespaces,
        } = outcome;
        self.namespaces = namespaces;
        // Only now: the journal and the registry share a disk.
        self.means.journal.append(events);
        if let Some(running) = self.running.take() {
            let (began, until) = (running.noticed_at, *running.deadline.borrow());
            let leave = Arc::clone(&self.means.leave);
            tokio::spawn(async move { leave.close(LeaveCause::Preemption, began, until).await });
            for reply in running.waiting {
                // The sender of the notice may have stopped waiting.
                let _ = reply.send(report.clone());
            }
        }
        self.log.report(report.clone());
        if self.state.on_finished(report) {
            self.reopen();
        }
    }

    /// Waits for the end of the preemption under way.
    #[cfg(test)]
    pub(super) async fn finish_running(&mut self) {
        let outcome = finished(&mut self.running).await;
        self.finish(outcome);
    }
}

/// Completes with the preemption under way; pending without one.
async fn finished(running: &mut Option<Running>) -> preemption::Outcome {
    match running {
        Some(running) => (&mut running.work).await,
        None => pending().await,
    }
}
