//! The one task that drives the protocol: events in, actions out.
//!
//! ```text
//!  claims, releases ──▶ ┌────────┐ ──▶ etcd: releases in groups, claims through a queue
//!  answers of etcd  ──▶ │ driver │ ──▶ fence: deadlines, thaws, freezes
//!  fence events ──────▶ └────────┘ ──▶ node: sessions to end
//! ```
//! It waits only for its next event.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{Action, BootTime, Event, NodeName, NodeProtocol, Slot, Stake};
use conman_watchdog::{TaskProgress, Watchdog, essential};
use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::codec::{self, Holder};
use super::fence_orders::{self, FenceEvent, FenceQueue, MAX_NEWS};
use super::figures::Tally;
use super::from_alone::FromAlone;
use super::joining::{self, Joined};
use super::shared::{Shared, boot_time};
use super::store::{Answered, Entry, ReadError};
use conman_registry::Standing;
use conman_registry::{FenceLink, FenceOrder};

mod claims;
mod commands;
mod releases;
mod requests;

use claims::Claims;
pub(super) use commands::{Command, Reply};
use releases::{Looked, Releases};
use requests::UnsentRelease;

/// Name of the task in reports of its end or stall.
pub(super) const NAME: &str = "ownership";

/// Interval of timer checks: well below every interval of the protocol.
const TICK: Duration = Duration::from_millis(50);

/// Commands taken at a time, so that releases that arrive together are sent together.
const MAX_TAKEN: usize = 1_024;

/// More than the number of attempts in one life of a protocol.
const ATTEMPTS_OF_A_PROTOCOL: u64 = 1 << 32;

/// Result of one of the driver's futures.
enum Done {
    Answered(u64, Answered),
    /// A renewal that may not have been answered in time.
    Overdue(u64),
    /// Releases that were sent together.
    Released(Vec<((u64, Slot), Answered)>),
    Looked(Box<Looked>),
    /// `holder/NAME` and `gone/NAME`.
    Holder(Result<(Vec<Option<Entry>>, i64), ReadError>),
}

enum Wake {
    Done(Done),
    Command(Option<Command>),
    Fence(Option<FenceEvent>),
    Observed,
    Taken,
    Tick,
}

/// Why serving ended.
enum ServeEnd {
    /// No caller is left.
    Unused,
    /// Another installation uses this node's name, or the node was forgotten.
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
    pub(super) watchdog: Watchdog,
}

impl Driver {
    pub(super) async fn run(mut self) {
        let progress = self.watchdog.task(NAME);
        loop {
            progress.beat().await;
            // It is retried until etcd and the shim answer.
            let Some(joined) = progress.idle(self.join()).await else {
                return;
            };
            let (queue, news) = (Arc::new(FenceQueue::default()), mpsc::channel(MAX_NEWS));
            let fence = self.watchdog.task(fence_orders::NAME);
            let orders =
                fence_orders::run(Arc::clone(&self.link), Arc::clone(&queue), news.0, fence);
            let orders = tokio::spawn(essential(fence_orders::NAME, orders));
            let serving = Serving::begin(&mut self, joined, queue, news.1);
            let left = serving.run(&progress).await;
            orders.abort();
            self.shared.nothing_mine();
            // Above every number that was sent.
            self.next_attempt += ATTEMPTS_OF_A_PROTOCOL;
            match left {
                ServeEnd::Unused => return,
                ServeEnd::NameLost => {}
            }
        }
    }

    /// `None` when no caller is left.
    async fn join(&mut self) -> Option<Joined> {
        let joining = joining::join(&self.shared, &self.link, &self.holder, self.from_alone);
        let mut joining = std::pin::pin!(joining);
        loop {
            tokio::select! {
                // Not cancelled by the other arm: the same future is polled again.
                joined = &mut joining => return Some(joined),
                // Cancel safe: a command is taken only when it is returned.
                command = self.commands.recv() => commands::refuse(command?, &self.shared),
            }
        }
    }
}

/// From the start of the protocol until the name is lost.
struct Serving<'a> {
    driver: &'a mut Driver,
    shared: Arc<Shared>,
    protocol: NodeProtocol,
    /// The revision that wrote `holder/NAME` last, as far as known; 0: it does not exist.
    holder: i64,
    queue: Arc<FenceQueue>,
    news: mpsc::Receiver<FenceEvent>,
    connection: u64,
    inbox: VecDeque<Event>,
    unsent_releases: Vec<UnsentRelease>,
    work: FuturesUnordered<BoxFuture<'static, Done>>,
    claims: Claims,
    releases: Releases,
    was_live: bool,
    ever_live: bool,
    /// Rejoin attempts under way.
    rejoins: Vec<u64>,
    /// Renewals under way, including rejoins.
    renewals: Vec<u64>,
    /// What to count when a transaction commits, by transaction.
    tallies: HashMap<u64, Tally>,
    /// Why the node has to rejoin.
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
        // A lower `limits.max_sessions` does not make the containers fewer that live already.
        let timing = shared.timing.for_sessions(joined.slots.len() as u64);
        let protocol = NodeProtocol::new(
            shared.me.clone(),
            &[],
            timing,
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
            unsent_releases: Vec::new(),
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

    async fn run(mut self, progress: &TaskProgress) -> ServeEnd {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            progress.beat().await;
            self.settle();
            if let Some(why) = self.name_lost {
                self.leave(why);
                return ServeEnd::NameLost;
            }
            let wake = tokio::select! {
                // Cancel safe: a result is taken only when it is returned.
                Some(done) = self.work.next(), if !self.work.is_empty() => Wake::Done(done),
                // Cancel safe: a command is taken only when it is returned.
                command = self.driver.commands.recv() => Wake::Command(command),
                // Cancel safe: likewise.
                news = self.news.recv() => Wake::Fence(news),
                // Cancel safe: a change stays pending until it is read.
                Ok(()) = self.driver.observed.changed() => Wake::Observed,
                // Cancel safe: likewise.
                () = self.shared.orders.taken() => Wake::Taken,
                // Cancel safe: a tick is consumed only when it is returned.
                _ = tick.tick() => Wake::Tick,
            };
            match wake {
                Wake::Done(done) => self.done(done),
                Wake::Command(None) => return ServeEnd::Unused,
                Wake::Command(Some(command)) => self.take(command),
                Wake::Fence(Some(event)) => self.hear(event),
                Wake::Fence(None) => conman_watchdog::end(fence_orders::NAME, "it has returned"),
                Wake::Observed => {
                    let observed = self.driver.observed.borrow_and_update().clone();
                    self.protocol.set_observed(boot_time(), &observed);
                    self.inbox.push_back(Event::Tick);
                }
                // This node's standing may have waited for it.
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

    fn hear(&mut self, event: FenceEvent) {
        self.inbox.push_back(match event {
            FenceEvent::Fired => Event::FenceFired,
            FenceEvent::Connected {
                connection,
                fired,
                slots,
            } => {
                self.connection = connection;
                if fired && !self.ever_live && slots.iter().any(|view| !view.certified) {
                    self.shared.events.found_frozen();
                }
                Event::ShimConnected { fired, slots }
            }
        });
    }

    fn me(&self) -> Vec<u8> {
        codec::text(&self.driver.holder)
    }

    /// Processes everything that needs no further event.
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
        self.send_releases();
        self.stand(boot_time());
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Store { op, request } => self.prepare(op, request),
            Action::Start(slot) => {
                // The caller is gone: nothing was sent, so nothing has to die first.
                if let Some(details) = self.claims.started(&slot, &self.shared) {
                    self.releases.give_back(details);
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
        // Its certificate has already arrived.
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
            false => "this node owns it in the registry, but has no record of its container",
        };
        self.shared.orders.condemn(slot.clone(), why.to_owned());
        // After the node has the reason.
        self.order(FenceOrder::Kill(slot));
    }

    fn stand(&mut self, now: BootTime) {
        let live = self.protocol.is_live();
        let shared = &self.shared;
        if !live && self.was_live {
            // Another node may own any of it.
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
            // A caller that sees the node live again must not reach a session that it has lost.
        } else if self.protocol.may_act(now) {
            let late = left_ms < shared.timing.fence_ms / 2;
            shared.stands(if late { Standing::Late } else { Standing::Live });
        } else if let Some(reason) = shared.store.client.seen().went_back() {
            shared.stands(Standing::Joining { reason });
        } else if self.ever_live {
            shared.stands(Standing::Fenced);
        }
    }

    fn leave(&mut self, why: &str) {
        self.claims.give_up(&self.shared);
        self.releases.give_up(&self.shared);
        let reason = format!("node `{}` rejoins: {why}", self.shared.me);
        tracing::error!(
            reason,
            "this node has to rejoin; all its sessions are frozen"
        );
        self.shared.stands(Standing::Joining { reason });
        self.shared.incarnation.send_replace(0);
    }
}
