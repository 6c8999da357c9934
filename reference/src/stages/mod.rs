//! The decode layer as a table of stages, in the contract's order (`docs/numerics.md`, Decode layer).
//!
//! A stage has a name, the tensors it reads, the tensors it writes and one function. Running the whole
//! table is a layer; running one stage on a device's own inputs is teacher forcing; running the table
//! under another [`Policy`] is a counterfactual.

mod attention;
mod mlp;
mod norm;
mod project;
mod quantize;
mod rope;
mod rows;
mod trace;

use std::borrow::Cow;
use std::slice::ChunksExactMut;

use half::bf16;
use ndarray::{Array2, ArrayView1};
use pulp::Arch;
use rayon::prelude::*;

use self::rows::Rows;
use crate::deviations::{self, Deviation};
use crate::geometry::BATCH;
use crate::inputs::LayerInputs;
use crate::policy::{Policy, Site};
use crate::products::Products;
use crate::rounding::{Rounding, to_bf16, under};
use crate::tensor::{Tensor, TensorId};

pub use attention::{KvSource, attend};
pub use quantize::{RowScale, row_scale};
pub use trace::Trace;

/// What a stage function sees besides the tensors it reads.
#[derive(Clone, Copy, Debug)]
pub struct Context<'c, 'd> {
    /// The layer's inputs.
    pub inputs: &'c LayerInputs<'d>,
    /// How to round, and which freedoms to take.
    pub policy: &'c Policy,
    /// Integer products that runs over these weights share; none: every product is computed.
    pub products: Option<&'c Products>,
    /// Faults of the kernel that is computed, the last one outermost; none: the contract.
    pub deviations: &'c [&'c Deviation],
    /// Whether the FP32 values behind narrowed tensors are kept, or only where the rule `none` hands them on.
    wide: bool,
    /// Rows of the batch that are computed: what the first axis of every tensor goes over.
    rows: Rows,
}

impl<'c, 'd> Context<'c, 'd> {
    /// A run that shares nothing and keeps the FP32 values behind narrowed tensors.
    #[must_use]
    pub fn new(inputs: &'c LayerInputs<'d>, policy: &'c Policy) -> Self {
        Self { inputs, policy, products: None, deviations: &[], wide: true, rows: Rows::all() }
    }

    /// The same run, sharing integer products. No result depends on it.
    #[must_use]
    pub fn sharing(self, products: &'c Products) -> Self {
        Self { products: Some(products), ..self }
    }

    /// The same run on other inputs and under another policy.
    pub(crate) fn over<'e, 'f>(&self, inputs: &'e LayerInputs<'f>, policy: &'e Policy) -> Context<'e, 'f>
    where
        'c: 'e,
    {
        let Self { products, deviations, wide, rows, .. } = *self;
        Context { inputs, policy, products, deviations, wide, rows }
    }

    /// The same run, which keeps every FP32 value behind narrowed tensors.
    pub(crate) fn keeping_wide(self) -> Self {
        Self { wide: true, ..self }
    }

    /// The same run of a kernel with these faults.
    #[must_use]
    pub fn deviating(self, deviations: &'c [&'c Deviation]) -> Self {
        Self { deviations, ..self }
    }

    /// The same run without the FP32 values behind narrowed tensors, but for those that later steps read under the rule
    /// `none`. No tensor depends on it.
    #[must_use]
    pub fn tensors_only(self) -> Self {
        Self { wide: false, ..self }
    }

    /// The row of the batch that is row `r` of this run's tensors.
    fn batch_row(&self, r: usize) -> usize {
        self.rows.computed()[r]
    }

    /// Whether the values narrowed under `rule` are kept.
    fn keeps(&self, rule: Rounding) -> bool {
        self.wide || rule == Rounding::None
    }
}

/// What a stage writes: a tensor, and for a narrowed one the FP32 values before the cast.
#[derive(Clone, Debug)]
pub struct Output {
    /// Which tensor.
    pub id: TensorId,
    /// Its stored value.
    pub tensor: Tensor,
    /// The FP32 values that were narrowed, same shape, where the run keeps them. For INT8 codes these are the scaled
    /// values.
    pub wide: Option<Array2<f32>>,
}

/// One step of the contract.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    /// The stage's name.
    pub name: &'static str,
    /// Step of the decode layer in `docs/numerics.md`.
    pub step: u8,
    /// Tensors it reads besides the layer's inputs.
    pub reads: &'static [TensorId],
    /// Tensors it writes.
    pub writes: &'static [TensorId],
    /// Cast sites inside it.
    pub sites: &'static [Site],
    /// Whether its results depend on more than IEEE operations in a fixed order: on the order of a long
    /// FP32 sum, or on exp, square root or reciprocal.
    pub free: bool,
    /// The contract's computation. It reads `reads` from the trace, which must hold them.
    pub run: fn(&Context<'_, '_>, &Trace) -> Vec<Output>,
}

impl Stage {
    /// What the stage writes, under the context's deviations. The trace must hold what it reads.
    #[must_use]
    pub fn compute(&self, context: &Context<'_, '_>, trace: &Trace) -> Vec<Output> {
        deviations::through(self, context, context.deviations, trace)
    }
}

use TensorId as T;

/// The decode layer.
pub const STAGES: &[Stage] = &[
    Stage {
        name: "normed",
        step: 1,
        reads: &[],
        writes: &[T::NormedStates],
        sites: &[Site::Normed],
        free: false,
        run: norm::normed,
    },
    Stage {
        name: "inv_rms",
        step: 2,
        reads: &[],
        writes: &[T::InvRmsStates],
        sites: &[],
        free: true,
        run: norm::inv_rms,
    },
    Stage {
        name: "quantize_normed",
        step: 3,
        reads: &[T::NormedStates],
        writes: &[T::NormedI8, T::ActScales],
        sites: &[Site::NormedI8],
        free: false,
        run: quantize::normed,
    },
    Stage {
        name: "q_projection",
        step: 4,
        reads: &[T::NormedI8, T::ActScales],
        writes: &[T::QProj],
        sites: &[],
        free: false,
        run: project::q,
    },
    Stage {
        name: "k_projection",
        step: 4,
        reads: &[T::NormedI8, T::ActScales],
        writes: &[T::KProj],
        sites: &[],
        free: false,
        run: project::k,
    },
    Stage {
        name: "v_projection",
        step: 4,
        reads: &[T::NormedI8, T::ActScales],
        writes: &[T::VProj],
        sites: &[],
        free: false,
        run: project::v,
    },
    Stage {
        name: "q_head_norm",
        step: 5,
        reads: &[T::QProj, T::InvRmsStates],
        writes: &[T::QProjNorm],
        sites: &[],
        free: true,
        run: norm::q_heads,
    },
    Stage {
        name: "k_head_norm",
        step: 5,
        reads: &[T::KProj, T::InvRmsStates],
        writes: &[T::KProjNorm],
        sites: &[],
        free: true,
        run: norm::k_heads,
    },
    Stage {
        name: "v_scale",
        step: 5,
        reads: &[T::VProj, T::InvRmsStates],
        writes: &[T::VProjNorm],
        sites: &[],
        free: false,
        run: norm::v_scaled,
    },
    Stage {
        name: "rope_q",
        step: 6,
        reads: &[T::QProjNorm],
        writes: &[T::AllQPadded],
        sites: &[Site::Q],
        free: false,
        run: rope::q,
    },
    Stage {
        name: "rope_k",
        step: 6,
        reads: &[T::KProjNorm],
        writes: &[T::KRows],
        sites: &[Site::KCache],
        free: false,
        run: rope::k,
    },
    Stage {
        name: "write_v",
        step: 6,
        reads: &[T::VProjNorm],
        writes: &[T::VRows],
        sites: &[Site::VCache],
        free: false,
        run: rope::v,
    },
    Stage {
        name: "attention",
        step: 7,
        reads: &[T::AllQPadded, T::KRows, T::VRows],
        writes: &[T::AttnOut],
        sites: &[Site::Prob, Site::Attn],
        free: true,
        run: attention::attention,
    },
    Stage {
        name: "quantize_attn",
        step: 9,
        reads: &[T::AttnOut],
        writes: &[T::AttnOutI8, T::AttnOutScales],
        sites: &[Site::AttnOutI8],
        free: false,
        run: quantize::attn,
    },
    Stage {
        name: "output_projection",
        step: 9,
        reads: &[T::AttnOutI8, T::AttnOutScales],
        writes: &[T::AttnProjFp32],
        sites: &[],
        free: false,
        run: project::o,
    },
    Stage {
        name: "residual",
        step: 10,
        reads: &[T::AttnProjFp32],
        writes: &[T::PostNormPartial],
        sites: &[Site::Residual],
        free: false,
        run: norm::residual,
    },
    Stage {
        name: "mlp_in",
        step: 10,
        reads: &[T::AttnProjFp32],
        writes: &[T::MlpNormIn],
        sites: &[Site::MlpIn],
        free: false,
        run: norm::mlp_in,
    },
    Stage {
        name: "post_inv",
        step: 10,
        reads: &[T::AttnProjFp32],
        writes: &[T::InvRmsTile],
        sites: &[],
        free: true,
        run: norm::post_inv,
    },
    Stage {
        name: "quantize_mlp",
        step: 11,
        reads: &[T::MlpNormIn],
        writes: &[T::MlpNormI8, T::MlpActScales],
        sites: &[Site::MlpNormI8],
        free: false,
        run: quantize::mlp,
    },
    Stage {
        name: "gate_projection",
        step: 11,
        reads: &[T::MlpNormI8, T::MlpActScales],
        writes: &[T::GateAccAll],
        sites: &[],
        free: false,
        run: project::gate,
    },
    Stage {
        name: "up_projection",
        step: 11,
        reads: &[T::MlpNormI8, T::MlpActScales],
        writes: &[T::UpAccAll],
        sites: &[],
        free: false,
        run: project::up,
    },
    Stage {
        name: "silu",
        step: 12,
        reads: &[T::GateAccAll, T::UpAccAll, T::InvRmsTile],
        writes: &[T::MlpDownTile],
        sites: &[Site::Silu],
        free: true,
        run: mlp::silu,
    },
    Stage {
        name: "down",
        step: 13,
        reads: &[T::MlpDownTile],
        writes: &[T::DownAccParts],
        sites: &[],
        free: true,
        run: mlp::down,
    },
    Stage {
        name: "out",
        step: 13,
        reads: &[T::DownAccParts, T::PostNormPartial],
        writes: &[T::Out],
        sites: &[Site::Down, Site::Out],
        free: false,
        run: mlp::out,
    },
];

/// The stage that writes a tensor.
#[must_use]
pub fn stage_of(id: TensorId) -> &'static Stage {
    // Every tensor is written by exactly one stage (tested), so the fallback is never taken.
    STAGES.iter().find(|stage| stage.writes.contains(&id)).unwrap_or(&STAGES[0])
}

/// Runs one stage on what the trace holds and records what it writes. Returns false, and does nothing,
/// when the trace lacks one of the stage's inputs.
pub fn run_stage(stage: &Stage, context: &Context<'_, '_>, trace: &mut Trace) -> bool {
    if !stage.reads.iter().all(|&id| trace.holds(id)) {
        return false;
    }
    for output in stage.compute(context, trace) {
        trace.record(output);
    }
    true
}

/// Runs a whole decode layer. The trace holds its tensors, and the FP32 values behind narrowed ones only where the rule
/// `none` hands them on; [`run_all`] keeps all.
#[must_use]
pub fn run_layer(inputs: &LayerInputs<'_>, policy: &Policy) -> Trace {
    run_all(Context::new(inputs, policy).tensors_only())
}

/// Runs the whole table from the inputs on. Padding rows that replicate row 0 are not computed.
#[must_use]
pub fn run_all(context: Context<'_, '_>) -> Trace {
    // A fault may tell replicated rows apart.
    let rows = if context.deviations.is_empty() { Rows::distinct(context.inputs) } else { Rows::all() };
    let context = Context { rows, ..context };
    // On a thread of the pool: work that is split there need not be handed over each time.
    rayon::scope(|_| {
        let mut trace = Trace::new();
        for stage in STAGES {
            run_stage(stage, &context, &mut trace);
        }
        trace.of_rows(context.rows)
    })
}

/// Elements from which on more threads than one pay: below, waking them takes longer than the work.
const PARALLEL: usize = 1 << 17;

/// Calls `row` with each item and its index, compiled for the CPU's vector level, on as many threads as `elements` in
/// all pay for.
fn each_row<T: Send>(items: impl Iterator<Item = T>, elements: usize, row: impl Fn(usize, T) + Sync) {
    let arch = Arch::new();
    let one = |(index, item)| {
        arch.dispatch(
            #[inline(always)]
            || row(index, item),
        )
    };
    let items: Vec<(usize, T)> = items.enumerate().collect();
    if elements < PARALLEL { items.into_iter().for_each(one) } else { items.into_par_iter().for_each(one) }
}

/// `[rows, columns]` of a tensor in this run, and how many elements of it are those of one row of the batch.
fn extent(context: &Context<'_, '_>, id: TensorId) -> ((usize, usize), usize) {
    let [rows, columns] = id.shape(context.inputs.geometry);
    ((rows / BATCH * context.rows.computed().len(), columns), rows / BATCH * columns)
}

/// A BF16 output. `row(r, out)` gives the values before the cast of all that belongs to row `r` of this run; it finds
/// zeros in `out`.
fn narrowed(
    context: &Context<'_, '_>,
    id: TensorId,
    site: Site,
    row: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<Output> {
    let rule = context.policy.at(site);
    let (shape, width) = extent(context, id);
    let mut tensor = Array2::from_elem(shape, bf16::ZERO);
    let mut wide = context.keeps(rule).then(|| Array2::zeros(shape));
    let mut kept = wide.as_mut().map(|wide| rows_mut(wide, width));
    let rows = rows_mut(&mut tensor, width).map(|narrow| (narrow, kept.as_mut().and_then(Iterator::next)));
    each_row(
        rows,
        shape.0 * shape.1,
        #[inline(always)]
        |r, (narrow, kept)| {
            let mut dropped = Vec::new();
            let values = kept.unwrap_or_else(|| {
                dropped.resize(width, 0.0);
                &mut dropped
            });
            row(r, values);
            narrow_all(values, rule, narrow);
        },
    );
    vec![Output { id, tensor: Tensor::Bf16(tensor), wide }]
}

/// An FP32 output. `row(r, out)` gives all that belongs to row `r` of this run.
fn plain(context: &Context<'_, '_>, id: TensorId, row: impl Fn(usize, &mut [f32]) + Sync) -> Vec<Output> {
    let (shape, width) = extent(context, id);
    let mut values = Array2::zeros(shape);
    each_row(
        rows_mut(&mut values, width),
        shape.0 * shape.1,
        #[inline(always)]
        |r, out| {
            row(r, out);
            one_nan(out);
        },
    );
    vec![Output { id, tensor: Tensor::F32(values), wide: None }]
}

/// Narrows every value.
#[inline(always)]
fn narrow_all(values: &[f32], rule: Rounding, out: &mut [bf16]) {
    under(
        rule,
        #[inline(always)]
        |rule| out.iter_mut().zip(values).for_each(|(out, &value)| *out = to_bf16(value, rule)),
    );
}

/// Every NaN of an FP32 output becomes the same one: which pattern an operation gives is the CPU's own affair.
#[inline(always)]
fn one_nan(values: &mut [f32]) {
    for value in values {
        let bits = value.to_bits();
        *value = f32::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { f32::NAN.to_bits() } else { bits });
    }
}

/// `width` elements at a time of an array without gaps.
fn rows_mut<T>(values: &mut Array2<T>, width: usize) -> ChunksExactMut<'_, T> {
    values.as_slice_mut().unwrap_or_default().chunks_exact_mut(width.max(1))
}

/// The elements of a row, where they lie if they lie side by side.
fn contiguous<T: Clone>(row: ArrayView1<'_, T>) -> Cow<'_, [T]> {
    row.to_slice().map_or_else(|| Cow::Owned(row.to_vec()), Cow::Borrowed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp32_outputs_hold_one_nan_only() {
        let patterns =
            [0xFFC0_0000, 0x7F80_0001, 0x7FC0_1234, 0x3F80_0000, 0xFF80_0000, 0x8000_0000].map(f32::from_bits);
        let mut values = patterns;
        one_nan(&mut values);
        let bits = values.map(f32::to_bits);
        let nan = f32::NAN.to_bits();
        assert_eq!(bits, [nan, nan, nan, 0x3F80_0000, 0xFF80_0000, 0x8000_0000]);
    }

    #[test]
    fn every_tensor_is_written_once_and_read_only_after_it_is_written() {
        let mut written = Vec::new();
        for stage in STAGES {
            for read in stage.reads {
                assert!(written.contains(read), "{} reads {} too early", stage.name, read.name());
            }
            for write in stage.writes {
                assert!(!written.contains(write), "{} is written twice", write.name());
                written.push(*write);
            }
        }
        written.sort_unstable();
        assert_eq!(written, TensorId::ALL);
    }
}
