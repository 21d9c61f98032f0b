//! Accounts of the kernel that a session could share with the host's root.

use crate::world::{Verdict, World, line_with};

/// Signals queued for the host's root, who runs this.
fn queued_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("readable");
    let line = line_with(&status, "SigQ:");
    let count = line.trim_start_matches("SigQ:").trim().split('/').next();
    count
        .and_then(|count| count.parse().ok())
        .expect("a number")
}

/// What a session could take of the host's inotify instances, root has still.
pub(crate) async fn inotify_instances(world: &World) -> Verdict {
    let (id, log) = world.helper("inotify", &["take_inotify"], "taken").await;
    let flags = rustix::fs::inotify::CreateFlags::CLOEXEC;
    let mut own = Vec::new();
    let mut failure = None;
    for _ in 0..8 {
        match rustix::fs::inotify::init(flags) {
            Ok(descriptor) => own.push(descriptor),
            Err(error) => failure = Some(error),
        }
    }
    world.stop(&id).await;
    let taken = line_with(&log, "taken").to_owned();
    match failure {
        Some(error) => Verdict::Reached(format!("{taken}; the host's root gets: {error}")),
        None => Verdict::Held(taken),
    }
}

pub(crate) async fn queued_signals_of_root(world: &World) -> Verdict {
    let before = queued_signals();
    let (id, log) = world.helper("signals", &["take_signals"], "taken").await;
    let during = queued_signals();
    world.stop(&id).await;
    let taken = line_with(&log, "taken");
    Verdict::reached_if(
        during > before + 500,
        format!("{taken}; those of the host's root went from {before} to {during}"),
    )
}

/// Bytes of POSIX message queues stay within one user's bound, whatever users there are inside.
pub(crate) async fn message_queues(world: &World) -> Verdict {
    let (id, log) = world.helper("queues", &["take_queues"], "taken").await;
    world.stop(&id).await;
    let taken = line_with(&log, "taken");
    let bytes: u64 = taken
        .rsplit(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    Verdict::reached_if(bytes > 1_000_000, format!("{taken} bytes"))
}
