//! The named cause, where one was asked for, and the deviations that were tried, best first.

use goldens::report::{CaseReport, Explanation, Reproduced};
use maud::{Markup, html};

use super::super::text::{grouped, plain};
use super::scrolling;

/// Candidates that are listed.
const MOST: usize = 50;

/// The cause and its ranking; nothing where none was asked for.
pub fn section(case: &CaseReport) -> Markup {
    html! {
        @if case.cause.is_some() || case.explanation.is_some() {
            h3 { "Cause" }
            @match &case.cause {
                Some(cause) => p.said { (plain(&cause.to_string())) },
                None => p { "No known deviation gives what went wrong." },
            }
            @if let Some(explanation) = &case.explanation { (ranking(explanation)) }
        }
    }
}

fn ranking(explanation: &Explanation) -> Markup {
    let hidden = explanation.candidates.len().saturating_sub(MOST);
    html! {
        @if !explanation.visible { p { "Nothing is wrong that a cause could be found for." } }
        @if explanation.reproduced.elements > 0 {
            p { "The best one gives " (reproduced(&explanation.reproduced)) " elements bit for bit." }
        }
        @if !explanation.candidates.is_empty() {
            (scrolling("Candidates", html! {
                table {
                    caption { "Deviations that were tried" }
                    thead { tr {
                        th.number scope="col" { "rank" } th scope="col" { "deviation" } th scope="col" { "at" }
                        th scope="col" { "score" } th.number scope="col" { "bit for bit" }
                        th scope="col" { "what it is" }
                    } }
                    tbody {
                        @for (index, candidate) in explanation.candidates.iter().take(MOST).enumerate() {
                            tr {
                                td.number { (index + 1) }
                                th scope="row" { (plain(&candidate.id)) }
                                td { (plain(&candidate.site)) }
                                td { (score(candidate.score)) }
                                td.number { (reproduced(&candidate.reproduced)) }
                                td.text { (plain(&candidate.description)) }
                            }
                        }
                    }
                }
            }))
            @if hidden > 0 { p.quiet { (hidden) " more are in the JSON report." } }
        }
        @if !explanation.notes.is_empty() { ul { @for note in &explanation.notes { li { (plain(note)) } } } }
    }
}

/// A score as a bar and a percentage that is not rounded up to all.
fn score(score: f64) -> Markup {
    let share = if score.is_finite() { score.clamp(0.0, 1.0) } else { 0.0 };
    html! {
        svg width="60" height="10" aria-hidden="true" {
            rect.x width="60" height="10" {} rect.f width=((60.0 * share).round()) height="10" {}
        }
        " " (format!("{:.1} %", (1000.0 * share).floor() / 10.0))
    }
}

fn reproduced(reproduced: &Reproduced) -> String {
    format!("{} of {}", grouped(reproduced.exact), grouped(reproduced.elements))
}
