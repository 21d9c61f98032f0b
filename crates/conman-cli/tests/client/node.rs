//! Commands about the node, tokens, and the story of a session.

use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::IntoResponse as _;
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::calls::Calls;
use crate::support::{Daemon, client, command, outcome, problem, session, with};

fn node() -> Value {
    json!({
        "name": "n1", "instance": "1a2b3c4d", "version": "9.8.7", "state": "live",
        "runtime": "docker", "runtime_error": null, "sessions_running": 3,
        "sessions_starting": 1, "sessions_stuck": 0, "max_sessions": 500, "connections": 12,
        "started_at": "2026-03-01T12:00:00Z",
    })
}

fn with_nodes(node: Value) -> Daemon {
    let own = node.clone();
    let show = move || async move { Json(own) };
    let list = move || async move { Json(json!({ "nodes": [node] })) };
    let routes = Router::new().route("/v1/nodes", get(list));
    Daemon::start(routes.route("/v1/nodes/self", get(show)))
}

#[tokio::test]
async fn nodes_of_a_fleet_are_listed_with_how_they_stand_and_what_they_have_to_do() {
    let fleet = |standing: &str| {
        json!({ "fleet": {
            "standing": standing, "draining": false, "announced_ago_ms": 61_500,
            "peer_url": "http://10.0.0.1:7702", "labels": {"pool": "gpu"},
            "load": {
                "cpu_pressure_percent": 12.4, "memory_available_bytes": 1_073_741_824_u64,
                "memory_total_bytes": 4_294_967_296_u64,
            },
        }})
    };
    let nothing = json!({
        "name": "n3", "version": "", "started_at": "1970-01-01T00:00:00Z", "fleet": {
            "standing": "fenced", "draining": false, "announced_ago_ms": null, "peer_url": null,
            "labels": {}, "load": null,
        },
    });
    let nodes = [
        with(node(), fleet("live")),
        with(with(node(), fleet("silent")), json!({ "name": "n2" })),
        with(node(), nothing),
    ];
    let list = move || async move { Json(json!({ "nodes": nodes })) };
    let daemon = Daemon::start(Router::new().route("/v1/nodes", get(list)));
    let outcome = daemon.run(&["nodes"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let rows: Vec<&str> = outcome.stdout.lines().skip(1).collect();
    for part in [
        "n1",
        "live",
        "1 min 1 s ago",
        "12 %",
        "1 GiB of 4 GiB",
        "9.8.7",
        "pool=gpu",
    ] {
        assert!(rows[0].contains(part), "{part}: {outcome:?}");
    }
    assert!(
        rows[1].starts_with("n2") && rows[1].contains("silent"),
        "{outcome:?}"
    );
    // Of one that has told nothing, nothing is made up.
    let words: Vec<&str> = rows[2].split_whitespace().collect();
    assert_eq!(words[..2], ["n3", "fenced"]);
    assert!(words[2..].iter().all(|word| *word == "-"), "{outcome:?}");
}

#[tokio::test]
async fn what_a_node_does_not_reach_and_what_does_not_answer_it_is_pointed_out() {
    let daemon = with_nodes(with(
        node(),
        json!({
            "unreached": ["n2", "n3"],
            "runtimes": [
                { "runtime": "native", "error": null, "answered_ago_ms": 900 },
                { "runtime": "docker", "error": null, "answered_ago_ms": 4_200 },
            ],
            "store": {
                "answered_ago_ms": 7_000, "round_trip_ms": 2_100,
                "warning": "a renewal in etcd took 2100 ms",
            },
            "fleet": {
                "standing": "live", "draining": false, "cut_off": true,
                "clock_ahead_ms": -86_400_000, "announced_ago_ms": 0, "peer_url": null,
                "labels": {}, "load": null,
            },
        }),
    ));
    let outcome = daemon.run(&["nodes"]).await;
    let row = outcome.stdout.lines().nth(1).expect("a row");
    for part in ["cut-off", "not 2 nodes", "etcd 7 s ago, docker 4 s ago"] {
        assert!(row.contains(part), "{part}: {row}");
    }
    assert!(!row.contains("shim"), "{row}");
    for part in [
        "n1 is cut off from most nodes",
        "does not reach: n2, n3",
        "the clock of n1 is 1 d behind the fleet's",
        "n1: a renewal in etcd took 2100 ms",
    ] {
        assert!(outcome.stderr.contains(part), "{part}: {outcome:?}");
    }
}

#[tokio::test]
async fn nodes_are_listed_and_one_that_cannot_start_sessions_is_pointed_out() {
    let daemon = with_nodes(with(
        node(),
        json!({
            "runtime_error": "docker does not answer",
            "runtimes": [
                { "runtime": "docker", "error": "docker does not answer" },
                { "runtime": "native", "error": "no user namespaces" },
            ],
        }),
    ));
    let outcome = daemon.run(&["nodes"]).await;
    assert_eq!(outcome.code, 0);
    let row = outcome.stdout.lines().nth(1).expect("a row");
    assert!(
        row.starts_with("n1") && row.contains("live") && row.contains("500"),
        "{row}"
    );
    assert!(
        outcome.stderr.contains("docker does not answer"),
        "{outcome:?}"
    );
    let other = "sessions of its native runtime: no user namespaces";
    assert!(outcome.stderr.contains(other), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 2, "{outcome:?}");
    let json = daemon.run(&["nodes", "--json"]).await;
    assert_eq!(
        (
            json.json()["nodes"][0]["name"].as_str(),
            json.stderr.as_str()
        ),
        (Some("n1"), "")
    );
}

#[tokio::test]
async fn version_tells_both_and_its_own_also_when_no_daemon_answers() {
    let daemon = with_nodes(node());
    let both = daemon.run(&["version"]).await;
    assert_eq!(both.code, 0);
    assert!(
        both.stdout.contains("client  ") && both.stdout.contains("server  9.8.7"),
        "{both:?}"
    );
    assert_eq!(
        daemon.run(&["version", "--json"]).await.json()["server"]["version"],
        "9.8.7"
    );

    let dir = tempfile::tempdir().expect("a directory");
    let alone = outcome(command(&dir.path().join("none"), &["version", "--json"])).await;
    assert_eq!(alone.code, 5);
    assert_eq!(alone.json()["server"], Value::Null);
    assert_eq!(alone.json()["client"]["version"], env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn token_prints_the_token_alone_and_sends_the_time_to_live() {
    let calls = Calls::default();
    let noted = calls.clone();
    let make = move |body: String| {
        noted.note(body);
        async {
            Json(json!({
                "token": "v4.local.abc", "expires_at": "2026-03-01T12:05:00Z",
                "url": "http://alice.localhost:7701/?token=v4.local.abc",
            }))
        }
    };
    let daemon = Daemon::start(Router::new().route("/v1/sessions/{id}/token", post(make)));
    let outcome = daemon.run(&["token", "alice", "--ttl", "5m"]).await;
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (0, "v4.local.abc\n")
    );
    assert_eq!(
        daemon.run(&["token", "alice", "--json"]).await.json()["token"],
        "v4.local.abc"
    );
    assert_eq!(calls.all(), [r#"{"ttl_s":300}"#, "{}"]);
}

/// A node that can be preempted; two of its sessions cannot be released when `stuck`.
fn preemptible(calls: &Calls, stuck: bool) -> Daemon {
    let calls = calls.clone();
    let preempt = move |Path(node): Path<String>, body: Json<Value>| {
        calls.note(format!("{node} {}", body.0));
        let plan = json!({
            "sessions": [
                {"id": "alice", "generation": 7, "pid": 4711, "signal": "SIGTERM", "grace_ms": 500},
                {"id": "bob", "generation": 9, "pid": null, "signal": null, "grace_ms": 0},
            ],
            "last_kill_ms": 500, "budget_ms": 25_000,
        });
        let unreleased = match stuck {
            true => json!([{ "id": "bob", "generation": 9, "reason": "process 9 is not dead" }]),
            false => json!([]),
        };
        let report = json!({
            "noticed_at": "2026-03-01T12:00:00Z", "source": "admin", "sessions": 2, "killed": 2,
            "certified": 2, "released": 2, "last_kill_ms": 1.5, "last_certificate_ms": 180.0,
            "last_release_ms": 201.0, "unreleased": unreleased,
        });
        let dry_run = body.0["dry_run"] == true;
        async move { Json(if dry_run { plan } else { report }) }
    };
    let readmit = |Path(_): Path<String>| async { Json(node()) };
    Daemon::start(
        Router::new()
            .route("/v1/nodes/{id}/preempt", post(preempt))
            .route("/v1/nodes/{id}/readmit", post(readmit)),
    )
}

#[tokio::test]
async fn a_dry_run_shows_the_plan_and_says_that_nothing_was_done() {
    let calls = Calls::default();
    let outcome = preemptible(&calls, false)
        .run(&["preempt", "--dry-run", "--budget", "25s"])
        .await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(
        outcome.stdout.contains("SIGTERM") && outcome.stdout.contains("500 ms"),
        "{outcome:?}"
    );
    assert!(
        outcome.stdout.contains("would kill 2 sessions"),
        "{outcome:?}"
    );
    assert!(outcome.stdout.contains("Nothing was done"), "{outcome:?}");
    assert_eq!(
        calls.all(),
        [format!(
            "self {}",
            json!({ "dry_run": true, "budget_ms": 25_000 })
        )]
    );
}

#[tokio::test]
async fn a_preemption_reports_its_four_moments() {
    let calls = Calls::default();
    let daemon = preemptible(&calls, false);
    let asked = ["preempt", "n1", "--yes", "--reason", "kernel update"];
    let outcome = daemon.run(&asked).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    for text in [
        "2 of 2 sessions killed",
        "1.5 ms",
        "180 ms",
        "201 ms",
        "n1 admits none until `conman readmit n1`",
    ] {
        assert!(outcome.stdout.contains(text), "{text}: {outcome:?}");
    }
    assert_eq!(
        calls.all(),
        [format!(
            "n1 {}",
            json!({ "dry_run": false, "reason": "kernel update" })
        )]
    );
    assert_eq!(daemon.run(&["readmit", "n1"]).await.stdout, "n1 is live\n");
}

#[tokio::test]
async fn sessions_that_could_not_be_released_make_a_preemption_stuck() {
    let daemon = preemptible(&Calls::default(), true);
    let outcome = daemon.run(&["preempt", "--yes"]).await;
    assert_eq!(outcome.code, 6);
    assert!(
        outcome.stderr.contains("bob: process 9 is not dead"),
        "{outcome:?}"
    );
    let json = daemon.run(&["preempt", "--yes", "--json"]).await;
    assert_eq!(
        (json.code, json.json()["unreleased"][0]["id"].as_str()),
        (6, Some("bob"))
    );
    assert_eq!(json.problem().slug(), "unreleased");
}

/// Node `n2` of a fleet, as it is drained: it is asked twice how it stands.
fn draining(calls: &Calls, stuck: bool) -> Daemon {
    let report = move |state: &str| {
        let unreleased = match stuck {
            true => json!([{ "id": "bob", "generation": 9, "reason": "process 9 is not dead" }]),
            false => json!([]),
        };
        let finished_at = match state {
            "drained" => json!("2026-03-01T12:00:02Z"),
            _ => Value::Null,
        };
        json!({
            "state": state, "reason": "new kernel", "started_at": "2026-03-01T12:00:00Z",
            "finished_at": finished_at, "released": 2, "remaining": 1,
            "moved": [{ "id": "alice", "node": "n3" }], "moved_count": 1, "unreleased": unreleased,
        })
    };
    let (begun, looked) = (calls.clone(), calls.clone());
    let drain = move |Path(node): Path<String>, body: Json<Value>| {
        begun.note(format!("POST {node} {}", body.0));
        let plan = json!({
            "sessions": [
                {
                    "id": "bob", "generation": 9, "connections": 0, "memory_bytes": 1_048_576,
                    "signal": null, "grace_ms": 0, "at_ms": 0,
                },
                {
                    "id": "alice", "generation": 7, "connections": 3, "memory_bytes": null,
                    "signal": "SIGTERM", "grace_ms": 10_000, "at_ms": 100,
                },
            ],
            "parallel": 1, "predicted_ms": 10_200,
        });
        let answer = match body.0["dry_run"] == true {
            true => plan,
            false => report("draining"),
        };
        async move { Json(answer) }
    };
    let look = move |Path(node): Path<String>| {
        looked.note(format!("GET {node}"));
        let state = match looked.all().len() {
            0..=2 => "draining",
            _ => "drained",
        };
        let answer = report(state);
        async move { Json(answer) }
    };
    let undrain = |Path(_): Path<String>| async { Json(with(node(), json!({ "name": "n2" }))) };
    Daemon::start(
        Router::new()
            .route("/v1/nodes/{id}/drain", post(drain).get(look))
            .route("/v1/nodes/{id}/undrain", post(undrain)),
    )
}

#[tokio::test]
async fn a_node_that_is_gone_is_forgotten_and_one_that_is_not_is_refused_with_the_next_step() {
    let remove = |Path(name): Path<String>| async move {
        match name.as_str() {
            "n2" => Json(json!({ "name": "n2" })).into_response(),
            _ => problem(409, "node-not-lost", "node `n1` is not known to be dead"),
        }
    };
    let daemon = Daemon::start(Router::new().route("/v1/nodes/{id}", delete(remove)));
    let outcome = daemon.run(&["nodes", "rm", "n2"]).await;
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (0, "n2 is forgotten\n")
    );
    let refused = daemon.run(&["nodes", "rm", "n1"]).await;
    assert_eq!(refused.code, 4, "{refused:?}");
    assert!(
        refused.stderr.contains("`conman drain NODE`"),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_drains_dry_run_shows_the_order_and_promises_no_time() {
    let calls = Calls::default();
    let daemon = draining(&calls, false);
    let asked = ["drain", "--dry-run", "--parallel", "1", "--signal", "TERM"];
    let outcome = daemon.run(&asked).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let rows: Vec<&str> = outcome.stdout.lines().skip(1).collect();
    for (row, parts) in rows
        .iter()
        .zip([["bob", "SIGKILL", "0 ms"], ["alice", "SIGTERM", "10.0 s"]])
    {
        for part in parts {
            assert!(row.contains(part), "{part}: {outcome:?}");
        }
    }
    for part in [
        "2 sessions, 1 at a time",
        "take about 10.2 s",
        "longer if",
        "Nothing was done",
    ] {
        assert!(outcome.stdout.contains(part), "{part}: {outcome:?}");
    }
    let body = json!({ "dry_run": true, "parallel": 1, "signal": "TERM" });
    assert_eq!(calls.all(), [format!("POST self {body}")]);
}

#[tokio::test]
async fn another_node_is_drained_until_it_is_empty_and_named_in_what_is_said() {
    let calls = Calls::default();
    let daemon = draining(&calls, false);
    let outcome = daemon.run(&["drain", "n2", "--grace", "5s"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    for part in [
        "Drained (new kernel) in 2.0",
        "1 session moved to other nodes; 1 more will start again when a client connects",
        "it can be switched off",
        "n2 admits none until `conman undrain n2`",
    ] {
        assert!(outcome.stdout.contains(part), "{part}: {outcome:?}");
    }
    let body = json!({ "dry_run": false, "grace_ms": 5_000 });
    let begun = format!("POST n2 {body}");
    assert_eq!(calls.all(), [begun.as_str(), "GET n2", "GET n2"]);
    let undrained = daemon.run(&["undrain", "n2"]).await;
    assert_eq!(undrained.stdout, "n2 is live\n");
}

#[tokio::test]
async fn a_drain_that_nobody_waits_for_says_how_it_is_taken_back() {
    let calls = Calls::default();
    let daemon = draining(&calls, false);
    let outcome = daemon.run(&["drain", "--no-wait"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    for part in [
        "Draining (new kernel): 1 session moved",
        "1 to go",
        "`conman undrain` cancels it",
    ] {
        assert!(outcome.stdout.contains(part), "{part}: {outcome:?}");
    }
    assert_eq!(calls.all().len(), 1);
}

#[tokio::test]
async fn sessions_that_could_not_be_released_make_a_drain_stuck() {
    let daemon = draining(&Calls::default(), true);
    let outcome = daemon.run(&["drain"]).await;
    assert_eq!(outcome.code, 6);
    assert!(
        outcome.stderr.contains("bob: process 9 is not dead"),
        "{outcome:?}"
    );
}

/// A daemon with the timeline of `alice`, which it may have forgotten otherwise.
fn remembering(forgotten: bool) -> Daemon {
    let event = |seq: u64, at: &str, kind: &str, message: &str| {
        json!({
            "seq": seq, "at": at, "kind": kind, "node": "n1", "session": "alice",
            "generation": 7, "message": message,
        })
    };
    let timeline = json!({
        "id": "alice",
        "events": [
            event(1, "2026-03-01T12:00:00Z", "session_claimed", "claimed"),
            event(2, "2026-03-01T12:00:01Z", "session_ready", "ready"),
            event(3, "2026-03-01T12:10:01Z", "session_killed", "SIGKILL for the preemption"),
            event(4, "2026-03-01T12:10:01.040Z", "session_dead", "its PID namespace is empty"),
            event(5, "2026-03-01T12:10:01.050Z", "session_released", "preempted"),
            event(6, "2026-03-01T12:10:02Z", "kind_of_a_newer_daemon", "something new"),
        ],
        "phases": [
            {"name": "create", "generation": 7, "started_at": "2026-03-01T12:00:00Z", "duration_ms": 300.0},
            {"name": "ready", "generation": 7, "started_at": "2026-03-01T12:00:00.3Z", "duration_ms": 700.0},
        ],
        "truncated": false,
    });
    let tell = move || async move { Json(timeline) };
    let show = move || async move {
        if forgotten {
            return problem(404, "no-such-session", "there is no session `alice`");
        }
        (
            StatusCode::OK,
            Json(with(
                session("alice", "stopped"),
                json!({ "reason": "preempted", "end": { "cause": "preempted" } }),
            )),
        )
            .into_response()
    };
    Daemon::start(
        Router::new()
            .route("/v1/sessions/{id}/timeline", get(tell))
            .route("/v1/sessions/{id}", get(show)),
    )
}

#[tokio::test]
async fn why_tells_the_story_and_in_json_brings_the_timeline_along() {
    let daemon = remembering(false);
    let outcome = daemon.run(&["why", "alice"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    for text in [
        "alice is stopped on n1: its node was preempted\n",
        "Start: 1.00 s (create 300 ms, ready 700 ms)\n",
        "Longest: waiting for the program to be ready (`ready`), 700 ms\n",
        "\nEvents:\n",
        "+40 ms  session_dead ",
        "+10 ms  session_released ",
        "something new",
        "\nNext:\n",
        "`conman run alice`",
    ] {
        assert!(outcome.stdout.contains(text), "{text}: {outcome:?}");
    }
    let json = daemon.run(&["why", "alice", "--json"]).await.json();
    assert_eq!(
        json["timeline"]["events"][5]["kind"],
        "kind_of_a_newer_daemon"
    );
    let headline = &json["story"]["headline"];
    assert_eq!(headline, "alice is stopped on n1: its node was preempted");
    for list in ["facts", "events", "earlier", "next"] {
        assert!(json["story"][list].is_array(), "{list}: {json}");
    }
}

#[tokio::test]
async fn why_tells_of_a_session_that_only_the_journal_remembers() {
    let outcome = remembering(true).run(&["why", "alice"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(
        outcome
            .stdout
            .starts_with("alice was forgotten by its node"),
        "{outcome:?}"
    );
}

#[tokio::test]
async fn completions_need_no_daemon_and_know_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let outcome = outcome(client(&["completions", shell])).await;
        assert_eq!(outcome.code, 0, "{outcome:?}");
        for word in ["readmit", "preempt", "idle-timeout"] {
            assert!(outcome.stdout.contains(word), "{shell}: {word}");
        }
    }
    let json = outcome(client(&["completions", "bash", "--json"]))
        .await
        .json();
    assert!(json["script"].as_str().expect("text").contains("_conman"));
}
