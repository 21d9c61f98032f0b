//! The figures of a storm as a drawing.

use std::fmt::Write as _;

use super::report::{StormReport, quantile};

const WIDTH: usize = 900;
const ROW: usize = 34;
const TOP: usize = 70;
/// Where bars begin, and the width of a decade.
const LEFT: f64 = 230.0;
const DECADE: f64 = 130.0;
/// The least value of the logarithmic axis, and its decades.
const ORIGIN_MS: f64 = 1.0;
const DECADES: u32 = 5;

impl StormReport {
    /// The interruptions of clients by kind of event, as an SVG document: a bar to the 99th percentile, and
    /// a mark at the greatest.
    #[must_use]
    pub fn to_svg(&self) -> String {
        let height = TOP + ROW * self.kinds.len() + 30;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
             font-family=\"sans-serif\" font-size=\"14\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"16\" y=\"28\" font-size=\"18\">Interruption of a client behind HAProxy, {} \
             sessions</text>\n\
             <text x=\"16\" y=\"48\">bar: 99 of 100; line: the longest; logarithmic</text>\n",
            self.sessions
        );
        for decade in 0..=DECADES {
            let value_ms = ORIGIN_MS * 10_f64.powi(decade.cast_signed());
            let (at, label) = (x(value_ms), shown(value_ms));
            let end = height - 24;
            let _ = writeln!(
                svg,
                "<line x1=\"{at}\" y1=\"{TOP}\" x2=\"{at}\" y2=\"{end}\" stroke=\"#ddd\"/>\
                 <text x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
                height - 8
            );
        }
        for (row, kind) in self.kinds.iter().enumerate() {
            let top = TOP + row * ROW;
            let (middle, mark) = (top + 20, top + 28);
            let _ = write!(
                svg,
                "<text x=\"{}\" y=\"{middle}\" text-anchor=\"end\">{} ({} ×)</text>",
                LEFT - 10.0,
                kind.name,
                kind.steps
            );
            let [p99, max] = [99, 100].map(|percent| quantile(&kind.interruptions_ms, percent));
            if let (Some(p99), Some(max)) = (p99, max) {
                let (width, end) = (x(p99) - LEFT, x(max));
                let _ = write!(
                    svg,
                    "<rect x=\"{LEFT}\" y=\"{}\" width=\"{width}\" height=\"20\" fill=\"#4a7fc1\"/>\
                     <line x1=\"{end}\" y1=\"{top}\" x2=\"{end}\" y2=\"{mark}\" stroke=\"#222\" \
                     stroke-width=\"2\"/>\
                     <text x=\"{}\" y=\"{middle}\">{}</text>",
                    top + 5,
                    end + 6.0,
                    shown(p99)
                );
            } else {
                let _ = write!(svg, "<text x=\"{LEFT}\" y=\"{middle}\">none</text>");
            }
            svg.push('\n');
        }
        svg.push_str("</svg>\n");
        svg
    }
}

fn x(value_ms: f64) -> f64 {
    let at = LEFT + DECADE * (value_ms.max(ORIGIN_MS) / ORIGIN_MS).log10();
    at.round()
}

fn shown(value_ms: f64) -> String {
    if value_ms < 1_000.0 {
        format!("{value_ms:.0} ms")
    } else {
        format!("{:.1} s", value_ms / 1e3)
    }
}
