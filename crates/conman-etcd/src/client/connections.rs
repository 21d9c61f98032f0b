//! The connections to etcd's endpoints.

use tonic::transport::{Channel, Endpoint};

use super::method::Lines;

/// Connections to each endpoint, of two kinds.
#[derive(Debug, Default)]
pub(super) struct Connections {
    endpoints: Vec<Endpoint>,
    /// One connection per endpoint, made on first use, replaced when it hangs.
    lines: Vec<Channel>,
    /// The same for [`Lines::Bulk`].
    bulk: Vec<Channel>,
}

impl Connections {
    pub(super) fn new(endpoints: Vec<Endpoint>) -> Self {
        Self {
            endpoints,
            ..Self::default()
        }
    }

    pub(super) fn lines(&mut self, which: Lines) -> &mut Vec<Channel> {
        let lines = match which {
            Lines::Common => &mut self.lines,
            Lines::Bulk => &mut self.bulk,
        };
        if lines.is_empty() {
            *lines = self.endpoints.iter().map(Endpoint::connect_lazy).collect();
        }
        lines
    }

    /// Calls that are still under way on the old connection are abandoned.
    pub(super) fn replace(&mut self, which: Lines, index: usize) {
        let Some(endpoint) = self.endpoints.get(index).cloned() else {
            return;
        };
        if let Some(line) = self.lines(which).get_mut(index) {
            *line = endpoint.connect_lazy();
        }
    }
}
