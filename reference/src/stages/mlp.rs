//! Steps 12 and 13: SwiGLU, the down projection and the layer's output.

use ndarray::{Axis, concatenate, s};

use super::{Context, Output, Trace, by_rows, contiguous, narrowed, plain};
use crate::elementary::{exp_all, reciprocal};
use crate::geometry::BATCH;
use crate::kernels::{SumOrder, matmul_down};
use crate::policy::{Freedom, Site};
use crate::rounding::round_f32;
use crate::tensor::TensorId as T;

/// Step 12: `g = gate * post_inv; u = up * post_inv; sig = 1 / (exp(-g) + 1);
/// act = cast@silu((g * sig) * u)`.
pub fn silu(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let (gate, up, inv) = (trace.f32(T::GateAccAll), trace.f32(T::UpAccAll), trace.f32(T::InvRmsTile));
    let freedom = context.policy.freedom;
    let wide = by_rows(&context.equal_to, gate.ncols(), |b, out| {
        let inv = inv[(b, 0)];
        let (gate, up) = (contiguous(gate.row(b)), contiguous(up.row(b)));
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
    });
    narrowed(context, T::MlpDownTile, Site::Silu, wide)
}

/// Step 13: BF16 x BF16 with FP32 accumulation, K split in two halves with separate accumulators.
pub fn down(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::MlpDownTile, context.policy.at(Site::Silu));
    let w = context.inputs.weights.w_down;
    let half = w.dim().0 / 2;
    let order = SumOrder::cube(context.policy.freedom, half);
    let part = |from: usize, to: usize| matmul_down(x.slice(s![.., from..to]), w.terms(from..to), &order);
    let parts = [part(0, half), part(half, 2 * half)];
    let stacked = concatenate![Axis(0), parts[0], parts[1]];
    plain(T::DownAccParts, stacked)
}

/// Step 13: `db = cast@down(part0 + part1); out = cast@out(f32(db) + f32(h1b))`.
pub fn out(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let parts = trace.f32(T::DownAccParts);
    let h1b = trace.widened(T::PostNormPartial, context.policy.at(Site::Residual));
    let rule = context.policy.at(Site::Down);
    let wide = by_rows(&context.equal_to, h1b.ncols(), |b, out| {
        let (part0, part1, h1b) = (contiguous(parts.row(b)), contiguous(parts.row(BATCH + b)), contiguous(h1b.row(b)));
        for (n, out) in out.iter_mut().enumerate() {
            *out = round_f32(part0[n] + part1[n], rule) + h1b[n];
        }
    });
    narrowed(context, T::Out, Site::Out, wide)
}
