//! Quotes the end of a program's output when the program failed: its log is deleted with its container.

use std::time::Duration;

use anstream::adapter::strip_bytes;
use conman_runtime::{ContainerKey, LogOptions, Runtime};
use futures_util::StreamExt;
use tokio::time::timeout;

/// Lines to read.
const LINES: u32 = 5;

/// Most bytes that are read, whatever the length of the lines.
const MAX_READ_BYTES: usize = 64 * 1024;

/// Most bytes that are quoted.
const MAX_QUOTED_BYTES: usize = 300;

/// Returns what the program wrote last; `None` if it wrote nothing, or the runtime does not answer in
/// time.
pub(super) async fn last_output(
    runtime: &dyn Runtime,
    key: &ContainerKey,
    patience: Duration,
) -> Option<String> {
    let read = async {
        let options = LogOptions {
            tail: Some(LINES),
            ..LogOptions::default()
        };
        let mut chunks = runtime.logs(key, options).await.ok()?;
        let mut bytes = Vec::new();
        while let Some(Ok(chunk)) = chunks.next().await {
            bytes.extend_from_slice(&chunk.bytes);
            if bytes.len() >= MAX_READ_BYTES {
                break;
            }
        }
        Some(bytes)
    };
    let bytes = timeout(patience, read).await.ok()??;
    let quoted = quote(&bytes);
    (!quoted.is_empty()).then_some(quoted)
}

/// The end of the text on one line, without terminal control sequences.
fn quote(bytes: &[u8]) -> String {
    // Terminal control sequences are not text.
    let plain = strip_bytes(bytes).into_vec();
    let text = String::from_utf8_lossy(&plain);
    let text = text.trim();
    let end = &text[text.ceil_char_boundary(text.len().saturating_sub(MAX_QUOTED_BYTES))..];
    let lines: Vec<_> = end
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    let joined = lines.join(" | ");
    joined
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotation_is_short_plain_and_on_one_line() {
        assert_eq!(quote(b"one\n\n two\r\n"), "one | two");
        assert_eq!(quote(b"\x1b[23;1H\x1b[31mred\x1b[K"), "red");
        assert!(!quote(b"a\x1b\x07\x00b\x9b1mc").contains(char::is_control));
        assert_eq!(quote(b" \n"), "");
        let long = quote("ä".repeat(10_000).as_bytes());
        assert!(
            long.len() <= MAX_QUOTED_BYTES && long.chars().all(|c| c == 'ä'),
            "{long}"
        );
    }
}
