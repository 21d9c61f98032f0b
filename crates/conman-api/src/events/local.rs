//! Reads pages of this node's journal.

use std::time::Duration;

use conman_proto::EventPage;
use conman_registry::{Journal, JournalError, MAX_EVENT_PAGE};
use futures_util::StreamExt as _;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::PageRequest;

/// How long a request waits for an event. The requesting node probes this one meanwhile.
pub(super) const WAIT: Duration = Duration::from_secs(20);

/// Most pages of the journal that are read for one page of wanted events: the requesting node waits for them.
const MAX_SCANNED_PAGES: usize = 64;

/// A page of wanted events. Pages of the journal are read until enough are found.
pub(crate) async fn page(
    journal: &Journal,
    request: &PageRequest,
) -> Result<EventPage, JournalError> {
    let limit = request.limit.clamp(1, MAX_EVENT_PAGE);
    let mut found = Vec::new();
    let mut position = request.after;
    let mut truncated = None;
    let mut scanned = 0;
    loop {
        let page = journal.page(position, MAX_EVENT_PAGE).await?;
        scanned += 1;
        let truncated = *truncated.get_or_insert(page.truncated);
        let end = page.events.last().map(|event| event.seq);
        let events = page.events.into_iter();
        let wanted = events.filter(|event| request.filter.wants(event));
        found.extend(wanted.take(limit - found.len()));
        let is_full = found.len() >= limit;
        match end {
            Some(end) if !is_full && scanned < MAX_SCANNED_PAGES => position = end,
            _ => {
                // Events of others that were scanned need not be scanned again.
                let through = match (found.last(), end) {
                    (Some(last), _) if is_full => last.seq,
                    (_, end) => end.unwrap_or(page.last_seq),
                };
                return Ok(EventPage {
                    cursor: through.to_string(),
                    complete: !is_full && end.is_none(),
                    events: found,
                    last_seq: page.last_seq,
                    truncated,
                });
            }
        }
    }
}

/// Likewise; waits for the first event if the request says so.
pub(crate) async fn awaited_page(
    journal: &Journal,
    request: &PageRequest,
    closing: &CancellationToken,
) -> Result<EventPage, JournalError> {
    if request.waits {
        let mut events = journal.follow(request.after);
        let wanted = async {
            while let Some(event) = events.next().await
                && !request.filter.wants(&event)
            {}
        };
        // The page is read whatever ended the wait.
        let _ = closing.run_until_cancelled(timeout(WAIT, wanted)).await;
    }
    page(journal, request).await
}
