//! Vite's and Next's hot reload, a room of Yjs, a build by Go.

use conman_e2e::{Api, Chromium, WebSocket, chromium, eventually, with};
use futures_util::{SinkExt as _, StreamExt as _};
use http::{Method, StatusCode};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::{CLI_PATIENCE, Programs, write};

const VITE: &str = r#"
port = 5173
env = { HOME = "/tmp" }
command = ["/opt/web/bin/node", "/opt/web/node_modules/vite/bin/vite.js", "/work", "--host", "127.0.0.1", "--port", "5173"]
"#;

/// Its project is in the image's directory: Next follows no link to packages elsewhere.
const NEXT: &str = r#"
port = 3000
env = { HOME = "/tmp", NEXT_TELEMETRY_DISABLED = "1" }
command = ["sh", "-c", """
mkdir -p /opt/web/pages
echo 'export default function Page() { return "the first page" }' >/opt/web/pages/index.js
exec /opt/web/bin/node /opt/web/node_modules/next/dist/bin/next dev /opt/web --hostname 127.0.0.1
"""]
"#;

const YJS: &str = r#"
port = 1234
env = { HOST = "127.0.0.1", PORT = "1234", YPERSISTENCE = "/work/rooms" }
command = ["/opt/web/bin/node", "/opt/web/node_modules/y-websocket/bin/server.js"]
"#;

const SHELL: &str = r#"
command = ["sleep", "infinity"]
ports = ["8000-8001"]
env = { HOME = "/tmp" }
"#;

/// The update that inserts "hello yjs" into an empty document's text `t`, as client 1.
const UPDATE: &[u8] = b"\x01\x01\x01\x00\x04\x01\x01\x74\x09hello yjs\x00";

/// Of the y-websocket protocol: synchronisation, with a state vector or an update.
const REQUEST_ALL: &[u8] = &[0, 0, 1, 0];

async fn socket(api: &Api, host: &str, path: &str, protocols: &[&str]) -> WebSocket {
    let request = with(api.request(Method::GET, path, None), "host", host);
    let connected = conman_e2e::websocket(api, request, protocols).await;
    connected
        .unwrap_or_else(|refusal| panic!("{}", refusal.text()))
        .1
}

/// Waits for a message that contains this.
async fn receive(socket: &mut WebSocket, wanted: &[u8]) {
    let receiving = async {
        while let Some(message) = socket.next().await {
            let data = message.expect("a message").into_data();
            if data.windows(wanted.len()).any(|part| part == wanted) {
                return;
            }
        }
        panic!("the WebSocket ended");
    };
    timeout(CLI_PATIENCE, receiving).await.expect("in time");
}

/// Loads the page in a browser, changes a module, and finds it replaced in the same page.
async fn replaces(programs: &Programs, browser: &mut Chromium, host: &str, content: &str) {
    browser.open(&format!("http://{host}/")).await;
    eventually("the page runs", CLI_PATIENCE, async || {
        browser.evaluate("return document.title !== ''").await == true
    })
    .await;
    browser.evaluate("window.isSame = true; return true").await;
    let shown = format!("return window.isSame && document.title.startsWith('{content}')");
    let mut count = 0;
    // A change is only seen once the page's WebSocket is open.
    eventually("the module is replaced", CLI_PATIENCE, async || {
        count += 1;
        let source = format!("export const x = \"{content}{count}\";\n");
        write(&programs.work("vite").join("x.js"), &source);
        browser.evaluate(&shown).await == true
    })
    .await;
}

/// Loads the page by the session's host, changes a module, and waits for the message of the change.
async fn reloads(programs: &Programs, host: &str, content: &str) {
    let api = programs.conman.sessions();
    let get = async |path: &str| {
        let request = with(api.request(Method::GET, path, None), "host", host);
        let answer = conman_e2e::answer(&api, request).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
        answer.text()
    };
    assert!(get("/").await.contains("/@vite/client"));
    assert!(get("/main.js").await.contains("/x.js"));
    get("/x.js").await;
    let client = get("/@vite/client").await;
    let token = client
        .split_once("const wsToken = \"")
        .and_then(|(_, rest)| rest.split('"').next());
    let path = format!("/?token={}", token.unwrap_or_default());
    let mut socket = socket(&api, host, &path, &["vite-hmr"]).await;
    receive(&mut socket, b"connected").await;
    let module = programs.work("vite").join("x.js");
    let source = format!("export const x = \"{content}\";\n");
    let copy = programs.conman.directory().join("x.js");
    write(&copy, &source);
    let path = copy.to_string_lossy();
    let copied = programs.conman.cli(&["cp", &path, "vite:/work/x.js"]).await;
    copied.success();
    assert_eq!(std::fs::read_to_string(module).expect("bound"), source);
    receive(&mut socket, b"/x.js").await;
    assert!(get("/x.js").await.contains(content));
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn vite_reloads_what_changes_also_after_a_preemption() {
    let Some(programs) = Programs::start("web", &[("vite", VITE)]).await else {
        return;
    };
    let work = programs.work("vite");
    write(
        &work.join("index.html"),
        "<!doctype html><script type=module src=/main.js></script>",
    );
    write(
        &work.join("main.js"),
        "import {x} from './x.js'; document.title = x; \
         import.meta.hot.accept('./x.js', (changed) => { document.title = changed.x; });",
    );
    write(&work.join("x.js"), "export const x = \"first\";\n");
    let host = format!(
        "vite.localhost:{}",
        programs.conman.sessions_address().port()
    );
    let Some(mut browser) = chromium("localhost").await else {
        return;
    };
    reloads(&programs, &host, "second").await;
    replaces(&programs, &mut browser, &host, "shown").await;
    programs.preempt().await;
    reloads(&programs, &host, "third").await;
    replaces(&programs, &mut browser, &host, "again").await;
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn next_replaces_what_changes_in_the_open_page_also_after_a_preemption() {
    let Some(programs) = Programs::start("next", &[("next", NEXT)]).await else {
        return;
    };
    let Some(mut browser) = chromium("localhost").await else {
        return;
    };
    let port = programs.conman.sessions_address().port();
    for name in ["second", "third"] {
        browser
            .open(&format!("http://next.localhost:{port}/"))
            .await;
        let shows = |text: &str| format!("return document.body.innerText.includes('{text}')");
        let first = shows("the first page");
        eventually("the page", CLI_PATIENCE, async || {
            browser.evaluate(&first).await == true
        })
        .await;
        browser.evaluate("window.isSame = true; return true").await;
        let replaced = format!("if (!window.isSame) return false; {}", shows(name));
        let mut count = 0;
        // A change is only seen once the page's WebSocket is open.
        eventually("its replacement", CLI_PATIENCE, async || {
            count += 1;
            let page = format!("the {name} page, changed for the {count}th time");
            let change = format!("sed -i 's/the .* page[^\"]*/{page}/' /opt/web/pages/index.js");
            programs.shell("next", &change).await;
            browser.evaluate(&replaced).await == true
        })
        .await;
        // The page would load itself again.
        browser.open("about:blank").await;
        programs.preempt().await;
    }
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn a_room_of_yjs_is_shared_and_kept_also_after_a_preemption() {
    let Some(programs) = Programs::start("web", &[("room", YJS)]).await else {
        return;
    };
    let api = programs.conman.sessions();
    let address = programs.conman.sessions_address().to_string();
    let path = "/s/room/notes";
    let mut reader = socket(&api, &address, path, &[]).await;
    let mut writer = socket(&api, &address, path, &[]).await;
    let length = u8::try_from(UPDATE.len()).expect("short");
    let message = [&[0, 2, length], UPDATE].concat();
    writer.send(Message::binary(message)).await.expect("sent");
    receive(&mut reader, b"hello yjs").await;
    let rooms = programs.work("room").join("rooms");
    eventually("the room is stored", CLI_PATIENCE, async || {
        std::fs::read_dir(&rooms).is_ok_and(|files| {
            let mut logs = files.filter_map(|file| std::fs::read(file.ok()?.path()).ok());
            logs.any(|log| log.windows(9).any(|part| part == b"hello yjs"))
        })
    })
    .await;
    programs.preempt().await;
    let mut late = socket(&api, &address, path, &[]).await;
    late.send(Message::binary(REQUEST_ALL)).await.expect("sent");
    receive(&mut late, b"hello yjs").await;
}

#[tokio::test]
#[ignore = "`cargo xtask acceptance programs`"]
async fn a_service_is_built_and_served_inside_a_session_also_after_a_preemption() {
    let Some(programs) = Programs::start("build", &[("shell", SHELL)]).await else {
        return;
    };
    let source = r#"package main
import ("fmt"; "net/http")
func main() {
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { fmt.Fprintln(w, "built inside") })
	http.ListenAndServe("127.0.0.1:8001", nil)
}
"#;
    let work = programs.work("shell");
    write(&work.join("main.go"), source);
    write(&work.join("go.mod"), "module service\n");
    let api = programs.conman.sessions();
    for build in ["cd /work && go build -o service .", "test -x /work/service"] {
        programs.shell("shell", build).await;
        programs
            .shell("shell", "setsid /work/service >/dev/null 2>&1 &")
            .await;
        eventually("the service answers", CLI_PATIENCE, async || {
            let answer = api.get("/s/shell:8001/").await;
            answer.status == StatusCode::OK && answer.text() == "built inside\n"
        })
        .await;
        programs.preempt().await;
        programs
            .conman
            .cli(&["run", "shell", "--template", "shell"])
            .await
            .success();
    }
}
