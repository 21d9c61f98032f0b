//! The network namespaces of links, kept open until their owners have ended.
//!
//! The kernel takes down the links of all dead namespaces that it finds under one lock (rtnl), at up to a
//! millisecond for each. After a mass death every other program that changes a link would wait for all of them.
//! So only few namespaces are closed at a time, each when the link of an earlier one is gone. The plane deletes
//! the links of those that wait.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;

/// Descriptors that stay open for each link.
pub const LINK_DESCRIPTORS: u32 = 1;

/// Namespaces whose links the kernel may take down at once. Meanwhile other users wait some 150 ms; with
/// fewer, the links of a thousand take longer to disappear (`conman bench net --cleanup`).
const MAX_CLOSED: usize = 200;

/// Network namespaces, by the indexes of their links.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    /// By owner.
    living: HashMap<String, (u32, OwnedFd)>,
    /// Of ended owners, and open.
    waiting: BTreeMap<u32, OwnedFd>,
    /// Closed, and their links may still exist.
    closed: HashSet<u32>,
}

impl Namespaces {
    /// Keeps the namespace of an owner's link.
    pub(crate) fn keep(&mut self, owner: &str, index: u32, namespace: OwnedFd) {
        self.living.insert(owner.to_owned(), (index, namespace));
    }

    /// Closes the namespace of an owner's link: from now on the link disappears when the owner does.
    pub(crate) fn let_go(&mut self, owner: &str) {
        self.living.remove(owner);
    }

    /// The owner has ended. Returns whether namespaces wait. Does nothing if the end is known.
    pub(crate) fn end(&mut self, owner: &str) -> bool {
        let Some((index, namespace)) = self.living.remove(owner) else {
            return false;
        };
        self.waiting.insert(index, namespace);
        self.close_some();
        !self.waiting.is_empty()
    }

    /// The link with this index does not exist any more.
    pub(crate) fn link_is_gone(&mut self, index: u32) {
        self.waiting.remove(&index);
        if self.closed.remove(&index) {
            self.close_some();
        }
    }

    /// Indexes of links whose namespaces are of ended owners and open.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = u32> {
        self.waiting.keys().copied()
    }

    /// Indexes of links that may still exist although their namespaces are closed.
    pub(crate) fn closed(&self) -> impl Iterator<Item = u32> {
        self.closed.iter().copied()
    }

    fn close_some(&mut self) {
        while self.closed.len() < MAX_CLOSED
            && let Some((index, namespace)) = self.waiting.pop_first()
        {
            self.closed.insert(index);
            drop(namespace);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Read as _, pipe};

    use super::*;

    /// Stands for a namespace; the other end shows whether it is open.
    fn namespace() -> (PipeReader, OwnedFd) {
        let (reader, writer): (PipeReader, PipeWriter) = pipe().expect("a pipe");
        rustix::io::ioctl_fionbio(&reader, true).expect("not blocking");
        (reader, writer.into())
    }

    fn count_closed(readers: &mut [PipeReader]) -> usize {
        let closed = readers.iter_mut().map(|reader| reader.read(&mut [0]));
        closed.filter(|read| matches!(read, Ok(0))).count()
    }

    #[test]
    fn namespaces_of_ended_owners_are_closed_few_at_a_time() {
        let mut namespaces = Namespaces::default();
        let last = u32::try_from(2 * MAX_CLOSED).expect("fits");
        let mut readers = Vec::new();
        for index in 0..=last {
            let (reader, namespace) = namespace();
            namespaces.keep(&index.to_string(), index, namespace);
            readers.push(reader);
        }
        for index in 0..last {
            namespaces.end(&index.to_string());
            namespaces.end(&index.to_string());
        }
        assert_eq!(count_closed(&mut readers), MAX_CLOSED);
        // A link that is deleted while its namespace waits makes no room; one of a closed namespace does.
        namespaces.link_is_gone(last - 1);
        assert_eq!(count_closed(&mut readers), MAX_CLOSED + 1);
        let closed: Vec<u32> = namespaces.closed().collect();
        for index in closed {
            namespaces.link_is_gone(index);
        }
        assert_eq!(
            count_closed(&mut readers),
            2 * MAX_CLOSED,
            "one owner lives"
        );
        assert_eq!(namespaces.closed().count(), MAX_CLOSED - 1);
    }
}
