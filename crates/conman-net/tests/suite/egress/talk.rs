//! Sessions that find others by name, and everything else by the node's name servers.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use conman_core::egress::{EGRESS_DNS_PORT, EGRESS_PROXY_PORT};
use conman_core::{TalkName, TalkingSession};
use conman_linux::{NetnsSockets, PidFd};
use conman_net::egress::{Egress, EgressGuard, EgressOptions, EgressService, TalkDirectory};
use conman_proto::Bandwidth;
use conman_traffic::Traffic;
use futures_util::future::BoxFuture;
use hickory_resolver::proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpSocket;
use tokio::time::{sleep, timeout};

use super::name_server::NameServer;
use super::namespace::{HOST, Namespace, SOON};

const ALICE: &str = "alice.session.internal";

/// Sessions by name; without them the registry does not answer.
#[derive(Debug, Default)]
struct Registry(Mutex<Option<HashMap<TalkName, Vec<TalkingSession>>>>);

impl Registry {
    fn set(&self, name: &str, groups: &[&str], addresses: &[IpAddr]) {
        let name = TalkName::parse(name).expect("a name");
        let session = TalkingSession {
            groups: groups.iter().map(|&group| group.to_owned()).collect(),
            name: Some("db".to_owned()),
            addresses: addresses.to_vec(),
        };
        let mut sessions = self.0.lock().expect("whole");
        sessions.get_or_insert_default().insert(name, vec![session]);
    }
}

impl TalkDirectory for Registry {
    fn find(&self, name: TalkName) -> BoxFuture<'static, Result<Vec<TalkingSession>, String>> {
        let sessions = self.0.lock().expect("whole");
        let found = match &*sessions {
            Some(sessions) => Ok(sessions.get(&name).cloned().unwrap_or_default()),
            None => Err("etcd does not answer".to_owned()),
        };
        Box::pin(async move { found })
    }
}

/// A session in the group `red`.
struct World {
    registry: Arc<Registry>,
    names: NameServer,
    sockets: Arc<NetnsSockets>,
    namespace: Namespace,
    _guard: EgressGuard,
    _egress: Egress,
}

impl World {
    async fn new() -> Self {
        let (registry, names) = (Arc::<Registry>::default(), NameServer::start().await);
        let options = EgressOptions {
            dns: vec![names.address],
            talk: Some(Arc::clone(&registry) as _),
            ..EgressOptions::default()
        };
        let egress = Egress::start(options).expect("threads");
        let namespace = Namespace::new();
        let groups = vec!["red".to_owned()];
        let service = EgressService::TalkNames { groups };
        let traffic = Arc::new(Traffic::new(&Bandwidth::default()));
        let guard = egress.serve(namespace.process(), None, service, traffic, Box::new(drop));
        let world = Self {
            registry,
            names,
            sockets: Arc::new(NetnsSockets::start().expect("threads")),
            namespace,
            _guard: guard,
            _egress: egress,
        };
        let served = async {
            while world.connects(EGRESS_DNS_PORT).await.is_none() {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, served).await.expect("it is served");
        world
    }

    async fn connects(&self, port: u16) -> Option<tokio::net::TcpStream> {
        let process: Arc<PidFd> = self.namespace.process();
        let socket = self.sockets.tcp_socket(process, false).await.ok()?;
        let inside = (Ipv4Addr::LOCALHOST, port).into();
        TcpSocket::from_std_stream(socket)
            .connect(inside)
            .await
            .ok()
    }

    /// The answer by UDP.
    async fn resolve(&self, name: &str, kind: RecordType) -> Message {
        let socket = tokio::net::UdpSocket::from_std(self.namespace.udp_socket());
        let socket = socket.expect("a socket");
        let server = (Ipv4Addr::LOCALHOST, EGRESS_DNS_PORT);
        socket
            .send_to(&query(name, kind), server)
            .await
            .expect("sent");
        let mut bytes = [0; 512];
        let length = timeout(SOON, socket.recv(&mut bytes))
            .await
            .expect("in time");
        Message::from_vec(&bytes[..length.expect("received")]).expect("an answer")
    }

    async fn resolve_by_tcp(&self, name: &str) -> Message {
        let mut stream = self.connects(EGRESS_DNS_PORT).await.expect("served");
        let query = query(name, RecordType::A);
        let length = u16::try_from(query.len()).expect("small");
        let framed = [&length.to_be_bytes()[..], &query].concat();
        stream.write_all(&framed).await.expect("sent");
        let length = timeout(SOON, stream.read_u16()).await.expect("in time");
        let mut answer = vec![0; length.expect("an answer").into()];
        stream.read_exact(&mut answer).await.expect("an answer");
        Message::from_vec(&answer).expect("an answer")
    }
}

fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let mut query = Message::new(7, MessageType::Query, OpCode::Query);
    query.add_query(Query::query(Name::from_ascii(name).expect("a name"), kind));
    query.to_vec().expect("small")
}

fn addresses(answer: &Message) -> Vec<IpAddr> {
    let data = answer.answers.iter().map(|record| record.data.ip_addr());
    data.map(|address| address.expect("an address")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_finds_those_that_it_may_talk_to_and_no_other_names() {
    let world = World::new().await;
    let (v4, v6): (IpAddr, IpAddr) = ([10, 96, 1, 7].into(), "fd00:96::107".parse().expect("one"));
    world.registry.set(ALICE, &["blue", "red"], &[v4, v6]);
    world.registry.set("bob.session.internal", &["blue"], &[v4]);
    world
        .registry
        .set("db.red.session.internal", &["red"], &[v4]);
    world
        .registry
        .set("db.blue.session.internal", &["blue", "red"], &[v4]);
    let answer = world
        .resolve("Alice.Session.Internal.", RecordType::A)
        .await;
    assert_eq!(addresses(&answer), [v4]);
    assert!(
        answer.answers.iter().all(|record| record.ttl == 0),
        "{answer}"
    );
    assert_eq!(
        addresses(&world.resolve(ALICE, RecordType::AAAA).await),
        [v6]
    );
    assert_eq!(addresses(&world.resolve_by_tcp(ALICE).await), [v4]);
    let answer = world
        .resolve("db.red.session.internal", RecordType::A)
        .await;
    assert_eq!(addresses(&answer), [v4]);
    for name in ["bob", "carol", "db.blue", "web.red", "a.b.c"] {
        let answer = world
            .resolve(&format!("{name}.session.internal"), RecordType::A)
            .await;
        assert_eq!(
            answer.metadata.response_code,
            ResponseCode::NXDomain,
            "{name}"
        );
    }
    let proxy = world.connects(EGRESS_PROXY_PORT).await;
    assert!(proxy.is_none(), "there is no proxy");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_moves_is_found_at_its_new_address() {
    let world = World::new().await;
    let [first, second]: [IpAddr; 2] = [[10, 96, 1, 7].into(), [10, 96, 2, 7].into()];
    world.registry.set(ALICE, &["red"], &[first]);
    assert_eq!(
        addresses(&world.resolve(ALICE, RecordType::A).await),
        [first]
    );
    world.registry.set(ALICE, &["red"], &[second]);
    let moved = async {
        while addresses(&world.resolve(ALICE, RecordType::A).await) != [second] {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SOON, moved).await.expect("it is found");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_names_are_those_of_the_name_servers_and_a_silent_registry_is_an_error() {
    let world = World::new().await;
    world.names.set("host.test", HOST);
    assert_eq!(
        addresses(&world.resolve("host.test", RecordType::A).await),
        [IpAddr::from(HOST)]
    );
    let answer = world.resolve("none.test", RecordType::TXT).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::NXDomain);
    let answer = world.resolve(ALICE, RecordType::A).await;
    assert_eq!(answer.metadata.response_code, ResponseCode::ServFail);
}
