//! Terminals: of a session's program, and of the people who look at what it printed.

use std::time::Duration;

use conman_e2e::websocket;
use conman_proto::ATTACH_PROTOCOL;
use http::Method;
use serde_json::json;

use crate::world::{Verdict, World, wait_for};

/// The program keeps its terminal for itself: who wants to attach still can.
pub(crate) async fn exclusive_terminal(world: &World) -> Verdict {
    let id = world.id("exclusive");
    let mut spec = world.spec(&[]);
    spec["tty"] = json!(true);
    let script = "import fcntl, time\ntry:\n    fcntl.ioctl(0, 0x540C)\nexcept OSError as e:\n    \
        print(e)\nprint('begun', flush=True)\ntime.sleep(1000)";
    spec["command"] = json!(["python3", "-c", script]);
    world.start_until(&id, &spec, "begun").await;
    let api = world.api();
    let request = api.request(Method::GET, &format!("/v1/sessions/{id}/attach"), None);
    let attached = websocket(&api, request, &[ATTACH_PROTOCOL]).await;
    world.stop(&id).await;
    Verdict::reached_if(attached.is_err(), format!("attached: {}", attached.is_ok()))
}

/// Control sequences of a program do not reach the terminal of an operator who asks why it ended.
pub(crate) async fn control_sequences(world: &World) -> Verdict {
    let id = world.id("escape");
    let mut spec = world.spec(&[]);
    let script = r"printf 'sorry \033]0;hostile\007\033[2J\033[31m\n'; exit 3";
    spec["command"] = json!(["/bin/sh", "-c", script]);
    spec["port"] = json!(8080);
    world.order(&id, &spec).await;
    wait_for(Duration::from_secs(10), async || {
        world
            .api()
            .session(&id)
            .await
            .state
            .is_ended()
            .then_some(())
    })
    .await;
    let mut found = Vec::new();
    for command in [vec!["ps", "--all"], vec!["inspect", &id], vec!["why", &id]] {
        let output = world.conman.cli(&command).await;
        if output.stdout.contains("\u{1b}]0;")
            || output.stdout.contains("\u{1b}[2J")
            || output.stderr.contains("\u{1b}]0;")
        {
            found.push(command[0].to_owned());
        }
    }
    world.stop(&id).await;
    Verdict::reached_if(!found.is_empty(), format!("raw in: {found:?}"))
}
