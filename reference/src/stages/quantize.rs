//! Steps 3, 9 and 11: row quantization of a BF16 tensor to INT8 codes and one scale a row.

use ndarray::{Array2, ArrayView1};

use super::{Context, Output, Trace};
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
    let mut amax = AMAX_FLOOR;
    for &value in row {
        // `f32::max` would drop a NaN on either side.
        if value.is_nan() || amax.is_nan() {
            amax = f32::NAN;
        } else {
            amax = amax.max(value.abs());
        }
    }
    RowScale { act: amax / INT8_MAX, quant: INT8_MAX / amax }
}

/// Step 3.
pub fn normed(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::NormedStates, context.policy.at(Site::Normed));
    quantize(context, &x, Site::NormedI8, T::NormedI8, T::ActScales)
}

/// Step 9.
pub fn attn(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::AttnOut, context.policy.at(Site::Attn));
    quantize(context, &x, Site::AttnOutI8, T::AttnOutI8, T::AttnOutScales)
}

/// Step 11.
pub fn mlp(context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
    let x = trace.widened(T::MlpNormIn, context.policy.at(Site::MlpIn));
    quantize(context, &x, Site::MlpNormI8, T::MlpNormI8, T::MlpActScales)
}

/// `i8 = clamp(rint(x * q_scale), -127, 127)` a row, with the scaled values kept as the wide ones.
fn quantize(context: &Context<'_, '_>, x: &Array2<f32>, site: Site, codes: T, scales: T) -> Vec<Output> {
    let rule = context.policy.at(site);
    let mut scaled = x.clone();
    let mut act = Array2::zeros((x.nrows(), 1));
    for (row, mut values) in scaled.rows_mut().into_iter().enumerate() {
        let scale = row_scale(x.row(row));
        act[(row, 0)] = scale.act;
        values.mapv_inplace(|value| value * scale.quant);
    }
    let tensor = Tensor::I8(scaled.mapv(|value| to_code(value, rule)));
    vec![Output { id: codes, tensor, wide: Some(scaled) }, Output { id: scales, tensor: Tensor::F32(act), wide: None }]
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
