//! The whole decode step that is timed: a checkpoint, and a cache that holds seeded keys and values of every earlier
//! token in place of those that a prefill would have written. No time depends on their values.

use bytemuck::cast_slice;
use cases::Checkpoint;
use cases::seeded::{self, Rope, SeededError};
use cases::{Input, Recipe, RecipeKind};
use ndarray::{Array2, ArrayView2};
use reference::head::greedy;
use reference::model::{PagedCache, Step, decode_step};
use reference::{BATCH, Batch, DType, DownWeight, Geometry, PAGE, Policy, Tensor};

use super::layer::Shape;
use crate::refusal::Refusal;

/// Seed of keys and values.
const SEED: u64 = 101;

/// Refuses a checkpoint that the lines named after the 14B geometry must not run on. Its vocabulary may be stored with
/// padding or without.
///
/// # Errors
/// The first size that differs.
pub fn require_14b(checkpoint: &Checkpoint) -> Result<(), Refusal> {
    let Some(wanted) = Geometry::named("14b") else {
        return Err(Refusal::Request("no geometry is called `14b`".into()));
    };
    let found = checkpoint.geometry();
    let vocabularies = wanted.real_vocab_size..=wanted.vocab_size;
    let sizes = [
        ("hidden_size", found.hidden_size, wanted.hidden_size),
        ("num_attention_heads", found.num_attention_heads, wanted.num_attention_heads),
        ("num_key_value_heads", found.num_key_value_heads, wanted.num_key_value_heads),
        ("head_dim", found.head_dim, wanted.head_dim),
        ("intermediate_size", found.intermediate_size, wanted.intermediate_size),
        ("num_hidden_layers", found.num_hidden_layers, wanted.num_hidden_layers),
        ("vocab_size", found.vocab_size, found.vocab_size.clamp(*vocabularies.start(), *vocabularies.end())),
    ];
    match sizes.into_iter().find(|(_, found, wanted)| found != wanted) {
        None => Ok(()),
        Some((size, found, wanted)) => Err(Refusal::Request(format!(
            "--model {}: the benchmark's line is that of the 14B geometry, and {size} is {found} here, not {wanted}; \
             `assay model synthesize DIR --geometry 14b` makes a checkpoint of it",
            checkpoint.dir().display()
        ))),
    }
}

/// The weights of all products of a step where they lie, as bytes.
pub fn weights(checkpoint: &Checkpoint) -> Vec<&[u8]> {
    fn codes(w: ArrayView2<'_, i8>) -> Option<&[u8]> {
        w.reversed_axes().to_slice().map(cast_slice)
    }
    let layers = (0..checkpoint.geometry().num_hidden_layers).filter_map(|layer| checkpoint.layer(layer));
    let layers = layers.flat_map(|w| {
        let down = match w.w_down {
            DownWeight::Int8 { codes, .. } => Some(codes),
            DownWeight::Bf16(_) => None,
        };
        [w.wq, w.wk, w.wv, w.wo, w.w_gate, w.w_up].into_iter().chain(down).filter_map(codes)
    });
    layers.chain(checkpoint.lm_head().to_slice().map(cast_slice)).collect()
}

/// A decode step, ready to run any number of times.
pub struct ModelStep<'a> {
    checkpoint: &'a Checkpoint,
    batch: Batch,
    tokens: Vec<usize>,
    rope: [Array2<f32>; 2],
    cache: PagedCache,
    policy: Policy,
}

impl<'a> ModelStep<'a> {
    /// A step of `shape.rows` rows, 1 to 16, each with a token and pages of its own; further rows repeat row 0.
    ///
    /// # Errors
    /// A cache that this machine cannot hold, or a generator that refuses its size.
    pub fn new(checkpoint: &'a Checkpoint, shape: Shape) -> Result<Self, Refusal> {
        let geometry = checkpoint.geometry();
        let batch = batch(shape);
        let tokens = seeded::prompt(SEED, 0, shape.rows, geometry.real_vocab_size);
        let positions = shape.context.next_multiple_of(PAGE);
        let refused = |what: &str, error: SeededError| Refusal::Request(format!("{what}: {error}"));
        let table = |which, name: &str| {
            let table = seeded::rope(which, positions, geometry.head_dim, checkpoint.rope_theta());
            table.map_err(|error| refused(name, error))
        };
        let rope = [table(Rope::Cos, "rope_cos")?, table(Rope::Sin, "rope_sin")?];
        let mut cache = PagedCache::new(geometry, shape.rows * positions / PAGE)?;
        let recipe = Recipe::new(RecipeKind::Normal { mean: 0.0, std: 1.0, bf16: false });
        for layer in 0..geometry.num_hidden_layers {
            for (mut cache, input) in cache.layer_mut(layer).into_iter().flatten().zip([Input::KCache, Input::VCache]) {
                let (rows, columns) = cache.dim();
                let drawn = seeded::tensor(SEED + layer as u64, input.name(), DType::Bf16, [rows, columns], &recipe);
                match drawn.map_err(|error| refused(input.name(), error))? {
                    Tensor::Bf16(values) => cache.assign(&values),
                    other => return Err(refused(input.name(), SeededError::DType(other.dtype().name()))),
                }
            }
        }
        Ok(Self { checkpoint, batch, tokens, rope, cache, policy: Policy::rne() })
    }

    /// What the step decodes.
    pub fn batch(&self) -> &Batch {
        &self.batch
    }

    /// Embedding, all layers, final norm, head, and the greedy token of each active row. Another run gives the same
    /// tokens: it overwrites its own keys and values only.
    ///
    /// # Errors
    /// A step that does not fit its cache; a logit that is NaN.
    pub fn run(&mut self) -> Result<Vec<usize>, Refusal> {
        let [cos, sin] = &self.rope;
        let step = Step { batch: &self.batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &self.policy };
        let decoded = decode_step(self.checkpoint, &self.tokens, &step, &mut self.cache, &mut |_, _| ())?;
        let vocabulary = self.checkpoint.geometry().real_vocab_size;
        let rows = decoded.logits.rows().into_iter().enumerate();
        rows.map(|(row, logits)| {
            greedy(logits, vocabulary).map_err(|error| Refusal::Request(format!("row {row}: {error}")))
        })
        .collect()
    }
}

/// Pages one after the other, row by row; padding rows repeat row 0.
fn batch(shape: Shape) -> Batch {
    let pages = shape.context.div_ceil(PAGE);
    let first = |row: usize| if row < shape.rows { row * pages } else { 0 };
    Batch {
        active: shape.rows,
        seq_lens: [shape.context; BATCH],
        // Pages of a cache that fits a machine are far below 2^31.
        block_table: (0..BATCH).map(|row| (first(row)..first(row) + pages).map(|page| page as i32).collect()).collect(),
        slots: std::array::from_fn(|row| first(row) * PAGE + shape.context - 1),
    }
}

#[cfg(test)]
mod tests {
    use cases::checkpoint::{Synthesis, synthesize};

    use super::*;
    use crate::bench::work::Work;

    fn mini(layers: usize) -> (tempfile::TempDir, Checkpoint) {
        let dir = tempfile::tempdir().unwrap();
        let geometry = Geometry { num_hidden_layers: layers, ..Geometry::named("mini").unwrap() };
        synthesize(dir.path(), &Synthesis { geometry, seed: 3, replace: false }, &mut |_, _| ()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        (dir, checkpoint)
    }

    #[test]
    fn a_step_gives_the_same_tokens_again_and_reads_its_context() {
        let (_dir, checkpoint) = mini(2);
        let mut two = ModelStep::new(&checkpoint, Shape { rows: 2, context: 130 }).unwrap();
        let tokens = two.run().unwrap();
        assert_eq!((tokens.len(), two.run().unwrap()), (2, tokens.clone()));
        // Row 0 has the same token and pages in a batch of its own.
        let mut one = ModelStep::new(&checkpoint, Shape { rows: 1, context: 130 }).unwrap();
        let first = one.cache.layer(1).unwrap().k.row(0).to_owned();
        assert_eq!(first, two.cache.layer(1).unwrap().k.row(0));
        assert_eq!(first.iter().filter(|x| x.to_f32() == 0.0).count(), 0, "the cache is filled");
        one.cache.layer_mut(0).unwrap()[1].fill(half::bf16::ZERO);
        let decoded = |step: &mut ModelStep<'_>| {
            let [cos, sin] = &step.rope;
            let at = Step { batch: &step.batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &step.policy };
            decode_step(&checkpoint, &step.tokens, &at, &mut step.cache, &mut |_, _| ()).unwrap().logits
        };
        assert_ne!(decoded(&mut one).row(0), decoded(&mut two).row(0));
    }

    #[test]
    fn the_least_work_of_a_step_is_the_file_without_the_other_embeddings() {
        let (_dir, checkpoint) = mini(3);
        let step = ModelStep::new(&checkpoint, Shape { rows: 1, context: 200 }).unwrap();
        let Work(parts) = Work::step(&checkpoint, step.batch()).unwrap();
        let held = |info: &cases::checkpoint::TensorInfo<'_>| {
            let elements: usize = info.shape.iter().product();
            match info.name {
                "model.embed_tokens.weight" => 2 * 2560,
                "lm_head.weight" => 2 * elements,
                name if name.ends_with("_proj.weight") => elements,
                _ => 4 * elements,
            }
        };
        let weights: usize = checkpoint.tensors().map(|info| held(&info)).sum();
        let cache = 3 * 200 * 4 * 128 * 2 * 2;
        assert_eq!(parts.iter().map(|part| part.bytes).sum::<f64>(), (weights + cache) as f64);
    }

    #[test]
    fn the_weights_that_are_read_for_the_floor_are_all_products() {
        let (_dir, checkpoint) = mini(3);
        let product = |info: &cases::checkpoint::TensorInfo<'_>| match info.name {
            "lm_head.weight" => 2 * info.shape.iter().product::<usize>(),
            name if name.ends_with("_proj.weight") => info.shape.iter().product(),
            _ => 0,
        };
        let expected: usize = checkpoint.tensors().map(|info| product(&info)).sum();
        assert_eq!(weights(&checkpoint).iter().map(|bytes| bytes.len()).sum::<usize>(), expected);
    }

    #[test]
    fn another_geometry_is_refused_with_the_size_that_differs() {
        let (dir, checkpoint) = mini(1);
        let refused = require_14b(&checkpoint).unwrap_err().to_string();
        assert!(refused.contains("hidden_size is 2560 here, not 5120"), "{refused}");
        assert!(refused.contains(&dir.path().display().to_string()) && refused.contains("synthesize"), "{refused}");
    }
}
