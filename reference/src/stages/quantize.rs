//! Steps 3, 9 and 11: row quantization of a BF16 tensor to INT8 codes and one scale a row.

use ndarray::{Array2, ArrayView1, Zip};
use pulp::Arch;

use super::{Context, Output, Trace, row_major};
use crate::geometry::{AMAX_FLOOR, INT8_MAX};
use crate::policy::Site;
use crate::rounding::to_code;
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
        Arch::new().dispatch(|| values.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() & 0x7FFF_FFFF)))
    };
    let amax = f32::from_bits(row.as_slice().map_or_else(|| largest(&row.to_vec()), largest));
    let amax = if amax.is_nan() { f32::NAN } else { amax.max(AMAX_FLOOR) };
    RowScale { act: amax / INT8_MAX, quant: INT8_MAX / amax }
}

/// Step 3.
pub fn normed(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::NormedStates, context.policy.at(Site::Normed));
    quantize(context, x, Site::NormedI8, T::NormedI8, T::ActScales)
}

/// Step 9.
pub fn attn(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::AttnOut, context.policy.at(Site::Attn));
    quantize(context, x, Site::AttnOutI8, T::AttnOutI8, T::AttnOutScales)
}

/// Step 11.
pub fn mlp(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::MlpNormIn, context.policy.at(Site::MlpIn));
    quantize(context, x, Site::MlpNormI8, T::MlpNormI8, T::MlpActScales)
}

/// `i8 = clamp(rint(x * q_scale), -127, 127)` a row, with the scaled values kept as the wide ones.
fn quantize(context: &Context<'_, '_>, x: Array2<f32>, site: Site, codes: T, scales: T) -> Vec<Output> {
    let rule = context.policy.at(site);
    let mut x = row_major(x);
    let mut act = Array2::zeros((x.nrows(), 1));
    let mut tensor = Array2::zeros(x.dim());
    Zip::from(x.rows_mut()).and(tensor.rows_mut()).and(act.rows_mut()).for_each(|mut x, mut codes, mut act| {
        let scale = row_scale(x.view());
        act.fill(scale.act);
        if let (Some(x), Some(codes)) = (x.as_slice_mut(), codes.as_slice_mut()) {
            Arch::new().dispatch(|| {
                for (code, x) in codes.iter_mut().zip(x) {
                    *x *= scale.quant;
                    *code = to_code(*x, rule);
                }
            });
        }
    });
    vec![
        Output { id: codes, tensor: Tensor::I8(tensor), wide: Some(x) },
        Output { id: scales, tensor: Tensor::F32(act), wide: None },
    ]
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
