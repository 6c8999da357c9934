//! The tensors a kernel reads: their names, types and shapes in the kernel's layout, and which kernel
//! reads which (`docs/numerics.md`, Tensors).

use reference::{BATCH, DType, Geometry, PAGE};

/// A generated input tensor. Tensors of several layers are stacked along dimension 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)] // Documented by `name`, `dtype` and `shape`.
pub enum Input {
    HiddenStates,
    InputRmsWeight,
    Wq,
    Wk,
    Wv,
    WqScale,
    WkScale,
    WvScale,
    QNormWeight,
    KNormWeight,
    RopeCos,
    RopeSin,
    KCache,
    VCache,
    Wo,
    WoScale,
    WGate,
    WUp,
    WGateScale,
    WUpScale,
    WDown,
    PostRmsWeight,
    FinalNormWeight,
    LmHeadWeight,
    EmbedTokens,
}

/// What the shapes of inputs depend on besides the geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Layers stacked along dimension 0.
    pub layers: usize,
    /// Rows of the RoPE tables.
    pub max_seq: usize,
    /// KV pages of each layer.
    pub pages: usize,
}

impl Input {
    /// Every input, in the order in which case files list them.
    pub const ALL: [Self; 25] = [
        Self::HiddenStates,
        Self::InputRmsWeight,
        Self::Wq,
        Self::Wk,
        Self::Wv,
        Self::WqScale,
        Self::WkScale,
        Self::WvScale,
        Self::QNormWeight,
        Self::KNormWeight,
        Self::RopeCos,
        Self::RopeSin,
        Self::KCache,
        Self::VCache,
        Self::Wo,
        Self::WoScale,
        Self::WGate,
        Self::WUp,
        Self::WGateScale,
        Self::WUpScale,
        Self::WDown,
        Self::PostRmsWeight,
        Self::FinalNormWeight,
        Self::LmHeadWeight,
        Self::EmbedTokens,
    ];

    /// The kernel's name of the tensor.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HiddenStates => "hidden_states",
            Self::InputRmsWeight => "input_rms_weight",
            Self::Wq => "wq",
            Self::Wk => "wk",
            Self::Wv => "wv",
            Self::WqScale => "wq_scale",
            Self::WkScale => "wk_scale",
            Self::WvScale => "wv_scale",
            Self::QNormWeight => "q_norm_weight",
            Self::KNormWeight => "k_norm_weight",
            Self::RopeCos => "rope_cos",
            Self::RopeSin => "rope_sin",
            Self::KCache => "k_cache",
            Self::VCache => "v_cache",
            Self::Wo => "wo",
            Self::WoScale => "wo_scale",
            Self::WGate => "w_gate",
            Self::WUp => "w_up",
            Self::WGateScale => "w_gate_scale",
            Self::WUpScale => "w_up_scale",
            Self::WDown => "w_down",
            Self::PostRmsWeight => "post_rms_weight",
            Self::FinalNormWeight => "final_norm_weight",
            Self::LmHeadWeight => "lm_head_weight",
            Self::EmbedTokens => "embed_tokens",
        }
    }

    /// The input with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|input| input.name() == name)
    }

    /// Element type.
    #[must_use]
    pub fn dtype(self) -> DType {
        match self {
            Self::HiddenStates | Self::KCache | Self::VCache | Self::WDown | Self::LmHeadWeight | Self::EmbedTokens => {
                DType::Bf16
            }
            Self::Wq | Self::Wk | Self::Wv | Self::Wo | Self::WGate | Self::WUp => DType::I8,
            _ => DType::F32,
        }
    }

    /// `[rows, columns]` in the kernel's layout. Callers bound the extent first, so that no product overflows.
    #[must_use]
    pub fn shape(self, geometry: &Geometry, extent: Extent) -> [usize; 2] {
        let (hidden, inner, head) = (geometry.hidden_size, geometry.intermediate_size, geometry.head_dim);
        let (q, kv) = (geometry.q_width(), geometry.kv_width());
        let Extent { layers, max_seq, pages } = extent;
        match self {
            Self::HiddenStates => [BATCH, hidden],
            Self::InputRmsWeight | Self::PostRmsWeight | Self::WoScale => [layers, hidden],
            Self::QNormWeight | Self::KNormWeight => [layers, head],
            Self::Wq => [layers * hidden, q],
            Self::Wk | Self::Wv => [layers * hidden, kv],
            Self::Wo => [layers * q, hidden],
            Self::WGate | Self::WUp => [layers * hidden, inner],
            Self::WDown => [layers * inner, hidden],
            Self::WqScale => [layers, q],
            Self::WkScale | Self::WvScale => [layers, kv],
            Self::WGateScale | Self::WUpScale => [layers, inner],
            Self::RopeCos | Self::RopeSin => [max_seq, head],
            Self::KCache | Self::VCache => [layers * pages * geometry.num_key_value_heads * PAGE, head],
            Self::FinalNormWeight => [1, hidden],
            Self::LmHeadWeight | Self::EmbedTokens => [geometry.vocab_size, hidden],
        }
    }

    /// Whether the tensor is drawn by a recipe; the RoPE tables follow from `rope_theta`.
    #[must_use]
    pub fn has_recipe(self) -> bool {
        !matches!(self, Self::RopeCos | Self::RopeSin)
    }

    /// Whether one decode layer reads the tensor.
    #[must_use]
    pub fn of_decode_layer(self) -> bool {
        !matches!(self, Self::FinalNormWeight | Self::LmHeadWeight | Self::EmbedTokens)
    }

    /// Whether a token run reads the tensor; its hidden states come from `embed_tokens`.
    #[must_use]
    pub fn of_tokens(self) -> bool {
        self != Self::HiddenStates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_listed_once_in_order() {
        for (index, input) in Input::ALL.into_iter().enumerate() {
            assert_eq!(input as usize, index);
            assert_eq!(Input::from_name(input.name()), Some(input));
        }
    }
}
