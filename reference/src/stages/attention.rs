//! Steps 7 and 8: online softmax over a paged BF16 cache in tiles of 16 tokens, and the padding rows.

use half::bf16;
use ndarray::{Array2, ArrayView1};
use rayon::prelude::*;

use super::{Context, Output, Trace, narrowed};
use crate::elementary::exp;
use crate::geometry::{BATCH, TILE};
use crate::inputs::{LayerInputs, cache_row};
use crate::kernels::SumOrder;
use crate::policy::{Policy, Site};
use crate::rounding::round_f32;
use crate::tensor::TensorId as T;

/// Where attention finds the keys and values of a row: the cache before the step, overlaid with what
/// this step wrote.
#[derive(Clone, Copy, Debug)]
pub struct KvSource<'a, 'd> {
    inputs: &'a LayerInputs<'d>,
    trace: &'a Trace,
}

impl<'a, 'd> KvSource<'a, 'd> {
    /// Keys and values as `trace` wrote them (`KRows`, `VRows`) over `inputs.cache`.
    #[must_use]
    pub fn new(inputs: &'a LayerInputs<'d>, trace: &'a Trace) -> Self {
        Self { inputs, trace }
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
            None => self.inputs.cache.k.row_move(cache_row(self.inputs.geometry, token.0, kv_head)),
        }
    }

    /// The value of a token for a KV head, BF16 `[D]`.
    #[must_use]
    pub fn value(&self, token: (usize, Option<usize>), kv_head: usize) -> ArrayView1<'_, bf16> {
        match token.1 {
            Some(writer) => self.written(T::VRows, writer, kv_head),
            None => self.inputs.cache.v.row_move(cache_row(self.inputs.geometry, token.0, kv_head)),
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

impl<'a> RowMove<'a> for ndarray::ArrayView2<'a, bf16> {
    fn row_move(self, row: usize) -> ArrayView1<'a, bf16> {
        self.index_axis_move(ndarray::Axis(0), row)
    }
}

/// Steps 7 and 8 as a stage.
pub fn attention(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let geometry = context.inputs.geometry;
    let (dim, kv_heads, active) = (geometry.head_dim, geometry.num_key_value_heads, context.inputs.batch.active);
    let source = KvSource::new(context.inputs, trace);
    let pairs: Vec<(usize, usize)> = (0..active).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))).collect();
    let groups: Vec<Vec<f32>> = pairs
        .par_iter()
        .map(|&(b, kv)| {
            let length = context.inputs.batch.seq_lens[b];
            attend(context.inputs, context.policy, trace, &source.tokens(b, length), b, kv)
        })
        .collect();
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
    let scale = geometry.attention_scale();
    let qk_order = SumOrder::cube(freedom, dim);
    let widen = |view: ArrayView1<'_, bf16>| -> Vec<f32> { view.iter().map(|x| x.to_f32()).collect() };

    let mut max = vec![f32::NEG_INFINITY; group];
    let mut sum = vec![0f32; group];
    let mut out = vec![0f32; group * dim];
    for (index, tile) in tokens.chunks(TILE).enumerate() {
        let keys: Vec<Vec<f32>> = tile.iter().map(|&token| widen(source.key(token, kv_head))).collect();
        let values: Vec<Vec<f32>> = tile.iter().map(|&token| widen(source.value(token, kv_head))).collect();
        let pv_order = SumOrder::cube(freedom, tile.len());
        for j in 0..group {
            let q = queries.row(j);
            let q = q.as_slice().unwrap_or_default();
            // s = (q . k) * scale; tile maximum, NaN kept.
            let scores: Vec<f32> = keys.iter().map(|key| qk_order.sum(dim, |i| q[i] * key[i]) * scale).collect();
            let tile_max = scores.iter().copied().fold(f32::NEG_INFINITY, nan_max);
            // p = exp(s - m_t), narrowed before it is summed and multiplied.
            let probs: Vec<f32> =
                scores.iter().map(|&s| round_f32(exp(s - tile_max, freedom), policy.at(Site::Prob))).collect();
            let tile_sum = match &pv_order {
                SumOrder::Canonical => probs.iter().fold(0.0, |sum, p| sum + p),
                order => order.sum(probs.len(), |t| probs[t]),
            };
            let mut tile_out = vec![0f32; dim];
            for (d, slot) in tile_out.iter_mut().enumerate() {
                *slot = match &pv_order {
                    SumOrder::Canonical => probs.iter().zip(&values).fold(0.0, |sum, (p, value)| sum + p * value[d]),
                    order => order.sum(probs.len(), |t| probs[t] * values[t][d]),
                };
            }
            // Combine in tile order; the first tile has nothing to be combined with.
            let out = &mut out[j * dim..(j + 1) * dim];
            if index == 0 {
                (max[j], sum[j]) = (tile_max, tile_sum);
                out.copy_from_slice(&tile_out);
                continue;
            }
            let new_max = nan_max(max[j], tile_max);
            let (a, c) = (exp(max[j] - new_max, freedom), exp(tile_max - new_max, freedom));
            sum[j] = a * sum[j] + c * tile_sum;
            for (o, o_t) in out.iter_mut().zip(&tile_out) {
                *o = *o * a + o_t * c;
            }
            max[j] = new_max;
        }
    }
    for j in 0..group {
        for o in &mut out[j * dim..(j + 1) * dim] {
            *o /= sum[j];
        }
    }
    out
}

/// The larger of two values; NaN if either is (`f32::max` drops it).
fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}
