//! Reports of `assay tokens check --all`, joined by the rules of those of the gate: what a shard wrote of a golden is
//! kept word for word, and a verdict that does not follow from it is refused.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{Kind, MergeError, Part, check, malformed, verdict};
use crate::report::Verdict;
use crate::tokens::report::TokensRun;

/// A shard's JSON report, as read: in its types, and word for word.
#[derive(Clone, Debug)]
pub struct TokensPart {
    part: Part,
    report: TokensRun,
    goldens: Vec<Value>,
}

impl TokensPart {
    /// Reads the text of a report; `file` is where it came from.
    ///
    /// # Errors
    /// It is no report of checked goldens, not that of a shard, or a verdict in it is not that of what it stands for.
    pub fn parse(file: &str, text: &str) -> Result<Self, MergeError> {
        let report: TokensRun = serde_json::from_str(text).map_err(|error| malformed(file, &error))?;
        let mut whole: Map<String, Value> = serde_json::from_str(text).map_err(|error| malformed(file, &error))?;
        let no_shard = || MergeError::NoShard { file: file.to_owned() };
        let shard = report.shard.ok_or_else(no_shard)?;
        let other = |file: String, said: Verdict, found: Verdict| {
            let (said, found) = (said.name(), found.name());
            Err(MergeError::Verdict { file, said, found })
        };
        for golden in &report.goldens {
            let found = golden.found();
            if found != golden.verdict {
                return other(format!("{file}: golden `{}`", golden.golden), golden.verdict, found);
            }
        }
        let found = Verdict::worst(report.goldens.iter().map(|golden| golden.verdict));
        if found != report.verdict {
            return other(file.to_owned(), report.verdict, found);
        }
        let Some(Value::Array(goldens)) = whole.remove("goldens") else { return Err(no_shard()) };
        let names = report.goldens.iter().map(|golden| golden.golden.clone()).collect();
        let part = Part { file: file.to_owned(), kind: Kind::Tokens, shard, cases: names };
        Ok(Self { part, report, goldens })
    }
}

/// Joins the reports of shards, goldens sorted by name: the report for those who show it, and the same as JSON. A
/// remark that several shards make is made once.
///
/// # Errors
/// Those of [`check`].
pub fn join_tokens(parts: Vec<TokensPart>) -> Result<(TokensRun, Value), MergeError> {
    let merged = check(&parts.iter().map(|part| part.part.clone()).collect::<Vec<_>>())?;
    let (mut goldens, mut remarks) = (Vec::new(), BTreeSet::new());
    for part in parts {
        goldens.extend(part.report.goldens.into_iter().zip(part.goldens));
        remarks.extend(part.report.remarks);
    }
    goldens.sort_by(|(a, _), (b, _)| a.golden.cmp(&b.golden));
    let (goldens, raw): (Vec<_>, Vec<_>) = goldens.into_iter().unzip();
    let mut report = TokensRun::new(goldens);
    report.verdict = verdict(report.verdict, &merged);
    (report.merged, report.remarks) = (Some(merged), remarks.into_iter().collect());
    // A report without its goldens has nothing that serialization could refuse.
    let mut whole = serde_json::to_value(TokensRun { goldens: Vec::new(), ..report.clone() }).unwrap_or_default();
    if let Some(object) = whole.as_object_mut() {
        object.insert("goldens".to_owned(), Value::Array(raw));
    }
    Ok((report, whole))
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use serde_json::json;

    use super::*;

    fn golden(name: &str, verdict: &str, step: &str) -> Value {
        let step = json!({"row": 0, "step": 0, "device": 1, "reference": 1, "margin": "Infinity", "verdict": step,
            "device_logit": null, "reference_logit": 2.5, "bound": null, "forced": false});
        json!({"verdict": verdict, "golden": name, "source": "d", "steps": [step], "findings": [], "remarks": [],
            "texts": [], "timing": null, "new key": [1]})
    }

    fn part(index: usize, goldens: &[Value], verdict: &str) -> Result<TokensPart, MergeError> {
        let shard = json!({"index": index, "count": 3, "cases_total": 2});
        let report = json!({"verdict": verdict, "shard": shard, "remarks": ["d: x"], "goldens": goldens});
        TokensPart::parse(&format!("{index}.json"), &report.to_string())
    }

    #[test]
    fn shards_are_joined_word_for_word_and_missing_ones_named() {
        let (a, b) = (golden("a", "pass", "agree"), golden("b", "unjudged", "unjudged"));
        let parts = || {
            let [one, two] = [part(1, from_ref(&a), "pass"), part(2, from_ref(&b), "unjudged")].map(Result::unwrap);
            (one, two, part(3, &[], "unjudged").unwrap())
        };
        let (one, two, three) = parts();
        let (report, whole) = join_tokens(vec![three, two, one]).unwrap();
        assert_eq!((report.verdict, report.goldens.len()), (Verdict::Unjudged, 2));
        let merged = json!({"count": 3, "cases_total": 2, "missing": []});
        let expected = json!({"verdict": "unjudged", "merged": merged, "remarks": ["d: x"], "goldens": [a, b]});
        assert_eq!(whole, expected);
        let (one, _, three) = parts();
        let (part, whole) = join_tokens(vec![one, three]).unwrap();
        assert_eq!((part.verdict, &whole["merged"]["missing"]), (Verdict::Unjudged, &json!([2])));
        let (one, ..) = parts();
        assert!(join_tokens(vec![one.clone(), one]).unwrap_err().to_string().contains("is shard 1, and so is"));
    }

    #[test]
    fn verdicts_that_do_not_follow_are_refused() {
        let told = |goldens: &[Value], verdict| part(1, goldens, verdict).unwrap_err().to_string();
        let lies = told(&[golden("a", "pass", "fail")], "pass");
        assert!(lies.contains("1.json: golden `a`: says `pass`, and what it holds says `fail`"), "{lies}");
        let lies = told(&[golden("a", "fail", "fail")], "pass");
        assert!(lies.contains("1.json: says `pass`"), "{lies}");
        let whole = json!({"verdict": "pass", "remarks": [], "goldens": [golden("a", "pass", "agree")]}).to_string();
        assert!(matches!(TokensPart::parse("x", &whole), Err(MergeError::NoShard { .. })));
        for text in ["", "[]", "{}", "{\"verdict\": \"pass\", \"remarks\": [], \"goldens\": 1}"] {
            assert!(matches!(TokensPart::parse("x", text), Err(MergeError::Json { .. })), "{text}");
        }
    }
}
