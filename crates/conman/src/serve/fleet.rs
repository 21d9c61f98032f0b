//! A node in a fleet: its registry in etcd, the fence that it controls, and the time before it
//! has joined.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context as _, Result};
use async_trait::async_trait;
use conman_api::{ServeOptions, serve_tcp, serve_unix};
use conman_auth::certificates_expire_at;
use conman_core::Instance;
use conman_core::ownership::{FenceHolds, FenceLinkError, FenceNews};
use conman_etcd::{
    COMPACT_EVERY, EtcdAccess, EtcdCredentials, EtcdOptions, EtcdRegistry, EtcdTls, Order, Orders,
};
use conman_node::Node;
use conman_proto::Generation;
use conman_registry::{FenceLink, FenceOrder, Fleet, RegistryError, Standing};
use conman_runtime::ShimFence;
use conman_watchdog::{TaskProgress, Watchdog, essential};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::listeners::Listeners;
use super::service_manager;
use super::trouble::Trouble;
use crate::config::{Config, SharedRegistry};
use crate::shim::{self, ShimPlace};

/// Interval of status reports to the service manager while the start waits for others.
const JOINING_SIGN: Duration = Duration::from_secs(10);
const JOINING: &str = "joining the fleet";

const EXPIRY: &str = "conman_etcd_certificate_expiry_timestamp_seconds";

/// Interval between checks of the credential files for etcd.
const ACCESS_LOOK: Duration = Duration::from_secs(10);

/// Interval between checks whether killed processes are dead.
const KILL_LOOK: Duration = Duration::from_millis(20);

/// Starts to join the fleet.
pub(super) fn registry(
    config: &Config,
    fleet: &SharedRegistry,
    instance: &Instance,
    generation_floor: Option<Generation>,
    watchdog: &Watchdog,
) -> Result<Arc<EtcdRegistry>> {
    let access = access(fleet)?;
    let options = EtcdOptions {
        node: config.name.clone(),
        instance: instance.to_string(),
        boot_id: conman_linux::boot_id().context("cannot read the id of this boot")?,
        state_dir: config.state_dir.clone(),
        access: access.clone(),
        prefix: fleet.prefix.clone(),
        timing: fleet.timing,
        accept_above: generation_floor,
        compact_every: fleet.compact.then_some(COMPACT_EVERY),
        watchdog: watchdog.clone(),
    };
    let command = shim::command(config)?;
    let socket = ShimPlace::of(instance).socket();
    let fence = ShimFence::new(socket, Some(command), Some(fleet.timing.freeze_ms));
    let registry = EtcdRegistry::start(options, Arc::new(Link(fence)))
        .context("cannot begin to join the fleet")?;
    let (fleet, weak) = (fleet.clone(), Arc::downgrade(&registry));
    // It only reads files.
    std::thread::Builder::new()
        .name("etcd-access".to_owned())
        .spawn(move || renew_access(&fleet, access, &weak))
        .context("cannot start the thread that reads etcd's certificates again")?;
    Ok(registry)
}

fn access(fleet: &SharedRegistry) -> Result<EtcdAccess> {
    let credentials = match &fleet.login {
        Some((user, file)) => Some(EtcdCredentials {
            user: user.clone(),
            password: secret(file, "registry.password_file")?,
        }),
        None => None,
    };
    Ok(EtcdAccess {
        endpoints: fleet.endpoints.clone(),
        credentials,
        tls: tls(fleet)?,
    })
}

fn tell_expiry(access: &EtcdAccess) {
    let tls = access.tls.as_ref();
    let certificate = tls.and_then(|tls| tls.identity.as_ref());
    if let Some(at) = certificate.and_then(|(pem, _)| certificates_expire_at(pem)) {
        metrics::gauge!(EXPIRY).set(at.as_second() as f64);
    }
}

/// Reloads the files when they change: certificates are short-lived, and a node whose certificate
/// has expired loses its ownership with the next connection to etcd.
#[expect(
    clippy::disallowed_methods,
    reason = "runs on a dedicated thread, not the runtime's"
)]
fn renew_access(fleet: &SharedRegistry, mut present: EtcdAccess, registry: &Weak<EtcdRegistry>) {
    metrics::describe_gauge!(
        EXPIRY,
        "When this node's certificate for etcd ends, in seconds since 1970"
    );
    let mut trouble = Trouble::of("the credentials for etcd");
    loop {
        tell_expiry(&present);
        std::thread::sleep(ACCESS_LOOK);
        let Some(registry) = registry.upgrade() else {
            return;
        };
        let renewed = match access(fleet) {
            Ok(read) if read == present => Ok(false),
            Ok(read) => match registry.renew_access(&read) {
                Ok(()) => {
                    present = read;
                    Ok(true)
                }
                Err(error) => Err(super::chain(&error)),
            },
            Err(error) => Err(format!("{error:#}")),
        };
        // A pair of files may be half written.
        trouble.report(renewed, false);
    }
}

fn secret(path: &Path, field: &str) -> Result<String> {
    let text = fs::read_to_string(path)
        .with_context(|| format!("cannot read `{field}`, {}", path.display()))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

fn tls(fleet: &SharedRegistry) -> Result<Option<EtcdTls>> {
    let read = |path: &Path, field: &str| {
        fs::read(path).with_context(|| format!("cannot read `{field}`, {}", path.display()))
    };
    let Some(ca) = &fleet.ca_file else {
        return Ok(None);
    };
    let identity = match &fleet.identity_files {
        Some((certificate, key)) => Some((
            read(certificate, "registry.cert_file")?,
            read(key, "registry.key_file")?,
        )),
        None => None,
    };
    let ca = read(ca, "registry.ca_file")?;
    Ok(Some(EtcdTls { ca, identity }))
}

/// Waits until the node has its ownership, and reports why it does not.
pub(super) async fn join(
    config: &Config,
    fleet: &dyn Fleet,
    listeners: Listeners,
) -> Result<Listeners> {
    let mut standing = fleet.standing();
    if standing.borrow().is_ready() {
        return Ok(listeners);
    }
    let (listeners, api, admin) = listeners.share()?;
    let closing = CancellationToken::new();
    let _closes = closing.clone().drop_guard();
    let options = ServeOptions {
        max_connections: config.limits.max_api_connections,
        ..ServeOptions::default()
    };
    let router = || conman_api::joining_router(fleet.standing());
    // The service manager expects no heartbeats before the node is ready.
    let unwatched = || TaskProgress::unwatched("joining");
    let servers = [
        tokio::spawn(serve_tcp(
            api,
            router(),
            options.clone(),
            closing.clone(),
            unwatched(),
        )),
        tokio::spawn(serve_unix(
            admin,
            router(),
            options,
            closing.clone(),
            unwatched(),
        )),
    ];
    tracing::info!("joining the fleet; not serving yet");
    loop {
        service_manager::goes_on(JOINING_SIGN * 3, JOINING);
        let ready = standing.wait_for(Standing::is_ready);
        match timeout(JOINING_SIGN, ready).await {
            Ok(joined) => {
                joined.context("the fleet's thread has ended")?;
                break;
            }
            Err(_) => tracing::debug!("still joining the fleet"),
        }
    }
    closing.cancel();
    for server in servers {
        server.await.context("a listener's task panicked")?;
    }
    tracing::info!("joined the fleet");
    Ok(listeners)
}

/// The fleet's key of connect tokens; retries while the registry does not answer.
pub(super) async fn shared_key(fleet: &dyn Fleet) -> Result<Option<[u8; 32]>, RegistryError> {
    let mut asking = fleet.shared_key();
    loop {
        service_manager::goes_on(JOINING_SIGN * 3, JOINING);
        // Cancel safe: the wait continues with the same call.
        if let Ok(key) = timeout(JOINING_SIGN, &mut asking).await {
            return key;
        }
    }
}

/// Kills everything that an earlier daemon left with the shim, when the machine stops before it
/// is known what this node owns. Nothing is released, since the registry is not connected; other
/// nodes take over after the takeover delay.
pub(super) async fn preempt_unjoined(config: &Config, instance: &Instance) {
    let budget = Duration::from_millis(config.preempt.budget_ms.into());
    // Without a shim, nothing of it runs.
    let fence = ShimFence::new(ShimPlace::of(instance).socket(), None, None);
    let mut killed = BTreeSet::new();
    let ending = async {
        loop {
            let slots = fence.look().await.map_err(|error| error.to_string())?.slots;
            let alive: Vec<_> = slots.into_iter().filter(|view| !view.certified).collect();
            if alive.is_empty() {
                return Ok(());
            }
            for view in alive {
                let done = fence.kill(&view.slot).await;
                done.map_err(|error| error.to_string())?;
                killed.insert(view.slot);
            }
            sleep(KILL_LOOK).await;
        }
    };
    let ended = timeout(budget, ending).await;
    let count = killed.len();
    match ended {
        Ok(Ok(())) => tracing::info!(count, "killed what a previous daemon had left running"),
        Ok(Err(why)) => {
            let why: String = why;
            tracing::warn!(count, why, "cannot list leftovers of a previous daemon");
        }
        Err(_) => tracing::warn!(count, "killed leftovers do not die in time"),
    }
}

/// Passes the registry's orders to end sessions on to the node.
pub(super) fn obey(orders: Arc<Orders>, node: &Arc<Node>, watchdog: &Watchdog) -> JoinHandle<()> {
    const NAME: &str = "orders";
    let node = Arc::downgrade(node);
    let progress = watchdog.task(NAME);
    tokio::spawn(essential(NAME, async move {
        loop {
            progress.beat().await;
            let order = progress.idle(orders.next()).await;
            let Some(node) = node.upgrade() else {
                return;
            };
            match order {
                Order::Condemned {
                    id,
                    generation,
                    why,
                } => node.sessions().condemn(&id, generation, &why),
                Order::Ended { id, generation } => node.sessions().note_end(&id, generation),
            }
        }
    }))
}

/// Implements the registry's fence interface by the shim's fence.
#[derive(Debug)]
struct Link(ShimFence);

#[async_trait]
impl FenceLink for Link {
    async fn connect(&self) -> Result<FenceHolds, FenceLinkError> {
        self.0.look().await
    }

    async fn order(&self, order: FenceOrder) -> Result<(), FenceLinkError> {
        match order {
            FenceOrder::SetDeadline(deadline) => self.0.extend(deadline).await,
            FenceOrder::Thaw { deadline, slots } => self.0.thaw(deadline, &slots).await,
            FenceOrder::FreezeAll => self.0.freeze_all().await,
            FenceOrder::Kill(slot) => self.0.kill(&slot).await,
        }
    }

    async fn news(&self) -> FenceNews {
        self.0.news().await
    }
}
