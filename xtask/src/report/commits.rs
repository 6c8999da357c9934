//! The report on a search for a commit, for a person: the answer, what it rests on, and every commit that was tried.

use std::fmt::Write as _;
use std::path::Path;

use comfy_table::Table;
use goldens::commits::{BisectReport, Commit, Mark, Outcome, Tried};

use super::human::{BOLD, TABLE, style, word};
use super::text::{place, plain, plural, short};
use crate::exit_codes::Code;

/// The whole report.
pub fn render(report: &BisectReport) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut out, report);
    out
}

fn write(out: &mut String, report: &BisectReport) -> std::fmt::Result {
    writeln!(out, "{BOLD}{}{BOLD:#}", plain(&report.message))?;
    for commit in report.first_bad.iter().chain(&report.suspects) {
        let Commit { hash, subject, author, date } = commit;
        writeln!(out, "  {}  {}", plain(hash), plain(subject))?;
        writeln!(out, "    {}, {}", plain(author), plain(date))?;
    }
    match (&report.detail, &report.first_divergence) {
        (Some(detail), _) => writeln!(out, "  {}", plain(detail))?,
        (None, Some(tensor)) => writeln!(out, "  First divergence: {}.", plain(tensor))?,
        (None, None) => {}
    }
    if let Some(cause) = &report.cause {
        writeln!(out, "  cause: {}", plain(&cause.to_string()))?;
    }
    for tried in report.tried.iter().filter(|tried| tried.flaky) {
        writeln!(out, "  flaky: {} {}", short(&tried.commit.hash), plain(&tried.commit.subject))?;
    }
    commits(out, &report.tried)?;
    let (code, style) = (Code::from(report.verdict), style(report.verdict));
    // A fault that was found is no pass of the kernel.
    let word = if report.outcome == Outcome::FirstBad { "FOUND" } else { word(report.verdict) };
    writeln!(out, "{style}{word}{style:#} (exit code {}: {})", code.number(), meaning(report.outcome))
}

fn commits(out: &mut String, all: &[Tried]) -> std::fmt::Result {
    if all.is_empty() {
        return Ok(());
    }
    let mut table = Table::new();
    table.load_style(TABLE).set_header(["commit", "verdict", "runs", "subject", "why"]);
    for tried in all {
        let why = tried.reason.as_deref().or_else(|| tried.failure().and_then(|run| run.detail.as_deref()));
        table.add_row([
            short(&tried.commit.hash).to_owned(),
            tried.verdict.name().to_owned(),
            runs(tried),
            clipped(&tried.commit.subject, 30),
            clipped(why.unwrap_or_default(), 60),
        ]);
    }
    for line in table.lines() {
        writeln!(out, "  {}", line.trim_end())?;
    }
    let logs = all.first().and_then(|tried| Path::new(&tried.log).parent()).map(place).unwrap_or_default();
    writeln!(out, "{} tried; logs: {}", plural(all.len() as u64, "commit"), plain(&logs))
}

/// How the runs of a commit came out: `2 good`, `3 good, 1 bad`.
fn runs(tried: &Tried) -> String {
    let count = |mark| tried.runs.iter().filter(|run| run.verdict == mark).count();
    let parts = [Mark::Good, Mark::Bad, Mark::Skip].map(|mark| (count(mark), mark.name()));
    let parts: Vec<_> = parts.iter().filter(|(count, _)| *count > 0).map(|(n, name)| format!("{n} {name}")).collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
}

fn clipped(text: &str, most: usize) -> String {
    let text = plain(text);
    if text.chars().count() <= most {
        return text.into_owned();
    }
    text.chars().take(most.saturating_sub(4)).chain(" ...".chars()).collect()
}

fn meaning(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::FirstBad => "the first bad commit was found",
        Outcome::GoodEndFails | Outcome::BadEndPasses => "an end is not what it was said to be; nothing was searched",
        Outcome::Malformed => "a bundle is malformed; the search ended there",
        Outcome::Suspects => "commits that could not be judged hide the first bad one",
        Outcome::EndNotJudged => "an end could not be judged; nothing was searched",
        Outcome::Interrupted => "interrupted; the repository is as it was",
    }
}

#[cfg(test)]
mod tests {
    use goldens::commits::Run;
    use goldens::report::{Cause, Verdict};

    use super::*;

    fn commit(letter: &str, subject: &str) -> Commit {
        let author = "Ada <ada@example.org>".to_owned();
        Commit { hash: letter.repeat(40), subject: subject.to_owned(), author, date: "2026-01-02T03:04:05Z".to_owned() }
    }

    fn tried(commit: Commit, verdict: Mark, marks: &[Mark], reason: Option<&str>) -> Tried {
        let detail =
            |mark: Mark| (mark == Mark::Bad).then(|| "First divergence: out: 1 of 40,960 elements drifts.".to_owned());
        let run = |&mark: &Mark| Run { verdict: mark, detail: detail(mark), first_divergence: None, cause: None };
        Tried {
            verdict,
            flaky: marks.contains(&Mark::Good) && marks.contains(&Mark::Bad),
            reason: reason.map(str::to_owned),
            runs: marks.iter().map(run).collect(),
            log: format!("/logs/{}.log", commit.hash),
            seconds: 1.0,
            commit,
        }
    }

    #[test]
    fn the_answer_stands_first_and_names_cannot_move_the_cursor() {
        use Mark::{Bad, Good, Skip};
        let (good, bad, flaky) = (commit("a", "right"), commit("b", "a\u{1b}[2Jb"), commit("c", "wavering"));
        let report = BisectReport {
            verdict: Verdict::Pass,
            outcome: Outcome::FirstBad,
            message: format!("the first bad commit is bbbbbbbbbbbb {}", bad.subject),
            repository: "/kernel".to_owned(),
            good: good.clone(),
            bad: bad.clone(),
            first_bad: Some(bad.clone()),
            suspects: Vec::new(),
            first_divergence: Some("out".to_owned()),
            detail: Some("First divergence: out: 1 of 40,960 elements drifts.".to_owned()),
            cause: Some(Cause {
                id: "residual.trunc".to_owned(),
                site: "out".to_owned(),
                description: "the residual is truncated".to_owned(),
                confidence: 0.987,
            }),
            tried: vec![
                tried(good, Good, &[Good, Good], None),
                tried(bad, Bad, &[Bad, Bad], None),
                tried(flaky, Skip, &[Bad, Good, Good, Good], Some("flaky: 1 of 4 runs failed, 3 passed")),
                tried(commit("d", "half done"), Skip, &[], Some("does not build: the build command exited with 1")),
            ],
        };
        let text = anstream::adapter::strip_str(&render(&report)).to_string();
        assert!(text.starts_with("the first bad commit is bbbbbbbbbbbb a\\u{1b}[2Jb\n  bbbbbbbb"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
        for words in [
            "Ada <ada@example.org>, 2026-01-02T03:04:05Z\n  First divergence: out: 1 of 40,960 elements drifts.\n",
            "cause: the residual is truncated (residual.trunc, at out; confidence 98 %)",
            "flaky: cccccccccccc wavering",
            "3 good, 1 bad",
            "does not build: the build command exited with 1",
            "4 commits tried; logs: /logs\nFOUND (exit code 0: the first bad commit was found)\n",
        ] {
            assert!(text.contains(words), "{words}: {text}");
        }
    }
}
