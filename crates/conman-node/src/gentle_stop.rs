//! Stops sessions by a signal first, and by SIGKILL once their time to obey it is over.
//!
//! Where the spec gives no time (`stop_grace_ms`), a stop is a kill. A preemption does not come here.

use std::sync::Arc;
use std::time::Duration;

use conman_core::{EndCause, error_chain};
use conman_linux::{PidFd, Signal, SignalNumber, parse_signal};
use conman_proto::{EventKind, SessionState};
use conman_runtime::{ContainerKey, RuntimeError};
use tokio::time::{sleep, timeout};

use crate::context::Context;
use crate::pause;
use crate::session::{SessionHandle, StopOrder};

/// Maximum wait for the runtime to return the image's stop signal.
const IMAGE_PATIENCE: Duration = Duration::from_secs(5);

/// Stops a session. Returns once its task has the order; until then, another order kills it at once.
pub(crate) async fn stop(
    context: &Context,
    handle: &Arc<SessionHandle>,
    cause: EndCause,
    why: &str,
) {
    let grace = Duration::from_millis(handle.spec().stop_grace_ms.into());
    if !grace.is_zero() {
        signal_and_wait(context, handle, (cause, why), grace).await;
    }
    handle.order_stop(cause, why);
}

async fn signal_and_wait(
    context: &Context,
    handle: &Arc<SessionHandle>,
    (cause, why): (EndCause, &str),
    grace: Duration,
) {
    let view = handle.view();
    let (SessionState::Running, Some(process)) = (view.state, view.process) else {
        return;
    };
    let is_first = handle.leaving.ordered().is_none();
    handle.leaving.order(StopOrder {
        cause,
        why: why.to_owned(),
    });
    // A second order joins the first.
    if is_first {
        let signal = signal_of(context, handle).await;
        // A paused session would not run during its grace.
        if let Err(error) = pause::resume(context, handle).await {
            let error = error_chain(&error);
            tracing::warn!(session = %handle.id, error, "cannot resume a paused session to signal it");
        }
        match send(context, handle, &process, signal).await {
            Ok(_) => note_signal(context, handle, (signal, why), grace),
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!(session = %handle.id, error, "cannot send the signal; killing");
                return;
            }
        }
    }
    let mut orders = handle.stop.subscribe();
    tokio::select! {
        // Cancel safe, as all of them only wait.
        _ = handle.wait_for(|view| view.process.is_none()) => {}
        // It is killed already.
        _ = orders.wait_for(Option::is_some) => {}
        () = sleep(grace) => {}
    }
}

/// Sends a signal to a session's program. `false` if it has ended.
pub(crate) async fn send(
    context: &Context,
    handle: &SessionHandle,
    process: &Arc<PidFd>,
    signal: SignalNumber,
) -> Result<bool, RuntimeError> {
    let runtime = context.runtime(handle.spec().runtime);
    let Some((runtime, generation)) = runtime.zip(handle.generation()) else {
        return Ok(false);
    };
    let key = ContainerKey::new(handle.id.clone(), generation);
    runtime.signal(&key, process, signal).await
}

fn note_signal(
    context: &Context,
    handle: &SessionHandle,
    (signal, why): (SignalNumber, &str),
    grace: Duration,
) {
    let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
    tracing::info!(session = %handle.id, %signal, grace_ms, "sent the stop signal");
    if let Some(generation) = handle.generation() {
        let message = format!("{signal}, and SIGKILL after {grace_ms} ms unless it ends: {why}");
        let kind = EventKind::SessionSignalled;
        context.note_session(kind, &handle.id, generation, message);
    }
}

/// The signal of its spec, else that of its image, else SIGTERM.
async fn signal_of(context: &Context, handle: &SessionHandle) -> SignalNumber {
    let spec = handle.spec();
    if let Some(signal) = spec.stop_signal.as_deref().and_then(parse_signal) {
        return signal;
    }
    let Some((runtime, generation)) = context.runtime(spec.runtime).zip(handle.generation()) else {
        return Signal::SIGTERM.into();
    };
    let key = ContainerKey::new(handle.id.clone(), generation);
    let reply = timeout(IMAGE_PATIENCE, runtime.stop_signal(&key)).await;
    let of_image = reply.ok().flatten().as_deref().and_then(parse_signal);
    of_image.unwrap_or(Signal::SIGTERM.into())
}
