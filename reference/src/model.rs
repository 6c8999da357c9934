//! A whole model: one decode step through embedding, all layers, final norm and LM head, over a paged cache that it
//! owns. Weights come through a trait, a layer at a time, so that nothing here reads a file and no more of a model
//! than one layer has to be in memory.

use half::bf16;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use thiserror::Error;

use crate::geometry::{BATCH, Geometry, PAGE};
use crate::head::{final_norm, lm_head};
use crate::inputs::{Batch, Cache, LayerInputs, LayerWeights, cache_row};
use crate::policy::Policy;
use crate::stages::{KvSource, Trace, run_layer};
use crate::tensor::TensorId;

/// Where a model's weights lie.
pub trait Weights {
    /// Sizes of the model.
    fn geometry(&self) -> &Geometry;
    /// The weights of a layer, counted from 0; `None` beyond the last.
    fn layer(&self, layer: usize) -> Option<LayerWeights<'_>>;
    /// Embedding, BF16 `[vocab, H]`.
    fn embed_tokens(&self) -> ArrayView2<'_, bf16>;
    /// Gamma of the final norm, FP32 `[H]`.
    fn final_norm(&self) -> ArrayView1<'_, f32>;
    /// LM head, BF16 `[vocab, H]`.
    fn lm_head(&self) -> ArrayView2<'_, bf16>;
}

impl<W: Weights + ?Sized> Weights for &W {
    fn geometry(&self) -> &Geometry {
        (**self).geometry()
    }

    fn layer(&self, layer: usize) -> Option<LayerWeights<'_>> {
        (**self).layer(layer)
    }

    fn embed_tokens(&self) -> ArrayView2<'_, bf16> {
        (**self).embed_tokens()
    }

    fn final_norm(&self) -> ArrayView1<'_, f32> {
        (**self).final_norm()
    }

    fn lm_head(&self) -> ArrayView2<'_, bf16> {
        (**self).lm_head()
    }
}

/// Why a step cannot be computed. But for [`ModelError::NoLayer`], nothing has been written to the cache then.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum ModelError {
    #[error("{found} tokens for {active} active rows; give one a row")]
    Tokens { found: usize, active: usize },
    #[error("prompt {row} has no tokens; give it at least one")]
    EmptyPrompt { row: usize },
    #[error("prompts {} and {} both write slot {slot}; give each its own pages", rows[0], rows[1])]
    SharedSlot { slot: usize, rows: [usize; 2] },
    #[error("row {row}: token {id} is not in the vocabulary of {vocabulary}")]
    Token { row: usize, id: usize, vocabulary: usize },
    #[error("{0} active rows; a batch has 1 to {BATCH}")]
    Active(usize),
    #[error("row {row}: the context length is 0; it counts the token being decoded, so it is at least 1")]
    NoContext { row: usize },
    #[error("row {row}: position {position} has no row in RoPE tables of {rows}; build them for longer contexts")]
    Position { row: usize, position: usize, rows: usize },
    #[error("row {row}: the block table has no page for logical block {block} of a context of {context}")]
    NoPage { row: usize, block: usize, context: usize },
    #[error("row {row}: {what} {index} lies beyond the cache's {pages} pages")]
    BeyondCache { row: usize, what: &'static str, index: usize, pages: usize },
    #[error("{what} is {found:?}, expected {expected:?}")]
    Shape { what: &'static str, found: (usize, usize), expected: (usize, usize) },
    #[error("the cache holds {found} layers, the model has {expected}")]
    Layers { found: usize, expected: usize },
    #[error("the model gives no weights for layer {0}")]
    NoLayer(usize),
    #[error("a cache of {pages} pages for {layers} layers does not fit this machine's memory; use fewer pages")]
    Memory { pages: usize, layers: usize },
}

/// The paged K and V caches of every layer, each BF16 `[pages * KV * 128, D]`, zero until written.
#[derive(Clone, Debug)]
pub struct PagedCache {
    pages: usize,
    layers: Vec<[Array2<bf16>; 2]>,
}

impl PagedCache {
    /// An empty cache.
    ///
    /// # Errors
    /// It does not fit the memory.
    pub fn new(geometry: &Geometry, pages: usize) -> Result<Self, ModelError> {
        let failed = || ModelError::Memory { pages, layers: geometry.num_hidden_layers };
        let rows = pages.checked_mul(geometry.num_key_value_heads).and_then(|n| n.checked_mul(PAGE));
        let count = rows.and_then(|rows| rows.checked_mul(geometry.head_dim));
        let (rows, count) = rows.zip(count).ok_or_else(failed)?;
        let zeros = || {
            // Memory that the system gives zeroed, and only where it is written to.
            let values: Vec<bf16> = bytemuck::allocation::try_zeroed_vec(count).map_err(|()| failed())?;
            Array2::from_shape_vec((rows, geometry.head_dim), values).map_err(|_| failed())
        };
        let layers = (0..geometry.num_hidden_layers).map(|_| Ok([zeros()?, zeros()?])).collect::<Result<_, _>>()?;
        Ok(Self { pages, layers })
    }

    /// Pages of 128 tokens.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// The caches of a layer.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Option<Cache<'_>> {
        self.layers.get(layer).map(|[k, v]| Cache { k: k.view(), v: v.view() })
    }

    /// Refuses a cache that is not one of this geometry.
    pub(crate) fn check(&self, geometry: &Geometry) -> Result<(), ModelError> {
        if self.layers.len() != geometry.num_hidden_layers {
            return Err(ModelError::Layers { found: self.layers.len(), expected: geometry.num_hidden_layers });
        }
        let expected = (self.pages * geometry.num_key_value_heads * PAGE, geometry.head_dim);
        self.layers.iter().try_for_each(|[k, _]| shape("cache of a layer", k.dim(), expected))
    }

    /// K and V of a layer, to be filled with what earlier steps would have written.
    pub fn layer_mut(&mut self, layer: usize) -> Option<[ArrayViewMut2<'_, bf16>; 2]> {
        self.layers.get_mut(layer).map(|[k, v]| [k.view_mut(), v.view_mut()])
    }
}

/// What a decode step reads besides weights and cache.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Batch metadata.
    pub batch: &'a Batch,
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub rope_cos: ArrayView2<'a, f32>,
    /// RoPE sines, FP32 `[max_seq, D]`.
    pub rope_sin: ArrayView2<'a, f32>,
    /// How to round, and which freedoms to take.
    pub policy: &'a Policy,
}

/// What a decode step gives.
#[derive(Clone, Debug)]
pub struct Decoded {
    /// The last layer's output, BF16 `[16, H]`.
    pub hidden_states: Array2<bf16>,
    /// Logits of the active rows, FP32 `[active, vocab]`; those of padding rows are dropped.
    pub logits: Array2<f32>,
}

/// One decode step. `tokens` holds an id for each active row; padding rows get row 0's, as in serving. `observe` sees
/// the trace of each layer when it is done, and then it is dropped.
///
/// # Errors
/// A batch that does not fit the cache or the tables, a token outside the vocabulary: refused before anything runs.
pub fn decode_step(
    weights: &impl Weights,
    tokens: &[usize],
    step: &Step<'_>,
    cache: &mut PagedCache,
    observe: &mut dyn FnMut(usize, &Trace),
) -> Result<Decoded, ModelError> {
    check(weights.geometry(), step, cache)?;
    if tokens.len() != step.batch.active {
        return Err(ModelError::Tokens { found: tokens.len(), active: step.batch.active });
    }
    let hidden = embed(weights, tokens)?;
    let hidden_states = decode_layers(weights, hidden, step, cache, observe)?;
    let active = hidden_states.slice(ndarray::s![..step.batch.active, ..]);
    let eps = weights.geometry().rms_norm_eps;
    let normed = final_norm(active, weights.final_norm(), eps, step.policy.freedom);
    let logits = lm_head(normed.view(), weights.lm_head(), step.policy);
    Ok(Decoded { hidden_states, logits })
}

/// The embeddings of `tokens`, then row 0's again up to 16 rows: BF16 `[16, H]`.
///
/// # Errors
/// No token or more than 16, or one outside the vocabulary.
pub fn embed(weights: &impl Weights, tokens: &[usize]) -> Result<Array2<bf16>, ModelError> {
    if !(1..=BATCH).contains(&tokens.len()) {
        return Err(ModelError::Active(tokens.len()));
    }
    let embedded = embedding(weights, tokens, |row| row)?;
    let rows: Vec<usize> = (0..BATCH).map(|row| if row < tokens.len() { row } else { 0 }).collect();
    Ok(embedded.select(Axis(0), &rows))
}

/// The embeddings of any number of tokens, BF16 `[tokens, H]`; `row_of` names the row that a token belongs to.
pub(crate) fn embedding(
    weights: &impl Weights,
    tokens: &[usize],
    row_of: impl Fn(usize) -> usize,
) -> Result<Array2<bf16>, ModelError> {
    let vocabulary = weights.geometry().real_vocab_size;
    let table = weights.embed_tokens();
    if let Some((index, &id)) = tokens.iter().enumerate().find(|(_, id)| **id >= vocabulary.min(table.nrows())) {
        return Err(ModelError::Token { row: row_of(index), id, vocabulary });
    }
    Ok(table.select(Axis(0), tokens))
}

/// All layers in sequence: `out` of one is `hidden_states` of the next. Each layer's K and V are written into the
/// cache after it. The result is the last layer's output, BF16 `[16, H]`.
///
/// # Errors
/// As [`decode_step`].
pub fn decode_layers(
    weights: &impl Weights,
    mut hidden: Array2<bf16>,
    step: &Step<'_>,
    cache: &mut PagedCache,
    observe: &mut dyn FnMut(usize, &Trace),
) -> Result<Array2<bf16>, ModelError> {
    let geometry = weights.geometry();
    check(geometry, step, cache)?;
    shape("hidden_states", hidden.dim(), (BATCH, geometry.hidden_size))?;
    for (layer, [k, v]) in cache.layers.iter_mut().enumerate() {
        let inputs = LayerInputs {
            geometry,
            batch: step.batch,
            hidden_states: hidden.view(),
            weights: weights.layer(layer).ok_or(ModelError::NoLayer(layer))?,
            rope_cos: step.rope_cos,
            rope_sin: step.rope_sin,
            cache: Cache { k: k.view(), v: v.view() },
        };
        let trace = run_layer(&inputs, step.policy);
        // Where rows share a slot, what attention saw of it is what stays.
        let source = KvSource::new(&inputs, &trace);
        let writers: Vec<usize> = (0..BATCH).filter(|&b| source.writer(step.batch.slots[b]) == Some(b)).collect();
        for b in writers {
            for kv_head in 0..geometry.num_key_value_heads {
                let row = cache_row(geometry, step.batch.slots[b], kv_head);
                let columns = kv_head * geometry.head_dim..(kv_head + 1) * geometry.head_dim;
                for (cache, id) in [(&mut *k, TensorId::KRows), (&mut *v, TensorId::VRows)] {
                    cache.row_mut(row).assign(&trace.bf16(id).slice(ndarray::s![b, columns.clone()]));
                }
            }
        }
        hidden = trace.bf16(TensorId::Out).to_owned();
        observe(layer, &trace);
    }
    Ok(hidden)
}

/// Refuses a step that would read or write outside its tables and pages.
fn check(geometry: &Geometry, step: &Step<'_>, cache: &PagedCache) -> Result<(), ModelError> {
    let (batch, pages) = (step.batch, cache.pages);
    cache.check(geometry)?;
    let rows = step.rope_cos.nrows();
    shape("rope_cos", step.rope_cos.dim(), (rows, geometry.head_dim))?;
    shape("rope_sin", step.rope_sin.dim(), (rows, geometry.head_dim))?;
    if !(1..=BATCH).contains(&batch.active) {
        return Err(ModelError::Active(batch.active));
    }
    for row in 0..BATCH {
        let (context, slot) = (batch.seq_lens[row], batch.slots[row]);
        let position = context.checked_sub(1).ok_or(ModelError::NoContext { row })?;
        if position >= rows {
            return Err(ModelError::Position { row, position, rows });
        }
        if slot / PAGE >= pages {
            return Err(ModelError::BeyondCache { row, what: "slot", index: slot, pages });
        }
        // Attention reads the pages of active rows only.
        let blocks = if row < batch.active { context.div_ceil(PAGE) } else { 0 };
        for block in 0..blocks {
            let page = batch.block_table.get(row).and_then(|table| table.get(block)).copied();
            let page = page.and_then(|page| usize::try_from(page).ok());
            let index = page.ok_or(ModelError::NoPage { row, block, context })?;
            if index >= pages {
                return Err(ModelError::BeyondCache { row, what: "page", index, pages });
            }
        }
    }
    Ok(())
}

/// Refuses a shape that is not the expected one.
pub(crate) fn shape(what: &'static str, found: (usize, usize), expected: (usize, usize)) -> Result<(), ModelError> {
    if found == expected { Ok(()) } else { Err(ModelError::Shape { what, found, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::greedy;
    use crate::small::{small, tables};
    use crate::stages::run_layer;
    use ndarray::s;

    /// Row `b` has pages `2b` and `2b + 1`; padding rows repeat row 0.
    fn batch(contexts: &[usize]) -> Batch {
        let mut batch = Batch { active: contexts.len(), seq_lens: [0; BATCH], block_table: vec![], slots: [0; BATCH] };
        for row in 0..BATCH {
            let from = if row < contexts.len() { row } else { 0 };
            batch.seq_lens[row] = contexts[from];
            batch.block_table.push(vec![2 * from as i32, 2 * from as i32 + 1]);
            batch.slots[row] = batch.slot_of(row, contexts[from] - 1).unwrap();
        }
        batch
    }

    /// Greedy decoding of `steps` tokens from one prompt token a row.
    fn generate(prompts: &[usize], steps: usize) -> (Vec<Vec<usize>>, Vec<Decoded>, PagedCache) {
        let (model, [cos, sin], policy) = (small(), tables(), Policy::production());
        let mut cache = PagedCache::new(&model.geometry, 2 * BATCH).unwrap();
        let (mut tokens, mut all, mut decoded) = (prompts.to_vec(), vec![prompts.to_vec()], vec![]);
        for step in 1..=steps {
            let batch = batch(&vec![step; prompts.len()]);
            let step = Step { batch: &batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &policy };
            let done = decode_step(&model, &tokens, &step, &mut cache, &mut |_, _| ()).unwrap();
            let choose = |row: ArrayView1<'_, f32>| greedy(row, model.geometry.real_vocab_size).unwrap();
            tokens = done.logits.rows().into_iter().map(choose).collect();
            all.push(tokens.clone());
            decoded.push(done);
        }
        (all, decoded, cache)
    }

    #[test]
    fn a_step_is_its_layers_in_sequence() {
        let (model, [cos, sin], policy) = (small(), tables(), Policy::production());
        let batch = batch(&[1, 1]);
        let step = Step { batch: &batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &policy };
        let mut cache = PagedCache::new(&model.geometry, 4).unwrap();
        let mut seen = vec![];
        let done = decode_step(&model, &[3, 5], &step, &mut cache, &mut |layer, trace| {
            seen.push((layer, trace.bf16(TensorId::KRows).to_owned()));
        });
        let done = done.unwrap();

        let mut hidden = Array2::from_shape_fn((BATCH, 24), |(b, i)| model.table[(if b == 1 { 5 } else { 3 }, i)]);
        let empty = Array2::from_elem((4 * 2 * PAGE, 6), bf16::ZERO);
        for layer in 0..2 {
            let inputs = LayerInputs {
                geometry: &model.geometry,
                batch: &batch,
                hidden_states: hidden.view(),
                weights: model.layer(layer).unwrap(),
                rope_cos: cos.view(),
                rope_sin: sin.view(),
                cache: Cache { k: empty.view(), v: empty.view() },
            };
            let trace = run_layer(&inputs, &policy);
            assert_eq!(seen[layer], (layer, trace.bf16(TensorId::KRows).to_owned()));
            // Exactly the rows of the two slots are written, a KV head at a time.
            let mut expected = empty.clone();
            for b in 0..2 {
                for head in 0..2 {
                    let values = trace.bf16(TensorId::VRows);
                    let row = cache_row(&model.geometry, batch.slots[b], head);
                    expected.row_mut(row).assign(&values.slice(s![b, head * 6..head * 6 + 6]));
                }
            }
            assert_eq!(cache.layer(layer).unwrap().v, expected);
            hidden = trace.bf16(TensorId::Out).to_owned();
        }
        assert_eq!(done.hidden_states, hidden);
        assert_eq!(done.logits.dim(), (2, 20));
        assert_ne!(done.logits.row(0), done.logits.row(1));
    }

    #[test]
    fn a_row_does_not_depend_on_the_others_and_steps_see_earlier_ones() {
        let (alone, alone_decoded, _) = generate(&[3], 5);
        let (pair, pair_decoded, cache) = generate(&[3, 7], 5);
        let full: Vec<usize> = (3..15).chain([0, 1, 2, 15]).collect();
        let (sixteen, ..) = generate(&full, 5);
        for step in 0..=5 {
            assert_eq!(alone[step][0], pair[step][0]);
            assert_eq!(alone[step][0], sixteen[step][0]);
        }
        for (a, b) in alone_decoded.iter().zip(&pair_decoded) {
            assert_eq!(a.logits.row(0), b.logits.row(0));
            assert_eq!(a.hidden_states.row(0), b.hidden_states.row(0));
        }
        // Token 5 of row 1 was written beside tokens 1 to 4, into its own page.
        let k = cache.layer(1).unwrap().k;
        let written = |slot| k.row(cache_row(&small().geometry, slot, 1)).iter().any(|x| *x != bf16::ZERO);
        assert!((0..5).all(|offset| written(2 * PAGE + offset)) && !written(2 * PAGE + 5));
        // The last step of a run without its history comes out otherwise.
        let (model, [cos, sin], policy) = (small(), tables(), Policy::production());
        let batch = batch(&[5]);
        let step = Step { batch: &batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &policy };
        let mut fresh = PagedCache::new(&model.geometry, 2).unwrap();
        let forgetful = decode_step(&model, &alone[4], &step, &mut fresh, &mut |_, _| ()).unwrap();
        assert_ne!(forgetful.logits, alone_decoded[4].logits);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_runs() {
        let (model, [cos, sin], policy) = (small(), tables(), Policy::rne());
        let good = batch(&[130]);
        let refusal = |tokens: &[usize], batch: &Batch, pages: usize| {
            let step = Step { batch, rope_cos: cos.view(), rope_sin: sin.view(), policy: &policy };
            let mut cache = PagedCache::new(&model.geometry, pages).unwrap();
            let error = decode_step(&model, tokens, &step, &mut cache, &mut |_, _| ()).unwrap_err();
            assert!(cache.layers.iter().flatten().flatten().all(|x| *x == bf16::ZERO));
            error
        };
        assert_eq!(refusal(&[18], &good, 2), ModelError::Token { row: 0, id: 18, vocabulary: 18 });
        assert_eq!(refusal(&[1, 2], &good, 2), ModelError::Tokens { found: 2, active: 1 });
        let beyond = ModelError::BeyondCache { row: 0, what: "slot", index: 129, pages: 1 };
        assert_eq!(refusal(&[1], &good, 1), beyond);
        let mut bad = good.clone();
        bad.block_table[0][0] = 7;
        assert_eq!(refusal(&[1], &bad, 2), ModelError::BeyondCache { row: 0, what: "page", index: 7, pages: 2 });
        bad.block_table[0][0] = -1;
        assert_eq!(refusal(&[1], &bad, 2), ModelError::NoPage { row: 0, block: 0, context: 130 });
        let mut bad = good.clone();
        bad.seq_lens[9] = 201;
        assert_eq!(refusal(&[1], &bad, 2), ModelError::Position { row: 9, position: 200, rows: 200 });
        bad.seq_lens[9] = 0;
        assert_eq!(refusal(&[1], &bad, 2), ModelError::NoContext { row: 9 });
        assert!(matches!(PagedCache::new(&model.geometry, usize::MAX / 2), Err(ModelError::Memory { .. })));
    }
}
