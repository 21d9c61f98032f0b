//! Sessions that others find by name.

use std::net::IpAddr;

use conman_core::{MAX_NAMED, TalkName, TalkingSession};
use conman_registry::{ContainerIdentity, PartRegistry as _, Registry as _};

use crate::etcd::Etcd;
use crate::node::{Node, id, patient, spec};

/// Starts a session named `worker` in the group `team`.
async fn start(node: &Node, session: &str, address: IpAddr) {
    let mut spec = spec();
    spec.talk = vec!["team".to_owned()];
    spec.labels = [("name".to_owned(), "worker".to_owned())].into();
    let claimed = node.registry.claim(&id(session), &spec).await;
    let generation = claimed.expect("it is free").generation;
    let container = ContainerIdentity {
        container_id: "c".to_owned(),
        pid: 7,
        start_time_ticks: 7,
        boot_id: "b".to_owned(),
        addresses: vec![address],
    };
    let id = id(session);
    let recorded = node.registry.set_container(&id, generation, &container);
    recorded.await.expect("recorded");
}

async fn workers(node: &Node) -> Vec<TalkingSession> {
    let name = TalkName::parse("worker.team.session.internal").expect("a name");
    node.registry.named(&name).await.expect("readable")
}

#[tokio::test]
async fn sessions_of_a_node_without_parts_do_not_hide_those_behind_them() {
    let Some(etcd) = Etcd::start() else { return };
    // Without a part, each is for the other like a lost node.
    let a = Node::join(&etcd.url(), "a", patient()).await;
    let b = Node::join(&etcd.url(), "b", patient()).await;
    let [of_a, of_b]: [IpAddr; 2] = [[10, 96, 0, 1].into(), [10, 96, 1, 1].into()];
    for number in 0..3 * MAX_NAMED {
        start(&a, &format!("a-{number:03}"), of_a).await;
    }
    start(&b, "b", of_b).await;
    assert!(workers(&a).await.len() >= MAX_NAMED, "its own are reached");
    let found = workers(&b).await.into_iter();
    let addresses: Vec<IpAddr> = found.flat_map(|one| one.addresses).collect();
    assert_eq!(addresses, [of_b]);
}
