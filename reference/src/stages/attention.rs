//! Steps 7 and 8: online softmax over a paged BF16 cache in tiles of 16 tokens, and the padding rows.

use std::borrow::Cow;
use std::ops::Deref;

use half::bf16;
use ndarray::{ArrayView1, ArrayView2};
use pulp::Arch;
use rayon::prelude::*;

use super::rows::Rows;
use super::{Context, Output, Trace, contiguous, narrowed, under};
use crate::elementary::exp_all;
use crate::geometry::{BATCH, PAGE, TILE};
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
    /// The rows of the batch that the trace's tensors have.
    rows: Rows,
    /// The caches as slices, where their rows lie one after the other.
    slices: Option<(&'d [bf16], &'d [bf16])>,
}

impl<'a, 'd> KvSource<'a, 'd> {
    /// Keys and values as `trace` wrote them (`KRows`, `VRows`) over `inputs.cache`.
    #[must_use]
    pub fn new(inputs: &'a LayerInputs<'d>, trace: &'a Trace) -> Self {
        Self::over(inputs, trace, Rows::all())
    }

    /// The same over a trace that has `rows` of the batch.
    fn over(inputs: &'a LayerInputs<'d>, trace: &'a Trace, rows: Rows) -> Self {
        let slices = inputs.cache.k.to_slice().zip(inputs.cache.v.to_slice());
        Self { inputs, trace, rows, slices }
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
        let batch = self.inputs.batch;
        let mut tokens = Vec::new();
        for start in (0..length).step_by(PAGE) {
            // Slots of a page follow one another, and most pages are not written in a step.
            let Some(first) = batch.slot_of(b, start) else { continue };
            let slots = first..first + PAGE.min(length - start);
            let written = batch.slots.iter().any(|slot| slots.contains(slot));
            tokens.extend(slots.map(|slot| (slot, if written { self.writer(slot) } else { None })));
        }
        tokens
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

    /// The keys (`KRows`) or values (`VRows`) of tokens for a KV head. Tokens of a page that were there before the step
    /// are one piece of it.
    fn rows_of(&self, id: T, tokens: &[(usize, Option<usize>)], kv_head: usize) -> Vec<Cow<'_, [bf16]>> {
        let row = |&token: &(usize, Option<usize>)| match id {
            T::KRows => self.key(token, kv_head),
            _ => self.value(token, kv_head),
        };
        let slice = self.slices.map(|(k, v)| if id == T::KRows { k } else { v });
        let follows = |pair: &[(usize, Option<usize>)]| pair[0].1.is_none() && pair[1] == (pair[0].0 + 1, None);
        match (slice, tokens) {
            (Some(all), [(slot, None), ..]) if tokens.windows(2).all(follows) && slot % PAGE + tokens.len() <= PAGE => {
                let (dim, row) = (self.inputs.geometry.head_dim, cache_row(self.inputs.geometry, *slot, kv_head));
                all[row * dim..][..tokens.len() * dim].chunks_exact(dim).map(Cow::Borrowed).collect()
            }
            _ => tokens.iter().map(|token| contiguous(row(token))).collect(),
        }
    }

    fn written(&self, id: T, writer: usize, kv_head: usize) -> ArrayView1<'_, bf16> {
        let dim = self.inputs.geometry.head_dim;
        self.trace.bf16(id).row_move(self.rows.of(writer)).slice_move(ndarray::s![kv_head * dim..(kv_head + 1) * dim])
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
    let (geometry, batch) = (context.inputs.geometry, context.inputs.batch);
    let (kv_heads, width) = (geometry.num_key_value_heads, geometry.group() * geometry.head_dim);
    let source = KvSource::over(context.inputs, trace, context.rows);
    // Active rows come first, and each of them is computed.
    let tokens: Vec<_> = (0..batch.active).map(|b| source.tokens(b, batch.seq_lens[b])).collect();
    let pairs: Vec<(usize, usize)> = (0..batch.active).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))).collect();
    let groups: Vec<Vec<f32>> =
        pairs.into_par_iter().map(|(b, kv)| attend_from(&source, context.policy, &tokens[b], b, kv)).collect();
    narrowed(
        context,
        T::AttnOut,
        Site::Attn,
        #[inline(always)]
        |r, out| {
            // Step 8: padding rows equal row 0, bit for bit.
            let b = if context.batch_row(r) < batch.active { r } else { 0 };
            for (out, values) in out.chunks_exact_mut(width).zip(&groups[b * kv_heads..]) {
                out.copy_from_slice(values);
            }
        },
    )
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
    attend_from(&KvSource::new(inputs, trace), policy, tokens, b, kv_head)
}

/// [`attend`] for row `r` of the trace that `source` reads.
fn attend_from(
    source: &KvSource<'_, '_>,
    policy: &Policy,
    tokens: &[(usize, Option<usize>)],
    r: usize,
    kv_head: usize,
) -> Vec<f32> {
    let geometry = source.inputs.geometry;
    let (dim, group, freedom) = (geometry.head_dim, geometry.group(), policy.freedom);
    let at = (r * geometry.num_key_value_heads + kv_head) * BATCH;
    let queries = source.trace.widened_rows(T::AllQPadded, policy.at(Site::Q), at..at + group);
    let queries = queries.as_slice().unwrap_or_default();
    let (scale, prob) = (geometry.attention_scale(), policy.at(Site::Prob));
    let (qk_order, pv_order) = (SumOrder::cube(freedom, dim), |tokens| SumOrder::cube(freedom, tokens));
    let whole_tile = pv_order(TILE);
    let arch = Arch::new();

    let mut max = vec![f32::NEG_INFINITY; group];
    let mut sum = vec![0f32; group];
    let mut out = vec![0f32; group * dim];
    let mut tile_out = vec![0f32; group * dim];
    let mut scores = vec![0f32; group * PAGE];
    let mut factors = vec![[0f32; 2]; group * PAGE / TILE];
    // The tiles of a page go through each step side by side, so that there is enough of each to be worth a loop.
    for (page, tokens) in tokens.chunks(PAGE).enumerate() {
        let keys = source.rows_of(T::KRows, tokens, kv_head);
        let values = source.rows_of(T::VRows, tokens, kv_head);
        let keys: Vec<&[bf16]> = keys.iter().map(Deref::deref).collect();
        let values: Vec<&[bf16]> = values.iter().map(Deref::deref).collect();
        let probs = &mut scores[..group * tokens.len()];
        let factors = &mut factors[..group * tokens.len().div_ceil(TILE)];
        // s = (q . k) * scale, tile by tile.
        for (keys, probs) in keys.chunks(TILE).zip(probs.chunks_mut(group * TILE)) {
            dot_rows(queries, keys, &qk_order, probs);
        }
        // p = exp(s - m_t), narrowed before it is summed and multiplied; a tile's maximum keeps a NaN.
        arch.dispatch(
            #[inline(always)]
            || {
                let tiles =
                    tokens.chunks(TILE).zip(probs.chunks_mut(group * TILE)).zip(factors.chunks_exact_mut(group));
                for ((tile, probs), factors) in tiles {
                    let rows = probs.chunks_exact_mut(tile.len()).zip(&mut max).zip(factors);
                    for ((probs, max), factors) in rows {
                        probs.iter_mut().for_each(|s| *s *= scale);
                        let tile_max = probs.iter().copied().fold(f32::NEG_INFINITY, nan_max);
                        probs.iter_mut().for_each(|s| *s -= tile_max);
                        // a = exp(m - m'), c = exp(m_t - m').
                        let new_max = nan_max(*max, tile_max);
                        *factors = [*max - new_max, tile_max - new_max];
                        *max = new_max;
                    }
                }
            },
        );
        exp_all(probs, freedom);
        exp_all(factors.as_flattened_mut(), freedom);
        arch.dispatch(
            #[inline(always)]
            || {
                under(
                    prob,
                    #[inline(always)]
                    |rule| probs.iter_mut().for_each(|p| *p = round_f32(*p, rule)),
                );
            },
        );
        // Combine in tile order; the first tile has nothing to be combined with.
        let tiles = values.chunks(TILE).zip(probs.chunks(group * TILE)).zip(factors.chunks_exact(group));
        for (index, ((values, probs), factors)) in tiles.enumerate() {
            let first = page == 0 && index == 0;
            let last_tile = (values.len() < TILE).then(|| pv_order(values.len()));
            let order = last_tile.as_ref().unwrap_or(&whole_tile);
            weighted_sum(probs, values, order, if first { &mut out } else { &mut tile_out });
            for (j, probs) in probs.chunks_exact(values.len()).enumerate() {
                let tile_sum = match order {
                    SumOrder::Canonical => probs.iter().fold(0.0, |sum, p| sum + p),
                    order => order.sum(probs.len(), |t| probs[t]),
                };
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
