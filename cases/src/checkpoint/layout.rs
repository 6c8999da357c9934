//! The tensors of a Qwen3 checkpoint: names, shapes and kinds, as a geometry and the form of the checkpoint make them.
//! Reading and writing follow this one table.

use reference::Geometry;
use safetensors::Dtype;

use super::{CONFIG_FILE, INDEX_FILE, SINGLE_FILE, ascend};

/// Embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Gamma of the final norm.
pub const FINAL_NORM: &str = "model.norm.weight";
/// LM head; absent where it is tied to the embedding.
pub const HEAD: &str = "lm_head.weight";

/// How a directory names and declares its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Hugging Face's layout with compressed-tensors: `quantization_config` in `config.json`.
    HuggingFace,
    /// The layout of the Ascend compressor: `quant_model_description.json`, and a zero offset beside each scale.
    Ascend,
    /// Hugging Face's layout in BF16, without any quantization: what a W8A8 checkpoint is made from, and no model that
    /// the contract computes.
    Unquantized,
}

impl Form {
    /// A name for a report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::HuggingFace => "Hugging Face (compressed-tensors)",
            Self::Ascend => "Ascend (msmodelslim)",
            Self::Unquantized => "Hugging Face (not quantized)",
        }
    }

    /// The file that says how the tensors are quantized.
    pub(super) fn declared_in(self) -> &'static str {
        if self == Self::Ascend { ascend::DESCRIPTION_FILE } else { CONFIG_FILE }
    }

    /// The index of several shards, and the single file that may be there instead.
    pub(super) fn files(self) -> (&'static str, &'static str) {
        if self == Self::Ascend { (ascend::INDEX_FILE, ascend::SINGLE_FILE) } else { (INDEX_FILE, SINGLE_FILE) }
    }

    /// Types that such a tensor may have.
    pub(super) fn types(self, part: Part) -> &'static [Dtype] {
        match part {
            Part::Codes => &[Dtype::I8],
            Part::Scale if self == Self::Ascend => &[Dtype::F32],
            Part::Offset => &[Dtype::F32],
            Part::Weights => &[Dtype::BF16],
            Part::Scale | Part::Norm | Part::Matrix => &[Dtype::BF16, Dtype::F32],
        }
    }

    /// The tensors of one layer, in the order in which they are checked.
    pub(super) fn of_layer(self, geometry: &Geometry, layer: usize) -> Vec<Expected> {
        match self {
            Self::HuggingFace => of_layer(geometry, layer),
            Self::Ascend => of_layer(geometry, layer).into_iter().chain(offsets(geometry, layer)).collect(),
            Self::Unquantized => unquantized(geometry, layer),
        }
    }
}

/// What a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// INT8 codes of a projection, `[out, in]`.
    Codes,
    /// Their scales, BF16 or FP32 `[out, 1]`.
    Scale,
    /// Their offsets, FP32 `[out, 1]`, all 0 because the scheme is symmetric.
    Offset,
    /// A projection that is not quantized, BF16 `[out, in]`.
    Weights,
    /// Gamma of a norm, BF16 or FP32.
    Norm,
    /// Embedding or head, BF16 or FP32 `[vocab, H]`.
    Matrix,
}

/// A tensor that a checkpoint holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Its name.
    pub name: String,
    /// What it is.
    pub part: Part,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// The norms of a layer, in the order of [`norms`].
pub const NORMS: [&str; 4] = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"];

/// The projections of a layer, in the order of [`projections`].
pub const PROJECTIONS: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Name of a module's tensor.
pub fn name(layer: usize, module: &str, tensor: &str) -> String {
    format!("model.layers.{layer}.{module}.{tensor}")
}

/// Widths of the norms.
pub fn norms(geometry: &Geometry) -> [usize; 4] {
    [geometry.hidden_size, geometry.hidden_size, geometry.head_dim, geometry.head_dim]
}

/// `(out, in)` of the projections.
pub fn projections(geometry: &Geometry) -> [(usize, usize); 7] {
    let (hidden, inner) = (geometry.hidden_size, geometry.intermediate_size);
    let (q, kv) = (geometry.q_width(), geometry.kv_width());
    [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (inner, hidden), (inner, hidden), (hidden, inner)]
}

/// A tensor of each projection of a layer: its offsets, say. `wide` says whether it has the inputs as a second
/// dimension, or 1.
fn of_projections(
    geometry: &Geometry,
    layer: usize,
    what: &'static str,
    part: Part,
    wide: bool,
) -> impl Iterator<Item = Expected> {
    PROJECTIONS.iter().zip(projections(geometry)).map(move |(module, (out, inputs))| Expected {
        name: name(layer, module, what),
        part,
        shape: vec![out, if wide { inputs } else { 1 }],
    })
}

fn of_norms(geometry: &Geometry, layer: usize) -> impl Iterator<Item = Expected> {
    let norms = NORMS.iter().zip(norms(geometry));
    norms.map(move |(module, width)| Expected {
        name: name(layer, module, "weight"),
        part: Part::Norm,
        shape: vec![width],
    })
}

/// The tensors of one quantized layer: norms, scales, then codes.
pub fn of_layer(geometry: &Geometry, layer: usize) -> Vec<Expected> {
    let scales = of_projections(geometry, layer, "weight_scale", Part::Scale, false);
    let codes = of_projections(geometry, layer, "weight", Part::Codes, true);
    of_norms(geometry, layer).chain(scales).chain(codes).collect()
}

/// What the Ascend compressor adds to a layer.
fn offsets(geometry: &Geometry, layer: usize) -> impl Iterator<Item = Expected> {
    of_projections(geometry, layer, "weight_offset", Part::Offset, false)
}

/// The tensors of one layer before quantization.
fn unquantized(geometry: &Geometry, layer: usize) -> Vec<Expected> {
    of_norms(geometry, layer).chain(of_projections(geometry, layer, "weight", Part::Weights, true)).collect()
}

/// Whether a tensor belongs to a projection of some layer.
pub fn is_of_projection(name: &str) -> bool {
    let inner = || {
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let (module, _) = rest.rsplit_once('.')?;
        layer.parse::<usize>().ok()?;
        Some(PROJECTIONS.contains(&module))
    };
    inner().unwrap_or(false)
}

/// The tensors outside the layers: embedding, final norm and, unless it is tied, the head.
pub fn outside(geometry: &Geometry, tied: bool) -> Vec<Expected> {
    let matrix = vec![geometry.vocab_size, geometry.hidden_size];
    let tensor = |name: &str, part, shape| Expected { name: name.to_owned(), part, shape };
    let mut tensors = vec![
        tensor(EMBEDDING, Part::Matrix, matrix.clone()),
        tensor(FINAL_NORM, Part::Norm, vec![geometry.hidden_size]),
    ];
    if !tied {
        tensors.push(tensor(HEAD, Part::Matrix, matrix));
    }
    tensors
}
