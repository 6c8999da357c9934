//! What searches for drift found, for a person.

use std::fmt::Write as _;

use goldens::bisect::{Origin, StageReport, State};
use goldens::report::{CaseReport, Explanation, Located, Verdict};

use super::human::{BOLD, DIM};
use super::summary::{element, headline};
use super::text::{grouped, labelled, plain, plural};

/// Notes shown of one tensor.
const NOTES: usize = 4;

/// Where drift was made.
pub fn stage(found: &StageReport, case: &CaseReport) -> String {
    let mut out = format!("{}  {DIM}{}{DIM:#}\n", plain(&found.name), plain(&found.path));
    match (&found.first_divergence, found.verdict) {
        (Some(origin), _) => {
            let _ = writeln!(out, "  {BOLD}drift is first made at {}{BOLD:#}", place(origin));
            details(&mut out, origin);
        }
        (None, Verdict::Pass) => out.push_str("  no drift: every captured tensor is right for what it was given\n"),
        (None, _) => {
            let _ = writeln!(out, "  {}", plain(&headline(case).unwrap_or_default()));
        }
    }
    if !found.consequences.is_empty() {
        let _ = writeln!(out, "  consequences, with no fault of their own: {}", found.consequences.join(", "));
    }
    for origin in &found.others {
        let _ = writeln!(out, "  {BOLD}a fault of its own at {}{BOLD:#}", place(origin));
        details(&mut out, origin);
    }
    let strip = found.stages.iter().map(|strip| match strip.state {
        State::NotCaptured => ("?", strip),
        State::Right => ("ok", strip),
        State::Consequence => ("follows", strip),
        State::First => ("FIRST", strip),
        State::Fault => ("FAULT", strip),
    });
    let _ = writeln!(out, "  stages (step: stage, what was found; ? not captured):");
    for (word, strip) in strip {
        let _ = writeln!(out, "    {:>2}  {:<18} {word}", strip.step, strip.stage);
    }
    out
}

fn place(origin: &Origin) -> String {
    let Origin { tensor, stage, step, .. } = origin;
    match &origin.between {
        None => format!("{tensor}: stage {stage} (step {step}), recomputed from the device's own inputs to it"),
        Some(between) => {
            let after =
                if between.after.is_empty() { "the layer's inputs".to_owned() } else { between.after.join(", ") };
            format!("{tensor}, somewhere between {after} and it: {}", between.stages.join(", "))
        }
    }
}

fn details(out: &mut String, origin: &Origin) {
    let wrong = origin.unexplained + origin.explained_ties;
    let elements = plural(origin.elements, "element");
    let _ = write!(out, "    {} of {elements}", grouped(wrong));
    let places = [labelled("row", &origin.rows), labelled("head", &origin.heads), labelled("page", &origin.pages)];
    let places: Vec<String> = places.into_iter().flatten().collect();
    let _ = writeln!(out, "{}", if places.is_empty() { String::new() } else { format!(", in {}", places.join(", ")) });
    if let Some(first) = &origin.first {
        let _ = writeln!(out, "    first  {}: {}", located(first), element(&first.element));
    }
    if let Some(worst) = origin
        .worst
        .as_ref()
        .filter(|worst| origin.first.as_ref().is_none_or(|first| first.element.index != worst.index))
    {
        let _ = writeln!(out, "    worst  {}", element(worst));
    }
    for note in origin.notes.iter().take(NOTES) {
        let _ = writeln!(out, "    {}", plain(note));
    }
}

/// Row, head, channel, page and slot of an element.
fn located(at: &Located) -> String {
    let parts = [("head", at.head), ("channel", at.channel), ("page", at.page), ("slot", at.slot)];
    let parts = parts.into_iter().filter_map(|(name, value)| value.map(|value| format!(", {name} {value}")));
    format!("row {}{}", at.row, parts.collect::<String>())
}

/// Why it was made.
pub fn cause(case: &CaseReport) -> String {
    let mut out = format!("{}  {DIM}{}{DIM:#}\n", plain(&case.name), plain(&case.path));
    if let Some(headline) = headline(case) {
        let _ = writeln!(out, "  {}", plain(&headline));
    }
    let Some(explanation) = &case.explanation else {
        out.push_str("  nothing was judged\n");
        return out;
    };
    match &case.cause {
        Some(cause) => {
            let _ = writeln!(out, "  {BOLD}cause: {}{BOLD:#}", plain(&cause.to_string()));
        }
        None if explanation.visible => {
            let _ = writeln!(out, "  {BOLD}cause: none of the known deviations{BOLD:#}");
            let first = case.tensors.iter().find(|tensor| Some(&tensor.name) == case.first_divergence.as_ref());
            for note in first.iter().flat_map(|tensor| &tensor.notes).take(NOTES) {
                let _ = writeln!(out, "    it looks like this: {}", plain(note));
            }
        }
        None => {}
    }
    rest(&mut out, explanation);
    out
}

/// The notes and the ranking of an explanation.
pub fn rest(out: &mut String, explanation: &Explanation) {
    for note in &explanation.notes {
        let _ = writeln!(out, "    {}", plain(note));
    }
    if explanation.candidates.is_empty() {
        return;
    }
    let _ = writeln!(out, "  tried, best first (share of the distance from the device that it explains):");
    for candidate in &explanation.candidates {
        let (exact, elements) = (candidate.reproduced.exact, candidate.reproduced.elements);
        let share = (1000.0 * candidate.score).floor() / 10.0;
        let given = if exact == elements {
            "all bits".to_owned()
        } else {
            format!("{} bits differ", grouped(elements - exact))
        };
        let _ = writeln!(out, "    {share:>5.1} %  {:<32} {given}", plain(&candidate.id));
    }
}
