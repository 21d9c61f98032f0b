//! A storm of preemptions: a fleet whose nodes get a notice and are replaced, one after the other, while clients
//! behind HAProxy talk to their sessions, reconnect and come for a moment. The old way and conman's, one after the
//! other, with the same seed, containers and clients.
//!
//! The fleet is network namespaces on this machine, with real etcd members and a Docker Engine for each node. The
//! sessions are witnesses: programs that write down that they run, into one file. Whether two containers of one
//! session ran at once is read from that file. Neither the witnesses nor the reader share code with conman.

mod clients;
mod every_way;
mod fleet;
pub(crate) mod old;
mod published;
mod report;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use conman_cluster::overlap::{Tail, journal, write};
use serde::Serialize;
use tokio::time::{Instant, sleep_until, timeout_at};

use self::clients::{Clients, Seen, all_connected};
use self::fleet::Fleet;
use crate::arguments::Storming;
use crate::interruption::{is_interrupted, until_interrupted};
use crate::needs;
use crate::report::Report;

/// The sessions' program in their image, and its arguments.
pub(crate) const WITNESS: &str = "/bin/witness";
const JOURNAL: &str = "/shared/journal";
/// Time between two lines of a witness.
const PAUSE_MS: u64 = 250;
const MEMORY_BYTES: u64 = 64 << 20;

/// A client's patience with a handshake, which includes the start of its session.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bound on the start of all sessions.
const BEGIN: Duration = Duration::from_secs(300);
/// After the last replacement: sessions whose clients are not connected by then never came back.
const END: Duration = Duration::from_secs(60);

/// How a fleet deals with a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Way {
    /// dockerd kills; a client of a session that still belongs to the node is refused
    Old,
    /// The same, but such a client waits
    OldHold,
    /// conman with Docker's containers
    Docker,
    /// conman with its own containers
    Native,
}

impl Way {
    pub(super) const ALL: [Self; 4] = [Self::Old, Self::OldHold, Self::Docker, Self::Native];

    const fn name(self) -> &'static str {
        match self {
            Self::Old => "old way",
            Self::OldHold => "old way with a hold",
            Self::Docker => "conman on Docker",
            Self::Native => "conman native",
        }
    }

    const fn is_conman(self) -> bool {
        matches!(self, Self::Docker | Self::Native)
    }

    const fn needs_docker(self) -> bool {
        !matches!(self, Self::Native)
    }
}

/// What one way came to.
#[derive(Debug, Serialize)]
struct Weathered {
    way: Way,
    lasted_s: f64,
    /// The notices, in seconds from the begin.
    notices_s: Vec<f64>,
    /// Notices that came late because the node before was not replaced yet.
    late: usize,
    seen: Seen,
    /// Sessions whose clients were not connected in the end.
    never_back: Vec<String>,
    /// Containers that ran, by the witnesses.
    lives: usize,
    /// Two containers of one session at once, and what else must not be.
    violations: Vec<String>,
    /// The time that as many `docker run`s take as a node has sessions, in seconds.
    bare_runs_s: Option<f64>,
}

/// Takes a fleet of each way through the storm.
///
/// # Errors
/// When a program is missing that all ways need, or the first fleet cannot be made.
pub(crate) async fn storm(conman: &Path, options: &Storming) -> Result<Report> {
    needs::require("the storm", &needs::FLEET)?;
    let ready = conman_cluster::requirements().context("this machine lacks what is named above")?;
    if options.every_way {
        return until_interrupted(every_way::run(conman, options, &ready)).await;
    }
    let (mut weathered, mut skipped) = (Vec::new(), Vec::new());
    for way in Way::ALL {
        if !options.ways.is_empty() && !options.ways.contains(&way) {
            continue;
        }
        let lacks = needs::missing(&needs::DOCKER);
        if let (true, Some(why)) = (way.needs_docker(), lacks) {
            skipped.push(format!("skipped: {}: {why}", way.name()));
            continue;
        }
        match until_interrupted(through(way, conman, options, &ready)).await {
            Ok(done) => weathered.push(done),
            // What the other ways come to is kept.
            Err(error) => {
                skipped.push(format!("not measured: {}: {error:#}", way.name()));
                if is_interrupted() {
                    break;
                }
            }
        }
    }
    if weathered.is_empty() {
        bail!("{}", skipped.join("; "));
    }
    Ok(report::report(options, &weathered, &skipped))
}

async fn through(
    way: Way,
    conman: &Path,
    options: &Storming,
    ready: &conman_cluster::Ready,
) -> Result<Weathered> {
    tell(&format!("{}: making the fleet", way.name()));
    let fleet = Fleet::start(way, conman, options, ready).await?;
    let bare_runs_s = match way {
        Way::Docker => Some(
            fleet
                .bare_runs(options.sessions.div_ceil(options.nodes))
                .await?,
        ),
        _ => None,
    };
    let mut tail = Tail::open(&journal(fleet.layout()))?;
    let mut random = fastrand::Rng::with_seed(options.seed);
    let clients = Clients::new(fleet.front(), PATIENCE);
    let ids: Vec<String> = (0..options.sessions).map(|n| format!("w{n}")).collect();
    tell(&format!("{}: starting {} sessions", way.name(), ids.len()));
    fleet.open(&ids).await?;
    clients.connect(&ids, &mut random);
    all_connected(&clients, BEGIN).await?;
    clients.begin_step();
    let begun = clients.now_s();
    tell(&format!(
        "{}: the storm, {} minutes",
        way.name(),
        options.minutes
    ));
    let (notices_s, late) = weather(&fleet, &clients, options, &mut random).await?;
    let calm = all_connected(&clients, END).await;
    let lasted_s = clients.now_s() - begun;
    let never_back = match calm {
        Ok(()) => Vec::new(),
        Err(_) => clients.away(),
    };
    let seen = clients.end_step().since(begun);
    drop(clients);
    let witnessed = tail.catch_up()?;
    let violations = witnessed.violations.iter().map(ToString::to_string);
    let notices_s = notices_s.iter().map(|at| at - begun).collect();
    tell(&format!(
        "{}: {} handshakes failed of {}",
        way.name(),
        seen.count(false),
        seen.handshakes.len()
    ));
    Ok(Weathered {
        way,
        lasted_s,
        notices_s,
        late,
        seen,
        never_back,
        lives: witnessed.lives,
        violations: violations.collect(),
        bare_runs_s,
    })
}

/// Gives notices until the time is over. Returns when they came, and how many were late.
async fn weather(
    fleet: &Fleet,
    clients: &Clients,
    options: &Storming,
    random: &mut fastrand::Rng,
) -> Result<(Vec<f64>, usize)> {
    let (every, budget) = (options.every(), options.budget());
    let end = Instant::now() + options.length();
    let (mut notices_s, mut late) = (Vec::new(), 0);
    let mut next = Instant::now();
    let mut latest = options.nodes;
    while next < end {
        sleep_until(next).await;
        // Another one than the latest, which all have just reconnected from.
        let node = match random.usize(0..options.nodes - 1) {
            node if node >= latest => node + 1,
            node => node,
        };
        latest = node;
        notices_s.push(clients.now_s());
        let gone = Instant::now() + budget;
        // The machine goes when its time is over, whatever the node still does.
        if let Ok(noticed) = timeout_at(gone, fleet.notice(node)).await {
            noticed.with_context(|| format!("the notice of n{}", node + 1))?;
        }
        sleep_until(gone).await;
        fleet.lose(node).await?;
        fleet.replace(node).await?;
        next += every;
        if next < Instant::now() {
            late += 1;
            next = Instant::now();
        }
    }
    Ok((notices_s, late))
}

/// The program of a session: `witness FILE PORT PAUSE_MS`.
///
/// # Errors
/// When it lacks what it needs.
pub(crate) fn witness() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let mut next = |what| {
        arguments
            .next()
            .with_context(|| format!("{what} is missing"))
    };
    let file = next("FILE")?;
    let port = next("PORT")?.parse().context("PORT is not one")?;
    let pause_ms = next("PAUSE_MS")?.parse().context("PAUSE_MS is not one")?;
    write(Path::new(&file), Some(port), Some(pause_ms)).with_context(|| format!("writing {file}"))
}

fn tell(what: &str) {
    use std::io::Write as _;

    // Progress that nobody reads is no failure.
    let _ = writeln!(std::io::stderr(), "  … {what}");
}
