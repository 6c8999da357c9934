//! One case: what it is, where it goes wrong first, and then everything that the report says of it.

use cases::Case;
use goldens::report::{CaseReport, Check, Verdict};
use maud::{Markup, html};

use super::super::summary;
use super::super::text::plain;
use super::{cause, marks, remarks, run, scrolling, stages, tensors, tokens};

/// The whole of it. `described` is the case that was run, where it is known.
pub fn article(index: usize, case: &CaseReport, described: Option<&Case>) -> Markup {
    html! {
        article id=(format!("case-{index}")) {
            h2 { (marks::pill(case.verdict)) " " (plain(&case.name)) }
            p.quiet { (plain(&case.path)) ", " (format!("{:.2} s", case.seconds)) }
            @if let Some(headline) = summary::headline(case) { p.said { (plain(&headline)) } }
            p { (summary::compared(case)) "." }
            @if !case.consequences.is_empty() { (consequences(case)) }
            @if let Some(described) = described { (run::case(described)) }
            (stages::strip(index, case))
            (tokens::section(case))
            (cause::section(case))
            (tensors::section(index, case))
            (checks(&case.checks))
            (rules(case))
            (remarks("Warnings", &case.warnings))
            (remarks("Not shown by this data", &case.coverage))
            h3 { "Where it comes from" }
            p { (plain(&summary::provenance(case))) "." }
            @if let Some(described) = described { (run::provenance(described)) }
        }
    }
}

fn consequences(case: &CaseReport) -> Markup {
    html! {
        p {
            "Downstream, with no fault of their own: "
            @for (index, name) in case.consequences.iter().enumerate() {
                @if index > 0 { ", " } code { (plain(name)) }
            }
            "."
        }
    }
}

fn checks(checks: &[Check]) -> Markup {
    // What failed stands first.
    let mut checks: Vec<&Check> = checks.iter().collect();
    checks.sort_by_key(|check| match check.verdict {
        Verdict::Fail | Verdict::Error => 0,
        Verdict::Unjudged => 1,
        Verdict::Pass => 2,
    });
    html! {
        @if !checks.is_empty() {
            h3 { "Checks" }
            (scrolling("Checks", html! {
                table {
                    caption { "What holds whatever the numbers are" }
                    thead { tr { th scope="col" { "check" } th scope="col" { "verdict" } th scope="col" { "found" } } }
                    tbody {
                        @for check in checks {
                            tr {
                                th scope="row" { (plain(&check.name)) }
                                td { (marks::pill(check.verdict)) }
                                td.text { (plain(&check.detail)) }
                            }
                        }
                    }
                }
            }))
        }
    }
}

fn rules(case: &CaseReport) -> Markup {
    html! {
        h3 { "Rounding rules" }
        p { "Held to " code { (plain(&case.policy.asked)) } "." }
        ul {
            @for violation in &case.policy.violations {
                li {
                    span.pill.fail { span aria-hidden="true" { (marks::sign(Verdict::Fail)) } " broken" }
                    " " (plain(violation))
                }
            }
            @for rule in summary::policy(&case.policy) { li { (plain(&rule)) } }
        }
    }
}
