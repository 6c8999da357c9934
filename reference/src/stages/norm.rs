//! Steps 1, 2, 5 and 10: norms, head norms and the residual.

use std::borrow::Cow;

use half::bf16;
use ndarray::{ArrayView1, Axis};

use super::{Context, Output, Trace, contiguous, narrowed, plain};
use crate::elementary::inverse_sqrt;
use crate::kernels::SumOrder;
use crate::policy::{Freedom, Site};
use crate::rounding::widen;
use crate::tensor::TensorId as T;

/// Step 1: `normed = cast@normed(f32(x) * gamma_in)`. The RMS is not in it.
pub fn normed(context: &Context<'_, '_>, _: &Trace) -> Vec<Output> {
    let gamma = contiguous(context.inputs.weights.input_rms_weight);
    narrowed(
        context,
        T::NormedStates,
        Site::Normed,
        #[inline(always)]
        |r, out| {
            for ((out, x), gamma) in out.iter_mut().zip(&*input(context, r)).zip(&*gamma) {
                *out = widen(*x) * gamma;
            }
        },
    )
}

/// Step 2: `inv_rms = 1 / sqrt(sum(x^2) * (1/H) + eps)`.
pub fn inv_rms(context: &Context<'_, '_>, _: &Trace) -> Vec<Output> {
    let norm = Norm::new(context, context.inputs.geometry.hidden_size, 256);
    plain(
        context,
        T::InvRmsStates,
        #[inline(always)]
        |r, out| {
            let x = input(context, r);
            out.fill(norm.inverse_rms(|i| widen(x[i])));
        },
    )
}

/// Step 5 for queries: the head norm.
pub fn q_heads(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    head_norm(context, trace, T::QProj, context.inputs.weights.q_norm_weight, T::QProjNorm)
}

/// Step 5 for keys: the head norm.
pub fn k_heads(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    head_norm(context, trace, T::KProj, context.inputs.weights.k_norm_weight, T::KProjNorm)
}

/// Step 5 for values: `v = proj * inv_rms`.
pub fn v_scaled(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let (proj, inv_rms) = (trace.f32(T::VProj), trace.f32(T::InvRmsStates));
    plain(
        context,
        T::VProjNorm,
        #[inline(always)]
        |r, out| {
            scaled(&contiguous(proj.row(r)), inv_rms[(r, 0)], out);
        },
    )
}

/// Step 10: `h1b = cast@residual(proj + f32(x))`.
pub fn residual(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let proj = trace.f32(T::AttnProjFp32);
    narrowed(
        context,
        T::PostNormPartial,
        Site::Residual,
        #[inline(always)]
        |r, out| {
            for ((out, proj), x) in out.iter_mut().zip(&*contiguous(proj.row(r))).zip(&*input(context, r)) {
                *out = h1(*proj, *x);
            }
        },
    )
}

/// Step 10: `mlp_in = cast@mlp_in(h1 * gamma_post)`, from the FP32 h1.
pub fn mlp_in(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let (proj, gamma) = (trace.f32(T::AttnProjFp32), contiguous(context.inputs.weights.post_rms_weight));
    narrowed(
        context,
        T::MlpNormIn,
        Site::MlpIn,
        #[inline(always)]
        |r, out| {
            let (proj, x) = (contiguous(proj.row(r)), input(context, r));
            for (((out, proj), x), gamma) in out.iter_mut().zip(&*proj).zip(&*x).zip(&*gamma) {
                *out = h1(*proj, *x) * gamma;
            }
        },
    )
}

/// Step 10: `post_inv = 1 / sqrt(sum(h1^2) * (1/H) + eps)`, from the FP32 h1.
pub fn post_inv(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let proj = trace.f32(T::AttnProjFp32);
    let norm = Norm::new(context, context.inputs.geometry.hidden_size, 512);
    plain(
        context,
        T::InvRmsTile,
        #[inline(always)]
        |r, out| {
            let (proj, x) = (contiguous(proj.row(r)), input(context, r));
            out.fill(norm.inverse_rms(|i| h1(proj[i], x[i])));
        },
    )
}

/// The layer's input, BF16 `[H]`, in row `r` of this run.
fn input<'a>(context: &Context<'a, '_>, r: usize) -> Cow<'a, [bf16]> {
    contiguous(context.inputs.hidden_states.index_axis_move(Axis(0), context.batch_row(r)))
}

/// The FP32 residual stream after attention, `proj + f32(x)`.
#[inline(always)]
fn h1(proj: f32, x: bf16) -> f32 {
    proj + widen(x)
}

/// `x * factor` of every value.
#[inline(always)]
fn scaled(x: &[f32], factor: f32, out: &mut [f32]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = x * factor;
    }
}

/// `1 / sqrt(mean of squares + eps)` over `n` values.
struct Norm {
    n: usize,
    order: SumOrder,
    eps: f32,
    freedom: Freedom,
}

impl Norm {
    /// Over `n` values, which the emulated device sums `chunk` at a time.
    fn new(context: &Context<'_, '_>, n: usize, chunk: usize) -> Self {
        let freedom = context.policy.freedom;
        Self { n, order: SumOrder::vector(freedom, n, chunk), eps: context.inputs.geometry.rms_norm_eps, freedom }
    }

    /// `1 / sqrt(sum(x^2) * (1/n) + eps)`.
    #[inline(always)]
    fn inverse_rms(&self, x: impl Fn(usize) -> f32) -> f32 {
        let square = |i| {
            let x = x(i);
            x * x
        };
        inverse_sqrt(self.order.sum(self.n, square) * (1.0 / self.n as f32) + self.eps, self.freedom)
    }
}

/// Step 5: `z = proj * inv_rms`; per head `inv = 1 / sqrt(sum(z^2) * (1/D) + eps)` and
/// `out = (z * gamma) * inv`: gamma first.
fn head_norm(context: &Context<'_, '_>, trace: &Trace, proj: T, gamma: ArrayView1<'_, f32>, id: T) -> Vec<Output> {
    let dim = context.inputs.geometry.head_dim;
    let norm = Norm::new(context, dim, dim);
    let (proj, inv_rms, gamma) = (trace.f32(proj), trace.f32(T::InvRmsStates), contiguous(gamma));
    plain(
        context,
        id,
        #[inline(always)]
        |r, out| {
            scaled(&contiguous(proj.row(r)), inv_rms[(r, 0)], out);
            for head in out.chunks_exact_mut(dim) {
                let inv = norm.inverse_rms(|i| head[i]);
                for (z, gamma) in head.iter_mut().zip(&*gamma) {
                    *z = (*z * gamma) * inv;
                }
            }
        },
    )
}
