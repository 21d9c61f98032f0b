//! Charts as inline SVG. Text has a fixed size and positions are percentages, so that a chart is readable at any
//! width; colours come from the page's style.

use std::fmt::Write as _;

use super::axis::{Axis, shown, tick};
use super::html::escaped;
use crate::statistics::quantiles;

/// Heights in pixels.
const ROW: usize = 44;
const PLOT: usize = 240;
const UNDER: usize = 22;
/// Curves are drawn in a square of this size and stretched.
const SQUARE: f64 = 1_000.0;
/// The style has that many colours.
const COLOURS: usize = 6;
/// Values whose ratio is greater are drawn on a logarithmic axis.
const LINEAR_RATIO: f64 = 100.0;

/// A chart of a result.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    title: String,
    /// Of the values.
    unit: &'static str,
    plot: Plot,
}

#[derive(Debug, Clone)]
enum Plot {
    Bars(Vec<Bar>),
    Curves(Curves),
}

/// A horizontal bar with its value.
#[derive(Debug, Clone)]
pub(crate) struct Bar {
    name: String,
    value: f64,
    /// Least and greatest value of several rounds.
    spread: Option<(f64, f64)>,
}

/// Values over time or a count.
#[derive(Debug, Clone)]
pub(crate) struct Curves {
    pub(crate) over: &'static str,
    pub(crate) logarithmic: bool,
    pub(crate) curves: Vec<Curve>,
    /// Events, as vertical lines.
    pub(crate) marks: Vec<f64>,
}

#[derive(Debug, Clone)]
pub(crate) struct Curve {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

impl Bar {
    /// The median of a sample, which is not empty, with its spread.
    pub(crate) fn of(name: impl Into<String>, sample: &[f64]) -> Self {
        let found = quantiles(sample);
        Self {
            name: name.into(),
            value: found.map_or(0.0, |found| found.p50),
            spread: found
                .filter(|found| found.count > 1)
                .map(|found| (found.min, found.max)),
        }
    }

    /// One value.
    pub(crate) fn one(name: impl Into<String>, value: f64) -> Self {
        Self::of(name, &[value])
    }

    /// A value with the interval that it lies in.
    pub(crate) fn within(name: impl Into<String>, value: f64, spread: (f64, f64)) -> Self {
        Self {
            name: name.into(),
            value,
            spread: Some(spread),
        }
    }
}

impl Chart {
    pub(crate) fn bars(title: impl Into<String>, unit: &'static str, bars: Vec<Bar>) -> Self {
        Self {
            title: title.into(),
            unit,
            plot: Plot::Bars(bars),
        }
    }

    pub(crate) fn curves(title: impl Into<String>, unit: &'static str, curves: Curves) -> Self {
        Self {
            title: title.into(),
            unit,
            plot: Plot::Curves(curves),
        }
    }

    pub(super) fn to_html(&self) -> String {
        let title = escaped(&self.title);
        let (note, body) = match &self.plot {
            Plot::Bars(bars) => draw_bars(bars, self.unit, &title),
            Plot::Curves(curves) => draw_curves(curves, &title),
        };
        let unit = escaped(self.unit);
        let comma = if note.is_empty() { "" } else { ", " };
        format!(
            "<figure><figcaption>{title} <span class=\"unit\">{unit}{comma}{note}</span></figcaption>\n\
             {body}</figure>\n"
        )
    }
}

/// Returns what is to be said of the axis, and the drawing.
fn draw_bars(bars: &[Bar], unit: &str, title: &str) -> (String, String) {
    let ends = |bar: &Bar| {
        bar.spread
            .map_or([bar.value; 2], |(least, most)| [least, most])
    };
    let all = || {
        bars.iter()
            .flat_map(ends)
            .chain(bars.iter().map(|bar| bar.value))
    };
    let greatest = all().fold(0.0, f64::max);
    let least = all().fold(f64::INFINITY, f64::min);
    let axis = if least > 0.0 && greatest / least > LINEAR_RATIO {
        Axis::logarithmic(least, greatest)
    } else {
        Axis::between(0.0, greatest.max(f64::MIN_POSITIVE))
    };
    let mut svg = format!(
        "<svg role=\"img\" aria-label=\"{title}\" width=\"100%\" height=\"{}\">\n",
        bars.len() * ROW
    );
    for (row, bar) in bars.iter().enumerate() {
        let top = row * ROW;
        let ours = if bar.name.contains("conman") {
            "ours"
        } else {
            "other"
        };
        let spread = bar.spread.map_or_else(String::new, |(least, most)| {
            format!(" ({} to {})", shown(least), shown(most))
        });
        let _ = write!(
            svg,
            "<text x=\"0\" y=\"{}\">{}</text>\
             <text x=\"100%\" y=\"{0}\" text-anchor=\"end\" class=\"value\">{} {unit}{spread}</text>\
             <rect class=\"{ours}\" x=\"0\" y=\"{}\" width=\"{}%\" height=\"12\" rx=\"2\"/>",
            top + 14,
            escaped(&bar.name),
            shown(bar.value),
            top + 21,
            percent(axis.at(bar.value).max(0.002)),
        );
        if let Some((least, most)) = bar.spread {
            let _ = write!(
                svg,
                "<line class=\"spread\" x1=\"{}%\" x2=\"{}%\" y1=\"{y}\" y2=\"{y}\"/>",
                percent(axis.at(least)),
                percent(axis.at(most)),
                y = top + 27,
            );
        }
        svg.push('\n');
    }
    svg.push_str("</svg>\n");
    let note = if axis.is_logarithmic() {
        "logarithmic"
    } else {
        ""
    };
    (note.to_owned(), svg)
}

fn draw_curves(plot: &Curves, title: &str) -> (String, String) {
    let points = || plot.curves.iter().flat_map(|curve| &curve.points);
    let begin = points().map(|point| point.0).fold(f64::INFINITY, f64::min);
    let end = points().map(|point| point.0).fold(0.0, f64::max);
    let greatest = points().map(|point| point.1).fold(0.0, f64::max);
    let least = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
    if points().next().is_none() {
        return (String::new(), "<p>There are no values.</p>\n".to_owned());
    }
    let y = match plot.logarithmic {
        true => Axis::logarithmic(least, greatest),
        false => Axis::linear(greatest),
    };
    let x = Axis::between(begin.min(0.0), end.max(begin + f64::MIN_POSITIVE));
    let height = PLOT + UNDER;
    let mut svg =
        format!("<svg role=\"img\" aria-label=\"{title}\" width=\"100%\" height=\"{height}\">\n");
    grid(&mut svg, &x, &y, plot.over);
    for mark in &plot.marks {
        let at = percent(x.at(*mark));
        let _ = write!(
            svg,
            "<line class=\"mark\" x1=\"{at}%\" x2=\"{at}%\" y1=\"0\" y2=\"{PLOT}\"/>"
        );
    }
    let _ = write!(
        svg,
        "\n<svg viewBox=\"0 0 {SQUARE} {SQUARE}\" preserveAspectRatio=\"none\" width=\"100%\" height=\"{PLOT}\">\n"
    );
    for (number, curve) in plot.curves.iter().enumerate() {
        let _ = write!(svg, "<polyline class=\"c{}\" points=\"", number % COLOURS);
        for (over, value) in &curve.points {
            let (left, top) = (x.at(*over) * SQUARE, (1.0 - y.at(*value)) * SQUARE);
            let _ = write!(svg, "{left:.1},{top:.1} ");
        }
        svg.push_str("\"/>\n");
    }
    svg.push_str("</svg>\n");
    for (number, curve) in plot.curves.iter().enumerate() {
        // A line of one point is invisible.
        if let [(over, value)] = curve.points[..] {
            let _ = write!(
                svg,
                "<circle class=\"f{}\" cx=\"{}%\" cy=\"{:.0}\" r=\"4\"/>",
                number % COLOURS,
                percent(x.at(over)),
                (1.0 - y.at(value)) * PLOT as f64,
            );
        }
    }
    svg.push_str("</svg>\n<ul class=\"legend\">");
    for (number, curve) in plot.curves.iter().enumerate() {
        let _ = write!(
            svg,
            "<li><span class=\"b{}\"></span>{}</li>",
            number % COLOURS,
            escaped(&curve.name)
        );
    }
    svg.push_str("</ul>\n");
    let note = if y.is_logarithmic() {
        "logarithmic"
    } else {
        ""
    };
    (note.to_owned(), svg)
}

fn grid(svg: &mut String, x: &Axis, y: &Axis, over: &str) {
    let plot = PLOT as f64;
    for value in y.ticks() {
        let at = (1.0 - y.at(value)) * plot;
        // The topmost label lies below its line, since above is outside.
        let label = if at < 14.0 { at + 13.0 } else { at - 4.0 };
        let _ = write!(
            svg,
            "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{at:.0}\" y2=\"{at:.0}\"/>\
             <text class=\"tick\" x=\"0\" y=\"{label:.0}\">{}</text>",
            tick(value)
        );
    }
    let ticks = x.ticks();
    for (number, value) in ticks.iter().enumerate() {
        let at = x.at(*value);
        let anchor = match at {
            at if at < 0.03 => "start",
            at if at > 0.97 => "end",
            _ => "middle",
        };
        let unit = if number + 1 == ticks.len() {
            format!(" {over}")
        } else {
            String::new()
        };
        let anchor = if unit.is_empty() { anchor } else { "end" };
        let _ = write!(
            svg,
            "<text class=\"tick\" x=\"{}%\" y=\"{}\" text-anchor=\"{anchor}\">{}{}</text>",
            percent(if unit.is_empty() { at } else { 1.0 }),
            PLOT + UNDER - 5,
            tick(*value),
            escaped(&unit),
        );
    }
}

fn percent(fraction: f64) -> String {
    format!("{:.2}", fraction * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_named_with_its_value_and_spread() {
        let bars = vec![
            Bar::one("docker kill", 9_600.0),
            Bar::of("conman", &[40.0, 42.5, 60.0]),
        ];
        let html = Chart::bars("dead", "ms", bars).to_html();
        assert!(
            html.contains("9600 ms") && html.contains("42.5 ms (40.0 to 60.0)"),
            "{html}"
        );
        assert!(html.contains("logarithmic"), "{html}");
    }

    #[test]
    fn curves_are_named_and_a_single_point_is_drawn_as_one() {
        let curve = |name: &str, points: &[(f64, f64)]| Curve {
            name: name.to_owned(),
            points: points.to_vec(),
        };
        let html = Chart::curves(
            "start",
            "ms",
            Curves {
                over: "sessions",
                logarithmic: true,
                curves: vec![
                    curve("conman", &[(100.0, 2.0), (200.0, 2.5)]),
                    curve("docker run", &[(150.0, 300.0)]),
                ],
                marks: vec![120.0],
            },
        )
        .to_html();
        assert!(
            html.contains("docker run") && html.contains("<circle"),
            "{html}"
        );
        assert_eq!(html.matches("class=\"mark\"").count(), 1);
    }

    #[test]
    fn a_chart_without_values_says_so() {
        let none = Curves {
            over: "s",
            logarithmic: false,
            curves: Vec::new(),
            marks: Vec::new(),
        };
        assert!(
            Chart::curves("t", "ms", none)
                .to_html()
                .contains("no values")
        );
    }
}
