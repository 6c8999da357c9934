//! Steps 12 and 13: SwiGLU, the down projection and the layer's output.

use ndarray::{Array2, Axis, Zip, concatenate, s};

use super::{Context, Output, Trace, narrowed, plain};
use crate::elementary::{exp_all, reciprocal};
use crate::geometry::BATCH;
use crate::kernels::{SumOrder, matmul_down};
use crate::policy::Site;
use crate::rounding::round_f32;
use crate::tensor::TensorId as T;

/// Step 12: `g = gate * post_inv; u = up * post_inv; sig = 1 / (exp(-g) + 1);
/// act = cast@silu((g * sig) * u)`.
pub fn silu(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let (gate, up, inv) = (trace.f32(T::GateAccAll), trace.f32(T::UpAccAll), trace.f32(T::InvRmsTile));
    let freedom = context.policy.freedom;
    let mut wide = Array2::zeros(gate.dim());
    Zip::from(wide.rows_mut()).and(gate.rows()).and(up.rows()).and(inv.rows()).par_for_each(
        |mut out, gate, up, inv| {
            let inv = inv[0];
            let mut exps: Vec<f32> = gate.iter().map(|gate| -(gate * inv)).collect();
            exp_all(&mut exps, freedom);
            Zip::from(&mut out).and(gate).and(up).and(&exps[..]).for_each(|out, gate, up, exp| {
                let (g, u) = (gate * inv, up * inv);
                *out = (g * reciprocal(exp + 1.0, freedom)) * u;
            });
        },
    );
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
    let wide =
        Array2::from_shape_fn(h1b.dim(), |(b, n)| round_f32(parts[(b, n)] + parts[(BATCH + b, n)], rule) + h1b[(b, n)]);
    narrowed(context, T::Out, Site::Out, wide)
}
