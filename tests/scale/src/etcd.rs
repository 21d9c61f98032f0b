//! What one etcd carries: the distribution's, on this machine, filled with records as large as conman's.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use conman_etcd::KeyWalk;
use futures_util::future::try_join_all;
use serde::Serialize;
use tokio::time::{sleep, timeout};

use crate::EtcdCosts;
use crate::wire::{Client, RECORDS, STATES};

/// Of a session's record, as a template with some environment makes it.
const RECORD_BYTES: usize = 1_000;
/// Of what a node announces, and of its other records.
const ANNOUNCEMENT_BYTES: usize = 1_200;
const STATE_BYTES: usize = 60;
/// Where such records are for the measurement.
const MIXED: &str = "/mixed/";
/// Puts in one transaction while records are made: etcd's default limit.
const A_TRANSACTION: usize = 128;
/// Requests under way at a time.
const PARALLEL: usize = 64;
/// Nodes' reads of many records at a time.
const READERS: usize = 8;
/// As conman's daemon reads them.
const PAGE: usize = 500;
const WATCHES: usize = 200;
const CHANGES: usize = 100;
/// The time over which a rate is measured.
const MEASURED: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);

/// etcd with a number of records.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Stored {
    pub records: usize,
    /// A node's read of all records, in pages.
    pub first_read: Duration,
    pub transactions_per_s: f64,
    pub memory_bytes: u64,
    pub file_bytes: u64,
    /// A compaction that frees one version of each of [`CHURN`] records.
    pub compaction: Duration,
}

/// Records that are written again before the compaction.
pub const CHURN: usize = 10_000;

/// The figures of etcd.
#[derive(Debug, Clone, Serialize)]
pub struct EtcdReport {
    pub version: String,
    pub costs: EtcdCosts,
    pub stored: Vec<Stored>,
}

/// A process that ends when this is dropped.
struct Etcd {
    process: Child,
    folder: tempfile::TempDir,
    client: Client,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Measures an etcd with each number of records; they grow.
///
/// # Errors
/// When etcd is not installed, or does not answer.
pub async fn measure(records: &[usize], tell: &dyn Fn(&str)) -> Result<EtcdReport> {
    let etcd = Etcd::start().await?;
    tell("etcd: transactions, reads and watches a second");
    etcd.fill(0, 1_000).await?;
    let mut costs = etcd.costs().await?;
    let (mut stored, mut filled) = (Vec::new(), 1_000);
    for records in records {
        tell(&format!("etcd: {records} records"));
        etcd.fill(filled, *records).await?;
        filled = filled.max(*records);
        let (measured, record_us) = etcd.with_records(filled).await?;
        stored.push(measured);
        costs.record_us = (record_us - costs.read_us / PAGE as f64).max(0.0);
    }
    Ok(EtcdReport {
        version: version()?,
        costs,
        stored,
    })
}

fn version() -> Result<String> {
    let output = Command::new("etcd").arg("--version").output();
    let output = output.context("etcd is missing: apt-get install etcd-server")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

impl Etcd {
    async fn start() -> Result<Self> {
        version()?;
        let folder = tempfile::tempdir().context("making a folder")?;
        let [client, peer] =
            [free_port()?, free_port()?].map(|port| format!("http://127.0.0.1:{port}"));
        let log = fs::File::create(folder.path().join("log")).context("making a log")?;
        let process = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.path().join("data"))
            .args([
                "--listen-client-urls",
                &client,
                "--advertise-client-urls",
                &client,
            ])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("default={peer}")])
            .args(["--quota-backend-bytes", "8589934592", "--logger", "zap"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("starting etcd")?;
        let client = Client::new(&client)?;
        let etcd = Self {
            process,
            folder,
            client,
        };
        let answers = async {
            while etcd.client.put(b"/up".to_vec(), Vec::new()).await.is_err() {
                sleep(POLL).await;
            }
        };
        timeout(PATIENCE, answers)
            .await
            .context("etcd does not answer")?;
        Ok(etcd)
    }

    /// Writes the records of these numbers.
    async fn fill(&self, from: usize, to: usize) -> Result<()> {
        let mut first = from;
        while first < to {
            let batches = (0..READERS).map(|batch| {
                let first = (first + batch * A_TRANSACTION).min(to);
                let last = (first + A_TRANSACTION).min(to);
                let puts = (first..last).map(|number| (record(number), value(number, 0)));
                self.client.put_all(puts.collect())
            });
            try_join_all(batches).await?;
            first += READERS * A_TRANSACTION;
        }
        Ok(())
    }

    async fn costs(&self) -> Result<EtcdCosts> {
        let write = self.rate(PARALLEL, |client, number| async move {
            // Each writer has its own keys, as nodes have.
            let key = format!("{STATES}{}", number % 10_000).into_bytes();
            client.compare_and_put(key, vec![b'x'; STATE_BYTES]).await
        });
        let (_, transaction_us) = write.await?;
        let read = self.rate(PARALLEL, |client, number| async move {
            let key = record(number % 1_000);
            client.range(key, Vec::new(), 1).await.map(drop)
        });
        let (_, read_us) = read.await?;
        let states = (0..PAGE).map(|number| {
            let length = if number % 4 == 0 {
                ANNOUNCEMENT_BYTES
            } else {
                STATE_BYTES
            };
            (format!("{MIXED}{number}").into_bytes(), vec![b'x'; length])
        });
        let states: Vec<_> = states.collect();
        for some in states.chunks(A_TRANSACTION) {
            self.client.put_all(some.to_vec()).await?;
        }
        let mixed = self.rate(READERS, |client, _| async move {
            client
                .range(MIXED.into(), behind(MIXED), PAGE as i64)
                .await
                .map(drop)
        });
        let (_, mixed_us) = mixed.await?;
        Ok(EtcdCosts {
            transaction_us,
            read_us,
            record_us: 0.0,
            state_us: ((mixed_us - read_us) / PAGE as f64).max(0.0),
            delivery_us: self.deliveries().await?,
        })
    }

    /// Calls a second, with so many under way, and the processor time of etcd for each in microseconds.
    async fn rate<F, R>(&self, parallel: usize, call: F) -> Result<(f64, f64)>
    where
        F: Fn(Client, usize) -> R,
        R: Future<Output = Result<()>>,
    {
        let (done, cpu_us) = (AtomicU64::new(0), self.cpu_us()?);
        let begun = Instant::now();
        let workers = (0..parallel).map(|worker| {
            let (done, call) = (&done, &call);
            async move {
                let mut number = worker;
                while begun.elapsed() < MEASURED {
                    call(self.client.clone(), number).await?;
                    done.fetch_add(1, Ordering::Relaxed);
                    number += parallel;
                }
                anyhow::Ok(())
            }
        });
        try_join_all(workers).await?;
        let rate = done.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64();
        let each_us = (self.cpu_us()? - cpu_us) / done.into_inner() as f64;
        Ok((rate, each_us))
    }

    /// The time that each delivery of a change to a watch takes, in microseconds.
    async fn deliveries(&self) -> Result<f64> {
        let seen = Arc::new(AtomicU64::new(0));
        let mut watches = Vec::new();
        for _ in 0..WATCHES {
            let mut changes = self.client.watch(b"/watched/".to_vec()).await?;
            let seen = Arc::clone(&seen);
            watches.push(tokio::spawn(async move {
                while let Ok(Some(change)) = changes.message().await {
                    seen.fetch_add(change.events.len() as u64, Ordering::Relaxed);
                }
            }));
        }
        let cpu_us = self.cpu_us()?;
        for number in 0..CHANGES {
            let key = format!("/watched/{}", number % 10).into_bytes();
            self.client.put(key, value(number, 2)).await?;
        }
        let all = (WATCHES * CHANGES) as u64;
        let arrived = async {
            while seen.load(Ordering::Relaxed) < all {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, arrived)
            .await
            .context("watches are late")?;
        for watch in watches {
            watch.abort();
        }
        Ok((self.cpu_us()? - cpu_us) / all as f64)
    }

    /// Also returns the processor time of each record of a read of all.
    async fn with_records(&self, records: usize) -> Result<(Stored, f64)> {
        let cpu_us = self.cpu_us()?;
        let first_read = self.read_all(records).await?;
        let record_us = (self.cpu_us()? - cpu_us) / records as f64;
        let write = self.rate(PARALLEL, |client, number| async move {
            let key = format!("{STATES}{}", number % 10_000).into_bytes();
            client.compare_and_put(key, vec![b'y'; STATE_BYTES]).await
        });
        let (transactions_per_s, _) = write.await?;
        self.fill(0, CHURN.min(records)).await?;
        let revision = self.client.put(b"/up".to_vec(), Vec::new()).await?;
        let begun = Instant::now();
        self.client.compact(revision).await?;
        let stored = Stored {
            records,
            first_read,
            transactions_per_s,
            memory_bytes: memory(self.process.id())?,
            file_bytes: fs::metadata(self.file()).map_or(0, |file| file.len()),
            compaction: begun.elapsed(),
        };
        Ok((stored, record_us))
    }

    /// The processor time that it has used.
    fn cpu_us(&self) -> Result<f64> {
        let path = format!("/proc/{}/stat", self.process.id());
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        // After the name in parentheses: utime and stime are fields 14 and 15 of the line, in hundredths of a second.
        let fields = text.rsplit(')').next().unwrap_or_default();
        let fields = fields.split_whitespace().skip(11).take(2);
        let ticks: u64 = fields.filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(ticks as f64 * 1e4)
    }

    fn file(&self) -> std::path::PathBuf {
        self.folder.path().join("data/member/snap/db")
    }

    async fn read_all(&self, records: usize) -> Result<Duration> {
        let begun = Instant::now();
        let mut walk = KeyWalk::new(RECORDS.into(), RECORDS.as_bytes(), 0);
        let mut read = 0;
        while let Some((from, end)) = walk.range() {
            let page = self.client.range(from, end, PAGE as i64).await?;
            let ends = page.kvs.first().zip(page.kvs.last());
            let ends = ends.map(|(first, last)| (first.key.as_slice(), last.key.as_slice()));
            let counted = usize::try_from(page.count).context("etcd counts")?;
            walk.advance(ends, page.kvs.len(), counted, PAGE);
            read += page.kvs.len();
        }
        if read != records {
            bail!("{read} records instead of {records}");
        }
        Ok(begun.elapsed())
    }
}

fn record(number: usize) -> Vec<u8> {
    format!("{RECORDS}s{number}").into_bytes()
}

/// A value that does not repeat itself in a way that etcd could use.
fn value(number: usize, version: usize) -> Vec<u8> {
    format!(
        "{{\"number\":{number},\"version\":{version},\"spec\":\"{number:>width$}\"}}",
        width = RECORD_BYTES - 60
    )
    .into_bytes()
}

/// The first key behind all with a prefix that ends with `/`.
fn behind(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    end.pop();
    end.push(b'0');
    end
}

fn memory(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(Path::new(&path)).with_context(|| format!("reading {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    Ok(kib.context("etcd's memory is not shown")? << 10)
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0").context("finding a port")?;
    Ok(listener.local_addr()?.port())
}
