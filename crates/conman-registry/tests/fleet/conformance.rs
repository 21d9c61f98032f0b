//! etcd is held to the same suite as the other registries.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use conman_registry::{Registry, conformance};

use crate::etcd::Etcd;
use crate::node::{Node, options, patient};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_registry_in_etcd_keeps_every_promise() {
    let Some(etcd) = Etcd::start() else { return };
    let next = AtomicUsize::new(0);
    conformance::suite(|| async {
        let prefix = format!("/registry-{}/", next.fetch_add(1, Ordering::Relaxed));
        let dir = tempfile::tempdir().expect("a directory");
        let node = Node::in_dir(dir, Vec::new(), |dir| {
            let mut options = options(&etcd.url(), "alone", patient(), dir);
            options.prefix = prefix;
            options
        });
        node.live().await;
        Arc::clone(&node.registry) as Arc<dyn Registry>
    })
    .await;
}
