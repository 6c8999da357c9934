//! The tokens of a run: a strip of rows by steps, each step with its verdict and its margin, then the steps worth a
//! look.

use std::collections::BTreeMap;

use goldens::report::{CaseReport, StepVerdict, TokenStep};
use maud::{Markup, html};

use super::super::summary;
use super::super::text::plain;
use super::plot::{Paths, Shape};
use super::{marks, scrolling};

/// Pixels of a step from left to right, and of its verdict and its margin from top to bottom.
const WIDE: usize = 9;
const VERDICT: usize = 13;
const MARGIN: usize = 24;
/// Pixels between two rows.
const GAP: usize = 16;
/// Pixels left of the steps.
const LEFT: usize = 60;
/// Pixels above them.
const TOP: usize = 18;
/// Steps of a run whose every cell has a text of its own.
const TITLED: usize = 2048;
/// Steps between two numbers above the strip.
const EVERY: usize = 16;
/// Steps that are listed.
const LISTED: usize = 100;
/// Smallest margins that are listed.
const SMALLEST: usize = 10;
/// Powers of ten that the margin's bar spans, from its foot to its top.
const DECADES: [f64; 2] = [-4.0, 1.0];

/// The strip and the lists; nothing for a case without steps.
pub fn section(case: &CaseReport) -> Markup {
    let Some(tokens) = summary::tokens(case) else { return html! {} };
    let notable = summary::notable_steps(case);
    let mut margins: Vec<&TokenStep> = case.steps.iter().filter(|step| step.margin.0.is_finite()).collect();
    margins.sort_by(|a, b| a.margin.0.total_cmp(&b.margin.0));
    margins.truncate(SMALLEST);
    html! {
        h3 { "Tokens" }
        p { (tokens) "." }
        figure {
            figcaption {
                strong { "row by step" } " "
                span.quiet {
                    "(below each step its margin, from 0.0001 to 10 on a logarithmic scale; the line across it is how "
                    "large a margin permitted freedoms can turn round: a bar that stays below it could have gone either way)"
                }
            }
            (scrolling("Row by step", strip(&case.steps)))
        }
        @if !notable.is_empty() { (list("Steps that are not plain agreement", &notable)) }
        (list("Smallest margins", &margins))
    }
}

fn strip(steps: &[TokenStep]) -> Markup {
    let mut rows: BTreeMap<usize, Vec<&TokenStep>> = BTreeMap::new();
    for step in steps {
        rows.entry(step.row).or_default().push(step);
    }
    let last = steps.iter().map(|step| step.step).max().unwrap_or(0);
    let line = VERDICT + MARGIN + GAP;
    let (width, height) = (LEFT + WIDE * (last + 1) + 6, TOP + line * rows.len());
    let titled = steps.len() <= TITLED;
    let count = |verdict| steps.iter().filter(|step| step.verdict == verdict).count();
    let label = format!(
        "row by step: {} agree, {} near ties, {} fail",
        count(StepVerdict::Agree),
        count(StepVerdict::NearTie),
        count(StepVerdict::Fail)
    );
    html! {
        svg.map width=(width) height=(height) role="img" aria-label=(label) {
            @for step in (0..=last).step_by(EVERY) { text.n x=(LEFT + step * WIDE) y=(TOP - 6) { (step) } }
            @for (index, (row, steps)) in rows.iter().enumerate() {
                @let y = TOP + index * line;
                text.n.e x=(LEFT - 6) y=(y + 10) { "row " (row) }
                @if titled {
                    @for step in steps { g { title { (told(step)) } (cells(&[step], y)) } }
                } @else { (cells(steps, y)) }
            }
        }
    }
}

/// Verdict, margin and bound of steps of one row.
fn cells(steps: &[&TokenStep], y: usize) -> Markup {
    let (mut paths, mut margins, mut bounds) = (Paths::default(), String::new(), String::new());
    let foot = y + VERDICT + 2 + MARGIN;
    for run in steps.chunk_by(|a, b| a.verdict == b.verdict && a.step + 1 == b.step) {
        let (Some(first), length) = (run.first(), run.len()) else { continue };
        // Agreement is ground, drawn in one; what is not is drawn a step at a time.
        let (each, count) = if first.verdict == StepVerdict::Agree { (length, 1) } else { (1, length) };
        for part in 0..count {
            let x = LEFT + (first.step + part) * WIDE;
            paths.draw(marks::of_step(first.verdict), [x, y], [each * WIDE - 1, VERDICT]);
        }
    }
    for step in steps {
        let x = LEFT + step.step * WIDE;
        if let Some(tall) = height(step.margin.0) {
            if step.margin.0 <= step.bound.0 {
                paths.draw(Shape::Tie, [x + 1, foot - tall], [WIDE - 3, tall]);
            } else {
                margins.push_str(&format!("M{} {}h{}v{tall}h-{}z", x + 1, foot - tall, WIDE - 3, WIDE - 3));
            }
        }
        if let Some(tall) = height(step.bound.0) {
            bounds.push_str(&format!("M{x} {}h{}", foot - tall, WIDE - 1));
        }
    }
    html! {
        (paths.markup())
        @if !margins.is_empty() { path.m d=(margins) {} }
        @if !bounds.is_empty() { path.bound d=(bounds) {} }
    }
}

/// Pixels of a margin's bar; at least one of a margin that is there.
fn height(margin: f64) -> Option<usize> {
    if !margin.is_finite() || margin < 0.0 {
        return None;
    }
    let [least, most] = DECADES;
    let share = (margin.log10() - least) / (most - least);
    Some((share.clamp(0.0, 1.0) * MARGIN as f64).round().max(1.0) as usize)
}

fn told(step: &TokenStep) -> String {
    let cells = summary::STEP_HEADINGS.into_iter().zip(summary::step_cells(step)).filter(|(_, cell)| !cell.is_empty());
    cells.map(|(heading, cell)| format!("{heading} {}", plain(&cell))).collect::<Vec<_>>().join(", ")
}

fn list(caption: &str, steps: &[&TokenStep]) -> Markup {
    let hidden = steps.len().saturating_sub(LISTED);
    html! {
        (scrolling(caption, html! {
            table {
                caption { (caption) }
                thead { tr { @for heading in summary::STEP_HEADINGS { th scope="col" { (heading) } } } }
                tbody {
                    @for step in steps.iter().take(LISTED) {
                        tr { @for cell in summary::step_cells(step) { td { (plain(&cell)) } } }
                    }
                }
            }
        }))
        @if hidden > 0 { p.quiet { (hidden) " more are in the JSON report." } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_have_heights() {
        assert_eq!(height(f64::NAN), None);
        assert_eq!(height(-1.0), None);
        assert_eq!([0.0, 1e-9, 1e9, 0.01].map(height), [Some(1), Some(1), Some(MARGIN), Some(10)]);
    }
}
