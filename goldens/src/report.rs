//! What a gate run found, as plain data. The JSON of `docs/bundles.md` is this module serialized;
//! every other format is a view of it.

use cases::Case;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::maps::TensorMap;

/// The word that a case, a check or a tensor ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Compared, and right.
    Pass,
    /// An accuracy or contract failure.
    Fail,
    /// The input is wrong; nothing was judged.
    Error,
    /// Nothing to judge it by.
    Unjudged,
}

impl Verdict {
    /// The word itself.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Error => "error",
            Self::Unjudged => "unjudged",
        }
    }

    /// The verdict on several: a failure wins over unjudged, unjudged over a pass.
    #[must_use]
    pub fn worst(verdicts: impl IntoIterator<Item = Self>) -> Self {
        let rank = |verdict| match verdict {
            Self::Pass => 0,
            Self::Unjudged => 1,
            Self::Fail => 2,
            Self::Error => 3,
        };
        verdicts.into_iter().max_by_key(|&verdict| rank(verdict)).unwrap_or(Self::Unjudged)
    }
}

/// A number that may be NaN or infinite; JSON gets the strings `NaN`, `Infinity` and `-Infinity` then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Number(pub f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.collect_str(self) }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Words;
        impl serde::de::Visitor<'_> for Words {
            type Value = Number;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a number, \"NaN\", \"Infinity\" or \"-Infinity\"")
            }

            fn visit_f64<E>(self, value: f64) -> Result<Number, E> {
                Ok(Number(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Number, E> {
                Ok(Number(value as f64))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Number, E> {
                Ok(Number(value as f64))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Number, E> {
                match text {
                    "NaN" => Ok(Number(f64::NAN)),
                    "Infinity" => Ok(Number(f64::INFINITY)),
                    "-Infinity" => Ok(Number(f64::NEG_INFINITY)),
                    other => Err(E::invalid_value(serde::de::Unexpected::Str(other), &self)),
                }
            }
        }
        deserializer.deserialize_any(Words)
    }
}

impl std::fmt::Display for Number {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.is_nan() {
            f.write_str("NaN")
        } else if self.0.is_infinite() {
            f.write_str(if self.0 > 0.0 { "Infinity" } else { "-Infinity" })
        } else {
            // Every value here is an FP32, BF16 or integer, so the shortest FP32 text is exact.
            write!(f, "{}", self.0 as f32)
        }
    }
}

/// A whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GateReport {
    /// The run's verdict.
    pub verdict: Verdict,
    /// What was wrong with the request, when `verdict` is `error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Which part of a run that was split over machines this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardReport>,
    /// The shards that were joined to this report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<MergedReport>,
    /// One entry a case.
    pub cases: Vec<CaseReport>,
}

impl GateReport {
    /// The report on several cases.
    #[must_use]
    pub fn new(cases: Vec<CaseReport>) -> Self {
        let verdict = Verdict::worst(cases.iter().map(|case| case.verdict));
        Self { verdict, message: None, shard: None, merged: None, cases }
    }

    /// The report on a request that is refused: nothing was judged.
    #[must_use]
    pub fn refused(message: &str) -> Self {
        Self { verdict: Verdict::Error, message: Some(message.to_owned()), ..Self::new(Vec::new()) }
    }
}

/// One shard of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardReport {
    /// Which shard, from 1.
    pub index: usize,
    /// Of how many.
    pub count: usize,
    /// Cases of the whole run, those of all shards.
    pub cases_total: usize,
}

/// Shards that were joined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MergedReport {
    /// Into how many shards the run was split.
    pub count: usize,
    /// Cases of the whole run.
    pub cases_total: usize,
    /// Shards whose report is not there, from 1, ascending.
    pub missing: Vec<usize>,
}

/// One case.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CaseReport {
    /// The case's own name.
    pub name: String,
    /// Where it was read from.
    pub path: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// Wall time, in seconds.
    pub seconds: f64,
    /// Where the outputs came from, in a few words (`emulated, kernel 5b8ce4d6`).
    pub source: String,
    /// Contract checks.
    pub checks: Vec<Check>,
    /// Compared tensors, in contract order.
    pub tensors: Vec<TensorReport>,
    /// Rounding rules asked for and found.
    pub policy: PolicyReport,
    /// What this data could not have shown.
    pub coverage: Vec<String>,
    /// Things to know that are neither failures nor gaps (a padding row that shares an active row's slot).
    pub warnings: Vec<String>,
    /// The first tensor, in contract order, at which drift was made.
    pub first_divergence: Option<String>,
    /// Tensors fed by the first divergence that are right for the inputs they were given, or that could only be judged
    /// behind it: what is wrong in them follows from it.
    pub consequences: Vec<String>,
    /// The named cause, when one was asked for and found.
    pub cause: Option<Cause>,
    /// How the cause was looked for, when it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub explanation: Option<Explanation>,
    /// Every token of a token run that was judged, rows one after the other; empty for other kernels.
    pub steps: Vec<TokenStep>,
}

impl CaseReport {
    /// The report on a case that a device could not run: nothing was compared, which is neither a pass nor an accuracy
    /// failure. `check` is what stood in the way, `detail` says why and what to do, without a full stop at its end.
    #[must_use]
    pub fn unjudged(case: &Case, check: &str, detail: &str) -> Self {
        let mut report = crate::judge::unjudged(case, &case.policy, detail);
        let check = Check { name: check.to_owned(), verdict: Verdict::Unjudged, detail: detail.to_owned() };
        report.checks.insert(0, check);
        report
    }
}

/// A deviation from the contract that gives the device's bits, or comes closest to them (`docs/verdicts.md`, Causes).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cause {
    /// The deviation's name in the catalogue, e.g. `residual.trunc`; several joined by `+` where one is not enough.
    pub id: String,
    /// The tensor or cast site at which it works.
    pub site: String,
    /// What such a device does, in words.
    pub description: String,
    /// How sure the choice is, 0 to 1.
    pub confidence: f64,
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { id, site, description, confidence } = self;
        write!(f, "{description} ({id}, at {site}; confidence {:.0} %)", (100.0 * confidence).floor())
    }
}

/// How a cause was looked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Deviations that were tried and say more than none at all, best first; the cause is the first of them.
    pub candidates: Vec<Candidate>,
    /// How much of what went wrong the best one gives bit for bit.
    pub reproduced: Reproduced,
    /// Whether something is wrong that a cause could be found for.
    pub visible: bool,
    /// What the answer rests on, or why there is none.
    pub notes: Vec<String>,
}

/// One deviation that was tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its name in the catalogue.
    pub id: String,
    /// The tensor or cast site at which it works.
    pub site: String,
    /// What such a device does, in words.
    pub description: String,
    /// Share of what the contract leaves unexplained that it explains: 1 is all, 0 is none.
    pub score: f64,
    /// Elements that it gives bit for bit, of those compared.
    pub reproduced: Reproduced,
}

/// Elements given bit for bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reproduced {
    /// Bit for bit.
    pub exact: u64,
    /// Of so many.
    pub elements: u64,
}

/// One generated token.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokenStep {
    /// Batch row.
    pub row: usize,
    /// Which of the row's tokens, from 0, the one that the prefill gives.
    pub step: usize,
    /// The device's token.
    pub device: i64,
    /// The reference's token for the same state; `None` where its logits are NaN.
    pub reference: Option<usize>,
    /// How far the reference's logit of its token lies above that of the device's token or, where they agree, above the
    /// runner-up's.
    pub margin: Number,
    /// How large a margin permitted freedoms can turn round.
    pub bound: Number,
    /// How they compare.
    pub verdict: StepVerdict,
    /// What else is to be said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How a device's token compares with the reference's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepVerdict {
    /// The same token.
    Agree,
    /// Another token, which permitted freedoms can give too.
    NearTie,
    /// A token that nothing permitted gives.
    Fail,
}

impl StepVerdict {
    /// The word itself.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Agree => "agree",
            Self::NearTie => "near_tie",
            Self::Fail => "fail",
        }
    }
}

/// One contract check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Check {
    /// Its name, e.g. `padding_rows`.
    pub name: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// What was found, with places.
    pub detail: String,
}

/// One compared tensor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TensorReport {
    /// The kernel's name of it.
    pub name: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// Whether its stage was recomputed from the device's own inputs to it.
    pub forced: bool,
    /// Elements compared.
    pub elements: u64,
    /// Elements equal to the value the contract gives.
    pub exact: u64,
    /// Differing elements that a permitted freedom or a tie rule explains.
    pub explained: u64,
    /// Of those, values within the derived bound of a rounding boundary, or of the exact FP32 value.
    pub explained_flips: u64,
    /// Of those, exact ties that went by another rule than asked for.
    pub explained_ties: u64,
    /// Differing elements that nothing permitted explains: drift.
    pub unexplained: u64,
    /// Non-finite elements on the device's side.
    pub nonfinite: u64,
    /// Drifting elements whose device value is exactly half of the reference's.
    pub exactly_half: u64,
    /// The worst drifting element, or the worst explained one when nothing drifts.
    pub worst: Option<Element>,
    /// The worst few drifting elements, worst first.
    pub worst_elements: Vec<Element>,
    /// The first element, in index order, that drifts or, where nothing drifts, that went by another tie rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<Located>,
    /// Rows that hold drift.
    pub rows_failing: Vec<usize>,
    /// Query or KV heads that hold drift, for tensors laid out by head.
    pub heads_failing: Vec<usize>,
    /// KV pages that hold drift, for cache tensors.
    pub pages_failing: Vec<usize>,
    /// What the drift looks like, in words, most specific first.
    pub notes: Vec<String>,
    /// Where its marks lie, when that was asked for; no part of the JSON.
    #[serde(skip)]
    pub map: Option<Box<TensorMap>>,
}

impl TensorReport {
    /// A report that counts nothing yet.
    #[must_use]
    pub fn new(name: &str, verdict: Verdict) -> Self {
        Self {
            name: name.to_owned(),
            verdict,
            forced: false,
            elements: 0,
            exact: 0,
            explained: 0,
            explained_flips: 0,
            explained_ties: 0,
            unexplained: 0,
            nonfinite: 0,
            exactly_half: 0,
            worst: None,
            worst_elements: Vec::new(),
            first: None,
            rows_failing: Vec::new(),
            heads_failing: Vec::new(),
            pages_failing: Vec::new(),
            notes: Vec::new(),
            map: None,
        }
    }
}

/// One element and where in the batch it lies.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Located {
    /// The element.
    #[serde(flatten)]
    pub element: Element,
    /// Physical row of the batch.
    pub row: usize,
    /// Query head, or KV head of keys and values, of tensors that are laid out by head.
    pub head: Option<usize>,
    /// Column inside the head.
    pub channel: Option<usize>,
    /// KV page, of what is written into a cache.
    pub page: Option<usize>,
    /// Slot, of what is written into a cache.
    pub slot: Option<usize>,
}

/// One element, both sides.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Element {
    /// Its index in the captured tensor.
    pub index: Vec<usize>,
    /// What the device gave.
    pub device: Number,
    /// What the contract gives.
    pub reference: Number,
    /// The device's bit pattern, `0x`-prefixed.
    pub device_bits: String,
    /// The reference's bit pattern, `0x`-prefixed.
    pub reference_bits: String,
    /// Distance in units in the last place of the tensor's own type; absent when a side is not finite, and for ids and
    /// cache rows.
    pub ulps: Option<u64>,
}

/// Rounding rules asked for and found.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PolicyReport {
    /// What the device was held to: `auto`, `production`, `rne`, or a file's name.
    pub asked: String,
    /// The rule seen at each site, or `not exercised`.
    pub rules: std::collections::BTreeMap<String, String>,
    /// Exact ties seen at each site that had any.
    pub ties: std::collections::BTreeMap<String, u64>,
    /// Sites whose rule is not the one asked for, each with what was found.
    pub violations: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_that_could_not_be_run_is_unjudged_and_says_why() {
        let case = cases::new_case(cases::NewCase::named("t", "mini").unwrap()).unwrap();
        let report = CaseReport::unjudged(&case, "device", "the device hangs");
        assert_eq!((report.verdict, report.name.as_str()), (Verdict::Unjudged, "t"));
        assert!(report.checks.iter().all(|check| check.verdict == Verdict::Unjudged));
        assert_eq!((report.checks[0].name.as_str(), report.checks[0].detail.as_str()), ("device", "the device hangs"));
        assert_eq!(report.coverage, ["the device hangs"]);
        assert_eq!(GateReport::new(vec![report]).verdict, Verdict::Unjudged);
    }
}
