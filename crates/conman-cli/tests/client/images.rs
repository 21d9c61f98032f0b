//! `conman image` against a daemon that answers as each test tells it.

use std::io::Write as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use crate::support::{Daemon, Outcome, PATIENCE, problem};

fn image(names: &[&str]) -> Value {
    json!({
        "id": format!("sha256:{}", "ab".repeat(32)),
        "names": names,
        "architecture": "amd64",
        "size_bytes": 4_404_019,
        "imported_at": "2026-03-01T12:00:00Z",
        "in_use": true,
        "layers": [{"id": format!("sha256:{}", "cd".repeat(32)), "size_bytes": null}],
        "config": {
            "entrypoint": ["/bin/tini"], "cmd": ["sh", "-c", "a b"], "env": ["PATH=/bin"],
            "user": "app", "workdir": "/srv", "stop_signal": null, "exposed_ports": ["80/tcp"],
            "labels": {"team": "a"},
        },
        "field_of_a_newer_daemon": true,
    })
}

/// What a daemon was sent: query, headers, body.
type Received = Arc<Mutex<Vec<(String, HeaderMap, Bytes)>>>;

fn accepting(
    received: &Received,
    answer: impl Fn() -> Response + Clone + Send + Sync + 'static,
) -> Router {
    let received = Arc::clone(received);
    let accept = move |uri: Uri, headers: HeaderMap, body: Bytes| {
        let query = uri.query().unwrap_or_default().to_owned();
        received
            .lock()
            .expect("no panic")
            .push((query, headers, body));
        let answer = answer.clone();
        async move { answer() }
    };
    Router::new()
        .route("/v1/images", post(accept))
        .layer(DefaultBodyLimit::disable())
}

fn created() -> Response {
    (StatusCode::CREATED, image(&["busybox:1"]).to_string()).into_response()
}

async fn with_stdin(daemon: &Daemon, words: &[&str], stdin: &[u8]) -> Outcome {
    let mut command = daemon.command(words);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().expect("the client runs");
    let mut input = child.stdin.take().expect("piped");
    tokio::io::AsyncWriteExt::write_all(&mut input, stdin)
        .await
        .expect("written");
    drop(input);
    let output = tokio::time::timeout(PATIENCE, child.wait_with_output())
        .await
        .expect("the client ends")
        .expect("its output is read");
    Outcome {
        code: output.status.code().expect("no signal"),
        stdout: String::from_utf8(output.stdout).expect("UTF-8"),
        stderr: String::from_utf8(output.stderr).expect("UTF-8"),
    }
}

#[tokio::test]
async fn an_archive_is_sent_as_it_is_from_a_file_and_from_standard_input() {
    let received = Received::default();
    let daemon = Daemon::start(accepting(&received, created));
    let archive: Vec<u8> = (0..300_000_u32).map(|n| (n % 251) as u8).collect();
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(&archive).expect("written");
    let path = file.path().to_str().expect("text");

    let outcome = daemon.run(&["image", "import", path, "a/busybox:1"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(outcome.stdout, "a/busybox:1 is here: 4.2 MiB in 1 layer\n");
    let words = ["--json", "image", "import", "-", "a/busybox:1"];
    let outcome = with_stdin(&daemon, &words, &archive).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert_eq!(outcome.json(), image(&["busybox:1"]));
    assert_eq!(outcome.stderr, "");

    let received = received.lock().expect("no panic");
    assert_eq!(received.len(), 2);
    for (query, headers, body) in received.iter() {
        assert_eq!(query, "name=a%2Fbusybox%3A1");
        assert_eq!(headers["content-type"], "application/octet-stream");
        assert!(body == &archive, "{} bytes arrived", body.len());
    }
    assert_eq!(received[0].1["content-length"], "300000");
    assert!(!received[1].1.contains_key("content-length"));
}

#[tokio::test]
async fn a_layouts_directory_is_sent_as_an_archive() {
    let received = Received::default();
    let daemon = Daemon::start(accepting(&received, created));
    let directory = tempfile::tempdir().expect("a directory");
    let blobs = directory.path().join("blobs/sha256");
    std::fs::create_dir_all(&blobs).expect("made");
    let content = vec![7; 300_000];
    for (path, bytes) in [
        (directory.path().join("oci-layout"), &b"{}"[..]),
        (directory.path().join("index.json"), b"[]"),
        (blobs.join("ab"), &content),
    ] {
        std::fs::write(path, bytes).expect("written");
    }
    let path = directory.path().to_str().expect("text");
    let outcome = daemon.run(&["image", "import", path, "x:1"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let received = received.lock().expect("no panic");
    let (_, _, body) = received.first().expect("it was sent");
    // A header each, whole blocks, and the end's two.
    let blocks = [2, 2, 1 + content.len().div_ceil(512), 2];
    assert_eq!(body.len(), blocks.iter().sum::<usize>() * 512);
    assert!(body[..512].starts_with(b"oci-layout\0"));
    assert!(body[4 * 512..].starts_with(b"blobs/sha256/ab\0"));
    assert_eq!(&body[5 * 512..][..content.len()], content);
}

#[tokio::test]
async fn what_cannot_be_read_is_told_and_never_sent_as_if_it_were_whole() {
    let received = Received::default();
    let daemon = Daemon::start(accepting(&received, created));
    let outcome = daemon.run(&["image", "import", "/nowhere", "x:1"]).await;
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(
        outcome.stderr.contains("/nowhere: No such file"),
        "{outcome:?}"
    );
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("text");
    let outcome = daemon.run(&["image", "import", path, "x:1"]).await;
    assert_eq!(outcome.code, 2, "{outcome:?}");
    assert!(outcome.stderr.contains("tar -C"), "{outcome:?}");
    // A layout without its index.
    std::fs::write(directory.path().join("oci-layout"), "{}").expect("written");
    let outcome = daemon.run(&["image", "import", path, "x:1"]).await;
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.stderr.contains("index.json"), "{outcome:?}");
    // It opens, and then cannot be read.
    let words = ["--json", "image", "import", "/proc/self/mem", "x:1"];
    let outcome = daemon.run(&words).await;
    assert_eq!(outcome.code, 1, "{outcome:?}");
    let told = outcome.problem();
    assert_eq!(told.slug(), "archive-unreadable");
    assert!(told.detail.contains("/proc/self/mem"), "{told:?}");
    assert!(received.lock().expect("no panic").is_empty());
}

#[tokio::test]
async fn a_refusal_in_the_middle_of_an_upload_is_told_as_the_daemon_did() {
    // It answers without reading the body.
    let refuse = || async { problem(507, "image-store-full", "no room in /var/lib/conman") };
    let daemon = Daemon::start(Router::new().route("/v1/images", post(refuse)));
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(&vec![0; 8 << 20]).expect("written");
    let path = file.path().to_str().expect("text");
    let outcome = daemon
        .run(&["--json", "image", "import", path, "x:1"])
        .await;
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert_eq!(outcome.problem().slug(), "image-store-full", "{outcome:?}");
}

#[tokio::test]
async fn a_pull_follows_its_progress_to_the_image_or_the_problem() {
    let events = |last: (&str, Value)| {
        let progress = json!({"phase": "downloading", "layers": [
            {"blob": "sha256:00", "total_bytes": 10, "done_bytes": 5}]});
        format!(
            ": hello\n\nevent: progress\ndata: {progress}\n\nevent: news\ndata: {{}}\n\n\
             event: {}\ndata: {}\n\n",
            last.0, last.1
        )
    };
    let stream = |text: String| {
        move || ([("content-type", "text/event-stream")], text.clone()).into_response()
    };
    let received = Received::default();
    let whole = stream(events(("image", image(&["r.example/a:1"]))));
    let daemon = Daemon::start(accepting(&received, whole));
    let outcome = daemon.run(&["image", "pull", "r.example/a:1"]).await;
    assert_eq!(outcome.code, 0, "{outcome:?}");
    assert!(
        outcome.stdout.starts_with("r.example/a:1 is here"),
        "{outcome:?}"
    );
    let words = ["--json", "image", "pull", "r.example/a:1", "--name", "a:1"];
    let outcome = daemon.run(&words).await;
    assert_eq!(outcome.json()["names"], json!(["r.example/a:1"]));
    {
        let received = received.lock().expect("no panic");
        let queries: Vec<&str> = received.iter().map(|(query, ..)| &**query).collect();
        assert_eq!(queries, ["", "name=a%3A1"]);
        for (_, headers, body) in received.iter() {
            assert_eq!(headers["accept"], "text/event-stream");
            assert_eq!(&body[..], br#"{"pull":"r.example/a:1"}"#);
        }
    }

    let refused = json!({"type": "urn:conman:problem:not-in-registry", "title": "t",
        "status": 422, "detail": "d", "retryable": false});
    let failed = Daemon::start(accepting(
        &Received::default(),
        stream(events(("problem", refused))),
    ));
    let outcome = failed
        .run(&["--json", "image", "pull", "r.example/a:1"])
        .await;
    assert_eq!(outcome.code, 4, "{outcome:?}");
    assert_eq!(outcome.problem().slug(), "not-in-registry");

    let cut = Daemon::start(accepting(
        &Received::default(),
        stream(": and nothing more\n\n".to_owned()),
    ));
    let outcome = cut.run(&["image", "pull", "r.example/a:1"]).await;
    assert_eq!(outcome.code, 1, "{outcome:?}");
    assert!(outcome.stderr.contains("may continue"), "{outcome:?}");
}

#[tokio::test]
async fn images_are_listed_by_name_and_shown_whole() {
    let list = || async {
        let mut unnamed = image(&[]);
        unnamed["in_use"] = json!(false);
        json!({"images": [image(&["z:1", "a:1"]), unnamed]}).to_string()
    };
    let router = Router::new().route("/v1/images", get(list)).route(
        "/v1/images/{name}",
        get(|| async { image(&["a:1"]).to_string() }),
    );
    let daemon = Daemon::start(router);
    let outcome = daemon.run(&["image", "ls"]).await;
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines.len(), 4, "{outcome:?}");
    for (line, part) in lines.iter().zip(["NAME", "- ", "a:1", "z:1"]) {
        assert!(line.starts_with(part), "{outcome:?}");
    }
    assert!(lines[2].contains("abababababab") && lines[2].contains("4.2 MiB"));
    assert!(!lines[1].contains("yes") && lines[3].contains("yes"));
    let quiet = daemon.run(&["image", "ls", "--quiet"]).await;
    assert_eq!(quiet.stdout, "z:1\na:1\n");
    let json = daemon.run(&["--json", "image", "list"]).await.json();
    assert_eq!(json["images"][0]["field_of_a_newer_daemon"], true);

    let shown = daemon.run(&["image", "inspect", "a:1"]).await.json();
    assert_eq!(shown, image(&["a:1"]));
}

#[tokio::test]
async fn removing_goes_on_after_a_name_that_is_not_there() {
    let remove = |axum::extract::Path(name): axum::extract::Path<String>| async move {
        if name == "gone:1" {
            return problem(404, "image-not-found", "there is no image gone:1");
        }
        let used = name == "used:1";
        json!({"name": name, "id": "sha256:00", "names": [], "in_use": used})
            .to_string()
            .into_response()
    };
    let collect = || async {
        json!({"images": ["sha256:00"], "layers": [], "freed_bytes": 2048}).to_string()
    };
    let router = Router::new()
        .route("/v1/images/{name}", axum::routing::delete(remove))
        .route("/v1/gc", post(collect));
    let daemon = Daemon::start(router);
    let words = ["image", "rm", "r.example/a:1", "gone:1", "used:1"];
    let outcome = daemon.run(&words).await;
    assert_eq!(outcome.code, 3, "{outcome:?}");
    let told = "r.example/a:1 is removed\nused:1 is removed; the image stays until no session \
                uses it\n";
    assert_eq!(outcome.stdout, told);
    assert!(outcome.stderr.contains("conman image ls"), "{outcome:?}");
    let json = daemon.run(&["--json", "image", "rm", "a:1"]).await.json();
    assert_eq!(json["removed"][0]["name"], "a:1");

    let outcome = daemon.run(&["image", "gc"]).await;
    assert_eq!(
        outcome.stdout,
        "removed 1 image and 0 layers: 2 KiB are free again\n"
    );
}
