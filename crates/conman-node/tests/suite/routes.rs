//! Ways into sessions: connections that are held, commands, files, logs.

use std::sync::Arc;
use std::time::Duration;

use crate::stage::{Stage, eventually, idle, program, session, web, web_from};
use conman_node::{AccessError, RouteError};
use conman_proto::{SessionRequest, SessionState};
use conman_runtime::{AttachOptions, ExecPlan, FilesOrder, LogOptions, files_streams};
use conman_testkit::{Fault, Operation};
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

#[test]
fn a_connection_reaches_the_program_inside_its_namespace() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &web());
    let route = daemon
        .run(daemon.node.access().route(&session("alice"), false))
        .expect("runs");
    let answer = daemon.run(async {
        let mut stream = route.connect(route.port).await.expect("connected");
        stream
            .write_all(b"GET /hostname HTTP/1.0\r\n\r\n")
            .await
            .expect("written");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("read");
        answer
    });
    assert!(
        answer.contains("200 OK") && answer.ends_with("alice\n"),
        "{answer}"
    );
}

#[test]
fn a_connection_to_a_starting_session_is_held_and_then_served() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon
        .faults()
        .next(Operation::Start, 1, Fault::Delay(Duration::from_secs(3)));
    daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("alice"), &web(), false),
        )
        .expect("begun");
    assert_eq!(daemon.show("alice").state, SessionState::Starting);
    let route = daemon
        .run(daemon.node.access().route(&session("alice"), false))
        .expect("served");
    assert_eq!(route.generation, daemon.show("alice").generation);
}

#[test]
fn held_connections_are_bounded_for_a_session_and_in_all() {
    let stage = Stage::new();
    let mut options = stage.options();
    options.limits.max_held_per_session = 2;
    options.limits.max_held = 3;
    let daemon = stage.boot_with(options);
    daemon.faults().hang();
    for id in ["alice", "bob"] {
        daemon
            .run(daemon.node.sessions().ensure(&session(id), &web(), false))
            .expect("begun");
    }
    let mut held = Vec::new();
    // One more than there is room for: the first to be answered is the one that was refused.
    let mut crowd = |id: &'static str, size: usize, words: &str| {
        let mut waiting: Vec<_> = (0..size)
            .map(|_| {
                let node = Arc::clone(&daemon.node);
                daemon.spawn(async move { node.access().route(&session(id), false).await })
            })
            .collect();
        let refused = eventually("a refusal", || {
            waiting.iter().position(JoinHandle::is_finished)
        });
        let error = daemon.run(waiting.swap_remove(refused)).expect("no panic");
        let error = error.expect_err("it was refused");
        assert!(
            matches!(error, RouteError::TooManyWaiting { .. }),
            "{error:?}"
        );
        assert!(error.to_string().contains(words), "{error}");
        held.extend(waiting);
    };
    crowd("alice", 3, "2 connections already wait for session alice");
    crowd(
        "bob",
        2,
        "3 connections already wait for sessions of this node",
    );
    daemon.faults().resume();
    for route in held {
        daemon
            .run(route)
            .expect("no panic")
            .expect("served in the end");
    }
}

#[test]
fn a_connection_starts_a_session_only_if_its_template_and_the_caller_may() {
    let stage = Stage::new();
    let daemon = stage.boot();
    for (id, template) in [("alice", "web"), ("bob", "manual")] {
        daemon.start(id, &web_from(template));
        daemon
            .run(daemon.node.sessions().stop(&session(id), "deleted"))
            .expect("stopped");
    }
    let route =
        |id: &str, may_start| daemon.run(daemon.node.access().route(&session(id), may_start));
    for (id, may_start) in [("alice", false), ("bob", true)] {
        let error = route(id, may_start).expect_err("refused");
        assert!(matches!(error, RouteError::Ended { .. }), "{error:?}");
        assert!(error.to_string().contains("PUT /v1/sessions"), "{error}");
    }
    let before = daemon.show("alice").generation;
    assert!(route("alice", true).expect("started").generation > before);
}

#[test]
fn what_cannot_be_reached_is_refused_with_its_reason() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("portless", &idle());
    let route = |id: &str| {
        daemon
            .run(daemon.node.access().route(&session(id), true))
            .expect_err("refused")
    };
    assert!(matches!(route("portless"), RouteError::NoPort { .. }));
    assert!(matches!(route("nobody"), RouteError::NoSuchSession { .. }));

    daemon.faults().next(
        Operation::Start,
        1,
        Fault::Refuse("no space left".to_owned()),
    );
    daemon
        .faults()
        .always(Operation::Create, Fault::Delay(Duration::from_secs(3)));
    daemon
        .run(
            daemon
                .node
                .sessions()
                .ensure(&session("broken"), &web(), false),
        )
        .expect("begun");
    let error = route("broken");
    let RouteError::NotStarted { source, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(source.to_string().contains("no space left"), "{source}");
}

#[test]
fn a_command_runs_in_a_session_and_its_output_and_exit_code_come_back() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &idle());
    let plan = ExecPlan {
        command: ["sh", "-c", "hostname; exit 5"].map(str::to_owned).to_vec(),
        ..ExecPlan::default()
    };
    let (output, status) = daemon.run(async {
        let mut io = daemon
            .node
            .access()
            .exec(&session("alice"), plan)
            .await
            .expect("runs");
        drop(io.stdin);
        let mut output = Vec::new();
        while let Some((_, bytes)) = io.output.recv().await {
            output.extend(bytes);
        }
        (output, io.status.await.expect("ended"))
    });
    assert_eq!((&output[..], status.exit_code), (&b"alice\n"[..], Some(5)));
}

#[test]
fn an_order_about_files_that_dies_with_its_session_has_the_reason_of_that() {
    let stage = Stage::new();
    let daemon = stage.boot_with_terminals();
    daemon.start("alice", &idle());
    let id = session("alice");
    let order = FilesOrder::List {
        path: "/".to_owned(),
    };
    let (io, guard) = daemon
        .run(daemon.node.access().files(&id, order, None))
        .expect("it begins");
    let (_input, mut output) = files_streams(io);
    daemon
        .run(daemon.node.sessions().stop(&id, "deleted"))
        .expect("stopped");
    assert_eq!(daemon.run(output.reply()), None);
    let error = daemon.run(guard.no_result());
    let AccessError::KilledWithSession { why, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!(why, "the session ended: deleted");
}

#[test]
fn a_sessions_log_is_read_while_its_container_exists() {
    let stage = Stage::new();
    let daemon = stage.boot();
    daemon.start("alice", &program("echo hello; exec sleep 1000"));
    let log = eventually("the log", || {
        daemon.run(async {
            let logs = daemon
                .node
                .access()
                .logs(&session("alice"), LogOptions::default())
                .await;
            let chunks: Vec<_> = logs.expect("a log").collect().await;
            let text: Vec<u8> = chunks
                .into_iter()
                .flat_map(|chunk| chunk.expect("read").bytes)
                .collect();
            (!text.is_empty()).then_some(text)
        })
    });
    assert_eq!(log, b"hello\n");

    daemon
        .run(daemon.node.sessions().stop(&session("alice"), "deleted"))
        .expect("stopped");
    eventually("the log to be gone with its container", || {
        let logs = daemon.run(
            daemon
                .node
                .access()
                .logs(&session("alice"), LogOptions::default()),
        );
        matches!(logs, Err(AccessError::NotKept { .. })).then_some(())
    });
    let error = daemon.run(
        daemon
            .node
            .access()
            .exec(&session("alice"), ExecPlan::default()),
    );
    assert!(matches!(error, Err(AccessError::NotRunning { .. })));
}

#[test]
fn who_follows_what_a_terminal_shows_has_a_place_among_those_who_are_attached() {
    let stage = Stage::new();
    let daemon = stage.boot_with_terminals();
    let with_terminal = SessionRequest {
        tty: Some(true),
        ..idle()
    };
    daemon.start("alice", &with_terminal);
    let id = session("alice");
    let logs = |follow| {
        let options = LogOptions {
            follow,
            ..LogOptions::default()
        };
        daemon.run(daemon.node.access().logs(&id, options))
    };
    let attach = || {
        let options = AttachOptions::default();
        daemon.run(daemon.node.access().attach(&id, None, options))
    };
    let attached = attach().expect("there is room");
    let mut followers = Vec::new();
    let most = loop {
        match logs(true) {
            Ok(log) => followers.push(log),
            Err(AccessError::TooManyAttached { limit, .. }) => break limit,
            Err(error) => panic!("{error}"),
        }
    };
    assert_eq!(followers.len() + 1, most);
    let refused = attach().map(|_| ()).expect_err("no place is left");
    assert!(
        matches!(refused, AccessError::TooManyAttached { .. }),
        "{refused}"
    );
    // What it showed so far can be read all the same.
    drop(logs(false).expect("it is read at once"));
    drop(attached);
    followers.push(logs(true).expect("there is room again"));
    followers.pop();
    drop(attach().expect("and again"));
}
