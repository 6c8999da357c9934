//! Shrinking (`docs/cases.md`): from a failing decode-layer case to a small one that fails at the same first
//! divergence. Greedy delta debugging: one reduction after the other is tried, those that cut most first, and kept
//! where the case still fails; what was refused once is not tried again. Nothing here is random, so that the same
//! answers lead to the same case.

mod reductions;

use std::collections::BTreeSet;

use cases::{Case, InputStore, Inputs};
use reference::{Deviation, Freedom};
use serde::Serialize;

use crate::judge::JudgeError;
use crate::power::{Bed, Shown};

/// What a device makes of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The gate fails; the first divergence.
    Fails(String),
    /// The gate passes.
    Passes,
    /// It could not be judged, and why.
    Unjudged(String),
}

/// A reduction that was kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// What was reduced: `active rows 16 -> 1`.
    pub what: String,
    /// The number of the try that kept it.
    pub at_try: u32,
}

/// A case that was made smaller.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// The smallest case that still fails in the same place.
    pub case: Case,
    /// The first divergence.
    pub at: String,
    /// What was reduced, in order.
    pub steps: Vec<Step>,
    /// Cases tried, the first one included.
    pub tries: u32,
    /// Of those, cases that could not be judged.
    pub unjudged: u32,
    /// Whether the number of tries ended the search before every reduction had been refused.
    pub cut_short: bool,
}

/// What came of it.
#[derive(Debug)]
pub enum Outcome {
    /// The case fails, and is now as small as it gets.
    Shrunk(Box<Shrunk>),
    /// The case does not fail as it is: the device's answer to it.
    NoFailure(Answer),
}

/// Makes a failing case smaller by asking `ask` what a device makes of each; at most `most` cases are tried. `ask` gets
/// what was reduced, and the case.
///
/// # Errors
/// Whatever ends `ask`.
pub fn shrink<E>(case: &Case, most: u32, mut ask: impl FnMut(&str, &Case) -> Result<Answer, E>) -> Result<Outcome, E> {
    let mut current = reductions::prepared(case);
    let at = match ask("the case as it is", &current)? {
        Answer::Fails(at) => at,
        other => return Ok(Outcome::NoFailure(other)),
    };
    let (mut tries, mut unjudged, mut steps) = (1, 0, Vec::new());
    let mut refused = BTreeSet::from([current.to_yaml()]);
    let mut cut_short = false;
    'search: loop {
        let before = steps.len();
        for kind in reductions::KINDS {
            // A kind is tried on what it has made of the case itself until it has nothing more to take.
            while let Some((what, smaller)) =
                kind(&current).into_iter().find(|(_, smaller)| !refused.contains(&smaller.to_yaml()))
            {
                if tries >= most {
                    cut_short = true;
                    break 'search;
                }
                tries += 1;
                refused.insert(smaller.to_yaml());
                match ask(&what, &smaller)? {
                    Answer::Fails(found) if found == at => {
                        steps.push(Step { what, at_try: tries });
                        current = smaller;
                    }
                    Answer::Unjudged(_) => unjudged += 1,
                    Answer::Fails(_) | Answer::Passes => {}
                }
            }
        }
        if steps.len() == before {
            break;
        }
    }
    Ok(Outcome::Shrunk(Box::new(Shrunk { case: current, at, steps, tries, unjudged, cut_short })))
}

/// What a device with a fault of the catalogue makes of a case. Inputs that cases share are kept in `store`.
///
/// # Errors
/// The inputs cannot be generated or judged.
pub fn planted(case: &Case, fault: &Deviation, store: &InputStore) -> Result<Answer, JudgeError> {
    let inputs = Inputs::generate(case, store)
        .map_err(|source| JudgeError::Inputs { case: case.name.clone(), source: source.into() })?;
    let bed = Bed::new(case, &inputs, Freedom::Sampled { seed: case.seed })?;
    Ok(match bed.shows(fault)? {
        Shown::Caught { at } => Answer::Fails(at),
        Shown::Unchanged | Shown::Permitted => Answer::Passes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cases::{NewCase, Padding, Poison};

    fn case() -> Case {
        let parameters = NewCase {
            active_batch: 3,
            seq_lens: vec![130, 77, 5],
            padding: Padding::Own,
            poison: Some(Poison::KvBeyondContextNan),
            ..NewCase::named("s", "mini").unwrap()
        };
        cases::new_case(parameters).unwrap()
    }

    fn shrunk(case: &Case, most: u32, fails: impl Fn(&Case) -> bool) -> Shrunk {
        let answer = |fails| if fails { Answer::Fails("here".into()) } else { Answer::Passes };
        let ask = |_: &str, case: &Case| Ok::<_, ()>(answer(fails(case)));
        match shrink(case, most, ask).unwrap() {
            Outcome::Shrunk(shrunk) => *shrunk,
            Outcome::NoFailure(answer) => panic!("{answer:?}"),
        }
    }

    #[test]
    fn what_no_failure_needs_is_removed() {
        let small = shrunk(&case(), 1000, |_| true);
        let batch = small.case.batch().unwrap();
        assert_eq!((batch.active, batch.seq_lens), (1, [1; 16]));
        assert_eq!((small.case.max_seq, small.case.pages, small.case.poison), (128, 1, None));
        assert!(small.case.tensors.values().all(|recipe| recipe.to_string() == "{recipe: zeros}"));
        assert!(!small.cut_short);
        // The kernels' tiling rules hold before and after.
        assert_eq!(small.case.geometry.tiling_violations(), Vec::<String>::new());
        assert_eq!((small.case.geometry.hidden_size, small.case.geometry.intermediate_size), (2560, 128));
        let text = small.case.to_yaml();
        assert_eq!(Case::parse(&text, &small.case.path).unwrap().to_yaml(), text);
    }

    #[test]
    fn what_a_failure_needs_stays() {
        let needs = |case: &Case| {
            let batch = case.batch().unwrap();
            batch.active >= 2 && batch.seq_lens[..batch.active].contains(&77) && case.poison.is_some()
        };
        let small = shrunk(&case(), 1000, needs);
        let batch = small.case.batch().unwrap();
        assert_eq!(batch.active, 2);
        let mut lengths = batch.seq_lens[..2].to_vec();
        lengths.sort_unstable();
        assert_eq!(lengths, [1, 77]);
        assert!(small.case.poison.is_some());
    }

    #[test]
    fn another_first_divergence_is_another_failure() {
        let ask = |_: &str, case: &Case| {
            let at = if case.batch().unwrap().active == 3 { "attn_out" } else { "normed_states" };
            Ok::<_, ()>(Answer::Fails(at.into()))
        };
        let Outcome::Shrunk(small) = shrink(&case(), 1000, ask).unwrap() else { panic!("it fails") };
        assert_eq!((small.at.as_str(), small.case.batch().unwrap().active), ("attn_out", 3));
    }

    #[test]
    fn tries_are_bounded_and_a_passing_case_is_not_shrunk() {
        let small = shrunk(&case(), 5, |_| true);
        assert_eq!((small.tries, small.cut_short), (5, true));
        let passes = shrink(&case(), 5, |_, _| Ok::<_, ()>(Answer::Passes)).unwrap();
        assert!(matches!(passes, Outcome::NoFailure(Answer::Passes)));
    }
}
