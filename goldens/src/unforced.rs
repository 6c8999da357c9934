//! Tensors behind a gap: a stage with freedom whose output the device did not give lies before them. The
//! permitted freedoms are sampled inside the reference, and the device is judged against that distribution
//! (`docs/verdicts.md`, Unforced).

mod flips;
mod sampling;
mod scale;

use std::collections::BTreeSet;
use std::sync::Arc;

use half::bf16;
use ndarray::Array2;
use reference::bounds::bf16_cell;
use reference::rounding::{round_f32, to_bf16};
use reference::stages::{Context, STAGES, Stage, run_stage, stage_of};
use reference::{BATCH, Deviation, LayerInputs, Policy, Rounding, Site, Tensor, TensorId, Trace};

use crate::Mark;
use crate::compare::{Found, Session, found_writes, narrowing_mark, same, same_bf16, tie_tally};
use crate::judge::Progress;
use crate::place::{counted, place};
use crate::rules::TieTally;
use crate::spread::{Distribution, Row, TESTS};
use crate::tally::Comparison;

use sampling::Gap;
pub use sampling::Sampled;
use scale::Scale;

/// Judges `device` against the reference run forward from what is known, and against sampled runs of it at the
/// run's false-alarm probability. Without `sampling` every difference stays drift.
pub fn compare(
    session: &mut Session<'_, '_>,
    id: TensorId,
    device: &Arc<Tensor>,
    known: &Trace,
    sampling: Option<f64>,
    progress: &dyn Progress,
) -> Comparison {
    let inputs = session.inputs;
    let deviations = session.deviations;
    let needed = needed_stages(id, known, deviations);
    let mut nominal = replay(&session.context(&session.rules.policy), known, &needed, None);
    // The nearest of the rows that share a slot is taken for its writer.
    let distance = |row: usize| -> f64 {
        let (nominal, device) = (nominal.bf16(id), device.bf16());
        (0..device.ncols()).map(|n| (nominal[(row, n)].to_f64() - device[(row, n)].to_f64()).powi(2)).sum()
    };
    let holds = |row: usize| {
        let slots = &inputs.batch.slots;
        (0..BATCH).filter(|&other| slots[other] == slots[row]).all(|other| distance(row) <= distance(other))
    };
    let found = found_writes(session, id, &holds);
    let dim = inputs.geometry.head_dim;
    let found = |row: usize, column: usize| found.as_ref().map_or(Found::Listed, |found| found[(row, column / dim)]);

    let faulty = touched(stage_of(id), deviations);
    // Faults that are another rounding rule leave the rest of the stage as it is.
    let recast = faulty && deviations.iter().all(|deviation| deviation.rule.is_some());
    let site = stage_of(id).sites.last().copied().filter(|site| !site.is_int8() && !faulty);
    let cast = Cast { id, site, device, found: &found };
    let mut comparison = cast.beside(session, &nominal);
    if !comparison.drifts() {
        return comparison;
    }
    let scale = Scale::new(&comparison.reference, id, inputs);
    let drifts = |row, column| comparison.marks[(row, column)] == Mark::Drift;
    comparison.energy = scale.measure(device, &comparison.reference, drifts).iter().map(|row| row.energy).sum();
    if let Some(false_alarm) = sampling {
        let policy = session.rules.policy.clone();
        let rows = distinct_rows(inputs);
        let gap = Gap { session, id, site, policy: &policy, known, needed: &needed, nominal: &nominal };
        let sampled = || gap.sample(&scale, &rows, progress);
        // Where nothing else was captured, every device of the case has the same distribution.
        let alone = session.evidence.tensors.keys().eq([&id]);
        let sampled = match session.memo.filter(|_| alone) {
            Some(memo) => memo.sampled(id, &policy, deviations, sampled),
            None => sampled(),
        };
        let canonical = Arc::clone(&comparison.reference);
        let nearest = sampled.nearest_flips(&scale, device).map(|flips| (gap.run(&flips), gap.note(&flips)));
        if let Some((run, note)) = nearest {
            nominal = run;
            // Beside the nearest run, more of the device's ties are seen.
            comparison = Comparison { energy: comparison.energy, ..cast.beside(session, &nominal) };
            comparison.notes.push(note);
        }
        let policy = session.rules.policy.clone();
        let rules = ruled(&policy, deviations);
        let test = Test {
            id,
            inputs,
            scale: &scale,
            rules: &rules,
            lambda: session.confidence.lambda(),
            attention: needed.iter().any(|&stage| STAGES[stage].writes.contains(&TensorId::AttnOut)),
            whole: faulty && !recast,
        };
        test.judge(&mut comparison, &nominal, &rows, &sampled.distribution, false_alarm / TESTS);
        // What flips before the tensor explain is explained, not exact.
        for ((row, column), mark) in comparison.marks.indexed_iter_mut() {
            if *mark == Mark::Exact && !same(device, &canonical, row, column) {
                *mark = Mark::Flip;
            }
        }
    }
    if comparison.drifts() {
        comparison.notes.extend(other_ties(session, id, device, &comparison.reference));
    }
    // A kernel with faults in attention may have other padding rows.
    if id == TensorId::AttnOut && !faulty {
        padding_rows(&mut comparison, inputs);
    }
    comparison
}

/// Says so when the other named policy explains most of what differs: then it is ties at sites that were not captured,
/// which cannot be told apart one by one behind them.
fn other_ties(session: &Session<'_, '_>, id: TensorId, device: &Tensor, reference: &Tensor) -> Option<String> {
    let differing = |reference: &Tensor| {
        let shape = device.shape();
        let places = (0..shape[0]).flat_map(|row| (0..shape[1]).map(move |column| (row, column)));
        places.filter(|&(row, column)| !same(device, reference, row, column)).count()
    };
    let asked = &session.rules.policy;
    let (name, other) = [("production", Policy::production()), ("rne", Policy::rne())]
        .into_iter()
        .find(|(_, policy)| Site::ALL.iter().any(|&site| policy.at(site) != asked.at(site)))?;
    // From the inputs on: what is known without freedom was computed under the rules asked for.
    let start = Trace::new();
    let needed = needed_stages(id, &start, session.deviations);
    let replayed = replay(&session.context(&other), &start, &needed, None);
    let (here, there) = (differing(reference), differing(replayed.get(id)?));
    (there * 4 < here).then(|| {
        format!(
            "under policy {name} {there} elements differ instead of {here}: the device breaks ties another way at a site \
             before this tensor that was not captured"
        )
    })
}

/// The last cast of a tensor behind a gap.
struct Cast<'a> {
    id: TensorId,
    site: Option<Site>,
    device: &'a Arc<Tensor>,
    /// What the device says of an element's cache row.
    found: &'a dyn Fn(usize, usize) -> Found,
}

impl Cast<'_> {
    /// The device beside a run: every element exact, a tie or drift, for nothing is measured yet. The cast's tie rule is read
    /// off the device first: with freedom before it single ties say little, all together much.
    fn beside(&self, session: &mut Session<'_, '_>, run: &Trace) -> Comparison {
        let (id, device) = (self.id, self.device);
        let wide = self.site.zip(run.wide(id));
        let violated = wide.is_some_and(|(site, wide)| session.rules.settle(site, majority(wide, device.bf16(), id)));
        let policy = &session.rules.policy;
        let reference = renarrowed(run, id, self.site, policy);
        // Under a violated tie rule, ties alone are set apart before anything is measured.
        let tie = |row, column| {
            let mark = |(site, wide): (Site, &Arc<Array2<f32>>)| {
                narrowing_mark(wide[(row, column)], device.bf16()[(row, column)], policy.at(site))
            };
            violated && wide.map(mark) == Some(Mark::Tie)
        };
        let mark = |(row, column)| match (self.found)(row, column) {
            Found::OtherRow => Mark::Skipped,
            _ if same(device, &reference, row, column) => Mark::Exact,
            Found::Unlisted => Mark::Skipped,
            _ if tie(row, column) => Mark::Tie,
            _ => Mark::Drift,
        };
        let [rows, columns] = device.shape();
        Comparison {
            id,
            forced: false,
            device: Arc::clone(device),
            marks: Array2::from_shape_fn((rows, columns), mark),
            reference: Arc::new(reference),
            energy: 0.0,
            violated,
            notes: self.site.and_then(|site| session.rules.violation(site).cloned()).into_iter().collect(),
        }
    }
}

/// The tests of one tensor.
struct Test<'a, 'd> {
    id: TensorId,
    inputs: &'a LayerInputs<'d>,
    scale: &'a Scale,
    rules: &'a Policy,
    lambda: f64,
    /// Whether attention lies behind the gap.
    attention: bool,
    /// Whether values count as they are: a kernel with faults may have other casts in the tensor's own stage.
    whole: bool,
}

impl Test<'_, '_> {
    /// Turns drift that permitted freedoms reach into explained flips. Everything is drift at first.
    fn judge(&self, comparison: &mut Comparison, nominal: &Trace, rows: &[usize], samples: &Distribution, p: f64) {
        let device = Arc::clone(&comparison.device);
        let reference = Arc::clone(&comparison.reference);
        let measured =
            self.scale.measure(&device, &reference, |row, column| comparison.marks[(row, column)] == Mark::Drift);
        // A replica of row 0 that does not have its distance is a row of its own.
        let mut rows = rows.to_vec();
        let replicas = |row: &usize| !rows.contains(row) && measured[*row].energy != measured[0].energy;
        let strays: Vec<usize> = (0..BATCH).filter(replicas).collect();
        rows.extend(strays);
        let (far, how_far) = self.rows_too_far(&measured, &rows, samples, p);
        let leaning = self.rows_leaning(&measured, samples);

        for ((row, column), mark) in comparison.marks.indexed_iter_mut().filter(|(_, mark)| **mark == Mark::Drift) {
            let at = place(self.id, self.inputs.geometry, row, column).row;
            if far.contains(&at) || leaning.contains(&at) {
                continue;
            }
            let distance = self.scale.distance(&device, &reference, row, column);
            // One flip inside attention moves a head alone, by up to about a step.
            let least = match self.id {
                TensorId::AttnOut | TensorId::AttnOutI8 => 1.0,
                // Codes are made from BF16 values, of which one step is up to half a code.
                TensorId::NormedI8 | TensorId::MlpNormI8 => 0.5,
                // A kernel with faults may narrow where the contract does not.
                _ if self.whole => 1.0,
                // About one FP32 ULP.
                _ if !self.scale.narrowed => 2f64.powi(-14),
                _ => 0.0,
            };
            let deviation = measured[at].deviation_without(distance, self.scale.narrowed);
            // A row of one scalar has no other element to be judged by: its energy was.
            let alone = device.shape()[1] == 1;
            let reach = if alone { f64::INFINITY } else { (2.0 * self.lambda * deviation).max(least) };
            let required = self.required(&device, &reference, nominal, row, column);
            if required <= reach {
                *mark = Mark::Flip;
            }
        }
        if !far.is_empty() {
            comparison.notes.push(format!(
                "{} further from the reference than permitted freedoms reach ({how_far}, against {} sampled rows)",
                counted("row", &far.into_iter().collect::<Vec<_>>()),
                samples.energies.len()
            ));
        }
        if !leaning.is_empty() {
            comparison.notes.push(format!(
                "{}: nearly every element moved by a step, or nearly all the same way, as no permitted freedom moves them",
                counted("row", &leaning.into_iter().collect::<Vec<_>>()),
            ));
        }
    }

    /// Rows whose energies permitted freedoms do not reach: the `k` largest together, for some `k`.
    fn rows_too_far(
        &self,
        measured: &[Row],
        rows: &[usize],
        samples: &Distribution,
        p: f64,
    ) -> (BTreeSet<usize>, String) {
        let active = self.inputs.batch.active;
        // Behind attention, padding rows hold what row 0 has there, and move with it: they are looked at one by one.
        let (bound, free): (Vec<usize>, Vec<usize>) = rows.iter().partition(|&&row| self.attention && row >= active);
        let groups = std::iter::once(free).chain(bound.into_iter().map(|row| vec![row]));
        let (mut set, mut how_far) = (BTreeSet::new(), String::new());
        for group in groups {
            let energies: Vec<f64> = group.iter().map(|&row| measured[row].energy).collect();
            let share = p * group.len() as f64 / rows.len() as f64;
            let (far, how) = samples.too_far(&energies, |index| self.scale.floor(group[index]), share);
            if !far.is_empty() {
                set.extend(far.into_iter().map(|index| group[index]));
                how_far = how;
            }
        }
        // Replicas of a row that is too far are so too.
        let least = set.iter().map(|&row| measured[row].energy).fold(f64::INFINITY, f64::min);
        set.extend((0..BATCH).filter(|row| !rows.contains(row) && measured[*row].energy >= least));
        (set, how_far)
    }

    /// Rows in which nearly every element moved, or nearly all moved one way relative to the sign of the value.
    fn rows_leaning(&self, measured: &[Row], samples: &Distribution) -> BTreeSet<usize> {
        // FP32 rows move as a whole with the scalars they are multiplied by.
        if !self.scale.narrowed {
            return BTreeSet::new();
        }
        let leaning = |row: &Row| {
            // A displacement of at most about a step leaves a quarter of the elements where they are.
            let all_moved = row.differing * 100 > row.elements * 82 && row.energy < 2.0 && row.elements >= 512;
            let limit = samples.lean.max(0.5) + self.lambda / (row.differing as f64).sqrt();
            all_moved || row.lean.abs() > limit
        };
        (0..BATCH).filter(|&row| leaning(&measured[row])).collect()
    }

    /// How far, in units, the value before the last narrowing must have been from the nominal one for the
    /// device's bits: zero when it is on the boundary.
    fn required(&self, device: &Tensor, reference: &Tensor, nominal: &Trace, row: usize, column: usize) -> f64 {
        let whole = self.scale.distance(device, reference, row, column);
        let unit = self.scale.units[(row, column)];
        let gap = |value: f64, (low, high): (f64, f64)| (low - value).max(value - high).max(0.0);
        match (device, nominal.wide(self.id)) {
            _ if self.whole => whole,
            (Tensor::I8(codes), Some(scaled)) => {
                let code = f64::from(codes[(row, column)]);
                gap(f64::from(scaled[(row, column)]), (code - 0.5, code + 0.5))
            }
            (Tensor::Bf16(values), Some(_)) if self.id == TensorId::Out => {
                self.required_at_out(values[(row, column)], nominal, row, column) / unit
            }
            (Tensor::Bf16(values), Some(wide)) => {
                let rule = stage_of(self.id).sites.last().map_or(Rounding::Rne, |&site| self.rules.at(site));
                let cell = bf16_cell(values[(row, column)], rule);
                cell.map_or(f64::INFINITY, |cell| gap(f64::from(wide[(row, column)]), cell) / unit)
            }
            _ => whole,
        }
    }

    /// The same for `out`, which is narrowed from the sum of two narrowed values: the least move of either
    /// one, the other held.
    fn required_at_out(&self, device: bf16, nominal: &Trace, b: usize, n: usize) -> f64 {
        let parts = nominal.f32(TensorId::DownAccParts);
        let Some((low, high)) = bf16_cell(device, self.rules.at(Site::Out)) else { return f64::INFINITY };
        let d = parts[(b, n)] + parts[(BATCH + b, n)];
        let (down, residual) = (self.rules.at(Site::Down), self.rules.at(Site::Residual));
        let narrowed = nominal.bf16(TensorId::PostNormPartial)[(b, n)].to_f32();
        let h1 = nominal.wide(TensorId::PostNormPartial).map_or(narrowed, |wide| wide[(b, n)]);
        let h1b = f64::from(if residual == Rounding::None { h1 } else { narrowed });
        let db = f64::from(round_f32(d, down));
        let of_d = move_needed(f64::from(d), (low - h1b, high - h1b), down);
        let of_h1 = move_needed(f64::from(h1), (low - db, high - db), residual);
        of_d.min(of_h1)
    }
}

/// How far `value` must move for its narrowing to fall into `target`.
fn move_needed(value: f64, target: (f64, f64), rule: Rounding) -> f64 {
    if rule == Rounding::None {
        return (target.0 - value).max(value - target.1).max(0.0);
    }
    let step = |x: bf16, up: bool| {
        let bits = x.to_bits();
        let (magnitude, negative) = (bits & 0x7FFF, bits & 0x8000 != 0);
        match (magnitude, negative == up) {
            (0, _) => bf16::from_bits(if up { 1 } else { 0x8001 }),
            (_, true) => bf16::from_bits(bits - 1),
            (_, false) => bf16::from_bits(bits + 1),
        }
    };
    // The narrowed values at the target's two ends, inside it.
    let (mut lowest, mut highest) = (bf16::from_f64(target.0), bf16::from_f64(target.1));
    if lowest.to_f64() < target.0 {
        lowest = step(lowest, true);
    }
    if highest.to_f64() > target.1 {
        highest = step(highest, false);
    }
    let (Some((low, _)), Some((_, high))) = (bf16_cell(lowest, rule), bf16_cell(highest, rule)) else {
        return f64::INFINITY;
    };
    (low - value).max(value - high).max(0.0)
}

/// Padding rows of attention's output are copies of the device's own row 0, whatever freedom it took.
fn padding_rows(comparison: &mut Comparison, inputs: &LayerInputs<'_>) {
    let device = Arc::clone(&comparison.device);
    let device = device.bf16();
    let mut expected = comparison.reference.bf16().to_owned();
    for b in inputs.batch.active..BATCH {
        expected.row_mut(b).assign(&device.row(0));
        for n in 0..device.ncols() {
            let same = same_bf16(device[(b, n)], device[(0, n)]);
            comparison.marks[(b, n)] = if same { Mark::Exact } else { Mark::Drift };
        }
    }
    comparison.reference = Arc::new(Tensor::Bf16(expected));
}

/// The rules under which a kernel with faults narrows.
fn ruled(policy: &Policy, deviations: &[&Deviation]) -> Policy {
    deviations
        .iter()
        .filter_map(|deviation| deviation.rule)
        .fold(policy.clone(), |policy, (site, rule)| policy.with(site, rule))
}

/// Whether any of these deviations changes a stage.
pub fn touched(stage: &Stage, deviations: &[&Deviation]) -> bool {
    deviations.iter().any(|deviation| deviation.touches(stage))
}

/// What a stage reads under deviations.
pub fn reads(stage: &Stage, deviations: &[&Deviation]) -> Vec<TensorId> {
    let more = deviations.iter().flat_map(|deviation| deviation.reads_in(stage));
    stage.reads.iter().chain(more).copied().collect()
}

/// Stages to run so that `target` is made from what is known, as indices into the table.
pub fn needed_stages(target: TensorId, known: &Trace, deviations: &[&Deviation]) -> Vec<usize> {
    let mut wanted = BTreeSet::from([target]);
    let mut needed = Vec::new();
    for (index, stage) in STAGES.iter().enumerate().rev() {
        if stage.writes.iter().any(|id| wanted.contains(id)) {
            needed.push(index);
            wanted.extend(reads(stage, deviations).iter().filter(|&&id| known.get(id).is_none()));
        }
    }
    needed.reverse();
    needed
}

/// Runs stages on top of what is known; what is known stays as it is. With `nominal`, another run of these stages whose
/// rules differ at most in the cast that is the last of them, what follows from the same tensors without freedom is
/// taken from there.
fn replay(context: &Context<'_, '_>, known: &Trace, stages: &[usize], nominal: Option<&Trace>) -> Trace {
    let mut trace = known.clone();
    let last = stages.last();
    for index in stages {
        let stage = &STAGES[*index];
        let nominal = nominal.filter(|nominal| {
            let unchanged = |&id: &TensorId| match (trace.get(id), nominal.get(id)) {
                (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
                _ => false,
            };
            !stage.free && Some(index) != last && reads(stage, context.deviations).iter().all(unchanged)
        });
        match nominal {
            Some(nominal) => stage.writes.iter().for_each(|&id| trace.take(id, nominal)),
            None => {
                run_stage(stage, context, &mut trace);
            }
        }
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
    tie_tally(wide, device, id, |_, _| true).clear_majority()
}

/// Rows whose samples tell something: replicated padding rows repeat row 0.
fn distinct_rows(inputs: &LayerInputs<'_>) -> Vec<usize> {
    let active = inputs.batch.active;
    let row0 = inputs.hidden_states.row(0);
    (0..BATCH).filter(|&b| b < active || inputs.hidden_states.row(b) != row0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_move_that_a_narrowing_needs() {
        let one = bf16::from_f32(1.0);
        let cell = bf16_cell(one, Rounding::Rne).unwrap();
        assert_eq!(move_needed(1.0, cell, Rounding::Rne), 0.0);
        // From 1.0 to the lower end of the cell of 1.0078125.
        let next = bf16_cell(bf16::from_f32(1.007_812_5), Rounding::Rne).unwrap();
        assert_eq!(move_needed(1.0, next, Rounding::Rne), 0.003_906_25);
        assert_eq!(move_needed(1.003, next, Rounding::Rne), 1.003_906_25 - 1.003);
    }

    #[test]
    fn only_the_stages_behind_the_gap_are_run() {
        let names = |known: &Trace| -> Vec<&str> {
            needed_stages(TensorId::Out, known, &[]).into_iter().map(|i| STAGES[i].name).collect()
        };
        assert_eq!(names(&Trace::new()).len(), STAGES.len());
        let mut known = Trace::new();
        let any = Arc::new(Tensor::F32(Array2::zeros((1, 1))));
        known.force(TensorId::MlpDownTile, Arc::clone(&any));
        known.force(TensorId::PostNormPartial, any);
        assert_eq!(names(&known), ["down", "out"]);
    }
}
