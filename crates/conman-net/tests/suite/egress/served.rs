//! Targets that the proxy and the resolver serve.

use std::time::{Duration, Instant};

use conman_core::egress::EGRESS_PROXY_PORT;
use conman_proto::Bandwidth;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::namespace::{HOST, SOON, World, echo, serve, status};

#[tokio::test]
async fn a_tunnel_reaches_a_listed_name_and_carries_bytes_both_ways() {
    let world = World::new().await;
    world.names.set("files.test", HOST);
    let target = echo().await;
    let (name, network) = (format!("files.test:{}", target.port()), target.to_string());
    let session = world.session(&[&name, &network]).await;
    let (status, mut stream) = session.tunnel(&name).await;
    assert_eq!(status, 200);
    let sent = vec![7; 1 << 20];
    let (mut from, mut to) = stream.split();
    let mut received = vec![0; sent.len()];
    let (wrote, read) = tokio::join!(to.write_all(&sent), from.read_exact(&mut received));
    wrote.expect("sent");
    read.expect("received");
    assert_eq!(received, sent);
}

#[tokio::test]
async fn a_sessions_connections_are_counted_and_limited_in_both_directions() {
    // 1 MB a second: a megabyte takes 0.9 s after a burst of 100 KB.
    const BYTES: usize = 1_000_000;
    const LEAST: Duration = Duration::from_millis(800);
    let (rate, world) = ("8mbit".parse().ok(), World::new().await);
    let target = echo().await.to_string();
    for (inward, outward) in [(rate, None), (None, rate)] {
        let bandwidth = Bandwidth { inward, outward };
        let session = world.limited_session(&[&target], bandwidth).await;
        let (status, mut stream) = session.tunnel(&target).await;
        assert_eq!(status, 200);
        let (sent, begun) = (vec![7; BYTES], Instant::now());
        let (mut from, mut to) = stream.split();
        let mut received = vec![0; BYTES];
        let (wrote, read) = tokio::join!(to.write_all(&sent), from.read_exact(&mut received));
        wrote.expect("sent");
        read.expect("received");
        assert!(
            begun.elapsed() >= LEAST,
            "{bandwidth:?}: {:?}",
            begun.elapsed()
        );
        // The request and its answer are among them. The last bytes are counted after they were sent.
        let counted = async {
            let all =
                |(carried_in, carried_out): (u64, u64)| carried_in.min(carried_out) > BYTES as u64;
            while !all(session.traffic.carried()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, counted).await.expect("counted");
    }
}

#[tokio::test]
async fn requests_on_one_connection_may_go_to_several_targets() {
    let world = World::new().await;
    let web = |name: &'static str| {
        serve(move |mut stream| async move {
            let mut head = vec![0; 4_096];
            let read = stream.read(&mut head).await.expect("a request");
            let head = String::from_utf8_lossy(&head[..read]).into_owned();
            let body = format!("{name} {head}");
            let length = body.len();
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).await.expect("sent");
        })
    };
    let (one, two) = (web("one").await, web("two").await);
    let listed = [one.to_string(), two.to_string()];
    let session = world.session(&[&listed[0], &listed[1]]).await;
    let mut stream = session.connect(EGRESS_PROXY_PORT).await.expect("served");
    for (name, target) in [("one", one), ("two", two), ("one", one)] {
        let request = format!(
            "GET http://{target}/path?query HTTP/1.1\r\nHost: elsewhere\r\n\
             Proxy-Connection: keep-alive\r\nProxy-Authorization: secret\r\nX-Own: kept\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = Vec::new();
        let reading = async {
            while !answer.ends_with(b"\r\n\r\n")
                || !answer
                    .windows(5)
                    .any(|text| text == b"X-Own" || text == b"x-own")
            {
                let mut bytes = [0; 4_096];
                let read = stream.read(&mut bytes).await.expect("an answer");
                assert!(
                    read > 0,
                    "ended early: {}",
                    String::from_utf8_lossy(&answer)
                );
                answer.extend_from_slice(&bytes[..read]);
            }
        };
        timeout(SOON, reading).await.expect("an answer");
        let answer = String::from_utf8_lossy(&answer).to_lowercase();
        assert_eq!(status(&answer), 200);
        for part in [
            format!("{name} get /path?query http/1.1"),
            format!("host: {target}"),
        ] {
            assert!(answer.contains(&part), "{part}: {answer}");
        }
        assert!(!answer.contains("secret"), "{answer}");
    }
}

#[tokio::test]
async fn socks_reaches_what_is_listed() {
    let world = World::new().await;
    world.names.set("files.test", HOST);
    let target = echo().await;
    let (name, network) = (format!("files.test:{}", target.port()), target.to_string());
    let session = world.session(&[&name, &network]).await;
    let port = target.port().to_be_bytes();
    let by_name = [&[5, 1, 0, 3, 10][..], b"files.test", &port].concat();
    let by_address = [&[5, 1, 0, 1][..], &HOST.octets(), &port].concat();
    let other = [&[5, 1, 0, 3, 10][..], b"other.test", &port].concat();
    let by_datagram = [&[5, 3, 0, 1][..], &HOST.octets(), &port].concat();
    for (request, reply) in [(by_name, 0), (by_address, 0), (other, 2), (by_datagram, 7)] {
        let mut stream = session.connect(EGRESS_PROXY_PORT).await.expect("served");
        stream.write_all(&[5, 2, 2, 0]).await.expect("sent");
        let mut method = [0; 2];
        stream.read_exact(&mut method).await.expect("an answer");
        assert_eq!(method, [5, 0]);
        stream.write_all(&request).await.expect("sent");
        let mut answer = [0; 10];
        stream.read_exact(&mut answer).await.expect("an answer");
        assert_eq!(answer[..2], [5, reply], "{request:?}");
        if reply == 0 {
            stream.write_all(b"hello").await.expect("sent");
            let mut echoed = [0; 5];
            stream.read_exact(&mut echoed).await.expect("echoed");
            assert_eq!(&echoed, b"hello");
        }
    }
}

#[tokio::test]
async fn a_namespace_is_served_again_by_the_next_daemon() {
    let world = World::new().await;
    let target = echo().await.to_string();
    let mut session = world.session(&[&target]).await;
    let (_, mut open) = session.tunnel(&target).await;
    session.guard = None;
    let mut end = Vec::new();
    let ended = timeout(SOON, open.read_to_end(&mut end)).await;
    assert!(ended.is_ok(), "the connection outlives its guard");
    let closed = async {
        while session.connect(EGRESS_PROXY_PORT).await.is_ok() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, closed).await.expect("the sockets are closed");
    world.serve(&mut session, &[&target]).await;
    assert_eq!(session.tunnel(&target).await.0, 200);
}

#[tokio::test]
async fn the_resolver_answers_for_listed_names_only() {
    use hickory_resolver::proto::op::{Message, Query, ResponseCode};
    use hickory_resolver::proto::rr::{Name, RData, RecordType};
    let world = World::new().await;
    world.names.set("files.test", HOST);
    world.names.set("other.test", HOST);
    world
        .names
        .set("node.test", std::net::Ipv4Addr::new(127, 0, 0, 3));
    let session = world.session(&["*.test:80", "files.test:80"]).await;
    // The hosts file of most machines has the machine's name; then its address is not to decide.
    let own = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("read");
    let own = own.trim().to_lowercase();
    let (listed, own_address) = (format!("{HOST}:80"), "127.0.0.1:80");
    let own_name = format!("{own}:80");
    let patterns = [
        "files.test:80",
        &listed,
        "node.test:80",
        own_address,
        &own_name,
    ];
    let narrow = world.session(&patterns).await;
    let socket = narrow.namespace.udp_socket();
    let socket = tokio::net::UdpSocket::from_std(socket).expect("non-blocking");
    socket.connect("127.0.0.1:53").await.expect("a target");
    for (name, code, addresses) in [
        ("files.test.", ResponseCode::NoError, 1),
        ("FILES.test.", ResponseCode::NoError, 1),
        ("other.test.", ResponseCode::NXDomain, 0),
        ("node.test.", ResponseCode::NXDomain, 0),
        (&format!("{own}."), ResponseCode::NXDomain, 0),
    ] {
        let mut query = Message::query();
        let name = Name::from_ascii(name).expect("a name");
        query.add_query(Query::query(name, RecordType::A));
        let bytes = query.to_vec().expect("small");
        socket.send(&bytes).await.expect("sent");
        let mut answer = [0; 512];
        let read = timeout(SOON, socket.recv(&mut answer)).await;
        let read = read.expect("an answer").expect("received");
        let by_datagram = Message::from_vec(&answer[..read]).expect("an answer");
        let mut stream = narrow.connect(53).await.expect("served");
        let length = u16::try_from(bytes.len()).expect("small");
        stream.write_u16(length).await.expect("sent");
        stream.write_all(&bytes).await.expect("sent");
        let length = stream.read_u16().await.expect("an answer");
        let mut answer = vec![0; length.into()];
        stream.read_exact(&mut answer).await.expect("whole");
        let by_stream = Message::from_vec(&answer).expect("an answer");
        for answer in [by_datagram, by_stream] {
            assert_eq!(answer.metadata.id, query.metadata.id);
            assert_eq!(answer.metadata.response_code, code);
            assert_eq!(answer.answers.len(), addresses);
            for record in &answer.answers {
                assert_eq!(record.data, RData::from(std::net::IpAddr::from(HOST)));
            }
        }
    }
    drop(session);
}

#[tokio::test]
async fn a_client_that_ends_its_sending_side_gets_its_answer() {
    let target = serve(|mut stream| async move {
        let mut request = [0; 1_024];
        let _ = stream.read(&mut request).await;
        // The proxy has seen the end of the client's input by then.
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            .await;
    })
    .await;
    let world = World::new().await;
    let session = world.session(&[&target.to_string()]).await;
    let mut client = session.connect(3128).await.expect("served");
    let request = format!("GET http://{target}/ HTTP/1.1\r\nHost: {target}\r\n\r\n");
    client.write_all(request.as_bytes()).await.expect("sent");
    client.shutdown().await.expect("open");
    let mut answer = String::new();
    let read = timeout(SOON, client.read_to_string(&mut answer)).await;
    read.expect("an answer").expect("whole");
    assert!(answer.ends_with("hello"), "{answer}");
}

/// 40 tunnels whose session does not read, while the target sends without end.
#[tokio::test]
async fn tunnels_that_nobody_reads_hold_a_bounded_amount_of_the_hosts_memory() {
    const MOST: u64 = 64 << 20;
    let target =
        serve(|mut stream| async move { while stream.write_all(&[0; 65_536]).await.is_ok() {} })
            .await;
    let world = World::new().await;
    let session = world.session(&[&target.to_string()]).await;
    let mut tunnels = Vec::new();
    for _ in 0..40 {
        let (status, mut stream) = session.tunnel(&target.to_string()).await;
        assert_eq!(status, 200);
        // So fast for a moment that the kernel gives the connection much room.
        let mut taken = vec![0; 4 << 20];
        stream.read_exact(&mut taken).await.expect("bytes");
        tunnels.push(stream);
    }
    let mut held = received(target.port());
    loop {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        let now = received(target.port());
        if now == held {
            break;
        }
        held = now;
    }
    assert!((1..MOST).contains(&held), "{} MB", held >> 20);
}

/// Bytes that the proxy's sockets towards a port hold of what has arrived.
fn received(port: u16) -> u64 {
    let filter = format!("dport = :{port}");
    let found = std::process::Command::new("ss")
        .args(["-Htmn", &filter])
        .output()
        .expect("ss runs");
    let text = String::from_utf8_lossy(&found.stdout).into_owned();
    let held = text.split("skmem:(r").skip(1).filter_map(|row| {
        let end = row.find(',')?;
        row[..end].parse::<u64>().ok()
    });
    held.sum()
}
