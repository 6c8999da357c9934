//! A token run with the reference for its device: a prefill, then decode steps, and what a capture of it holds.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ::device::{Bundle, Captured, Captures, LayerStates, Moment, TokenCaptures};
use cases::{
    Case, GeneratedModel, Input, InputStore, Inputs, Kernel, Padding, PolicyRequest, Recipe, RecipeKind, TokensCase,
    new_case,
};
use goldens::report::CaseReport;
use goldens::{Job, Only, judge};
use half::bf16;
use ndarray::{Array2, Array3, ArrayView1, ArrayView2, Axis, s};
use reference::head::{final_norm, lm_head};
use reference::inputs::cache_row;
use reference::model::{PagedCache, Weights};
use reference::prefill::{Prompt, prefill};
use reference::stages::run_layer;
use reference::{BATCH, Batch, Geometry, LayerInputs, LayerWeights, PAGE, Policy, TensorId, Trace};

use crate::bench::small;
use crate::written::{self, Rows};

/// A token run, its inputs and what a device gave.
#[derive(Debug)]
pub struct TokenRun {
    /// What was run.
    pub case: Case,
    /// Its inputs.
    pub inputs: Inputs,
    /// What the device gave.
    pub captures: Captures,
    /// Its states after every layer.
    pub states: LayerStates,
}

/// Changes batch and caches before a decode step.
pub type Before<'a> = dyn FnMut(usize, &mut Batch, &mut PagedCache) + 'a;

/// The token of a row and step, from the greedy one.
pub type Choose<'a> = dyn FnMut(usize, usize, usize) -> usize + 'a;

/// Runs a layer of a decode step in a device's own way: the step, the layer, what it reads and the policy; `None` where it
/// runs as it should.
pub type Instead<'a> = dyn FnMut(usize, usize, &LayerInputs<'_>, &Policy) -> Option<Trace> + 'a;

/// What a device does in its own way. The default is a right device.
pub struct Habits<'a> {
    /// Which layer's weights each layer takes.
    pub layers: Vec<usize>,
    /// How many positions later it rotates than it should, in each decode step.
    pub rotated_late: usize,
    /// Sees the batch and the caches before each decode step, and may change them.
    pub before: Box<Before<'a>>,
    /// Chooses a token by its row and step and the greedy one.
    pub choose: Box<Choose<'a>>,
    /// Runs a layer of a decode step in its own way.
    pub instead: Box<Instead<'a>>,
}

/// A small model of three layers whose contexts cross a page: two prompts, of 130 and 5 tokens.
#[must_use]
pub fn small_run(seed: u64, lengths: &[usize], decode_steps: usize) -> Case {
    deep_run(3, seed, lengths, decode_steps)
}

/// The same with any number of layers.
#[must_use]
pub fn deep_run(layers: usize, seed: u64, lengths: &[usize], decode_steps: usize) -> Case {
    let mut case = new_case(small()).unwrap();
    case.geometry = Geometry { num_hidden_layers: layers, vocab_size: 200, real_vocab_size: 190, ..case.geometry };
    let blocks = (lengths.iter().max().unwrap() + decode_steps).div_ceil(PAGE);
    let prompt =
        |row: usize, length: usize| (0..length).map(|i| (seed as usize + 7 * row + i * i * 13) % 190).collect();
    case.kernel = Kernel::Tokens(TokensCase {
        prompts: lengths.iter().enumerate().map(|(row, &length)| prompt(row, length)).collect(),
        decode_steps,
        // Pages from the last on, so that logical and physical ones differ.
        block_table: (0..lengths.len())
            .map(|row| (0..blocks).map(|block| (row * blocks + blocks - 1 - block) as i32).collect())
            .collect(),
    });
    (case.layers, case.seed, case.max_seq) = (layers, seed, blocks * PAGE);
    (case.pages, case.active_batch) = (blocks * lengths.len() + 1, lengths.len());
    case.padding = if lengths.len() == BATCH { Padding::Own } else { Padding::ReplicateRow0 };
    case.tensors.remove(&Input::HiddenStates);
    let normal = |mean, std, bf16| Recipe::new(RecipeKind::Normal { mean, std, bf16 });
    case.tensors.insert(Input::EmbedTokens, normal(0.0, 1.0, false));
    case.tensors.insert(Input::FinalNormWeight, normal(1.0, 0.1, true));
    case.tensors.insert(Input::LmHeadWeight, normal(0.0, 0.05, false));
    case.inputs_sha256.clear();
    // What is tested is a case that a file could hold.
    Case::parse(&case.to_yaml(), &case.path).unwrap()
}

/// A model whose layers are taken in another order.
struct Reordered<'a>(GeneratedModel<'a>, Vec<usize>);

impl Weights for Reordered<'_> {
    fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    fn layer(&self, layer: usize) -> Option<LayerWeights<'_>> {
        self.0.layer(*self.1.get(layer)?)
    }

    fn embed_tokens(&self) -> ArrayView2<'_, bf16> {
        self.0.embed_tokens()
    }

    fn final_norm(&self) -> ArrayView1<'_, f32> {
        self.0.final_norm()
    }

    fn lm_head(&self) -> ArrayView2<'_, bf16> {
        self.0.lm_head()
    }
}

impl TokenRun {
    /// A recorded run of the repository.
    #[must_use]
    pub fn recorded(name: &str) -> Self {
        let bundle = Bundle::open(&crate::Bench::path(name)).unwrap();
        let inputs = Inputs::generate(&bundle.case, &InputStore::new()).unwrap();
        Self { case: bundle.case, inputs, captures: bundle.captures.unwrap(), states: LayerStates::default() }
    }

    /// A right device.
    #[must_use]
    pub fn right(case: Case, policy: &Policy) -> Self {
        Self::play(case, policy, |_| ())
    }

    /// A device with habits of its own.
    #[must_use]
    pub fn play<'a>(case: Case, policy: &Policy, change: impl FnOnce(&mut Habits<'a>)) -> Self {
        let inputs = Inputs::generate(&case, &InputStore::new()).unwrap();
        let mut habits = Habits {
            layers: (0..case.layers).collect(),
            rotated_late: 0,
            before: Box::new(|_, _, _| ()),
            choose: Box::new(|_, _, greedy| greedy),
            instead: Box::new(|_, _, _, _| None),
        };
        change(&mut habits);
        let (captures, states) = run(&case, &inputs, policy, &mut habits);
        Self { case, inputs, captures, states }
    }

    /// The gate's report on some outputs of this run.
    #[must_use]
    pub fn judge(&self, captures: Captures, policy: &PolicyRequest) -> CaseReport {
        let bundle = Bundle { dir: PathBuf::new(), case: self.case.clone(), captures: Some(captures) };
        let job = Job::new(&bundle, &self.inputs, policy);
        judge(&job, &()).unwrap()
    }

    /// The report under `auto` on some tensors of what the device gave.
    #[must_use]
    pub fn gate_only(&self, names: &[&str]) -> CaseReport {
        let bundle = Bundle { dir: PathBuf::new(), case: self.case.clone(), captures: Some(self.captures.clone()) };
        let mut only = Only::default();
        names.iter().for_each(|name| only.insert(name).unwrap());
        let (policy, only) = (&PolicyRequest::Auto, Some(&only));
        let job = Job { only, ..Job::new(&bundle, &self.inputs, policy) };
        judge(&job, &()).unwrap()
    }

    /// The report under `auto` on what the device gave.
    #[must_use]
    pub fn gate(&self) -> CaseReport {
        self.judge(self.captures.clone(), &PolicyRequest::Auto)
    }

    /// The report on changed outputs.
    #[must_use]
    pub fn gate_with(&self, change: impl FnOnce(&mut Captures)) -> CaseReport {
        let mut captures = self.captures.clone();
        change(&mut captures);
        self.judge(captures, &PolicyRequest::Auto)
    }

    /// Its tokens, `[rows, steps]`.
    #[must_use]
    pub fn tokens(&self) -> &Array2<i64> {
        values(&self.captures.tokens.token_ids)
    }
}

/// The values of a captured tensor.
#[must_use]
pub fn values<T>(captured: &Option<Captured<T>>) -> &T {
    captured.as_ref().and_then(Captured::values).expect("captured")
}

/// The values of a captured tensor, to be changed.
pub fn values_mut<T>(captured: &mut Option<Captured<T>>) -> &mut T {
    match captured {
        Some(Captured::Values(values)) => values,
        _ => panic!("not captured"),
    }
}

fn run(case: &Case, inputs: &Inputs, policy: &Policy, habits: &mut Habits<'_>) -> (Captures, LayerStates) {
    let Kernel::Tokens(tokens) = &case.kernel else { panic!("not a token run") };
    let (rows, decode_steps) = (tokens.prompts.len(), tokens.decode_steps);
    let model = Reordered(inputs.model().unwrap(), habits.layers.clone());
    let geometry = model.geometry().clone();
    let (cos, sin) = (inputs.f32(Input::RopeCos).unwrap(), inputs.f32(Input::RopeSin).unwrap());
    let mut cache = PagedCache::new(&geometry, case.pages).unwrap();
    for layer in 0..case.layers {
        let before = inputs.cache(layer).unwrap();
        let [mut k, mut v] = cache.layer_mut(layer).unwrap();
        k.assign(&before.k);
        v.assign(&before.v);
    }
    let prompts: Vec<Prompt<'_>> = tokens
        .prompts
        .iter()
        .zip(&tokens.block_table)
        .map(|(tokens, pages)| Prompt { tokens, start: 0, pages })
        .collect();
    let mut states = LayerStates::default();
    let prefilled = prefill(&model, &prompts, cos, sin, policy, &mut cache, &mut |layer, trace| {
        states.states.insert((layer, Moment::Prefill), trace.bf16(TensorId::Out).to_owned());
    })
    .unwrap();
    let mut ends = Vec::new();
    for prompt in &tokens.prompts {
        ends.push(ends.last().copied().unwrap_or(0) + prompt.len());
    }
    let last: Vec<usize> = ends.iter().map(|end| end - 1).collect();

    let mut out = TokenCaptures::default();
    let mut ids = Array2::zeros((rows, 1 + decode_steps));
    let mut top2_ids = Array3::zeros((rows, 1 + decode_steps, 2));
    let mut top2_logits = Array3::zeros((rows, 1 + decode_steps, 2));
    let mut decode_hidden = Array3::from_elem((decode_steps, rows, geometry.hidden_size), bf16::ZERO);
    let mut state = prefilled.select(Axis(0), &last);
    out.prefill_hidden = Some(Captured::Values(prefilled));
    for step in 0..=decode_steps {
        let normed = final_norm(state.view(), model.final_norm(), geometry.rms_norm_eps, policy.freedom);
        let logits = lm_head(normed.view(), model.lm_head(), policy);
        for row in 0..rows {
            let logits = logits.slice(s![row, ..geometry.real_vocab_size]);
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
            for j in 0..2 {
                top2_ids[(row, step, j)] = order[j] as i64;
                top2_logits[(row, step, j)] = logits[order[j]];
            }
            ids[(row, step)] = (habits.choose)(row, step, order[0]) as i64;
        }
        if step == decode_steps {
            break;
        }
        let mut batch = Batch { active: rows, seq_lens: [1; BATCH], block_table: vec![], slots: [0; BATCH] };
        let mut hidden = Array2::from_elem((BATCH, geometry.hidden_size), bf16::ZERO);
        for row in 0..BATCH {
            let of = if row < rows { row } else { 0 };
            batch.seq_lens[row] = tokens.prompts[of].len() + step + 1;
            batch.block_table.push(tokens.block_table[of].clone());
            batch.slots[row] = batch.slot_of(row, batch.seq_lens[row] - 1).unwrap();
            hidden.row_mut(row).assign(&model.embed_tokens().row(ids[(of, step)] as usize));
        }
        (habits.before)(step, &mut batch, &mut cache);
        let late = habits.rotated_late;
        let (cos, sin) = (cos.slice(s![late.., ..]), sin.slice(s![late.., ..]));
        let done = decode(&model, hidden, &batch, [cos, sin], &mut cache, &mut |layer, inputs| {
            let trace = (habits.instead)(step, layer, inputs, policy).unwrap_or_else(|| run_layer(inputs, policy));
            let state = trace.bf16(TensorId::Out).slice(s![..rows, ..]).to_owned();
            states.states.insert((layer, Moment::Step(step)), state);
            trace
        });
        state = done.slice(s![..rows, ..]).to_owned();
        decode_hidden.index_axis_mut(Axis(0), step).assign(&state);
    }
    out.token_ids = Some(Captured::Values(ids));
    out.top2_ids = Some(Captured::Values(top2_ids));
    out.top2_logits = Some(Captured::Values(top2_logits));
    out.decode_hidden = Some(Captured::Values(decode_hidden));
    let changed = |values: bool| {
        let mut rows: Rows = BTreeMap::new();
        for layer in 0..case.layers {
            let (before, after) = (inputs.cache(layer).unwrap(), cache.layer(layer).unwrap());
            let (before, after) = if values { (before.v, after.v) } else { (before.k, after.k) };
            for (row, (before, after)) in before.rows().into_iter().zip(after.rows()).enumerate() {
                if before.iter().zip(after).any(|(a, b)| a.to_bits() != b.to_bits()) {
                    rows.insert((layer * before_rows(case) + row) as i64, after.to_vec());
                }
            }
        }
        written::write(&rows, &geometry)
    };
    let (k_written, v_written) = (Some(changed(false)), Some(changed(true)));
    (Captures { k_written, v_written, tokens: out, ..Captures::default() }, states)
}

/// A decode step whose layers are run one by one; it writes the rows of active ones.
fn decode(
    model: &impl Weights,
    mut hidden: Array2<bf16>,
    batch: &Batch,
    [rope_cos, rope_sin]: [ArrayView2<'_, f32>; 2],
    cache: &mut PagedCache,
    run: &mut dyn FnMut(usize, &LayerInputs<'_>) -> Trace,
) -> Array2<bf16> {
    let geometry = model.geometry();
    for layer in 0..geometry.num_hidden_layers {
        let trace = {
            let hidden_states = hidden.view();
            let (weights, cache) = (model.layer(layer).unwrap(), cache.layer(layer).unwrap());
            run(layer, &LayerInputs { geometry, batch, hidden_states, weights, rope_cos, rope_sin, cache })
        };
        let [mut k, mut v] = cache.layer_mut(layer).unwrap();
        let dim = geometry.head_dim;
        for b in 0..batch.active {
            for kv_head in 0..geometry.num_key_value_heads {
                let row = cache_row(geometry, batch.slots[b], kv_head);
                for (cache, id) in [(&mut k, TensorId::KRows), (&mut v, TensorId::VRows)] {
                    cache.row_mut(row).assign(&trace.bf16(id).slice(s![b, kv_head * dim..(kv_head + 1) * dim]));
                }
            }
        }
        hidden = trace.bf16(TensorId::Out).to_owned();
    }
    hidden
}

/// Rows of each layer's caches.
fn before_rows(case: &Case) -> usize {
    case.pages * case.geometry.num_key_value_heads * PAGE
}
