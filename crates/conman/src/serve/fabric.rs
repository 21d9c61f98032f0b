//! Keeps this node's part of the fabric: its parts of the pool in the registry, and the routes, the device and the
//! rules' sets of this host, which follow from the parts of all nodes.
//!
//! One task. A start that finds no free address requests a part of it, and waits. Until the task has read the parts of
//! all nodes, routes, device and sets stay as the previous daemon left them: sessions that still run use them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use conman_core::Instance;
use conman_core::error_chain;
use conman_core::ownership::{FabricRecord, PartRecord, WantedPart};
use conman_core::{TalkName, TalkingSession};
use conman_net::egress::TalkDirectory;
use conman_net::{
    Class, Fabric, FabricElements, FabricKind, FabricOptions, FabricRules, HostNetlink,
    PartRequest, Plane, PlaneParts, RemotePart,
};
use conman_registry::{ConfirmedParts, HeldParts, PartError, PartRegistry};
use futures_util::future::BoxFuture;
use ipnet::IpNet;
use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::fabric_file::FabricFile;
use super::state::LockedState;
use crate::config::{Config, NetFabric};

/// Requests for parts that wait; one is answered within a round trip to etcd.
const MAX_REQUESTS: usize = 64;

/// Pause after a change by somebody else, so that many are followed by one comparison.
const SETTLE: Duration = Duration::from_millis(50);

/// Interval of comparisons without a notification, and of attempts after an error.
const COMPARE_INTERVAL: Duration = Duration::from_secs(15);
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Pause after a part was refused, unless the parts of nodes change: each attempt reads the owners of all sessions.
const REFUSED_PAUSE: Duration = Duration::from_secs(30);

/// A fabric that was checked against the host. Nothing is changed before it runs.
pub(super) struct FabricTask {
    pub(super) fabric: Arc<Fabric>,
    settings: NetFabric,
    registry: Arc<dyn PartRegistry>,
    requests: mpsc::Receiver<PartRequest>,
    elements: watch::Sender<Arc<FabricElements>>,
    /// The latest of them, for the next daemon.
    file: FabricFile,
    /// The lists of groups of this node's templates.
    groups: BTreeSet<Vec<String>>,
    /// When a part for these groups was refused, and why.
    refused: BTreeMap<Vec<String>, (Instant, String)>,
    /// What was logged last.
    trouble: Option<String>,
}

/// Finds sessions by name in the registry.
#[derive(Debug)]
struct Names(Arc<dyn PartRegistry>);

impl TalkDirectory for Names {
    fn find(&self, name: TalkName) -> BoxFuture<'static, Result<Vec<TalkingSession>, String>> {
        let registry = Arc::clone(&self.0);
        Box::pin(async move {
            let found = registry.named(&name).await;
            found.map_err(|error| error_chain(&error))
        })
    }
}

/// What resolves the names of sessions; `None` without a fabric.
pub(super) fn names(config: &Config, state: &LockedState) -> Option<Arc<dyn TalkDirectory>> {
    let registry = state
        .parts
        .as_ref()
        .filter(|_| config.net.fabric.is_some())?;
    Some(Arc::new(Names(Arc::clone(registry))))
}

/// What the host's rules need to know of a fabric.
pub(super) fn rules(config: &Config, settings: &NetFabric) -> FabricRules {
    FabricRules {
        pool: settings.pool.networks().collect(),
        vxlan: match settings.kind {
            FabricKind::HostGateway => None,
            // Without an address, no fabric is opened.
            FabricKind::Vxlan { port, .. } => {
                address(config, settings).map(|address| SocketAddr::new(address, port))
            }
        },
    }
}

/// This node's address for the others.
fn address(config: &Config, settings: &NetFabric) -> Option<IpAddr> {
    let peers = config.listen.peers.map(|peers| peers.ip());
    settings
        .address
        .or(peers.filter(|address| !address.is_unspecified()))
}

fn options(config: &Config, settings: &NetFabric, instance: &str) -> Result<FabricOptions> {
    let address = address(config, settings).context(
        "`listen.peers` is no single address, by which other nodes would reach this one; set `net.fabric.address`",
    )?;
    Ok(FabricOptions {
        instance: instance.to_owned(),
        kind: settings.kind,
        pool: settings.pool,
        part: settings.part,
        mtu: settings.mtu,
        address,
    })
}

/// What this host lacks for the fabric. Changes nothing.
pub(super) async fn missing(config: &Config, settings: &NetFabric, instance: &str) -> Vec<String> {
    match options(config, settings, instance) {
        Ok(options) => {
            let problems = Fabric::problems(options).await;
            problems
                .iter()
                .map(|problem| error_chain(problem))
                .collect()
        }
        Err(error) => vec![error.to_string()],
    }
}

/// Checks the host, and returns the plane's share of the fabric.
pub(super) async fn open(
    config: &Config,
    settings: &NetFabric,
    (instance, netlink): (&Instance, HostNetlink),
    registry: &Arc<dyn PartRegistry>,
    classes: &[Class],
) -> Result<(FabricTask, PlaneParts)> {
    let options = options(config, settings, instance.as_str())?;
    let fabric = Fabric::open(options, netlink).await?;
    let (sender, requests) = mpsc::channel(MAX_REQUESTS);
    let parts = PlaneParts {
        mtu: fabric.underlay().mtu,
        incarnation: registry.incarnation(),
        requests: sender,
    };
    let file = FabricFile::new(&config.state_dir, record(settings));
    let reading = file.clone();
    let elements = spawn_blocking(move || reading.read()).await?;
    let groups = classes.iter().map(|class| class.groups.clone());
    let task = FabricTask {
        fabric: Arc::new(fabric),
        settings: settings.clone(),
        registry: Arc::clone(registry),
        requests,
        elements: watch::Sender::new(Arc::new(elements)),
        file,
        groups: groups.filter(|groups| !groups.is_empty()).collect(),
        refused: BTreeMap::new(),
        trouble: None,
    };
    Ok((task, parts))
}

impl FabricTask {
    /// What the rules' sets are to hold.
    pub(super) fn elements(&self) -> watch::Receiver<Arc<FabricElements>> {
        self.elements.subscribe()
    }

    pub(super) async fn run(mut self, plane: Arc<Plane>) {
        let mut held = self.registry.held_parts();
        let mut incarnation = self.registry.incarnation();
        let mut confirmed = ConfirmedParts::default();
        loop {
            incarnation.borrow_and_update();
            let parts = Arc::clone(&held.borrow_and_update());
            let worked = self.work(&plane, &parts, &mut confirmed).await;
            let pause = match &worked {
                Ok(()) => COMPARE_INTERVAL,
                Err(_) => RETRY_INTERVAL,
            };
            self.report(worked.err());
            tokio::select! {
                // Cancel safe, as all of these: a change, a request and a notification stay pending.
                Ok(()) = held.changed() => self.refused.clear(),
                Ok(()) = incarnation.changed() => {}
                Some(request) = self.requests.recv() => {
                    let answer = self.provide(&plane, &request.groups, &mut confirmed).await;
                    // The start may have been given up.
                    let _ = request.reply.send(answer);
                }
                () = self.fabric.changed() => sleep(SETTLE).await,
                () = sleep(pause) => {}
            }
        }
    }

    /// Logs a trouble once, and its end.
    fn report(&mut self, trouble: Option<String>) {
        match (&trouble, &self.trouble) {
            (Some(error), before) if before.as_ref() != Some(error) => {
                tracing::error!(error, "the fabric is not complete; trying again");
            }
            (None, Some(_)) => tracing::info!("the fabric is complete again"),
            _ => {}
        }
        self.trouble = trouble;
    }

    /// Confirms and claims what this node needs, and makes the host as the parts of all nodes say.
    async fn work(
        &mut self,
        plane: &Plane,
        parts: &HeldParts,
        confirmed: &mut ConfirmedParts,
    ) -> Result<(), String> {
        let live = *self.registry.incarnation().borrow();
        let mut troubles = Vec::new();
        match self.fabric.refresh().await {
            Ok(true) => {
                tracing::info!(underlay = ?self.fabric.underlay(), "other nodes reach this one in another way");
                // To be published.
                confirmed.incarnation = 0;
            }
            Ok(false) => {}
            Err(error) => troubles.push(error_chain(&error)),
        }
        if live != 0 {
            if confirmed.incarnation != live {
                troubles.extend(self.confirm(plane, confirmed).await.err());
            }
            for groups in self.groups.clone() {
                troubles.extend(self.provide(plane, &groups, confirmed).await.err());
            }
        }
        if is_complete(parts, confirmed) {
            troubles.extend(self.follow(parts, confirmed).await);
        }
        match troubles.into_iter().next() {
            None => Ok(()),
            Some(first) => Err(first),
        }
    }

    /// Makes the host as these parts say.
    async fn follow(&self, parts: &HeldParts, confirmed: &ConfirmedParts) -> Vec<String> {
        let remote = self.remote(parts, confirmed);
        let elements = Arc::new(self.elements_of(&remote, confirmed));
        let changed = self.elements.send_if_modified(|present| {
            let changed = *present != elements;
            *present = Arc::clone(&elements);
            changed
        });
        if changed {
            let file = self.file.clone();
            // It logs why it fails.
            let _ = spawn_blocking(move || file.write(&elements)).await;
        }
        let remote: Vec<RemotePart> = remote
            .into_iter()
            .map(|(number, part)| RemotePart {
                networks: self.settings.pool.part(number, self.settings.part),
                underlay: part.underlay.clone(),
            })
            .collect();
        match self.fabric.apply(&remote).await {
            Ok(unroutable) => unroutable.iter().map(|one| error_chain(one)).collect(),
            Err(error) => vec![error_chain(&error)],
        }
    }

    /// The parts of other nodes. A node without a part has no session that talks, or another fabric.
    fn remote<'a>(
        &self,
        parts: &'a HeldParts,
        confirmed: &ConfirmedParts,
    ) -> Vec<(u32, &'a PartRecord)> {
        let count = self.settings.pool.parts(self.settings.part);
        let mut mine = confirmed.parts.values();
        let Some(me) = mine.next().map(|part| &part.holder) else {
            return Vec::new();
        };
        let remote = parts
            .iter()
            .filter(|(number, part)| **number < count && !part.lost && part.record.holder != *me);
        remote
            .map(|(number, part)| (*number, &part.record))
            .collect()
    }

    fn elements_of(
        &self,
        remote: &[(u32, &PartRecord)],
        confirmed: &ConfirmedParts,
    ) -> FabricElements {
        let mut elements = FabricElements::default();
        let networks = |number: u32| -> Vec<IpNet> {
            let part = self.settings.pool.part(number, self.settings.part);
            part.networks().collect()
        };
        for (number, part) in remote {
            let underlay = &part.underlay;
            let origins = networks(*number)
                .into_iter()
                .map(|network| (underlay.mac, network));
            elements.origins.extend(origins);
            elements.nodes.extend(underlay.v4.map(IpAddr::V4));
            elements.nodes.extend(underlay.v6.map(IpAddr::V6));
        }
        // Sessions that a former template started keep its groups.
        let own_groups = confirmed.parts.values().flat_map(|part| &part.groups);
        elements.groups = own_groups
            .map(|group| (group.clone(), BTreeSet::new()))
            .collect();
        let own = confirmed.parts.iter().map(|(number, part)| (*number, part));
        for (number, part) in own.chain(remote.iter().copied()) {
            for group in &part.groups {
                if let Some(of_group) = elements.groups.get_mut(group) {
                    of_group.extend(networks(number));
                }
            }
        }
        elements
    }

    /// Makes sure that a session in these groups gets an address.
    async fn provide(
        &mut self,
        plane: &Plane,
        groups: &[String],
        confirmed: &mut ConfirmedParts,
    ) -> Result<(), String> {
        let live = *self.registry.incarnation().borrow();
        if confirmed.incarnation != live {
            self.confirm(plane, confirmed).await?;
        }
        if plane.has_room(groups) {
            return Ok(());
        }
        if let Some((at, why)) = self.refused.get(groups)
            && at.elapsed() < REFUSED_PAUSE
        {
            return Err(why.clone());
        }
        let wanted = WantedPart {
            fabric: record(&self.settings),
            count: self.settings.pool.parts(self.settings.part),
            groups: groups.to_vec(),
            underlay: self.fabric.underlay(),
        };
        match self.registry.claim_part(&wanted).await {
            Ok(()) => self.confirm(plane, confirmed).await,
            Err(PartError::Refused(refusal)) => {
                let refused = (Instant::now(), refusal.to_string());
                self.refused.insert(groups.to_vec(), refused);
                Err(refusal.to_string())
            }
            Err(PartError::Registry(error)) => Err(error_chain(&error)),
        }
    }

    async fn confirm(&self, plane: &Plane, confirmed: &mut ConfirmedParts) -> Result<(), String> {
        let (record, underlay) = (record(&self.settings), self.fabric.underlay());
        let parts = self.registry.confirm_parts(&record, &underlay).await;
        *confirmed = parts.map_err(|error| error_chain(&error))?;
        let count = self.settings.pool.parts(self.settings.part);
        // Of one beyond the pool the addresses would be another's.
        confirmed.parts.retain(|number, _| *number < count);
        let parts = confirmed.parts.iter().map(|(number, part)| {
            let networks = self.settings.pool.part(*number, self.settings.part);
            (*number, networks, part.groups.clone())
        });
        plane.set_parts(confirmed.incarnation, parts);
        Ok(())
    }
}

fn record(settings: &NetFabric) -> FabricRecord {
    let kind = match settings.kind {
        FabricKind::HostGateway => "host-gw".to_owned(),
        FabricKind::Vxlan { vni, port } => format!("vxlan {vni} on port {port}"),
    };
    let pool = settings.pool.networks();
    FabricRecord {
        kind,
        pool: pool.map(|network| network.to_string()).collect(),
        part: settings.part,
    }
}

/// Whether the parts of all nodes are known. They are read separately from this node's, and may still be older than the
/// confirmation of those.
fn is_complete(parts: &HeldParts, confirmed: &ConfirmedParts) -> bool {
    let is_confirmed = *confirmed != ConfirmedParts::default();
    let mut own = confirmed.parts.keys();
    is_confirmed && (confirmed.parts.is_empty() || own.any(|number| parts.contains_key(number)))
}

#[cfg(test)]
mod tests {
    use conman_core::ownership::Underlay;
    use conman_registry::HeldPart;

    use super::*;

    #[test]
    fn routes_and_sets_stay_until_the_parts_of_all_nodes_are_read() {
        let record = PartRecord {
            holder: "n1".into(),
            incarnation: 7,
            groups: vec!["team".to_owned()],
            underlay: Underlay::default(),
        };
        let held = HeldPart {
            record: record.clone(),
            lost: false,
        };
        let (unread, read) = (HeldParts::new(), HeldParts::from([(3, held)]));
        let mut confirmed = ConfirmedParts::default();
        assert!(!is_complete(&read, &confirmed), "not joined");
        confirmed.incarnation = 7;
        assert!(is_complete(&unread, &confirmed), "it has no part");
        confirmed.parts.insert(3, record);
        assert!(!is_complete(&unread, &confirmed), "an older read");
        assert!(is_complete(&read, &confirmed));
        // As after a change of how other nodes reach this one.
        confirmed.incarnation = 0;
        assert!(is_complete(&read, &confirmed));
    }
}
