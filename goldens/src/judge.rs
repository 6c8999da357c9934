//! The walk along the stage table beside a bundle's captures.

use std::collections::BTreeSet;
use std::sync::Arc;

use cases::{Case, Inputs, Padding, PolicyRequest};
use device::Bundle;
use reference::bounds::Confidence;
use reference::stages::STAGES;
use reference::{Deviation, LayerInputs, Policy, Products, Rounding, Site, TensorId, Trace};
use thiserror::Error;

use crate::Mark;
use crate::cause::{Memo, explain};
use crate::compare::{Session, compare};
use crate::coverage::{self, Coverage};
use crate::evidence::Evidence;
use crate::only::Only;
use crate::report::{CaseReport, Check, PolicyReport, TensorReport, Verdict};
use crate::rules::Rules;
use crate::tally::Comparison;
use crate::unforced::{reads, touched};
use crate::{checks, maps, notes, runs, unforced};

/// Default false-alarm probability of a whole run.
pub const FALSE_ALARM: f64 = 1e-6;

/// One bundle to judge.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// What was run, and what the device gave.
    pub bundle: &'a Bundle,
    /// Its inputs, regenerated.
    pub inputs: &'a Inputs,
    /// The rounding rules the device is held to.
    pub policy: &'a PolicyRequest,
    /// When set, only these captured tensors are looked at.
    pub only: Option<&'a Only>,
    /// False-alarm probability of the whole run, default [`FALSE_ALARM`].
    pub false_alarm: f64,
    /// Whether a cause is looked for where something fails.
    pub explain: bool,
    /// What is kept between several devices that ran one case.
    pub memo: Option<&'a Memo>,
    /// Whether the report says where marks lie ([`TensorReport::map`]).
    pub maps: bool,
}

impl<'a> Job<'a> {
    /// Everything that was captured, at the default false-alarm probability, without a search for causes.
    #[must_use]
    pub fn new(bundle: &'a Bundle, inputs: &'a Inputs, policy: &'a PolicyRequest) -> Self {
        Self { bundle, inputs, policy, only: None, false_alarm: FALSE_ALARM, explain: false, memo: None, maps: false }
    }
}

/// Why a bundle cannot be judged as asked.
#[derive(Debug, Error)]
pub enum JudgeError {
    /// The inputs lack something: a fault of the caller.
    #[error("{case}: {source}")]
    Inputs {
        /// The case.
        case: String,
        /// What is missing.
        source: Box<cases::InputError>,
    },
    /// A policy keeps a site wide whose narrowed tensor the device stored.
    #[error(
        "policy: `none` at {site}, but the bundle holds {tensor}, which is stored in BF16; \
         take `none` away there, or the tensor out of the comparison"
    )]
    StoredWide {
        /// The site.
        site: &'static str,
        /// The tensor.
        tensor: &'static str,
    },
    /// The reference cannot run the model.
    #[error("{case}: {source}")]
    Model {
        /// The case.
        case: String,
        /// Why not.
        source: reference::model::ModelError,
    },
}

/// Hears what is being done.
pub trait Progress: Sync {
    /// A part of the work begins.
    fn begin(&self, what: &str);
    /// A step of it is done.
    fn step(&self, what: &str);
}

impl Progress for () {
    fn begin(&self, _: &str) {}
    fn step(&self, _: &str) {}
}

/// Judges one bundle. `path` and `seconds` of the report are left for the caller.
///
/// # Errors
/// [`JudgeError`] when the request contradicts the bundle.
pub fn judge(job: &Job<'_>, progress: &dyn Progress) -> Result<CaseReport, JudgeError> {
    let case = &job.bundle.case;
    progress.begin(&case.name);
    let Some(captures) = job.bundle.captures.as_ref() else {
        return Ok(unjudged(
            case,
            job.policy,
            "the bundle holds no captures: run your kernel on the case and save its outputs as captures.safetensors beside it",
        ));
    };
    if case.batch().is_none() {
        return runs::judge(job, captures, progress);
    }
    let inputs =
        job.inputs.layer(0).map_err(|source| JudgeError::Inputs { case: case.name.clone(), source: source.into() })?;
    let evidence = Evidence::collect(captures, &inputs, job.only.map(|only| &only.layer));
    if evidence.tensors.is_empty() && evidence.wrong_dtype.is_empty() {
        return Ok(unjudged(case, job.policy, "the bundle holds no output"));
    }
    let rules = Rules::new(job.policy);
    refuse_stored_wide(&rules.policy, &evidence)?;

    let products = Products::new();
    let walker = Walker {
        inputs: &inputs,
        products: &products,
        evidence: &evidence,
        false_alarm: job.false_alarm,
        progress,
        memo: job.memo,
    };
    let walk = settled_walk(&walker, rules);
    let mut report = report(job, &inputs, &evidence, &walk);
    if job.explain {
        let (cause, explanation) = explain(&walker, &walk, report.first_divergence.as_deref());
        (report.cause, report.explanation) = (cause, Some(explanation));
    }
    Ok(report)
}

/// A walk's findings.
pub struct Walk {
    /// Compared tensors, in contract order.
    pub comparisons: Vec<Comparison>,
    /// The rules found.
    pub rules: Rules,
    /// What the data could not have shown.
    pub coverage: Coverage,
}

/// Walks under the request's rules; where a free site's tensor was not captured, so that its ties cannot be
/// read off, and something drifts, the other tie rule is tried there and kept if less drifts with it.
fn settled_walk(walker: &Walker<'_, '_>, rules: Rules) -> Walk {
    let drift =
        |walk: &Walk| -> u64 { walk.comparisons.iter().filter(|c| c.forced).map(|c| c.count(Mark::Drift)).sum() };
    // Behind a gap something always differs: only a marked change of how far counts there.
    let energy = |walk: &Walk| -> f64 { walk.comparisons.iter().map(|c| c.energy).sum() };
    let better = |a: &Walk, b: &Walk| match (drift(a), drift(b)) {
        (a, b) if a != b => a < b,
        _ => 2.0 * energy(a) < energy(b),
    };
    let walk = walker.walk(rules.clone(), true);
    let open: Vec<Site> = hidden_sites(walker.evidence).into_iter().filter(|&site| rules.is_open(site)).collect();
    if open.is_empty() || !walk.comparisons.iter().any(Comparison::drifts) {
        return walk;
    }
    let mut best = (rules.clone(), walker.walk(rules, false));
    let mut changed = true;
    let mut settled = BTreeSet::new();
    while changed {
        changed = false;
        for &site in &open {
            if settled.contains(&site) {
                continue;
            }
            let mut other = best.0.clone();
            other.policy.set(site, Rounding::Rne);
            let found = walker.walk(other.clone(), false);
            if better(&found, &best.1) {
                best = (other, found);
                changed = settled.insert(site);
            }
        }
    }
    let walk = if settled.is_empty() { walk } else { walker.walk(best.0, true) };
    other_rules(walker, walk, &open)
}

/// Behind a gap, ties that went the other way move rows as flips do, and how far says little about which site they are of.
/// A device that drifts there alone is judged under other rules of the sites whose ties nobody saw: one rule at all of them,
/// then site by site, and those with the least drift are kept.
fn other_rules(walker: &Walker<'_, '_>, walk: Walk, hidden: &[Site]) -> Walk {
    let drift = |walk: &Walk| -> u64 { walk.comparisons.iter().map(|c| c.count(Mark::Drift)).sum() };
    if walk.comparisons.iter().any(|c| c.forced && c.drifts()) {
        return walk;
    }
    // Probabilities are never captured.
    let sites: Vec<Site> =
        hidden.iter().copied().chain([Site::Prob].into_iter().filter(|&site| walk.rules.is_open(site))).collect();
    let alike = |rule: Rounding| sites.iter().map(move |&site| (site, rule)).collect::<Vec<_>>();
    let each = sites.iter().flat_map(|&site| [Rounding::Rne, Rounding::TiesAway].map(|rule| vec![(site, rule)]));
    let mut best = walk;
    for change in [alike(Rounding::Rne), alike(Rounding::TiesAway)].into_iter().chain(each) {
        if drift(&best) == 0 {
            break;
        }
        let mut rules = best.rules.clone();
        change.iter().for_each(|&(site, rule)| rules.policy.set(site, rule));
        if rules.policy != best.rules.policy {
            let found = walker.walk(rules, true);
            if drift(&found) < drift(&best) {
                best = found;
            }
        }
    }
    best
}

/// Free sites whose tensor the device did not give, in contract order.
fn hidden_sites(evidence: &Evidence) -> Vec<Site> {
    stored_at()
        .into_iter()
        .filter(|(site, id)| site.ties_are_free() && !evidence.tensors.contains_key(id))
        .map(|(site, _)| site)
        .collect()
}

/// The stored BF16 tensor behind each site that has one.
fn stored_at() -> [(Site, TensorId); 9] {
    [
        (Site::Normed, TensorId::NormedStates),
        (Site::Q, TensorId::AllQPadded),
        (Site::KCache, TensorId::KRows),
        (Site::VCache, TensorId::VRows),
        (Site::Attn, TensorId::AttnOut),
        (Site::Residual, TensorId::PostNormPartial),
        (Site::MlpIn, TensorId::MlpNormIn),
        (Site::Silu, TensorId::MlpDownTile),
        (Site::Out, TensorId::Out),
    ]
}

fn refuse_stored_wide(policy: &Policy, evidence: &Evidence) -> Result<(), JudgeError> {
    for (site, id) in stored_at() {
        if policy.at(site) == Rounding::None && evidence.tensors.contains_key(&id) {
            return Err(JudgeError::StoredWide { site: site.name(), tensor: id.name() });
        }
    }
    Ok(())
}

/// What every walk beside one bundle shares.
pub struct Walker<'a, 'd> {
    /// The layer's inputs.
    pub inputs: &'a LayerInputs<'d>,
    /// Integer products over its weights.
    pub products: &'a Products,
    /// What the device gave.
    pub evidence: &'a Evidence,
    /// False-alarm probability of the whole run.
    pub false_alarm: f64,
    /// Hears what is being done.
    pub progress: &'a dyn Progress,
    /// What is kept between devices that ran one case.
    pub memo: Option<&'a Memo>,
}

impl Walker<'_, '_> {
    /// One walk along the stage table. A stage runs on the device's own tensors where they were captured, and
    /// on what follows from them without freedom; its captured outputs are compared and then taken as known. What
    /// lies behind a stage with freedom whose output was not captured is judged by `sampling`; without it every
    /// difference there stays drift.
    pub fn walk(&self, rules: Rules, sampling: bool) -> Walk {
        self.walk_beside(rules, sampling, &[])
    }

    /// The same beside a kernel with faults. Where they change a stage with freedom, it is judged by sampling.
    pub fn walk_beside(&self, rules: Rules, sampling: bool, deviations: &[&Deviation]) -> Walk {
        let (inputs, evidence) = (self.inputs, self.evidence);
        let confidence = Confidence::new(self.false_alarm);
        let sampling = sampling.then_some(self.false_alarm);
        let patched = PatchedCache::new(inputs, evidence);
        let (k, v) = match &patched {
            Some(patched) => (patched.k.view(), patched.v.view()),
            None => (inputs.cache.k.view(), inputs.cache.v.view()),
        };
        let before = inputs.view();
        let after = inputs.with_cache(k, v);
        let mut known = Trace::new();
        let mut comparisons = Vec::new();
        let mut coverage = Coverage::default();
        let mut rules = rules;
        for stage in STAGES {
            let attention = stage.writes.contains(&TensorId::AttnOut);
            let inputs = if attention { &after } else { &before };
            let mut session =
                Session { inputs, products: self.products, evidence, rules, confidence, deviations, memo: self.memo };
            let faulty = touched(stage, deviations);
            let freed = deviations.iter().any(|deviation| deviation.frees(stage));
            let forced = reads(stage, deviations).iter().all(|&id| known.holds(id));
            let mut outputs = if forced {
                let policy = session.rules.policy.clone();
                stage.compute(&session.context(&policy), &known)
            } else {
                Vec::new()
            };
            for &id in stage.writes {
                let at = outputs.iter().position(|output| output.id == id);
                let output = at.map(|at| outputs.swap_remove(at));
                match (evidence.tensors.get(&id), output) {
                    (Some(device), Some(output)) if !freed => {
                        coverage.see(&output, inputs, &known);
                        // What a kernel with faults does not narrow is handed on as it is.
                        let handed_on = faulty.then(|| output.clone());
                        let mut comparison = compare(&mut session, output, device, &known);
                        notes::explain(&mut comparison, &session, &known);
                        comparisons.push(comparison);
                        match handed_on {
                            Some(output) => {
                                known.record(output);
                                known.overlay(id, Arc::clone(device));
                            }
                            None => known.force(id, Arc::clone(device)),
                        }
                    }
                    (Some(device), output) => {
                        let mut comparison =
                            unforced::compare(&mut session, id, device, &known, sampling, self.progress);
                        if comparison.drifts() && sampling.is_some() {
                            comparison.notes.splice(0..0, notes::shape(&comparison, &session));
                        }
                        comparisons.push(comparison);
                        if let Some(output) = output {
                            known.record(output);
                            known.overlay(id, Arc::clone(device));
                        } else {
                            known.force(id, Arc::clone(device));
                        }
                    }
                    (None, Some(output)) if !stage.free && !freed => known.record(output),
                    (None, _) => {}
                }
            }
            rules = session.rules;
            self.progress.step(stage.name);
        }
        Walk { comparisons, rules, coverage }
    }
}

/// The caches with every row that the device wrote, its stray ones outside the batch's slots included.
pub struct PatchedCache {
    /// Keys.
    pub k: ndarray::Array2<half::bf16>,
    /// Values.
    pub v: ndarray::Array2<half::bf16>,
}

impl PatchedCache {
    /// `None` when the device wrote nowhere else: then the cache before the step serves.
    pub fn new(inputs: &LayerInputs<'_>, evidence: &Evidence) -> Option<Self> {
        let expected = checks::expected_rows(inputs);
        let strays = |cache: &Option<crate::evidence::CacheEvidence>| {
            cache.as_ref().is_some_and(|cache| cache.position.keys().any(|row| !expected.contains(row)))
        };
        if !strays(&evidence.k) && !strays(&evidence.v) {
            return None;
        }
        let patch = |before: ndarray::ArrayView2<'_, half::bf16>, cache: &Option<crate::evidence::CacheEvidence>| {
            let mut after = before.to_owned();
            if let Some(cache) = cache {
                for (&row, &index) in &cache.position {
                    after.row_mut(row).assign(&cache.values.row(index));
                }
            }
            after
        };
        Some(Self { k: patch(inputs.cache.k, &evidence.k), v: patch(inputs.cache.v, &evidence.v) })
    }
}

/// A case of which nothing can be said.
pub fn unjudged(case: &Case, policy: &PolicyRequest, why: &str) -> CaseReport {
    CaseReport {
        name: case.name.clone(),
        path: String::new(),
        verdict: Verdict::Unjudged,
        seconds: 0.0,
        source: coverage::source(case),
        checks: checks::ALWAYS
            .map(|name| Check { name: name.to_owned(), verdict: Verdict::Unjudged, detail: why.to_owned() })
            .to_vec(),
        tensors: Vec::new(),
        policy: PolicyReport { asked: policy.name().to_owned(), ..PolicyReport::default() },
        coverage: vec![why.to_owned()],
        warnings: case.warnings(),
        first_divergence: None,
        consequences: Vec::new(),
        cause: None,
        explanation: None,
        steps: Vec::new(),
    }
}

/// Puts a walk's findings, the contract checks and the coverage remarks together.
fn report(job: &Job<'_>, inputs: &LayerInputs<'_>, evidence: &Evidence, walk: &Walk) -> CaseReport {
    let case = &job.bundle.case;
    let mut tensors: Vec<(TensorId, TensorReport)> = Vec::new();
    for comparison in &walk.comparisons {
        let cache = evidence.cache(comparison.id);
        let map = job.maps.then(|| Box::new(maps::of(comparison, inputs, cache)));
        tensors.push((comparison.id, TensorReport { map, ..comparison.report(inputs, cache) }));
    }
    for (&id, found) in &evidence.wrong_dtype {
        tensors.push((id, checks::wrong_dtype(id, found)));
    }
    for id in [TensorId::KRows, TensorId::VRows] {
        if let Some(cache) = evidence.cache(id) {
            tensors.push((id, checks::written_rows(id, cache, inputs, &walk.comparisons)));
        }
    }
    // Contract order; the rows that were written come before their values.
    tensors.sort_by_key(|(id, report)| (*id, report.name.ends_with("_values")));

    let findings = checks::all(&checks::Evidenced {
        inputs,
        evidence,
        walk,
        replicated: case.padding == Padding::ReplicateRow0,
        final_caches: &case.final_cache_sha256,
    });
    let failing = tensors.iter().find(|(_, tensor)| tensor.verdict == Verdict::Fail);
    // A check may fail where every number is right for what it was made from: it names its own tensor.
    let of_check = || findings.iter().find_map(|finding| finding.tensor.map(str::to_owned));
    let first_divergence = failing.map(|(_, tensor)| tensor.name.clone()).or_else(of_check);
    let checks: Vec<Check> = findings.iter().map(|finding| finding.check.clone()).collect();
    let consequences = consequences(walk, first_divergence.as_deref());

    let hidden = |id| job.only.is_some_and(|only| !only.layer.contains(&id));
    let out_missing = !evidence.tensors.contains_key(&TensorId::Out)
        && !evidence.wrong_dtype.contains_key(&TensorId::Out)
        && !hidden(TensorId::Out);
    let mut coverage = walk.coverage.remarks(inputs, evidence, &walk.rules, &walk.comparisons);
    if case.layers > 1 {
        coverage
            .push(format!("the case has {} layers, of which this kernel runs one: layer 0 was judged", case.layers));
    }
    if let Some(only) = job.only {
        coverage.insert(0, format!("looked at as asked: {}; every other captured tensor was left out", only.named()));
    }
    let mut verdict = Verdict::Pass;
    let failed =
        tensors.iter().any(|(_, t)| t.verdict == Verdict::Fail) || checks.iter().any(|c| c.verdict == Verdict::Fail);
    let compared: u64 = tensors.iter().map(|(_, t)| t.elements).sum();
    if failed {
        verdict = Verdict::Fail;
    } else if out_missing || compared == 0 {
        verdict = Verdict::Unjudged;
        coverage.insert(0, "the bundle holds no `out`: the layer's result was not judged".to_owned());
    }
    CaseReport {
        name: case.name.clone(),
        path: String::new(),
        verdict,
        seconds: 0.0,
        source: coverage::source(case),
        checks,
        tensors: tensors.into_iter().map(|(_, tensor)| tensor).collect(),
        policy: walk.rules.report(job.policy.name()),
        coverage,
        warnings: case.warnings(),
        first_divergence,
        consequences,
        cause: None,
        explanation: None,
        steps: Vec::new(),
    }
}

/// Tensors that are fed by the first divergence and are right for the inputs they were given, or that could only
/// be judged behind it: whatever is wrong in them is its consequence. A forced tensor that drifts again is not
/// among them: it has a fault of its own.
fn consequences(walk: &Walk, first: Option<&str>) -> Vec<String> {
    let Some(origin) = walk.comparisons.iter().find(|c| Some(c.id.name()) == first) else { return Vec::new() };
    // A tensor is downstream when one of its stage's inputs is the origin or is downstream itself.
    let mut downstream = BTreeSet::from([origin.id]);
    for stage in STAGES {
        if stage.reads.iter().any(|id| downstream.contains(id)) {
            downstream.extend(stage.writes);
        }
    }
    let fed = walk.comparisons.iter().filter(|c| c.id != origin.id && downstream.contains(&c.id));
    fed.filter(|c| !c.forced || !c.fails()).map(|c| c.id.name().to_owned()).collect()
}
