//! What is asked for while it goes from one node to another.

use std::sync::{Arc, Mutex};

use conman_peer::{Dialer, PeerAccept as _, PeerAcceptor, Stream};
use conman_proto::{EnsureResponse, Session, SessionState, StopReport};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::held::Holds;
use super::world::{Node, World, nowhere, two};
use crate::stage::{PATIENCE, session};

/// To and fro; all are told to go at once, so that some are met in each step of their end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_put_while_its_node_gives_it_up_is_started_by_another() {
    let (world, a, b) = two().await;
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
            loop {
                let answer = asked.put(id).await;
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

/// Between a node and the others: what it answers may be lost.
struct Relay {
    url: String,
    loses: Arc<Mutex<Option<Loss>>>,
}

/// Of the next answer.
struct Loss {
    came: oneshot::Sender<()>,
    /// Until its other end is dropped, whoever asked hears nothing.
    held: oneshot::Receiver<()>,
}

impl Relay {
    /// Before the node `b`: it has the certificates of any node, as it knows the secret.
    async fn before_b(world: &World) -> Self {
        let to = world.address_of_b();
        let acceptor = PeerAcceptor::new(Some(world.tls("b")));
        let dialer = Dialer::new("a", Some(world.tls("a")));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let url = format!("https://{}", listener.local_addr().expect("bound"));
        let loses = Arc::new(Mutex::new(None));
        let lost = Arc::clone(&loses);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let client = acceptor.accept(client).await.expect("a node");
                let node = dialer.dial(&to).await.expect("it listens");
                tokio::spawn(pass(client, node, Arc::clone(&lost)));
            }
        });
        Self { url, loses }
    }

    /// The next answer's connection ends instead.
    fn lose_next(&self) {
        drop(self.hold_next());
    }

    /// The same, but not before the second is dropped; the first tells that it has been answered.
    fn hold_next(&self) -> (oneshot::Receiver<()>, oneshot::Sender<()>) {
        let (came, has_come) = oneshot::channel();
        let (holds, held) = oneshot::channel();
        *self.loses.lock().expect("no panic") = Some(Loss { came, held });
        (has_come, holds)
    }

    fn has_lost(&self) -> bool {
        self.loses.lock().expect("no panic").is_none()
    }
}

async fn pass(client: Stream, node: Stream, loses: Arc<Mutex<Option<Loss>>>) {
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_node, mut to_node) = tokio::io::split(node);
    let asked = tokio::io::copy(&mut from_client, &mut to_node);
    let answered = async {
        let mut bytes = vec![0; 16 * 1024];
        while let Ok(read @ 1..) = from_node.read(&mut bytes).await {
            let loss = loses.lock().expect("no panic").take();
            if let Some(Loss { came, held }) = loss {
                let _ = came.send(());
                let _ = held.await;
                return;
            }
            if to_client.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    };
    // Whoever ends it ends both ways.
    tokio::select! {
        _ = asked => {}
        () = answered => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_starts_or_ends_a_session_is_asked_again_where_its_node_has_not_answered() {
    let (world, a, b) = two().await;
    let started = world.start_on_b(&b, "alice").await;
    let relay = Relay::before_b(&world).await;
    world.announced("b", |b| b.peer_url = Some(relay.url.clone()));
    let ask = async |method: Method, body: &'static str| {
        // The connection is one that has been used.
        assert_eq!(a.api.get(&session("alice")).await.status, StatusCode::OK);
        relay.lose_next();
        let answer = a.api.call(method, &session("alice"), body).await;
        assert!(relay.has_lost(), "nothing was lost");
        answer
    };
    let again = ask(Method::PUT, r#"{"template": "idle"}"#).await;
    assert_eq!(again.status, StatusCode::OK, "{}", again.text());
    let again: EnsureResponse = again.json();
    assert!(!again.created && again.session.generation == started.generation);

    let stopped = ask(Method::DELETE, "").await;
    assert_eq!(stopped.status, StatusCode::OK, "{}", stopped.text());
    let report: StopReport = stopped.json();
    assert_eq!(
        (report.generation, report.state),
        (started.generation, SessionState::Stopped)
    );
    // What cannot be repeated is not.
    b.ensure("alice").await;
    let exec = format!("{}/exec", session("alice"));
    assert_eq!(a.api.get(&session("alice")).await.status, StatusCode::OK);
    relay.lose_next();
    let run = r#"{"command": ["true"]}"#;
    let problem = a.api.call(Method::POST, &exec, run).await.problem();
    assert_eq!(problem.slug(), "node-silent", "{}", problem.detail);
}

/// Whoever asked for the end of one life has not asked for the next one's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delete_that_is_asked_again_ends_no_later_generation_wherever_that_has_begun() {
    let (world, a, b) = two().await;
    let relay = Relay::before_b(&world).await;
    world.announced("b", |b| b.peer_url = Some(relay.url.clone()));
    for (id, later, name, other) in [("alice", &a, "a", "b"), ("bob", &b, "b", "a")] {
        let ended = world.start_on_b(&b, id).await;
        let (has_come, holds) = relay.hold_next();
        let path = session(id);
        let asked = a.api.call(Method::DELETE, &path, "");
        let begins = async {
            let answered = tokio::time::timeout(PATIENCE, has_come).await;
            answered.expect("in time").expect("it is answered");
            world.announced(other, |other| other.draining = true);
            let begun = later.ensure(id).await.session;
            world.announced(other, |other| other.draining = false);
            drop(holds);
            begun
        };
        let (answer, begun) = tokio::join!(asked, begins);
        assert_eq!((ended.node.as_str(), begun.node.as_str()), ("b", name));
        assert!(begun.generation > ended.generation, "{begun:?}");

        let problem = answer.problem();
        assert_eq!(problem.slug(), "node-silent", "{}", problem.detail);
        for part in [
            format!("generation {} of", ended.generation),
            format!("on node `{name}`"),
        ] {
            assert!(problem.detail.contains(&part), "{}", problem.detail);
        }
        let shown: Session = later.api.get(&session(id)).await.json();
        assert_eq!(
            (shown.generation, shown.state),
            (begun.generation, SessionState::Running)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delete_that_goes_by_the_record_ends_nothing_that_has_begun_since_it_was_looked_for() {
    let (world, holds) = (World::new(), Holds::default());
    let secret = (&world.secret, 100);
    let a = Node::join_by(&world, "a", secret, |records| holds.over(records)).await;
    let b = Node::join(&world, "b").await;
    let relay = Relay::before_b(&world).await;
    world.announced("b", |b| b.peer_url = Some(relay.url.clone()));
    let ended = world.start_on_b(&b, "alice").await;
    world.announced("a", |a| a.draining = true);

    let path = session("alice");
    let (has_come, answers) = relay.hold_next();
    let asked = a.api.call(Method::DELETE, &path, "");
    let begins = async {
        let comes = async |come| tokio::time::timeout(PATIENCE, come).await;
        let answered = comes(has_come).await;
        answered.expect("in time").expect("it is answered");
        // Which nobody hears, nor anything else of that node: its record is looked at.
        world.announced("b", |b| b.peer_url = Some(nowhere()));
        let (has_come, reads) = holds.hold_next();
        drop(answers);
        comes(has_come).await.expect("in time").expect("it is read");
        let begun = b.ensure("alice").await.session;
        let stopped = b.api.call(Method::DELETE, &path, "").await;
        assert_eq!(stopped.status, StatusCode::OK, "{}", stopped.text());
        drop(reads);
        begun
    };
    let (answer, begun) = tokio::join!(asked, begins);
    assert!(begun.generation > ended.generation, "{begun:?}");
    let problem = answer.problem();
    assert_eq!(problem.slug(), "node-silent", "{}", problem.detail);
    let told = format!("generation {} of", ended.generation);
    assert!(problem.detail.contains(&told), "{}", problem.detail);
    // Its record is there still.
    let shown: Session = b.api.get(&path).await.json();
    assert_eq!(shown.generation, begun.generation);
}
