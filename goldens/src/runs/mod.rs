//! Token runs: a prefill, then decode steps of all layers, judged step by step on the device's own tokens and history
//! (`docs/verdicts.md`, Token runs).
//!
//! [`first`] and [`choice`] judge strictly what follows from known inputs: the first layer's cache rows and what the LM
//! head makes of captured states. [`certain`] finds what is wrong where nothing can be compared. [`behind`] judges the layers between against sampled devices, on runs that [`forced`]
//! makes. [`history`] tells which token was fed where, [`steps`] compares the tokens.

mod alone;
mod behind;
mod caches;
mod certain;
mod choice;
mod findings;
mod first;
mod forced;
mod history;
mod layers;
pub mod layerwise;
mod one_layer;
mod plan;
mod remarks;
mod reports;
mod scalar;
mod states;
mod steps;

use cases::{GeneratedModel, Input, InputError, Kernel};
use device::Captures;
use ndarray::ArrayView2;
use reference::TensorId;
use reference::bounds::Confidence;
use reference::model::{ModelError, Weights};

use crate::judge::{Job, JudgeError, Progress, unjudged};
use crate::report::{CaseReport, TensorReport, TokenStep, Verdict};
use crate::rules::Rules;
use caches::RunCache;
use certain::Certain;
use choice::{Choice, Head};
use first::First;
use history::History;
use plan::Plan;
use reports::rows_name;
use steps::{Chosen, Given};

/// Judges a `tokens` bundle. `path` and `seconds` of the report are left for the caller.
///
/// # Errors
/// The inputs are not those of a token run, or the machine cannot hold what the reference needs.
pub fn judge(job: &Job<'_>, captures: &Captures, progress: &dyn Progress) -> Result<CaseReport, JudgeError> {
    let case = &job.bundle.case;
    let judged = with_run(job, captures, progress, |run, wrong| run.judge(Rules::new(job.policy), wrong))?;
    match judged {
        None => Ok(unjudged(case, job.policy, "not a token run")),
        Some(report) => report.map_err(|source| JudgeError::Model { case: case.name.clone(), source }),
    }
}

/// Reads a `tokens` bundle and hands it on, with the tensors whose type is not the contract's; `None` for other kernels.
///
/// # Errors
/// The inputs are not those of a token run.
fn with_run<T>(
    job: &Job<'_>,
    captures: &Captures,
    progress: &dyn Progress,
    use_it: impl FnOnce(&Run<'_>, &[(&str, String)]) -> T,
) -> Result<Option<T>, JudgeError> {
    let case = &job.bundle.case;
    let Kernel::Tokens(tokens) = &case.kernel else { return Ok(None) };
    let inputs = |source: InputError| JudgeError::Inputs { case: case.name.clone(), source: source.into() };
    let weights = job.inputs.model().map_err(inputs)?;
    let plan = Plan::new(case, tokens);
    let (cos, sin) = (job.inputs.f32(Input::RopeCos).map_err(inputs)?, job.inputs.f32(Input::RopeSin).map_err(inputs)?);
    let before = [Input::KCache, Input::VCache].map(|input| job.inputs.bf16(input));
    let [k_before, v_before] = before;
    let (k_before, v_before) = (k_before.map_err(inputs)?, v_before.map_err(inputs)?);

    // What was captured, and what of it has the contract's types.
    let shown = |id: TensorId| job.only.is_none_or(|only| only.layer.contains(&id));
    let (given, wrong_types) = Given::new(&captures.tokens, job.only);
    let mut wrong: Vec<(&str, String)> = wrong_types
        .into_iter()
        .map(|(name, found, expected)| (name, format!("element type {found}, where the contract has {expected}")))
        .collect();
    let mut read = [None, None];
    let caches = [(TensorId::KRows, &captures.k_written, k_before), (TensorId::VRows, &captures.v_written, v_before)];
    for (slot, (id, written, before)) in read.iter_mut().zip(caches) {
        match written.as_ref().filter(|_| shown(id)).map(|written| RunCache::new(&plan, written, before)) {
            Some(Ok(cache)) => *slot = Some(cache),
            Some(Err(found)) => wrong.push((if found.starts_with("rows") { rows_name(id) } else { id.name() }, found)),
            None => {}
        }
    }
    let run = Run { job, plan: &plan, weights: &weights, given, caches: &read, cos, sin, progress };
    Ok(Some(use_it(&run, &wrong)))
}

/// One run and what the device gave of it.
struct Run<'a> {
    job: &'a Job<'a>,
    plan: &'a Plan<'a>,
    weights: &'a GeneratedModel<'a>,
    given: Given<'a>,
    /// K and V.
    caches: &'a [Option<RunCache<'a>>; 2],
    cos: ArrayView2<'a, f32>,
    sin: ArrayView2<'a, f32>,
    progress: &'a dyn Progress,
}

/// Everything that a comparison found, before it is put into words.
struct Found {
    rules: Rules,
    tensors: Vec<TensorReport>,
    steps: Vec<TokenStep>,
    /// The tensor that drifts first among those whose layers are known.
    origin: Option<&'static str>,
    /// Whether layers behind the first were judged, by phase: prefill, decode.
    behind: [bool; 2],
    /// Places whose token is not known.
    unknown: usize,
    /// What is wrong whatever freedoms permit.
    certain: Certain,
}

impl Run<'_> {
    fn judge(&self, mut rules: Rules, wrong: &[(&str, String)]) -> Result<CaseReport, ModelError> {
        let (plan, given) = (self.plan, self.given);
        let confidence = Confidence::new(self.job.false_alarm);
        let head = Head {
            gamma: self.weights.final_norm(),
            weight: self.weights.lm_head(),
            real: plan.geometry.real_vocab_size,
            eps: plan.geometry.rms_norm_eps,
            confidence,
        };
        self.progress.step("LM head");
        let policy = rules.policy.clone();
        let mut choices = self.own_choices(&head, &policy);

        self.progress.step("first layer");
        let history = self.history(&mut rules, &choices, confidence);
        let mut behind = [None, None];
        if let Some(history) = &history {
            let first = [false, true].map(|decode| self.behind(decode, history, &mut rules, confidence));
            let [prefill, decode] = first;
            behind = [prefill?, decode?];
        }
        // States that were not captured are the reference's own.
        let own: Vec<bool> = choices.iter().map(Option::is_some).collect();
        let spread = self.reference_choices(&head, &rules.policy, &behind, &mut choices);

        let certain = self.certain(&head, history.as_ref(), &behind, &rules.policy)?;
        let dead = self.dead_states(&behind);
        let mut fed_instead = vec![None; plan.rows() * plan.steps()];
        if let Some(history) = history.as_ref().filter(|_| given.token_ids.is_some()) {
            for &index in &history.misreported {
                let place = plan.places[index];
                if let Some(step) = plan.step_of(place) {
                    fed_instead[place.row * plan.steps() + step] = history.fed[index];
                }
            }
        }
        let chosen = Chosen {
            plan,
            given,
            choices: &choices,
            own: &own,
            spread,
            real: head.real,
            stored: plan.geometry.vocab_size,
            infinite: &certain.logits,
            dead: &dead,
            fed_instead: &fed_instead,
        };
        let steps = chosen.steps();
        let mut tensors = Vec::new();
        for (id, values) in [(TensorId::KRows, false), (TensorId::VRows, true)] {
            let found = (history.as_ref(), &behind, &certain);
            tensors.extend(self.cache_reports(id, values, found, confidence, &rules.policy));
        }
        tensors.extend(self.hidden_reports(&behind, &certain));
        tensors
            .extend([chosen.logits_report(), chosen.ids_report(), chosen.tokens_report(&steps)].into_iter().flatten());
        for (name, found) in wrong {
            let note = format!("{found}; values are never converted");
            tensors.retain(|tensor| tensor.name != *name);
            tensors.push(TensorReport { notes: vec![note], ..TensorReport::new(name, Verdict::Fail) });
        }
        tensors.sort_by_key(|tensor| remarks::ORDER.iter().position(|name| *name == tensor.name));
        let origin = self.origin(history.as_ref(), &behind);
        let unknown = history.map_or(0, |history| history.fed.iter().filter(|fed| fed.is_none()).count());
        let judged = behind.each_ref().map(Option::is_some);
        Ok(self.report(Found { rules, tensors, steps, origin, behind: judged, unknown, certain }))
    }

    /// The first layer's rows, where a cache was captured.
    fn history(&self, rules: &mut Rules, choices: &[Option<Choice>], confidence: Confidence) -> Option<History> {
        if self.caches.iter().all(Option::is_none) {
            return None;
        }
        let held = self.caches.each_ref().map(|cache| Some(&cache.as_ref()?.held[0]));
        let plan = self.plan;
        let candidates: Vec<Vec<usize>> = plan
            .places
            .iter()
            .map(|&place| match plan.step_of(place) {
                None => vec![plan.tokens.prompts[place.row][place.position]],
                Some(step) => {
                    let choice = choices[place.row * plan.steps() + step].as_ref().and_then(|choice| choice.token);
                    // A reported id that is none keeps its place, so that another one found is known to be another.
                    let reported = self.given.token_ids.map(|ids| ids[(place.row, step)]);
                    let reported = reported.map(|id| usize::try_from(id).unwrap_or(usize::MAX));
                    let ids = self.given.ids(place.row, step);
                    reported.into_iter().chain(choice).chain(ids).collect()
                }
            })
            .collect();
        Some(history::read(&self.first(confidence)?, plan, held, &candidates, rules))
    }

    fn first(&self, confidence: Confidence) -> Option<First<'_>> {
        Some(First {
            geometry: self.plan.geometry,
            weights: self.weights.layer(0)?,
            embed: self.weights.embed_tokens(),
            cos: self.cos,
            sin: self.sin,
            confidence,
        })
    }
}
