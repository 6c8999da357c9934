//! The reference's own run of a case on the device's tokens: nothing of what the device computed enters it. Flips make it
//! leave the device soon, so that it can judge no value, but it tells what has to be finite and what cannot be all zero.

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis, s};
use reference::inputs::cache_row;
use reference::model::{ModelError, PagedCache, Step, Weights, decode_layers};
use reference::prefill::{Prompt, prefill};
use reference::{BATCH, Batch, Policy};

use super::plan::{Place, Plan};

/// What the reference holds at each place of a run.
#[derive(Debug)]
pub struct Alone {
    /// K by layer, `[places, KV*D]`.
    pub k: Vec<Array2<bf16>>,
    /// V by layer.
    pub v: Vec<Array2<bf16>>,
    /// The last layer's output, `[places, H]`.
    pub hidden: Array2<bf16>,
}

impl Alone {
    /// Runs a case. `fed` holds the token of each place; where it is not known, or none of the vocabulary, `choose` gives
    /// it from the state before.
    ///
    /// # Errors
    /// The caches do not fit the memory.
    pub fn run<W: Weights>(
        weights: &W,
        plan: &Plan<'_>,
        fed: &[Option<usize>],
        [cos, sin]: [ArrayView2<'_, f32>; 2],
        policy: &Policy,
        choose: impl Fn(ArrayView2<'_, bf16>) -> usize,
    ) -> Result<Self, ModelError> {
        let geometry = weights.geometry();
        let (rows, table) = (plan.rows(), weights.embed_tokens());
        let mut cache = PagedCache::new(geometry, plan.pages)?;
        let tokens = plan.tokens;
        let prompts = tokens.prompts.iter().zip(&tokens.block_table);
        let prompts: Vec<Prompt<'_>> =
            prompts.map(|(tokens, pages)| Prompt { tokens, start: 0, pages: pages.as_slice() }).collect();
        let prefilled = prefill(weights, &prompts, cos, sin, policy, &mut cache, &mut |_, _| ())?;
        let mut hidden = Array2::from_elem((plan.places.len(), geometry.hidden_size), bf16::ZERO);
        for index in plan.of_phase(false) {
            hidden.row_mut(index).assign(&prefilled.row(plan.prompt_index(plan.places[index])));
        }
        for step in 0..tokens.decode_steps {
            let mut batch = Batch { active: rows, seq_lens: [1; BATCH], block_table: Vec::new(), slots: [0; BATCH] };
            let mut states = Array2::from_elem((BATCH, geometry.hidden_size), bf16::ZERO);
            for row in 0..BATCH {
                // Padding rows repeat the first.
                let of = if row < rows { row } else { 0 };
                let place = Place { row: of, position: tokens.prompts[of].len() + step };
                let before = plan.index(plan.source(of, step));
                let known = fed[plan.index(place)].filter(|&token| token < table.nrows());
                let token = known.unwrap_or_else(|| choose(hidden.slice(s![before..=before, ..])));
                batch.seq_lens[row] = place.position + 1;
                batch.block_table.push(tokens.block_table[of].clone());
                batch.slots[row] = plan.slot(place);
                states.row_mut(row).assign(&table.row(token));
            }
            let at = Step { batch: &batch, rope_cos: cos, rope_sin: sin, policy };
            let done = decode_layers(weights, states, &at, &mut cache, &mut |_, _| ())?;
            for row in 0..rows {
                let place = Place { row, position: tokens.prompts[row].len() + step };
                hidden.row_mut(plan.index(place)).assign(&done.index_axis(Axis(0), row));
            }
        }
        let read = |layer: usize, values: bool| {
            let mut held = Array2::from_elem((plan.places.len(), geometry.kv_width()), bf16::ZERO);
            let Some(cache) = cache.layer(layer) else { return held };
            let (cache, dim) = (if values { cache.v } else { cache.k }, geometry.head_dim);
            for (index, &place) in plan.places.iter().enumerate() {
                for kv_head in 0..geometry.num_key_value_heads {
                    let columns = s![index, kv_head * dim..(kv_head + 1) * dim];
                    held.slice_mut(columns).assign(&cache.row(cache_row(geometry, plan.slot(place), kv_head)));
                }
            }
            held
        };
        let [k, v] = [false, true].map(|values| (0..plan.layers).map(|layer| read(layer, values)).collect());
        Ok(Self { k, v, hidden })
    }
}
