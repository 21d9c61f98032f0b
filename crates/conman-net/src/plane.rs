//! One instance's links on a host, from the address to the proof that a link is gone.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_proto::Bandwidth;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::timeout;

use crate::host_check::{self, HostError};
use crate::host_netlink::{HostNetlink, Namespace};
use crate::link_identity::{LinkIdentity, link_index};
use crate::link_messages::{
    FoundLink, Link, all_links, delete_group, delete_link, find_link, is_no_link, set_group,
};
use crate::link_watch;
use crate::namespaces::Namespaces;
use crate::pool::{AddressPool, Addresses, PoolExhausted, PoolNetworks};

/// Interval of the sweeps, unless many owners end together. A link whose namespace is dead disappears within it,
/// so that a sweep finds little but what something else keeps.
const SWEEP_INTERVAL: Duration = Duration::from_millis(500);

/// Links deleted at once. The kernel holds rtnl meanwhile, for 0.4 to 1.2 ms for each, so that other users wait
/// less than 100 ms (`conman bench net --cleanup`).
const SWEEP_LINKS: usize = 50;

/// A part that was claimed may be used up before the one that requested it takes an address.
const PART_REQUESTS: u32 = 4;

/// Holds the notifications of about a thousand links that disappear at once.
pub const NOTIFICATION_BYTES: usize = 4 << 20;

/// Settings of a plane.
#[derive(Debug, Clone)]
pub struct PlaneOptions {
    /// Eight hexadecimal digits.
    pub instance: String,
    pub networks: PoolNetworks,
    /// Of links, in bytes.
    pub mtu: u32,
    /// Buffer for the kernel's notifications about links, up to the host's `net.core.rmem_max`.
    pub notification_bytes: usize,
    pub parts: Option<PlaneParts>,
}

/// Where addresses of sessions that talk to others come from.
#[derive(Debug, Clone)]
pub struct PlaneParts {
    /// Of links with an address of the fabric's pool, in bytes.
    pub mtu: u32,
    /// This node's incarnation: parts that were confirmed under an earlier one may be another node's.
    pub incarnation: watch::Receiver<u64>,
    pub requests: mpsc::Sender<PartRequest>,
}

/// Requests a part for sessions in these groups. The plane has it, or why not, when this is answered.
#[derive(Debug)]
pub struct PartRequest {
    pub groups: Vec<String>,
    pub reply: oneshot::Sender<Result<(), String>>,
}

impl PlaneOptions {
    /// The usual ones.
    pub fn new(instance: &str, networks: PoolNetworks) -> Self {
        Self {
            instance: instance.to_owned(),
            networks,
            mtu: 1_500,
            notification_bytes: NOTIFICATION_BYTES,
            parts: None,
        }
    }
}

/// One instance's links.
#[derive(Debug)]
pub struct Plane {
    identity: LinkIdentity,
    mtu: u32,
    parts: Option<PlaneParts>,
    netlink: HostNetlink,
    links: Arc<Mutex<Links>>,
    /// Notified when more owners have ended than the kernel may take down links at once.
    many_waiting: Notify,
}

/// What is known of the links, in memory.
#[derive(Debug)]
pub(crate) struct Links {
    pool: AddressPool,
    namespaces: Namespaces,
    /// Under which the pool's parts were confirmed.
    incarnation: u64,
}

impl Links {
    /// Indexes of links of owners that are not known to have ended.
    fn living(&self) -> BTreeSet<u32> {
        let mut living = self.pool.taken();
        for index in self.namespaces.waiting() {
            living.remove(&index);
        }
        living
    }

    /// Indexes of links that may exist although their owners have ended.
    fn leaving(&self) -> BTreeSet<u32> {
        let mut leaving = self.pool.leaving();
        leaving.extend(self.namespaces.closed());
        leaving
    }

    /// The link with this index does not exist any more.
    pub(crate) fn link_is_gone(&mut self, index: u32) {
        self.pool.link_is_gone(index);
        self.namespaces.link_is_gone(index);
    }
}

impl Plane {
    /// Opens the plane in the network namespace of the calling thread, and starts its task. Changes nothing on the
    /// host. Fails if the pool cannot be used on it.
    pub async fn open(options: &PlaneOptions, netlink: HostNetlink) -> Result<Self, HostError> {
        let identity = LinkIdentity::new(&options.instance);
        let problems = host_check::problems(&netlink, &options.networks, &identity).await;
        if let Some(problem) = problems.into_iter().next() {
            return Err(problem);
        }
        Self::start(identity, options, netlink).map_err(HostError::Netlink)
    }

    /// Everything for which a plane cannot be opened, or cannot create links. Changes nothing on the host.
    pub async fn problems(options: &PlaneOptions) -> Vec<HostError> {
        let identity = LinkIdentity::new(&options.instance);
        let netlink = HostNetlink::default();
        let mut problems = host_check::problems(&netlink, &options.networks, &identity).await;
        problems.extend(host_check::try_link().await.err());
        problems
    }

    fn start(
        identity: LinkIdentity,
        options: &PlaneOptions,
        netlink: HostNetlink,
    ) -> io::Result<Self> {
        let links = Arc::new(Mutex::new(Links {
            pool: AddressPool::new(options.networks),
            namespaces: Namespaces::default(),
            incarnation: 0,
        }));
        link_watch::start(&links, options.notification_bytes)?;
        Ok(Self {
            identity,
            mtu: options.mtu,
            parts: options.parts.clone(),
            netlink,
            links,
            many_waiting: Notify::new(),
        })
    }

    /// Takes addresses for an owner.
    pub fn take(&self, owner: &str) -> Result<Addresses, PoolExhausted> {
        self.links().pool.take(owner)
    }

    /// Takes addresses of a part whose sessions are in these groups, and requests one more part if none has any.
    /// Blocks.
    pub fn take_in(&self, owner: &str, groups: &[String]) -> Result<Addresses, String> {
        let parts = self.parts.as_ref().ok_or("`net.fabric` is missing")?;
        for _ in 0..PART_REQUESTS {
            if let Some(addresses) = self.take_confirmed(parts, owner, groups) {
                return Ok(addresses);
            }
            let (reply, answer) = oneshot::channel();
            let groups = groups.to_owned();
            let request = PartRequest { groups, reply };
            let ended = "the fabric's task has ended";
            parts.requests.blocking_send(request).map_err(|_| ended)?;
            answer.blocking_recv().map_err(|_| ended)??;
        }
        Err("others take the addresses of each new part of the fabric's pool".to_owned())
    }

    fn take_confirmed(
        &self,
        parts: &PlaneParts,
        owner: &str,
        groups: &[String],
    ) -> Option<Addresses> {
        let mut links = self.links();
        if links.incarnation != *parts.incarnation.borrow() {
            return None;
        }
        links.pool.take_in(owner, groups)
    }

    /// Sets the parts of the fabric's pool that were confirmed under this incarnation, with their groups.
    pub fn set_parts(
        &self,
        incarnation: u64,
        parts: impl Iterator<Item = (u32, PoolNetworks, Vec<String>)>,
    ) {
        let mut links = self.links();
        links.incarnation = incarnation;
        links.pool.set_parts(parts);
    }

    /// Whether a session in these groups can get an address without another part.
    pub fn has_room(&self, groups: &[String]) -> bool {
        self.links().pool.has_room(groups)
    }

    /// The addresses of an owner that other hosts reach.
    pub fn fabric_addresses(&self, owner: &str) -> Vec<IpAddr> {
        let addresses = self.links().pool.in_part(owner);
        let each = addresses.map(|of| [Some(of.v4.into()), of.v6.map(IpAddr::V6)]);
        each.into_iter().flatten().flatten().collect()
    }

    /// Keeps the addresses of an owner that has lived longer than this plane. To be called for all of them
    /// before the first sweep. Its namespace is not kept open: the kernel takes down its link when it likes.
    pub fn adopt(&self, owner: &str, addresses: Addresses) {
        self.links().pool.adopt(owner, addresses.v4);
    }

    /// Creates and configures an owner's link. The other end is in `namespace`, which stays open until the
    /// owner has ended.
    pub async fn connect(
        &self,
        owner: &str,
        addresses: Addresses,
        class: u16,
        bandwidth: Bandwidth,
        namespace: Namespace,
    ) -> io::Result<()> {
        let link = Link {
            name: self.identity.name(addresses.v4),
            addresses,
            group: self.identity.group(class),
            mtu: self.mtu_of(addresses),
            bandwidth,
        };
        let kept = namespace.file.try_clone()?;
        self.netlink.connect(link, namespace).await?;
        let index = link_index(addresses.v4);
        self.links().namespaces.keep(owner, index, kept);
        Ok(())
    }

    /// Closes an owner's namespace, so that the kernel takes down its link when the owner ends, with all others that it
    /// finds then. For owners whose end is not reported.
    pub fn let_go(&self, owner: &str) {
        self.links().namespaces.let_go(owner);
    }

    fn mtu_of(&self, addresses: Addresses) -> u32 {
        match &self.parts {
            Some(parts) if self.links().pool.is_in_fabric(addresses.v4) => parts.mtu,
            _ => self.mtu,
        }
    }

    /// Returns addresses for which no link was ever made.
    pub fn give_back(&self, owner: &str, addresses: Addresses) {
        let mut links = self.links();
        if links.pool.leave(owner, addresses.v4) {
            links.link_is_gone(link_index(addresses.v4));
        }
    }

    /// The owner has ended, so its link may disappear. It keeps its addresses.
    pub fn end(&self, owner: &str) {
        if self.links().namespaces.end(owner) {
            self.many_waiting.notify_one();
        }
    }

    /// The owner has ended. Its addresses return to the pool once its link is certainly gone. Does nothing if
    /// they were returned before.
    pub async fn leave(&self, owner: &str, addresses: Addresses) {
        self.end(owner);
        if !self.links().pool.leave(owner, addresses.v4) {
            return;
        }
        let index = link_index(addresses.v4);
        // The watch reports only links that disappear from now on.
        let found = self.netlink.change(vec![find_link(index)]).await;
        if let Ok([Err(error)]) = found.as_deref()
            && is_no_link(error)
        {
            self.links().link_is_gone(index);
        }
    }

    /// Whether this instance has a link.
    pub async fn has_links(&self) -> io::Result<bool> {
        let links = self.netlink.dump(all_links()).await?;
        let mut links = links.into_iter().filter_map(FoundLink::of);
        Ok(links.any(|link| self.identity.owns(&link.name)))
    }

    /// The number of addresses that wait for the end of their links.
    pub fn leaving(&self) -> usize {
        self.links().pool.leaving().len()
    }

    /// Deletes the links of this instance that have no owner, which a crash has left, and then, for as long as
    /// it is polled, those that outlive their owners, at once where many owners have ended together. Finds out
    /// which links are gone if the kernel's notification was lost.
    pub async fn sweep(&self) {
        let mut outlived = BTreeSet::new();
        let mut all = true;
        loop {
            outlived.extend(self.links().namespaces.waiting());
            let swept = match all || !outlived.is_empty() {
                true => {
                    self.sweep_links(|index| all || outlived.contains(&index))
                        .await
                }
                false => Ok(0),
            };
            match &swept {
                Ok(0) => {}
                Ok(count) => tracing::info!(count, "deleted links without an owner"),
                Err(error) => tracing::warn!(
                    %error,
                    "cannot sweep links; addresses of ended sessions stay in use"
                ),
            }
            all &= swept.is_err();
            outlived = self.links().leaving();
            // Cancel safe, as everything here: a later sweep continues.
            let _ = timeout(SWEEP_INTERVAL, self.many_waiting.notified()).await;
            let leaving = self.links().leaving();
            outlived.retain(|index| leaving.contains(index));
        }
    }

    /// Returns the number of deleted links: those without a living owner that `chosen` accepts.
    async fn sweep_links(&self, chosen: impl Fn(u32) -> bool) -> io::Result<usize> {
        // Before the list: one that begins to leave later is not judged by it.
        let leaving = self.links().leaving();
        let links = self.netlink.dump(all_links()).await?;
        let links: Vec<FoundLink> = links.into_iter().filter_map(FoundLink::of).collect();
        let present = links.iter().map(|link| link.index).collect();
        for index in leaving.difference(&present) {
            self.links().link_is_gone(*index);
        }
        let living = self.links().living();
        let swept: Vec<u32> = links
            .iter()
            .filter(|link| self.identity.owns(&link.name) && !living.contains(&link.index))
            .map(|link| link.index)
            .filter(|index| chosen(*index))
            .collect();
        let group = self.identity.sweep_group();
        let foreign = links
            .iter()
            .any(|link| link.group == group && !self.identity.owns(&link.name));
        for chunk in swept.chunks(SWEEP_LINKS) {
            // The link of an earlier owner may have disappeared since the list, and a new owner have its index.
            let living = self.links().living();
            let chunk = chunk.iter().filter(|index| !living.contains(index));
            let changes = if foreign {
                // Slower, but other programs' links stay.
                chunk.map(|index| delete_link(*index)).collect()
            } else {
                let moved = chunk.map(|index| set_group(*index, group));
                moved.chain([delete_group(group)]).collect()
            };
            for answer in self.netlink.change(changes).await? {
                match answer {
                    // It has disappeared meanwhile.
                    Err(error) if is_no_link(&error) => {}
                    other => other?,
                }
            }
        }
        Ok(swept.len())
    }

    fn links(&self) -> MutexGuard<'_, Links> {
        lock(&self.links)
    }
}

/// A panic while the lock is held cannot leave half a change: each is a few map operations.
pub(crate) fn lock(links: &Mutex<Links>) -> MutexGuard<'_, Links> {
    links.lock().unwrap_or_else(PoisonError::into_inner)
}
