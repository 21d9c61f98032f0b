//! Sessions with an OCI runtime of the configuration, whose processes the host sees.

use std::path::Path;
use std::time::Duration;

use conman_e2e::{Conman, Native, ROOT, eventually, lacks, native};
use conman_proto::{ExecResult, ProcessList};
use http::StatusCode;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

const CRUN: &str = "/usr/bin/crun";

/// A node with a template that `crun` runs, if the machine has it.
async fn start(native: &Native) -> Option<Conman> {
    if !Path::new(CRUN).exists() {
        lacks("crun is missing (package crun)");
        return None;
    }
    let toml = format!(
        "[runtimes.crun]\nkind = \"oci\"\npath = \"{CRUN}\"\nargs = [\"--cgroup-manager=disabled\"]\n\
         [templates.tools]\nruntime = \"crun\"\nimage = \"{ROOT}\"\nstop_grace_ms = 20000\n"
    );
    Some(Conman::builder().toml(&toml).start_native(native).await)
}

#[tokio::test]
async fn a_session_of_an_oci_runtime_is_served_like_others_and_survives_the_daemon() {
    let Some(native) = native() else { return };
    let Some(mut conman) = start(&native).await else {
        return;
    };
    let serve = "trap 'echo stopped; exit 4' TERM; echo page >/tmp/index.html; \
                 httpd -f -p 8000 -h /tmp & wait";
    let spec = json!({"template": "tools", "port": 8000, "command": ["sh", "-c", serve]});
    let made = conman.api().ensure("s", &spec).await;
    assert_eq!(made.session.runtime.to_string(), "crun");
    for round in 0..2 {
        let api = conman.api();
        let page = conman.sessions().get("/s/s/index.html").await;
        assert_eq!(
            (page.status, &*page.text()),
            (StatusCode::OK, "page\n"),
            "{round}"
        );
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
        // The session's processes, and not those of the runtime.
        let listed: ProcessList = api
            .get("/v1/sessions/s/processes")
            .await
            .expect(StatusCode::OK);
        let first = &listed.processes[0];
        assert_eq!((first.pid, &*first.command[0]), (1, "sh"), "{listed:?}");
        let runs_crun = |one: &conman_proto::SessionProcess| one.command[0].contains("runtime");
        assert!(!listed.processes.iter().any(runs_crun), "{listed:?}");
        if round == 0 {
            conman.restart_after_crash().await;
        }
    }
    let api = conman.api();
    api.stop("s").await;
    // The trap has run.
    let log = api.get("/v1/sessions/s/logs").await;
    assert!(log.text().contains("stopped"), "{}", log.text());
    assert!(conman.processes().is_empty(), "{:?}", conman.processes());
}

#[tokio::test]
async fn what_an_oci_runtime_shows_its_session_is_the_sessions() {
    let Some(native) = native() else { return };
    let Some(conman) = start(&native).await else {
        return;
    };
    let api = conman.api();
    let spec = json!({"template": "tools", "command": ["sleep", "1000"]});
    api.ensure("s", &spec).await;
    let shell = async |script: &str| -> ExecResult {
        let command = json!({"command": ["sh", "-c", script]});
        let answer = api.post("/v1/sessions/s/exec", &command).await;
        answer.expect(StatusCode::OK)
    };
    // Neither the runtime nor its container.
    for path in [
        "/runtime",
        "/config.json",
        "/state",
        "/rootfs",
        "/usr/lib/x86_64-linux-gnu",
    ] {
        let seen = shell(&format!("ls -d {path} /proc/1/root{path}")).await;
        assert_ne!(seen.exit_code, 0, "{path}: {seen:?}");
        assert_eq!(seen.stdout, "", "{path}");
    }
    let status = shell("cat /proc/1/status /proc/self/status").await.stdout;
    let has = |line: &str| status.matches(line).count();
    assert_eq!(has("NoNewPrivs:\t1\n"), 2, "{status}");
    assert_eq!(has("Seccomp:\t2\n"), 2, "{status}");
    // The nine capabilities of a native session.
    assert_eq!(has("CapEff:\t00000000000404fb\n"), 2, "{status}");
    assert_eq!(has("CapBnd:\t00000000000404fb\n"), 2, "{status}");
    let refused = shell("unshare -U true").await;
    assert!(
        refused.stderr.contains("not permitted"),
        "{}",
        refused.stderr
    );
    let written = shell("echo 1 >/proc/sys/kernel/hostname; echo x >/sys/fs/cgroup/x").await;
    assert_eq!(
        written.stderr.matches("can't create").count(),
        2,
        "{written:?}"
    );
}

#[tokio::test]
async fn what_an_oci_runtime_cannot_do_is_refused_and_one_that_is_missing_is_named() {
    let Some(native) = native() else { return };
    let toml = format!(
        "[runtimes.other]\nkind = \"oci\"\npath = \"/no/such/runtime\"\n\
         [templates.tools]\nruntime = \"other\"\nimage = \"{ROOT}\"\n"
    );
    let conman = Conman::builder().toml(&toml).start_native(&native).await;
    let spec = json!({"template": "tools", "command": ["true"], "preempt_signal": "SIGUSR1"});
    let refused = conman.api().put("/v1/sessions/s", &spec).await;
    assert!(
        refused.text().contains("the other runtime cannot"),
        "{}",
        refused.text()
    );
    let spec = json!({"template": "tools", "command": ["sleep", "1000"]});
    let refused = conman.api().put("/v1/sessions/s", &spec).await;
    assert!(
        refused.text().contains("/no/such/runtime"),
        "{}",
        refused.text()
    );
    // The node reports it before a session needs it.
    eventually("the node reports it", PATIENCE, async || {
        let nodes = conman.cli(&["nodes"]).await;
        nodes.stderr.contains("/no/such/runtime") && nodes.stderr.contains("other")
    })
    .await;
}
