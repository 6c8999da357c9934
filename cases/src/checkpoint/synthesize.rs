//! Synthetic checkpoints: a named geometry filled by the seeded generator, for benchmarks and tests that need a model
//! of full size and no particular one. Tensors are drawn a few rows at a time and written as they are drawn, so that
//! memory stays small; scales are such that activations stay of order 1 through any number of layers.

use std::path::Path;

use reference::geometry::GeometryError;
use reference::{DType, Geometry};
use safetensors::Dtype;
use serde_json::{Value, json};
use thiserror::Error;

use super::config::quantization_config;
use super::layout::{self, EMBEDDING, Expected, HEAD, Part};
use super::staging::{self, Output, Slot, WriteError};
use super::{CONFIG_FILE, GENERATION_FILE};
use crate::inputs::bytes;
use crate::recipe::{OutlierColumns, Recipe, RecipeKind};
use crate::seeded::{self, SeededError};

/// Bytes drawn at a time.
const PART: usize = 16 << 20;
/// Standard deviation of the INT8 codes.
const CODE_STD: u32 = 32;
/// Standard deviation of the logits.
const LOGIT_STD: f64 = 2.0;
/// Base of the rotary frequencies, and longest context.
const ROPE_THETA: f64 = 1e6;
const MAX_POSITIONS: usize = 4096;

/// What to synthesize.
#[derive(Clone, Debug, PartialEq)]
pub struct Synthesis {
    /// Sizes. As many rows of vocabulary are stored as are real.
    pub geometry: Geometry,
    /// Seed of every tensor.
    pub seed: u64,
    /// Whether the directory may hold something already: files of the same names are replaced.
    pub replace: bool,
}

/// Why there is no synthetic checkpoint.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum SynthesisError {
    #[error("geometry: {0}")]
    Geometry(#[from] GeometryError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("tensor `{tensor}`: {error}")]
    Generate { tensor: String, error: SeededError },
}

/// Writes a synthetic checkpoint into `dir`, which is made when it is not there. All files are written into a temporary
/// directory inside it first and moved when the last of them is whole: until then an old checkpoint stays as it was,
/// and so it does when the request is refused or the writing fails. While files are moved there is no `config.json`,
/// so that an interrupted run never leaves a mixture that opens. `progress` is told the bytes written so far and those
/// of all tensors.
///
/// # Errors
/// A geometry that cannot be computed, a directory in use, too little space, or what the file system says.
pub fn synthesize(dir: &Path, synthesis: &Synthesis, progress: &mut dyn FnMut(u64, u64)) -> Result<(), SynthesisError> {
    let mut geometry = synthesis.geometry.clone();
    geometry.vocab_size = geometry.real_vocab_size;
    geometry.validate()?;
    staging::write_whole(dir, synthesis.replace, total_bytes(&geometry), |staging| {
        write_files(staging, &geometry, synthesis.seed, progress)
    })
}

/// Writes the files of a checkpoint into `dir`; their names, `config.json` last.
fn write_files(
    dir: &Path,
    geometry: &Geometry,
    seed: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<String>, SynthesisError> {
    let plan = plan(geometry);
    let mut output = Output::create(dir, plan.iter().map(|tensor| tensor.slot.clone()).collect(), progress)?;
    for tensor in &plan {
        tensor.write(seed, &mut output)?;
    }
    let mut names = output.finish()?;
    names.push(staging::write_json(dir, GENERATION_FILE, &generation_config(geometry))?);
    names.push(staging::write_json(dir, CONFIG_FILE, &config(geometry))?);
    Ok(names)
}

/// Bytes of all tensors. Layers are alike, so that one of them tells.
fn total_bytes(geometry: &Geometry) -> u64 {
    let sum = |tensors: Vec<Expected>| -> u64 {
        tensors.into_iter().map(|tensor| Planned::new(geometry, tensor).slot.bytes() as u64).sum()
    };
    let layers = sum(layout::of_layer(geometry, 0)).saturating_mul(geometry.num_hidden_layers as u64);
    sum(layout::outside(geometry, false)).saturating_add(layers)
}

/// A tensor to be written, and how it is drawn.
#[derive(Clone, Debug)]
struct Planned {
    slot: Slot,
    recipe: Recipe,
}

/// All tensors in the model's order: the embedding first, final norm and head after the layers.
fn plan(geometry: &Geometry) -> Vec<Planned> {
    let layers = (0..geometry.num_hidden_layers).flat_map(|layer| layout::of_layer(geometry, layer));
    let mut order = layout::outside(geometry, false);
    let after = order.split_off(1);
    order.into_iter().chain(layers).chain(after).map(|expected| Planned::new(geometry, expected)).collect()
}

impl Planned {
    fn new(geometry: &Geometry, expected: Expected) -> Self {
        let Expected { name, part, shape } = expected;
        let normal = |mean, std| Recipe::new(RecipeKind::Normal { mean, std, bf16: false });
        let recipe = match part {
            Part::Codes => Recipe::new(RecipeKind::Int8Normal { std: CODE_STD }),
            Part::Scale => {
                let scale = weight_std(geometry, &name) / f64::from(CODE_STD);
                Recipe::new(RecipeKind::Uniform { lo: 0.5 * scale, hi: 1.5 * scale })
            }
            // Of other forms than the one that is written.
            Part::Offset | Part::Weights => normal(0.0, weight_std(geometry, &name)),
            Part::Norm => normal(1.0, 0.1),
            Part::Matrix if name == HEAD => normal(0.0, LOGIT_STD / (geometry.hidden_size as f64).sqrt()),
            Part::Matrix => {
                let outliers = OutlierColumns { period: 512, phase: 37, factor: 16.0 };
                Recipe { outlier_columns: Some(outliers), ..normal(0.0, 1.0) }
            }
        };
        debug_assert!(part != Part::Matrix || name == HEAD || name == EMBEDDING);
        let dtype = if part == Part::Codes { Dtype::I8 } else { Dtype::BF16 };
        Self { slot: Slot { name, dtype, shape }, recipe }
    }

    /// Draws the tensor a part at a time and writes each part.
    fn write(&self, seed: u64, output: &mut Output<'_>) -> Result<(), SynthesisError> {
        let Slot { name, dtype, shape } = &self.slot;
        let (rows, columns) = match shape[..] {
            [rows, columns] => (rows, columns),
            _ => (1, shape.iter().product()),
        };
        let dtype = if *dtype == Dtype::I8 { DType::I8 } else { DType::Bf16 };
        let step = (PART / (columns * dtype.size()).max(1)).max(1);
        let mut offset = 0;
        for first in (0..rows).step_by(step) {
            let part = first..rows.min(first + step);
            let drawn = seeded::rows(seed, name, dtype, part, columns, &self.recipe)
                .map_err(|error| SynthesisError::Generate { tensor: name.clone(), error })?;
            let bytes = bytes(&drawn);
            output.put(name, offset, bytes)?;
            offset += bytes.len();
        }
        Ok(())
    }
}

/// Standard deviation of a projection's weights: what gives outputs of order 1 from inputs of order 1. The two
/// projections that add to the residual stream, 2 L of them, together add no more than it holds.
fn weight_std(geometry: &Geometry, name: &str) -> f64 {
    let module = |index: usize| name.contains(layout::PROJECTIONS[index]);
    let (depth, terms) = match (module(3), module(6)) {
        (true, _) => (geometry.q_width(), 2 * geometry.num_hidden_layers),
        (_, true) => (geometry.intermediate_size, 2 * geometry.num_hidden_layers),
        _ => (geometry.hidden_size, 1),
    };
    1.0 / (depth as f64 * terms as f64).sqrt()
}

/// `config.json`, with the keys that a reader of such checkpoints looks for.
fn config(geometry: &Geometry) -> Value {
    // The shortest decimal of the FP32 value, not the digits of its FP64 neighbour.
    let eps: f64 = geometry.rms_norm_eps.to_string().parse().unwrap_or(f64::from(geometry.rms_norm_eps));
    json!({
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": false,
        "dtype": "bfloat16",
        "eos_token_id": geometry.real_vocab_size - 1,
        "head_dim": geometry.head_dim,
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": geometry.num_attention_heads,
        "num_hidden_layers": geometry.num_hidden_layers,
        "num_key_value_heads": geometry.num_key_value_heads,
        "quantization_config": quantization_config(),
        "rms_norm_eps": eps,
        "rope_theta": ROPE_THETA,
        "tie_word_embeddings": false,
        "use_sliding_window": false,
        "vocab_size": geometry.vocab_size,
    })
}

/// `generation_config.json`: greedy, and a second stop id that `config.json` does not have, as real models do.
fn generation_config(geometry: &Geometry) -> Value {
    let last = geometry.real_vocab_size - 1;
    json!({ "do_sample": false, "eos_token_id": [last, last.saturating_sub(1)] })
}

#[cfg(test)]
mod tests {
    use super::*;
    use staging::SHARD;

    #[test]
    fn the_plan_of_a_large_model_has_shards_of_at_most_4_gb() {
        let geometry = Geometry::named("14b").unwrap();
        let shards = staging::shards(plan(&geometry).into_iter().map(|tensor| tensor.slot).collect());
        let sizes: Vec<usize> = shards.iter().map(|shard| shard.iter().map(Slot::bytes).sum()).collect();
        assert_eq!(sizes.len(), 5);
        assert!(sizes.iter().all(|size| *size <= SHARD), "{sizes:?}");
        assert_eq!(sizes.iter().sum::<usize>() / 1_000_000, 16_331);
        assert_eq!(shards.iter().flatten().count(), 3 + 40 * 18);
        assert_eq!(sizes.iter().sum::<usize>() as u64, total_bytes(&geometry));
    }
}
