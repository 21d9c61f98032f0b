//! Memory, processes, CPU and disk beyond a session's limits.

use std::path::{Path, PathBuf};
use std::time::Duration;

use conman_e2e::resident_bytes;
use http::StatusCode;
use serde_json::{Value, json};

use crate::world::{Verdict, World, line_with, wait_for};

/// Well beyond what a session may have, and little for this machine.
const WANTED_MEBIBYTES: &str = "256";

/// How long a session with too much may live.
const PATIENCE: Duration = Duration::from_secs(20);

/// Fills memory in this way: the session is killed, or refused before it has what it wants.
async fn memory(world: &World, how: &str) -> Verdict {
    let id = world.id(how);
    let mut spec = world.spec(&["fill_memory", how, WANTED_MEBIBYTES]);
    spec["cpus"] = json!(1.0);
    let _ = world.order(&id, &spec).await;
    let outcome = wait_for(PATIENCE, async || {
        let log = world.log(&id).await;
        let line = line_with(&log, "taken");
        let line = if line.is_empty() {
            line_with(&log, "stopped")
        } else {
            line
        };
        if !line.is_empty() {
            return Some(line.to_owned());
        }
        let ended = world.api().session(&id).await.state.is_ended();
        ended.then(|| "the session was killed".to_owned())
    })
    .await;
    world.stop(&id).await;
    let outcome = outcome.unwrap_or_else(|| "neither killed nor full".to_owned());
    Verdict::reached_if(outcome.starts_with("taken"), outcome)
}

pub(crate) async fn anonymous_memory(world: &World) -> Verdict {
    memory(world, "anonymous").await
}
pub(crate) async fn memory_files(world: &World) -> Verdict {
    memory(world, "memfd").await
}
pub(crate) async fn system_v_memory(world: &World) -> Verdict {
    memory(world, "sysv").await
}
pub(crate) async fn pipe_buffers(world: &World) -> Verdict {
    memory(world, "pipes").await
}
pub(crate) async fn socket_buffers(world: &World) -> Verdict {
    memory(world, "sockets").await
}
pub(crate) async fn network_buffers(world: &World) -> Verdict {
    if Path::new("/sys/fs/cgroup/memory/memory.kmem.tcp.limit_in_bytes").exists() {
        // Each of many connections may have its smallest buffers.
        return Verdict::Skipped("cgroup v1 bounds buffers of TCP only in part");
    }
    memory(world, "listeners").await
}

/// Tasks of a session: the 64 of its spec, and its init.
const MOST_TASKS: usize = 64 + 1;

/// Processes, or threads, up to the session's limit.
async fn processes(world: &World, bomb: &str) -> Verdict {
    let (id, _) = world.helper("bomb", &[bomb], "forking").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let count: usize = world
        .processes(&id)
        .iter()
        .map(|one| std::fs::read_dir(format!("/proc/{}/task", one.pid)).map_or(0, Iterator::count))
        .sum();
    world.stop(&id).await;
    let left = world.processes(&id).len();
    Verdict::reached_if(
        count > MOST_TASKS || left > 0,
        format!("{count} tasks, {left} left"),
    )
}

pub(crate) async fn fork_bomb(world: &World) -> Verdict {
    processes(world, "fork_bomb").await
}
pub(crate) async fn thread_bomb(world: &World) -> Verdict {
    processes(world, "thread_bomb").await
}

pub(crate) async fn cpu_share(world: &World) -> Verdict {
    let mut spec = world.spec(&["cpu_share", "8", "3"]);
    spec["cpus"] = json!(0.1);
    let id = world.id("share");
    let log = world.start_until(&id, &spec, "share").await;
    world.stop(&id).await;
    let line = line_with(&log, "share");
    let share: u32 = line
        .rsplit(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .unwrap_or(u32::MAX);
    Verdict::reached_if(share > 200, format!("{line} thousandths of 100"))
}

/// The files of this name in the cgroups of a session.
fn cgroup_files(top: &Path, below: &str, name: &str, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(top).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            let own = path.join(name);
            if path.to_string_lossy().contains(below) && own.exists() {
                found.push(own);
            }
            let near = path.components().count() < 6 || path.to_string_lossy().contains("conman-");
            if near {
                cgroup_files(&path, below, name, found);
            }
        }
    }
}

/// A session of which nothing is said has limits of memory and processes.
pub(crate) async fn default_limits(world: &World) -> Verdict {
    let id = world.id("default");
    let mut spec = world.spec(&["sleep_long"]);
    for field in ["memory_bytes", "pids", "cpus"] {
        spec.as_object_mut().expect("an object").remove(field);
    }
    world.api().ensure(&id, &spec).await;
    let below = format!("conman-{}/{id}.", world.conman.instance());
    let mut unlimited = Vec::new();
    for (what, names) in [
        ("memory", ["memory.max", "memory.limit_in_bytes"]),
        ("processes", ["pids.max", "pids.max"]),
    ] {
        let mut found = Vec::new();
        for name in names {
            cgroup_files(Path::new("/sys/fs/cgroup"), &below, name, &mut found);
        }
        let bounded = found.iter().any(|path| {
            let value = std::fs::read_to_string(path).unwrap_or_default();
            value
                .trim()
                .parse::<u64>()
                .is_ok_and(|value| value < 1 << 60)
        });
        if !bounded {
            unlimited.push(what);
        }
    }
    let spec = serde_json::to_value(world.api().session(&id).await.spec).expect("JSON");
    if spec.get("disk_bytes").is_none_or(Value::is_null) {
        unlimited.push("disk");
    }
    world.stop(&id).await;
    Verdict::reached_if(
        !unlimited.is_empty(),
        format!("without a limit: {unlimited:?}"),
    )
}

/// Fills the disk in this way: writes fail, or the session is ended within seconds.
async fn disk(world: &World, how: &str, amount: &str) -> Verdict {
    let id = world.id(how);
    let mut spec = world.spec(&["fill_disk", how, amount]);
    spec["disk_bytes"] = json!(64 << 20);
    spec["disk_inodes"] = json!(2_000);
    let answer = world.order(&id, &spec).await;
    if answer.status != StatusCode::OK {
        let limited = !answer.text().contains("disk_bytes");
        let why = format!("{}: {}", answer.status, answer.text());
        return Verdict::reached_if(!limited, why);
    }
    let log = wait_for(PATIENCE, async || {
        let log = world.log(&id).await;
        let ended = world.api().session(&id).await.state.is_ended();
        (ended || log.contains("stopped") || log.contains("taken")).then_some(log)
    })
    .await
    .unwrap_or_default();
    // Accounting may need some seconds.
    let ended = wait_for(Duration::from_secs(10), async || {
        let session = world.api().session(&id).await;
        (session.state.is_ended() || log.contains("stopped")).then_some(())
    })
    .await;
    world.stop(&id).await;
    Verdict::reached_if(ended.is_none(), log)
}

pub(crate) async fn large_file(world: &World) -> Verdict {
    disk(world, "large", "192").await
}
pub(crate) async fn unlinked_file(world: &World) -> Verdict {
    disk(world, "unlinked", "192").await
}
pub(crate) async fn allocated_file(world: &World) -> Verdict {
    disk(world, "fallocate", "192").await
}
/// /dev/shm is a directory of the session's own file system.
pub(crate) async fn shared_memory(world: &World) -> Verdict {
    disk(world, "shm", "192").await
}
pub(crate) async fn many_files(world: &World) -> Verdict {
    disk(world, "inodes", "20000").await
}

/// With `own_filters` in the template a program's filters work, and without it they do not.
pub(crate) async fn filters_of_a_template(world: &World) -> Verdict {
    let mut installed = Vec::new();
    for template in [Value::Null, json!("filters")] {
        let mut spec = world.spec(&["sleep_long"]);
        spec["template"] = template;
        let id = world.id("filters");
        world.api().ensure(&id, &spec).await;
        let command = ["python3", "/inside.py", "try", "own_filters"];
        installed.push(world.exec(&id, &command).await.stdout);
        world.stop(&id).await;
    }
    let expected = ["own_filters held", "own_filters reached: seccomp"];
    let mut pairs = installed.iter().zip(expected);
    let wrong = !pairs.all(|(text, expected)| text.contains(expected));
    Verdict::reached_if(wrong, installed.join("; "))
}

/// Commands that write without end do not fill the daemon's memory.
pub(crate) async fn cve_2022_31030(world: &World) -> Verdict {
    let id = world.id("output");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let pids = [world.conman.pid(), world.conman.shim_pid()];
    let before: u64 = pids.iter().map(|pid| resident_bytes(*pid)).sum();
    let request = json!({"command": ["cat", "/dev/zero"], "timeout_ms": 2_000});
    let execs = (0..8).map(|_| world.exec_answer(&id, &request));
    futures_util::future::join_all(execs).await;
    let after: u64 = pids.iter().map(|pid| resident_bytes(*pid)).sum();
    world.stop(&id).await;
    let more = after.saturating_sub(before) >> 20;
    Verdict::reached_if(
        more > 160,
        format!("{more} MiB more in the daemon and the shim"),
    )
}
