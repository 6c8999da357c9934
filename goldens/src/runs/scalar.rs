//! Rows whose one freedom is a scalar: the root of a row's or head's mean square is the only value there that depends on
//! the order of a sum, and it multiplies the whole row (`docs/verdicts.md`, Token runs).

use half::bf16;
use ndarray::ArrayView1;
use reference::Rounding;
use reference::bounds::{Bounded, bf16_cell};
use reference::rounding::round_f32;

/// Which elements of a row one common factor within `1 - reach ..= 1 + reach` gives the device's bits, when it is chosen
/// so that as many as possible do. `values` are exact for the factor 1; `slack` is what the roundings after it may move
/// each by.
pub fn under_one_factor(values: &[f64], slack: &[f64], device: &[bf16], reach: f64, rule: Rounding) -> Vec<bool> {
    // Every element allows an interval of factors.
    let allowed: Vec<Option<(f64, f64)>> = values
        .iter()
        .zip(slack)
        .zip(device)
        .map(|((&value, &slack), &device)| {
            if value.is_nan() && device.is_nan() {
                return Some((f64::NEG_INFINITY, f64::INFINITY));
            }
            let (low, high) = bf16_cell(device, rule)?;
            let (low, high) = (low - slack, high + slack);
            if value == 0.0 {
                return (low <= 0.0 && high >= 0.0).then_some((f64::NEG_INFINITY, f64::INFINITY));
            }
            let (a, b) = (low / value, high / value);
            Some(if a <= b { (a, b) } else { (b, a) }).filter(|(a, b)| !a.is_nan() && !b.is_nan())
        })
        .collect();
    let (least, most) = (1.0 - reach, 1.0 + reach);
    // The best factor is where an interval begins, or the least one.
    let mut starts: Vec<f64> = vec![least];
    let mut ends: Vec<f64> = Vec::new();
    for &(low, high) in allowed.iter().flatten() {
        if low <= most && high >= least {
            ends.push(high);
            starts.push(low.max(least));
        }
    }
    let whole = ends.len();
    starts[1..].sort_by(f64::total_cmp);
    ends.sort_by(f64::total_cmp);
    let mut best = (0, 1.0);
    // At the k-th start, k intervals have begun; those whose end lies before it are over.
    for (begun, &start) in starts[1..].iter().enumerate() {
        let begun = starts[1..].partition_point(|&s| s <= start).max(begun + 1);
        let over = ends.partition_point(|&end| end < start);
        if begun - over > best.0 {
            best = (begun - over, start);
            if best.0 == whole {
                break;
            }
        }
    }
    allowed.iter().map(|allowed| allowed.is_some_and(|(low, high)| low <= best.1 && best.1 <= high)).collect()
}

/// The rows `cast((x * inv) * gamma)` that a scalar within its bound can give.
#[derive(Debug)]
pub struct Variants {
    /// The row of the exact scalar, widened.
    pub nominal: Vec<f32>,
    /// Elements that are not the same under every scalar.
    pub loose: Vec<usize>,
    /// Their values in each distinct row, the nominal one first.
    pub values: Vec<Vec<f32>>,
}

impl Variants {
    /// All rows of `x`, BF16 `[n]` widened, and `gamma`, FP32 `[n]`.
    pub fn new(x: &[f32], gamma: ArrayView1<'_, f32>, inv: Bounded, rule: Rounding) -> Self {
        let value = |i: usize, inv: f32| round_f32((x[i] * inv) * gamma[i], rule);
        let nearest = inv.value as f32;
        let nominal: Vec<f32> = (0..x.len()).map(|i| value(i, nearest)).collect();
        let (low, high) = ((inv.value - inv.bound) as f32, (inv.value + inv.bound) as f32);
        if !(low > 0.0 && high.is_finite()) {
            return Self { nominal, loose: Vec::new(), values: vec![Vec::new()] };
        }
        // Multiplication and rounding keep order, so that what is equal at both ends is equal between them.
        let loose: Vec<usize> = (0..x.len()).filter(|&i| value(i, low).to_bits() != value(i, high).to_bits()).collect();
        let mut values = vec![loose.iter().map(|&i| nominal[i]).collect::<Vec<f32>>()];
        if !loose.is_empty() {
            // Neighbours of a positive FP32 number are neighbours of its bits.
            for bits in low.to_bits()..=high.to_bits() {
                let row: Vec<f32> = loose.iter().map(|&i| value(i, f32::from_bits(bits))).collect();
                if values.last() != Some(&row) && values.first() != Some(&row) {
                    values.push(row);
                }
            }
        }
        Self { nominal, loose, values }
    }

    /// A whole row.
    pub fn row(&self, variant: usize) -> Vec<f32> {
        let mut row = self.nominal.clone();
        for (&i, &value) in self.loose.iter().zip(&self.values[variant]) {
            row[i] = value;
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array1;
    use proptest::prelude::*;
    use reference::rounding::to_bf16;

    proptest! {
        #[test]
        fn a_factor_within_reach_is_found(seed in prop::collection::vec(-4.0f64..4.0, 1..200), factor in -1.0f64..1.0) {
            let reach = 1e-4;
            let device: Vec<bf16> =
                seed.iter().map(|&v| to_bf16((v * (1.0 + factor * reach)) as f32, Rounding::Rne)).collect();
            let slack: Vec<f64> = seed.iter().map(|v| v.abs() * 1e-7).collect();
            let reached = under_one_factor(&seed, &slack, &device, reach, Rounding::Rne);
            prop_assert!(reached.iter().all(|&r| r), "{:?}", reached.iter().position(|&r| !r));
            // One element that is a step off is not reached, the others still are.
            let mut wrong = device.clone();
            wrong[0] = bf16::from_bits(wrong[0].to_bits() ^ 2);
            let reached = under_one_factor(&seed, &slack, &wrong, reach, Rounding::Rne);
            prop_assert!(seed.len() < 3 || (!reached[0] && reached[1..].iter().all(|&r| r)));
        }

        #[test]
        fn every_scalar_within_the_bound_gives_a_variant(seed: u64, n in 1usize..300, at in -1.0f64..1.0) {
            let real = |i: usize| (reference::elementary::mix(seed ^ i as u64) >> 40) as f32 / 8_388_608.0 - 1.0;
            let x: Vec<f32> = (0..n).map(|i| bf16::from_f32(3.0 * real(i)).to_f32()).collect();
            let gamma = Array1::from_shape_fn(n, |i| 1.0 + 0.1 * real(n + i));
            let inv = Bounded { value: 0.7 + 0.2 * f64::from(real(9999)), bound: 1e-5 };
            let variants = Variants::new(&x, gamma.view(), inv, Rounding::TiesAway);
            let scalar = (inv.value + at * inv.bound) as f32;
            let row: Vec<f32> = (0..n).map(|i| round_f32((x[i] * scalar) * gamma[i], Rounding::TiesAway)).collect();
            prop_assert!((0..variants.values.len()).any(|v| variants.row(v) == row));
        }
    }
}
