//! Online softmax: attention of the queries that share a KV head over tiles of tokens, combined in tile order
//! (`docs/numerics.md`, step 7; Prefill).

use half::bf16;
use pulp::Arch;

use crate::elementary::exp_all;
use crate::geometry::PAGE;
use crate::kernels::{SumOrder, kernels};
use crate::policy::Freedom;
use crate::rounding::{Rounding, round_f32, under};

/// How attention is computed.
#[derive(Clone, Copy, Debug)]
pub struct Softmax {
    /// Tokens of a tile; divides a page.
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
    /// `[G, D]`, before the cast.
    pub fn attend(&self, queries: &[f32], keys: &[&[bf16]], values: &[&[bf16]], out: &mut [f32]) {
        let (dim, tile) = (keys.first().map_or(1, |key| key.len().max(1)), self.tile);
        let group = queries.len() / dim;
        let (whole_tile, arch) = (Orders::of(self, tile), Arch::new());
        let dot = SumOrder::cube(self.freedom, dim);
        let mut max = vec![f32::NEG_INFINITY; group];
        let mut sum = vec![0f32; group];
        let mut tile_out = vec![0f32; group * dim];
        let mut scores = vec![0f32; group * PAGE];
        let mut factors = vec![[0f32; 2]; group * PAGE.div_ceil(tile)];
        // The tiles of a page go through each step side by side, so that there is enough of each to be worth a loop.
        for (page, (keys, values)) in keys.chunks(PAGE).zip(values.chunks(PAGE)).enumerate() {
            let probs = &mut scores[..group * keys.len()];
            let factors = &mut factors[..group * keys.len().div_ceil(tile)];
            // s = (q . k) * scale, tile by tile.
            for (keys, probs) in keys.chunks(tile).zip(probs.chunks_mut(group * tile)) {
                dot_rows(queries, keys, &dot, probs);
            }
            // p = exp(s - m_t), narrowed before it is summed and multiplied; a tile's maximum keeps a NaN.
            arch.dispatch(
                #[inline(always)]
                || {
                    let tiles = probs.chunks_mut(group * tile).zip(factors.chunks_exact_mut(group));
                    for (probs, factors) in tiles {
                        let tokens = probs.len() / group;
                        for ((probs, max), factors) in probs.chunks_exact_mut(tokens).zip(&mut max).zip(factors) {
                            probs.iter_mut().for_each(|s| *s *= self.scale);
                            let tile_max = nan_max_of(probs);
                            probs.iter_mut().for_each(|s| *s -= tile_max);
                            // a = exp(m - m'), c = exp(m_t - m').
                            let new_max = nan_max(*max, tile_max);
                            *factors = [*max - new_max, tile_max - new_max];
                            *max = new_max;
                        }
                    }
                },
            );
            exp_all(probs, self.freedom);
            exp_all(factors.as_flattened_mut(), self.freedom);
            arch.dispatch(
                #[inline(always)]
                || {
                    under(
                        self.prob,
                        #[inline(always)]
                        |rule| probs.iter_mut().for_each(|p| *p = round_f32(*p, rule)),
                    );
                },
            );
            // Combine in tile order; the first tile has nothing to be combined with.
            let tiles = values.chunks(tile).zip(probs.chunks(group * tile)).zip(factors.chunks_exact(group));
            for (index, ((values, probs), factors)) in tiles.enumerate() {
                let (first, tokens) = (page == 0 && index == 0, values.len());
                let last_tile = (tokens < tile).then(|| Orders::of(self, tokens));
                let orders = last_tile.as_ref().unwrap_or(&whole_tile);
                weighted_sum(probs, values, &orders.weighted, if first { &mut *out } else { &mut tile_out });
                for (j, probs) in probs.chunks_exact(tokens).enumerate() {
                    let tile_sum = match &orders.sum {
                        SumOrder::Canonical => probs.iter().fold(0.0, |sum, p| sum + p),
                        order => order.sum(tokens, |t| probs[t]),
                    };
                    // l = a*l + c*l_t; o = o*a + o_t*c.
                    let [a, c] = factors[j];
                    sum[j] = if first { tile_sum } else { a * sum[j] + c * tile_sum };
                }
                if !first {
                    arch.dispatch(
                        #[inline(always)]
                        || {
                            let rows = out.chunks_exact_mut(dim).zip(tile_out.chunks_exact(dim)).zip(factors);
                            for ((out, tile_out), &[a, c]) in rows {
                                for (o, o_t) in out.iter_mut().zip(tile_out) {
                                    *o = *o * a + o_t * c;
                                }
                            }
                        },
                    );
                }
            }
        }
        arch.dispatch(
            #[inline(always)]
            || {
                for (out, sum) in out.chunks_exact_mut(dim).zip(&sum) {
                    out.iter_mut().for_each(|o| *o /= sum);
                }
            },
        );
    }
}

/// The orders of a tile's two sums over its tokens.
struct Orders {
    /// Of `p @ v`, on the cube unit.
    weighted: SumOrder,
    /// Of the probabilities, on the vector unit. Without freedom they are added one after the other.
    sum: SumOrder,
}

impl Orders {
    fn of(softmax: &Softmax, tokens: usize) -> Self {
        let freedom = softmax.freedom;
        Self { weighted: SumOrder::cube(freedom, tokens), sum: SumOrder::vector(freedom, tokens, softmax.tile) }
    }
}

/// `q . k` of each query, `[G, D]`, and key; `out` is `[G, T]`.
fn dot_rows(queries: &[f32], keys: &[&[bf16]], order: &SumOrder, out: &mut [f32]) {
    if matches!(order, SumOrder::Canonical) {
        return kernels().scores(queries, keys, out);
    }
    let dim = keys.first().map_or(1, |key| key.len());
    let keys: Vec<Vec<f32>> = keys.iter().map(|key| widened(key)).collect();
    for (q, out) in queries.chunks_exact(dim).zip(out.chunks_exact_mut(keys.len())) {
        for (out, key) in out.iter_mut().zip(&keys) {
            *out = order.sum(dim, |i| q[i] * key[i]);
        }
    }
}

/// `p @ v`: `probs` is `[G, T]`, `out` is `[G, D]`. Without freedom tokens are added one after the other.
fn weighted_sum(probs: &[f32], values: &[&[bf16]], order: &SumOrder, out: &mut [f32]) {
    if matches!(order, SumOrder::Canonical) {
        return kernels().weighted(probs, values, out);
    }
    let dim = values.first().map_or(1, |value| value.len());
    let values: Vec<Vec<f32>> = values.iter().map(|value| widened(value)).collect();
    for (probs, out) in probs.chunks_exact(values.len()).zip(out.chunks_exact_mut(dim)) {
        for (d, out) in out.iter_mut().enumerate() {
            *out = order.sum(probs.len(), |t| probs[t] * values[t][d]);
        }
    }
}

fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// The largest value, negative infinity of none; NaN if one is. Without branches, so that it becomes vector code.
#[inline(always)]
fn nan_max_of(values: &[f32]) -> f32 {
    let (mut max, mut nan) = (f32::NEG_INFINITY, false);
    for &value in values {
        max = if value > max { value } else { max };
        nan |= value.is_nan();
    }
    if nan { f32::NAN } else { max }
}

/// The larger of two values; NaN if either is (`f32::max` drops it).
#[inline(always)]
fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}
