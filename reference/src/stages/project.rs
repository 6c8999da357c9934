//! Steps 4, 9 and 11: INT8 projections, dequantized column scale first.

use pulp::Arch;

use super::{Context, Output, Trace, contiguous, one_nan, plain};
use crate::kernels::matmul_i8_into;
use crate::tensor::{Tensor, TensorId as T};

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
    let (codes, act_scale, w_scale) = (trace.i8(p.codes), trace.f32(p.scales), contiguous(p.weight_scale));
    let Some(products) = context.products else {
        let values = matmul_i8_into(codes, p.weight, |row, start, acc, out| {
            Arch::new().dispatch(
                #[inline(always)]
                || dequantize(acc, &w_scale[start..], act_scale[(row, 0)], out),
            );
        });
        return vec![Output { id, tensor: Tensor::F32(values), wide: None }];
    };
    let acc = products.sums(id, codes, p.weight);
    plain(
        context,
        id,
        #[inline(always)]
        |r, out| dequantize(&contiguous(acc.row(r)), &w_scale, act_scale[(r, 0)], out),
    )
}

/// The two scales of a projection, column first, over some sums of a row.
#[inline(always)]
fn dequantize(acc: &[i32], w_scale: &[f32], act_scale: f32, out: &mut [f32]) {
    for ((out, &acc), w_scale) in out.iter_mut().zip(acc).zip(w_scale) {
        *out = (acc as f32 * w_scale) * act_scale;
    }
    one_nan(out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_scale_comes_first_and_large_sums_round_to_even() {
        let acc: Vec<i32> = (0..100).map(|n| if n == 0 { (1 << 24) + 1 } else { n }).collect();
        let mut out = [f32::NAN; 100];
        dequantize(&acc, &[0.1; 100], 0.3, &mut out);
        assert_eq!(out[0], (16_777_216.0 * 0.1f32) * 0.3);
        assert!((1..100).all(|n| out[n] == (n as f32 * 0.1) * 0.3));
        assert!(
            (1..100).any(|n| out[n] != (n as f32 * 0.3) * 0.1),
            "the order must matter for this test to mean anything"
        );
    }
}
