//! Every registry of this crate is held to the one suite.

use std::sync::Arc;

use conman_registry::{EmbeddedOptions, EmbeddedRegistry, Registry};
use conman_testkit::ModelRegistry;
use conman_testkit::registry_conformance as conformance;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_model_registry_keeps_every_promise() {
    conformance::suite(|| async { Arc::new(ModelRegistry::new()) as Arc<dyn Registry> }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_registry_keeps_every_promise() {
    let root = tempfile::tempdir().expect("a directory for the registries");
    conformance::suite(|| async {
        let dir = tempfile::tempdir_in(root.path())
            .expect("a directory")
            .keep();
        let registry = EmbeddedRegistry::open(&dir, EmbeddedOptions::default()).expect("opens");
        Arc::new(registry) as Arc<dyn Registry>
    })
    .await;
}
