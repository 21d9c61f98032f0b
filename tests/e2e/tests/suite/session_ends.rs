//! How sessions are stopped, and what they say about their end, native and Docker's.

use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_e2e::{
    Api, BUSYBOX, Builder, Conman, Docker, ROOT, docker_shared, eventually, eventually_some, native,
};
use conman_proto::{EndCause, EnsureResponse, ExecResult, Session, SessionState};
use http::StatusCode;
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// A native session's root in files of binds.
const BINDS_ROOT: u32 = 2_130_706_432;

/// Each runtime's image.
const RUNTIMES: [(&str, &str); 2] = [("native", ROOT), ("docker", BUSYBOX)];

fn template(runtime: &str) -> &'static str {
    match runtime {
        "docker" => "tiny",
        _ => "idle",
    }
}

async fn ended(api: &Api, id: &str) -> Session {
    eventually_some("it has ended", PATIENCE, async || {
        let session = api.session(id).await;
        session.state.is_ended().then_some(session)
    })
    .await
}

#[tokio::test]
async fn a_program_that_memory_ran_out_for_says_so() {
    let Some(native) = native() else { return };
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (runtime, _) in RUNTIMES {
        // Keeps what it reads, as it looks for the last lines. An end before it runs would fail its start.
        let program = "until [ -e /go ]; do sleep 0.05; done; exec tail /dev/zero";
        let spec = json!({"template": template(runtime), "command": ["sh", "-c", program],
            "memory_bytes": 32 << 20});
        api.ensure(runtime, &spec).await;
        let go = json!({"command": ["touch", "/go"]});
        // Its end may overtake the answer.
        let _ = api.post(&format!("/v1/sessions/{runtime}/exec"), &go).await;
        let session = ended(&api, runtime).await;
        let cause = session.end.as_ref().map(|end| end.cause);
        assert_eq!(
            (cause, session.exit_code, session.state),
            (Some(EndCause::OutOfMemory), Some(137), SessionState::Failed),
            "{runtime}: {session:?}"
        );
        let why = conman.cli(&["why", runtime]).await.success().to_owned();
        assert!(why.contains("memory ran out"), "{why}");
        let events = api
            .get(&format!(
                "/v1/events?session={runtime}&follow=false&limit=1000"
            ))
            .await
            .text();
        assert!(events.contains("out_of_memory"), "{events}");
    }
}

#[tokio::test]
async fn a_command_that_memory_ran_out_for_says_so_and_its_session_continues() {
    let Some(native) = native() else { return };
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (runtime, _) in RUNTIMES {
        let spec = json!({"template": template(runtime), "memory_bytes": 32 << 20});
        api.ensure(runtime, &spec).await;
        let path = format!("/v1/sessions/{runtime}/exec");
        let hog = json!({"command": ["tail", "/dev/zero"]});
        let result: ExecResult = api.post(&path, &hog).await.expect(StatusCode::OK);
        assert!(
            result.exit_code == 137 && result.out_of_memory,
            "{runtime}: {result:?}"
        );
        let shown = conman.cli(&["exec", runtime, "tail", "/dev/zero"]).await;
        assert_eq!(shown.code, Some(137), "{shown:?}");
        assert!(shown.stderr.contains("memory ran out"), "{shown:?}");
        // A kill is none.
        let killed = json!({"command": ["sh", "-c", "kill -9 $$"]});
        let result: ExecResult = api.post(&path, &killed).await.expect(StatusCode::OK);
        assert!(
            result.exit_code == 137 && !result.out_of_memory,
            "{result:?}"
        );

        eventually("it is noticed", PATIENCE, async || {
            api.session(runtime).await.oom_kills >= 2
        })
        .await;
        assert_eq!(api.session(runtime).await.state, SessionState::Running);
        eventually("its events say so", PATIENCE, async || {
            let path = format!("/v1/events?session={runtime}&follow=false&limit=1000");
            let events = api.get(&path).await.text();
            events.contains("session_out_of_memory")
        })
        .await;
    }
    eventually("all are counted", PATIENCE, async || {
        let metrics = conman.admin().get("/metrics").await.text();
        let counted = metrics.lines().find_map(|line| {
            line.strip_prefix("conman_session_oom_kills_total ")?
                .parse::<u64>()
                .ok()
        });
        counted >= Some(4)
    })
    .await;
}

#[tokio::test]
async fn an_operators_kill_is_the_cause_of_the_end() {
    let Some(native) = native() else { return };
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (runtime, _) in RUNTIMES {
        api.ensure(runtime, &json!({"template": template(runtime)}))
            .await;
        conman.cli(&["kill", runtime]).await.success();
        ended(&api, runtime).await;
    }
    // Kept after the end.
    conman.restart_after_crash().await;
    let api = conman.api();
    for (runtime, _) in RUNTIMES {
        let session = api.session(runtime).await;
        let cause = session.end.as_ref().map(|end| end.cause);
        assert_eq!(
            (cause, session.exit_code, session.state),
            (Some(EndCause::Killed), Some(137), SessionState::Stopped),
            "{runtime}: {session:?}"
        );
        let reason = session.reason.expect("a reason");
        assert!(reason.contains("SIGKILL"), "{reason}");
    }
}

/// A conman whose sessions write to a directory of the host's.
async fn with_files(builder: Builder, root: &Path) -> Option<(Conman, Docker)> {
    let native = native()?;
    let docker = docker_shared().await?;
    let allow = format!("allow = [\"{}\"]", root.display());
    let builder = builder.set("binds", &allow);
    Some((builder.start_both(&native, &docker).await, docker))
}

/// Writes `saved` when it gets the signal, and `begun` before.
fn saves_on(runtime: &str, image: &str, signal: &str, directory: &Path) -> Value {
    let script = format!(
        "trap 'echo saved >/out/saved; exit 0' {signal}; touch /out/begun; \
         while :; do sleep 0.05; done"
    );
    let template = template(runtime);
    json!({"template": template, "image": image, "command": ["sh", "-c", script],
        "stop_grace_ms": 60_000, "binds": [format!("{}:/out", directory.display())]})
}

/// An empty directory of the runtime's sessions' root.
fn empty(root: &Path, runtime: &str) -> PathBuf {
    let directory = root.join(runtime);
    std::fs::create_dir_all(&directory).expect("made");
    if runtime == "native" {
        chown(&directory, Some(BINDS_ROOT), Some(BINDS_ROOT)).expect("given");
    }
    for file in ["begun", "saved"] {
        let _ = std::fs::remove_file(directory.join(file));
    }
    directory
}

#[tokio::test]
async fn a_session_is_asked_to_end_before_it_is_killed() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().canonicalize().expect("it is there");
    let Some((conman, _docker)) = with_files(Conman::builder(), &root).await else {
        return;
    };
    let api = conman.api();
    for (runtime, image) in RUNTIMES {
        let out = empty(&root, runtime);
        let begun = async || {
            eventually("its trap is set", PATIENCE, async || {
                out.join("begun").exists()
            })
            .await;
        };
        let spec = saves_on(runtime, image, "TERM", &out);
        api.ensure(runtime, &spec).await;
        begun().await;
        let report = api.stop(runtime).await;
        assert_eq!(report.state, SessionState::Stopped, "{report:?}");
        assert!(out.join("saved").exists(), "{runtime}: after DELETE");
        let end = api.session(runtime).await.end.map(|end| end.cause);
        assert_eq!(end, Some(EndCause::Deleted));

        empty(&root, runtime);
        api.ensure(runtime, &spec).await;
        begun().await;
        std::fs::remove_file(out.join("begun")).expect("removed");
        let restart = format!("/v1/sessions/{runtime}/restart");
        let again: EnsureResponse = api
            .post(&restart, &json!(null))
            .await
            .expect(StatusCode::OK);
        assert_eq!(again.session.state, SessionState::Running);
        assert!(out.join("saved").exists(), "{runtime}: after a restart");

        begun().await;
        empty(&root, runtime);
        conman.cli(&["rm", "--force", runtime]).await.success();
        assert!(!out.join("saved").exists(), "{runtime}: after rm --force");

        // Also at the end of its idle time, and by a real-time signal.
        empty(&root, runtime);
        let mut spec = saves_on(runtime, image, "37", &out);
        spec["stop_signal"] = json!("SIGRTMIN+3");
        api.ensure(runtime, &spec).await;
        begun().await;
        let update = ["update", runtime, "--idle-timeout", "1s"];
        conman.cli(&update).await.success();
        let session = ended(&api, runtime).await;
        let end = session.end.map(|end| end.cause);
        assert_eq!(end, Some(EndCause::Idle), "{runtime}");
        assert!(out.join("saved").exists(), "{runtime}: after its idle time");

        empty(&root, runtime);
        api.ensure(runtime, &spec).await;
        begun().await;
        let kill = ["kill", runtime, "--signal", "RTMIN+3"];
        conman.cli(&kill).await.success();
        let session = ended(&api, runtime).await;
        assert_eq!(session.exit_code, Some(0), "{runtime}: {session:?}");
    }
}

#[tokio::test]
async fn the_signal_of_the_image_is_sent_as_by_docker_engine() {
    const IMAGE: &str = "conman-test/stop-signal:1";
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path().canonicalize().expect("it is there");
    let Some((conman, docker)) = with_files(Conman::builder(), &root).await else {
        return;
    };
    let api = conman.api();
    // The classic builder, which needs no plugin.
    let file = format!("FROM {BUSYBOX}\nSTOPSIGNAL SIGUSR1\n");
    let context = root.join("context");
    std::fs::create_dir(&context).expect("made");
    std::fs::write(context.join("Dockerfile"), file).expect("written");
    let built = tokio::process::Command::new("docker")
        .args(["build", "--quiet", "--tag", IMAGE])
        .arg(&context)
        .env("DOCKER_BUILDKIT", "0")
        .output();
    let built = built.await.expect("docker runs");
    assert!(built.status.success(), "{built:?}");
    let archive = root.join("image.tar");
    let file = archive.to_string_lossy();
    docker.run(&["save", "--output", &*file, IMAGE]).await;
    conman
        .cli(&["image", "import", &*file, IMAGE])
        .await
        .success();

    let script = "trap 'exit 5' USR1; trap '' TERM; touch /begun; while :; do sleep 0.05; done";
    let reference = docker
        .run(&["run", "--detach", IMAGE, "sh", "-c", script])
        .await;
    let reference = reference.trim();
    let begun = "until [ -e /begun ]; do sleep 0.05; done";
    docker.run(&["exec", reference, "sh", "-c", begun]).await;
    docker.run(&["stop", "--time", "60", reference]).await;
    let code = docker.inspect(reference, "{{.State.ExitCode}}").await;
    docker.run(&["rm", reference]).await;
    assert_eq!(code, "5", "Docker Engine sends it");

    for (runtime, _) in RUNTIMES {
        let out = empty(&root, runtime);
        let spec = saves_on(runtime, IMAGE, "USR1", &out);
        api.ensure(runtime, &spec).await;
        eventually("its trap is set", PATIENCE, async || {
            out.join("begun").exists()
        })
        .await;
        api.stop(runtime).await;
        assert!(out.join("saved").exists(), "{runtime}");
    }
    // conman removes its containers in the background.
    eventually("the image is removed", PATIENCE, async || {
        let mut remove = tokio::process::Command::new("docker");
        let removed = remove.args(["rmi", IMAGE]).output().await;
        removed.expect("docker runs").status.success()
    })
    .await;
}
