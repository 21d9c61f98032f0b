//! The fleet in memory is held to the same suite as the real one.

use std::sync::Arc;

use async_trait::async_trait;
use conman_proto::SessionId;
use conman_testkit::ModelFleet;
use conman_testkit::fleet_conformance::{self, Member, World};

struct InMemory(Arc<ModelFleet>);

#[async_trait]
impl World for InMemory {
    async fn begin(&self, name: &str) -> Member {
        let (registry, fleet) = self.0.join(name);
        Member { registry, fleet }
    }

    async fn cut(&self, name: &str) {
        self.0.cut(name);
    }

    async fn takeover_passes(&self) {
        self.0.declare_dead();
    }

    async fn heal(&self, name: &str) {
        self.0.heal(name);
    }

    async fn spoil(&self, id: &SessionId) {
        let what = format!("the record of session {id} cannot be read");
        self.0.cannot_read(id, &what);
    }
}

async fn fleet() -> InMemory {
    InMemory(ModelFleet::new())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_fleet_keeps_every_promise() {
    fleet_conformance::suite(fleet).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_fleet_keeps_every_promise_of_deaths() {
    fleet_conformance::suite_of_deaths(fleet).await;
}
