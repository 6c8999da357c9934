//! Checks, remarks and the report of a token run.

use std::collections::BTreeSet;

use cases::Input;
use rayon::prelude::*;
use reference::{BATCH, PAGE, Site};

use super::certain::Certain;
use super::{Found, Run};
use crate::coverage;
use crate::only::TokenTensor;
use crate::report::{CaseReport, Check, StepVerdict, TensorReport, TokenStep, Verdict};
use crate::rules::Rules;

/// Tensors in the order in which a run makes them.
pub const ORDER: [&str; 9] = [
    "k_written_rows",
    "k_written_values",
    "v_written_rows",
    "v_written_values",
    "prefill_hidden",
    "decode_hidden",
    "top2_logits",
    "top2_ids",
    "token_ids",
];

fn check(name: &str, verdict: Verdict, detail: impl Into<String>) -> Check {
    Check { name: name.to_owned(), verdict, detail: detail.into() }
}

impl Run<'_> {
    /// Puts everything together.
    pub(super) fn report(&self, found: Found) -> CaseReport {
        let case = &self.job.bundle.case;
        let Found { rules, tensors, steps, origin, behind, unknown, certain } = found;
        let checks = self.checks(&tensors, &certain);
        let fails = |tensor: &&TensorReport| tensor.verdict == Verdict::Fail;
        // Rows that were missed or strayed come first: what later steps read depends on them.
        let rows = tensors.iter().filter(fails).find(|tensor| tensor.name.ends_with("_rows"));
        let first = || tensors.iter().find(fails).map(|tensor| tensor.name.as_str());
        let blamed = rows.map(|tensor| tensor.name.as_str()).or(origin).or_else(first).map(str::to_owned);
        let of_check = || {
            let hash = checks.iter().any(|check| check.name == "kv_values" && check.verdict == Verdict::Fail);
            let infinite = || ORDER.into_iter().find(|name| certain.holds(name));
            hash.then_some("k_written_values").or_else(infinite).map(str::to_owned)
        };
        let first_divergence = blamed.or_else(of_check);
        // Layers feed those behind them, so that these can only be judged behind a fault of theirs.
        let behind_it = |tensor: &&TensorReport| {
            fails(tensor) && !tensor.forced && origin.is_some() && first_divergence.as_deref() != Some(&*tensor.name)
        };
        let consequences = tensors.iter().filter(behind_it).map(|tensor| tensor.name.clone()).collect();
        let failed =
            tensors.iter().any(|tensor| fails(&tensor)) || checks.iter().any(|check| check.verdict == Verdict::Fail);
        let mut coverage = self.coverage(&tensors, &steps, &rules, behind, unknown);
        let of_tokens = |tensor: &TensorReport| tensor.name == "token_ids";
        // What the request hides is not missing.
        let hidden = self.job.only.is_some_and(|only| !only.tokens.contains(&TokenTensor::TokenIds));
        let tokens_missing = !hidden && !tensors.iter().any(of_tokens);
        let compared: u64 = tensors.iter().map(|tensor| tensor.elements).sum();
        let verdict = if failed {
            Verdict::Fail
        } else if tokens_missing {
            coverage.insert(0, self.absent("token_ids"));
            Verdict::Unjudged
        } else if hidden && compared == 0 {
            coverage.insert(0, "nothing that was asked for could be judged by itself".to_owned());
            Verdict::Unjudged
        } else if !hidden && steps.is_empty() {
            let what = "neither hidden states nor both caches were captured: no token could be judged";
            coverage.insert(0, what.to_owned());
            Verdict::Unjudged
        } else {
            Verdict::Pass
        };
        let mut policy = rules.report(self.job.policy.name());
        // The normed state is never captured, and one scalar moves it as a tie would.
        policy.rules.insert(Site::FinalNorm.name().to_owned(), "not exercised".to_owned());
        CaseReport {
            name: case.name.clone(),
            path: String::new(),
            verdict,
            seconds: 0.0,
            source: coverage::source(case),
            checks,
            tensors,
            policy,
            coverage,
            warnings: case.warnings(),
            first_divergence,
            consequences,
            cause: None,
            explanation: None,
            steps,
        }
    }

    fn absent(&self, what: &str) -> String {
        let why = if self.job.only.is_some() { "not captured, or hidden by the request" } else { "not captured" };
        format!("{what}: {why}")
    }

    fn checks(&self, tensors: &[TensorReport], certain: &Certain) -> Vec<Check> {
        let find = |name: &str| tensors.iter().find(|tensor| tensor.name == name);
        let of_both = |name: &str, tensors: [&str; 2], pass: &str, one: &str| {
            let found: Vec<&TensorReport> = tensors.iter().filter_map(|name| find(name)).collect();
            let failing: Vec<String> = found
                .iter()
                .filter(|tensor| tensor.verdict == Verdict::Fail)
                .map(|tensor| format!("{}: {}", tensor.name, tensor.notes.join("; ")))
                .collect();
            match (failing.is_empty(), found.len()) {
                (false, _) => check(name, Verdict::Fail, failing.join("; ")),
                (true, 2) => check(name, Verdict::Pass, pass),
                (true, 1) if found.iter().all(|tensor| tensor.verdict == Verdict::Pass) => {
                    let missing: Vec<&str> = tensors.into_iter().filter(|name| find(name).is_none()).collect();
                    check(name, Verdict::Unjudged, format!("{}; {one}", self.absent(&missing.join(" and "))))
                }
                _ => check(name, Verdict::Unjudged, self.absent(&tensors.join(" and "))),
            }
        };
        let rows = of_both(
            "kv_written_rows",
            ["k_written_rows", "v_written_rows"],
            "exactly the cache rows of the run's tokens were written, in every layer",
            "those of the other cache are right",
        );
        let mut values = of_both(
            "kv_values",
            ["k_written_values", "v_written_values"],
            "values match",
            "of the other cache the first layer is right, and the layers behind it were not compared",
        );
        self.whole_caches(&mut values);
        vec![rows, values, certain.check(), self.tiling()]
    }

    /// The whole caches against the hashes that the case states.
    fn whole_caches(&self, values: &mut Check) {
        let stated = &self.job.bundle.case.final_cache_sha256;
        let inputs = [Input::KCache, Input::VCache];
        let found: Vec<Option<(Input, String)>> = inputs
            .par_iter()
            .zip(self.caches.par_iter())
            .map(|(&input, cache)| {
                let cache = cache.as_ref().filter(|_| stated.contains_key(&input))?;
                Some((input, cache.sha256()))
            })
            .collect();
        let found: Vec<(Input, String)> = found.into_iter().flatten().collect();
        let mut failures = Vec::new();
        for (input, found) in &found {
            if let Some(stated) = stated.get(input).filter(|stated| *stated != found) {
                failures.push(format!(
                    "final_cache_sha256 of {}: the cache before the run with the captured rows written gives {found}, the \
                     case states {stated}: some other row changed, or these rows are not what was left",
                    input.name()
                ));
            }
        }
        if !failures.is_empty() {
            let before = if values.verdict == Verdict::Fail { format!("{}; ", values.detail) } else { String::new() };
            *values = check("kv_values", Verdict::Fail, format!("{before}{}", failures.join("; ")));
        } else if found.len() == 2 && values.verdict == Verdict::Pass {
            values.detail = "values match, and both whole caches match their SHA-256".to_owned();
        }
    }

    fn tiling(&self) -> Check {
        let broken = self.plan.geometry.tiling_violations();
        if broken.is_empty() {
            return check("tiling", Verdict::Pass, "the geometry fits the production kernels' tiles");
        }
        let detail = format!("the production kernels cannot run this geometry; it breaks {}", broken.join("; "));
        check("tiling", Verdict::Unjudged, detail)
    }

    /// What the data could not have shown, most telling first.
    fn coverage(
        &self,
        tensors: &[TensorReport],
        steps: &[TokenStep],
        rules: &Rules,
        behind: [bool; 2],
        unknown: usize,
    ) -> Vec<String> {
        let plan = self.plan;
        let mut remarks = Vec::new();
        let mut say = |when: bool, text: String| {
            if when {
                remarks.push(text);
            }
        };
        if let Some(only) = self.job.only {
            say(true, format!("looked at as asked: {}; every other captured tensor was left out", only.named()));
        }
        for name in ORDER {
            let given = tensors.iter().find(|tensor| tensor.name == name);
            say(given.is_none(), self.absent(name));
            let idle = given.filter(|tensor| tensor.verdict == Verdict::Unjudged);
            let why = idle.map(|tensor| tensor.notes.first().map_or("nothing to compare it with", String::as_str));
            say(idle.is_some(), format!("{name}: captured, but {}", why.unwrap_or_default()));
        }
        let near: Vec<String> = steps
            .iter()
            .filter(|step| step.verdict == StepVerdict::NearTie)
            .map(|step| format!("row {}, step {}", step.row, step.step))
            .collect();
        say(!near.is_empty(), format!("either of two tokens is right at {}", near.join("; ")));
        let count = plan.rows() * plan.steps() - steps.len();
        say(count > 0 && !steps.is_empty(), format!("{count} steps without a state to judge them by"));
        say(unknown > 0, format!("{unknown} positions whose token nothing tells: their rows were not judged"));
        for (decode, judged) in [false, true].into_iter().zip(behind) {
            let phase = if decode { "decode" } else { "prefill" };
            let any = !plan.of_phase(decode).is_empty();
            let why = if self.caches.iter().all(Option::is_some) { "" } else { ", which takes both caches" };
            say(any && !judged, format!("{phase}: the layers behind the first were not judged{why}"));
        }
        say(
            behind.contains(&true) && plan.layers > 1,
            "layers behind the first and the last states were judged against sampled devices: a fault that moves rows no \
             further than permitted freedoms do could not show there"
                .to_owned(),
        );
        say(
            plan.rows() < BATCH,
            "padding rows replicate row 0: a kernel that treats them as real rows gives the same tokens".to_owned(),
        );
        let longest = plan.places.iter().map(|place| place.position + 1).max().unwrap_or(0);
        say(longest <= PAGE, "no context crosses a page: its walk was not exercised".to_owned());
        let silent: BTreeSet<&str> = Site::ALL
            .into_iter()
            .filter(|&site| site.ties_are_free() && !rules.exercised(site))
            .map(Site::name)
            .collect();
        let silent: Vec<&str> = Site::ALL.map(Site::name).into_iter().filter(|name| silent.contains(name)).collect();
        say(!silent.is_empty(), format!("tie rules that nothing captured tells: {}", silent.join(", ")));
        remarks
    }
}
