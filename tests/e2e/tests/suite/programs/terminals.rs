//! Shells: OpenSSH with tmux, and a terminal in a web page.

use std::path::Path;

use conman_e2e::{Chromium, chromium, eventually, lacks};
use tokio::process::Command;

use super::{CLI_PATIENCE, Forward, Programs, run, write};

const SSHD: &str = r#"
port = 22
ptys = 4
env = { LC_ALL = "C.UTF-8" }
command = ["sh", "-c", """
mkdir -p /run/sshd
echo 'sshd:x:100:65534::/run/sshd:/bin/false' >>/etc/passwd
[ -e /work/host_key ] || ssh-keygen -q -t ed25519 -N '' -f /work/host_key
exec /usr/sbin/sshd -f /dev/null -D -e -o HostKey=/work/host_key -o AuthorizedKeysFile=/work/authorized_keys \
    -o PermitRootLogin=yes -o StrictModes=no -o UsePAM=no
"""]
"#;

// The image lacks what the package's scripts write, among it the settings of PAM.
const WEB_TERMINAL: &str = r#"
port = 4200
ptys = 4
command = ["sh", "-c", """
for kind in auth account session; do echo $kind required pam_permit.so; done >/etc/pam.d/other
exec shellinaboxd -t -p 4200 --localhost-only -s /:0:0:/work:/bin/sh
"""]
"#;

/// `ssh` with a key and a file of known hosts in this directory.
async fn ssh(port: u16, directory: &Path, arguments: &[&str]) -> String {
    let mut command = Command::new("ssh");
    let known = format!("UserKnownHostsFile={}", directory.join("known").display());
    command.args(["-F", "/dev/null", "-p", &port.to_string(), "-o", &known]);
    // The host's key is learned once, and must be the same afterwards.
    command.args([
        "-o",
        "StrictHostKeyChecking=accept-new",
        "-o",
        "BatchMode=yes",
    ]);
    command.args(["-o", "HostKeyAlias=session", "-o", "LogLevel=ERROR", "-i"]);
    command.arg(directory.join("key")).arg("root@127.0.0.1");
    run(command.args(arguments)).await
}

/// A session of tmux outlives the connection that made it.
async fn keeps_a_terminal(port: u16, keys: &Path) {
    let new = "tmux -f /dev/null new-session -d 'echo in $TERM; exec sleep 1000'";
    ssh(port, keys, &[new]).await;
    let screen = "until tmux capture-pane -p | grep 'in tmux\\|in screen'; do sleep 0.1; done";
    ssh(port, keys, &[screen]).await;
}

#[tokio::test]
async fn openssh_and_tmux_work_through_a_forwarded_port_also_after_a_preemption() {
    if !Path::new("/usr/bin/ssh").exists() {
        return lacks("/usr/bin/ssh is missing (package openssh-client)");
    }
    let Some(programs) = Programs::start("shells", &[("shell", SSHD)]).await else {
        return;
    };
    let keys = tempfile::tempdir().expect("a directory can be made");
    let (keys, work) = (keys.path(), programs.work("shell"));
    let key = keys.join("key");
    run(Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key))
    .await;
    std::fs::copy(keys.join("key.pub"), work.join("authorized_keys")).expect("copied");

    let forward = Forward::start(&programs.conman, "shell", 22).await;
    let terminal = ssh(forward.port, keys, &["-tt", "tty; echo kept >/work/note"]).await;
    assert!(terminal.contains("/dev/pts/0"), "{terminal}");
    keeps_a_terminal(forward.port, keys).await;

    let before = programs.api().session("shell").await.generation;
    programs.preempt().await;
    let note = ssh(forward.port, keys, &["cat /work/note"]).await;
    assert_eq!(note, "kept\n");
    keeps_a_terminal(forward.port, keys).await;
    assert!(programs.api().session("shell").await.generation > before);
}

/// Opens the page until its terminal shows a prompt.
async fn opens(programs: &Programs, browser: &mut Chromium) {
    let port = programs.conman.sessions_address().port();
    let url = format!("http://terminal.localhost:{port}/");
    browser.open(&url).await;
    shows(browser, "#").await;
}

/// Waits until the page shows this text.
async fn shows(browser: &mut Chromium, text: &str) {
    let condition =
        format!("return document.body.innerText.replaceAll('\\u00a0', ' ').includes('{text}')");
    eventually(text, CLI_PATIENCE, async || {
        browser.evaluate(&condition).await == true
    })
    .await;
}

/// Gives the page's script the keys of a line, and waits for what the shell prints.
async fn types(browser: &mut Chromium, line: &str, printed: &str) {
    let keys = format!("window.shellinabox.keysPressed('{line}\\r'); return true");
    browser.evaluate(&keys).await;
    shows(browser, printed).await;
}

#[tokio::test]
async fn a_terminal_in_a_web_page_works_also_after_a_preemption() {
    let Some(programs) = Programs::start("shells", &[("terminal", WEB_TERMINAL)]).await else {
        return;
    };
    let Some(mut browser) = chromium("localhost").await else {
        return;
    };
    opens(&programs, &mut browser).await;
    types(&mut browser, "tty", "/dev/pts/0").await;
    let keep = "echo $((6 * 7)) kept >note; cat note";
    types(&mut browser, keep, "42 kept").await;
    programs.preempt().await;
    opens(&programs, &mut browser).await;
    types(&mut browser, "cat note", "42 kept").await;
    write(&programs.work("terminal").join("from-host"), "seen\n");
    types(&mut browser, "cat from-host", "seen").await;
}
