//! Where a token run's drift is made, for a person: the layer and step, how far it is, and what to do next.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};
use goldens::layerwise::{Drift, Later, LayerReport, Outcome};
use goldens::report::TensorReport;

use super::human::{BOLD, DIM};
use super::text::{grouped, labelled, plain, plural};
use crate::exit_codes::Code;

/// Later drift that is shown before the rest is counted.
const FEW: usize = 4;

/// The report.
pub fn render(report: &LayerReport, path: &str, code: Code) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, report, path, code);
    out
}

fn write(out: &mut String, report: &LayerReport, path: &str, code: Code) -> std::fmt::Result {
    let (word, colour) = match report.outcome {
        Outcome::Located => ("LOCATED", AnsiColor::Red),
        Outcome::NoDrift => ("NO DRIFT", AnsiColor::Green),
        Outcome::EndIsRight => ("END IS RIGHT", AnsiColor::Yellow),
        Outcome::Lost => ("LOST", AnsiColor::Yellow),
        Outcome::Unjudged => ("UNJUDGED", AnsiColor::Yellow),
    };
    let style = Style::new().bold().fg_color(Some(colour.into()));
    writeln!(out, "{style}{word}{style:#} {BOLD}{}{BOLD:#}  {DIM}{}{DIM:#}", plain(&report.name), plain(path))?;
    if let Some(found) = &report.drift {
        drift(out, found)?;
    }
    later(out, &report.later)?;
    writeln!(
        out,
        "  judged: {}, {} of keys and values",
        plural(report.states as u64, "state"),
        plural(report.cache_rows as u64, "row")
    )?;
    if let Some(expected) = report.fetches_expected {
        let names: Vec<_> = report.fetched.iter().map(|name| plain(name)).collect();
        let said = plural(names.len() as u64, "state");
        let names = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
        writeln!(out, "  fetched: {said}, at most {expected} where the fault is not lost{names}")?;
    }
    for remark in &report.remarks {
        writeln!(out, "  remark: {}", plain(remark))?;
    }
    writeln!(out, "{DIM}outputs: {}{DIM:#}", plain(&report.source))?;
    let meaning = match report.outcome {
        Outcome::Located => "the layer was found",
        Outcome::NoDrift => "nothing that was captured drifts",
        Outcome::EndIsRight => "the end that was to be bad is right",
        Outcome::Lost | Outcome::Unjudged => code.meaning(),
    };
    writeln!(out, "{style}{word}{style:#} (exit code {}: {meaning})", code.number())
}

fn drift(out: &mut String, found: &Drift) -> std::fmt::Result {
    let layers = if found.first_layer == found.last_layer {
        format!("layer {}", found.last_layer)
    } else {
        format!("layers {} to {}", found.first_layer, found.last_layer)
    };
    let step = match found.step {
        device::Moment::Prefill => "the prefill".to_owned(),
        device::Moment::Step(step) => format!("decode step {step}"),
    };
    let how = if found.forced { "from the device's own state before it" } else { "behind states that are not known" };
    writeln!(out, "  {BOLD}Drift is made by {layers} in {step}{BOLD:#}, judged {how}: {}", plain(&found.places))?;
    for tensor in &found.tensors {
        self::tensor(out, tensor, &found.rows)?;
    }
    writeln!(out, "  next: {}", plain(&found.next))
}

fn tensor(out: &mut String, tensor: &TensorReport, rows: &[usize]) -> std::fmt::Result {
    let rows = labelled("row", rows).unwrap_or_default();
    write!(
        out,
        "  {}: {} of {} elements drift, {rows}",
        plain(&tensor.name),
        grouped(tensor.unexplained),
        grouped(tensor.elements)
    )?;
    if let Some(worst) = &tensor.worst {
        let (device, reference) = (&worst.device, &worst.reference);
        write!(out, "; worst {:?}: device {device} ({}), ", worst.index, worst.device_bits)?;
        write!(out, "contract {reference} ({})", worst.reference_bits)?;
        if let Some(ulps) = worst.ulps {
            write!(out, ", {ulps} ULPs apart")?;
        }
    }
    writeln!(out)?;
    tensor.notes.iter().try_for_each(|note| writeln!(out, "    {}", plain(note)))
}

fn later(out: &mut String, later: &[Later]) -> std::fmt::Result {
    for (own, what) in [(true, "later drift of its own"), (false, "later drift, which may follow from it")] {
        let all: Vec<&Later> = later.iter().filter(|later| later.own == own).collect();
        if all.is_empty() {
            continue;
        }
        let name = |later: &&Later| format!("step {}, layer {} ({})", later.step, later.layer, later.tensor);
        let names: Vec<String> = all.iter().take(FEW).map(name).collect();
        let more = all.len().saturating_sub(FEW);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        writeln!(out, "  {what}: {}{more}", plain(&names.join("; ")))?;
    }
    Ok(())
}
