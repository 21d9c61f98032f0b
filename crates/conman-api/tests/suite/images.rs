//! The image store over the API: what arrives whole is there, what is refused leaves nothing.
//!
//! The tests of full and read-only stores run themselves once more in a mount namespace of their
//! own, so that the machine's mounts stay as they are whatever happens.
#![allow(clippy::print_stderr, reason = "a skipped test says so")]

#[path = "../../../conman-image/tests/suite/support/private_mounts.rs"]
mod private_mounts;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::stage::{Answer, Api, Stage};
use axum::body::{Body, Bytes};
use conman_auth::Scope;
use conman_image::{ImageLimits, ImageStore};
use conman_proto::{GcReport, Image, ImageList, ImageRemoval};
use http::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, LOCATION};
use http::{Method, Request, StatusCode};
use private_mounts::{inside, mount};

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("skipped: layers are unpacked as root");
    }
    root
}

fn header(length: usize) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_size(length as u64);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header
}

/// A root file system of one file.
fn archive(content: &[u8]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    builder
        .append_data(&mut header(content.len()), "etc/motd", content)
        .expect("in memory");
    builder.into_inner().expect("in memory")
}

/// An archive with an entry that leads out of it.
fn hostile() -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = header(1);
    let name = b"../escaped";
    header.as_gnu_mut().expect("GNU").name[..name.len()].copy_from_slice(name);
    header.set_cksum();
    builder.append(&header, &b"x"[..]).expect("in memory");
    builder.into_inner().expect("in memory")
}

fn upload(api: &Api, scope: Scope, query: &str, body: impl Into<Body>) -> Request<Body> {
    let mut request = api.request(scope, Method::POST, &format!("/v1/images{query}"));
    let media_type = "application/octet-stream".parse().expect("a value");
    request.headers_mut().insert(CONTENT_TYPE, media_type);
    *request.body_mut() = body.into();
    request
}

async fn import(api: &Api, name: &str, body: impl Into<Body>) -> Answer {
    let request = upload(api, Scope::Admin, &format!("?name={name}"), body);
    api.send(request).await
}

/// Every file below the store's directory.
fn files(store: &ImageStore) -> BTreeSet<PathBuf> {
    fn walk(directory: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in std::fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                walk(&path, found);
            }
            found.insert(path);
        }
    }
    let mut found = BTreeSet::new();
    walk(store.directory(), &mut found);
    found
}

#[track_caller]
fn assert_refused(answer: &Answer, status: u16, slug: &str, field: &str, part: &str) {
    let problem = answer.problem();
    assert_eq!(
        (problem.status, problem.slug()),
        (status, slug),
        "{problem:?}"
    );
    let fields: Vec<&str> = problem.errors.iter().map(|error| &*error.field).collect();
    assert_eq!(fields.first().copied().unwrap_or_default(), field);
    assert!(problem.detail.contains(part), "{part:?}: {problem:?}");
}

#[tokio::test]
async fn an_uploaded_root_file_system_is_listed_shown_removed_and_collected() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let api = stage.boot().await;
    let empty: ImageList = api.get("/v1/images").await.json();
    assert_eq!(empty.images, []);

    let answer = import(&api, "r.example:5000/team/app", archive(b"hello")).await;
    assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text());
    let image: Image = answer.json();
    assert_eq!(image.names, ["r.example:5000/team/app:latest"]);
    assert_eq!((image.size_bytes, image.layers.len()), (5, 1));
    assert!(!image.in_use && image.imported_at.as_second() > 0);
    let path = answer.headers[LOCATION].to_str().expect("text").to_owned();
    assert_eq!(api.get(&path).await.json::<Image>(), image);
    let list: ImageList = api.get("/v1/images").await.json();
    assert_eq!(list.images, std::slice::from_ref(&image));

    let guard = stage
        .images
        .pin(&"r.example:5000/team/app".parse().expect("a name"))
        .expect("it is there");
    assert!(api.get(&path).await.json::<Image>().in_use);
    let removed: ImageRemoval = api.call(Method::DELETE, &path, "").await.json();
    assert_eq!(removed.name, image.names[0]);
    assert!(removed.in_use && removed.names.is_empty());
    assert_refused(
        &api.get(&path).await,
        404,
        "image-not-found",
        "",
        "team/app",
    );
    let kept: GcReport = api.call(Method::POST, "/v1/gc", "").await.json();
    assert_eq!(kept, GcReport::default());
    let list: ImageList = api.get("/v1/images").await.json();
    assert_eq!(list.images[0].id, image.id);

    drop(guard);
    let freed: GcReport = api.call(Method::POST, "/v1/gc", "").await.json();
    assert_eq!((freed.images, freed.freed_bytes), (vec![image.id], 5));
    assert_refused(
        &api.call(Method::DELETE, &path, "").await,
        404,
        "image-not-found",
        "",
        "team/app",
    );
}

#[tokio::test]
async fn a_second_image_takes_the_name_of_the_first() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let api = stage.boot().await;
    let first: Image = import(&api, "x:1", archive(b"first")).await.json();
    let second: Image = import(&api, "x:1", archive(b"second")).await.json();
    assert_ne!(first.id, second.id);
    assert_eq!(
        api.get("/v1/images/x:1").await.json::<Image>().id,
        second.id
    );
    // The same archive again is the same image, whatever it is called.
    let again: Image = import(&api, "y:1", archive(b"second")).await.json();
    assert_eq!(again.id, second.id);
    assert_eq!(again.names, ["x:1", "y:1"]);
}

#[tokio::test]
async fn what_is_no_image_is_refused_by_its_field_and_leaves_nothing() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let api = stage.boot().await;
    let before = files(&stage.images);
    let mut cut = archive(&[7; 100_000]);
    cut.truncate(50_000);
    let cases: [(&[u8], &str); 5] = [
        (b"", "empty"),
        (b"this is no archive, but a text of some length", ""),
        (&cut, "cut off"),
        (&hostile(), "../escaped"),
        (b"\xfd7zXZ\0 and so on", "gzip or zstd"),
    ];
    for (body, part) in cases {
        let answer = import(&api, "bad:1", body.to_vec()).await;
        assert_refused(&answer, 422, "bad-image", "body", part);
        assert_eq!(files(&stage.images), before, "{part}");
    }
    assert_eq!(
        api.get("/v1/images/bad:1").await.status,
        StatusCode::NOT_FOUND
    );
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    if !is_root() {
        return;
    }
    let stage = Stage::new();
    let api = stage.boot().await;
    let before = files(&stage.images);
    // Whole as an archive, but not as an upload.
    let broken = futures_util::stream::iter([
        Ok(Bytes::from(archive(b"hello"))),
        Err(std::io::Error::other("the peer is gone")),
    ]);
    let answer = import(&api, "x:1", Body::from_stream(broken)).await;
    assert_refused(&answer, 400, "bad-request", "", "the peer is gone");

    // The caller goes away: its request is dropped in the middle of the body.
    let endless = futures_util::StreamExt::chain(
        futures_util::stream::iter([Ok::<_, std::io::Error>(Bytes::from(archive(b"hello")))]),
        futures_util::stream::pending(),
    );
    let dropped = tokio::time::timeout(
        Duration::from_millis(300),
        import(&api, "x:1", Body::from_stream(endless)),
    );
    assert!(dropped.await.is_err(), "it was answered");
    assert_eq!(files(&stage.images), before);
    assert_eq!(
        api.get("/v1/images/x:1").await.status,
        StatusCode::NOT_FOUND
    );
    // And its place is free again.
    for tag in 0..8 {
        let answer = import(&api, &format!("x:{tag}"), archive(b"hello")).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text());
    }
}

#[tokio::test]
async fn an_archive_beyond_the_limits_is_refused_before_it_is_read() {
    if !is_root() {
        return;
    }
    let mut stage = Stage::new();
    let limits = ImageLimits {
        max_blob_bytes: 100_000,
        max_entries: 1,
        ..ImageLimits::default()
    };
    let directory = tempfile::tempdir().expect("a directory");
    stage.images = ImageStore::open(directory.path(), limits).expect("a store");
    let api = stage.boot().await;
    let mut announced = upload(&api, Scope::Admin, "?name=x:1", Body::empty());
    announced
        .headers_mut()
        .insert(CONTENT_LENGTH, 100_001.into());
    assert_refused(
        &api.send(announced).await,
        413,
        "body-too-large",
        "",
        "100000 are allowed",
    );
    let unannounced =
        futures_util::stream::iter((0..5).map(|_| Ok::<_, std::io::Error>(vec![0; 50_000])));
    let answer = import(&api, "x:1", Body::from_stream(unannounced)).await;
    assert_refused(&answer, 413, "body-too-large", "", "100000");
    // Two entries: the directory and the file.
    let answer = import(&api, "x:1", {
        let mut builder = tar::Builder::new(Vec::new());
        for name in ["a", "b"] {
            builder
                .append_data(&mut header(0), name, &b""[..])
                .expect("in memory");
        }
        builder.into_inner().expect("in memory")
    })
    .await;
    assert_refused(&answer, 422, "bad-image", "body", "entries");
}

#[tokio::test]
async fn who_may_only_look_changes_no_image() {
    let stage = Stage::new();
    let api = stage.boot().await;
    for scope in [Scope::Read, Scope::Frontend] {
        let request = upload(&api, scope, "?name=x:1", archive(b"hello"));
        assert_refused(&api.send(request).await, 403, "forbidden", "", "admin");
        for (method, path) in [(Method::DELETE, "/v1/images/x:1"), (Method::POST, "/v1/gc")] {
            let answer = api.send(api.request(scope, method, path)).await;
            assert_refused(&answer, 403, "forbidden", "", "admin");
        }
        let list = api.request(scope, Method::GET, "/v1/images");
        assert_eq!(api.send(list).await.status, StatusCode::OK);
    }
}

#[tokio::test]
async fn a_request_that_asks_for_no_image_names_its_mistake() {
    let mut stage = Stage::new();
    stage.pulls.allowed_registries = Some(BTreeSet::from(["r.example:5000".to_owned()]));
    let api = stage.boot().await;
    let pull = |reference: &str| format!(r#"{{"pull": "{reference}"}}"#);
    let digest = format!("sha256:{}", "0".repeat(64));
    let cases = [
        ("", "{}".to_owned(), 422, "bad-body", "pull", "required"),
        (
            "",
            r#"{"pul": "x"}"#.to_owned(),
            422,
            "bad-body",
            "pul",
            "did you mean `pull`?",
        ),
        (
            "",
            pull("python:3.12"),
            422,
            "bad-body",
            "pull",
            "does not name a registry",
        ),
        (
            "?name=x",
            pull("r.example:5000/A B"),
            422,
            "bad-body",
            "pull",
            "not an image reference",
        ),
        (
            "",
            pull("other.example/a:1"),
            422,
            "registry-not-allowed",
            "pull",
            "r.example:5000",
        ),
        (
            "",
            pull(&format!("r.example:5000/a@{digest}")),
            400,
            "bad-query",
            "name",
            "required",
        ),
        (
            "?name=A",
            pull("r.example:5000/a"),
            400,
            "bad-query",
            "name",
            "NAME:TAG",
        ),
        (
            "?nam=a",
            pull("r.example:5000/a"),
            400,
            "bad-query",
            "nam",
            "name",
        ),
    ];
    for (query, body, status, slug, field, part) in cases {
        let path = format!("/v1/images{query}");
        let answer = api.call(Method::POST, &path, &body).await;
        assert_refused(&answer, status, slug, field, part);
    }
    let answer = api
        .send(upload(&api, Scope::Admin, "", archive(b"hello")))
        .await;
    assert_refused(&answer, 400, "bad-query", "name", "required");
    let mut text = upload(&api, Scope::Admin, "?name=x:1", "hello");
    text.headers_mut()
        .insert(CONTENT_TYPE, "text/plain".parse().expect("a value"));
    let answer = api.send(text).await;
    assert_refused(&answer, 415, "unsupported-media-type", "", "octet-stream");
    for path in ["/v1/images/A", "/v1/images/a%2F..%2Fb", "/v1/images/-x"] {
        assert_refused(&api.get(path).await, 400, "bad-path", "name", "NAME:TAG");
    }
}

#[tokio::test]
async fn a_pull_that_fails_tells_so_as_its_last_event() {
    let stage = Stage::new();
    let api = stage.boot().await;
    // Nobody listens on the discard port of loopback.
    let body = r#"{"pull": "127.0.0.1:9/a:1"}"#;
    let mut request = api.request(Scope::Admin, Method::POST, "/v1/images");
    for (name, value) in [
        (CONTENT_TYPE, "application/json"),
        (ACCEPT, "text/event-stream"),
    ] {
        let value = value.parse().expect("a value");
        request.headers_mut().insert(name, value);
    }
    *request.body_mut() = Body::from(body);
    let answer = api.send(request).await;
    assert_eq!(answer.status, StatusCode::OK);
    assert_eq!(answer.headers[CONTENT_TYPE], "text/event-stream");
    let text = answer.text();
    let last = text.trim_end().rsplit("\n\n").next().expect("an event");
    let data = last
        .strip_prefix("event: problem\ndata: ")
        .unwrap_or_else(|| panic!("{text}"));
    let told: conman_proto::Problem = serde_json::from_str(data).expect("a problem");
    assert_eq!(
        (told.status, told.slug(), told.retryable),
        (502, "image-registry-unreachable", true)
    );

    let answer = api.call(Method::POST, "/v1/images", body).await;
    assert_eq!(answer.status, StatusCode::BAD_GATEWAY);
    assert_eq!(answer.problem().slug(), "image-registry-unreachable");
}

/// A stage whose store lies on a file system of 1 MiB.
fn small(directory: &Path) -> Stage {
    mount(&["-t", "tmpfs", "-o", "size=1m", "tmpfs"], directory);
    let mut stage = Stage::new();
    stage.images = ImageStore::open(directory, ImageLimits::default()).expect("a store");
    stage
}

#[tokio::test]
async fn a_full_store_says_so_and_keeps_what_it_has() {
    if !inside("images::a_full_store_says_so_and_keeps_what_it_has") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let stage = small(directory.path());
    let api = stage.boot().await;
    let kept: Image = import(&api, "small:1", archive(b"hello")).await.json();
    let before = files(&stage.images);
    let large = archive(&vec![1; 2 << 20]);
    // Announced, not announced, and with room for the archive but not for what is in it.
    let mut announced = upload(&api, Scope::Admin, "?name=large:1", large.clone());
    announced
        .headers_mut()
        .insert(CONTENT_LENGTH, large.len().into());
    let streamed = futures_util::stream::iter([Ok::<_, std::io::Error>(large.clone())]);
    let streamed = upload(
        &api,
        Scope::Admin,
        "?name=large:1",
        Body::from_stream(streamed),
    );
    let half = archive(&vec![1; 600 << 10]);
    let unpacked = upload(&api, Scope::Admin, "?name=large:1", half);
    for request in [announced, streamed, unpacked] {
        let answer = api.send(request).await;
        let problem = answer.problem();
        assert_eq!((problem.status, problem.slug()), (507, "image-store-full"));
        assert_eq!(files(&stage.images), before);
    }
    assert_eq!(api.get("/v1/images/small:1").await.json::<Image>(), kept);
}

#[tokio::test]
async fn a_read_only_store_says_so_and_goes_on_showing_images() {
    if !inside("images::a_read_only_store_says_so_and_goes_on_showing_images") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let stage = small(directory.path());
    let api = stage.boot().await;
    let kept: Image = import(&api, "small:1", archive(b"hello")).await.json();
    // Another mount of the same above it: the store's lock is open for writing in the first.
    let path = directory.path().display().to_string();
    mount(&["--bind", &path], directory.path());
    mount(&["-o", "remount,bind,ro"], directory.path());
    let answers = [
        import(&api, "x:1", archive(b"other")).await,
        api.call(Method::DELETE, "/v1/images/small:1", "").await,
    ];
    for answer in answers {
        let problem = answer.problem();
        assert_eq!(
            (problem.status, problem.slug()),
            (507, "image-store-read-only"),
            "{problem:?}"
        );
    }
    assert_eq!(api.get("/v1/images/small:1").await.json::<Image>(), kept);
}
