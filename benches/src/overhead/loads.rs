//! The programs that are measured, and how their figures are read.

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::arguments::Overhead;
use crate::needs::Need;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Load {
    /// Memory bandwidth, random access and Linpack
    Hpcc,
    /// Block I/O, sequential and random, on a bind
    Disk,
    /// The same on the root, where a session does not wait for the disk
    Root,
    /// Redis over each kind of network
    Redis,
    /// A transactional database over each kind of network
    Oltp,
}

impl Load {
    pub(crate) const ALL: [Self; 5] = [Self::Hpcc, Self::Disk, Self::Root, Self::Redis, Self::Oltp];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hpcc => "hpcc",
            Self::Disk => "fio on a bind",
            Self::Root => "fio on the root",
            Self::Redis => "Redis",
            Self::Oltp => "OLTP",
        }
    }

    pub(super) const fn needs(self) -> &'static [Need] {
        match self {
            Self::Hpcc => &[("hpcc", "hpcc")],
            Self::Disk | Self::Root => &[("fio", "fio")],
            Self::Redis => &[
                ("redis-server", "redis-server"),
                ("redis-benchmark", "redis-tools"),
            ],
            Self::Oltp => &[
                ("mariadbd", "mariadb-server"),
                ("mariadb-install-db", "mariadb-server"),
                ("sysbench", "sysbench"),
            ],
        }
    }

    /// Whether a server answers clients over a network.
    pub(super) const fn is_server(self) -> bool {
        matches!(self, Self::Redis | Self::Oltp)
    }
}

/// Metric and value. A greater value is better in all of them.
pub(super) type Figures = Vec<(String, f64)>;

/// The directory of a load's files, inside every place.
pub(super) const WORK: &str = "/work";

/// hpcc's configuration: a small problem, since only ratios are compared. Blocks, and a grid of one process.
pub(super) fn hpcc_input(size: usize) -> String {
    format!(
        "HPLinpack benchmark input file\nconman\nHPL.out\n8\n1\n{size}\n1\n80\n0\n1\n1\n1\n16.0\n1\n2\n1\n4\n1\n2\n1\n\
         1\n1\n1\n1\n0\n1\n1\n64\n0\n0\n1\n8\n0\n0\n0\n0\n0\n1\n"
    )
}

/// Runs in the directory with that configuration, as a single process without a launcher.
pub(super) fn hpcc_script(folder: &str) -> String {
    format!(
        "cd {folder} && rm -f hpccoutf.txt && OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
         OMPI_MCA_ess_singleton_isolated=1 OMPI_MCA_btl=self HOME=/tmp hpcc >/dev/null && cat hpccoutf.txt"
    )
}

pub(super) fn hpcc_figures(text: &str) -> Result<Figures> {
    let wanted = [
        ("SingleSTREAM_Copy", "STREAM copy, GB/s", 1.0),
        ("SingleSTREAM_Triad", "STREAM triad, GB/s", 1.0),
        (
            "SingleRandomAccess_GUPs",
            "RandomAccess, million updates/s",
            1_000.0,
        ),
        ("HPL_Tflops", "HPL, Gflop/s", 1_000.0),
    ];
    let figure = |(key, metric, factor): (&str, &str, f64)| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let value: Option<f64> = line.and_then(|value| value.trim().parse().ok());
        let value = value.with_context(|| format!("hpcc shows no {key}"))?;
        Ok((metric.to_owned(), value * factor))
    };
    wanted.into_iter().map(figure).collect()
}

/// Sequential and random reads and writes, past the page cache.
pub(super) fn fio_script(folder: &str, options: &Overhead) -> String {
    let size = if options.seconds < 1.0 { "8M" } else { "256M" };
    let common = format!(
        "fio --directory={folder} --filename=fio.data --size={size} --direct=1 --ioengine=psync --time_based \
         --runtime={:.0}ms --output-format=json",
        options.seconds * 1_000.0
    );
    let jobs = FIO.map(|(name, mode, block, _)| {
        format!("--name={name} --rw={mode} --bs={block} --stonewall")
    });
    format!("{common} {} && rm -f {folder}/fio.data", jobs.join(" "))
}

/// Name, mode, size of a block, metric.
const FIO: [(&str, &str, &str, &str); 4] = [
    ("sequential-write", "write", "1M", "write, MiB/s"),
    ("sequential-read", "read", "1M", "read, MiB/s"),
    ("random-write", "randwrite", "4k", "random writes/s"),
    ("random-read", "randread", "4k", "random reads/s"),
];

pub(super) fn fio_figures(text: &str, place: &str) -> Result<Figures> {
    // Warnings may come first.
    let json = text.get(text.find('{').unwrap_or(0)..).unwrap_or_default();
    let found: serde_json::Value = serde_json::from_str(json).context("reading fio's report")?;
    let jobs = found["jobs"].as_array().context("fio ran no job")?;
    let mut figures = Figures::new();
    for (job, (_, mode, _, metric)) in jobs.iter().zip(FIO) {
        let side = &job[if mode.ends_with("read") {
            "read"
        } else {
            "write"
        }];
        let value = match mode.starts_with("rand") {
            true => side["iops"].as_f64(),
            false => side["bw"].as_f64().map(|kib| kib / 1_024.0),
        };
        let value = value.with_context(|| format!("fio shows no {metric}"))?;
        figures.push((format!("{metric}, {place}"), value));
    }
    Ok(figures)
}

/// Small requests of fifty clients.
pub(super) fn redis_arguments(host: &str, port: u16) -> Vec<String> {
    let port = port.to_string();
    let words = [
        "-h", host, "-p", &port, "-t", "set,get", "-c", "50", "-n", "50000", "--csv",
    ];
    words.map(str::to_owned).to_vec()
}

pub(super) fn redis_figures(text: &str) -> Result<Figures> {
    let figure = |name: &str| {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("\"{name}\"")));
        let value = line.and_then(|line| line.split(',').nth(1)?.trim_matches('"').parse().ok());
        let value: f64 = value.with_context(|| format!("redis-benchmark shows no {name}"))?;
        Ok((format!("Redis {name}/s"), value))
    };
    ["SET", "GET"].into_iter().map(figure).collect()
}

pub(super) fn sysbench_rate(text: &str) -> Result<f64> {
    let line = text
        .lines()
        .find_map(|line| line.trim().strip_prefix("transactions:"));
    let rate = line.and_then(|line| line.split('(').nth(1)?.split(' ').next()?.parse().ok());
    rate.context("sysbench shows no transactions")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_of_each_program_are_read() {
        let hpcc = "HPL_Tflops=0.0135\nSingleSTREAM_Copy=9.5\nSingleSTREAM_Triad=8.25\n\
                    SingleRandomAccess_GUPs=0.0412\n";
        let found = hpcc_figures(hpcc).expect("all are there");
        assert_eq!(found[1], ("STREAM triad, GB/s".to_owned(), 8.25));
        assert!((found[3].1 - 13.5).abs() < 1e-9, "{found:?}");
        assert!(hpcc_figures("HPL_Tflops=1\n").is_err());

        let redis =
            "\"test\",\"rps\"\n\"SET\",\"98765.43\",\"0.4\"\n\"GET\",\"99999.00\",\"0.4\"\n";
        assert_eq!(redis_figures(redis).expect("both")[0].1, 98_765.43);

        let oltp = "    transactions:                        1234   (205.61 per sec.)\n";
        assert_eq!(sysbench_rate(oltp).expect("a rate"), 205.61);

        let job = |side: &str| format!("{{\"{side}\":{{\"bw\":2048,\"iops\":500.5}}}}");
        let jobs = ["write", "read", "write", "read"].map(job).join(",");
        let found = fio_figures(&format!("note\n{{\"jobs\":[{jobs}]}}"), "bind").expect("four");
        assert_eq!(found[0], ("write, MiB/s, bind".to_owned(), 2.0));
        assert_eq!(found[3], ("random reads/s, bind".to_owned(), 500.5));
    }
}
