//! Deviations of attention and of its padding rows (steps 7 and 8).

use half::bf16;
use ndarray::Array2;
use rayon::prelude::*;

use super::Change;
use super::changes::narrowed;
use crate::elementary::exp;
use crate::geometry::{BATCH, TILE};
use crate::inputs::LayerInputs;
use crate::kernels::SumOrder;
use crate::policy::{Policy, Site};
use crate::rounding::round_f32;
use crate::stages::{Context, KvSource, Output, Trace};
use crate::tensor::TensorId as T;

/// How a kernel may compute attention otherwise; the contract is the default.
#[derive(Clone, Copy, Default)]
pub struct Attention {
    /// How tiles are combined.
    pub combine: Combine,
    /// Probabilities are added up before they are narrowed.
    pub sum_unrounded: bool,
    /// What scores are multiplied by instead of `D^-0.5`.
    pub scale: Option<fn(usize) -> f32>,
    /// Query heads take KV heads in turn, not group by group.
    pub heads_in_turn: bool,
}

/// How tiles of the online softmax are combined.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Combine {
    /// `l = a*l + c*l_t; o = o*a + o_t*c`.
    #[default]
    Contract,
    /// What came before is not rescaled to the new maximum: `a` is left out.
    OldNotRescaled,
    /// The new tile is not rescaled to the maximum so far: `c` is left out.
    NewNotRescaled,
    /// The sum is added up without either factor.
    SumNotRescaled,
    /// The sum of the last tile alone divides.
    LastSum,
    /// The products are fused into the additions.
    Fused,
}

/// Attention done so.
pub fn attended(how: Attention) -> Change {
    Box::new(move |call| run(call.context, call.trace, how))
}

fn run(context: &Context<'_, '_>, trace: &Trace, how: Attention) -> Vec<Output> {
    let (geometry, batch) = (context.inputs.geometry, context.inputs.batch);
    let dim = geometry.head_dim;
    let source = KvSource::new(context.inputs, trace);
    let heads: Vec<(usize, usize)> =
        (0..batch.active).flat_map(|b| (0..geometry.num_attention_heads).map(move |head| (b, head))).collect();
    let values: Vec<Vec<f32>> =
        heads.par_iter().map(|&(b, head)| attend(&source, context, trace, (b, head), how)).collect();
    let mut wide = Array2::zeros((BATCH, geometry.q_width()));
    for b in 0..BATCH {
        let row = if b < batch.active { b } else { 0 };
        for head in 0..geometry.num_attention_heads {
            for (d, &value) in values[row * geometry.num_attention_heads + head].iter().enumerate() {
                wide[(b, head * dim + d)] = value;
            }
        }
    }
    narrowed(context, T::AttnOut, Site::Attn, wide)
}

/// One head of one row, before the cast.
fn attend(
    source: &KvSource<'_, '_>,
    context: &Context<'_, '_>,
    trace: &Trace,
    (b, head): (usize, usize),
    how: Attention,
) -> Vec<f32> {
    let (geometry, policy): (_, &Policy) = (context.inputs.geometry, context.policy);
    let (dim, freedom, rule) = (geometry.head_dim, policy.freedom, policy.at(Site::Prob));
    let tokens = source.tokens(b, context.inputs.batch.seq_lens[b]);
    let kv_head = if how.heads_in_turn { head % geometry.num_key_value_heads } else { head / geometry.group() };
    let row = (b * geometry.num_key_value_heads + head / geometry.group()) * BATCH + head % geometry.group();
    let q = trace.widened_rows(T::AllQPadded, policy.at(Site::Q), row..row + 1);
    let scale = how.scale.map_or_else(|| geometry.attention_scale(), |scale| scale(dim));
    let dot = SumOrder::cube(freedom, dim);
    let (mut max, mut sum, mut out) = (f32::NEG_INFINITY, 0f32, vec![0f32; dim]);
    for (index, tile) in tokens.chunks(TILE).enumerate() {
        let widened = |values: ndarray::ArrayView1<'_, bf16>| values.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let values: Vec<Vec<f32>> = tile.iter().map(|&token| widened(source.value(token, kv_head))).collect();
        let scores: Vec<f32> = tile
            .iter()
            .map(|&token| {
                let key = widened(source.key(token, kv_head));
                dot.sum(dim, |i| q[(0, i)] * key[i]) * scale
            })
            .collect();
        let larger = |a: f32, b: f32| if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) };
        let tile_max = scores.iter().copied().fold(f32::NEG_INFINITY, larger);
        let wide: Vec<f32> = scores.iter().map(|s| exp(s - tile_max, freedom)).collect();
        let probs: Vec<f32> = wide.iter().map(|&p| round_f32(p, rule)).collect();
        let summed = if how.sum_unrounded { &wide } else { &probs };
        let tile_sum = match SumOrder::vector(freedom, tile.len(), TILE) {
            SumOrder::Canonical => summed.iter().fold(0.0, |sum, p| sum + p),
            order => order.sum(tile.len(), |t| summed[t]),
        };
        let weighted = SumOrder::cube(freedom, tile.len());
        let tile_out: Vec<f32> = (0..dim)
            .map(|d| match &weighted {
                SumOrder::Canonical => (0..tile.len()).fold(0.0, |sum, t| sum + probs[t] * values[t][d]),
                order => order.sum(tile.len(), |t| probs[t] * values[t][d]),
            })
            .collect();
        let new_max = larger(max, tile_max);
        let (a, c) = (exp(max - new_max, freedom), exp(tile_max - new_max, freedom));
        max = new_max;
        if index == 0 {
            (sum, out) = (tile_sum, tile_out);
            continue;
        }
        let (a, c) = match how.combine {
            Combine::OldNotRescaled => (1.0, c),
            Combine::NewNotRescaled => (a, 1.0),
            _ => (a, c),
        };
        sum = match how.combine {
            Combine::SumNotRescaled => sum + tile_sum,
            Combine::LastSum => tile_sum,
            Combine::Fused => c.mul_add(tile_sum, a * sum),
            _ => a * sum + c * tile_sum,
        };
        for (o, o_t) in out.iter_mut().zip(&tile_out) {
            *o = if how.combine == Combine::Fused { o_t.mul_add(c, *o * a) } else { *o * a + o_t * c };
        }
    }
    out.iter().map(|o| o / sum).collect()
}

/// What padding rows hold instead of row 0's attention.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// Zeros.
    Zero,
    /// What memory held: NaN, as a run that poisons its memory first finds it.
    NotFilled,
    /// Row 0 of the step before: its attention without the newest token.
    Stale,
    /// The last active row.
    LastRow,
    /// Row 1.
    Row1,
}

/// Padding rows done so.
pub fn padded(how: Padding) -> Change {
    Box::new(move |call| {
        let batch = call.context.inputs.batch;
        let mut outputs = call.run();
        let earlier = (how == Padding::Stale).then(|| {
            let mut earlier = batch.clone();
            earlier.seq_lens[0] = earlier.seq_lens[0].saturating_sub(1).max(1);
            let inputs = LayerInputs { batch: &earlier, ..call.context.inputs.view() };
            call.run_on(&inputs)
        });
        let rule = call.context.policy.at(Site::Attn);
        for output in &mut outputs {
            let of = |outputs: &[Output], b: usize| -> Vec<f32> {
                let output = outputs.iter().find(|o| o.id == output.id);
                output.map_or_else(Vec::new, |o| o.tensor.bf16().row(b).iter().map(|x| x.to_f32()).collect())
            };
            let row = match (how, &earlier) {
                (Padding::NotFilled, _) => vec![f32::NAN; output.tensor.shape()[1]],
                (Padding::Stale, Some(earlier)) => of(earlier, 0),
                (Padding::LastRow, _) => of(std::slice::from_ref(output), batch.active - 1),
                (Padding::Row1, _) => of(std::slice::from_ref(output), 1),
                _ => vec![0.0; output.tensor.shape()[1]],
            };
            super::changes::recast(output, rule, |(b, n), value| if b < batch.active { value } else { row[n] });
        }
        outputs
    })
}
