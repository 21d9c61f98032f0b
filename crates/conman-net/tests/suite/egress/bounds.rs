//! Bounds on what one session may take of the proxy and the resolver.

use std::time::{Duration, Instant};

use conman_core::egress::EGRESS_PROXY_PORT;
use conman_net::egress::MAX_CONNECTIONS;
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::name_server::HANGS;
use super::namespace::{HOST, SOON, World, echo, serve};

/// Set in the process that the test below starts: it needs most of the descriptors.
const APART: &str = "CONMAN_NET_APART";

#[test]
fn ten_thousand_connections_of_one_session_take_no_place_of_another() {
    if std::env::var_os(APART).is_some() {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        return runtime.block_on(ten_thousand_connections());
    }
    let this =
        "suite::egress::bounds::ten_thousand_connections_of_one_session_take_no_place_of_another";
    let status = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", this, "--nocapture"])
        .env(APART, "1")
        .status();
    assert!(status.expect("it runs").success());
}

async fn ten_thousand_connections() {
    let world = World::new().await;
    let target = echo().await.to_string();
    let greedy = std::sync::Arc::new(world.session(&[&target]).await);
    let before = open_descriptors();
    let mut connecting = JoinSet::new();
    for _ in 0..10_000 {
        let greedy = std::sync::Arc::clone(&greedy);
        connecting.spawn(async move {
            // Beyond the listener's queue the kernel answers nothing.
            let connected = timeout(Duration::from_secs(3), greedy.connect(EGRESS_PROXY_PORT));
            connected.await.ok()?.ok()
        });
    }
    let connected = connecting.join_all().await;
    let connected: Vec<_> = connected.into_iter().flatten().collect();
    assert!(
        connected.len() > MAX_CONNECTIONS,
        "the places are all taken"
    );
    let accepted = open_descriptors() - before - connected.len();
    assert!(accepted <= MAX_CONNECTIONS, "{accepted} were accepted");
    let modest = world.session(&[&target]).await;
    assert_eq!(modest.tunnel(&target).await.0, 200);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("listed").count()
}

#[tokio::test]
async fn a_name_server_that_hangs_delays_only_lookups_of_its_names() {
    let world = World::new().await;
    world.names.set("files.test", HOST);
    let target = echo().await;
    let (name, network) = (format!("files.test:{}", target.port()), target.to_string());
    let hanging = format!("{HANGS}:80");
    let stuck = world.session(&[&hanging]).await;
    let other = world.session(&[&name, &network]).await;
    let began = Instant::now();
    let waiting = async {
        let requests = (0..30).map(|_| stuck.tunnel(&hanging));
        for (status, _) in timeout(SOON, join_all(requests)).await.expect("bounded") {
            assert_eq!(status, 502);
        }
        began.elapsed()
    };
    let served = async {
        let (status, _) = other.tunnel(&name).await;
        assert_eq!(status, 200);
        began.elapsed()
    };
    let (waited, served) = tokio::join!(waiting, served);
    assert!(served < waited, "{served:?} {waited:?}");
    assert!(waited < Duration::from_secs(40), "{waited:?}");
}

#[tokio::test]
async fn a_target_that_resets_ends_its_tunnel_and_nothing_else() {
    let world = World::new().await;
    let resets = serve(|stream| async move {
        // It may be reported as readable before anything has arrived.
        let _ = stream.peek(&mut [0]).await;
        let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    });
    let (resets, works) = (resets.await.to_string(), echo().await.to_string());
    let session = world.session(&[&resets, &works]).await;
    let (status, mut stream) = session.tunnel(&resets).await;
    assert_eq!(status, 200);
    stream.write_all(b"hello").await.expect("sent");
    let ended = timeout(SOON, stream.read(&mut [0])).await.expect("it ends");
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    let request = format!("GET http://{resets}/ HTTP/1.1\r\nHost: a\r\n\r\n");
    let (head, _) = session.ask(&request).await;
    assert!(head.starts_with("HTTP/1.1 502"), "{head}");
    assert_eq!(session.tunnel(&works).await.0, 200);
    let closed = format!("{HOST}:1");
    let session = world.session(&[&closed]).await;
    assert_eq!(session.tunnel(&closed).await.0, 502, "nothing listens");
}

#[tokio::test]
async fn a_client_that_sends_no_request_is_disconnected() {
    let world = World::new().await;
    let session = world.session(&["internet"]).await;
    let mut silent = session.connect(EGRESS_PROXY_PORT).await.expect("served");
    let mut slow = session.connect(EGRESS_PROXY_PORT).await.expect("served");
    let dripping = async {
        for _ in 0..60 {
            if slow.write_all(b"G").await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        panic!("a request of one byte a second is read for ever");
    };
    let mut end = [0];
    let (silent, ()) = tokio::join!(timeout(SOON, silent.read(&mut end)), dripping);
    assert!(matches!(silent.expect("it ends"), Ok(0) | Err(_)));
}
