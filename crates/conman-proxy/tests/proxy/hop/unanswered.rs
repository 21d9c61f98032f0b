//! Nodes that break, fall silent or die before they have answered.

use conman_core::Closing;

use super::nodes::{Believed, CUT_OFF, Entry, GET_ALICE, Owner};
use crate::support::{RawBackend, status};
use conman_peer::PeerRefusal;

#[tokio::test]
async fn an_answer_of_a_node_that_falls_silent_or_is_declared_dead_is_not_waited_for() {
    for (upgrade, dead) in [(false, false), (false, true), (true, false), (true, true)] {
        let (owner, mut backend) = Owner::of_alice().await;
        let believed = Believed::new(owner.address);
        let entry = Entry::new(&believed);
        let mut client = entry.connect().await;
        let wish = match upgrade {
            true => "Connection: upgrade\r\nUpgrade: x\r\n",
            false => "Connection: close\r\n",
        };
        client
            .send(format!(
                "GET / HTTP/1.1\r\nHost: alice.localhost\r\n{wish}\r\n"
            ))
            .await;
        // It has arrived, and the session takes as long as it likes.
        let mut session = backend.accept().await;
        session.read_head().await;
        if dead {
            let closing = Closing::service_restart("gone");
            believed.gone.send_replace(Some(closing));
        } else {
            believed.silent.send_replace(true);
        }
        let head = client.read_head().await;
        assert_eq!(status(&head), "502", "{head}");
        assert!(believed.refusal().is_empty());
    }
}

#[tokio::test]
async fn a_node_that_is_declared_dead_is_not_dialled_any_longer() {
    let owner = Owner::of_echo().await;
    let believed = Believed::new(CUT_OFF);
    believed.truth.send_replace(None);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    client.send(GET_ALICE).await;
    let closing = Closing::service_restart("gone");
    believed.gone.send_replace(Some(closing));
    let PeerRefusal::Unreachable(why) = believed.refused().await else {
        panic!("{:?}", believed.refusal());
    };
    assert_eq!(why, "it has been declared dead");
    // The route to the next node.
    believed.gone.send_replace(None);
    believed.truth.send_replace(Some(owner.address));
    let head = client.read_head().await;
    assert_eq!(status(&head), "200", "{head}");
}

#[tokio::test]
async fn what_changes_nothing_is_sent_once_more_where_its_node_broke_before_it_answered() {
    let (mut former, owner) = (RawBackend::new().await, Owner::of_echo().await);
    let believed = Believed::new(former.address);
    let entry = Entry::new(&believed);
    let mut client = entry.connect().await;
    let request = "GET /s/alice/again HTTP/1.1\r\nHost: x\r\n\r\n";
    client.send(request).await;
    let mut node = former.accept().await;
    node.read_head().await;
    node.send("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!(status(&client.read_head().await), "204");
    client.send(request).await;
    assert!(node.read_head().await.starts_with("GET /again "));
    believed.truth.send_replace(Some(owner.address));
    drop(node);
    let head = client.read_head().await;
    assert_eq!(status(&head), "200", "{head}");
    let echoed = client.read_head().await;
    assert!(echoed.starts_with("GET /again "), "{echoed}");
    assert!(matches!(
        believed.refusal()[..],
        [PeerRefusal::Unreachable(_)]
    ));
}

#[tokio::test]
async fn what_broke_is_sent_so_often_at_most_and_once_where_it_may_change_something() {
    /// As often as a request is refused.
    const MANY: usize = 16;
    let requests = [
        ("GET", "", MANY),
        ("POST", "", 1),
        ("DELETE", "", 1),
        ("GET", "Content-Length: 4\r\n\r\nbody", 1),
        ("GET", "Connection: upgrade\r\nUpgrade: x\r\n", MANY),
    ];
    for (method, more, times) in requests {
        let mut node = RawBackend::new().await;
        let believed = Believed::new(node.address);
        let entry = Entry::new(&believed);
        let mut client = entry.connect().await;
        client
            .send(format!(
                "{method} /s/alice/ HTTP/1.1\r\nHost: x\r\n{more}\r\n"
            ))
            .await;
        for _ in 0..times {
            node.accept().await.read_head().await;
        }
        let head = client.read_head().await;
        assert_eq!(status(&head), "502", "{method} {more}: {head}");
        assert_eq!(believed.refusal().len(), times - 1, "{method} {more}");
        assert!(node.try_accept().is_none(), "{method} {more}");
    }
}
