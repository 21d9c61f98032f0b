//! The demo's tour: a program over HTTP, a shell over a WebSocket, a command, a package through an egress
//! list, and a preemption; with Docker also its bridge, and a comparison with `docker kill`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tungstenite::Message;

use super::daemon::{Conman, binary};
use crate::process::{cargo, output};
use crate::progress::Step;
use crate::setup::DEMO_IMAGE;

/// Sessions that die together at the end of the tour.
const CROWD: usize = 20;
/// Bound on every read of the tour, so that a failure ends it.
const PATIENCE: Duration = Duration::from_secs(20);
/// Fetches the URL in its first argument. busybox's wget is not used: linked statically, it
/// crashes in the resolver of some C libraries.
const FETCH: &str = "import sys, urllib.request as r; \
                     print(r.urlopen(sys.argv[1], timeout=10).read().decode())";
const METADATA: &str = "http://169.254.169.254/";
/// A Python package with one module, which prints a line.
const PACKAGE: &[u8] = include_bytes!("../../../../deploy/demo/greeting-1.0-py3-none-any.whl");
const PACKAGE_NAME: &str = "greeting-1.0-py3-none-any.whl";
const GREETING: &str = "greetings from the host";

/// Sessions that [`open_sessions`] starts, and their templates; the last one is on Docker.
const SESSIONS: [(&str, &str); 4] = [
    ("notebook", "python"),
    ("console", "console"),
    ("installer", "installer"),
    ("worker", "egress"),
];
/// Sessions that `docker kill` and conman kill for the comparison.
const COMPARED: &str = "40";

fn sessions(conman: &Conman) -> &'static [(&'static str, &'static str)] {
    match conman.docker {
        true => &SESSIONS,
        false => &SESSIONS[..3],
    }
}

pub(crate) fn open_sessions(conman: &Conman, archive: &Path) -> Result<()> {
    let step = Step::start(format!("importing the image {DEMO_IMAGE}"));
    let path = archive.to_string_lossy();
    conman.command(&["image", "import", &path, DEMO_IMAGE])?;
    step.done();
    for (id, template) in sessions(conman) {
        let step = Step::start(format!("starting session {id} (template {template})"));
        conman.command(&["run", id, "--template", template])?;
        step.done();
    }
    Ok(())
}

pub(crate) fn explain(conman: &Conman) {
    let tool = format!(
        "{} --socket {}",
        binary().display(),
        conman.socket().display()
    );
    let (api, sessions) = (&conman.api, &conman.sessions);
    let egress = match conman.docker {
        true => {
            format!("\n  {tool} exec worker -- ip route          # the session on Docker's bridge")
        }
        false => String::new(),
    };
    println!(
        "
conman is running.

  a shell in a browser    http://console.localhost:{port}/
  a Python web server     http://notebook.localhost:{port}/

Try:
  curl http://{sessions}/s/notebook/
  TOKEN=$(cat {token})       # the API is for its administrator, who is root
  curl -X PUT -H \"Authorization: Bearer $TOKEN\" -H 'content-type: application/json' \\
       -d '{{\"template\":\"python\"}}' http://{api}/v1/sessions/mine
  {tool} ps
  {tool} exec -it console -- sh{egress}
  {tool} why notebook
  {tool} preempt                          # the machine is going: all sessions die at once
  {tool} readmit                          # false alarm: take sessions again

The daemon's log: {log}
Ctrl-C ends the demo.",
        port = sessions.rsplit(':').next().unwrap_or_default(),
        log = conman.log_file().display(),
        token = conman.token_file().display(),
    );
}

pub(crate) fn take(conman: &Conman) -> Result<()> {
    over_http(conman)?;
    over_websocket(conman)?;
    a_command(conman)?;
    a_package(conman)?;
    if conman.docker {
        bridge(conman)?;
    }
    why(conman)?;
    preemption(conman)?;
    if conman.docker {
        comparison()?;
    }
    Ok(())
}

fn over_http(conman: &Conman) -> Result<()> {
    let url = format!("http://{}/s/notebook/index.html", conman.sessions);
    println!("\n$ curl {url}");
    let page = output(Command::new("curl").args(["--silent", "--show-error", "--fail", &url]))?;
    let page = String::from_utf8_lossy(&page.stdout).into_owned();
    println!("{}", page.lines().take(3).collect::<Vec<_>>().join("\n"));
    ensure!(
        page.contains("A shell inside the session"),
        "the session's page looks different"
    );
    Ok(())
}

fn over_websocket(conman: &Conman) -> Result<()> {
    let url = format!("ws://{}/s/console/", conman.sessions);
    println!("\n$ websocket {url}");
    let stream = TcpStream::connect(&conman.sessions).context("connecting to conman")?;
    stream
        .set_read_timeout(Some(PATIENCE))
        .context("bounding reads")?;
    let (mut socket, _) = tungstenite::client(url.as_str(), stream)
        .map_err(|error| anyhow::anyhow!("opening a WebSocket to the session: {error}"))?;
    socket
        .send(Message::text("echo $((6 * 7)) processes: $(ps | wc -l)"))
        .context("sending")?;
    loop {
        let message = socket
            .read()
            .context("reading from the session's WebSocket")?;
        let Message::Text(text) = message else {
            continue;
        };
        println!("{text}");
        if text.starts_with("42 processes") {
            break;
        }
        ensure!(
            !text.starts_with("[exit"),
            "the shell in the session did not answer with 42"
        );
    }
    socket.close(None).context("closing the WebSocket")?;
    Ok(())
}

fn a_command(conman: &Conman) -> Result<()> {
    println!("\n$ conman exec console -- hostname");
    let answer = conman.command(&["exec", "console", "--", "hostname"])?;
    let answer = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    println!("{answer}");
    ensure!(answer == "console", "the session calls itself {answer}");
    Ok(())
}

/// The installer reaches the registry in its egress list, and not the metadata address, although the
/// list has `internet` as well.
fn a_package(conman: &Conman) -> Result<()> {
    let registry = conman.registry.local_addr().context("reading a port")?;
    let listener = conman.registry.try_clone().context("sharing a listener")?;
    // It ends with this program.
    std::thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let _ = serve_package(client);
        }
    });
    let index = format!("http://{registry}/simple");
    let install = "pip install --quiet --target /tmp/packages --trusted-host 127.0.0.2 --index-url";
    println!("\n$ conman exec installer -- {install} {index} greeting");
    let script = format!("python3 -m {install} {index} greeting");
    conman.command(&["exec", "installer", "--", "sh", "-c", &script])?;
    let import = "cd /tmp/packages && exec python3 -m greeting";
    println!("$ conman exec installer -- sh -c '{import}'");
    let answer = conman.command(&["exec", "installer", "--", "sh", "-c", import])?;
    let answer = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    println!("{answer}");
    ensure!(
        answer == "installed through the egress list",
        "the package was not installed"
    );
    println!("$ conman exec installer -- python3 -c '…' {METADATA}");
    match conman.command(&["exec", "installer", "--", "python3", "-c", FETCH, METADATA]) {
        Ok(_) => bail!("a session reached the metadata address"),
        Err(error) => {
            let refused = format!("{error:#}").contains("403");
            ensure!(refused, "the proxy did not refuse it: {error:#}");
            println!("(fails, as it must: 403 from the session's proxy)");
        }
    }
    Ok(())
}

fn serve_package(mut client: TcpStream) -> std::io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    let mut request = [0; 4096];
    let read = client.read(&mut request)?;
    let page = format!("<a href=\"/{PACKAGE_NAME}\">{PACKAGE_NAME}</a>");
    let is_page = request[..read].starts_with(b"GET /simple/greeting/ ");
    let (kind, body) = match is_page {
        true => ("text/html", page.as_bytes()),
        false => ("application/octet-stream", PACKAGE),
    };
    write!(
        client,
        "HTTP/1.0 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )?;
    client.write_all(body)
}

/// The worker fetches a page from this machine over Docker's bridge; the notebook cannot.
fn bridge(conman: &Conman) -> Result<()> {
    let gateway = conman.command(&[
        "exec",
        "worker",
        "--",
        "sh",
        "-c",
        "ip route | awk '/default/ {print $3}'",
    ])?;
    let gateway = String::from_utf8_lossy(&gateway.stdout).trim().to_owned();
    let listener = TcpListener::bind((gateway.as_str(), 0))
        .with_context(|| format!("listening on {gateway}, the bridge's address on this machine"))?;
    let url = format!(
        "http://{}/",
        listener.local_addr().context("reading the port")?
    );
    println!("\n$ conman exec worker -- python3 -c '{FETCH}' {url}");
    let server = std::thread::spawn(move || greet_once(&listener));
    let answer = conman.command(&["exec", "worker", "--", "python3", "-c", FETCH, &url])?;
    let answer = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    println!("{answer}");
    ensure!(
        answer == GREETING,
        "the host answered {answer:?} to the session"
    );
    match server.join() {
        Ok(served) => served.context("serving the session's request")?,
        Err(_) => bail!("the demo's little web server panicked"),
    }
    println!("$ conman exec notebook -- python3 -c '…' {url}");
    match conman.command(&["exec", "notebook", "--", "python3", "-c", FETCH, &url]) {
        Ok(_) => bail!("a session on the loopback network reached the host"),
        Err(_) => println!("(fails, as it must: this session has no network but its own loopback)"),
    }
    Ok(())
}

fn greet_once(listener: &TcpListener) -> std::io::Result<()> {
    let (mut client, _) = listener.accept()?;
    client.set_read_timeout(Some(PATIENCE))?;
    let mut request = [0; 1024];
    client.read(&mut request).map(drop)?;
    write!(
        client,
        "HTTP/1.0 200 OK\r\ncontent-length: {}\r\n\r\n{GREETING}",
        GREETING.len()
    )
}

fn why(conman: &Conman) -> Result<()> {
    println!("\n$ conman why notebook");
    let answer = conman.command(&["why", "notebook"])?;
    println!("{}", String::from_utf8_lossy(&answer.stdout).trim_end());
    Ok(())
}

fn preemption(conman: &Conman) -> Result<()> {
    let step = Step::start(format!("starting {CROWD} more sessions"));
    for number in 0..CROWD {
        let id = format!("crowd-{number}");
        conman.command(&["run", &id, "--template", "tiny", "--no-wait"])?;
    }
    for number in 0..CROWD {
        conman.command(&["run", &format!("crowd-{number}"), "--template", "tiny"])?;
    }
    step.done();
    println!("\n$ conman preempt");
    let report = conman.command(&["preempt", "--yes"])?;
    println!("{}", String::from_utf8_lossy(&report.stdout).trim_end());
    let report = conman.command(&["preempt", "--yes", "--json"])?;
    let report: serde_json::Value =
        serde_json::from_slice(&report.stdout).context("reading the preemption's report")?;
    let count = |name: &str| {
        report
            .get(name)
            .and_then(serde_json::Value::as_u64)
            .unwrap_or(0)
    };
    let expected = u64::try_from(CROWD).context("counting sessions")?
        + u64::try_from(sessions(conman).len()).context("counting sessions")?;
    ensure!(
        count("released") == expected && count("certified") == expected,
        "not all of the {expected} sessions were certified dead and released: {report}"
    );
    Ok(())
}

/// `docker kill` and conman on the same containers.
fn comparison() -> Result<()> {
    println!("\n$ conman bench kill --count {COMPARED}");
    output(cargo().args(["build", "--locked", "--quiet", "--package", "conman-bench"]))?;
    let table = output(Command::new(binary()).args(["bench", "kill", "--count", COMPARED]))?;
    println!("{}", String::from_utf8_lossy(&table.stdout).trim_end());
    Ok(())
}
