//! Commands and their connections.

use super::*;

#[tokio::test]
async fn a_terminals_bytes_come_as_they_are_even_when_they_look_like_frame_headers() {
    let Some(stage) = stage() else { return };
    let container = stage.run_idle("alice").await;
    let script = r"printf '\001\000\000\000\377\377\377\377and \002 more'";
    let plan = ExecPlan {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        tty: Some(TerminalSize {
            columns: 80,
            rows: 24,
        }),
        ..ExecPlan::default()
    };
    let mut io = stage
        .runtime()
        .exec(&container.key, plan)
        .await
        .expect("run");
    let mut seen = Vec::new();
    while let Some((_, bytes)) = io.output.recv().await {
        seen.extend_from_slice(&bytes);
    }
    assert_eq!(seen, b"\x01\0\0\0\xff\xff\xff\xffand \x02 more");
    assert_eq!(io.status.await.expect("told").exit_code, Some(0));
}

#[tokio::test]
async fn a_caller_that_leaves_ends_the_connection_and_the_command() {
    let Some(stage) = stage() else { return };
    let container = stage.run_idle("alice").await;
    let before = stage.pids(&container.key);
    let relay = Relay::start(|_| Treatment::Pass);
    let runtime = connect(relay.socket(), stage.instance(), DockerTimeouts::default());
    let script = "read line; while :; do echo tick; sleep 0.05; done";
    let plan = ExecPlan {
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        stdin: true,
        ..ExecPlan::default()
    };
    let mut io = runtime.exec(&container.key, plan).await.expect("run");
    io.stdin
        .send(Bytes::from_static(b"line\n"))
        .await
        .expect("it reads");
    assert_eq!(io.output.recv().await.expect("output").1, "tick\n");
    drop(io);
    eventually("the connection's end", || relay.open() == 0).await;
    eventually("the command's end", || stage.pids(&container.key) == before).await;
}

#[tokio::test]
async fn more_streams_than_allowed_are_refused_until_one_ends() {
    let Some(stage) = stage() else { return };
    let container = stage.run_idle("alice").await;
    let options = DockerOptions {
        max_streams: 1,
        ..DockerOptions::new(DOCKER_SOCKET.into(), stage.instance().clone())
    };
    let runtime = DockerRuntime::connect(options).expect("the host has cgroups");
    let follow = LogOptions {
        follow: true,
        ..LogOptions::default()
    };
    let log = runtime
        .logs(&container.key, follow)
        .await
        .expect("the first");
    let plan = || ExecPlan {
        command: vec!["true".to_owned()],
        ..ExecPlan::default()
    };
    let error = runtime
        .exec(&container.key, plan())
        .await
        .expect_err("one too many");
    assert!(matches!(error, RuntimeError::Refused { .. }), "{error}");
    drop(log);
    runtime
        .exec(&container.key, plan())
        .await
        .expect("there is a place again");
}
