//! etcd is held to the same suites as the registries and the fleet in memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use conman_core::ownership::Timing;
use conman_proto::SessionId;
use conman_registry::Registry;
use conman_testkit::fleet_conformance::{self, Member, World};
use conman_testkit::registry_conformance as conformance;
use tokio::sync::Mutex;

use crate::etcd::Etcd;
use crate::node::{Node, options, patient, short};
use crate::proxy::{Proxy, Way};

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

/// A fleet under a prefix of its own. Every node has its own way to etcd, which can be cut.
struct InEtcd<'etcd> {
    etcd: &'etcd Etcd,
    prefix: String,
    timing: Timing,
    nodes: Mutex<HashMap<String, (Node, Proxy)>>,
}

/// How many there were.
static FLEETS: AtomicUsize = AtomicUsize::new(0);

impl<'etcd> InEtcd<'etcd> {
    fn new(etcd: &'etcd Etcd, timing: Timing) -> Self {
        let number = FLEETS.fetch_add(1, Ordering::Relaxed);
        Self {
            etcd,
            prefix: format!("/fleet-{number}/"),
            timing,
            nodes: Mutex::default(),
        }
    }

    async fn set(&self, name: &str, way: Way) {
        let nodes = self.nodes.lock().await;
        let (_, proxy) = nodes.get(name).expect("it has begun");
        proxy.set(way);
    }
}

#[async_trait]
impl World for InEtcd<'_> {
    async fn begin(&self, name: &str) -> Member {
        let proxy = Proxy::to(self.etcd.address()).await;
        let dir = tempfile::tempdir().expect("a directory");
        let node = Node::in_dir(dir, Vec::new(), |dir| {
            let mut options = options(&proxy.url(), name, self.timing, dir);
            options.prefix.clone_from(&self.prefix);
            options
        });
        let member = Member {
            registry: node.registry.clone(),
            fleet: node.registry.clone(),
        };
        self.nodes
            .lock()
            .await
            .insert(name.to_owned(), (node, proxy));
        member
    }

    async fn cut(&self, name: &str) {
        self.set(name, Way::Cut).await;
    }

    async fn heal(&self, name: &str) {
        self.set(name, Way::Open).await;
    }

    async fn spoil(&self, id: &SessionId) {
        let key = format!("{}session/{id}", self.prefix);
        self.etcd.ctl(&["put", &key, "garbage"]).expect("written");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fleet_in_etcd_keeps_every_promise() {
    let Some(etcd) = Etcd::start() else { return };
    fleet_conformance::suite(|| async { InEtcd::new(&etcd, patient()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fleet_in_etcd_keeps_every_promise_of_deaths() {
    let Some(etcd) = Etcd::start() else { return };
    // Long enough silent before it is declared dead for that to be seen.
    let timing = Timing {
        takeover_ms: 9_000,
        ..short()
    };
    fleet_conformance::suite_of_deaths(|| async { InEtcd::new(&etcd, timing) }).await;
}
