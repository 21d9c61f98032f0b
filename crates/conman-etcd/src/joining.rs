//! Steps before the protocol starts: etcd answers and holds a registry of a known format, no other
//! installation uses this node's name, and the fence reports what it holds.

use std::sync::Arc;
use std::time::Duration;

use conman_core::ownership::{
    Answer, FenceLinkError, Heartbeat, Key, NodeState, Observer, Request, SlotView, Value, Verdict,
};
use conman_proto::Generation;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use super::codec::{self, Holder};
use super::forgetting;
use super::from_alone::FromAlone;
use super::schema::{self, SchemaError};
use super::shared::{Shared, boot_time};
use super::wire::{self, TxnRequest};
use conman_registry::Standing;
use conman_registry::{FenceLink, FenceOrder};

/// Pause between two attempts.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Pause after a registry of another format: each attempt reads all of it, and another fleet may be using it.
const OTHER_FORMAT_PAUSE: Duration = Duration::from_secs(30);

/// What the protocol starts with.
#[derive(Debug)]
pub(super) struct Joined {
    pub(super) slots: Vec<SlotView>,
    /// The revision that wrote `holder/NAME`, 0 without one; the rejoin replaces exactly this one.
    pub(super) holder: i64,
}

/// Tries until it succeeds, and publishes why it does not.
pub(super) async fn join(
    shared: &Shared,
    link: &Arc<dyn FenceLink>,
    me: &Holder,
    from_alone: FromAlone,
) -> Joined {
    let mut is_held = !from_alone.runs;
    loop {
        match attempt(shared, link, me, from_alone.floor, &mut is_held).await {
            Ok(joined) => return joined,
            Err(Obstacle { reason, pause }) => {
                shared.stands(Standing::Joining { reason });
                sleep(pause).await;
            }
        }
    }
}

/// Why an attempt failed, and how long to wait before the next one.
struct Obstacle {
    reason: String,
    pause: Duration,
}

impl From<String> for Obstacle {
    fn from(reason: String) -> Self {
        Self {
            reason,
            pause: RETRY_PAUSE,
        }
    }
}

impl From<SchemaError> for Obstacle {
    fn from(error: SchemaError) -> Self {
        let pause = match &error {
            SchemaError::OtherFormat { .. } => OTHER_FORMAT_PAUSE,
            SchemaError::Read(_) | SchemaError::Foreign { .. } | SchemaError::NotWritten { .. } => {
                RETRY_PAUSE
            }
        };
        Self {
            reason: error.to_string(),
            pause,
        }
    }
}

async fn attempt(
    shared: &Shared,
    link: &Arc<dyn FenceLink>,
    me: &Holder,
    floor: Option<Generation>,
    is_held: &mut bool,
) -> Result<Joined, Obstacle> {
    if !*is_held {
        hold(link.as_ref())
            .await
            .map_err(|error| error.to_string())?;
        *is_held = true;
    }
    schema::check(&shared.store).await?;
    same_store(shared).await?;
    if let Some(floor) = floor {
        raise_floor(shared, floor).await?;
    }
    // Not before the floor is raised: a daemon that knows this etcd joins without raising it.
    keep_seen(shared).await?;
    forgetting::recall(shared).await?;
    let holder = alone(shared, me).await?;
    let holds = link.connect().await.map_err(|error| error.to_string())?;
    Ok(Joined {
        slots: holds.slots,
        holder,
    })
}

/// Refuses a store that has an earlier state of this node than it had itself.
async fn same_store(shared: &Shared) -> Result<(), String> {
    let keys = &shared.store.keys;
    let record = Key::Node(shared.me.clone());
    let names = [
        keys.of(&record),
        keys.of(&Key::Heartbeat(shared.me.clone())),
        keys.lost_node(&shared.me),
    ];
    let read = shared.store.get(&names).await;
    let (entries, _) = read.map_err(|error| error.to_string())?;
    let incarnation = match entries.first() {
        Some(Some((name, bytes, _))) => match codec::decode(&record, name, bytes) {
            Ok(Value::Node(record)) => Some(record.incarnation),
            Ok(_) => None,
            Err(error) => return Err(error.to_string()),
        },
        _ => None,
    };
    let revisions = entries.iter().flatten().map(|(_, _, revision)| *revision);
    let seen = shared.store.client.seen();
    seen.check_own(revisions.max().unwrap_or(0), incarnation)
}

/// Freezes what ran before the node joined: the rest of the fleet may start those sessions, however
/// long joining takes.
async fn hold(link: &dyn FenceLink) -> Result<(), FenceLinkError> {
    link.connect().await?;
    link.order(FenceOrder::FreezeAll).await
}

/// A node that owns anything must recognize this etcd later, or notice that it was restored. A full
/// disk does not prevent a node that knows this etcd from using its sessions.
async fn keep_seen(shared: &Shared) -> Result<(), String> {
    let client = Arc::clone(&shared.store.client);
    let kept = spawn_blocking(move || {
        let seen = client.seen();
        seen.may_be_kept();
        let Err(error) = seen.keep() else {
            return Ok(());
        };
        let reason = format!(
            "cannot write the state of etcd to {}: {error}; make sure that `state_dir` has free \
             space and is writable",
            seen.file().display()
        );
        if !seen.is_known() {
            return Err(reason);
        }
        tracing::warn!("{reason}");
        Ok(())
    });
    kept.await.map_err(|error| error.to_string())?
}

/// Sessions start above every generation used here or given by an operator.
async fn raise_floor(shared: &Shared, floor: Generation) -> Result<(), String> {
    let read = shared.store.execute(Request::Read(vec![Key::Floor])).await;
    let Answer::Values(_) = read.answer else {
        return Err(read.trouble.unwrap_or_default());
    };
    let current = match read.answer.value(&Key::Floor) {
        Some(Value::Floor(current)) => Some(*current),
        _ => None,
    };
    if current.is_some_and(|current| current >= floor.get()) {
        return Ok(());
    }
    let key = shared.store.keys.of(&Key::Floor);
    let current = current.map(|current| shared.store.stored(&key, &Value::Floor(current)));
    let request = TxnRequest {
        compare: vec![wire::is(key.clone(), current)],
        success: vec![wire::put(key, codec::encode(&Value::Floor(floor.get())))],
    };
    let written = shared.store.transact(request).await;
    match written.answer {
        Answer::Committed => Ok(()),
        _ => Err(written
            .trouble
            .unwrap_or_else(|| "another node raises the generation floor too".to_owned())),
    }
}

/// Returns once no other installation can act under this node's name: the name is free, or it was
/// held by an earlier daemon of this installation since this boot, or by another installation that
/// was silent for so long that its fence has ended its sessions, as for any other node.
async fn alone(shared: &Shared, me: &Holder) -> Result<i64, String> {
    let mut observer = Observer::new(shared.me.clone());
    let mut first: Option<Heartbeat> = None;
    loop {
        let protocol = [Key::Node, Key::Heartbeat, Key::Silence];
        let protocol = protocol.map(|key| key(shared.me.clone())).to_vec();
        let holder = shared.store.keys.holder(&shared.me);
        let read = shared.store.get_with(holder, protocol).await;
        let (holder, answer) = read.map_err(|error| error.to_string())?;
        let revision = holder.as_ref().map_or(0, |(_, _, revision)| *revision);
        let held_by = holder.map(|(key, bytes, _)| codec::parse::<Holder>(&key, &bytes));
        let held_by = held_by.transpose().map_err(|error| error.to_string())?;
        let (record, heartbeat) = answer.node(&shared.me);
        if record.is_some_and(|record| record.incarnation == u64::MAX) {
            return Err(format!(
                "the record of node `{0}` in etcd is damaged: it has the greatest possible \
                 incarnation; give this node another `node.name`",
                shared.me
            ));
        }
        let live = record.is_some_and(|record| record.state == NodeState::Live);
        if !live || held_by.as_ref() == Some(me) {
            return Ok(revision);
        }
        let other = held_by.map_or_else(|| "of unknown origin".to_owned(), |one| one.instance);
        if first.is_some() && heartbeat != first && other == me.instance {
            return Err(format!(
                "this state directory is a copy: installation {other} is live on another machine as \
                 node `{}` and renews; remove the state directory here, and give this node another \
                 `node.name`",
                shared.me
            ));
        }
        if first.is_some() && heartbeat != first {
            return Err(format!(
                "another conman (installation {other}) is live as node `{}` and renews; give one \
                 of the two another `node.name`",
                shared.me
            ));
        }
        first = first.or(heartbeat);
        // A record without a heartbeat is not written by conman; a node that renews would create
        // one.
        if let Verdict::Fence(fencing) = observer.answered(boot_time(), &answer, &shared.timing) {
            let fenced = shared.store.execute(Request::Commit(fencing)).await;
            if fenced.answer == Answer::Committed {
                tracing::warn!(
                    other,
                    "took over this node's name from another installation, which is silent"
                );
                return Ok(revision);
            }
            return Err(fenced.trouble.unwrap_or_else(|| {
                format!("another conman has just come back as node `{}`", shared.me)
            }));
        }
        shared.stands(Standing::Joining {
            reason: format!(
                "node `{}` was last held by another conman (installation {other}); waiting {} ms \
                 in which it does not renew",
                shared.me,
                shared.timing.patience_ms(answer.silence_ms(&shared.me))
            ),
        });
        sleep(Duration::from_millis(shared.timing.renew_ms)).await;
    }
}
