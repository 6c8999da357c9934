//! The reference beside the device, a layer at a time: each layer starts from the device's own state where that is known
//! and from what the layer before gave where not, and attention reads the device's own cache rows. Where a cache was not
//! captured, the rows that follow from those inputs take its place.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use cases::GeneratedModel;
use half::bf16;
use ndarray::{Array1, Array2};
use reference::Policy;
use reference::model::{ModelError, Weights as _};

use super::known::{Known, moment_of};
use crate::runs::one_layer::{OneLayer, Ran};

/// What the device's run is known by, besides its states.
pub struct Walker<'a, 'r> {
    /// The model and its places.
    pub one: OneLayer<'a, GeneratedModel<'r>>,
    /// The token that was fed at each place; `None` where nothing tells.
    pub fed: &'a [Option<usize>],
    /// K and V of each place by layer, where captured.
    pub held: [Option<&'a [Array2<bf16>]>; 2],
}

/// What one layer gave for the places of one phase.
#[derive(Debug)]
pub struct Walked {
    /// The places, one a row.
    pub indices: Vec<usize>,
    /// The first layer that ran from what is known, by row: its input was the device's own state or an embedding.
    pub starts: Vec<usize>,
    /// What came out.
    pub ran: Ran,
}

/// By layer, what the prefill and the decode steps gave.
pub type Layers = Vec<[Option<Walked>; 2]>;

impl Walker<'_, '_> {
    /// Whether a cache was not captured, so that histories are made from states.
    pub fn derives(&self) -> bool {
        self.held.iter().any(Option::is_none)
    }

    /// Runs `layers` for `places` under `policy`; the states in `inputs` are what the next layers start from. A place
    /// whose input is not known yet is left out until it is.
    ///
    /// # Errors
    /// The model lacks a layer.
    pub fn walk(
        &self,
        places: &[usize],
        layers: Range<usize>,
        inputs: &Known,
        policy: &Policy,
    ) -> Result<Layers, ModelError> {
        let plan = self.one.plan;
        let (first, places) = if self.derives() { (0, self.until(places)) } else { (layers.start, places.to_vec()) };
        let decode: Vec<bool> = places.iter().map(|&index| plan.step_of(plan.places[index]).is_some()).collect();
        let mut current: BTreeMap<usize, (usize, Array1<bf16>)> = BTreeMap::new();
        let mut walked = Vec::new();
        for layer in first..layers.end {
            for &index in &places {
                if let Some(state) = self.input(layer, index, inputs) {
                    current.insert(index, (layer, state));
                }
            }
            let [k, v] = self.history(layer, &current, policy)?;
            let mut phases = [None, None];
            for (phase, slot) in phases.iter_mut().enumerate() {
                let of_phase = places.iter().zip(&decode).filter(|(_, decode)| usize::from(**decode) == phase);
                let indices: Vec<usize> =
                    of_phase.map(|(&index, _)| index).filter(|index| current.contains_key(index)).collect();
                if indices.is_empty() {
                    continue;
                }
                let ran = self.one.run(layer, &indices, self.stacked(&indices, &current).view(), [&k, &v], policy)?;
                let mut starts = Vec::with_capacity(indices.len());
                for (&index, state) in indices.iter().zip(ran.out.rows()) {
                    if let Some((start, input)) = current.get_mut(&index) {
                        starts.push(*start);
                        input.assign(&state);
                    }
                }
                *slot = Some(Walked { indices, starts, ran });
            }
            if layer >= layers.start {
                walked.push(phases);
            }
        }
        Ok(walked)
    }

    /// Places up to the last moment of `places`: their rows are what attention reads.
    fn until(&self, places: &[usize]) -> Vec<usize> {
        let plan = self.one.plan;
        let last = places.iter().map(|&index| moment_of(plan, index)).max();
        (0..plan.places.len()).filter(|&index| Some(moment_of(plan, index)) <= last).collect()
    }

    /// What is known to enter a layer at a place.
    fn input(&self, layer: usize, index: usize, inputs: &Known) -> Option<Array1<bf16>> {
        match layer.checked_sub(1) {
            Some(before) => inputs.get(before, index).map(|state| state.to_owned()),
            None => {
                let table = self.one.weights.embed_tokens();
                self.fed[index].filter(|&token| token < table.nrows()).map(|token| table.row(token).to_owned())
            }
        }
    }

    fn stacked(&self, indices: &[usize], current: &BTreeMap<usize, (usize, Array1<bf16>)>) -> Array2<bf16> {
        let mut input = Array2::from_elem((indices.len(), self.one.plan.geometry.hidden_size), bf16::ZERO);
        for (mut row, index) in input.rows_mut().into_iter().zip(indices) {
            if let Some((_, state)) = current.get(index) {
                row.assign(state);
            }
        }
        input
    }

    /// The layer's K and V of every place: the device's own, or what `current` gives.
    fn history<'h>(
        &'h self,
        layer: usize,
        current: &BTreeMap<usize, (usize, Array1<bf16>)>,
        policy: &Policy,
    ) -> Result<[Cow<'h, Array2<bf16>>; 2], ModelError> {
        let plan = self.one.plan;
        let mut made: Option<[Array2<bf16>; 2]> = None;
        if self.derives() {
            let none = Array2::from_elem((plan.places.len(), plan.geometry.kv_width()), bf16::ZERO);
            let mut rows = [none.clone(), none.clone()];
            for decode in [false, true] {
                let of_phase = |index: &usize| plan.step_of(plan.places[*index]).is_some() == decode;
                let indices: Vec<usize> = current.keys().copied().filter(of_phase).collect();
                if indices.is_empty() {
                    continue;
                }
                // Keys and values do not depend on attention.
                let input = self.stacked(&indices, current);
                let ran = self.one.run(layer, &indices, input.view(), [&none, &none], policy)?;
                for (n, &index) in indices.iter().enumerate() {
                    rows[0].row_mut(index).assign(&ran.k.row(n));
                    rows[1].row_mut(index).assign(&ran.v.row(n));
                }
            }
            made = Some(rows);
        }
        // What was captured comes first, and without it there are rows that were made.
        let [k, v] = made.unwrap_or_default();
        let one =
            |held: Option<&'h [Array2<bf16>]>, made| held.map_or(Cow::Owned(made), |held| Cow::Borrowed(&held[layer]));
        Ok([one(self.held[0], k), one(self.held[1], v)])
    }
}
