//! Step 6: rotary position embedding, and what is written into the caches.

use super::{Context, Output, Trace, contiguous, narrowed};
use crate::geometry::BATCH;
use crate::policy::Site;
use crate::tensor::TensorId as T;

/// Rotated queries, `cast@q`, laid out as the kernel pads them: row `(b*KV + kv_head)*16 + j` is query
/// `j` of that KV head, zero rows after the last.
pub fn q(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let (dim, group) = (context.inputs.geometry.head_dim, context.inputs.geometry.group());
    let x = trace.f32(T::QProjNorm);
    narrowed(
        context,
        T::AllQPadded,
        Site::Q,
        #[inline(always)]
        |r, out| {
            for (head, values) in contiguous(x.row(r)).chunks_exact(dim).enumerate() {
                let at = head / group * BATCH + head % group;
                rotate(context, r, values, &mut out[at * dim..(at + 1) * dim]);
            }
        },
    )
}

/// Rotated keys, `cast@k_cache`: what each row writes at its slot.
pub fn k(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let dim = context.inputs.geometry.head_dim;
    let x = trace.f32(T::KProjNorm);
    narrowed(
        context,
        T::KRows,
        Site::KCache,
        #[inline(always)]
        |r, out| {
            for (values, out) in contiguous(x.row(r)).chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
                rotate(context, r, values, out);
            }
        },
    )
}

/// Values, not rotated, `cast@v_cache`.
pub fn v(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.f32(T::VProjNorm);
    narrowed(
        context,
        T::VRows,
        Site::VCache,
        #[inline(always)]
        |r, out| out.copy_from_slice(&contiguous(x.row(r))),
    )
}

/// `lo' = lo*cos_lo - hi*sin_lo; hi' = hi*cos_hi + lo*sin_hi` at the position of row `r` of this run.
#[inline(always)]
fn rotate(context: &Context<'_, '_>, r: usize, x: &[f32], out: &mut [f32]) {
    let position = context.inputs.batch.position(context.batch_row(r));
    let (cos, sin) =
        (contiguous(context.inputs.rope_cos.row(position)), contiguous(context.inputs.rope_sin.row(position)));
    let half = x.len() / 2;
    let ((lo, hi), (out_lo, out_hi)) = (x.split_at(half), out.split_at_mut(half));
    let ((cos_lo, cos_hi), (sin_lo, sin_hi)) = (cos.split_at(half), sin.split_at(half));
    for j in 0..half {
        out_lo[j] = lo[j] * cos_lo[j] - hi[j] * sin_lo[j];
        out_hi[j] = hi[j] * cos_hi[j] + lo[j] * sin_hi[j];
    }
}
