//! The GitHub step summary: Markdown with one line a case, and what failed folded below it.

use std::fmt::Write as _;

use goldens::report::{CaseReport, GateReport, Verdict};

use super::summary;
use super::text::{grouped, plain};
use crate::exit_codes::ending;

/// Steps of a token run that are shown.
const MOST_STEPS: usize = 50;

/// The summary.
pub fn render(report: &GateReport) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, report);
    out
}

fn write(out: &mut String, report: &GateReport) -> std::fmt::Result {
    let (code, meaning) = ending(report);
    writeln!(out, "## Assay: {}\n", word(report.verdict))?;
    writeln!(out, "{} (exit code {}: {}).\n", summary::tally(&report.cases), code.number(), meaning)?;
    if let Some(scope) = summary::scope(report) {
        writeln!(out, "{scope}.\n")?;
    }
    if !report.cases.is_empty() {
        writeln!(out, "| case | verdict | compared | seconds |\n|---|---|---|---:|")?;
        for case in &report.cases {
            let (name, compared) = (escape(&case.name), escape(&summary::compared(case)));
            writeln!(out, "| {name} | {} | {compared} | {:.2} |", word(case.verdict), case.seconds)?;
        }
        writeln!(out)?;
    }
    report.cases.iter().try_for_each(|case| section(out, case))
}

fn section(out: &mut String, case: &CaseReport) -> std::fmt::Result {
    if let Some(headline) = summary::headline(case) {
        writeln!(out, "### {} {}\n\n**{}**\n", word(case.verdict), escape(&case.name), escape(&headline))?;
        if let Some(cause) = &case.cause {
            writeln!(out, "Cause: {}\n", escape(&cause.to_string()))?;
        } else if case.explanation.is_some() && case.verdict == Verdict::Fail {
            writeln!(out, "Cause: none of the known deviations\n")?;
        }
        if !case.consequences.is_empty() {
            writeln!(out, "Downstream, with no fault of their own: {}\n", escape(&case.consequences.join(", ")))?;
        }
        for check in case.checks.iter().filter(|check| check.verdict != Verdict::Pass) {
            let (name, detail) = (escape(&check.name), escape(&check.detail));
            writeln!(out, "- check {name}: {}: {detail}", word(check.verdict))?;
        }
        for tensor in case.tensors.iter().filter(|tensor| tensor.verdict != Verdict::Pass) {
            for note in &tensor.notes {
                writeln!(out, "- {}: {}", escape(&tensor.name), escape(note))?;
            }
        }
        for violation in summary::violations(case) {
            writeln!(out, "- rounding rule: {}", escape(violation))?;
        }
        writeln!(out)?;
    }
    if let Some(tokens) = summary::tokens(case) {
        writeln!(out, "{}: {}\n", escape(&case.name), escape(&tokens))?;
        let notable = summary::notable_steps(case);
        if !notable.is_empty() {
            writeln!(out, "| {} |\n|---:|---:|---:|---:|---:|---:|---|---|", summary::STEP_HEADINGS.join(" | "))?;
        }
        for step in notable.iter().take(MOST_STEPS) {
            writeln!(out, "| {} |", summary::step_cells(step).map(|cell| escape(&cell)).join(" | "))?;
        }
        writeln!(out)?;
        if notable.len() > MOST_STEPS {
            writeln!(out, "{} more steps\n", notable.len() - MOST_STEPS)?;
        }
    }
    writeln!(out, "<details><summary>{}: tensors, rounding rules, remarks</summary>\n", escape(&case.name))?;
    if !case.tensors.is_empty() {
        writeln!(out, "| tensor | verdict | forced | elements | exact | explained | drift | non-finite |")?;
        writeln!(out, "|---|---|---|---:|---:|---:|---:|---:|")?;
        for tensor in &case.tensors {
            let counts = [tensor.elements, tensor.exact, tensor.explained, tensor.unexplained, tensor.nonfinite];
            let counts = counts.map(grouped).join(" | ");
            let forced = if tensor.forced { "yes" } else { "no" };
            writeln!(out, "| {} | {} | {forced} | {counts} |", escape(&tensor.name), word(tensor.verdict))?;
        }
        writeln!(out)?;
    }
    for tensor in case.tensors.iter().filter(|tensor| !tensor.worst_elements.is_empty()) {
        writeln!(out, "Worst of {}:", escape(&tensor.name))?;
        for element in &tensor.worst_elements {
            writeln!(out, "- {}", escape(&summary::element(element)))?;
        }
        writeln!(out)?;
    }
    for rule in summary::policy(&case.policy) {
        writeln!(out, "- policy {}: {}", escape(&case.policy.asked), escape(&rule))?;
    }
    for (what, remarks) in [("warning", &case.warnings), ("not shown by this data", &case.coverage)] {
        for remark in remarks {
            writeln!(out, "- {what}: {}", escape(remark))?;
        }
    }
    writeln!(out, "- {}\n\n</details>\n", escape(&summary::provenance(case)))
}

/// Text that means itself in a Markdown table: no cell ends, no tags, no emphasis, no links.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in plain(text).chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '|' | '*' | '`' | '[' | ']' | '\\' | '~' | '#' | '!' => out.extend(['\\', character]),
            other => out.push(other),
        }
    }
    out
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "✅ pass",
        Verdict::Fail => "❌ fail",
        Verdict::Error => "❌ error",
        Verdict::Unjudged => "❔ unjudged",
    }
}
