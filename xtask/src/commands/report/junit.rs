//! JUnit reports of shards, joined. What shard a suite comes from stands in its properties; a suite without a path is
//! no case but says that there is none.

use std::fmt::Write as _;

use goldens::merge::{self, Kind, MergeError, Part};
use goldens::report::{ShardReport, Verdict};
use quick_junit::{NonSuccessKind, Report, TestCaseStatus, TestSuite};

use crate::exit_codes::ending_of;
use crate::refusal::Refusal;
use crate::report::junit::{KIND, MISSING, PATH, SHARD, TOKENS, nothing_from};
use crate::report::text::{labelled, plain, plural};

/// One shard's report.
pub struct JunitPart {
    part: Part,
    /// The suites of cases; one that only says that there is none is left out.
    suites: Vec<TestSuite>,
}

/// What was made of them.
pub struct Joined {
    /// The report, as XML.
    pub text: String,
    /// The same for a person, in few words.
    pub said: String,
    /// The verdict on the whole run.
    pub verdict: Verdict,
}

/// Reads the text of a report; `file` is where it came from.
///
/// # Errors
/// It is no JUnit report, not that of a shard, or that of a refused run.
pub fn read(file: &str, text: &str) -> Result<JunitPart, Refusal> {
    let report = Report::deserialize_from_str(text)
        .map_err(|error| Refusal::Request(format!("{file}: this is no JUnit report of the gate: {error}")))?;
    if let Some(message) = report.test_suites.iter().find_map(refused) {
        return Err(MergeError::Refused { file: file.to_owned(), message }.into());
    }
    let mut first = None;
    for suite in &report.test_suites {
        let of = shard_of(suite).ok_or_else(|| MergeError::NoShard { file: file.to_owned() })?;
        let kind = if property(suite, KIND) == Some(TOKENS) { Kind::Tokens } else { Kind::Gate };
        if *first.get_or_insert((of, kind)) != (of, kind) {
            let name = plain(&suite.name).into_owned();
            return Err(Refusal::Request(format!(
                "{file}: the suite {name} is of another shard or command than those before it"
            )));
        }
    }
    let (shard, kind) = first.ok_or_else(|| MergeError::NoShard { file: file.to_owned() })?;
    let suites: Vec<_> = report.test_suites.into_iter().filter(|suite| property(suite, PATH).is_some()).collect();
    let cases = suites.iter().map(|suite| suite.name.as_str().to_owned()).collect();
    Ok(JunitPart { part: Part { file: file.to_owned(), kind, shard, cases }, suites })
}

/// Joins the reports of shards, the suites sorted by name.
///
/// # Errors
/// They do not belong together.
pub fn join(parts: Vec<JunitPart>) -> Result<Joined, Refusal> {
    let merged = merge::check(&parts.iter().map(|part| part.part.clone()).collect::<Vec<_>>())?;
    let what = parts.first().map_or(Kind::Gate, |part| part.part.kind).entry();
    let mut suites: Vec<TestSuite> = parts.into_iter().flat_map(|part| part.suites).collect();
    suites.sort_by(|a, b| a.name.cmp(&b.name));
    let count = |wanted| suites.iter().filter(|suite| verdict(suite) == wanted).count() as u64;
    let (failed, unjudged, passed) = (count(Verdict::Fail), count(Verdict::Unjudged), count(Verdict::Pass));
    let verdict = merge::verdict(Verdict::worst(suites.iter().map(verdict)), &merged);
    let mut said = format!(
        "{} joined: {failed} failed, {unjudged} could not be judged, {passed} passed",
        plural(suites.len() as u64, what)
    );
    if let Some(missing) = labelled("shard", &merged.missing) {
        let verb = if merged.missing.len() == 1 { "is" } else { "are" };
        let _ = write!(said, "; {missing} of {} {verb} missing", merged.count);
    }
    let (code, meaning) = ending_of(None, verdict, false, what);
    let _ = writeln!(said, " (exit code {}: {meaning})", code.number());
    let mut report = Report::new("assay");
    report.set_time(
        suites
            .iter()
            .filter_map(|suite| suite.time)
            .fold(std::time::Duration::ZERO, |sum, time| sum.saturating_add(time)),
    );
    report.add_test_suites(suites);
    report.add_test_suites(merged.missing.iter().map(|&index| nothing_from(index, merged.count, MISSING)));
    let text = report.to_string().map_err(|error| Refusal::Request(format!("the joined JUnit report: {error}")))?;
    Ok(Joined { text, said, verdict })
}

/// Why a run was refused, when this is the suite that says so.
fn refused(suite: &TestSuite) -> Option<String> {
    let error = |status: &TestCaseStatus| match status {
        TestCaseStatus::NonSuccess { kind: NonSuccessKind::Error, message, .. } => {
            Some(message.as_ref().map_or_else(|| "it does not say why".to_owned(), |text| text.as_str().to_owned()))
        }
        _ => None,
    };
    suite.test_cases.iter().find_map(|test| error(&test.status))
}

/// The verdict on a case: that of its tests, of which `verdict` alone can leave it unjudged.
fn verdict(suite: &TestSuite) -> Verdict {
    let failed = |status: &TestCaseStatus| matches!(status, TestCaseStatus::NonSuccess { .. });
    if suite.test_cases.iter().any(|test| failed(&test.status)) {
        return Verdict::Fail;
    }
    match suite.test_cases.iter().find(|test| test.name.as_str() == "verdict").map(|test| &test.status) {
        Some(TestCaseStatus::Success { .. }) => Verdict::Pass,
        _ => Verdict::Unjudged,
    }
}

fn shard_of(suite: &TestSuite) -> Option<ShardReport> {
    let [index, count, cases_total] = SHARD.map(|name| property(suite, name).and_then(|value| value.parse().ok()));
    Some(ShardReport { index: index?, count: count?, cases_total: cases_total? })
}

fn property<'a>(suite: &'a TestSuite, name: &str) -> Option<&'a str> {
    suite.properties.iter().find(|property| property.name.as_str() == name).map(|property| property.value.as_str())
}

#[cfg(test)]
mod tests {
    use goldens::report::{CaseReport, GateReport, PolicyReport};

    use super::*;

    fn case(name: &str, verdict: Verdict) -> CaseReport {
        CaseReport {
            name: name.into(),
            path: format!("{name}/case.yaml"),
            verdict,
            seconds: 0.5,
            source: String::new(),
            checks: vec![],
            tensors: vec![],
            policy: PolicyReport::default(),
            coverage: vec![],
            warnings: vec![],
            first_divergence: None,
            consequences: vec![],
            cause: None,
            explanation: None,
            steps: vec![],
        }
    }

    fn xml(index: usize, count: usize, cases: Vec<CaseReport>) -> String {
        let shard = Some(ShardReport { index, count, cases_total: 2 });
        crate::report::junit::render(&GateReport { shard, ..GateReport::new(cases) }).unwrap()
    }

    fn joined(texts: &[&str]) -> Result<Joined, Refusal> {
        join(texts.iter().map(|text| read("x.xml", text)).collect::<Result<Vec<_>, _>>()?)
    }

    #[test]
    fn shards_are_joined_and_missing_ones_named() {
        let one = xml(1, 3, vec![case("a", Verdict::Pass)]);
        let two = xml(2, 3, vec![case("b", Verdict::Unjudged)]);
        let three = xml(3, 3, vec![]);
        let whole = joined(&[&three, &two, &one]).unwrap();
        assert_eq!(whole.verdict, Verdict::Unjudged);
        let (a, b) =
            (whole.text.find("<testsuite name=\"a\"").unwrap(), whole.text.find("<testsuite name=\"b\"").unwrap());
        assert!(a < b && !whole.text.contains("shard 3/3"), "{}", whole.text);
        let bad = xml(2, 3, vec![case("b", Verdict::Fail)]);
        assert_eq!(joined(&[&one, &bad]).unwrap().verdict, Verdict::Fail);
        let part = joined(&[&one, &three]).unwrap();
        assert_eq!(part.verdict, Verdict::Unjudged);
        assert!(part.text.contains("shard 2/3") && part.said.contains("shard 2 of 3 is missing"), "{}", part.said);
    }

    #[test]
    fn what_is_no_shards_report_is_refused() {
        let refusal = |text: &str| joined(&[text]).err().unwrap().to_string();
        let whole = crate::report::junit::render(&GateReport::new(vec![case("a", Verdict::Pass)])).unwrap();
        assert!(refusal(&whole).contains("--shard"));
        let refused = crate::report::junit::render(&GateReport::refused("case.yaml:3: wrong")).unwrap();
        assert!(refusal(&refused).contains("case.yaml:3: wrong"));
        for text in
            ["<", "<testsuites>", "<html></html>", "<testsuites name=\"a\" tests=\"1\" failures=\"0\" errors=\"0\"/>"]
        {
            assert!(refusal(text).starts_with("x.xml: "), "{text}");
        }
        let one = xml(1, 3, vec![case("a", Verdict::Pass)]);
        assert!(joined(&[&one, &one]).is_err());
        assert!(
            refusal(&one.replace("\"shard.index\" value=\"1\"", "\"shard.index\" value=\"7\""))
                .contains("no such shard")
        );
    }
}
