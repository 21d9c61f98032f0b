//! Images that are made to hurt: their archives, their links and their configuration.

use serde_json::{Value, json};

use crate::image::Entry;
use crate::world::{CANARY, Verdict, World};

/// Says `LEAK` where /proc or a device is not what conman puts there.
const CHECK: &str = "grep -q ' /proc proc ' /proc/mounts || echo LEAK: no proc; \
    grep -q NoNewPrivs:.1 /proc/self/status || echo LEAK: privileges; \
    [ -s /proc/keys ] && echo LEAK: keys; [ -w /proc/sysrq-trigger ] && echo LEAK: sysrq; \
    [ -c /dev/null ] || echo LEAK: null; \
    grep -q . /proc/timer_list && echo LEAK: timers; \
    grep -q 'sysrq\\|core_pattern' /proc/mounts && echo LEAK: a mount; true";

async fn with_links(world: &World, name: &str, links: &[(&str, &str)], more: Value) -> Verdict {
    let entries: Vec<Entry<'_>> = links
        .iter()
        .map(|(path, to)| Entry::Link(path, to))
        .collect();
    match world.import(name, &json!({}), &entries).await {
        Err(refusal) => Verdict::Held(refusal),
        Ok(image) => match world.run_image(&image, CHECK, more).await {
            Err(refusal) => Verdict::Held(refusal),
            Ok(log) => Verdict::reached_if(log.contains("LEAK"), log),
        },
    }
}

/// /proc and /sys of the image are links: also CVE-2023-27561 (runc) and CVE-2025-54867 (youki).
pub(crate) async fn cve_2019_19921(world: &World) -> Verdict {
    with_links(
        world,
        "proc-link",
        &[("proc", "/tmp"), ("sys", "/tmp")],
        json!({}),
    )
    .await
}

/// /dev/null of the image is a link, by which masks would be made: also CVE-2025-62161 (youki).
pub(crate) async fn cve_2025_31133(world: &World) -> Verdict {
    let links = [
        ("dev/null", "/proc/sysrq-trigger"),
        ("dev/zero", "/proc/keys"),
    ];
    with_links(world, "null-link", &links, json!({})).await
}

/// The console of the image is a link: also by way of its pseudo terminals.
pub(crate) async fn cve_2025_52565(world: &World) -> Verdict {
    let links = [
        ("dev/console", "/proc/sysrq-trigger"),
        ("dev/pts", "/proc/sys/kernel"),
        ("dev/ptmx", "/proc/keys"),
    ];
    with_links(world, "console-link", &links, json!({"tty": true})).await
}

/// Writes to /proc are led elsewhere by links in it; the target of a bind is one of these.
pub(crate) async fn cve_2025_52881(world: &World) -> Verdict {
    let source = world.bindable("attr");
    let bind = format!("{}:/data/attr", source.display());
    with_links(
        world,
        "attr-link",
        &[("data", "/proc/self")],
        json!({"binds": [bind]}),
    )
    .await
}

/// What conman itself writes into a root is led to the host by links.
pub(crate) async fn files_led_out_by_links(world: &World) -> Verdict {
    let canary = world.canary();
    let file = canary.join("file").to_string_lossy().into_owned();
    let directory = canary.to_string_lossy().into_owned();
    let up = format!("../../../../../../../../../../..{file}");
    let mut said = Vec::new();
    for links in [
        vec![
            ("etc/hosts", &*file),
            ("etc/resolv.conf", &*file),
            ("etc/hostname", &*file),
        ],
        vec![
            ("etc/hosts", &*up),
            ("etc/resolv.conf", &*up),
            ("etc/hostname", &*up),
        ],
        vec![("etc", &*directory)],
    ] {
        let verdict = with_links(world, "etc-link", &links, json!({})).await;
        if let Some(damage) = world.canary_damage() {
            return Verdict::Reached(damage);
        }
        said.push(verdict);
    }
    Verdict::Held(format!("the host's files are as they were; {said:?}"))
}

/// Users are read from a file that never ends, or that gives no byte.
pub(crate) async fn endless_user_files(world: &World) -> Verdict {
    let large = "x:".repeat(4 << 20);
    for entries in [
        vec![
            Entry::Directory("etc"),
            Entry::Fifo("etc/passwd"),
            Entry::Fifo("etc/group"),
        ],
        vec![
            Entry::Link("etc/passwd", "/dev/zero"),
            Entry::Link("etc/group", "/dev/zero"),
        ],
        vec![
            Entry::Link("etc/passwd", "/proc/1/mem"),
            Entry::Link("etc/group", "/dev/tty"),
        ],
        vec![
            Entry::File("etc/passwd", &large),
            Entry::File("etc/group", &large),
        ],
    ] {
        let config = json!({"User": "nobody-knows:none"});
        let Ok(image) = world.import("users", &config, &entries).await else {
            continue;
        };
        let begun = tokio::time::Instant::now();
        if world.run_image(&image, "true", json!({})).await.is_ok() {
            return Verdict::Reached("a user that does not exist runs a program".to_owned());
        }
        if begun.elapsed().as_secs() >= 15 {
            return Verdict::Reached("the start waits for the image".to_owned());
        }
    }
    Verdict::Held("each start was refused at once".to_owned())
}

/// A numeric user is a number, whatever a line of /etc/passwd calls itself.
pub(crate) async fn cve_2016_3697(world: &World) -> Verdict {
    let entries = [Entry::File(
        "etc/passwd",
        "root:x:0:0::/:/bin/sh\n1000:x:0:0::/:/bin/sh\n",
    )];
    let image = world
        .import("numeric", &json!({"User": "1000"}), &entries)
        .await;
    let image = image.expect("it is a proper image");
    match world.run_image(&image, "id -u", json!({})).await {
        Ok(log) => Verdict::reached_if(log.contains("0\n") && !log.contains("1000"), log),
        Err(refusal) => Verdict::Held(refusal),
    }
}

/// Volumes of an image whose paths lead out of it are copied into the container.
pub(crate) async fn cve_2022_23648(world: &World) -> Verdict {
    let canary = world.canary();
    let up = format!("/../../../../../../../..{}", canary.display());
    let config = json!({"Volumes": {&up: {}, canary.to_string_lossy(): {}}});
    let Ok(image) = world.import("volume", &config, &[]).await else {
        return Verdict::Held("refused".to_owned());
    };
    let script = format!("cat {}/file", canary.display());
    match world.run_image(&image, &script, json!({})).await {
        Ok(log) => Verdict::reached_if(log.contains(CANARY.trim()), log),
        Err(refusal) => Verdict::Held(refusal),
    }
}

/// Entries of a layer that lie outside of it, by name or through links.
pub(crate) async fn entries_out_of_a_layer(world: &World) -> Verdict {
    let canary = world.canary();
    let up = format!("../../../../../../../../../..{}", canary.display());
    let through_parent = format!("{up}/planted");
    let absolute = format!("{}/planted", canary.display());
    let target = canary.to_string_lossy().into_owned();
    let file = format!("{target}/file");
    let attacks: [(&str, Vec<Entry<'_>>); 5] = [
        ("parent", vec![Entry::File(&through_parent, "x")]),
        ("absolute", vec![Entry::File(&absolute, "x")]),
        (
            "link",
            vec![Entry::Link("out", &target), Entry::File("out/planted", "x")],
        ),
        (
            "up",
            vec![Entry::Link("out", &up), Entry::File("out/planted", "x")],
        ),
        (
            "hard",
            vec![
                Entry::HardLink("copy", &file),
                Entry::File("copy", "changed\n"),
            ],
        ),
    ];
    for (name, entries) in attacks {
        let _ = world.import(name, &json!({}), &entries).await;
        if let Some(damage) = world.canary_damage() {
            return Verdict::Reached(format!("{name}: {damage}"));
        }
    }
    Verdict::Held("the host's files are as they were".to_owned())
}

/// A hard link to a file of the host is readable in the container.
pub(crate) async fn hard_link_to_the_host(world: &World) -> Verdict {
    let canary = world.canary();
    let file = format!("{}/file", canary.display());
    let up = format!("../../../../../../../../..{file}");
    for target in [&file, &up] {
        if let Ok(image) = world
            .import("hard", &json!({}), &[Entry::HardLink("seen", target)])
            .await
            && let Ok(log) = world.run_image(&image, "cat /seen", json!({})).await
            && log.contains(CANARY.trim())
        {
            return Verdict::Reached(log);
        }
    }
    Verdict::Held("refused, or not there".to_owned())
}

/// A device in a layer.
pub(crate) async fn device_in_a_layer(world: &World) -> Verdict {
    match world
        .import("device", &json!({}), &[Entry::Disk("disk")])
        .await
    {
        Err(refusal) => Verdict::Held(refusal),
        Ok(image) => match world
            .run_image(&image, "[ -b /disk ] && echo LEAK; true", json!({}))
            .await
        {
            Err(refusal) => Verdict::Held(refusal),
            Ok(log) => Verdict::reached_if(log.contains("LEAK"), log),
        },
    }
}

/// Every start copies the image's environment and command line.
pub(crate) async fn huge_configuration(world: &World) -> Verdict {
    let variable = format!("A={}", "x".repeat(1_500_000));
    let mut accepted = Vec::new();
    let plain = [Entry::File("plain", "x")];
    let control = world
        .import("plain", &json!({"Env": ["A=b"]}), &plain)
        .await;
    control.expect("a plain image is imported");
    for (name, config) in [
        ("environment", json!({"Env": [variable]})),
        ("arguments", json!({"Cmd": vec!["x"; 100_000]})),
    ] {
        if world.import(name, &config, &plain).await.is_ok() {
            accepted.push(name);
        }
    }
    Verdict::reached_if(!accepted.is_empty(), format!("accepted: {accepted:?}"))
}
