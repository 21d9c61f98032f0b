//! The shim's fence, for the component that decides what this node still owns.
//!
//! It uses a separate connection from the runtimes'. Orders use the connection that the last
//! [`ShimFence::look`] made, and fail with it, so that no order reaches a shim whose state is
//! unknown.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use conman_core::ownership::{BootTime, FenceHolds, FenceLinkError, FenceNews, Slot, SlotView};
use conman_shim_protocol::{CallError, ContainerView, FenceState, Reply, Request};
use tokio::sync::Notify;

use crate::fence_opening::{FenceOpener, NAMES};
use crate::shim_link::{Connection, Link, LinkError, NotificationHandler, ShimCommand};

/// Bound on one answer, which the shim gives at once.
const PATIENCE: Duration = Duration::from_secs(2);

const NS_IN_MS: u64 = 1_000_000;

/// A client of the fence.
#[derive(Debug)]
pub struct ShimFence {
    link: Link,
    news: Arc<NewsBuffer>,
    current: Mutex<Option<Arc<Connection>>>,
    freeze_ms: Option<u64>,
    /// The shim waits for less than `freeze_ms`; the next deadline sets the configured time.
    waits_less: AtomicBool,
}

/// Stores news until it is fetched. Bounded: duplicates are not added.
#[derive(Debug, Default)]
struct NewsBuffer {
    heard: Mutex<VecDeque<FenceNews>>,
    more: Notify,
}

impl NewsBuffer {
    fn add(&self, news: FenceNews) {
        let mut heard = self.heard();
        if !heard.contains(&news) {
            heard.push_back(news);
        }
        drop(heard);
        self.more.notify_one();
    }

    /// A panic while the lock is held cannot leave half a change.
    fn heard(&self) -> MutexGuard<'_, VecDeque<FenceNews>> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NotificationHandler for NewsBuffer {
    /// The runtimes deal with ends.
    fn on_container_end(&self, _ended: &ContainerView) -> bool {
        true
    }

    fn on_fence_state(&self, state: FenceState) {
        if is_closed(state) {
            self.add(FenceNews::Fired);
        }
    }

    fn on_connection_end(&self) {
        self.add(FenceNews::Lost);
    }
}

impl ShimFence {
    /// `freeze_ms`: how long the fence waits for proof that a container is frozen before it kills
    /// it; `None` keeps the running shim's time. Other nodes take over according to the time in the
    /// registry. So a longer time takes effect with the first deadline, which follows its
    /// publication in the registry, and a shorter one at once.
    #[must_use]
    pub fn new(socket: PathBuf, shim: Option<ShimCommand>, freeze_ms: Option<u64>) -> Self {
        let news = Arc::<NewsBuffer>::default();
        let handler = Arc::clone(&news) as Arc<dyn NotificationHandler>;
        Self {
            link: Link::new(socket, shim, Some(handler), FenceOpener::Registry),
            news,
            current: Mutex::default(),
            freeze_ms,
            waits_less: AtomicBool::new(false),
        }
    }

    /// Connects, starting a shim where none answers, and reads the state of its fence.
    pub async fn look(&self) -> Result<FenceHolds, FenceLinkError> {
        let connection = self.link.connection().await.map_err(failure)?;
        let current = self.current().clone();
        let is_known = current.is_some_and(|known| Arc::ptr_eq(&known, &connection));
        if let Some(freeze_ms) = self.freeze_ms.filter(|_| !is_known) {
            let waits_less = agree(&connection, freeze_ms).await?;
            self.waits_less.store(waits_less, Ordering::Relaxed);
        }
        // News of earlier connections; the state of the new one covers them.
        self.news.heard().clear();
        let fired = match ask(&connection, &Request::Fence).await? {
            Reply::Fence { state } => is_closed(state),
            _ => return Err(failure(LinkError::Unexpected)),
        };
        let views = connection.containers(PATIENCE).await.map_err(failure)?;
        let slots = views.iter().filter_map(|view| seen(view, fired)).collect();
        *self.current() = Some(connection);
        Ok(FenceHolds { fired, slots })
    }

    /// Moves the deadline after ownership was renewed; never thaws.
    pub async fn extend(&self, deadline: BootTime) -> Result<(), FenceLinkError> {
        let until_boottime_ns = deadline.0.saturating_mul(NS_IN_MS);
        self.open(&Request::ExtendDeadline { until_boottime_ns })
            .await
    }

    /// For a renewal after the fence had closed: these containers run until the deadline.
    pub async fn thaw(&self, deadline: BootTime, slots: &[Slot]) -> Result<(), FenceLinkError> {
        let mut chunks: Vec<&[Slot]> = slots.chunks(NAMES).collect();
        if chunks.is_empty() {
            chunks.push(&[]);
        }
        let last = chunks.len();
        for (index, chunk) in chunks.into_iter().enumerate() {
            // Each order needs a later deadline than the one before it.
            let early = u64::try_from(last - 1 - index).unwrap_or(0);
            let until = deadline
                .0
                .saturating_mul(NS_IN_MS)
                .saturating_sub(early * NS_IN_MS);
            let names = chunk.iter().map(name).collect();
            self.open(&Request::Unfence {
                until_boottime_ns: Some(until),
                names: Some(names),
            })
            .await?;
        }
        Ok(())
    }

    /// Freezes everything now.
    pub async fn freeze_all(&self) -> Result<(), FenceLinkError> {
        let connection = self.connected()?;
        ask(&connection, &Request::FreezeAll).await.map(|_| ())
    }

    /// Kills a container, frozen or not; a missing one is fine.
    pub async fn kill(&self, slot: &Slot) -> Result<(), FenceLinkError> {
        let connection = self.connected()?;
        let kill = Request::Kill { name: name(slot) };
        match connection.call(&kill, &[], PATIENCE).await {
            Ok(_)
            | Err(LinkError::Refused(
                CallError::NoSuchContainer { .. } | CallError::Ended { .. },
            )) => Ok(()),
            Err(error) => Err(failure(error)),
        }
    }

    /// The next news since [`Self::look`]. Cancel safe: it is removed when it is returned.
    pub async fn news(&self) -> FenceNews {
        loop {
            let next = self.news.heard().pop_front();
            match next {
                Some(news) => return news,
                None => self.news.more.notified().await,
            }
        }
    }

    /// Sends an order after which the fence is open.
    async fn open(&self, request: &Request) -> Result<(), FenceLinkError> {
        let connection = self.connected()?;
        if let Some(freeze_ms) = self.freeze_ms
            && self.waits_less.load(Ordering::Relaxed)
        {
            tell_freeze_ms(&connection, freeze_ms).await?;
            self.waits_less.store(false, Ordering::Relaxed);
        }
        match ask(&connection, request).await? {
            Reply::Fence { state } if is_closed(state) => Err(FenceLinkError::Refused {
                reason: "the deadline has passed".to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn connected(&self) -> Result<Arc<Connection>, FenceLinkError> {
        let current = self.current();
        current.clone().ok_or_else(|| FenceLinkError::Lost {
            reason: "no shim is connected".to_owned(),
        })
    }

    fn current(&self) -> MutexGuard<'_, Option<Arc<Connection>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sets the fence's time. Other nodes compute their takeover from it, so a shim with another
/// configuration gets it first. Returns `true` if the shim waits for less, which is allowed until
/// other nodes know the longer time.
async fn agree(connection: &Connection, freeze_ms: u64) -> Result<bool, FenceLinkError> {
    if connection.freeze_ms <= freeze_ms {
        return Ok(connection.freeze_ms < freeze_ms);
    }
    tell_freeze_ms(connection, freeze_ms).await.map(|()| false)
}

async fn tell_freeze_ms(connection: &Connection, freeze_ms: u64) -> Result<(), FenceLinkError> {
    ask(connection, &Request::FreezePatience { freeze_ms }).await?;
    tracing::info!(
        before_ms = connection.freeze_ms,
        freeze_ms,
        "set the shim's `freeze_ms` as configured"
    );
    Ok(())
}

async fn ask(connection: &Connection, request: &Request) -> Result<Reply, FenceLinkError> {
    let answer = connection.call(request, &[], PATIENCE).await;
    answer.map(|(reply, _)| reply).map_err(failure)
}

fn failure(error: LinkError) -> FenceLinkError {
    let reason = error.to_string();
    match error {
        LinkError::Refused(_) => FenceLinkError::Refused { reason },
        LinkError::Unreachable { .. }
        | LinkError::Lost
        | LinkError::TimedOut { .. }
        | LinkError::Unexpected => FenceLinkError::Lost { reason },
    }
}

fn is_closed(state: FenceState) -> bool {
    match state {
        FenceState::Unarmed | FenceState::Armed { .. } => false,
        FenceState::Freezing { .. } | FenceState::Fenced { .. } => true,
    }
}

/// The registry's view of a session's container. `None` for commands in a container: they live
/// and die with it.
fn seen(view: &ContainerView, fired: bool) -> Option<SlotView> {
    let (session, generation) = view.name.rsplit_once('.')?;
    let generation = generation.parse().ok()?;
    if view.exec_in.is_some() {
        return None;
    }
    let alive = view.state.is_alive();
    Some(SlotView {
        slot: Slot {
            session: session.into(),
            generation,
        },
        present: alive && view.pid != 0,
        frozen: alive && fired,
        certified: !alive,
    })
}

fn name(slot: &Slot) -> String {
    format!("{}.{}", slot.session, slot.generation)
}

#[cfg(test)]
mod tests {
    use conman_shim_protocol::ContainerState;

    use super::*;

    fn view(name: &str, state: ContainerState) -> ContainerView {
        ContainerView {
            name: name.to_owned(),
            pid: 7,
            state,
            exec_in: None,
            foreign: false,
            fenced: false,
        }
    }

    #[test]
    fn containers_are_told_of_by_session_and_generation_and_commands_are_not() {
        let running = seen(&view("a-b.12", ContainerState::Running), true).expect("a slot");
        assert_eq!(
            (&*running.slot.session, running.slot.generation),
            ("a-b", 12)
        );
        assert!(running.present && running.frozen && !running.certified);
        let ended = seen(&view("a.1", ContainerState::Lost), true).expect("a slot");
        assert!(!ended.present && !ended.frozen && ended.certified);
        let mut command = view("a.1.e5", ContainerState::Running);
        assert_eq!(seen(&command, false), None);
        command.name = "a.1.5".to_owned();
        command.exec_in = Some("a.1".to_owned());
        assert_eq!(seen(&command, false), None);
    }
}
