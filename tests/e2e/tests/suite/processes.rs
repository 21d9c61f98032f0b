//! The processes of a session, and its ports that change while it runs, natively and in Docker.

use std::time::Duration;

use conman_e2e::{Conman, ROOT, docker_shared, eventually, native};
use conman_proto::{ProcessList, Session, SessionProcess};
use http::{Method, StatusCode};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// A native session, and one of Docker's where there are both.
const RUNTIMES: [(&str, &str); 2] = [("image", ROOT), ("template", "tiny")];

#[tokio::test]
async fn processes_are_listed_as_the_session_sees_them() {
    let (Some(native), Some(docker)) = (native(), docker_shared().await) else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    for (kind, value) in RUNTIMES {
        // A shell that waits, a child of it, and one that computes.
        let script = "sleep 1234 & (while :; do :; done) & wait";
        let spec = json!({kind: value, "command": ["sh", "-c", script]});
        api.ensure("s", &spec).await;
        let list = async || -> Vec<SessionProcess> {
            let answer = api.get("/v1/sessions/s/processes").await;
            let list: ProcessList = answer.expect(StatusCode::OK);
            assert!(!list.truncated);
            list.processes
        };
        let named = |list: &[SessionProcess], words: &[&str]| {
            list.iter().find(|one| one.command == words).cloned()
        };
        eventually("both children", PATIENCE, async || {
            let list = list().await;
            let busy = list.iter().any(|one| one.cpu_s > 0.1);
            let sleeps = |one: SessionProcess| &*one.state == "S";
            busy && named(&list, &["sleep", "1234"]).is_some_and(sleeps)
        })
        .await;
        let list = list().await;
        assert!(list.is_sorted_by_key(|one| one.pid), "{list:?}");
        assert_eq!(list[0].pid, 1, "{list:?}");
        assert!(list[0].command[0].contains("init"), "{list:?}");
        let shell = list
            .iter()
            .find(|one| one.command[0] == "sh" && one.cpu_s < 0.1)
            .unwrap_or_else(|| panic!("{list:?}"));
        let sleep = named(&list, &["sleep", "1234"]).expect("it was there");
        assert_eq!(sleep.parent, Some(shell.pid), "{list:?}");
        assert_eq!(sleep.uid, Some(0), "{list:?}");
        assert_eq!((&*sleep.state, sleep.threads), ("S", 1), "{list:?}");
        assert!(sleep.memory_bytes > 0, "{list:?}");
        // What the session's own ps says.
        let request = json!({"command": ["sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; \
            echo \"=${p#/proc/}\"; done"]});
        let seen = api.post("/v1/sessions/s/exec", &request).await.json();
        let seen = seen["stdout"].as_str().expect("text").to_owned();
        let mark = format!("sleep 1234 ={}\n", sleep.pid);
        assert!(seen.contains(&mark), "{mark}: {seen}");

        let table = conman.cli(&["processes", "s"]).await;
        assert!(table.success().contains("sleep 1234"), "{table:?}");
        api.stop("s").await;
        let ended = api.get("/v1/sessions/s/processes").await.problem();
        assert_eq!(ended.slug(), "not-running");
        api.delete("/v1/sessions/s?forget=true").await;
    }
}

#[tokio::test]
async fn ports_of_a_running_session_change_from_the_next_connection_on() {
    let (Some(native), Some(docker)) = (native(), docker_shared().await) else {
        return;
    };
    let conman = Conman::builder().start_both(&native, &docker).await;
    let api = conman.api();
    let sessions = conman.sessions();
    for (kind, value) in RUNTIMES {
        let serve = "mkdir /tmp/w; echo hello >/tmp/w/index.html; exec httpd -f -p 9000 -h /tmp/w";
        let spec = json!({kind: value, "command": ["sh", "-c", serve], "ports": [8000]});
        api.ensure("s", &spec).await;
        let page = async || sessions.get("/s/s:9000/").await;
        assert_eq!(page().await.problem().slug(), "no-such-port");
        let changed = conman
            .cli(&["update", "s", "--ports", "8000,9000-9001"])
            .await;
        changed.success();
        eventually("its page", PATIENCE, async || {
            let answer = page().await;
            answer.status == StatusCode::OK && answer.text() == "hello\n"
        })
        .await;
        let session: Session = api.session("s").await;
        assert!(session.spec.ports.iter().any(|ports| ports.contains(9001)));
        let none = api
            .send(Method::PATCH, "/v1/sessions/s", Some(&json!({"ports": []})))
            .await;
        none.expect::<Session>(StatusCode::OK);
        assert_ne!(page().await.status, StatusCode::OK);
        let wrong = json!({"ports": [0]});
        let wrong = api
            .send(Method::PATCH, "/v1/sessions/s", Some(&wrong))
            .await;
        assert_eq!(
            wrong.status,
            StatusCode::UNPROCESSABLE_ENTITY,
            "{}",
            wrong.text()
        );
        api.stop("s").await;
        api.delete("/v1/sessions/s?forget=true").await;
    }
}
