//! A daemon that hangs, is gone, loses answers, or believes what is not so.

use super::*;

const SHORT: Duration = Duration::from_millis(200);

fn short() -> DockerTimeouts {
    DockerTimeouts {
        info: SHORT,
        create: SHORT,
        start: SHORT,
        inspect: SHORT,
        list: SHORT,
        remove: SHORT,
        exec: SHORT,
    }
}

/// The error of every call about containers.
async fn errors(runtime: &DockerRuntime, stage: &Stage) -> Vec<(&'static str, RuntimeError)> {
    let plan = stage.plan("alice", &["true"]);
    let key = plan.key.clone();
    let command = ExecPlan {
        command: vec!["true".to_owned()],
        ..ExecPlan::default()
    };
    vec![
        ("create", runtime.create(&plan).await.expect_err("trouble")),
        ("start", runtime.start(&key).await.expect_err("trouble")),
        ("find", runtime.find(&key).await.expect_err("trouble")),
        ("list", runtime.list().await.expect_err("trouble")),
        (
            "exec",
            runtime.exec(&key, command).await.expect_err("trouble"),
        ),
        (
            "logs",
            runtime
                .logs(&key, LogOptions::default())
                .await
                .err()
                .expect("trouble"),
        ),
        (
            "remove",
            runtime.remove(&[key]).await.remove(0).expect_err("trouble"),
        ),
    ]
}

#[tokio::test]
async fn a_daemon_that_hangs_costs_its_callers_their_patience_and_nothing_that_stays() {
    let Some(stage) = stage() else { return };
    for swallowed in ["/version", "/info", "/containers"] {
        let relay = Relay::start(move |request| {
            if request.contains(swallowed) {
                Treatment::Swallow
            } else {
                Treatment::Pass
            }
        });
        let runtime = connect(relay.socket(), stage.instance(), short());
        if swallowed != "/containers" {
            let error = runtime.info().await.expect_err("trouble");
            assert!(error.is_ambiguous(), "{swallowed}: {error}");
        }
        for (call, error) in errors(&runtime, &stage).await {
            assert!(
                matches!(
                    error,
                    RuntimeError::TimedOut { .. } | RuntimeError::Unavailable { .. }
                ),
                "{swallowed}: {call}: {error}"
            );
            assert!(error.is_ambiguous(), "{error}");
        }
        eventually("the end of every connection", || relay.open() == 0).await;
    }
}

#[tokio::test]
async fn a_daemon_that_is_not_there_is_told_with_the_remedy_and_found_once_it_comes() {
    let Some(stage) = stage() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    // What is not there refuses at once; what is there may take its time.
    let patient = DockerTimeouts {
        info: PATIENCE,
        ..short()
    };
    let runtime = connect(socket_in(dir.path()), stage.instance(), patient);
    let of_info = ("info", runtime.info().await.expect_err("trouble"));
    for (call, error) in errors(&runtime, &stage).await.into_iter().chain([of_info]) {
        match error {
            RuntimeError::Unavailable { reason, .. } => {
                assert!(reason.contains("start Docker"), "{call}: {reason}");
            }
            other => panic!("{call}: {other}"),
        }
    }
    assert!(
        !stage.plan("alice", &[]).files_dir.exists(),
        "nothing can come of that create"
    );
    let relay = Relay::start_in(dir, |_| Treatment::Pass);
    let info = runtime.info().await.expect("it is there now");
    assert!(!info.version.is_empty());
    drop(relay);
}

#[tokio::test]
async fn a_container_that_docker_believes_to_run_is_removed_once_it_notices() {
    let Some(stage) = stage() else { return };
    let container = stage.run_idle("alice").await;
    container.kill();
    let refusals = AtomicUsize::new(0);
    let relay = Relay::start(move |request| {
        let early = || refusals.fetch_add(1, Ordering::SeqCst) < 3;
        if request.starts_with("DELETE") && early() {
            Treatment::Answer(409, "You cannot remove a running container")
        } else {
            Treatment::Pass
        }
    });
    let runtime = connect(relay.socket(), stage.instance(), DockerTimeouts::default());
    let removed = runtime.remove(std::slice::from_ref(&container.key)).await;
    assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    assert_eq!(stage.runtime().list().await.expect("answered"), []);
}

/// A container that has written a whole line and one without its newline, which dockerd writes once it notices the
/// end.
async fn with_unfinished_line(stage: &Stage) -> Running {
    let program = ["sh", "-c", "printf 'one\ntwo'; sleep 1000"];
    let container = stage.run(&stage.plan("alice", &program)).await;
    eventually("what follows the output", || {
        let names = stage.pids(&container.key).into_iter().map(|pid| {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            name.unwrap_or_default()
        });
        names.into_iter().any(|name| name == "sleep\n")
    })
    .await;
    container
}

/// The rest of a log's text.
async fn text(log: impl TryStreamExt<Ok = LogChunk, Error = RuntimeError>) -> String {
    let chunks: Vec<_> = log.try_collect().await.expect("readable");
    let bytes = chunks.into_iter().flat_map(|chunk| chunk.bytes).collect();
    String::from_utf8(bytes).expect("text")
}

#[tokio::test]
async fn the_log_is_kept_whole_though_docker_notices_the_end_late() {
    let Some(stage) = stage() else { return };
    let container = with_unfinished_line(&stage).await;
    // dockerd learns of the end from this one.
    let parent = process_status(container.pid, "PPid");
    let parent = Pid::from_raw(parent.parse().expect("a pid"));
    kill(parent, Signal::SIGSTOP).expect("stopped");
    container.kill();

    let looks = Arc::new(Semaphore::new(0));
    let relay = Relay::start({
        let looks = Arc::clone(&looks);
        move |request| {
            if request.contains("/containers/json") {
                looks.add_permits(1);
            }
            Treatment::Pass
        }
    });
    let kept = tempfile::tempdir().expect("a directory");
    let options = DockerOptions {
        kept_logs: Some((kept.path().join("kept"), KeptLogLimits::default())),
        ..DockerOptions::new(relay.socket(), stage.instance().clone())
    };
    let runtime = DockerRuntime::connect(options).expect("the host has cgroups");
    let keys = [container.key.clone()];
    let continues = async {
        // It has found the container running once, and waits.
        let twice = looks.acquire_many(2).await;
        twice.expect("it is never closed").forget();
        kill(parent, Signal::SIGCONT).expect("continued");
    };
    let (removed, ()) = tokio::join!(runtime.remove(&keys), continues);
    assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    let log = runtime.logs(&container.key, LogOptions::default()).await;
    assert_eq!(text(log.expect("it is kept")).await, "one\ntwo");
}

#[tokio::test]
async fn a_followed_log_is_whole_though_docker_breaks_it_off() {
    let Some(stage) = stage() else { return };
    let container = with_unfinished_line(&stage).await;
    let relay = Relay::start(|request| match request.contains("follow=true") {
        true => Treatment::CutAnswer("one\n"),
        false => Treatment::Pass,
    });
    let runtime = connect(relay.socket(), stage.instance(), DockerTimeouts::default());
    let follow = LogOptions {
        follow: true,
        ..LogOptions::default()
    };
    let log = runtime.logs(&container.key, follow).await.expect("a log");
    container.kill();
    assert_eq!(text(log).await, "one\ntwo");
}

#[tokio::test]
async fn a_container_that_docker_believes_to_run_for_ever_is_reported_and_can_be_tried_again() {
    let Some(stage) = stage() else { return };
    let container = stage.run_idle("alice").await;
    let never = stage.plan("nobody", &[]).key;
    container.kill();
    let relay = Relay::start(|request| {
        if request.starts_with("DELETE") {
            Treatment::Answer(409, "You cannot remove a running container")
        } else {
            Treatment::Pass
        }
    });
    let timeouts = DockerTimeouts {
        remove: Duration::from_secs(3),
        ..DockerTimeouts::default()
    };
    let runtime = connect(relay.socket(), stage.instance(), timeouts);
    let keys = [container.key.clone(), never];
    match &runtime.remove(&keys).await[..] {
        [Err(RuntimeError::Refused { reason, .. }), Ok(())] => {
            assert!(reason.contains("running container"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    let again = stage.runtime().remove(&keys).await;
    assert!(matches!(again[..], [Ok(()), Ok(())]), "{again:?}");
    assert!(!stage.plan("alice", &[]).files_dir.exists());
}

#[tokio::test]
async fn a_create_whose_answer_is_lost_keeps_its_files_and_is_removed_with_them() {
    let Some(stage) = stage() else { return };
    let relay = Relay::start(|request| {
        if request.contains("/containers/create") {
            Treatment::LoseAnswer
        } else {
            Treatment::Pass
        }
    });
    let timeouts = DockerTimeouts {
        create: Duration::from_millis(500),
        ..DockerTimeouts::default()
    };
    let runtime = connect(relay.socket(), stage.instance(), timeouts);
    let plan = stage.plan("alice", &["sleep", "1000"]);
    let error = runtime.create(&plan).await.expect_err("no answer");
    assert!(matches!(error, RuntimeError::TimedOut { .. }), "{error}");
    assert!(
        plan.files_dir.exists(),
        "the container that was made after all needs them"
    );
    let found = async {
        while stage
            .runtime()
            .find(&plan.key)
            .await
            .expect("answered")
            .is_none()
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, found)
        .await
        .expect("it comes to exist");
    // By a runtime that did not create it: the container's label says where the files are.
    let removed = stage
        .runtime()
        .remove(std::slice::from_ref(&plan.key))
        .await;
    assert!(matches!(removed[..], [Ok(())]), "{removed:?}");
    assert!(!plan.files_dir.exists());
}

#[tokio::test]
async fn what_a_daemon_in_trouble_says_of_an_image_counts_as_nothing() {
    let Some(stage) = stage() else { return };
    for treatment in [
        Treatment::Swallow,
        Treatment::Answer(500, "no such image, or something like that"),
        Treatment::Answer(404, "page not found"),
    ] {
        let relay = Relay::start(move |request| match request.contains("/images/") {
            true => treatment.clone(),
            false => Treatment::Pass,
        });
        let runtime = connect(relay.socket(), stage.instance(), short());
        let lacks = runtime.lacks_image("conman-test:no-such-tag").await;
        assert!(lacks.is_none(), "{lacks:?}");
    }
    let runtime = connect("/nowhere/docker.sock".into(), stage.instance(), short());
    assert!(
        runtime
            .lacks_image("conman-test:no-such-tag")
            .await
            .is_none()
    );
}
