//! Steps 7 and 8: online softmax over a paged BF16 cache in tiles of 16 tokens, and the padding rows.

use std::borrow::Cow;

use half::bf16;
use ndarray::{ArrayView1, ArrayView2};
use rayon::prelude::*;

use super::rows::Rows;
use super::{Context, Output, Trace, contiguous, narrowed};
use crate::geometry::{BATCH, PAGE, TILE};
use crate::inputs::{LayerInputs, cache_row};
use crate::policy::{Policy, Site};
use crate::softmax::Softmax;
use crate::tensor::TensorId as T;

/// A token's slot, and the row of this step that wrote it.
type Token = (usize, Option<usize>);

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
    pub fn tokens(&self, b: usize, length: usize) -> Vec<Token> {
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
    pub fn key(&self, token: Token, kv_head: usize) -> ArrayView1<'_, bf16> {
        match token.1 {
            Some(writer) => self.written(T::KRows, writer, kv_head),
            None => self.cached(self.slices.map(|(k, _)| k), self.inputs.cache.k, token.0, kv_head),
        }
    }

    /// The value of a token for a KV head, BF16 `[D]`.
    #[must_use]
    pub fn value(&self, token: Token, kv_head: usize) -> ArrayView1<'_, bf16> {
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

    /// Where tokens lie one after the other: in a page, and there before the step.
    fn runs<'t>(&self, tokens: &'t [Token]) -> Vec<&'t [Token]> {
        let follows = |a: &Token, b: &Token| {
            self.slices.is_some() && a.1.is_none() && *b == (a.0 + 1, None) && !b.0.is_multiple_of(PAGE)
        };
        tokens.chunk_by(follows).collect()
    }

    /// The keys (`KRows`) or values (`VRows`) of runs of tokens for a KV head, `D` by `D`.
    fn pieces<'s>(&'s self, id: T, runs: &'s [&[Token]], kv_head: usize) -> Vec<Cow<'s, [bf16]>> {
        let (dim, slice) =
            (self.inputs.geometry.head_dim, self.slices.map(|(k, v)| if id == T::KRows { k } else { v }));
        let piece = |run: &&[Token]| match (slice, run[0]) {
            (Some(all), (slot, None)) => {
                let row = cache_row(self.inputs.geometry, slot, kv_head);
                Cow::Borrowed(&all[row * dim..][..run.len() * dim])
            }
            (_, token) if id == T::KRows => contiguous(self.key(token, kv_head)),
            (_, token) => contiguous(self.value(token, kv_head)),
        };
        runs.iter().map(piece).collect()
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
    let runs: Vec<_> = tokens.iter().map(|tokens| source.runs(tokens)).collect();
    let pairs: Vec<(usize, usize)> = (0..batch.active).flat_map(|b| (0..kv_heads).map(move |kv| (b, kv))).collect();
    let groups: Vec<Vec<f32>> = pairs
        .par_iter()
        .enumerate()
        .map(|(index, &(b, kv))| {
            let next = pairs.get(index + 1).map(|&(b, kv)| (runs[b].as_slice(), kv));
            attend_from(&source, context.policy, &runs[b], b, kv, next)
        })
        .collect();
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
    tokens: &[Token],
    b: usize,
    kv_head: usize,
) -> Vec<f32> {
    let source = KvSource::new(inputs, trace);
    attend_from(&source, policy, &source.runs(tokens), b, kv_head, None)
}

/// [`attend`] for row `r` of the trace that `source` reads; `next` are the runs and the KV head that come after.
fn attend_from(
    source: &KvSource<'_, '_>,
    policy: &Policy,
    runs: &[&[Token]],
    r: usize,
    kv_head: usize,
    next: Option<(&[&[Token]], usize)>,
) -> Vec<f32> {
    let geometry = source.inputs.geometry;
    let at = (r * geometry.num_key_value_heads + kv_head) * BATCH;
    let queries = source.trace.widened_rows(T::AllQPadded, policy.at(Site::Q), at..at + geometry.group());
    let queries = queries.as_slice().unwrap_or_default();
    let [keys, values] = [T::KRows, T::VRows].map(|id| source.pieces(id, runs, kv_head));
    let [keys, values] = [&keys, &values].map(|pieces| rows(pieces, geometry.head_dim));
    // A page of them is as much as is read before anything is asked for.
    let next = next.map(|(runs, kv_head)| source.pieces(T::KRows, &runs[..runs.len().min(1)], kv_head));
    let next = rows(next.as_deref().unwrap_or_default(), geometry.head_dim);
    let softmax =
        Softmax { tile: TILE, scale: geometry.attention_scale(), prob: policy.at(Site::Prob), freedom: policy.freedom };
    let mut out = vec![0f32; queries.len()];
    softmax.attend(queries, &keys, &values, &next, &mut out);
    out
}

/// The rows of `dim` values that lie one after the other in each piece.
fn rows<'p>(pieces: &'p [Cow<'_, [bf16]>], dim: usize) -> Vec<&'p [bf16]> {
    let mut rows = Vec::with_capacity(pieces.iter().map(|piece| piece.len() / dim).sum());
    pieces.iter().for_each(|piece| rows.extend(piece.chunks_exact(dim)));
    rows
}
