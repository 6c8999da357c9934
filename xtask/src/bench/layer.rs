//! The decode layers that are timed: cases in memory of one geometry that share their weights and caches, in the
//! kernels' layout as generated, and in a checkpoint's by reading the same buffers the other way round.

use cases::seeded::{self, SeededError};
use cases::{Case, Input, InputStore, Inputs, NewCase, Recipe, RecipeKind, new_case};
use ndarray::{Array2, ArrayView2, ShapeError};
use reference::{DType, DownWeight, Geometry, LayerInputs, LayerWeights, Tensor};

use crate::refusal::Refusal;

/// How a layer's weights lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[in, out]` with a BF16 down weight, as the device's kernels hold them.
    InOut,
    /// `[out, in]` with an INT8 down weight and its scale, as checkpoints hold them.
    OutIn,
}

/// Which layer: rows that differ, and the context of each. Further rows are padding that repeats row 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Distinct rows, 1..=16.
    pub rows: usize,
    /// Context length of each.
    pub context: usize,
}

/// Seed of all that is generated.
const SEED: u64 = 101;

/// Layers of one geometry. What their inputs have in common is generated once and held once.
pub struct Layers {
    geometry: &'static str,
    max_seq: usize,
    store: InputStore,
}

impl Layers {
    /// Layers of a named geometry, with contexts up to `max_seq`.
    pub fn new(geometry: &'static str, max_seq: usize) -> Self {
        Self { geometry, max_seq, store: InputStore::new() }
    }

    /// The case of a layer.
    ///
    /// # Errors
    /// A shape that makes no valid case.
    pub fn case(&self, shape: Shape) -> Result<Case, Refusal> {
        let named = NewCase::named("bench", self.geometry);
        let named = named.ok_or_else(|| Refusal::Request(format!("no geometry is called `{}`", self.geometry)))?;
        let seq_lens = vec![shape.context; shape.rows];
        let new = NewCase { seed: SEED, active_batch: shape.rows, seq_lens, max_seq: self.max_seq, ..named };
        Ok(new_case(new)?)
    }

    /// The inputs of a layer, generated as far as they are not held.
    ///
    /// # Errors
    /// A shape that makes no valid case, or inputs that this machine cannot hold.
    pub fn inputs(&self, shape: Shape) -> Result<Inputs, Refusal> {
        Ok(Inputs::generate(&self.case(shape)?, &self.store)?)
    }
}

/// Codes of a down weight as a checkpoint holds it, `[H, I]`. Cases hold the BF16 weight that a loader makes of such
/// codes, so these are drawn separately.
///
/// # Errors
/// The generator refuses.
pub fn down_codes(geometry: &Geometry) -> Result<Array2<i8>, Refusal> {
    let shape = [geometry.hidden_size, geometry.intermediate_size];
    let recipe = Recipe::new(RecipeKind::Int8Normal { std: 32 });
    match seeded::tensor(SEED, Input::WDown.name(), DType::I8, shape, &recipe) {
        Ok(Tensor::I8(codes)) => Ok(codes),
        Ok(other) => Err(SeededError::DType(other.dtype().name())),
        Err(error) => Err(error),
    }
    .map_err(|error| Refusal::Request(format!("{}: {error}", Input::WDown.name())))
}

/// The layer as a checkpoint holds it. The INT8 buffers stay where they are and are read as `[out, in]`: other
/// matrices than before, of the same sizes and the same distribution. `down` is `[H, I]`; its scale is that of the
/// output projection, which has as many channels.
///
/// # Errors
/// A weight that is not in one piece.
pub fn as_checkpoint<'a>(inputs: LayerInputs<'a>, down: ArrayView2<'a, i8>) -> Result<LayerInputs<'a>, ShapeError> {
    let turned = |w: ArrayView2<'a, i8>| {
        let (depth, outputs) = w.dim();
        Ok(w.into_shape_with_order((outputs, depth))?.reversed_axes())
    };
    let w = inputs.weights;
    let weights = LayerWeights {
        wq: turned(w.wq)?,
        wk: turned(w.wk)?,
        wv: turned(w.wv)?,
        wo: turned(w.wo)?,
        w_gate: turned(w.w_gate)?,
        w_up: turned(w.w_up)?,
        w_down: DownWeight::Int8 { codes: down.reversed_axes(), scale: w.wo_scale },
        ..w
    };
    Ok(LayerInputs { weights, ..inputs })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_layer_has_the_same_sizes_in_the_same_memory() {
        let layers = Layers::new("mini", 256);
        let inputs = layers.inputs(Shape { rows: 2, context: 200 }).unwrap();
        let down = down_codes(inputs.geometry()).unwrap();
        let held = inputs.layer(0).unwrap();
        let turned = as_checkpoint(held, down.view()).unwrap();
        assert_eq!(turned.weights.wk.dim(), held.weights.wk.dim());
        assert_eq!(turned.weights.wk.strides(), [1, 2560]);
        assert_eq!(turned.weights.wk.as_ptr(), held.weights.wk.as_ptr());
        assert_eq!(turned.weights.w_down.dim(), held.weights.w_down.dim());
    }
}
