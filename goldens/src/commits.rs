//! The commit that broke a kernel: what runs of one commit say together, and the report on a search. Which commit is
//! tried next, and how a commit is run, is for the front end; a check that cannot be trusted names no commit.

use serde::Serialize;

use crate::report::{Cause, Verdict};

/// What one run of a commit showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mark {
    /// The kernel computes what it should.
    Good,
    /// An accuracy or contract failure.
    Bad,
    /// It could not be judged: no build, a device fault, a missing capture; of a commit also that its runs disagree.
    Skip,
}

impl Mark {
    /// The word, which is that of `git bisect` too.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
            Self::Skip => "skip",
        }
    }
}

/// One run of a commit.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// What it showed.
    pub verdict: Mark,
    /// Why it could not be judged, or what failed; nothing for a run that passed.
    pub detail: Option<String>,
    /// The first tensor at which drift was made.
    pub first_divergence: Option<String>,
    /// The named cause, where the gate looked for one and found it.
    pub cause: Option<Cause>,
}

/// What the runs of a commit so far say together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Another run is needed.
    Again,
    /// Enough is known.
    Done {
        /// What the commit is.
        verdict: Mark,
        /// Whether some runs passed and others failed.
        flaky: bool,
        /// Why it is skipped.
        reason: Option<String>,
    },
}

/// Decides over the runs of a commit, of which `repeat` have to agree.
///
/// Runs that agree decide at once. Where a run disagrees, or some could not be judged, as many again are made: a commit
/// of which one run passes and another fails is skipped and called flaky, because neither verdict could be trusted; one
/// whose faults pass by is judged by the runs that could be.
#[must_use]
pub fn decide(runs: &[Run], repeat: usize) -> Decision {
    let repeat = repeat.max(1);
    let count = |mark| runs.iter().filter(|run| run.verdict == mark).count();
    let [good, bad, skip] = [Mark::Good, Mark::Bad, Mark::Skip].map(count);
    let done = |verdict, flaky, reason| Decision::Done { verdict, flaky, reason };
    let most = repeat.saturating_mul(2);
    match (good, bad) {
        _ if runs.len() < repeat => Decision::Again,
        (0, 0) => done(Mark::Skip, false, runs.iter().find_map(|run| run.detail.clone())),
        (_, 0) if good >= repeat => done(Mark::Good, false, None),
        (0, _) if bad >= repeat => done(Mark::Bad, false, None),
        _ if runs.len() < most => Decision::Again,
        (1.., 1..) => {
            done(Mark::Skip, true, Some(format!("flaky: {bad} of {} runs failed, {good} passed", runs.len())))
        }
        _ => done(Mark::Skip, false, Some(format!("{skip} of {} runs could not be judged", runs.len()))),
    }
}

/// A commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Commit {
    /// Its hash.
    pub hash: String,
    /// The first line of its message.
    pub subject: String,
    /// Who wrote it.
    pub author: String,
    /// When it was written, ISO 8601.
    pub date: String,
}

/// A commit that was tried.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Which.
    pub commit: Commit,
    /// What it is.
    pub verdict: Mark,
    /// Whether some of its runs passed and others failed.
    pub flaky: bool,
    /// Why it is skipped.
    pub reason: Option<String>,
    /// Its runs; none where it does not build.
    pub runs: Vec<Run>,
    /// What its commands said.
    pub log: String,
    /// Wall time, in seconds.
    pub seconds: f64,
}

impl Tried {
    /// The first run that failed.
    #[must_use]
    pub fn failure(&self) -> Option<&Run> {
        self.runs.iter().find(|run| run.verdict == Mark::Bad)
    }
}

/// How a search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The first bad commit is known.
    FirstBad,
    /// It is one of several, which could not be told apart because some of them could not be judged.
    Suspects,
    /// The commit that was said to be good fails.
    GoodEndFails,
    /// The commit that was said to be bad passes.
    BadEndPasses,
    /// One of the two could not be judged.
    EndNotJudged,
    /// A commit's bundle is malformed.
    Malformed,
    /// Somebody ended the search.
    Interrupted,
}

impl Outcome {
    /// The verdict that the exit code follows.
    #[must_use]
    pub fn verdict(self) -> Verdict {
        match self {
            Self::FirstBad => Verdict::Pass,
            Self::GoodEndFails | Self::BadEndPasses => Verdict::Fail,
            Self::Malformed => Verdict::Error,
            Self::Suspects | Self::EndNotJudged | Self::Interrupted => Verdict::Unjudged,
        }
    }
}

/// A search.
#[derive(Clone, Debug, Serialize)]
pub struct BisectReport {
    /// `pass` where the first bad commit was found.
    pub verdict: Verdict,
    /// How it ended.
    pub outcome: Outcome,
    /// The same in a sentence.
    pub message: String,
    /// The repository.
    pub repository: String,
    /// The commit that was said to be good.
    pub good: Commit,
    /// The commit that was said to be bad.
    pub bad: Commit,
    /// The first bad commit, where it was found.
    pub first_bad: Option<Commit>,
    /// The commits of which one is the first bad one, where skipped ones hide it; newest first.
    pub suspects: Vec<Commit>,
    /// The first divergence of the first bad commit, or of the oldest one known to be bad.
    pub first_divergence: Option<String>,
    /// What failed there, in words.
    pub detail: Option<String>,
    /// Its named cause.
    pub cause: Option<Cause>,
    /// Every commit that was tried, in order; the two ends first.
    pub tried: Vec<Tried>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(marks: &str) -> Vec<Run> {
        let run = |mark| {
            let verdict = match mark {
                'g' => Mark::Good,
                'b' => Mark::Bad,
                _ => Mark::Skip,
            };
            let detail = (verdict == Mark::Skip).then(|| "device fault".to_owned());
            Run { verdict, detail, first_divergence: None, cause: None }
        };
        marks.chars().map(run).collect()
    }

    #[test]
    fn runs_that_agree_decide_and_others_are_repeated() {
        use Mark::{Bad, Good, Skip};
        for (marks, repeat, decided) in [
            ("", 2, None),
            ("g", 2, None),
            ("gg", 2, Some((Good, false))),
            ("bb", 2, Some((Bad, false))),
            ("xx", 2, Some((Skip, false))),
            ("g", 1, Some((Good, false))),
            ("b", 1, Some((Bad, false))),
            ("x", 1, Some((Skip, false))),
            ("gb", 2, None),
            ("gbg", 2, None),
            ("gbgg", 2, Some((Skip, true))),
            ("gxg", 2, Some((Good, false))),
            ("xbb", 2, Some((Bad, false))),
            ("gx", 2, None),
            ("gxxx", 2, Some((Skip, false))),
            ("gxxb", 2, Some((Skip, true))),
            ("g", 0, Some((Good, false))),
        ] {
            let decision = match decide(&runs(marks), repeat) {
                Decision::Again => None,
                Decision::Done { verdict, flaky, reason } => {
                    assert_eq!(reason.is_some(), verdict == Skip, "{marks}");
                    Some((verdict, flaky))
                }
            };
            assert_eq!(decision, decided, "{marks} of {repeat}");
        }
    }

    #[test]
    fn every_sequence_of_runs_comes_to_an_end() {
        for repeat in 1..4 {
            for code in 0..3_usize.pow(6) {
                let marks: String = (0..6).map(|place| ['g', 'b', 'x'][code / 3_usize.pow(place) % 3]).collect();
                let all = runs(&marks);
                let needed = (0..=6).find(|&length| decide(&all[..length], repeat) != Decision::Again).unwrap();
                assert!(needed <= 2 * repeat, "{marks} of {repeat}");
            }
        }
    }
}
