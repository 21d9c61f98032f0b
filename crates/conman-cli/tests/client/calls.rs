//! What a fake daemon was asked, for a test to look at.

use std::sync::{Arc, Mutex};

/// Notes in the order in which they were made; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Calls(Arc<Mutex<Vec<String>>>);

impl Calls {
    pub(crate) fn note(&self, what: impl Into<String>) {
        self.0.lock().expect("not poisoned").push(what.into());
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.0.lock().expect("not poisoned").clone()
    }
}
