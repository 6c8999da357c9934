//! What a check of generated tokens found, as plain data. The JSON of `docs/tokens.md` is this module serialized.

use serde::{Deserialize, Serialize};

use crate::report::{MergedReport, Number, ShardReport, Verdict};

/// Checks of many goldens, or of the part of them that one shard has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokensRun {
    /// The verdict on all of it.
    pub verdict: Verdict,
    /// Which part of a run that was split over machines this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardReport>,
    /// The shards that were joined to this report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<MergedReport>,
    /// What to know besides.
    pub remarks: Vec<String>,
    /// One entry a golden, sorted by name.
    pub goldens: Vec<TokensReport>,
}

impl TokensRun {
    /// The report on several goldens.
    #[must_use]
    pub fn new(goldens: Vec<TokensReport>) -> Self {
        let verdict = Verdict::worst(goldens.iter().map(|golden| golden.verdict));
        Self { verdict, shard: None, merged: None, remarks: Vec::new(), goldens }
    }
}

/// A check of one dump, or of a second run of the reference, against a golden.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TokensReport {
    /// The verdict on all of it.
    pub verdict: Verdict,
    /// The golden's name.
    pub golden: String,
    /// Where the tokens came from.
    pub source: String,
    /// Every step that was looked at, rows in order, each from its first step.
    pub steps: Vec<StepReport>,
    /// What failed, the first of each row, and what decides nothing.
    pub findings: Vec<Finding>,
    /// What to know besides.
    pub remarks: Vec<String>,
    /// Differing texts, where a tokenizer was there.
    pub texts: Vec<TextChange>,
    /// Time a token, where the dump carries it.
    pub timing: Option<Timing>,
}

impl TokensReport {
    /// The verdict that follows from steps and findings.
    #[must_use]
    pub fn found(&self) -> Verdict {
        self.found_in(|_| true)
    }

    /// The same of one row.
    #[must_use]
    pub fn found_of(&self, row: usize) -> Verdict {
        self.found_in(|of| of == row)
    }

    fn found_in(&self, asked: impl Fn(usize) -> bool) -> Verdict {
        let steps = || self.steps.iter().filter(|step| asked(step.row));
        let mut findings = self.findings.iter().filter(|finding| asked(finding.row));
        if steps().any(|step| step.verdict == StepVerdict::Fail) || findings.any(Finding::fails) {
            Verdict::Fail
        } else if steps().all(|step| matches!(step.verdict, StepVerdict::Agree | StepVerdict::NearTie))
            && steps().next().is_some()
        {
            Verdict::Pass
        } else {
            Verdict::Unjudged
        }
    }
}

/// How one token compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepVerdict {
    /// The reference's token.
    Agree,
    /// Another one, which the permitted freedoms can bring to the top.
    NearTie,
    /// Nothing permitted explains it.
    Fail,
    /// Nothing to judge it by.
    Unjudged,
}

/// One step of one row.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepReport {
    /// The row of the golden.
    pub row: usize,
    /// The step, from 0.
    pub step: usize,
    /// The device's id; `null` where it gave none.
    pub device: Option<i64>,
    /// The reference's id after the tokens before it; `null` where it has none.
    pub reference: Option<usize>,
    /// By how much the reference's best logit exceeds its second.
    pub margin: Option<Number>,
    /// The verdict.
    pub verdict: StepVerdict,
    /// Logit of the device's id in the reference, where known.
    pub device_logit: Option<Number>,
    /// Logit of the reference's id.
    pub reference_logit: Option<Number>,
    /// How far below the best the permitted freedoms reach for the device's id, where it is not the best.
    pub bound: Option<Number>,
    /// Whether the reference was run on the device's own tokens, which had left the golden's.
    pub forced: bool,
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// An id that a right device may choose as well.
    NearTie,
    /// An id that it may not.
    WrongToken,
    /// Ids after one that ends the row.
    PastStop,
    /// An id that the stored vocabulary has only as padding.
    PaddingVocabulary,
    /// An id that is in no vocabulary.
    OutsideVocabulary,
    /// The same id at every step.
    ConstantStream,
    /// The row ends too early.
    TooShort,
    /// The row goes on past its limit.
    TooLong,
    /// A row that the golden does not have, or that the dump does not have.
    Rows,
    /// The ids have the wrong element type.
    ElementType,
    /// A second run of the reference gave other bits.
    Reference,
}

/// Something to look at.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Finding {
    /// The row.
    pub row: usize,
    /// The step.
    pub step: usize,
    /// What it is about.
    pub kind: FindingKind,
    /// What was found, with ids and logits, and what to do.
    pub message: String,
    /// Whether the earlier dump has the same tokens up to here; `null` where there is none.
    pub already_before: Option<bool>,
}

impl Finding {
    /// Whether the check fails by it.
    #[must_use]
    pub fn fails(&self) -> bool {
        self.kind != FindingKind::NearTie
    }
}

/// The text of a row, where it differs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TextChange {
    /// The row.
    pub row: usize,
    /// The golden's text.
    pub reference: String,
    /// The device's text.
    pub device: String,
    /// Both in one: `[-gone-]`, `{+new+}`.
    pub diff: String,
}

/// Time a token. It is never part of a verdict.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timing {
    /// Median seconds a token.
    pub median_seconds: f64,
    /// That of the earlier dump.
    pub before_median_seconds: Option<f64>,
    /// Now over before.
    pub ratio: Option<f64>,
}
