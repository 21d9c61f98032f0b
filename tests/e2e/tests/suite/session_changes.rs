//! Sessions with a generated name, sessions that are changed while they run, and `conman run --rm`.

use std::time::Duration;

use conman_e2e::{Api, Conman, ROOT, eventually, native};
use conman_linux::{Signal, signal_process};
use conman_proto::{EndCause, EnsureResponse, Session, SessionList, SessionState};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};

const PATIENCE: Duration = Duration::from_secs(60);

async fn patch(api: &Api, id: &str, body: &Value) -> conman_e2e::Answer {
    let path = format!("/v1/sessions/{id}");
    api.send(Method::PATCH, &path, Some(body)).await
}

async fn shown(api: &Api, query: &str) -> Vec<String> {
    let path = format!("/v1/sessions?{query}");
    let list: SessionList = api.get(&path).await.expect(StatusCode::OK);
    let ids = list.sessions.into_iter().map(|session| session.id);
    ids.map(String::from).collect()
}

#[tokio::test]
async fn a_running_session_is_changed_for_good_in_what_can_change() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let spec = json!({"template": "web", "labels": {"team": "blue", "tier": "1"}});
    api.ensure("web", &spec).await;
    let change = json!({"labels": {"team": "red", "tier": null, "new": "yes"}});
    let changed: Session = patch(&api, "web", &change).await.expect(StatusCode::OK);
    assert_eq!(changed.spec.labels["team"], "red");
    assert!(!changed.spec.labels.contains_key("tier"));
    let ends = "2099-01-31T18:00:00Z";
    let change = json!({"expires_at": ends, "idle_timeout_s": 3_600});
    patch(&api, "web", &change)
        .await
        .expect::<Session>(StatusCode::OK);
    assert_eq!(shown(&api, "label=team=red&label=new").await, ["web"]);

    // The next daemon knows it, and PUT compares with it.
    conman.restart_after_crash().await;
    let api = conman.api();
    let session = api.session("web").await;
    assert_eq!(session.spec.labels["team"], "red");
    let expires = session.spec.expires_at.expect("it is kept").to_string();
    assert_eq!(expires, ends);
    assert_eq!(session.spec.idle_timeout_s, 3_600);
    assert!(!api.ensure("web", &spec).await.spec_matches);

    for (wrong, field, part) in [
        (json!({"image": "x"}), "image", "cannot change"),
        (json!({"port": 81}), "port", "DELETE it, then PUT"),
        (json!({"lables": {}}), "lables", "did you mean `labels`"),
        (json!({"labels": {"A B": "x"}}), "labels", "a key must be"),
        (
            json!({"expires_at": "2020-01-01T00:00:00Z"}),
            "expires_at",
            "past",
        ),
        (json!({"expires_at": "soon"}), "expires_at", ""),
    ] {
        let problem = patch(&api, "web", &wrong).await.problem();
        assert_eq!(problem.status, 422, "{wrong}: {problem:?}");
        let error = &problem.errors[0];
        assert!(error.field.starts_with(field), "{wrong}: {error:?}");
        assert!(error.message.contains(part), "{wrong}: {error:?}");
    }
    assert_eq!(api.session("web").await.spec, session.spec);
    let nobody = patch(&api, "nobody", &json!({})).await.problem();
    assert_eq!(nobody.slug(), "no-such-session");

    // Its new times count at once.
    conman
        .cli(&["update", "web", "--expires", "1s"])
        .await
        .success();
    let reason = ended(&api, "web").await;
    assert_eq!(reason, Some(EndCause::Lifetime));
    let over = patch(&api, "web", &json!({})).await.problem();
    assert_eq!(over.slug(), "not-running");
    api.ensure("idle", &json!({"template": "web"})).await;
    let update = ["update", "idle", "--idle-timeout", "1s", "--label", "a=b"];
    conman.cli(&update).await.success();
    assert_eq!(ended(&api, "idle").await, Some(EndCause::Idle));
    // The end of an earlier life does not end the next one.
    let answer = api.post("/v1/sessions/web/restart", &json!(null)).await;
    let again: EnsureResponse = answer.expect(StatusCode::OK);
    assert_eq!(again.session.state, SessionState::Running);
    assert_eq!(again.session.spec.expires_at, None);
}

async fn ended(api: &Api, id: &str) -> Option<EndCause> {
    eventually("it has ended", PATIENCE, async || {
        api.session(id).await.state == SessionState::Stopped
    })
    .await;
    api.session(id).await.end.map(|end| end.cause)
}

#[tokio::test]
async fn a_session_without_a_name_gets_one_without_a_dash() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let answer = api.post("/v1/sessions", &json!({"template": "web"})).await;
    let location = answer.headers["location"]
        .to_str()
        .expect("text")
        .to_owned();
    let made: EnsureResponse = answer.expect(StatusCode::CREATED);
    let id = made.session.id.as_str();
    assert!(made.created && !id.contains('-'), "{made:?}");
    assert_eq!(location, format!("/v1/sessions/{id}"));
    let page = conman.sessions().get(&format!("/s/{id}/")).await.text();
    assert_eq!(page, "hello\n");
    let spec = json!({"template": "web"});
    let again = api.post("/v1/sessions?wait=false", &spec).await;
    let other: EnsureResponse = again.expect(StatusCode::ACCEPTED);
    assert_ne!(other.session.id, made.session.id);
    let wrong = api.post("/v1/sessions", &json!({"imgae": "x"})).await;
    assert_eq!(wrong.problem().errors[0].field, "imgae");

    let url = conman.cli(&["run", "--template", "web"]).await;
    let url = url.success().trim().to_owned();
    // One of them was not waited for.
    eventually(&url, PATIENCE, async || {
        shown(&api, "state=running").await.len() == 3
    })
    .await;
}

#[tokio::test]
async fn run_rm_shows_the_output_and_leaves_nothing() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    let run = ["run", "--rm", "--image", ROOT, "--"];
    let script = "for i in 1 2 3; do echo line $i; done; exit 7";
    let output = conman
        .cli(&[&run[..], &["sh", "-c", script]].concat())
        .await;
    assert_eq!(output.code, Some(7), "{output:?}");
    assert_eq!(output.stdout, "line 1\nline 2\nline 3\n", "{output:?}");
    assert!(shown(&api, "").await.is_empty());

    // One that runs on ends with the command.
    let mut command = conman.cli_command();
    let script = "echo begun; sleep 1000";
    let words = [
        "run", "mine", "--rm", "--image", ROOT, "--", "sh", "-c", script,
    ];
    command.args(words).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().expect("spawned");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert_eq!(
        lines.next_line().await.expect("read").as_deref(),
        Some("begun")
    );
    // Another such command neither joins nor removes it.
    let joined = conman.cli(&words).await;
    assert_eq!(joined.code, Some(4), "{joined:?}");
    eventually("it runs", PATIENCE, async || {
        api.session("mine").await.state == SessionState::Running
    })
    .await;
    let pid = child.id().expect("it runs").cast_signed();
    signal_process(pid, Signal::SIGINT).expect("signalled");
    let status = child.wait().await.expect("waited");
    assert_eq!(status.code(), Some(128 + Signal::SIGINT as i32));
    assert!(shown(&api, "").await.is_empty());

    // At a terminal, however soon it ends. script makes the terminal, and exits with the command's code.
    for script in ["echo begun; exit 7", "sleep 1; echo begun; exit 7"] {
        let line = format!(
            "exec {} --socket {} run --rm -it --image {ROOT} -- sh -c '{script}'",
            conman_e2e::binary().display(),
            conman.socket_path().display(),
        );
        let mut command = tokio::process::Command::new("script");
        command
            .args(["-qefc", &line, "/dev/null"])
            .env("TERM", "xterm");
        command
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true);
        let output = tokio::time::timeout(PATIENCE, command.output()).await;
        let output = output.expect("it does not hang").expect("script runs");
        let shown_text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(7), "{script}: {shown_text}");
        // It is attached to in time, or its kept output is shown, or it is said that there is none.
        let seen = ["begun\r", "before its terminal could be attached to"];
        let is_shown = seen.iter().any(|text| shown_text.contains(text));
        assert!(is_shown, "{script}: {shown_text}");
        assert!(shown(&api, "").await.is_empty());
    }

    // One that cannot start says why.
    let words = ["run", "--rm", "--image", ROOT, "--", "/no/such/program"];
    let failed = conman.cli(&words).await;
    assert!(
        failed.code != Some(0) && failed.stderr.contains("/no/such/program"),
        "{failed:?}"
    );
    assert!(shown(&api, "").await.is_empty());
}
