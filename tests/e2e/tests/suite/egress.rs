//! Sessions without a network that reach what their template lists.

use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use conman_e2e::{Api, Conman, PYTHON, docker_shared, eventually, native, slowness};
use conman_proto::{ExecResult, Problem};
use http::StatusCode;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

const PATIENCE: Duration = Duration::from_secs(60);

/// A daemon that was started again serves its sessions within this time on a usual machine.
const SERVED_AGAIN: Duration = Duration::from_secs(2);

/// What the tests serve on the host. Not 127.0.0.1, which programs exempt from proxies.
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);

/// Answers every question for an IPv4 address with [`HOST`], and all others with nothing.
fn name_server() -> u16 {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let port = socket.local_addr().expect("bound").port();
    thread::spawn(move || {
        let mut bytes = [0; 512];
        while let Ok((length, client)) = socket.recv_from(&mut bytes) {
            // Header and question, without the additional records.
            let name = bytes[12..length].iter().position(|&byte| byte == 0);
            let end = 12 + name.expect("a name") + 5;
            let is_ipv4 = bytes[end - 4..end] == [0, 1, 0, 1];
            let mut answer = bytes[..end].to_vec();
            answer[2..4].copy_from_slice(&[0x81, 0x80]);
            answer[4..12].copy_from_slice(&[0, 1, 0, is_ipv4.into(), 0, 0, 0, 0]);
            if is_ipv4 {
                answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
                answer.extend(HOST.octets());
            }
            let _ = socket.send_to(&answer, client);
        }
    });
    port
}

/// Serves the text `hello`.
pub(crate) async fn web_server() -> u16 {
    let listener = TcpListener::bind((HOST, 0)).await.expect("a port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4_096]).await;
            let answer = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello";
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    port
}

/// Programs of the host in a session: busybox's static ones cannot resolve names.
const HOSTS_PROGRAMS: &str =
    r#"binds = ["/usr:/usr:ro", "/usr/lib:/lib:ro", "/usr/lib64:/lib64:ro"]"#;

/// Settings with the template `fetcher`, whose sessions may connect to a web server, and its URL.
async fn settings(image: &str, runtime: &str, more: &str) -> (String, String) {
    let (names, web) = (name_server(), web_server().await);
    let toml = format!(
        "[net]\ndns = [\"127.0.0.1:{names}\"]\n\
         [templates.fetcher]\nimage = \"{image}\"\nruntime = \"{runtime}\"\n{more}\n\
         command = [\"sleep\", \"1000000\"]\n\
         egress = [\"*.files.test:{web}\", \"{HOST}:{web}\", \"internet\"]"
    );
    (toml, format!("http://a.files.test:{web}/"))
}

async fn exec(api: &Api, id: &str, command: &[&str]) -> ExecResult {
    let path = format!("/v1/sessions/{id}/exec");
    let answer = api.post(&path, &json!({"command": command})).await;
    answer.expect(StatusCode::OK)
}

async fn fetch(api: &Api, id: &str, url: &str) -> ExecResult {
    exec(api, id, &["curl", "-sS", "--fail", "--max-time", "30", url]).await
}

#[tokio::test]
async fn a_native_session_reaches_what_is_listed_and_nothing_else() {
    let Some(native) = native() else { return };
    let (toml, url) = settings(conman_e2e::ROOT, "native", HOSTS_PROGRAMS).await;
    let builder = Conman::builder()
        .toml(&toml)
        .set("binds", "allow = [\"/usr\"]");
    let mut conman = builder.start_native(&native).await;
    let api = conman.api();
    let request = json!({"template": "fetcher"});
    api.ensure("alice", &request).await;
    assert_eq!(fetch(&api, "alice", &url).await.stdout, "hello");
    let looked_up = exec(&api, "alice", &["getent", "hosts", "a.files.test"]).await;
    assert!(looked_up.stdout.contains("127.0.0.2"), "{looked_up:?}");
    for refused in ["http://169.254.169.254/latest/", "http://other.test:1/"] {
        let fetched = fetch(&api, "alice", refused).await;
        assert_ne!(fetched.exit_code, 0, "{refused}");
        assert!(fetched.stderr.contains("403"), "{refused}: {fetched:?}");
    }
    let why = conman.cli(&["why", "alice"]).await;
    let why = why.success();
    assert!(why.contains("169.254.169.254:80"), "{why}");
    assert!(why.contains("allow_addresses"), "{why}");
    // The proxy and the resolver serve before the program begins.
    let fetches = format!("curl -sS --fail {url} && exec sleep 1000000");
    let request = json!({"template": "fetcher", "command": ["sh", "-c", fetches]});
    api.ensure("carol", &request).await;
    eventually("it has fetched", PATIENCE, async || {
        let logs = conman.cli(&["logs", "carol"]).await;
        logs.success().trim() == "hello"
    })
    .await;
    // A session without the list has neither proxy nor resolver.
    api.ensure("bob", &json!({"template": "fetcher", "egress": []}))
        .await;
    let fetched = fetch(&api, "bob", &url).await;
    assert_ne!(fetched.exit_code, 0, "{fetched:?}");

    // The best of a few, as other programs of this machine take their part of it.
    let mut took = Duration::MAX;
    for _ in 0..5 {
        conman.restart_after_crash().await;
        let ready = Instant::now();
        let api = conman.api();
        eventually("it is served again", PATIENCE, async || {
            fetch(&api, "alice", &url).await.stdout == "hello"
        })
        .await;
        took = took.min(ready.elapsed());
        if took < SERVED_AGAIN {
            break;
        }
    }
    assert!(took < SERVED_AGAIN * slowness(), "{took:?}");
}

#[tokio::test]
async fn a_request_can_only_narrow_the_list_of_its_template() {
    let Some(native) = native() else { return };
    let (toml, url) = settings(conman_e2e::ROOT, "native", HOSTS_PROGRAMS).await;
    let builder = Conman::builder()
        .toml(&toml)
        .set("binds", "allow = [\"/usr\"]");
    let conman = builder.start_native(&native).await;
    let api = conman.api();
    let wider = json!({"template": "fetcher", "egress": ["10.0.0.0/8:80"]});
    let answer = api.put("/v1/sessions/wider", &wider).await;
    let problem: Problem = answer.expect(StatusCode::UNPROCESSABLE_ENTITY);
    assert!(
        format!("{problem:?}").contains("10.0.0.0/8:80"),
        "{problem:?}"
    );
    let narrower = json!({"template": "fetcher", "egress": ["example.org:443"]});
    let session = api.ensure("narrower", &narrower).await.session;
    assert_eq!(session.spec.egress, ["example.org:443"]);
    let fetched = fetch(&api, "narrower", &url).await;
    assert!(fetched.stderr.contains("403"), "{fetched:?}");
}

#[tokio::test]
async fn a_docker_session_reaches_what_is_listed_too() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let (toml, url) = settings(PYTHON, "docker", "").await;
    let conman = Conman::builder().toml(&toml).start(&docker).await;
    let api = conman.api();
    api.ensure("alice", &json!({"template": "fetcher"})).await;
    let script = format!("import urllib.request; print(urllib.request.urlopen('{url}').read())");
    let fetched = exec(&api, "alice", &["python3", "-c", &script]).await;
    assert_eq!(fetched.stdout, "b'hello'\n", "{fetched:?}");
}
