//! Pulls from a real registry on loopback.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Stage, is_root, lacks, name};
use conman_image::{
    Digest, Image, ImageStore, ImportError, PullConfig, PullError, PullPhase, Puller,
};

const SOURCE: &str = "conman-test:busybox";

/// For the registry to answer, on a machine that does much else.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// An answer is logged this much later, at most, on a machine that is not busy.
const LATE: Duration = Duration::from_millis(200);

/// Loopback addresses are this machine's alone and all of them usable: one a process and registry, so
/// that nobody else takes its port before it does.
static NEXT: AtomicU8 = AtomicU8::new(0);

struct Registry {
    process: Child,
    address: SocketAddr,
    data: PathBuf,
    log: PathBuf,
    tag: String,
}

impl Registry {
    /// A registry that holds [`SOURCE`] as `test/busybox:1`.
    async fn with_busybox(stage: &Stage) -> Option<Self> {
        if !is_root() {
            return None;
        }
        let has_image = Command::new("docker")
            .args(["image", "inspect", SOURCE])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !has_image {
            lacks(&format!("docker has no image {SOURCE}"));
            return None;
        }
        let registry = Self::start(stage).await?;
        registry.push();
        Some(registry)
    }

    async fn start(stage: &Stage) -> Option<Self> {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let second = 150 + NEXT.fetch_add(1, Ordering::Relaxed);
        let address = SocketAddr::from((Ipv4Addr::new(127, second, high, low), 5_017));
        let data = stage.path().join("registry");
        let log = stage.path().join("registry.log");
        let config = format!(
            "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: {address}\n",
            data.display()
        );
        let config = stage.file("registry.yml", config.as_bytes());
        let output = File::create(&log).expect("log");
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("log"))
            .stderr(output)
            .spawn();
        let Ok(process) = process else {
            lacks("docker-registry is not installed");
            return None;
        };
        let registry = Self {
            process,
            address,
            data,
            log,
            tag: format!("{address}/test/busybox:1"),
        };
        let start = Instant::now();
        while TcpStream::connect(address).is_err() {
            assert!(start.elapsed() < START_TIMEOUT, "{}", registry.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Some(registry)
    }

    fn push(&self) {
        let docker = |arguments: &[&str]| {
            let output = Command::new("docker")
                .args(arguments)
                .output()
                .expect("docker");
            assert!(
                output.status.success(),
                "docker {arguments:?}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        };
        docker(&["tag", SOURCE, &self.tag]);
        docker(&["push", "--quiet", &self.tag]);
        docker(&["rmi", &self.tag]);
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).expect("log")
    }

    fn blob(&self, digest: &Digest) -> PathBuf {
        let hex = digest.hex();
        self.data
            .join("docker/registry/v2/blobs/sha256")
            .join(&hex[..2])
            .join(hex)
            .join("data")
    }

    fn manifest(&self) -> Digest {
        let link = "docker/registry/v2/repositories/test/busybox/_manifests/tags/1/current/link";
        let text = fs::read_to_string(self.data.join(link)).expect("link");
        text.trim().parse().expect("a digest")
    }

    /// The largest layer's blob and its size.
    fn layer(&self) -> (Digest, u64) {
        let manifest = fs::read(self.blob(&self.manifest())).expect("manifest");
        let manifest: serde_json::Value = serde_json::from_slice(&manifest).expect("JSON");
        manifest["layers"]
            .as_array()
            .expect("layers")
            .iter()
            .map(|layer| {
                let digest = layer["digest"].as_str().expect("digest");
                let size = layer["size"].as_u64().expect("size");
                (digest.parse().expect("a digest"), size)
            })
            .max_by_key(|(_, size)| *size)
            .expect("a layer")
    }

    /// Answers to requests for the blob, by status.
    fn answers(&self, digest: &Digest, status: u16) -> usize {
        let blob = format!("/blobs/{digest} ");
        let status = format!("\" {status} ");
        self.log()
            .lines()
            .filter(|line| {
                line.contains("\"GET ") && line.contains(&blob) && line.contains(&status)
            })
            .count()
    }

    /// Waits until so many have been given: the registry logs an answer once it has been sent.
    async fn has_answered(&self, digest: &Digest, status: u16, count: usize) {
        let start = Instant::now();
        while self.answers(digest, status) < count {
            assert!(start.elapsed() < START_TIMEOUT, "{}", self.log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn put_manifest(&self, tag: &str, media_type: &str, body: &str) {
        let mut stream = TcpStream::connect(self.address).expect("registry");
        write!(
            stream,
            "PUT /v2/test/busybox/manifests/{tag} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\
             Content-Type: {media_type}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answer");
        assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn puller(store: &ImageStore) -> Puller {
    Puller::new(store.clone(), PullConfig::default())
}

fn assert_is_busybox(image: &Image) {
    let found = image.lower_directories().iter().any(|root| {
        fs::symlink_metadata(root.join("bin/busybox")).is_ok_and(|file| file.len() > 0)
    });
    assert!(found, "{image:?}");
}

fn partial(store: &ImageStore, digest: &Digest) -> PathBuf {
    store
        .directory()
        .join(format!("blobs/{}.partial", digest.hex()))
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).expect("directory").next().is_none()
}

#[tokio::test]
async fn one_pull_serves_all_who_ask_for_the_image_at_once() {
    let stage = Stage::new();
    let Some(registry) = Registry::with_busybox(&stage).await else {
        return;
    };
    let store = stage.store();
    let puller = puller(&store);
    let name = name("busybox:1");
    let mut seen = Vec::new();
    let (first, second, third) = tokio::join!(
        puller.pull(&registry.tag, &name, |progress| seen.push(progress.clone())),
        puller.pull(&registry.tag, &name, |_| {}),
        puller.pull(&registry.tag, &name, |_| {}),
    );
    let image = first.expect("pulled");
    assert_is_busybox(&image);
    for other in [second, third] {
        assert_eq!(other.expect("pulled").id, image.id);
    }
    let (layer, size) = registry.layer();
    registry.has_answered(&layer, 200, 1).await;
    // For one too many to show.
    tokio::time::sleep(LATE).await;
    assert_eq!(registry.answers(&layer, 200), 1, "{}", registry.log());
    let last = seen.last().expect("progress");
    assert_eq!(last.phase, PullPhase::Unpacking);
    let layer = last
        .layers
        .iter()
        .find(|row| row.blob == layer)
        .expect("the layer's row");
    assert_eq!((layer.done_bytes, layer.total_bytes), (size, size));
    assert!(is_empty(&store.directory().join("blobs")));

    // What is there is not downloaded again.
    let again = puller
        .pull(&registry.tag, &name, |_| {})
        .await
        .expect("pulled again");
    assert_eq!(again.id, image.id);
    tokio::time::sleep(LATE).await;
    assert_eq!(registry.answers(&registry.layer().0, 200), 1);
    assert_eq!(store.get(&name).expect("named").id, image.id);
}

#[tokio::test]
async fn a_download_goes_on_where_it_broke_off() {
    let stage = Stage::new();
    let Some(registry) = Registry::with_busybox(&stage).await else {
        return;
    };
    let store = stage.store();
    let (layer, size) = registry.layer();
    let bytes = fs::read(registry.blob(&layer)).expect("blob");
    fs::write(partial(&store, &layer), &bytes[..bytes.len() / 2]).expect("partial");
    let mut fewest = size;
    let image = puller(&store)
        .pull(&registry.tag, &name("busybox:1"), |progress| {
            let rows = progress.layers.iter().filter(|row| row.blob == layer);
            let done = rows
                .map(|row| row.done_bytes)
                .filter(|done| *done > 0)
                .min();
            fewest = fewest.min(done.unwrap_or(size));
        })
        .await
        .expect("pulled");
    assert_is_busybox(&image);
    assert!(fewest > size / 2, "{fewest} of {size}");
    registry.has_answered(&layer, 206, 1).await;
    tokio::time::sleep(LATE).await;
    assert_eq!(registry.answers(&layer, 206), 1, "{}", registry.log());
    assert_eq!(registry.answers(&layer, 200), 0);
}

#[tokio::test]
async fn a_damaged_partial_download_is_started_over() {
    let stage = Stage::new();
    let Some(registry) = Registry::with_busybox(&stage).await else {
        return;
    };
    let store = stage.store();
    let (layer, size) = registry.layer();
    for bytes in [
        vec![7; 1000],
        vec![7; usize::try_from(size).expect("fits") + 5],
    ] {
        fs::write(partial(&store, &layer), bytes).expect("partial");
        let image = puller(&store)
            .pull(&registry.tag, &name("busybox:1"), |_| {})
            .await
            .expect("pulled");
        assert_is_busybox(&image);
        store.remove(&name("busybox:1")).expect("removed");
        store.collect(&BTreeSet::new()).expect("collected");
    }
}

#[tokio::test]
async fn a_blob_with_other_content_is_refused_and_forgotten() {
    let stage = Stage::new();
    let Some(registry) = Registry::with_busybox(&stage).await else {
        return;
    };
    let store = stage.store();
    let (layer, _) = registry.layer();
    let mut bytes = fs::read(registry.blob(&layer)).expect("blob");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(registry.blob(&layer), bytes).expect("damage");
    let error = puller(&store)
        .pull(&registry.tag, &name("busybox:1"), |_| {})
        .await
        .expect_err("damaged");
    assert!(
        matches!(&*error, PullError::DigestMismatch { expected, .. } if *expected == layer),
        "{error:?}"
    );
    assert!(store.list().is_empty());
    assert!(is_empty(&store.directory().join("layers")));
    assert!(!partial(&store, &layer).exists());
}

#[tokio::test]
async fn an_index_leads_to_the_image_for_this_machine() {
    let stage = Stage::new();
    let Some(registry) = Registry::with_busybox(&stage).await else {
        return;
    };
    let store = stage.store();
    let digest = registry.manifest();
    let size = fs::metadata(registry.blob(&digest))
        .expect("manifest")
        .len();
    let media_type = "application/vnd.docker.distribution.manifest.v2+json";
    let list_type = "application/vnd.docker.distribution.manifest.list.v2+json";
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let list = |architectures: &[&str]| {
        let manifests: Vec<_> = architectures
            .iter()
            .map(|architecture| {
                serde_json::json!({
                    "mediaType": media_type, "digest": digest.to_string(), "size": size,
                    "platform": {"os": "linux", "architecture": architecture},
                })
            })
            .collect();
        serde_json::json!({"schemaVersion": 2, "mediaType": list_type, "manifests": manifests})
            .to_string()
    };
    registry.put_manifest("multi", list_type, &list(&["s390x", architecture]));
    registry.put_manifest("foreign", list_type, &list(&["s390x"]));
    let reference = |tag: &str| format!("{}/test/busybox:{tag}", registry.address);
    let image = puller(&store)
        .pull(&reference("multi"), &name("busybox:multi"), |_| {})
        .await
        .expect("pulled");
    assert_is_busybox(&image);
    let error = puller(&store)
        .pull(&reference("foreign"), &name("busybox:foreign"), |_| {})
        .await
        .expect_err("for another machine");
    let PullError::Import { source, .. } = &*error else {
        panic!("{error:?}");
    };
    assert!(source.to_string().contains("linux/s390x"), "{source}");
    let pinned = format!("{}/test/busybox@{digest}", registry.address);
    let image = puller(&store)
        .pull(&pinned, &name("busybox:pinned"), |_| {})
        .await
        .expect("pulled by digest");
    assert_is_busybox(&image);
}

#[tokio::test]
async fn what_the_registry_lacks_and_what_is_no_reference_is_named() {
    let stage = Stage::new();
    if !is_root() {
        return;
    }
    let Some(registry) = Registry::start(&stage).await else {
        return;
    };
    let store = stage.store();
    let puller = puller(&store);
    let error = puller
        .pull(&registry.tag, &name("busybox:1"), |_| {})
        .await
        .expect_err("nothing there");
    assert!(matches!(&*error, PullError::Fetch { .. }), "{error:?}");
    let error = puller
        .pull("127.0.0.1:1/NOT A REFERENCE", &name("busybox:1"), |_| {})
        .await
        .expect_err("no reference");
    assert!(matches!(&*error, PullError::Reference { .. }), "{error:?}");
}

/// The first connections for a blob are cut after a part of it, by a proxy on the way.
#[tokio::test]
async fn a_connection_that_keeps_breaking_is_resumed_until_all_is_there() {
    let stage = Stage::new();
    let Some(registry) = Registry::with_busybox(&stage).await else {
        return;
    };
    let store = stage.store();
    let (layer, size) = registry.layer();
    let proxy = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("proxy");
    let port = proxy.local_addr().expect("address").port();
    let upstream = registry.address;
    let allowed = size / 3;
    let cutting = tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        // Cancelled with the task, when the test ends: the connections go with the set.
        while let Ok((mut client, _)) = proxy.accept().await {
            connections.spawn(async move {
                use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
                let Ok(mut server) = tokio::net::TcpStream::connect(upstream).await else {
                    return;
                };
                let (mut from_client, mut to_client) = client.split();
                let (from_server, mut to_server) = server.split();
                let forth = tokio::io::copy(&mut from_client, &mut to_server);
                let mut limited = from_server.take(allowed);
                let back = tokio::io::copy(&mut limited, &mut to_client);
                // Either end closes both: cutting is the point.
                tokio::select! {
                    _ = forth => {}
                    _ = back => {}
                }
                let _ = to_client.shutdown().await;
            });
        }
    });
    let image = puller(&store)
        .pull(
            &format!("127.0.0.1:{port}/test/busybox:1"),
            &name("busybox:1"),
            |_| {},
        )
        .await;
    cutting.abort();
    assert_is_busybox(&image.expect("pulled"));
    registry.has_answered(&layer, 206, 2).await;
}

/// Answers every request for a manifest with a body that never ends; how much of it was taken.
fn endless_registry() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let sent = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&sent);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut head = [0; 4_096];
            let read = stream.read(&mut head).unwrap_or(0);
            let wants_manifest = String::from_utf8_lossy(&head[..read]).contains("/manifests/");
            let head = "HTTP/1.1 200 OK\r\nConnection: close\r\n";
            if !wants_manifest {
                let _ = write!(stream, "{head}Content-Length: 0\r\n\r\n");
                continue;
            }
            let _ = write!(stream, "{head}\r\n");
            let spaces = vec![b' '; 64 * 1_024];
            // No more than a host without the bound can hold.
            while counted.load(Ordering::Relaxed) < 512 << 20 && stream.write_all(&spaces).is_ok() {
                counted.fetch_add(spaces.len(), Ordering::Relaxed);
            }
        }
    });
    (port, sent)
}

#[tokio::test]
async fn no_more_of_a_manifest_is_read_than_it_may_be_long() {
    let stage = Stage::new();
    let (port, sent) = endless_registry();
    let tag = format!("127.0.0.1:{port}/test/endless:1");
    let (puller, name) = (puller(&stage.store()), name("endless:1"));
    let pulled = puller.pull(&tag, &name, |_| {}).await;
    let error = pulled.expect_err("endless");
    assert!(matches!(*error, PullError::Import { .. }), "{error:?}");
    // What is allowed, and what the sockets' buffers take.
    let sent = sent.load(Ordering::Relaxed);
    assert!(sent < 64 << 20, "{sent}");
}

/// Answers every request with this manifest.
fn registry_of(manifest: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            if stream.read(&mut [0; 4_096]).unwrap_or(0) == 0 {
                continue;
            }
            let length = manifest.len();
            let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length:";
            let _ = write!(stream, "{head} {length}\r\n\r\n{manifest}");
        }
    });
    port
}

#[tokio::test]
async fn a_reference_with_a_digest_gets_no_other_manifest() {
    let stage = Stage::new();
    let port = registry_of("{}");
    let reference = format!("127.0.0.1:{port}/test/other@{}", Digest::of(b"another"));
    let (puller, name) = (puller(&stage.store()), name("other:1"));
    let pulled = puller.pull(&reference, &name, |_| {}).await;
    let error = pulled.expect_err("another manifest");
    let PullError::Import { source, .. } = &*error else {
        panic!("{error:?}");
    };
    assert!(
        matches!(source, ImportError::DigestMismatch { .. }),
        "{source:?}"
    );
}
