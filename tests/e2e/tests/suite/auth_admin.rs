//! The admin socket is for root and the daemon's own user, by its mode and by who connects; so is the
//! administrator's token next to it, which the first start makes.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use conman_e2e::{Conman, answer, docker_shared, eventually, native, with};
use conman_linux::Signal;
use conman_proto::Problem;
use http::{Method, StatusCode};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
/// curl's exit code where it cannot connect.
const CURL_CANNOT_CONNECT: i32 = 7;

/// A request over the socket by a process of this user, with its status in the last line.
fn curl_as(uid: &str, socket: &Path, arguments: &[&str]) -> Output {
    Command::new("setpriv")
        .args(["--reuid", uid, "--regid", uid, "--clear-groups", "--"])
        .args([
            "curl",
            "--silent",
            "--max-time",
            "60",
            "--write-out",
            "\n%{http_code}",
        ])
        .arg("--unix-socket")
        .arg(socket)
        .args(arguments)
        .output()
        .expect("setpriv and curl can be run")
}

#[tokio::test]
async fn the_admin_socket_admits_root_and_nobody_else_even_when_its_mode_does() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder().token("any", "read").start(&docker).await;
    let socket = conman.socket_path();
    let made = fs::symlink_metadata(&socket).expect("the socket is there");
    assert!(made.file_type().is_socket());
    assert_eq!((made.mode() & 0o7777, made.uid()), (0o600, 0));
    let admin = conman.admin();
    admin.ensure("s", &json!({"template": "tiny"})).await;

    // The directory lets everybody through; the socket's mode is what stands in the way.
    fs::set_permissions(conman.directory(), Permissions::from_mode(0o711)).expect("chmod");
    let list = "http://localhost/v1/sessions";
    let kept_out = curl_as("65534", &socket, &[list]);
    assert_eq!(
        kept_out.status.code(),
        Some(CURL_CANNOT_CONNECT),
        "{kept_out:?}"
    );

    // Now nothing but the credentials of the process does.
    fs::set_permissions(&socket, Permissions::from_mode(0o666)).expect("chmod");
    let token = format!("authorization: Bearer {}", conman.token("any"));
    for arguments in [
        &[list][..],
        &["-X", "DELETE", "http://localhost/v1/sessions/s"],
        &["-X", "POST", "http://localhost/v1/nodes/self/preempt"],
        &["http://localhost/healthz"],
        &["http://localhost/no-such-route"],
        &["-H", &token, list],
    ] {
        let refused = curl_as("65534", &socket, arguments);
        let text = String::from_utf8_lossy(&refused.stdout).into_owned();
        let (body, status) = text.rsplit_once('\n').expect("two lines");
        assert_eq!(status, "403", "{arguments:?}: {text}");
        let problem: Problem = serde_json::from_str(body).expect("a problem");
        assert_eq!(problem.slug(), "forbidden");
        assert!(problem.detail.contains("uid 65534"), "{}", problem.detail);
    }
    let root = curl_as("0", &socket, &[list]);
    let text = String::from_utf8_lossy(&root.stdout).into_owned();
    assert!(text.ends_with("\n200") && text.contains("\"s\""), "{text}");
    admin.session("s").await;
}

#[tokio::test]
async fn the_admin_socket_needs_no_token_and_answers_no_page() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .token("any", "read")
        .set("listen", "allowed_origins = [\"https://app.example\"]")
        .start(&docker)
        .await;
    let admin = conman.admin();
    assert_eq!(admin.get("/v1/sessions").await.status, StatusCode::OK);
    let wrong = conman.admin().with_token("cmn_admin_wrong");
    assert_eq!(wrong.get("/v1/sessions").await.status, StatusCode::OK);
    for origin in ["https://app.example", "http://localhost", "null"] {
        let request = admin.request(Method::GET, "/v1/sessions", None);
        let refused = answer(&admin, with(request, "origin", origin)).await;
        assert_eq!(refused.problem().slug(), "origin-refused", "{origin}");
        assert!(!refused.headers.contains_key("access-control-allow-origin"));
    }
}

/// What anybody could do, if the API were open: each line is method, path, body.
const FOR_ANYBODY: [(&str, &str, &str); 4] = [
    ("GET", "/v1/sessions", ""),
    ("PUT", "/v1/sessions/mine", r#"{"template":"idle"}"#),
    ("POST", "/v1/nodes/self/preempt", "{}"),
    ("POST", "/v1/images/pull", r#"{"image":"127.0.0.1:9/x:1"}"#),
];

#[tokio::test]
async fn from_the_first_start_the_api_on_loopback_is_for_the_administrator() {
    let Some(native) = native() else { return };
    let mut conman = Conman::builder()
        .set("auth", "loopback = \"token\"")
        .start_native(&native)
        .await;
    let file = conman.directory().join("admin.token");
    let made = fs::metadata(&file).expect("the token is next to the socket");
    assert_eq!((made.mode() & 0o7777, made.uid()), (0o600, 0));
    let token = fs::read_to_string(&file).expect("root reads it");
    fs::set_permissions(conman.directory(), Permissions::from_mode(0o711)).expect("chmod");
    for (method, path, body) in FOR_ANYBODY {
        let url = format!("http://{}{path}", conman.api_address());
        let nobody = Command::new("setpriv")
            .args([
                "--reuid",
                "65534",
                "--regid",
                "65534",
                "--clear-groups",
                "--",
            ])
            .args(["curl", "-sS", "--max-time", "20", "-X", method, "-d", body])
            .args(["-H", "content-type: application/json", &url])
            .output()
            .expect("setpriv and curl can be run");
        let problem: Problem = serde_json::from_slice(&nobody.stdout).expect("a problem");
        assert_eq!(problem.status, 401, "{method} {path}");
        let named = file.to_string_lossy();
        assert!(problem.detail.contains(&*named), "{}", problem.detail);
    }
    let api = conman.api();
    assert_eq!(api.get("/readyz").await.status, StatusCode::OK);
    let administrator = api.with_token(token.trim());
    administrator
        .ensure("mine", &json!({"template": "idle"}))
        .await;
    // The token that was given to a program stays valid.
    conman.restart_after_crash().await;
    assert_eq!(fs::read_to_string(&file).expect("kept"), token);
    administrator.session("mine").await;
}

#[tokio::test]
async fn an_open_api_is_named_and_stays_open_until_the_restart_that_is_asked_for() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    assert!(!conman.directory().join("admin.token").exists());
    let open = "every user of this machine is an administrator";
    assert!(conman.log().contains(open), "{}", conman.log());
    let config = conman.config_path();
    let text = fs::read_to_string(&config).expect("readable");
    let closed = text.replace("loopback = \"open\"", "loopback = \"token\"");
    fs::write(&config, closed).expect("written");
    conman.signal(Signal::SIGHUP);
    let said = || {
        conman
            .log()
            .contains("`auth` is read at the next start only")
    };
    eventually("the log says so", PATIENCE, async || said()).await;
    assert_eq!(
        conman.api().get("/v1/sessions").await.status,
        StatusCode::OK
    );
}
