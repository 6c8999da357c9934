//! The reference at work: sequences for a new golden, the spread of every gap over sampled devices, and a device's own
//! tokens followed step by step.

use ndarray::{Array2, ArrayView1};
use reference::generate::{Choice, Decoder, GenerateError, Limits, Sequence};
use reference::model::Weights;
use reference::{Freedom, Policy};

use super::golden::{Candidate, Row, Step, Stop};
use super::judge::{Follow, Forced};
use super::spread::root_mean_square;
use crate::judge::Progress;

/// A model and the way to run it.
pub struct Reference<'a, W> {
    /// The model.
    pub weights: &'a W,
    /// RoPE cosines and sines, FP32 `[max_seq_len or more, D]`.
    pub rope: [Array2<f32>; 2],
    /// Where sequences end.
    pub limits: Limits,
    /// How to round. Its freedom is not looked at.
    pub policy: Policy,
    /// Sampled devices behind every spread.
    pub samples: u32,
    /// Sees what is at work.
    pub progress: &'a dyn Progress,
}

/// A row's prompt and the tokens fed to it.
struct Fed<'a> {
    prompt: &'a [usize],
    tokens: Option<&'a [usize]>,
}

impl<W: Weights> Reference<'_, W> {
    /// The greedy sequences of 1 to 16 prompts, every step with its spreads.
    ///
    /// # Errors
    /// Prompts or limits that cannot be run, logits that are NaN.
    pub fn record(&self, prompts: &[Vec<usize>]) -> Result<Vec<Row>, GenerateError> {
        let sequences = self.generate(prompts)?;
        let tokens: Vec<Vec<usize>> = sequences.iter().map(Sequence::tokens).collect();
        let forced: Vec<Forced<'_>> =
            prompts.iter().zip(&tokens).map(|(prompt, tokens)| Forced { prompt, tokens }).collect();
        let steps = self.spreads(&forced, &choices(&sequences))?;
        Ok(rows(&sequences, steps))
    }

    /// The greedy sequences alone, with no spread: enough to compare a second run bit for bit.
    ///
    /// # Errors
    /// As [`Reference::record`].
    pub fn repeat(&self, prompts: &[Vec<usize>]) -> Result<Vec<Row>, GenerateError> {
        let sequences = self.generate(prompts)?;
        let plain = |choice: &Choice| Step {
            top: choice.top.iter().map(|&(id, logit)| Candidate { id, logit, spread: 0.0 }).collect(),
        };
        let steps = sequences.iter().map(|row| row.choices.iter().map(plain).collect()).collect();
        Ok(rows(&sequences, steps))
    }

    fn generate(&self, prompts: &[Vec<usize>]) -> Result<Vec<Sequence>, GenerateError> {
        let rows: Vec<Fed<'_>> = prompts.iter().map(|prompt| Fed { prompt, tokens: None }).collect();
        self.run(&rows, Freedom::Canonical, "the reference", &mut |_, _, _| {})
    }

    /// The steps whose choices on these tokens are `choices`, with the spread of each candidate.
    fn spreads(&self, rows: &[Forced<'_>], choices: &[Vec<Choice>]) -> Result<Vec<Vec<Step>>, GenerateError> {
        let fed: Vec<Fed<'_>> = rows.iter().map(|row| Fed { prompt: row.prompt, tokens: Some(row.tokens) }).collect();
        // Squares of the changes of each row's, step's and candidate's gap, added up in the order of the seeds.
        let mut squares: Vec<Vec<Vec<f64>>> =
            choices.iter().map(|row| row.iter().map(|choice| vec![0.0; choice.top.len()]).collect()).collect();
        for seed in 0..u64::from(self.samples) {
            let title = format!("sampled device {} of {}", seed + 1, self.samples);
            self.run(&fed, Freedom::Sampled { seed }, &title, &mut |row, step, logits| {
                let (Some(choice), Some(squares)) = (
                    choices.get(row).and_then(|row| row.get(step)),
                    squares.get_mut(row).and_then(|row| row.get_mut(step)),
                ) else {
                    return;
                };
                for (square, change) in squares.iter_mut().zip(changes(choice, logits)) {
                    *square += change * change;
                }
            })?;
        }
        let step = |(choice, squares): (&Choice, &Vec<f64>)| Step {
            top: choice
                .top
                .iter()
                .zip(squares)
                .map(|(&(id, logit), &square)| Candidate { id, logit, spread: root_mean_square(square, self.samples) })
                .collect(),
        };
        Ok(choices.iter().zip(&squares).map(|(row, squares)| row.iter().zip(squares).map(step).collect()).collect())
    }

    fn run(
        &self,
        rows: &[Fed<'_>],
        freedom: Freedom,
        title: &str,
        observe: &mut dyn FnMut(usize, usize, ArrayView1<'_, f32>),
    ) -> Result<Vec<Sequence>, GenerateError> {
        let prompts = rows.iter().map(|row| row.prompt.to_vec()).collect();
        let policy = self.policy.clone().under(freedom);
        let mut decoder = Decoder::new(self.weights, self.rope.clone(), prompts, self.limits.clone(), policy)?;
        for (row, fed) in rows.iter().enumerate() {
            if let Some(tokens) = fed.tokens {
                decoder.force(row, tokens.to_vec())?;
            }
        }
        let mut step = 0;
        self.progress.step(title);
        while decoder.advance_observed(observe)? {
            step += 1;
            self.progress.step(&format!("{title}, step {step}"));
        }
        Ok(decoder.sequences().to_vec())
    }
}

impl<W: Weights> Follow for Reference<'_, W> {
    fn follow(&mut self, rows: &[Forced<'_>]) -> Result<Vec<Vec<Step>>, GenerateError> {
        let fed: Vec<Fed<'_>> = rows.iter().map(|row| Fed { prompt: row.prompt, tokens: Some(row.tokens) }).collect();
        let sequences =
            self.run(&fed, Freedom::Canonical, "the reference on the device's tokens", &mut |_, _, _| {})?;
        self.spreads(rows, &choices(&sequences))
    }
}

fn choices(sequences: &[Sequence]) -> Vec<Vec<Choice>> {
    sequences.iter().map(|row| row.choices.clone()).collect()
}

/// By how much the gap of each candidate to the chosen one differs in `logits`. Where the difference is that of
/// infinities nothing can be said, and the change has no end.
fn changes<'a>(choice: &'a Choice, logits: ArrayView1<'a, f32>) -> impl Iterator<Item = f64> + 'a {
    let at = move |id: usize| logits.get(id).copied().map_or(f64::NAN, f64::from);
    let best = choice.top.first().copied();
    choice.top.iter().enumerate().map(move |(index, &(id, logit))| {
        let Some((best, best_logit)) = best.filter(|_| index > 0) else { return 0.0 };
        let change = (at(id) - at(best)) - (f64::from(logit) - f64::from(best_logit));
        if change.is_nan() { f64::INFINITY } else { change }
    })
}

fn rows(sequences: &[Sequence], steps: Vec<Vec<Step>>) -> Vec<Row> {
    use reference::generate::Stop as Ended;
    let row = |(sequence, steps): (&Sequence, Vec<Step>)| Row {
        prompt_ids: sequence.prompt.clone(),
        prompt: None,
        text: None,
        stop: match sequence.stop {
            Some(Ended::StopId(_)) => Stop::Eos,
            Some(Ended::MaxSeqLen) => Stop::MaxSeqLen,
            Some(Ended::MaxNewTokens | Ended::Forced) | None => Stop::MaxNewTokens,
        },
        steps,
    };
    sequences.iter().zip(steps).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;
    use crate::tokens::golden::tests::golden;
    use crate::tokens::report::StepVerdict;
    use crate::tokens::testing::{Model, model};
    use crate::tokens::{Check, Dump, Kind, check};

    #[test]
    fn spreads_come_from_sampled_devices_and_repeat() {
        let Model { checkpoint, rope, .. } = &model();
        let limits = Limits { max_new_tokens: 6, max_seq_len: 64, stop_ids: vec![] };
        let reference = Reference {
            weights: checkpoint,
            rope: rope.clone(),
            limits,
            policy: Policy::production(),
            samples: 4,
            progress: &(),
        };
        let prompts = [vec![3, 1, 4, 1, 5], vec![9, 2]];
        let rows = reference.record(&prompts).unwrap();
        assert_eq!(rows, reference.record(&prompts).unwrap());
        assert_eq!(rows.iter().map(|row| row.steps.len()).collect::<Vec<_>>(), [6, 6]);
        let spreads = || rows.iter().flat_map(|row| &row.steps).map(Step::spread);
        // Later steps see other roundings; a freedom that moved nothing at all would be none.
        assert!(spreads().any(|spread| spread > 0.0) && spreads().all(|spread| spread < 1.0));
        // A row does not depend on the one beside it.
        assert_eq!(reference.record(&prompts[..1]).unwrap()[0], rows[0]);
        let plain = reference.repeat(&prompts).unwrap();
        assert!(plain.iter().zip(&rows).all(|(plain, row)| plain.token_ids() == row.token_ids()));
    }

    #[test]
    fn following_the_own_tokens_gives_the_own_steps() {
        let Model { checkpoint, rope, .. } = &model();
        let limits = Limits { max_new_tokens: 5, max_seq_len: 64, stop_ids: vec![] };
        let mut reference = Reference {
            weights: checkpoint,
            rope: rope.clone(),
            limits,
            policy: Policy::rne(),
            samples: 2,
            progress: &(),
        };
        let prompt = vec![3, 1, 4];
        let rows = reference.record(std::slice::from_ref(&prompt)).unwrap();
        let tokens = rows[0].token_ids();
        let followed = reference.follow(&[Forced { prompt: &prompt, tokens: &tokens }]).unwrap();
        assert_eq!(followed[0], rows[0].steps);
        // Another token changes what follows it, and nothing before.
        let mut other = tokens.clone();
        other[2] = (other[2] + 1) % 90;
        let followed = reference.follow(&[Forced { prompt: &prompt, tokens: &other }]).unwrap();
        assert_eq!(followed[0][..3], rows[0].steps[..3]);
        assert_ne!(followed[0][3..], rows[0].steps[3..]);
    }

    #[test]
    fn right_devices_never_fail_and_a_wrong_one_does() {
        let Model { checkpoint, rope, .. } = &model();
        let limits = Limits { max_new_tokens: 24, max_seq_len: 64, stop_ids: vec![] };
        let policy = Policy::production();
        let mut reference = Reference {
            weights: checkpoint,
            rope: rope.clone(),
            limits: limits.clone(),
            policy: policy.clone(),
            samples: 16,
            progress: &(),
        };
        let prompts: Vec<Vec<usize>> = (0..16).map(|row| vec![row, 3 * row + 1]).collect();
        let mut golden = golden(reference.record(&prompts).unwrap());
        golden.limits = limits.clone();
        golden.model.geometry = checkpoint.geometry().clone();
        // Devices whose freedoms no sample has taken, each on its own path where it leaves the golden's.
        for seed in 1000..1006 {
            let policy = policy.clone().under(Freedom::Sampled { seed });
            let mut device = Decoder::new(checkpoint, rope.clone(), prompts.clone(), limits.clone(), policy).unwrap();
            while device.advance().unwrap() {}
            let ids = |row: &Sequence| row.tokens().into_iter().map(|id| id as i64).collect();
            let dump = Dump { rows: device.sequences().iter().map(ids).collect(), ..Dump::default() };
            let job = Check { golden: &golden, dump: &dump, row: None, before: None, decode: None };
            let report = check(&job, Some(&mut reference)).unwrap();
            assert_eq!(report.verdict, Verdict::Pass, "{seed}: {:?}", report.findings);
        }
        // One that takes the last candidate where the step is firm.
        let far = golden.rows[0].steps.iter().position(|step| step.kind(&golden) == Kind::Firm).unwrap();
        let mut ids: Vec<i64> = golden.rows[0].token_ids().into_iter().map(|id| id as i64).collect();
        ids[far] = golden.rows[0].steps[far].top.last().unwrap().id as i64;
        let dump = Dump { rows: vec![ids], ..Dump::default() };
        let job = Check { golden: &golden, dump: &dump, row: Some(0), before: None, decode: None };
        let report = check(&job, Some(&mut reference)).unwrap();
        assert_eq!((report.verdict, report.findings[0].step), (Verdict::Fail, far));
        assert!(report.steps.iter().all(|step| step.verdict != StepVerdict::Unjudged));
    }

    #[test]
    fn what_has_no_difference_has_no_end() {
        let choice = Choice { top: vec![(0, f32::INFINITY), (1, f32::INFINITY), (2, 1.0)] };
        let logits = ndarray::array![f32::INFINITY, f32::INFINITY, 2.0];
        let found: Vec<f64> = changes(&choice, logits.view()).collect();
        assert_eq!(found, [0.0, f64::INFINITY, f64::INFINITY]);
        let step = Step {
            top: vec![
                Candidate { id: 1, logit: 3.0, spread: 0.0 },
                Candidate { id: 2, logit: 1.0, spread: f32::INFINITY },
            ],
        };
        assert_eq!(step.kind(&golden(vec![])), Kind::NearTie);
    }
}
