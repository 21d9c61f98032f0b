//! Directories of the host in a session, and what a session leaves or finds there.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use http::StatusCode;
use serde_json::json;

use crate::world::{CANARY, Verdict, World, exists};

/// Owners below this are the host's own, logins among them.
const FIRST_FOREIGN_ID: u32 = 65_536;

/// Runs `in_bind` with a directory of the host at /bind.
async fn in_bind(world: &World, how: &str, more: &str) -> (std::path::PathBuf, String) {
    let source = world.bindable(how);
    fs::set_permissions(&source, fs::Permissions::from_mode(0o777)).expect("set");
    let mut spec = world.spec(&["in_bind", how, "/bind"]);
    spec["binds"] = json!([format!("{}:/bind{more}", source.display())]);
    spec["command"] = json!([
        "/bin/sh",
        "-c",
        format!("python3 /inside.py in_bind {how} /bind; echo ended; exec sleep 1000000")
    ]);
    let id = world.id("bind");
    let log = world.start_until(&id, &spec, "ended").await;
    world.stop(&id).await;
    (source, log)
}

fn owner(path: &Path) -> Option<(u32, u32)> {
    let data = fs::symlink_metadata(path).ok()?;
    Some((data.uid(), data.mode() & 0o7777))
}

/// A set-user-id program in a bind is, on the host, a program of an owner that is nobody's.
pub(crate) async fn set_user_id_in_a_bind(world: &World) -> Verdict {
    let (source, log) = in_bind(world, "suid", "").await;
    match owner(&source.join("suid")) {
        None => Verdict::Held(log),
        Some((uid, mode)) => {
            let harmful = uid < FIRST_FOREIGN_ID && mode & 0o6000 != 0;
            Verdict::reached_if(harmful, format!("uid {uid}, mode {mode:o} on the host"))
        }
    }
}

/// The same for an ordinary file: root inside is not root on the host.
pub(crate) async fn owner_in_a_bind(world: &World) -> Verdict {
    let (source, log) = in_bind(world, "chown", "").await;
    match owner(&source.join("owned")) {
        None => Verdict::Held(log),
        Some((uid, _)) => {
            Verdict::reached_if(uid < FIRST_FOREIGN_ID, format!("uid {uid} on the host"))
        }
    }
}

pub(crate) async fn device_in_a_bind(world: &World) -> Verdict {
    let (source, log) = in_bind(world, "node", "").await;
    Verdict::reached_if(exists(&source.join("node")), log)
}

/// File capabilities that count on the host: those whose root is the host's.
pub(crate) async fn capability_in_a_bind(world: &World) -> Verdict {
    let (source, log) = in_bind(world, "capability", "").await;
    let mut value = [0_u8; 64];
    let path = source.join("capable");
    let got = rustix::fs::getxattr(&path, c"security.capability", &mut value);
    // Version 3 with another root id than 0 has 24 bytes.
    let root_id = value[20..24].iter().any(|byte| *byte != 0);
    let harmful = got.is_ok_and(|length| length < 24 || !root_id);
    Verdict::reached_if(harmful, log)
}

pub(crate) async fn write_to_a_read_only_bind(world: &World) -> Verdict {
    let (source, log) = in_bind(world, "write", ":ro").await;
    Verdict::reached_if(exists(&source.join("written")), log)
}

/// A link that one session leaves in a shared directory is the source of another one's bind.
pub(crate) async fn bind_source_by_link(world: &World) -> Verdict {
    let shared = world.bindable("shared");
    for (name, target) in [
        ("absolute", world.canary()),
        ("relative", Path::new("../../canary").to_path_buf()),
    ] {
        symlink(target, shared.join(name)).expect("linked");
        for source in [shared.join(name), shared.join(name).join("file")] {
            let mut spec = world.spec(&[]);
            spec["command"] = json!([
                "/bin/sh",
                "-c",
                "cat /bind /bind/file; echo ended; exec sleep 1000"
            ]);
            spec["binds"] = json!([format!("{}:/bind:ro", source.display())]);
            let id = world.id("source");
            let answer = world.order(&id, &spec).await;
            if answer.status == StatusCode::OK {
                let log = conman_e2e::log_with(&world.api(), &id, "ended").await;
                if log.contains(CANARY.trim()) {
                    world.stop(&id).await;
                    return Verdict::Reached(format!("{} is {log}", source.display()));
                }
            }
            world.stop(&id).await;
        }
    }
    Verdict::Held("refused".to_owned())
}

/// Targets where the session's own parts are.
pub(crate) async fn cve_2019_16884(world: &World) -> Verdict {
    let source = world.bindable("over");
    let mut covered = Vec::new();
    for target in [
        "/proc",
        "/proc/self",
        "/proc/sys",
        "/proc/1/attr",
        "/dev/pts",
        "/dev",
        "/",
    ] {
        let mut spec = world.spec(&[]);
        let check = "[ -e /proc/self/status ] && [ -c /dev/null ] && \
            [ ! -w /proc/sys/kernel/panic ] && echo well; echo ended; exec sleep 1000";
        spec["command"] = json!(["/bin/sh", "-c", check]);
        spec["binds"] = json!([format!("{}:{target}", source.display())]);
        let id = world.id("over");
        let answer = world.order(&id, &spec).await;
        if answer.status == StatusCode::OK {
            let log = conman_e2e::log_with(&world.api(), &id, "ended").await;
            if !log.contains("well") {
                covered.push(target);
            }
        }
        world.stop(&id).await;
    }
    Verdict::reached_if(!covered.is_empty(), format!("covered: {covered:?}"))
}

/// One session exchanges a directory for a link while another one's bind is put there: runc's
/// CVE-2021-30465, and CVE-2024-45310 for the directories that are made on the way.
pub(crate) async fn cve_2021_30465(world: &World) -> Verdict {
    let shared = world.bindable("race");
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o777)).expect("set");
    let other = world.bindable("other");
    let canary = world.canary().to_string_lossy().into_owned();
    let mut attacker = world.spec(&["swap_link", "/v", "x", &canary, "30"]);
    attacker["binds"] = json!([format!("{}:/v", shared.display())]);
    let id = world.id("race");
    world.start_until(&id, &attacker, "swapping").await;
    let mut damage = None;
    for _ in 0..10 {
        let victim = world.id("victim");
        let mut spec = world.spec(&["sleep_long"]);
        spec["binds"] = json!([
            format!("{}:/v", shared.display()),
            format!("{}:/v/x/made", other.display())
        ]);
        world.order(&victim, &spec).await;
        world.stop(&victim).await;
        damage = damage.or_else(|| world.canary_damage());
    }
    world.stop(&id).await;
    match damage {
        Some(damage) => Verdict::Reached(format!("on the host: {damage}")),
        None => Verdict::Held("nothing on the host has changed".to_owned()),
    }
}

/// Directories that are made for a bind's target, where the image has a link to the host.
pub(crate) async fn cve_2024_45310(world: &World) -> Verdict {
    let shared = world.bindable("made");
    let canary = world.canary();
    symlink(&canary, shared.join("link")).expect("linked");
    let other = world.bindable("other");
    let mut spec = world.spec(&["sleep_long"]);
    spec["binds"] = json!([
        format!("{}:/v", shared.display()),
        format!("{}:/v/link/made", other.display())
    ]);
    let id = world.id("made");
    let answer = world.order(&id, &spec).await;
    world.stop(&id).await;
    match world.canary_damage() {
        Some(damage) => Verdict::Reached(format!("on the host: {damage}")),
        None => Verdict::Held(format!("{}", answer.status)),
    }
}
