//! Sessions with gVisor as their kernel, beside native ones on the same node.

use std::time::Duration;

use conman_e2e::{Conman, Native, ROOT, eventually, native};
use conman_observer::ProcEntry;
use conman_proto::{EndCause, ExecResult, SessionState};
use http::StatusCode;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// The command line of a process of the host.
fn command(process: &ProcEntry) -> String {
    std::fs::read_to_string(format!("/proc/{}/cmdline", process.pid)).unwrap_or_default()
}

/// The process of a session whose command line begins so.
fn process(conman: &Conman, name: &str) -> ProcEntry {
    let mut all = conman.processes().into_iter();
    all.find(|one| command(one).starts_with(name))
        .unwrap_or_else(|| panic!("no {name} runs"))
}

fn send(process: &ProcEntry, signal: Signal) {
    kill(Pid::from_raw(process.pid), signal).expect("sent");
}

async fn start(native: &Native) -> Conman {
    let runsc = std::env::var("CONMAN_RUNSC").unwrap_or("/usr/local/bin/runsc".to_owned());
    let toml = format!(
        "[runtimes.gvisor]\nkind = \"oci\"\npath = \"{runsc}\"\n\
         [templates.own-kernel]\nruntime = \"gvisor\"\nimage = \"{ROOT}\"\nstop_grace_ms = 20000\n"
    );
    Conman::builder().toml(&toml).start_native(native).await
}

#[tokio::test]
#[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
async fn a_session_with_its_own_kernel_is_served_like_others_and_survives_the_daemon() {
    let Some(native) = native() else { return };
    let mut conman = start(&native).await;
    let serve = "trap 'echo stopped; exit 4' TERM; echo page >/tmp/index.html; \
                 httpd -f -p 8000 -h /tmp & wait";
    let spec = json!({"template": "own-kernel", "port": 8000, "command": ["sh", "-c", serve]});
    conman.api().ensure("s", &spec).await;
    for round in 0..2 {
        let api = conman.api();
        let page = conman.sessions().get("/s/s/index.html").await;
        assert_eq!(
            (page.status, &*page.text()),
            (StatusCode::OK, "page\n"),
            "{round}"
        );
        let which = json!({"command": ["cat", "/proc/version"]});
        let which: ExecResult = api
            .post("/v1/sessions/s/exec", &which)
            .await
            .expect(StatusCode::OK);
        assert!(which.stdout.contains("gvisor"), "{which:?}");
        // What a client writes is there for the session, and the other way round.
        let file = conman.directory().join("file");
        std::fs::write(&file, format!("round {round}")).expect("written");
        let copied = conman
            .cli(&["cp", &file.to_string_lossy(), "s:/root/in"])
            .await;
        copied.success();
        let copy = json!({"command": ["cp", "/root/in", "/root/out"]});
        let copied: ExecResult = api
            .post("/v1/sessions/s/exec", &copy)
            .await
            .expect(StatusCode::OK);
        assert_eq!(copied.exit_code, 0, "{copied:?}");
        let fetched = conman
            .cli(&["cp", "s:/root/out", &file.to_string_lossy()])
            .await;
        fetched.success();
        let text = std::fs::read_to_string(&file).expect("fetched");
        assert_eq!(text, format!("round {round}"));
        if round == 0 {
            conman.restart_after_crash().await;
        }
    }
    let api = conman.api();
    // The kernel beside it is the host's.
    let spec = json!({"image": ROOT, "command": ["sleep", "1000"]});
    api.ensure("n", &spec).await;
    let which = json!({"command": ["cat", "/proc/version"]});
    let which: ExecResult = api
        .post("/v1/sessions/n/exec", &which)
        .await
        .expect(StatusCode::OK);
    assert!(!which.stdout.contains("gvisor"), "{which:?}");
    let listed = api.get("/v1/sessions/s/processes").await;
    assert_eq!(
        listed.status,
        StatusCode::UNPROCESSABLE_ENTITY,
        "{}",
        listed.text()
    );

    api.stop("s").await;
    // The trap has run.
    let log = api.get("/v1/sessions/s/logs").await;
    assert!(log.text().contains("stopped"), "{}", log.text());
}

#[tokio::test]
#[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
async fn a_kernel_that_is_missing_or_killed_is_said_and_leaves_nothing() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    let spec = json!({"template": "own-kernel", "command": ["sleep", "1000"]});
    api.ensure("s", &spec).await;
    // The sandbox: the process of the session that the host sees as such.
    send(&process(&conman, "runsc-sandbox"), Signal::SIGKILL);
    eventually("its end", PATIENCE, async || {
        api.session("s").await.state == SessionState::Failed
    })
    .await;
    let session = api.session("s").await;
    assert_eq!(session.end.map(|end| end.cause), Some(EndCause::Exited));
    eventually("nothing of it runs", PATIENCE, async || {
        let mut all = conman.processes().into_iter();
        !all.any(|one| command(&one).starts_with("runsc"))
    })
    .await;

    // A gofer that hangs delays no death.
    api.ensure("h", &spec).await;
    let gofer = process(&conman, "runsc-gofer");
    send(&gofer, Signal::SIGSTOP);
    conman.cli(&["rm", "--force", "h"]).await.success();
    let left = conman.processes();
    assert!(!left.iter().any(|one| one.pid == gofer.pid), "{left:?}");

    // Nor does a kernel that does not answer when it is asked to pass on the stop signal.
    let spec =
        json!({"template": "own-kernel", "command": ["sleep", "1000"], "stop_grace_ms": 100});
    api.ensure("w", &spec).await;
    send(&process(&conman, "runsc-sandbox"), Signal::SIGSTOP);
    api.stop("w").await;
    let ended = api.session("w").await;
    assert!(ended.state.is_ended(), "{ended:?}");

    let toml = format!(
        "[runtimes.gvisor]\nkind = \"oci\"\npath = \"/no/such/runsc\"\n\
         [templates.own-kernel]\nruntime = \"gvisor\"\nimage = \"{ROOT}\"\n"
    );
    let conman = Conman::builder().toml(&toml).start_native(&native).await;
    let refused = conman.api().put("/v1/sessions/s", &spec).await;
    assert!(
        refused.text().contains("/no/such/runsc"),
        "{}",
        refused.text()
    );
    // The node says so before anybody tries.
    eventually("the node reports it", PATIENCE, async || {
        let nodes = conman.cli(&["nodes"]).await;
        nodes.stderr.contains("/no/such/runsc") && nodes.stderr.contains("gvisor")
    })
    .await;
}

/// What a session's kernel says it is.
async fn kernel(conman: &Conman, id: &str) -> String {
    let which = json!({"command": ["cat", "/proc/version"]});
    let path = format!("/v1/sessions/{id}/exec");
    let which: ExecResult = conman
        .api()
        .post(&path, &which)
        .await
        .expect(StatusCode::OK);
    which.stdout
}

#[tokio::test]
#[ignore = "needs runsc: `cargo xtask acceptance gvisor`"]
async fn sessions_keep_their_kernel_when_their_template_gets_another_one() {
    let Some(native) = native() else { return };
    let mut conman = start(&native).await;
    let (own, hosts) = ("runtime = \"gvisor\"\n", "runtime = \"native\"\n");
    let config = conman.config_path();
    let set = |from: &str, to: &str| {
        let text = std::fs::read_to_string(&config).expect("read");
        assert!(text.contains(from), "{text}");
        std::fs::write(&config, text.replacen(from, to, 1)).expect("written");
    };
    let template = "[templates.own-kernel]\n";
    set(&format!("{template}{own}"), &format!("{template}{hosts}"));
    conman.restart_after_crash().await;
    let spec = json!({"template": "own-kernel", "command": ["sleep", "1000"]});
    conman.api().ensure("before", &spec).await;
    set(&format!("{template}{hosts}"), &format!("{template}{own}"));
    conman.restart_after_crash().await;
    conman.api().ensure("after", &spec).await;
    assert!(!kernel(&conman, "before").await.contains("gvisor"));
    assert!(kernel(&conman, "after").await.contains("gvisor"));
    // The one from before gets the new kernel at its next start.
    conman.api().stop("before").await;
    conman.api().ensure("before", &spec).await;
    assert!(kernel(&conman, "before").await.contains("gvisor"));
}
