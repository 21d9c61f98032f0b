//! Reports: the result of a benchmark as text, as JSON and as one HTML file.
//!
//! All of them are written here. A benchmark returns a [`Report`] of data; it knows nothing of their forms. The
//! HTML needs no other file, adapts to light and dark and to the width of a telephone, and shows the [`Setting`]
//! of the measurement: the command, the machine and the versions.

mod axis;
mod chart;
mod html;
mod setting;
mod table;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub(crate) use axis::shown;
pub(crate) use chart::{Bar, Chart, Curve, Curves};
pub(crate) use setting::Setting;
pub(crate) use table::Table;

use crate::statistics::{median, quantiles};

/// A benchmark's result.
#[derive(Debug, Clone)]
pub(crate) struct Report {
    /// The heading.
    pub(crate) title: String,
    /// In the order in which they are shown.
    pub(crate) parts: Vec<Part>,
    /// For programs.
    pub(crate) json: serde_json::Value,
    /// The bound that is not met, as text.
    pub(crate) missed: Option<String>,
}

/// A part of a report.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    /// A paragraph for each line.
    Text(String),
    Table(Table),
    /// Only HTML shows it.
    Chart(Chart),
}

impl From<Table> for Part {
    fn from(table: Table) -> Self {
        Self::Table(table)
    }
}

impl From<Chart> for Part {
    fn from(chart: Chart) -> Self {
        Self::Chart(chart)
    }
}

impl From<String> for Part {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Part {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl Report {
    /// Adds why the measurement ended early, if it did.
    pub(crate) fn ended_early(mut self, why: Option<String>) -> Self {
        self.json["early_end"] = why.clone().into();
        self.parts.extend(why.map(Part::from));
        self
    }

    /// As in a file's name.
    pub(crate) fn name(&self) -> String {
        let name = self.json["benchmark"].as_str().unwrap_or("report");
        name.replace(' ', "-")
    }

    /// For a terminal.
    pub(crate) fn to_text(&self) -> String {
        let mut text = format!("{}\n", self.title);
        for part in &self.parts {
            // Writing to a string does not fail.
            let _ = match part {
                Part::Text(lines) => writeln!(text, "{}", lines.trim_end()),
                Part::Table(table) => writeln!(text, "{table}"),
                Part::Chart(_) => Ok(()),
            };
        }
        text
    }

    /// The data, with the setting as `setting`.
    pub(crate) fn to_json(&self, setting: &Setting) -> serde_json::Value {
        let mut json = self.json.clone();
        json["setting"] = setting.to_json();
        json["missed"] = self.missed.clone().into();
        json
    }

    /// Writes the HTML to `path`, and the JSON beside it. Returns the path of the JSON.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(crate) fn save(&self, path: &Path, setting: &Setting) -> Result<PathBuf> {
        let json = path.with_extension("json");
        let data =
            serde_json::to_string_pretty(&self.to_json(setting)).context("a report is plain")?;
        for (path, text) in [(path, html::page(self, setting)), (&json, data + "\n")] {
            fs::write(path, text)
                .with_context(|| format!("cannot write the report to {}", path.display()))?;
        }
        Ok(json)
    }
}

/// The median of a sample with its unit, and the least and the greatest value where there are several.
pub(crate) fn figure(sample: &[f64], unit: &str) -> String {
    let Some(found) = quantiles(sample) else {
        return "–".to_owned();
    };
    let middle = median(sample).unwrap_or(found.p50);
    if sample.len() == 1 {
        return format!("{} {unit}", shown(middle));
    }
    let (least, greatest) = (shown(found.min), shown(found.max));
    format!("{} {unit} ({least} to {greatest})", shown(middle))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report() -> Report {
        let mut table = Table::new(["way", "dead"]);
        table.row(["docker <kill>", "9600 ms"]);
        Report {
            title: "Killing".to_owned(),
            parts: vec![
                "one round & no more".into(),
                table.into(),
                Chart::bars(
                    "last dead",
                    "ms",
                    vec![Bar::of("conman", &[41.0, 42.5, 50.0])],
                )
                .into(),
            ],
            json: json!({ "benchmark": "kill" }),
            missed: Some("too slow".to_owned()),
        }
    }

    #[test]
    fn a_page_is_one_file_that_escapes_what_it_shows_and_names_its_setting() {
        let page = html::page(&report(), &Setting::begin());
        for wanted in [
            "docker &lt;kill&gt;",
            "one round &amp; no more",
            "prefers-color-scheme: dark",
            "name=\"viewport\"",
            "42.5 ms",
            "41.0 to 50.0",
            "too slow",
            "Kernel",
        ] {
            assert!(page.contains(wanted), "no {wanted} in {page}");
        }
        for foreign in ["src=", "href=", "<script", "@import"] {
            assert!(!page.contains(foreign), "{foreign} in {page}");
        }
    }

    #[test]
    fn a_saved_report_has_its_data_and_setting_beside_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let json = report()
            .save(&folder.path().join("kill.html"), &Setting::begin())
            .expect("it is written");
        let text = fs::read_to_string(json).expect("it is there");
        let data: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(data["benchmark"], "kill");
        assert_eq!(data["missed"], "too slow");
        let kernel = data["setting"]["kernel"].as_str();
        assert!(kernel.is_some_and(|kernel| !kernel.is_empty()), "{text}");
    }

    #[test]
    fn a_figure_of_several_rounds_shows_their_spread() {
        assert_eq!(figure(&[3.0, 1.0, 2.0], "ms"), "2.00 ms (1.00 to 3.00)");
        assert_eq!(figure(&[3.0], "ms"), "3.00 ms");
        assert_eq!(figure(&[], "ms"), "–");
    }
}
