//! Order statistics of samples.

use serde::Serialize;

/// Order statistics of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) count: usize,
    pub(crate) min: f64,
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

/// By the nearest-rank method: every quantile is a measured value. `None` for an empty sample.
pub(crate) fn quantiles(sample: &[f64]) -> Option<Quantiles> {
    let mut sorted = sample.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(Quantiles {
        count: sorted.len(),
        min: *sorted.first()?,
        p50: *rank(&sorted, 50)?,
        p99: *rank(&sorted, 99)?,
        max: *sorted.last()?,
    })
}

/// The median by nearest rank; `None` for an empty sample.
pub(crate) fn median(sample: &[f64]) -> Option<f64> {
    quantiles(sample).map(|quantiles| quantiles.p50)
}

fn rank(sorted: &[f64], percent: usize) -> Option<&f64> {
    sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let sample: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let found = quantiles(&sample).expect("a sample that is not empty");
        assert_eq!(
            (found.min, found.p50, found.p99, found.max),
            (1.0, 50.0, 99.0, 100.0)
        );
        assert_eq!(quantiles(&[7.0]).expect("one value").p99, 7.0);
        assert_eq!(quantiles(&[]), None);
    }
}
