use std::sync::Arc;
use std::time::Duration;

use conman_auth::TokenFile;
use conman_node::{EmergencyHandle, Node};
use conman_proto::PreemptRequest;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use crate::config::OnSigterm;

/// Time for the rest of the daemon to stop in order once every session is dead and released.
const EXIT_PATIENCE: Duration = Duration::from_secs(10);

/// Tells the main task to stop.
pub(super) struct Stopped(watch::Receiver<Option<&'static str>>);

impl Stopped {
    /// Waits for the word to stop and gives its reason.
    pub(super) async fn wait(mut self) -> &'static str {
        // Cancelling loses nothing: the value stays in the channel.
        match self.0.wait_for(Option::is_some).await {
            Ok(why) => why.unwrap_or("told to"),
            Err(_) => "the signal handler has ended",
        }
    }
}

/// Handles signals on the emergency thread: SIGTERM and SIGINT stop the daemon, after a preemption
/// where the configuration says so; SIGHUP reads the token file again.
pub(super) fn watch(
    node: &Arc<Node>,
    on_sigterm: OnSigterm,
    tokens: Option<Arc<TokenFile>>,
) -> Stopped {
    let (sender, receiver) = watch::channel(None);
    let emergency = node.emergency().clone();
    node.emergency()
        .spawn(async move { stop_on_signal(&emergency, on_sigterm, &sender).await });
    tokio::spawn(reload_on_hangup(tokens));
    Stopped(receiver)
}

async fn stop_on_signal(
    emergency: &EmergencyHandle,
    on_sigterm: OnSigterm,
    sender: &watch::Sender<Option<&'static str>>,
) {
    let (Some(mut terminate), Some(mut interrupt)) = (
        listen(SignalKind::terminate()),
        listen(SignalKind::interrupt()),
    ) else {
        return;
    };
    // Cancelling a `recv` loses no signal: the next one reports it.
    let name = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    };
    if on_sigterm == OnSigterm::Leave {
        sender.send_replace(Some(name));
        // A second signal means that somebody has lost patience.
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = sender.closed() => return,
        }
        std::process::exit(1);
    }
    let request = PreemptRequest {
        reason: Some(name.to_owned()),
        ..PreemptRequest::default()
    };
    match emergency.preempt(&request, "signal") {
        Ok(report) => {
            if let Err(error) = report.wait().await {
                tracing::error!(%error, "the preemption on {name} has no report");
            }
        }
        Err(error) => tracing::error!(%error, "cannot preempt on {name}"),
    }
    sender.send_replace(Some("preempted"));
    // The sessions are dead and released; a main runtime that hangs must not keep the machine.
    if tokio::time::timeout(EXIT_PATIENCE, sender.closed())
        .await
        .is_err()
    {
        std::process::exit(0);
    }
}

async fn reload_on_hangup(tokens: Option<Arc<TokenFile>>) {
    let Some(mut hangup) = listen(SignalKind::hangup()) else {
        return;
    };
    while hangup.recv().await.is_some() {
        let Some(tokens) = tokens.clone() else {
            tracing::info!("SIGHUP: there is no token file to read again");
            continue;
        };
        // A file is read: not on a thread that serves requests.
        match tokio::task::spawn_blocking(move || tokens.reload()).await {
            Ok(Ok(count)) => tracing::info!(count, "read the token file again"),
            Ok(Err(error)) => {
                tracing::error!("kept the former tokens: {}", super::chain(&error));
            }
            Err(error) => tracing::error!(%error, "reading the token file panicked"),
        }
    }
}

fn listen(kind: SignalKind) -> Option<Signal> {
    signal(kind)
        .inspect_err(|error| tracing::error!(%error, "cannot watch for signals"))
        .ok()
}
