//! Long bodies and endless answers through the sessions listener: whole, at the pace of the slower
//! side, and without a place in the daemon's memory.

use std::process::Stdio;
use std::time::Duration;

use conman_e2e::{Conman, PYTHON, RawClient, docker_shared, peak_resident_bytes, resident_bytes};
use http::{Method, StatusCode};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::{Child, Command};
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(240);

const MIB: usize = 1 << 20;
/// Size of each transfer in MiB.
const TRANSFER: usize = 300;
/// Most by which the daemon may grow for one of them: nothing of it depends on their size.
const GROWTH_BYTES: u64 = 32 << 20;

/// `GET /<n>` is n MiB of a known pattern, `PUT` says how many MiB of it were sent, and whether
/// they were the pattern.
const BULK: &str = r"
import array, http.server

MIB = 1 << 20

def block(number):
    return array.array('Q', range(number << 17, (number + 1) << 17)).tobytes()

class Bulk(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def pieces(self):
        left = self.headers['Content-Length']
        if left is not None:
            left = int(left)
            while left and (piece := self.rfile.read1(min(left, MIB))):
                left -= len(piece)
                yield piece
            return
        while size := int(self.rfile.readline().split(b';')[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def do_PUT(self):
        count, same, ahead = 0, True, bytearray()
        for piece in self.pieces():
            ahead += piece
            while len(ahead) >= MIB:
                same &= ahead[:MIB] == block(count)
                del ahead[:MIB]
                count += 1
        self.answer(b'%d MiB and %d bytes, %s' % (count, len(ahead), str(same).encode()))

    def answer(self, text):
        self.send_response(200)
        self.send_header('Content-Length', str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        count = int(self.path[1:])
        self.send_response(200)
        self.send_header('Content-Length', str(count * MIB))
        self.end_headers()
        for number in range(count):
            self.wfile.write(block(number))

    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

Server(('127.0.0.1', 8080), Bulk).serve_forever()
";

fn program(text: &str) -> Value {
    json!({"image": PYTHON, "command": ["python3", "-c", text], "port": 8080})
}

/// The pattern's MiB of this number.
fn block(number: usize) -> Vec<u8> {
    let words = MIB / 8;
    (number * words..(number + 1) * words)
        .flat_map(|word| (word as u64).to_le_bytes())
        .collect()
}

fn curl(arguments: &[&str]) -> Child {
    Command::new("curl")
        .args(["--silent", "--show-error", "--fail", "--max-time", "240"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("curl can be run")
}

/// Uploads with curl: in chunks, or with a length where there is one. Gives the answer.
async fn upload(url: &str, with_length: bool) -> String {
    let length = format!("Content-Length: {}", TRANSFER * MIB);
    let mut arguments = vec!["--upload-file", "-"];
    if with_length {
        // curl then sends what it reads without chunks.
        arguments.extend(["--header", "Transfer-Encoding:", "--header", &length]);
    }
    arguments.push(url);
    let mut child = curl(&arguments);
    let mut input = child.stdin.take().expect("it has a standard input");
    let feeding = tokio::spawn(async move {
        for number in 0..TRANSFER {
            input.write_all(&block(number)).await.expect("curl reads");
        }
    });
    let output = child.wait_with_output().await.expect("curl ends");
    feeding.await.expect("everything was fed");
    assert!(output.status.success(), "{:?}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Downloads with curl and compares with the pattern.
async fn download(url: &str) {
    let mut child = curl(&[url]);
    let mut output = child.stdout.take().expect("it has a standard output");
    let mut piece = vec![0; MIB];
    for number in 0..TRANSFER {
        output.read_exact(&mut piece).await.expect("it goes on");
        // Not by `assert_eq!`, which would print both.
        assert!(piece == block(number), "MiB {number} is another one");
    }
    assert_eq!(output.read(&mut piece).await.expect("it ends"), 0);
    assert!(child.wait().await.expect("curl ends").success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "in acceptance: takes all of a machine; conman-proxy `streaming::`"]
async fn hundreds_of_mebibytes_pass_both_ways_whole_and_leave_no_trace_in_the_daemon() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("bulk", &program(BULK)).await;
    let address = conman.sessions_address();
    let url = |path: &str| format!("http://{address}/s/bulk{path}");
    // What is made once is made before the first measurement.
    let warm = conman.sessions().get("/s/bulk/1").await;
    assert!(warm.body == block(0), "the pattern is the program's");
    let before = resident_bytes(conman.pid());

    // A client that asks for everything and reads nothing, all the while.
    let mut unread = RawClient::connect(address).await;
    let request = format!("GET /s/bulk/{TRANSFER} HTTP/1.1\r\nHost: localhost\r\n\r\n");
    unread.send(&request).await;

    let work = async {
        let down = async { download(&url(&format!("/{TRANSFER}"))).await };
        let up = async { upload(&url("/"), false).await };
        let ((), chunked) = tokio::join!(down, up);
        (chunked, upload(&url("/"), true).await)
    };
    let work = timeout(PATIENCE, work);
    let (received, peak) = peak_resident_bytes(conman.pid(), work).await;
    let (chunked, sized) = received.expect("in time");
    let whole = format!("{TRANSFER} MiB and 0 bytes, True");
    assert_eq!(
        (chunked.as_str(), sized.as_str()),
        (whole.as_str(), whole.as_str())
    );
    assert!(
        peak < before + GROWTH_BYTES,
        "the daemon grew from {before} to {peak} bytes"
    );
    let head = unread.read_until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let first = unread.read(MIB).await;
    assert!(first == block(0), "the unread answer is still whole");
}

/// `GET /events` is a stream of the events that `POST /emit` makes, one each.
const EVENTS: &str = r"
import http.server, queue

made = queue.Queue()

class Events(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        self.send_response(200)
        self.send_header('Content-Type', 'text/event-stream')
        if self.path == '/chunked':
            self.send_header('Transfer-Encoding', 'chunked')
        else:
            self.send_header('Connection', 'close')
        self.end_headers()
        while (number := made.get()) is not None:
            event = b'data: %d\n\n' % number
            if self.path == '/chunked':
                event = b'%x\r\n%s\r\n' % (len(event), event)
            self.wfile.write(event)
        if self.path == '/chunked':
            self.wfile.write(b'0\r\n\r\n')

    def do_POST(self):
        number = int(self.rfile.read(int(self.headers['Content-Length'])))
        made.put(number if number else None)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

Server(('127.0.0.1', 8080), Events).serve_forever()
";

#[tokio::test]
async fn an_event_arrives_before_the_next_one_is_made() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    conman.api().ensure("events", &program(EVENTS)).await;
    let sessions = conman.sessions();
    let emit = async |number: u64| {
        let made = sessions.post("/s/events/emit", &json!(number)).await;
        assert_eq!(made.status, StatusCode::NO_CONTENT);
    };
    for path in ["/s/events/chunked", "/s/events/until-closed"] {
        let request = sessions.request(Method::GET, path, None);
        let mut stream = sessions.open(request).await.expect("an answer");
        // The head is there before there is any event.
        assert_eq!(
            stream.response.headers()["content-type"],
            "text/event-stream"
        );
        for number in 1..=20 {
            emit(number).await;
            let event = timeout(PATIENCE, stream.response.body_mut().frame()).await;
            let event = event.expect("in time").expect("no end").expect("no error");
            let text = event.into_data().expect("content");
            assert_eq!(text, format!("data: {number}\n\n"));
        }
        emit(0).await;
        let end = timeout(PATIENCE, stream.response.body_mut().frame()).await;
        assert!(end.expect("in time").is_none(), "it ends in order");
    }
}

#[tokio::test]
async fn an_answer_that_comes_before_the_end_of_a_long_upload_is_not_lost() {
    let Some(docker) = docker_shared().await else {
        return;
    };
    let conman = Conman::start(&docker).await;
    // http.server refuses a PUT at once, reads nothing of it, and closes.
    conman
        .api()
        .ensure("python", &json!({"template": "python"}))
        .await;
    let address = conman.sessions_address();
    for fields in ["", "Expect: 100-continue\r\n"] {
        let mut client = RawClient::connect(address).await;
        let request = format!(
            "PUT /s/python/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{fields}\
             Content-Length: {}\r\n\r\n",
            64 * MIB
        );
        client.send(&request).await;
        let piece = vec![b'x'; 64 << 10];
        for _ in 0..1_024 {
            if !client.try_send(&piece).await {
                break;
            }
        }
        let answer = client.read_to_end().await;
        let refused = answer
            .lines()
            .find(|line| !line.contains(" 100 ") && !line.is_empty());
        assert!(
            refused.is_some_and(|line| line.starts_with("HTTP/1.1 501 ")),
            "{fields:?}: {answer}"
        );
    }
}
