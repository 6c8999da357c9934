//! Steps 12 and 13: SwiGLU, the down projection and the layer's output.

use ndarray::{Axis, concatenate, s};
use pulp::Arch;

use super::{Context, Output, Trace, contiguous, narrowed, one_nan, under};
use crate::elementary::{exp_all, reciprocal};
use crate::kernels::{SumOrder, matmul_down};
use crate::policy::{Freedom, Site};
use crate::rounding::round_f32;
use crate::tensor::{Tensor, TensorId as T};

/// Step 12: `g = gate * post_inv; u = up * post_inv; sig = 1 / (exp(-g) + 1);
/// act = cast@silu((g * sig) * u)`.
pub fn silu(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let (gate, up, inv) = (trace.f32(T::GateAccAll), trace.f32(T::UpAccAll), trace.f32(T::InvRmsTile));
    let freedom = context.policy.freedom;
    narrowed(
        context,
        T::MlpDownTile,
        Site::Silu,
        #[inline(always)]
        |r, out| {
            let inv = inv[(r, 0)];
            let (gate, up) = (contiguous(gate.row(r)), contiguous(up.row(r)));
            let step = |exp: f32, reciprocal: &dyn Fn(f32) -> f32, gate: f32, up: f32| {
                ((gate * inv) * reciprocal(exp + 1.0)) * (up * inv)
            };
            out.iter_mut().zip(&*gate).for_each(|(out, gate)| *out = -(gate * inv));
            exp_all(out, freedom);
            match freedom {
                // Nothing to draw: a loop that vectorizes.
                Freedom::Canonical | Freedom::Emulated => {
                    for ((out, gate), up) in out.iter_mut().zip(&*gate).zip(&*up) {
                        *out = step(*out, &|x| 1.0 / x, *gate, *up);
                    }
                }
                Freedom::Sampled { .. } | Freedom::Enlarged { .. } => {
                    for ((out, gate), up) in out.iter_mut().zip(&*gate).zip(&*up) {
                        *out = step(*out, &|x| reciprocal(x, freedom), *gate, *up);
                    }
                }
            }
        },
    )
}

/// Step 13: BF16 x BF16 with FP32 accumulation, K split in two halves with separate accumulators.
pub fn down(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::MlpDownTile, context.policy.at(Site::Silu));
    let w = context.inputs.weights.w_down;
    let half = w.dim().0 / 2;
    let order = SumOrder::cube(context.policy.freedom, half);
    let part = |from: usize, to: usize| matmul_down(x.slice(s![.., from..to]), w.terms(from..to), &order);
    let mut values = concatenate![Axis(0), part(0, half), part(half, 2 * half)];
    Arch::new().dispatch(
        #[inline(always)]
        || one_nan(values.as_slice_mut().unwrap_or_default()),
    );
    vec![Output { id: T::DownAccParts, tensor: Tensor::F32(values), wide: None }]
}

/// Step 13: `db = cast@down(part0 + part1); out = cast@out(f32(db) + f32(h1b))`.
pub fn out(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let parts = trace.f32(T::DownAccParts);
    let h1b = trace.widened(T::PostNormPartial, context.policy.at(Site::Residual));
    let rule = context.policy.at(Site::Down);
    narrowed(
        context,
        T::Out,
        Site::Out,
        #[inline(always)]
        |r, out| {
            let half = parts.nrows() / 2;
            let (part0, part1, h1b) =
                (contiguous(parts.row(r)), contiguous(parts.row(half + r)), contiguous(h1b.row(r)));
            under(
                rule,
                #[inline(always)]
                |rule| {
                    for (((out, part0), part1), h1b) in out.iter_mut().zip(&*part0).zip(&*part1).zip(&*h1b) {
                        *out = round_f32(part0 + part1, rule) + h1b;
                    }
                },
            );
        },
    )
}
