//! What most deviations are made of: a stage run under another rule, on other inputs or tensors, or with its result
//! edited.

use std::sync::Arc;

use half::bf16;
use ndarray::{Array2, Zip};

use super::{Call, Change};
use crate::geometry::Geometry;
use crate::inputs::{Batch, LayerInputs};
use crate::policy::Site;
use crate::rounding::{Rounding, to_bf16};
use crate::stages::{Context, Output, Stage, Trace};
use crate::tensor::{Tensor, TensorId};

/// Another rule at a cast site.
pub fn rounding(site: Site, rule: Rounding) -> Change {
    Box::new(move |call| {
        let policy = call.context.policy.clone().with(site, rule);
        call.run_under(&policy)
    })
}

/// No cast at a site whose narrowed tensor is stored all the same: what is stored is right, and the stages that read it
/// see the FP32 values.
pub fn unnarrowed(site: Site) -> Change {
    Box::new(move |call| {
        if call.stage.sites.contains(&site) {
            return call.run_wide();
        }
        call.run_under(&call.context.policy.clone().with(site, Rounding::None))
    })
}

/// Other batch metadata.
pub fn batch(change: impl Fn(&mut Batch, &LayerInputs<'_>) + Send + Sync + 'static) -> Change {
    Box::new(move |call| {
        let mut batch = call.context.inputs.batch.clone();
        change(&mut batch, call.context.inputs);
        let inputs = LayerInputs { batch: &batch, ..call.context.inputs.view() };
        call.run_on(&inputs)
    })
}

/// Other weights or tables, as views of those that are there.
pub fn inputs(change: for<'a> fn(&mut LayerInputs<'a>)) -> Change {
    Box::new(move |call| {
        let mut inputs = call.context.inputs.view();
        change(&mut inputs);
        call.run_on(&inputs)
    })
}

/// Another eps under the norms' roots.
pub fn eps(value: f32) -> Change {
    Box::new(move |call| {
        let geometry = Geometry { rms_norm_eps: value, ..*call.context.inputs.geometry };
        let inputs = LayerInputs { geometry: &geometry, ..call.context.inputs.view() };
        call.run_on(&inputs)
    })
}

/// Another tensor in the place of one that the stage reads.
pub fn reading(id: TensorId, other: fn(&Call<'_, '_, '_>) -> Tensor) -> Change {
    Box::new(move |call| {
        let mut trace = call.trace.clone();
        trace.force(id, Arc::new(other(call)));
        call.run_after(&trace)
    })
}

/// The stage's results, edited.
pub fn edited(edit: fn(&Call<'_, '_, '_>, &mut Output)) -> Change {
    Box::new(move |call| {
        let mut outputs = call.run_wide();
        outputs.iter_mut().for_each(|output| edit(call, output));
        outputs
    })
}

/// Another function in the place of the stage's.
pub fn replaced(run: fn(&Context<'_, '_>, &Trace, &Stage) -> Vec<Output>) -> Change {
    Box::new(move |call| run(call.context, call.trace, call.stage))
}

/// The values of a BF16 tensor before its cast, each replaced, and narrowed by the site's rule.
pub fn recast(output: &mut Output, rule: Rounding, value: impl Fn((usize, usize), f32) -> f32) {
    let Tensor::Bf16(narrow) = &mut output.tensor else { return };
    let mut wide = output.wide.take().unwrap_or_else(|| narrow.mapv(bf16::to_f32));
    for (at, wide) in wide.indexed_iter_mut() {
        *wide = value(at, *wide);
    }
    Zip::from(narrow).and(&wide).for_each(|narrow, &wide| *narrow = to_bf16(wide, rule));
    output.wide = Some(wide);
}

/// A BF16 output of these values.
pub fn narrowed(context: &Context<'_, '_>, id: TensorId, site: Site, wide: Array2<f32>) -> Vec<Output> {
    let rule = context.policy.at(site);
    let tensor = Tensor::Bf16(wide.mapv(|value| to_bf16(value, rule)));
    vec![Output { id, tensor, wide: Some(wide) }]
}

/// An FP32 output of these values, every NaN the same one.
pub fn plain(id: TensorId, mut values: Array2<f32>) -> Vec<Output> {
    values.mapv_inplace(|value| if value.is_nan() { f32::NAN } else { value });
    vec![Output { id, tensor: Tensor::F32(values), wide: None }]
}
