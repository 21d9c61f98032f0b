//! The one task that drives the protocol: events in, actions out.
//!
//! ```text
//!  claims, releases ──▶ ┌────────┐ ──▶ etcd: one future a request, releases in batches
//!  answers of etcd  ──▶ │ driver │ ──▶ fence: deadlines, thaws, freezes
//!  news of the fence ─▶ └────────┘ ──▶ node: whom to end
//! ```
//! It never waits for anything but its next event.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{
    Action, Answer, BootTime, Event, Key, NodeName, NodeProtocol, NodeState, OwnedState, Ownership,
    Request, SessionName, Slot, Stake, Transaction, Value,
};
use conman_proto::{Generation, ResolvedSpec, SessionId};
use conman_vitals::{Pulse, Vitals, essential};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::codec::{self, Holder};
use super::fence_orders::{self, FenceEvent, FenceQueue, MAX_NEWS};
use super::figures::Tally;
use super::from_alone::FromAlone;
use super::joining::{self, Joined};
use super::shared::{Shared, boot_time};
use super::store::{Answered, Beside, Entry, ReadError};
use super::wire;
use crate::fence_link::{FenceLink, FenceOrder};
use crate::{RegistryError, Release, SessionRecord, Standing};

mod batches;
mod claims;
mod releases;

use claims::Claims;
use releases::{Looked, Releases};

/// What the task is called when it ends or stands still.
pub(super) const NAME: &str = "ownership";

/// What time alone makes due is looked at this often: well below every interval of the protocol.
const TICK: Duration = Duration::from_millis(50);

/// Commands taken at a time, so that releases that come together go together.
const MAX_TAKEN: usize = 1_024;

/// Before a release that etcd refuses is tried again.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);

/// More heartbeats than are sent in a life.
const ATTEMPTS_OF_A_PROTOCOL: u64 = 1 << 32;

pub(super) type Reply<T> = oneshot::Sender<Result<T, RegistryError>>;

/// What the registry's callers ask for.
#[derive(Debug)]
pub(super) enum Command {
    Claim {
        id: SessionId,
        spec: Box<ResolvedSpec>,
        /// The revision that wrote the record which it goes by.
        read: Option<i64>,
        reply: Reply<SessionRecord>,
    },
    /// Whether a start may be sent, which it will be.
    MayStart {
        id: SessionId,
        generation: Generation,
        reply: Reply<()>,
    },
    Release {
        releases: Vec<(Release, Reply<()>)>,
    },
    /// Ends what this node holds and no record tells of.
    EndUntold {
        slot: Slot,
        reply: Reply<()>,
    },
}

/// What a future of the driver comes to.
enum Done {
    Answered(u64, Answered),
    /// Several transactions at once.
    Merged(Vec<Sent>, Answered),
    Looked(Box<Looked>),
    /// `holder/NAME` and `gone/NAME`.
    Holder(Result<(Vec<Option<Entry>>, i64), ReadError>),
}

/// A transaction under way with others.
struct Sent {
    op: u64,
    transaction: Transaction,
    beside: Beside,
}

enum Wake {
    Done(Done),
    Command(Option<Command>),
    Fence(Option<FenceEvent>),
    Observed,
    Taken,
    Tick,
}

/// Why serving came to an end.
enum Left {
    /// Nobody asks any more.
    Unused,
    /// Somebody else acts by this node's name, or it was forgotten.
    NameLost,
}

pub(super) struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) link: Arc<dyn FenceLink>,
    pub(super) holder: Holder,
    pub(super) from_alone: FromAlone,
    pub(super) next_attempt: u64,
    pub(super) commands: mpsc::Receiver<Command>,
    pub(super) observed: watch::Receiver<Vec<NodeName>>,
    pub(super) vitals: Vitals,
}

impl Driver {
    pub(super) async fn run(mut self) {
        let pulse = self.vitals.task(NAME);
        loop {
            pulse.beat().await;
            // It goes on until etcd and the shim answer.
            let Some(joined) = pulse.idle(self.join()).await else {
                return;
            };
            let (queue, news) = (Arc::new(FenceQueue::default()), mpsc::channel(MAX_NEWS));
            let fence = self.vitals.task(fence_orders::NAME);
            let orders =
                fence_orders::run(Arc::clone(&self.link), Arc::clone(&queue), news.0, fence);
            let orders = tokio::spawn(essential(fence_orders::NAME, orders));
            let serving = Serving::begin(&mut self, joined, queue, news.1);
            let left = serving.run(&pulse).await;
            orders.abort();
            self.shared.nothing_mine();
            // Above every one that was sent.
            self.next_attempt += ATTEMPTS_OF_A_PROTOCOL;
            match left {
                Left::Unused => return,
                Left::NameLost => {}
            }
        }
    }

    /// `None` when nobody asks any more.
    async fn join(&mut self) -> Option<Joined> {
        let joining = joining::join(&self.shared, &self.link, &self.holder, self.from_alone);
        let mut joining = std::pin::pin!(joining);
        loop {
            tokio::select! {
                // Not cancelled by the other arm: the same future is polled again.
                joined = &mut joining => return Some(joined),
                // Cancel safe: a command is taken when it is returned.
                command = self.commands.recv() => refuse(command?, &self.shared),
            }
        }
    }
}

fn refuse(command: Command, shared: &Shared) {
    match command {
        Command::Claim { reply, .. } => {
            let _ = reply.send(Err(shared.unavailable()));
        }
        Command::MayStart { reply, .. } | Command::EndUntold { reply, .. } => {
            let _ = reply.send(Err(shared.unavailable()));
        }
        Command::Release { releases } => {
            for (_, reply) in releases {
                let _ = reply.send(Err(shared.unavailable()));
            }
        }
    }
}

/// From the protocol's beginning until the name is lost.
struct Serving<'a> {
    driver: &'a mut Driver,
    shared: Arc<Shared>,
    protocol: NodeProtocol,
    /// The revision that wrote `holder/NAME` last, as far as is known; 0: it does not exist.
    holder: i64,
    queue: Arc<FenceQueue>,
    news: mpsc::Receiver<FenceEvent>,
    connection: u64,
    inbox: VecDeque<Event>,
    outbox: Vec<Sent>,
    work: FuturesUnordered<BoxFuture<'static, Done>>,
    claims: Claims,
    releases: Releases,
    was_live: bool,
    ever_live: bool,
    /// Attempts of rejoins under way.
    rejoins: Vec<u64>,
    /// Renewals under way, rejoins among them.
    renewals: Vec<u64>,
    /// What is counted when it is committed, by transaction.
    tallies: HashMap<u64, Tally>,
    /// Why the node has to join anew.
    name_lost: Option<&'static str>,
}

impl<'a> Serving<'a> {
    fn begin(
        driver: &'a mut Driver,
        joined: Joined,
        queue: Arc<FenceQueue>,
        news: mpsc::Receiver<FenceEvent>,
    ) -> Self {
        let shared = Arc::clone(&driver.shared);
        driver.observed.mark_changed();
        let protocol = NodeProtocol::new(
            shared.me.clone(),
            &[],
            shared.timing,
            boot_time(),
            driver.next_attempt,
            joined.slots,
        );
        Self {
            driver,
            shared,
            protocol,
            holder: joined.holder,
            queue,
            news,
            connection: 0,
            inbox: VecDeque::from([Event::Tick]),
            outbox: Vec::new(),
            work: FuturesUnordered::new(),
            claims: Claims::default(),
            releases: Releases::default(),
            was_live: false,
            ever_live: false,
            rejoins: Vec::new(),
            renewals: Vec::new(),
            tallies: HashMap::new(),
            name_lost: None,
        }
    }

    async fn run(mut self, pulse: &Pulse) -> Left {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            pulse.beat().await;
            self.settle();
            if let Some(why) = self.name_lost {
                self.leave(why);
                return Left::NameLost;
            }
            let wake = tokio::select! {
                // Cancel safe: what is done is taken when it is returned.
                Some(done) = self.work.next(), if !self.work.is_empty() => Wake::Done(done),
                // Cancel safe: a command is taken when it is returned.
                command = self.driver.commands.recv() => Wake::Command(command),
                // Cancel safe: likewise.
                news = self.news.recv() => Wake::Fence(news),
                // Cancel safe: a change stays one until it is looked at.
                Ok(()) = self.driver.observed.changed() => Wake::Observed,
                // Cancel safe: likewise.
                () = self.shared.orders.taken() => Wake::Taken,
                // Cancel safe: a tick is counted when it is returned.
                _ = tick.tick() => Wake::Tick,
            };
            match wake {
                Wake::Done(done) => self.done(done),
                Wake::Command(None) => return Left::Unused,
                Wake::Command(Some(command)) => self.take(command),
                Wake::Fence(Some(event)) => self.hear(event),
                Wake::Fence(None) => conman_vitals::end(fence_orders::NAME, "it has returned"),
                Wake::Observed => {
                    let observed = self.driver.observed.borrow_and_update().clone();
                    self.protocol.set_observed(boot_time(), &observed);
                    self.inbox.push_back(Event::Tick);
                }
                // Perhaps this node's standing waited for it.
                Wake::Taken => {}
                Wake::Tick => self.inbox.push_back(Event::Tick),
            }
        }
    }

    fn take(&mut self, first: Command) {
        self.command(first);
        for _ in 0..MAX_TAKEN {
            let Ok(command) = self.driver.commands.try_recv() else {
                return;
            };
            self.command(command);
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Claim {
                id,
                spec,
                read,
                reply,
            } => {
                let stake = self.protocol.stake(&super::shared::name(&id));
                let asked = (*spec, read);
                let begun = self.claims.ask(id, asked, reply, stake, &self.shared);
                self.inbox.extend(begun.map(Event::EnsureAsked));
            }
            Command::MayStart {
                id,
                generation,
                reply,
            } => {
                let _ = reply.send(self.may_start(id, generation));
            }
            Command::Release { releases } => {
                for (release, reply) in releases {
                    self.release(release, reply);
                }
            }
            Command::EndUntold { slot, reply } => {
                self.end_untold(slot);
                let _ = reply.send(Ok(()));
            }
        }
    }

    /// Held still, it is what was found to be without a record, and nobody else may claim it before
    /// it is proven dead. Whatever else the protocol makes of it ends by itself.
    fn end_untold(&mut self, slot: Slot) {
        let generation = slot.generation;
        if self.protocol.stake(&slot.session) == Some(Stake::Held { generation }) {
            self.inbox.push_back(Event::StopAsked {
                session: slot.session,
                delete: false,
            });
        }
    }

    fn may_start(&mut self, id: SessionId, generation: Generation) -> Result<(), RegistryError> {
        let slot = Slot {
            session: super::shared::name(&id),
            generation: generation.get(),
        };
        if self.protocol.may_start(boot_time(), &slot) {
            // Before whatever else happens to it.
            self.inbox.push_back(Event::StartSent(slot));
            return Ok(());
        }
        let held = match self.protocol.stake(&slot.session) {
            Some(Stake::Held { generation }) => generation == slot.generation,
            _ => false,
        };
        match held && !self.protocol.may_act(boot_time()) {
            true => Err(self.shared.unavailable()),
            false => Err(RegistryError::Superseded {
                id,
                generation,
                current: None,
            }),
        }
    }

    /// Its record has to be known before the protocol hears of the certificate, which is answered
    /// by a transaction that writes it.
    fn release(&mut self, release: Release, reply: Reply<()>) {
        match self.shared.mine(&release.id) {
            Some(mine) if mine.told.record.generation == release.generation => {
                let certified = self.releases.begin(mine.told, release, reply);
                self.inbox.extend(certified.map(Event::DeathCertificate));
            }
            _ => {
                let shared = Arc::clone(&self.shared);
                let looking = releases::look(shared, release, reply, true);
                self.work
                    .push(Box::pin(async { Done::Looked(Box::new(looking.await)) }));
            }
        }
    }

    fn hear(&mut self, event: FenceEvent) {
        self.inbox.push_back(match event {
            FenceEvent::Fired => Event::FenceFired,
            FenceEvent::Connected {
                connection,
                fired,
                slots,
            } => {
                self.connection = connection;
                Event::ShimConnected { fired, slots }
            }
        });
    }

    fn done(&mut self, done: Done) {
        match done {
            Done::Answered(op, answered) => self.answered(op, answered),
            Done::Merged(sent, answered) => {
                // What another one spoiled is tried alone.
                if answered.answer == Answer::Conflict {
                    for one in sent {
                        self.send(one);
                    }
                    return;
                }
                if answered.refused {
                    return self.refused(sent, answered);
                }
                for one in sent {
                    let answered = Answered {
                        answer: answered.answer.clone(),
                        trouble: answered.trouble.clone(),
                        revision: answered.revision,
                        refused: false,
                    };
                    self.releases.answered(&one.transaction, &answered);
                    self.answered(one.op, answered);
                }
            }
            Done::Looked(looked) => {
                let follows = self.releases.looked(*looked, &self.protocol, &self.shared);
                self.inbox.extend(follows);
            }
            Done::Holder(Ok((entries, _))) => self.held(&entries),
            Done::Holder(Err(error)) => {
                tracing::debug!(%error, "who holds this node's name is not known");
            }
        }
    }

    /// Looks at who holds this node's name, after a rejoin that did not commit.
    fn held(&mut self, entries: &[Option<Entry>]) {
        if let [_, Some(_)] = entries {
            self.name_lost = Some("the fleet has forgotten this node meanwhile");
            return;
        }
        match entries.first() {
            Some(Some((_, holder, revision))) if *holder == self.me() => self.holder = *revision,
            // Whoever wrote it has joined since it was found to be silent.
            Some(Some((_, _, revision))) if *revision != self.holder => {
                self.name_lost = Some("another conman has taken this node's name");
            }
            Some(Some(_)) => {}
            _ => self.holder = 0,
        }
    }

    /// What is refused together may be taken in parts. A single one is told of, and tried again only
    /// after a while: no haste helps.
    fn refused(&mut self, mut sent: Vec<Sent>, answered: Answered) {
        if sent.len() > 1 {
            let half = sent.split_off(sent.len() / 2);
            self.send_together(sent);
            self.send_together(half);
            return;
        }
        for one in sent {
            let reason = answered.trouble.clone().unwrap_or_default();
            self.releases.refused(&one.transaction, reason);
            let answered = Answered {
                answer: answered.answer.clone(),
                trouble: None,
                revision: 0,
                refused: true,
            };
            self.work.push(Box::pin(async move {
                tokio::time::sleep(REFUSED_PAUSE).await;
                Done::Answered(one.op, answered)
            }));
        }
    }

    fn answered(&mut self, op: u64, answered: Answered) {
        if let Some(trouble) = &answered.trouble {
            tracing::debug!(op, trouble, "etcd");
            if !self.ever_live {
                let reason = trouble.clone();
                self.shared.stands(Standing::Joining { reason });
            }
        }
        let renewal = self.renewals.iter().position(|renewal| *renewal == op);
        let is_renewal = renewal.map(|index| self.renewals.swap_remove(index));
        match (&answered.trouble, &answered.answer) {
            // What is read before a rejoin is a part of it.
            (Some(trouble), _) if is_renewal.is_some() || !self.protocol.is_live() => {
                self.shared.note_trouble(Some(trouble.clone()));
            }
            (None, Answer::Committed) if is_renewal.is_some() => self.shared.note_trouble(None),
            _ => {}
        }
        if answered.refused {
            self.claims
                .refused(op, answered.trouble.as_deref().unwrap_or_default());
        }
        self.claims.answered(op, answered.revision);
        if let Some(tally) = self.tallies.remove(&op)
            && answered.answer == Answer::Committed
        {
            tally.count();
        }
        if self.rejoins.contains(&op) {
            self.rejoins.retain(|rejoin| *rejoin != op);
            match answered.answer {
                Answer::Committed => self.holder = answered.revision,
                // Perhaps since somebody else holds the name, or as an earlier try was done.
                _ => {
                    let store = self.shared.store.clone();
                    let me = &self.shared.me;
                    let names = [store.keys.holder(me), store.keys.gone(me)];
                    self.work.push(Box::pin(
                        async move { Done::Holder(store.get(&names).await) },
                    ));
                }
            }
        }
        let answer = answered.answer;
        self.inbox.push_back(Event::StoreAnswer { op, answer });
    }

    fn me(&self) -> Vec<u8> {
        codec::text(&self.driver.holder)
    }

    /// Brings everything to rest that needs no further event.
    fn settle(&mut self) {
        loop {
            while let Some(event) = self.inbox.pop_front() {
                for action in self.protocol.on(boot_time(), event) {
                    self.act(action);
                }
            }
            let again = self.claims.settle(&self.protocol, &self.shared);
            self.inbox.extend(again.into_iter().map(Event::EnsureAsked));
            let again = self.releases.settle(&self.protocol, &self.shared);
            for looking in again {
                self.work
                    .push(Box::pin(async { Done::Looked(Box::new(looking.await)) }));
            }
            if self.inbox.is_empty() {
                break;
            }
        }
        self.flush();
        self.stand(boot_time());
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Store { op, request } => self.prepare(op, request),
            Action::Start(slot) => {
                // Whoever asked for it is gone: nothing was sent, so nothing needs to die first.
                if let Some(told) = self.claims.started(&slot, &self.shared) {
                    self.releases.give_back(told);
                    self.inbox.push_back(Event::DeathCertificate(slot));
                }
            }
            Action::Kill(slot) => self.condemn(slot),
            Action::Ended(slot) => {
                if self.releases.is_certified(&slot) {
                    self.inbox.push_back(Event::DeathCertificate(slot));
                } else {
                    self.shared.orders.ended(slot);
                }
            }
            Action::Forget(slot) => self.shared.orders.withdraw(&slot),
            Action::SetDeadline(deadline) => self.order(FenceOrder::SetDeadline(deadline)),
            Action::Thaw { deadline, slots } => self.order(FenceOrder::Thaw { deadline, slots }),
            Action::FreezeAll => self.order(FenceOrder::FreezeAll),
            Action::Forward { session, owner } => self.claims.forwarded(&session, owner),
        }
    }

    fn order(&mut self, order: FenceOrder) {
        self.queue.push(self.connection, order);
    }

    fn condemn(&mut self, slot: Slot) {
        // Its certificate is here already.
        if self.releases.is_certified(&slot) {
            self.inbox.push_back(Event::DeathCertificate(slot));
            return;
        }
        let lost = matches!(
            self.protocol.stake(&slot.session),
            Some(Stake::Ending { owned: false, .. })
        );
        let why = match lost {
            true => "its ownership was lost: this node was silent for too long",
            false => "the registry says that it is this node's, and nothing tells of its container",
        };
        self.shared.orders.condemn(slot.clone(), why.to_owned());
        // After the node was told why.
        self.order(FenceOrder::Kill(slot));
    }

    /// Adds what is told beside.
    fn prepare(&mut self, op: u64, request: Request) {
        let transaction = match request {
            Request::Commit(transaction) => transaction,
            read => {
                let store = self.shared.store.clone();
                self.work.push(Box::pin(async move {
                    Done::Answered(op, store.execute(read, Beside::default()).await)
                }));
                return;
            }
        };
        if let Some(tally) = Tally::of(&transaction, &self.shared.me) {
            self.tallies.insert(op, tally);
        }
        let mut beside = Beside::default();
        let heartbeat = Key::Heartbeat(self.shared.me.clone());
        if transaction.write.iter().any(|(key, _)| *key == heartbeat) {
            self.renewals.push(op);
        }
        for (key, value) in &transaction.write {
            match (key, value) {
                (Key::Node(name), Some(Value::Node(record)))
                    if *name == self.shared.me && record.state == NodeState::Live =>
                {
                    let key = self.shared.store.keys.holder(name);
                    let unchanged = wire::unchanged_since(key.clone(), self.holder);
                    beside.compare.push(unchanged);
                    let gone = self.shared.store.keys.gone(name);
                    beside.compare.push(wire::is(gone, None));
                    beside.write.push(wire::put(key, self.me()));
                    self.rejoins.push(op);
                }
                (Key::Session(session), Some(Value::Session(ownership))) => {
                    self.tell(op, session, ownership, &mut beside);
                }
                (Key::Session(session), None) => {
                    let key = self.shared.store.keys.told(session);
                    beside.write.push(wire::delete(key));
                }
                _ => {}
            }
        }
        self.outbox.push(Sent {
            op,
            transaction,
            beside,
        });
    }

    fn tell(&mut self, op: u64, session: &SessionName, ownership: &Ownership, beside: &mut Beside) {
        let told = match ownership.state {
            OwnedState::Owned => {
                if let Some(revision) = self.claims.read(session) {
                    let key = self.shared.store.keys.told(session);
                    let unchanged = wire::unchanged_since(key, revision);
                    beside.compare.push(unchanged);
                }
                self.claims.told(op, session, ownership, &self.shared)
            }
            OwnedState::Released => {
                let slot = Slot {
                    session: session.clone(),
                    generation: ownership.generation,
                };
                self.releases.told(&slot, &self.claims, &self.shared)
            }
        };
        if let Some(told) = told {
            let key = self.shared.store.keys.told(session);
            beside.write.push(wire::put(key, codec::text(&told)));
        }
    }

    /// Sends what has come together, releases in batches.
    fn flush(&mut self) {
        let mut releases = Vec::new();
        for one in std::mem::take(&mut self.outbox) {
            if is_release(&one.transaction) {
                releases.push(one);
            } else {
                self.send(one);
            }
        }
        for batch in batches::of(releases) {
            self.send_together(batch);
        }
    }

    fn send_together(&mut self, sent: Vec<Sent>) {
        let store = self.shared.store.clone();
        self.work.push(Box::pin(async move {
            let parts: Vec<_> = sent
                .iter()
                .map(|one| (one.transaction.clone(), one.beside.clone()))
                .collect();
            let answered = store.commit(&parts).await;
            // A single one has nobody to blame.
            match <[Sent; 1]>::try_from(sent) {
                Ok([one]) if answered.answer == Answer::Conflict => {
                    Done::Answered(one.op, answered)
                }
                Ok(one) => Done::Merged(one.into(), answered),
                Err(sent) => Done::Merged(sent, answered),
            }
        }));
    }

    fn send(&mut self, one: Sent) {
        let store = self.shared.store.clone();
        let release = is_release(&one.transaction);
        self.work.push(Box::pin(async move {
            let parts = [(one.transaction, one.beside)];
            let answered = store.commit(&parts).await;
            let [(transaction, beside)] = parts;
            let sent = Sent {
                op: one.op,
                transaction,
                beside,
            };
            match release && answered.answer != Answer::Conflict {
                true => Done::Merged(vec![sent], answered),
                false => Done::Answered(sent.op, answered),
            }
        }));
    }

    fn stand(&mut self, now: BootTime) {
        let live = self.protocol.is_live();
        let shared = &self.shared;
        if !live && self.was_live {
            // Another node may own any of it by now.
            shared.nothing_mine();
        }
        self.was_live = live;
        self.ever_live |= live;
        let incarnation = if live { self.protocol.incarnation() } else { 0 };
        shared.incarnation.send_if_modified(|known| {
            let changed = *known != incarnation;
            *known = incarnation;
            changed
        });
        let left_ms = self.protocol.deadline().since(now);
        let is_fenced = *shared.standing.borrow() == Standing::Fenced;
        if is_fenced && self.protocol.may_act(now) && shared.orders.are_to_kill() {
            // Who hears that it is live again must not be led to what it has lost.
        } else if self.protocol.may_act(now) {
            let late = left_ms < shared.timing.fence_ms / 2;
            shared.stands(if late { Standing::Late } else { Standing::Live });
        } else if let Some(reason) = shared.store.client.seen().went_back() {
            shared.stands(Standing::Joining { reason });
        } else if self.protocol.is_used_up() {
            let reason = format!(
                "the record of node `{0}` in etcd has the greatest incarnation that there is, and is \
                 damaged; give this node another `node.name`",
                shared.me
            );
            shared.stands(Standing::Joining { reason });
        } else if self.ever_live {
            shared.stands(Standing::Fenced);
        }
    }

    fn leave(&mut self, why: &str) {
        self.claims.give_up(&self.shared);
        self.releases.give_up(&self.shared);
        let reason = format!("node `{}` joins anew: {why}", self.shared.me);
        tracing::error!(reason, "everything on this node is frozen");
        self.shared.stands(Standing::Joining { reason });
        self.shared.incarnation.send_replace(0);
    }
}

fn is_release(transaction: &Transaction) -> bool {
    matches!(
        &transaction.write[..],
        [(Key::Session(_), Some(Value::Session(ownership)))]
            if ownership.state == OwnedState::Released
    )
}
