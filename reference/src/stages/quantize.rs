//! Steps 3, 9 and 11: row quantization of a BF16 tensor to INT8 codes and one scale a row.

use ndarray::{Array2, ArrayView1};
use pulp::Arch;

use super::{Context, Output, Trace, each_row, rows_mut, under};
use crate::geometry::{AMAX_FLOOR, INT8_MAX};
use crate::policy::Site;
use crate::rounding::{Rounding, to_code};
use crate::tensor::{Tensor, TensorId as T};

/// The two scales of a quantized row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowScale {
    /// `amax / 127`: what a code stands for.
    pub act: f32,
    /// `127 / amax`: what values are multiplied by.
    pub quant: f32,
}

/// `amax = max(1e-4, max |x|)`, NaN if the row holds one; the two scales are separate divisions.
#[must_use]
pub fn row_scale(row: ArrayView1<'_, f32>) -> RowScale {
    // The order of magnitudes is that of their bits, and every NaN lies above infinity: unlike `f32::max`, the largest
    // bits do not lose one.
    let largest = |values: &[f32]| {
        Arch::new().dispatch(
            #[inline(always)]
            || values.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() & 0x7FFF_FFFF)),
        )
    };
    let amax = f32::from_bits(row.as_slice().map_or_else(|| largest(&row.to_vec()), largest));
    let amax = if amax.is_nan() { f32::NAN } else { amax.max(AMAX_FLOOR) };
    RowScale { act: amax / INT8_MAX, quant: INT8_MAX / amax }
}

/// Step 3.
pub fn normed(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    quantize(context, trace, (T::NormedStates, Site::Normed), Site::NormedI8, [T::NormedI8, T::ActScales])
}

/// Step 9.
pub fn attn(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    quantize(context, trace, (T::AttnOut, Site::Attn), Site::AttnOutI8, [T::AttnOutI8, T::AttnOutScales])
}

/// Step 11.
pub fn mlp(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    quantize(context, trace, (T::MlpNormIn, Site::MlpIn), Site::MlpNormI8, [T::MlpNormI8, T::MlpActScales])
}

/// `i8 = clamp(rint(x * q_scale), -127, 127)` a row of `source`, as later steps see it.
fn quantize(
    context: &Context<'_, '_>,
    trace: &Trace,
    source: (T, Site),
    site: Site,
    [codes, scales]: [T; 2],
) -> Vec<Output> {
    let rule = context.policy.at(site);
    let mut x = trace.widened(source.0, context.policy.at(source.1));
    let mut act = Array2::zeros((x.nrows(), 1));
    let mut tensor = Array2::zeros(x.dim());
    let (elements, width) = (x.len(), x.ncols());
    let rows = rows_mut(&mut x, width).zip(rows_mut(&mut tensor, width)).zip(&mut act);
    each_row(
        rows,
        elements,
        #[inline(always)]
        |_, ((x, codes), act)| {
            let scale = row_scale(ArrayView1::from(&*x));
            *act = scale.act;
            encode(x, scale.quant, rule, codes);
        },
    );
    vec![
        Output { id: codes, tensor: Tensor::I8(tensor), wide: context.keeps(rule).then_some(x) },
        Output { id: scales, tensor: Tensor::F32(act), wide: None },
    ]
}

/// The codes of a row, whose values become the scaled ones.
#[inline(always)]
fn encode(x: &mut [f32], scale: f32, rule: Rounding, codes: &mut [i8]) {
    under(
        rule,
        #[inline(always)]
        |rule| {
            for (code, x) in codes.iter_mut().zip(&mut *x) {
                *x *= scale;
                *code = to_code(*x, rule);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::aview1;

    #[test]
    fn scales_at_the_edges() {
        let zero = row_scale(aview1(&[0.0; 640]));
        assert_eq!((zero.act, zero.quant), (1e-4 / 127.0, 127.0 / 1e-4));
        let nan = row_scale(aview1(&[1.0, f32::NAN, 3.0]));
        assert!(nan.act.is_nan() && nan.quant.is_nan());
        let exact = row_scale(aview1(&[-3.968_75, 1.0]));
        assert_eq!(exact.quant, 32.0);
    }
}
