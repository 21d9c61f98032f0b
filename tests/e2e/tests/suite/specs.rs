//! What a spec asks for is what its container has.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use conman_e2e::{Api, BUSYBOX, Conman, PYTHON, docker_shared, eventually, eventually_some};
use conman_proto::{ExecResult, SessionState};
use http::StatusCode;
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

async fn exec(api: &Api, id: &str, command: &[&str]) -> ExecResult {
    let path = format!("/v1/sessions/{id}/exec");
    let answer = api.post(&path, &json!({"command": command})).await;
    answer.expect(StatusCode::OK)
}

#[tokio::test]
async fn a_fork_bomb_is_held_by_the_limit_of_processes() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let bomb = "i=0; while [ $i -lt 100 ]; do i=$((i+1)); sleep 1000000 & done; \
                echo survived; exec sleep 1000000";
    let script = format!("sh -c '{bomb}'; echo bombed; exec sleep 1000000");
    let request = json!({"image": BUSYBOX, "command": ["sh", "-c", script], "pids": 16});
    api.ensure("bomb", &request).await;
    eventually("the bomb went off", PATIENCE, async || {
        api.get("/v1/sessions/bomb/logs")
            .await
            .text()
            .contains("fork")
    })
    .await;
    let processes = conman.processes().len();
    assert!((2..=16).contains(&processes), "{processes}");
    let other = api.ensure("other", &json!({"template": "tiny"})).await;
    assert_eq!(other.session.state, SessionState::Running);
    assert_eq!(api.stop("bomb").await.state, SessionState::Stopped);
}

#[tokio::test]
async fn a_program_that_takes_more_memory_than_its_session_may_have_is_killed() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    let hungry = ["python3", "-c", "x = bytearray(200 << 20); print(len(x))"];
    let request = json!({"image": PYTHON, "command": ["sleep", "1000000"],
        "memory_bytes": 64 << 20});
    let limited = api.ensure("limited", &request).await.session;
    assert_eq!(limited.spec.memory_bytes, Some(64 << 20));
    let killed = exec(&api, "limited", &hungry).await;
    assert_eq!(killed.exit_code, 137, "{killed:?}");
    assert_eq!(api.session("limited").await.state, SessionState::Running);
    // The same without the limit, so that it is the limit that kills.
    let request = json!({"image": PYTHON, "command": ["sleep", "1000000"]});
    api.ensure("free", &request).await;
    assert_eq!(exec(&api, "free", &hungry).await.stdout.trim(), "209715200");
}

#[tokio::test]
async fn the_container_has_no_restart_policy_no_published_port_and_the_limit_of_cores() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let request = json!({"template": "python", "cpus": 0.5});
    let session = conman.api().ensure("s", &request).await.session;
    let name = format!("conman-{}-s-{}", conman.instance(), session.generation);
    let inspect = async |field: &str| docker.inspect(&name, field).await;
    assert_eq!(inspect("{{.HostConfig.RestartPolicy.Name}}").await, "no");
    assert_eq!(inspect("{{.Config.NetworkDisabled}}").await, "true");
    assert_eq!(inspect("{{.NetworkSettings.Ports}}").await, "map[]");
    assert_eq!(inspect("{{.HostConfig.Init}}").await, "true");
    assert_eq!(inspect("{{.HostConfig.PidMode}}").await, "");
    let pid = inspect("{{.State.Pid}}").await;
    assert_eq!(pid.parse().ok(), session.pid);
    let cores = inspect("{{.HostConfig.NanoCpus}} {{.HostConfig.CpuQuota}}").await;
    assert!(
        ["500000000 0", "0 50000"].contains(&cores.as_str()),
        "{cores}"
    );
}

#[tokio::test]
async fn environment_arguments_and_labels_of_request_and_template_are_merged() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let template = format!(
        "[templates.echo]\nimage = \"{BUSYBOX}\"\n\
         command = [\"sh\", \"-c\", 'echo \"$0|$1|$2\"; exec sleep 1000000', \"zero\"]\n\
         env = {{ A = \"template\", B = \"template\" }}\nlabels = {{ team = \"x\", kind = \"t\" }}\n"
    );
    let conman = Conman::builder().toml(&template).start(&docker).await;
    let api = conman.api();
    let request = json!({"template": "echo", "args": ["one", "two words"],
        "env": {"B": "request", "C": "with space and \"quotes\""}, "labels": {"kind": "r"}});
    let session = api.ensure("s", &request).await.session;
    let log = eventually_some("it has printed", PATIENCE, async || {
        let log = api.get("/v1/sessions/s/logs").await.text();
        log.ends_with('\n').then_some(log)
    })
    .await;
    assert_eq!(log, "zero|one|two words\n");
    let environment = exec(&api, "s", &["env"]).await.stdout;
    let generation = format!("CONMAN_GENERATION={}", session.generation);
    for line in [
        "A=template",
        "B=request",
        "C=with space and \"quotes\"",
        "CONMAN_SESSION_ID=s",
        &generation,
    ] {
        assert!(
            environment.lines().any(|own| own == line),
            "{line}: {environment}"
        );
    }
    let labels: Vec<_> = session
        .spec
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    assert_eq!(labels, ["kind=r", "team=x"]);
}

#[tokio::test]
async fn a_session_on_loopback_resolves_its_own_name_and_reaches_nothing_else() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "python"})).await;
    let links = exec(&api, "s", &["ls", "/sys/class/net"]).await.stdout;
    assert!(!links.contains("eth"), "{links}");
    let local = exec(
        &api,
        "s",
        &["wget", "-q", "-O", "-", "http://localhost:8080/"],
    )
    .await;
    assert_eq!(local.exit_code, 0, "{local:?}");
    let out = exec(
        &api,
        "s",
        &[
            "wget",
            "-q",
            "-T",
            "5",
            "-O",
            "-",
            "http://169.254.169.254/",
        ],
    )
    .await;
    assert_ne!(out.exit_code, 0, "{out:?}");
}

#[tokio::test]
async fn binds_carry_the_sessions_id_and_stay_below_the_allow_list() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let outer = tempfile::tempdir().expect("a temporary directory");
    let root = outer.path().canonicalize().expect("it is there");
    let work = root.join("work");
    for directory in ["work/ann", "work/bob", "secret"] {
        fs::create_dir_all(root.join(directory)).expect("a directory");
    }
    fs::write(root.join("secret/key"), "hidden").expect("a file");
    symlink(root.join("secret"), work.join("mallory")).expect("a link");
    let (root, work) = (root.display(), work.display());
    let template = format!(
        "[templates.bound]\nimage = \"{BUSYBOX}\"\ncommand = [\"sleep\", \"1000000\"]\n\
         binds = [\"{work}/{{id}}:/work\"]\n"
    );
    let conman = Conman::builder()
        .set("binds", &format!("allow = [\"{work}\"]"))
        .toml(&template)
        .start(&docker)
        .await;
    let api = conman.api();

    let session = api
        .ensure("ann", &json!({"template": "bound"}))
        .await
        .session;
    assert_eq!(session.spec.binds, [format!("{work}/ann:/work")]);
    let written = exec(&api, "ann", &["sh", "-c", "echo hers > /work/file"]).await;
    assert_eq!(written.exit_code, 0, "{written:?}");
    let path = format!("{work}/ann/file");
    assert_eq!(
        fs::read_to_string(path).expect("it is on the host"),
        "hers\n"
    );

    let read_only = json!({"template": "bound", "binds": [format!("{work}/{{id}}:/work:ro")]});
    api.ensure("bob", &read_only).await;
    let refused = exec(&api, "bob", &["sh", "-c", "echo his > /work/file"]).await;
    assert_ne!(refused.exit_code, 0);
    assert!(refused.stderr.contains("Read-only"), "{refused:?}");

    for (bind, why) in [
        (format!("{root}/secret:/x"), "outside"),
        (format!("{work}/../secret:/x"), "above"),
        ("/etc:/x".to_owned(), "elsewhere"),
        (format!("{work}:/proc"), "over /proc"),
    ] {
        let request = json!({"template": "tiny", "binds": [bind]});
        let problem = api.put("/v1/sessions/eve", &request).await.problem();
        assert_eq!((problem.status, problem.slug()), (422, "bad-spec"), "{why}");
        assert_eq!(problem.errors[0].field, "binds[0]", "{problem:?}");
    }
    // A link that leads out, and a directory that is not there.
    for (id, word) in [("mallory", "link"), ("carol", "does not exist")] {
        let path = format!("/v1/sessions/{id}");
        let problem = api
            .put(&path, &json!({"template": "bound"}))
            .await
            .problem();
        assert_eq!(
            (problem.status, problem.slug()),
            (422, "bind-refused"),
            "{problem:?}"
        );
        assert!(problem.detail.contains(word), "{}", problem.detail);
    }
    assert_eq!(docker.containers_of(&conman.instance()).await.len(), 2);
}
