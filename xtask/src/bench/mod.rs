//! Speed against the machine's own limits (`docs/performance.md`): [`floors`] measures what the machine can do,
//! [`work`] says how long a piece of work must take at least, [`lines`] are the pieces of work, [`layer`]
//! and [`model`] what some of them run on, [`peer`] runs somebody else's code on the same inputs. Times are reported and never judged.

pub mod floors;
pub mod layer;
pub mod lines;
pub mod model;
pub mod peer;
pub mod work;

use serde::Serialize;

pub use floors::Floors;

/// What a run of `assay bench` found. Serialized, it is the JSON that the command prints.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The best floors of the run.
    pub floors: Floors,
    /// One entry a line, in the order of [`lines::LINES`], the peer's last.
    pub lines: Vec<Line>,
    /// What else a person should know: the peer's equality, or why it was not run.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// One timed piece of work.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Median seconds of its runs.
    pub seconds: f64,
    /// What bounds it: `read`, `int8`, `fp32`, several of them with `+`; for a peer, what it is compared with.
    pub floor: String,
    /// Seconds at that bound.
    pub floor_seconds: f64,
    /// `seconds / floor_seconds`.
    pub ratio: f64,
    /// Seconds of the fastest run.
    #[serde(skip)]
    pub best: f64,
}

impl Line {
    /// A line from the seconds of its runs. Its ratio is that of the medians.
    pub fn new(name: &str, seconds: &[f64], floor: String, floor_seconds: f64) -> Self {
        let median = median(seconds);
        let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
        Self { name: name.to_owned(), seconds: median, floor, floor_seconds, ratio: median / floor_seconds, best }
    }
}

/// The middle one of an odd number of values, the upper middle one of an even number; NaN of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_takes_the_median_and_keeps_the_best() {
        let line = Line::new("x", &[3.0, 1.0, 2.0], "read".into(), 0.5);
        assert_eq!((line.seconds, line.best, line.ratio), (2.0, 1.0, 4.0));
        assert_eq!(median(&[2.0, 1.0, 8.0, 4.0, 16.0]), 4.0);
        assert!(median(&[]).is_nan());
    }
}
