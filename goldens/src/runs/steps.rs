//! The tokens themselves: logits, the two best ids and the greedy choice of every step, each against what the hidden
//! state that the device gave allows.

use std::collections::BTreeMap;

use device::{Captured, TokenCaptures};
use half::bf16;
use ndarray::{Array2, Array3, ArrayView1};

use super::choice::Choice;
use super::findings::{Findings, Pair};
use super::plan::Plan;
use crate::Mark;
use crate::only::{Only, TokenTensor};
use crate::report::{Number, StepVerdict, TensorReport, TokenStep};

/// What the device gave besides its caches, the contract's types only.
#[derive(Clone, Copy, Default)]
pub struct Given<'a> {
    /// INT64 `[rows, steps]`.
    pub token_ids: Option<&'a Array2<i64>>,
    /// INT64 `[rows, steps, 2]`.
    pub top2_ids: Option<&'a Array3<i64>>,
    /// FP32 `[rows, steps, 2]`.
    pub top2_logits: Option<&'a Array3<f32>>,
    /// BF16 `[all prompt tokens, H]`.
    pub prefill_hidden: Option<&'a Array2<bf16>>,
    /// BF16 `[decode steps, rows, H]`.
    pub decode_hidden: Option<&'a Array3<bf16>>,
}

/// A tensor whose element type is not the contract's: its name, what was found and what was expected.
pub type WrongType = (&'static str, String, &'static str);

impl<'a> Given<'a> {
    /// The tensors of a capture that a request looks at, and those of a wrong type.
    pub fn new(captures: &'a TokenCaptures, only: Option<&Only>) -> (Self, Vec<WrongType>) {
        fn values<'a, T>(
            (id, only): (TokenTensor, Option<&Only>),
            expected: &'static str,
            captured: &'a Option<Captured<T>>,
            wrong: &mut Vec<WrongType>,
        ) -> Option<&'a T> {
            let captured = captured.as_ref().filter(|_| only.is_none_or(|only| only.tokens.contains(&id)))?;
            match captured {
                Captured::Values(values) => Some(values),
                Captured::WrongDType { found, .. } => {
                    wrong.push((id.name(), found.clone(), expected));
                    None
                }
            }
        }
        let mut wrong = Vec::new();
        let given = Self {
            prefill_hidden: values((TokenTensor::PrefillHidden, only), "BF16", &captures.prefill_hidden, &mut wrong),
            decode_hidden: values((TokenTensor::DecodeHidden, only), "BF16", &captures.decode_hidden, &mut wrong),
            top2_logits: values((TokenTensor::Top2Logits, only), "FP32", &captures.top2_logits, &mut wrong),
            top2_ids: values((TokenTensor::Top2Ids, only), "INT64", &captures.top2_ids, &mut wrong),
            token_ids: values((TokenTensor::TokenIds, only), "INT64", &captures.token_ids, &mut wrong),
        };
        (given, wrong)
    }

    /// The state that token `step` of `row` was chosen from, where it was captured.
    pub fn state(&self, plan: &Plan<'_>, row: usize, step: usize) -> Option<ArrayView1<'a, bf16>> {
        use ndarray::Axis;
        match step.checked_sub(1) {
            None => {
                let index = plan.prompt_index(plan.source(row, 0));
                self.prefill_hidden.map(|hidden| hidden.index_axis(Axis(0), index))
            }
            Some(decode) => {
                self.decode_hidden.map(|hidden| hidden.index_axis(Axis(0), decode).index_axis_move(Axis(0), row))
            }
        }
    }

    /// The ids that the device names for a step, the chosen one first.
    pub fn ids(&self, row: usize, step: usize) -> Vec<usize> {
        let top2 = self.top2_ids.map(|ids| [ids[(row, step, 0)], ids[(row, step, 1)]]);
        let ids = self.token_ids.map(|ids| ids[(row, step)]).into_iter().chain(top2.into_iter().flatten());
        ids.filter_map(|id| usize::try_from(id).ok()).collect()
    }
}

/// What is judged of the tokens, by step: the choices are those of `Plan::steps`, rows one after the other.
pub struct Chosen<'a> {
    /// The run's places.
    pub plan: &'a Plan<'a>,
    /// What the device gave.
    pub given: Given<'a>,
    /// What each step's state allows; `None` where neither the device nor the reference has a state.
    pub choices: &'a [Option<Choice>],
    /// Whether a step's state is the device's own.
    pub own: &'a [bool],
    /// By how much logits of a state that is not the device's own may differ from the device's.
    pub spread: f64,
    /// Ids of the real vocabulary.
    pub real: usize,
    /// Ids of the vocabulary as stored.
    pub stored: usize,
    /// Logits that are not finite where the reference's are, by row, step and place, with the reference's.
    pub infinite: &'a BTreeMap<(usize, usize, usize), f32>,
    /// Steps whose state the device left all zero where the reference's is not.
    pub dead: &'a [bool],
    /// Steps whose reported token is not the one that was fed back, with that one.
    pub fed_instead: &'a [Option<usize>],
}

impl Chosen<'_> {
    fn at(&self, row: usize, step: usize) -> usize {
        row * self.plan.steps() + step
    }

    fn each(&self) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let steps = self.plan.steps();
        (0..self.plan.rows()).flat_map(move |row| (0..steps).map(move |step| (row, step, row * steps + step)))
    }

    /// The device's two logits of a step with their ids, where both were captured and the ids are of the vocabulary.
    fn top2(&self, row: usize, step: usize) -> Option<[(usize, f32); 2]> {
        let (ids, logits) = self.given.top2_ids.zip(self.given.top2_logits)?;
        let id = |j| usize::try_from(ids[(row, step, j)]).ok();
        Some([(id(0)?, logits[(row, step, 0)]), (id(1)?, logits[(row, step, 1)])])
    }

    /// The variants of the normed row that give the device's own logits; all of them where it has none.
    fn variants(&self, choice: &Choice, row: usize, step: usize) -> Vec<usize> {
        match self.top2(row, step).filter(|_| self.own[self.at(row, step)]) {
            Some(top2) => choice.reached(&top2).1,
            None => choice.variants(),
        }
    }

    /// Whether `id` can be the largest, `before` left out.
    fn can_lead(&self, choice: &Choice, id: usize, before: &[usize], row: usize, step: usize) -> bool {
        if self.own[self.at(row, step)] {
            return choice.can_lead(id, before, self.real, &self.variants(choice, row, step));
        }
        let Some(logit) = choice.logit(id).filter(|_| id < self.real) else { return false };
        let rivals = choice.logits.iter().take(self.real).enumerate().filter(|(other, _)| !before.contains(other));
        let largest = rivals.map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
        f64::from(largest) - f64::from(logit) <= 2.0 * self.spread
    }

    /// The report on `top2_logits`.
    pub fn logits_report(&self) -> Option<TensorReport> {
        let logits = self.given.top2_logits?;
        let all_own = self.own.iter().all(|&own| own);
        let mut findings = Findings::new("top2_logits", all_own);
        let mut failing = Vec::new();
        for (row, step, at) in self.each() {
            let (Some(choice), Some(top2)) = (&self.choices[at], self.top2(row, step)) else {
                for j in 0..2 {
                    if let Some(&reference) = self.infinite.get(&(row, step, j)) {
                        let pair = Pair::from([logits[(row, step, j)], reference]);
                        findings.add(Mark::Drift, pair, row, || vec![row, step, j]);
                        failing.push((row, step));
                    }
                }
                continue;
            };
            let reached = if self.own[at] {
                choice.reached(&top2).0
            } else {
                let near = |&(id, logit): &(usize, f32)| {
                    choice.logit(id).is_some_and(|l| (f64::from(l) - f64::from(logit)).abs() <= self.spread)
                };
                top2.iter().map(near).collect()
            };
            for (j, &(id, device)) in top2.iter().enumerate() {
                let pair = Pair::from([device, choice.logit(id).unwrap_or(f32::NAN)]);
                let mark = match (pair.same(), reached.get(j)) {
                    (true, _) => Mark::Exact,
                    (false, Some(true)) => Mark::Flip,
                    _ => Mark::Drift,
                };
                if mark == Mark::Drift {
                    failing.push((row, step));
                }
                findings.add(mark, pair, row, || vec![row, step, j]);
            }
        }
        if !failing.is_empty() {
            failing.dedup();
            findings.note(format!("not the LM head's logits of these states: {}", named(&failing)));
            let said = alive(logits.iter().map(|&x| f64::from(x)));
            if let Some(said) = said {
                findings.note(format!("all of them are {said}"));
            }
        }
        Some(findings.finish())
    }

    /// The report on `top2_ids`.
    pub fn ids_report(&self) -> Option<TensorReport> {
        let ids = self.given.top2_ids?;
        let mut findings = Findings::new("top2_ids", self.own.iter().all(|&own| own));
        let mut failing = Vec::new();
        for (row, step, at) in self.each() {
            let device = [ids[(row, step, 0)], ids[(row, step, 1)]];
            let Some(choice) = &self.choices[at] else {
                for j in self.impossible(row, step, device) {
                    failing.push((row, step));
                    findings.add(Mark::Drift, Pair::ids(device[j], None), row, || vec![row, step, j]);
                }
                continue;
            };
            let best = choice.token;
            let runner_up = best.and_then(|_| choice.runner_up(self.real));
            for (j, reference) in [best, runner_up].into_iter().enumerate() {
                let id = usize::try_from(device[j]).ok();
                let before: Vec<usize> =
                    if j == 0 { Vec::new() } else { usize::try_from(device[0]).into_iter().collect() };
                let mark = if id.is_some() && id == reference {
                    Mark::Exact
                } else if id.is_some_and(|id| !before.contains(&id) && self.can_lead(choice, id, &before, row, step)) {
                    Mark::Flip
                } else {
                    failing.push((row, step));
                    Mark::Drift
                };
                findings.add(mark, Pair::ids(device[j], reference), row, || vec![row, step, j]);
            }
        }
        if !failing.is_empty() {
            failing.dedup();
            findings.note(format!("not the two largest logits of the real vocabulary: {}", named(&failing)));
        }
        Some(findings.finish())
    }

    /// Which of a step's two ids no two best can be, whatever the state: none of the real vocabulary, twice the same, or
    /// the second with the larger logit.
    fn impossible(&self, row: usize, step: usize, device: [i64; 2]) -> Vec<usize> {
        let real = |id: i64| usize::try_from(id).is_ok_and(|id| id < self.real);
        let swapped = self.top2(row, step).is_some_and(|[a, b]| b.1 > a.1);
        (0..2).filter(|&j| !real(device[j]) || (j == 1 && (device[0] == device[1] || swapped))).collect()
    }

    /// Every step, where the device's tokens were captured and a state is known or the token cannot be right.
    pub fn steps(&self) -> Vec<TokenStep> {
        let Some(tokens) = self.given.token_ids else { return Vec::new() };
        self.each()
            .filter_map(|(row, step, at)| {
                let device = tokens[(row, step)];
                let Some(choice) = &self.choices[at] else {
                    let note = self.certain_fault(None, row, step, device)?;
                    let (margin, bound) = (Number(f64::NAN), Number(f64::NAN));
                    let (verdict, note) = (StepVerdict::Fail, Some(note));
                    return Some(TokenStep { row, step, device, reference: None, margin, bound, verdict, note });
                };
                Some(self.step(choice, row, step, device))
            })
            .collect()
    }

    fn step(&self, choice: &Choice, row: usize, step: usize, device: i64) -> TokenStep {
        let id = usize::try_from(device).ok();
        let reference = choice.token;
        let margin = id.map_or(f64::NAN, |id| choice.margin(id, self.real));
        let own = self.own[self.at(row, step)];
        let bound = match (own, id, reference) {
            (false, ..) => 2.0 * self.spread,
            (true, Some(id), Some(token)) => {
                let rival = if id == token { choice.runner_up(self.real).unwrap_or(token) } else { id };
                choice.gap_bound(token, rival)
            }
            _ => f64::NAN,
        };
        let (verdict, note) = self.verdict(choice, row, step, device, id);
        TokenStep { row, step, device, reference, margin: Number(margin), bound: Number(bound), verdict, note }
    }

    fn verdict(
        &self,
        choice: &Choice,
        row: usize,
        step: usize,
        device: i64,
        id: Option<usize>,
    ) -> (StepVerdict, Option<String>) {
        let fail = |note: String| (StepVerdict::Fail, Some(note));
        let Some(reference) = choice.token else {
            return fail("the LM head gives NaN for this state, so that no token is the greedy one".to_owned());
        };
        let logit = |id: usize| choice.logit(id).unwrap_or(f32::NAN);
        if let Some(fault) = self.certain_fault(Some(choice), row, step, device) {
            return fail(fault);
        }
        let id = id.unwrap_or(usize::MAX);
        if id == reference {
            return (StepVerdict::Agree, None);
        }
        let logits = format!("logits: {} of {id} against {} of {reference}", logit(id), logit(reference));
        if self.can_lead(choice, id, &[], row, step) {
            (StepVerdict::NearTie, Some(format!("either token is right; {logits}")))
        } else {
            fail(format!("not the largest logit; {logits}"))
        }
    }

    /// What is wrong with a step's token whatever the logits of a right device are: it is none of the real vocabulary, not
    /// the one that was fed back, or not the first of the device's own logits. `choice` is what its state allows, where one
    /// is known.
    fn certain_fault(&self, choice: Option<&Choice>, row: usize, step: usize, device: i64) -> Option<String> {
        let known = |text: &dyn Fn(&Choice, usize) -> String| {
            choice.and_then(|choice| Some(text(choice, choice.token?))).unwrap_or_default()
        };
        let logit = |choice: &Choice, id: usize| choice.logit(id).unwrap_or(f32::NAN);
        let Some(id) = usize::try_from(device).ok().filter(|&id| id < self.stored) else {
            let reference = known(&|_, reference| format!("; the reference has {reference}"));
            return Some(format!("id {device} is outside the vocabulary of {}{reference}", self.stored));
        };
        if let Some(fed) = self.fed_instead[self.at(row, step)] {
            let logits = known(&|choice, _| format!("; logits: {} against {}", logit(choice, id), logit(choice, fed)));
            return Some(format!(
                "reported is {id}, but the cache rows of the next position are those of token {fed}: the id was changed \
                 after it was fed back{logits}"
            ));
        }
        if id >= self.real {
            let logits = known(&|choice, reference| {
                format!("; logits: {} against {} of {reference}", logit(choice, id), logit(choice, reference))
            });
            let last = self.real.saturating_sub(1);
            return Some(format!("id {id} is padding of the vocabulary, whose real ids end at {last}{logits}"));
        }
        if self.dead[self.at(row, step)] {
            return Some("the state is all zero, so that every logit is the same: it decides nothing".to_owned());
        }
        // A device's argmax goes over its own logits.
        let [a, b] = self.top2(row, step)?;
        let leads = if a.1 == b.1 { a.0.min(b.0) } else { a.0 };
        (id != leads && a.1 >= b.1).then(|| {
            let reference = known(&|choice, reference| {
                format!("; the reference has {reference}, {} above {id}", choice.margin(id, self.real))
            });
            format!(
                "the device's own logits put {leads} first ({} and {} for {} and {}){reference}",
                a.1, b.1, a.0, b.0
            )
        })
    }

    /// The report on `token_ids`, whose elements are the steps.
    pub fn tokens_report(&self, steps: &[TokenStep]) -> Option<TensorReport> {
        let tokens = self.given.token_ids?;
        let mut findings = Findings::new("token_ids", self.own.iter().all(|&own| own));
        let mut failing = Vec::new();
        for step in steps {
            let mark = match step.verdict {
                StepVerdict::Agree => Mark::Exact,
                StepVerdict::NearTie => Mark::Flip,
                StepVerdict::Fail => Mark::Drift,
            };
            if mark == Mark::Drift {
                failing.push(step);
            }
            findings.add(mark, Pair::ids(step.device, step.reference), step.row, || vec![step.row, step.step]);
        }
        if let Some(first) = failing.first() {
            let note = first.note.clone().unwrap_or_default();
            findings.note(format!("row {}, step {}: {note}", first.row, first.step));
            let all: Vec<(usize, usize)> = failing.iter().map(|step| (step.row, step.step)).collect();
            if all.len() > 1 {
                findings.note(format!("{} of {} steps fail: {}", all.len(), steps.len(), named(&all)));
            }
        }
        // Where nothing could be judged this is all that there is to say.
        let one = tokens.first().copied();
        if (steps.is_empty() || !failing.is_empty()) && tokens.len() > 2 && tokens.iter().all(|&id| Some(id) == one) {
            findings.note(self.one_stage_back(one.unwrap_or_default()));
        }
        Some(findings.finish())
    }

    /// Where a stream of one and the same id was made.
    fn one_stage_back(&self, id: i64) -> String {
        let said = |name: &str, said: Option<Option<String>>| match said {
            None => format!("{name} were not captured"),
            Some(None) => format!("{name} are alive"),
            Some(Some(said)) => format!("{name} are {said}"),
        };
        let logits = self.given.top2_logits.map(|logits| alive(logits.iter().map(|&x| f64::from(x))));
        let decode = self.given.decode_hidden.map(|hidden| alive(hidden.iter().map(|x| x.to_f64())));
        let prefill = self.given.prefill_hidden.map(|hidden| alive(hidden.iter().map(|x| x.to_f64())));
        let dead = [&decode, &prefill].into_iter().flatten().any(Option::is_some);
        let blame = match (dead, &logits) {
            (true, _) => "; the fault lies before the LM head",
            (false, Some(Some(_))) => "; the fault lies in the LM head",
            (false, Some(None)) => "; the fault lies behind the logits, in the choice or in the copy of the ids",
            (false, None) => "",
        };
        format!(
            "every id is {id}; one stage back, {}, {} and {}{blame}",
            said("logits", logits),
            said("decode's hidden states", decode),
            said("the prefill's", prefill)
        )
    }
}

/// What all of some numbers are, where that is remarkable.
pub fn alive(mut values: impl Iterator<Item = f64> + Clone) -> Option<String> {
    if values.clone().all(f64::is_nan) {
        return Some("NaN".to_owned());
    }
    let first = values.next()?;
    values.all(|value| value == first).then(|| if first == 0.0 { "zero".to_owned() } else { format!("{first}") })
}

/// `row 0, step 3; row 0, step 7 and 2 more`.
fn named(steps: &[(usize, usize)]) -> String {
    let names: Vec<String> = steps.iter().take(3).map(|(row, step)| format!("row {row}, step {step}")).collect();
    let more = steps.len().saturating_sub(3);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", names.join("; "))
}
