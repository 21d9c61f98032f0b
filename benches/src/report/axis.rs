//! Positions on axes, and numbers as text.

/// Three significant digits at most.
pub(crate) fn shown(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Maps values to fractions of a length.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    logarithmic: bool,
}

/// Ticks of a linear axis, about.
const TICKS: f64 = 5.0;

impl Axis {
    /// From zero to a round number above the greatest value.
    pub(super) fn linear(greatest: f64) -> Self {
        // Nothing but zeros still needs an axis.
        let greatest = if greatest > 0.0 { greatest } else { 1.0 };
        let step = step(greatest);
        Self {
            from: 0.0,
            to: (greatest / step).ceil().max(1.0) * step,
            logarithmic: false,
        }
    }

    /// Whole decades around the values; linear if one is not positive.
    pub(super) fn logarithmic(least: f64, greatest: f64) -> Self {
        if least <= 0.0 {
            return Self::linear(greatest);
        }
        let from = least.log10().floor();
        Self {
            from: 10_f64.powf(from),
            to: 10_f64.powf(greatest.log10().ceil().max(from + 1.0)),
            logarithmic: true,
        }
    }

    /// Exactly between these.
    pub(super) const fn between(from: f64, to: f64) -> Self {
        Self {
            from,
            to,
            logarithmic: false,
        }
    }

    pub(super) const fn is_logarithmic(&self) -> bool {
        self.logarithmic
    }

    /// 0 at the begin, 1 at the end; values outside are moved to the nearest end.
    pub(super) fn at(&self, value: f64) -> f64 {
        let at = if self.logarithmic {
            (value.max(self.from) / self.from).log10() / (self.to / self.from).log10()
        } else {
            (value - self.from) / (self.to - self.from)
        };
        at.clamp(0.0, 1.0)
    }

    pub(super) fn ticks(&self) -> Vec<f64> {
        if self.logarithmic {
            let decades = (self.to / self.from).log10().round() as i32;
            return (0..=decades)
                .map(|decade| self.from * 10_f64.powi(decade))
                .collect();
        }
        let step = step(self.to - self.from);
        let first = (self.from / step).ceil();
        let count = ((self.to - self.from) / step).floor() as i32;
        (0..=count)
            .map(|number| (first + f64::from(number)) * step)
            .filter(|tick| *tick <= self.to * (1.0 + f64::EPSILON))
            .collect()
    }
}

/// A round number that divides the length into about [`TICKS`] parts.
fn step(length: f64) -> f64 {
    let rough = length / TICKS;
    let decade = 10_f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0];
    let fits = factor.into_iter().find(|factor| factor * decade >= rough);
    fits.unwrap_or(10.0) * decade
}

/// A tick as text: no more digits than it needs.
pub(super) fn tick(value: f64) -> String {
    match value.abs() {
        size if size >= 1e6 => format!("{}M", trimmed(value / 1e6)),
        size if size >= 1e4 => format!("{}k", trimmed(value / 1e3)),
        _ => trimmed(value),
    }
}

fn trimmed(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_linear_axis_ends_at_a_round_number_above_all_values() {
        let axis = Axis::linear(93.0);
        assert_eq!(axis.ticks(), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert!((axis.at(50.0) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn a_logarithmic_axis_has_whole_decades() {
        let axis = Axis::logarithmic(3.0, 250.0);
        assert_eq!(axis.ticks().len(), 4);
        assert!((axis.at(10.0) - 1.0 / 3.0).abs() < 1e-9);
        assert!(!Axis::logarithmic(0.0, 250.0).is_logarithmic());
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!(
            [0.5, 20.0, 15_000.0, 1e6].map(tick),
            ["0.5", "20", "15k", "1M"]
        );
    }
}
