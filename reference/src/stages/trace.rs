//! What passes between stages: the tensors of a run, and the FP32 values behind narrowed ones.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use ndarray::{Array2, ArrayView2, s};
use pulp::Arch;

use super::Output;
use super::rows::{Replicated, Rows};
use crate::rounding::{Rounding, widen};
use crate::tensor::{Tensor, TensorId, nothing};

/// Tensors that passed between stages, with the FP32 values behind narrowed ones as far as the run kept them. Cloning
/// is cheap. A whole layer's run holds what it computed, and replicates rows when a tensor is read for the first time.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    tensors: BTreeMap<TensorId, Arc<Replicated<Tensor>>>,
    wide: BTreeMap<TensorId, Arc<Replicated<Array2<f32>>>>,
}

impl Trace {
    /// An empty trace.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the tensor is known.
    #[must_use]
    pub fn holds(&self, id: TensorId) -> bool {
        self.tensors.contains_key(&id)
    }

    /// The tensor, where it is known.
    #[must_use]
    pub fn get(&self, id: TensorId) -> Option<&Arc<Tensor>> {
        self.tensors.get(&id).map(|tensor| tensor.get(id))
    }

    /// The FP32 values that were narrowed to this tensor, where its stage ran and kept them.
    #[must_use]
    pub fn wide(&self, id: TensorId) -> Option<&Arc<Array2<f32>>> {
        self.wide.get(&id).map(|wide| wide.get(id))
    }

    /// Sets a tensor to somebody else's values: what teacher forcing does.
    pub fn force(&mut self, id: TensorId, tensor: Arc<Tensor>) {
        self.wide.remove(&id);
        self.tensors.insert(id, Arc::new(Replicated::whole(tensor)));
    }

    /// Sets a tensor to somebody else's values, over the FP32 values that are known behind it.
    pub fn overlay(&mut self, id: TensorId, tensor: Arc<Tensor>) {
        self.tensors.insert(id, Arc::new(Replicated::whole(tensor)));
    }

    /// Sets a tensor to what another run gave, with the values behind it.
    pub fn take(&mut self, id: TensorId, other: &Self) {
        if let Some(tensor) = other.tensors.get(&id) {
            self.wide.remove(&id);
            self.wide.extend(other.wide.get(&id).map(|wide| (id, Arc::clone(wide))));
            self.tensors.insert(id, Arc::clone(tensor));
        }
    }

    /// Keeps what a stage wrote.
    pub fn record(&mut self, output: Output) {
        self.force(output.id, Arc::new(output.tensor));
        self.wide.extend(output.wide.map(|wide| (output.id, Arc::new(Replicated::whole(Arc::new(wide))))));
    }

    /// The same trace, whose tensors are known to have `rows` of the batch only: from here on it shows all rows.
    pub(super) fn of_rows(mut self, rows: Rows) -> Self {
        self.tensors.values_mut().for_each(|tensor| *tensor = Arc::new(tensor.of_rows(rows)));
        self.wide.values_mut().for_each(|wide| *wide = Arc::new(wide.of_rows(rows)));
        self
    }

    /// FP32 tensor as a view. A missing one reads as empty; [`super::run_stage`] checks before it runs a stage.
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
        match (rule, self.wide(id)) {
            (Rounding::None, Some(wide)) => wide.slice(s![rows, ..]).to_owned(),
            _ => {
                let narrow = self.bf16(id).slice_move(s![rows, ..]);
                match narrow.to_slice() {
                    // A loop that vectorizes.
                    Some(values) => Array2::from_shape_vec(narrow.dim(), widen_all(values)).unwrap_or_default(),
                    None => narrow.mapv(widen),
                }
            }
        }
    }
}

/// Every value widened.
fn widen_all(values: &[bf16]) -> Vec<f32> {
    Arch::new().dispatch(
        #[inline(always)]
        || values.iter().map(|&value| widen(value)).collect(),
    )
}
