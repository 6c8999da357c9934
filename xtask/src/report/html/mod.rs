//! A report to look at: one HTML page that needs nothing else, no network, no script, no second file. It is readable on
//! a phone, in the dark, on paper and without colours, and every string of a file is escaped by the template. Sizes are
//! bounded by the maps' bins and by how much of a list is shown, so that a page of full-size layers stays small.

mod case;
mod cause;
mod distances;
mod marks;
mod plot;
mod run;
mod stages;
mod tensors;
mod tokens;

#[cfg(test)]
mod tests;

use cases::Case;
use goldens::report::{CaseReport, GateReport, TensorReport, Verdict};
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::summary;
use super::text::{grouped, plain};
use crate::exit_codes::Code;

/// Nothing is loaded from anywhere, whatever a name in the report looks like.
const SECURITY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// What a page shows.
pub struct Page<'a> {
    /// The report.
    pub report: &'a GateReport,
    /// The cases of the report's entries, in the same order; fewer where the request was refused.
    pub cases: &'a [Case],
    /// How it was made.
    pub run: &'a Facts,
}

/// How a report was made.
pub struct Facts {
    /// Version of this program.
    pub version: String,
    /// Level of the kernels that computed the reference.
    pub kernels: String,
    /// False-alarm probability of a run.
    pub false_alarm: f64,
    /// The command and its arguments.
    pub command: Vec<String>,
}

/// The whole page.
pub fn render(page: &Page<'_>) -> String {
    let report = page.report;
    let title = format!("{}: {}", word(report.verdict), summary::tally(&report.cases));
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(SECURITY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { "Assay: " (title) }
                style { (PreEscaped(include_str!("style.css"))) }
            }
            body {
                header {
                    h1 { "Assay gate report" }
                    p.lead { (marks::pill(report.verdict)) " " (summary::tally(&report.cases)) "." }
                    p.quiet {
                        @let code = Code::from(report.verdict);
                        "Exit code " (code.number()) ": " (code.meaning()) "."
                    }
                }
                main {
                    @if let Some(message) = &report.message {
                        section { h2 { "Refused" } p.said { (plain(message)) } }
                    }
                    @if !report.cases.is_empty() {
                        (overview(&report.cases))
                        (marks::legend())
                    }
                    @for (index, case) in report.cases.iter().enumerate() {
                        (case::article(index, case, page.cases.get(index)))
                    }
                }
                footer { h2 { "How this was made" } (run::facts(page.run)) }
            }
        }
    };
    let mut text = markup.into_string();
    text.push('\n');
    text
}

/// One line a case.
fn overview(cases: &[CaseReport]) -> Markup {
    let sum = |case: &CaseReport, field: fn(&TensorReport) -> u64| {
        grouped(case.tensors.iter().map(field).fold(0, u64::saturating_add))
    };
    scrolling(
        "Cases",
        html! {
            table {
                caption { "Cases" }
                thead { tr {
                    th scope="col" { "case" } th scope="col" { "verdict" }
                    th.number scope="col" { "elements" } th.number scope="col" { "explained" }
                    th.number scope="col" { "drift" } th scope="col" { "first divergence" }
                    th scope="col" { "outputs" }
                } }
                tbody {
                    @for (index, case) in cases.iter().enumerate() {
                        tr {
                            th scope="row" { a href=(format!("#case-{index}")) { (plain(&case.name)) } }
                            td { (marks::pill(case.verdict)) }
                            td.number { (sum(case, |tensor| tensor.elements)) }
                            td.number { (sum(case, |tensor| tensor.explained)) }
                            td.number { (sum(case, |tensor| tensor.unexplained)) }
                            td { (case.first_divergence.as_deref().map_or("–".into(), plain)) }
                            td { (plain(&case.source)) }
                        }
                    }
                }
            }
        },
    )
}

/// A box in which what is wider than the screen scrolls by itself.
fn scrolling(label: &str, content: Markup) -> Markup {
    html! { div.scroll role="region" tabindex="0" aria-label=(plain(label)) { (content) } }
}

/// A list of remarks under a heading; nothing where there are none.
fn remarks(heading: &str, remarks: &[String]) -> Markup {
    html! {
        @if !remarks.is_empty() {
            h3 { (heading) }
            ul { @for remark in remarks { li { (plain(remark)) } } }
        }
    }
}

/// A verdict's word.
fn word(verdict: Verdict) -> &'static str {
    super::human::word(verdict)
}
