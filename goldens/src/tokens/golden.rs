//! A golden: what the reference generates from some prompts, with the margin of every choice and how far the
//! permitted freedoms move it, so that a step is `firm` or a `near_tie` (`docs/tokens.md`, A golden).

use reference::generate::Limits;
use reference::{Geometry, Policy};

use super::spread::reach;

/// Version of the file format.
pub const FORMAT: u64 = 1;

/// Generated sequences, and all that fixes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Golden {
    /// Its name, which is that of its file.
    pub name: String,
    /// The program that made it, e.g. `assay 0.1.0`.
    pub tool: String,
    /// Why and when it became the standard; `None` while it is pending.
    pub accepted: Option<Accepted>,
    /// The model.
    pub model: Model,
    /// How the reference rounded; its freedom is the canonical one.
    pub policy: Policy,
    /// Where sequences end.
    pub limits: Limits,
    /// Sampled devices behind every spread.
    pub samples: u32,
    /// Probability, for one step of a right device, that it is called a failure.
    pub false_alarm: f64,
    /// The sequences, one a prompt.
    pub rows: Vec<Row>,
}

/// Who made a golden the standard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Why.
    pub reason: String,
    /// When, `YYYY-MM-DD` in UTC.
    pub date: String,
}

/// The model of a golden.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// What it is called: its directory's name.
    pub name: String,
    /// SHA-256 over everything that fixes its outputs, in hexadecimal.
    pub fingerprint: String,
    /// Its sizes.
    pub geometry: Geometry,
}

/// The sequence of one prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Token ids of the prompt.
    pub prompt_ids: Vec<usize>,
    /// The prompt as text, where a tokenizer was there.
    pub prompt: Option<String>,
    /// What was generated as text, where a tokenizer was there.
    pub text: Option<String>,
    /// Why it ended.
    pub stop: Stop,
    /// One step a generated token.
    pub steps: Vec<Step>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Its last token is a stop id.
    Eos,
    /// It has `max_new_tokens` tokens.
    MaxNewTokens,
    /// Prompt and tokens have reached `max_seq_len`.
    MaxSeqLen,
}

impl Stop {
    const ALL: [Self; 3] = [Self::Eos, Self::MaxNewTokens, Self::MaxSeqLen];

    /// The word in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Eos => "eos",
            Self::MaxNewTokens => "max_new_tokens",
            Self::MaxSeqLen => "max_seq_len",
        }
    }

    /// The reason of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stop| stop.name() == name)
    }
}

/// One choice: the largest logits of the real vocabulary, the chosen first.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The candidates, largest logit first, of equal ones the lower id first. Never empty.
    pub top: Vec<Candidate>,
}

/// A token that a step may have chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Its id.
    pub id: usize,
    /// Its logit in the reference, FP32, finite.
    pub logit: f32,
    /// Root mean square change of its gap to the chosen one over the sampled devices; 0 for the chosen one.
    pub spread: f32,
}

/// Whether a right device may choose otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It may not.
    Firm,
    /// Permitted freedoms can bring another candidate to the top.
    NearTie,
}

impl Kind {
    /// The word in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Firm => "firm",
            Self::NearTie => "near_tie",
        }
    }
}

/// What a step says about a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// It is the reference's.
    Same,
    /// The freedoms can close its gap.
    Permitted {
        /// How far its logit lies below the best.
        gap: f64,
        /// How far they reach.
        bound: f64,
    },
    /// They cannot.
    Wrong {
        /// Its logit, where it is among the candidates.
        logit: Option<f32>,
        /// How far it lies below the best, at least.
        gap: f64,
        /// How far the freedoms reach.
        bound: f64,
    },
    /// It is none of the candidates, but even the last of them is within reach: its gap is not known.
    Unknown {
        /// How far it lies below the best, at least.
        gap: f64,
        /// How far the freedoms reach.
        bound: f64,
    },
}

impl Step {
    /// The chosen id.
    #[must_use]
    pub fn id(&self) -> usize {
        self.top.first().map_or(0, |best| best.id)
    }

    /// The chosen id's logit.
    #[must_use]
    pub fn logit(&self) -> f32 {
        self.top.first().map_or(f32::NAN, |best| best.logit)
    }

    /// By how much the chosen logit exceeds the next, in FP32; infinite where there is no other.
    #[must_use]
    pub fn margin(&self) -> f32 {
        self.top.get(1).map_or(f32::INFINITY, |second| self.logit() - second.logit)
    }

    /// The spread of the margin.
    #[must_use]
    pub fn spread(&self) -> f32 {
        self.top.get(1).map_or(0.0, |second| second.spread)
    }

    fn gap(&self, candidate: &Candidate) -> f64 {
        f64::from(self.logit()) - f64::from(candidate.logit)
    }

    fn reach(&self, golden: &Golden) -> f64 {
        reach(golden.samples, golden.false_alarm, self.top.len().saturating_sub(1))
    }

    /// Whether a right device may choose otherwise.
    #[must_use]
    pub fn kind(&self, golden: &Golden) -> Kind {
        let reach = self.reach(golden);
        let open = |other: &Candidate| self.gap(other) <= reach * f64::from(other.spread);
        if self.top.iter().skip(1).any(open) { Kind::NearTie } else { Kind::Firm }
    }

    /// What the step says about a token of the real vocabulary.
    #[must_use]
    pub fn judge(&self, id: usize, golden: &Golden) -> Choice {
        if id == self.id() {
            return Choice::Same;
        }
        let reach = self.reach(golden);
        if let Some(found) = self.top.iter().find(|candidate| candidate.id == id) {
            let (gap, bound) = (self.gap(found), reach * f64::from(found.spread));
            return if gap <= bound {
                Choice::Permitted { gap, bound }
            } else {
                Choice::Wrong { logit: Some(found.logit), gap, bound }
            };
        }
        // A token below the candidates lies at least as far down as the last of them; its spread is not known, and is
        // taken to be no larger than the largest known one.
        let gap = self.top.last().map_or(0.0, |last| self.gap(last));
        let bound = reach * self.top.iter().map(|candidate| f64::from(candidate.spread)).fold(0.0, f64::max);
        if gap <= bound { Choice::Unknown { gap, bound } } else { Choice::Wrong { logit: None, gap, bound } }
    }
}

impl Row {
    /// The generated ids.
    #[must_use]
    pub fn token_ids(&self) -> Vec<usize> {
        self.steps.iter().map(Step::id).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn step(top: &[(usize, f32, f32)]) -> Step {
        Step { top: top.iter().map(|&(id, logit, spread)| Candidate { id, logit, spread }).collect() }
    }

    pub fn row(prompt: &[usize], stop: Stop, steps: Vec<Step>) -> Row {
        Row { prompt_ids: prompt.to_vec(), prompt: None, text: None, stop, steps }
    }

    pub fn golden(rows: Vec<Row>) -> Golden {
        let mut geometry = Geometry::named("mini").unwrap();
        (geometry.vocab_size, geometry.real_vocab_size) = (110, 100);
        Golden {
            name: "small".into(),
            tool: "assay 0.1.0".into(),
            accepted: None,
            model: Model { name: "tiny".into(), fingerprint: "ab".repeat(32), geometry },
            policy: Policy::production(),
            limits: Limits { max_new_tokens: 4, max_seq_len: 256, stop_ids: vec![98, 99] },
            samples: 16,
            false_alarm: 1e-6,
            rows,
        }
    }

    #[test]
    fn only_what_the_freedoms_reach_is_permitted() {
        let golden = golden(vec![]);
        let reach = reach(16, 1e-6, 3);
        let step = step(&[(5, 3.0, 0.0), (7, 2.5, 0.1), (9, 2.0, 0.1), (11, 1.0, 0.001)]);
        assert!(reach > 5.0 && reach < 10.0, "{reach}");
        assert_eq!(step.judge(5, &golden), Choice::Same);
        assert!(matches!(step.judge(7, &golden), Choice::Permitted { gap, .. } if gap == 0.5));
        assert!(matches!(step.judge(9, &golden), Choice::Wrong { logit: Some(2.0), gap, .. } if gap == 1.0));
        assert!(matches!(step.judge(11, &golden), Choice::Wrong { .. }));
        assert!(matches!(step.judge(50, &golden), Choice::Wrong { logit: None, gap, .. } if gap == 2.0));
        assert_eq!(step.kind(&golden), Kind::NearTie);
    }

    #[test]
    fn equal_logits_are_a_near_tie_whatever_the_spread() {
        let golden = golden(vec![]);
        let tie = step(&[(105, 3.0, 0.0), (243, 3.0, 0.0)]);
        assert_eq!((tie.margin(), tie.kind(&golden)), (0.0, Kind::NearTie));
        let alone = step(&[(1, 3.0, 0.0)]);
        assert_eq!((alone.margin(), alone.kind(&golden)), (f32::INFINITY, Kind::Firm));
    }

    #[test]
    fn an_id_below_candidates_that_are_all_in_reach_is_unknown() {
        let golden = golden(vec![]);
        let crowd = step(&[(1, 3.0, 0.0), (2, 2.9, 0.2), (3, 2.8, 0.2)]);
        assert!(matches!(crowd.judge(60, &golden), Choice::Unknown { .. }));
    }
}
