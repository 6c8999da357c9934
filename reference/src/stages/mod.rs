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

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, s};
use pulp::Arch;
use rayon::prelude::*;

use crate::geometry::BATCH;
use crate::inputs::LayerInputs;
use crate::policy::{Policy, Site};
use crate::products::Products;
use crate::rounding::{Rounding, to_bf16, widen};
use crate::tensor::{Tensor, TensorId, nothing};

pub use attention::{KvSource, attend};
pub use quantize::{RowScale, row_scale};

/// What a stage function sees besides the tensors it reads.
#[derive(Clone, Copy, Debug)]
pub struct Context<'c, 'd> {
    /// The layer's inputs.
    pub inputs: &'c LayerInputs<'d>,
    /// How to round, and which freedoms to take.
    pub policy: &'c Policy,
    /// Integer products that runs over these weights share; none: every product is computed.
    pub products: Option<&'c Products>,
    /// The row that each row is known to equal in every tensor: itself, or an earlier one of which it is a replica.
    equal_to: [usize; BATCH],
}

impl<'c, 'd> Context<'c, 'd> {
    /// A run that shares nothing.
    #[must_use]
    pub fn new(inputs: &'c LayerInputs<'d>, policy: &'c Policy) -> Self {
        Self { inputs, policy, products: None, equal_to: std::array::from_fn(|b| b) }
    }

    /// A run of the whole table from the inputs on, in which padding rows that replicate row 0 are computed once: they
    /// have its input and position, and step 8 gives them its attention, so that all else is equal too.
    fn replicating(mut self) -> Self {
        let (x, batch) = (self.inputs.hidden_states, self.inputs.batch);
        let equal = |b: usize| x.row(b).iter().zip(x.row(0)).all(|(a, b)| a.to_bits() == b.to_bits());
        for b in batch.active..BATCH {
            if batch.seq_lens[b] == batch.seq_lens[0] && equal(b) {
                self.equal_to[b] = 0;
            }
        }
        self
    }

    /// The same run, sharing integer products. No result depends on it.
    #[must_use]
    pub fn sharing(self, products: &'c Products) -> Self {
        Self { products: Some(products), ..self }
    }
}

/// What a stage writes: a tensor, and for a narrowed one the FP32 values before the cast.
#[derive(Clone, Debug)]
pub struct Output {
    /// Which tensor.
    pub id: TensorId,
    /// Its stored value.
    pub tensor: Tensor,
    /// The FP32 values that were narrowed, same shape. For INT8 codes these are the scaled values.
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
    /// The computation. It reads `reads` from the trace, which must hold them.
    pub run: fn(&Context<'_, '_>, &Trace) -> Vec<Output>,
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

/// Tensors that passed between stages, with the FP32 values behind narrowed ones. Cloning is cheap.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    tensors: BTreeMap<TensorId, Arc<Tensor>>,
    wide: BTreeMap<TensorId, Arc<Array2<f32>>>,
}

impl Trace {
    /// An empty trace.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The tensor, where it is known.
    #[must_use]
    pub fn get(&self, id: TensorId) -> Option<&Arc<Tensor>> {
        self.tensors.get(&id)
    }

    /// The FP32 values that were narrowed to this tensor, where its stage ran.
    #[must_use]
    pub fn wide(&self, id: TensorId) -> Option<&Arc<Array2<f32>>> {
        self.wide.get(&id)
    }

    /// Sets a tensor to somebody else's values: what teacher forcing does.
    pub fn force(&mut self, id: TensorId, tensor: Arc<Tensor>) {
        self.wide.remove(&id);
        self.tensors.insert(id, tensor);
    }

    /// Sets a tensor to what another run gave, with the values behind it.
    pub fn take(&mut self, id: TensorId, other: &Self) {
        if let Some(tensor) = other.get(id) {
            self.force(id, Arc::clone(tensor));
            self.wide.extend(other.wide(id).map(|wide| (id, Arc::clone(wide))));
        }
    }

    /// Keeps what a stage wrote.
    pub fn record(&mut self, output: Output) {
        match output.wide {
            Some(wide) => self.wide.insert(output.id, Arc::new(wide)),
            None => self.wide.remove(&output.id),
        };
        self.tensors.insert(output.id, Arc::new(output.tensor));
    }

    /// FP32 tensor as a view. A missing one reads as empty; [`run_stage`] checks before it runs a stage.
    #[must_use]
    pub fn f32(&self, id: TensorId) -> ArrayView2<'_, f32> {
        self.get(id).map_or_else(nothing, |tensor| tensor.f32())
    }

    /// INT8 tensor as a view.
    #[must_use]
    pub fn i8(&self, id: TensorId) -> ArrayView2<'_, i8> {
        self.get(id).map_or_else(nothing, |tensor| tensor.i8())
    }

    /// BF16 tensor as a view.
    #[must_use]
    pub fn bf16(&self, id: TensorId) -> ArrayView2<'_, bf16> {
        self.get(id).map_or_else(nothing, |tensor| tensor.bf16())
    }

    /// What later steps see of a narrowed tensor: its BF16 values widened, or the FP32 values
    /// themselves where the site's rule is `none`.
    #[must_use]
    pub fn widened(&self, id: TensorId, rule: Rounding) -> Array2<f32> {
        self.widened_rows(id, rule, 0..self.bf16(id).nrows())
    }

    /// Some rows of [`Trace::widened`].
    #[must_use]
    pub fn widened_rows(&self, id: TensorId, rule: Rounding, rows: Range<usize>) -> Array2<f32> {
        let rows = s![rows, ..];
        match (rule, self.wide(id)) {
            (Rounding::None, Some(wide)) => wide.slice(rows).to_owned(),
            _ => self.bf16(id).slice(rows).mapv(widen),
        }
    }
}

/// Runs one stage on what the trace holds and records what it writes. Returns false, and does nothing,
/// when the trace lacks one of the stage's inputs.
pub fn run_stage(stage: &Stage, context: &Context<'_, '_>, trace: &mut Trace) -> bool {
    if stage.reads.iter().any(|&id| trace.get(id).is_none()) {
        return false;
    }
    for output in (stage.run)(context, trace) {
        trace.record(output);
    }
    true
}

/// Runs a whole decode layer.
#[must_use]
pub fn run_layer(inputs: &LayerInputs<'_>, policy: &Policy) -> Trace {
    let context = Context::new(inputs, policy).replicating();
    let mut trace = Trace::new();
    for stage in STAGES {
        run_stage(stage, &context, &mut trace);
    }
    trace
}

/// A BF16 output with the values before its cast.
fn narrowed(context: &Context<'_, '_>, id: TensorId, site: Site, wide: Array2<f32>) -> Vec<Output> {
    let rule = context.policy.at(site);
    let wide = row_major(wide);
    let mut tensor = Array2::from_elem(wide.dim(), bf16::ZERO);
    if let (Some(tensor), Some(wide)) = (tensor.as_slice_mut(), wide.as_slice()) {
        // All that belongs to a row of the batch lies together, in however many rows of the tensor.
        let width = wide.len() / BATCH;
        fill_rows(tensor, width, &context.equal_to, |b, tensor| {
            for (narrow, &wide) in tensor.iter_mut().zip(&wide[b * width..]) {
                *narrow = to_bf16(wide, rule);
            }
        });
    }
    vec![Output { id, tensor: Tensor::Bf16(tensor), wide: Some(wide) }]
}

/// Elements from which on more threads than one pay: below, waking them takes longer than the work.
const PARALLEL: usize = 1 << 17;

/// FP32 values `[rows, width]`, one row for each entry of `equal_to`, filled by [`fill_rows`].
fn by_rows(equal_to: &[usize], width: usize, row: impl Fn(usize, &mut [f32]) + Sync) -> Array2<f32> {
    let mut out = Array2::zeros((equal_to.len(), width));
    if let Some(out) = out.as_slice_mut() {
        fill_rows(out, width, equal_to, row);
    }
    out
}

/// Fills each row with `row` on one thread, compiled for the CPU's vector level; a row that equals an earlier one is
/// copied from it.
fn fill_rows<T: Copy + Send>(out: &mut [T], width: usize, equal_to: &[usize], row: impl Fn(usize, &mut [T]) + Sync) {
    if width == 0 {
        return;
    }
    let together = if out.len() < PARALLEL { equal_to.len() } else { 1 };
    let rows = out.par_chunks_exact_mut(width).zip(equal_to).enumerate().with_min_len(together);
    rows.for_each(|(index, (out, &equal))| {
        if equal == index {
            Arch::new().dispatch(|| row(index, out));
        }
    });
    for (index, &equal) in equal_to.iter().enumerate().filter(|(index, equal)| index != *equal) {
        out.copy_within(equal * width..(equal + 1) * width, index * width);
    }
}

/// The elements of a row, where they lie if they lie side by side.
fn contiguous<T: Clone>(row: ArrayView1<'_, T>) -> Cow<'_, [T]> {
    row.to_slice().map_or_else(|| Cow::Owned(row.to_vec()), Cow::Borrowed)
}

/// The array with its rows as slices, which vector loops want; nearly every one has them already.
fn row_major(values: Array2<f32>) -> Array2<f32> {
    if values.is_standard_layout() { values } else { values.as_standard_layout().into_owned() }
}

/// An FP32 output. Every NaN becomes the same one: which pattern an operation gives is the CPU's own affair.
fn plain(id: TensorId, mut values: Array2<f32>) -> Vec<Output> {
    if let Some(values) = values.as_slice_mut() {
        Arch::new().dispatch(|| {
            for value in values {
                let bits = value.to_bits();
                *value = f32::from_bits(if bits & 0x7FFF_FFFF > 0x7F80_0000 { f32::NAN.to_bits() } else { bits });
            }
        });
    }
    vec![Output { id, tensor: Tensor::F32(values), wide: None }]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp32_outputs_hold_one_nan_only() {
        let patterns =
            [0xFFC0_0000, 0x7F80_0001, 0x7FC0_1234, 0x3F80_0000, 0xFF80_0000, 0x8000_0000].map(f32::from_bits);
        let outputs = plain(T::QProj, ndarray::arr2(&[patterns]));
        let bits: Vec<u32> = outputs[0].tensor.f32().iter().map(|value| value.to_bits()).collect();
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
