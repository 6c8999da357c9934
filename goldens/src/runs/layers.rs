//! The layers behind the first: nominal and sampled runs of a phase, under the rules that explain the device.

use cases::GeneratedModel;
use half::bf16;
use ndarray::{Array2, Axis};
use reference::bounds::Confidence;
use reference::model::ModelError;
use reference::rounding::{is_bf16_tie, to_bf16};
use reference::{Policy, Rounding, Site};

use super::Run;
use super::behind::{self, Judged, Nominal, Spread};
use super::forced::{Forced, States};
use super::history::History;
use crate::Mark;
use crate::compare::same_bf16;
use crate::rules::{Rules, TieTally};
use crate::spread::Distribution;

/// What the layers behind the first are, of one phase.
pub(super) struct Behind {
    pub(super) indices: Vec<usize>,
    pub(super) nominal: States,
    pub(super) k: Vec<Option<Judged>>,
    pub(super) v: Vec<Option<Judged>>,
    pub(super) hidden: Option<Judged>,
    /// States of sampled devices, where the device's own were not captured: the first nominal row of each, and rows.
    pub(super) states: Vec<(usize, Array2<bf16>)>,
    /// Where the asked policy does not explain the device and another one does: its name.
    pub(super) other_policy: Option<&'static str>,
}

impl Behind {
    pub(super) fn judged(&self) -> impl Iterator<Item = &Judged> {
        self.k.iter().chain(&self.v).flatten().chain(&self.hidden)
    }

    pub(super) fn drifts(&self) -> usize {
        self.judged().map(|judged| judged.rows.len()).sum()
    }

    pub(super) fn energy(&self) -> f64 {
        self.judged().map(|judged| judged.energy).sum()
    }

    /// The mark of an element under the rules asked for. Where only another policy explains the device, what differs from
    /// the rules asked for is ties.
    pub(super) fn mark(&self, judged: Mark, device: bf16, reference: bf16) -> Mark {
        match self.other_policy {
            Some(_) if same_bf16(device, reference) => Mark::Exact,
            Some(_) => Mark::Tie,
            None => judged,
        }
    }
}

impl Run<'_> {
    /// The layers behind the first, of one phase, under the rules in force; where these do not explain the device, under
    /// the other named policy.
    pub(super) fn behind(
        &self,
        decode: bool,
        history: &History,
        rules: &mut Rules,
        confidence: Confidence,
    ) -> Result<Option<Behind>, ModelError> {
        let [Some(k), Some(v)] = self.caches else { return Ok(None) };
        let mut indices = self.plan.of_phase(decode);
        indices.retain(|&index| history.fed[index].is_some());
        if indices.is_empty() {
            return Ok(None);
        }
        let forced = Forced {
            weights: self.weights,
            plan: self.plan,
            fed: &history.fed,
            k: &k.held,
            v: &v.held,
            cos: self.cos,
            sin: self.sin,
        };
        self.progress.step(if decode { "decode steps" } else { "prefill" });
        let mut policy = rules.policy.clone();
        let mut nominal = forced.run(&indices, &policy)?;
        if decode {
            rules.settle(Site::Out, self.ties_at_out(&indices, &nominal));
            if rules.policy != policy {
                policy = rules.policy.clone();
                nominal = forced.run(&indices, &policy)?;
            }
        }
        let asked = self.compare(&forced, &indices, nominal, &policy, confidence)?;
        if asked.drifts() == 0 {
            return Ok(Some(asked));
        }
        let others = [("production", Policy::production()), ("rne", Policy::rne())];
        for (name, other) in others.into_iter().filter(|(_, other)| *other != policy) {
            // Whatever the ties of a site have told stays.
            let mut other = other;
            for site in Site::ALL.into_iter().filter(|&site| rules.exercised(site) && rules.violation(site).is_none()) {
                other.set(site, policy.at(site));
            }
            let nominal = forced.run(&indices, &other)?;
            let found = self.compare(&forced, &indices, nominal, &other, confidence)?;
            if found.drifts() == 0 && found.energy() < asked.energy() {
                if Site::ALL.into_iter().all(|site| policy.at(site) == other.at(site) || rules.is_open(site)) {
                    rules.policy = other;
                    return Ok(Some(found));
                }
                if decode {
                    // Under rules that explain the rest, the ties at `out` are not blurred.
                    rules.settle(Site::Out, self.ties_at_out(&indices, &found.nominal));
                }
                return Ok(Some(Behind { nominal: asked.nominal, other_policy: Some(name), ..found }));
            }
        }
        Ok(Some(asked))
    }

    /// How exact ties at `out` went. Flips of the layers before blur single ones, so that only a clear majority counts.
    pub(super) fn ties_at_out(&self, indices: &[usize], nominal: &States) -> TieTally {
        let (mut tally, Some(wide)) = (TieTally::default(), &nominal.wide) else { return TieTally::default() };
        for (n, &index) in indices.iter().enumerate() {
            let Some(device) = self.state_at(index) else { continue };
            for (column, &value) in wide.row(n).iter().enumerate().filter(|(_, value)| is_bf16_tie(**value)) {
                let (even, away) = (to_bf16(value, Rounding::Rne), to_bf16(value, Rounding::TiesAway));
                tally.count(&even, &away, &device[column], || format!("decode_hidden, {}", self.plan.name(index)));
            }
        }
        tally.clear_majority()
    }

    /// Samples devices and judges every tensor of a phase against them.
    pub(super) fn compare(
        &self,
        forced: &Forced<'_, GeneratedModel<'_>>,
        indices: &[usize],
        nominal: States,
        policy: &Policy,
        confidence: Confidence,
    ) -> Result<Behind, ModelError> {
        let states: Option<Vec<_>> = indices.iter().map(|&index| self.state_at(index)).collect();
        let spread = Spread::sample(forced, indices, &nominal, policy, states.is_none(), self.progress)?;
        let name = |rows: &[usize]| {
            let places: Vec<usize> = rows.iter().map(|&row| indices[row]).collect();
            self.plan.names(&places)
        };
        let judge = |device: &Array2<bf16>, nominal: Nominal<'_>, samples: &Distribution| {
            behind::judge(device, nominal, samples, confidence.lambda(), self.job.false_alarm, name)
        };
        let layers = |held: &[Array2<bf16>], nominal: &[Array2<bf16>], samples: &[Distribution]| {
            let judged = (0..nominal.len()).map(|layer| {
                (layer > 0).then(|| {
                    judge(
                        &held[layer].select(Axis(0), indices),
                        Nominal::narrowed_once(&nominal[layer]),
                        &samples[layer],
                    )
                })
            });
            judged.collect::<Vec<Option<Judged>>>()
        };
        let hidden = states.map(|states| {
            let mut device = nominal.hidden.clone();
            for (mut row, state) in device.rows_mut().into_iter().zip(states) {
                row.assign(&state);
            }
            judge(&device, Nominal::last(&nominal), &spread.hidden)
        });
        let (k, v) = (layers(forced.k, &nominal.k, &spread.k), layers(forced.v, &nominal.v, &spread.v));
        Ok(Behind { indices: indices.to_vec(), nominal, k, v, hidden, states: spread.states, other_policy: None })
    }
}
