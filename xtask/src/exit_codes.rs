//! Exit codes, the same everywhere in the tool (`docs/bundles.md`, The command).

use std::process::ExitCode;

use goldens::report::Verdict;

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
