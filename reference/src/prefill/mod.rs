//! Prefill: the tokens of one or more prompts through all layers, causally, over the paged cache
//! (`docs/numerics.md`, Prefill).
//!
//! A call takes a chunk of each prompt; earlier tokens of a prompt are already in the cache. A token's result depends
//! on the tokens before it and on nothing else, so that a prompt in one chunk or in several gives the same bits.

mod attention;
mod layer;

use half::bf16;
use ndarray::{Array2, ArrayView2};

use crate::geometry::{Geometry, PAGE};
use crate::inputs::cache_row;
use crate::model::{ModelError, PagedCache, Weights, embedding, shape};
use crate::policy::Policy;
use crate::stages::Trace;
use crate::tensor::TensorId;

pub use layer::{Chunk, run_layer};

/// A chunk of a prompt.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Token ids of the chunk, at least one.
    pub tokens: &'a [usize],
    /// Tokens of the prompt before these: the position of the first one.
    pub start: usize,
    /// Page of each logical block of 128 tokens; entries after the last one in use may be -1.
    pub pages: &'a [i32],
}

impl Prompt<'_> {
    /// Slot of the token at `position`; `None` where there is no page for it.
    fn slot_of(&self, position: usize) -> Option<usize> {
        let page = *self.pages.get(position / PAGE)?;
        usize::try_from(page).ok().map(|page| page * PAGE + position % PAGE)
    }
}

/// A token of a call: which prompt it belongs to, where it stands in it, and where its K and V are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the prompt.
    pub prompt: usize,
    /// Position in the prompt, from 0.
    pub position: usize,
    /// `page * 128 + offset`.
    pub slot: usize,
}

/// Runs the prompts' tokens through all layers and writes their K and V into the cache. The result is the last layer's
/// output, BF16 `[tokens, H]`, prompts one after the other. `rope_cos` and `rope_sin` are FP32 `[max_seq, D]`. `observe`
/// sees the trace of each layer when it is done: its tensors have a row for each token, and then it is dropped.
///
/// # Errors
/// A prompt without tokens, a token outside the vocabulary, a place outside tables or cache, a slot written twice: refused
/// before anything runs.
pub fn prefill(
    weights: &impl Weights,
    prompts: &[Prompt<'_>],
    rope_cos: ArrayView2<'_, f32>,
    rope_sin: ArrayView2<'_, f32>,
    policy: &Policy,
    cache: &mut PagedCache,
    observe: &mut dyn FnMut(usize, &Trace),
) -> Result<Array2<bf16>, ModelError> {
    let geometry = weights.geometry();
    cache.check(geometry)?;
    shape("rope_cos", rope_cos.dim(), (rope_cos.nrows(), geometry.head_dim))?;
    shape("rope_sin", rope_sin.dim(), rope_cos.dim())?;
    let places = places(prompts, rope_cos.nrows(), cache)?;
    let tokens: Vec<usize> = prompts.iter().flat_map(|prompt| prompt.tokens).copied().collect();
    let mut hidden = embedding(weights, &tokens, |token| places[token].prompt)?;
    for layer in 0..geometry.num_hidden_layers {
        let [mut k, mut v] = cache.layer_mut(layer).ok_or(ModelError::NoLayer(layer))?;
        let chunk = Chunk {
            geometry,
            prompts,
            places: &places,
            hidden_states: hidden.view(),
            weights: weights.layer(layer).ok_or(ModelError::NoLayer(layer))?,
            rope_cos,
            rope_sin,
        };
        let trace = run_layer(&chunk, policy, &mut k, &mut v);
        hidden = trace.bf16(TensorId::Out).to_owned();
        observe(layer, &trace);
    }
    Ok(hidden)
}

/// Where each token stands, prompts one after the other.
fn places(prompts: &[Prompt<'_>], positions: usize, cache: &PagedCache) -> Result<Vec<Place>, ModelError> {
    let pages = cache.pages();
    let mut places = Vec::new();
    for (row, prompt) in prompts.iter().enumerate() {
        if prompt.tokens.is_empty() {
            return Err(ModelError::EmptyPrompt { row });
        }
        let context = prompt.start.saturating_add(prompt.tokens.len());
        if context > positions {
            return Err(ModelError::Position { row, position: context - 1, rows: positions });
        }
        // Every page up to the last token is read by attention, those before `start` too.
        for block in 0..context.div_ceil(PAGE) {
            let page = prompt.slot_of(block * PAGE).ok_or(ModelError::NoPage { row, block, context })?;
            if page / PAGE >= pages {
                return Err(ModelError::BeyondCache { row, what: "page", index: page / PAGE, pages });
            }
        }
        for position in prompt.start..context {
            let block = position / PAGE;
            let slot = prompt.slot_of(position).ok_or(ModelError::NoPage { row, block, context })?;
            places.push(Place { prompt: row, position, slot });
        }
    }
    let mut slots: Vec<(usize, usize)> = places.iter().map(|place| (place.slot, place.prompt)).collect();
    slots.sort_unstable();
    if let Some(pair) = slots.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(ModelError::SharedSlot { slot: pair[0].0, rows: [pair[0].1, pair[1].1] });
    }
    Ok(places)
}

/// The cache rows of the tokens before `length` of a prompt, for a KV head, in order.
fn rows_of(geometry: &Geometry, prompt: &Prompt<'_>, length: usize, kv_head: usize) -> Vec<usize> {
    let slots = (0..length).filter_map(|position| prompt.slot_of(position));
    slots.map(|slot| cache_row(geometry, slot, kv_head)).collect()
}

#[cfg(test)]
mod tests;
