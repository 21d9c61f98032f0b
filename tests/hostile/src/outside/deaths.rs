//! Ends that are none, and signals to others.

use std::time::Duration;

use conman_linux::{Signal, signal_process};
use http::StatusCode;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::world::{Verdict, World};

/// Whether what conman says of the session is what the kernel says.
async fn judged(world: &World, id: &str) -> Verdict {
    sleep(Duration::from_secs(3)).await;
    let ended = world.api().session(id).await.state.is_ended();
    let alive = world.processes(id).len();
    if ended && alive > 0 {
        world.stop(id).await;
        let left = world.processes(id);
        for one in &left {
            let _ = signal_process(one.pid, Signal::SIGKILL);
        }
        let said = format!(
            "ended, and {alive} processes live; {} after its stop",
            left.len()
        );
        return Verdict::Reached(said);
    }
    if !ended {
        let answer = world
            .exec_answer(id, &json!({"command": ["true"], "timeout_ms": 5_000}))
            .await;
        if answer.status != StatusCode::OK {
            world.stop(id).await;
            return Verdict::Reached(format!("it runs, and no exec: {}", answer.text()));
        }
    }
    world.stop(id).await;
    let left = world.processes(id).len();
    Verdict::reached_if(
        left > 0,
        format!("ended: {ended}; {left} processes after its stop"),
    )
}

/// A stop of a traced process looks like an end to a careless parent.
pub(crate) async fn forged_death(world: &World) -> Verdict {
    let (id, _) = world
        .helper("forged", &["forge_death", "trace"], "forging")
        .await;
    judged(world, &id).await
}

pub(crate) async fn stopped_first_process(world: &World) -> Verdict {
    let (id, _) = world
        .helper("stopped", &["forge_death", "stop"], "forging")
        .await;
    // And from outside, as an operator's debugger would: the init as well.
    let processes = world.processes(&id);
    for one in &processes {
        signal_process(one.pid, Signal::SIGSTOP).expect("stopped");
    }
    sleep(Duration::from_secs(1)).await;
    let ended = world.api().session(&id).await.state.is_ended();
    for one in &processes {
        signal_process(one.pid, Signal::SIGCONT).expect("continued");
    }
    match judged(world, &id).await {
        Verdict::Held(why) => Verdict::reached_if(ended, why),
        reached => reached,
    }
}

/// A command that stops as a traced process has not ended.
pub(crate) async fn forged_end_of_a_command(world: &World) -> Verdict {
    let id = world.id("command");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let begun = Instant::now();
    let command = ["python3", "/inside.py", "forge_death", "exec"];
    let answer = world
        .exec_answer(&id, &json!({"command": command, "timeout_ms": 8_000}))
        .await;
    let took = begun.elapsed();
    let code = answer.json()["exit_code"].clone();
    world.stop(&id).await;
    // 7 where the trace was refused and it came to its end; 133, SIGTRAP, where that killed it.
    let honest = code == 7 || code == 133 || answer.status != StatusCode::OK;
    Verdict::reached_if(
        !honest,
        format!("exit code {code} after {took:?}; {}", answer.status),
    )
}

/// SIGKILL to everything that can be named.
pub(crate) async fn kill_everything(world: &World) -> Verdict {
    let watched = [world.conman.pid(), world.conman.shim_pid()];
    let id = world.id("killer");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let command = ["python3", "/inside.py", "kill_everything"];
    world
        .exec_answer(&id, &json!({"command": command, "timeout_ms": 20_000}))
        .await;
    let dead: Vec<i32> = watched
        .into_iter()
        .filter(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
        .collect();
    world.stop(&id).await;
    Verdict::reached_if(!dead.is_empty(), format!("killed: {dead:?}"))
}
