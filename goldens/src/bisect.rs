//! Where in a layer drift was made: a case's report, read along the stage table.

use std::collections::BTreeSet;

use reference::TensorId;
use reference::stages::{STAGES, Stage, stage_of};
use serde::Serialize;

use crate::report::{CaseReport, Element, Located, TensorReport, Verdict};

/// Where drift was made, and what followed.
#[derive(Clone, Debug, Serialize)]
pub struct StageReport {
    /// The case's own name.
    pub name: String,
    /// Where it was read from.
    pub path: String,
    /// The gate's verdict on it.
    pub verdict: Verdict,
    /// Where drift was first made; none where nothing fails.
    pub first_divergence: Option<Origin>,
    /// Tensors that are wrong only because of it.
    pub consequences: Vec<String>,
    /// Later tensors that are wrong for the device's own inputs to them: faults of their own.
    pub others: Vec<Origin>,
    /// Every stage of the layer, in order.
    pub stages: Vec<Strip>,
}

/// One tensor at which drift was made.
#[derive(Clone, Debug, Serialize)]
pub struct Origin {
    /// The tensor.
    pub tensor: String,
    /// The stage that writes it.
    pub stage: &'static str,
    /// Its step in `docs/numerics.md`.
    pub step: u8,
    /// Whether the stage was recomputed from the device's own inputs to it. Otherwise the fault lies `between`.
    pub forced: bool,
    /// The captured tensors before it that are right, and the stages between them and it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub between: Option<Between>,
    /// The first element of it, in index order.
    pub first: Option<Located>,
    /// The worst element of it.
    pub worst: Option<Element>,
    /// Drifting elements.
    pub unexplained: u64,
    /// Ties that went by a forbidden rule.
    pub explained_ties: u64,
    /// Elements compared.
    pub elements: u64,
    /// Rows, heads and KV pages that hold drift.
    pub rows: Vec<usize>,
    /// Heads that hold drift.
    pub heads: Vec<usize>,
    /// KV pages that hold drift.
    pub pages: Vec<usize>,
    /// What the drift looks like, in words.
    pub notes: Vec<String>,
}

/// A stretch of the stage table without captures.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Between {
    /// The captured tensors that it starts from; none: it starts from the layer's inputs.
    pub after: Vec<&'static str>,
    /// Stages in which the fault may be.
    pub stages: Vec<&'static str>,
}

/// One stage, as far as it was judged.
#[derive(Clone, Debug, Serialize)]
pub struct Strip {
    /// The stage.
    pub stage: &'static str,
    /// Its step in `docs/numerics.md`.
    pub step: u8,
    /// What was found.
    pub state: State,
}

/// What was found at a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// None of its tensors was captured.
    NotCaptured,
    /// Right for what it was given.
    Right,
    /// Right for what it was given, which was wrong, or only judged behind what was wrong.
    Consequence,
    /// Drift was first made here.
    First,
    /// Wrong for what it was given, after the first.
    Fault,
}

/// Reads a report along the stage table.
#[must_use]
pub fn stages(report: &CaseReport) -> StageReport {
    let captured: BTreeSet<TensorId> = report.tensors.iter().filter_map(|tensor| tensor_id(&tensor.name)).collect();
    let first = report.first_divergence.as_deref();
    let consequence = |tensor: &TensorReport| report.consequences.contains(&tensor.name);
    let failing = |tensor: &&TensorReport| tensor.verdict == Verdict::Fail;
    let origin_of = |tensor: &TensorReport| origin(tensor, &captured);
    let first_divergence = report.tensors.iter().find(|t| Some(t.name.as_str()) == first).map(origin_of);
    let others = report.tensors.iter().filter(failing).filter(|t| Some(t.name.as_str()) != first && !consequence(t));
    let strip = STAGES.iter().map(|stage| Strip { stage: stage.name, step: stage.step, state: state(stage, report) });
    StageReport {
        name: report.name.clone(),
        path: report.path.clone(),
        verdict: report.verdict,
        first_divergence,
        consequences: report.consequences.clone(),
        others: others.map(origin_of).collect(),
        stages: strip.collect(),
    }
}

fn state(stage: &Stage, report: &CaseReport) -> State {
    let tensors = || report.tensors.iter().filter(|t| tensor_id(&t.name).is_some_and(|id| stage.writes.contains(&id)));
    let any = |holds: &dyn Fn(&TensorReport) -> bool| tensors().any(holds);
    if tensors().next().is_none() {
        State::NotCaptured
    } else if any(&|t| report.first_divergence.as_ref() == Some(&t.name)) {
        State::First
    } else if any(&|t| t.verdict == Verdict::Fail && !report.consequences.contains(&t.name)) {
        State::Fault
    } else if any(&|t| report.consequences.contains(&t.name)) {
        State::Consequence
    } else {
        State::Right
    }
}

fn origin(tensor: &TensorReport, captured: &BTreeSet<TensorId>) -> Origin {
    let id = tensor_id(&tensor.name).unwrap_or(TensorId::Out);
    let stage = stage_of(id);
    let rows = tensor.name.ends_with("_written_rows");
    Origin {
        tensor: tensor.name.clone(),
        stage: stage.name,
        step: stage.step,
        forced: tensor.forced || rows,
        between: (!tensor.forced && !rows).then(|| between(id, captured)),
        first: tensor.first.clone(),
        worst: tensor.worst.clone(),
        unexplained: tensor.unexplained,
        explained_ties: tensor.explained_ties,
        elements: tensor.elements,
        rows: tensor.rows_failing.clone(),
        heads: tensor.heads_failing.clone(),
        pages: tensor.pages_failing.clone(),
        notes: tensor.notes.clone(),
    }
}

/// The stretch between captured tensors and `target`.
fn between(target: TensorId, captured: &BTreeSet<TensorId>) -> Between {
    let (suspects, known) = suspects(target, captured);
    Between {
        after: known.into_iter().map(TensorId::name).collect(),
        stages: suspects.iter().rev().map(|stage| stage.name).collect(),
    }
}

/// Stages that lie between what was captured and a tensor, the last first: one, where all that its stage reads was
/// captured; and the captured tensors that they start from.
pub(crate) fn suspects(target: TensorId, captured: &BTreeSet<TensorId>) -> (Vec<&'static Stage>, BTreeSet<TensorId>) {
    let mut wanted = BTreeSet::from([target]);
    let (mut suspects, mut known) = (Vec::new(), BTreeSet::new());
    for stage in STAGES.iter().rev().filter(|stage| stage.writes.iter().any(|id| *id <= target)) {
        if stage.writes.iter().any(|id| wanted.contains(id)) {
            suspects.push(stage);
            let (given, missing): (Vec<TensorId>, Vec<TensorId>) =
                stage.reads.iter().partition(|id| captured.contains(id) && **id != target);
            wanted.extend(missing);
            known.extend(given);
        }
    }
    (suspects, known)
}

/// The tensor that a report's name stands for.
pub(crate) fn tensor_id(name: &str) -> Option<TensorId> {
    match name {
        "k_written_rows" => Some(TensorId::KRows),
        "v_written_rows" => Some(TensorId::VRows),
        _ => TensorId::ALL.into_iter().find(|id| id.name() == name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stretch_without_captures_is_named_by_its_ends() {
        let all: BTreeSet<TensorId> = TensorId::ALL.into_iter().collect();
        let forced = between(TensorId::Out, &all);
        assert_eq!(forced.stages, ["out"]);
        assert_eq!(forced.after, ["post_norm_partial", "down_acc_parts"]);
        let some = BTreeSet::from([TensorId::AttnOut, TensorId::Out]);
        let gap = between(TensorId::Out, &some);
        assert_eq!(
            (gap.after[..].to_vec(), gap.stages.first(), gap.stages.len()),
            (vec!["attn_out"], Some(&"quantize_attn"), 11)
        );
        let nothing = between(TensorId::Out, &BTreeSet::from([TensorId::Out]));
        assert_eq!((nothing.after.len(), nothing.stages.len()), (0, STAGES.len()));
    }
}
