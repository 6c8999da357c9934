//! Steps 7 and 8: online softmax over a paged BF16 cache in tiles of 16 tokens, and the padding rows.

use std::ops::Deref;

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2};
use pulp::Arch;
use rayon::prelude::*;

use super::{Context, Output, Trace, contiguous, narrowed};
use crate::elementary::exp_all;
use crate::geometry::{BATCH, TILE};
use crate::inputs::{LayerInputs, cache_row};
use crate::kernels::{SumOrder, kernels};
use crate::policy::{Policy, Site};
use crate::rounding::round_f32;
use crate::tensor::TensorId as T;

/// Where attention finds the keys and values of a row: the cache before the step, overlaid with what
/// this step wrote.
#[derive(Clone, Copy, Debug)]
pub struct KvSource<'a, 'd> {
    inputs: &'a LayerInputs<'d>,
    trace: &'a Trace,
    /// The caches as slices, where their rows lie one after the other.
    slices: Option<(&'d [bf16], &'d [bf16])>,
}

impl<'a, 'd> KvSource<'a, 'd> {
    /// Keys and values as `trace` wrote them (`KRows`, `VRows`) over `inputs.cache`.
    #[must_use]
    pub fn new(inputs: &'a LayerInputs<'d>, trace: &'a Trace) -> Self {
        let slices = inputs.cache.k.to_slice().zip(inputs.cache.v.to_slice());
        Self { inputs, trace, slices }
    }

    /// The row of this step whose K and V end up in `slot`. An active row wins over padding rows; of
    /// padding rows the last wins.
    #[must_use]
    pub fn writer(&self, slot: usize) -> Option<usize> {
        let batch = self.inputs.batch;
        (0..batch.active)
            .find(|&b| batch.slots[b] == slot)
            .or_else(|| (batch.active..BATCH).rev().find(|&b| batch.slots[b] == slot))
    }

    /// The slots of the first `length` tokens of row `b`, in order, with the row of this step that wrote
    /// each. Tokens without a page are left out.
    #[must_use]
    pub fn tokens(&self, b: usize, length: usize) -> Vec<(usize, Option<usize>)> {
        let slots = (0..length).filter_map(|position| self.inputs.batch.slot_of(b, position));
        slots.map(|slot| (slot, self.writer(slot))).collect()
    }

    /// The key of a token for a KV head, BF16 `[D]`.
    #[must_use]
    pub fn key(&self, token: (usize, Option<usize>), kv_head: usize) -> ArrayView1<'_, bf16> {
        match token.1 {
            Some(writer) => self.written(T::KRows, writer, kv_head),
            None => self.cached(self.slices.map(|(k, _)| k), self.inputs.cache.k, token.0, kv_head),
        }
    }

    /// The value of a token for a KV head, BF16 `[D]`.
    #[must_use]
    pub fn value(&self, token: (usize, Option<usize>), kv_head: usize) -> ArrayView1<'_, bf16> {
        match token.1 {
            Some(writer) => self.written(T::VRows, writer, kv_head),
            None => self.cached(self.slices.map(|(_, v)| v), self.inputs.cache.v, token.0, kv_head),
        }
    }

    /// A row of a cache.
    fn cached(
        &self,
        slice: Option<&'d [bf16]>,
        cache: ArrayView2<'d, bf16>,
        slot: usize,
        kv_head: usize,
    ) -> ArrayView1<'d, bf16> {
        let row = cache_row(self.inputs.geometry, slot, kv_head);
        match slice {
            Some(all) => ArrayView1::from(&all[row * cache.ncols()..][..cache.ncols()]),
            None => cache.row_move(row),
        }
    }

    fn written(&self, id: T, writer: usize, kv_head: usize) -> ArrayView1<'_, bf16> {
        let dim = self.inputs.geometry.head_dim;
        self.trace.bf16(id).row_move(writer).slice_move(ndarray::s![kv_head * dim..(kv_head + 1) * dim])
    }
}

/// `ArrayView2::row` that keeps the view's own lifetime.
trait RowMove<'a> {
    fn row_move(self, row: usize) -> ArrayView1<'a, bf16>;
}

impl<'a> RowMove<'a> for ArrayView2<'a, bf16> {
    fn row_move(self, row: usize) -> ArrayView1<'a, bf16> {
        self.index_axis_move(ndarray::Axis(0), row)
    }
}

/// Steps 7 and 8 as a stage.
pub fn attention(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let geometry = context.inputs.geometry;
    let (dim, kv_heads, active) = (geometry.head_dim, geometry.num_key_value_heads, context.inputs.batch.active);
    let source = KvSource::new(context.inputs, trace);
    let tokens: Vec<_> = (0..active).map(|b| source.tokens(b, context.inputs.batch.seq_lens[b])).collect();
    let pairs: Vec<(usize, usize)> = (0..active).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))).collect();
    let groups: Vec<Vec<f32>> =
        pairs.par_iter().map(|&(b, kv)| attend(context.inputs, context.policy, trace, &tokens[b], b, kv)).collect();
    let group = geometry.group();
    let mut wide = Array2::zeros((BATCH, geometry.q_width()));
    for (&(b, kv), values) in pairs.iter().zip(&groups) {
        for (n, &value) in values.iter().enumerate() {
            wide[(b, kv * group * dim + n)] = value;
        }
    }
    // Step 8: padding rows equal row 0, bit for bit.
    let row0 = wide.row(0).to_owned();
    for b in active..BATCH {
        wide.row_mut(b).assign(&row0);
    }
    narrowed(context, T::AttnOut, Site::Attn, wide)
}

/// Attention of one row's queries that share `kv_head` over `tokens`, before the cast: `group * D`
/// FP32 values, query by query (step 7).
#[must_use]
pub fn attend(
    inputs: &LayerInputs<'_>,
    policy: &Policy,
    trace: &Trace,
    tokens: &[(usize, Option<usize>)],
    b: usize,
    kv_head: usize,
) -> Vec<f32> {
    let geometry = inputs.geometry;
    let (dim, group, freedom) = (geometry.head_dim, geometry.group(), policy.freedom);
    let source = KvSource::new(inputs, trace);
    let at = (b * geometry.num_key_value_heads + kv_head) * BATCH;
    let queries = trace.widened_rows(T::AllQPadded, policy.at(Site::Q), at..at + group);
    let queries = queries.as_slice().unwrap_or_default();
    let (scale, prob) = (geometry.attention_scale(), policy.at(Site::Prob));
    let qk_order = SumOrder::cube(freedom, dim);

    let mut max = vec![f32::NEG_INFINITY; group];
    let mut sum = vec![0f32; group];
    let mut out = vec![0f32; group * dim];
    let mut tile_out = vec![0f32; group * dim];
    let mut scores = vec![0f32; group * TILE];
    for (index, tile) in tokens.chunks(TILE).enumerate() {
        let keys: Vec<_> = tile.iter().map(|&token| contiguous(source.key(token, kv_head))).collect();
        let values: Vec<_> = tile.iter().map(|&token| contiguous(source.value(token, kv_head))).collect();
        let keys: Vec<&[bf16]> = keys.iter().map(Deref::deref).collect();
        let values: Vec<&[bf16]> = values.iter().map(Deref::deref).collect();
        let pv_order = SumOrder::cube(freedom, tile.len());
        // s = (q . k) * scale.
        let probs = &mut scores[..group * tile.len()];
        dot_rows(queries, &keys, &qk_order, probs);
        // p = exp(s - m_t), narrowed before it is summed and multiplied; a tile's maximum keeps a NaN.
        let mut tile_max = vec![f32::NEG_INFINITY; group];
        Arch::new().dispatch(|| {
            for (probs, tile_max) in probs.chunks_exact_mut(tile.len()).zip(&mut tile_max) {
                probs.iter_mut().for_each(|s| *s *= scale);
                *tile_max = probs.iter().copied().fold(f32::NEG_INFINITY, nan_max);
                probs.iter_mut().for_each(|s| *s -= *tile_max);
            }
        });
        exp_all(probs, freedom);
        Arch::new().dispatch(|| probs.iter_mut().for_each(|p| *p = round_f32(*p, prob)));
        weighted_sum(probs, &values, &pv_order, &mut tile_out);
        let tile_sum = |j: usize| {
            let probs = &probs[j * tile.len()..(j + 1) * tile.len()];
            match &pv_order {
                SumOrder::Canonical => probs.iter().fold(0.0, |sum, p| sum + p),
                order => order.sum(probs.len(), |t| probs[t]),
            }
        };
        // Combine in tile order; the first tile has nothing to be combined with. a = exp(m - m'), c = exp(m_t - m').
        let mut factors: Vec<f32> = Vec::with_capacity(2 * group);
        for (max, tile_max) in max.iter_mut().zip(&tile_max) {
            let new_max = nan_max(*max, *tile_max);
            factors.extend([*max - new_max, tile_max - new_max]);
            *max = new_max;
        }
        if index > 0 {
            exp_all(&mut factors, freedom);
        }
        for j in 0..group {
            let (out, tile_out) = (&mut out[j * dim..(j + 1) * dim], &tile_out[j * dim..(j + 1) * dim]);
            if index == 0 {
                sum[j] = tile_sum(j);
                out.copy_from_slice(tile_out);
                continue;
            }
            let (a, c) = (factors[2 * j], factors[2 * j + 1]);
            sum[j] = a * sum[j] + c * tile_sum(j);
            Arch::new().dispatch(|| {
                for (o, o_t) in out.iter_mut().zip(tile_out) {
                    *o = *o * a + o_t * c;
                }
            });
        }
    }
    for j in 0..group {
        for o in &mut out[j * dim..(j + 1) * dim] {
            *o /= sum[j];
        }
    }
    out
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

/// The larger of two values; NaN if either is (`f32::max` drops it).
#[inline(always)]
fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}
