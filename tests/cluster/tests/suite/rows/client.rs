//! Somebody who is connected to a session through one node, which is seldom the session's.
//!
//! Whatever befalls the session's node, a client waits at worst: nothing refuses it, and nothing that
//! it is told is of an older generation than what it was told before.

use std::net::SocketAddr;

use conman_cluster::overlap::{Line, visit};
use conman_e2e::Api;
use futures_util::StreamExt as _;
use http::{Method, StatusCode};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_tungstenite::WebSocketStream;

use super::fleet::{Fleet, PATIENCE};

pub(crate) struct Client {
    through: SocketAddr,
    sessions: Api,
    id: String,
    socket: WebSocketStream<TcpStream>,
    /// The newest generation that has answered.
    newest: u64,
}

/// A request that is under way.
pub(crate) struct Asked(JoinHandle<Line>);

impl Client {
    /// Opens a WebSocket to a session that runs, through a node, and asks by HTTP as well.
    pub(crate) async fn connect(fleet: &Fleet, node: usize, id: &str) -> Self {
        let through = fleet.node(node).sessions_address();
        let (socket, line) = open(through, id).await;
        let mut client = Self {
            through,
            sessions: fleet.node(node).sessions(),
            id: id.to_owned(),
            socket,
            newest: line.generation,
        };
        let same = client.ask();
        assert_eq!(client.answered(same).await, line.generation);
        client
    }

    /// Asks by HTTP, which may take as long as the session's node is away.
    pub(crate) fn ask(&self) -> Asked {
        let (api, path) = (self.sessions.clone(), format!("/s/{}/", self.id));
        Asked(tokio::spawn(async move {
            let asked = timeout(PATIENCE, api.try_send(Method::GET, &path, None)).await;
            let answer = asked.expect("an answer, however late").expect("an answer");
            assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
            serde_json::from_slice(&answer.body).expect("a greeting")
        }))
    }

    /// The same, and again while its node does not answer: a request that was on its way when the node
    /// fell silent may have arrived there, and one to a node that is cut off from this one fails in time.
    pub(crate) fn ask_until_known(&self) -> Asked {
        let (api, path) = (self.sessions.clone(), format!("/s/{}/", self.id));
        Asked(tokio::spawn(async move {
            let asked = async {
                loop {
                    let answer = api.try_send(Method::GET, &path, None).await;
                    let answer = answer.expect("an answer");
                    if answer.status == StatusCode::OK {
                        return serde_json::from_slice(&answer.body).expect("a greeting");
                    }
                    let problem = answer.problem();
                    let is_known = ["node-silent", "node-unreachable"].contains(&problem.slug());
                    assert!(is_known, "{}", answer.text());
                }
            };
            let asked = timeout(PATIENCE, asked).await;
            asked.expect("an answer, however late")
        }))
    }

    /// The generation that has answered.
    pub(crate) async fn answered(&mut self, asked: Asked) -> u64 {
        let line = asked.0.await.expect("it was answered");
        self.told(&line)
    }

    /// Waits until the WebSocket ends, which says nothing more before, and opens the next one: the
    /// generation that greets.
    pub(crate) async fn comes_back(&mut self) -> u64 {
        let ends = async {
            while let Some(Ok(message)) = self.socket.next().await {
                assert!(!message.is_text(), "a word of the old one: {message}");
                if message.is_close() {
                    break;
                }
            }
        };
        timeout(PATIENCE, ends).await.expect("it ends");
        let (socket, line) = open(self.through, &self.id).await;
        self.socket = socket;
        self.told(&line)
    }

    fn told(&mut self, line: &Line) -> u64 {
        assert_eq!(line.session, self.id);
        assert!(
            line.generation >= self.newest,
            "generation {} answers after {}",
            line.generation,
            self.newest
        );
        self.newest = line.generation;
        line.generation
    }
}

impl Asked {
    pub(crate) fn is_answered(&self) -> bool {
        self.0.is_finished()
    }
}

async fn open(through: SocketAddr, id: &str) -> (WebSocketStream<TcpStream>, Line) {
    let opened = timeout(PATIENCE, visit(through, id)).await;
    let opened = opened.unwrap_or_else(|_| panic!("{id} does not greet"));
    opened.unwrap_or_else(|error| panic!("{id} refuses a WebSocket: {error:#}"))
}
