//! One layer of a token run on given inputs: each place has its own input state, and attention sees given rows for the
//! tokens before it and for the token itself. So all places are independent of each other and run side by side, as rows of
//! a batch; what the layer writes is put aside, where attention does not read it.

use std::collections::BTreeMap;

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis, Zip, s};
use reference::inputs::cache_row;
use reference::model::{ModelError, Weights};
use reference::prefill::{self, Chunk, Prompt};
use reference::rounding::round_f32;
use reference::stages::run_layer;
use reference::{BATCH, Batch, Cache, LayerInputs, PAGE, Policy, Site, TensorId};

use super::plan::{Place, Plan};

/// A model whose layers are run one at a time, and the places of the run.
pub struct OneLayer<'a, W> {
    /// The model.
    pub weights: &'a W,
    /// The run's places.
    pub plan: &'a Plan<'a>,
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub cos: ArrayView2<'a, f32>,
    /// RoPE sines.
    pub sin: ArrayView2<'a, f32>,
}

/// What a layer gives for some places, one a row.
#[derive(Clone, Debug)]
pub struct Ran {
    /// K, `[n, KV*D]`.
    pub k: Array2<bf16>,
    /// V, `[n, KV*D]`.
    pub v: Array2<bf16>,
    /// The layer's output, `[n, H]`.
    pub out: Array2<bf16>,
    /// The FP32 values that were narrowed to it, where a decode step made it.
    pub wide: Option<Array2<f32>>,
    /// There, the magnitude of the larger of the two narrowed values whose sum that is.
    pub addends: Option<Array2<f32>>,
}

/// Caches made for some places.
struct Pages {
    k: Array2<bf16>,
    v: Array2<bf16>,
    /// The page of each block of a row's context.
    of_row: BTreeMap<(usize, usize), usize>,
    /// The first of the pages that no context has. The reference writes its own keys and values there, in the order of
    /// the places, so that attention does not read them.
    aside: usize,
}

impl Pages {
    /// The pages of a place's context, in order.
    fn table(&self, place: Place) -> Vec<i32> {
        let blocks = 0..=place.position / PAGE;
        blocks.filter_map(|block| self.of_row.get(&(place.row, block))).map(|&page| page as i32).collect()
    }

    /// The slot that the reference writes for the `n`-th place.
    fn slot(&self, n: usize) -> usize {
        self.aside * PAGE + n
    }
}

impl<W: Weights + Sync> OneLayer<'_, W> {
    /// Runs `layer` for the places `indices`, all computed by decode steps or all by the prefill, from `input`, one row
    /// a place. `history` holds the layer's K and V of every place.
    ///
    /// # Errors
    /// The model has no such layer.
    pub fn run(
        &self,
        layer: usize,
        indices: &[usize],
        input: ArrayView2<'_, bf16>,
        history: [&Array2<bf16>; 2],
        policy: &Policy,
    ) -> Result<Ran, ModelError> {
        let geometry = self.plan.geometry;
        let decode = |index: &usize| self.plan.step_of(self.plan.places[*index]).is_some();
        if !indices.first().is_some_and(decode) {
            return self.prefill(layer, indices, input, history, policy);
        }
        let count = indices.len();
        let mut ran = Ran {
            k: Array2::from_elem((count, geometry.kv_width()), bf16::ZERO),
            v: Array2::from_elem((count, geometry.kv_width()), bf16::ZERO),
            out: Array2::from_elem((count, geometry.hidden_size), bf16::ZERO),
            wide: None,
            addends: None,
        };
        let mut wide = Array2::zeros((count, geometry.hidden_size));
        let mut addends = wide.clone();
        for (chunk, places) in indices.chunks(BATCH).enumerate() {
            let rows = chunk * BATCH..chunk * BATCH + places.len();
            let input = input.slice(s![rows.clone(), ..]);
            let trace = self.decode(layer, places, input, history, policy)?;
            let n = places.len();
            for (all, id) in
                [(&mut ran.k, TensorId::KRows), (&mut ran.v, TensorId::VRows), (&mut ran.out, TensorId::Out)]
            {
                all.slice_mut(s![rows.clone(), ..]).assign(&trace.bf16(id).slice(s![..n, ..]));
            }
            // Step 13: the two values whose sum is narrowed to the output.
            let parts = trace.f32(TensorId::DownAccParts);
            let residual = trace.widened(TensorId::PostNormPartial, policy.at(Site::Residual));
            let rule = policy.at(Site::Down);
            let (mut wide, mut addends) =
                (wide.slice_mut(s![rows.clone(), ..]), addends.slice_mut(s![rows.clone(), ..]));
            Zip::indexed(&mut wide).and(&mut addends).for_each(|(row, column), wide, addend| {
                let down = round_f32(parts[(row, column)] + parts[(BATCH + row, column)], rule);
                let residual = residual[(row, column)];
                (*wide, *addend) = (down + residual, down.abs().max(residual.abs()));
            });
        }
        (ran.wide, ran.addends) = (Some(wide), Some(addends));
        Ok(ran)
    }

    /// Places of prompts, each as a prompt of one token that continues what is in the cache.
    fn prefill(
        &self,
        layer: usize,
        indices: &[usize],
        input: ArrayView2<'_, bf16>,
        history: [&Array2<bf16>; 2],
        policy: &Policy,
    ) -> Result<Ran, ModelError> {
        let (plan, count) = (self.plan, indices.len());
        let mut pages = self.pages(indices, history);
        let at = |n: usize| plan.places[indices[n]];
        let tables: Vec<Vec<i32>> = (0..count).map(|n| pages.table(at(n))).collect();
        // The layer reads states, never ids.
        let prompts: Vec<Prompt<'_>> =
            (0..count).map(|n| Prompt { tokens: &[0], start: at(n).position, pages: &tables[n] }).collect();
        let places: Vec<prefill::Place> =
            (0..count).map(|n| prefill::Place { prompt: n, position: at(n).position, slot: pages.slot(n) }).collect();
        let chunk = Chunk {
            geometry: plan.geometry,
            prompts: &prompts,
            places: &places,
            hidden_states: input,
            weights: self.weights.layer(layer).ok_or(ModelError::NoLayer(layer))?,
            rope_cos: self.cos,
            rope_sin: self.sin,
        };
        let trace = prefill::run_layer(&chunk, policy, &mut pages.k.view_mut(), &mut pages.v.view_mut());
        let [k, v, out] = [TensorId::KRows, TensorId::VRows, TensorId::Out].map(|id| trace.bf16(id).to_owned());
        Ok(Ran { k, v, out, wide: None, addends: None })
    }

    /// At most 16 places as rows of one decode step.
    fn decode(
        &self,
        layer: usize,
        indices: &[usize],
        input: ArrayView2<'_, bf16>,
        history: [&Array2<bf16>; 2],
        policy: &Policy,
    ) -> Result<reference::Trace, ModelError> {
        let pages = self.pages(indices, history);
        let count = indices.len();
        let mut batch = Batch { active: count, seq_lens: [1; BATCH], block_table: Vec::new(), slots: [0; BATCH] };
        // Padding rows repeat the first.
        let of: Vec<usize> = (0..BATCH).map(|row| if row < count { row } else { 0 }).collect();
        for (row, &of) in of.iter().enumerate() {
            let place = self.plan.places[indices[of]];
            batch.seq_lens[row] = place.position + 1;
            batch.block_table.push(pages.table(place));
            batch.slots[row] = pages.slot(of);
        }
        let hidden = input.select(Axis(0), &of);
        let inputs = LayerInputs {
            geometry: self.plan.geometry,
            batch: &batch,
            hidden_states: hidden.view(),
            weights: self.weights.layer(layer).ok_or(ModelError::NoLayer(layer))?,
            rope_cos: self.cos,
            rope_sin: self.sin,
            cache: Cache { k: pages.k.view(), v: pages.v.view() },
        };
        Ok(run_layer(&inputs, policy))
    }

    /// Caches that hold the contexts of these places.
    fn pages(&self, indices: &[usize], [k_history, v_history]: [&Array2<bf16>; 2]) -> Pages {
        let (plan, dim) = (self.plan, self.plan.geometry.head_dim);
        let mut context: BTreeMap<usize, usize> = BTreeMap::new();
        for &index in indices {
            let Place { row, position } = plan.places[index];
            let most = context.entry(row).or_default();
            *most = position.max(*most);
        }
        let blocks = context.iter().flat_map(|(&row, &most)| (0..=most / PAGE).map(move |block| (row, block)));
        let of_row: BTreeMap<(usize, usize), usize> = blocks.enumerate().map(|(page, at)| (at, page)).collect();
        let aside = of_row.len();
        let rows = (aside + indices.len().div_ceil(PAGE)) * plan.geometry.num_key_value_heads * PAGE;
        let empty = Array2::from_elem((rows, dim), bf16::ZERO);
        let (mut k, mut v) = (empty.clone(), empty);
        for (&(row, block), &page) in &of_row {
            let end = context.get(&row).map_or(0, |&most| most + 1).min((block + 1) * PAGE);
            for position in block * PAGE..end {
                let index = plan.index(Place { row, position });
                for kv_head in 0..plan.geometry.num_key_value_heads {
                    let at = cache_row(plan.geometry, page * PAGE + position % PAGE, kv_head);
                    let columns = s![index, kv_head * dim..(kv_head + 1) * dim];
                    k.row_mut(at).assign(&k_history.slice(columns));
                    v.row_mut(at).assign(&v_history.slice(columns));
                }
            }
        }
        Pages { k, v, of_row, aside }
    }
}
