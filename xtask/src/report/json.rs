//! The JSON of `docs/bundles.md`: the report, serialized.

use goldens::report::{GateReport, Verdict};

/// One object and a newline.
pub fn render(report: &GateReport) -> String {
    // Plain data with string keys: there is nothing in it that serialization could refuse.
    let mut text = serde_json::to_string_pretty(report)
        .unwrap_or_else(|error| format!("{{\"message\": {:?}}}", error.to_string()));
    text.push('\n');
    text
}

/// The object for a refused request: `{"verdict": "error", "message": ..., "cases": []}`.
pub fn refused(message: &str) -> String {
    render(&GateReport { verdict: Verdict::Error, message: Some(message.into()), cases: Vec::new() })
}
