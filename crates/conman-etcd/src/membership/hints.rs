//! Watches, which only cause an earlier read.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use tokio::sync::Notify;
use tokio::time::sleep;
use tonic::Status;

use super::super::shared::Shared;
use super::super::wire::{self, WatchResponse};

/// Pause before a broken watch is started again.
const REWATCH_PAUSE: Duration = Duration::from_secs(1);

/// Causes an earlier read when a key below this one changes and `is_news` returns true for its key
/// and value.
pub(crate) async fn watch(
    shared: Arc<Shared>,
    parent: Vec<u8>,
    is_news: impl Fn(&[u8], &[u8]) -> bool,
) {
    loop {
        let end = wire::behind(&parent);
        match shared.store.client.watch(parent.clone(), end).await {
            Ok(hints) => follow(hints, &is_news, &shared.hurry).await,
            Err(error) => tracing::debug!(%error, "cannot watch etcd"),
        }
        sleep(REWATCH_PAUSE).await;
    }
}

/// Until the watch ends: compacted, or disconnected. The next read covers what it missed.
async fn follow(
    mut hints: impl Stream<Item = Result<WatchResponse, Status>> + Unpin,
    is_news: impl Fn(&[u8], &[u8]) -> bool,
    hurry: &Notify,
) {
    while let Some(Ok(hint)) = hints.next().await
        && !hint.canceled
    {
        let mut changed = hint.events.iter().filter_map(|event| event.kv.as_ref());
        if changed.any(|kv| is_news(&kv.key, &kv.value)) {
            hurry.notify_one();
        }
    }
    hurry.notify_one();
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, stream};

    use super::super::super::wire::{KeyValue, WatchEvent};
    use super::*;

    fn hint(value: Option<&str>) -> WatchResponse {
        let event = |value: &str| WatchEvent {
            kv: Some(KeyValue {
                value: value.into(),
                ..KeyValue::default()
            }),
        };
        WatchResponse {
            events: value.map(event).into_iter().collect(),
            ..WatchResponse::default()
        }
    }

    /// Whether a watch with this hint causes a read, and whether the watch continues.
    fn effect_of(hint: Result<WatchResponse, Status>) -> (bool, bool) {
        let hurry = Notify::new();
        // More hints may come.
        let hints = stream::iter([hint]).chain(stream::pending());
        let is_news = |_: &[u8], value: &[u8]| value == b"news";
        let ended = follow(hints, is_news, &hurry).now_or_never();
        let asked = hurry.notified().now_or_never();
        (asked.is_some(), ended.is_none())
    }

    #[test]
    fn what_a_watch_does_not_tell_any_more_is_looked_at() {
        let canceled = WatchResponse {
            canceled: true,
            compact_revision: 7,
            ..WatchResponse::default()
        };
        assert_eq!(effect_of(Ok(canceled)), (true, false), "compacted away");
        let gone = Err(Status::unavailable("the line is gone"));
        assert_eq!(effect_of(gone), (true, false), "the line is gone");
        assert_eq!(effect_of(Ok(hint(Some("news")))), (true, true));
        assert_eq!(effect_of(Ok(hint(Some("else")))), (false, true));
        assert_eq!(effect_of(Ok(hint(None))), (false, true));
    }
}
