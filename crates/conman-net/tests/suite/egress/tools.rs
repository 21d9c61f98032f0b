//! Programs as they are, which find the proxy by the variables that conman gives a session.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use conman_core::egress::egress_variables;

use super::namespace::{HOST, Session, World};

const NAME: &str = "files.test";
/// Debian's, whose packages the set-up installs.
const PYTHON: &str = "/usr/bin/python3";

/// A web server with the files of a directory, until dropped.
struct FileServer(std::process::Child);

impl Drop for FileServer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl FileServer {
    async fn start(directory: &Path) -> (Self, u16) {
        let free = tokio::net::TcpListener::bind((HOST, 0)).await;
        let port = free.expect("a port").local_addr().expect("bound").port();
        let mut command = Command::new(PYTHON);
        command
            .args([
                "-m",
                "http.server",
                "--bind",
                &HOST.to_string(),
                &port.to_string(),
            ])
            .arg("--directory")
            .arg(directory)
            .stderr(std::process::Stdio::null());
        let server = Self(command.spawn().expect("python runs"));
        let served = async {
            while tokio::net::TcpStream::connect((HOST, port)).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(super::namespace::SOON, served)
            .await
            .expect("it serves");
        (server, port)
    }
}

/// A session that may connect to the files of a directory, and their URL.
async fn with_files(directory: &Path) -> (World, Session, FileServer, String) {
    let world = World::new().await;
    world.names.set(NAME, HOST);
    let (server, port) = FileServer::start(directory).await;
    let listed = [format!("{NAME}:{port}"), format!("{HOST}:{port}")];
    let session = world.session(&[&listed[0], &listed[1]]).await;
    (world, session, server, format!("http://{NAME}:{port}"))
}

/// Runs a program inside, in an environment like a session's.
async fn run(session: &Session, home: &Path, words: &[&str]) -> Output {
    let mut command = session.namespace.command(words[0]);
    command
        .args(&words[1..])
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
        .env("HOME", home)
        .envs(egress_variables())
        .current_dir(home);
    let output = tokio::task::spawn_blocking(move || command.output()).await;
    output.expect("no panic").expect("it runs")
}

async fn must_succeed(session: &Session, home: &Path, words: &[&str]) -> String {
    let output = run(session, home, words).await;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let trouble = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {text}{trouble}");
    text
}

/// Runs a script on the host that makes files.
fn make(directory: &Path, script: &str) {
    let made = Command::new("sh")
        .args(["-euc", script])
        .current_dir(directory)
        .output()
        .expect("sh runs");
    let trouble = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success(), "{script}: {trouble}");
}

#[tokio::test]
async fn curl_and_httpx_fetch_what_is_listed_by_request_and_by_tunnel() {
    let (files, home) = (
        tempfile::tempdir().expect("made"),
        tempfile::tempdir().expect("made"),
    );
    fs::write(files.path().join("a.txt"), "hello").expect("written");
    let (_world, session, _server, url) = with_files(files.path()).await;
    let file = format!("{url}/a.txt");
    for words in [
        vec!["curl", "-sS", &file],
        vec!["curl", "-sS", "--proxytunnel", &file],
        vec!["curl", "-sS", "--proxy", "socks5h://127.0.0.1:3128", &file],
    ] {
        assert_eq!(must_succeed(&session, home.path(), &words).await, "hello");
    }
    let script = format!("import httpx; print(httpx.get('{file}').text, end='')");
    let text = must_succeed(&session, home.path(), &[PYTHON, "-c", &script]).await;
    assert_eq!(text, "hello");
    let refused = run(
        &session,
        home.path(),
        &["curl", "-sS", "https://other.test/"],
    )
    .await;
    let trouble = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(trouble.contains("403"), "{trouble}");
}

#[tokio::test]
async fn pip_installs_a_package() {
    let (files, home) = (
        tempfile::tempdir().expect("made"),
        tempfile::tempdir().expect("made"),
    );
    make(
        files.path(),
        r#"mkdir -p simple/hello
        cd simple/hello
        /usr/bin/python3 - <<'END'
import zipfile
wheel = zipfile.ZipFile("hello-1.0-py3-none-any.whl", "w")
wheel.writestr("hello.py", "print('installed')\n")
wheel.writestr("hello-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: hello\nVersion: 1.0\n")
wheel.writestr("hello-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
wheel.writestr("hello-1.0.dist-info/RECORD", "")
wheel.close()
END
        echo '<a href="hello-1.0-py3-none-any.whl">hello-1.0-py3-none-any.whl</a>' > index.html"#,
    );
    let (_world, session, _server, url) = with_files(files.path()).await;
    let index = format!("{url}/simple");
    let target = home.path().join("lib").display().to_string();
    let words = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--index-url",
        &index,
        "--trusted-host",
        NAME,
        "--target",
        &target,
        "hello",
    ];
    must_succeed(&session, home.path(), &words).await;
    let script = format!("import sys; sys.path.append('{target}'); import hello");
    let text = must_succeed(&session, home.path(), &[PYTHON, "-c", &script]).await;
    assert_eq!(text, "installed\n");
}

#[tokio::test]
async fn npm_installs_a_package() {
    let (files, home) = (
        tempfile::tempdir().expect("made"),
        tempfile::tempdir().expect("made"),
    );
    let (_world, session, _server, url) = with_files(files.path()).await;
    make(
        files.path(),
        r#"mkdir package
        echo '{"name":"hello","version":"1.0.0"}' > package/package.json
        echo 'console.log("installed")' > package/index.js
        tar -czf hello-1.0.0.tgz package"#,
    );
    let document = format!(
        r#"{{"name":"hello","dist-tags":{{"latest":"1.0.0"}},"versions":{{"1.0.0":{{"name":"hello",
        "version":"1.0.0","dist":{{"tarball":"{url}/hello-1.0.0.tgz"}}}}}}}}"#
    );
    fs::write(files.path().join("hello"), document).expect("written");
    let words = ["npm", "install", "--no-audit", "--registry", &url, "hello"];
    must_succeed(&session, home.path(), &words).await;
    let text = must_succeed(&session, home.path(), &["node", "node_modules/hello"]).await;
    assert_eq!(text, "installed\n");
}

#[tokio::test]
async fn git_clones_a_repository() {
    let (files, home) = (
        tempfile::tempdir().expect("made"),
        tempfile::tempdir().expect("made"),
    );
    make(
        files.path(),
        r#"git init -q work && cd work && echo installed > file && git add file
        git -c user.name=a -c user.email=a@a.test commit -q -m first
        cd .. && git clone -q --bare work repository && cd repository && git update-server-info"#,
    );
    let (_world, session, _server, url) = with_files(files.path()).await;
    let repository = format!("{url}/repository");
    must_succeed(
        &session,
        home.path(),
        &["git", "clone", "-q", &repository, "clone"],
    )
    .await;
    let file = fs::read_to_string(home.path().join("clone/file"));
    assert_eq!(file.expect("cloned"), "installed\n");
}

#[tokio::test]
async fn apt_downloads_a_package() {
    let (files, home) = (
        tempfile::tempdir().expect("made"),
        tempfile::tempdir().expect("made"),
    );
    make(
        files.path(),
        r#"mkdir -p hello/DEBIAN
        printf 'Package: hello-conman\nVersion: 1.0\nArchitecture: all\nMaintainer: a <a@a.test>\nDescription: a\n' > hello/DEBIAN/control
        dpkg-deb --build hello hello-conman_1.0_all.deb >/dev/null
        { cat hello/DEBIAN/control
          echo "Filename: ./hello-conman_1.0_all.deb"
          echo "Size: $(stat -c %s hello-conman_1.0_all.deb)"
          echo "SHA256: $(sha256sum hello-conman_1.0_all.deb | cut -d' ' -f1)"
        } > Packages"#,
    );
    let (_world, session, _server, url) = with_files(files.path()).await;
    let at = home.path().display();
    make(home.path(), "mkdir -p lists/partial cache/archives/partial");
    let source = format!("deb [trusted=yes] {url} ./\n");
    fs::write(home.path().join("sources.list"), source).expect("written");
    let options = [
        format!("Dir::State::Lists={at}/lists"),
        format!("Dir::Cache={at}/cache"),
        format!("Dir::Etc::SourceList={at}/sources.list"),
        "Dir::Etc::SourceParts=/nonexistent".to_owned(),
        "APT::Sandbox::User=root".to_owned(),
    ];
    let options: Vec<&str> = options.iter().flat_map(|option| ["-o", option]).collect();
    let update = [&["apt-get"][..], &options, &["update"]].concat();
    must_succeed(&session, home.path(), &update).await;
    let download = [&["apt-get"][..], &options, &["download", "hello-conman"]].concat();
    must_succeed(&session, home.path(), &download).await;
    let package = home.path().join("hello-conman_1.0_all.deb");
    assert!(package.exists(), "downloaded");
}
