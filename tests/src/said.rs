//! What a report says, in the shapes that tests compare.

use goldens::report::{CaseReport, Check, TensorReport, Verdict};

/// The report on one tensor.
#[must_use]
pub fn tensor<'a>(report: &'a CaseReport, name: &str) -> &'a TensorReport {
    report.tensors.iter().find(|tensor| tensor.name == name).unwrap_or_else(|| panic!("no report on {name}"))
}

/// The report on one check.
#[must_use]
pub fn check<'a>(report: &'a CaseReport, name: &str) -> &'a Check {
    report.checks.iter().find(|check| check.name == name).unwrap_or_else(|| panic!("no check {name}"))
}

/// Names of the tensors that fail, in contract order.
#[must_use]
pub fn failing(report: &CaseReport) -> Vec<&str> {
    report.tensors.iter().filter(|t| t.verdict == Verdict::Fail).map(|t| t.name.as_str()).collect()
}

/// Everything that a report says in words.
#[must_use]
pub fn words(report: &CaseReport) -> String {
    let mut words = Vec::new();
    for tensor in report.tensors.iter().filter(|tensor| tensor.verdict == Verdict::Fail) {
        words.extend(tensor.notes.iter().map(|note| format!("{}: {note}", tensor.name)));
    }
    for check in report.checks.iter().filter(|check| check.verdict == Verdict::Fail) {
        words.push(format!("{}: {}", check.name, check.detail));
    }
    words.extend(report.policy.violations.iter().map(|violation| format!("policy: {violation}")));
    words.join("\n")
}

/// A report in a few lines, for the message of a failed assertion.
#[must_use]
pub fn summary(report: &CaseReport) -> String {
    let mut text = format!("{}: {:?}, first {:?}\n", report.name, report.verdict, report.first_divergence);
    for t in report.tensors.iter().filter(|t| t.verdict == Verdict::Fail) {
        text += &format!(
            "  {} forced {}: {} elements, {} exact, {} flips, {} ties, {} drift, rows {:?}, worst {:?}\n",
            t.name,
            t.forced,
            t.elements,
            t.exact,
            t.explained_flips,
            t.explained_ties,
            t.unexplained,
            t.rows_failing,
            t.worst.as_ref().map(|e| (&e.index, e.device.0, e.reference.0))
        );
    }
    text + &words(report)
}

/// Asserts that a case passes, with nothing unexplained.
///
/// # Panics
/// When it does not.
pub fn passes(report: &CaseReport, what: &str) {
    let drift: u64 = report.tensors.iter().map(|tensor| tensor.unexplained).sum();
    assert!(report.verdict == Verdict::Pass && drift == 0, "{what}\n{}", summary(report));
}
