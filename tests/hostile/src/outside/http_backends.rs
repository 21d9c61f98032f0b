//! Backends that answer as no HTTP server does, requests that browsers send across sessions, and
//! callers without credentials.

use std::net::SocketAddr;
use std::time::Duration;

use conman_e2e::resident_bytes;
use http::StatusCode;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};

use crate::world::{Verdict, World};

/// Most that the daemon may keep of what an endless answer brings.
const MOST_MEMORY: u64 = 48 << 20;

/// How long an answer is read; a backend that is to be cut off is within it.
const READ: Duration = Duration::from_secs(8);

/// A session with the backend.
async fn backend(world: &World) -> String {
    let id = world.id("backend");
    let mut spec = world.spec(&["serve"]);
    spec["port"] = json!(8080);
    spec["cpus"] = json!(1.0);
    world.api().ensure(&id, &spec).await;
    id
}

/// What comes back for a request, and whether the connection was ended from the other side.
struct Exchange {
    text: String,
    bytes: usize,
    ended: bool,
}

async fn exchange(address: SocketAddr, request: &str, patience: Duration) -> Exchange {
    let mut stream = TcpStream::connect(address).await.expect("connected");
    stream.write_all(request.as_bytes()).await.expect("sent");
    let mut kept = Vec::new();
    let mut bytes = 0;
    let mut buffer = vec![0; 64 << 10];
    let reading = async {
        while let Ok(count) = stream.read(&mut buffer).await {
            if count == 0 {
                break;
            }
            bytes += count;
            if kept.len() < 256 << 10 {
                kept.extend_from_slice(&buffer[..count]);
            }
        }
    };
    let ended = timeout(patience, reading).await.is_ok();
    Exchange {
        text: String::from_utf8_lossy(&kept).into_owned(),
        bytes,
        ended,
    }
}

/// `GET /s/ID/NAME` in the path form.
async fn get(world: &World, id: &str, name: &str, more: &str, patience: Duration) -> Exchange {
    let address = world.conman.sessions_address();
    let request = format!(
        "GET /s/{id}/{name} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{more}\r\n"
    );
    exchange(address, &request, patience).await
}

/// A header that reaches beyond the session is not in the answer.
async fn header(world: &World, name: &str, marks: &[&str]) -> Verdict {
    let id = backend(world).await;
    let answer = get(world, &id, name, "", READ).await;
    world.stop(&id).await;
    let head = answer
        .text
        .split("\r\n\r\n")
        .next()
        .unwrap_or_default()
        .to_lowercase();
    if !answer.text.starts_with("HTTP/1.1 200") {
        return Verdict::Held(head);
    }
    let found: Vec<&str> = marks
        .iter()
        .filter(|mark| head.contains(**mark))
        .copied()
        .collect();
    Verdict::reached_if(!found.is_empty(), head)
}

pub(crate) async fn cookie_for_a_domain(world: &World) -> Verdict {
    header(world, "cookie-domain", &["domain="]).await
}
pub(crate) async fn cookie_of_conman(world: &World) -> Verdict {
    header(world, "cookie-own", &["set-cookie: conman_session"]).await
}
pub(crate) async fn service_worker_for_all(world: &World) -> Verdict {
    header(world, "worker", &["service-worker-allowed"]).await
}
pub(crate) async fn clear_site_data(world: &World) -> Verdict {
    header(world, "clear", &["clear-site-data"]).await
}
pub(crate) async fn strict_transport_security(world: &World) -> Verdict {
    header(world, "hsts", &["strict-transport-security"]).await
}
pub(crate) async fn alternative_services(world: &World) -> Verdict {
    header(world, "alternative", &["alt-svc"]).await
}
/// A web server in front of conman would send the request elsewhere, or a file.
pub(crate) async fn orders_to_a_web_server(world: &World) -> Verdict {
    let marks = ["accel", "x-sendfile", "surrogate", "litespeed"];
    header(world, "web-server", &marks).await
}

/// Under `/s/{id}/` all sessions share an origin: what a browser sends is refused.
pub(crate) async fn browser_in_the_path_form(world: &World) -> Verdict {
    let id = backend(world).await;
    let mut found = Vec::new();
    for more in [
        "Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\n",
        "Sec-Fetch-Mode: navigate\r\nSec-Fetch-Dest: document\r\n",
        "Cookie: conman_session=x\r\n",
    ] {
        let answer = get(world, &id, "plain", more, READ).await;
        if answer.text.starts_with("HTTP/1.1 200") {
            found.push(more.trim());
        }
    }
    world.stop(&id).await;
    Verdict::reached_if(!found.is_empty(), format!("answered: {found:?}"))
}

/// 103 Early Hints without end.
pub(crate) async fn endless_early_hints(world: &World) -> Verdict {
    let id = backend(world).await;
    let answer = get(world, &id, "early", "", READ).await;
    world.stop(&id).await;
    let hints = answer.text.matches("HTTP/1.1 103").count();
    let refused = answer.ended && answer.text.starts_with("HTTP/1.1 5");
    Verdict::reached_if(
        hints > 100 || !refused,
        format!(
            "{hints} hints, {} bytes, ended: {}",
            answer.bytes, answer.ended
        ),
    )
}

/// A head without end, in fields or in one line.
pub(crate) async fn endless_head(world: &World) -> Verdict {
    let id = backend(world).await;
    let before = resident_bytes(world.conman.pid());
    let mut wrong = Vec::new();
    for name in ["endless-head", "endless-line"] {
        let answer = get(world, &id, name, "", READ).await;
        if !answer.ended || answer.bytes > 1 << 20 {
            wrong.push(format!(
                "{name}: {} bytes, ended: {}",
                answer.bytes, answer.ended
            ));
        }
    }
    let more = resident_bytes(world.conman.pid()).saturating_sub(before);
    world.stop(&id).await;
    Verdict::reached_if(
        !wrong.is_empty() || more > MOST_MEMORY,
        format!("{wrong:?}, {} MiB", more >> 20),
    )
}

/// A second answer behind the first is given to no other request.
pub(crate) async fn smuggled_answers(world: &World) -> Verdict {
    let id = backend(world).await;
    let address = world.conman.sessions_address();
    let mut wrong = Vec::new();
    for name in [
        "two-lengths",
        "length-and-chunks",
        "more-than-length",
        "bare-feed",
        "unasked-upgrade",
    ] {
        // Two requests on a connection, the second for an honest answer.
        let request = format!(
            "GET /s/{id}/{name} HTTP/1.1\r\nHost: {address}\r\n\r\n\
             GET /s/{id}/plain HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
        );
        let answer = exchange(address, &request, READ).await;
        if answer.text.contains("smuggled")
            || answer.text.to_lowercase().contains("\ninjected: yes")
        {
            wrong.push(name);
        }
    }
    world.stop(&id).await;
    Verdict::reached_if(!wrong.is_empty(), format!("{wrong:?}"))
}

/// A client that does not read what a backend sends without end costs a bounded amount of memory.
pub(crate) async fn endless_body(world: &World) -> Verdict {
    let id = backend(world).await;
    let before = resident_bytes(world.conman.pid());
    let address = world.conman.sessions_address();
    let mut clients = Vec::new();
    for name in [
        "endless-body",
        "endless-body",
        "huge-chunk",
        "flood",
        "flood",
        "frame",
    ] {
        let mut stream = TcpStream::connect(address).await.expect("connected");
        let upgrade = if matches!(name, "flood" | "frame") {
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
             Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        } else {
            ""
        };
        let request = format!("GET /s/{id}/{name} HTTP/1.1\r\nHost: {address}\r\n{upgrade}\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        clients.push(stream);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let more = resident_bytes(world.conman.pid()).saturating_sub(before);
    drop(clients);
    world.stop(&id).await;
    Verdict::reached_if(more > MOST_MEMORY, format!("{} MiB more", more >> 20))
}

/// A backend that sends a byte of its head now and then is given up. (One that sends nothing makes only
/// its own callers wait, as a long poll does.)
pub(crate) async fn trickled_head(world: &World) -> Verdict {
    let id = backend(world).await;
    let answer = get(world, &id, "trickle-head", "", Duration::from_secs(80)).await;
    world.stop(&id).await;
    Verdict::reached_if(!answer.ended, "still waiting")
}

/// Idle connections without a token from one address leave room for those who have something to say.
async fn idle(address: SocketAddr, count: usize) -> Verdict {
    let mut idle = Vec::new();
    for _ in 0..count {
        match timeout(Duration::from_secs(2), TcpStream::connect(address)).await {
            Ok(Ok(stream)) => idle.push(stream),
            _ => break,
        }
    }
    let mut wrong = Vec::new();
    for path in ["/healthz", "/readyz"] {
        let begun = Instant::now();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        let answer = timeout(
            Duration::from_secs(4),
            exchange(address, &request, Duration::from_secs(3)),
        )
        .await;
        if !answer.is_ok_and(|answer| answer.text.starts_with("HTTP/1.1")) {
            wrong.push(format!("{path} was not answered for {:?}", begun.elapsed()));
        }
    }
    let opened = idle.len();
    drop(idle);
    // The bystander's next operations should not meet what this one has left.
    tokio::time::sleep(Duration::from_millis(500)).await;
    Verdict::reached_if(
        !wrong.is_empty(),
        format!("{opened} idle connections; {wrong:?}"),
    )
}

pub(crate) async fn idle_connections_to_the_api(world: &World) -> Verdict {
    idle(world.conman.api_address(), 1_300).await
}

pub(crate) async fn idle_connections_to_sessions(world: &World) -> Verdict {
    idle(world.conman.sessions_address(), 17_000).await
}

/// A path that the proxy and the session read differently leads into no other session.
pub(crate) async fn path_confusion(world: &World) -> Verdict {
    let (one, other) = (backend(world).await, backend(world).await);
    let address = world.conman.sessions_address();
    let mut wrong = Vec::new();
    for path in [
        format!("/s/{one}/../{other}/plain"),
        format!("/s/{one}/..%2f{other}/plain"),
        format!("/s/{one}/%2e%2e/{other}/plain"),
        format!("/s/{one}//{address}/s/{other}/plain"),
        format!("http://{other}.localhost/s/{one}/plain"),
    ] {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        let answer = exchange(address, &request, READ).await;
        // The log of the other one says whether a request came.
        if answer.text.starts_with("HTTP/1.1 200") && world.log(&other).await.contains("plain") {
            wrong.push(path);
        }
    }
    world.stop(&one).await;
    world.stop(&other).await;
    Verdict::reached_if(!wrong.is_empty(), format!("{wrong:?}"))
}

/// The daemon's API is not in reach from inside, whatever a backend redirects to.
pub(crate) async fn api_through_the_proxy(world: &World) -> Verdict {
    let id = backend(world).await;
    let mut wrong = Vec::new();
    let address = world.conman.sessions_address();
    for path in [
        "/v1/sessions",
        "/metrics",
        &format!("/s/{id}/../../v1/sessions"),
    ] {
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        let answer = exchange(address, &request, READ).await;
        if answer
            .text
            .starts_with(&format!("HTTP/1.1 {}", StatusCode::OK))
            && answer.text.contains("\"sessions\"")
        {
            wrong.push(path.to_owned());
        }
    }
    world.stop(&id).await;
    Verdict::reached_if(!wrong.is_empty(), format!("{wrong:?}"))
}
