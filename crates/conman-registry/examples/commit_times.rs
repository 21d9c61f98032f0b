//! How long the registry's durable answers take on a disk: `commit_times [DIRECTORY]`.
//!
//! The directory should lie on the disk that will hold the state; everything made in it is
//! removed again.
#![expect(clippy::print_stdout, reason = "this program prints a table")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use conman_proto::{EventKind, ResolvedSpec, RuntimeKind, SessionId};
use conman_registry::{
    EmbeddedOptions, EmbeddedRegistry, Ending, Journal, NewEvent, Registry, Release, SessionRecord,
};
use conman_testkit::resolved_spec;
use jiff::Timestamp;

const ROUNDS: usize = 300;
const AT_A_TIME: usize = 8;
const BATCH: usize = 200;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let parent = std::env::args_os()
        .nth(1)
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let dir = tempfile::tempdir_in(parent)?;
    println!("{:<44} {:>9} {:>9} {:>9}", "", "p50 µs", "p99 µs", "max µs");
    print(
        "one pwrite and fdatasync of 512 bytes",
        raw_syncs(dir.path())?,
    );
    measure(&dir.path().join("quiet"), None, "").await?;
    let journal = Arc::new(Journal::open(&dir.path().join("busy"), "node", 100_000)?);
    measure(&dir.path().join("busy"), Some(journal), ", journal busy").await?;
    Ok(())
}

fn raw_syncs(dir: &Path) -> std::io::Result<Vec<Duration>> {
    let path = dir.join("raw");
    let file = OpenOptions::new().create_new(true).write(true).open(path)?;
    file.write_all_at(&[0; 8192], 0)?;
    file.sync_all()?;
    (0..ROUNDS)
        .map(|round| {
            let begin = Instant::now();
            file.write_all_at(&[u8::try_from(round % 256).unwrap_or(0); 512], 0)?;
            file.sync_data()?;
            Ok(begin.elapsed())
        })
        .collect()
}

async fn measure(
    dir: &Path,
    journal: Option<Arc<Journal>>,
    note: &str,
) -> Result<(), Box<dyn Error>> {
    let registry = Arc::new(EmbeddedRegistry::open(dir, EmbeddedOptions::default())?);
    let stop = Arc::new(AtomicBool::new(false));
    let noise = journal.map(|journal| {
        let stop = Arc::clone(&stop);
        tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                journal.append((0..50).map(event).collect());
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    });

    one_at_a_time(&registry, note).await?;
    concurrent_claims(&registry, note).await?;
    batched_releases(&registry, note).await?;
    stop.store(true, Ordering::Relaxed);
    if let Some(noise) = noise {
        noise.await?;
    }
    Ok(())
}

/// Claims and releases, each of which waits for the one before.
async fn one_at_a_time(registry: &EmbeddedRegistry, note: &str) -> Result<(), Box<dyn Error>> {
    let mut claims = Vec::new();
    let mut releases = Vec::new();
    for round in 0..ROUNDS {
        let id: SessionId = format!("one-{}", round % 50).parse()?;
        let begin = Instant::now();
        let record = registry.claim(&id, &spec()).await?;
        claims.push(begin.elapsed());
        let begin = Instant::now();
        registry.release(vec![release(&record)]).await.remove(0)?;
        releases.push(begin.elapsed());
    }
    print(&format!("claim, one at a time{note}"), claims);
    print(&format!("release of one{note}"), releases);
    Ok(())
}

/// Claims of [`AT_A_TIME`] tasks; their releases are not measured.
async fn concurrent_claims(
    registry: &Arc<EmbeddedRegistry>,
    note: &str,
) -> Result<(), Box<dyn Error>> {
    let mut workers = Vec::new();
    for worker in 0..AT_A_TIME {
        let registry = Arc::clone(registry);
        workers.push(tokio::spawn(async move {
            let mut claims = Vec::new();
            for round in 0..ROUNDS / AT_A_TIME {
                let id: SessionId = format!("w{worker}-{round}")
                    .parse()
                    .expect("the name is an id");
                let begin = Instant::now();
                let record = registry.claim(&id, &spec()).await.expect("claimed");
                claims.push(begin.elapsed());
                registry
                    .release(vec![release(&record)])
                    .await
                    .remove(0)
                    .expect("released");
            }
            claims
        }));
    }
    let mut claims = Vec::new();
    for worker in workers {
        claims.extend(worker.await?);
    }
    print(&format!("claim, {AT_A_TIME} at a time{note}"), claims);
    Ok(())
}

/// Releases of [`BATCH`] sessions that were claimed before.
async fn batched_releases(
    registry: &Arc<EmbeddedRegistry>,
    note: &str,
) -> Result<(), Box<dyn Error>> {
    let mut batches = Vec::new();
    for _ in 0..20 {
        let mut claims = Vec::new();
        for index in 0..BATCH {
            let registry = Arc::clone(registry);
            claims.push(tokio::spawn(async move {
                let id: SessionId = format!("b-{index}").parse().expect("the name is an id");
                registry.claim(&id, &spec()).await.expect("claimed")
            }));
        }
        let mut batch = Vec::new();
        for claim in claims {
            batch.push(release(&claim.await?));
        }
        let begin = Instant::now();
        for result in registry.release(batch).await {
            result?;
        }
        batches.push(begin.elapsed());
    }
    print(&format!("release of {BATCH} in one batch{note}"), batches);
    Ok(())
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)].as_micros();
    println!("{what:<44} {:>9} {:>9} {:>9}", at(50), at(99), at(100));
}

fn release(record: &SessionRecord) -> Release {
    Release {
        id: record.id.clone(),
        generation: record.generation,
        ending: Ending {
            cause: None,
            failed_phase: None,
            failed: false,
            reason: "measured".to_owned(),
            exit_code: Some(137),
            ended_at: Timestamp::now(),
            started_at: None,
            phases: Default::default(),
        },
    }
}

fn event(number: usize) -> NewEvent {
    NewEvent {
        at: Timestamp::now(),
        kind: EventKind::SessionPhase,
        session: format!("one-{number}").parse().ok(),
        generation: None,
        phase: Some("claim".to_owned()),
        cause: None,
        duration_ms: Some(0.5),
        message: "a message of the usual length, about so many characters".to_owned(),
    }
}

fn spec() -> ResolvedSpec {
    ResolvedSpec {
        template: Some("python".to_owned()),
        command: ["python3", "-m", "http.server", "8080"]
            .map(str::to_owned)
            .to_vec(),
        env: BTreeMap::from([("KEY".to_owned(), "value".repeat(50))]),
        port: Some(8080),
        ready_path: Some("/".to_owned()),
        memory_bytes: Some(1 << 28),
        cpus: Some(0.5),
        idle_timeout_s: 600,
        ..resolved_spec(RuntimeKind::Docker, "python:demo")
    }
}
