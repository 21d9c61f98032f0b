//! Images through the command line and the daemon: from an archive, and from a registry.

use std::fs::{self, File};
use std::net::TcpStream;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use conman_e2e::{
    BUSYBOX, Conman, Docker, Port, docker_shared, eventually, lacks, peak_resident_bytes,
    resident_bytes,
};
use conman_proto::{Image, ImageList};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(60);

/// A root file system of the distribution's busybox, packed with gzip.
fn busybox_archive(directory: &Path) -> Option<PathBuf> {
    let program = ["/bin/busybox", "/usr/bin/busybox"]
        .into_iter()
        .find(|path| Path::new(path).exists());
    let Some(program) = program else {
        lacks("busybox is missing (package busybox-static)");
        return None;
    };
    let root = directory.join("root");
    fs::create_dir_all(root.join("bin")).expect("a directory");
    fs::copy(program, root.join("bin/busybox")).expect("copied");
    for name in ["sh", "sleep", "httpd"] {
        symlink("busybox", root.join("bin").join(name)).expect("a link");
    }
    let archive = directory.join("busybox.tar.gz");
    let packed = Command::new("tar")
        .arg("-C")
        .arg(&root)
        .arg("-czf")
        .arg(&archive)
        .arg(".")
        .status()
        .expect("tar runs");
    assert!(packed.success());
    Some(archive)
}

/// What there is of layers in the store, with what is being made.
fn layers(conman: &Conman) -> usize {
    let store = conman.state_dir().join("images");
    ["layers", "tmp"]
        .into_iter()
        .map(|part| fs::read_dir(store.join(part)).expect("it is there").count())
        .sum()
}

#[tokio::test]
async fn an_archive_is_imported_listed_kept_over_a_crash_and_removed() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::start(&docker).await;
    let Some(archive) = busybox_archive(conman.directory()) else {
        return;
    };
    let archive = archive.to_str().expect("text");

    let told = conman
        .cli(&["image", "import", archive, "busybox:own"])
        .await;
    assert!(
        told.success().starts_with("busybox:own is here"),
        "{told:?}"
    );
    let list = conman.cli(&["--json", "image", "ls"]).await;
    let list: ImageList = serde_json::from_str(list.success()).expect("a list");
    assert_eq!(list.images.len(), 1);
    assert_eq!(list.images[0].names, ["busybox:own"]);
    assert_eq!(layers(&conman), 1);

    conman.restart_after_crash().await;
    let shown = conman
        .cli(&["--json", "image", "inspect", "busybox:own"])
        .await;
    let shown: Image = serde_json::from_str(shown.success()).expect("an image");
    assert_eq!(shown, list.images[0]);

    let removed = conman.cli(&["image", "rm", "busybox:own"]).await;
    assert_eq!(removed.success(), "busybox:own is removed\n");
    eventually("the layer is collected", PATIENCE, async || {
        layers(&conman) == 0
    })
    .await;
    let again = conman.cli(&["image", "rm", "busybox:own"]).await;
    assert_eq!(again.code, Some(3), "{again:?}");
    let gc = conman.cli(&["--json", "image", "gc"]).await;
    let gc: Value = serde_json::from_str(gc.success()).expect("a report");
    assert_eq!(gc["freed_bytes"], 0);
}

#[tokio::test]
async fn what_is_no_archive_is_refused_in_words_and_leaves_nothing() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::builder()
        .toml("[images]\nmax_archive_bytes = 1048576")
        .start(&docker)
        .await;
    let text = conman
        .cli_with_input(&["image", "import", "-", "bad:1"], "no archive at all")
        .await;
    assert_eq!(text.code, Some(4), "{text:?}");
    assert!(text.stderr.contains("cannot be imported"), "{text:?}");
    // Beyond the limit, announced and not.
    let large = conman.directory().join("large.tar");
    fs::write(&large, vec![0; 32 << 20]).expect("written");
    let large = large.to_str().expect("text");
    for source in [large, "/dev/zero"] {
        let words = ["--json", "image", "import", source, "bad:1"];
        let refused = conman.cli(&words).await;
        assert_eq!(refused.code, Some(4), "{refused:?}");
        assert!(refused.stderr.contains("body-too-large"), "{refused:?}");
    }
    assert_eq!(layers(&conman), 0);
    let name = conman.cli(&["image", "import", large, "No Name"]).await;
    assert_eq!(name.code, Some(4), "{name:?}");
    assert!(name.stderr.contains("NAME:TAG"), "{name:?}");
}

/// A registry on loopback, gone when it is dropped.
pub(crate) struct Registry {
    process: Child,
    pub(crate) address: String,
    _port: Port,
}

impl Registry {
    pub(crate) async fn start(directory: &Path) -> Option<Self> {
        let port = Port::claim();
        let address = format!("127.0.0.1:{}", port.number);
        let config = directory.join("registry.yml");
        let storage = directory.join("registry");
        fs::write(
            &config,
            format!(
                "version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {}\nhttp:\n  addr: \
                 {address}\n",
                storage.display()
            ),
        )
        .expect("written");
        let log = File::create(directory.join("registry.log")).expect("a log");
        let process = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn();
        let Ok(process) = process else {
            lacks("docker-registry is missing (package docker-registry)");
            return None;
        };
        let registry = Self {
            process,
            address,
            _port: port,
        };
        eventually("the registry listens", PATIENCE, async || {
            TcpStream::connect(&registry.address).is_ok()
        })
        .await;
        Some(registry)
    }

    /// Puts busybox into it as `name`.
    async fn push(&self, docker: &Docker, name: &str) -> String {
        self.push_as(docker, BUSYBOX, name).await
    }

    /// Puts an image of Docker's into it as `name`.
    pub(crate) async fn push_as(&self, docker: &Docker, image: &str, name: &str) -> String {
        let reference = format!("{}/{name}", self.address);
        docker.run(&["tag", image, &reference]).await;
        docker.run(&["push", "--quiet", &reference]).await;
        docker.run(&["rmi", &reference]).await;
        reference
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[tokio::test]
async fn an_image_is_pulled_from_a_registry_that_the_node_allows() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let directory = tempfile::tempdir().expect("a directory");
    let Some(registry) = Registry::start(directory.path()).await else {
        return;
    };
    let reference = registry.push(&docker, "test/busybox:1").await;
    let conman = Conman::builder()
        .toml(&format!(
            "[images]\nregistries = [\"{}\"]",
            registry.address
        ))
        .start(&docker)
        .await;

    let pulled = conman.cli(&["--json", "image", "pull", &reference]).await;
    let pulled: Image = serde_json::from_str(pulled.success()).expect("an image");
    assert_eq!(pulled.names, [reference.as_str()]);
    assert!(!pulled.layers.is_empty() && pulled.size_bytes > 0);
    let words = ["image", "pull", &reference, "--name", "busybox:pulled"];
    let named = conman.cli(&words).await;
    assert!(
        named.success().starts_with("busybox:pulled is here"),
        "{named:?}"
    );
    let shown = conman
        .cli(&["--json", "image", "inspect", &reference])
        .await;
    let shown: Image = serde_json::from_str(shown.success()).expect("an image");
    assert_eq!(shown.id, pulled.id);
    assert_eq!(shown.names.len(), 2);

    for (reference, slug) in [
        (
            format!("{}/test/busybox:2", registry.address),
            "not-in-registry",
        ),
        (
            format!("{}/test/nothing:1", registry.address),
            "not-in-registry",
        ),
        (
            "127.0.0.1:1/test/busybox:1".to_owned(),
            "registry-not-allowed",
        ),
        ("busybox".to_owned(), "registry-not-allowed"),
        ("Busybox".to_owned(), "bad-body"),
    ] {
        let refused = conman.cli(&["--json", "image", "pull", &reference]).await;
        assert_eq!(refused.code, Some(4), "{refused:?}");
        assert!(refused.stderr.contains(slug), "{reference}: {refused:?}");
    }
    assert_eq!(layers(&conman), pulled.layers.len());
}

#[tokio::test]
async fn what_a_session_was_made_of_stays_until_it_ends_whatever_happens_to_the_daemon() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let mut conman = Conman::builder()
        .set("node", "runtime = \"native\"")
        .toml("[templates.own]\nimage = \"own:1\"\ncommand = [\"sleep\", \"1000000\"]")
        .start(&docker)
        .await;
    let Some(archive) = busybox_archive(conman.directory()) else {
        return;
    };
    let archive = archive.to_str().expect("text");
    conman
        .cli(&["image", "import", archive, "own:1"])
        .await
        .success();
    conman.api().ensure("s", &json!({"template": "own"})).await;
    let removed = conman.cli(&["image", "rm", "--force", "own:1"]).await;
    assert!(
        removed.success().contains("until no session uses it"),
        "{removed:?}"
    );
    conman.cli(&["image", "gc"]).await.success();
    conman.restart_after_crash().await;
    conman.cli(&["image", "gc"]).await.success();
    assert_eq!(layers(&conman), 1);
    let said = conman
        .cli(&["exec", "s", "--", "sh", "-c", "echo hi"])
        .await;
    assert_eq!(said.success(), "hi\n");
    // Its image has no name any more, so that no other session can be made of it.
    let other = conman
        .api()
        .put("/v1/sessions/t", &json!({"template": "own"}))
        .await;
    assert_eq!(other.problem().slug(), "no-such-image");

    conman.api().stop("s").await;
    eventually("the image is collected", PATIENCE, async || {
        conman.cli(&["image", "gc"]).await.success();
        layers(&conman) == 0
    })
    .await;
}

#[tokio::test]
async fn an_archive_much_larger_than_the_daemon_passes_through_it_in_pieces() {
    /// Bytes of the archive's one file.
    const LARGE: u64 = 96 << 20;
    /// What the daemon may grow by: a third of that.
    const GROWTH: u64 = 32 << 20;
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    let file = conman.directory().join("large");
    let made = File::create(&file).and_then(|file| file.set_len(LARGE));
    made.expect("a file of holes");
    let before = resident_bytes(conman.pid());
    let mut tar = Command::new("tar")
        .arg("-C")
        .arg(conman.directory())
        .args(["-cf", "-", "large"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("tar runs");
    let mut import = conman.cli_command();
    import
        .args(["--json", "image", "import", "-", "large:1"])
        .stdin(tar.stdout.take().expect("piped"));
    let (output, peak) = peak_resident_bytes(conman.pid(), import.output()).await;
    let output = output.expect("conman runs");
    assert!(tar.wait().expect("tar ends").success());
    assert!(output.status.success(), "{output:?}");
    let image: Image = serde_json::from_slice(&output.stdout).expect("an image");
    assert_eq!(image.size_bytes, LARGE);
    let grown = peak.saturating_sub(before);
    assert!(grown < GROWTH, "the daemon grew by {grown} bytes");
}
