//! Finds the node that serves a session, and waits if there is none yet.
//!
//! Whatever takes time (starting a session, waiting until it is ready at its node, waiting for a
//! node that cannot be reached) is done once for all requests that wait for the session
//! (`SharedWait`): by a task of the main runtime, which ends when no request waits any longer. Each
//! waiting request then looks the session up again. The proxy bounds how long and how many
//! requests may wait in all.

mod node_requests;
mod owner_waits;
mod restart;
mod shared_waits;
mod start;

use std::collections::HashMap;
use std::future::{Future as _, poll_fn};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use conman_node::{Node, RouteError, SessionRoute};
use conman_peer::{Dialer, PeerAddress, PeerRefusal};
use conman_proto::SessionId;
use conman_proxy::{Route, Way};
use conman_registry::RegistryError;
use conman_watchdog::essential;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

pub(crate) use self::restart::LostSession;
use self::shared_waits::SharedWait;
use crate::hold_metrics::{self, Cause, HeldRequest};
use crate::locate_error::{has_ended, is_elsewhere};
use crate::node_waits::pause;
use crate::{FleetMap, LocateError, NoAddress, Owner, PeerBackend, SessionLocation, own_route};

/// Look-ups of one call. Each but the first comes after a wait, and reads the registry.
const MAX_LOOKUPS: u32 = 8;
/// Interval between checks for lost nodes, besides those after a change.
const LOST_NODE_INTERVAL: Duration = Duration::from_millis(500);

/// Finds sessions of the whole fleet.
#[derive(Debug)]
pub struct Locator {
    node: Arc<Node>,
    map: Arc<FleetMap>,
    dialer: Dialer,
    main: Handle,
    shared_waits: Mutex<HashMap<SessionId, Arc<SharedWait>>>,
    /// For one session.
    max_waiting: usize,
}

/// The node that a session was on.
#[derive(Debug, Clone)]
struct FormerNode {
    name: String,
    is_lost: bool,
}

/// The event that a request waits for.
#[derive(Debug, Clone)]
enum Awaited {
    /// A node starts the session, which no node owns.
    Start { may_start: bool, former: FormerNode },
    /// Its node makes it ready.
    Ready { node: Arc<str>, may_start: bool },
    /// Its node can be reached.
    Reachable { node: Arc<str> },
    /// The registry answers, so that its node is known.
    Registry,
}

impl Locator {
    /// Finds sessions until `closing`. `max_held`: the limit of requests that wait at a listener.
    #[must_use]
    pub fn new(
        node: Arc<Node>,
        map: Arc<FleetMap>,
        dialer: Dialer,
        max_held: usize,
        closing: CancellationToken,
    ) -> Arc<Self> {
        hold_metrics::describe();
        let locator = Arc::new(Self {
            node,
            map,
            dialer,
            main: Handle::current(),
            shared_waits: Mutex::default(),
            max_waiting: shared_waits::share_of_one(max_held),
        });
        let watching = Arc::clone(&locator);
        tokio::spawn(essential("lost nodes", async move {
            let mut changes = watching.map.fleet().peer_changes();
            loop {
                let change = timeout(LOST_NODE_INTERVAL, changes.changed());
                // Cancel safe: a check skipped at shutdown is not needed.
                if closing.run_until_cancelled(change).await.is_none() {
                    return;
                }
                watching.map.close_streams_of_lost_nodes();
            }
        }));
        locator
    }

    pub(crate) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub(crate) fn map(&self) -> &Arc<FleetMap> {
        &self.map
    }

    /// The session's route, once it is served. `fresh`: reads the registry even if the location is
    /// cached. Cancel safe.
    ///
    /// # Errors
    /// It cannot be reached or started.
    pub async fn find(
        self: &Arc<Self>,
        id: &SessionId,
        may_start: bool,
        mut fresh: bool,
    ) -> Result<Route, LocateError> {
        for _ in 0..MAX_LOOKUPS {
            let mut ended = None;
            if self.node.sessions().is_live(id) {
                match self.wait_here(id, may_start).await {
                    Ok(route) => return Ok(own_route(route)),
                    // It has ended or was taken meanwhile, or another node was first.
                    Err(error) if is_elsewhere(&error) => fresh = true,
                    Err(error) if has_ended(&error) => {
                        fresh = true;
                        ended = Some(error);
                    }
                    Err(_) if !self.node.sessions().is_live(id) => fresh = true,
                    Err(error) => return Err(LocateError::Route(error)),
                }
            }
            let location = match ended {
                // If no other node is known, the answer is this node's.
                Some(ended) => {
                    let located = self.map.locate(id, &mut fresh).await;
                    located.map_err(|_| LocateError::Route(ended))?
                }
                None => match self.map.locate_now(id, &mut fresh).await {
                    Ok(location) => location,
                    Err(RegistryError::Unavailable { .. }) => {
                        let _held = HeldRequest::new(Cause::Registry);
                        self.wait_for(id, Awaited::Registry).await?;
                        continue;
                    }
                    Err(error) => return Err(LocateError::Registry(error)),
                },
            };
            match location {
                SessionLocation::There(owner) => match owner.node.address.clone() {
                    Ok(address) => return Ok(self.route_to(id, owner, address)),
                    // It has just joined, or has gone and is not declared dead yet.
                    Err(NoAddress::NotYet { .. }) => {
                        let node = owner.node.name;
                        let _held = self.held(&node, Cause::Silent);
                        self.wait_for(id, Awaited::Reachable { node }).await?;
                    }
                    Err(why) => return Err(LocateError::Unreachable(why)),
                },
                SessionLocation::NoOwner => return self.route_here(id, may_start).await,
                SessionLocation::Here { .. } if fresh => {
                    return self.route_here(id, may_start).await;
                }
                SessionLocation::Released { node, .. } if fresh => {
                    self.wait_for_start(id, may_start, node, false).await?;
                }
                SessionLocation::Lost { node, .. } if fresh => {
                    self.wait_for_start(id, may_start, node, true).await?;
                }
                SessionLocation::Here { .. }
                | SessionLocation::Released { .. }
                | SessionLocation::Lost { .. } => {}
            }
            fresh = true;
        }
        Err(LocateError::Moves { id: id.clone() })
    }

    /// Whether another node that can be reached owns the session. Waits only for the registry.
    pub async fn is_elsewhere(&self, id: &SessionId) -> bool {
        let located = self.map.locate(id, &mut false).await;
        matches!(located, Ok(SessionLocation::There(owner)) if owner.node.address.is_ok())
    }

    /// The route for a request that the node of `from` refused, for the `times`th time in a row.
    /// Cancel safe.
    ///
    /// # Errors
    /// As for [`Locator::find`].
    pub async fn find_again(
        self: &Arc<Self>,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, LocateError> {
        let id = &from.session;
        let node = match &from.way {
            Way::Peer { node, .. } => Arc::clone(node),
            Way::Session | Way::Api => return self.find(id, may_start, true).await,
        };
        match why {
            PeerRefusal::NotOwner => {
                self.map.fleet().forget_location(id, from.generation);
                // The first time, the registry was not read yet.
                if times > 1 {
                    tokio::time::sleep(pause(times)).await;
                }
            }
            PeerRefusal::Refused => {
                self.map.fleet().forget_location(id, from.generation);
                let now = self.map.locate_fresh(id).await;
                let now = now.map_err(LocateError::Registry)?;
                if matches!(now, SessionLocation::There(owner) if owner.node.name == node) {
                    let refused = self.map.client().refused_by(&node);
                    return Err(LocateError::Refused(refused));
                }
            }
            PeerRefusal::NotReady => {
                let _held = self.held(&node, Cause::Starting);
                self.wait_for(id, Awaited::Ready { node, may_start })
                    .await?;
            }
            PeerRefusal::Unreachable(_) => {
                let _held = self.held(&node, Cause::Silent);
                self.wait_for(id, Awaited::Reachable { node }).await?;
                // It may be reachable but unusable, for example because it is full.
                if times > 1 {
                    tokio::time::sleep(pause(times)).await;
                }
            }
        }
        self.find(id, may_start, true).await
    }

    async fn route_here(&self, id: &SessionId, may_start: bool) -> Result<Route, LocateError> {
        let route = self.wait_here(id, may_start).await;
        route.map(own_route).map_err(LocateError::Route)
    }

    /// The session's route according to this node; waits for a session that starts.
    async fn wait_here(&self, id: &SessionId, may_start: bool) -> Result<SessionRoute, RouteError> {
        let mut route = std::pin::pin!(self.node.access().route(id, may_start));
        // Most sessions are ready, so nothing is waited for.
        let first = poll_fn(|cx| Poll::Ready(route.as_mut().poll(cx))).await;
        if let Poll::Ready(route) = first {
            return route;
        }
        let fenced = self.map.fleet().standing().borrow().is_frozen();
        let _held = HeldRequest::new(match fenced {
            true => Cause::Fenced,
            false => Cause::Starting,
        });
        route.await
    }

    async fn wait_for_start(
        self: &Arc<Self>,
        id: &SessionId,
        may_start: bool,
        name: String,
        is_lost: bool,
    ) -> Result<(), LocateError> {
        let otherwise = match is_lost {
            true => Cause::Fenced,
            false => Cause::Ended,
        };
        let _held = self.held(&name, otherwise);
        let former = FormerNode { name, is_lost };
        self.wait_for(id, Awaited::Start { may_start, former })
            .await
    }

    /// Counts a request that waits for a session that is or was on this node.
    fn held(&self, node: &str, otherwise: Cause) -> HeldRequest {
        let peers = self.map.fleet().peers();
        let peer = peers.iter().find(|peer| peer.name == node);
        HeldRequest::new(Cause::of(peer, otherwise))
    }

    fn route_to(&self, id: &SessionId, owner: Owner, address: PeerAddress) -> Route {
        let closing = self.map.lost(&owner.node);
        let (node, incarnation) = (owner.node.name, owner.node.incarnation);
        Route {
            session: id.clone(),
            generation: owner.generation,
            // The owner counts the session's; this is what passes through this node.
            activity: Arc::clone(self.node.leave().through()),
            closing,
            port: None,
            strip_prefix: true,
            way: Way::Peer { node, incarnation },
            backend: Arc::new(PeerBackend {
                dialer: self.dialer.clone(),
                liveness: self.map.client().liveness().clone(),
                address,
            }),
        }
    }
}
