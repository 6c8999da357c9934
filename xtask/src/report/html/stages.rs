//! The strip of stages: the layer in the contract's order, each stage with what its tensors came to, the first
//! divergence named and what follows from it told apart from faults of its own.

use goldens::report::{CaseReport, TensorReport, Verdict};
use maud::{Markup, html};
use reference::TensorId;
use reference::stages::{STAGES, Stage};

/// What a stage came to, the worst last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Absent,
    Unjudged,
    Exact,
    Explained,
    Downstream,
    Follows,
    Fails,
    First,
}

impl State {
    /// Class, sign and words.
    fn look(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Absent => ("absent", "·", "not captured"),
            Self::Unjudged => ("unjudged", "?", "not judged"),
            Self::Exact => ("pass", "✓", "exact"),
            Self::Explained => ("pass", "✓", "explained"),
            Self::Downstream => ("pass downstream", "↳", "right for its inputs"),
            Self::Follows => ("follows", "↳", "a consequence"),
            Self::Fails => ("fail", "✕", "fails"),
            Self::First => ("fail first", "▶", "first divergence"),
        }
    }
}

/// The strip; nothing for a case without a layer's tensors.
pub fn strip(index: usize, case: &CaseReport) -> Markup {
    if !case.steps.is_empty() || !STAGES.iter().any(|stage| state(stage, case) != State::Absent) {
        return html! {};
    }
    html! {
        h3 { "Stages" }
        ol.stages {
            @for (number, stage) in STAGES.iter().enumerate() {
                @let state = state(stage, case);
                @let (class, sign, words) = state.look();
                li class=(class) title=(title(stage, words)) {
                    @if let Some(tensor) = shown(stage, case) {
                        a href=(format!("#case-{index}-tensor-{tensor}")) { (name(number, stage)) }
                    } @else { (name(number, stage)) }
                    span.state { span aria-hidden="true" { (sign) } " " (words) }
                }
            }
        }
    }
}

fn name(number: usize, stage: &Stage) -> Markup {
    html! { span.quiet { (number + 1) } " " (stage.name) }
}

fn title(stage: &Stage, words: &str) -> String {
    let writes: Vec<&str> = stage.writes.iter().map(|id| id.name()).collect();
    format!("stage {}, step {} of the contract, writes {}: {words}", stage.name, stage.step, writes.join(", "))
}

/// The capture's names of a stage's tensors: caches have their rows besides their values.
fn names(stage: &Stage) -> impl Iterator<Item = &'static str> {
    stage.writes.iter().flat_map(|id| {
        let rows = match id {
            TensorId::KRows => Some("k_written_rows"),
            TensorId::VRows => Some("v_written_rows"),
            _ => None,
        };
        rows.into_iter().chain([id.name()])
    })
}

fn tensors<'a>(stage: &Stage, case: &'a CaseReport) -> impl Iterator<Item = (usize, &'a TensorReport)> {
    let names: Vec<&str> = names(stage).collect();
    case.tensors.iter().enumerate().filter(move |(_, tensor)| names.contains(&tensor.name.as_str()))
}

/// The tensor that a stage leads to: the one that is worst, or its first.
fn shown(stage: &Stage, case: &CaseReport) -> Option<usize> {
    let worst = tensors(stage, case).max_by_key(|(index, tensor)| (of(tensor, case), std::cmp::Reverse(*index)));
    worst.map(|(index, _)| index)
}

fn state(stage: &Stage, case: &CaseReport) -> State {
    // A check may name a tensor that was not compared.
    if names(stage).any(|name| case.first_divergence.as_deref() == Some(name)) {
        return State::First;
    }
    tensors(stage, case).map(|(_, tensor)| of(tensor, case)).max().unwrap_or(State::Absent)
}

fn of(tensor: &TensorReport, case: &CaseReport) -> State {
    let follows = case.consequences.contains(&tensor.name);
    match tensor.verdict {
        _ if case.first_divergence.as_deref() == Some(tensor.name.as_str()) => State::First,
        Verdict::Fail | Verdict::Error if follows => State::Follows,
        Verdict::Fail | Verdict::Error => State::Fails,
        Verdict::Unjudged => State::Unjudged,
        Verdict::Pass if follows => State::Downstream,
        Verdict::Pass if tensor.explained > 0 => State::Explained,
        Verdict::Pass => State::Exact,
    }
}
