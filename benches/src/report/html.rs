//! The page around a report.

use std::fmt::Write as _;

use super::table::Table;
use super::{Part, Report, Setting};

const STYLE: &str = include_str!("style.css");

/// A report as one HTML document without references to others.
pub(super) fn page(report: &Report, setting: &Setting) -> String {
    let title = escaped(&report.title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n"
    );
    if let Some(missed) = &report.missed {
        let _ = writeln!(
            page,
            "<p class=\"missed\"><b>Not within the bounds:</b> {}</p>",
            escaped(missed)
        );
    }
    for part in &report.parts {
        match part {
            Part::Text(lines) => {
                for line in lines.lines().filter(|line| !line.trim().is_empty()) {
                    let _ = writeln!(page, "<p>{}</p>", escaped(line.trim()));
                }
            }
            Part::Table(rows) => page.push_str(&table(rows)),
            Part::Chart(chart) => page.push_str(&chart.to_html()),
        }
    }
    page.push_str("<h2>Setting</h2>\n<dl>\n");
    for (name, value) in setting.lines() {
        let _ = writeln!(page, "<dt>{name}</dt><dd>{}</dd>", escaped(&value));
    }
    page.push_str("</dl>\n</main>\n</body>\n</html>\n");
    page
}

fn table(table: &Table) -> String {
    let row = |cells: &[String], name: &str| {
        let cells: String = cells
            .iter()
            .enumerate()
            .map(|(column, cell)| {
                let class = if table.is_numeric(column) {
                    " class=\"number\""
                } else {
                    ""
                };
                format!("<{name}{class}>{}</{name}>", escaped(cell))
            })
            .collect();
        format!("<tr>{cells}</tr>\n")
    };
    let body: String = table.rows().iter().map(|cells| row(cells, "td")).collect();
    format!(
        "<div class=\"wide\"><table>\n<thead>{}</thead>\n<tbody>{body}</tbody>\n</table></div>\n",
        row(table.header(), "th")
    )
}

/// Text as HTML's and SVG's content or attribute.
pub(super) fn escaped(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => html.push_str("&amp;"),
            '<' => html.push_str("&lt;"),
            '>' => html.push_str("&gt;"),
            '"' => html.push_str("&quot;"),
            _ => html.push(letter),
        }
    }
    html
}
