//! A daemon that dies at any moment: nothing else dies with it, and nothing is left over.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use conman_e2e::{
    Api, BUSYBOX, Conman, Docker, docker_shared, eventually, eventually_some, slowness,
};
use conman_proto::{EventKind, EventPage, Generation, SessionList, SessionState};
use futures_util::StreamExt as _;
use futures_util::stream;
use http::{Method, StatusCode};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
/// Starts at a time, as a frontend would do them.
const AT_A_TIME: usize = 8;

/// What must outlive a daemon: each running session's generation and process.
async fn running(api: &Api) -> BTreeMap<String, (Generation, Option<i32>)> {
    let list = api.get("/v1/sessions?state=running&limit=1000").await;
    let list: SessionList = list.expect(StatusCode::OK);
    list.sessions
        .into_iter()
        .map(|session| (session.id.to_string(), (session.generation, session.pid)))
        .collect()
}

async fn ensure_many(api: &Api, count: usize) {
    stream::iter(0..count)
        .for_each_concurrent(AT_A_TIME, async |number| {
            api.ensure(&format!("s{number}"), &json!({"template": "tiny"}))
                .await;
        })
        .await;
}

/// Each session has one process and no container besides its own one.
async fn assert_nothing_more_than(
    docker: &Docker,
    conman: &Conman,
    expected: &BTreeMap<String, (Generation, Option<i32>)>,
) {
    let instance = conman.instance();
    let mut names: Vec<String> = expected
        .iter()
        .map(|(id, (generation, _))| format!("conman-{instance}-{id}-{generation}"))
        .collect();
    names.sort();
    eventually(
        "Docker has these containers and no other",
        PATIENCE,
        async || {
            let mut found = docker.containers_of(&instance).await;
            found.sort();
            found == names
        },
    )
    .await;
    let inits: Vec<i32> = expected.values().filter_map(|(_, pid)| *pid).collect();
    let processes = conman.processes();
    for init in &inits {
        assert!(
            processes.iter().any(|process| process.pid == *init),
            "{init} is gone"
        );
    }
    let mut namespaces: Vec<_> = processes
        .iter()
        .map(|process| process.pid_namespace)
        .collect();
    namespaces.sort_unstable();
    namespaces.dedup();
    assert_eq!(namespaces.len(), inits.len(), "{processes:?}");
}

#[tokio::test]
#[ignore = "in acceptance: a hundred containers of Docker take all of a machine; the crashes below and `native_crash::` stay"]
async fn a_hundred_sessions_outlive_a_crash_and_are_adopted_within_two_seconds() {
    const COUNT: usize = 100;
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    ensure_many(&conman.api(), COUNT).await;
    let before = running(&conman.api()).await;
    assert_eq!(before.len(), COUNT);
    // The best of a few, as other tests of this machine take their part of it.
    let mut took = Duration::MAX;
    for _ in 0..5 {
        conman.crash();
        assert!(conman.processes().len() >= COUNT);
        let started = Instant::now();
        conman.launch().await;
        assert_eq!(running(&conman.api()).await, before);
        took = took.min(started.elapsed());
        if took < Duration::from_secs(2) {
            break;
        }
    }
    let bound = Duration::from_secs(2) * slowness();
    assert!(took < bound, "adopted after {took:?}");
    assert_nothing_more_than(&docker, &conman, &before).await;
    let adopted = events(&conman.api()).await;
    let adopted = adopted
        .iter()
        .filter(|kind| **kind == EventKind::SessionAdopted);
    let adopted = adopted.count();
    assert!(adopted > 0 && adopted % COUNT == 0, "{adopted}");
    // What was adopted can be used and ended like anything else.
    let path = "/v1/sessions/s7/exec";
    let command = json!({"command": ["echo", "here"]});
    let answer = conman.api().post(path, &command).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert_eq!(conman.api().stop("s7").await.state, SessionState::Stopped);
}

async fn events(api: &Api) -> Vec<EventKind> {
    let mut kinds = Vec::new();
    let mut after = 0;
    loop {
        let path = format!("/v1/events?follow=false&limit=1000&after={after}");
        let page: EventPage = api.get(&path).await.expect(StatusCode::OK);
        let Some(last) = page.events.last() else {
            return kinds;
        };
        after = last.seq;
        kinds.extend(page.events.iter().map(|event| event.kind));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn crashes_in_the_middle_of_starts_and_stops_leave_neither_strays_nor_stuck_sessions() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    ensure_many(&conman.api(), 4).await;
    let kept = running(&conman.api()).await;
    // Spread over what a start and a stop take here; their order is the scheduler's own.
    for (round, delay_ms) in [0_u64, 5, 15, 40, 90, 170, 300, 550]
        .into_iter()
        .enumerate()
    {
        let api = conman.api();
        let storm = (0..6).map(|number| {
            let api = api.clone();
            tokio::spawn(async move {
                let path = format!("/v1/sessions/storm-{round}-{number}");
                let request = json!({"template": "tiny"});
                let started = api.try_send(Method::PUT, &path, Some(&request)).await;
                if started.is_ok() && number % 2 == 0 {
                    let _ = api.try_send(Method::DELETE, &path, None).await;
                }
            })
        });
        let storm: Vec<_> = storm.collect();
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
        conman.crash();
        for request in storm {
            request.await.expect("a request fails without a panic");
        }
        conman.launch().await;
        let now = running(&conman.api()).await;
        for (id, was) in &kept {
            assert_eq!(now.get(id), Some(was), "{id} in round {round}");
        }
    }
    let api = conman.api();
    eventually(
        "no session is left between two states",
        PATIENCE,
        async || {
            let path = "/v1/sessions?state=starting&state=stopping&state=stuck&limit=1000";
            let list: SessionList = api.get(path).await.expect(StatusCode::OK);
            list.sessions.is_empty()
        },
    )
    .await;
    assert_nothing_more_than(&docker, &conman, &running(&api).await).await;
    // Every id can be started again, with a greater generation.
    let list: SessionList = api
        .get("/v1/sessions?limit=1000")
        .await
        .expect(StatusCode::OK);
    let ended = list
        .sessions
        .iter()
        .filter(|session| session.state.is_ended());
    for session in ended.take(4) {
        let next = api
            .ensure(session.id.as_str(), &json!({"template": "tiny"}))
            .await;
        assert!(next.session.generation > session.generation);
    }
}

#[tokio::test]
async fn a_container_of_ours_without_a_record_is_ended_and_others_are_not_touched() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let mut other = Conman::start(&docker).await;
    conman.crash();
    let stray = async |of: &Conman, id: &str| {
        let instance = of.instance();
        let name = format!("conman-{instance}-{id}-999");
        let labels = [
            format!("dev.conman.instance={instance}"),
            format!("dev.conman.session={id}"),
            "dev.conman.generation=999".to_owned(),
        ];
        let parent = format!("/conman-{instance}/{id}.999");
        docker
            .run(&[
                "run",
                "--detach",
                "--network",
                "none",
                "--cgroup-parent",
                &parent,
                "--name",
                &name,
                "--label",
                &labels[0],
                "--label",
                &labels[1],
                "--label",
                &labels[2],
                BUSYBOX,
                "sleep",
                "1000000",
            ])
            .await;
        name
    };
    stray(&conman, "stray").await;
    // A daemon that is not there does not look for strays.
    other.crash();
    let theirs = stray(&other, "stray").await;
    assert_eq!(conman.processes().len(), 1);

    conman.launch().await;
    eventually("the stray is dead", PATIENCE, async || {
        conman.processes().is_empty()
    })
    .await;
    let instance = conman.instance();
    eventually("and removed", PATIENCE, async || {
        docker.containers_of(&instance).await.is_empty()
    })
    .await;
    let kinds = eventually_some("it is told", PATIENCE, async || {
        let kinds = events(&conman.api()).await;
        kinds.contains(&EventKind::OrphanEnded).then_some(kinds)
    })
    .await;
    assert!(!kinds.contains(&EventKind::SessionAdopted));
    assert_eq!(docker.containers_of(&other.instance()).await, [theirs]);
    assert_eq!(other.processes().len(), 1);
}

#[tokio::test]
async fn a_record_whose_container_is_gone_is_released() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let api = conman.api();
    ensure_many(&api, 2).await;
    let before = running(&api).await;
    conman.crash();
    let name = format!("conman-{}-s0-{}", conman.instance(), before["s0"].0);
    docker.run(&["rm", "--force", &name]).await;
    conman.launch().await;

    let gone = api.session("s0").await;
    assert!(gone.state.is_ended(), "{gone:?}");
    assert_eq!(gone.generation, before["s0"].0);
    assert!(gone.reason.is_some());
    let kept = api.session("s1").await;
    assert_eq!((kept.generation, kept.pid), before["s1"]);
    let next = api.ensure("s0", &json!({"template": "tiny"})).await;
    assert!(next.created && next.session.generation > gone.generation);
}

#[tokio::test]
async fn a_second_daemon_on_the_same_state_says_so_and_touches_nothing() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    ensure_many(&conman.api(), 2).await;
    let before = running(&conman.api()).await;
    let second = conman
        .serve()
        .stderr(std::process::Stdio::piped())
        .output()
        .expect("conman can be run");
    let words = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{words}");
    assert!(words.contains("another conman"), "{words}");
    assert!(
        words.contains(&conman.state_dir().display().to_string()),
        "{words}"
    );
    assert!(words.contains(&conman.pid().to_string()), "{words}");

    assert!(conman.ended().is_none());
    assert_eq!(running(&conman.api()).await, before);
    // Its own socket is still in place, too.
    assert_eq!(running(&conman.admin()).await, before);
    conman.restart_after_crash().await;
    assert_eq!(running(&conman.api()).await, before);
}

#[tokio::test]
async fn generations_grow_through_stops_crashes_and_the_loss_of_either_file_of_the_registry() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder()
        // So that what has ended is soon forgotten.
        .set("limits", "max_stopped_kept = 1")
        .start(&docker)
        .await;
    let request = json!({"template": "tiny"});
    let mut last: Option<Generation> = None;
    let mut grow = async |conman: &Conman, what: &str| {
        let api = conman.api();
        let session = api.ensure("s", &request).await;
        assert!(session.created, "{what}");
        let generation = session.session.generation;
        assert!(
            Some(generation) > last,
            "{generation} after {last:?} {what}"
        );
        last = Some(generation);
        api.stop("s").await;
        for id in ["x", "y"] {
            api.ensure(id, &request).await;
            api.stop(id).await;
        }
        let forgotten = api.get("/v1/sessions/s").await;
        assert_eq!(forgotten.status, StatusCode::NOT_FOUND, "{what}");
    };
    grow(&conman, "at first").await;
    grow(&conman, "after being forgotten").await;
    conman.restart_after_crash().await;
    grow(&conman, "after a crash").await;
    for file in ["generations", "registry.redb", "generations"] {
        conman.crash();
        fs::remove_file(conman.state_dir().join(file)).expect("the file is there");
        conman.launch().await;
        grow(&conman, &format!("after the loss of {file}")).await;
    }
    // Without both nobody knows: the daemon must not guess.
    conman.crash();
    for file in ["generations", "registry.redb"] {
        fs::remove_file(conman.state_dir().join(file)).expect("the file is there");
    }
    conman.spawn();
    let status = conman.wait_ended().await;
    assert_eq!(status.code(), Some(1));
    assert!(
        conman.log().contains("--generation-floor"),
        "{}",
        conman.log()
    );
}

#[tokio::test]
async fn sigterm_leaves_the_sessions_to_the_next_daemon_unless_told_otherwise() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    ensure_many(&conman.api(), 3).await;
    let before = running(&conman.api()).await;
    assert!(conman.terminate().await.success());
    assert!(!conman.socket_path().exists());
    assert!(conman.processes().len() >= 3);
    conman.launch().await;
    assert_eq!(running(&conman.api()).await, before);
}
