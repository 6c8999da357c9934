//! The report for a person at a terminal, to be read in ten seconds: what failed first, where, and why;
//! a passing case takes a line or two. Text carries colour; whoever prints it strips it for a pipe.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};
use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, Color, LineStyle, Table, TableStyle};
use goldens::report::{CaseReport, GateReport, StepVerdict, TensorReport, Verdict};

use super::summary;
use super::text::{grouped, plain, plural};
use crate::exit_codes::ending;

/// Stands out.
pub const BOLD: Style = Style::new().bold();
/// Stands back.
pub const DIM: Style = Style::new().dimmed();
/// A rule under the header and nothing else.
pub const TABLE: TableStyle = NOTHING.header_separator(LineStyle::new(' ', '─', '─', ' '));
/// Remarks shown of a case before the rest is only counted.
const FEW: usize = 3;

/// The whole report.
pub fn render(report: &GateReport, verbose: bool) -> String {
    let mut out = String::new();
    // Where the outputs came from is said once when it is the same for all.
    let mut sources: Vec<_> = report.cases.iter().map(summary::provenance).collect();
    sources.dedup();
    for case in &report.cases {
        // Writing to a string cannot fail.
        let _ = if case.verdict == Verdict::Pass && !verbose {
            passing(&mut out, case)
        } else {
            whole(&mut out, case, verbose)
        };
        if sources.len() > 1 {
            let _ = writeln!(out, "  {DIM}{}{DIM:#}", plain(&summary::provenance(case)));
        }
        out.push('\n');
    }
    if let [source] = sources.as_slice() {
        let _ = writeln!(out, "{DIM}{}{DIM:#}", plain(source));
    }
    if let Some(scope) = summary::scope(report) {
        let _ = writeln!(out, "{scope}");
    }
    let (code, meaning) = ending(report);
    let style = style(report.verdict);
    let _ = writeln!(
        out,
        "{}. {style}{}{style:#} (exit code {}: {})",
        summary::tally(&report.cases),
        word(report.verdict),
        code.number(),
        meaning,
    );
    out
}

fn title(out: &mut String, case: &CaseReport) -> std::fmt::Result {
    let style = style(case.verdict);
    let (word, name, path) = (word(case.verdict), plain(&case.name), plain(&case.path));
    writeln!(out, "{style}{word}{style:#} {BOLD}{name}{BOLD:#}  {DIM}{path}  {:.2} s{DIM:#}", case.seconds)
}

fn passing(out: &mut String, case: &CaseReport) -> std::fmt::Result {
    title(out, case)?;
    let checks = case.checks.iter().filter(|check| check.verdict == Verdict::Pass).count();
    writeln!(out, "  {}; {checks} of {} checks pass", summary::compared(case), case.checks.len())?;
    steps(out, case, false)?;
    rules(out, case)?;
    for check in case.checks.iter().filter(|check| check.verdict != Verdict::Pass) {
        writeln!(out, "  {} {}: {}", word(check.verdict), plain(&check.name), plain(&check.detail))?;
    }
    remarks(out, "warning", &case.warnings, usize::MAX)?;
    remarks(out, "not shown by this data", &case.coverage, 1)
}

fn whole(out: &mut String, case: &CaseReport, verbose: bool) -> std::fmt::Result {
    title(out, case)?;
    let headline = summary::headline(case).unwrap_or_default();
    if !headline.is_empty() {
        writeln!(out, "  {BOLD}{}{BOLD:#}", plain(&headline))?;
    }
    if let Some(cause) = &case.cause {
        writeln!(out, "  cause: {}", plain(&cause.to_string()))?;
    } else if let Some(explanation) = case.explanation.as_ref().filter(|_| case.verdict == Verdict::Fail) {
        writeln!(out, "  cause: none of the known deviations")?;
        for note in &explanation.notes {
            writeln!(out, "    {}", plain(note))?;
        }
    }
    if !case.consequences.is_empty() {
        let most = if verbose { usize::MAX } else { 2 * FEW };
        let shown = case.consequences.iter().take(most).map(|name| plain(name)).collect::<Vec<_>>().join(", ");
        let more = case.consequences.len().saturating_sub(most);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        writeln!(out, "  downstream, with no fault of their own: {shown}{more}")?;
    }
    table(out, case, verbose)?;
    for tensor in &case.tensors {
        // What follows from an earlier tensor is not worth a second look.
        if verbose || is_remarkable(tensor) && !case.consequences.contains(&tensor.name) {
            details(out, tensor)?;
        }
    }
    for check in &case.checks {
        let said = headline == summary::check(check) || headline.contains(&*check.detail);
        if (check.verdict != Verdict::Pass || verbose) && !said {
            let style = style(check.verdict);
            let (name, detail) = (plain(&check.name), plain(&check.detail));
            writeln!(out, "  check {name}: {style}{}{style:#}: {detail}", word(check.verdict))?;
        }
    }
    steps(out, case, verbose)?;
    rules(out, case)?;
    let most = if verbose { usize::MAX } else { FEW };
    remarks(out, "warning", &case.warnings, usize::MAX)?;
    // What the headline has said is not said again.
    let unsaid: Vec<_> = case.coverage.iter().filter(|reason| !headline.contains(reason.as_str())).cloned().collect();
    remarks(out, "not shown by this data", &unsaid, most)
}

/// The tensors worth a look; the others are counted.
fn table(out: &mut String, case: &CaseReport, verbose: bool) -> std::fmt::Result {
    let (shown, hidden): (Vec<_>, Vec<_>) = case.tensors.iter().partition(|tensor| verbose || is_remarkable(tensor));
    let only_passing = shown.is_empty();
    if !shown.is_empty() {
        let mut table = Table::new();
        table.load_style(TABLE).enforce_styling();
        table.set_header(["tensor", "verdict", "forced", "elements", "exact", "explained", "drift", "non-finite"]);
        for column in table.column_iter_mut().skip(3) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        for tensor in shown {
            let cell = Cell::new(word(tensor.verdict));
            let cell = match tensor.verdict {
                Verdict::Pass => cell.fg(Color::Green),
                Verdict::Fail | Verdict::Error => cell.fg(Color::Red),
                Verdict::Unjudged => cell.fg(Color::Yellow),
            };
            let counts = [tensor.elements, tensor.exact, tensor.explained, tensor.unexplained, tensor.nonfinite];
            let mut row =
                vec![Cell::new(plain(&tensor.name)), cell, Cell::new(if tensor.forced { "yes" } else { "no" })];
            row.extend(counts.map(|count| Cell::new(grouped(count))));
            table.add_row(row);
        }
        for line in table.lines() {
            writeln!(out, "  {}", line.trim_end())?;
        }
    }
    match hidden.len() {
        0 => Ok(()),
        count if only_passing => writeln!(out, "  {} compared, none with a finding", plural(count as u64, "tensor")),
        1 => writeln!(out, "  1 other tensor passes"),
        count => writeln!(out, "  {count} other tensors pass"),
    }
}

fn is_remarkable(tensor: &TensorReport) -> bool {
    tensor.verdict != Verdict::Pass || tensor.unexplained > 0 || tensor.nonfinite > 0
}

/// What a tensor's row in the table cannot say.
fn details(out: &mut String, tensor: &TensorReport) -> std::fmt::Result {
    let elements: Vec<_> = if tensor.worst_elements.is_empty() {
        tensor.worst.iter().collect()
    } else {
        tensor.worst_elements.iter().collect()
    };
    let places = summary::places(tensor);
    if elements.is_empty() && places.is_none() && tensor.notes.is_empty() && tensor.exactly_half == 0 {
        return Ok(());
    }
    let places = places.map(|places| format!(" {places}")).unwrap_or_default();
    writeln!(out, "  {BOLD}{}{BOLD:#}{places}", plain(&tensor.name))?;
    for note in &tensor.notes {
        writeln!(out, "    {}", plain(note))?;
    }
    // A few halves among thousands are chance; most of the drift is a lead.
    if tensor.exactly_half > 0 && 2 * tensor.exactly_half >= tensor.unexplained {
        let are = if tensor.exactly_half == 1 { "1 is" } else { &format!("{} are", grouped(tensor.exactly_half)) };
        writeln!(out, "    {are} exactly half of the contract's value")?;
    }
    if tensor.explained_ties > 0 {
        let ties = plural(tensor.explained_ties, "exact tie");
        writeln!(out, "    {ties} went by another rule than asked for")?;
    }
    for element in elements {
        writeln!(out, "    {}", summary::element(element))?;
    }
    Ok(())
}

/// The tokens of a run: how many of them are what, and those worth a look.
fn steps(out: &mut String, case: &CaseReport, verbose: bool) -> std::fmt::Result {
    let Some(tokens) = summary::tokens(case) else { return Ok(()) };
    writeln!(out, "  {tokens}")?;
    let notable = summary::notable_steps(case);
    let shown = if verbose { case.steps.iter().collect() } else { notable };
    if shown.is_empty() {
        return Ok(());
    }
    let most = if verbose { usize::MAX } else { 4 * FEW };
    let mut table = Table::new();
    table.load_style(TABLE).enforce_styling();
    table.set_header(summary::STEP_HEADINGS);
    for column in table.column_iter_mut().take(6) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for step in shown.iter().take(most) {
        let mut cells: Vec<Cell> = summary::step_cells(step).iter().map(|cell| Cell::new(plain(cell))).collect();
        let colour = match step.verdict {
            StepVerdict::Agree => Color::Green,
            StepVerdict::NearTie => Color::Yellow,
            StepVerdict::Fail => Color::Red,
        };
        if let Some(cell) = cells.get_mut(6) {
            *cell = cell.clone().fg(colour);
        }
        table.add_row(cells);
    }
    for line in table.lines() {
        writeln!(out, "  {}", line.trim_end())?;
    }
    let hidden = shown.len().saturating_sub(most);
    if hidden > 0 {
        writeln!(out, "  {} (--verbose shows them)", plural(hidden as u64, "more step"))?;
    }
    Ok(())
}

fn rules(out: &mut String, case: &CaseReport) -> std::fmt::Result {
    let rules = summary::policy(&case.policy);
    if !rules.is_empty() {
        writeln!(out, "  policy {}; rules seen: {}", plain(&case.policy.asked), plain(&rules.join("; ")))?;
    }
    for violation in summary::violations(case) {
        writeln!(out, "  rounding rule: {}", plain(violation))?;
    }
    Ok(())
}

/// The first few of a list of remarks, and how many more there are.
fn remarks(out: &mut String, what: &str, remarks: &[String], most: usize) -> std::fmt::Result {
    let more = remarks.len().saturating_sub(most);
    for (index, remark) in remarks.iter().take(most).enumerate() {
        write!(out, "  {what}: {}", plain(remark))?;
        if more > 0 && index + 1 == most {
            write!(out, " ({more} more with --verbose)")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

pub(super) fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Pass => "PASS",
        Verdict::Fail => "FAIL",
        Verdict::Error => "ERROR",
        Verdict::Unjudged => "UNJUDGED",
    }
}

pub(super) fn style(verdict: Verdict) -> Style {
    let colour = match verdict {
        Verdict::Pass => AnsiColor::Green,
        Verdict::Fail | Verdict::Error => AnsiColor::Red,
        Verdict::Unjudged => AnsiColor::Yellow,
    };
    colour.on_default().bold()
}
