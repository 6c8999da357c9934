//! The generated model of a `tokens` case, as the reference reads a model.

use half::bf16;
use ndarray::{ArrayView1, ArrayView2, Axis};
use reference::model::Weights;
use reference::{Geometry, LayerWeights};

use crate::input::Input;
use crate::inputs::{InputError, Inputs};

/// All layers that a case holds between embedding, final norm and LM head: views into its [`Inputs`].
#[derive(Clone, Debug)]
pub struct GeneratedModel<'a> {
    geometry: Geometry,
    inputs: &'a Inputs,
    embed_tokens: ArrayView2<'a, bf16>,
    final_norm: ArrayView1<'a, f32>,
    lm_head: ArrayView2<'a, bf16>,
}

impl Inputs {
    /// The whole model. Its geometry counts the layers that the case holds, which may be fewer than its geometry's.
    ///
    /// # Errors
    /// A `decode_layer` case, whose inputs are those of a layer only.
    pub fn model(&self) -> Result<GeneratedModel<'_>, InputError> {
        Ok(GeneratedModel {
            geometry: Geometry { num_hidden_layers: self.layers(), ..self.geometry().clone() },
            inputs: self,
            embed_tokens: self.bf16(Input::EmbedTokens)?,
            final_norm: self.f32(Input::FinalNormWeight)?.index_axis_move(Axis(0), 0),
            lm_head: self.bf16(Input::LmHeadWeight)?,
        })
    }
}

impl Weights for GeneratedModel<'_> {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn layer(&self, layer: usize) -> Option<LayerWeights<'_>> {
        self.inputs.weights(layer).ok()
    }

    fn embed_tokens(&self) -> ArrayView2<'_, bf16> {
        self.embed_tokens.view()
    }

    fn final_norm(&self) -> ArrayView1<'_, f32> {
        self.final_norm.view()
    }

    fn lm_head(&self) -> ArrayView2<'_, bf16> {
        self.lm_head.view()
    }
}
