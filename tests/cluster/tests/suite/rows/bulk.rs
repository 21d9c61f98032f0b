//! Much that passes through two nodes: at the pace of who reads it, and without a place in either
//! daemon's memory.

use std::future::Future;
use std::io::Write as _;
use std::time::Duration;

use conman_cluster::Cluster;
use conman_e2e::{RawClient, eventually, eventually_some, peak_resident_bytes, resident_bytes};
use futures_util::StreamExt as _;
use http::{Method, StatusCode};
use serde_json::json;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, client_async};

use super::fleet::{Fleet, PATIENCE};

const MIB: usize = 1 << 20;
/// Of a download, and of what a WebSocket brings once it is read.
const TRANSFER: usize = 300;
const RESUMED: usize = 64;
/// Most by which a daemon may grow: nothing of it depends on how much there is.
const GROWTH_BYTES: u64 = 32 << 20;
/// What all sockets on the way hold together, at most: four of each kind, and those of the machine's
/// own way into the cluster.
const ON_THE_WAY: usize = 96;
/// What stands still for so long does not go on.
const STILL: Duration = Duration::from_secs(4);
/// A slow reader's pause between two pieces, and how much of the download it takes.
const SLOW_PAUSE: Duration = Duration::from_millis(50);
const SLOW_PIECES: usize = 60;
/// How long another reader takes nothing: longer than it takes to notice that a node is gone.
const PAUSE: Duration = Duration::from_secs(20);
/// What that reader takes afterwards: as much as can be on the way when it resumes.
const AFTER_PAUSE: usize = ON_THE_WAY;

/// Answers a request with numbers, one a line, as many bytes as there are MiB of; a WebSocket with
/// binary messages of 16 KiB without an end, and the log with how many MiB of these went out.
const PROGRAM: &str = r#"
cat > /bin/answer <<'ANSWER'
while read -r line; do
    line=${line%?}
    [ -n "$line" ] || break
    case $line in
        [Ss]ec-[Ww]eb[Ss]ocket-[Kk]ey:*) key=${line#*: } ;;
    esac
done
if [ -z "$key" ]; then
    printf 'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n' $((MIB * 1048576))
    seq 1 100000000 | head -c $((MIB * 1048576))
    exit
fi
accept=$(printf '%s' "${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11" | sha1sum | cut -c -40 |
    xxd -r -p | base64)
printf 'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n'
printf 'Sec-WebSocket-Accept: %s\r\n\r\n' "$accept"
count=0
while cat /tmp/mib; do
    count=$((count + 1))
    echo "sent $count" >&2
done
ANSWER
seq 100000 999999 | head -c 16384 > /tmp/payload
printf '\202\176\100\000' | cat - /tmp/payload > /tmp/message
for _ in $(seq 64); do cat /tmp/message; done > /tmp/mib
exec nc -ll -p 8080 -e sh /bin/answer
"#;

/// A fleet with the program on its first node; and of each daemon what it has now.
async fn serving() -> Option<(Fleet, [(i32, u64); 2])> {
    let fleet = Fleet::shared(Cluster::builder().nodes(2)).await?;
    let body = json!({
        "template": "idle",
        "command": ["sh", "-c", PROGRAM],
        "env": {"MIB": TRANSFER.to_string()},
        "port": 8080,
    });
    let path = "/v1/sessions/bulk?node_label=host%3Dn1";
    eventually_some("it runs", PATIENCE, async || {
        let answer = fleet.ask(0, Method::PUT, path, Some(&body)).await?;
        assert_ne!(answer.status, StatusCode::BAD_REQUEST, "{}", answer.text());
        answer.status.is_success().then_some(())
    })
    .await;
    // What is made once is made before the first measurement.
    let mut warm = download(&fleet).await;
    warm.read(MIB).await;
    let daemons = [0, 1].map(|node| {
        let pid = fleet.node(node).daemon_pid().expect("it runs");
        (pid, resident_bytes(pid))
    });
    Some((fleet, daemons))
}

/// A download through the second node, of which the head was read.
async fn download(fleet: &Fleet) -> RawClient {
    let mut client = RawClient::connect(fleet.node(1).sessions_address()).await;
    client
        .send("GET /s/bulk/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        .await;
    let head = client.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    client
}

/// What work comes to, during which neither daemon grows.
async fn at_constant_memory<T>(daemons: [(i32, u64); 2], work: impl Future<Output = T>) -> T {
    let [(owner, owner_before), (entry, entry_before)] = daemons;
    let both = peak_resident_bytes(owner, peak_resident_bytes(entry, work));
    let ((done, entry_peak), owner_peak) = both.await;
    for (node, before, peak) in [
        ("n1", owner_before, owner_peak),
        ("n2", entry_before, entry_peak),
    ] {
        assert!(
            peak < before + GROWTH_BYTES,
            "the daemon of {node} grew from {before} to {peak} bytes"
        );
    }
    done
}

/// The numbers as the program writes them.
struct Numbers {
    next: u64,
    ahead: Vec<u8>,
}

impl Numbers {
    fn take(&mut self, count: usize) -> Vec<u8> {
        while self.ahead.len() < count {
            writeln!(self.ahead, "{}", self.next).expect("memory takes it");
            self.next += 1;
        }
        let rest = self.ahead.split_off(count);
        std::mem::replace(&mut self.ahead, rest)
    }
}

/// Panics unless the piece is the expected one: a connection that was cut, or the first wrong byte.
fn same(piece: &[u8], expected: &[u8], what: &str) {
    if piece == expected {
        return;
    }
    let right = piece
        .iter()
        .zip(expected)
        .take_while(|(is, should)| is == should);
    let right = right.count();
    let end = piece.len();
    assert!(right == end, "{what}: byte {right} of {end} is a wrong one");
    assert!(end == expected.len(), "{what}: cut after {end} bytes");
}

fn numbers() -> Numbers {
    let ahead = Vec::new();
    Numbers { next: 1, ahead }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: takes all of a machine; conman-proxy `streaming::`"]
async fn long_downloads_through_another_node_are_whole_and_leave_no_trace_in_either_daemon() {
    let Some((fleet, daemons)) = serving().await else {
        return;
    };
    let whole = async {
        let (mut client, mut expected) = (download(&fleet).await, numbers());
        for number in 0..TRANSFER {
            let piece = client.read(MIB).await;
            same(&piece, &expected.take(MIB), &format!("MiB {number}"));
        }
    };
    let slow = async {
        let (mut client, mut expected) = (download(&fleet).await, numbers());
        let begun = Instant::now();
        for number in 0..SLOW_PIECES {
            sleep(SLOW_PAUSE).await;
            let piece = client.read(MIB / 4).await;
            let what = format!("piece {number}, after {:?}", begun.elapsed());
            same(&piece, &expected.take(MIB / 4), &what);
        }
    };
    let paused = async {
        let (mut client, mut expected) = (download(&fleet).await, numbers());
        sleep(PAUSE).await;
        for number in 0..AFTER_PAUSE {
            let piece = client.read(MIB).await;
            let what = format!("MiB {number} after the pause");
            same(&piece, &expected.take(MIB), &what);
        }
    };
    // And one that asks for everything and reads nothing, all the while.
    let mut unread = download(&fleet).await;
    let work = async { tokio::join!(whole, slow, paused) };
    let done = timeout(PATIENCE * 2, at_constant_memory(daemons, work)).await;
    done.expect("in time");
    let first = unread.read(MIB).await;
    same(&first, &numbers().take(MIB), "the first MiB");
}

/// A WebSocket through the second node.
async fn socket(fleet: &Fleet) -> WebSocketStream<TcpStream> {
    let through = fleet.node(1).sessions_address();
    let stream = TcpStream::connect(through).await.expect("it listens");
    let url = format!("ws://{through}/s/bulk/");
    let opened = timeout(PATIENCE, client_async(url, stream)).await;
    let opened = opened.expect("in time");
    opened.expect("opened").0
}

/// How many MiB the program has sent.
async fn sent(fleet: &Fleet) -> usize {
    let path = "/v1/sessions/bulk/logs?tail=1";
    let answer = fleet.node(0).api().get(path).await;
    let text = answer.text();
    let count = text.trim().strip_prefix("sent ");
    count.map_or(0, |count| count.parse().expect("a number"))
}

/// Waits until the program sends no more: how much it has sent, of which so much was read.
async fn stands_still(fleet: &Fleet, read: usize) -> usize {
    let (mut last, mut since) = (0, Instant::now());
    eventually("nobody takes more", PATIENCE, async || {
        let now = sent(fleet).await;
        assert!(now < read + ON_THE_WAY, "{now} MiB, and {read} were read");
        if now != last {
            (last, since) = (now, Instant::now());
        }
        last > 0 && since.elapsed() > STILL
    })
    .await;
    last
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_waits_for_a_reader_of_its_websocket_behind_another_node_and_both_stay_small() {
    let Some((fleet, daemons)) = serving().await else {
        return;
    };
    let mut socket = socket(&fleet).await;
    let payload: String = (100_000..)
        .map(|number| format!("{number}\n"))
        .take(2_341)
        .collect();
    let work = async {
        let before = stands_still(&fleet, 0).await;
        let mut left = RESUMED * MIB;
        while left > 0 {
            let message = timeout(PATIENCE, socket.next()).await.expect("in time");
            let Some(Ok(Message::Binary(bytes))) = message else {
                panic!("{message:?} with {left} bytes to come");
            };
            assert_eq!(bytes.len(), 16_384);
            assert!(bytes[..] == payload.as_bytes()[..16_384], "another message");
            left = left.saturating_sub(bytes.len());
        }
        // Not read again: it waits again, behind what was taken.
        let after = stands_still(&fleet, RESUMED).await;
        assert!(after >= RESUMED, "{after}, after {before}");
    };
    at_constant_memory(daemons, work).await;
}
