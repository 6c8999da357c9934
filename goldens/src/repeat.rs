//! Two runs of one kernel on the same inputs must agree bit for bit: what order a sum takes is the kernel's
//! choice, but a fixed kernel makes it once.

use cases::{Case, Kernel};
use device::{Bundle, Captured, Captures, WrittenRows};
use half::bf16;
use ndarray::{Array, Array2, Dimension, IntoDimension as _};
use reference::{Tensor, TensorId};

use crate::bits::compare_bf16;
use crate::compare::{same, same_bf16, same_bytes, same_f32};
use crate::report::{CaseReport, Check, Verdict};

/// Adds the check `repeatable` to each report whose bundle repeats an earlier one, and fails it where the two
/// differ. `bundles` and `reports` go together.
pub fn repeatability(bundles: &[Bundle], reports: &mut [CaseReport]) {
    for later in 1..bundles.len().min(reports.len()) {
        let earlier = (0..later).find(|&earlier| same_run(&bundles[earlier].case, &bundles[later].case));
        let Some(earlier) = earlier else { continue };
        let (Some(a), Some(b)) = (&bundles[earlier].captures, &bundles[later].captures) else { continue };
        // Two bundles of one run mostly have one name.
        let first = format!("{} ({})", reports[earlier].name, bundles[earlier].case.path.display());
        let (check, differs) = compare_runs("this run", &first, a, b);
        let report = &mut reports[later];
        if check.verdict == Verdict::Fail {
            report.verdict = Verdict::Fail;
            report.first_divergence = report.first_divergence.take().or(differs);
        }
        report.checks.push(check);
    }
}

/// Whether two cases say that the same kernel ran on the same inputs.
fn same_run(a: &Case, b: &Case) -> bool {
    let batch = |case: &Case| match &case.kernel {
        Kernel::DecodeLayer(decode) => Some(decode.batch.clone()),
        Kernel::Tokens(_) => None,
    };
    batch(a).is_some()
        && batch(a) == batch(b)
        && a.device == b.device
        && (&a.geometry, a.layers, a.seed, a.max_seq, a.pages) == (&b.geometry, b.layers, b.seed, b.max_seq, b.pages)
        && a.rope_theta.to_bits() == b.rope_theta.to_bits()
        && (&a.tensors, &a.padding, &a.poison) == (&b.tensors, &b.padding, &b.poison)
}

/// Whether two caches were written alike; NaN equals NaN.
fn same_writes(a: &WrittenRows, b: &WrittenRows) -> bool {
    let values = match (&a.values, &b.values) {
        (Captured::Values(a), Captured::Values(b)) => a.dim() == b.dim() && differences(a, b).0 == 0,
        (a, b) => a == b,
    };
    values && a.rows == b.rows
}

/// Where two caches that were written differently differ first.
fn difference(a: &WrittenRows, b: &WrittenRows) -> String {
    let rows = |written: &WrittenRows| written.rows.values().map(|rows| rows.to_vec());
    let (Some(in_a), Some(in_b)) = (rows(a), rows(b)) else { return "the rows written".to_owned() };
    let only = |these: &[i64], those: &[i64]| these.iter().find(|row| !those.contains(row)).copied();
    if let Some(row) = only(&in_a, &in_b).or_else(|| only(&in_b, &in_a)) {
        return format!("cache row {row} was written by one of them only");
    }
    match (&a.values, &b.values) {
        (Captured::Values(x), Captured::Values(y)) if in_a == in_b && x.dim() == y.dim() => {
            let (count, first) = differences(x, y);
            let columns = x.ncols().max(1);
            let place = first.map(|first| (in_a.get(first / columns).copied().unwrap_or_default(), first % columns));
            let place = place.map(|(row, column)| format!(", first in cache row {row}, channel {column}"));
            format!("{count} of {} elements{}", x.len(), place.unwrap_or_default())
        }
        _ => "the rows written or their values".to_owned(),
    }
}

/// How many elements of two BF16 arrays of one shape differ, and where in them the first does; NaN equals NaN.
fn differences(a: &Array2<bf16>, b: &Array2<bf16>) -> (u64, Option<usize>) {
    let (a, b) = (a.as_standard_layout(), b.as_standard_layout());
    let found = compare_bf16(a.as_slice().unwrap_or_default(), b.as_slice().unwrap_or_default());
    (found.differing, found.first)
}

/// The check on two runs by their names, and the first tensor that differs.
pub fn compare_runs(later: &str, earlier: &str, a: &Captures, b: &Captures) -> (Check, Option<String>) {
    let compared = compare_all(a, b);
    match compared.difference {
        Some(difference) => {
            let detail = format!("{later} and {earlier} differ at {difference}");
            (check(Verdict::Fail, detail), Some(difference.tensor.to_owned()))
        }
        None => {
            let verdict = if compared.tensors > 0 { Verdict::Pass } else { Verdict::Unjudged };
            (check(verdict, format!("{} tensors equal those of {earlier}, bit for bit", compared.tensors)), None)
        }
    }
}

/// Several runs of one kernel on one case, each compared with the first as it comes, so that no more than two are held.
#[derive(Clone, Debug)]
pub struct Repeats<'a> {
    first: &'a Captures,
    /// Runs seen, the first one included.
    runs: usize,
    /// Tensors that every further run was compared in, at least.
    tensors: usize,
    /// The first run that differs, by its number from 1, and how.
    differs: Option<(usize, Difference)>,
}

impl<'a> Repeats<'a> {
    /// Nothing but the first run yet.
    #[must_use]
    pub fn of(first: &'a Captures) -> Self {
        Self { first, runs: 1, tensors: usize::MAX, differs: None }
    }

    /// One more run. What only one of two runs gave is a difference: both were asked for the same.
    pub fn see(&mut self, later: &Captures) {
        self.runs += 1;
        let compared = compare_all(self.first, later);
        self.tensors = self.tensors.min(compared.tensors);
        let difference = compared.difference.or_else(|| compared.lone.map(Difference::absent));
        if let (None, Some(difference)) = (&self.differs, difference) {
            self.differs = Some((self.runs, difference));
        }
    }

    /// Whether a run differed.
    #[must_use]
    pub fn differ(&self) -> bool {
        self.differs.is_some()
    }

    /// Adds the check `repeatable` to the report on the first run, and fails it where a run differed.
    pub fn add_to(self, report: &mut CaseReport) {
        let check = match self.differs {
            Some((run, difference)) => {
                report.verdict = Verdict::Fail;
                report.first_divergence = report.first_divergence.take().or(Some(difference.tensor.to_owned()));
                check(Verdict::Fail, format!("run {run} and run 1 differ at {difference}"))
            }
            None if self.runs < 2 || self.tensors == 0 => {
                check(Verdict::Unjudged, "there is nothing that two runs gave to compare".to_owned())
            }
            None => {
                check(Verdict::Pass, format!("{} tensors of {} runs are equal, bit for bit", self.tensors, self.runs))
            }
        };
        report.checks.push(check);
    }
}

fn check(verdict: Verdict, detail: String) -> Check {
    Check { name: "repeatable".to_owned(), verdict, detail }
}

/// Where two runs differ first, in the order in which a run makes its tensors.
#[derive(Clone, Debug)]
struct Difference {
    tensor: &'static str,
    what: String,
    why: &'static str,
}

impl Difference {
    fn absent(tensor: &'static str) -> Self {
        Self { tensor, what: "only one of them gave it".to_owned(), why: "both ran the same command" }
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}; {}", self.tensor, self.what, self.why)
    }
}

/// How two runs compare.
#[derive(Default)]
struct Compared {
    /// Tensors that both hold.
    tensors: usize,
    /// The first that differs.
    difference: Option<Difference>,
    /// The first that only one of them holds.
    lone: Option<&'static str>,
}

impl Compared {
    /// Adds a tensor; `differs` says how two values of it differ.
    fn add<T>(
        &mut self,
        tensor: &'static str,
        a: Option<T>,
        b: Option<T>,
        differs: impl FnOnce(T, T) -> Option<String>,
    ) {
        match (a, b) {
            (Some(a), Some(b)) => {
                self.tensors += 1;
                if let (None, Some(what)) = (&self.difference, differs(a, b)) {
                    let why = match tensor {
                        "out" => {
                            "the contract has two FP32 parts, and a sum of two does not depend on order, so no \
                             difference is allowed"
                        }
                        _ => "a fixed kernel on the same inputs gives the same bits",
                    };
                    self.difference = Some(Difference { tensor, what, why });
                }
            }
            (None, None) => {}
            _ => self.lone = self.lone.or(Some(tensor)),
        }
    }
}

fn compare_all(a: &Captures, b: &Captures) -> Compared {
    let mut compared = Compared::default();
    for id in TensorId::ALL {
        let written = match id {
            TensorId::KRows => Some((&a.k_written, &b.k_written)),
            TensorId::VRows => Some((&a.v_written, &b.v_written)),
            _ => None,
        };
        if let Some((a, b)) = written {
            compared.add(id.name(), a.as_ref(), b.as_ref(), |a, b| (!same_writes(a, b)).then(|| difference(a, b)));
        } else {
            let values = |captures: &'_ Captures| captures.tensors.get(&id).and_then(|t| t.values().cloned());
            compared.add(id.name(), values(a), values(b), |a, b| tensors(&a, &b));
        }
    }
    let (a, b) = (&a.tokens, &b.tokens);
    let bits32 = |a: &f32, b: &f32| same_f32(*a, *b);
    let bits16 = |a: &bf16, b: &bf16| same_bf16(*a, *b);
    compared.add("prefill_hidden", held(&a.prefill_hidden), held(&b.prefill_hidden), |a, b| arrays(a, b, bits16));
    compared.add("decode_hidden", held(&a.decode_hidden), held(&b.decode_hidden), |a, b| arrays(a, b, bits16));
    compared.add("top2_logits", held(&a.top2_logits), held(&b.top2_logits), |a, b| arrays(a, b, bits32));
    compared.add("top2_ids", held(&a.top2_ids), held(&b.top2_ids), |a, b| arrays(a, b, i64::eq));
    compared.add("token_ids", held(&a.token_ids), held(&b.token_ids), |a, b| arrays(a, b, i64::eq));
    compared
}

fn held<T>(captured: &Option<Captured<T>>) -> Option<&T> {
    captured.as_ref().and_then(Captured::values)
}

/// How two tensors of a layer differ.
fn tensors(a: &Tensor, b: &Tensor) -> Option<String> {
    let [rows, columns] = a.shape();
    let (count, first) = match (a, b) {
        (Tensor::Bf16(a), Tensor::Bf16(b)) => differences(a, b),
        _ => {
            let places = (0..rows).filter(|&row| !same_bytes(a, b, row));
            let places = places.flat_map(|row| (0..columns).map(move |column| (row, column)));
            let mut differing = places.filter(|&(row, column)| !same(a, b, row, column));
            let first = differing.next().map(|(row, column)| row * columns + column);
            (u64::from(first.is_some()) + differing.count() as u64, first)
        }
    };
    first.map(|first| {
        let (row, column) = (first / columns, first % columns);
        format!("{count} of {} elements, first [{row}, {column}]", rows * columns)
    })
}

/// How two arrays of one shape differ.
fn arrays<T, D: Dimension>(a: &Array<T, D>, b: &Array<T, D>, same: impl Fn(&T, &T) -> bool) -> Option<String> {
    let mut differing = a.indexed_iter().zip(b.iter()).filter(|((_, a), b)| !same(a, b)).map(|((at, _), _)| at);
    let first = differing.next()?;
    let count = 1 + differing.count();
    let index = first.into_dimension();
    let index: Vec<String> = index.slice().iter().map(usize::to_string).collect();
    Some(format!("{count} of {} elements, first [{}]", a.len(), index.join(", ")))
}

#[cfg(test)]
mod tests {
    use device::TokenCaptures;
    use ndarray::array;

    use super::*;

    fn captures(out: f32, ids: [i64; 2]) -> Captures {
        let tokens =
            TokenCaptures { token_ids: Some(Captured::Values(array![[ids[0], ids[1]]])), ..TokenCaptures::default() };
        let scales = Tensor::F32(Array2::from_elem((16, 1), out));
        Captures { tensors: [(TensorId::ActScales, Captured::Values(scales))].into(), tokens, ..Captures::default() }
    }

    fn seen(first: &Captures, later: &[Captures]) -> (Option<(usize, String)>, usize) {
        let mut repeats = Repeats::of(first);
        later.iter().for_each(|later| repeats.see(later));
        let differs = repeats.differs.as_ref().map(|(run, difference)| (*run, difference.to_string()));
        (differs, repeats.tensors)
    }

    #[test]
    fn runs_are_compared_in_all_that_they_gave() {
        let first = captures(1.0, [3, 4]);
        assert_eq!(seen(&first, &[first.clone(), first.clone()]), (None, 2));
        let nan = captures(f32::NAN, [3, 4]);
        assert_eq!(seen(&nan, std::slice::from_ref(&nan)), (None, 2));
        let (differs, _) = seen(&first, &[first.clone(), captures(1.0, [3, 5]), captures(2.0, [3, 4])]);
        let (run, told) = differs.unwrap();
        assert_eq!(run, 3);
        assert!(told.starts_with("token_ids: 1 of 2 elements, first [0, 1]; "), "{told}");
        let (_, told) = seen(&first, &[captures(-1.0, [0, 0])]).0.unwrap();
        assert!(told.starts_with("act_scales: 16 of 16 elements, first [0, 0]; "), "{told}");
        let less = Captures { tensors: std::collections::BTreeMap::new(), ..first.clone() };
        let (_, told) = seen(&first, &[less]).0.unwrap();
        assert!(told.starts_with("act_scales: only one of them gave it"), "{told}");
    }
}
