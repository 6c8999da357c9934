//! What was found, as plain data (`docs/bisect.md`, Layer).

use device::Moment;
use serde::{Serialize, Serializer};

use crate::report::{PolicyReport, TensorReport};

/// How the question was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Drift is made at the named layer and step.
    Located,
    /// Nothing that was captured drifts.
    NoDrift,
    /// A search was asked for, and the state that it starts from does not drift.
    EndIsRight,
    /// The search came to a layer that does not drift when it runs from the device's own state, and none beside it does.
    Lost,
    /// There was nothing to compare.
    Unjudged,
}

/// Where drift is made, and what else was seen.
#[derive(Clone, Debug, Serialize)]
pub struct LayerReport {
    /// How the question was answered.
    pub outcome: Outcome,
    /// The case.
    pub name: String,
    /// Where the outputs came from, in words.
    pub source: String,
    /// Where drift is made first, in order of execution.
    pub drift: Option<Drift>,
    /// Drift in what comes after it.
    pub later: Vec<Later>,
    /// States that were judged, one a place.
    pub states: usize,
    /// Cache rows that were judged, K and V of one place and layer counting as two.
    pub cache_rows: usize,
    /// States that were fetched, by name, in order.
    pub fetched: Vec<String>,
    /// How many a search that does not lose the fault fetches at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetches_expected: Option<usize>,
    /// Rounding rules asked for and found.
    pub policy: PolicyReport,
    /// What to know besides.
    pub remarks: Vec<String>,
}

/// Drift that was made between two places of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Drift {
    /// The decode step, counted from 0, or `prefill`.
    #[serde(serialize_with = "moment")]
    pub step: Moment,
    /// The first layer that can have made it.
    pub first_layer: usize,
    /// The last layer that can have made it: what it made drifts.
    pub last_layer: usize,
    /// Whether `last_layer` ran from the device's own state before it.
    pub forced: bool,
    /// Batch rows that drift.
    pub rows: Vec<usize>,
    /// The first few places that drift, in words.
    pub places: String,
    /// What drifts: cache rows, and the state after the layer. Elements of `k_written_values` and `v_written_values` have
    /// the index row, position, column; those of a state their index in its tensor.
    pub tensors: Vec<TensorReport>,
    /// What to do next.
    pub next: String,
}

/// Drift behind the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Later {
    /// The decode step, or `prefill`.
    #[serde(serialize_with = "moment")]
    pub step: Moment,
    /// The layer.
    pub layer: usize,
    /// What drifts.
    pub tensor: String,
    /// Whether it is a fault of its own: it was made from what the device had. Otherwise it may follow from an earlier one.
    pub own: bool,
}

fn moment<S: Serializer>(moment: &Moment, serializer: S) -> Result<S::Ok, S::Error> {
    match moment {
        Moment::Prefill => serializer.serialize_str("prefill"),
        Moment::Step(step) => serializer.serialize_u64(*step as u64),
    }
}
