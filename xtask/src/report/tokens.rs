//! Reports on token sequences for a person: the verdict, what failed and where, what decides nothing; and what a pending
//! golden would change.

use std::fmt::Write as _;

use anstyle::Style;
use comfy_table::{CellAlignment, Table};
use goldens::tokens::report::{Finding, FindingKind, StepReport, StepVerdict, TokensReport, TokensRun};
use goldens::tokens::{Review, RowReview};

use super::human::{TABLE, style, word};
use super::summary::{scope_of, tally_of};
use super::text::{plain, plural};
use crate::exit_codes::{Code, ending_of};

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();
/// Findings of a row that are shown before the rest is counted.
const FEW: usize = 5;

/// The report on a check.
pub fn check(report: &TokensReport, verbose: bool) -> String {
    let mut out = String::new();
    let (style, word, code) = (style(report.verdict), word(report.verdict), Code::from(report.verdict));
    // Writing to a string cannot fail.
    let _ = write_check(&mut out, report, verbose);
    let _ = writeln!(out, "{style}{word}{style:#} (exit code {}: {})", code.number(), code.meaning());
    out
}

/// The report on checks of many goldens.
pub fn run(report: &TokensRun, verbose: bool) -> String {
    let mut out = String::new();
    for golden in &report.goldens {
        let _ = write_check(&mut out, golden, verbose);
        out.push('\n');
    }
    for remark in &report.remarks {
        let _ = writeln!(out, "remark: {}", plain(remark));
    }
    let (style, word) = (style(report.verdict), word(report.verdict));
    let verdicts: Vec<_> = report.goldens.iter().map(|golden| golden.verdict).collect();
    if let Some(scope) = scope_of(report.merged.as_ref(), report.shard, verdicts.len(), "golden") {
        let _ = writeln!(out, "{scope}");
    }
    let (code, meaning) = ending_of(report.shard, report.verdict, verdicts.is_empty(), "golden");
    let (tally, code) = (tally_of(&verdicts, "golden"), code.number());
    let _ = writeln!(out, "{tally}. {style}{word}{style:#} (exit code {code}: {meaning})");
    out
}

/// What was found of one golden, without an end.
fn write_check(out: &mut String, report: &TokensReport, verbose: bool) -> std::fmt::Result {
    let (style, word) = (style(report.verdict), word(report.verdict));
    let (golden, source) = (plain(&report.golden), plain(&report.source));
    writeln!(out, "{style}{word}{style:#} {BOLD}{golden}{BOLD:#}  {DIM}{source}{DIM:#}")?;
    let count = |verdict| report.steps.iter().filter(|step| step.verdict == verdict).count() as u64;
    let mut counts = Vec::new();
    for (verdict, what) in [
        (StepVerdict::Agree, "agree"),
        (StepVerdict::NearTie, "near_tie"),
        (StepVerdict::Fail, "fail"),
        (StepVerdict::Unjudged, "unjudged"),
    ] {
        if count(verdict) > 0 || verdict == StepVerdict::Agree {
            counts.push(format!("{} {what}", count(verdict)));
        }
    }
    let mut rows: Vec<usize> = report.steps.iter().map(|step| step.row).collect();
    rows.dedup();
    let steps = plural(report.steps.len() as u64, "step");
    writeln!(out, "  {}, {steps}: {}", plural(rows.len() as u64, "row"), counts.join(", "))?;
    let mut shown: Vec<(usize, usize)> = Vec::new();
    // What fails is not hidden behind what decides nothing.
    let mut findings: Vec<&Finding> = report.findings.iter().collect();
    findings.sort_by_key(|finding| (finding.row, finding.kind == FindingKind::NearTie));
    for finding in findings {
        match shown.last_mut() {
            Some((row, count)) if *row == finding.row => *count += 1,
            _ => shown.push((finding.row, 1)),
        }
        let many = shown.last().map_or(0, |(_, count)| *count);
        if many > FEW && !verbose {
            continue;
        }
        let before = match finding.already_before {
            Some(true) => " (already so before this change)",
            Some(false) => " (not so before)",
            None => "",
        };
        writeln!(out, "  row {}, step {}: {}{before}", finding.row, finding.step, plain(&finding.message))?;
    }
    for (row, count) in shown.iter().filter(|(_, count)| *count > FEW && !verbose) {
        writeln!(out, "  row {row}: {} more with --verbose", count - FEW)?;
    }
    if verbose {
        table(out, &report.steps)?;
    }
    for text in &report.texts {
        writeln!(out, "  text of row {}: {}", text.row, plain(&text.diff))?;
    }
    for remark in &report.remarks {
        writeln!(out, "  remark: {}", plain(remark))?;
    }
    if let Some(timing) = &report.timing {
        write!(out, "  median {:.4} s a token", timing.median_seconds)?;
        if let Some((before, ratio)) = timing.before_median_seconds.zip(timing.ratio) {
            write!(out, ", {before:.4} s before: {ratio:.2} times as long (only runs of one environment compare)")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

fn table(out: &mut String, steps: &[StepReport]) -> std::fmt::Result {
    let mut table = Table::new();
    table.load_style(TABLE).set_header(["row", "step", "device", "reference", "margin", "verdict", "forced"]);
    for column in table.column_iter_mut().take(5) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    for step in steps {
        let none = || "-".to_owned();
        table.add_row([
            step.row.to_string(),
            step.step.to_string(),
            step.device.map_or_else(none, |id| id.to_string()),
            step.reference.map_or_else(none, |id| id.to_string()),
            step.margin.map_or_else(none, |margin| margin.to_string()),
            match step.verdict {
                StepVerdict::Agree => "agree",
                StepVerdict::NearTie => "near_tie",
                StepVerdict::Fail => "FAIL",
                StepVerdict::Unjudged => "unjudged",
            }
            .to_owned(),
            if step.forced { "yes" } else { "no" }.to_owned(),
        ]);
    }
    for line in table.lines() {
        writeln!(out, "  {}", line.trim_end())?;
    }
    Ok(())
}

/// What a pending golden would change.
pub fn review(review: &Review) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_review(&mut out, review);
    out
}

fn write_review(out: &mut String, review: &Review) -> std::fmt::Result {
    let what = if review.new { "new" } else { "differs from the accepted one" };
    writeln!(out, "{BOLD}{}{BOLD:#}: {what}", plain(&review.name))?;
    for remark in &review.remarks {
        writeln!(out, "  remark: {}", plain(remark))?;
    }
    for line in &review.settings {
        writeln!(out, "  {}", plain(line))?;
    }
    for row in &review.rows {
        write_row(out, row, review.new)?;
    }
    if review.rows.is_empty() {
        writeln!(out, "  every row is the same")?;
    }
    Ok(())
}

fn write_row(out: &mut String, row: &RowReview, new: bool) -> std::fmt::Result {
    let (steps, ties) = (plural(row.steps as u64, "step"), plural(row.near_ties as u64, "near tie"));
    write!(out, "  row {}: {steps}, {ties}", row.row)?;
    match row.first_change {
        _ if new => writeln!(out)?,
        Some(step) => writeln!(out, "; ids differ from step {step} on")?,
        None => writeln!(out, "; same ids")?,
    }
    if new {
        let ids: Vec<&str> = row.ids.lines().filter_map(|line| line.strip_prefix('+')?.rsplit(' ').next()).collect();
        writeln!(out, "    ids: {}", ids.join(" "))?;
    } else {
        for line in row.ids.lines() {
            writeln!(out, "    {}", plain(line))?;
        }
    }
    if let Some(text) = &row.text {
        writeln!(out, "    text: {}", plain(text))?;
    }
    for kind in &row.kinds {
        writeln!(out, "    {}", plain(kind))?;
    }
    if row.margins_changed > 0 {
        let (count, most) = (plural(row.margins_changed as u64, "margin"), row.largest_margin_change);
        writeln!(out, "    {count} differ, by {most} logits at most")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use goldens::report::{Number, Verdict};
    use goldens::tokens::report::{TextChange, Timing};
    use snapbox::{assert_data_eq, file};

    use super::*;

    fn step(
        row: usize,
        step: usize,
        device: Option<i64>,
        reference: Option<usize>,
        verdict: StepVerdict,
    ) -> StepReport {
        StepReport {
            row,
            step,
            device,
            reference,
            margin: reference.map(|_| Number(0.25)),
            verdict,
            device_logit: None,
            reference_logit: None,
            bound: None,
            forced: step > 1,
        }
    }

    fn failing() -> TokensReport {
        let finding = |row, step, kind, message: &str| Finding {
            row,
            step,
            kind,
            message: message.into(),
            already_before: (row == 1).then_some(true),
        };
        TokensReport {
            verdict: Verdict::Fail,
            golden: "standing".into(),
            source: "dump\u{1b}[2J.json".into(),
            steps: vec![
                step(0, 0, Some(109_432), Some(109_432), StepVerdict::Agree),
                step(0, 1, Some(7), Some(9), StepVerdict::NearTie),
                step(0, 2, Some(-4), Some(9), StepVerdict::Fail),
                step(1, 0, None, Some(1), StepVerdict::Fail),
                step(1, 1, Some(3), None, StepVerdict::Unjudged),
            ],
            findings: vec![
                finding(0, 1, FindingKind::NearTie, "either id may be chosen"),
                finding(0, 2, FindingKind::OutsideVocabulary, "id -4 is no token"),
                finding(1, 0, FindingKind::TooShort, "the row ends after 0 tokens"),
            ],
            remarks: vec!["name the model".into()],
            texts: vec![TextChange {
                row: 0,
                reference: "故宫".into(),
                device: "建筑".into(),
                diff: "[-故宫-]{+建筑+}\n".into(),
            }],
            timing: Some(Timing { median_seconds: 0.5, before_median_seconds: Some(0.25), ratio: Some(2.0) }),
        }
    }

    fn uncoloured(text: &str) -> String {
        anstream::adapter::strip_str(text).to_string()
    }

    #[test]
    fn a_check_reads_like_this() {
        assert_data_eq!(uncoloured(&check(&failing(), false)), file!["snapshots/tokens.txt"].raw());
        assert_data_eq!(uncoloured(&check(&failing(), true)), file!["snapshots/tokens_verbose.txt"].raw());
    }

    #[test]
    fn checks_of_many_goldens_read_like_this() {
        let step = step(0, 0, Some(5), Some(5), StepVerdict::Agree);
        let right = TokensReport {
            verdict: Verdict::Pass,
            golden: "first".into(),
            steps: vec![step],
            findings: vec![],
            remarks: vec![],
            texts: vec![],
            timing: None,
            ..failing()
        };
        let shard = Some(goldens::report::ShardReport { index: 2, count: 3, cases_total: 7 });
        let remarks = vec!["dumps: standnig.json is the dump of no accepted golden".into()];
        let report = TokensRun { shard, remarks, ..TokensRun::new(vec![right, failing()]) };
        assert_data_eq!(uncoloured(&run(&report, false)), file!["snapshots/tokens_run.txt"].raw());
        let nothing = TokensRun { shard, ..TokensRun::new(vec![]) };
        let words = "shard 2/3: 0 of 7 goldens\nno golden. UNJUDGED (exit code 0: no golden falls to this shard";
        assert!(uncoloured(&run(&nothing, false)).starts_with(words), "{}", run(&nothing, false));
        let merged = goldens::report::MergedReport { count: 3, cases_total: 7, missing: vec![3] };
        let joined = TokensRun { merged: Some(merged), ..TokensRun::new(vec![]) };
        assert!(
            uncoloured(&run(&joined, false)).starts_with("2 of 3 shards joined, 0 of 7 goldens; shard 3 is missing")
        );
    }

    #[test]
    fn a_long_list_of_findings_is_cut() {
        let mut report = failing();
        let one = report.findings[1].clone();
        report.findings = vec![one; 9];
        let text = check(&report, false);
        assert_eq!(text.matches("id -4 is no token").count(), 5);
        assert!(text.contains("row 0: 4 more with --verbose"), "{text}");
        assert_eq!(check(&report, true).matches("id -4 is no token").count(), 9);
    }

    #[test]
    fn a_review_reads_like_this() {
        let row = |row, first_change| RowReview {
            row,
            steps: 48,
            near_ties: 1,
            first_change,
            ids: "-step 2: 8\n+step 2: 9\n".into(),
            text: Some("北京[-的-]{+故宫+}".into()),
            kinds: vec!["step 0: firm is now near_tie".into()],
            margins_changed: 2,
            largest_margin_change: 0.125,
        };
        let changed = Review {
            name: "standing".into(),
            new: false,
            remarks: vec![],
            settings: vec!["-  max_seq_len: 256".into(), "+  max_seq_len: 300".into()],
            rows: vec![row(0, Some(2)), row(3, None)],
        };
        assert_data_eq!(uncoloured(&review(&changed)), file!["snapshots/tokens_review.txt"].raw());
        let remarks = vec!["what is accepted cannot be read".into()];
        let new = Review { new: true, remarks, settings: vec![], rows: vec![row(0, None)], ..changed };
        let new = review(&new);
        assert!(!new.contains("-step 2") && new.contains("  remark: what is accepted cannot be read\n"), "{new}");
    }
}
