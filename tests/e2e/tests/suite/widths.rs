//! Tables on terminals of 80 and 120 columns.

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use conman_e2e::{Conman, native};
use serde_json::json;

const TABLES: [&str; 8] = [
    "ps",
    "ps --all",
    "nodes",
    "image ls",
    "stats",
    "execs LONG",
    "port LONG",
    "ls LONG:/bin",
];

/// What a command prints on a terminal of this width, which `script` makes.
fn on_terminal(conman: &Conman, columns: u32, command: &str) -> String {
    let line = format!(
        "stty cols {columns} rows 40; exec {} --no-color --socket {} {command} 2>/dev/null",
        conman_e2e::binary().display(),
        conman.socket_path().display(),
    );
    let output = Command::new("script")
        .args(["-qefc", &line, "/dev/null"])
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .output()
        .expect("script runs");
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    assert!(output.status.success(), "{command}: {text}");
    text
}

#[tokio::test]
async fn tables_with_long_names_fit_the_terminal_and_have_a_line_a_row() {
    let Some(native) = native() else { return };
    let name = format!("worker-{}.example.org", "x".repeat(60));
    let conman = Conman::builder()
        .set("node", &format!("name = \"{name}\""))
        .start_native(&native)
        .await;
    let image = format!("registry.example.org/{}/app:1", "team-".repeat(20) + "a");
    let archive = conman.directory().join("root.tar").display().to_string();
    let imported = conman.cli(&["image", "import", &archive, &image]).await;
    imported.success();
    let long = format!("notebook-{}", "of-a-long-name-".repeat(3) + "0");
    for id in [&*long, "short"] {
        let spec = json!({
            "image": image, "command": ["httpd", "-f", "-p", "8080"], "port": 8080, "ports": ["3000-3010"],
            "labels": {"team": "t".repeat(60)},
        });
        conman.api().ensure(id, &spec).await;
        let exec = [
            "exec",
            "--detach",
            id,
            "--",
            "sleep",
            "1000",
            &"y".repeat(200),
        ];
        conman.cli(&exec).await.success();
    }
    let ended = json!({"image": image, "command": ["/no/such/program"]});
    let _ = conman.api().put("/v1/sessions/ended", &ended).await;
    let mut wrong = String::new();
    for command in TABLES {
        let command = command.replace("LONG", &long);
        let whole = on_terminal(&conman, 1000, &command).lines().count();
        for columns in [80, 120] {
            let text = on_terminal(&conman, columns, &command);
            let longest = text.lines().map(|line| line.chars().count()).max();
            let is_wide = longest.is_none_or(|longest| longest > columns as usize);

            if is_wide || text.lines().count() > whole {
                let _ = writeln!(
                    wrong,
                    "{command}, {columns} columns, {longest:?}, {whole} rows:\n{text}"
                );
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
