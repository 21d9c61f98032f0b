//! A client's position in the journal of each node.
//!
//! Its text is `f1-SINCE-NODE.SEQ-NODE.SEQ…`, in hexadecimal. Nodes are hashes of their names,
//! which bounds the text for all names.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use jiff::Timestamp;

/// Largest sequence number that JSON readers keep exact.
const MAX_SEQ: u64 = (1 << 53) - 1;

/// Most nodes in a cursor, and thus in a stream: keeps the id of an event within 8 KiB.
pub(super) const MAX_NODES: usize = 256;

/// Clocks of two nodes are assumed to differ by at most this.
const MAX_SKEW_MS: u64 = 30_000;

const PREFIX: &str = "f1";

/// Bits of a node's hash: among 256 names two collide once in eight billion fleets.
const HASH_BITS: u32 = 48;

/// A position that a client resumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Position {
    /// In the journal of the node that receives the request.
    Own(u64),
    Fleet(Cursor),
}

/// A position in each node's journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Cursor {
    /// For a node without a position: events since then, in milliseconds since 1970.
    since_ms: u64,
    nodes: BTreeMap<u64, u64>,
}

/// The text is not a valid position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be the id of an event, or 0 for the oldest ones kept")]
pub(crate) struct NoPosition;

impl Cursor {
    /// Where a stream or page of node `me` begins; without a position, with future events.
    pub(super) fn begin(position: Option<Position>, me: &str) -> Self {
        let now_ms = u64::try_from(Timestamp::now().as_millisecond()).unwrap_or(0);
        match position {
            None => Self::since(now_ms),
            Some(Position::Own(0)) => Self::since(0),
            Some(Position::Own(seq)) => {
                let mut cursor = Self::since(now_ms);
                cursor.set(me, seq);
                cursor
            }
            Some(Position::Fleet(cursor)) => cursor,
        }
    }

    /// Everything that happened since then.
    const fn since(since_ms: u64) -> Self {
        Self {
            since_ms,
            nodes: BTreeMap::new(),
        }
    }

    /// The events to request of a node: those after a position, and since a time in milliseconds
    /// since 1970.
    pub(super) fn of(&self, node: &str) -> (u64, u64) {
        match self.seq(node) {
            Some(seq) => (seq, 0),
            // By the clock of that node, which may be behind.
            None => (0, self.since_ms.saturating_sub(MAX_SKEW_MS)),
        }
    }

    pub(crate) fn seq(&self, node: &str) -> Option<u64> {
        self.nodes.get(&hash(node)).copied()
    }

    /// Records how far a node's journal was read.
    pub(super) fn set(&mut self, node: &str, seq: u64) {
        self.nodes.insert(hash(node), seq);
    }

    /// Makes room for the positions of these nodes, at most [`MAX_NODES`]: drops those of others if
    /// there would be too many.
    pub(super) fn make_room<'a>(&mut self, nodes: impl Iterator<Item = &'a Arc<str>>) {
        let nodes: BTreeSet<u64> = nodes.map(|node| hash(node)).collect();
        let is_other = |node: &&u64| !nodes.contains(*node);
        if nodes.len() + self.nodes.keys().filter(is_other).count() > MAX_NODES {
            self.nodes.retain(|node, _| nodes.contains(node));
        }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{PREFIX}-{:x}", self.since_ms)?;
        for (node, seq) in &self.nodes {
            write!(formatter, "-{node:x}.{seq:x}")?;
        }
        Ok(())
    }
}

impl FromStr for Position {
    type Err = NoPosition;

    fn from_str(text: &str) -> Result<Self, NoPosition> {
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            let seq = text.parse().ok().filter(|seq| *seq <= MAX_SEQ);
            return seq.map(Self::Own).ok_or(NoPosition);
        }
        let mut parts = text.split('-');
        if parts.next() != Some(PREFIX) {
            return Err(NoPosition);
        }
        let since_ms = parts.next().and_then(number).ok_or(NoPosition)?;
        let mut nodes = BTreeMap::new();
        for part in parts {
            let (node, seq) = part.split_once('.').ok_or(NoPosition)?;
            let node = number(node).filter(|node| *node < 1 << HASH_BITS);
            let (node, seq) = node.zip(number(seq)).ok_or(NoPosition)?;
            nodes.insert(node, seq);
            if nodes.len() > MAX_NODES {
                return Err(NoPosition);
            }
        }
        Ok(Self::Fleet(Cursor { since_ms, nodes }))
    }
}

/// Only hexadecimal digits: `from_str_radix` also accepts a sign.
fn number(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u64::from_str_radix(text, 16).ok().filter(|_| digits);
    number.filter(|number| *number <= MAX_SEQ)
}

/// FNV-1a: the same on every node and in every version, which std's hashers do not guarantee.
fn hash(name: &str) -> u64 {
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    (hash >> HASH_BITS) ^ (hash & ((1 << HASH_BITS) - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_comes_back_from_its_text() {
        let mut cursor = Cursor::since(1_780_000_000_000);
        for (node, seq) in [("n1", 0), ("n2", 17), ("n3", MAX_SEQ)] {
            cursor.set(node, seq);
        }
        let text = cursor.to_string();
        assert_eq!(text.parse(), Ok(Position::Fleet(cursor.clone())));
        assert_eq!(cursor.of("n2"), (17, 0));
        let since_ms = 1_780_000_000_000 - MAX_SKEW_MS;
        assert_eq!(cursor.of("n4"), (0, since_ms));
        assert_eq!("42".parse(), Ok(Position::Own(42)));
    }

    #[test]
    fn what_no_node_gave_is_refused() {
        for text in [
            "",
            "-1",
            "+1",
            "9007199254740992",
            "f1",
            "f1-",
            "f1-x",
            "f2-0",
            "f1-0-",
            "f1-0-1",
            "f1-0-1.",
            "f1-0-1.+1",
            "f1-0-1000000000000.1",
            "f1-0-1.ffffffffffffffff",
        ] {
            assert_eq!(text.parse::<Position>(), Err(NoPosition), "{text}");
        }
    }

    #[test]
    fn a_cursor_stays_bounded_and_gives_up_nodes_that_are_gone() {
        let mut cursor = Cursor::since(MAX_SEQ);
        let names = (0..MAX_NODES).map(|number| Arc::<str>::from(format!("n{number}")));
        let names: Vec<Arc<str>> = names.collect();
        cursor.make_room(names.iter());
        for name in &names {
            cursor.set(name, MAX_SEQ);
        }
        let text = cursor.to_string();
        assert!(text.len() <= 8 * 1024, "{}", text.len());
        assert_eq!(text.parse(), Ok(Position::Fleet(cursor.clone())));
        cursor.make_room(names.iter());
        assert_eq!(cursor.seq("n0"), Some(MAX_SEQ));
        let new = Arc::from("new");
        cursor.make_room(names.iter().skip(1).chain([&new]));
        assert_eq!(cursor.seq("n0"), None);
        assert_eq!(cursor.seq("n1"), Some(MAX_SEQ));
        cursor.set("new", MAX_SEQ);
        assert!(cursor.to_string().parse::<Position>().is_ok());
        let more = format!("{text}-1.1");
        assert_eq!(more.parse::<Position>(), Err(NoPosition));
    }
}
