//! Deviations of the three row quantizations (steps 3, 9 and 11).

use ndarray::{Array2, ArrayView1};

use super::Change;
use crate::geometry::{AMAX_FLOOR, INT8_MAX};
use crate::policy::Site;
use crate::rounding::{Rounding, to_code};
use crate::stages::{Context, Output, Stage, Trace};
use crate::tensor::{Tensor, TensorId as T};

/// How a kernel may quantize otherwise; the contract is the default.
#[derive(Clone, Copy)]
pub struct Quantization {
    /// Codes to a side: `amax / levels` and `levels / amax`.
    pub levels: f32,
    /// What is put under the largest magnitude.
    pub floor: f32,
    /// Where the largest magnitude is looked for.
    pub amax: Amax,
    /// How the activation scale comes from it.
    pub act: Scale,
    /// How values are scaled.
    pub quant: Scale,
    /// Whether codes are clamped to -127..127; otherwise they wrap.
    pub clamped: bool,
}

/// What the largest magnitude is taken of.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Amax {
    /// Magnitudes of a row.
    Row,
    /// Values of a row, negative ones included with their sign.
    Signed,
    /// Magnitudes of the whole tensor.
    Tensor,
}

/// How a scale is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// One division of its own.
    Divided,
    /// By way of a reciprocal: `amax * (1 / 127)`, and values times `1 / act_scale`.
    Reciprocal,
    /// Values divided by the activation scale, one by one.
    Quotient,
}

impl Default for Quantization {
    fn default() -> Self {
        Self {
            levels: INT8_MAX,
            floor: AMAX_FLOOR,
            amax: Amax::Row,
            act: Scale::Divided,
            quant: Scale::Divided,
            clamped: true,
        }
    }
}

/// A quantization stage done so.
pub fn quantized(how: Quantization) -> Change {
    Box::new(move |call| run(call.context, call.trace, call.stage, how))
}

fn run(context: &Context<'_, '_>, trace: &Trace, stage: &Stage, how: Quantization) -> Vec<Output> {
    let (source, source_site, site, codes, scales) = match stage.writes {
        [T::NormedI8, ..] => (T::NormedStates, Site::Normed, Site::NormedI8, T::NormedI8, T::ActScales),
        [T::AttnOutI8, ..] => (T::AttnOut, Site::Attn, Site::AttnOutI8, T::AttnOutI8, T::AttnOutScales),
        _ => (T::MlpNormIn, Site::MlpIn, Site::MlpNormI8, T::MlpNormI8, T::MlpActScales),
    };
    let rule = context.policy.at(site);
    let mut x = trace.widened(source, context.policy.at(source_site));
    let of_tensor = x.rows().into_iter().map(|row| magnitude(row, Amax::Row)).fold(0.0, nan_max);
    let mut act = Array2::zeros((x.nrows(), 1));
    let mut tensor = Array2::zeros(x.dim());
    for (b, mut row) in x.rows_mut().into_iter().enumerate() {
        let amax = if how.amax == Amax::Tensor { of_tensor } else { magnitude(row.view(), how.amax) };
        let amax = if amax.is_nan() { amax } else { amax.max(how.floor) };
        let scale = if how.act == Scale::Reciprocal { amax * (1.0 / how.levels) } else { amax / how.levels };
        act[(b, 0)] = if scale.is_nan() { f32::NAN } else { scale };
        for (x, code) in row.iter_mut().zip(tensor.row_mut(b)) {
            *x = match how.quant {
                Scale::Divided => *x * (how.levels / amax),
                Scale::Reciprocal => *x * (1.0 / scale),
                Scale::Quotient => *x / scale,
            };
            *code = if how.clamped { to_code(*x, rule) } else { wrapped(*x, rule) };
        }
    }
    vec![
        Output { id: codes, tensor: Tensor::I8(tensor), wide: Some(x) },
        Output { id: scales, tensor: Tensor::F32(act), wide: None },
    ]
}

/// A code that no clamp keeps from wrapping.
fn wrapped(scaled: f32, rule: Rounding) -> i8 {
    let rounded = match rule {
        Rounding::Rne | Rounding::None => scaled.round_ties_even(),
        Rounding::TiesAway => scaled.round(),
        Rounding::Trunc => scaled.trunc(),
    };
    rounded as i32 as i8
}

fn magnitude(row: ArrayView1<'_, f32>, of: Amax) -> f32 {
    row.iter().fold(0.0, |amax, &x| nan_max(amax, if of == Amax::Signed { x } else { x.abs() }))
}

fn nan_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { a.max(b) }
}
