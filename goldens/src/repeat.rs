//! Two runs of one kernel on the same inputs must agree bit for bit: what order a sum takes is the kernel's
//! choice, but a fixed kernel makes it once.

use cases::{Case, Kernel};
use device::{Bundle, Captured, Captures, WrittenRows};
use half::bf16;
use ndarray::Array2;
use reference::{Tensor, TensorId};

use crate::bits::compare_bf16;
use crate::compare::{same, same_bytes};
use crate::report::{CaseReport, Check, Verdict};

/// Adds the check `repeatable` to each report whose bundle repeats an earlier one, and fails it where the two
/// differ. `bundles` and `reports` go together.
pub fn repeatability(bundles: &[Bundle], reports: &mut [CaseReport]) {
    for later in 1..bundles.len().min(reports.len()) {
        let earlier = (0..later).find(|&earlier| same_run(&bundles[earlier].case, &bundles[later].case));
        let Some(earlier) = earlier else { continue };
        let (Some(a), Some(b)) = (&bundles[earlier].captures, &bundles[later].captures) else { continue };
        let (check, differs) = compare_runs("this run", &reports[earlier].name, a, b);
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
    const NAME: &str = "repeatable";
    let mut compared = 0;
    for id in TensorId::ALL {
        let written = match id {
            TensorId::KRows => Some((&a.k_written, &b.k_written)),
            TensorId::VRows => Some((&a.v_written, &b.v_written)),
            _ => None,
        };
        let difference = if let Some((Some(x), Some(y))) = written {
            compared += 1;
            (!same_writes(x, y)).then(|| difference(x, y))
        } else {
            let values = |captures: &Captures| captures.tensors.get(&id).and_then(|t| t.values().cloned());
            let (Some(x), Some(y)) = (values(a), values(b)) else { continue };
            compared += 1;
            let [rows, columns] = x.shape();
            let (count, first) = match (&x, &y) {
                (Tensor::Bf16(x), Tensor::Bf16(y)) => differences(x, y),
                _ => {
                    let places = (0..rows).filter(|&row| !same_bytes(&x, &y, row));
                    let places = places.flat_map(|row| (0..columns).map(move |column| (row, column)));
                    let mut differing = places.filter(|&(row, column)| !same(&x, &y, row, column));
                    let first = differing.next().map(|(row, column)| row * columns + column);
                    (u64::from(first.is_some()) + differing.count() as u64, first)
                }
            };
            first.map(|first| {
                let (row, column) = (first / columns, first % columns);
                format!("{count} of {} elements, first [{row}, {column}]", rows * columns)
            })
        };
        if let Some(difference) = difference {
            let why = match id {
                TensorId::Out => {
                    "the contract has two FP32 parts, and a sum of two does not depend on order, so no difference is \
                     allowed"
                }
                _ => "a fixed kernel on the same inputs gives the same bits",
            };
            let detail = format!("{later} and {earlier} differ at {}: {difference}; {why}", id.name());
            let check = Check { name: NAME.to_owned(), verdict: Verdict::Fail, detail };
            return (check, Some(id.name().to_owned()));
        }
    }
    let verdict = if compared > 0 { Verdict::Pass } else { Verdict::Unjudged };
    let detail = format!("{compared} tensors equal those of {earlier}, bit for bit");
    (Check { name: NAME.to_owned(), verdict, detail }, None)
}
