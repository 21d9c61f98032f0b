//! Notices that the kernel has killed processes of sessions because memory ran out.
//!
//! One task. The host counts such kills; only after its count has grown are those of all sessions read.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use conman_linux::host_oom_kills;
use conman_proto::{EventKind, SessionState};
use conman_runtime::{ContainerKey, Runtime};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use crate::context::Context;
use crate::session::SessionHandle;

/// The task's name in messages about its end.
pub(crate) const NAME: &str = "memory watch";

const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// A look at all sessions is followed by a pause of at least this multiple of its duration.
const PAUSE_FACTOR: u32 = 20;

type Candidate = (Arc<SessionHandle>, Arc<dyn Runtime>, ContainerKey);

/// Watches until it is aborted.
pub(crate) async fn run(context: Arc<Context>) {
    let mut before = None;
    loop {
        sleep(LOOK_INTERVAL).await;
        let now = spawn_blocking(host_oom_kills).await.ok().flatten();
        if now == before {
            continue;
        }
        before = now;
        let began = Instant::now();
        look(&context).await;
        sleep(began.elapsed() * PAUSE_FACTOR).await;
    }
}

/// Notes what happened since the last look.
async fn look(context: &Arc<Context>) {
    let running = context.sessions.live().into_iter();
    let running = running.filter(|handle| handle.state() == SessionState::Running);
    let candidates: Vec<Candidate> = running
        .filter_map(|handle| {
            let runtime = Arc::clone(context.runtime(handle.spec().runtime)?);
            let key = ContainerKey::new(handle.id.clone(), handle.generation()?);
            Some((handle, runtime, key))
        })
        .collect();
    let read = move || -> Vec<(Candidate, Option<u64>)> {
        let counted = candidates.into_iter().map(|one| {
            let kills = one.1.oom_kills(&one.2);
            (one, kills)
        });
        counted.collect()
    };
    for ((handle, _, key), kills) in spawn_blocking(read).await.unwrap_or_default() {
        if let Some(kills) = kills {
            note(context, &handle, &key, kills);
        }
    }
}

/// Notes how many processes of a session have been killed in its life.
pub(crate) fn note(context: &Context, handle: &SessionHandle, key: &ContainerKey, kills: u64) {
    let before = handle.oom_noted.swap(kills, Ordering::Relaxed);
    let new = kills.saturating_sub(before);
    // What an earlier daemon noted is not known.
    if before == SessionHandle::OOM_UNKNOWN || new == 0 {
        return;
    }
    metrics::counter!("conman_session_oom_kills_total").increment(new);
    let message = match new {
        1 => "the kernel killed one of its processes, because its memory ran out".to_owned(),
        new => format!("the kernel killed {new} of its processes, because its memory ran out"),
    };
    context.note_session(
        EventKind::SessionOutOfMemory,
        &handle.id,
        key.generation,
        message,
    );
}
