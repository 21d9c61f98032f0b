//! TLS in front of both listeners, by the configurations of `deploy/balancers.md`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use conman_e2e::{Conman, eventually, lacks, native};

use crate::pages::fenced;

const PAGE: &str = include_str!("../../../../../deploy/balancers.md");
const HAPROXY: &str = include_str!("../../../../../deploy/haproxy/haproxy.cfg");
const NGINX: &str = include_str!("../../../../../deploy/nginx/conman.conf");
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

/// A node as the page configures it, and a certificate for its names.
struct Stage {
    conman: Conman,
    certificate: PathBuf,
    key: PathBuf,
}

/// Ends with the test.
struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Stage {
    async fn start(program: &str) -> Option<Self> {
        let native = native()?;
        if !Path::new("/usr/sbin").join(program).exists() {
            lacks(&format!("{program} is not installed"));
            return None;
        }
        let page = &fenced(PAGE, "toml")[0];
        let listen = page
            .lines()
            .skip(1)
            .take_while(|line| !line.starts_with('['));
        let builder = Conman::builder().token("admin", "admin");
        let builder = listen.fold(builder, |builder, line| builder.set("listen", line));
        let conman = builder.start_native(&native).await;
        conman
            .cli(&["run", "alice", "--template", "web"])
            .await
            .success();
        let certificate = conman.directory().join("certificate.pem");
        let key = conman.directory().join("key.pem");
        let made = Command::new("openssl")
            .args([
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-subj",
                "/CN=conman",
            ])
            .args([
                "-addext",
                "subjectAltName=DNS:api.example.org,DNS:*.sessions.example.org",
            ])
            .arg("-out")
            .arg(&certificate)
            .arg("-keyout")
            .arg(&key)
            .output()
            .expect("openssl runs");
        assert!(made.status.success(), "{made:?}");
        Some(Self {
            conman,
            certificate,
            key,
        })
    }

    /// A port that nothing uses; the proxy binds it next.
    fn port() -> u16 {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.local_addr().expect("its address").port()
    }

    /// The answer to a request for this name through the proxy.
    fn get(&self, port: u16, host: &str, path: &str, arguments: &[&str]) -> String {
        let output = Command::new("curl")
            .args([
                "-sS",
                "--fail-with-body",
                "--max-time",
                "20",
                "--noproxy",
                "*",
            ])
            .arg("--cacert")
            .arg(&self.certificate)
            .args(["--connect-to", &format!("{host}:443:127.0.0.1:{port}")])
            .args(arguments)
            .arg(format!("https://{host}{path}"))
            .output()
            .expect("curl runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    }

    async fn serves(&self, port: u16) {
        let bearer = format!("Authorization: Bearer {}", self.conman.token("admin"));
        let session = "alice.sessions.example.org";
        eventually("the proxy serves a session", PATIENCE, async || {
            self.get(port, session, "/", &["-H", &bearer]) == "hello\n"
        })
        .await;
        let refused = self.get(port, session, "/", &[]);
        assert!(refused.contains("401"), "{refused}");
        // A cookie over TLS is for TLS only: conman trusts `X-Forwarded-Proto`.
        let (admin, body) = (self.conman.admin(), serde_json::json!({}));
        let made = admin.post("/v1/sessions/alice/token", &body).await;
        let token: serde_json::Value = made.expect(http::StatusCode::OK);
        let path = format!(
            "/?conman_token={}",
            token["token"].as_str().expect("a token")
        );
        let exchanged = self.get(port, session, &path, &["-i"]).to_lowercase();
        assert!(exchanged.contains("; secure"), "{exchanged}");
    }
}

fn spawn(command: &mut Command, directory: &Path) -> Proxy {
    let log = fs::File::create(directory.join("proxy.log")).expect("a file");
    let child = command
        .stdin(Stdio::null())
        .stdout(log.try_clone().expect("shared"))
        .stderr(log)
        .spawn();
    Proxy(child.expect("it starts"))
}

#[tokio::test]
async fn haproxy_terminates_tls_as_the_page_says() {
    let Some(stage) = Stage::start("haproxy").await else {
        return;
    };
    let directory = stage.conman.directory();
    let certificates = directory.join("certificates");
    fs::create_dir(&certificates).expect("made");
    let both = [&stage.certificate, &stage.key].map(|path| fs::read_to_string(path).expect("read"));
    fs::write(certificates.join("conman.pem"), both.concat()).expect("written");
    let port = Stage::port();
    let page = fenced(PAGE, "haproxy")[0]
        .replace(":443", &format!("127.0.0.1:{port}"))
        .replace(
            "/etc/haproxy/certs/",
            &format!("{}/", certificates.display()),
        )
        .replace("10.0.0.1:7700", &stage.conman.api_address().to_string());
    let (base, own) = (directory.join("haproxy.cfg"), directory.join("tls.cfg"));
    fs::write(&base, HAPROXY).expect("written");
    fs::write(&own, page).expect("written");
    let mut haproxy = Command::new("haproxy");
    haproxy
        .arg("-db")
        .args([Path::new("-f"), &base, Path::new("-f"), &own])
        .env("CONMAN_LISTEN", format!("127.0.0.1:{}", Stage::port()));
    for number in 1..=3 {
        // All three are this node.
        let sessions = stage.conman.sessions_address().to_string();
        haproxy.env(format!("CONMAN_N{number}"), sessions);
    }
    let _proxy = spawn(&mut haproxy, directory);
    stage.serves(port).await;
    let bearer = format!("Authorization: Bearer {}", stage.conman.token("admin"));
    let listed = stage.get(port, "api.example.org", "/v1/sessions", &["-H", &bearer]);
    assert!(listed.contains("\"alice\""), "{listed}");
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn nginx_terminates_tls_as_the_page_says() {
    let Some(stage) = Stage::start("nginx").await else {
        return;
    };
    let directory = stage.conman.directory();
    let port = Stage::port();
    let tls = fenced(PAGE, "nginx")[0]
        .replace("443", &format!("127.0.0.1:{port}"))
        .replace(
            "/etc/nginx/conman.pem",
            &stage.certificate.display().to_string(),
        )
        .replace("/etc/nginx/conman.key", &stage.key.display().to_string());
    let mut servers = NGINX
        .replace("    listen 80;\n", &tls)
        .replace(".conman.example", ".sessions.example.org");
    for node in ["10.0.0.1:7701", "10.0.0.2:7701", "10.0.0.3:7701"] {
        servers = servers.replace(node, &stage.conman.sessions_address().to_string());
    }
    let own = directory.display();
    let whole = format!(
        "daemon off;\nuser root;\npid {own}/nginx.pid;\nerror_log {own}/nginx.log;\nevents {{}}\n\
         http {{\naccess_log off;\n{servers}}}\n"
    );
    let file = directory.join("nginx.conf");
    fs::write(&file, whole).expect("written");
    let mut nginx = Command::new("nginx");
    nginx.arg("-p").arg(directory).arg("-c").arg(&file);
    let _proxy = spawn(&mut nginx, directory);
    stage.serves(port).await;
}

/// The alerts of the page, as rules.
#[test]
#[ignore = "`cargo xtask acceptance programs`"]
fn prometheus_accepts_the_alerts_of_the_page() {
    let page = include_str!("../../../../../deploy/metrics.md");
    let (_, alerts) = page.split_once("## Alerts to set").expect("the section");
    let mut rules = "groups:\n- name: conman\n  rules:\n".to_owned();
    let mut count = 0;
    for row in alerts.lines().filter(|line| line.starts_with("| ")).skip(1) {
        let expression = row.split('`').nth(1).expect("an expression");
        count += 1;
        rules.push_str(&format!(
            "  - alert: conman{count}\n    expr: '{expression}'\n"
        ));
    }
    assert!(count >= 9, "{rules}");
    let scrape = &fenced(page, "yaml")[0];
    let directory = tempfile::tempdir().expect("a directory");
    let (file, config) = (
        directory.path().join("rules.yml"),
        directory.path().join("prometheus.yml"),
    );
    fs::write(&file, &rules).expect("written");
    let token = directory.path().join("token");
    fs::write(&token, "secret").expect("written");
    let scrape = scrape.replace("/etc/prometheus/conman-token", &token.display().to_string());
    fs::write(&config, scrape).expect("written");
    for arguments in [["check", "rules"], ["check", "config"]] {
        let path = if arguments[1] == "rules" {
            &file
        } else {
            &config
        };
        let checked = Command::new("promtool").args(arguments).arg(path).output();
        let checked = checked.expect("promtool runs (package prometheus)");
        assert!(checked.status.success(), "{checked:?}\n{rules}");
    }
}
