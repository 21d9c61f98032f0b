//! The table of images.

use comfy_table::Cell;
use conman_proto::Image;
use jiff::Timestamp;

use crate::failure::Failure;
use crate::human::{ago, bytes, printable};
use crate::output::Output;

/// Digits of an id that are shown.
const SHORT_DIGITS: usize = 12;

pub(super) fn table(output: &Output, images: &[Image]) -> Result<(), Failure> {
    if images.is_empty() {
        output
            .note("no images; `conman image import FILE NAME` and `conman image pull` bring some");
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
