//! The first layer and step of a token run at which drift is made (`docs/bisect.md`, Layer).
//!
//! `survey` judges cache rows and states of layers, each from the latest state of the device before it: `walk` runs the
//! reference so, `known` holds the device's states. `locate` reads off where drift is made first, and `search` fetches
//! states one at a time until it is known to a layer.

mod known;
mod locate;
mod report;
mod search;
mod survey;
mod walk;

use std::ops::Range;

use device::{Captures, LayerStates, Moment, state_name};
use reference::bounds::Confidence;
use reference::model::ModelError;
use reference::{Policy, Site};
use thiserror::Error;

pub use report::{Drift, Later, LayerReport, Outcome};
pub use search::{Fetch, FetchError};

use super::Run;
use super::behind::Judged;
use super::history::History;
use super::one_layer::OneLayer;
use super::plan::Plan;
use crate::Mark;
use crate::coverage;
use crate::judge::{Job, JudgeError, Progress};
use crate::rules::Rules;
use known::{Contradiction, Known, place_name};
use search::{Found, Search};
use survey::{Point, Survey, What};
use walk::Walker;

/// What is asked.
#[derive(Clone, Copy)]
pub struct LayerRequest<'a> {
    /// The bundle, its inputs and the rules that the device is held to.
    pub job: Job<'a>,
    /// States after layers, in any number.
    pub states: &'a LayerStates,
    /// For a search, the step that is said to be bad; without it the last one.
    pub bad: Option<Moment>,
}

/// Why there is no answer.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum BisectError {
    #[error("{case}: is no token run; layers are told apart in bundles of kernel `tokens`")]
    NotTokens { case: String },
    #[error(transparent)]
    Judge(#[from] JudgeError),
    #[error("{0}")]
    Model(#[from] ModelError),
    #[error(
        "`{state}` was given twice with different bits, first at row {}, column {}: as a layer's state and as the bundle's \
         last one, or by two fetches; they are not of one run, capture it again", at[0], at[1]
    )]
    Contradiction { state: String, at: [usize; 2] },
    #[error("`{state}` could not be fetched: {said}")]
    Fetch { state: String, said: String },
    #[error("`{state}` as it was fetched cannot be used: {said}")]
    WrongState { state: String, said: String },
}

impl From<Contradiction> for BisectError {
    fn from(found: Contradiction) -> Self {
        Self::Contradiction { state: state_name(found.layer, found.moment), at: found.at }
    }
}

/// Finds the first layer and step at which drift is made. With `fetch`, states that are not in the request are fetched.
///
/// # Errors
/// The request contradicts the bundle or itself, or a state could not be fetched.
pub fn bisect_layer(
    request: &LayerRequest<'_>,
    fetch: Option<&mut dyn Fetch>,
    progress: &dyn Progress,
) -> Result<LayerReport, BisectError> {
    let case = &request.job.bundle.case;
    progress.begin(&case.name);
    let nothing = Captures::default();
    let captures = request.job.bundle.captures.as_ref().unwrap_or(&nothing);
    let found = super::with_run(&request.job, captures, progress, |run, wrong| answer(request, run, wrong, fetch))?;
    found.unwrap_or_else(|| Err(BisectError::NotTokens { case: case.name.clone() }))
}

/// A run whose history is known.
struct Session<'a, 'r> {
    run: &'a Run<'r>,
    walker: Walker<'a, 'r>,
    history: Option<&'a History>,
    rules: Rules,
    confidence: Confidence,
}

/// What was looked at, and how it compares.
struct Looked {
    points: Vec<Point>,
    first: Option<Drift>,
    later: Vec<Later>,
    rules: Rules,
    /// Another named policy under which nothing drifts, where the one asked for does not explain the device.
    other: Option<&'static str>,
}

fn answer(
    request: &LayerRequest<'_>,
    run: &Run<'_>,
    wrong: &[(&str, String)],
    fetch: Option<&mut dyn Fetch>,
) -> Result<LayerReport, BisectError> {
    let (plan, job) = (run.plan, &request.job);
    let mut known = Known::of(plan, request.states);
    let last = plan.layers - 1;
    if let Some(hidden) = run.given.prefill_hidden {
        known.add(plan, last, Moment::Prefill, hidden.view())?;
    }
    for (step, hidden) in run.given.decode_hidden.iter().flat_map(|hidden| hidden.outer_iter()).enumerate() {
        known.add(plan, last, Moment::Step(step), hidden)?;
    }
    let confidence = Confidence::new(job.false_alarm);
    let mut rules = Rules::new(job.policy);
    let choices = vec![None; plan.rows() * plan.steps()];
    run.progress.step("first layer");
    let history = run.history(&mut rules, &choices, confidence);
    let fed = match &history {
        Some(history) => history.fed.clone(),
        None => reported(run),
    };
    let held = run.caches.each_ref().map(|cache| cache.as_ref().map(|cache| cache.held.as_slice()));
    let one = OneLayer { weights: run.weights, plan, cos: run.cos, sin: run.sin };
    let walker = Walker { one, fed: &fed, held };
    let session = Session { run, walker, history: history.as_ref(), rules, confidence };

    let mut report = LayerReport {
        outcome: Outcome::Unjudged,
        name: job.bundle.case.name.clone(),
        source: coverage::source(&job.bundle.case),
        drift: None,
        later: Vec::new(),
        states: 0,
        cache_rows: 0,
        fetched: Vec::new(),
        fetches_expected: None,
        policy: session.rules.report(job.policy.name()),
        remarks: wrong.iter().map(|(name, found)| format!("{name} was left out: {found}")).collect(),
    };
    report.remarks.extend(session.remarks());
    if session.walker.derives() && fed.iter().any(Option::is_none) {
        let why = "without both caches the tokens of all steps have to be known: capture `token_ids`, or the caches";
        report.remarks.insert(0, why.to_owned());
        return Ok(report);
    }
    let everything: Vec<usize> = (0..plan.places.len()).collect();
    let mut looked = session.look(&everything, 0..plan.layers, &known, &known)?;
    let mut outcome = match (&looked.first, looked.points.is_empty()) {
        (Some(_), _) => Outcome::Located,
        (None, true) => Outcome::Unjudged,
        (None, false) => Outcome::NoDrift,
    };
    report.count(&looked);
    let mut drift = looked.first.take();
    let later = std::mem::take(&mut looked.later);
    if let Some(fetch) = fetch {
        let session = Session { rules: looked.rules.clone(), ..session };
        let mut search = Search {
            session: &session,
            fetch,
            before: known.clone(),
            known,
            fetched: Vec::new(),
            expected: 0,
            remarks: Vec::new(),
        };
        let found = search.run(drift.as_ref(), request.bad)?;
        report.remarks.append(&mut search.remarks);
        (report.fetched, report.fetches_expected) = (search.fetched, Some(search.expected));
        match found {
            Found::Drift(found) => {
                let (confirmed, found) = *found;
                outcome = Outcome::Located;
                report.count(&confirmed);
                drift = Some(found);
                looked = confirmed;
            }
            Found::EndIsRight(moment) => {
                outcome = Outcome::EndIsRight;
                report.remarks.push(format!(
                    "`{}` is what the contract gives: there is nothing to search for before it. What the last layer makes \
                     after its keys and values reaches no later step but by the token chosen; where another step is known \
                     to be bad, name it with --step",
                    state_name(last, moment)
                ));
            }
            Found::Lost(moment, layer) => {
                outcome = Outcome::Lost;
                drift = None;
                report.remarks.push(format!(
                    "no layer of step {moment} drifts from the device's own state before it, layer {layer} included: many \
                     layers each drift by less than permitted freedoms do, or states and bundle are not of one run"
                ));
            }
        }
    }
    if let Some(name) = looked.other {
        report.remarks.push(format!(
            "under policy {name} nothing drifts: the device breaks ties by another rule than asked for; the gate names the \
             sites"
        ));
    }
    report.later = later;
    if let Some(drift) = &drift {
        report.later.retain(|later| (later.step, later.layer) != (drift.step, drift.last_layer));
    }
    report.policy = looked.rules.report(job.policy.name());
    (report.outcome, report.drift) = (outcome, drift);
    Ok(report)
}

/// The tokens that were fed, as the device reports them.
fn reported(run: &Run<'_>) -> Vec<Option<usize>> {
    let token = |&place: &super::plan::Place| match run.plan.step_of(place) {
        None => Some(run.plan.tokens.prompts[place.row][place.position]),
        Some(step) => run.given.token_ids.and_then(|ids| usize::try_from(ids[(place.row, step)]).ok()),
    };
    run.plan.places.iter().map(token).collect()
}

impl LayerReport {
    fn count(&mut self, looked: &Looked) {
        for point in &looked.points {
            *(if point.what == What::State { &mut self.states } else { &mut self.cache_rows }) += point.places.len();
        }
    }
}

impl<'r> Session<'_, 'r> {
    fn plan(&self) -> &'r Plan<'r> {
        self.run.plan
    }

    fn progress(&self) -> &dyn Progress {
        self.run.progress
    }

    /// The latest layer, up to `layer`, whose input is known at all of `places`.
    fn start(&self, inputs: &Known, places: &[usize], layer: usize) -> usize {
        let known = |before: usize| places.iter().all(|&index| inputs.get(before, index).is_some());
        (1..=layer).rev().find(|&layer| known(layer - 1)).unwrap_or(0)
    }

    /// Judges `evidence` and cache rows of some places and layers, under the rules that explain the device best.
    fn look(
        &self,
        places: &[usize],
        layers: Range<usize>,
        inputs: &Known,
        evidence: &Known,
    ) -> Result<Looked, BisectError> {
        let run = self.run;
        let survey = Survey {
            walker: &self.walker,
            places,
            layers: layers.clone(),
            inputs,
            evidence,
            confidence: self.confidence,
            false_alarm: run.job.false_alarm,
            progress: run.progress,
        };
        let mut rules = self.rules.clone();
        run.progress.step("layers");
        let mut policy = rules.policy.clone();
        let mut nominal = survey.nominal(&policy)?;
        let tally = survey.ties_at_out(&nominal);
        if rules.is_open(Site::Out) || tally.ties > 0 {
            rules.settle(Site::Out, tally);
        }
        if rules.policy != policy {
            policy = rules.policy.clone();
            nominal = survey.nominal(&policy)?;
        }
        let strict = if layers.contains(&0) { self.first_layer(places) } else { Vec::new() };
        let drifts = |points: &[Point]| points.iter().map(|point| point.judged.rows.len()).sum::<usize>();
        let mut points = survey.judge(&nominal, &policy)?;
        let mut other = None;
        let others = [("production", Policy::production()), ("rne", Policy::rne())];
        for (name, mut candidate) in others {
            if drifts(&points) == 0 {
                break;
            }
            // Whatever the ties of a site have told stays.
            for site in Site::ALL.into_iter().filter(|&site| rules.exercised(site) && rules.violation(site).is_none()) {
                candidate.set(site, policy.at(site));
            }
            if candidate == policy {
                continue;
            }
            let nominal = survey.nominal(&candidate)?;
            let found = survey.judge(&nominal, &candidate)?;
            let open = Site::ALL.into_iter().all(|site| policy.at(site) == candidate.at(site) || rules.is_open(site));
            if open && drifts(&found) < drifts(&points) {
                rules.policy = candidate;
                points = found;
            } else if !open && drifts(&found) == 0 {
                (points, other) = (found, Some(name));
            }
        }
        points.extend(strict);
        let first = locate::first(&survey, &points);
        let later = first.as_ref().map(|first| locate::later(&survey, &points, first)).unwrap_or_default();
        Ok(Looked { points, first, later, rules, other })
    }

    /// The first layer's cache rows, which follow from the tokens alone.
    fn first_layer(&self, places: &[usize]) -> Vec<Point> {
        let Some(history) = self.history else { return Vec::new() };
        let mut points = Vec::new();
        for (what, values) in [(What::K, false), (What::V, true)] {
            let Some(held) = self.walker.held[usize::from(values)].and_then(|held| held.first()) else { continue };
            let judged = places.iter().filter_map(|&index| Some((index, history.written[index].as_ref()?)));
            let judged: Vec<_> = judged.collect();
            let places: Vec<usize> = judged.iter().map(|&(index, _)| index).collect();
            let device = held.select(ndarray::Axis(0), &places);
            let mut nominal = device.clone();
            for (mut row, (_, written)) in nominal.rows_mut().into_iter().zip(&judged) {
                let written = if values { &written.v } else { &written.k };
                row.iter_mut().zip(written).for_each(|(value, &written)| *value = written);
            }
            let mark = |(n, column): (usize, usize)| history.mark(places[n], column, values, device[(n, column)]);
            let marks = ndarray::Array2::from_shape_fn(device.dim(), mark);
            let rows: Vec<usize> =
                (0..places.len()).filter(|&n| marks.row(n).iter().any(|&mark| mark == Mark::Drift)).collect();
            let notes = match rows.len() {
                0 => Vec::new(),
                n => vec![format!("nothing permitted gives the first layer's rows of {n} places from their tokens")],
            };
            let judged = Judged { marks, energy: 0.0, notes, rows };
            points.push(Point { what, layer: 0, start: 0, places, device, nominal, judged });
        }
        points
    }

    /// What is known about the history and is no drift of a layer.
    fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        let plan = self.plan();
        let missing: Vec<&str> = ["k", "v"]
            .into_iter()
            .zip(&self.walker.held)
            .filter(|(_, held)| held.is_none())
            .map(|(name, _)| name)
            .collect();
        if !missing.is_empty() {
            remarks.push(format!(
                "no cache rows of {}: histories are made from the states and tokens that are known, and a later step may \
                 drift as a consequence",
                missing.join(" and ")
            ));
        }
        if let Some(history) = self.history {
            if let Some(&index) = history.misreported.first() {
                remarks.push(format!(
                    "{}: another token was fed than the one reported ({} places); it was judged on the one fed",
                    place_name(plan, index),
                    history.misreported.len()
                ));
            }
            let unknown = history.fed.iter().filter(|fed| fed.is_none()).count();
            if unknown > 0 {
                remarks.push(format!(
                    "{unknown} places whose token is not known were left out up to their first known state"
                ));
            }
        }
        remarks
    }
}
