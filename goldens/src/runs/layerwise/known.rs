//! The device's own states after layers, by layer and place.

use std::collections::BTreeMap;

use device::{LayerStates, Moment};
use half::bf16;
use ndarray::{Array1, ArrayView1, ArrayView2};

use crate::runs::plan::{Place, Plan};

/// States that the device gave, in any number of layers and places.
#[derive(Clone, Debug, Default)]
pub struct Known {
    states: BTreeMap<(usize, usize), Array1<bf16>>,
}

/// A state that was given twice, with different bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contradiction {
    /// The layer.
    pub layer: usize,
    /// When.
    pub moment: Moment,
    /// Row and column of the first element that differs.
    pub at: [usize; 2],
}

impl Known {
    /// Everything that some states hold.
    pub fn of(plan: &Plan<'_>, states: &LayerStates) -> Self {
        let mut known = Self::default();
        for (&(layer, moment), values) in &states.states {
            // Each state is there once.
            let _ = known.add(plan, layer, moment, values.view());
        }
        known
    }

    /// Adds a state, BF16 `[rows, H]`. One that is there already has to be the same.
    pub fn add(
        &mut self,
        plan: &Plan<'_>,
        layer: usize,
        moment: Moment,
        values: ArrayView2<'_, bf16>,
    ) -> Result<(), Contradiction> {
        let places = places_of(plan, moment);
        for (row, (&index, state)) in places.iter().zip(values.rows()).enumerate() {
            if let Some(held) = self.get(layer, index) {
                let differs = |(a, b): (&bf16, &bf16)| a.to_bits() != b.to_bits();
                if let Some(column) = held.iter().zip(state).position(differs) {
                    return Err(Contradiction { layer, moment, at: [row, column] });
                }
            }
        }
        for (&index, state) in places.iter().zip(values.rows()) {
            self.states.insert((layer, index), state.to_owned());
        }
        Ok(())
    }

    /// The state after `layer` at a place.
    pub fn get(&self, layer: usize, index: usize) -> Option<ArrayView1<'_, bf16>> {
        self.states.get(&(layer, index)).map(|state| state.view())
    }

    /// Whether the state after `layer` is there for every place of a moment.
    pub fn has(&self, plan: &Plan<'_>, layer: usize, moment: Moment) -> bool {
        places_of(plan, moment).iter().all(|&index| self.states.contains_key(&(layer, index)))
    }

    /// The states after one layer at some places.
    pub fn only(&self, layer: usize, places: &[usize]) -> Self {
        let of = |&index: &usize| Some(((layer, index), self.states.get(&(layer, index))?.clone()));
        Self { states: places.iter().filter_map(of).collect() }
    }
}

/// The places of a moment, in the order of a state's rows.
pub fn places_of(plan: &Plan<'_>, moment: Moment) -> Vec<usize> {
    match moment {
        Moment::Prefill => plan.of_phase(false),
        Moment::Step(step) => {
            let place = |row: usize| Place { row, position: plan.tokens.prompts[row].len() + step };
            (0..plan.rows()).map(|row| plan.index(place(row))).collect()
        }
    }
}

/// When a place is computed.
pub fn moment_of(plan: &Plan<'_>, index: usize) -> Moment {
    plan.step_of(plan.places[index]).map_or(Moment::Prefill, Moment::Step)
}

/// Names a place within its moment: `row 1`, or `prompt 1, token 20`.
pub fn place_name(plan: &Plan<'_>, index: usize) -> String {
    let Place { row, position } = plan.places[index];
    match plan.step_of(plan.places[index]) {
        Some(step) => format!("row {row} at step {step} (position {position})"),
        None => format!("row {row}, prompt token {position}"),
    }
}
