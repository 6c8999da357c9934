//! The JSON of `docs/bundles.md`: the report, serialized.

use goldens::report::GateReport;
use serde::Serialize;

/// One object and a newline.
pub fn render(report: &GateReport) -> String {
    text(report)
}

/// A value as reports are written.
pub fn text(value: &impl Serialize) -> String {
    // Plain data with string keys: there is nothing in it that serialization could refuse.
    let mut text =
        serde_json::to_string_pretty(value).unwrap_or_else(|error| format!("{{\"message\": {:?}}}", error.to_string()));
    text.push('\n');
    text
}

/// The object for a refused request: `{"verdict": "error", "message": ..., "cases": []}`.
pub fn refused(message: &str) -> String {
    render(&GateReport::refused(message))
}
