//! The proxy's directory, as the daemon composes it.

use std::sync::Arc;

use async_trait::async_trait;
use conman_api::locate_problem;
use conman_fleet::{LocateError, Locator};
use conman_peer::PeerRefusal;
use conman_proto::SessionId;
use conman_proxy::{Directory, Refusal, Route};

pub(super) struct FleetDirectory(pub(super) Arc<Locator>);

fn refusal(error: LocateError) -> Refusal {
    Refusal::from(locate_problem(&error))
}

#[async_trait]
impl Directory for FleetDirectory {
    async fn route(&self, id: &SessionId, may_start: bool) -> Result<Route, Refusal> {
        let found = self.0.find(id, may_start, false).await;
        found.map_err(refusal)
    }

    async fn route_again(
        &self,
        from: &Route,
        why: &PeerRefusal,
        times: u32,
        may_start: bool,
    ) -> Result<Route, Refusal> {
        let found = self.0.find_again(from, why, times, may_start).await;
        found.map_err(refusal)
    }
}
