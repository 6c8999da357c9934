//! Step 6: rotary position embedding, and what is written into the caches.

use ndarray::{Array2, ArrayView1, ArrayViewMut1};

use super::{Context, Output, Trace, narrowed};
use crate::geometry::BATCH;
use crate::policy::Site;
use crate::tensor::TensorId as T;

/// Rotated queries, `cast@q`, laid out as the kernel pads them: row `(b*KV + kv_head)*16 + j` is query
/// `j` of that KV head, zero rows after the last.
pub fn q(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let geometry = context.inputs.geometry;
    let (dim, group, kv_heads) = (geometry.head_dim, geometry.group(), geometry.num_key_value_heads);
    let x = trace.f32(T::QProjNorm);
    let mut wide = Array2::zeros((BATCH * kv_heads * BATCH, dim));
    for b in 0..BATCH {
        for (head, values) in x.row(b).exact_chunks(dim).into_iter().enumerate() {
            let at = (b * kv_heads + head / group) * BATCH + head % group;
            rotate(context, b, values, wide.row_mut(at));
        }
    }
    narrowed(context, T::AllQPadded, Site::Q, wide)
}

/// Rotated keys, `cast@k_cache`: what each row writes at its slot.
pub fn k(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let dim = context.inputs.geometry.head_dim;
    let x = trace.f32(T::KProjNorm);
    let mut wide = Array2::zeros(x.dim());
    for b in 0..BATCH {
        let heads = x.row(b).into_owned();
        let mut row = wide.row_mut(b);
        for (values, out) in heads.exact_chunks(dim).into_iter().zip(row.exact_chunks_mut(dim)) {
            rotate(context, b, values, out);
        }
    }
    narrowed(context, T::KRows, Site::KCache, wide)
}

/// Values, not rotated, `cast@v_cache`.
pub fn v(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    narrowed(context, T::VRows, Site::VCache, trace.f32(T::VProjNorm).to_owned())
}

/// `lo' = lo*cos_lo - hi*sin_lo; hi' = hi*cos_hi + lo*sin_hi` at the row's position.
fn rotate(context: &Context<'_, '_>, b: usize, x: ArrayView1<'_, f32>, mut out: ArrayViewMut1<'_, f32>) {
    let position = context.inputs.batch.position(b);
    let (cos, sin) = (context.inputs.rope_cos.row(position), context.inputs.rope_sin.row(position));
    let half = x.len() / 2;
    for j in 0..half {
        let (lo, hi) = (x[j], x[half + j]);
        out[j] = lo * cos[j] - hi * sin[j];
        out[half + j] = hi * cos[half + j] + lo * sin[half + j];
    }
}
