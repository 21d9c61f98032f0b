//! What a session takes from others' starts, commands and ends.

use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use crate::world::{ATTACKS, MEMORY_BYTES, Verdict, World};

/// Longest start of another session meanwhile: a debug build's on a busy machine takes a third.
const START: Duration = Duration::from_millis(2_500);

/// Longest death.
const DEATH: Duration = Duration::from_millis(2_000);

/// A session of spinning shells with a hundredth of a CPU.
fn spinning(processes: &str) -> serde_json::Value {
    let script = format!("for n in $(seq {processes}); do while :; do :; done & done; wait");
    json!({"image": ATTACKS, "command": ["/bin/busybox", "sh", "-c", script], "cpus": 0.01,
        "memory_bytes": MEMORY_BYTES, "pids": 256})
}

async fn starved(world: &World, processes: &str) -> String {
    let id = world.id("starved");
    let _ = world.order(&id, &spinning(processes)).await;
    let count: usize = processes.parse().expect("a number");
    crate::world::wait_for(Duration::from_secs(20), async || {
        (world.processes(&id).len() >= count / 2).then_some(())
    })
    .await;
    id
}

async fn start_another(world: &World) -> Duration {
    let id = world.id("other");
    let begun = Instant::now();
    world.order(&id, &world.spec(&["sleep_long"])).await;
    let took = begun.elapsed();
    world.stop(&id).await;
    took
}

/// Sixty-four commands into a session without CPU keep no other session from starting.
pub(crate) async fn starved_commands(world: &World) -> Verdict {
    let id = starved(world, "8").await;
    let quiet = start_another(world).await;
    let request = json!({"command": ["true"], "timeout_ms": 5_000});
    let execs = (0..64).map(|_| world.exec_answer(&id, &request));
    let starts = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..4 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            slowest = slowest.max(start_another(world).await);
        }
        slowest
    };
    let (_, slowest) = tokio::join!(futures_util::future::join_all(execs), starts);
    world.stop(&id).await;
    Verdict::reached_if(
        slowest > START.max(quiet * 3),
        format!("another session's start took {slowest:?}, {quiet:?} before"),
    )
}

/// A session without CPU dies at once when it is to.
pub(crate) async fn starved_death(world: &World) -> Verdict {
    let id = starved(world, "48").await;
    let begun = Instant::now();
    world.stop(&id).await;
    let took = begun.elapsed();
    Verdict::reached_if(took > DEATH, format!("its death took {took:?}"))
}

/// Starts of sessions that cannot come up take no place from others'.
pub(crate) async fn starts_that_hang(world: &World) -> Verdict {
    let ids: Vec<String> = (0..8).map(|_| world.id("hang")).collect();
    let mut spec = spinning("4");
    // Nothing ever listens there.
    spec["port"] = json!(9);
    spec["ready_timeout_s"] = json!(6);
    let quiet = start_another(world).await;
    let hanging = futures_util::future::join_all(ids.iter().map(|id| world.order(id, &spec)));
    let starts = async {
        let mut slowest = Duration::ZERO;
        for _ in 0..3 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            slowest = slowest.max(start_another(world).await);
        }
        slowest
    };
    let (_, slowest) = tokio::join!(hanging, starts);
    futures_util::future::join_all(ids.iter().map(|id| world.stop(id))).await;
    Verdict::reached_if(
        slowest > START.max(quiet * 3),
        format!("another session's start took {slowest:?}, {quiet:?} before"),
    )
}
