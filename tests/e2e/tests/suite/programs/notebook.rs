//! JupyterLab: a kernel over a WebSocket, a terminal, large files; by host and by path.

use conman_e2e::{Api, Chromium, WebSocket, chromium, eventually, with};
use conman_proto::SessionState;
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::{CLI_PATIENCE, Programs};

/// Bytes of a piece that is uploaded, as the page uploads large files.
const PIECE: usize = 3 << 20;
/// 201 MiB in all.
const PIECES: usize = 67;

/// Its paths contain the session's where it is reached by path. XSRF checks are for browsers.
fn template(base_url: &str) -> String {
    format!(
        r#"
port = 8888
strip_prefix = false
env = {{ PYTHONPATH = "/opt/lab", JUPYTER_PATH = "/opt/lab/share/jupyter", JUPYTER_CONFIG_PATH = "/opt/lab/etc/jupyter", HOME = "/tmp" }}
command = ["python3", "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", "--port=8888",
    "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", "--ServerApp.allow_remote_access=True",
    "--LabApp.app_dir=/opt/lab/share/jupyter/lab", "--ServerApp.root_dir=/work", "--ServerApp.base_url={base_url}"]
"#
    )
}

/// A way to the server.
struct Lab {
    sessions: Api,
    host: String,
    prefix: &'static str,
}

impl Lab {
    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> conman_e2e::Answer {
        let path = format!("{}{path}", self.prefix);
        let request = self.sessions.request(method, &path, body);
        conman_e2e::answer(&self.sessions, with(request, "host", &self.host)).await
    }

    async fn socket(&self, path: &str) -> WebSocket {
        let path = format!("{}{path}", self.prefix);
        let request = self.sessions.request(Method::GET, &path, None);
        let request = with(request, "host", &self.host);
        let connected = conman_e2e::websocket(&self.sessions, request, &[]).await;
        connected
            .unwrap_or_else(|refusal| panic!("{}", refusal.text()))
            .1
    }

    async fn computes_in_a_kernel(&self) {
        let kernel = json!({"name": "python3"});
        let kernel = self.send(Method::POST, "/api/kernels", Some(&kernel)).await;
        let kernel: Value = kernel.expect(StatusCode::CREATED);
        let id = kernel["id"].as_str().expect("an id");
        let mut socket = self
            .socket(&format!("/api/kernels/{id}/channels?session_id=s"))
            .await;
        let request = json!({
            "header": {"msg_id": "m", "msg_type": "execute_request", "username": "u",
                "session": "s", "version": "5.3", "date": ""},
            "parent_header": {}, "metadata": {}, "channel": "shell", "buffers": [],
            "content": {"code": "print(6 * 7)", "silent": false, "store_history": false,
                "user_expressions": {}, "allow_stdin": false},
        });
        socket
            .send(Message::text(request.to_string()))
            .await
            .expect("sent");
        let is_result =
            |value: &Value| value["msg_type"] == "stream" && value["content"]["text"] == "42\n";
        receive(&mut socket, is_result).await;
    }

    async fn has_a_terminal(&self) {
        let terminal = self
            .send(Method::POST, "/api/terminals", Some(&json!({})))
            .await;
        let terminal: Value = terminal.expect(StatusCode::OK);
        let name = terminal["name"].as_str().expect("a name");
        let mut socket = self.socket(&format!("/terminals/websocket/{name}")).await;
        let line = json!(["stdin", "tty; echo $((6 * 7))done\r"]);
        socket
            .send(Message::text(line.to_string()))
            .await
            .expect("sent");
        let mut screen = String::new();
        let is_done = |value: &Value| {
            if value[0] == "stdout" {
                screen.push_str(value[1].as_str().unwrap_or_default());
            }
            screen.contains("/dev/pts/") && screen.contains("42done")
        };
        receive(&mut socket, is_done).await;
    }

    async fn uploads(&self) {
        for number in 0..PIECES {
            let chunk = if number + 1 == PIECES {
                -1
            } else {
                i64::try_from(number + 1).expect("few")
            };
            let group = format!("{}QID", char::from(LETTERS[number % LETTERS.len()]));
            let body = json!({"type": "file", "format": "base64", "name": "big", "path": "big",
                "chunk": chunk, "content": group.repeat(PIECE / 3)});
            let answer = self
                .send(Method::PUT, "/api/contents/big", Some(&body))
                .await;
            assert!(answer.status.is_success(), "{}", answer.text());
        }
    }

    async fn downloads(&self) {
        let answer = self.send(Method::GET, "/files/big", None).await;
        assert_eq!(
            (answer.status, answer.body.len()),
            (StatusCode::OK, PIECE * PIECES)
        );
        for (number, piece) in answer.body.chunks(PIECE).enumerate() {
            let letter = u8::try_from(number % LETTERS.len()).expect("few");
            // The letter's six bits, then those of `QID`.
            let group = [(letter << 2) | 1, 2, 3];
            assert!(
                piece.chunks(3).all(|bytes| bytes == group),
                "piece {number}"
            );
        }
    }
}

const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

async fn receive(socket: &mut WebSocket, mut wanted: impl FnMut(&Value) -> bool) {
    let receiving = async {
        while let Some(message) = socket.next().await {
            let message = message.expect("a message");
            if let Ok(value) = serde_json::from_slice(&message.into_data())
                && wanted(&value)
            {
                return;
            }
        }
        panic!("the WebSocket ended");
    };
    timeout(CLI_PATIENCE, receiving).await.expect("in time");
}

/// Opens the page, until its script shows the panel with the notebooks.
async fn opens(browser: &mut Chromium, lab: &Lab) {
    browser
        .open(&format!("http://{}{}/lab", lab.host, lab.prefix))
        .await;
    let panel = "return !!document.querySelector('#jp-main-dock-panel')";
    eventually("the page is shown", CLI_PATIENCE, async || {
        browser.evaluate(panel).await == true
    })
    .await;
}

async fn serves(programs: &Programs, browser: &mut Chromium, lab: &Lab, id: &str) {
    opens(browser, lab).await;
    lab.computes_in_a_kernel().await;
    lab.has_a_terminal().await;
    lab.uploads().await;
    lab.downloads().await;
    let before = programs.api().session(id).await.generation;
    programs.preempt().await;
    assert_eq!(
        programs.api().session(id).await.state,
        SessionState::Stopped
    );
    // This connection starts it again.
    lab.downloads().await;
    lab.computes_in_a_kernel().await;
    opens(browser, lab).await;
    assert!(programs.api().session(id).await.generation > before);
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn jupyterlab_works_by_path_and_by_host_also_after_a_preemption() {
    let by_path = template("/s/path/");
    let by_host = template("/");
    let templates = [("path", &*by_path), ("host", &*by_host)];
    let Some(programs) = Programs::start("notebook", &templates).await else {
        return;
    };
    let Some(mut browser) = chromium("localhost").await else {
        return;
    };
    let sessions = programs.conman.sessions();
    let address = programs.conman.sessions_address();
    let path = Lab {
        sessions: sessions.clone(),
        host: address.to_string(),
        prefix: "/s/path",
    };
    serves(&programs, &mut browser, &path, "path").await;
    let host = Lab {
        sessions,
        host: format!("host.localhost:{}", address.port()),
        prefix: "",
    };
    serves(&programs, &mut browser, &host, "host").await;
}
