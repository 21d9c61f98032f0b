//! Sessions with the network `routed`: a node in a network namespace, with a network beyond it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use conman_e2e::{Api, BUSYBOX, Conman, Native, docker_shared, eventually, native};
use conman_linux::{Namespaces, bring_loopback_up, unshare_namespaces};
use conman_proto::{ExecResult, PreemptReport, Session, SessionState};
use futures_util::future::join_all;
use http::{Method, StatusCode};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);

/// Beyond the node: addresses that the configuration names, and some that it does not.
const NAME_SERVER: &str = "10.2.0.53";
pub(crate) const LISTED: &str = "10.1.0.5";
pub(crate) const UNLISTED: &str = "198.41.0.10";
const METADATA: &str = "169.254.169.254";
/// The node's own address.
const NODE: &str = "192.0.2.1";

const CONFIG: &str = r#"
[net]
pool = ["10.88.0.0/29"]
dns = ["10.2.0.53"]
[templates.routed]
image = "conman-test/root:1"
command = ["httpd", "-f", "-p", "8080", "-h", "/www"]
port = 8080
start_on_connect = true
network = "routed"
egress = ["10.1.0.0/16:53"]
"#;

pub(crate) fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output();
    let output = output.expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {text}{errors}");
    text
}

/// Runs a test whose processes are in a new network namespace, beyond which another one answers on port 53
/// of every address.
pub(crate) fn in_network(test: impl AsyncFnOnce(Native) + Send + 'static) {
    let Some(native) = native() else { return };
    let run = move || {
        let (stop, stopped) = mpsc::sync_channel::<()>(1);
        let (sender, beyond) = mpsc::sync_channel(1);
        std::thread::spawn(move || beyond_the_node(&sender, &stopped));
        let beyond: String = beyond.recv().expect("it is set up");
        new_namespace();
        shell(&format!(
            "ip link add uplink type veth peer name uplink netns {beyond}
             nsenter --net={beyond} ip address add 192.0.2.2/24 dev uplink
             nsenter --net={beyond} ip link set uplink up
             ip address add {NODE}/24 dev uplink; ip link set uplink up
             ip route add default via 192.0.2.2
             echo 1 > /proc/sys/net/ipv4/ip_forward"
        ));
        // Its threads, and the processes that it starts, are in this thread's namespace.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(test(native));
        drop(stop);
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

fn new_namespace() {
    unshare_namespaces(Namespaces::NEWNET).expect("a namespace");
    bring_loopback_up().expect("loopback is up");
}

fn beyond_the_node(ready: &mpsc::SyncSender<String>, stopped: &mpsc::Receiver<()>) {
    new_namespace();
    for address in [NAME_SERVER, LISTED, UNLISTED, METADATA] {
        shell(&format!("ip address add {address}/32 dev lo"));
    }
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 53)).expect("bound");
    std::thread::spawn(move || {
        for connection in listener.incoming() {
            let mut connection = BufReader::new(connection.expect("a connection"));
            // To the end of the request: a close with something unread would be a reset.
            let mut line = String::new();
            while connection
                .read_line(&mut line)
                .is_ok_and(|length| length > 2)
            {
                line.clear();
            }
            let answer = b"HTTP/1.0 200 OK\r\n\r\nbeyond\n";
            let _ = connection.get_mut().write_all(answer);
        }
    });
    let thread = std::fs::read_link("/proc/thread-self").expect("readable");
    let path = format!("/proc/{}/ns/net", thread.display());
    ready.send(path).expect("received");
    // The test has ended, or has failed.
    let _ = stopped.recv();
}

async fn start(native: &Native) -> Conman {
    Conman::builder().toml(CONFIG).start_native(native).await
}

/// Asks a server from inside a session's network namespace; `None` when nothing answers.
pub(crate) async fn fetch(api: &Api, id: &str, address: &str) -> Option<String> {
    let session: Session = api
        .get(&format!("/v1/sessions/{id}"))
        .await
        .expect(StatusCode::OK);
    let pid = session.pid.expect("it runs");
    let ask = format!(
        "exec 3<>/dev/tcp/{address}/53 || exit; printf 'GET / HTTP/1.0\r\n\r\n' >&3; tail -n 1 <&3"
    );
    let mut command = tokio::process::Command::new("nsenter");
    command.args([
        &format!("--net=/proc/{pid}/ns/net"),
        "timeout",
        "3",
        "bash",
        "-c",
        &ask,
    ]);
    let output = command.output().await.expect("it runs");
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Waits until a server answers there: a request gives up after three seconds, which a loaded machine exceeds.
pub(crate) async fn reaches(api: &Api, id: &str, address: &str) {
    let what = format!("{id} reaches {address}");
    eventually(&what, PATIENCE, async || {
        fetch(api, id, address).await.as_deref() == Some("beyond\n")
    })
    .await;
}

fn links(conman: &Conman) -> usize {
    let prefix = format!("c{}", conman.instance());
    shell("ip -o link").matches(&prefix).count()
}

#[test]
fn a_routed_session_reaches_what_it_may_and_is_reached_through_the_proxy() {
    in_network(async |native| {
        let conman = start(&native).await;
        let api = conman.api();
        let made = api.ensure("a", &json!({"template": "routed"})).await;
        assert_eq!(made.session.state, SessionState::Running);
        assert_eq!(conman.sessions().get("/s/a/").await.text(), "hello\n");
        for reached in [NAME_SERVER, LISTED] {
            reaches(&api, "a", reached).await;
        }
        for refused in [METADATA, UNLISTED, NODE, "192.0.2.2"] {
            assert_eq!(fetch(&api, "a", refused).await, None, "{refused}");
        }
        api.ensure("b", &json!({"template": "routed"})).await;
        assert_eq!(links(&conman), 2);
        assert_eq!(api.stop("a").await.state, SessionState::Stopped);
        assert_eq!(api.stop("b").await.state, SessionState::Stopped);
        eventually("every link is gone", PATIENCE, async || links(&conman) == 0).await;
    });
}

#[test]
fn a_docker_session_has_the_links_of_a_native_one() {
    in_network(async |native| {
        let Some(docker) = docker_shared().await else {
            return;
        };
        let serve =
            "mkdir /tmp/www; echo hello >/tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www";
        let template = |name: &str, network: &str| {
            format!(
                "[templates.{name}]\nimage = \"{BUSYBOX}\"\nruntime = \"docker\"\nport = 8080\n\
                 command = [\"sh\", \"-c\", \"{serve}\"]\nnetwork = \"{network}\"\n"
            )
        };
        let routed = template("docker", "routed") + "egress = [\"10.1.0.0/16:53\"]\n";
        let lan = "[net.interfaces.uplink]\nsubnet = \"192.0.2.0/24\"\nrange = \"192.0.2.128/30\"\n\
                   gateway = \"192.0.2.2\"\n";
        let builder = Conman::builder().toml(CONFIG).toml(lan);
        let builder = builder
            .toml(&routed)
            .toml(&template("lan", "macvlan:uplink"));
        let mut conman = builder.start_both(&native, &docker).await;
        let api = conman.api();
        for (id, template) in [("n", "routed"), ("d", "docker"), ("l", "lan")] {
            let made = api.ensure(id, &json!({"template": template})).await;
            assert_eq!(made.session.state, SessionState::Running, "{id}");
            let page = conman.sessions().get(&format!("/s/{id}/")).await;
            assert_eq!(page.text(), "hello\n", "{id}");
        }
        let reads = json!({"command": ["cat", "/etc/resolv.conf"]});
        let read = api.post("/v1/sessions/d/exec", &reads).await;
        let read: ExecResult = read.expect(StatusCode::OK);
        assert_eq!(read.stdout, format!("nameserver {NAME_SERVER}\n"));
        conman.restart_after_crash().await;
        let api = conman.api();
        assert_eq!(links(&conman), 2);
        for id in ["d", "l"] {
            reaches(&api, id, LISTED).await;
        }
        for refused in [METADATA, UNLISTED, NODE] {
            assert_eq!(fetch(&api, "d", refused).await, None, "{refused}");
        }
        // The pool has six addresses, and two are in use.
        let routed = json!({"template": "docker"});
        for number in 0..4 {
            api.ensure(&format!("e{number}"), &routed).await;
        }
        let full = api.put("/v1/sessions/e4", &routed).await.problem();
        assert!(full.detail.contains("addresses"), "{full:?}");
        for id in ["d", "n", "l", "e0", "e1", "e2", "e3"] {
            api.stop(id).await;
        }
        eventually("every link is gone", PATIENCE, async || links(&conman) == 0).await;
        eventually("an address is free", PATIENCE, async || {
            let made = api.put("/v1/sessions/f", &routed).await;
            made.status == StatusCode::OK
        })
        .await;
        api.stop("f").await;
    });
}

/// Row 32 of the fault matrix, for what the rules inside a session refuse.
#[test]
fn row_32_a_session_reaches_no_metadata_and_not_the_node_while_the_rules_are_flushed() {
    in_network(async |native| {
        let conman = start(&native).await;
        let api = conman.api();
        api.ensure("a", &json!({"template": "routed"})).await;
        let flushing = async {
            for _ in 0..50 {
                shell("nft flush ruleset");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let asking = async {
            for refused in [METADATA, NODE].into_iter().cycle().take(20) {
                assert_eq!(fetch(&api, "a", refused).await, None, "{refused}");
            }
        };
        tokio::join!(flushing, asking);
    });
}

/// Row 30 of the fault matrix, in the middle of starts and ends.
#[test]
fn row_30_a_daemon_killed_while_links_come_and_go_leaves_none() {
    in_network(async |native| {
        let mut conman = start(&native).await;
        let routed = json!({"template": "routed"});
        for round in 0..8 {
            let api = conman.api();
            let change = async |number: u32| {
                let path = format!("/v1/sessions/s{number}");
                // The daemon is killed meanwhile, at a point that differs from round to round.
                let _ = match (number + round) % 2 {
                    0 => api.try_send(Method::PUT, &path, Some(&routed)).await,
                    _ => api.try_send(Method::DELETE, &path, None).await,
                };
            };
            let changes = join_all((0..6).map(change));
            let _ =
                tokio::time::timeout(Duration::from_millis(30 * u64::from(round)), changes).await;
            conman.restart_after_crash().await;
        }
        let api = conman.api();
        // The pool has six addresses.
        for number in 0..6 {
            api.ensure(&format!("s{number}"), &routed).await;
        }
        eventually("each has one link", PATIENCE, async || links(&conman) == 6).await;
        for number in 0..6 {
            api.stop(&format!("s{number}")).await;
        }
        eventually("every link is gone", PATIENCE, async || links(&conman) == 0).await;
        let table = format!("conman_{}", conman.instance());
        assert!(shell("nft list tables").contains(&table));
        conman.terminate().await;
        assert!(!shell("nft list tables").contains(&table));
    });
}

/// Row 30 of the fault matrix, for links.
#[test]
fn row_30_links_survive_a_daemon_and_none_is_left_of_a_session_that_does_not() {
    in_network(async |native| {
        let mut conman = start(&native).await;
        for id in ["a", "b"] {
            conman
                .api()
                .ensure(id, &json!({"template": "routed"}))
                .await;
        }
        // A link that no session has, as a crash between two messages would leave it if something pinned
        // its namespace.
        let orphan = format!("c{}zzzzzz", conman.instance());
        shell(&format!("ip link add {orphan} type veth peer name orphan"));
        conman.restart_after_crash().await;
        let api = conman.api();
        eventually("the orphan is gone", PATIENCE, async || links(&conman) == 2).await;
        reaches(&api, "a", NAME_SERVER).await;
        // The pool has six addresses; each start takes one, and each end returns it.
        for _ in 0..8 {
            api.ensure("c", &json!({"template": "routed"})).await;
            reaches(&api, "c", NAME_SERVER).await;
            api.stop("c").await;
        }
        for id in ["a", "b"] {
            api.stop(id).await;
        }
        eventually("every link is gone", PATIENCE, async || links(&conman) == 0).await;
    });
}

#[test]
fn links_of_a_preempted_node_disappear_although_it_stays_preempted() {
    in_network(async |native| {
        let conman = start(&native).await;
        let api = conman.api();
        for id in ["a", "b", "c"] {
            api.ensure(id, &json!({"template": "routed"})).await;
        }
        // An attached link ends with its namespace only.
        shell("ip link add br0 type bridge; ip link set br0 up");
        let bridge = json!({"to": "bridge:br0", "addresses": ["10.7.0.2/24"]});
        let attached = api.post("/v1/sessions/a/links", &bridge).await;
        assert_eq!(attached.status, StatusCode::CREATED, "{attached:?}");
        let report = api.post("/v1/nodes/self/preempt", &json!({})).await;
        let report: PreemptReport = report.expect(StatusCode::OK);
        assert_eq!(report.released, 3, "{report:?}");
        eventually("every link is gone", PATIENCE, async || {
            links(&conman) == 0 && shell("ip -o link show master br0").is_empty()
        })
        .await;
        let later = json!({"template": "routed"});
        let refused = api.put("/v1/sessions/d", &later).await.problem();
        assert_eq!(refused.slug(), "node-preempted");
    });
}
