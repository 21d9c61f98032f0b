//! Checks of what a container finds around it: network, files, variables, limits.

use conman_core::DEFAULT_BIND_FIRST_ID;
use conman_proto::RuntimeKind;

use super::stage::Stage;
use conman_runtime::BindPlan;

pub async fn only_lo_is_there_and_it_is_up(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let interfaces = stage.sh(&container.key, "cat /proc/net/dev").await.stdout;
    let lines = interfaces.lines().filter_map(|line| line.split_once(':'));
    let names: Vec<_> = lines.map(|(name, _)| name.trim()).collect();
    assert_eq!(names, ["lo"], "{interfaces}");
    let addresses = stage.sh(&container.key, "ip addr show dev lo").await.stdout;
    assert!(
        addresses.contains("UP") && addresses.contains("127.0.0.1/8"),
        "{addresses}"
    );
    let routes = stage
        .sh(&container.key, "tail -n +2 /proc/net/route")
        .await
        .stdout;
    assert_eq!(routes, "", "no route leads out");
}

pub async fn names_are_told_by_files_that_cannot_be_changed(stage: &Stage) {
    let container = stage.run_idle("alice").await;
    let hosts = stage.sh(&container.key, "cat /etc/hosts").await.stdout;
    for (address, name) in [
        ("127.0.0.1", "localhost"),
        ("127.0.0.1", "alice"),
        ("::1", "localhost"),
    ] {
        let known = hosts
            .lines()
            .map(str::split_ascii_whitespace)
            .any(|mut words| words.next() == Some(address) && words.any(|word| word == name));
        assert!(known, "{name} is not {address}: {hosts}");
    }
    assert_eq!(
        stage
            .sh(&container.key, "hostname; cat /etc/hostname")
            .await
            .stdout,
        "alice\nalice\n"
    );
    let resolver = stage
        .sh(&container.key, "cat /etc/resolv.conf")
        .await
        .stdout;
    assert!(!resolver.contains("nameserver"), "{resolver}");
    for file in ["/etc/hosts", "/etc/hostname", "/etc/resolv.conf"] {
        let outcome = stage.sh(&container.key, &format!("echo x >>{file}")).await;
        assert_ne!(outcome.exit_code, Some(0), "{file}");
        assert!(
            outcome.stderr.contains("Read-only"),
            "{file}: {}",
            outcome.stderr
        );
    }
    if stage.runtime().kind() == RuntimeKind::Native {
        let mounts = stage.sh(&container.key, "cat /proc/self/mountinfo").await;
        assert!(mounts.stdout.contains(" /etc/hosts "), "{}", mounts.stdout);
        // The host directory of the files is below it.
        let host = stage.dir().to_string_lossy();
        assert!(!mounts.stdout.contains(&*host), "{}", mounts.stdout);
    }
}

pub async fn the_environment_has_the_session_and_its_generation(stage: &Stage) {
    let mut plan = stage.plan("alice", &["sh", "-c", "env; sleep 1000"]);
    plan.spec
        .env
        .insert("GREETING".to_owned(), "hello there = 'you'".to_owned());
    let container = stage.run(&plan).await;
    super::logs::until_logged(stage, &container.key, "CONMAN_SESSION_ID=alice\n").await;
    super::logs::until_logged(stage, &container.key, "CONMAN_GENERATION=7\n").await;
    super::logs::until_logged(stage, &container.key, "GREETING=hello there = 'you'\n").await;
}

pub async fn limits_are_set(stage: &Stage) {
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    plan.spec.memory_bytes = Some(64 << 20);
    plan.spec.pids = 12;
    let container = stage.run(&plan).await;
    // A kernel of the session's own has threads of its own, and their number is bounded with the session's.
    let runs_programs_itself = stage.runtime().runs_programs_itself();
    let own = if plan.spec.has_own_init() { "13" } else { "12" };
    let pids = if runs_programs_itself { own } else { "268" };
    // The values that the host shows: not every container sees its cgroups.
    for (controller, v1, v2, expected) in [
        ("memory", "memory.limit_in_bytes", "memory.max", "67108864"),
        ("pids", "pids.max", "pids.max", pids),
    ] {
        let found = limit(container.pid, controller, v1, v2);
        assert_eq!(found.as_deref(), Some(expected), "{controller}");
    }
    if !runs_programs_itself {
        return;
    }
    let script = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do sleep 5 & done; wait";
    let refused = stage.sh(&container.key, script).await;
    assert!(
        refused.stderr.to_lowercase().contains("fork"),
        "{}",
        refused.stderr
    );
}

/// Returns a limit of the cgroup of a process, of either cgroup version.
fn limit(pid: i32, controller: &str, v1: &str, v2: &str) -> Option<String> {
    let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("readable");
    let own = |wanted: &str| {
        cgroups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':').skip(1);
            let controllers = parts.next()?;
            let path = parts.next()?;
            let held = controllers.split(',').any(|one| one == wanted);
            held.then(|| path.trim_start_matches('/').to_owned())
        })
    };
    let base = std::path::Path::new("/sys/fs/cgroup");
    let old = own(controller).map(|path| base.join(controller).join(path).join(v1));
    let new = own("").into_iter().flat_map(|path| {
        let roots = [base.to_owned(), base.join("unified")];
        roots.map(|root| root.join(&path).join(v2))
    });
    let text = old.into_iter().chain(new);
    let text = text.filter_map(|file| std::fs::read_to_string(file).ok());
    text.map(|text| text.trim().to_owned()).next()
}

pub async fn binds_are_mounted_as_asked(stage: &Stage) {
    let shared = stage.dir().join("shared");
    std::fs::create_dir(&shared).expect("a new directory");
    std::fs::write(shared.join("from-host"), "hello\n").expect("written");
    if has_own_ids(stage) {
        let owner = Some(DEFAULT_BIND_FIRST_ID);
        std::os::unix::fs::chown(&shared, owner, owner).expect("owned");
    }
    let mut plan = stage.plan("alice", &["sleep", "1000"]);
    let bind = |target: &str, read_only| BindPlan {
        root: stage.dir().to_owned(),
        below: "shared".into(),
        target: target.to_owned(),
        read_only,
    };
    plan.binds = vec![bind("/run/writable", false), bind("/run/fixed", true)];
    let container = stage.run(&plan).await;
    let outcome = stage
        .sh(
            &container.key,
            "cat /run/fixed/from-host && echo back >/run/writable/from-container",
        )
        .await;
    assert_eq!(
        (outcome.stdout.as_str(), outcome.exit_code),
        ("hello\n", Some(0))
    );
    let back = std::fs::read_to_string(shared.join("from-container"));
    assert_eq!(back.expect("written by the container"), "back\n");
    let refused = stage
        .sh(&container.key, "echo x >/run/fixed/from-container")
        .await;
    assert!(refused.stderr.contains("Read-only"), "{}", refused.stderr);
}

/// Whether users of its containers are others on the host.
fn has_own_ids(stage: &Stage) -> bool {
    match stage.runtime().kind() {
        RuntimeKind::Native | RuntimeKind::Gvisor | RuntimeKind::Oci(_) => true,
        RuntimeKind::Docker | RuntimeKind::Process => false,
    }
}
