//! What enters a session from outside: its first process, and the commands of execs.

use http::StatusCode;
use serde_json::json;

use crate::world::{Verdict, World, line_with};

/// Work directories by descriptor, from the first that a launcher may hold.
const DESCRIPTORS: std::ops::Range<u32> = 3..24;

/// Whether the top of the work directory's tree is another one than the session's root; without a
/// library, so that nothing is opened.
const WHERE: &str = "[ / -ef ../../../../../../../../../../../.. ] && echo inside || echo OUTSIDE";

async fn exec_in(world: &World, id: &str, workdir: &str) -> Option<String> {
    let request = json!({"command": ["/bin/sh", "-c", WHERE], "workdir": workdir});
    let answer = world.exec_answer(id, &request).await;
    let text = answer.text();
    (answer.status == StatusCode::OK && text.contains("OUTSIDE")).then(|| workdir.to_owned())
}

/// An exec whose work directory is a descriptor of the program that starts it.
pub(crate) async fn cve_2024_21626(world: &World) -> Verdict {
    let (id, _) = world
        .helper("workdir", &["show_first_descriptors"], "descriptors")
        .await;
    let (id_of_sleeper, _) = (world.id("workdir"), world.stop(&id).await);
    world
        .api()
        .ensure(&id_of_sleeper, &world.spec(&["sleep_long"]))
        .await;
    let mut found = Vec::new();
    for number in DESCRIPTORS {
        found.extend(exec_in(world, &id_of_sleeper, &format!("/proc/self/fd/{number}")).await);
    }
    world.stop(&id_of_sleeper).await;
    Verdict::reached_if(!found.is_empty(), format!("outside from {found:?}"))
}

/// The same through a symbolic link that the session has put in a work directory's place.
pub(crate) async fn work_directory_by_link(world: &World) -> Verdict {
    let id = world.id("link");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let links = "mkdir -p /work; for n in $(seq 3 23); do ln -s /proc/self/fd/$n /work/$n; done";
    world.exec(&id, &["/bin/busybox", "sh", "-c", links]).await;
    let mut found = Vec::new();
    for number in DESCRIPTORS {
        found.extend(exec_in(world, &id, &format!("/work/{number}")).await);
    }
    world.stop(&id).await;
    Verdict::reached_if(!found.is_empty(), format!("outside from {found:?}"))
}

/// The same as the work directory of an image.
pub(crate) async fn work_directory_of_an_image(world: &World) -> Verdict {
    let mut found = Vec::new();
    for number in 5..16 {
        let workdir = format!("/proc/self/fd/{number}");
        let Ok(image) = world
            .import("workdir", &json!({"WorkingDir": workdir}), &[])
            .await
        else {
            continue;
        };
        if let Ok(log) = world.run_image(&image, WHERE, json!({})).await
            && log.contains("OUTSIDE")
        {
            found.push(workdir);
        }
    }
    Verdict::reached_if(!found.is_empty(), format!("outside from {found:?}"))
}

/// A work directory that does not exist is an error, and not another directory.
pub(crate) async fn missing_work_directory(world: &World) -> Verdict {
    let id = world.id("missing");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let request = json!({"command": ["/bin/sh", "-c", "pwd"], "workdir": "/no/such/directory"});
    let answer = world.exec_answer(&id, &request).await;
    world.stop(&id).await;
    let wrong = answer.status == StatusCode::OK && answer.json()["exit_code"] == 0;
    Verdict::reached_if(wrong, format!("{}: {}", answer.status, answer.text()))
}

/// The first process has its three standard descriptors and no other.
pub(crate) async fn descriptors_of_the_first_process(world: &World) -> Verdict {
    let (id, log) = world
        .helper("first", &["show_first_descriptors"], "descriptors")
        .await;
    world.stop(&id).await;
    let line = line_with(&log, "descriptors");
    Verdict::reached_if(line != "descriptors []", line)
}

/// The same for the command of an exec.
pub(crate) async fn descriptors_of_a_command(world: &World) -> Verdict {
    let id = world.id("command");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let result = world
        .exec(&id, &["python3", "/inside.py", "first_descriptors"])
        .await;
    world.stop(&id).await;
    let line = line_with(&result.stdout, "descriptors").to_owned();
    Verdict::reached_if(line != "descriptors []", line)
}

/// Watches every process that enters, while these commands do.
async fn watched(world: &World, commands: &[&[&str]]) -> Verdict {
    let spec = world.spec(&["watch_entering", "4"]);
    let id = world.id("watch");
    world.start_until(&id, &spec, "watching").await;
    for command in commands.iter().cycle().take(16) {
        world.exec_answer(&id, &json!({"command": command})).await;
    }
    let end = std::time::Duration::from_secs(15);
    let log = crate::world::wait_for(end, async || {
        let log = world.log(&id).await;
        log.contains("to the end").then_some(log)
    })
    .await;
    world.stop(&id).await;
    let log = log.unwrap_or_default();
    let line = line_with(&log, "reached");
    if line.is_empty() {
        Verdict::Held(line_with(&log, "watched").to_owned())
    } else {
        Verdict::Reached(line.to_owned())
    }
}

/// A process that enters is open to those inside before it has dropped what it holds.
pub(crate) async fn cve_2016_9962(world: &World) -> Verdict {
    watched(world, &[&["true"], &["/bin/sh", "-c", "true"]]).await
}

/// The program that starts containers is run inside, and written to through its own descriptor.
pub(crate) async fn cve_2019_5736(world: &World) -> Verdict {
    watched(
        world,
        &[
            &["/proc/self/exe", "shim"],
            &["/proc/self/exe", "sleep", "1"],
        ],
    )
    .await
}

/// A user id beyond 32 bits, which would be root once it is cut off.
pub(crate) async fn cve_2024_40635(world: &World) -> Verdict {
    let id = world.id("overflow");
    world.api().ensure(&id, &world.spec(&["sleep_long"])).await;
    let mut found = Vec::new();
    for user in [
        "4294967296",
        "4294967295",
        "2147483648",
        "65536",
        "-1",
        "1000:4294967296",
    ] {
        let request = json!({"command": ["id", "-u"], "user": user});
        let answer = world.exec_answer(&id, &request).await;
        if answer.status == StatusCode::OK && answer.json()["stdout"] == "0\n" {
            found.push(user);
        }
    }
    world.stop(&id).await;
    Verdict::reached_if(!found.is_empty(), format!("root as {found:?}"))
}
