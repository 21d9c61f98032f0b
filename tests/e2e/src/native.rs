//! Images and templates of native sessions.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the store calls the image of native sessions: busybox with all its applets, a web page, and
/// a program that greets WebSockets.
pub const ROOT: &str = "conman-test/root:1";

/// The templates of a conman with the native runtime:
/// - `idle`: busybox that sleeps, without a port,
/// - `web`: busybox's httpd on port 8080, started by a connection, with one page, `hello`,
/// - `socket`: greets every WebSocket with the text `hello` and then only listens.
pub const NATIVE_TEMPLATES: &str = r#"
[templates.idle]
image = "conman-test/root:1"
command = ["sleep", "1000000"]
[templates.web]
image = "conman-test/root:1"
command = ["httpd", "-f", "-p", "8080", "-h", "/www"]
port = 8080
start_on_connect = true
[templates.socket]
image = "conman-test/root:1"
command = ["nc", "-ll", "-p", "8080", "-e", "/bin/greet"]
port = 8080
start_on_connect = true
"#;

const BUSYBOX: &str = "/usr/bin/busybox";

/// Answers the upgrade (RFC 6455, 4.2.2) with one text frame behind it.
const GREET: &str = r#"#!/bin/sh
while read -r line; do
    line=${line%?}
    [ -n "$line" ] || break
    case $line in
        [Ss]ec-[Ww]eb[Ss]ocket-[Kk]ey:*) key=${line#*: } ;;
    esac
done
[ -n "$key" ] || exit 0
accept=$(printf '%s' "${key}258EAFA5-E914-47DA-95CA-C5AB0DC85B11" | sha1sum | cut -c -40 |
    xxd -r -p | base64)
printf 'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n'
printf 'Sec-WebSocket-Accept: %s\r\n\r\n\201\005hello' "$accept"
cat >/dev/null
"#;

/// What native sessions need of a machine: root, and an image.
#[derive(Debug)]
pub struct Native(());

/// The native runtime. `None`, with a line that says why, when the test cannot run on this machine.
pub fn native() -> Option<Native> {
    let missing = if !nix::unistd::geteuid().is_root() {
        Some("containers are made by root".to_owned())
    } else if !Path::new(BUSYBOX).exists() {
        Some(format!("{BUSYBOX} is missing (package busybox-static)"))
    } else {
        None
    };
    match missing {
        None => Some(Native(())),
        Some(why) => {
            crate::lacks(&why);
            None
        }
    }
}

impl Native {
    /// Makes an archive of the root file system that becomes [`ROOT`], in this directory.
    ///
    /// # Panics
    /// When it cannot be made.
    pub fn archive(&self, directory: &Path) -> PathBuf {
        let root = directory.join("root");
        make_root(&root);
        let path = directory.join("root.tar");
        let packed = Command::new("tar")
            .args(["--numeric-owner", "--owner=0", "--group=0", "-cf"])
            .arg(&path)
            .arg("-C")
            .arg(&root)
            .arg(".")
            .status()
            .expect("tar runs");
        assert!(packed.success(), "the root cannot be packed: {packed}");
        path
    }
}

fn make_root(root: &Path) {
    for name in ["bin", "etc", "root", "run", "tmp", "www"] {
        fs::create_dir_all(root.join(name)).expect("a directory can be made");
    }
    fs::copy(BUSYBOX, root.join("bin/busybox")).expect("busybox can be copied");
    let listed = Command::new(BUSYBOX).arg("--list").output();
    let listed = listed.expect("busybox lists its applets");
    for applet in String::from_utf8_lossy(&listed.stdout).lines() {
        if applet != "busybox" {
            symlink("busybox", root.join("bin").join(applet)).expect("an applet is linked");
        }
    }
    let greet = root.join("bin/greet");
    fs::write(&greet, GREET).expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&greet, mode).expect("it can be run");
    fs::write(root.join("www/index.html"), "hello\n").expect("written");
    let passwd = "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n";
    fs::write(root.join("etc/passwd"), passwd).expect("written");
}
