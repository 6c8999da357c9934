//! Final norm, LM head and the greedy choice (`docs/numerics.md`, Final norm and LM head).

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2};
use thiserror::Error;

use crate::elementary::rsqrt;
use crate::kernels::{SumOrder, matmul_bf16};
use crate::policy::{Freedom, Policy, Site};
use crate::rounding::round_f32;

/// Columns that the emulated device sums at a time (`docs/numerics.md`, Orders of the emulated device).
const CHUNK: usize = 128;

/// `(f32(x) * inv) * gamma` with `inv = rsqrt(sum(x^2) * (1/H) + eps)`: the FP32 values before `cast@final_norm`,
/// `[rows, H]`. `hidden` is BF16 `[rows, H]`, `gamma` FP32 `[H]`.
#[must_use]
pub fn final_norm(hidden: ArrayView2<'_, bf16>, gamma: ArrayView1<'_, f32>, eps: f32, freedom: Freedom) -> Array2<f32> {
    let columns = hidden.ncols();
    let order = SumOrder::vector(freedom, columns, CHUNK);
    let mut wide = hidden.mapv(bf16::to_f32);
    for mut row in wide.rows_mut() {
        let sum = order.sum(columns, |i| row[i] * row[i]);
        let inv = rsqrt(sum * (1.0 / columns as f32) + eps, freedom);
        row.zip_mut_with(&gamma, |x, gamma| *x = (*x * inv) * gamma);
    }
    wide
}

/// `logits = n . w^T` with `n = cast@final_norm(normed)`, FP32 `[rows, vocab]`. `normed` is what [`final_norm`]
/// gives, `head` BF16 `[vocab, H]` as it is stored.
#[must_use]
pub fn lm_head(normed: ArrayView2<'_, f32>, head: ArrayView2<'_, bf16>, policy: &Policy) -> Array2<f32> {
    let rule = policy.at(Site::FinalNorm);
    let n = normed.mapv(|value| round_f32(value, rule));
    matmul_bf16(n.view(), head.reversed_axes(), &SumOrder::cube(policy.freedom, n.ncols()))
}

/// Why no token is the greedy one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum GreedyError {
    /// A maximum over NaN is NaN, and no id has it.
    #[error("the logit of token {id} is NaN, so that there is no largest one")]
    NaN {
        /// The lowest such id.
        id: usize,
    },
    /// Arithmetic of finite weights does not give it, and what it is apart from others is no number.
    #[error("the logit of token {id} is infinite, so that its distance to others is no number")]
    Infinite {
        /// The lowest such id.
        id: usize,
    },
    /// No logit to choose from.
    #[error("there are no logits of the real vocabulary")]
    Empty,
}

/// The greedy token: the lowest index of the largest logit among the first `real_vocab_size`.
///
/// # Errors
/// A logit of the real vocabulary is NaN, or there is none.
pub fn greedy(logits: ArrayView1<'_, f32>, real_vocab_size: usize) -> Result<usize, GreedyError> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().take(real_vocab_size).enumerate() {
        if logit.is_nan() {
            return Err(GreedyError::NaN { id });
        }
        if best.is_none_or(|(_, largest)| logit > largest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id).ok_or(GreedyError::Empty)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementary::mix;
    use crate::rounding::Rounding;
    use ndarray::{Array1, array};
    use proptest::prelude::*;

    fn real(seed: u64, index: usize) -> f32 {
        (mix(seed ^ index as u64) >> 40) as f32 / 8_388_608.0 - 1.0
    }

    fn narrow(value: f32) -> f32 {
        bf16::from_f32(value).to_f32()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn norm_and_head_are_what_the_formula_says(rows in 1usize..5, width in 1usize..90, vocab in 1usize..150, seed: u64) {
            let x = Array2::from_shape_fn((rows, width), |(r, c)| bf16::from_f32(3.0 * real(seed, r * width + c)));
            let w = Array2::from_shape_fn((vocab, width), |(r, c)| bf16::from_f32(real(!seed, r * width + c)));
            let gamma = Array1::from_shape_fn(width, |i| 1.0 + 0.1 * real(seed ^ 1, i));
            let policy = Policy::rne();
            let wide = final_norm(x.view(), gamma.view(), 1e-6, policy.freedom);
            let logits = lm_head(wide.view(), w.view(), &policy);
            for r in 0..rows {
                // The canonical order of one run a lane, written out: eight lanes, then adjacent pairs.
                let sum_of = |term: &dyn Fn(usize) -> f32| {
                    let mut lanes = [0f32; 8];
                    for i in 0..width {
                        lanes[i % 8] += term(i);
                    }
                    let [a, b, c, d, e, f, g, h] = lanes;
                    ((a + b) + (c + d)) + ((e + f) + (g + h))
                };
                let mean = sum_of(&|i| x[(r, i)].to_f32() * x[(r, i)].to_f32()) * (1.0 / width as f32);
                let inv = (1.0 / f64::from(mean + 1e-6).sqrt()) as f32;
                let n: Vec<f32> = (0..width).map(|i| (x[(r, i)].to_f32() * inv) * gamma[i]).collect();
                for i in 0..width {
                    prop_assert_eq!(wide[(r, i)].to_bits(), n[i].to_bits());
                }
                for v in 0..vocab {
                    let expected = sum_of(&|i| narrow(n[i]) * w[(v, i)].to_f32());
                    prop_assert_eq!(logits[(r, v)].to_bits(), expected.to_bits());
                }
            }
        }

        #[test]
        fn the_greedy_token_is_the_first_of_the_largest(logits in prop::collection::vec(-3i8..3, 1..40), real in 1usize..50) {
            let values = Array1::from_iter(logits.iter().map(|&l| f32::from(l)));
            let seen = &logits[..real.min(logits.len())];
            let largest = seen.iter().max().unwrap();
            let expected = seen.iter().position(|l| l == largest).unwrap();
            prop_assert_eq!(greedy(values.view(), real), Ok(expected));
        }
    }

    #[test]
    fn the_rule_of_the_site_decides_ties() {
        // inv = 1 and gamma = 1.01953125, which lies midway between two BF16 numbers.
        let wide = array![[1.019_531_25f32]];
        let head = array![[bf16::from_f32(1.0)]];
        let under = |rule| lm_head(wide.view(), head.view(), &Policy::rne().with(Site::FinalNorm, rule))[(0, 0)];
        assert_eq!(under(Rounding::Rne), 1.015_625);
        assert_eq!(under(Rounding::TiesAway), 1.023_437_5);
        assert_eq!(under(Rounding::None), 1.019_531_25);
    }

    #[test]
    fn nan_spoils_its_row_and_its_choice_only() {
        let hidden = array![[bf16::from_f32(1.0), bf16::NAN], [bf16::from_f32(1.0), bf16::from_f32(2.0)]];
        let (gamma, head) = (array![1f32, 1.0], array![[bf16::from_f32(1.0), bf16::from_f32(-1.0)]]);
        let policy = Policy::rne();
        let logits =
            lm_head(final_norm(hidden.view(), gamma.view(), 1e-6, policy.freedom).view(), head.view(), &policy);
        assert!(logits[(0, 0)].is_nan() && logits[(1, 0)].is_finite());
        assert_eq!(greedy(array![1.0, f32::NAN, f32::NAN].view(), 3), Err(GreedyError::NaN { id: 1 }));
        // Ids of the padding do not count, whatever they hold.
        assert_eq!(greedy(array![1.0, 2.0, f32::NAN, 9.0].view(), 2), Ok(1));
        assert_eq!(greedy(array![f32::NEG_INFINITY, f32::NEG_INFINITY].view(), 2), Ok(0));
        assert_eq!(greedy(Array1::zeros(0).view(), 2), Err(GreedyError::Empty));
    }
}
