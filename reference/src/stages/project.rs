//! Steps 4, 9 and 11: INT8 projections, dequantized column scale first.

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::{Context, Output, Trace, by_rows, contiguous, plain};
use crate::kernels::matmul_i8;
use crate::tensor::TensorId as T;

/// Step 4, queries.
pub fn q(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    project(context, trace, T::QProj)
}

/// Step 4, keys.
pub fn k(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    project(context, trace, T::KProj)
}

/// Step 4, values.
pub fn v(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    project(context, trace, T::VProj)
}

/// Step 9, output projection.
pub fn o(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    project(context, trace, T::AttnProjFp32)
}

/// Step 11, gate.
pub fn gate(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    project(context, trace, T::GateAccAll)
}

/// Step 11, up.
pub fn up(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    project(context, trace, T::UpAccAll)
}

/// `(f32(acc) * w_scale[n]) * act_scale[b]` with `acc` the exact INT32 sum. `f32(acc)` rounds to nearest,
/// ties to even, where `|acc|` passes 2^24.
fn project(context: &Context<'_, '_>, trace: &Trace, id: T) -> Vec<Output> {
    let Some(p) = context.inputs.weights.projection(id) else { return Vec::new() };
    let codes = trace.i8(p.codes);
    let acc = match context.products {
        Some(products) => products.sums(id, codes, p.weight),
        None => matmul_i8(codes, p.weight),
    };
    plain(id, dequantize(&acc, p.weight_scale, trace.f32(p.scales), &context.equal_to))
}

/// The two scales of a projection, column first.
fn dequantize(
    acc: &Array2<i32>,
    w_scale: ArrayView1<'_, f32>,
    act_scale: ArrayView2<'_, f32>,
    equal_to: &[usize],
) -> Array2<f32> {
    let w_scale = contiguous(w_scale);
    by_rows(equal_to, acc.ncols(), |b, out| {
        let act_scale = act_scale[(b, 0)];
        for ((out, &acc), w_scale) in out.iter_mut().zip(&*contiguous(acc.row(b))).zip(&*w_scale) {
            *out = (acc as f32 * w_scale) * act_scale;
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_scale_comes_first_and_large_sums_round_to_even() {
        let acc = Array2::from_shape_fn((1, 100), |(_, n)| if n == 0 { (1 << 24) + 1 } else { n as i32 });
        let w_scale = ndarray::Array1::from_elem(100, 0.1f32);
        let act = ndarray::array![[0.3f32]];
        let out = dequantize(&acc, w_scale.view(), act.view(), &[0]);
        assert_eq!(out[(0, 0)], (16_777_216.0 * 0.1f32) * 0.3);
        assert!((1..100).all(|n| out[(0, n)] == (n as f32 * 0.1) * 0.3));
        assert!(
            (1..100).any(|n| out[(0, n)] != (n as f32 * 0.3) * 0.1),
            "the order must matter for this test to mean anything"
        );
    }
}
