//! The search that fetches few states: first the step, then the layer, each by halving, and then the one layer found is
//! judged by itself, from the device's own state before it (`docs/bisect.md`, Fetching).
//!
//! What is halved is whether a state agrees with the reference's run from the start of the search. That is true before the
//! faulty layer and false from it on, as long as the fault is not lost among permitted freedoms; whatever the answers are,
//! halving ends at two neighbours of which the first agrees and the second does not. Because answers may be blurred, the
//! layer between them is accused only if it drifts from the device's own state. If it does not, the layers around it are
//! judged the same way, one after the other.

use device::{Moment, state_name};
use half::bf16;
use ndarray::Array2;

use super::known::{Known, places_of};
use super::report::Drift;
use super::{BisectError, Looked, Session};

/// Gives states of the device's run.
pub trait Fetch {
    /// The state after `layer`, BF16 `[rows, H]`: a row for each active row, or for each prompt token in the prefill.
    ///
    /// # Errors
    /// The state cannot be had.
    fn fetch(&mut self, layer: usize, moment: Moment) -> Result<Array2<bf16>, FetchError>;
}

/// Why a state was not had.
#[derive(Debug)]
pub enum FetchError {
    /// The device or its command failed.
    Failed(String),
    /// What it gave is no such state.
    Wrong(String),
}

/// What a search came to.
pub(super) enum Found {
    /// Drift, confirmed from the device's own state.
    Drift(Box<(Looked, Drift)>),
    /// The end that should be bad is right.
    EndIsRight(Moment),
    /// No layer of the step drifts by itself.
    Lost(Moment, usize),
}

/// Halvings of `n` intervals.
fn halvings(n: usize) -> usize {
    n.max(1).next_power_of_two().trailing_zeros() as usize
}

pub(super) struct Search<'s, 'a, 'r> {
    pub session: &'s Session<'a, 'r>,
    pub fetch: &'s mut dyn Fetch,
    /// What was known before the search: layers start from it.
    pub before: Known,
    /// Everything that is known.
    pub known: Known,
    /// Names of what was fetched.
    pub fetched: Vec<String>,
    /// How many fetches a search takes that does not lose the fault.
    pub expected: usize,
    pub remarks: Vec<String>,
}

impl Search<'_, '_, '_> {
    /// Searches. `seen` is where drift is already seen; without it the state after the last layer at `bad` has to drift.
    pub fn run(&mut self, seen: Option<&Drift>, bad: Option<Moment>) -> Result<Found, BisectError> {
        let plan = self.session.plan();
        let last = plan.layers - 1;
        let (moment, mut low, mut high) = match seen {
            Some(drift) => {
                self.expected = halvings(drift.last_layer + 1 - drift.first_layer) + 2;
                (drift.step, drift.first_layer, drift.last_layer)
            }
            None => {
                let steps = plan.steps() - 1;
                let end = bad.unwrap_or(if steps == 0 { Moment::Prefill } else { Moment::Step(steps - 1) });
                let moments = if bad.is_some() { 1 } else { plan.steps() };
                self.expected = 1 + halvings(moments) + halvings(plan.layers) + 2;
                if !self.drifts(last, end)? {
                    return Ok(Found::EndIsRight(end));
                }
                let moment = if bad.is_some() { end } else { self.first_bad_step(last)? };
                (moment, 0, last)
            }
        };
        // The state before layer `low` agrees, that after layer `high` does not.
        while low < high {
            let middle = (low + high - 1) / 2;
            if self.drifts(middle, moment)? {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        if let Some(found) = self.confirm(high, moment)? {
            return Ok(Found::Drift(Box::new(found)));
        }
        self.remarks.push(format!(
            "the search lost the fault: {} differs from a run from the start, but layer {high} is right for the device's \
             own state before it; the other layers of this step were judged one by one",
            state_name(high, moment)
        ));
        for layer in (0..high).rev().chain(high + 1..=last) {
            if let Some(found) = self.confirm(layer, moment)? {
                return Ok(Found::Drift(Box::new(found)));
            }
        }
        Ok(Found::Lost(moment, high))
    }

    /// The first moment whose last state drifts, by halving; that of the last one does.
    fn first_bad_step(&mut self, last: usize) -> Result<Moment, BisectError> {
        let moment = |n: usize| n.checked_sub(1).map_or(Moment::Prefill, Moment::Step);
        let (mut low, mut high) = (0, self.session.plan().steps() - 1);
        while low < high {
            let middle = (low + high) / 2;
            if self.drifts(last, moment(middle))? {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Ok(moment(high))
    }

    /// Whether the state after a layer is one that the reference gives from what was known before the search.
    fn drifts(&mut self, layer: usize, moment: Moment) -> Result<bool, BisectError> {
        self.get(layer, moment)?;
        let places = places_of(self.session.plan(), moment);
        // Nothing that was fetched is an input, and nothing but this state is asked about.
        let first = self.session.start(&self.before, &places, layer);
        let evidence = self.known.only(layer, &places);
        let looked = self.session.look(&places, first..layer + 1, &self.before, &evidence)?;
        Ok(looked.first.is_some())
    }

    /// Judges one layer from the device's own state before it.
    fn confirm(&mut self, layer: usize, moment: Moment) -> Result<Option<(Looked, Drift)>, BisectError> {
        if let Some(before) = layer.checked_sub(1) {
            self.get(before, moment)?;
        }
        self.get(layer, moment)?;
        let places = places_of(self.session.plan(), moment);
        let looked = self.session.look(&places, layer..layer + 1, &self.known, &self.known)?;
        let drift = looked.first.clone();
        Ok(drift.map(|drift| (looked, drift)))
    }

    /// Fetches a state that is not known.
    fn get(&mut self, layer: usize, moment: Moment) -> Result<(), BisectError> {
        let plan = self.session.plan();
        if self.known.has(plan, layer, moment) {
            return Ok(());
        }
        let name = state_name(layer, moment);
        self.session.progress().step(&format!("fetching {name}"));
        let state = self.fetch.fetch(layer, moment).map_err(|error| match error {
            FetchError::Failed(said) => BisectError::Fetch { state: name.clone(), said },
            FetchError::Wrong(said) => BisectError::WrongState { state: name.clone(), said },
        })?;
        let expected = (places_of(plan, moment).len(), plan.geometry.hidden_size);
        if state.dim() != expected {
            let said = format!("it has shape {:?}, expected {expected:?}", state.dim());
            return Err(BisectError::WrongState { state: name, said });
        }
        self.known.add(plan, layer, moment, state.view())?;
        self.fetched.push(name);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::halvings;

    #[test]
    fn halvings_are_logarithms_rounded_up() {
        assert_eq!([1, 2, 3, 4, 5, 8, 40].map(halvings), [0, 1, 2, 2, 3, 3, 6]);
    }
}
