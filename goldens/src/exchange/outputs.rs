//! The outputs of a case's layer for other tools: from the reference, or from a device's captures. Caches are whole.

use cases::{Case, Input, Inputs, PolicyRequest};
use device::{Captured, Captures, WrittenRows};
use half::bf16;
use ndarray::{Array2, ArrayView2};
use reference::{Policy, Products};

use crate::judge::JudgeError;
use crate::mutant::mutant;
use crate::rules::Rules;

/// What a layer left.
#[derive(Clone, Debug)]
pub struct Outputs {
    /// Its tensors, and the rows written into the caches.
    pub captures: Captures,
    /// The whole key cache after the step; `None` where the device gave no rows.
    pub k_cache: Option<Array2<bf16>>,
    /// The whole value cache.
    pub v_cache: Option<Array2<bf16>>,
}

/// What the reference gives under the rules of `policy`; where they are left open, under those of the production
/// kernels.
///
/// # Errors
/// The case is no decode layer.
pub fn reference_outputs(case: &Case, inputs: &Inputs, policy: &PolicyRequest) -> Result<Outputs, JudgeError> {
    let layer =
        inputs.layer(0).map_err(|source| JudgeError::Inputs { case: case.name.clone(), source: source.into() })?;
    let rules: Policy = Rules::new(policy).policy;
    let captures = mutant(&layer, &rules, &Products::new(), &[]);
    device_outputs(case, inputs, captures)
}

/// What a device's captures say, with whole caches.
///
/// # Errors
/// The case is no decode layer.
pub fn device_outputs(case: &Case, inputs: &Inputs, captures: Captures) -> Result<Outputs, JudgeError> {
    // Of all layers, of which the first is the one that runs.
    let before = |input| {
        inputs.bf16(input).map_err(|source| JudgeError::Inputs { case: case.name.clone(), source: source.into() })
    };
    let (k, v) = (before(Input::KCache)?, before(Input::VCache)?);
    let k_cache = captures.k_written.as_ref().and_then(|written| patched(k, written));
    let v_cache = captures.v_written.as_ref().and_then(|written| patched(v, written));
    Ok(Outputs { captures, k_cache, v_cache })
}

/// A cache with its written rows; `None` where they have a wrong type or lie outside of it.
fn patched(before: ArrayView2<'_, bf16>, written: &WrittenRows) -> Option<Array2<bf16>> {
    let (Captured::Values(rows), Captured::Values(values)) = (&written.rows, &written.values) else { return None };
    let mut after = before.to_owned();
    for (&row, values) in rows.iter().zip(values.rows()) {
        let row = usize::try_from(row).ok().filter(|&row| row < after.nrows())?;
        after.row_mut(row).assign(&values);
    }
    Some(after)
}
