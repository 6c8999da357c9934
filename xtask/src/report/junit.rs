//! The JUnit report: a test suite a case, a test case a check and a tensor; of goldens, a suite each and a test case a
//! row.

use std::io;
use std::time::Duration;

use goldens::report::{
    CaseReport, GateReport, MergedReport, ShardReport, StepVerdict, TensorReport, TokenStep, Verdict,
};
use goldens::tokens::report::{Finding, TokensReport, TokensRun};
use quick_junit::{NonSuccessKind, Report, TestCase, TestCaseStatus, TestSuite};

use super::summary;
use super::text::plain;

/// The report as XML.
///
/// # Errors
/// The XML writer refuses.
pub fn render(report: &GateReport) -> io::Result<String> {
    let mut out = Report::new("assay");
    out.set_time(duration(report.cases.iter().map(|case| case.seconds).sum()));
    if let Some(message) = &report.message {
        let mut suite = TestSuite::new("request");
        suite.add_test_case(TestCase::new("request", status(report.verdict, &plain(message), "")));
        out.add_test_suite(suite);
    }
    out.add_test_suites(report.cases.iter().map(suite));
    if let Some(shard) = report.shard.filter(|_| report.cases.is_empty() && report.message.is_none()) {
        out.add_test_suite(nothing_from(shard.index, shard.count, "no case falls to this shard"));
    }
    shards(&mut out, report.shard, report.merged.as_ref());
    out.to_string().map_err(io::Error::other)
}

/// The report on checks of goldens, as XML.
///
/// # Errors
/// The XML writer refuses.
pub fn of_tokens(report: &TokensRun) -> io::Result<String> {
    let mut out = Report::new("assay");
    out.add_test_suites(report.goldens.iter().map(golden));
    if let Some(shard) = report.shard.filter(|_| report.goldens.is_empty()) {
        out.add_test_suite(nothing_from(shard.index, shard.count, "no golden falls to this shard"));
    }
    shards(&mut out, report.shard, report.merged.as_ref());
    for suite in &mut out.test_suites {
        suite.add_property((KIND, TOKENS));
    }
    if let (Some(suite), false) = (out.test_suites.first_mut(), report.remarks.is_empty()) {
        let remarks = report.remarks.iter().map(|remark| format!("remark: {}", plain(remark)));
        let own = suite.system_out.iter().map(|text| text.as_str().to_owned());
        let text = own.chain(remarks).collect::<Vec<_>>().join("\n");
        suite.set_system_out(text);
    }
    out.to_string().map_err(io::Error::other)
}

/// Says of each suite which shard it comes from, and names shards that are missing.
fn shards(out: &mut Report, shard: Option<ShardReport>, merged: Option<&MergedReport>) {
    if let Some(shard) = shard {
        mark(out, shard);
    }
    if let Some(merged) = merged {
        out.add_test_suites(merged.missing.iter().map(|&index| nothing_from(index, merged.count, MISSING)));
    }
}

/// What is said of a shard whose report is not there.
pub const MISSING: &str = "the report of this shard is missing";
/// The property of a suite that names its case's file. Only suites of cases have it.
pub const PATH: &str = "path";
/// The property of a suite that says which command made it, where that is not the gate, and what it says of the checks
/// of goldens.
pub const KIND: &str = "kind";
/// The value of [`KIND`] for goldens.
pub const TOKENS: &str = "tokens";
/// The properties of a suite that say which shard of which run it comes from.
pub const SHARD: [&str; 3] = ["shard.index", "shard.count", "shard.cases_total"];

/// A suite for a shard that has none of its own.
pub fn nothing_from(index: usize, count: usize, why: &str) -> TestSuite {
    let mut suite = TestSuite::new(format!("shard {index}/{count}"));
    suite.add_test_case(TestCase::new("shard", status(Verdict::Unjudged, why, "")));
    suite
}

fn mark(out: &mut Report, shard: ShardReport) {
    for suite in &mut out.test_suites {
        for (name, value) in SHARD.into_iter().zip([shard.index, shard.count, shard.cases_total]) {
            suite.add_property((name, value.to_string().as_str()));
        }
    }
}

fn suite(case: &CaseReport) -> TestSuite {
    let name = plain(&case.name);
    let mut suite = TestSuite::new(&*name);
    suite.set_time(duration(case.seconds));
    suite.add_property((PATH, &*plain(&case.path)));
    suite.add_property(("source", &*plain(&summary::provenance(case))));
    let mut add = |test: &str, status| {
        let mut test = TestCase::new(plain(test), status);
        test.set_classname(&*name);
        suite.add_test_case(test);
    };
    // Whatever made the case fail, a reader that only counts test cases sees it fail.
    add("verdict", status(case.verdict, &plain(&summary::headline(case).unwrap_or_default()), ""));
    for check in &case.checks {
        add(&format!("check {}", check.name), status(check.verdict, &plain(&check.detail), ""));
    }
    for tensor in &case.tensors {
        add(
            &format!("tensor {}", tensor.name),
            status(tensor.verdict, &plain(&summary::drift(tensor)), &description(tensor)),
        );
    }
    if let Some(tokens) = summary::tokens(case) {
        let failed = case.steps.iter().any(|step| step.verdict == StepVerdict::Fail);
        let verdict = if failed { Verdict::Fail } else { Verdict::Pass };
        let line = |step: &&TokenStep| {
            let cells = summary::STEP_HEADINGS.into_iter().zip(summary::step_cells(step));
            cells.map(|(heading, cell)| format!("{heading} {}", plain(&cell))).collect::<Vec<_>>().join(", ")
        };
        let steps = summary::notable_steps(case).iter().map(line).collect::<Vec<_>>().join("\n");
        add("tokens", status(verdict, &tokens, &steps));
    }
    let remarks = case.warnings.iter().map(|text| ("warning", text));
    let remarks = remarks.chain(case.coverage.iter().map(|text| ("not shown by this data", text)));
    let remarks: Vec<_> = remarks.map(|(what, text)| format!("{what}: {}", plain(text))).collect();
    if !remarks.is_empty() {
        suite.set_system_out(remarks.join("\n"));
    }
    suite
}

fn golden(report: &TokensReport) -> TestSuite {
    let name = plain(&report.golden);
    let mut suite = TestSuite::new(&*name);
    suite.add_property((PATH, &*plain(&report.source)));
    let mut add = |test: &str, status| {
        let mut test = TestCase::new(test, status);
        test.set_classname(&*name);
        suite.add_test_case(test);
    };
    let place = |finding: &Finding| format!("row {}, step {}: {}", finding.row, finding.step, plain(&finding.message));
    let headline = match report.verdict {
        Verdict::Fail => report.findings.iter().find(|finding| finding.fails()).map(place),
        _ => report.remarks.first().map(|remark| plain(remark).into_owned()),
    };
    add("verdict", status(report.verdict, &headline.unwrap_or_default(), ""));
    let mut rows: Vec<usize> = report.steps.iter().map(|step| step.row).collect();
    rows.dedup();
    for row in rows {
        let findings = || report.findings.iter().filter(|finding| finding.row == row);
        let first = findings().find(|finding| finding.fails()).or(findings().next()).map(place).unwrap_or_default();
        let all = findings().map(place).collect::<Vec<_>>().join("\n");
        add(&format!("row {row}"), status(report.found_of(row), &first, &all));
    }
    if !report.remarks.is_empty() {
        let remarks = report.remarks.iter().map(|remark| format!("remark: {}", plain(remark)));
        suite.set_system_out(remarks.collect::<Vec<_>>().join("\n"));
    }
    suite
}

fn description(tensor: &TensorReport) -> String {
    let notes = tensor.notes.iter().map(|note| plain(note).into_owned());
    notes.chain(tensor.worst_elements.iter().map(summary::element)).collect::<Vec<_>>().join("\n")
}

fn status(verdict: Verdict, message: &str, description: &str) -> TestCaseStatus {
    let mut status = match verdict {
        Verdict::Pass => return TestCaseStatus::success(),
        Verdict::Unjudged => TestCaseStatus::skipped(),
        Verdict::Fail => TestCaseStatus::non_success(NonSuccessKind::Failure),
        Verdict::Error => TestCaseStatus::non_success(NonSuccessKind::Error),
    };
    status.set_message(message);
    if !description.is_empty() {
        status.set_description(description);
    }
    status
}

/// Seconds as a duration; what cannot be one is none.
fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
