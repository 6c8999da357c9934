//! How far the permitted freedoms move the gap between two logits, and which gaps they can close: sampled devices,
//! and the quantile of Student's t for as many degrees of freedom as there are samples (`docs/tokens.md`, Near ties).

/// Sampled devices of a new golden. The quantile falls by half from 8 to 16 of them, and hardly further.
pub const SAMPLES: u32 = 16;
/// Most samples of a golden: more would be a day's work for no narrower bound.
pub const MOST_SAMPLES: u32 = 4096;
/// Probability, for one step of a right device, that it is called a failure.
pub const FALSE_ALARM: f64 = 1e-6;

/// The distance from zero that a right device keeps, in units of the spread: the value that Student's t with `samples`
/// degrees of freedom exceeds with probability `false_alarm / candidates`, so that none of the candidates of a step
/// exceeds its own with more than `false_alarm`.
#[must_use]
pub fn reach(samples: u32, false_alarm: f64, candidates: usize) -> f64 {
    let p = false_alarm / candidates.max(1) as f64;
    // The tail falls from one half at zero; doubling finds an upper end, halving the place between.
    let (mut low, mut high) = (0.0, 1.0);
    while tail(samples, high) > p && high < 1e300 {
        (low, high) = (high, 2.0 * high);
    }
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            break;
        }
        if tail(samples, middle) > p { low = middle } else { high = middle }
    }
    high
}

/// Probability that Student's t with `n` degrees of freedom exceeds `t >= 0`.
///
/// With `cos^2 = n / (n + t^2)`, the distribution function is a finite sum of powers of the cosine, the beginning of a
/// series of positive terms whose sum is 1. The tail is the rest of that series, so that nothing cancels however small
/// it is.
fn tail(n: u32, t: f64) -> f64 {
    let n = n.max(1);
    let degrees = f64::from(n);
    let square = degrees / (degrees + t * t);
    // Far out the squared cosine vanishes beside 1, near zero the series is endless.
    if square >= 1.0 - 1e-6 {
        return 0.5;
    }
    let (sine, cosine) = ((t * t / (degrees + t * t)).sqrt(), square.sqrt());
    // Even: sine * sum of c[k] cos^2k, c[k] = 1*3*...(2k-1) / 2*4*...2k. Odd: the same with cos^(2k+1) and
    // d[k] = 2*4*...2k / 3*5*...(2k+1), over pi/2. `first` terms belong to the distribution function.
    let odd = n % 2 == 1;
    let first = if odd { (n - 1) / 2 } else { n / 2 };
    let ratio = |k: f64| square * if odd { (2.0 * k) / (2.0 * k + 1.0) } else { (2.0 * k - 1.0) / (2.0 * k) };
    let mut term = if odd { cosine } else { 1.0 };
    for k in 1..=first {
        term *= ratio(f64::from(k));
    }
    let (mut sum, mut k) = (term, f64::from(first));
    while term > sum * 1e-17 {
        k += 1.0;
        term *= ratio(k);
        sum += term;
    }
    let scale = if odd { std::f64::consts::FRAC_2_PI } else { 1.0 };
    (0.5 * scale * sine * sum).min(0.5)
}

/// Root mean square of the changes of a gap, one a sampled device. Not about their mean: a device deviates from the
/// reference as the samples do, and the reference is not their centre.
#[must_use]
pub fn spread(changes: &[f64]) -> f32 {
    if changes.is_empty() {
        return 0.0;
    }
    let squares: f64 = changes.iter().map(|change| change * change).sum();
    (squares / changes.len() as f64).sqrt() as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use reference::elementary::mix;

    /// Values of the printed tables, and closed forms far out.
    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (n, p, t) in [
            (1, 0.025, 12.706_204_736),
            (2, 0.025, 4.302_652_730),
            (3, 0.005, 5.840_909_310),
            (8, 0.025, 2.306_004_135),
            (16, 0.005, 2.920_781_622),
            (30, 0.0005, 3.645_958_635),
            (120, 0.025, 1.979_930_405),
        ] {
            let found = reach(n, p, 1);
            assert!((found / t - 1.0).abs() < 1e-8, "{n} {p}: {found} {t}");
        }
        // One degree of freedom is Cauchy's distribution: the tail is atan(1/t) / pi.
        for t in [2.0, 100.0, 1e6] {
            let expected = libm::atan(1.0 / t) / std::f64::consts::PI;
            assert!((tail(1, t) / expected - 1.0).abs() < 1e-12, "{t}");
        }
        // Two: (1 - t / sqrt(2 + t^2)) / 2, as 1 / (s (s + t)) with s = sqrt(2 + t^2).
        for t in [1.0, 50.0, 1e5] {
            let s = f64::sqrt(2.0 + t * t);
            assert!((tail(2, t) * s * (s + t) - 1.0).abs() < 1e-12, "{t}");
        }
    }

    #[test]
    fn candidates_share_the_false_alarm() {
        assert_eq!(reach(16, 1e-6, 7), reach(16, 1e-6 / 7.0, 1));
        assert!(reach(16, 1e-6, 7) > reach(16, 1e-6, 1));
        assert!(reach(8, 1e-6, 7) > 1.5 * reach(16, 1e-6, 7));
    }

    proptest! {
        #[test]
        fn the_tail_falls(n in 1u32..200, t in 0.01f64..50.0, step in 0.01f64..5.0) {
            prop_assert!(tail(n, t) > tail(n, t + step));
            prop_assert!(tail(n, t) >= tail(n + 1, t) || t < 1.0);
        }

        #[test]
        fn a_quantile_has_its_tail(n in 1u32..100, exponent in 1.0f64..12.0) {
            let p = libm::pow(10.0, -exponent);
            prop_assert!((tail(n, reach(n, p, 1)) / p - 1.0).abs() < 1e-6);
        }
    }

    /// A device, the reference and the samples are draws of one distribution, and all are seen from the reference. The
    /// changes so share its error; that makes the rate of false alarms smaller than asked for, never larger.
    #[test]
    fn the_rate_of_false_alarms_is_at_most_what_was_asked_for() {
        let mut state = 7;
        let mut normal = || {
            // The sum of twelve uniform numbers: normal as far as a rate of a hundredth can tell.
            (0..12)
                .map(|_| {
                    state += 1;
                    (mix(state) >> 11) as f64 / (1u64 << 53) as f64
                })
                .sum::<f64>()
                - 6.0
        };
        let (trials, asked, samples) = (40_000, 0.02, 8);
        let limit = reach(samples, asked, 1);
        let alarms = (0..trials).filter(|_| {
            let own = normal();
            let changes: Vec<f64> = (0..samples).map(|_| normal() - own).collect();
            normal() - own > limit * f64::from(spread(&changes))
        });
        let rate = alarms.count() as f64 / f64::from(trials);
        assert!(rate < asked && rate > asked / 4.0, "{rate}");
    }
}
