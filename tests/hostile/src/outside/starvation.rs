//! What a session takes from others' starts, commands and ends.

use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use crate::world::{Verdict, World};

/// Longest start of another session meanwhile: a debug build's on a busy machine takes a third.
const START: Duration = Duration::from_millis(2_500);

/// Longest death.
const DEATH: Duration = Duration::from_millis(2_000);

async fn starved(world: &World, processes: &str) -> String {
    let id = world.id("starved");
    let mut spec = world.spec(&["spin", processes]);
    spec["cpus"] = json!(0.01);
    spec["pids"] = json!(256);
    let _ = world.order(&id, &spec).await;
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
    let request = json!({"command": ["true"], "timeout_ms": 8_000});
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
    let mut slowest = Duration::ZERO;
    for _ in 0..2 {
        let id = starved(world, "48").await;
        let begun = Instant::now();
        world.stop(&id).await;
        slowest = slowest.max(begun.elapsed());
    }
    Verdict::reached_if(slowest > DEATH, format!("its death took {slowest:?}"))
}

/// Starts of sessions that cannot come up take no place from others'.
pub(crate) async fn starts_that_hang(world: &World) -> Verdict {
    let ids: Vec<String> = (0..8).map(|_| world.id("hang")).collect();
    let mut spec = world.spec(&["spin", "4"]);
    spec["cpus"] = json!(0.01);
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
