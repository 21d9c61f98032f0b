//! Sessions of the native runtime, from the start to nothing left of them, with no other daemon.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use conman_e2e::{Api, Conman, Native, ROOT, eventually, eventually_some, native, websocket};
use conman_linux::Cgroups;
use conman_observer::ProcEntry;
use conman_proto::{
    ExecResult, PreemptReport, RuntimeKind, Session, SessionList, SessionState, SessionStats,
    StatsList,
};
use futures_util::StreamExt as _;
use futures_util::stream;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) async fn start(native: &Native) -> Conman {
    Conman::builder().start_native(native).await
}

async fn exec(api: &Api, id: &str, request: Value) -> ExecResult {
    let answer = api.post(&format!("/v1/sessions/{id}/exec"), &request).await;
    answer.expect(StatusCode::OK)
}

/// Nothing of any session is left: processes, cgroups, directories.
async fn assert_nothing_left(conman: &Conman) {
    let cgroups = Cgroups::detect().expect("there are cgroups");
    let cgroup = format!("/conman-{}", conman.instance());
    let state = conman.state_dir();
    eventually("everything is removed", PATIENCE, async || {
        let empty = |name: &str| {
            let entries = std::fs::read_dir(state.join(name));
            entries.map_or(0, Iterator::count) == 0
        };
        conman.processes().is_empty()
            && cgroups.pids_below(&cgroup).is_empty()
            && [
                "native/containers",
                "native/leaving",
                "native/trash",
                "files",
            ]
            .into_iter()
            .all(empty)
    })
    .await;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    let own = state.to_string_lossy().into_owned();
    assert!(!mounts.contains(&own), "a mount is left: {mounts}");
}

#[tokio::test]
async fn a_session_answers_over_http_and_leaves_nothing() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    let made = api.ensure("web", &json!({"template": "web"})).await;
    assert_eq!(made.session.runtime, RuntimeKind::Native);
    assert_eq!(made.session.state, SessionState::Running);
    let answer = conman.sessions().get("/s/web/").await;
    assert_eq!(
        (answer.status, answer.text().as_str()),
        (StatusCode::OK, "hello\n")
    );
    // One that a connection starts.
    let answer = conman.sessions().get("/s/web/index.html").await;
    assert_eq!(answer.text(), "hello\n");

    assert_eq!(api.stop("web").await.state, SessionState::Stopped);
    assert_eq!(conman.processes(), []);
    assert_nothing_left(&conman).await;
    // Again, as the next generation, on what the first has left of its name: nothing.
    let next = api.ensure("web", &json!({"template": "web"})).await;
    assert!(next.session.generation > made.session.generation);
    assert_eq!(conman.sessions().get("/s/web/").await.text(), "hello\n");
}

#[tokio::test]
async fn a_websocket_gets_through_and_is_told_when_its_session_goes() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    conman
        .api()
        .ensure("s", &json!({"template": "socket"}))
        .await;
    let sessions = conman.sessions();
    let request = sessions.request(Method::GET, "/s/s/", None);
    let (_, mut socket) = websocket(&sessions, request, &[])
        .await
        .expect("it is upgraded");
    let first = socket.next().await.expect("a frame").expect("readable");
    assert_eq!(first, Message::text("hello"));
    conman.api().stop("s").await;
    let last = socket.next().await.expect("a frame").expect("readable");
    match last {
        Message::Close(Some(frame)) => assert_eq!(u16::from(frame.code), 1012),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn commands_and_logs_are_those_of_the_session() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    let script = "echo one; echo two >&2; echo three; exec sleep 1000000";
    let request = json!({"image": ROOT, "command": ["sh", "-c", script]});
    api.ensure("s", &request).await;
    let result = exec(
        &api,
        "s",
        json!({"command": ["sh", "-c", "cat; id -u; exit 42"],
        "stdin": "typed\n", "user": "user", "workdir": "/tmp"}),
    )
    .await;
    assert_eq!(
        (result.exit_code, result.stdout.as_str()),
        (42, "typed\n1000\n")
    );
    let missing = json!({"command": ["no-such-program"]});
    let answer = api.post("/v1/sessions/s/exec", &missing).await;
    assert_eq!(answer.problem().slug(), "no-such-command");
    for (field, slug) in [("user", "no-such-user"), ("workdir", "no-such-workdir")] {
        let request = json!({"command": ["true"], field: "/nosuch"});
        let answer = api.post("/v1/sessions/s/exec", &request).await;
        let problem = answer.problem();
        assert_eq!(problem.slug(), slug, "{problem:?}");
        assert!(problem.detail.contains("nosuch"), "{problem:?}");
    }
    let lines = eventually_some("three lines", PATIENCE, async || {
        let log = api.get("/v1/sessions/s/logs").await.text();
        log.contains("three").then_some(log)
    })
    .await;
    let order = ["one", "two", "three"].map(|word| lines.find(word).expect("it is there"));
    assert!(order.is_sorted(), "{lines}");
    let tail = api.get("/v1/sessions/s/logs?tail=1").await.text();
    assert!(tail.contains("three") && !tail.contains("two"), "{tail}");
}

#[tokio::test]
async fn a_log_is_bounded_and_can_be_read_from_where_it_begins() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    // 48 MiB in lines of 64 bytes.
    let line = "x".repeat(56);
    let script = format!("yes {line} | head -n 800000 | nl -w 6; echo the end; sleep 1000000");
    let request = json!({"image": ROOT, "command": ["sh", "-c", script]});
    api.ensure("s", &request).await;
    let log = conman.state_dir().join("native/containers/s.1/log");
    eventually("it is written and cut", PATIENCE, async || {
        std::fs::metadata(&log).is_ok_and(|data| {
            use std::os::unix::fs::MetadataExt as _;
            data.len() > 51_200_000 && data.blocks() * 512 < 24_000_000
        })
    })
    .await;
    let tail = api.get("/v1/sessions/s/logs?tail=1").await.text();
    assert!(tail.contains("the end"), "{tail}");
    let some = api.get("/v1/sessions/s/logs?tail=1000").await.text();
    assert!(
        some.contains("799002") && !some.contains("799001"),
        "{}",
        some.len()
    );
}

#[tokio::test]
async fn a_terminal_is_one_inside_too() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    conman.api().ensure("s", &json!({"template": "idle"})).await;
    let script = "conman=$1; shift; exec script -qec \"$conman $*\" /dev/null";
    let binary = conman_e2e::binary().to_string_lossy().into_owned();
    let socket = conman.socket_path().to_string_lossy().into_owned();
    let inside = "'test -t 0 && echo it is a terminal'";
    let arguments = [
        "--socket", &socket, "exec", "-it", "s", "--", "sh", "-c", inside,
    ];
    let output = tokio::process::Command::new("sh")
        .args(["-c", script, "sh", &binary])
        .args(arguments)
        .output()
        .await
        .expect("script(1) runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("it is a terminal"), "{said}");
}

#[tokio::test]
async fn limits_hold_and_hurt_nobody_else() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    api.ensure("bystander", &json!({"template": "web"})).await;
    // An end before it runs would fail its start.
    let script = "until [ -e /go ]; do sleep 0.05; done; tail /dev/zero";
    let hog = json!({"image": ROOT, "command": ["sh", "-c", script], "memory_bytes": 32 << 20});
    api.ensure("hog", &hog).await;
    // Its end may overtake the answer.
    let go = json!({"command": ["touch", "/go"]});
    let _ = api.post("/v1/sessions/hog/exec", &go).await;
    let ended = eventually_some("the hog is killed", PATIENCE, async || {
        let session = api.session("hog").await;
        session.state.is_ended().then_some(session)
    })
    .await;
    assert_eq!(ended.exit_code, Some(137), "{ended:?}");
    let bomb = json!({"image": ROOT, "pids": 16,
        "command": ["sh", "-c", "(bomb() { bomb | bomb & }; bomb) & exec sleep 1000000"]});
    api.ensure("bomb", &bomb).await;
    let count = || {
        let processes = conman.processes();
        let own = |one: &&ProcEntry| one.is_below(&format!("/conman-{}/bomb.1", conman.instance()));
        processes.iter().filter(own).count()
    };
    // And the init.
    assert!(count() <= 16 + 1, "{}", count());
    assert_eq!(
        conman.sessions().get("/s/bystander/").await.text(),
        "hello\n"
    );
    api.stop("bomb").await;
    assert_eq!(count(), 0);
}

#[tokio::test]
async fn starts_that_cannot_succeed_say_why_and_leave_nothing() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    for (id, request, slug, words, exit_code) in [
        (
            "image",
            json!({"image": "no-such/image:1", "command": ["sh"]}),
            "no-such-image",
            ["no-such/image:1", "conman image import"],
            None,
        ),
        (
            "command",
            json!({"image": ROOT, "command": ["no-such-program"]}),
            "start-refused",
            ["no-such-program", "not found in PATH"],
            Some(127),
        ),
        (
            "directory",
            json!({"image": ROOT, "command": ["/etc"]}),
            "start-refused",
            ["/etc", "ermission denied"],
            Some(126),
        ),
        (
            "nothing",
            json!({"image": ROOT}),
            "start-refused",
            ["entrypoint", "give a command"],
            None,
        ),
        (
            "early",
            json!({"image": ROOT, "command": ["sh", "-c", "echo sorry; exit 3"], "port": 8080}),
            "start-exited",
            ["exit code 3", "sorry"],
            Some(3),
        ),
    ] {
        let answer = api.put(&format!("/v1/sessions/{id}"), &request).await;
        let problem = answer.problem();
        assert_eq!(problem.slug(), slug, "{problem:?}");
        let session: Session = api.session(id).await;
        assert_eq!(session.state, SessionState::Failed, "{session:?}");
        let reason = session.reason.unwrap_or_default();
        for word in words {
            assert!(reason.contains(word), "{reason}");
        }
        assert_eq!(session.exit_code, exit_code, "{reason}");
    }
    let bridge = json!({"image": ROOT, "command": ["sh"], "network": "bridge"});
    let answer = api.put("/v1/sessions/bridge", &bridge).await;
    assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        answer.text().contains("has no `bridge`"),
        "{}",
        answer.text()
    );
    assert_nothing_left(&conman).await;
}

/// Those that the daemon has open, besides its own.
fn open_network_namespaces(conman: &Conman) -> BTreeSet<PathBuf> {
    let own = std::fs::read_link("/proc/self/ns/net").expect("readable");
    let entries = std::fs::read_dir(format!("/proc/{}/fd", conman.pid())).expect("readable");
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    targets
        .filter(|target| target.to_string_lossy().starts_with("net:[") && *target != own)
        .collect()
}

#[tokio::test]
async fn a_preemption_kills_certifies_and_releases_all() {
    const COUNT: usize = 40;
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    let script = "trap '' TERM INT; sleep 1000001 & (trap '' HUP TERM; sleep 1000002) & wait";
    let request = json!({"image": ROOT, "command": ["sh", "-c", script]});
    stream::iter(0..COUNT)
        .for_each_concurrent(8, async |number| {
            api.ensure(&format!("s{number}"), &request).await;
        })
        .await;
    let notice = json!({"reason": "a test"});
    let report = api.post("/v1/nodes/self/preempt", &notice).await;
    assert_eq!(conman.processes(), []);
    let report: PreemptReport = report.expect(StatusCode::OK);
    let counts = [report.killed, report.certified, report.released];
    assert_eq!(counts, [COUNT as u64; 3]);
    let list = api.get("/v1/sessions?limit=1000").await;
    let list: SessionList = list.expect(StatusCode::OK);
    let stopped = list.sessions.iter().map(|one| one.state);
    assert_eq!(
        stopped.collect::<Vec<_>>(),
        vec![SessionState::Stopped; COUNT]
    );
    let kept = open_network_namespaces(&conman);
    // Kernels before 6.11 open none by pidfd.
    assert!(kept.is_empty() || kept.len() == COUNT, "{kept:?}");
    // The machine stays after all.
    conman.cli(&["readmit"]).await.success();
    eventually("the namespaces' end", PATIENCE, async || {
        open_network_namespaces(&conman).is_empty()
    })
    .await;
    api.ensure("after", &json!({"template": "idle"})).await;
    api.stop("after").await;
    assert_nothing_left(&conman).await;
}

#[tokio::test]
async fn the_logs_of_a_session_that_ended_and_of_its_start_before_are_kept() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    let says = |text: &str| json!({"image": ROOT, "command": ["sh", "-c", format!("echo {text}; sleep 1000")]});
    for text in ["first", "second"] {
        api.ensure("s", &says(text)).await;
        eventually("it has printed", PATIENCE, async || {
            conman.cli(&["logs", "s"]).await.stdout == format!("{text}\n")
        })
        .await;
        api.stop("s").await;
    }
    assert_nothing_left(&conman).await;
    assert_eq!(conman.cli(&["logs", "s"]).await.success(), "second\n");
    assert_eq!(conman.cli(&["logs", "-p", "s"]).await.success(), "first\n");
    let before = conman.cli(&["logs", "--previous", "other"]).await;
    assert_eq!(before.code, Some(3), "{before:?}");
}

#[tokio::test]
async fn the_stats_show_what_a_session_uses() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    let script = "while :; do :; done & yes | head -c 20000000 >/big; sync; sleep 1000";
    let request = json!({"image": ROOT, "command": ["sh", "-c", script], "cpus": 0.1,
        "memory_bytes": 64 << 20, "pids": 50});
    api.ensure("busy", &request).await;
    let seen = eventually_some("it computes and is held up", PATIENCE, async || {
        let stats = api.get("/v1/sessions/busy/stats").await;
        let stats: SessionStats = stats.expect(StatusCode::OK);
        let busy = stats.cpu_s > Some(0.1) && stats.throttled_s > Some(0.0);
        busy.then_some(stats)
    })
    .await;
    assert!(
        seen.memory_bytes
            .is_some_and(|bytes| (1..64 << 20).contains(&bytes)),
        "{seen:?}"
    );
    assert!(
        seen.pids.is_some_and(|pids| (2..50).contains(&pids)),
        "{seen:?}"
    );
    assert_eq!((seen.pids_limit, seen.oom_kills), (50, Some(0)));
    assert_eq!((seen.received_bytes, seen.sent_bytes), (Some(0), Some(0)));
    let all: StatsList = api.get("/v1/nodes/self/stats").await.expect(StatusCode::OK);
    assert_eq!(all.sessions.len(), 1);
    let table = conman.cli(&["stats"]).await;
    assert!(table.success().contains("busy"), "{table:?}");
    let no_such = api.get("/v1/sessions/none/stats").await.problem();
    assert_eq!(no_such.slug(), "no-such-session");
}

#[tokio::test]
async fn the_stats_count_what_was_killed_for_memory_once_and_only_where_it_was() {
    let Some(native) = native() else { return };
    let conman = start(&native).await;
    let api = conman.api();
    for id in ["calm", "greedy"] {
        let request = json!({"image": ROOT, "command": ["sleep", "1000"],
            "memory_bytes": 32 << 20});
        api.ensure(id, &request).await;
    }
    let kills = async || {
        let all: StatsList = api.get("/v1/nodes/self/stats").await.expect(StatusCode::OK);
        let of_each = all.sessions.into_iter();
        of_each
            .map(|one| (one.id.to_string(), one.oom_kills))
            .collect::<Vec<_>>()
    };
    let counted = |greedy| {
        vec![
            ("calm".to_owned(), Some(0)),
            ("greedy".to_owned(), Some(greedy)),
        ]
    };
    assert_eq!(kills().await, counted(0));
    for times in 1..=2 {
        let command = ["dd", "if=/dev/zero", "of=/dev/null", "bs=100M", "count=1"];
        let request = json!({"command": command});
        let answer = api.post("/v1/sessions/greedy/exec", &request).await;
        assert!(answer.status.is_success(), "{}", answer.text());
        // The second look does not read the count again.
        for _ in 0..2 {
            assert_eq!(kills().await, counted(times));
        }
    }
}

/// Commands at a time that hold a lock: more than the daemon has threads.
const HOLDERS: usize = 32;

#[tokio::test]
async fn commands_that_hold_the_locks_of_their_pipes_delay_nobody_else() {
    let Some(native) = native() else { return };
    let settings = format!(
        "[templates.host]\nimage = \"{ROOT}\"\nruntime = \"native\"\n\
         command = [\"sleep\", \"1000000\"]\n\
         binds = [\"/usr:/usr:ro\", \"/usr/lib:/lib:ro\", \"/usr/lib64:/lib64:ro\"]"
    );
    let builder = Conman::builder()
        .toml(&settings)
        .set("binds", "allow = [\"/usr\"]");
    let conman = builder.start_native(&native).await;
    let api = conman.api();
    api.ensure("hostile", &json!({"template": "host"})).await;
    api.ensure("other", &json!({"template": "host"})).await;
    // The pipe of standard output is full, and then a socket that has no data is spliced into it.
    let splice = libc::SYS_splice;
    let script = format!(
        "$| = 1; print 'x' x 65536; socketpair(A, B, 1, 1, 0); \
         syscall({splice}, fileno(A), 0, 1, 0, 4096, 0)"
    );
    let mut holders = tokio::task::JoinSet::new();
    for _ in 0..HOLDERS {
        let (api, script) = (conman.api(), script.clone());
        holders.spawn(async move {
            let request = json!({"command": ["perl", "-e", script]});
            api.post("/v1/sessions/hostile/exec", &request).await
        });
    }
    eventually("all hold their locks", PATIENCE, async || {
        let splices = |process: &ProcEntry| {
            let call = std::fs::read_to_string(format!("/proc/{}/syscall", process.pid));
            call.is_ok_and(|call| call.starts_with(&format!("{splice} ")))
        };
        conman.processes().into_iter().filter(splices).count() == HOLDERS
    })
    .await;
    let echoed = exec(&api, "other", json!({"command": ["echo", "hello"]})).await;
    assert_eq!(echoed.stdout, "hello\n");
    api.stop("hostile").await;
    while let Some(answer) = holders.join_next().await {
        drop(answer.expect("no panic"));
    }
}
