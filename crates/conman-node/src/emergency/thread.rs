//! The thread: it begins with the notice sources, and preempts once it has a node.

use std::collections::VecDeque;
use std::future::pending;
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use conman_core::preemption::{Action, Event, Origin, Preemption, run_time};
use conman_linux::KeptNamespaces;
use conman_proto::{EventKind, PreemptReport};
use conman_registry::NewEvent;
use tokio::runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::handle::PreemptionHandle;
use super::kill_priority::{self, Weight};
use super::log::Log;
use super::preemption::Execution;
use super::sources::{NoticeSender, NoticeSourceOptions};
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
        for source in sources.iter().filter(|source| source.is_on) {
            let name = source.kind.name;
            let watcher = source.open().map_err(|rule| NodeStartError::NoticeSource {
                name,
                setting: source.setting.join(" "),
                rule,
            })?;
            opened.push((name, watcher));
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
        let base = Instant::now();
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
                        EmergencyLoop::new(means, log, base)
                            .run(queue, caught)
                            .await;
                    }
                };
                runtime.block_on(conman_watchdog::essential("emergency", work));
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

/// Closes descriptors on another thread, unless there can be none: this one may have to kill.
fn drop_elsewhere(namespaces: impl Send + 'static) {
    let _ = thread::Builder::new()
        .name("namespaces".to_owned())
        .spawn(|| drop(namespaces));
}

/// A notice that has no report yet.
struct WaitingNotice {
    at: Instant,
    deadline: Instant,
    reply: oneshot::Sender<PreemptReport>,
}

/// The thread's loop: it drives [`Preemption`].
pub(super) struct EmergencyLoop {
    pub(super) means: Means,
    log: Log,
    weight: Weight,
    preemption: Preemption,
    /// The preemption under way.
    execution: Option<Execution>,
    /// The zero of the state machine's time; no notice is older.
    base: Instant,
    /// When the node was up.
    began: Instant,
    waiting: Vec<WaitingNotice>,
    /// Of the last preemption.
    report: Option<PreemptReport>,
    /// Of the sessions that the last preemption killed: the mount namespaces.
    namespaces: KeptNamespaces,
}

impl EmergencyLoop {
    pub(super) fn new(means: Means, log: Log, base: Instant) -> Self {
        Self {
            weight: Weight::of(&means.instance),
            means,
            log,
            preemption: Preemption::default(),
            execution: None,
            base,
            began: Instant::now(),
            waiting: Vec::new(),
            report: None,
            namespaces: KeptNamespaces::default(),
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
                // Cancel safe: what is under way is kept.
                event = self.next() => self.drive(event),
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
            // A full queue means that the node is cordoned already, or cannot be now.
            Command::Cordon(reason) => drop(self.means.cordons.try_send(reason)),
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
        let event = Event::Notice {
            origin: notice.origin,
            noticed_at: self.clock(notice.at),
            deadline: self.clock(deadline),
        };
        let actions = self.preemption.on(self.clock(Instant::now()), event);
        if actions.contains(&Action::Close) {
            self.execution = Some(Execution::new(&self.means, &self.weight, &notice));
        }
        self.waiting.push(WaitingNotice {
            at: notice.at,
            deadline,
            reply: notice.reply,
        });
        self.execute(actions);
    }

    pub(super) fn readmit(&mut self, by: Origin) {
        self.drive(Event::Readmit(by));
    }

    fn clock(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.base)
    }

    /// Waits for the next event of the preemption under way; pending without one. Cancel safe.
    pub(super) async fn next(&mut self) -> Event {
        let wake = self.preemption.next_wake().map(|wake| self.base + wake);
        match (&mut self.execution, wake) {
            (Some(_), Some(wake)) if wake <= Instant::now() => Event::Tick,
            (Some(execution), Some(wake)) => execution.next(wake).await,
            _ => pending().await,
        }
    }

    #[cfg(test)]
    pub(super) fn is_under_way(&self) -> bool {
        self.preemption.is_under_way()
    }

    pub(super) fn drive(&mut self, event: Event) {
        let actions = self.preemption.on(self.clock(Instant::now()), event);
        self.execute(actions);
    }

    /// Executes actions, and whatever their results lead to.
    fn execute(&mut self, actions: Vec<Action>) {
        let mut actions = VecDeque::from(actions);
        loop {
            while let Some(action) = actions.pop_front() {
                for event in self.act(action) {
                    actions.extend(self.preemption.on(self.clock(Instant::now()), event));
                }
            }
            let Some(execution) = &mut self.execution else {
                return;
            };
            let Some(event) = execution.table_handled() else {
                return;
            };
            actions.extend(self.preemption.on(self.clock(Instant::now()), event));
        }
    }

    fn act(&mut self, action: Action) -> Vec<Event> {
        match action {
            Action::Close => {
                if let Some(execution) = &self.execution {
                    self.means.table.close(execution.reason().to_owned());
                }
                self.means.leave.announce(LeaveCause::Preemption);
            }
            Action::Reopen => self.reopen(),
            Action::ForgetNotice => {
                self.means.file.set(None);
            }
            Action::Finish => self.finish(),
            Action::Answer => self.answer(),
            Action::CloseThrough(until) => {
                let until = self.base + until;
                self.means.leave.close_now(LeaveCause::Preemption, until);
            }
            action => {
                let execution = self.execution.as_mut();
                return execution.map_or_else(Vec::new, |execution| execution.execute(action));
            }
        }
        Vec::new()
    }

    fn reopen(&mut self) {
        drop_elsewhere(std::mem::take(&mut self.namespaces));
        self.means.table.reopen();
        self.means.leave.stay(LeaveCause::Preemption);
        let message =
            "readmitted: unless the node is being drained, sessions are admitted again".to_owned();
        let event = NewEvent::of_node(EventKind::NodeReadmitted, message.clone());
        self.means.journal.append(vec![event]);
        self.log.info(message);
    }

    fn finish(&mut self) {
        let Some(execution) = self.execution.take() else {
            return;
        };
        let concluded = execution.conclude(&self.preemption.outcome());
        self.namespaces = concluded.namespaces;
        // The releases are written, and the machine may stay: links are not to outlive their sessions.
        drop_elsewhere(self.namespaces.take_networks());
        // Only now: the journal and the registry share a disk.
        self.means.journal.append(concluded.events);
        self.report = Some(concluded.report.clone());
        self.answer();
        self.log.report(concluded.report);
    }

    /// Closes what passes through the node, and then sends the last preemption's report to every notice that waits
    /// for it: with the report, a source lets the machine be stopped.
    fn answer(&mut self) {
        let Some(report) = &self.report else {
            return;
        };
        for notice in self.waiting.drain(..) {
            let (leave, mut report) = (Arc::clone(&self.means.leave), report.clone());
            tokio::spawn(async move {
                let cause = LeaveCause::Preemption;
                leave.close(cause, notice.at, notice.deadline).await;
                report.through = leave.through().in_flight();
                // The sender of the notice may have stopped waiting.
                let _ = notice.reply.send(report);
            });
        }
    }
}
