//! Steps 4, 9 and 11: INT8 projections, dequantized column scale first.

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::{Context, Output, Trace, plain};
use crate::kernels::matmul_i8;
use crate::tensor::TensorId as T;

/// Step 4, queries.
pub fn q(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let w = &context.inputs.weights;
    plain(T::QProj, project(trace, T::NormedI8, T::ActScales, w.wq, w.wq_scale))
}

/// Step 4, keys.
pub fn k(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let w = &context.inputs.weights;
    plain(T::KProj, project(trace, T::NormedI8, T::ActScales, w.wk, w.wk_scale))
}

/// Step 4, values.
pub fn v(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let w = &context.inputs.weights;
    plain(T::VProj, project(trace, T::NormedI8, T::ActScales, w.wv, w.wv_scale))
}

/// Step 9, output projection.
pub fn o(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let w = &context.inputs.weights;
    plain(T::AttnProjFp32, project(trace, T::AttnOutI8, T::AttnOutScales, w.wo, w.wo_scale))
}

/// Step 11, gate.
pub fn gate(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let w = &context.inputs.weights;
    plain(T::GateAccAll, project(trace, T::MlpNormI8, T::MlpActScales, w.w_gate, w.w_gate_scale))
}

/// Step 11, up.
pub fn up(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let w = &context.inputs.weights;
    plain(T::UpAccAll, project(trace, T::MlpNormI8, T::MlpActScales, w.w_up, w.w_up_scale))
}

/// `(f32(acc) * w_scale[n]) * act_scale[b]` with `acc` the exact INT32 sum. `f32(acc)` rounds to nearest,
/// ties to even, where `|acc|` passes 2^24.
fn project(trace: &Trace, codes: T, scales: T, w: ArrayView2<'_, i8>, w_scale: ArrayView1<'_, f32>) -> Array2<f32> {
    let acc = matmul_i8(trace.i8(codes), w);
    dequantize(&acc, w_scale, trace.f32(scales))
}

/// The two scales of a projection, column first.
fn dequantize(acc: &Array2<i32>, w_scale: ArrayView1<'_, f32>, act_scale: ArrayView2<'_, f32>) -> Array2<f32> {
    Array2::from_shape_fn(acc.dim(), |(b, n)| (acc[(b, n)] as f32 * w_scale[n]) * act_scale[(b, 0)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_scale_comes_first_and_large_sums_round_to_even() {
        let acc = Array2::from_shape_fn((1, 100), |(_, n)| if n == 0 { (1 << 24) + 1 } else { n as i32 });
        let w_scale = ndarray::Array1::from_elem(100, 0.1f32);
        let act = ndarray::array![[0.3f32]];
        let out = dequantize(&acc, w_scale.view(), act.view());
        assert_eq!(out[(0, 0)], (16_777_216.0 * 0.1f32) * 0.3);
        assert!((1..100).all(|n| out[(0, n)] == (n as f32 * 0.1) * 0.3));
        assert!(
            (1..100).any(|n| out[(0, n)] != (n as f32 * 0.3) * 0.1),
            "the order must matter for this test to mean anything"
        );
    }
}
