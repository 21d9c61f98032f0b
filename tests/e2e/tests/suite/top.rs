//! `conman top` in a real terminal.

use std::process::Stdio;
use std::time::Duration;

use conman_e2e::{Conman, native};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

struct Screen {
    keys: ChildStdin,
    output: ChildStdout,
    parser: vt100::Parser,
}

impl Screen {
    async fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).await.expect("typed");
    }

    async fn shows(&mut self, wanted: impl Fn(&str) -> bool) {
        let mut buffer = [0; 4096];
        while !wanted(&self.parser.screen().contents()) {
            let read = timeout(PATIENCE, self.output.read(&mut buffer)).await;
            let shown = self.parser.screen().contents();
            let count = read.unwrap_or_else(|_| panic!("on the screen is {shown}"));
            let count = count.expect("read");
            assert!(count > 0, "it ended with {shown}");
            self.parser.process(&buffer[..count]);
        }
    }
}

#[tokio::test]
async fn top_filters_follows_and_leaves_the_terminal_as_it_was() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let api = conman.api();
    for id in ["alpha", "beta"] {
        api.ensure(id, &json!({"template": "idle"})).await;
    }
    let top = format!(
        "stty cols 160 rows 40; exec {} --socket {} top",
        conman_e2e::binary().display(),
        conman.socket_path().display()
    );
    // script makes the terminal.
    let mut script = Command::new("script");
    script
        .args(["-qefc", &top, "/dev/null"])
        .env("TERM", "xterm");
    script
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    let mut script = script.spawn().expect("script starts");
    let mut screen = Screen {
        keys: script.stdin.take().expect("piped"),
        output: script.stdout.take().expect("piped"),
        parser: vt100::Parser::new(nonzero(40), nonzero(160), 0),
    };
    screen
        .shows(|text| text.contains(" 2 sessions ") && text.contains("beta"))
        .await;
    screen.press("/alp\r").await;
    screen
        .shows(|text| text.contains(" 1 of 2 sessions: alp ") && !text.contains("beta"))
        .await;
    screen.press("\r").await;
    // Followed: its figures, the second reading's share of a processor among them.
    screen
        .shows(|text| text.contains(" alpha ") && text.contains("THROTTLED   0.0 ms"))
        .await;
    assert!(screen.parser.screen().alternate_screen());
    api.stop("alpha").await;
    screen
        .shows(|text| text.contains("not running: `conman why alpha` explains"))
        .await;
    screen.press("q").await;
    let status = timeout(PATIENCE, script.wait())
        .await
        .expect("in time")
        .expect("it ends");
    assert!(status.success(), "{status}");
    let mut rest = Vec::new();
    screen.output.read_to_end(&mut rest).await.expect("read");
    screen.parser.process(&rest);
    assert!(!screen.parser.screen().alternate_screen());
    assert!(!screen.parser.screen().hide_cursor());
}

#[tokio::test]
async fn top_without_a_terminal_names_the_command_that_prints() {
    let Some(native) = native() else { return };
    let conman = Conman::builder().start_native(&native).await;
    let output = conman.cli(&["top"]).await;
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("`conman stats`"), "{output:?}");
}

fn nonzero(cells: u16) -> std::num::NonZero<u16> {
    std::num::NonZero::new(cells).expect("not zero")
}
