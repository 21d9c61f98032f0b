//! VS Code in a browser, by code-server.

use conman_e2e::{Chromium, chromium, eventually};

use super::{CLI_PATIENCE, Programs};

const CODE_SERVER: &str = r#"
port = 8080
ptys = 4
ready_timeout_s = 300
env = { HOME = "/tmp", SHELL = "/bin/sh" }
command = ["/opt/web/bin/node", "/opt/web/node_modules/code-server/out/node/entry.js", "--auth=none",
    "--bind-addr=127.0.0.1:8080", "--disable-telemetry", "--disable-update-check", "--disable-workspace-trust", "/work"]
"#;

/// Runs a command of the palette. Until the page has loaded all of itself, the palette does not find it, and what
/// it shows stays so.
async fn command(browser: &mut Chromium, name: &str) {
    let palette = "return !!document.querySelector('.quick-input-widget input:focus')";
    let found = format!(
        "for (let tries = 0; tries < 50; tries++) {{
            const first = document.querySelector('.quick-input-list-row');
            if (first?.innerText.includes('{name}')) return true;
            await new Promise(resolve => setTimeout(resolve, 100));
        }}
        return false"
    );
    eventually("the palette finds the command", CLI_PATIENCE, async || {
        browser.presses("Escape", 27).await;
        browser.presses("F1", 112).await;
        shows(browser, palette).await;
        browser.types(name).await;
        browser.evaluate(&found).await == true
    })
    .await;
    browser.presses("Enter", 13).await;
}

async fn shows(browser: &mut Chromium, condition: &str) {
    eventually(condition, CLI_PATIENCE, async || {
        browser.evaluate(condition).await == true
    })
    .await;
}

/// Opens the page and a terminal in it, whose shell writes a file.
async fn writes_by_its_terminal(programs: &Programs, browser: &mut Chromium, word: &str) {
    let port = programs.conman.sessions_address().port();
    let url = format!("http://code.localhost:{port}/?folder=/work");
    browser.open(&url).await;
    shows(
        browser,
        "return !!document.querySelector('.monaco-workbench .explorer-folders-view')",
    )
    .await;
    command(browser, "Terminal: Create New Terminal").await;
    shows(
        browser,
        "return !!document.querySelector('.xterm textarea:focus')",
    )
    .await;
    browser
        .types(&format!("tty >{word}; echo {word} >>{word}"))
        .await;
    browser.presses("Enter", 13).await;
    let file = programs.work("code").join(word);
    eventually("the file is written", CLI_PATIENCE, async || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.starts_with("/dev/pts/") && text.ends_with(&format!("{word}\n"))
    })
    .await;
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn vs_code_opens_a_terminal_also_after_a_preemption() {
    let Some(programs) = Programs::start("editor", &[("code", CODE_SERVER)]).await else {
        return;
    };
    let Some(mut browser) = chromium("localhost").await else {
        return;
    };
    writes_by_its_terminal(&programs, &mut browser, "first").await;
    programs.preempt().await;
    writes_by_its_terminal(&programs, &mut browser, "second").await;
    assert!(programs.work("code").join("first").exists());
}
