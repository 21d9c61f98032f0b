//! A client's position in the journal of each node.
//!
//! Its text is `f1-SINCE-NODE.SEQ-NODE.SEQ…`, in hexadecimal. Nodes are hashes of their names,
//! which bounds the text for all names.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use super::From;

/// Largest sequence number that JSON readers keep exact.
const MAX_SEQ: u64 = (1 << 53) - 1;

/// Most nodes in a cursor, and thus in a stream: keeps the id of an event within 8 KiB.
const MAX_NODES: usize = 256;

/// Clocks of two nodes are assumed to differ by at most this.
pub(super) const MAX_SKEW_MS: u64 = 30_000;

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
    /// Everything that happened since then.
    pub(crate) const fn since(since_ms: u64) -> Self {
        Self {
            since_ms,
            nodes: BTreeMap::new(),
        }
    }

    /// The request to a node.
    pub(crate) fn of(&self, node: &str) -> From {
        match self.seq(node) {
            Some(seq) => From {
                after: Some(seq),
                since_ms: 0,
            },
            // By the clock of that node, which may be behind.
            None => From {
                after: Some(0),
                since_ms: self.since_ms.saturating_sub(MAX_SKEW_MS),
            },
        }
    }

    pub(crate) fn seq(&self, node: &str) -> Option<u64> {
        self.nodes.get(&hash(node)).copied()
    }

    /// Records how far a node's journal was read.
    pub(crate) fn set(&mut self, node: &str, seq: u64) {
        self.nodes.insert(hash(node), seq);
    }

    /// Whether there is room for a node's position next to those of the present nodes. Positions of
    /// lost nodes are dropped first.
    pub(crate) fn has_room<'a>(
        &mut self,
        node: &str,
        pending: usize,
        present: impl Iterator<Item = &'a str>,
    ) -> bool {
        if self.nodes.contains_key(&hash(node)) || self.nodes.len() + pending < MAX_NODES {
            return true;
        }
        let present: Vec<u64> = present.map(hash).collect();
        self.nodes.retain(|node, _| present.contains(node));
        self.nodes.len() + pending < MAX_NODES
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
        assert_eq!(cursor.of("n2").after, Some(17));
        let new = cursor.of("n4");
        let since_ms = 1_780_000_000_000 - MAX_SKEW_MS;
        assert_eq!((new.after, new.since_ms), (Some(0), since_ms));
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
        let names: Vec<String> = (0..MAX_NODES).map(|number| format!("n{number}")).collect();
        for name in &names {
            assert!(cursor.has_room(name, 0, std::iter::empty()));
            cursor.set(name, MAX_SEQ);
        }
        let text = cursor.to_string();
        assert!(text.len() <= 8 * 1024, "{}", text.len());
        assert_eq!(text.parse(), Ok(Position::Fleet(cursor.clone())));
        let all = || names.iter().map(String::as_str);
        assert!(!cursor.has_room("new", 0, all()));
        assert!(cursor.has_room("n0", 0, all()));
        assert!(!cursor.has_room("new", 1, all().skip(1)));
        assert!(cursor.has_room("new", 0, all().skip(1)));
        assert_eq!(cursor.seq("n0"), None);
        assert_eq!(cursor.seq("n1"), Some(MAX_SEQ));
        let more = format!("{text}-1.1");
        assert_eq!(more.parse::<Position>(), Err(NoPosition));
    }
}
