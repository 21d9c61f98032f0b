//! How soon the sessions of a node that goes away are served elsewhere.
//!
//! A fleet of three nodes has sessions on one of them; clients are connected to some, through the
//! others, by WebSockets. Then the node is told that it goes, or it vanishes: every process of it is
//! killed and every packet lost. Clients connect again, each through the node that it had come by,
//! until the program of a newer container greets them. Those sessions are witnesses: their journal
//! tells whether two of one ever ran.

mod apart;
mod client;
mod deaths;
mod figures;
mod sessions;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use conman_linux::Signal;
use conman_proto::PreemptReport;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

pub use self::apart::Apart;
use self::client::{Client, Served};
use self::deaths::Deaths;
pub use self::figures::{Figures, Quantiles};
use crate::cluster::Cluster;
use crate::cut::Cut;
use crate::docker;
use crate::overlap::{Tail, journal};
use crate::requirements::Ready;

/// Beside the node that goes.
const OTHERS: [usize; 2] = [1, 2];
/// Announcements and renewals are under way all the time; what a start leaves to do is done by then.
const CALM: Duration = Duration::from_secs(3);
/// Bound on a client's way back, beside the takeover time.
const PATIENCE: Duration = Duration::from_secs(60);

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// On the node that goes.
    pub sessions: usize,
    /// Sessions among them to which somebody is connected.
    pub clients: usize,
    pub docker: bool,
    /// Without a notice.
    pub lost: bool,
    /// What the node that goes does not share with the others.
    pub apart: Option<Apart>,
}

/// Makes a fleet, has a node of it go, and measures.
///
/// # Errors
/// When a fleet cannot be made, or a client is not served again.
pub async fn fleet(
    options: &Options,
    ready: &Ready,
    witness: &Path,
    tell: &mut dyn FnMut(&str),
) -> Result<Figures> {
    ensure!(
        (1..=options.sessions).contains(&options.clients),
        "there must be a client, and a session for each"
    );
    let builder = Cluster::builder()
        .members(3)
        .set("limits", "max_sessions = 1000");
    let paused = options.apart == Some(Apart::Engine);
    ensure!(
        !paused || options.docker && !options.lost,
        "`--apart engine` stops the Docker Engine when a notice comes: it needs Docker sessions, and no \
         `--lost`"
    );
    let builder = match (options.docker, paused) {
        (true, true) => builder.docker_of_the_first(),
        (true, false) => builder.docker(),
        (false, _) => builder,
    };
    tell("making three etcd members and three nodes");
    let cluster = Cluster::start(&builder, ready, witness).await?;
    if options.apart == Some(Apart::Processors) {
        apart::settle(&cluster)?;
    }
    tell(&format!("starting {} sessions on n1", options.sessions));
    sessions::start(&cluster, options).await?;
    tell(&format!(
        "connecting {} clients through n2 and n3",
        options.clients
    ));
    let (gone, going) = watch::channel(None);
    let mut clients = Vec::new();
    for number in 0..options.clients {
        let through = &cluster.nodes()[OTHERS[number % OTHERS.len()]];
        // Somebody whose node vanishes may look at a dead window, or load the page anew.
        let reloads = options.lost && number / OTHERS.len() % 2 == 1;
        let client = Client::connect(
            through.sessions_address(),
            sessions::witness(number),
            reloads,
        );
        clients.push(client.await?);
    }
    let mut tail = Tail::open(&journal(cluster.layout()))?;
    sleep(CALM).await;

    let mut waiting = JoinSet::new();
    for client in clients {
        waiting.spawn(client.come_back(going.clone()));
    }
    let mut figures = Figures::of(options, builder.timing());
    let went = if options.lost {
        lose(&cluster, &gone)?
    } else {
        tell("the notice");
        if paused {
            let stopped = docker::signal(cluster.layout(), Signal::SIGSTOP)?;
            ensure!(stopped, "the Docker daemon of n1 has ended: see its log");
        }
        preempt(&cluster, &gone, &mut figures).await?
    };
    tell("waiting for the clients");
    let patience = PATIENCE + Duration::from_millis(builder.timing().takeover_ms);
    let served = timeout(patience, waiting.join_all()).await;
    let served: Vec<Served> =
        served.with_context(|| format!("some client was not served within {patience:?}"))?;
    if paused {
        docker::signal(cluster.layout(), Signal::SIGCONT)?;
    }
    figures.served_since(went, &served);
    figures.starts(sessions::phases(&cluster, options.clients).await?);
    // For what may run beside the new ones.
    sleep(CALM).await;
    figures.judged(&tail.catch_up()?);
    Ok(figures)
}

/// The notice, by the way that an operator's script goes.
async fn preempt(
    cluster: &Cluster,
    gone: &watch::Sender<Option<Instant>>,
    figures: &mut Figures,
) -> Result<Instant> {
    let node = &cluster.nodes()[0];
    let deaths = Deaths::below(&node.cgroup().context("n1 has run")?)?;
    figures.processes = deaths.count();
    let body = json!({"reason": "a benchmark"});
    let admin = node.admin();
    let went = Instant::now();
    gone.send_replace(Some(went));
    let dead = deaths.watch();
    let answer = admin.post("/v1/nodes/self/preempt", &body).await;
    ensure!(answer.status.is_success(), "{}", answer.text());
    let report: PreemptReport =
        serde_json::from_slice(&answer.body).context("cannot understand a preemption's report")?;
    let dead = dead.await.context("a thread ended")??;
    figures.preempted(dead.duration_since(went.into_std()), &report);
    Ok(went)
}

/// No packet goes out or comes in any more, so that nobody is told; then all of it is dead.
fn lose(cluster: &Cluster, gone: &watch::Sender<Option<Instant>>) -> Result<Instant> {
    let node = &cluster.nodes()[0];
    let own = node.host().clone();
    let went = Instant::now();
    for other in cluster.layout().hosts() {
        if other != own {
            cluster.cut(&Cut::Between(own.clone(), other))?;
        }
    }
    // Now, or they would find what is about to die.
    gone.send_replace(Some(went));
    tokio::task::block_in_place(|| node.lose())?;
    Ok(went)
}
