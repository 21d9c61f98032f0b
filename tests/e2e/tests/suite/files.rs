//! Files in and out of a session, and what hostile paths, links and archives cannot do.

use std::time::Duration;

use bytes::Bytes;
use conman_e2e::{Answer, Api, Conman, ROOT, SmallDisk, native};
use conman_proto::{ExecResult, FileEntry, FileList, FileType, UnpackReport};
use http::header::{CONTENT_LENGTH, CONTENT_RANGE, RANGE};
use http::{HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde_json::json;

const FILES: &str = "/v1/sessions/s/files";

async fn started() -> Option<Conman> {
    let native = native()?;
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    api.ensure("s", &json!({"template": "idle"})).await;
    sh(&api, "chmod 1777 /tmp").await;
    Some(conman)
}

async fn put(api: &Api, query: &str, body: impl Into<Bytes>) -> Answer {
    let request = api.request(Method::PUT, &format!("{FILES}?{query}"), None);
    let request = request.map(|_| Full::new(body.into()));
    let mut streamed = api.open(request).await.expect("an answer");
    let body = streamed.response.body_mut().collect().await;
    Answer {
        status: streamed.response.status(),
        headers: streamed.response.headers().clone(),
        body: body.expect("whole").to_bytes(),
    }
}

async fn get(api: &Api, query: &str) -> Answer {
    api.get(&format!("{FILES}?{query}")).await
}

async fn sh(api: &Api, script: &str) -> String {
    let request = json!({"command": ["sh", "-c", script]});
    let answer = api.post("/v1/sessions/s/exec", &request).await;
    let result: ExecResult = answer.expect(StatusCode::OK);
    assert_eq!(result.exit_code, 0, "{script}: {result:?}");
    result.stdout
}

/// An archive of entries: path, type, and content or link target.
fn tar(entries: &[(&str, tar::EntryType, &str)]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, kind, content) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o640);
        header.set_mtime(1_000_000_000);
        // As a hostile archiver would: the crate refuses `..` in names.
        header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
        let content = match kind {
            tar::EntryType::Regular => content.as_bytes(),
            _ => {
                header.as_mut_bytes()[157..157 + content.len()].copy_from_slice(content.as_bytes());
                &[]
            }
        };
        header.set_size(content.len() as u64);
        header.set_cksum();
        archive.append(&header, content).expect("written");
    }
    archive.into_inner().expect("written")
}

fn refused(answer: &Answer, slug: &str) -> String {
    let problem = answer.problem();
    assert_eq!(problem.slug(), slug, "{problem:?}");
    problem.detail
}

#[tokio::test]
async fn a_file_is_written_whole_read_in_parts_listed_moved_and_removed() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    let missing = put(&api, "path=/a/b/c", "x").await;
    refused(&missing, "no-such-file");
    let written = put(&api, "path=/a/b/c&parents&user=user&mode=600", "x").await;
    // `user` may not make a directory in the root.
    refused(&written, "file-refused");
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    for query in ["path=/a/b/c&parents", "path=/a/b/c&mode=600"] {
        let written = put(&api, query, content.clone()).await;
        assert_eq!(written.status, StatusCode::NO_CONTENT, "{}", written.text());
    }
    assert_eq!(
        sh(&api, "stat -c '%a %u %s' /a/b/c; ls -A /a/b").await,
        "600 0 12000000\nc\n"
    );
    let mine = put(&api, "path=/tmp/mine&user=user", "").await;
    assert_eq!(mine.status, StatusCode::NO_CONTENT, "{}", mine.text());
    assert_eq!(sh(&api, "stat -c '%a %u' /tmp/mine").await, "644 1000\n");

    let read = get(&api, "path=/a/b/c").await;
    assert_eq!(
        (read.status, read.body.len()),
        (StatusCode::OK, content.len())
    );
    assert_eq!(read.body, content);
    for (range, bytes, shown) in [
        ("bytes=10-19", 10..20, "bytes 10-19/12000000"),
        (
            "bytes=-5",
            11_999_995..12_000_000,
            "bytes 11999995-11999999/12000000",
        ),
        (
            "bytes=11999998-",
            11_999_998..12_000_000,
            "bytes 11999998-11999999/12000000",
        ),
    ] {
        let mut request = api.request(Method::GET, &format!("{FILES}?path=/a/b/c"), None);
        request
            .headers_mut()
            .insert(RANGE, HeaderValue::from_static(range));
        let mut answer = api.open(request).await.expect("an answer");
        assert_eq!(answer.response.status(), StatusCode::PARTIAL_CONTENT);
        assert_eq!(answer.response.headers()[CONTENT_RANGE], shown);
        let body = answer.response.body_mut().collect().await.expect("whole");
        assert_eq!(body.to_bytes(), content[bytes], "{range}");
    }
    let head = api
        .send(Method::HEAD, &format!("{FILES}?path=/a/b/c"), None)
        .await;
    assert_eq!(
        (head.status, &head.headers[CONTENT_LENGTH]),
        (StatusCode::OK, &"12000000".parse().expect("valid"))
    );

    let renamed = json!({"from": "/a/b/c", "to": "/a/d"});
    let answer = api.post(&format!("{FILES}/move"), &renamed).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT, "{}", answer.text());
    let made = json!({"path": "/a/e/f", "parents": true});
    let answer = api.post(&format!("{FILES}/mkdir"), &made).await;
    assert_eq!(answer.status, StatusCode::NO_CONTENT, "{}", answer.text());
    sh(&api, "ln -s /a/d /a/link; mkfifo /a/fifo").await;
    let list: FileList = api
        .get(&format!("{FILES}/list?path=/a"))
        .await
        .expect(StatusCode::OK);
    let mut entries = list.entries;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    let shown: Vec<_> = entries
        .iter()
        .map(|entry| (entry.name.as_str(), entry.kind))
        .collect();
    let expected = [
        ("b", FileType::Directory),
        ("d", FileType::File),
        ("e", FileType::Directory),
        ("fifo", FileType::Other),
        ("link", FileType::Link),
    ];
    assert_eq!(shown, expected);
    let FileEntry {
        size, mode, uid, ..
    } = &entries[1];
    assert_eq!((*size, mode.as_str(), *uid), (12_000_000, "0600", 0));
    assert_eq!(entries[4].link_target.as_deref(), Some("/a/d"));

    refused(
        &api.delete(&format!("{FILES}?path=/a")).await,
        "file-conflict",
    );
    let removed = api.delete(&format!("{FILES}?path=/a&recursive")).await;
    assert_eq!(removed.status, StatusCode::NO_CONTENT, "{}", removed.text());
    refused(&get(&api, "path=/a/d").await, "no-such-file");
    conman.api().stop("s").await;
}

#[tokio::test]
async fn a_tree_comes_back_as_it_was_sent_and_devices_are_skipped() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    let archive = tar(&[
        ("./dir/", tar::EntryType::Directory, ""),
        ("./dir/file", tar::EntryType::Regular, "content"),
        ("./dir/hard", tar::EntryType::Link, "dir/file"),
        ("./dir/soft", tar::EntryType::Symlink, "../../etc/passwd"),
        ("./device", tar::EntryType::Block, ""),
        ("./fifo", tar::EntryType::Fifo, ""),
    ]);
    let sent = put(&api, "path=/tree&archive=tar&parents", archive).await;
    let report: UnpackReport = sent.expect(StatusCode::OK);
    assert_eq!((report.entries, report.skipped), (4, 2));
    let script = "cd /tree; stat -c '%n %a %h %Y' dir/file; readlink dir/soft; ls";
    assert_eq!(
        sh(&api, script).await,
        "dir/file 640 2 1000000000\n../../etc/passwd\ndir\n"
    );

    sh(
        &api,
        "mkfifo /tree/fifo; ln -s /etc /tree/etc; yes | head -c 100000 >/tree/big",
    )
    .await;
    let packed = get(&api, "path=/tree&archive=tar").await;
    assert_eq!(packed.status, StatusCode::OK, "{}", packed.text());
    let mut found: Vec<_> = tar::Archive::new(&packed.body[..])
        .entries()
        .expect("an archive")
        .map(|entry| {
            let entry = entry.expect("whole");
            (
                entry.path().expect("a name").display().to_string(),
                entry.size(),
            )
        })
        .collect();
    found.sort();
    // Either is the file, and the other the link to it.
    let links: Vec<_> = found
        .extract_if(.., |(name, _)| name == "dir/file" || name == "dir/hard")
        .collect();
    assert_eq!(
        links.iter().map(|(_, size)| size).sum::<u64>(),
        7,
        "{links:?}"
    );
    assert_eq!(links.len(), 2);
    let names: Vec<_> = found
        .iter()
        .map(|(name, size)| (name.as_str(), *size))
        .collect();
    let expected = [
        ("./", 0),
        ("big", 100_000),
        ("dir", 0),
        ("dir/soft", 0),
        ("etc", 0),
        ("pax_global_header", 66),
    ];
    assert_eq!(names, expected);
}

#[tokio::test]
async fn no_path_link_or_archive_leads_out_of_a_session_or_its_directory() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    // Links lead where they lead inside the session.
    sh(
        &api,
        "ln -s ../../../../../../etc/passwd /tmp/up; ln -s /etc/passwd /tmp/absolute; \
         ln -s /proc/self/root/etc/passwd /tmp/magic; ln -s /proc/self/environ /tmp/environ; \
         ln -s / /tmp/root; mkfifo /tmp/fifo",
    )
    .await;
    let passwd = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n";
    for path in ["/tmp/up", "/tmp/absolute", "/tmp/root/etc/passwd"] {
        assert_eq!(
            get(&api, &format!("path={path}")).await.text(),
            passwd,
            "{path}"
        );
    }
    for path in [
        "/tmp/magic",
        "/tmp/environ",
        "/proc/self/mem",
        "/proc/self/root/etc/passwd",
        "/proc/1/environ",
        "/proc/self/exe",
    ] {
        refused(&get(&api, &format!("path={path}")).await, "file-refused");
    }
    refused(&get(&api, "path=/proc&archive=tar").await, "file-refused");
    for path in ["/tmp/fifo", "/dev/null", "/dev/zero"] {
        refused(&get(&api, &format!("path={path}")).await, "file-conflict");
        refused(
            &put(&api, &format!("path={path}"), "x").await,
            "file-conflict",
        );
    }
    for path in ["/tmp/../etc/passwd", "..", ""] {
        refused(&get(&api, &format!("path={path}")).await, "bad-query");
    }
    refused(&get(&api, "path=/etc").await, "is-a-directory");

    // A link at the path itself is replaced.
    assert_eq!(
        put(&api, "path=/tmp/absolute", "mine").await.status,
        StatusCode::NO_CONTENT
    );
    assert_eq!(get(&api, "path=/etc/passwd").await.text(), passwd);

    use tar::EntryType::{Link, Regular, Symlink};
    for (entries, slug) in [
        (vec![("../out", Regular, "x")], "bad-archive"),
        (vec![("a/../../out", Regular, "x")], "bad-archive"),
        (vec![("hard", Link, "../../etc/passwd")], "files-failed"),
        (vec![("hard", Link, "etc/passwd")], "no-such-file"),
        // The link leads to a path in the directory, which does not exist.
        (
            vec![("soft", Symlink, "/etc"), ("soft/passwd", Regular, "x")],
            "no-such-file",
        ),
        (
            vec![("up", Symlink, "../.."), ("up/etc/passwd", Regular, "x")],
            "",
        ),
    ] {
        let answer = put(&api, "path=/in&archive=tar&parents", tar(&entries)).await;
        match slug {
            "" => assert_eq!(answer.status, StatusCode::OK, "{}", answer.text()),
            slug => drop(refused(&answer, slug)),
        }
    }
    assert_eq!(get(&api, "path=/etc/passwd").await.text(), passwd);
    assert_eq!(get(&api, "path=/in/etc/passwd").await.text(), "x");
    refused(
        &put(&api, "path=/in&archive=tar", "not an archive".repeat(100)).await,
        "bad-archive",
    );
}

#[tokio::test]
async fn directories_that_become_links_during_a_walk_show_nothing_else() {
    let Some(conman) = started().await else {
        return;
    };
    let api = conman.api();
    let swap = "mkdir -p /w/d /w/l; echo inside >/w/d/f; ln -s /secret /w/s; \
        mkdir /secret; echo secret >/secret/f; \
        (while :; do mv /w/d /w/x; mv /w/s /w/d; mv /w/d /w/s; mv /w/x /w/d; done) \
        >/dev/null 2>&1 &";
    sh(&api, swap).await;
    for _ in 0..100 {
        let packed = get(&api, "path=/w&archive=tar").await;
        assert_eq!(packed.status, StatusCode::OK, "{}", packed.text());
        assert!(!packed.text().contains("secret\n"), "a link was followed");
    }
}

#[tokio::test]
async fn a_full_disk_and_a_broken_upload_leave_the_old_file_and_no_other() {
    let Some(native) = native() else { return };
    let small = tempfile::tempdir().expect("a directory");
    // A session's root owns it.
    let _disk = SmallDisk::mount(small.path(), "size=1m,uid=2130706432,gid=2130706432");
    let allow = format!("allow = [\"{}\"]", small.path().display());
    let conman = Conman::builder()
        .set("binds", &allow)
        .start_native(&native)
        .await;
    let api = conman.api();
    let bind = format!("{}:/small", small.path().display());
    let request = json!({"image": ROOT, "command": ["sleep", "1000000"], "binds": [bind]});
    api.ensure("s", &request).await;
    assert_eq!(
        put(&api, "path=/small/f", "old").await.status,
        StatusCode::NO_CONTENT
    );
    let big = vec![b'x'; 8 << 20];
    refused(&put(&api, "path=/small/f", big.clone()).await, "disk-full");
    let big = String::from_utf8(big).expect("text");
    let bomb = tar(&[("bomb", tar::EntryType::Regular, &big)]);
    refused(
        &put(&api, "path=/small&archive=tar", bomb).await,
        "disk-full",
    );

    // A request whose client goes away in the middle of the body.
    let mut half = raw_put(&conman, "/small/f", 100_000).await;
    tokio::io::AsyncWriteExt::write_all(&mut half, &[b'y'; 10_000])
        .await
        .expect("sent");
    drop(half);
    let left = async || sh(&api, "ls -A /small; cat /small/f; rm -f /small/bomb").await;
    conman_e2e::eventually(
        "only the old file is left",
        Duration::from_secs(60),
        async || left().await == "f\nold",
    )
    .await;
    api.stop("s").await;
}

async fn raw_put(conman: &Conman, path: &str, length: usize) -> tokio::net::TcpStream {
    let address = conman.api_address();
    let mut stream = tokio::net::TcpStream::connect(address)
        .await
        .expect("connected");
    let head = format!(
        "PUT {FILES}?path={path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {length}\r\n\r\n"
    );
    tokio::io::AsyncWriteExt::write_all(&mut stream, head.as_bytes())
        .await
        .expect("sent");
    stream
}

#[tokio::test]
async fn cp_and_ls_copy_and_show_files_and_trees_both_ways() {
    let Some(conman) = started().await else {
        return;
    };
    let local = tempfile::tempdir().expect("a directory");
    let path = |name: &str| local.path().join(name).display().to_string();
    std::fs::create_dir_all(path("tree/sub")).expect("made");
    std::fs::write(path("tree/sub/file"), "content").expect("written");
    std::os::unix::fs::symlink("sub/file", path("tree/link")).expect("linked");
    std::fs::write(path("one"), "1").expect("written");

    conman.cli(&["cp", &path("one"), "s:/tmp"]).await.success();
    conman
        .cli(&["cp", &path("one"), "s:/tmp/two"])
        .await
        .success();
    conman.cli(&["cp", &path("tree"), "s:/new"]).await.success();
    conman
        .cli(&["cp", "-u", "user", &path("tree"), "s:/tmp"])
        .await
        .success();
    let api = conman.api();
    let script = "cat /tmp/one /tmp/two /new/link; stat -c %u /tmp/tree/sub/file";
    assert_eq!(sh(&api, script).await, "11content1000\n");
    let shown = conman.cli(&["ls", "s:/tmp/tree"]).await;
    assert!(shown.success().contains("link -> sub/file"), "{shown:?}");
    let names = conman.cli(&["ls", "-q", "s:/tmp"]).await;
    assert_eq!(names.success(), "one\ntree\ntwo\n");

    conman.cli(&["cp", "s:/new", &path("back")]).await.success();
    let back = std::fs::read_to_string(path("back/link")).expect("copied");
    assert_eq!(back, "content");
    conman
        .cli(&[
            "cp",
            "s:/new/sub/file",
            local.path().to_str().expect("text"),
        ])
        .await
        .success();
    assert_eq!(
        std::fs::read_to_string(path("file")).expect("copied"),
        "content"
    );

    let piped = conman
        .cli_with_input(&["cp", "-", "s:/tmp/typed"], "typed")
        .await;
    piped.success();
    assert_eq!(
        conman.cli(&["cp", "s:/tmp/typed", "-"]).await.success(),
        "typed"
    );
    let archive = tar(&[("inside", tar::EntryType::Regular, "y")]);
    let archive = String::from_utf8(archive).expect("text");
    conman
        .cli_with_input(&["cp", "-", "s:/tmp/"], &archive)
        .await
        .success();
    assert_eq!(sh(&api, "cat /tmp/inside").await, "y");
    let missing = conman.cli(&["cp", "s:/no/such", &path("x")]).await;
    assert_eq!(missing.code, Some(3), "{missing:?}");
}
