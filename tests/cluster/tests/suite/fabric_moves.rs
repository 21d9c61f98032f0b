//! Sessions that move: they are found where they are, and other nodes write nothing for it.

use std::io::Read as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use conman_cluster::{Cluster, people};
use conman_e2e::eventually;

use super::fabric::{PATIENCE, Placed, fleet, place, place_as};

/// Types of records.
const A: u16 = 1;
const AAAA: u16 = 28;

/// Sends a query to a name server, and prints the answer.
const QUERY: &str = "
import ipaddress, socket, struct, sys
server, name, kind = sys.argv[1], sys.argv[2], int(sys.argv[3])
labels = b''.join(bytes([len(label)]) + label.encode() for label in name.split('.')) + bytes(1)
query = struct.pack('>6H', 7, 0x100, 1, 0, 0, 0) + labels + struct.pack('>2H', kind, 1)
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(30)
client.sendto(query, (server, 53))
answer = client.recv(4096)
code, count = answer[3] & 15, struct.unpack('>H', answer[6:8])[0]
rest = answer[len(query):]
for _ in range(count):
    rest = rest[2:] if rest[0] >= 0xc0 else rest[len(labels):]
    ttl, length = struct.unpack('>IH', rest[4:10])
    print(ttl, ipaddress.ip_address(rest[10:10 + length]))
    rest = rest[10 + length:]
if code: print('error', code)
";
const NO_SUCH_NAME: &str = "error 3";

/// How long an answer may be wrong after a session has moved.
const MOVED: Duration = Duration::from_secs(1);

/// What the resolver of a session's resolv.conf answers for a name: `TTL ADDRESS` for each address, or the code of the
/// error.
fn resolves(session: &Placed, name: &str, kind: u16) -> Vec<String> {
    let file = format!("/proc/{}/root/etc/resolv.conf", session.pid);
    let text = std::fs::read_to_string(file).expect("readable");
    let server = text.trim().strip_prefix("nameserver ").expect("one server");
    let kind = kind.to_string();
    let output = session.run(&["python3", "-c", QUERY, server, name, &kind]);
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().map(str::to_owned).collect()
}

/// Prints what changes on a node.
struct Monitor(Child);

impl Monitor {
    /// Of routes and of rules.
    async fn both(cluster: &Cluster, node: &str) -> [Self; 2] {
        let routes = Self::start(cluster, node, "exec ip -o monitor route").await;
        [routes, Self::start(cluster, node, "exec nft monitor").await]
    }

    async fn start(cluster: &Cluster, node: &str, script: &str) -> Self {
        let words = ["sh", "-c", script].map(str::to_owned);
        let command = people::command(cluster.layout(), node, &words);
        let child = command.expect("a host").stdout(Stdio::piped()).spawn();
        let child = child.expect("it runs");
        // Its socket is listed with the groups that it has joined.
        let (path, id) = (
            format!("/proc/{}/net/netlink", child.id()),
            child.id().to_string(),
        );
        eventually("it listens", PATIENCE, async || {
            let listed = std::fs::read_to_string(&path).unwrap_or_default();
            listed.lines().any(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                matches!(&words[..], [_, _, owner, groups, ..] if *owner == id && *groups != "00000000")
            })
        })
        .await;
        Self(child)
    }

    fn stop(mut self) -> String {
        let mut text = String::new();
        self.0.kill().expect("it lives");
        let stdout = self.0.stdout.as_mut().expect("piped");
        stdout.read_to_string(&mut text).expect("readable");
        text
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn sessions_find_each_other_by_name_where_they_are() {
    let Some(cluster) = fleet("host-gw", 2, None).await else {
        return;
    };
    let one = place(&cluster, "n1", "red", &["red"]).await;
    let other = place_as(&cluster, "moves", "n1", "red", &["red"]).await;
    let stranger = place(&cluster, "n2", "blue", &["blue"]).await;
    let answers = |to: &Placed| -> [Vec<String>; 2] {
        [0, 1].map(|family| vec![format!("0 {}", to.addresses[family])])
    };
    let id = "moves.session.internal";
    eventually("it is found", PATIENCE, async || {
        resolves(&one, id, A) == answers(&other)[0]
    })
    .await;
    assert_eq!(resolves(&one, id, AAAA), answers(&other)[1]);
    let mut of_name = resolves(&one, "web.red.session.internal", A);
    of_name.sort();
    let mut both = [&one, &other].map(|to| answers(to)[0].concat());
    both.sort();
    assert_eq!(of_name, both);
    for name in [id, "web.red.session.internal", "nobody.session.internal"] {
        assert_eq!(resolves(&stranger, name, A), [NO_SUCH_NAME], "{name}");
    }
    // It moves: no answer is wrong for longer than a second.
    let api = cluster.nodes()[0].api();
    let stopped = api.delete("/v1/sessions/moves").await;
    assert!(stopped.status.is_success(), "{}", stopped.text());
    let moved = place_as(&cluster, "moves", "n2", "red", &["red"]).await;
    assert_ne!(moved.addresses, other.addresses);
    let since = Instant::now();
    loop {
        let is_late = since.elapsed() > MOVED;
        let answer = resolves(&one, id, A);
        if answer == answers(&moved)[0] {
            break;
        }
        assert!(!is_late, "{answer:?} is wrong for more than a second");
    }
    eventually("it is reached there", PATIENCE, async || {
        one.reaches(moved.addresses[0])
    })
    .await;
    assert_eq!(
        resolves(&moved, "red-n1.session.internal", A),
        answers(&one)[0]
    );
    // Its node is lost, and with it the names.
    cluster.nodes()[1].lose().expect("lost");
    eventually("it is not found", PATIENCE, async || {
        resolves(&one, id, A) == [NO_SUCH_NAME]
    })
    .await;
}

#[tokio::test]
async fn sessions_that_move_change_no_route_and_no_rule_of_other_nodes() {
    let Some(cluster) = fleet("host-gw", 3, None).await else {
        return;
    };
    // Each node has its part from the first session on.
    let one = place(&cluster, "n3", "red", &["red"]).await;
    for node in ["n1", "n2"] {
        place(&cluster, node, "red", &["red"]).await;
    }
    let api = cluster.nodes()[0].api();
    let ids = ["a", "b", "c", "d"];
    let mut sessions = Vec::new();
    for id in ids {
        sessions.push(place_as(&cluster, id, "n1", "red", &["red"]).await);
    }
    for session in &sessions {
        let address = session.addresses[0];
        eventually("it is reached", PATIENCE, async || one.reaches(address)).await;
    }
    let monitors = Monitor::both(&cluster, "n3").await;
    for id in ids {
        let stopped = api.delete(&format!("/v1/sessions/{id}")).await;
        assert!(stopped.status.is_success(), "{}", stopped.text());
        let moved = place_as(&cluster, id, "n2", "red", &["red"]).await;
        let address = moved.addresses[0];
        eventually("it is reached there", PATIENCE, async || {
            one.reaches(address)
        })
        .await;
    }
    assert_eq!(monitors.map(Monitor::stop), ["", ""]);
}
