//! Attacks of a session on its own log.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use http::Method;
use tokio::time::{Instant, timeout};

use crate::world::{Verdict, World, line_with, wait_for};

/// Room that a log may take, its bound and what is written between two looks at it.
const MOST_BYTES: u64 = 48 << 20;

/// Time within which `conman logs` answers.
const ANSWER: Duration = Duration::from_secs(5);

/// What is on the host after the attack.
struct Damage {
    blocks: u64,
    mode: u32,
    owner: u32,
    answered: bool,
    log: String,
    file: String,
}

async fn attack(world: &World, how: &str) -> Damage {
    let id = world.id("log");
    world
        .api()
        .ensure(&id, &world.spec(&["abuse_log", how]))
        .await;
    let path = world.log_file(&id);
    // Read directly: conman itself may be what the attack keeps from answering.
    let file = wait_for(Duration::from_secs(15), async || {
        use rustix::fs::{Mode, OFlags};
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let opened = rustix::fs::open(&path, flags, Mode::empty()).ok()?;
        let mut tail = Vec::new();
        let mut file = std::fs::File::from(opened);
        let size = file.metadata().ok()?.len();
        let from = size.saturating_sub(4096).min(1 << 30);
        std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(from)).ok()?;
        std::io::Read::read_to_end(&mut std::io::Read::take(file, 4096), &mut tail).ok()?;
        let text = String::from_utf8_lossy(&tail).into_owned();
        (text.contains("done") || size > 1 << 30).then_some(text)
    })
    .await;
    // The shim bounds logs every second or so.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let data = std::fs::symlink_metadata(&path);
    let begun = Instant::now();
    let api = world.api();
    let shown = format!("/v1/sessions/{id}/logs?tail=50");
    let answer = timeout(ANSWER, api.try_send(Method::GET, &shown, None)).await;
    let log = match answer {
        Ok(Ok(answer)) => answer.text(),
        _ => String::new(),
    };
    let answered = begun.elapsed() < ANSWER;
    world.stop(&id).await;
    Damage {
        blocks: data.as_ref().map_or(0, |data| data.blocks() * 512),
        mode: data.as_ref().map_or(0, |data| data.mode() & 0o7777),
        owner: data.as_ref().map_or(0, MetadataExt::uid),
        answered,
        log,
        file: file.unwrap_or_default(),
    }
}

fn bounded(damage: &Damage) -> Verdict {
    let mebibytes = damage.blocks >> 20;
    if !damage.answered {
        return Verdict::Reached("the log is not answered".to_owned());
    }
    let said = line_with(&damage.log, "refused").to_owned();
    Verdict::reached_if(
        damage.blocks > MOST_BYTES,
        format!("{mebibytes} MiB on the host; {said}"),
    )
}

/// Blocks beyond the end of the file, which its size does not show.
pub(crate) async fn allocated_log(world: &World) -> Verdict {
    bounded(&attack(world, "fallocate").await)
}

/// A lease makes everyone who opens the log wait for up to 45 seconds.
pub(crate) async fn leased_log(world: &World) -> Verdict {
    bounded(&attack(world, "lease").await)
}

pub(crate) async fn leased_log_of_standard_output(world: &World) -> Verdict {
    bounded(&attack(world, "lease-write").await)
}

pub(crate) async fn locked_log(world: &World) -> Verdict {
    bounded(&attack(world, "lock").await)
}

pub(crate) async fn flooded_log(world: &World) -> Verdict {
    bounded(&attack(world, "flood").await)
}

/// A log of 1 TiB without a block in it is answered and bounded like any other.
pub(crate) async fn stretched_log(world: &World) -> Verdict {
    bounded(&attack(world, "truncate").await)
}

/// A session may lose its own lines, and nothing else.
pub(crate) async fn erased_log(world: &World) -> Verdict {
    bounded(&attack(world, "erase").await)
}

pub(crate) async fn overwritten_log(world: &World) -> Verdict {
    bounded(&attack(world, "overwrite").await)
}

/// The log is a file on the host: a set-user-id program there would be one for all of its users.
pub(crate) async fn mode_of_the_log(world: &World) -> Verdict {
    let damage = attack(world, "chmod").await;
    let reached = damage.mode & 0o6111 != 0;
    Verdict::reached_if(
        reached,
        format!(
            "mode {:o}, owner {}; {}",
            damage.mode,
            damage.owner,
            line_with(&damage.file, "refused")
        ),
    )
}
