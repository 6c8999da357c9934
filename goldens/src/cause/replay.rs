//! What a kernel with faults would have given beside the device's own tensors: each stage runs on what the device
//! gave before it where it was captured, and on what such a kernel gives elsewhere. Stages that no fault reaches are
//! not run again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use half::bf16;
use ndarray::{ArrayView1, ArrayView2, s};
use reference::inputs::cache_row;
use reference::stages::{Context, KvSource, STAGES};
use reference::{BATCH, Deviation, LayerInputs, Policy, Tensor, TensorId, Trace};
use sha2::{Digest as _, Sha256};

use super::Memo;
use super::loss::{Loss, distance, of_row, of_tensor};
use crate::judge::{PatchedCache, Walker};
use crate::report::Reproduced;
use crate::unforced::{reads, touched};

/// Replays beside one bundle.
pub struct Replay<'a, 'd> {
    walker: &'a Walker<'a, 'd>,
    policy: Policy,
    patched: Option<PatchedCache>,
    memo: Option<&'a Memo>,
    contract: Predicted,
}

/// What a kernel would have given.
#[derive(Clone, Default)]
struct Predicted {
    /// Captured tensors.
    tensors: BTreeMap<TensorId, Arc<Tensor>>,
    /// What stages saw of every tensor.
    known: Trace,
}

impl<'a, 'd> Replay<'a, 'd> {
    /// Replays under the rules that were found.
    pub fn new(walker: &'a Walker<'a, 'd>, policy: &Policy) -> Self {
        let patched = PatchedCache::new(walker.inputs, walker.evidence);
        let alone = walker.evidence.tensors.keys().eq([&TensorId::Out]);
        let memo = walker.memo.filter(|_| alone);
        let mut replay = Self { walker, policy: policy.clone(), patched, memo, contract: Predicted::default() };
        replay.contract = replay.compute(&[], None);
        replay
    }

    /// The contract's distance from the device.
    pub fn contract_loss(&self) -> f64 {
        self.measure(&self.contract, &[]).bits
    }

    /// The distance that faults leave, how much they give bit for bit, and a digest of all they give.
    pub fn loss(&self, faults: &[&Deviation]) -> (f64, Reproduced, u64) {
        let predicted = self.predict(faults);
        let loss = self.measure(&predicted, faults);
        (loss.bits, loss.reproduced, self.digest(&predicted, faults))
    }

    /// The distances from the device of two sets of faults, at the elements where they differ.
    pub fn duel(&self, ours: &[&Deviation], theirs: &[&Deviation]) -> (f64, f64) {
        let (a, b) = (self.predict(ours), self.predict(theirs));
        let (mut mine, mut other) = (0.0, 0.0);
        for (id, device) in &self.walker.evidence.tensors {
            if matches!(id, TensorId::KRows | TensorId::VRows) {
                continue;
            }
            let (Some(a), Some(b)) = (a.tensors.get(id), b.tensors.get(id)) else { continue };
            if Arc::ptr_eq(a, b) {
                continue;
            }
            let [rows, columns] = device.shape();
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                let of = |tensor: &Tensor| (tensor.get(row, column), tensor.bits(row, column));
                let (of_a, of_b, of_device) = (of(a), of(b), of(device));
                if of_a.1 != of_b.1 {
                    mine += distance(device.dtype(), of_device, of_a);
                    other += distance(device.dtype(), of_device, of_b);
                }
            }
        }
        let caches = |predicted: &Predicted, faults: &[&Deviation]| self.cache_loss(predicted, faults).bits;
        (mine + caches(&a, ours), other + caches(&b, theirs))
    }

    /// Whether the device's caches hold anything else than what faults would have written.
    pub fn caches_differ(&self, faults: &[&Deviation]) -> bool {
        self.cache_loss(&self.predict(faults), faults).bits > 0.0
    }

    fn predict(&self, faults: &[&Deviation]) -> Predicted {
        if faults.is_empty() {
            return self.contract.clone();
        }
        let Some(memo) = self.memo else { return self.compute(faults, Some(&self.contract)) };
        let out = memo
            .out(&self.policy, faults, || self.compute(faults, Some(&self.contract)).tensors.remove(&TensorId::Out));
        Predicted { tensors: out.map(|out| (TensorId::Out, out)).into_iter().collect(), known: Trace::new() }
    }

    fn compute(&self, faults: &[&Deviation], contract: Option<&Predicted>) -> Predicted {
        let (inputs, evidence) = (self.walker.inputs, self.walker.evidence);
        let (k, v) = match &self.patched {
            Some(patched) => (patched.k.view(), patched.v.view()),
            None => (inputs.cache.k.view(), inputs.cache.v.view()),
        };
        let (before, after) = (inputs.view(), inputs.with_cache(k, v));
        let mut predicted = Predicted::default();
        for stage in STAGES {
            let reads = reads(stage, faults);
            let faulty = touched(stage, faults);
            let unreached = |contract: &&Predicted| {
                let same = |id: &TensorId| match (contract.known.get(*id), predicted.known.get(*id)) {
                    (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                    _ => false,
                };
                !faulty && reads.iter().all(same)
            };
            if let Some(contract) = contract.filter(unreached) {
                for &id in stage.writes {
                    predicted.known.take(id, &contract.known);
                    predicted.tensors.extend(contract.tensors.get(&id).map(|tensor| (id, Arc::clone(tensor))));
                }
                continue;
            }
            if !reads.iter().all(|&id| predicted.known.holds(id)) {
                continue;
            }
            let inputs = if stage.writes.contains(&TensorId::AttnOut) { &after } else { &before };
            let context = Context::new(inputs, &self.policy).sharing(self.walker.products).deviating(faults);
            for output in stage.compute(&context, &predicted.known) {
                let id = output.id;
                predicted.known.record(output);
                if let (Some(device), Some(ours)) = (evidence.tensors.get(&id), predicted.known.get(id)) {
                    predicted.tensors.insert(id, Arc::clone(ours));
                    predicted.known.overlay(id, Arc::clone(device));
                }
            }
        }
        predicted
    }

    fn measure(&self, predicted: &Predicted, faults: &[&Deviation]) -> Loss {
        let mut loss = self.cache_loss(predicted, faults);
        for (id, device) in &self.walker.evidence.tensors {
            if let (false, Some(ours)) = (matches!(id, TensorId::KRows | TensorId::VRows), predicted.tensors.get(id)) {
                loss.add(of_tensor(device, ours));
            }
        }
        loss
    }

    /// The distance of the caches' final contents, over the rows that either wrote.
    fn cache_loss(&self, predicted: &Predicted, faults: &[&Deviation]) -> Loss {
        let (inputs, evidence) = (self.walker.inputs, self.walker.evidence);
        let batch = faults.iter().find_map(|fault| fault.written(inputs));
        let written = batch.as_ref().map_or_else(|| inputs.view(), |batch| LayerInputs { batch, ..inputs.view() });
        let mut loss = Loss::default();
        let caches = [
            (TensorId::KRows, &evidence.k, inputs.cache.k.view()),
            (TensorId::VRows, &evidence.v, inputs.cache.v.view()),
        ];
        for (id, cache, before) in caches {
            let (Some(cache), Some(rows)) = (cache, predicted.tensors.get(&id)) else { continue };
            let ours = written_rows(&written, rows);
            let places: BTreeSet<usize> = cache.position.keys().chain(ours.keys()).copied().collect();
            for row in places {
                let device = cache.position.get(&row).map_or_else(|| before.row(row), |&at| cache.values.row(at));
                let ours = ours.get(&row).map_or_else(|| before.row(row), |values| ArrayView1::from(&values[..]));
                loss.add(of_row(device, ours));
            }
        }
        loss
    }

    fn digest(&self, predicted: &Predicted, faults: &[&Deviation]) -> u64 {
        let mut hash = Sha256::new();
        for (id, tensor) in &predicted.tensors {
            let contract = self.contract.tensors.get(id);
            if contract.is_some_and(|contract| Arc::ptr_eq(contract, tensor)) {
                continue;
            }
            hash.update(id.name().as_bytes());
            let [rows, columns] = tensor.shape();
            for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                hash.update(tensor.bits(row, column).to_le_bytes());
            }
        }
        if let Some(batch) = faults.iter().find_map(|fault| fault.written(self.walker.inputs)) {
            batch.slots.iter().for_each(|slot| hash.update(slot.to_le_bytes()));
        }
        let digest = hash.finalize();
        u64::from_le_bytes(std::array::from_fn(|i| digest[i]))
    }
}

/// Cache rows that a step writes, by cache row, from what each row of the batch writes (BF16 `[16, KV*D]`).
pub fn written_rows(inputs: &LayerInputs<'_>, rows: &Tensor) -> BTreeMap<usize, Vec<bf16>> {
    let (geometry, dim, nothing) = (inputs.geometry, inputs.geometry.head_dim, Trace::new());
    let source = KvSource::new(inputs, &nothing);
    let values: ArrayView2<'_, bf16> = rows.bf16();
    let mut written = BTreeMap::new();
    for b in 0..BATCH {
        let slot = inputs.batch.slots[b];
        if source.writer(slot) != Some(b) {
            continue;
        }
        for head in 0..geometry.num_key_value_heads {
            let values = values.slice(s![b, head * dim..(head + 1) * dim]).to_vec();
            written.insert(cache_row(geometry, slot, head), values);
        }
    }
    written
}
