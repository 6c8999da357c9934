//! Reports of shards, joined. Whether they are the shards of one run, and which are not there, is decided here; reports
//! are files that others wrote, and nothing in them is taken for granted.

mod kind;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};

use cases::Shard;
use serde::Deserialize;
use serde_json::{Map, Value};
use thiserror::Error;

use crate::power::CasePower;
use crate::report::{GateReport, MergedReport, ShardReport, Verdict};

pub use kind::Kind;
pub use tokens::{TokensPart, join_tokens};

/// Keeps of what is to be split the items of one shard, by their names; the report counts all items. Every machine has
/// to have the whole list.
pub fn take<T>(shard: Shard, items: &mut Vec<T>, name: impl Fn(&T) -> &str) -> ShardReport {
    let cases_total = items.len();
    let taken: BTreeSet<String> = shard.taken(items.iter().map(&name)).into_iter().map(str::to_owned).collect();
    items.retain(|item| taken.contains(name(item)));
    ShardReport { index: shard.index(), count: shard.count(), cases_total }
}

/// What has to be known of one shard's report, whatever its format.
#[derive(Clone, Debug)]
pub struct Part {
    /// The file that it was read from.
    pub file: String,
    /// Whose report it is.
    pub kind: Kind,
    /// Which shard it says it is.
    pub shard: ShardReport,
    /// Names of its cases, or goldens.
    pub cases: Vec<String>,
}

/// Why reports cannot be joined.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum MergeError {
    #[error(
        "{file}:{line}:{column}: this is no JSON report of `assay gate`, `assay power` or `assay tokens check --all`: \
             {message}"
    )]
    Json { file: String, line: usize, column: usize, message: String },
    #[error("{file}: is a report of {kind}, and {first_file} is one of {first}; join reports of one kind")]
    Kinds { file: String, kind: Kind, first_file: String, first: Kind },
    #[error("{file}: the run was refused, so that there is nothing to join: {message}")]
    Refused { file: String, message: String },
    #[error("{file}: is not the report of a shard; join what was made with --shard I/N and --format json or --junit")]
    NoShard { file: String },
    #[error("{file}: says that it is shard {index} of {count} of a run of {total} {what}s, and there is no such shard")]
    Shard { file: String, index: usize, count: usize, total: usize, what: &'static str },
    #[error("{file}: says `{said}`, and what it holds says `{found}`; make the report again")]
    Verdict { file: String, said: &'static str, found: &'static str },
    #[error("nothing to join: name the reports of the shards")]
    Nothing,
    #[error(
        "{file}: is of a run split into {count} shards of {total} {what}s, and {first} of one split into {of_first} \
             shards of {total_of_first} {what}s; join shards of one run"
    )]
    Mixture {
        file: String,
        count: usize,
        total: usize,
        first: String,
        of_first: usize,
        total_of_first: usize,
        what: &'static str,
    },
    #[error("{file}: is shard {index}, and so is {other}; name each shard once")]
    Twice { file: String, other: String, index: usize },
    #[error("{file}: holds the {what} `{case}`, and so does {other}; shards of one run have no {what} in common")]
    Case { file: String, other: String, case: String, what: &'static str },
    #[error("{files} hold {found} {what}s, and the run has {total}; make the reports again")]
    Count { files: String, found: usize, total: usize, what: &'static str },
    #[error(
        "{file}: holds the {what} `{case}`, which falls to another shard than {index} among the {what}s of these \
             reports; the shards did not have the same list of {what}s"
    )]
    Elsewhere { file: String, case: String, index: usize, what: &'static str },
}

/// Checks that these are shards of one run, each once, and says which are missing.
///
/// # Errors
/// They are not: another number of shards or cases, a shard or a case twice, a case in the wrong shard.
pub fn check(parts: &[Part]) -> Result<MergedReport, MergeError> {
    let first = parts.first().ok_or(MergeError::Nothing)?;
    let ShardReport { count, cases_total, .. } = first.shard;
    let what = first.kind.entry();
    let (mut shards, mut cases) = (BTreeMap::new(), BTreeMap::new());
    for part in parts {
        let ShardReport { index, count: of, cases_total: total } = part.shard;
        if part.kind != first.kind {
            let (file, first_file) = (part.file.clone(), first.file.clone());
            return Err(MergeError::Kinds { file, kind: part.kind, first_file, first: first.kind });
        }
        if Shard::new(index, of).is_err() || total == 0 {
            return Err(MergeError::Shard { file: part.file.clone(), index, count: of, total, what });
        }
        if (of, total) != (count, cases_total) {
            return Err(MergeError::Mixture {
                file: part.file.clone(),
                count: of,
                total,
                first: first.file.clone(),
                of_first: count,
                total_of_first: cases_total,
                what,
            });
        }
        if let Some(other) = shards.insert(index, &part.file) {
            return Err(MergeError::Twice { file: part.file.clone(), other: other.clone(), index });
        }
        for case in part.cases.iter().collect::<BTreeSet<_>>() {
            if let Some(other) = cases.insert(case, part) {
                let (file, other) = (part.file.clone(), other.file.clone());
                return Err(MergeError::Case { file, other, case: case.clone(), what });
            }
        }
    }
    let missing: Vec<usize> = (1..=count).filter(|index| !shards.contains_key(index)).collect();
    let found = parts.iter().map(|part| part.cases.len()).sum();
    if found > cases_total || (missing.is_empty() && found < cases_total) {
        let files = parts.iter().map(|part| part.file.as_str()).collect::<Vec<_>>().join(", ");
        return Err(MergeError::Count { files, found, total: cases_total, what });
    }
    if missing.is_empty() {
        for (position, (case, part)) in cases.iter().enumerate() {
            let index = part.shard.index;
            if !Shard::new(index, count).is_ok_and(|shard| shard.takes(position)) {
                let (file, case) = (part.file.clone(), (*case).clone());
                return Err(MergeError::Elsewhere { file, case, index, what });
            }
        }
    }
    Ok(MergedReport { count, cases_total, missing })
}

/// A shard's JSON report, as read: in its types, and word for word.
#[derive(Clone, Debug)]
pub struct JsonPart {
    part: Part,
    report: GateReport,
    cases: Vec<Value>,
}

impl JsonPart {
    /// Reads the text of a report; `file` is where it came from.
    ///
    /// # Errors
    /// It is no report of the gate, not that of a shard, or that of a refused run.
    pub fn parse(file: &str, text: &str) -> Result<Self, MergeError> {
        let report: GateReport = serde_json::from_str(text).map_err(|error| malformed(file, &error))?;
        let mut whole: Map<String, Value> = serde_json::from_str(text).map_err(|error| malformed(file, &error))?;
        if report.verdict == Verdict::Error || report.message.is_some() {
            let message = report.message.unwrap_or_else(|| "it does not say why".to_owned());
            return Err(MergeError::Refused { file: file.to_owned(), message });
        }
        let shard = report.shard.ok_or_else(|| MergeError::NoShard { file: file.to_owned() })?;
        let found = Verdict::worst(report.cases.iter().map(|case| case.verdict));
        if found != report.verdict {
            let (said, found) = (report.verdict.name(), found.name());
            return Err(MergeError::Verdict { file: file.to_owned(), said, found });
        }
        for case in &report.cases {
            let parts = case.tensors.iter().map(|tensor| tensor.verdict).chain(case.checks.iter().map(|c| c.verdict));
            if case.verdict != Verdict::Fail && parts.into_iter().any(|part| part == Verdict::Fail) {
                let (said, found) = (case.verdict.name(), Verdict::Fail.name());
                return Err(MergeError::Verdict { file: format!("{file}: case `{}`", case.name), said, found });
            }
        }
        let Some(Value::Array(cases)) = whole.remove("cases") else {
            return Err(MergeError::NoShard { file: file.to_owned() });
        };
        let names = report.cases.iter().map(|case| case.name.clone()).collect();
        Ok(Self { part: Part { file: file.to_owned(), kind: Kind::Gate, shard, cases: names }, report, cases })
    }
}

fn malformed(file: &str, error: &serde_json::Error) -> MergeError {
    MergeError::Json {
        file: file.to_owned(),
        line: error.line(),
        column: error.column(),
        // The place stands before the message already.
        message: error.to_string().rsplit_once(" at line ").map_or(error.to_string(), |(words, _)| words.to_owned()),
    }
}

/// A shard's report of `assay power`.
#[derive(Debug, Deserialize)]
struct PowerShard {
    shard: Option<ShardReport>,
    cases: Vec<CasePower>,
}

/// Joins the reports of `assay power`, each with the file that it was read from, to the trials of all cases, sorted by
/// name and seed.
///
/// # Errors
/// A text that is no such report, and those of [`check`].
pub fn join_power(texts: &[(&str, &str)]) -> Result<(MergedReport, Vec<CasePower>), MergeError> {
    let (mut parts, mut cases) = (Vec::new(), Vec::new());
    for &(file, text) in texts {
        let report: PowerShard = serde_json::from_str(text).map_err(|error| malformed(file, &error))?;
        let shard = report.shard.ok_or_else(|| MergeError::NoShard { file: file.to_owned() })?;
        let names: BTreeSet<String> = report.cases.iter().map(|case| case.name.clone()).collect();
        let cases_of = names.into_iter().collect();
        parts.push(Part { file: file.to_owned(), kind: Kind::Power, shard, cases: cases_of });
        cases.extend(report.cases);
    }
    let merged = check(&parts)?;
    cases.sort_by(|a, b| (&a.name, a.seed).cmp(&(&b.name, b.seed)));
    Ok((merged, cases))
}

/// Joins the JSON reports of shards: the report for those who show it, and the same as JSON, in which the cases are
/// what the shards wrote, keys that this program does not know included. Cases are sorted by name.
///
/// A case that failed fails the whole; where nothing failed and a shard is missing, the whole is unjudged.
///
/// # Errors
/// Those of [`check`].
pub fn join(parts: Vec<JsonPart>) -> Result<(GateReport, Value), MergeError> {
    let merged = check(&parts.iter().map(|part| part.part.clone()).collect::<Vec<_>>())?;
    let mut cases: Vec<_> = parts.into_iter().flat_map(|part| part.report.cases.into_iter().zip(part.cases)).collect();
    cases.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let (cases, raw): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    let mut report = GateReport::new(cases);
    report.verdict = verdict(report.verdict, &merged);
    report.merged = Some(merged);
    // A report without its cases has nothing that serialization could refuse.
    let mut whole = serde_json::to_value(GateReport { cases: Vec::new(), ..report.clone() }).unwrap_or_default();
    if let Some(object) = whole.as_object_mut() {
        object.insert("cases".to_owned(), Value::Array(raw));
    }
    Ok((report, whole))
}

/// The verdict on a run whose known cases have this one: what is missing cannot pass.
#[must_use]
pub fn verdict(known: Verdict, merged: &MergedReport) -> Verdict {
    if merged.missing.is_empty() { known } else { Verdict::worst([known, Verdict::Unjudged]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(file: &str, index: usize, cases: &[&str]) -> Part {
        let shard = ShardReport { index, count: 2, cases_total: 3 };
        let cases = cases.iter().map(|case| (*case).to_owned()).collect();
        Part { file: file.into(), kind: Kind::Gate, shard, cases }
    }

    #[test]
    fn shards_of_one_run_are_joined_in_any_order() {
        let (one, two) = (part("1", 1, &["c", "a"]), part("2", 2, &["b"]));
        assert_eq!(check(&[one.clone(), two.clone()]).unwrap().missing, [0_usize; 0]);
        assert_eq!(check(&[two.clone(), one.clone()]).unwrap().missing, [0_usize; 0]);
        assert_eq!(check(&[two]).unwrap().missing, [1]);
        assert_eq!(check(&[one]).unwrap().missing, [2]);
        assert!(matches!(check(&[]), Err(MergeError::Nothing)));
    }

    #[test]
    fn mixtures_are_refused_with_both_files() {
        let one = part("1.json", 1, &["a", "c"]);
        let with = |change: fn(&mut Part)| {
            let mut two = part("2.json", 2, &["b"]);
            change(&mut two);
            check(&[one.clone(), two]).unwrap_err().to_string()
        };
        for (words, told) in [
            ("3 shards", with(|part| part.shard.count = 3)),
            ("4 cases", with(|part| part.shard.cases_total = 4)),
            ("is shard 1", with(|part| part.shard.index = 1)),
            ("`a`", with(|part| part.cases = vec!["a".into()])),
            ("hold 2 cases", with(|part| part.cases.clear())),
            ("hold 4 cases", with(|part| part.cases.push("d".into()))),
            ("`c`, which falls", with(|part| part.cases = vec!["d".into()])),
            ("no such shard", with(|part| part.shard.index = 3)),
            ("no such shard", with(|part| part.shard.index = 0)),
            ("`assay tokens check --all`, and 1.json is one of `assay gate`", with(|part| part.kind = Kind::Tokens)),
        ] {
            assert!(told.contains(words) && told.contains(".json"), "{words}: {told}");
        }
        let endless = Part { shard: ShardReport { index: 1, count: usize::MAX, cases_total: 1 }, ..one };
        assert!(matches!(check(&[endless]), Err(MergeError::Shard { .. })));
    }

    #[test]
    fn a_shard_keeps_its_items_in_their_order_and_counts_all() {
        let mut items = vec![("b", 1), ("a", 2), ("c", 3), ("a", 4)];
        let report = take("1/2".parse().unwrap(), &mut items, |item| item.0);
        assert_eq!(items, [("a", 2), ("c", 3), ("a", 4)]);
        assert_eq!(report, ShardReport { index: 1, count: 2, cases_total: 4 });
    }

    #[test]
    fn a_report_is_read_with_its_faults_located() {
        let error = |text: &str| JsonPart::parse("a.json", text).unwrap_err().to_string();
        let shard = r#""shard": {"index": 1, "count": 2, "cases_total": 1}"#;
        for (text, words) in [
            ("", "a.json:1:0: "),
            ("{\n \"verdict\": \"maybe\", \"cases\": []}", "a.json:2:"),
            (r#"{"verdict": "pass", "cases": 3}"#, "a.json:1:"),
            (r#"{"verdict": "unjudged", "cases": []}"#, "--shard"),
            (r#"{"verdict": "error", "message": "x.yaml: wrong", "cases": []}"#, "x.yaml: wrong"),
            (&format!(r#"{{"verdict": "pass", {shard}, "cases": []}}"#), "says `pass`"),
            (r#"{"verdict": "unjudged", "shard": {"index": -1}, "cases": []}"#, "a.json:1:"),
            (&"[".repeat(100_000), "a.json:1:"),
        ] {
            let told = error(text);
            assert!(told.starts_with("a.json:") && told.contains(words), "{text:.60}: {told}");
        }
        assert!(JsonPart::parse("a.json", &format!(r#"{{"verdict": "unjudged", {shard}, "cases": []}}"#)).is_ok());
    }

    #[test]
    fn what_is_missing_cannot_pass_and_a_failure_stays_one() {
        let merged = |missing: &[usize]| MergedReport { count: 2, cases_total: 3, missing: missing.to_vec() };
        assert_eq!(verdict(Verdict::Pass, &merged(&[])), Verdict::Pass);
        assert_eq!(verdict(Verdict::Pass, &merged(&[2])), Verdict::Unjudged);
        assert_eq!(verdict(Verdict::Fail, &merged(&[2])), Verdict::Fail);
        assert_eq!(verdict(Verdict::Unjudged, &merged(&[])), Verdict::Unjudged);
    }
}
