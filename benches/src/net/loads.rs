//! The loads: this program's client, iperf3 and redis-benchmark, started where the client belongs.

use std::io::Write as _;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::process::Command;

use super::namespaces::Place;
use super::services::{BULK, CHUNK_BYTES, Services, program};
use crate::arguments::{LoadKind, Loading};
use crate::load::{Target, connect, echo, read_head};
use crate::statistics::quantiles;

/// Size of an echoed message and of Redis's values.
const MESSAGE_BYTES: usize = 64;
/// Connections of the loads that show the rate.
const CONNECTIONS: usize = 32;
/// Requests of redis-benchmark for each second that a measurement shall take, on one connection
/// and on many.
const REDIS_REQUESTS: [usize; 2] = [10_000, 40_000];
/// A measurement may take this much longer than its load.
const PATIENCE: Duration = Duration::from_secs(60);
/// iperf3 serves one client at a time.
const BUSY_PATIENCE: Duration = Duration::from_secs(5);
const BUSY_PAUSE: Duration = Duration::from_millis(100);
/// What bulk transfers begin with, which is not counted: the windows grow.
const WARM_UP: Duration = Duration::from_millis(200);

/// One of the table's columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Metric {
    LatencyUs,
    MessagesPerS,
    FetchGbitPerS,
    PushGbitPerS,
    Iperf3GbitPerS,
    RedisLatencyUs,
    RedisRequestsPerS,
}

impl Metric {
    pub(super) const ALL: [Self; 7] = [
        Self::LatencyUs,
        Self::MessagesPerS,
        Self::FetchGbitPerS,
        Self::PushGbitPerS,
        Self::Iperf3GbitPerS,
        Self::RedisLatencyUs,
        Self::RedisRequestsPerS,
    ];

    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::LatencyUs => "64 B, p50",
            Self::MessagesPerS => "64 B, 32 conn.",
            Self::FetchGbitPerS => "fetch",
            Self::PushGbitPerS => "push",
            Self::Iperf3GbitPerS => "iperf3",
            Self::RedisLatencyUs => "Redis SET",
            Self::RedisRequestsPerS => "Redis, 32 conn.",
        }
    }

    pub(super) const fn unit(self) -> &'static str {
        match self {
            Self::LatencyUs | Self::RedisLatencyUs => "µs",
            Self::MessagesPerS | Self::RedisRequestsPerS => "/s",
            Self::FetchGbitPerS | Self::PushGbitPerS | Self::Iperf3GbitPerS => "Gbit/s",
        }
    }

    /// Measures the path from `client` to `services`; `None` if this load cannot be sent on it.
    pub(super) async fn measure(
        self,
        client: &Place,
        services: &Services,
        length: Duration,
    ) -> Result<Option<f64>> {
        let own = |kind, target, connections| own(client, kind, target, connections, length);
        let measured = match (self, services.tools) {
            (Self::LatencyUs, _) => own("echo", &services.http, 1).await?.0,
            (Self::MessagesPerS, _) => own("echo", &services.http, CONNECTIONS).await?.1,
            (Self::FetchGbitPerS, _) => own("fetch", &services.http, 1).await?.1 * 8e-9,
            (Self::PushGbitPerS, _) => own("push", &services.http, 1).await?.1 * 8e-9,
            (_, None) => return Ok(None),
            (Self::Iperf3GbitPerS, Some(tools)) => iperf3(client, tools.iperf3, length).await?,
            (Self::RedisLatencyUs, Some(tools)) => redis(client, tools.redis, 1, length).await?.0,
            (Self::RedisRequestsPerS, Some(tools)) => {
                redis(client, tools.redis, CONNECTIONS, length).await?.1
            }
        };
        Ok(Some(measured))
    }
}

/// Runs this program's client: the median latency in microseconds, and messages or bytes a second.
async fn own(
    client: &Place,
    kind: &str,
    target: &Target,
    connections: usize,
    length: Duration,
) -> Result<(f64, f64)> {
    let this = std::env::current_exe().context("finding this program")?;
    let mut command = client.command(&this);
    command
        .args(["load", kind, "--address", &target.address.to_string()])
        .args(["--path", &target.path])
        .args(["--connections", &connections.to_string()])
        .args(["--seconds", &length.as_secs().to_string()]);
    if let Some(proxy) = target.through {
        command.args(["--through", &proxy.to_string()]);
    }
    let found: Value = serde_json::from_str(&output(&mut command, length).await?)?;
    let value = |name: &str| found[name].as_f64().context("the client measured nothing");
    Ok((value("p50_us")?, value("per_s")?))
}

/// The client: `conman-bench load`.
///
/// # Errors
/// When the target cannot be reached, or does not answer as expected.
pub(crate) async fn load(arguments: Loading) -> Result<()> {
    let length = Duration::from_secs(arguments.seconds as u64);
    let target = Target {
        address: arguments.address,
        path: arguments.path,
        through: arguments.through,
    };
    let (p50_us, per_s) = match arguments.kind {
        LoadKind::Echo => {
            let measured = echo(&target, arguments.connections, MESSAGE_BYTES, length).await?;
            let latency = quantiles(&measured.latencies_us).context("nothing was echoed")?;
            (latency.p50, measured.messages_per_s)
        }
        LoadKind::Fetch => (0.0, bulk(&target, length, false).await?),
        LoadKind::Push => (0.0, bulk(&target, length, true).await?),
    };
    let found = json!({ "p50_us": p50_us, "per_s": per_s });
    // The benchmark that started this may have been interrupted.
    let _ = writeln!(std::io::stdout(), "{found}");
    Ok(())
}

/// Sends or receives as much as possible; bytes a second.
async fn bulk(target: &Target, length: Duration, push: bool) -> Result<f64> {
    let mut stream = connect(target).await?;
    let (method, more) = match push {
        true => ("POST", "Content-Length: 1000000000000\r\n"),
        false => ("GET", ""),
    };
    let (path, address) = (&target.path, target.address);
    let head = format!("{method} {path}{BULK} HTTP/1.1\r\nHost: {address}\r\n{more}\r\n");
    stream
        .write_all(head.as_bytes())
        .await
        .context("sending a request")?;
    if !push {
        let head = read_head(&mut stream).await?;
        let head = String::from_utf8_lossy(&head);
        let status = head.lines().next().unwrap_or_default();
        ensure!(status.starts_with("HTTP/1.1 200"), "answered: {status}");
    }
    let mut chunk = vec![b'x'; CHUNK_BYTES];
    let mut begun = Instant::now();
    let (mut bytes, mut warm) = (0, false);
    loop {
        let count = match push {
            true => stream.write(&chunk).await.context("sending")?,
            false => stream.read(&mut chunk).await.context("receiving")?,
        };
        ensure!(count > 0, "the transfer ended early");
        bytes += count;
        let elapsed = begun.elapsed();
        if warm && elapsed >= length {
            return Ok(bytes as f64 / elapsed.as_secs_f64());
        }
        if !warm && elapsed >= WARM_UP {
            (begun, bytes, warm) = (Instant::now(), 0, true);
        }
    }
}

/// Bulk from the client to the server; Gbit/s.
async fn iperf3(client: &Place, server: SocketAddr, length: Duration) -> Result<f64> {
    let end = Instant::now() + BUSY_PATIENCE;
    let mut command = client.command(&program("iperf3", "iperf3")?);
    command
        .args(["--client", &server.ip().to_string()])
        .args(["--port", &server.port().to_string(), "--json"])
        .args(["--time", &length.as_secs().to_string()]);
    let found = loop {
        match output(&mut command, length).await {
            // Its last client has ended, and it has not noticed yet.
            Err(error) if error.to_string().contains("server is busy") && Instant::now() < end => {
                tokio::time::sleep(BUSY_PAUSE).await;
            }
            found => break found?,
        }
    };
    let found: Value = serde_json::from_str(&found)?;
    let bits = found["end"]["sum_received"]["bits_per_second"].as_f64();
    let why = found["error"].as_str().unwrap_or("no sum");
    Ok(bits.with_context(|| format!("iperf3 measured nothing: {why}"))? * 1e-9)
}

/// SETs of small values: the mean latency in microseconds, and requests a second.
async fn redis(
    client: &Place,
    server: SocketAddr,
    connections: usize,
    length: Duration,
) -> Result<(f64, f64)> {
    let requests = REDIS_REQUESTS[usize::from(connections > 1)] * length.as_secs() as usize;
    let mut command = client.command(&program("redis-benchmark", "redis-server")?);
    command
        .args(["-h", &server.ip().to_string()])
        .args(["-p", &server.port().to_string()])
        .args(["-c", &connections.to_string(), "-n", &requests.to_string()])
        .args(["-d", &MESSAGE_BYTES.to_string(), "-t", "set", "--csv"]);
    redis_csv(&output(&mut command, length).await?)
}

/// Reads redis-benchmark's CSV: its mean latency, in microseconds, and its rate.
fn redis_csv(text: &str) -> Result<(f64, f64)> {
    let cells = |line: &str| -> Vec<String> {
        let cells = line.split(',').map(|cell| cell.trim_matches('"'));
        cells.map(str::to_owned).collect()
    };
    let mut lines = text.lines().filter(|line| line.starts_with('"')).map(cells);
    let (names, values) = (lines.next(), lines.next());
    let (Some(names), Some(values)) = (names, values) else {
        bail!("redis-benchmark printed no table: {}", text.trim());
    };
    let of = |name: &str| -> Result<f64> {
        let at = names.iter().position(|cell| cell == name);
        let value = at.and_then(|at| values.get(at)?.parse().ok());
        value.with_context(|| format!("redis-benchmark printed no {name}; it is older than 6.2"))
    };
    Ok((of("avg_latency_ms")? * 1e3, of("rps")?))
}

async fn output(command: &mut Command, length: Duration) -> Result<String> {
    let output = tokio::time::timeout(length + PATIENCE, command.output())
        .await
        .context("the load did not end")?
        .context("starting the load")?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        let said = String::from_utf8_lossy(&output.stdout);
        let why = if why.trim().is_empty() { said } else { why };
        bail!("{} ({})", why.trim(), output.status);
    }
    String::from_utf8(output.stdout).context("reading the load's result")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_redis_is_read_by_its_names() {
        let text = "\"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\"\n\
                    \"SET\",\"50000.00\",\"0.025\",\"0.008\"\n";
        let (latency_us, rate) = redis_csv(text).expect("a table");
        assert_eq!((latency_us, rate), (25.0, 50_000.0));
        let older = redis_csv("\"SET\",\"50000.00\"\n");
        assert!(older.is_err(), "{older:?}");
    }
}
