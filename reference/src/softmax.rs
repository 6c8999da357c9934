//! Online softmax: attention of the queries that share a KV head over tiles of tokens, combined in tile order
//! (`docs/numerics.md`, step 7; Prefill).

use half::bf16;

use crate::elementary::exp_all;
use crate::kernels::{SumOrder, kernels};
use crate::policy::Freedom;
use crate::rounding::{Rounding, round_f32, widen};

/// How attention is computed.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// Tokens of a tile.
    pub tile: usize,
    /// What scores are multiplied by.
    pub scale: f32,
    /// How probabilities are narrowed before they are summed and multiplied.
    pub prob: Rounding,
    /// Order of the sums, accuracy of exp.
    pub freedom: Freedom,
}

impl Softmax {
    /// Attention of `queries`, FP32 `[G, D]`, over tokens whose `keys` and `values` are `D` BF16 values each: FP32
    /// `[G, D]`, before the cast. At least one token.
    pub fn attend(&self, queries: &[f32], keys: &[&[bf16]], values: &[&[bf16]], out: &mut [f32]) {
        let dim = keys.first().map_or(1, |key| key.len().max(1));
        let group = queries.len() / dim;
        let mut max = vec![f32::NEG_INFINITY; group];
        let mut sum = vec![0f32; group];
        let mut scores = vec![0f32; group * self.tile];
        let mut tile_out = vec![0f32; group * dim];
        for (index, (keys, values)) in keys.chunks(self.tile).zip(values.chunks(self.tile)).enumerate() {
            let tokens = keys.len();
            let probs = &mut scores[..group * tokens];
            // s = (q . k) * scale.
            self.dot_rows(queries, keys, probs);
            let tile_max: Vec<f32> = probs
                .chunks_exact_mut(tokens)
                .map(|scores| {
                    scores.iter_mut().for_each(|s| *s *= self.scale);
                    let largest = scores.iter().copied().fold(f32::NEG_INFINITY, nan_max);
                    scores.iter_mut().for_each(|s| *s -= largest);
                    largest
                })
                .collect();
            // p = exp(s - m_t), narrowed before it is summed and multiplied.
            exp_all(probs, self.freedom);
            probs.iter_mut().for_each(|p| *p = round_f32(*p, self.prob));
            self.weighted_sum(probs, values, &mut tile_out);
            let order = SumOrder::vector(self.freedom, tokens, self.tile);
            for (j, probs) in probs.chunks_exact(tokens).enumerate() {
                let tile_sum = order.sum(tokens, |t| probs[t]);
                let (out, tile_out) = (&mut out[j * dim..(j + 1) * dim], &tile_out[j * dim..(j + 1) * dim]);
                if index == 0 {
                    // Nothing to be combined with.
                    (max[j], sum[j]) = (tile_max[j], tile_sum);
                    out.copy_from_slice(tile_out);
                    continue;
                }
                // m' = max(m, m_t); a = exp(m - m'); c = exp(m_t - m'); l = a*l + c*l_t; o = o*a + o_t*c.
                let new_max = nan_max(max[j], tile_max[j]);
                let mut factors = [max[j] - new_max, tile_max[j] - new_max];
                exp_all(&mut factors, self.freedom);
                let [a, c] = factors;
                max[j] = new_max;
                sum[j] = a * sum[j] + c * tile_sum;
                out.iter_mut().zip(tile_out).for_each(|(o, o_t)| *o = *o * a + o_t * c);
            }
        }
        for (out, sum) in out.chunks_exact_mut(dim).zip(&sum) {
            out.iter_mut().for_each(|o| *o /= sum);
        }
    }

    /// `q . k` of each query and key; `out` is `[G, T]`.
    fn dot_rows(&self, queries: &[f32], keys: &[&[bf16]], out: &mut [f32]) {
        let dim = keys.first().map_or(1, |key| key.len());
        match SumOrder::cube(self.freedom, dim) {
            SumOrder::Canonical => kernels().scores(queries, keys, out),
            order => {
                for (q, out) in queries.chunks_exact(dim).zip(out.chunks_exact_mut(keys.len())) {
                    for (out, key) in out.iter_mut().zip(keys) {
                        *out = order.sum(dim, |i| q[i] * widen(key[i]));
                    }
                }
            }
        }
    }

    /// `p @ v`: `probs` is `[G, T]`, `out` is `[G, D]`. Without freedom tokens are added one after the other.
    fn weighted_sum(&self, probs: &[f32], values: &[&[bf16]], out: &mut [f32]) {
        let dim = values.first().map_or(1, |value| value.len());
        match SumOrder::cube(self.freedom, values.len()) {
            SumOrder::Canonical => kernels().weighted(probs, values, out),
            order => {
                for (probs, out) in probs.chunks_exact(values.len()).zip(out.chunks_exact_mut(dim)) {
                    for (d, out) in out.iter_mut().enumerate() {
                        *out = order.sum(probs.len(), |t| probs[t] * widen(values[t][d]));
                    }
                }
            }
        }
    }
}

/// The larger of two values; NaN if either is (`f32::max` drops it).
#[inline(always)]
fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}
