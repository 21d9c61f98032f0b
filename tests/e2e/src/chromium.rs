//! A browser without a screen.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use conman_linux::{Signal, signal_group};
use futures_util::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::eventually_some;

/// Where distributions put it.
const PROGRAMS: [&str; 2] = ["chromium", "chromium-browser"];

/// Bound on one command to the browser, a page's load included.
const PATIENCE: Duration = Duration::from_secs(60);

/// The life of a browser whose test was killed, in seconds.
const LIFE_SECONDS: &str = "600";

/// Browsers at a time in one test binary: each wants a core and a quarter of a GiB.
static BROWSERS: Semaphore = Semaphore::const_new(1);

/// A headless Chromium with a fresh profile and one tab, driven over the DevTools protocol.
///
/// <https://chromedevtools.github.io/devtools-protocol/>
#[derive(Debug)]
pub struct Chromium {
    process: Child,
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    /// The session of the one tab.
    tab: String,
    last_id: u64,
    _profile: TempDir,
    _permit: SemaphorePermit<'static>,
}

/// Starts Chromium, in which every name below `domain` is this host. `None`, with a line that says
/// why, when there is none on this machine.
///
/// # Panics
/// When it does not start.
pub async fn chromium(domain: &str) -> Option<Chromium> {
    let found = PROGRAMS.into_iter().find(|program| {
        let version = Command::new(program).arg("--version").output();
        version.is_ok_and(|output| output.status.success())
    });
    let Some(program) = found else {
        crate::lacks("chromium is missing (package chromium)");
        return None;
    };
    let permit = BROWSERS.acquire().await.expect("never closed");
    let profile = tempfile::Builder::new()
        .prefix("conman-e2e-chromium-")
        .tempdir()
        .expect("a temporary directory can be made");
    let process = Command::new("timeout")
        .args(["--kill-after=1", LIFE_SECONDS, program])
        .args([
            "--headless",
            // It runs as root here, where its own sandbox refuses to work.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--no-proxy-server",
            "--disable-background-networking",
            "--disable-breakpad",
            "--disable-component-update",
            "--disable-dev-shm-usage",
            "--disable-sync",
            // A page asked for by http is to be loaded by http.
            "--disable-features=HttpsUpgrades,HttpsFirstBalancedModeAutoEnable",
            "--remote-debugging-port=0",
        ])
        .arg(format!("--host-resolver-rules=MAP *.{domain} 127.0.0.1"))
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .arg("about:blank")
        // What it leaves in the temporary directory goes with its profile.
        .env("TMPDIR", profile.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("chromium starts");
    let mut started = Started(Some(process));
    let port_file = profile.path().join("DevToolsActivePort");
    let address = eventually_some("chromium listens", PATIENCE, async || {
        let text = fs::read_to_string(&port_file).ok()?;
        let (port, path) = text.split_once('\n')?;
        (!path.is_empty()).then(|| format!("ws://127.0.0.1:{port}{path}"))
    })
    .await;
    let (socket, _) = timeout(PATIENCE, connect_async(address))
        .await
        .expect("chromium answers in time")
        .expect("chromium is a WebSocket server");
    let mut browser = Chromium {
        process: started.0.take().expect("it was started"),
        socket,
        tab: String::new(),
        last_id: 0,
        _profile: profile,
        _permit: permit,
    };
    browser.open_tab().await;
    Some(browser)
}

/// A browser that is killed unless somebody takes it.
struct Started(Option<Child>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(process) = &mut self.0 {
            kill(process);
        }
    }
}

fn kill(process: &mut Child) {
    // Who has ended needs no killing.
    let _ = signal_group(process.id().cast_signed(), Signal::SIGKILL);
    let _ = process.wait();
}

impl Drop for Chromium {
    fn drop(&mut self) {
        kill(&mut self.process);
    }
}

impl Chromium {
    async fn open_tab(&mut self) {
        let made = self
            .call("Target.createTarget", &json!({"url": "about:blank"}))
            .await;
        let attach = json!({"targetId": made["targetId"], "flatten": true});
        let attached = self.call("Target.attachToTarget", &attach).await;
        self.tab = attached["sessionId"].as_str().expect("an id").to_owned();
        self.call("Page.enable", &json!({})).await;
    }

    /// Goes to a page as if its address had been typed, and waits until it has loaded.
    ///
    /// # Panics
    /// When nothing answers there.
    pub async fn open(&mut self, url: &str) {
        let gone = self.call("Page.navigate", &json!({"url": url})).await;
        assert!(gone["errorText"].is_null(), "{url}: {gone}");
        self.evaluate(
            "await new Promise(done => document.readyState === 'complete' \
             ? done() : addEventListener('load', done))",
        )
        .await;
    }

    /// Runs the body of an asynchronous function within the page and gives what it returns.
    ///
    /// # Panics
    /// When it throws.
    pub async fn evaluate(&mut self, body: &str) -> Value {
        let request = json!({
            "expression": format!("(async () => {{ {body} }})()"),
            "awaitPromise": true,
            "returnByValue": true,
            "userGesture": true,
        });
        let mut answer = self.call("Runtime.evaluate", &request).await;
        assert!(answer["exceptionDetails"].is_null(), "{body}: {answer}");
        answer["result"]["value"].take()
    }

    /// Types text where the focus is.
    pub async fn types(&mut self, text: &str) {
        let text = json!({"text": text});
        self.call("Input.insertText", &text).await;
    }

    /// Presses a key that makes no text, such as `F1` with code 112, or Enter with code 13.
    pub async fn presses(&mut self, key: &str, code: u32) {
        for kind in ["keyDown", "keyUp"] {
            let mut event =
                json!({"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code});
            if (kind, key) == ("keyDown", "Enter") {
                event["text"] = json!("\r");
            }
            self.call("Input.dispatchKeyEvent", &event).await;
        }
    }

    /// The cookies that the browser would send to this address.
    pub async fn cookies(&mut self, url: &str) -> Vec<Value> {
        let mut answer = self
            .call("Network.getCookies", &json!({"urls": [url]}))
            .await;
        match answer["cookies"].take() {
            Value::Array(cookies) => cookies,
            other => panic!("no cookies: {other}"),
        }
    }

    /// One command and its result; events are not looked at.
    async fn call(&mut self, method: &str, params: &Value) -> Value {
        self.last_id += 1;
        let id = self.last_id;
        let mut command = json!({"id": id, "method": method, "params": params});
        if !self.tab.is_empty() {
            command["sessionId"] = json!(self.tab);
        }
        let exchange = async {
            let text = Message::text(command.to_string());
            self.socket.send(text).await.expect("chromium listens");
            loop {
                let message = self.socket.next().await.expect("chromium lives");
                let Message::Text(text) = message.expect("chromium keeps to the protocol") else {
                    continue;
                };
                let mut answer: Value = serde_json::from_str(&text).expect("JSON");
                if answer["id"] == id {
                    assert!(answer["error"].is_null(), "{command}: {answer}");
                    return answer["result"].take();
                }
            }
        };
        timeout(PATIENCE, exchange)
            .await
            .unwrap_or_else(|_| panic!("chromium takes too long for {command}"))
    }
}
