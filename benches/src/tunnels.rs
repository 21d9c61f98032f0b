//! Measures the memory that open tunnels take.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use conman_observer::resident_bytes;
use conman_proto::RuntimeKind;
use futures_util::{StreamExt, TryStreamExt, stream};
use indicatif::ProgressBar;
use serde_json::json;

use crate::arguments::Tunnelling;
use crate::daemon::Daemon;
use crate::docker::Docker;
use crate::image;
use crate::interruption::until_interrupted;
use crate::load::{Client, Target};
use crate::report::{Bar, Chart, Report, shown};

/// Concurrent openings of tunnels.
const PARALLEL: usize = 32;
/// Tunnels opened and closed first, so that one-time allocations of the daemon are not counted.
const WARM_UP: usize = 64;
/// Time until buffers of the handshakes are freed.
const SETTLE: Duration = Duration::from_secs(2);
/// Size of messages on each tunnel.
const MESSAGE_BYTES: usize = 64;

/// Opens tunnels, echoes once on each, leaves them idle, and divides the growth of the daemon's
/// resident memory.
///
/// # Errors
/// When Docker or the image is missing, or a tunnel cannot be opened or does not echo at the end.
pub(crate) async fn tunnels(conman: &Path, options: &Tunnelling) -> Result<Report> {
    let (_scratch, archive) = image::with_this_program()?;
    let docker = Docker::with_image(&archive).await?;
    let daemon = Daemon::start(conman, RuntimeKind::Docker, 1, &archive).await?;
    let measured = until_interrupted(measure(options, &daemon)).await;
    let stopped = daemon.stop(Some(&docker)).await;
    let (before, after) = measured?;
    stopped?;
    let each = after.saturating_sub(before) as f64 / options.count as f64 / 1024.0;
    Ok(Report {
        missed: None,
        title: format!("{} idle tunnels", options.count),
        parts: vec![
            format!(
                "{} KiB of the daemon's memory each ({} MiB before, {} MiB with them)",
                shown(each),
                shown(before as f64 / 1_048_576.0),
                shown(after as f64 / 1_048_576.0),
            )
            .into(),
            Chart::bars(
                "the daemon's memory",
                "KiB",
                vec![Bar::one("conman, a tunnel", each)],
            )
            .into(),
        ],
        json: json!({
            "benchmark": "tunnels", "count": options.count, "kib_each": each,
            "resident_bytes_before": before, "resident_bytes_with_tunnels": after,
        }),
    })
}

async fn measure(options: &Tunnelling, daemon: &Daemon) -> Result<(u64, u64)> {
    conman_linux::raise_nofile().context("raising the limit of open files")?;
    daemon.open_one("echo".to_owned(), "echo").await?;
    let target = Target {
        address: daemon
            .sessions
            .parse()
            .context("reading conman's address")?,
        path: "/s/echo/".to_owned(),
        through: None,
    };
    drop(open(&target, WARM_UP, |_| {}).await?);
    tokio::time::sleep(SETTLE).await;
    let before = resident_bytes(daemon.pid()?).context("reading conman's memory")?;
    let bar = ProgressBar::new(options.count as u64);
    let mut clients = open(&target, options.count, |done| bar.set_position(done as u64)).await?;
    bar.finish_and_clear();
    tokio::time::sleep(SETTLE).await;
    let after = resident_bytes(daemon.pid()?).context("reading conman's memory")?;
    for client in &mut clients {
        client.echo_once().await.context("an idle tunnel was cut")?;
    }
    ensure!(
        clients.len() == options.count,
        "not all tunnels were opened"
    );
    Ok((before, after))
}

async fn open(target: &Target, count: usize, progress: impl Fn(usize)) -> Result<Vec<Client>> {
    let mut opened = Vec::with_capacity(count);
    let mut openings = stream::iter(0..count)
        .map(|_| async {
            let mut client = Client::open(target, MESSAGE_BYTES).await?;
            client.echo_once().await?;
            anyhow::Ok(client)
        })
        .buffer_unordered(PARALLEL);
    while let Some(client) = openings.try_next().await? {
        opened.push(client);
        progress(opened.len());
    }
    Ok(opened)
}
