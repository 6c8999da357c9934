//! Ways in which kernels depart from the contract, as one table (`docs/deviations.md`). A deviation wraps the function
//! of the stages that it touches, so that a layer with a fault is the same stage table run under another [`Context`]:
//! there is no second implementation of a layer, and several faults combine. Adding a deviation is one entry in
//! [`catalogue`].

mod attention;
mod catalogue;
mod changes;
mod project;
mod quantize;
mod rope;

use std::fmt;

use crate::inputs::{Batch, LayerInputs};
use crate::policy::{Policy, Site};
use crate::rounding::Rounding;
use crate::stages::{Context, Output, STAGES, Stage, Trace};
use crate::tensor::TensorId;

pub use catalogue::catalogue;

/// What a touched stage computes instead.
type Change = Box<dyn Fn(&Call<'_, '_, '_>) -> Vec<Output> + Send + Sync>;

/// One way in which a kernel may depart from the contract.
pub struct Deviation {
    /// Its name, `site.what`.
    pub id: String,
    /// The cast site or the tensor at which it works.
    pub site: &'static str,
    /// What such a kernel does, in words that follow "the device".
    pub description: String,
    /// Stages whose results it may change, in the order of the table.
    stages: Vec<&'static str>,
    /// Tensors that touched stages read besides those of the table.
    reads: Vec<TensorId>,
    /// What touched stages compute.
    change: Change,
    /// Whether it gives stages a freedom that the contract's do not have: a long FP32 sum.
    freely: bool,
    /// The rounding rule that it is, where it is one.
    pub rule: Option<(Site, Rounding)>,
    /// Where rows are written instead of the slots of the batch.
    written: Option<fn(&Batch, &LayerInputs<'_>) -> Batch>,
}

impl Deviation {
    /// Whether a stage's results may change.
    #[must_use]
    pub fn touches(&self, stage: &Stage) -> bool {
        self.stages.contains(&stage.name)
    }

    /// Whether the results of a stage depend, with this fault, on more than IEEE operations in a fixed order.
    #[must_use]
    pub fn frees(&self, stage: &Stage) -> bool {
        self.touches(stage) && (stage.free || self.freely)
    }

    /// Whether a policy asks for just this.
    #[must_use]
    pub fn is_asked_by(&self, policy: &Policy) -> bool {
        self.rule.is_some_and(|(site, rule)| policy.at(site) == rule)
    }

    /// The first stage whose results may change; none where only the places of cache writes do.
    #[must_use]
    pub fn first_stage(&self) -> Option<&'static Stage> {
        STAGES.iter().find(|stage| self.touches(stage))
    }

    /// Tensors that it reads in a stage besides those of the table.
    pub fn reads_in(&self, stage: &Stage) -> &[TensorId] {
        if self.touches(stage) { &self.reads } else { &[] }
    }

    /// Whether it writes cache rows elsewhere.
    #[must_use]
    pub fn moves_writes(&self) -> bool {
        self.written.is_some()
    }

    /// The batch by whose slots cache rows are written; none where it is the right one.
    #[must_use]
    pub fn written(&self, inputs: &LayerInputs<'_>) -> Option<Batch> {
        self.written.map(|written| written(inputs.batch, inputs))
    }
}

impl fmt::Debug for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deviation").field("id", &self.id).field("stages", &self.stages).finish_non_exhaustive()
    }
}

/// A touched stage about to run.
pub struct Call<'a, 'c, 'd> {
    /// The stage.
    pub stage: &'a Stage,
    /// What it sees.
    pub context: &'a Context<'c, 'd>,
    /// The tensors before it.
    pub trace: &'a Trace,
    /// Deviations inside this one.
    rest: &'a [&'c Deviation],
}

impl Call<'_, '_, '_> {
    /// The stage without this deviation.
    pub fn run(&self) -> Vec<Output> {
        through(self.stage, self.context, self.rest, self.trace)
    }

    /// The stage without this deviation, on other inputs.
    pub fn run_on(&self, inputs: &LayerInputs<'_>) -> Vec<Output> {
        through(self.stage, &self.context.over(inputs, self.context.policy), self.rest, self.trace)
    }

    /// The stage without this deviation, under another policy.
    pub fn run_under(&self, policy: &Policy) -> Vec<Output> {
        through(self.stage, &self.context.over(self.context.inputs, policy), self.rest, self.trace)
    }

    /// The stage without this deviation, with the FP32 values behind what it narrows.
    pub fn run_wide(&self) -> Vec<Output> {
        through(self.stage, &self.context.keeping_wide(), self.rest, self.trace)
    }

    /// The stage without this deviation, on other tensors.
    pub fn run_after(&self, trace: &Trace) -> Vec<Output> {
        through(self.stage, self.context, self.rest, trace)
    }
}

/// Runs a stage under deviations, the last of which is the outermost.
pub(crate) fn through<'c>(
    stage: &Stage,
    context: &Context<'c, '_>,
    deviations: &[&'c Deviation],
    trace: &Trace,
) -> Vec<Output> {
    match deviations.split_last() {
        None => (stage.run)(context, trace),
        Some((deviation, rest)) if deviation.touches(stage) && deviation.reads.iter().all(|&id| trace.holds(id)) => {
            (deviation.change)(&Call { stage, context, trace, rest })
        }
        Some((_, rest)) => through(stage, context, rest, trace),
    }
}
