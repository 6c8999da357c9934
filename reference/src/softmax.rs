//! Online softmax: attention of the queries that share a KV head over tiles of tokens, combined in tile order
//! (`docs/numerics.md`, step 7; Prefill).

use std::array::from_fn;

use half::bf16;
use pulp::{Arch, NullaryFnOnce};

use crate::elementary::exp_all;
use crate::geometry::{PAGE, TILE};
use crate::kernels::{SumOrder, Upcoming, Weighted, kernels};
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
    /// `[G, D]`, before the cast. `next` are keys that are read after these, and prefetched.
    pub fn attend(&self, queries: &[f32], keys: &[&[bf16]], values: &[&[bf16]], next: &[&[bf16]], out: &mut [f32]) {
        let (dim, tile) = (keys.first().map_or(1, |key| key.len().max(1)), self.tile);
        let (group, arch) = (queries.len() / dim, Arch::new());
        let dot = SumOrder::cube(self.freedom, dim);
        let mut upcoming = Upcoming::new(keys, values, PAGE, next);
        let mut max = vec![f32::NEG_INFINITY; group];
        let mut sum = vec![0f32; group];
        // Of a page: [query][token], [tile][query].
        let mut scores = vec![0f32; group * PAGE];
        let mut factors = vec![[0f32; 2]; group * PAGE.div_ceil(tile)];
        // What is combined with the first tile leaves it as it is, the sign of zero included.
        out.fill(-0.0);
        // The tiles of a page go through each step side by side, so that there is enough of each to be worth a loop.
        for (keys, values) in keys.chunks(PAGE).zip(values.chunks(PAGE)) {
            let (tokens, tiles) = (keys.len(), keys.len().div_ceil(tile));
            let probs = &mut scores[..group * tokens];
            let factors = &mut factors[..group * tiles];
            // s = (q . k) * scale.
            dot_rows(queries, keys, &dot, &mut upcoming, probs);
            // p = exp(s - m_t), narrowed before it is summed and multiplied; a tile's maximum keeps a NaN.
            arch.dispatch(BelowMax { scores: probs, tokens, tile, scale: self.scale, max: &mut max, factors });
            for probs in probs.chunks_mut(8 * group) {
                // With what the kernels fetch, the two rows of a token for each.
                upcoming.fetch(4);
                exp_all(probs, self.freedom);
            }
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
            // l = a*l + c*l_t; o = o*a + o_t*c, in tile order.
            for (j, (probs, sum)) in probs.chunks_exact(tokens).zip(&mut sum).enumerate() {
                for (probs, [a, c]) in probs.chunks(tile).zip(factors[j..].iter().step_by(group)) {
                    *sum = a * *sum + c * self.tile_sum(probs);
                }
            }
            self.add_weighted(Weighted { p: probs, factors, values, tile }, &mut upcoming, out);
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

    /// The sum of a tile's probabilities, on the vector unit. Without freedom they are added one after the other.
    fn tile_sum(&self, probs: &[f32]) -> f32 {
        match SumOrder::vector(self.freedom, probs.len(), self.tile) {
            SumOrder::Canonical => probs.iter().fold(0.0, |sum, p| sum + p),
            order => order.sum(probs.len(), |t| probs[t]),
        }
    }

    /// `o = o*a + (p @ v)*c`, tile by tile; `out` is `[G, D]`. Without freedom tokens are added one after the other.
    fn add_weighted(&self, weighted: Weighted<'_>, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
        let Weighted { p, factors, values, tile } = weighted;
        if matches!(SumOrder::cube(self.freedom, tile), SumOrder::Canonical) {
            return kernels().weighted(weighted, upcoming, out);
        }
        let (tokens, dim) = (values.len(), values.first().map_or(1, |value| value.len()));
        let values: Vec<Vec<f32>> = values.iter().map(|value| widened(value)).collect();
        for (index, (values, factors)) in values.chunks(tile).zip(factors.chunks_exact(p.len() / tokens)).enumerate() {
            // On the cube unit.
            let order = SumOrder::cube(self.freedom, values.len());
            for ((p, [a, c]), out) in p.chunks_exact(tokens).zip(factors).zip(out.chunks_exact_mut(dim)) {
                let p = &p[index * tile..];
                for (d, out) in out.iter_mut().enumerate() {
                    *out = *out * a + order.sum(values.len(), |t| p[t] * values[t][d]) * c;
                }
            }
        }
    }
}

/// `q . k` of each query, `[G, D]`, and key; `out` is `[G, T]`.
fn dot_rows(queries: &[f32], keys: &[&[bf16]], order: &SumOrder, upcoming: &mut Upcoming<'_>, out: &mut [f32]) {
    if matches!(order, SumOrder::Canonical) {
        return kernels().scores(queries, keys, upcoming, out);
    }
    let dim = keys.first().map_or(1, |key| key.len());
    let keys: Vec<Vec<f32>> = keys.iter().map(|key| widened(key)).collect();
    for (q, out) in queries.chunks_exact(dim).zip(out.chunks_exact_mut(keys.len())) {
        for (out, key) in out.iter_mut().zip(&keys) {
            *out = order.sum(dim, |i| q[i] * key[i]);
        }
    }
}

fn widened(values: &[bf16]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}

/// Scales scores and takes the maximum of their tile off.
struct BelowMax<'a> {
    /// `[G, T]`.
    scores: &'a mut [f32],
    tokens: usize,
    tile: usize,
    scale: f32,
    /// The maximum of each query so far.
    max: &'a mut [f32],
    /// What the exponentials of are to be taken for a tile's factors, `[tiles, G]`.
    factors: &'a mut [[f32; 2]],
}

impl NullaryFnOnce for BelowMax<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let group = self.max.len();
        for (j, (scores, max)) in self.scores.chunks_exact_mut(self.tokens).zip(self.max).enumerate() {
            for (scores, factors) in scores.chunks_mut(self.tile).zip(self.factors[j..].iter_mut().step_by(group)) {
                // A length that is known makes it vector code.
                let tile_max = match scores.first_chunk_mut::<TILE>() {
                    Some(whole) if self.tile == TILE => below_max(whole, self.scale),
                    _ => below_max(scores, self.scale),
                };
                // a = exp(m - m'), c = exp(m_t - m').
                let new_max = nan_max(*max, tile_max);
                *factors = [*max - new_max, tile_max - new_max];
                *max = new_max;
            }
        }
    }
}

/// Scales scores and takes their maximum off, which it returns: NaN if one is.
#[inline(always)]
fn below_max(scores: &mut [f32], scale: f32) -> f32 {
    const LANES: usize = 16;
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let (mut lanes, mut nan) = ([f32::NEG_INFINITY; LANES], false);
    for scores in scores.chunks_mut(LANES) {
        for (score, lane) in scores.iter_mut().zip(&mut lanes) {
            *score *= scale;
            *lane = larger(*score, *lane);
            nan |= score.is_nan();
        }
    }
    let eight: [f32; 8] = from_fn(|i| larger(lanes[i], lanes[i + 8]));
    let four: [f32; 4] = from_fn(|i| larger(eight[i], eight[i + 4]));
    let max = larger(larger(four[0], four[2]), larger(four[1], four[3]));
    let max = if nan { f32::NAN } else { max };
    scores.iter_mut().for_each(|score| *score -= max);
    max
}

/// The larger of two values; NaN if either is (`f32::max` drops it).
#[inline(always)]
fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}
