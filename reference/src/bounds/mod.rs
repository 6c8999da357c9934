//! Error bounds derived from a step's own data (`docs/verdicts.md`).
//!
//! Every bound answers one question: how far from the exact value of this step may a correct device
//! be? Sums are bounded probabilistically (Higham and Mary 2019) at a stated false-alarm
//! probability; elementary functions by their documented ULPs; everything else by one rounding an
//! operation.

mod attention;

pub use attention::{HeadAnalysis, analyse_head};

use ndarray::ArrayView1;

use crate::elementary::{EXP_ULPS, ROOT_ULPS, exp_f64};
use crate::rounding::{Rounding, to_bf16};

/// Unit roundoff of FP32, `2^-24`.
pub const U: f64 = 1.0 / 16_777_216.0;
/// One ULP of an FP32 value is at most this much of it.
const ULP: f64 = 2.0 * U;
/// Anything below the smallest normal FP32 value may be flushed to zero.
const TINY: f64 = f32::MIN_POSITIVE as f64;
/// Comparisons a run may hold: the false-alarm probability of a run is split over this many.
const COMPARISONS: f64 = (1u64 << 26) as f64;

/// How sure a bound is to hold: a false-alarm probability, split over the comparisons of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Confidence {
    /// `ln(2 / delta)`, with `delta` the probability for one comparison.
    log: f64,
}

impl Confidence {
    /// From the false-alarm probability of a whole run, e.g. `1e-6`.
    #[must_use]
    pub fn new(run: f64) -> Self {
        let run = run.clamp(1e-300, 0.5);
        Self { log: std::f64::consts::LN_2 + COMPARISONS.ln() - run.ln() }
    }

    /// Deviations of a sum of independent, bounded, mean-zero errors, in units of the root of the sum
    /// of their squared bounds (Hoeffding).
    #[must_use]
    pub fn lambda(self) -> f64 {
        (2.0 * self.log).sqrt()
    }

    /// Bound on the error of an FP32 sum of `n` exact terms added one at a time in any order that does
    /// not depend on their values. `total` is their exact sum, `squares` the sum of their squares
    /// (`docs/verdicts.md`, Sums).
    #[must_use]
    pub fn sum(self, n: usize, total: f64, squares: f64) -> f64 {
        if n < 2 {
            return 0.0;
        }
        let n = n as f64;
        let centred = (squares - total * total / n).max(0.0);
        // The partial sums are a straight line to `total` plus a bridge of the centred terms.
        let line = self.lambda() * total.abs() * ((n + 1.0) * (2.0 * n + 1.0) / (6.0 * n)).sqrt();
        let bridge = self.log / std::f64::consts::PI * (n * centred).sqrt();
        let worst = (n - 1.0) * (n * squares).sqrt();
        U * (line + bridge).min(worst) + TINY
    }
}

/// The exact value of a step and how far from it a correct device may be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounded {
    /// The exact value, in float64.
    pub value: f64,
    /// Largest distance from it.
    pub bound: f64,
}

impl Bounded {
    /// Whether a device's value is within the bound.
    #[must_use]
    pub fn holds(self, device: f32) -> bool {
        (f64::from(device) - self.value).abs() <= self.bound
    }

    /// Whether a device's BF16 value can be the narrowing of some value within the bound: whether a
    /// rounding boundary of it, if not the exact value itself, lies that close.
    #[must_use]
    pub fn reaches(self, device: half::bf16, rule: Rounding) -> bool {
        let Some((low, high)) = bf16_cell(device, rule) else { return false };
        self.value >= low - self.bound && self.value <= high + self.bound
    }
}

/// `1 / sqrt(sum(x^2) * (1/n) + eps)` of a row of values that are exact in FP32, squares included when
/// `exact_squares` (BF16 values); otherwise each square is rounded too. A square root, then a reciprocal.
#[must_use]
pub fn inverse_rms(x: ArrayView1<'_, f32>, eps: f32, exact_squares: bool, confidence: Confidence) -> Bounded {
    inverse_root(x, eps, exact_squares, 2, confidence)
}

/// The same of a row of BF16 values where the reciprocal square root is one instruction, as in the final norm.
#[must_use]
pub fn final_inverse_rms(x: ArrayView1<'_, f32>, eps: f32, confidence: Confidence) -> Bounded {
    inverse_root(x, eps, true, 1, confidence)
}

fn inverse_root(x: ArrayView1<'_, f32>, eps: f32, exact_squares: bool, roots: u32, confidence: Confidence) -> Bounded {
    let n = x.len();
    let (mut total, mut squares) = (0f64, 0f64);
    for &value in x {
        let term = f64::from(value) * f64::from(value);
        total += term;
        squares += term * term;
    }
    // The kernel multiplies by 1/n as an FP32 constant.
    let mean = total * f64::from(1.0 / n as f32);
    let exact = 1.0 / (mean + f64::from(eps)).sqrt();
    let mut relative = confidence.sum(n, total, squares) / total.max(TINY) + 2.0 * U;
    if !exact_squares {
        relative += U;
    }
    let roots = f64::from(roots * ROOT_ULPS) * ULP;
    Bounded { value: exact, bound: exact * (0.5 * relative + roots) * SECOND_ORDER }
}

/// Products of small relative errors are dropped from every first-order bound; this makes up for them.
const SECOND_ORDER: f64 = 1.0 + 1e-3;

/// `(g * sig) * u` with `sig = 1 / (exp(-g) + 1)`, from exact FP32 `g` and `u` (step 12).
#[must_use]
pub fn silu(g: f32, u: f32) -> Bounded {
    let (g, u) = (f64::from(g), f64::from(u));
    let e = exp_f64(-g);
    let sigmoid = 1.0 / (e + 1.0);
    let value = g * sigmoid * u;
    // exp carries over to the sum by its share of it; then one addition, one reciprocal, two products.
    let exp_share = f64::from(EXP_ULPS) * ULP * (1.0 - sigmoid);
    let relative = exp_share + U + f64::from(ROOT_ULPS) * ULP + 2.0 * U;
    // exp(-g) overflows FP32 below -88.7 and the sigmoid underflows: the device's value is then zero.
    let flushed = if e > f64::from(f32::MAX) { value.abs() } else { 0.0 };
    let tiny = TINY * (1.0 + g.abs()) * (1.0 + u.abs());
    Bounded { value, bound: value.abs() * relative * SECOND_ORDER + flushed + tiny }
}

/// The interval of exact values that narrow to `value` under `rule`, ends included; `None` for NaN.
#[must_use]
pub fn bf16_cell(value: half::bf16, rule: Rounding) -> Option<(f64, f64)> {
    if value.is_nan() {
        return None;
    }
    let negative = value.is_sign_negative();
    let bits = value.to_bits() & 0x7FFF;
    // The pattern after the largest finite one stands for 2^128 when a boundary is asked for.
    let magnitude = |bits: u16| if bits >= 0x7F80 { 2f64.powi(128) } else { half::bf16::from_bits(bits).to_f64() };
    let (low, high) = if rule == Rounding::Trunc {
        (magnitude(bits), magnitude(bits + 1))
    } else {
        let above = (magnitude(bits) + magnitude(bits.saturating_add(1))) / 2.0;
        let below = if bits == 0 { -above } else { (magnitude(bits - 1) + magnitude(bits)) / 2.0 };
        (below, above)
    };
    let low = if bits == 0 && rule == Rounding::Trunc { -high } else { low };
    let high = if bits == 0x7F80 { f64::INFINITY } else { high };
    Some(if negative { (-high, -low) } else { (low, high) })
}

/// Narrows a float64 value to BF16. The detour over FP32 can only matter within 2^-25 of a boundary,
/// which every bound in this module exceeds.
fn narrow(value: f64, rule: Rounding) -> half::bf16 {
    to_bf16(value as f32, rule)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementary::{exp, reciprocal};
    use crate::kernels::SumOrder;
    use crate::policy::Freedom;
    use half::bf16;
    use proptest::prelude::*;

    #[test]
    fn a_sum_with_one_rounding_is_bounded_by_it() {
        let confidence = Confidence::new(1e-6);
        assert_eq!(confidence.sum(1, 3.0, 9.0), 0.0);
        assert!(confidence.sum(2, 3.0, 5.0) <= 2.0 * 3.2 * U);
    }

    #[test]
    fn cells_meet_and_hold_their_value() {
        for bits in [0u16, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7F] {
            let value = bf16::from_bits(bits);
            let (low, high) = bf16_cell(value, Rounding::Rne).unwrap();
            assert!(low <= value.to_f64() && value.to_f64() <= high);
            if bits < 0x7F7F {
                let (next, _) = bf16_cell(bf16::from_bits(bits + 1), Rounding::Rne).unwrap();
                assert_eq!(next, high);
            }
        }
        assert_eq!(bf16_cell(bf16::NAN, Rounding::Rne), None);
        assert_eq!(bf16_cell(bf16::INFINITY, Rounding::Rne).unwrap().1, f64::INFINITY);
    }

    proptest! {
        #[test]
        fn cells_agree_with_narrowing(bits in 0u32..0x7F80_0000, negative: bool) {
            let value = f32::from_bits(bits | u32::from(negative) << 31);
            for rule in [Rounding::Rne, Rounding::TiesAway, Rounding::Trunc] {
                let (low, high) = bf16_cell(to_bf16(value, rule), rule).unwrap();
                prop_assert!(low <= f64::from(value) && f64::from(value) <= high, "{low} {value} {high}");
            }
        }

        #[test]
        fn every_order_stays_within_the_sum_bound(n in 2usize..600, seed: u64, offset in -1.0f32..1.0) {
            let term = |i: usize| {
                let draw = crate::elementary::mix(seed ^ i as u64);
                bf16::from_f32((draw as u32 as f32 / u32::MAX as f32 - 0.5) + offset).to_f32()
            };
            let exact: f64 = (0..n).map(|i| f64::from(term(i))).sum();
            let squares: f64 = (0..n).map(|i| f64::from(term(i)).powi(2)).sum();
            // At a false-alarm probability of one half the bound still has to hold in every one of these runs.
            let bound = Confidence::new(0.5).sum(n, exact, squares);
            for freedom in [Freedom::Canonical, Freedom::Emulated, Freedom::Sampled { seed }] {
                let sum = SumOrder::vector(freedom, n, 128).sum(n, term);
                prop_assert!((f64::from(sum) - exact).abs() <= bound);
            }
        }

        #[test]
        fn sampled_silu_stays_within_its_bound(g in -100.0f32..100.0, u in -50.0f32..50.0, seed: u64) {
            let freedom = Freedom::Sampled { seed };
            let sig = reciprocal(exp(-g, freedom) + 1.0, freedom);
            let value = (g * sig) * u;
            prop_assert!(silu(g, u).holds(value), "{} {:?}", value, silu(g, u));
        }
    }
}
