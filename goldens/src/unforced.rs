//! Tensors behind a gap: a stage with freedom whose output the device did not give lies before them. The
//! permitted freedoms are sampled inside the reference, and the device is judged against that distribution
//! (`docs/verdicts.md`, Unforced).

use std::collections::BTreeSet;
use std::sync::Arc;

use half::bf16;
use ndarray::Array2;
use reference::rounding::{is_bf16_tie, to_bf16};
use reference::stages::{Context, STAGES, run_stage, stage_of};
use reference::{BATCH, DType, Freedom, LayerInputs, Policy, Rounding, Site, Tensor, TensorId, Trace};

use crate::Mark;
use crate::compare::{Found, Session, found_writes, same, same_bf16, view_bf16};
use crate::judge::Progress;
use crate::place::{counted, place};
use crate::rules::TieTally;
use crate::tally::Comparison;

/// Sampled devices.
const SAMPLES: u64 = 16;
/// Rows that a run may judge this way: its false-alarm probability is split over them.
const ROWS: f64 = 1024.0;

/// Judges `device` against the reference run forward from what is known, and against sampled runs of it.
pub fn compare(
    session: &mut Session<'_, '_>,
    id: TensorId,
    device: &Arc<Tensor>,
    known: &Trace,
    false_alarm: f64,
    progress: &dyn Progress,
) -> Comparison {
    let inputs = session.inputs;
    let needed = needed_stages(id, known);
    let nominal = replay(inputs, &session.rules.policy, known, &needed);
    let found = found_writes(session, id);
    let dim = inputs.geometry.head_dim;
    let found = |row: usize, column: usize| found.as_ref().map_or(Found::Listed, |found| found[(row, column / dim)]);

    // The tie rule of the tensor's own cast: with freedom before it single ties say little, all together much.
    let mut violated = false;
    let mut notes = Vec::new();
    let site = stage_of(id).sites.last().copied().filter(|site| !site.is_int8());
    if let (Some(site), Some(wide)) = (site, nominal.wide(id)) {
        violated = session.rules.settle(site, majority(wide, view_bf16(device), id));
        notes.extend(session.rules.violation(site).cloned());
    }
    let policy = session.rules.policy.clone();
    let reference = renarrowed(&nominal, id, site, &policy);
    let mut comparison = Comparison {
        id,
        forced: false,
        device: Arc::clone(device),
        marks: Array2::from_elem((device.shape()[0], device.shape()[1]), Mark::Exact),
        reference: Arc::new(reference),
        violated,
        notes,
    };
    let mut differs = false;
    for ((row, column), mark) in comparison.marks.indexed_iter_mut() {
        *mark = if found(row, column) == Found::OtherRow {
            Mark::Skipped
        } else if same(device, &comparison.reference, row, column) {
            Mark::Exact
        } else if found(row, column) == Found::Unlisted {
            Mark::Skipped
        } else {
            differs = true;
            Mark::Drift
        };
    }
    if !differs {
        return comparison;
    }

    // Energy of each row's difference from the nominal run, and of each sampled row's.
    let scale = Scale::new(&comparison.reference, id, inputs);
    let distinct = distinct_rows(inputs);
    let mut sampled = Vec::new();
    for seed in 0..SAMPLES {
        progress.step(&format!("{} against sampled device {} of {SAMPLES}", id.name(), seed + 1));
        let policy = policy.clone().under(Freedom::Sampled { seed });
        let trace = replay(inputs, &policy, known, &needed);
        if let Some(sample) = trace.get(id) {
            let energy = scale.energy(sample, &comparison.reference, |_, _| true);
            sampled.extend(distinct.iter().map(|&row| energy[row]));
        }
    }
    let limit = threshold(&mut sampled, false_alarm / ROWS).max(scale.floor());
    let element_limit = session.confidence.lambda() * limit.sqrt() + 1.0;
    let energy = scale.energy(device, &comparison.reference, |row, column| {
        comparison.marks[(row, column)] == Mark::Drift
    });

    let wide = nominal.wide(id);
    let mut beyond = BTreeSet::new();
    for ((row, column), mark) in comparison.marks.indexed_iter_mut() {
        if *mark != Mark::Drift {
            continue;
        }
        let at = place(id, inputs.geometry, row, column).row;
        let distance = scale.distance(device, &comparison.reference, row, column);
        if energy[at] > limit || energy[at].is_nan() {
            beyond.insert(at);
        } else if distance <= element_limit {
            *mark = Mark::Flip;
        }
        let tie = violated
            && wide.is_some_and(|wide| {
                let value = wide[(row, column)];
                let device = view_bf16(device)[(row, column)];
                is_bf16_tie(value)
                    && [Rounding::Rne, Rounding::TiesAway].into_iter().any(|r| same_bf16(device, to_bf16(value, r)))
            });
        if tie {
            *mark = Mark::Tie;
        }
    }
    if !beyond.is_empty() {
        let rows: Vec<usize> = beyond.into_iter().collect();
        let most = rows.iter().map(|&row| energy[row]).fold(0.0, f64::max);
        comparison.notes.push(format!(
            "{} further from the reference than permitted freedoms reach: {:.1} times the limit that {SAMPLES} sampled \
             devices set (mean square {most:.3e} against {limit:.3e})",
            counted("row", &rows),
            most / limit
        ));
    }
    if id == TensorId::AttnOut {
        padding_rows(&mut comparison, inputs);
    }
    comparison
}

/// Padding rows of attention's output are copies of the device's own row 0, whatever freedom it took.
fn padding_rows(comparison: &mut Comparison, inputs: &LayerInputs<'_>) {
    let device = Arc::clone(&comparison.device);
    let device = view_bf16(&device);
    let mut expected = view_bf16(&comparison.reference).to_owned();
    for b in inputs.batch.active..BATCH {
        expected.row_mut(b).assign(&device.row(0));
        for n in 0..device.ncols() {
            let same = same_bf16(device[(b, n)], device[(0, n)]);
            comparison.marks[(b, n)] = if same { Mark::Exact } else { Mark::Drift };
        }
    }
    comparison.reference = Arc::new(Tensor::Bf16(expected));
}

/// Stages to run so that `target` is made from what is known, as indices into the table.
fn needed_stages(target: TensorId, known: &Trace) -> Vec<usize> {
    let mut wanted = BTreeSet::from([target]);
    let mut needed = Vec::new();
    for (index, stage) in STAGES.iter().enumerate().rev() {
        if stage.writes.iter().any(|id| wanted.contains(id)) {
            needed.push(index);
            wanted.extend(stage.reads.iter().filter(|&&id| known.get(id).is_none()));
        }
    }
    needed.reverse();
    needed
}

/// Runs stages on top of what is known; what is known stays as it is.
fn replay(inputs: &LayerInputs<'_>, policy: &Policy, known: &Trace, stages: &[usize]) -> Trace {
    let mut trace = known.clone();
    for &index in stages {
        let stage = &STAGES[index];
        run_stage(stage, &Context { inputs, policy }, &mut trace);
        for id in stage.writes {
            if let Some(device) = known.get(*id) {
                trace.force(*id, Arc::clone(device));
            }
        }
    }
    trace
}

/// The nominal tensor under the rule settled for its cast.
fn renarrowed(nominal: &Trace, id: TensorId, site: Option<Site>, policy: &Policy) -> Tensor {
    match (site, nominal.wide(id), nominal.get(id)) {
        (Some(site), Some(wide), _) => Tensor::Bf16(wide.mapv(|value| to_bf16(value, policy.at(site)))),
        (_, _, Some(tensor)) => tensor.as_ref().clone(),
        _ => Tensor::F32(Array2::zeros((0, 0))),
    }
}

/// Ties of a cast behind a gap. Other differences blur them, so only a clear majority counts, and it counts
/// for all.
fn majority(wide: &Array2<f32>, device: ndarray::ArrayView2<'_, bf16>, id: TensorId) -> TieTally {
    let mut tally = TieTally::default();
    for ((row, column), &value) in wide.indexed_iter() {
        if is_bf16_tie(value) {
            let (even, away) = (to_bf16(value, Rounding::Rne), to_bf16(value, Rounding::TiesAway));
            tally.count(&even, &away, &device[(row, column)], || format!("{}[{row}, {column}]", id.name()));
        }
    }
    let (most, least) = (tally.even.max(tally.away), tally.even.min(tally.away));
    if most < 16 || most < 2 * least {
        TieTally { even: 0, away: 0, ..tally }
    } else if tally.even > tally.away {
        TieTally { away: 0, ..tally }
    } else {
        TieTally { even: 0, ..tally }
    }
}

/// Rows whose samples tell something: replicated padding rows repeat row 0.
fn distinct_rows(inputs: &LayerInputs<'_>) -> Vec<usize> {
    let active = inputs.batch.active;
    let row0 = inputs.hidden_states.row(0);
    (0..BATCH).filter(|&b| b < active || inputs.hidden_states.row(b) != row0).collect()
}

/// Units in which differences of a tensor are measured: the BF16 spacing at an element's size, or at the
/// size of its row where the element is small; one code for INT8.
struct Scale {
    units: Array2<f64>,
    rows: Vec<usize>,
}

impl Scale {
    fn new(reference: &Tensor, id: TensorId, inputs: &LayerInputs<'_>) -> Self {
        let [rows, columns] = reference.shape();
        let spacing = |x: f64| if x > 0.0 && x.is_finite() { 2f64.powi(x.log2().floor() as i32 - 7) } else { 1.0 };
        let mut units = Array2::from_elem((rows, columns), 1.0);
        if reference.dtype() != DType::I8 {
            for row in 0..rows {
                let squares: f64 = (0..columns).map(|c| f64::from(reference.get(row, c)).powi(2)).sum();
                let typical = (squares / columns.max(1) as f64).sqrt();
                for column in 0..columns {
                    let mut size = f64::from(reference.get(row, column)).abs().max(typical);
                    if id == TensorId::Out {
                        // The residual that the output is added to may be larger than their sum.
                        size = size.max(inputs.hidden_states[(row, column)].to_f64().abs());
                    }
                    units[(row, column)] = spacing(size);
                }
            }
        }
        let of = |row| place(id, inputs.geometry, row, 0).row;
        Self { units, rows: (0..rows).map(of).collect() }
    }

    /// Distance of one element in units; infinite when finiteness differs.
    fn distance(&self, a: &Tensor, b: &Tensor, row: usize, column: usize) -> f64 {
        let difference = (f64::from(a.get(row, column)) - f64::from(b.get(row, column))).abs();
        if difference.is_nan() { f64::INFINITY } else { difference / self.units[(row, column)] }
    }

    /// Mean square distance of each batch row.
    fn energy(&self, a: &Tensor, b: &Tensor, counts: impl Fn(usize, usize) -> bool) -> Vec<f64> {
        let mut sums = vec![0f64; BATCH];
        let mut elements = vec![0usize; BATCH];
        for row in 0..self.units.nrows() {
            for column in 0..self.units.ncols() {
                elements[self.rows[row]] += 1;
                if counts(row, column) && !same(a, b, row, column) {
                    sums[self.rows[row]] += self.distance(a, b, row, column).powi(2);
                }
            }
        }
        sums.iter().zip(elements).map(|(sum, n)| sum / n.max(1) as f64).collect()
    }

    /// The least limit: a few elements by one unit, however still the samples were.
    fn floor(&self) -> f64 {
        let elements = self.units.len() as f64 / BATCH as f64;
        8.0 / elements.max(1.0)
    }
}

/// The energy that a correct row exceeds with probability `p`: exceedances over the median of the samples
/// follow an exponential tail, whose mean is taken at its upper confidence limit.
fn threshold(samples: &mut [f64], p: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let Some(&median) = samples.get(samples.len() / 2) else { return 0.0 };
    let above: Vec<f64> = samples.iter().filter(|&&t| t > median).map(|t| t - median).collect();
    if above.is_empty() {
        return median;
    }
    let mean = above.iter().sum::<f64>() / above.len() as f64;
    let upper = mean * (1.0 + 2.0 / (above.len() as f64).sqrt());
    let share = above.len() as f64 / samples.len() as f64;
    median + upper * (share / p).max(1.0).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threshold_of_an_exponential_tail() {
        // Quantiles of an exponential distribution of mean 1.
        let mut samples: Vec<f64> = (0..256).map(|i| -(1.0 - (f64::from(i) + 0.5) / 256.0).ln()).collect();
        let limit = threshold(&mut samples, 1e-9);
        let exact = -(1e-9f64).ln();
        assert!(limit > exact && limit < 1.5 * exact, "{limit} against {exact}");
        assert_eq!(threshold(&mut [0.0; 8], 1e-9), 0.0);
    }

    #[test]
    fn only_the_stages_behind_the_gap_are_run() {
        let names = |known: &Trace| -> Vec<&str> {
            needed_stages(TensorId::Out, known).into_iter().map(|i| STAGES[i].name).collect()
        };
        assert_eq!(names(&Trace::new()).len(), STAGES.len());
        let mut known = Trace::new();
        let any = Arc::new(Tensor::F32(Array2::zeros((1, 1))));
        known.force(TensorId::MlpDownTile, Arc::clone(&any));
        known.force(TensorId::PostNormPartial, any);
        assert_eq!(names(&known), ["down", "out"]);
    }
}
