//! Sessions in the node's network or on an interface of it, and links that are attached to running sessions.

use std::net::TcpListener;
use std::time::Duration;

use conman_e2e::{Api, Conman, Docker, Native, docker_shared, eventually};
use conman_proto::{SessionLink, SessionLinkList, SessionState, SessionStats};
use http::StatusCode;
use serde_json::json;

use super::routed::{LISTED, UNLISTED, fetch, in_network, reaches, shell};

const PATIENCE: Duration = Duration::from_secs(60);

const CONFIG: &str = r#"
[net]
dns = ["192.0.2.2"]
[net.interfaces.uplink]
subnet = "192.0.2.0/24"
range = "192.0.2.128/30"
gateway = "192.0.2.2"
[templates.lan]
image = "conman-test/root:1"
command = ["httpd", "-f", "-p", "8080", "-h", "/www"]
port = 8080
network = "macvlan:uplink"
[templates.elsewhere]
image = "conman-test/root:1"
command = ["sleep", "1000000"]
network = "ipoib:uplink"
[templates.host]
image = "conman-test/root:1"
command = ["httpd", "-f", "-p", "8099", "-h", "/www"]
port = 8099
network = "host"
"#;

async fn start(native: &Native) -> Conman {
    let builder = Conman::builder().toml(CONFIG).token("ops", "admin");
    builder.start_native(native).await
}

#[test]
fn a_session_on_an_interface_has_its_network_and_ends_with_its_link() {
    in_network(async |native| {
        let mut conman = start(&native).await;
        let elsewhere = json!({"template": "elsewhere"});
        let api = conman.admin();
        for id in ["a", "b"] {
            let made = api.ensure(id, &json!({"template": "lan"})).await;
            assert_eq!(made.session.state, SessionState::Running);
            for reached in ["192.0.2.2", LISTED, UNLISTED] {
                reaches(&api, id, reached).await;
            }
        }
        let full = api.put("/v1/sessions/c", &json!({"template": "lan"})).await;
        assert!(full.problem().detail.contains("larger `range`"), "{full:?}");
        let lacking = api.put("/v1/sessions/c", &elsewhere).await;
        let detail = lacking.problem().detail;
        assert!(detail.contains("larger `range`"), "{detail}");
        // A new daemon knows the addresses that are in use.
        conman.restart_after_crash().await;
        let api = conman.admin();
        let full = api.put("/v1/sessions/c", &json!({"template": "lan"})).await;
        assert!(full.problem().detail.contains("larger `range`"), "{full:?}");
        api.stop("a").await;
        eventually("the kernel refuses", PATIENCE, async || {
            let lacking = api.put("/v1/sessions/c", &elsewhere).await;
            lacking.problem().detail.contains("ib_ipoib")
        })
        .await;
        eventually("a has left its address", PATIENCE, async || {
            let made = api.put("/v1/sessions/d", &json!({"template": "lan"})).await;
            made.status == StatusCode::OK
        })
        .await;
        reaches(&api, "d", LISTED).await;
        for id in ["b", "d"] {
            api.stop(id).await;
        }
    });
}

#[test]
fn a_session_in_the_nodes_network_is_reached_and_never_another_program_instead() {
    in_network(async |native| {
        let conman = start(&native).await;
        let api = conman.admin();
        let squatter = TcpListener::bind("127.0.0.1:8099").expect("a free port");
        let host = json!({"template": "host"});
        let refused = api.put("/v1/sessions/h", &host).await.problem().detail;
        assert!(refused.contains("listens on port 8099"), "{refused}");
        drop(squatter);
        let made = api.ensure("h", &host).await;
        assert_eq!(made.session.state, SessionState::Running);
        let sessions = conman.sessions().with_token(conman.token("ops"));
        assert_eq!(sessions.get("/s/h/").await.text(), "hello\n");
        reaches(&api, "h", LISTED).await;
        let second = api.put("/v1/sessions/i", &host).await.problem().detail;
        assert!(
            second.contains("8099") && second.contains("has the network `host`"),
            "{second}"
        );
        let link = json!({"to": "macvlan:uplink"});
        let refused = api.post("/v1/sessions/h/links", &link).await;
        assert_eq!(refused.problem().slug(), "not-supported");
        api.stop("h").await;
        eventually("the port is free again", PATIENCE, async || {
            api.put("/v1/sessions/i", &host).await.status == StatusCode::OK
        })
        .await;
        api.stop("i").await;
    });
}

#[test]
fn an_operator_attaches_a_running_session_to_a_bridge_and_an_interface() {
    in_network(async |native| {
        let mut conman = start(&native).await;
        let api = conman.admin();
        api.ensure("s", &json!({"template": "idle"})).await;
        assert_eq!(fetch(&api, "s", LISTED).await, None);
        assert_eq!(received(&api).await, Some(0));
        let attach = [
            "net",
            "attach",
            "s",
            "--to",
            "macvlan:uplink",
            "--address",
            "192.0.2.9/24",
            "--route",
            "10.1.0.0/16 via 192.0.2.2",
        ];
        let attached = conman.cli(&attach).await;
        assert_eq!(attached.success(), "eth1\n");
        reaches(&api, "s", LISTED).await;
        assert!(received(&api).await > Some(0));
        assert_eq!(
            fetch(&api, "s", UNLISTED).await,
            None,
            "it has no default route"
        );
        shell(
            "ip link add br0 type bridge; ip link set br0 up; ip address add 10.7.0.1/24 dev br0",
        );
        let bridge = json!({"to": "bridge:br0", "name": "lan", "addresses": ["10.7.0.2/24"]});
        let attached: SessionLink = api
            .post("/v1/sessions/s/links", &bridge)
            .await
            .expect(StatusCode::CREATED);
        assert_eq!(
            (attached.name.as_str(), attached.to.to_string().as_str()),
            ("lan", "bridge:br0")
        );
        for (link, kind) in [
            (json!({"to": "bridge:br1"}), "link-refused"),
            (json!({"to": "bridge:uplink"}), "link-refused"),
            (
                json!({"to": "macvlan:uplink", "name": "lan"}),
                "link-refused",
            ),
            (
                json!({"to": "macvlan:uplink", "routes": ["default via 10.9.9.9"]}),
                "link-refused",
            ),
            (
                json!({"to": "macvlan:uplink", "addresses": ["10.7.0.2"]}),
                "bad-body",
            ),
            (json!({"to": "wlan:uplink"}), "bad-body"),
        ] {
            let refused = api.post("/v1/sessions/s/links", &link).await.problem();
            assert_eq!(refused.slug(), kind, "{link}: {refused:?}");
        }
        // They outlive the daemon, and not the session.
        conman.restart_after_crash().await;
        let api = conman.admin();
        let listed: SessionLinkList = api.get("/v1/sessions/s/links").await.expect(StatusCode::OK);
        let names = listed.links.iter().map(|link| link.name.as_str());
        assert_eq!(names.collect::<Vec<_>>(), ["eth1", "lan"]);
        assert!(
            received(&api).await > Some(0),
            "the new daemon counts them, too"
        );
        assert!(
            conman
                .cli(&["net", "ls"])
                .await
                .success()
                .contains("10.7.0.2/24")
        );
        assert_eq!(
            conman.cli(&["net", "detach", "s", "eth1"]).await.success(),
            ""
        );
        assert_eq!(fetch(&api, "s", LISTED).await, None);
        let again = api.delete("/v1/sessions/s/links/eth1").await.problem();
        assert_eq!(again.slug(), "no-such-link");
        api.stop("s").await;
        eventually("the bridge has no port", PATIENCE, async || {
            shell("ip -o link show master br0").is_empty()
        })
        .await;
    });
}

/// What session `s` has received through its interfaces, in bytes.
async fn received(api: &Api) -> Option<u64> {
    let stats = api.get("/v1/sessions/s/stats").await;
    stats.expect::<SessionStats>(StatusCode::OK).received_bytes
}

#[tokio::test]
async fn a_docker_session_gets_a_link_too() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    attach_to_docker(&docker).await;
}

/// The bridge is in the namespace of this machine, as Docker is. It has no uplink.
async fn attach_to_docker(docker: &Docker) {
    let conman = Conman::start(docker).await;
    let api = conman.admin();
    api.ensure("s", &json!({"template": "tiny"})).await;
    let name = format!("cb{}", &conman.instance()[..8]);
    shell(&format!(
        "ip link add {name} type bridge; ip link set {name} up"
    ));
    let link = json!({"to": format!("bridge:{name}"), "addresses": ["10.254.7.2/24"]});
    let attached = api.post("/v1/sessions/s/links", &link).await;
    let listed: SessionLinkList = api.get("/v1/sessions/s/links").await.expect(StatusCode::OK);
    api.stop("s").await;
    shell(&format!("ip link delete {name}"));
    assert_eq!(attached.status, StatusCode::CREATED, "{attached:?}");
    assert_eq!(listed.links.len(), 1);
    assert_eq!(listed.links[0].addresses, ["10.254.7.2/24"]);
}
