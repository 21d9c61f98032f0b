//! Images as a person reads them.

use std::fmt::Write as _;

use comfy_table::Cell;
use conman_proto::Image;
use jiff::Timestamp;

use crate::failure::Failure;
use crate::human::{ago, bytes, clock, count, printable};
use crate::output::Output;

/// Digits of an id that are shown.
const SHORT_DIGITS: usize = 12;

pub(super) fn table(output: &Output, images: &[Image]) -> Result<(), Failure> {
    if images.is_empty() {
        output
            .note("no images; `conman image import FILE NAME` and `conman image pull` bring some");
        return Ok(());
    }
    let now = Timestamp::now();
    let mut rows: Vec<(String, Vec<Cell>)> = images
        .iter()
        .flat_map(|image| {
            let names: Vec<&str> = match &image.names[..] {
                [] => vec!["-"],
                names => names.iter().map(String::as_str).collect(),
            };
            names
                .into_iter()
                .map(|name| (name.to_owned(), row(name, image, now)))
                .collect::<Vec<_>>()
        })
        .collect();
    rows.sort_by(|one, other| one.0.cmp(&other.0));
    let header = ["NAME", "ID", "SIZE", "LAYERS", "FOR", "IMPORTED", "IN USE"];
    output.table(&header, rows.into_iter().map(|(_, row)| row).collect())
}

fn row(name: &str, image: &Image, now: Timestamp) -> Vec<Cell> {
    vec![
        Cell::new(printable(name)),
        Cell::new(printable(&short(&image.id))),
        Cell::new(bytes(image.size_bytes)),
        Cell::new(image.layers.len()),
        Cell::new(printable(&image.architecture)),
        Cell::new(ago(now, image.imported_at)),
        Cell::new(if image.in_use { "yes" } else { "-" }),
    ]
}

fn short(id: &str) -> String {
    let digits = id.strip_prefix("sha256:").unwrap_or(id);
    digits.chars().take(SHORT_DIGITS).collect()
}

pub(super) fn describe(image: &Image) -> String {
    let mut text = String::new();
    let mut add = |key: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key:<14}{}", printable(value));
    };
    let words = |words: &[String]| {
        let quoted: Vec<String> = words.iter().map(|word| format!("{word:?}")).collect();
        quoted.join(" ")
    };
    add("id", &image.id);
    for name in &image.names {
        add("name", name);
    }
    add("for", &image.architecture);
    add("size", &bytes(image.size_bytes));
    let imported = image.imported_at;
    let since = ago(Timestamp::now(), imported);
    add("imported", &format!("{} ({since})", clock(imported)));
    add("in use", if image.in_use { "yes" } else { "no" });
    let config = &image.config;
    for (key, list) in [("entrypoint", &config.entrypoint), ("command", &config.cmd)] {
        if !list.is_empty() {
            add(key, &words(list));
        }
    }
    for (key, value) in [
        ("user", &config.user),
        ("directory", &config.workdir),
        ("stop signal", &config.stop_signal),
    ] {
        if let Some(value) = value {
            add(key, value);
        }
    }
    for variable in &config.env {
        add("environment", variable);
    }
    for port in &config.exposed_ports {
        add("port", port);
    }
    for (name, value) in &config.labels {
        add("label", &format!("{name}={value}"));
    }
    for layer in &image.layers {
        let size = layer.size_bytes.map_or_else(|| "missing".to_owned(), bytes);
        let devices = match layer.skipped_devices {
            0 => String::new(),
            skipped => format!(", {} skipped", count(skipped, "device node")),
        };
        add("layer", &format!("{} ({size}{devices})", layer.id));
    }
    text
}
