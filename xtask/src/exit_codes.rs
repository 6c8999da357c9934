//! Exit codes, the same everywhere in the tool (`docs/bundles.md`, The command).

use std::process::ExitCode;

use goldens::report::{GateReport, ShardReport, Verdict};

/// What the process ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// 0: every case passed, or the command did what it was asked.
    Pass,
    /// 1: an accuracy or contract failure was found.
    Failure,
    /// 2: the request or an input is wrong; nothing was judged.
    Refused,
    /// 125: could not be judged: a device fault, a missing capture. `git bisect run` skips it.
    Unjudged,
}

impl Code {
    /// The number.
    pub fn number(self) -> u8 {
        match self {
            Self::Pass => 0,
            Self::Failure => 1,
            Self::Refused => 2,
            Self::Unjudged => 125,
        }
    }

    /// What the number says.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::Pass => "every case passed",
            Self::Failure => "an accuracy or contract failure was found",
            Self::Refused => "the request or an input is wrong; nothing was judged",
            Self::Unjudged => "could not be judged",
        }
    }
}

/// What a run of the gate ends with, and what that says.
pub fn ending(report: &GateReport) -> (Code, String) {
    ending_of(report.shard, report.verdict, report.cases.is_empty(), "case")
}

/// What a run that may be a shard ends with, and what that says. A shard that no case falls to judged nothing, which
/// is no pass; but it must not fail the shards beside it: the whole run is judged where its shards are joined.
pub fn ending_of(shard: Option<ShardReport>, verdict: Verdict, empty: bool, what: &str) -> (Code, String) {
    match (shard, verdict) {
        (Some(_), Verdict::Unjudged) if empty => {
            (Code::Pass, format!("no {what} falls to this shard; report merge judges the whole run"))
        }
        (_, Verdict::Pass) => (Code::Pass, format!("every {what} passed")),
        _ => (verdict.into(), Code::from(verdict).meaning().to_owned()),
    }
}

impl From<Verdict> for Code {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Pass => Self::Pass,
            Verdict::Fail => Self::Failure,
            Verdict::Error => Self::Refused,
            Verdict::Unjudged => Self::Unjudged,
        }
    }
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        code.number().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_shard_ends_well_and_is_no_pass() {
        let shard = Some(ShardReport { index: 3, count: 3, cases_total: 2 });
        let empty = GateReport { shard, ..GateReport::new(Vec::new()) };
        assert_eq!((ending(&empty).0, empty.verdict), (Code::Pass, Verdict::Unjudged));
        assert_eq!(ending(&GateReport::new(Vec::new())).0, Code::Unjudged);
        assert_eq!(ending(&GateReport { shard, ..GateReport::refused("no") }).0, Code::Refused);
    }

    #[test]
    fn a_failure_wins_over_unjudged_and_unjudged_over_a_pass() {
        let code = |verdicts: &[Verdict]| Code::from(Verdict::worst(verdicts.iter().copied())).number();
        use Verdict::{Fail, Pass, Unjudged};
        assert_eq!(code(&[Pass, Pass]), 0);
        assert_eq!(code(&[Pass, Unjudged, Fail]), 1);
        assert_eq!(code(&[Unjudged, Pass]), 125);
        assert_eq!(code(&[Verdict::Error, Fail]), 2);
        // Nothing judged is not a pass.
        assert_eq!(code(&[]), 125);
    }
}
