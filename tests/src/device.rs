//! A device's steps as a trace that tests change.

use std::collections::BTreeSet;
use std::sync::Arc;

use ::device::{Captured, Captures};
use half::bf16;
use ndarray::{Array2, s};
use reference::inputs::cache_row;
use reference::rounding::to_bf16;
use reference::stages::{Context, KvSource, STAGES, attend, run_stage, stage_of};
use reference::{BATCH, LayerInputs, Policy, Site, Tensor, TensorId, Trace};

use crate::written::{self, Rows};

/// A token's slot, and the row of this step that wrote it.
pub type Token = (usize, Option<usize>);

/// What a device computed, with the steps that were changed.
#[derive(Clone, Debug)]
pub struct Device<'a> {
    /// What the layer reads.
    pub inputs: LayerInputs<'a>,
    /// What passed between its steps.
    pub trace: Trace,
    /// How the device rounds and adds.
    pub policy: Policy,
    changed: BTreeSet<TensorId>,
}

impl<'a> Device<'a> {
    /// A device that computed `trace`.
    #[must_use]
    pub fn new(inputs: LayerInputs<'a>, trace: Trace, policy: Policy) -> Self {
        Self { inputs, trace, policy, changed: BTreeSet::new() }
    }

    /// A device that gave `captures`; cache rows that it does not list hold what they held before.
    #[must_use]
    pub fn captured(inputs: LayerInputs<'a>, captures: &Captures, policy: Policy) -> Self {
        let mut trace = Trace::new();
        for (&id, captured) in &captures.tensors {
            if let Captured::Values(tensor) = captured {
                trace.force(id, Arc::new(tensor.clone()));
            }
        }
        for (id, written, before) in [
            (TensorId::KRows, &captures.k_written, inputs.cache.k),
            (TensorId::VRows, &captures.v_written, inputs.cache.v),
        ] {
            let Some(written) = written else { continue };
            let rows = written::read(written);
            let dim = inputs.geometry.head_dim;
            let mut dense = Array2::from_elem((BATCH, inputs.geometry.kv_width()), bf16::ZERO);
            for (b, &slot) in inputs.batch.slots.iter().enumerate() {
                for head in 0..inputs.geometry.num_key_value_heads {
                    let row = cache_row(inputs.geometry, slot, head);
                    let held = rows.get(&(row as i64)).cloned().unwrap_or_else(|| before.row(row).to_vec());
                    dense.slice_mut(s![b, head * dim..(head + 1) * dim]).assign(&ndarray::aview1(&held));
                }
            }
            trace.force(id, Arc::new(Tensor::Bf16(dense)));
        }
        Self::new(inputs, trace, policy)
    }

    /// Puts a tensor in the place of what the device computed.
    pub fn set(&mut self, id: TensorId, tensor: Tensor) -> &mut Self {
        assert_eq!((tensor.dtype(), tensor.shape()), (id.dtype(), id.shape(self.inputs.geometry)), "{}", id.name());
        self.trace.force(id, Arc::new(tensor));
        self.changed.insert(id);
        self
    }

    /// The tensor that the device computed.
    #[must_use]
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        self.trace.get(id).unwrap_or_else(|| panic!("the device did not give {}", id.name()))
    }

    /// Changes each element of a tensor by its row, column and value; the new value is narrowed to the
    /// tensor's type, nearest even.
    pub fn map(&mut self, id: TensorId, change: impl Fn(usize, usize, f32) -> f32) -> &mut Self {
        let tensor = match self.tensor(id) {
            Tensor::Bf16(values) => Tensor::Bf16(mapped(values, |r, c, x| bf16::from_f32(change(r, c, x.to_f32())))),
            Tensor::F32(values) => Tensor::F32(mapped(values, |r, c, x| change(r, c, *x))),
            Tensor::I8(values) => {
                Tensor::I8(mapped(values, |r, c, x| change(r, c, f32::from(*x)).round_ties_even() as i8))
            }
        };
        self.set(id, tensor)
    }

    /// Moves elements by units in the last place, away from zero; INT8 codes by steps, towards zero at the ends.
    pub fn nudge(&mut self, id: TensorId, steps: impl Fn(usize, usize) -> u32) -> &mut Self {
        let tensor = match self.tensor(id) {
            Tensor::Bf16(values) => {
                Tensor::Bf16(mapped(values, |r, c, x| bf16::from_bits(x.to_bits() + steps(r, c) as u16)))
            }
            Tensor::F32(values) => Tensor::F32(mapped(values, |r, c, x| f32::from_bits(x.to_bits() + steps(r, c)))),
            Tensor::I8(values) => Tensor::I8(mapped(values, |r, c, &x| {
                let step = steps(r, c) as i8;
                if x > 100 { x - step } else { x + step }
            })),
        };
        self.set(id, tensor)
    }

    /// Rearranges a tensor: the element at each place comes from another place.
    pub fn rearrange(&mut self, id: TensorId, from: impl Fn(usize, usize) -> (usize, usize)) -> &mut Self {
        let tensor = match self.tensor(id) {
            Tensor::Bf16(values) => Tensor::Bf16(mapped(values, |r, c, _| values[from(r, c)])),
            Tensor::F32(values) => Tensor::F32(mapped(values, |r, c, _| values[from(r, c)])),
            Tensor::I8(values) => Tensor::I8(mapped(values, |r, c, _| values[from(r, c)])),
        };
        self.set(id, tensor)
    }

    /// Runs the stage that writes `id` again on other inputs, and keeps `id` of what it writes.
    pub fn redo(&mut self, id: TensorId, inputs: &LayerInputs<'_>) -> &mut Self {
        self.redo_as(id, inputs, &self.trace.clone(), &self.policy.clone())
    }

    /// Runs the stage that writes `id` again under another policy, and keeps `id` of what it writes.
    pub fn redo_under(&mut self, id: TensorId, policy: &Policy) -> &mut Self {
        self.redo_as(id, &self.inputs.clone(), &self.trace.clone(), policy)
    }

    /// Runs the stage that writes `id` again on other inputs, on other tensors, under another policy.
    pub fn redo_as(&mut self, id: TensorId, inputs: &LayerInputs<'_>, trace: &Trace, policy: &Policy) -> &mut Self {
        let outputs = stage_of(id).compute(&Context::new(inputs, policy), trace);
        let output = outputs.into_iter().find(|output| output.id == id).expect("the stage writes it");
        self.set(id, output.tensor)
    }

    /// Where attention finds row `b`'s first `length` tokens.
    #[must_use]
    pub fn tokens(&self, b: usize, length: usize) -> Vec<Token> {
        KvSource::new(&self.inputs, &self.trace).tokens(b, length)
    }

    /// Lets row `b` attend to these tokens. Padding rows copy row 0, as they must.
    pub fn attend(&mut self, b: usize, tokens: &[Token]) -> &mut Self {
        let (geometry, active) = (self.inputs.geometry, self.inputs.batch.active);
        let heads = (0..geometry.num_key_value_heads)
            .flat_map(|head| attend(&self.inputs, &self.policy, &self.trace, tokens, b, head));
        let rule = self.policy.at(Site::Attn);
        let row: Vec<bf16> = heads.map(|value| to_bf16(value, rule)).collect();
        self.map(TensorId::AttnOut, |r, c, x| if r == b || (b == 0 && r >= active) { row[c].to_f32() } else { x })
    }

    /// Runs every stage again that reads something changed, in order: downstream of a fault everything is its
    /// right consequence. Tensors that the device did not give stay unknown.
    pub fn follow(&mut self) -> &mut Self {
        let planted = self.changed.clone();
        for stage in STAGES {
            let reached = stage.reads.iter().any(|id| self.changed.contains(id));
            if !reached || stage.writes.iter().all(|id| planted.contains(id)) {
                continue;
            }
            let kept: Vec<_> = stage.writes.iter().map(|&id| (id, self.trace.get(id).cloned())).collect();
            let ran = run_stage(stage, &Context::new(&self.inputs, &self.policy), &mut self.trace);
            assert!(ran, "{} lacks an input", stage.name);
            for (id, before) in kept {
                match before {
                    Some(before) if planted.contains(&id) => self.trace.force(id, before),
                    _ => {
                        self.changed.insert(id);
                    }
                }
            }
        }
        self
    }

    /// What a capture of the device holds: every tensor, and the cache rows whose bytes changed.
    #[must_use]
    pub fn captures(&self) -> Captures {
        let mut captures = Captures::default();
        for id in TensorId::ALL {
            if let (Some(tensor), true) = (self.trace.get(id), TensorId::from_capture_name(id.name()).is_some()) {
                captures.tensors.insert(id, Captured::Values(tensor.as_ref().clone()));
            }
        }
        captures.k_written = self.rows(TensorId::KRows).map(|rows| written::write(&rows, self.inputs.geometry));
        captures.v_written = self.rows(TensorId::VRows).map(|rows| written::write(&rows, self.inputs.geometry));
        captures
    }

    /// The rows of a cache whose bytes the step changes, by cache row.
    fn rows(&self, id: TensorId) -> Option<Rows> {
        self.trace.get(id)?;
        let geometry = self.inputs.geometry;
        let before = if id == TensorId::KRows { self.inputs.cache.k } else { self.inputs.cache.v };
        let (source, dim) = (KvSource::new(&self.inputs, &self.trace), geometry.head_dim);
        let mut rows = Rows::new();
        for (b, &slot) in self.inputs.batch.slots.iter().enumerate() {
            for head in 0..geometry.num_key_value_heads {
                let row = cache_row(geometry, slot, head);
                let values = self.trace.bf16(id).slice(s![b, head * dim..(head + 1) * dim]).to_vec();
                let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                if source.writer(slot) == Some(b) && bits(&values) != bits(&before.row(row).to_vec()) {
                    rows.insert(row as i64, values);
                }
            }
        }
        Some(rows)
    }
}

/// The same inputs for a shorter life, so that a test can put views of its own among them.
#[must_use]
pub fn borrowed<'b>(inputs: &'b LayerInputs<'_>) -> LayerInputs<'b> {
    inputs.with_cache(inputs.cache.k.view(), inputs.cache.v.view())
}

fn mapped<T>(values: &Array2<T>, change: impl Fn(usize, usize, &T) -> T) -> Array2<T> {
    Array2::from_shape_fn(values.dim(), |(row, column)| change(row, column, &values[(row, column)]))
}
