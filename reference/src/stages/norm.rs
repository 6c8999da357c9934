//! Steps 1, 2, 5 and 10: norms, head norms and the residual.

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::{Context, Output, Trace, by_rows, contiguous, narrowed, plain};
use crate::elementary::inverse_sqrt;
use crate::kernels::SumOrder;
use crate::policy::{Freedom, Site};
use crate::rounding::widen;
use crate::tensor::TensorId as T;

/// Step 1: `normed = cast@normed(f32(x) * gamma_in)`. The RMS is not in it.
pub fn normed(context: &Context<'_, '_>, _: &Trace) -> Vec<Output> {
    let (x, gamma) = (context.inputs.hidden_states, contiguous(context.inputs.weights.input_rms_weight));
    let wide = by_rows(&context.equal_to, x.ncols(), |b, out| {
        for ((out, x), gamma) in out.iter_mut().zip(&*contiguous(x.row(b))).zip(&*gamma) {
            *out = widen(*x) * gamma;
        }
    });
    narrowed(context, T::NormedStates, Site::Normed, wide)
}

/// Step 2: `inv_rms = 1 / sqrt(sum(x^2) * (1/H) + eps)`.
pub fn inv_rms(context: &Context<'_, '_>, _: &Trace) -> Vec<Output> {
    plain(T::InvRmsStates, row_inverse_rms(context, context.inputs.hidden_states.mapv(widen).view(), 256))
}

/// Step 5 for queries: the head norm.
pub fn q_heads(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    plain(T::QProjNorm, head_norm(context, trace, T::QProj, context.inputs.weights.q_norm_weight))
}

/// Step 5 for keys: the head norm.
pub fn k_heads(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    plain(T::KProjNorm, head_norm(context, trace, T::KProj, context.inputs.weights.k_norm_weight))
}

/// Step 5 for values: `v = proj * inv_rms`.
pub fn v_scaled(_: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    plain(T::VProjNorm, &trace.f32(T::VProj) * &trace.f32(T::InvRmsStates))
}

/// Step 10: `h1b = cast@residual(proj + f32(x))`.
pub fn residual(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    narrowed(context, T::PostNormPartial, Site::Residual, h1(context, trace))
}

/// Step 10: `mlp_in = cast@mlp_in(h1 * gamma_post)`, from the FP32 h1.
pub fn mlp_in(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let gamma = contiguous(context.inputs.weights.post_rms_weight);
    let h1 = h1(context, trace);
    let wide = by_rows(&context.equal_to, h1.ncols(), |b, out| {
        for ((out, h1), gamma) in out.iter_mut().zip(&*contiguous(h1.row(b))).zip(&*gamma) {
            *out = h1 * gamma;
        }
    });
    narrowed(context, T::MlpNormIn, Site::MlpIn, wide)
}

/// Step 10: `post_inv = 1 / sqrt(sum(h1^2) * (1/H) + eps)`, from the FP32 h1.
pub fn post_inv(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    plain(T::InvRmsTile, row_inverse_rms(context, h1(context, trace).view(), 512))
}

/// The FP32 residual stream after attention, `proj + f32(x)`.
fn h1(context: &Context<'_, '_>, trace: &Trace) -> Array2<f32> {
    let (proj, x) = (trace.f32(T::AttnProjFp32), context.inputs.hidden_states);
    by_rows(&context.equal_to, x.ncols(), |b, out| {
        for ((out, proj), x) in out.iter_mut().zip(&*contiguous(proj.row(b))).zip(&*contiguous(x.row(b))) {
            *out = proj + widen(*x);
        }
    })
}

/// `1 / sqrt(mean of squares + eps)` of each row, `[rows, 1]`.
fn row_inverse_rms(context: &Context<'_, '_>, x: ArrayView2<'_, f32>, chunk: usize) -> Array2<f32> {
    let freedom = context.policy.freedom;
    let order = SumOrder::vector(freedom, x.ncols(), chunk);
    let eps = context.inputs.geometry.rms_norm_eps;
    by_rows(&context.equal_to, 1, |row, out| out[0] = inverse_rms(&contiguous(x.row(row)), &order, eps, freedom))
}

/// `1 / sqrt(sum(x^2) * (1/n) + eps)`.
#[inline(always)]
fn inverse_rms(x: &[f32], order: &SumOrder, eps: f32, freedom: Freedom) -> f32 {
    let sum = order.sum(x.len(), |i| x[i] * x[i]);
    inverse_sqrt(sum * (1.0 / x.len() as f32) + eps, freedom)
}

/// Step 5: `z = proj * inv_rms`; per head `inv = 1 / sqrt(sum(z^2) * (1/D) + eps)` and
/// `out = (z * gamma) * inv`: gamma first.
fn head_norm(context: &Context<'_, '_>, trace: &Trace, proj: T, gamma: ArrayView1<'_, f32>) -> Array2<f32> {
    let (freedom, dim) = (context.policy.freedom, context.inputs.geometry.head_dim);
    let order = SumOrder::vector(freedom, dim, dim);
    let eps = context.inputs.geometry.rms_norm_eps;
    let (proj, inv_rms, gamma) = (trace.f32(proj), trace.f32(T::InvRmsStates), contiguous(gamma));
    by_rows(&context.equal_to, proj.ncols(), |b, out| {
        for (z, proj) in out.iter_mut().zip(&*contiguous(proj.row(b))) {
            *z = proj * inv_rms[(b, 0)];
        }
        for head in out.chunks_exact_mut(dim) {
            let inv = inverse_rms(head, &order, eps, freedom);
            for (z, gamma) in head.iter_mut().zip(&*gamma) {
                *z = (*z * gamma) * inv;
            }
        }
    })
}
