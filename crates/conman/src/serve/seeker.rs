//! Finds the node that serves a session, and waits if there is none yet.
//!
//! Whatever takes time (starting a session, waiting until it is ready at its node, waiting for a
//! node that cannot be reached) is done once for all requests that wait for the session
//! (`SharedWait`): by a task of the main runtime, which ends when no request waits any more. Each
//! waiting request then looks the session up again. The proxy bounds how long and how many
//! requests may wait in all.

mod asking;
mod owner;
mod refusals;
mod restarting;
mod reviving;
mod shared_waits;

use std::collections::HashMap;
use std::future::{Future as _, poll_fn};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use conman_fleet::holding::{self, Cause, Held};
use conman_fleet::{
    Dialer, FleetMap, NoAddress, Owner, PeerAddress, PlacementRequest, SessionLocation, ToNode,
};
use conman_node::{Node, RouteError, SessionRoute};
use conman_proto::{Problem, ResolvedSpec, SessionId};
use conman_proxy::{PeerRefusal, Refusal, Route, Way};
use conman_vitals::essential;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use self::refusals::{is_elsewhere, is_over, no_registry, passing, refused, unreachable};
pub(super) use self::restarting::LostSession;
use self::shared_waits::SharedWait;
use super::directory::{own_route, refusal};

/// Look-ups of one call. Each but the first reads the registry, after a wait.
const MAX_LOOKUPS: u32 = 8;
/// Nodes that are asked at a time to start one session.
const MAX_CANDIDATES: usize = 4;
/// Pause between two attempts, at first and at most.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Interval between checks for lost nodes.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Finds sessions of the whole fleet.
#[derive(Debug)]
pub(super) struct Seeker {
    node: Arc<Node>,
    map: Arc<FleetMap>,
    dialer: Dialer,
    main: Handle,
    shared_waits: Mutex<HashMap<SessionId, Arc<SharedWait>>>,
    /// For one session.
    most_waiting: usize,
}

/// The node that a session was on.
#[derive(Debug, Clone)]
struct Was {
    node: String,
    is_lost: bool,
}

/// What a request has to wait for.
#[derive(Debug, Clone)]
enum Need {
    /// No node owns the session: one has to start it.
    Start { may_start: bool, was: Was },
    /// Its node has to make it ready.
    Ready { node: Arc<str>, may_start: bool },
    /// Its node cannot be reached.
    Reach { node: Arc<str> },
}

impl Seeker {
    pub(super) fn new(
        node: Arc<Node>,
        map: Arc<FleetMap>,
        dialer: Dialer,
        max_held: usize,
        closing: CancellationToken,
    ) -> Arc<Self> {
        holding::describe();
        let seeker = Arc::new(Self {
            node,
            map,
            dialer,
            main: Handle::current(),
            shared_waits: Mutex::default(),
            most_waiting: shared_waits::share_of_one(max_held),
        });
        let watching = Arc::clone(&seeker);
        tokio::spawn(essential("look for gone nodes", async move {
            let pause = || tokio::time::sleep(LOOK_EVERY);
            // Cancel safe: a check skipped at shutdown is not needed.
            while closing.run_until_cancelled(pause()).await.is_some() {
                watching.map.tell_of_gone_nodes();
            }
        }));
        seeker
    }

    /// The session's route, once it is served.
    pub(super) async fn find(
        self: &Arc<Self>,
        id: &SessionId,
        may_start: bool,
        mut fresh: bool,
    ) -> Result<Route, Refusal> {
        for _ in 0..MAX_LOOKUPS {
            let mut over = None;
            if self.node.sessions().is_live(id) {
                match self.own(id, may_start).await {
                    Ok(route) => return Ok(own_route(route)),
                    // It has ended or was taken meanwhile, or another node was first.
                    Err(error) if is_elsewhere(&error) => fresh = true,
                    Err(error) if is_over(&error) => {
                        fresh = true;
                        over = Some(refusal(&error));
                    }
                    Err(_) if !self.node.sessions().is_live(id) => fresh = true,
                    Err(error) => return Err(refusal(&error)),
                }
            }
            let looked = self.map.look(id, &mut fresh).await;
            // If no other node is known, the answer is this node's.
            let whereabouts = looked.map_err(|error| over.unwrap_or_else(|| no_registry(error)))?;
            match whereabouts {
                SessionLocation::There(owner) => match owner.node.address.clone() {
                    Ok(address) => return Ok(self.way(id, owner, address)),
                    // It has just joined, or has gone and is not declared dead yet.
                    Err(NoAddress::NotYet { .. }) => {
                        let node = owner.node.name;
                        let _held = self.held(&node, Cause::Silent);
                        self.wait_for(id, Need::Reach { node }).await?;
                    }
                    Err(why) => return Err(unreachable(why.to_string())),
                },
                SessionLocation::NoOwner => return self.local(id, may_start).await,
                SessionLocation::Here { .. } if fresh => return self.local(id, may_start).await,
                SessionLocation::Released { node, .. } if fresh => {
                    let _held = self.held(&node, Cause::Ended);
                    let was = Was {
                        node,
                        is_lost: false,
                    };
                    self.wait_for(id, Need::Start { may_start, was }).await?;
                }
                SessionLocation::Lost { node, .. } if fresh => {
                    let _held = self.held(&node, Cause::Fenced);
                    let was = Was {
                        node,
                        is_lost: true,
                    };
                    self.wait_for(id, Need::Start { may_start, was }).await?;
                }
                SessionLocation::Here { .. }
                | SessionLocation::Released { .. }
                | SessionLocation::Lost { .. } => {}
            }
            fresh = true;
        }
        Err(passing(Problem::new(
            "session-moves",
            "The session changes its node",
            503,
            format!("session `{id}` changed its node each time that it was looked up; try again"),
        )))
    }

    /// The route for a request that the node of `from` refused.
    pub(super) async fn find_anew(
        self: &Arc<Self>,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
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
                let now = self.map.whereabouts(id).await.map_err(no_registry)?;
                if matches!(now, SessionLocation::There(owner) if owner.node.name == node) {
                    return Err(refused(&self.map.client().refused_by(&node)));
                }
            }
            PeerRefusal::NotReady => {
                let _held = self.held(&node, Cause::Starting);
                self.wait_for(id, Need::Ready { node, may_start }).await?;
            }
            PeerRefusal::Unreachable(_) => {
                let _held = self.held(&node, Cause::Silent);
                self.wait_for(id, Need::Reach { node }).await?;
                // It may be reachable but unusable, for example because it is full.
                if times > 1 {
                    tokio::time::sleep(pause(times)).await;
                }
            }
        }
        self.find(id, may_start, true).await
    }

    async fn local(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        let route = self.own(id, may_start).await;
        route.map(own_route).map_err(|error| refusal(&error))
    }

    /// The session's route according to this node; waits for a session that starts.
    async fn own(&self, id: &SessionId, may_start: bool) -> Result<SessionRoute, RouteError> {
        let mut route = std::pin::pin!(self.node.access().route(id, may_start));
        // Most sessions are ready, so nothing is waited for.
        let first = poll_fn(|cx| Poll::Ready(route.as_mut().poll(cx))).await;
        if let Poll::Ready(route) = first {
            return route;
        }
        let fenced = self.map.fleet().standing().borrow().is_frozen();
        let _held = Held::new(match fenced {
            true => Cause::Fenced,
            false => Cause::Starting,
        });
        route.await
    }

    /// Counts requests that wait for a session that is on this node, or was.
    fn held(&self, node: &str, otherwise: Cause) -> Held {
        let peers = self.map.fleet().peers();
        let peer = peers.iter().find(|peer| peer.name == node);
        Held::new(Cause::of(peer, otherwise))
    }

    fn way(&self, id: &SessionId, owner: Owner, address: PeerAddress) -> Route {
        let closing = self.map.gone(&owner.node);
        let (node, incarnation) = (owner.node.name, owner.node.incarnation);
        Route {
            session: id.clone(),
            generation: owner.generation,
            // The owner counts what is open.
            activity: Arc::default(),
            closing,
            way: Way::Peer { node, incarnation },
            backend: Arc::new(ToNode {
                dialer: self.dialer.clone(),
                pulse: self.map.client().pulse().clone(),
                address,
            }),
        }
    }
}

fn pause(times: u32) -> Duration {
    (PAUSE * 2_u32.saturating_pow(times.min(8).saturating_sub(1))).min(LONGEST_PAUSE)
}

fn wish_of(spec: &ResolvedSpec) -> PlacementRequest {
    PlacementRequest {
        template: spec.template.clone(),
        runtime: Some(spec.runtime),
        labels: spec.node_labels.clone(),
        memory_bytes: spec.memory_bytes.unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests;
