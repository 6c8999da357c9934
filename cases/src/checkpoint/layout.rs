//! The tensors of a Qwen3 W8A8 checkpoint: names, shapes and kinds, as a geometry makes them. Reading and writing
//! follow this one table.

use reference::Geometry;

/// Embedding.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Gamma of the final norm.
pub const FINAL_NORM: &str = "model.norm.weight";
/// LM head; absent where it is tied to the embedding.
pub const HEAD: &str = "lm_head.weight";

/// What a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// INT8 codes of a projection, `[out, in]`.
    Codes,
    /// Their scales, BF16 or FP32 `[out, 1]`.
    Scale,
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

/// The tensors of one layer: norms, scales, then codes.
pub fn of_layer(geometry: &Geometry, layer: usize) -> Vec<Expected> {
    let tensor = |module: &str, tensor: &str, part, shape| Expected { name: name(layer, module, tensor), part, shape };
    let norms = NORMS.iter().zip(norms(geometry)).map(|(module, width)| (module, "weight", Part::Norm, vec![width]));
    let sizes = || PROJECTIONS.iter().zip(projections(geometry));
    let scales = sizes().map(|(module, (out, _))| (module, "weight_scale", Part::Scale, vec![out, 1]));
    let codes = sizes().map(|(module, (out, inputs))| (module, "weight", Part::Codes, vec![out, inputs]));
    norms.chain(scales).chain(codes).map(|(module, what, part, shape)| tensor(module, what, part, shape)).collect()
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
