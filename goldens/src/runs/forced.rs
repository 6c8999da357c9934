//! The reference on the device's own history: every token's layers run from its embedding, and attention sees in every
//! layer what the device wrote for the tokens before it and for the token itself. So no token inherits the flips of an
//! earlier one, no layer's attention those of its own keys, and all tokens are independent of each other: they run side
//! by side, as rows of a batch.

use half::bf16;
use ndarray::{Array2, ArrayView2};
use reference::Policy;
use reference::model::{ModelError, Weights};

use super::one_layer::OneLayer;
use super::plan::Plan;

/// What the device's run is known by.
pub struct Forced<'a, W> {
    /// The model.
    pub weights: &'a W,
    /// The run's places.
    pub plan: &'a Plan<'a>,
    /// The token that was fed at each place; `None` where nothing tells.
    pub fed: &'a [Option<usize>],
    /// K of each place by layer, `[places, KV*D]`.
    pub k: &'a [Array2<bf16>],
    /// V likewise.
    pub v: &'a [Array2<bf16>],
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub cos: ArrayView2<'a, f32>,
    /// RoPE sines.
    pub sin: ArrayView2<'a, f32>,
}

/// What the reference gives for some places, one a row.
#[derive(Clone, Debug)]
pub struct States {
    /// K by layer, `[n, KV*D]`.
    pub k: Vec<Array2<bf16>>,
    /// V by layer.
    pub v: Vec<Array2<bf16>>,
    /// The last layer's output, `[n, H]`.
    pub hidden: Array2<bf16>,
    /// The FP32 values that were narrowed to it, where a decode step made it.
    pub wide: Option<Array2<f32>>,
    /// There, the magnitude of the larger of the two narrowed values whose sum that is.
    pub addends: Option<Array2<f32>>,
}

impl<W: Weights + Sync> Forced<'_, W> {
    /// Runs the places `indices`, all computed by decode steps or all by the prefill, under `policy`. Their tokens must
    /// be known.
    ///
    /// # Errors
    /// The model lacks a layer.
    pub fn run(&self, indices: &[usize], policy: &Policy) -> Result<States, ModelError> {
        let one = OneLayer { weights: self.weights, plan: self.plan, cos: self.cos, sin: self.sin };
        let hidden = Array2::from_elem((indices.len(), self.plan.geometry.hidden_size), bf16::ZERO);
        let mut states = States { k: Vec::new(), v: Vec::new(), hidden, wide: None, addends: None };
        let table = self.weights.embed_tokens();
        for (mut row, &index) in states.hidden.rows_mut().into_iter().zip(indices) {
            if let Some(token) = self.fed[index].filter(|&token| token < table.nrows()) {
                row.assign(&table.row(token));
            }
        }
        for layer in 0..self.plan.layers {
            let history = [&self.k[layer], &self.v[layer]];
            let ran = one.run(layer, indices, states.hidden.view(), history, policy)?;
            states.k.push(ran.k);
            states.v.push(ran.v);
            (states.hidden, states.wide, states.addends) = (ran.out, ran.wide, ran.addends);
        }
        Ok(states)
    }
}
