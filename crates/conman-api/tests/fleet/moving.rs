//! What is asked for while it goes from one node to another.

use conman_proto::EnsureResponse;
use futures_util::future::join_all;
use http::{Method, StatusCode};

use crate::{Node, World, session};

/// To and fro; all are told to go at once, so that some are met in each step of their end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_put_while_its_node_gives_it_up_is_started_by_another() {
    let world = World::new();
    let (a, b) = (Node::join(&world, "a").await, Node::join(&world, "b").await);
    let ids: Vec<String> = (0..16).map(|number| format!("s{number}")).collect();
    world.announced("a", |a| a.draining = true);
    for id in &ids {
        assert_eq!(b.ensure(id).await.session.node, "b");
    }
    for round in 0..6 {
        let ((from, giver), (to, _)) = match round % 2 {
            0 => (("b", &b), ("a", &a)),
            _ => (("a", &a), ("b", &b)),
        };
        world.announced(to, |to| to.draining = false);
        world.announced(from, |from| from.draining = true);
        let begun = giver.api.call(Method::POST, "/v1/nodes/self/drain", "{}");
        let begun = begun.await;
        assert_eq!(begun.status, StatusCode::ACCEPTED, "{}", begun.text());
        let put = async |(number, id): (usize, &String)| {
            let asked = if number % 2 == 0 { &a } else { &b };
            let body = r#"{"template": "idle"}"#;
            loop {
                let answer = asked.api.call(Method::PUT, &session(id), body).await;
                assert_eq!(answer.status, StatusCode::OK, "{id}: {}", answer.text());
                // One that has not been told to go yet answers as before.
                let told: EnsureResponse = answer.json();
                if told.session.node == to {
                    return;
                }
            }
        };
        join_all(ids.iter().enumerate().map(put)).await;
        let undrained = giver.api.call(Method::POST, "/v1/nodes/self/undrain", "{}");
        assert_eq!(undrained.await.status, StatusCode::OK);
    }
}
