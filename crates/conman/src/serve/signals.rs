//! The signals that the daemon handles.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use conman_auth::TokenFile;
use conman_node::{PreemptionHandle, SIGNAL};
use conman_proto::PreemptRequest;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::renewal::Renewal;
use super::template_reload::TemplateReload;
use crate::config::OnSigterm;

/// Time for the rest of the daemon to stop in order once every session is dead and released.
const EXIT_PATIENCE: Duration = Duration::from_secs(10);

/// The signals that this process handles once this exists. A signal that arrives before a wait is
/// kept.
pub(super) struct Signals {
    pub(super) ending: EndingSignals,
    hangup: Signal,
}

/// The signals that end the daemon.
pub(super) struct EndingSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Must be called within a runtime.
    pub(super) fn listen() -> io::Result<Self> {
        let ending = EndingSignals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        };
        Ok(Self {
            ending,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

impl EndingSignals {
    /// The name of the next one. Cancelling loses none: the next call returns it.
    pub(super) async fn next(&mut self) -> &'static str {
        tokio::select! {
            // Cancelling either `recv` keeps its signal.
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// The main task's stop order.
pub(super) struct Stopped(watch::Receiver<Option<&'static str>>);

impl Stopped {
    /// Waits for the stop order and returns its reason.
    pub(super) async fn wait(mut self) -> &'static str {
        // Cancelling loses nothing: the value stays in the channel.
        match self.0.wait_for(Option::is_some).await {
            Ok(why) => why.unwrap_or("ordered to"),
            Err(_) => "the signal handler has ended",
        }
    }
}

/// Handles signals on the emergency thread: SIGTERM and SIGINT stop the daemon, after a
/// preemption if so configured; SIGHUP reloads the token file, the nodes' credentials and the templates.
pub(super) fn watch(
    signals: Signals,
    preemption: &PreemptionHandle,
    on_sigterm: OnSigterm,
    reloads: Reloads,
) -> Stopped {
    let (sender, receiver) = watch::channel(None);
    let ordered = preemption.clone();
    let Signals {
        mut ending,
        mut hangup,
    } = signals;
    preemption
        .spawn(async move { stop_on_signal(&mut ending, &ordered, on_sigterm, &sender).await });
    tokio::spawn(async move { reload_on_hangup(&mut hangup, reloads).await });
    Stopped(receiver)
}

async fn stop_on_signal(
    signals: &mut EndingSignals,
    preemption: &PreemptionHandle,
    on_sigterm: OnSigterm,
    sender: &watch::Sender<Option<&'static str>>,
) {
    let name = signals.next().await;
    if on_sigterm == OnSigterm::Leave {
        sender.send_replace(Some(name));
        // A second signal ends the daemon at once.
        tokio::select! {
            // Cancel safe: the signal is not needed any more.
            _ = signals.next() => {}
            // The main task has stopped.
            () = sender.closed() => return,
        }
        std::process::exit(1);
    }
    let request = PreemptRequest {
        reason: Some(name.to_owned()),
        ..PreemptRequest::default()
    };
    match preemption.begin(&request, SIGNAL) {
        Ok(report) => {
            if let Err(error) = report.wait().await {
                tracing::error!(signal = name, %error, "cannot get the preemption's report");
            }
        }
        Err(error) => tracing::error!(signal = name, %error, "cannot preempt"),
    }
    sender.send_replace(Some("preempted"));
    // The sessions are dead and released; a main runtime that hangs must not delay the machine.
    if tokio::time::timeout(EXIT_PATIENCE, sender.closed())
        .await
        .is_err()
    {
        std::process::exit(0);
    }
}

/// What SIGHUP reloads.
pub(super) struct Reloads {
    pub(super) tokens: Option<Arc<TokenFile>>,
    pub(super) renewal: Renewal,
    pub(super) templates: TemplateReload,
}

async fn reload_on_hangup(hangup: &mut Signal, reloads: Reloads) {
    let Reloads {
        tokens,
        renewal,
        templates,
    } = reloads;
    let templates = Arc::new(templates);
    while hangup.recv().await.is_some() {
        renewal.look(true).await;
        let (tokens, templates) = (tokens.clone(), Arc::clone(&templates));
        // It reads files, so it must not run on a thread that serves requests.
        let reloading = tokio::task::spawn_blocking(move || {
            templates.read();
            match tokens.map(|tokens| tokens.reload()) {
                Some(Ok(count)) => tracing::info!(count, "reloaded the token file"),
                Some(Err(error)) => tracing::error!(
                    error = %super::chain(&error),
                    "cannot reload the token file; keeping the former tokens"
                ),
                None => tracing::info!("SIGHUP: no token file to reload"),
            }
        });
        if let Err(error) = reloading.await {
            tracing::error!(%error, "reloading at SIGHUP panicked");
        }
    }
}
