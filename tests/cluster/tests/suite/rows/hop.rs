//! What goes through another node, while the session's own stands still, is preempted, or has other
//! certificates.

use std::sync::Arc;
use std::time::Duration;

use conman_cluster::overlap::{Line, SERVING, monotonic_ns};
use conman_cluster::{Authority, Cluster};
use conman_e2e::{Answer, eventually, eventually_some, websocket};
use conman_linux::Signal;
use conman_proto::{ATTACH_PROTOCOL, EnsureResponse, ExecChannel};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::process::Child;
use tokio::time::{sleep, timeout};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{WebSocketStream, client_async};

use super::client::Client;
use super::fleet::{Fleet, PATIENCE, measured};
use super::load::Bystander;
use super::typed::{began, conman, printed, told};

/// What a node knows of another one's incarnation is up to a second old: of so many, some come within.
const RESTARTS: usize = 4;
/// By then it is known.
const KNOWN: Duration = Duration::from_secs(3);

/// Has a session run on the first node.
async fn ensured(fleet: &Fleet, id: &str, body: &Value) -> u64 {
    let path = format!("/v1/sessions/{id}?node_label=host%3Dn1");
    ensured_after(fleet, (0, &path), body, 0).await
}

/// Asks a node until a later generation runs.
async fn ensured_after(
    fleet: &Fleet,
    (node, path): (usize, &str),
    body: &Value,
    after: u64,
) -> u64 {
    let what = format!("{path} runs, later than {after}");
    eventually_some(&what, PATIENCE, async || {
        let answer = fleet.ask(node, Method::PUT, path, Some(body)).await?;
        if !answer.status.is_success() {
            return None;
        }
        let response: EnsureResponse = answer.expect(answer.status);
        let generation = response.session.generation.get();
        (generation > after).then_some(generation)
    })
    .await
}

/// A WebSocket to a witness through the second node, and who answers.
pub(crate) async fn open(fleet: &Fleet, id: &str) -> Option<(WebSocketStream<TcpStream>, Line)> {
    let through = fleet.node(1).sessions_address();
    let stream = TcpStream::connect(through).await.ok()?;
    let url = format!("ws://{through}/s/{id}/");
    let opened = timeout(PATIENCE, client_async(url, stream)).await;
    let (mut socket, _) = opened.expect("an answer, if not a socket").ok()?;
    let greeting = timeout(PATIENCE, socket.next()).await;
    match greeting.expect("a greeting, or the end")?.ok()? {
        Message::Text(text) => Some((socket, serde_json::from_str(text.as_str()).expect("a line"))),
        _ => None,
    }
}

/// Whether a socket that was open before lives, or how it has ended: never neither.
async fn lives(socket: &mut WebSocketStream<TcpStream>) -> bool {
    if socket
        .send(Message::Ping(b"x".to_vec().into()))
        .await
        .is_err()
    {
        return false;
    }
    let next = timeout(PATIENCE, socket.next()).await;
    matches!(
        next.expect("an answer or an end"),
        Some(Ok(Message::Pong(_)))
    )
}

/// Asks for a page through the second node.
async fn page(fleet: &Fleet) -> Answer {
    let api = fleet.node(1).sessions();
    let asked = timeout(PATIENCE, api.try_send(Method::GET, "/s/page/", None)).await;
    let answer = asked.expect("nothing hangs").expect("an answer");
    let honest = [
        StatusCode::OK,
        StatusCode::BAD_GATEWAY,
        StatusCode::SERVICE_UNAVAILABLE,
        StatusCode::GATEWAY_TIMEOUT,
    ];
    assert!(honest.contains(&answer.status), "{}", answer.text());
    answer
}

async fn serves_pages(fleet: &Fleet) {
    eventually("the page is served", PATIENCE, async || {
        page(fleet).await.status == StatusCode::OK
    })
    .await;
}

#[tokio::test]
async fn row_02_owner_that_stands_still_for_a_moment_serves_what_comes_through_another_node_again()
{
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let generation = ensured(&fleet, "s", &json!({"template": SERVING})).await;
    ensured(&fleet, "page", &json!({"template": "web"})).await;
    let (mut socket, line) = open(&fleet, "s").await.expect("served");
    assert_eq!((line.host.as_str(), line.generation), ("n1", generation));
    serves_pages(&fleet).await;
    fleet.goes_on("s", generation).await;

    let begun = monotonic_ns();
    fleet
        .node(0)
        .signal_daemon(Signal::SIGSTOP)
        .expect("stopped");
    let meanwhile = async {
        // Far less than the fence's time, however long it takes on this machine.
        sleep(Duration::from_millis(1_500)).await;
        fleet
            .node(0)
            .signal_daemon(Signal::SIGCONT)
            .expect("goes on");
        monotonic_ns()
    };
    let (answer, until) = tokio::join!(page(&fleet), meanwhile);
    measured("a daemon stood still", begun, until);
    measured(&format!("until {}", answer.status), begun, monotonic_ns());
    serves_pages(&fleet).await;
    measured("until it served again", begun, monotonic_ns());
    let kept = lives(&mut socket).await;
    let again = eventually_some("it is served", PATIENCE, async || open(&fleet, "s").await).await;
    // Whether its time ended meanwhile is the machine's doing.
    if again.1.generation == generation {
        assert!(kept, "what was open stays open");
        fleet.goes_on("s", generation).await;
    }
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_02_owner_that_stands_still_for_good_lets_go_of_what_came_through_another_node() {
    let Some(mut fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let generation = ensured(&fleet, "s", &json!({"template": SERVING})).await;
    let page_before = ensured(&fleet, "page", &json!({"template": "web"})).await;
    let (mut socket, _) = open(&fleet, "s").await.expect("served");
    serves_pages(&fleet).await;
    fleet.goes_on("s", generation).await;

    let bystander = Bystander::begin(&fleet, 1, &[1]).await;
    let begun = monotonic_ns();
    fleet
        .node(0)
        .signal_daemon(Signal::SIGSTOP)
        .expect("stopped");
    let answer = page(&fleet).await;
    measured(&format!("until {}", answer.status), begun, monotonic_ns());
    // Each without the wish for the first node.
    let (serving, web) = (json!({"template": SERVING}), json!({"template": "web"}));
    let (kept, new, _) = tokio::join!(
        lives(&mut socket),
        ensured_after(&fleet, (1, "/v1/sessions/s"), &serving, generation),
        ensured_after(&fleet, (1, "/v1/sessions/page"), &web, page_before),
    );
    assert!(!kept, "its container is dead");
    serves_pages(&fleet).await;
    measured("until another node served", begun, monotonic_ns());
    let (_, line) = open(&fleet, "s").await.expect("served");
    assert_eq!((line.host.as_str(), line.generation), ("n2", new));
    fleet.goes_on("s", new).await;
    bystander.saw_nothing().await;
    fleet
        .node(0)
        .signal_daemon(Signal::SIGCONT)
        .expect("goes on");
    fleet.all_ready().await;
    serves_pages(&fleet).await;
    fleet.leaves_nothing().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: conman-proxy `hop::`"]
async fn what_is_opened_through_another_node_right_after_the_owners_restart_stays_open() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let generation = ensured(&fleet, "s", &json!({"template": SERVING})).await;
    for _ in 0..RESTARTS {
        fleet.node(0).kill_daemon().expect("killed");
        fleet.node(0).start().expect("started");
        fleet.all_ready().await;
        let served = eventually_some("served", PATIENCE, async || open(&fleet, "s").await).await;
        let (mut socket, line) = served;
        assert_eq!(line.generation, generation);
        sleep(KNOWN).await;
        assert!(lives(&mut socket).await, "its node is well");
    }
    fleet.leaves_nothing().await;
}

/// Tunnels are closed first, and whoever has not sent all of a request keeps the daemon for some seconds
/// after that.
#[tokio::test]
async fn who_comes_back_while_the_owners_daemon_ends_waits_for_the_next_one() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let generation = ensured(&fleet, "s", &json!({"template": SERVING})).await;
    let mut client = Client::connect(&fleet, 1, "s").await;
    let owner = fleet.node(0);
    let slow = TcpStream::connect(owner.sessions_address()).await;
    let mut slow = slow.expect("connected");
    let begun = format!(
        "POST /s/s/ HTTP/1.1\r\nhost: {}\r\ncontent-length: 9\r\n\r\nhalf",
        owner.sessions_address()
    );
    slow.write_all(begun.as_bytes()).await.expect("written");
    // It has begun once something that was sent later is answered.
    let answered = client.ask();
    client.answered(answered).await;
    let (came, ()) = tokio::join!(client.comes_back(), async {
        owner.end_daemon().await.expect("it ends");
        owner.start().expect("started");
    });
    assert_eq!(came, generation);
    drop(slow);
    fleet.leaves_nothing().await;
}

/// A session's log and a command in it, as somebody follows them through another node.
async fn followed(fleet: &Fleet) -> (Child, Child) {
    let script = ["sh", "-c", "echo up; sleep 1000000"];
    ensured(fleet, "s", &json!({"template": "idle", "command": script})).await;
    let mut log = conman(fleet, &["logs", "-f", "s"]);
    let mut command = conman(fleet, &["exec", "s", "--", script[0], script[1], script[2]]);
    began(&mut log).await;
    began(&mut command).await;
    (log, command)
}

#[tokio::test]
async fn what_is_followed_through_another_node_tells_of_its_containers_preemption() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let (log, command) = followed(&fleet).await;
    fleet.preempt(0).await;
    for (child, wanted, again) in [
        (log, Some(5), "`conman logs -f s`"),
        (command, Some(125), "`conman exec s …`"),
    ] {
        let (code, text) = told(child).await;
        assert_eq!(code, wanted, "{text}");
        for part in ["node n1", "preempted: a test", again] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}

#[tokio::test]
#[ignore = "in acceptance: row 02 for good stays"]
async fn what_is_followed_of_a_node_that_stands_still_ends_once_that_one_is_declared_dead() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2).short()).await else {
        return;
    };
    let (log, command) = followed(&fleet).await;
    fleet
        .node(0)
        .signal_daemon(Signal::SIGSTOP)
        .expect("stopped");
    for (child, wanted, again) in [
        (log, 5, "`conman logs -f s`"),
        (command, 125, "`conman exec s …`"),
    ] {
        let (code, text) = told(child).await;
        assert_eq!(code, Some(wanted), "{text}");
        for part in ["node n1", "its node was lost", again] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    fleet
        .node(0)
        .signal_daemon(Signal::SIGCONT)
        .expect("goes on");
}

#[tokio::test]
async fn a_session_is_inspected_entered_and_attached_to_from_another_node() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let script = json!(["sh", "-c", "echo up; sleep 1000000"]);
    ensured(&fleet, "s", &json!({"template": "idle", "command": script})).await;
    let mut log = conman(&fleet, &["logs", "-f", "s"]);
    began(&mut log).await;
    drop(log);
    let inside = ["exec", "s", "--", "sh", "-c", "echo inside; exit 7"];
    for (arguments, wanted, parts) in [
        (&inside[..], 7, &["inside"][..]),
        (&["logs", "s"], 0, &["up"]),
        (&["ps"], 0, &["s", "n1"]),
        (&["inspect", "s"], 0, &["n1", "running"]),
        (&["why", "s"], 0, &["n1", "running"]),
        (&["nodes"], 0, &["n1", "n2"]),
        (
            &["events", "--session", "s", "--no-follow"],
            0,
            &["n1", "s"],
        ),
    ] {
        let text = printed(&fleet, arguments, wanted).await;
        for part in parts {
            assert!(text.contains(part), "{arguments:?} without {part}: {text}");
        }
    }

    let shell = json!({"template": "idle", "tty": true, "command": ["sh"]});
    ensured(&fleet, "t", &shell).await;
    let api = fleet.node(1).api();
    let path = "/v1/sessions/t/attach?columns=80&rows=24";
    let request = api.request(Method::GET, path, None);
    let attached = websocket(&api, request, &[ATTACH_PROTOCOL]).await;
    let (_, mut socket) = attached.unwrap_or_else(|refusal| panic!("{}", refusal.text()));
    // What is typed is shown, too; the sum is not.
    let typed = [&[ExecChannel::Stdin as u8], &b"echo $((40 + 2))\r"[..]].concat();
    socket.send(Message::binary(typed)).await.expect("sent");
    let mut shown = String::new();
    let sees = async {
        while !shown.contains("42") {
            let message = socket.next().await.expect("goes on").expect("readable");
            shown.push_str(&String::from_utf8_lossy(&message.into_data()));
        }
    };
    let seen = timeout(PATIENCE, sees).await;
    assert!(seen.is_ok(), "{shown}");
}

/// What a node says of a session, in the end.
async fn says(fleet: &Fleet, node: usize, id: &str, what: impl Fn(&Answer) -> bool) -> Answer {
    let path = format!("/v1/sessions/{id}");
    let name = format!("n{} says so of {id}", node + 1);
    eventually_some(&name, PATIENCE, async || {
        let answer = fleet.ask(node, Method::GET, &path, None).await?;
        what(&answer).then_some(answer)
    })
    .await
}

#[tokio::test]
async fn row_33_certificate_of_its_own_is_all_that_a_node_needs_and_may_change() {
    let ours = Arc::new(Authority::new("ours").expect("an authority"));
    let builder = Cluster::builder().nodes(2).short().certified(&ours);
    let Some(mut fleet) = Fleet::shared(builder).await else {
        return;
    };
    let is_served = |answer: &Answer| answer.status == StatusCode::OK;
    ensured(&fleet, "page", &json!({"template": "web"})).await;
    let generation = fleet.ensure_on(1, "s").await.generation.get();
    says(&fleet, 1, "page", is_served).await;
    says(&fleet, 0, "s", is_served).await;
    serves_pages(&fleet).await;

    // Of another authority, which the first node does not know.
    let theirs = Authority::new("theirs").expect("an authority");
    let host = fleet.node(1).host().clone();
    let layout = fleet.cluster.layout().clone();
    theirs.certify(&layout, &host, 2_091).expect("written");
    fleet.node(1).signal_daemon(Signal::SIGHUP).expect("told");
    for (node, id) in [(0, "s"), (1, "page")] {
        // Not for another reason, such as a node that stands still for a moment.
        let is_refused = |answer: &Answer| answer.text().contains("`fleet.tls");
        let refused = says(&fleet, node, id, is_refused).await;
        assert!(!is_served(&refused));
        let text = refused.text();
        assert!(!text.contains("may have been carried out"), "{text}");
    }

    // One that is good again is found without a word.
    let begun = monotonic_ns();
    ours.certify(&layout, &host, 2_092).expect("written");
    says(&fleet, 1, "page", is_served).await;
    says(&fleet, 0, "s", is_served).await;
    measured("until new certificates were used", begun, monotonic_ns());
    serves_pages(&fleet).await;
    let metrics = fleet.node(1).admin().get("/metrics").await.text();
    // The first second of 2092.
    let ends = "conman_fleet_certificate_expiry_timestamp_seconds 3849984000";
    assert!(metrics.contains(ends), "{metrics}");
    fleet.goes_on("s", generation).await;
    fleet.leaves_nothing().await;
}

#[tokio::test]
async fn a_port_of_a_session_is_reached_through_another_node() {
    let Some(fleet) = Fleet::shared(Cluster::builder().nodes(2)).await else {
        return;
    };
    let script = "mkdir /tmp/w; echo page of 3000 >/tmp/w/index.html; httpd -p 3000 -h /tmp/w; \
        httpd -p 7000 -h /tmp/w; exec httpd -f -p 8080 -h /www";
    let body = json!({"image": conman_e2e::ROOT, "command": ["sh", "-c", script], "port": 8080,
        "ports": [3000]});
    ensured(&fleet, "s", &body).await;
    let through = fleet.node(1).sessions_address();
    let get = async |path: &str| {
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: {through}\r\nconnection: close\r\n\r\n");
        conman_e2e::raw_exchange(through, request).await
    };
    for (path, end) in [("/s/s/", "hello\n"), ("/s/s:3000/", "page of 3000\n")] {
        let answer = get(path).await;
        assert!(answer.ends_with(end), "{path}: {answer}");
    }
    let unlisted = get("/s/s:7000/").await;
    assert!(unlisted.contains("no-such-port"), "{unlisted}");
    let ended = fleet.node(0).api().stop("s").await;
    assert!(ended.state.is_ended(), "{ended:?}");
}
