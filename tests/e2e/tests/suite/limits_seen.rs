//! What a session's programs see of their limits, next to Docker's own containers.

use conman_e2e::{Api, BUSYBOX, Conman, Docker, ROOT, docker_shared, lacks, native};
use conman_proto::ExecResult;
use http::StatusCode;
use serde_json::{Value, json};

const MEMORY: u64 = 512 << 20;

/// Prints the limit of memory as programs read it, in the forms of v2 and v1.
const READ_MEMORY: &str =
    "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null; true";

async fn sh(api: &Api, script: &str) -> ExecResult {
    let request = json!({"command": ["sh", "-c", script], "timeout_ms": 60_000});
    let answer = api.post("/v1/sessions/s/exec", &request).await;
    answer.expect(StatusCode::OK)
}

async fn docker_sh(docker: &Docker, options: &[&str], script: &str) -> String {
    let words = ["run", "--rm", "--network", "none"];
    let rest = [BUSYBOX, "sh", "-c", script];
    docker.run(&[&words[..], options, &rest].concat()).await
}

async fn start(api: &Api, more: &Value) {
    let mut spec = json!({"image": ROOT, "command": ["sleep", "1000000"], "memory_bytes": MEMORY, "cpus": 1.0});
    for (field, value) in more.as_object().expect("an object") {
        spec[field] = value.clone();
    }
    api.ensure("s", &spec).await;
}

#[tokio::test]
async fn programs_see_their_own_limits_and_nothing_of_others() {
    let (Some(native), Some(docker)) = (native(), docker_shared().await) else {
        return;
    };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    start(&api, &json!({})).await;
    let memory = docker_sh(&docker, &["--memory", "512m"], READ_MEMORY).await;
    assert_eq!(memory.trim(), MEMORY.to_string(), "Docker's own");
    let seen = sh(&api, READ_MEMORY).await;
    assert_eq!(seen.stdout.trim(), memory.trim(), "{seen:?}");

    // In the places of the host, and each with the container's own cgroup as its root.
    let mounts = sh(&api, "grep ' - cgroup' /proc/self/mountinfo")
        .await
        .stdout;
    let host = std::fs::read_to_string("/proc/self/mountinfo").expect("readable");
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let (root, place, options) = (fields[3], fields[4], fields[5]);
        assert!(host.contains(&format!(" {place} ")), "{line}");
        assert_eq!(root, "/", "{line}");
        for option in ["ro", "nosuid", "nodev", "noexec"] {
            assert!(options.split(',').any(|one| one == option), "{line}");
        }
    }
    // As many superblocks as before: those of the host.
    let device = |line: &str| line.split(' ').nth(2).map(str::to_owned);
    for line in mounts.lines() {
        let shared = host.lines().any(|other| device(other) == device(line));
        assert!(shared, "{line}");
    }

    // Nothing is writable, and no directory is another's cgroup.
    let script = "find /sys -type d | sort; echo; find /sys -type f -exec sh -c \
        'for f; do (: >>\"$f\") 2>/dev/null && echo \"$f\"; done' - {} +; \
        mkdir /sys/x /sys/fs/cgroup/x /sys/fs/cgroup/memory/x 2>/dev/null && echo made";
    let found = sh(&api, script).await.stdout;
    let (directories, writable) = found.split_once("\n\n").expect("two parts");
    assert_eq!(writable, "", "{found}");
    for directory in directories.lines() {
        let depth = directory.matches('/').count();
        assert!(depth <= 4 && !directory.contains("conman"), "{directories}");
    }
    // What stands in for a cgroup of its own shows no process of another session.
    let script = "cd /sys/fs/cgroup; for f in cpuset/tasks cpuacct/tasks; do if [ -e $f ]; then \
        while read p; do [ -e /proc/$p ] || echo $p; done <$f; fi; done";
    let strangers = sh(&api, script).await;
    assert_eq!(strangers.stdout, "", "{strangers:?}");

    // A command is in the same cgroups, by the same names.
    let own = sh(&api, "cat /proc/self/cgroup; echo; cat /proc/1/cgroup")
        .await
        .stdout;
    let (command, program) = own.split_once("\n\n").expect("two parts");
    assert_eq!(command.trim(), program.trim());
    api.stop("s").await;
}

#[tokio::test]
async fn a_template_leaves_the_view_out() {
    let Some(native) = native() else { return };
    let conman = Conman::builder()
        .toml(&format!("[templates.bare]\nimage = \"{ROOT}\"\nsys = false\ncommand = [\"sleep\", \"1000000\"]\n"))
        .start_native(&native)
        .await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "bare", "memory_bytes": MEMORY}))
        .await;
    let seen = sh(
        &api,
        "ls /sys | wc -l; grep -c ' - cgroup' /proc/self/mountinfo",
    )
    .await;
    assert_eq!(seen.stdout, "0\n0\n", "{seen:?}");
}

#[tokio::test]
async fn fsync_waits_for_the_disk_only_where_a_template_wants_that() {
    let Some(native) = native() else { return };
    let template = |name: &str, durable: bool| {
        format!(
            "[templates.{name}]\nimage = \"{ROOT}\"\ndurable = {durable}\ncommand = [\"sleep\", \"1000000\"]\n"
        )
    };
    let conman = Conman::builder()
        .toml(&(template("fast", false) + &template("safe", true)))
        .start_native(&native)
        .await;
    let api = conman.api();
    for (name, is_volatile) in [("fast", true), ("safe", false)] {
        api.ensure("s", &json!({"template": name})).await;
        let root = sh(&api, "grep ' / / ' /proc/self/mountinfo").await.stdout;
        assert_eq!(root.contains("volatile"), is_volatile, "{root}");
        api.stop("s").await;
    }
}

/// The JVM and Node decide by the files that are mounted, each in its own way. Both are the host's own, bound
/// read-only.
#[tokio::test]
#[ignore = "needs OpenJDK and Node of the distribution; acceptance programs runs it"]
async fn openjdk_and_node_size_themselves_by_their_limits() {
    let Some(native) = native() else { return };
    for program in ["/usr/bin/java", "/usr/bin/node"] {
        if !std::path::Path::new(program).exists() {
            lacks(&format!("there is no {program}"));
            return;
        }
    }
    let binds = "allow = [\"/usr\", \"/etc\"]";
    let conman = Conman::builder()
        .set("binds", binds)
        .start_native(&native)
        .await;
    let api = conman.api();
    let binds = json!([
        "/usr:/usr:ro",
        "/usr/lib:/lib:ro",
        "/usr/lib64:/lib64:ro",
        "/etc:/etc:ro"
    ]);
    start(&api, &json!({"binds": binds})).await;
    // It reads every hierarchy.
    let settings = sh(&api, "java -XshowSettings:system -version 2>&1").await;
    assert_eq!(settings.exit_code, 0, "{settings:?}");
    assert!(
        settings.stdout.contains("Memory Limit: 512.00M"),
        "{settings:?}"
    );
    assert!(
        settings.stdout.contains("Effective CPU Count: 1"),
        "{settings:?}"
    );
    let java = "java -XX:+PrintFlagsFinal -version 2>/dev/null | grep -w MaxHeapSize";
    let seen = sh(&api, java).await;
    let heap: u64 = seen
        .stdout
        .lines()
        .last()
        .and_then(|line| line.split_whitespace().nth(3))
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("{seen:?}"));
    assert!(
        (100 << 20..200 << 20).contains(&heap),
        "{heap}: {}",
        seen.stdout
    );
    let node = "node -p 'process.constrainedMemory?.() ?? require(\"v8\").getHeapStatistics().heap_size_limit'";
    let seen = sh(&api, node).await;
    let limit: u64 = seen
        .stdout
        .trim()
        .parse()
        .unwrap_or_else(|_| panic!("{seen:?}"));
    assert!(limit <= MEMORY, "{seen:?}");
}
