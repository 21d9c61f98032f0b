//! Sessions whose templates limit what they send and receive.

use std::time::{Duration, Instant};

use conman_e2e::Conman;
use conman_proto::{ExecResult, Session, SessionStats};
use http::StatusCode;
use serde_json::json;

use super::routed::{in_network, shell};

const CONFIG: &str = r#"
[net]
pool = ["10.88.0.0/29"]
dns = ["10.2.0.53"]
[templates.limited]
image = "conman-test/root:1"
command = ["httpd", "-f", "-p", "8080", "-h", "/www"]
port = 8080
network = "routed"
bandwidth = { in = "80mbit", out = "16mbit" }
"#;

/// 2 MB a second: they take 1.4 s after a burst of 200 KB.
const BYTES: usize = 3_000_000;
const LEAST: Duration = Duration::from_millis(1_200);

#[test]
fn a_session_sends_at_its_templates_rate_and_shows_what_it_has_sent() {
    in_network(async |native| {
        let builder = Conman::builder().toml(CONFIG).token("ops", "admin");
        let conman = builder.start_native(&native).await;
        let api = conman.admin();
        let faster = json!({"template": "limited", "bandwidth": {"out": "17mbit"}});
        let refused = api.put("/v1/sessions/s", &faster).await.problem();
        assert_eq!(refused.errors[0].field, "bandwidth.out", "{refused:?}");
        let lower = json!({"template": "limited", "bandwidth": {"in": "40mbit"}});
        let made: Session = api.ensure("s", &lower).await.session;
        let spec = made.spec.bandwidth;
        let shown = serde_json::to_value(spec).expect("it serializes");
        assert_eq!(shown, json!({"in": "40mbit", "out": "16mbit"}));
        // The host's end sends what the session receives.
        let queues = shell("tc qdisc show");
        assert!(
            queues.contains("tbf") && queues.contains("rate 40Mbit"),
            "{queues}"
        );
        let make = format!("yes | head -c {BYTES} >/www/big");
        let command = json!({"command": ["sh", "-c", make]});
        let made = api.post("/v1/sessions/s/exec", &command).await;
        let made: ExecResult = made.expect(StatusCode::OK);
        assert_eq!(made.exit_code, 0, "{made:?}");
        let sessions = conman.sessions().with_token(conman.token("ops"));
        let begun = Instant::now();
        assert_eq!(sessions.get("/s/s/big").await.text().len(), BYTES);
        assert!(begun.elapsed() >= LEAST, "{:?}", begun.elapsed());
        let stats = api.get("/v1/sessions/s/stats").await;
        let stats: SessionStats = stats.expect(StatusCode::OK);
        assert!(stats.proxy_sent_bytes >= BYTES as u64, "{stats:?}");
        assert!(stats.proxy_received_bytes > 0, "{stats:?}");
        assert!(stats.sent_bytes < Some(BYTES as u64), "{stats:?}");
        api.stop("s").await;
    });
}
