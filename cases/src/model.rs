//! The generated model of a `tokens` case, as the reference reads a model.

use half::bf16;
use ndarray::{ArrayView1, ArrayView2, Axis};
use reference::model::Weights;
use reference::{DType, Geometry, LayerWeights};
use safetensors::Dtype;

use crate::checkpoint::{Fingerprint, Named, fingerprint};
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

    /// The fingerprint of the whole model, over its tensors in the kernels' layout (`docs/checkpoints.md`, Fingerprint).
    ///
    /// # Errors
    /// As [`Inputs::model`].
    pub fn fingerprint(
        &self,
        rope_theta: f64,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Fingerprint, InputError> {
        let model = self.model()?;
        // What is in the caches before the run changes nothing that it gives.
        let weights = Input::ALL.into_iter().filter(|input| {
            !matches!(input, Input::HiddenStates | Input::KCache | Input::VCache | Input::RopeCos | Input::RopeSin)
        });
        let named = |input: Input| {
            let dtype = match input.dtype() {
                DType::Bf16 => Dtype::BF16,
                DType::F32 => Dtype::F32,
                DType::I8 => Dtype::I8,
                DType::I32 => Dtype::I32,
                DType::I64 => Dtype::I64,
            };
            let tensor = self.tensor(input)?;
            let shape = tensor.shape().to_vec();
            Some(Named { name: input.name().to_owned(), dtype, shape, bytes: self.bytes(input)? })
        };
        Ok(fingerprint(&model.geometry, rope_theta, weights.filter_map(named).collect(), progress))
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
