//! Charts of results.

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// Size of a chart in pixels.
const SIZE: (u32, u32) = (900, 480);

/// A chart of a result.
#[derive(Debug, Clone)]
pub(crate) struct Chart {
    pub(crate) title: String,
    /// Of the values.
    pub(crate) unit: &'static str,
    pub(crate) plot: Plot,
}

#[derive(Debug, Clone)]
pub(crate) enum Plot {
    /// Horizontal bars with their values, on a logarithmic axis if the values span more than two
    /// decades.
    Bars(Vec<(String, f64)>),
    /// Values over a count, on a logarithmic axis.
    Curves {
        over: &'static str,
        curves: Vec<(String, Vec<(f64, f64)>)>,
    },
}

impl Chart {
    /// The chart as an SVG document.
    ///
    /// # Errors
    /// When the drawing library fails, for example because there is nothing to draw.
    pub(crate) fn to_svg(&self) -> Result<String> {
        let mut svg = String::new();
        match &self.plot {
            Plot::Bars(bars) => self.draw_bars(bars, &mut svg),
            Plot::Curves { over, curves } => self.draw_curves(over, curves, &mut svg),
        }
        .map_err(|error| anyhow!("drawing the chart: {error}"))?;
        Ok(svg)
    }

    fn draw_bars(&self, bars: &[(String, f64)], svg: &mut String) -> Drawn {
        let greatest = bars.iter().map(|bar| bar.1).fold(0.0, f64::max);
        let least = bars.iter().map(|bar| bar.1).fold(f64::INFINITY, f64::min);
        if bars.is_empty() || greatest <= 0.0 || !greatest.is_finite() {
            return Err("there are no values".into());
        }
        let logarithmic = least > 0.0 && greatest / least > 100.0;
        // Positions on the axis: plain values, or decades above a tenth of the least.
        let origin = least / 10.0;
        let position = |value: f64| {
            if logarithmic {
                (value / origin).log10()
            } else {
                value.max(0.0)
            }
        };
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|error| error.to_string())?;
        let rows = i32::try_from(bars.len()).map_err(|error| error.to_string())?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 20))
            .margin(16)
            .x_label_area_size(36)
            .y_label_area_size(8)
            .build_cartesian_2d(0.0..position(greatest) * 1.25, 0..rows)
            .map_err(|error| error.to_string())?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_desc(if logarithmic {
                format!("{}, logarithmic", self.unit)
            } else {
                self.unit.to_owned()
            })
            .x_label_formatter(&|at| {
                let value = if logarithmic {
                    origin * 10_f64.powf(*at)
                } else {
                    *at
                };
                shown(value)
            })
            .draw()
            .map_err(|error| error.to_string())?;
        for (row, (name, value)) in (0_i32..).zip(bars.iter().rev()) {
            let color = if name.starts_with("conman") {
                &BLUE
            } else {
                &RGBColor(150, 150, 150)
            };
            let bar = Rectangle::new(
                [(0.0, row), (position(*value), row + 1)],
                color.mix(0.7).filled(),
            );
            let label = Text::new(
                format!("{name}: {} {}", shown(*value), self.unit),
                (position(greatest) * 0.01, row + 1),
                ("sans-serif", 15).into_font(),
            );
            chart
                .draw_series([bar])
                .map_err(|error| error.to_string())?;
            chart
                .draw_series([label])
                .map_err(|error| error.to_string())?;
        }
        root.present().map_err(|error| error.to_string())?;
        Ok(())
    }

    fn draw_curves(
        &self,
        over: &str,
        curves: &[(String, Vec<(f64, f64)>)],
        svg: &mut String,
    ) -> Drawn {
        let points = || curves.iter().flat_map(|(_, points)| points);
        let end = points().map(|point| point.0).fold(0.0, f64::max);
        let greatest = points().map(|point| point.1).fold(0.0, f64::max);
        let least = points().map(|point| point.1).fold(f64::INFINITY, f64::min);
        if !(least > 0.0 && greatest.is_finite() && end > 0.0) {
            return Err("there are no values, or some that no logarithm has".into());
        }
        let root = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(|error| error.to_string())?;
        let mut chart = ChartBuilder::on(&root)
            .caption(&self.title, ("sans-serif", 20))
            .margin(16)
            .x_label_area_size(36)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..end * 1.02, (least / 1.5..greatest * 1.5).log_scale())
            .map_err(|error| error.to_string())?;
        chart
            .configure_mesh()
            .x_desc(over)
            .y_desc(format!("{}, logarithmic", self.unit))
            .y_label_formatter(&|value| shown(*value))
            .draw()
            .map_err(|error| error.to_string())?;
        for (number, (name, points)) in curves.iter().enumerate() {
            let color = Palette99::pick(number).to_rgba();
            let line = LineSeries::new(points.iter().copied(), color.stroke_width(2));
            chart
                .draw_series(line.point_size(2))
                .map_err(|error| error.to_string())?
                .label(name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
        }
        chart
            .configure_series_labels()
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .position(SeriesLabelPosition::UpperLeft)
            .draw()
            .map_err(|error| error.to_string())?;
        root.present().map_err(|error| error.to_string())?;
        Ok(())
    }
}

type Drawn = Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// Three significant digits at most.
pub(crate) fn shown(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_names_every_bar_with_its_value() {
        let chart = Chart {
            title: "last process dead".to_owned(),
            unit: "ms",
            plot: Plot::Bars(vec![
                ("docker kill".to_owned(), 9_600.0),
                ("conman".to_owned(), 42.5),
            ]),
        };
        let svg = chart.to_svg().expect("two bars can be drawn");
        assert!(
            svg.contains("docker kill: 9600 ms") && svg.contains("conman: 42.5 ms"),
            "{svg}"
        );
    }

    #[test]
    fn a_chart_of_nothing_is_refused() {
        let chart = Chart {
            title: String::new(),
            unit: "ms",
            plot: Plot::Bars(Vec::new()),
        };
        assert!(chart.to_svg().is_err());
    }

    #[test]
    fn a_chart_of_curves_names_each() {
        let chart = Chart {
            title: "start".to_owned(),
            unit: "ms",
            plot: Plot::Curves {
                over: "sessions alive",
                curves: vec![
                    ("conman".to_owned(), vec![(100.0, 2.0), (200.0, 2.5)]),
                    ("docker run".to_owned(), vec![(150.0, 300.0)]),
                ],
            },
        };
        let svg = chart.to_svg().expect("three points can be drawn");
        assert!(
            svg.contains("conman") && svg.contains("docker run"),
            "{svg}"
        );
    }
}
