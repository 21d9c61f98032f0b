//! Finds the node that serves a session, and waits where there is none yet.
//!
//! Whatever takes time — a session that is started, one that is not ready at its node, a node that
//! is not to be reached — is done once for all who wait for the session (`Quest`): by a task of the
//! main runtime, which ends when nobody waits for it any more. Each who has waited then looks the
//! session up anew. How long and how many may wait in all, the proxy bounds.

use std::collections::{BTreeSet, HashMap};
use std::future::{Future as _, poll_fn};
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use conman_node::{
    EnsureError, Former, Node, RestartError, RouteError, SessionRoute, WithoutImage,
};
use conman_peer::holding::{self, Cause, Held};
use conman_peer::{
    AskError, Dialer, FleetMap, NoAddress, Owner, PeerAddress, RefusedBy, ToNode, Whereabouts, Wish,
};
use conman_proto::{Generation, Problem, ResolvedSpec, SessionId};
use conman_proxy::{Refusal, Route, Turned, Way};
use conman_registry::{PeerStanding, RegistryError};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty, Limited};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::directory::{own_route, refusal};

/// Sessions that are waited for at a time.
const MAX_QUESTS: usize = 10_000;
/// Those who wait for one session: a quarter of what may wait at one listener, so that the clients of
/// one session do not keep all others' from waiting.
const MAX_WAITING: usize = 1_024;
/// Look-ups of one call: each but the first asks the registry, after something was waited for.
const MAX_LOOKUPS: u32 = 8;
/// Nodes that are asked to start one session, at a time.
const MAX_CANDIDATES: usize = 4;
/// How often a record is asked for that the registry does not tell.
const MAX_READS: u32 = 8;
/// What a node says whose clients take all the places of a session that is not ready.
const TOO_MANY_WAITING: &str = "too-many-waiting";
/// What a node says that lacks what the session needs: another one may have it.
const NO_SUCH_IMAGE: &str = "no-such-image";
const NO_SUCH_RUNTIME: &str = "no-such-runtime";
/// Between two tries, at first and at most.
const PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Between two looks at which nodes are gone.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Bytes of a problem that another node answers with.
const MAX_PROBLEM_BYTES: usize = 64 * 1024;
/// Time for it, once its head is there: by then nobody looks whether the node still answers.
const PROBLEM_PATIENCE: Duration = Duration::from_secs(5);
/// When a client may ask again.
const RETRY_AFTER_S: u32 = 1;

/// Who asks for a session to be ready, as the other node's log has it.
const CALLER: HeaderValue = HeaderValue::from_static("frontend sessions");

/// A session to be restarted.
#[derive(Debug, Clone)]
pub(super) struct LostSession {
    pub(super) id: SessionId,
    pub(super) generation: Generation,
    pub(super) spec: ResolvedSpec,
    /// The node that it was on.
    pub(super) from: String,
    /// Which restart in a row this is.
    pub(super) count: u32,
}

/// Finds sessions of the whole fleet.
#[derive(Debug)]
pub(super) struct Seeker {
    node: Arc<Node>,
    map: Arc<FleetMap>,
    dialer: Dialer,
    main: Handle,
    quests: Mutex<HashMap<SessionId, Arc<Quest>>>,
}

/// Something that all who wait for one session wait for. `None` until it is over.
#[derive(Debug, Default)]
struct Quest(watch::Sender<Option<Result<(), Refusal>>>);

impl Quest {
    /// Waits with the others, while there is a place.
    fn join(
        &self,
        id: &SessionId,
    ) -> Result<watch::Receiver<Option<Result<(), Refusal>>>, Box<Refusal>> {
        if self.0.receiver_count() < MAX_WAITING {
            return Ok(self.0.subscribe());
        }
        Err(Box::new(passing(Problem::new(
            TOO_MANY_WAITING,
            "Too many connections wait for the session",
            503,
            format!(
                "{MAX_WAITING} connections wait for session `{id}` already; try again in a moment"
            ),
        ))))
    }
}

/// The node that a session was on.
#[derive(Debug, Clone)]
struct Was {
    node: String,
    is_lost: bool,
}

/// What has to be waited for.
#[derive(Debug, Clone)]
enum Need {
    /// Nobody owns it: some node has to start it.
    Start { may_start: bool, was: Was },
    /// Its node has to have it ready.
    Ready { node: Arc<str>, may_start: bool },
    /// Its node cannot be reached.
    Reach { node: Arc<str> },
}

/// What another node said.
enum Said {
    Ready,
    /// The session is elsewhere by now.
    Elsewhere,
    Problem(Problem),
    /// It takes nothing of this one's.
    Refused(RefusedBy),
    Nothing,
}

impl Seeker {
    pub(super) fn new(
        node: Arc<Node>,
        map: Arc<FleetMap>,
        dialer: Dialer,
        closing: CancellationToken,
    ) -> Arc<Self> {
        holding::describe();
        let seeker = Arc::new(Self {
            node,
            map,
            dialer,
            main: Handle::current(),
            quests: Mutex::default(),
        });
        let watching = Arc::clone(&seeker);
        tokio::spawn(async move {
            let pause = || tokio::time::sleep(LOOK_EVERY);
            // A look that is not taken any more tells nobody anything.
            while closing.run_until_cancelled(pause()).await.is_some() {
                watching.map.tell_of_gone_nodes();
            }
        });
        seeker
    }

    /// Where the session is served, once it is.
    pub(super) async fn find(
        self: &Arc<Self>,
        id: &SessionId,
        may_start: bool,
        mut fresh: bool,
    ) -> Result<Route, Refusal> {
        for _ in 0..MAX_LOOKUPS {
            let mut over = None;
            if self.node.is_live(id) {
                match self.own(id, may_start).await {
                    Ok(route) => return Ok(own_route(route)),
                    // It has ended or was taken meanwhile, or another node was first.
                    Err(error) if is_elsewhere(&error) => fresh = true,
                    Err(error) if is_over(&error) => {
                        fresh = true;
                        over = Some(refusal(&error));
                    }
                    Err(_) if !self.node.is_live(id) => fresh = true,
                    Err(error) => return Err(refusal(&error)),
                }
            }
            let looked = self.map.look(id, &mut fresh).await;
            // Where nobody can tell of another node, what this one knows is told.
            let whereabouts = looked.map_err(|error| over.unwrap_or_else(|| no_registry(error)))?;
            match whereabouts {
                Whereabouts::There(owner) => match owner.node.address.clone() {
                    Ok(address) => return Ok(self.way(id, owner, address)),
                    // It has just come, or has gone and is not declared dead yet.
                    Err(NoAddress::NotYet { .. }) => {
                        let node = owner.node.name;
                        let _held = self.held(&node, Cause::Silent);
                        self.wait_for(id, Need::Reach { node }).await?;
                    }
                    Err(why) => return Err(unreachable(why.to_string())),
                },
                Whereabouts::Nobody => return self.local(id, may_start).await,
                Whereabouts::Here { .. } if fresh => return self.local(id, may_start).await,
                Whereabouts::Released { node, .. } if fresh => {
                    let _held = self.held(&node, Cause::Ended);
                    let was = Was {
                        node,
                        is_lost: false,
                    };
                    self.wait_for(id, Need::Start { may_start, was }).await?;
                }
                Whereabouts::Lost { node, .. } if fresh => {
                    let _held = self.held(&node, Cause::Fenced);
                    let was = Was {
                        node,
                        is_lost: true,
                    };
                    self.wait_for(id, Need::Start { may_start, was }).await?;
                }
                Whereabouts::Here { .. }
                | Whereabouts::Released { .. }
                | Whereabouts::Lost { .. } => {}
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

    /// Where a request goes that the node of `from` did not take.
    pub(super) async fn find_anew(
        self: &Arc<Self>,
        from: &Route,
        why: &Turned,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        let id = &from.session;
        let node = match &from.way {
            Way::Peer { node, .. } => Arc::clone(node),
            Way::Session | Way::Api => return self.find(id, may_start, true).await,
        };
        match why {
            Turned::NotOwner => {
                self.map.fleet().forget_location(id, from.generation);
                // The first time the registry was not asked yet.
                if times > 1 {
                    tokio::time::sleep(pause(times)).await;
                }
            }
            Turned::Refused => {
                self.map.fleet().forget_location(id, from.generation);
                let now = self.map.whereabouts(id).await.map_err(no_registry)?;
                if matches!(now, Whereabouts::There(owner) if owner.node.name == node) {
                    return Err(refused(&self.map.client().refused_by(&node)));
                }
            }
            Turned::NotReady => {
                let _held = self.held(&node, Cause::Starting);
                self.wait_for(id, Need::Ready { node, may_start }).await?;
            }
            Turned::Unreachable(_) => {
                let _held = self.held(&node, Cause::Silent);
                self.wait_for(id, Need::Reach { node }).await?;
                // It can be reached and yet not be used, for example because it is full.
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

    /// By this node's own word, for which a session that starts has to be waited for.
    async fn own(&self, id: &SessionId, may_start: bool) -> Result<SessionRoute, RouteError> {
        let mut route = std::pin::pin!(self.node.route(id, may_start));
        // Most are there already, and wait for nothing.
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

    /// Counts who waits for a session that is on this node, or was.
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

    /// Waits for what is needed, with all who wait for the session.
    async fn wait_for(self: &Arc<Self>, id: &SessionId, need: Need) -> Result<(), Refusal> {
        let mut over = {
            let mut quests = lock(&self.quests);
            match quests.get(id) {
                Some(quest) => quest.join(id).map_err(|refusal| *refusal)?,
                None if quests.len() >= MAX_QUESTS => {
                    return Err(passing(Problem::new(
                        TOO_MANY_WAITING,
                        "Too many sessions are waited for",
                        503,
                        format!(
                            "connections wait for {MAX_QUESTS} sessions already; try again in a \
                             moment"
                        ),
                    )));
                }
                None => {
                    let quest = Arc::<Quest>::default();
                    let over = quest.0.subscribe();
                    quests.insert(id.clone(), Arc::clone(&quest));
                    let (seeker, id) = (Arc::clone(self), id.clone());
                    self.main
                        .spawn(async move { seeker.run(&id, need, &quest).await });
                    over
                }
            }
        };
        metrics::gauge!("conman_hop_quests").set(lock(&self.quests).len() as f64);
        let ended = match over.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            // Its task panicked: look anew.
            Err(_) => None,
        };
        ended.unwrap_or(Ok(()))
    }

    async fn run(&self, id: &SessionId, need: Need, quest: &Arc<Quest>) {
        // Also when the quest panics: those who wait must not wait for ever.
        let _entry = Entry {
            seeker: self,
            id,
            quest,
        };
        let mut work = std::pin::pin!(self.quest(id, &need));
        loop {
            tokio::select! {
                outcome = &mut work => {
                    // First, so that nobody joins what is over: they may need something else.
                    lock(&self.quests).remove(id);
                    quest.0.send_replace(Some(outcome));
                    return;
                }
                // Looked at anew below, where nobody can join meanwhile.
                () = quest.0.closed() => {
                    let mut quests = lock(&self.quests);
                    if quest.0.receiver_count() == 0 {
                        quests.remove(id);
                        return;
                    }
                }
            }
        }
    }

    async fn quest(&self, id: &SessionId, need: &Need) -> Result<(), Refusal> {
        match need {
            Need::Start { may_start, was } => self.start(id, *may_start, was).await,
            // Cancel safe: what is asked of the node is asked anew, and a look is only a look.
            Need::Ready { node, may_start } => tokio::select! {
                outcome = self.ready(id, node, *may_start) => outcome,
                () = self.lost(id, node) => Ok(()),
            },
            Need::Reach { node } => {
                self.reach(id, node).await;
                Ok(())
            }
        }
    }

    /// Has some node start the session by its record.
    async fn start(&self, id: &SessionId, may_start: bool, was: &Was) -> Result<(), Refusal> {
        let mut lacking = Lacking::default();
        for times in 1.. {
            let record = match self.node.record(id).await {
                Ok(Some(record)) => record,
                Ok(None) => return Ok(()),
                // Its leader may just have gone, with the machine of a node.
                Err(RegistryError::Unavailable { .. }) if times <= MAX_READS => {
                    tokio::time::sleep(pause(times)).await;
                    continue;
                }
                Err(error) => return Err(no_registry(error)),
            };
            let placement = self.map.place(id, &wish_of(&record.spec));
            let (mut trouble, mut refusals) = (None, Vec::new());
            let mut candidates = lacking.others(&placement.candidates);
            if candidates.is_empty() {
                candidates = lacking.others(&placement.second);
            }
            for name in &candidates {
                let said = if *name == self.map.me() {
                    self.start_here(id, may_start, was).await
                } else {
                    self.ask(id, &self.map.node(name).address, may_start, was)
                        .await
                };
                match said {
                    Said::Ready | Said::Elsewhere => return Ok(()),
                    Said::Problem(problem) if is_for_want_of_something(&problem) => {
                        lacking.add(name, problem);
                    }
                    // Another node has no better chance.
                    Said::Problem(problem) if !problem.retryable => {
                        return Err(Refusal::from(problem));
                    }
                    Said::Problem(problem) => trouble = Some(problem),
                    Said::Refused(refused) => refusals.push(refused),
                    Said::Nothing => {}
                }
            }
            if placement.candidates.is_empty() {
                return Err(no_node(id, &placement.refused));
            }
            if let Some(why) = lacking.all_of([&placement.candidates, &placement.second]) {
                // It may be started once a node that has the runtime takes sessions.
                if placement.runtime_elsewhere && why.slug() == NO_SUCH_RUNTIME {
                    return Err(no_node(id, &placement.refused));
                }
                return Err(Refusal::from(why));
            }
            if let Some(last) = refusals
                .last()
                .filter(|_| refusals.len() == candidates.len())
            {
                return Err(refused(last));
            }
            tracing::debug!(session = %id, ?trouble, times, "no node could start it yet");
            tokio::time::sleep(pause(times)).await;
        }
        Ok(())
    }

    /// Has some node restart a session that lost its node, each asked once: the node that it runs
    /// on then, or why it runs on none. One that lacks its image or its runtime is passed over, and
    /// only where all do, one of them tries, which is counted.
    pub(super) async fn restart(&self, lost: &LostSession) -> Result<String, String> {
        let placement = self.map.place(&lost.id, &wish_of(&lost.spec));
        let first = placement.candidates.len();
        let order = in_turn(placement.candidates, lost.count);
        let mut trouble = reasons(&placement.refused);
        let (mut asked, mut lacks_image) = (0, None);
        for (number, name) in order.iter().chain(&placement.second).enumerate() {
            // Those of second choice are for want of the image or the runtime alone.
            if asked >= MAX_CANDIDATES || number >= first && asked > 0 {
                break;
            }
            match self.restart_on(lost, name, WithoutImage::Refuse).await {
                Said::Problem(problem) if is_for_want_of_something(&problem) => {
                    trouble = told_by(name, &problem);
                    if problem.slug() == NO_SUCH_IMAGE {
                        lacks_image.get_or_insert(name);
                    }
                }
                said => match self.restarted(lost, name, said).await {
                    ControlFlow::Break(outcome) => return outcome,
                    ControlFlow::Continue(why) => {
                        asked += 1;
                        trouble = why;
                    }
                },
            }
        }
        // So that it ends: nothing would be counted otherwise.
        if let Some(name) = lacks_image.filter(|_| asked == 0) {
            let said = self.restart_on(lost, name, WithoutImage::Try).await;
            return match self.restarted(lost, name, said).await {
                ControlFlow::Break(outcome) => outcome.map_err(|_| trouble),
                ControlFlow::Continue(why) => Err(why),
            };
        }
        Err(trouble)
    }

    async fn restart_on(
        &self,
        lost: &LostSession,
        name: &str,
        without_image: WithoutImage,
    ) -> Said {
        if name == self.map.me() {
            return self.restart_here(lost, without_image).await;
        }
        let (id, generation) = (&lost.id, lost.generation);
        let address = &self.map.node(name).address;
        let from = utf8_percent_encode(&lost.from, NON_ALPHANUMERIC);
        let elsewhere = without_image == WithoutImage::Refuse;
        let target = format!(
            "/peer/sessions/{id}/restart?from={from}&generation={generation}&elsewhere={elsewhere}"
        );
        self.post(id, address, target).await
    }

    /// What a restart has come to by what a node said, or why the next is to be asked.
    async fn restarted(
        &self,
        lost: &LostSession,
        name: &str,
        said: Said,
    ) -> ControlFlow<Result<String, String>, String> {
        match said {
            Said::Ready => ControlFlow::Break(Ok(name.to_owned())),
            Said::Elsewhere => ControlFlow::Break(self.whose(&lost.id).await),
            Said::Problem(problem) => ControlFlow::Continue(told_by(name, &problem)),
            Said::Refused(by) => ControlFlow::Continue(by.to_string()),
            Said::Nothing => ControlFlow::Continue(format!("node `{name}` did not answer")),
        }
    }

    /// The node that owns a session by now.
    pub(super) async fn whose(&self, id: &SessionId) -> Result<String, String> {
        match self.map.whereabouts(id).await {
            Ok(Whereabouts::There(owner)) => Ok(owner.node.name.to_string()),
            Ok(Whereabouts::Here { .. }) => Ok(self.map.me().to_owned()),
            Ok(_) => Err("it is not to be restarted any more".to_owned()),
            Err(error) => Err(super::chain(&error)),
        }
    }

    async fn restart_here(&self, lost: &LostSession, without_image: WithoutImage) -> Said {
        let (id, generation) = (&lost.id, lost.generation);
        let begun = self.node.restart(id, generation, &lost.from, without_image);
        match begun.await {
            Ok(_) => Said::Ready,
            Err(RestartError::NotWanted { .. }) => Said::Elsewhere,
            Err(RestartError::NotStarted { source, .. }) if is_of_another(&source) => {
                Said::Elsewhere
            }
            Err(error) => {
                let detail = super::chain(&error);
                let slug = match &error {
                    RestartError::NotStarted {
                        source: EnsureError::NoSuchImage { .. },
                        ..
                    } => NO_SUCH_IMAGE,
                    RestartError::NotStarted {
                        source: EnsureError::NoSuchRuntime { .. },
                        ..
                    } => NO_SUCH_RUNTIME,
                    RestartError::NotStarted { .. } | RestartError::NotWanted { .. } => {
                        "not-restarted"
                    }
                };
                Said::Problem(Problem::new(slug, "It was not restarted", 503, detail))
            }
        }
    }

    async fn start_here(&self, id: &SessionId, may_start: bool, was: &Was) -> Said {
        let former = Former {
            node: Some(&was.node),
            is_lost: was.is_lost,
        };
        match self.node.revive(id, may_start, former).await {
            Ok(_) => Said::Ready,
            Err(error) if is_elsewhere(&error) => Said::Elsewhere,
            Err(error) => Said::Problem(conman_api::route_problem(&error)),
        }
    }

    /// Has the session's node say when it takes requests.
    async fn ready(&self, id: &SessionId, name: &str, may_start: bool) -> Result<(), Refusal> {
        let was = Was {
            node: name.to_owned(),
            is_lost: false,
        };
        let said = self
            .ask(id, &self.map.node(name).address, may_start, &was)
            .await;
        match said {
            Said::Ready | Said::Elsewhere => Ok(()),
            Said::Refused(by) => Err(refused(&by)),
            // Its own clients have all the places for the session: how long and how many wait here
            // is not for it to say.
            Said::Problem(problem) if problem.slug() == TOO_MANY_WAITING => {
                tokio::time::sleep(LONGEST_PAUSE).await;
                Ok(())
            }
            Said::Nothing => {
                tokio::time::sleep(PAUSE).await;
                Ok(())
            }
            Said::Problem(problem) => {
                // What a node says of a session that it has lost meanwhile is of no interest.
                match self.map.whereabouts(id).await {
                    Ok(Whereabouts::There(owner)) if *owner.node.name == *name => {
                        Err(with_retry(problem))
                    }
                    // Who looks again is told where the registry does not answer.
                    Ok(_) | Err(_) => Ok(()),
                }
            }
        }
    }

    /// Returns when a node that answers, and yet is not heard of, is not the session's any more: its
    /// ownership lapses, and what it has is frozen.
    async fn lost(&self, id: &SessionId, name: &str) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let peers = self.map.fleet().peers();
            let peer = peers.iter().find(|peer| peer.name == name);
            // Nobody can have claimed what is its own before it is declared dead.
            if peer.is_some_and(|peer| peer.standing != PeerStanding::Fenced) {
                continue;
            }
            match self.map.whereabouts(id).await {
                Ok(Whereabouts::There(owner)) if *owner.node.name == *name => {}
                Ok(_) => return,
                // While the registry does not answer, nothing has changed.
                Err(_) => {}
            }
        }
    }

    /// Returns when the node can be reached, or is not the session's any more.
    async fn reach(&self, id: &SessionId, name: &str) {
        for times in 1.. {
            tokio::time::sleep(pause(times)).await;
            // While the registry does not answer, nothing has changed.
            let Ok(now) = self.map.whereabouts(id).await else {
                continue;
            };
            match now {
                Whereabouts::There(owner) if *owner.node.name == *name => {
                    match owner.node.address {
                        Ok(address) if self.answers(&address).await => return,
                        Ok(_) | Err(NoAddress::NotYet { .. }) => {}
                        // Who looks again is told why it cannot be.
                        Err(NoAddress::NotListening { .. } | NoAddress::Malformed { .. }) => return,
                    }
                }
                _ => return,
            }
        }
    }

    /// Whether a node answers, for as long as nobody asks anew whose the session is.
    async fn answers(&self, address: &PeerAddress) -> bool {
        let pulse = self.map.client().pulse();
        tokio::time::timeout(LONGEST_PAUSE, pulse.answers(address)).await == Ok(true)
    }

    /// Asks a node to have the session ready.
    async fn ask(
        &self,
        id: &SessionId,
        address: &Result<PeerAddress, NoAddress>,
        may_start: bool,
        was: &Was,
    ) -> Said {
        let from = utf8_percent_encode(&was.node, NON_ALPHANUMERIC);
        let lost = was.is_lost;
        let target = format!("/peer/sessions/{id}/ready?start={may_start}&lost={lost}&from={from}");
        self.post(id, address, target).await
    }

    async fn post(
        &self,
        id: &SessionId,
        address: &Result<PeerAddress, NoAddress>,
        target: String,
    ) -> Said {
        let Ok(address) = address else {
            return Said::Nothing;
        };
        let request = Request::post(target)
            .header("x-conman-caller", CALLER)
            .body(Empty::<Bytes>::new());
        let Ok(request) = request else {
            return Said::Nothing;
        };
        let response = match self.map.client().ask(address, request).await {
            Ok(response) => response,
            Err(AskError::Refused(refused)) => return Said::Refused(refused),
            Err(
                error @ (AskError::Dial(_)
                | AskError::Stopped(_)
                | AskError::Silent(_)
                | AskError::Request { .. }
                | AskError::NoRoom { .. }
                | AskError::Unanswered { .. }),
            ) => {
                tracing::debug!(session = %id, error = super::chain(&error), "a node did not answer");
                return Said::Nothing;
            }
        };
        if response.headers().contains_key("x-conman-turned") {
            return Said::Elsewhere;
        }
        if response.status() == StatusCode::OK {
            return Said::Ready;
        }
        let body = Limited::new(response.into_body(), MAX_PROBLEM_BYTES).collect();
        let body = tokio::time::timeout(PROBLEM_PATIENCE, body).await;
        let problem = body
            .ok()
            .and_then(Result::ok)
            .and_then(|body| serde_json::from_slice(&body.to_bytes()).ok());
        problem.map_or(Said::Nothing, Said::Problem)
    }
}

/// The nodes that a quest has found to lack its session's image, or its runtime.
#[derive(Debug, Default)]
struct Lacking {
    nodes: BTreeSet<String>,
    why: Option<Problem>,
}

impl Lacking {
    fn add(&mut self, node: &str, why: Problem) {
        self.nodes.insert(node.to_owned());
        // That an image is missing is nearer to a start than that a runtime is.
        let nearer = self
            .why
            .as_ref()
            .is_some_and(|why| why.slug() == NO_SUCH_IMAGE);
        if !nearer || why.slug() == NO_SUCH_IMAGE {
            self.why = Some(why);
        }
    }

    /// The first of the others.
    fn others<'a>(&self, candidates: &'a [String]) -> Vec<&'a str> {
        let others = candidates.iter().map(String::as_str);
        let others = others.filter(|name| !self.nodes.contains(*name));
        others.take(MAX_CANDIDATES).collect()
    }

    /// What the last one said that had the most of it, where no other is left.
    fn all_of(&mut self, nodes: [&[String]; 2]) -> Option<Problem> {
        let lack = nodes.iter().all(|nodes| self.others(nodes).is_empty());
        lack.then(|| self.why.take()).flatten()
    }
}

/// A quest's place in the table, until its task ends.
struct Entry<'run> {
    seeker: &'run Seeker,
    id: &'run SessionId,
    quest: &'run Arc<Quest>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut quests = lock(&self.seeker.quests);
        if quests
            .get(self.id)
            .is_some_and(|present| Arc::ptr_eq(present, self.quest))
        {
            quests.remove(self.id);
        }
        // For those whose quest has panicked.
        self.quest.0.send_if_modified(|outcome| {
            let without = outcome.is_none();
            if without {
                *outcome = Some(Ok(()));
            }
            without
        });
    }
}

/// The maps are sound after every single step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn pause(times: u32) -> Duration {
    (PAUSE * 2_u32.saturating_pow(times.min(8).saturating_sub(1))).min(LONGEST_PAUSE)
}

fn is_for_want_of_something(problem: &Problem) -> bool {
    [NO_SUCH_IMAGE, NO_SUCH_RUNTIME].contains(&problem.slug())
}

/// Whether another node was first.
fn is_elsewhere(error: &RouteError) -> bool {
    matches!(error, RouteError::NotStarted { source, .. } if is_of_another(source))
}

/// What ends here, or cannot, may be another node's by now.
fn is_over(error: &RouteError) -> bool {
    matches!(error, RouteError::Ended { .. } | RouteError::Stuck { .. })
}

fn is_of_another(error: &EnsureError) -> bool {
    matches!(error, EnsureError::Registry { source, .. }
        if matches!(**source, RegistryError::Elsewhere { .. } | RegistryError::Changed { .. }))
}

fn with_retry(problem: Problem) -> Refusal {
    let retry_after_s = problem.retryable.then_some(RETRY_AFTER_S);
    Refusal {
        problem,
        retry_after_s,
    }
}

fn passing(problem: Problem) -> Refusal {
    with_retry(Problem {
        retryable: true,
        ..problem
    })
}

fn no_registry(error: RegistryError) -> Refusal {
    passing(Problem::new(
        "registry-failed",
        "The registry failed",
        503,
        super::chain(&error),
    ))
}

fn unreachable(why: String) -> Refusal {
    passing(Problem::new(
        "node-unreachable",
        "The session's node cannot be reached",
        503,
        why,
    ))
}

fn refused(by: &RefusedBy) -> Refusal {
    let title = "The session's node does not know this one";
    Refusal::from(Problem::new("node-refuses", title, 502, by.to_string()))
}

fn wish_of(spec: &ResolvedSpec) -> Wish {
    Wish {
        template: spec.template.clone(),
        runtime: Some(spec.runtime),
        labels: spec.node_labels.clone(),
        memory_bytes: spec.memory_bytes.unwrap_or_default(),
    }
}

/// The nodes that are asked to restart a session: what failed on one may succeed on the next.
fn in_turn(mut candidates: Vec<String>, count: u32) -> Vec<String> {
    let first = candidates.len().min(MAX_CANDIDATES);
    if first > 0 {
        let failed = usize::try_from(count.saturating_sub(1)).unwrap_or_default();
        candidates[..first].rotate_left(failed % first);
    }
    candidates
}

fn told_by(node: &str, problem: &Problem) -> String {
    format!("node `{node}`: {}", problem.detail)
}

/// Why no node may take a session.
fn reasons(refused: &[conman_core::placement::Refused]) -> String {
    let reasons: Vec<String> = refused
        .iter()
        .map(|refused| format!("node `{}` {}", refused.node, refused.why))
        .collect();
    if reasons.is_empty() {
        "none is known".to_owned()
    } else {
        reasons.join("; ")
    }
}

fn no_node(id: &SessionId, refused: &[conman_core::placement::Refused]) -> Refusal {
    let reasons = reasons(refused);
    passing(Problem::new(
        "no-node",
        "No node takes the session",
        503,
        format!("no node takes session `{id}`: {reasons}. Wait, add a node, or undrain one"),
    ))
}

#[cfg(test)]
mod tests;
