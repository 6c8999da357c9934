//! Deviations of the INT8 projections (steps 4, 9 and 11) and of the down projection (step 13).

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis, concatenate, s};
use rayon::prelude::*;

use super::Change;
use super::changes::plain;
use crate::inputs::{DownWeight, Projection};
use crate::kernels::{SumOrder, matmul_down, matmul_i8};
use crate::policy::Site;
use crate::rounding::{Rounding, round_f32};
use crate::stages::{Context, Output, Stage, Trace};
use crate::tensor::TensorId as T;

/// How a kernel may turn sums into results: `(acc, w_scale, act_scale)`.
pub type Dequantize = fn(f32, f32, f32) -> f32;

/// What a kernel may add up instead of the exact INT32 sum over all of K.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    /// The contract's.
    Exact,
    /// FP32 products, added one after the other.
    Fp32,
    /// The first half of K.
    FirstHalf,
    /// All of K but its last 128 terms.
    WithoutTail,
    /// Two halves of K, each narrowed to BF16.
    Bf16Halves,
}

/// A projection done so.
pub fn projected(sums: Sums, dequantize: Dequantize) -> Change {
    Box::new(move |call| run(call.context, call.trace, call.stage, sums, dequantize))
}

/// The contract's way of applying scales: the column first.
pub fn column_first(acc: f32, w_scale: f32, act_scale: f32) -> f32 {
    (acc * w_scale) * act_scale
}

fn run(context: &Context<'_, '_>, trace: &Trace, stage: &Stage, sums: Sums, dequantize: Dequantize) -> Vec<Output> {
    let [id] = stage.writes else { return Vec::new() };
    let Some(p) = context.inputs.weights.projection(*id) else { return Vec::new() };
    let (codes, act_scale) = (trace.i8(p.codes), trace.f32(p.scales));
    let acc = summed(sums, codes, &p);
    plain(*id, Array2::from_shape_fn(acc.dim(), |(b, n)| dequantize(acc[(b, n)], p.weight_scale[n], act_scale[(b, 0)])))
}

fn summed(sums: Sums, codes: ArrayView2<'_, i8>, p: &Projection<'_>) -> Array2<f32> {
    let terms = codes.ncols();
    let exact = |from: usize, to: usize| {
        matmul_i8(codes.slice(s![.., from..to]), p.weight.slice(s![from..to, ..])).mapv(|sum| sum as f32)
    };
    let narrowed = |sum: Array2<f32>| sum.mapv(|x| round_f32(x, Rounding::Rne));
    match sums {
        Sums::Exact => exact(0, terms),
        Sums::FirstHalf => exact(0, terms / 2),
        Sums::WithoutTail => exact(0, terms.saturating_sub(128)),
        Sums::Bf16Halves => narrowed(narrowed(exact(0, terms / 2)) + narrowed(exact(terms / 2, terms))),
        Sums::Fp32 => {
            let mut values = Array2::zeros((codes.nrows(), p.weight.ncols()));
            values.axis_iter_mut(Axis(1)).into_par_iter().enumerate().for_each(|(n, mut column)| {
                for (sum, codes) in column.iter_mut().zip(codes.rows()) {
                    let products = codes.iter().zip(p.weight.column(n)).map(|(&x, &w)| f32::from(x) * f32::from(w));
                    *sum = products.fold(0f32, |sum, product| sum + product);
                }
            });
            values
        }
    }
}

/// Gate and up as prefill has them: BF16 activations times BF16 weights, without the INT8 codes.
pub fn bf16_activations(context: &Context<'_, '_>, trace: &Trace, stage: &Stage) -> Vec<Output> {
    let [id] = stage.writes else { return Vec::new() };
    let Some(p) = context.inputs.weights.projection(*id) else { return Vec::new() };
    let x = trace.widened(T::MlpNormIn, context.policy.at(Site::MlpIn));
    let weight = DownWeight::Int8 { codes: p.weight, scale: p.weight_scale };
    let order = SumOrder::cube(context.policy.freedom, x.ncols());
    plain(*id, matmul_down(x.view(), weight, &order))
}

/// What a kernel may do with the halves of the down projection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Halves {
    /// One accumulator over all of K.
    Unsplit,
    /// The second half is lost.
    SecondLost,
    /// Each is narrowed to BF16 before they are added.
    Bf16,
}

/// The down projection done so.
pub fn down(halves: Halves) -> Change {
    Box::new(move |call| {
        let (context, trace) = (call.context, call.trace);
        let x = trace.widened(T::MlpDownTile, context.policy.at(Site::Silu));
        let w = context.inputs.weights.w_down;
        let half = w.dim().0 / 2;
        let part = |from: usize, to: usize| {
            let order = SumOrder::cube(context.policy.freedom, to - from);
            matmul_down(x.slice(s![.., from..to]), w.terms(from..to), &order)
        };
        let nothing = || Array2::zeros((x.nrows(), w.dim().1));
        let narrowed = |part: Array2<f32>| part.mapv(|x| bf16::from_f32(x).to_f32());
        let parts = match halves {
            Halves::Unsplit => [part(0, 2 * half), nothing()],
            Halves::SecondLost => [part(0, half), nothing()],
            Halves::Bf16 => [narrowed(part(0, half)), narrowed(part(half, 2 * half))],
        };
        plain(T::DownAccParts, concatenate![Axis(0), parts[0], parts[1]])
    })
}
