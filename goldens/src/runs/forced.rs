//! The reference on the device's own history: every token's layers run from its embedding, and attention sees in every
//! layer what the device wrote for the tokens before it and for the token itself. So no token inherits the flips of an
//! earlier one, no layer's attention those of its own keys, and all tokens are independent of each other: they run side
//! by side, as rows of a batch.

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;
use ndarray::{Array2, ArrayView2, Zip, s};
use reference::inputs::cache_row;
use reference::model::{ModelError, PagedCache, Step, Weights, decode_layers};
use reference::prefill::{self, Chunk, Prompt};
use reference::rounding::round_f32;
use reference::{BATCH, Batch, PAGE, Policy, Site, TensorId};

use super::plan::{Place, Plan};

/// What the device's run is known by.
pub struct Forced<'a, W> {
    /// The model.
    pub weights: &'a W,
    /// The run's places.
    pub plan: &'a Plan<'a>,
    /// The token that was fed at each place; `None` where nothing tells.
    pub fed: &'a [Option<usize>],
    /// K of each place by layer, `[places, KV*D]`.
    pub k: &'a [Array2<bf16>],
    /// V likewise.
    pub v: &'a [Array2<bf16>],
    /// RoPE cosines, FP32 `[max_seq, D]`.
    pub cos: ArrayView2<'a, f32>,
    /// RoPE sines.
    pub sin: ArrayView2<'a, f32>,
}

/// What the reference gives for some places, one a row.
#[derive(Clone, Debug)]
pub struct States {
    /// K by layer, `[n, KV*D]`.
    pub k: Vec<Array2<bf16>>,
    /// V by layer.
    pub v: Vec<Array2<bf16>>,
    /// The last layer's output, `[n, H]`.
    pub hidden: Array2<bf16>,
    /// The FP32 values that were narrowed to it, where a decode step made it.
    pub wide: Option<Array2<f32>>,
    /// There, the magnitude of the larger of the two narrowed values whose sum that is.
    pub addends: Option<Array2<f32>>,
}

impl States {
    fn empty(plan: &Plan<'_>) -> Self {
        let rows = || (0..plan.layers).map(|_| Array2::from_elem((0, plan.geometry.kv_width()), bf16::ZERO)).collect();
        let hidden = plan.geometry.hidden_size;
        Self {
            k: rows(),
            v: rows(),
            hidden: Array2::from_elem((0, hidden), bf16::ZERO),
            wide: Some(Array2::zeros((0, hidden))),
            addends: Some(Array2::zeros((0, hidden))),
        }
    }

    fn append(&mut self, other: &Self) {
        // Widths are those of one geometry, so that nothing can be refused.
        for (all, more) in self.k.iter_mut().zip(&other.k).chain(self.v.iter_mut().zip(&other.v)) {
            let _ = all.append(ndarray::Axis(0), more.view());
        }
        let _ = self.hidden.append(ndarray::Axis(0), other.hidden.view());
        for (all, more) in [(&mut self.wide, &other.wide), (&mut self.addends, &other.addends)] {
            match (all.as_mut(), more) {
                (Some(all), Some(more)) => {
                    let _ = all.append(ndarray::Axis(0), more.view());
                }
                _ => *all = None,
            }
        }
    }
}

/// A cache made for some places.
struct Pages {
    cache: PagedCache,
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

impl<W: Weights + Sync> Forced<'_, W> {
    /// Runs the places `indices`, all computed by decode steps or all by the prefill, under `policy`. Their tokens must
    /// be known.
    ///
    /// # Errors
    /// The caches do not fit the memory.
    pub fn run(&self, indices: &[usize], policy: &Policy) -> Result<States, ModelError> {
        let mut states = States::empty(self.plan);
        let decode = |index: &&usize| self.plan.step_of(self.plan.places[**index]).is_some();
        if indices.first().as_ref().is_some_and(decode) {
            for indices in indices.chunks(BATCH) {
                states.append(&self.decode(indices, policy)?);
            }
        } else if !indices.is_empty() {
            states = self.prefill(indices, policy)?;
        }
        Ok(states)
    }

    /// Places of prompts, each as a prompt of one token that continues what is in the cache.
    fn prefill(&self, indices: &[usize], policy: &Policy) -> Result<States, ModelError> {
        let (plan, count) = (self.plan, indices.len());
        let mut pages = self.pages(indices)?;
        let at = |n: usize| plan.places[indices[n]];
        let tables: Vec<Vec<i32>> = (0..count).map(|n| pages.table(at(n))).collect();
        let tokens: Vec<usize> = indices.iter().map(|&index| self.fed[index].unwrap_or_default()).collect();
        let prompts: Vec<Prompt<'_>> =
            (0..count).map(|n| Prompt { tokens: &tokens[n..=n], start: at(n).position, pages: &tables[n] }).collect();
        let places: Vec<prefill::Place> =
            (0..count).map(|n| prefill::Place { prompt: n, position: at(n).position, slot: pages.slot(n) }).collect();
        let table = self.weights.embed_tokens();
        let mut hidden = Array2::from_elem((count, plan.geometry.hidden_size), bf16::ZERO);
        for (mut row, &token) in hidden.rows_mut().into_iter().zip(&tokens).filter(|(_, token)| **token < table.nrows())
        {
            row.assign(&table.row(token));
        }
        for layer in 0..plan.layers {
            let weights = self.weights.layer(layer).ok_or(ModelError::NoLayer(layer))?;
            let [mut k, mut v] = pages.cache.layer_mut(layer).ok_or(ModelError::NoLayer(layer))?;
            let chunk = Chunk {
                geometry: plan.geometry,
                prompts: &prompts,
                places: &places,
                hidden_states: hidden.view(),
                weights,
                rope_cos: self.cos,
                rope_sin: self.sin,
            };
            let trace = prefill::run_layer(&chunk, policy, &mut k, &mut v);
            hidden = trace.bf16(TensorId::Out).to_owned();
        }
        let [k, v] = self.written(count, &pages);
        Ok(States { k, v, hidden, wide: None, addends: None })
    }

    /// At most 16 places as rows of one decode step.
    fn decode(&self, indices: &[usize], policy: &Policy) -> Result<States, ModelError> {
        let mut pages = self.pages(indices)?;
        let count = indices.len();
        let mut batch = Batch { active: count, seq_lens: [1; BATCH], block_table: Vec::new(), slots: [0; BATCH] };
        let mut hidden = Array2::from_elem((BATCH, self.plan.geometry.hidden_size), bf16::ZERO);
        let table = self.weights.embed_tokens();
        for row in 0..BATCH {
            // Padding rows repeat the first.
            let of = if row < count { row } else { 0 };
            let place = self.plan.places[indices[of]];
            batch.seq_lens[row] = place.position + 1;
            batch.block_table.push(pages.table(place));
            batch.slots[row] = pages.slot(of);
            if let Some(id) = self.fed[indices[of]].filter(|&id| id < table.nrows()) {
                hidden.row_mut(row).assign(&table.row(id));
            }
        }
        let step = Step { batch: &batch, rope_cos: self.cos, rope_sin: self.sin, policy };
        let mut wide = Array2::zeros((count, self.plan.geometry.hidden_size));
        let mut addends = wide.clone();
        let last = self.plan.layers - 1;
        let out = decode_layers(self.weights, hidden, &step, &mut pages.cache, &mut |layer, trace| {
            if layer != last {
                return;
            }
            // Step 13: the two values whose sum is narrowed to the output.
            let parts = trace.f32(TensorId::DownAccParts);
            let residual = trace.widened(TensorId::PostNormPartial, policy.at(Site::Residual));
            let rule = policy.at(Site::Down);
            Zip::indexed(&mut wide).and(&mut addends).for_each(|(row, column), wide, addend| {
                let down = round_f32(parts[(row, column)] + parts[(BATCH + row, column)], rule);
                let residual = residual[(row, column)];
                (*wide, *addend) = (down + residual, down.abs().max(residual.abs()));
            });
        })?;
        let [k, v] = self.written(count, &pages);
        Ok(States { k, v, hidden: out.slice(s![..count, ..]).to_owned(), wide: Some(wide), addends: Some(addends) })
    }

    /// Caches that hold the contexts of these places as the device left them.
    fn pages(&self, indices: &[usize]) -> Result<Pages, ModelError> {
        let mut context: BTreeMap<usize, usize> = BTreeMap::new();
        for &index in indices {
            let Place { row, position } = self.plan.places[index];
            let most = context.entry(row).or_default();
            *most = position.max(*most);
        }
        let blocks = context.iter().flat_map(|(&row, &most)| (0..=most / PAGE).map(move |block| (row, block)));
        let of_row: BTreeMap<(usize, usize), usize> = blocks.enumerate().map(|(page, at)| (at, page)).collect();
        let aside = of_row.len();
        let mut cache = PagedCache::new(self.weights.geometry(), aside + indices.len().div_ceil(PAGE))?;
        for (&(row, block), &page) in &of_row {
            let end = context.get(&row).map_or(0, |&most| most + 1).min((block + 1) * PAGE);
            self.fill(&mut cache, row, block * PAGE..end, page);
        }
        Ok(Pages { cache, of_row, aside })
    }

    /// Copies the device's rows of some positions of `row` to the beginning of a page, in every layer.
    fn fill(&self, cache: &mut PagedCache, row: usize, positions: Range<usize>, page: usize) {
        let (plan, dim) = (self.plan, self.plan.geometry.head_dim);
        for layer in 0..plan.layers {
            let Some([mut k, mut v]) = cache.layer_mut(layer) else { continue };
            for position in positions.clone() {
                let index = plan.index(Place { row, position });
                for kv_head in 0..plan.geometry.num_key_value_heads {
                    let at = cache_row(plan.geometry, page * PAGE + position % PAGE, kv_head);
                    let columns = s![index, kv_head * dim..(kv_head + 1) * dim];
                    k.row_mut(at).assign(&self.k[layer].slice(columns));
                    v.row_mut(at).assign(&self.v[layer].slice(columns));
                }
            }
        }
    }

    /// K and V that the reference wrote for `count` places, by layer.
    fn written(&self, count: usize, pages: &Pages) -> [Vec<Array2<bf16>>; 2] {
        let (plan, dim) = (self.plan, self.plan.geometry.head_dim);
        let read = |layer: usize, values: bool| {
            let mut rows = Array2::from_elem((count, plan.geometry.kv_width()), bf16::ZERO);
            let Some(cache) = pages.cache.layer(layer) else { return rows };
            let cache = if values { cache.v } else { cache.k };
            for n in 0..count {
                for kv_head in 0..plan.geometry.num_key_value_heads {
                    let columns = s![n, kv_head * dim..(kv_head + 1) * dim];
                    rows.slice_mut(columns).assign(&cache.row(cache_row(plan.geometry, pages.slot(n), kv_head)));
                }
            }
            rows
        };
        [false, true].map(|values| (0..plan.layers).map(|layer| read(layer, values)).collect())
    }
}
