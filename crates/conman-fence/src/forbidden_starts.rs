//! Names of starts that must never begin.

use std::collections::{BTreeSet, VecDeque};

use crate::containers::MAX_CONTAINERS;

/// Forbidden before a start of them was ordered. As many are kept as there may be containers, so that
/// the oldest one's start has been given up.
#[derive(Debug, Default)]
pub(crate) struct ForbiddenStarts {
    /// The oldest first.
    in_order: VecDeque<String>,
    names: BTreeSet<String>,
}

impl ForbiddenStarts {
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }

    /// Adds a name. Returns the name that it replaces, if any.
    pub(crate) fn add(&mut self, name: String) -> Option<String> {
        if !self.names.insert(name.clone()) {
            return None;
        }
        self.in_order.push_back(name);
        if self.in_order.len() <= MAX_CONTAINERS {
            return None;
        }
        let oldest = self.in_order.pop_front()?;
        self.names.remove(&oldest);
        Some(oldest)
    }

    pub(crate) fn len(&self) -> usize {
        self.in_order.len()
    }

    /// The oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &str> {
        self.in_order.iter().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_given_up_and_no_name_counts_twice() {
        let mut all = ForbiddenStarts::default();
        for number in 0..MAX_CONTAINERS {
            assert_eq!(all.add(number.to_string()), None);
        }
        assert_eq!(all.add("0".to_owned()), None);
        assert_eq!(all.add("last".to_owned()), Some("0".to_owned()));
        assert!(!all.contains("0") && all.contains("1") && all.contains("last"));
        assert_eq!(all.len(), MAX_CONTAINERS);
        assert_eq!(all.iter().next(), Some("1"));
    }
}
