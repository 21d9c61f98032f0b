//! Targets that the proxy and the resolver refuse.

use std::net::{IpAddr, Ipv4Addr};

use super::namespace::{HOST, World, echo, serve, status};

#[tokio::test]
async fn what_is_not_listed_is_refused_with_the_remedy() {
    let world = World::new().await;
    world.names.set("files.test", HOST);
    let target = echo().await;
    let port = target.port();
    let listed = format!("files.test:{port}");
    let session = world.session(&[&listed]).await;
    for other in [
        "other.test:443".to_owned(),
        "files.test:1".to_owned(),
        format!("files.test.:{}", port.wrapping_add(1).max(1)),
        target.to_string(),
        "198.35.26.96:443".to_owned(),
    ] {
        assert_eq!(session.tunnel(&other).await.0, 403, "{other}");
    }
    // Listed, but the name's address is the host's loopback.
    assert_eq!(session.tunnel(&listed).await.0, 403);
    // Again, which is not reported again.
    assert_eq!(session.tunnel("other.test:443").await.0, 403);
    let refusals = session.refusals.lock().expect("whole").clone();
    assert_eq!(refusals.len(), 6, "one for each target: {refusals:?}");
    assert!(refusals[0].contains("other.test:443"), "{refusals:?}");
    assert!(
        refusals[0].contains("`egress` of the template"),
        "{refusals:?}"
    );
}

#[tokio::test]
async fn metadata_and_the_host_are_out_of_reach_however_they_are_written() {
    let world = World::new().await;
    let metadata = IpAddr::from(Ipv4Addr::new(169, 254, 169, 254));
    world.names.set("metadata.test", metadata);
    world.names.set("loopback.test", HOST);
    let session = world
        .session(&["internet", "0.0.0.0/0:80", "[::/0]:80"])
        .await;
    for host in [
        "169.254.169.254",
        "metadata.test",
        "metadata.test.",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[::169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::]",
        "[fd00:ec2::254]",
        "2852039166",
        "0xa9fea9fe",
        "0xa9.254.169.254",
        "0251.0376.0251.0376",
        "169.254.43518",
        "127.0.0.1",
        "localhost",
        "loopback.test",
        "[::1]",
        "0.0.0.0",
        "0",
    ] {
        let (status, _) = session.tunnel(&format!("{host}:80")).await;
        assert!([400, 403, 502].contains(&status), "{host}: {status}");
        let request = format!("GET http://{host}/ HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let (head, _) = session.ask(&request).await;
        assert!(
            [400, 403, 502].contains(&self::status(&head)),
            "{host}: {head}"
        );
        assert!(
            !head.contains("Connection refused"),
            "{host} was tried: {head}"
        );
    }
}

#[tokio::test]
async fn a_name_that_is_bound_to_another_address_is_checked_again() {
    let world = World::new().await;
    let target = echo().await;
    let (name, network) = (
        format!("rebound.test:{}", target.port()),
        target.to_string(),
    );
    let session = world.session(&[&name, &network]).await;
    for _ in 0..3 {
        world.names.set("rebound.test", HOST);
        assert_eq!(session.tunnel(&name).await.0, 200);
        world
            .names
            .set("rebound.test", Ipv4Addr::new(169, 254, 169, 254));
        assert_eq!(session.tunnel(&name).await.0, 403);
    }
}

#[tokio::test]
async fn a_redirect_to_metadata_is_refused_when_the_client_follows_it() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::new().await;
    let target = serve(|mut stream| async move {
        let _ = stream.read(&mut [0; 4_096]).await;
        let answer = "HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/latest/\r\n\
                      Content-Length: 0\r\n\r\n";
        let _ = stream.write_all(answer.as_bytes()).await;
    });
    let target = target.await.to_string();
    let session = world.session(&["internet", &target]).await;
    let mut curl = session.namespace.command("curl");
    curl.args([
        "-s",
        "-L",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code} %{num_redirects}",
    ])
    .args([
        "--proxy",
        "http://127.0.0.1:3128",
        &format!("http://{target}/"),
    ]);
    let output = tokio::task::spawn_blocking(move || curl.output()).await;
    let output = output.expect("no panic").expect("curl runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "403 1");
}

#[tokio::test]
async fn what_is_not_a_proxy_request_is_answered_with_an_error() {
    let world = World::new().await;
    let session = world.session(&["internet"]).await;
    for request in [
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "GET https://a.test/ HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT a.test HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT a.test:0 HTTP/1.1\r\nHost: a\r\n\r\n",
        "CONNECT a.test:99999 HTTP/1.1\r\nHost: a\r\n\r\n",
        "\r\n\r\nhello\r\n\r\n",
    ] {
        let (head, _) = session.ask(request).await;
        assert_eq!(status(&head), 400, "{request:?}");
    }
    let long = format!("GET http://a.test/{} HTTP/1.1\r\n\r\n", "a".repeat(80_000));
    let (head, _) = session.ask(&long).await;
    assert!([414, 431].contains(&status(&head)), "{head}");
}
