//! Mutation testing of the gate itself (`docs/power.md`): devices with known faults are judged, and what was caught,
//! located and named is counted, beside what rules that others use would have said.

use cases::{Case, Inputs, PolicyRequest};
use device::{Bundle, Captured, Captures};
use half::bf16;
use reference::deviations::catalogue;
use reference::{Deviation, Freedom, LayerInputs, Policy, Products, TensorId};

use serde::{Deserialize, Serialize};

use crate::cause::Memo;
use crate::judge::{Job, JudgeError, judge};
use crate::mutant::mutant;
use crate::only::Only;
use crate::report::{CaseReport, Verdict};

/// One case, ready to be tried with many faults.
pub struct Bed<'a> {
    case: Case,
    inputs: &'a Inputs,
    layer: LayerInputs<'a>,
    products: Products,
    memo: Memo,
    /// The right device.
    clean: Captures,
    /// `out` as a golden without freedoms has it, which is what others compare with.
    golden: Vec<f64>,
    policy: Policy,
}

/// What a device with one fault led to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trial {
    /// The fault.
    pub id: String,
    /// The first tensor whose bits the fault changes; none: it cannot be seen in the case's data.
    pub first: Option<String>,
    /// What the gate said of everything that was captured.
    pub whole: Option<Outcome>,
    /// What it said of `out` alone; none where the fault changes no bit of it.
    pub out_alone: Option<Outcome>,
    /// What others' rules say of `out`.
    pub others: Others,
}

/// Whether a case's data can show a fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "result")]
pub enum Shown {
    /// The fault changes no bit of what is captured.
    Unchanged,
    /// It changes what is captured by no more than a right device may.
    Permitted,
    /// The gate fails.
    Caught {
        /// The first divergence.
        at: String,
    },
}

impl Shown {
    /// Whether the gate fails.
    #[must_use]
    pub fn is_caught(&self) -> bool {
        matches!(self, Self::Caught { .. })
    }
}

/// What the gate said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Whether it failed.
    pub caught: bool,
    /// The first divergence.
    pub located: Option<String>,
    /// The cause that was named.
    pub cause: Option<String>,
    /// Faults that give the same bits as the one named.
    pub alike: Vec<String>,
}

impl Outcome {
    fn of(report: &CaseReport) -> Self {
        let notes = report.explanation.as_ref().map_or(&[][..], |e| &e.notes);
        let alike = notes.iter().filter_map(|note| note.strip_prefix(crate::cause::ALIKE));
        Self {
            caught: report.verdict == Verdict::Fail,
            located: report.first_divergence.clone(),
            cause: report.cause.as_ref().map(|cause| cause.id.clone()),
            alike: alike.flat_map(|names| names.split(", ").map(str::to_owned)).collect(),
        }
    }

    /// Whether the fault was named, or one that gives the same bits.
    #[must_use]
    pub fn names(&self, id: &str) -> bool {
        self.cause.as_deref() == Some(id) || self.alike.iter().any(|alike| alike == id)
    }
}

/// What rules that others use say of the same `out`: whether each of them fails it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Others {
    /// `allclose` with rtol and atol of 1e-3.
    pub allclose: bool,
    /// At most 2 % of elements outside rtol 1e-2, atol 1e-2.
    pub outliers: bool,
    /// Cosine similarity of at least 0.999.
    pub cosine: bool,
    /// At most one element in a thousand that differs by more than one in a thousand.
    pub thousandth: bool,
}

impl Others {
    /// Judges `device` by `reference`.
    #[must_use]
    // NaN is within no tolerance.
    #[allow(clippy::neg_cmp_op_on_partial_ord)]
    pub fn of(device: &[f64], reference: &[f64]) -> Self {
        let pairs = || device.iter().zip(reference);
        let outside =
            |atol: f64, rtol: f64| pairs().filter(|(d, r)| !((*d - *r).abs() <= atol + rtol * r.abs())).count();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let cosine = dot(device, reference) / (dot(device, device) * dot(reference, reference)).sqrt();
        let n = device.len();
        Self {
            allclose: outside(1e-3, 1e-3) > 0,
            outliers: outside(1e-2, 1e-2) * 50 > n,
            cosine: !(cosine >= 0.999),
            thousandth: outside(0.0, 1e-3) * 1000 > n,
        }
    }
}

impl Others {
    /// Each rule's verdict: allclose, the outlier budget, cosine, the share of one in a thousand.
    #[must_use]
    pub fn all(self) -> [bool; 4] {
        [self.allclose, self.outliers, self.cosine, self.thousandth]
    }

    /// Counts each rule's failure.
    pub fn add_to(self, counts: &mut [u32; 4]) {
        counts.iter_mut().zip(self.all()).for_each(|(count, fails)| *count += u32::from(fails));
    }
}

impl<'a> Bed<'a> {
    /// A case whose device computes with the freedoms of `freedom` under the production rules.
    ///
    /// # Errors
    /// Inputs that are no decode layer's.
    pub fn new(case: &'a Case, inputs: &'a Inputs, freedom: Freedom) -> Result<Self, JudgeError> {
        let layer =
            inputs.layer(0).map_err(|source| JudgeError::Inputs { case: case.name.clone(), source: source.into() })?;
        let policy = Policy::production().under(freedom);
        let products = Products::new();
        let clean = mutant(&layer, &policy, &products, &[]);
        let golden = values(&mutant(&layer, &Policy::production(), &products, &[]));
        // The caches of a case's own device are not those of another.
        let case = Case { final_cache_sha256: std::collections::BTreeMap::new(), ..case.clone() };
        Ok(Self { case, inputs, layer, products, memo: Memo::default(), clean, golden, policy })
    }

    /// Another right device, judged by everything and by `out` alone: how often it failed, and what others' rules say
    /// of it.
    ///
    /// # Errors
    /// As [`judge`].
    pub fn false_alarms(&self, freedom: Freedom) -> Result<(u32, Others), JudgeError> {
        let policy = self.policy.clone().under(freedom);
        let captures = mutant(&self.layer, &policy, &self.products, &[]);
        let failed = |out_alone| Ok(u32::from(self.judge(&captures, out_alone, false)?.verdict != Verdict::Pass));
        Ok((failed(false)? + failed(true)?, Others::of(&values(&captures), &self.golden)))
    }

    /// A device with one fault, judged.
    ///
    /// # Errors
    /// As [`judge`].
    pub fn trial(&self, fault: &Deviation) -> Result<Trial, JudgeError> {
        let captures = mutant(&self.layer, &self.policy, &self.products, &[fault]);
        let first = first_difference(&self.clean, &captures);
        let out = values(&captures);
        let out_differs = bits(&captures) != bits(&self.clean);
        let whole = match first {
            Some(_) => Some(Outcome::of(&self.judge(&captures, false, true)?)),
            None => None,
        };
        let out_alone = match out_differs {
            true => Some(Outcome::of(&self.judge(&captures, true, true)?)),
            false => None,
        };
        Ok(Trial { id: fault.id.clone(), first, whole, out_alone, others: Others::of(&out, &self.golden) })
    }

    /// Whether this data can show a fault: a device with it, judged by everything that is captured. It is quicker than
    /// [`Bed::trial`], because no cause is looked for.
    ///
    /// # Errors
    /// As [`judge`].
    pub fn shows(&self, fault: &Deviation) -> Result<Shown, JudgeError> {
        let captures = mutant(&self.layer, &self.policy, &self.products, &[fault]);
        if first_difference(&self.clean, &captures).is_none() {
            return Ok(Shown::Unchanged);
        }
        let report = self.judge(&captures, false, false)?;
        Ok(match (report.verdict, report.first_divergence) {
            (Verdict::Fail, at) => Shown::Caught { at: at.unwrap_or_else(|| "a contract check".to_owned()) },
            _ => Shown::Permitted,
        })
    }

    fn judge(&self, captures: &Captures, out_alone: bool, explain: bool) -> Result<CaseReport, JudgeError> {
        let bundle =
            Bundle { dir: std::path::PathBuf::new(), case: self.case.clone(), captures: Some(captures.clone()) };
        let out = Only { layer: [TensorId::Out].into(), ..Only::default() };
        let only = out_alone.then_some(&out);
        let policy = PolicyRequest::Production;
        judge(&Job { only, explain, memo: Some(&self.memo), ..Job::new(&bundle, self.inputs, &policy) }, &())
    }
}

/// Every trial of one case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CasePower {
    /// The case's name, and its seed.
    pub name: String,
    /// Seed of the inputs and of the device's freedoms.
    pub seed: u64,
    /// Right devices judged; each by everything and by `out` alone.
    pub clean: u32,
    /// Judgements of right devices that failed.
    pub false_alarms: u32,
    /// Right devices that others' rules fail, in the order of [`Others::all`].
    pub others_false_alarms: [u32; 4],
    /// One a fault, in the order of the catalogue.
    pub trials: Vec<Trial>,
}

/// Counts over trials.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Faults tried.
    pub faults: u32,
    /// Of those, faults that change a bit of what was captured.
    pub changed: u32,
    /// Of those, faults that change it by no more than a right device may: nothing can tell them apart on this data.
    pub permitted: u32,
    /// Of the others, caught.
    pub caught: u32,
    /// Of those, located at the tensor at which the fault works.
    pub located: u32,
    /// Of those, named.
    pub named: u32,
    /// Faults that change a bit of `out`.
    pub out_changed: u32,
    /// Of those, caught by `out` alone.
    pub out_caught: u32,
    /// Of those, named.
    pub out_named: u32,
    /// Of the faults that change a bit of `out`, what others' rules fail there, in the order of [`Others::all`].
    pub others: [u32; 4],
}

impl Counts {
    /// Over some trials.
    #[must_use]
    pub fn of<'t>(trials: impl Iterator<Item = &'t Trial>) -> Self {
        let mut counts = Self::default();
        for trial in trials {
            counts.faults += 1;
            if let Some(outcome) = &trial.whole {
                counts.changed += 1;
                counts.permitted += u32::from(!outcome.caught);
                counts.caught += u32::from(outcome.caught);
                counts.located += u32::from(outcome.caught && outcome.located == trial.first);
                counts.named += u32::from(outcome.caught && outcome.names(&trial.id));
            }
            if let Some(outcome) = &trial.out_alone {
                counts.out_changed += 1;
                counts.out_caught += u32::from(outcome.caught);
                counts.out_named += u32::from(outcome.caught && outcome.names(&trial.id));
                trial.others.add_to(&mut counts.others);
            }
        }
        counts
    }
}

/// Faults that a production kernel can have: every deviation but the rules that it follows.
#[must_use]
pub fn faults() -> Vec<Deviation> {
    let production = Policy::production();
    // The head's cast is no part of a layer.
    catalogue().into_iter().filter(|deviation| !deviation.is_asked_by(&production)).collect()
}

fn out(captures: &Captures) -> Option<ndarray::ArrayView2<'_, bf16>> {
    match captures.tensors.get(&TensorId::Out) {
        Some(Captured::Values(tensor)) => Some(tensor.bf16()),
        _ => None,
    }
}

fn values(captures: &Captures) -> Vec<f64> {
    out(captures).map_or_else(Vec::new, |out| out.iter().map(|x| x.to_f64()).collect())
}

fn bits(captures: &Captures) -> Vec<u16> {
    out(captures).map_or_else(Vec::new, |out| out.iter().map(|x| x.to_bits()).collect())
}

/// The first captured tensor, in contract order, whose bits differ.
fn first_difference(clean: &Captures, faulty: &Captures) -> Option<String> {
    let differs = |id: TensorId| match (clean.tensors.get(&id), faulty.tensors.get(&id)) {
        (Some(Captured::Values(a)), Some(Captured::Values(b))) => {
            let [rows, columns] = a.shape();
            (0..rows).any(|row| (0..columns).any(|column| a.bits(row, column) != b.bits(row, column)))
        }
        _ => false,
    };
    let rows = |captures: &'_ Captures, id: TensorId| {
        let written = if id == TensorId::KRows { &captures.k_written } else { &captures.v_written };
        written.clone()
    };
    TensorId::ALL.into_iter().find_map(|id| {
        if !matches!(id, TensorId::KRows | TensorId::VRows) {
            return differs(id).then(|| id.name().to_owned());
        }
        let (a, b) = (rows(clean, id)?, rows(faulty, id)?);
        let prefix = if id == TensorId::KRows { "k" } else { "v" };
        if a.rows != b.rows {
            return Some(format!("{prefix}_written_rows"));
        }
        let bits = |rows: &device::WrittenRows| {
            rows.values.values().map(|v| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        (bits(&a) != bits(&b)).then(|| format!("{prefix}_written_values"))
    })
}
