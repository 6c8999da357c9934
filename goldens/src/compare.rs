//! Forced comparisons: one function for each way in which a stage's output may be judged
//! (`docs/verdicts.md`). Every one of them recomputes from the device's own inputs to the stage.

use std::cell::LazyCell;
use std::sync::Arc;

use bytemuck::{NoUninit, cast_slice};
use half::bf16;
use ndarray::{Array2, ArrayView2, Axis, s};
use reference::bounds::{self, Bounded, Confidence};
use reference::inputs::cache_row;
use reference::kernels::{distinct_rows, exact_bf16_product};
use reference::rounding::{is_bf16_tie, is_code_tie, round_f32, to_bf16, to_code};
use reference::stages::{Context, KvSource, Output, stage_of};
use reference::{BATCH, Deviation, Freedom, LayerInputs, Policy, Products, Rounding, Site, Tensor, TensorId, Trace};

use crate::Mark;
use crate::cause::Memo;
use crate::evidence::Evidence;
use crate::rules::{Rules, TieTally};
use crate::tally::Comparison;
use crate::unforced::touched;

/// What every comparison of a bundle shares.
pub struct Session<'a, 'd> {
    /// The layer's inputs.
    pub inputs: &'a LayerInputs<'d>,
    /// Integer products over its weights.
    pub products: &'a Products,
    /// What the device gave.
    pub evidence: &'a Evidence,
    /// The rules in force.
    pub rules: Rules,
    /// How sure bounds are to hold.
    pub confidence: Confidence,
    /// Faults of the kernel that the device is compared with; none: the contract.
    pub deviations: &'a [&'a Deviation],
    /// What is kept between devices that ran one case.
    pub memo: Option<&'a Memo>,
}

impl<'a, 'd> Session<'a, 'd> {
    /// A run of the kernel under `policy`.
    pub fn context<'c>(&self, policy: &'c Policy) -> Context<'c, 'd>
    where
        'a: 'c,
    {
        Context::new(self.inputs, policy).sharing(self.products).deviating(self.deviations)
    }
}

/// Compares one output of a stage that was run on the device's own inputs, `known`.
pub fn compare(session: &mut Session<'_, '_>, output: Output, device: &Arc<Tensor>, known: &Trace) -> Comparison {
    use TensorId as T;
    let id = output.id;
    let faulty = touched(stage_of(id), session.deviations);
    let comparison = Comparison {
        id,
        forced: true,
        device: Arc::clone(device),
        marks: Array2::from_elem(device_dim(device), Mark::Drift),
        reference: Arc::new(output.tensor),
        energy: 0.0,
        violated: false,
        notes: Vec::new(),
    };
    match (id, output.wide) {
        // The contract's bounds are not those of a kernel with faults here.
        _ if faulty => exact(comparison),
        (T::NormedStates, Some(wide)) => narrowed(session, comparison, &wide, Site::Normed),
        (T::AllQPadded, Some(wide)) => narrowed(session, comparison, &wide, Site::Q),
        (T::KRows, Some(wide)) => narrowed(session, comparison, &wide, Site::KCache),
        (T::VRows, Some(wide)) => narrowed(session, comparison, &wide, Site::VCache),
        (T::PostNormPartial, Some(wide)) => narrowed(session, comparison, &wide, Site::Residual),
        (T::MlpNormIn, Some(wide)) => narrowed(session, comparison, &wide, Site::MlpIn),
        (T::NormedI8, Some(scaled)) => codes(session, comparison, &scaled, Site::NormedI8),
        (T::AttnOutI8, Some(scaled)) => codes(session, comparison, &scaled, Site::AttnOutI8),
        (T::MlpNormI8, Some(scaled)) => codes(session, comparison, &scaled, Site::MlpNormI8),
        (T::QProj | T::KProj | T::VProj | T::AttnProjFp32 | T::GateAccAll | T::UpAccAll, _) => {
            projection(session, comparison, known)
        }
        (T::InvRmsStates | T::InvRmsTile, _) => inverse_rms(session, comparison, known),
        (T::QProjNorm | T::KProjNorm, _) => head_norm(session, comparison, known),
        (T::AttnOut, Some(_)) => crate::attention::compare(session, comparison, known),
        (T::MlpDownTile, Some(_)) => silu(session, comparison, known),
        (T::DownAccParts, _) => down(session, comparison, known),
        (T::Out, Some(_)) => out(session, comparison, known),
        _ => exact(comparison),
    }
}

fn device_dim(device: &Tensor) -> (usize, usize) {
    let [rows, columns] = device.shape();
    (rows, columns)
}

/// Bit equality; NaN equals NaN.
pub fn same_f32(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Bit equality; NaN equals NaN.
pub fn same_bf16(a: bf16, b: bf16) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Whether two tensors hold the same bits at a place; NaN equals NaN.
pub fn same(a: &Tensor, b: &Tensor, row: usize, column: usize) -> bool {
    a.bits(row, column) == b.bits(row, column) || (a.get(row, column).is_nan() && b.get(row, column).is_nan())
}

/// Whether a row of two tensors holds the same bytes, found at memory speed: nothing in it needs a closer look then.
/// Rows that differ in the bits of a NaN alone do not.
pub fn same_bytes(a: &Tensor, b: &Tensor, row: usize) -> bool {
    a.dtype() == b.dtype() && row_bytes(a, row).is_some_and(|bytes| row_bytes(b, row) == Some(bytes))
}

/// The bytes of a row; `None` where they do not lie side by side.
fn row_bytes(tensor: &Tensor, row: usize) -> Option<&[u8]> {
    fn bytes<T: NoUninit>(values: ArrayView2<'_, T>, row: usize) -> Option<&[u8]> {
        values.index_axis_move(Axis(0), row).to_slice().map(cast_slice)
    }
    match tensor {
        Tensor::Bf16(values) => bytes(values.view(), row),
        Tensor::F32(values) => bytes(values.view(), row),
        Tensor::I8(values) => bytes(values.view(), row),
    }
}

/// A stage without freedom: the bits, or drift.
fn exact(mut comparison: Comparison) -> Comparison {
    let (device, reference) = (&comparison.device, &comparison.reference);
    for (row, mut marks) in comparison.marks.rows_mut().into_iter().enumerate() {
        if same_bytes(device, reference, row) {
            marks.fill(Mark::Exact);
            continue;
        }
        for (column, mark) in marks.iter_mut().enumerate() {
            *mark = if same(device, reference, row, column) { Mark::Exact } else { Mark::Drift };
        }
    }
    comparison
}

/// A BF16 narrowing of values that the contract fixes: only the direction of exact ties is open.
fn narrowed(session: &mut Session<'_, '_>, mut comparison: Comparison, wide: &Array2<f32>, site: Site) -> Comparison {
    let holds = |row: usize| {
        let device = comparison.device.bf16();
        wide.row(row)
            .iter()
            .zip(device.row(row))
            .all(|(&value, &device)| narrowing_mark(value, device, session.rules.policy.at(site)) != Mark::Drift)
    };
    let found = found_writes(session, comparison.id, &holds);
    let dim = session.inputs.geometry.head_dim;
    let found = |row, column| found.as_ref().map_or(Found::Listed, |found| found[(row, column / dim)]);
    let device = Arc::clone(&comparison.device);
    let device = device.bf16();
    let tally = tie_tally(wide, device, comparison.id, |row, column| found(row, column) == Found::Listed);
    comparison.violated = session.rules.settle(site, tally);
    let rule = session.rules.policy.at(site);
    comparison.reference = Arc::new(Tensor::Bf16(wide.mapv(|value| to_bf16(value, rule))));
    for (row, mut marks) in comparison.marks.rows_mut().into_iter().enumerate() {
        let all_exact = same_bytes(&comparison.device, &comparison.reference, row);
        for (column, mark) in marks.iter_mut().enumerate() {
            let narrowed = || narrowing_mark(wide[(row, column)], device[(row, column)], rule);
            let narrowed = if all_exact { Mark::Exact } else { narrowed() };
            *mark = match (found(row, column), narrowed) {
                (Found::OtherRow, _) => Mark::Skipped,
                // Old bytes that are not the new ones: a write is missing, which `k_written_rows` says.
                (Found::Unlisted, mark) if mark != Mark::Exact => Mark::Skipped,
                (_, mark) => mark,
            };
        }
    }
    if let Some(violation) = session.rules.violation(site) {
        comparison.notes.push(violation.clone());
    }
    comparison
}

/// How the exact ties of a cast went, of the elements that count.
pub fn tie_tally(
    wide: &Array2<f32>,
    device: ArrayView2<'_, bf16>,
    id: TensorId,
    counts: impl Fn(usize, usize) -> bool,
) -> TieTally {
    let mut tally = TieTally::default();
    for ((row, column), &value) in wide.indexed_iter() {
        if is_bf16_tie(value) && counts(row, column) {
            let (even, away) = (to_bf16(value, Rounding::Rne), to_bf16(value, Rounding::TiesAway));
            tally.count(&even, &away, &device[(row, column)], || format!("{}[{row}, {column}]", id.name()));
        }
    }
    tally
}

/// The mark of one narrowed element whose wide value is exactly known.
pub fn narrowing_mark(wide: f32, device: bf16, rule: Rounding) -> Mark {
    if same_bf16(device, to_bf16(wide, rule)) {
        return Mark::Exact;
    }
    let tie = is_bf16_tie(wide)
        && [Rounding::Rne, Rounding::TiesAway].into_iter().any(|rule| same_bf16(device, to_bf16(wide, rule)));
    if tie { Mark::Tie } else { Mark::Drift }
}

/// For a cache tensor, whether an element of what a physical row writes can be found in the capture:
/// another row may write the same slot and win, and a place whose bytes did not change is not listed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Found {
    Listed,
    Unlisted,
    OtherRow,
}

/// `holds(row)` tells whether the device's slot holds what that row writes. Where padding rows alone share a slot
/// nothing orders their writes, so that any of them may be the one that stays; an active row's write must stay.
pub fn found_writes(session: &Session<'_, '_>, id: TensorId, holds: &dyn Fn(usize) -> bool) -> Option<Array2<Found>> {
    let (cache, inputs) = (session.evidence.cache(id)?, session.inputs);
    let nothing = Trace::new();
    let source = KvSource::new(inputs, &nothing);
    let stays: Vec<Option<usize>> = (0..BATCH)
        .map(|b| {
            let slot = inputs.batch.slots[b];
            let writer = source.writer(slot);
            let among_padding = writer.is_some_and(|writer| writer >= inputs.batch.active);
            let sharers = (0..BATCH).filter(|&row| among_padding && inputs.batch.slots[row] == slot);
            sharers.rev().find(|&row| holds(row)).or(writer)
        })
        .collect();
    let heads = inputs.geometry.num_key_value_heads;
    Some(Array2::from_shape_fn((BATCH, heads), |(b, kv_head)| {
        if stays[b] != Some(b) {
            Found::OtherRow
        } else if cache.position.contains_key(&cache_row(inputs.geometry, inputs.batch.slots[b], kv_head)) {
            Found::Listed
        } else {
            Found::Unlisted
        }
    }))
}

/// INT8 codes: exact, ties to even at every quantization.
fn codes(session: &mut Session<'_, '_>, mut comparison: Comparison, scaled: &Array2<f32>, site: Site) -> Comparison {
    let device = Arc::clone(&comparison.device);
    let Tensor::I8(device) = device.as_ref() else { return comparison };
    let mut tally = TieTally::default();
    for ((row, column), &value) in scaled.indexed_iter() {
        if is_code_tie(value) {
            let (even, away) = (to_code(value, Rounding::Rne), to_code(value, Rounding::TiesAway));
            tally.count(&even, &away, &device[(row, column)], || format!("{}[{row}, {column}]", comparison.id.name()));
        }
    }
    comparison.violated = session.rules.settle(site, tally);
    let rule = session.rules.policy.at(site);
    for ((row, column), mark) in comparison.marks.indexed_iter_mut() {
        let (value, device) = (scaled[(row, column)], device[(row, column)]);
        let tie = || {
            is_code_tie(value)
                && [Rounding::Rne, Rounding::TiesAway].into_iter().any(|rule| device == to_code(value, rule))
        };
        *mark = if device == to_code(value, rule) {
            Mark::Exact
        } else if tie() {
            Mark::Tie
        } else {
            Mark::Drift
        };
    }
    if let Some(violation) = session.rules.violation(site) {
        comparison.notes.push(violation.clone());
    }
    comparison
}

/// Largest INT32 that every conversion to FP32 represents exactly.
const EXACT_INT: i32 = 1 << 24;

/// An INT8 projection: exact bits. Where `|acc|` passes 2^24 the conversion of the sum to FP32 rounds; the
/// device's rule there is not documented, so another consistent one is accepted and named.
fn projection(session: &Session<'_, '_>, comparison: Comparison, known: &Trace) -> Comparison {
    let mut comparison = exact(comparison);
    if !comparison.drifts() {
        return comparison;
    }
    let Some(p) = session.inputs.weights.projection(comparison.id) else { return comparison };
    let acc = session.products.sums(comparison.id, known.i8(p.codes), p.weight);
    if acc.iter().all(|sum| sum.abs() <= EXACT_INT) {
        return comparison;
    }
    let device = comparison.device.f32();
    let act_scale = known.f32(p.scales);
    let value = |converted: f32, b: usize, n: usize| (converted * p.weight_scale[n]) * act_scale[(b, 0)];
    for (name, convert) in [("toward zero", truncated as fn(i32) -> f32), ("ties away from zero", away)] {
        let rounded = || acc.indexed_iter().filter(|(_, sum)| sum.abs() > EXACT_INT);
        let holds = rounded().all(|((b, n), &sum)| same_f32(device[(b, n)], value(convert(sum), b, n)));
        if holds {
            let mut count = 0;
            for ((b, n), _) in rounded() {
                if comparison.marks[(b, n)] == Mark::Drift {
                    comparison.marks[(b, n)] = Mark::Flip;
                    count += 1;
                }
            }
            comparison.notes.push(format!(
                "{count} INT32 sums above 2^24 were converted to FP32 {name}; the reference rounds to even, and the \
                 device's rule is not documented"
            ));
            break;
        }
    }
    comparison
}

/// INT32 to FP32 toward zero.
fn truncated(sum: i32) -> f32 {
    let converted = sum as f32;
    if i64::from(sum).abs() < converted.abs() as i64 { f32::from_bits(converted.to_bits() - 1) } else { converted }
}

/// INT32 to FP32, nearest, ties away from zero.
fn away(sum: i32) -> f32 {
    let low = truncated(sum);
    let step = f32::from_bits(low.to_bits() + 1);
    let magnitude = i64::from(sum).abs();
    let (below, above) = (magnitude - low.abs() as i64, step.abs() as i64 - magnitude);
    if below == 0 || below < above { low } else { step }
}

/// Whether some INT32 sum behind a projection passed 2^24, as its dequantized values show.
pub fn passes_exact_int(output: &Output, inputs: &LayerInputs<'_>, known: &Trace) -> bool {
    let Some(p) = inputs.weights.projection(output.id) else { return false };
    let act_scale = known.f32(p.scales);
    output.tensor.f32().indexed_iter().any(|((b, n), &value)| {
        let scale = f64::from(p.weight_scale[n]) * f64::from(act_scale[(b, 0)]);
        f64::from(value).abs() > f64::from(EXACT_INT) * scale.abs()
    })
}

/// Sampled orders that show how far an order shifts rows together.
const ORDERS: u64 = 16;

/// One FP32 scalar a row, with a bound on it.
fn inverse_rms(session: &Session<'_, '_>, mut comparison: Comparison, known: &Trace) -> Comparison {
    let inputs = session.inputs;
    let mut x = inputs.hidden_states.mapv(bf16::to_f32);
    let exact_squares = comparison.id == TensorId::InvRmsStates;
    if !exact_squares {
        x = &known.f32(TensorId::AttnProjFp32) + &x;
    }
    let (device, reference) = (comparison.device.f32(), comparison.reference.f32());
    let eps = inputs.geometry.rms_norm_eps;
    let (_, distinct) = distinct_rows(x.view());
    let bounds: Vec<Bounded> =
        x.rows().into_iter().map(|row| bounds::inverse_rms(row, eps, exact_squares, session.confidence)).collect();
    // Devices that add in sampled orders, asked only where something is far off.
    let sampled = LazyCell::new(|| -> Vec<Tensor> {
        let run = |seed| {
            let policy = session.rules.policy.clone().under(Freedom::Sampled { seed });
            let outputs = stage_of(comparison.id).compute(&session.context(&policy), known);
            outputs.into_iter().find(|output| output.id == comparison.id).map(|output| output.tensor)
        };
        (0..ORDERS).filter_map(run).collect()
    });
    // Squares of BF16 values lie on a grid, and the last bits that partial sums lose of them need not be zero in the mean:
    // a bias that sampled orders share is permitted besides the bound.
    let biased = |row: usize, value: f32| {
        let errors = sampled.iter().map(|tensor| f64::from(tensor.get(row, 0)) - bounds[row].value);
        let bias = errors.sum::<f64>() / sampled.len().max(1) as f64;
        let error = f64::from(value) - bounds[row].value;
        error.signum() == bias.signum() && error.abs() <= bounds[row].bound + bias.abs()
    };
    for (row, mark) in comparison.marks.iter_mut().enumerate() {
        let value = device[(row, 0)];
        *mark = if same_f32(value, reference[(row, 0)]) {
            Mark::Exact
        } else if bounds[row].holds(value) || biased(row, value) {
            Mark::Flip
        } else {
            Mark::Drift
        };
    }
    // Rounding errors of different rows are independent: together they reach no further than the square root of
    // their number, while a wrong constant shifts all rows alike. In rows of one kind so does an order of adding: as
    // far as sampled orders say that one may, at the same confidence, that is permitted.
    let together = |values: ArrayView2<'_, f32>| {
        let error = |&row: &usize| (f64::from(values[(row, 0)]) - bounds[row].value) / bounds[row].bound;
        distinct.iter().map(error).sum::<f64>() / (distinct.len() as f64).sqrt()
    };
    let shared = || {
        let squared = sampled.iter().map(|tensor| together(tensor.f32()).powi(2));
        let mean = squared.sum::<f64>() / sampled.len().max(1) as f64;
        // The root mean square of so few is this much larger at its upper confidence limit.
        session.confidence.lambda() * mean.sqrt() * (1.0 + 2.0 / (ORDERS as f64).sqrt())
    };
    let together = together(device);
    if distinct.len() > 1 && together.abs() > 1.0 && together.abs() > shared() {
        for mark in comparison.marks.iter_mut().filter(|mark| **mark == Mark::Flip) {
            *mark = Mark::Drift;
        }
        let implied = |&row: &usize| {
            let mean: f64 = x.row(row).iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / x.ncols() as f64;
            f64::from(device[(row, 0)]).powi(-2) - mean
        };
        let implied = distinct.iter().map(implied).sum::<f64>() / distinct.len() as f64;
        comparison.notes.push(format!(
            "all {} distinct rows are off the same way, {:.1} times as far as independent rounding errors reach \
             together; the mean fits an eps of {implied:.1e}, the contract has {eps:.1e}",
            distinct.len(),
            together.abs()
        ));
    }
    comparison
}

/// Head norms: all elements of a head share one free scalar, its inverse RMS. One FP32 value of it within
/// its bound has to give every element's bits.
fn head_norm(session: &Session<'_, '_>, mut comparison: Comparison, known: &Trace) -> Comparison {
    let inputs = session.inputs;
    let (proj, gamma) = if comparison.id == TensorId::QProjNorm {
        (TensorId::QProj, inputs.weights.q_norm_weight)
    } else {
        (TensorId::KProj, inputs.weights.k_norm_weight)
    };
    let dim = inputs.geometry.head_dim;
    let z = &known.f32(proj) * &known.f32(TensorId::InvRmsStates);
    let (device, reference) = (comparison.device.f32(), comparison.reference.f32());
    for row in 0..z.nrows() {
        for start in (0..z.ncols()).step_by(dim) {
            let head = s![row, start..start + dim];
            let (z, device, reference) = (z.slice(head), device.slice(head), reference.slice(head));
            let mut marks = comparison.marks.slice_mut(head);
            marks.fill(Mark::Exact);
            if device.iter().zip(reference).all(|(&a, &b)| same_f32(a, b)) {
                continue;
            }
            let eps = inputs.geometry.rms_norm_eps;
            let inv = bounds::inverse_rms(z, eps, false, session.confidence);
            let matches = |inv: f32| {
                let element = move |(i, &z): (usize, &f32)| same_f32(device[i], (z * gamma[i]) * inv);
                z.iter().enumerate().map(element).collect::<Vec<bool>>()
            };
            let best = candidates(inv).map(matches).max_by_key(|hits| hits.iter().filter(|&&hit| hit).count());
            for (i, mark) in marks.iter_mut().enumerate() {
                if !same_f32(device[i], reference[i]) {
                    let hit = best.as_ref().is_some_and(|hits| hits[i]);
                    *mark = if hit { Mark::Flip } else { Mark::Drift };
                }
            }
        }
    }
    comparison
}

/// Every FP32 value within a bound of a positive scalar. Bounds here span some dozens of them; a
/// pathological one is cut short.
fn candidates(scalar: Bounded) -> impl Iterator<Item = f32> {
    const MOST: u32 = 1 << 12;
    let low = ((scalar.value - scalar.bound).max(0.0) as f32).to_bits().saturating_sub(1);
    let high = ((scalar.value + scalar.bound) as f32).to_bits().saturating_add(1);
    let bounded = scalar.value.is_finite() && high < f32::INFINITY.to_bits();
    let range = bounded.then(|| low..=high.min(low + MOST));
    range.into_iter().flatten().map(f32::from_bits).filter(move |&candidate| scalar.holds(candidate))
}

/// SwiGLU: elementwise, narrowed; a boundary within the bound of the exact value explains a flip.
fn silu(session: &Session<'_, '_>, mut comparison: Comparison, known: &Trace) -> Comparison {
    use TensorId as T;
    let (gate, up, inv) = (known.f32(T::GateAccAll), known.f32(T::UpAccAll), known.f32(T::InvRmsTile));
    let (device, reference) = (comparison.device.bf16(), comparison.reference.bf16());
    let rule = session.rules.policy.at(Site::Silu);
    for ((b, n), mark) in comparison.marks.indexed_iter_mut() {
        *mark = if same_bf16(device[(b, n)], reference[(b, n)]) {
            Mark::Exact
        } else {
            let bounded = bounds::silu(gate[(b, n)] * inv[(b, 0)], up[(b, n)] * inv[(b, 0)]);
            // An exact zero has a sign that no freedom changes.
            let reached = bounded.value != 0.0 && bounded.reaches(device[(b, n)], rule);
            if reached { Mark::Flip } else { Mark::Drift }
        };
    }
    comparison
}

/// The down projection's FP32 sums, each within the bound of its own terms.
fn down(session: &Session<'_, '_>, mut comparison: Comparison, known: &Trace) -> Comparison {
    let x = known.widened(TensorId::MlpDownTile, session.rules.policy.at(Site::Silu));
    let w = session.inputs.weights.w_down;
    let half = w.dim().0 / 2;
    let (device, reference) = (comparison.device.f32(), comparison.reference.f32());
    for part in 0..2 {
        let rows = part * BATCH..(part + 1) * BATCH;
        let equal =
            device.slice(s![rows.clone(), ..]).iter().zip(reference.slice(s![rows, ..])).all(|(&a, &b)| same_f32(a, b));
        let exact = (!equal).then(|| {
            let terms = s![.., part * half..(part + 1) * half];
            exact_bf16_product(x.slice(terms), w.terms(part * half..(part + 1) * half))
        });
        for b in 0..BATCH {
            for n in 0..w.dim().1 {
                let (value, expected) = (device[(part * BATCH + b, n)], reference[(part * BATCH + b, n)]);
                comparison.marks[(part * BATCH + b, n)] = match &exact {
                    _ if same_f32(value, expected) => Mark::Exact,
                    Some((totals, squares)) => {
                        let (total, squares) = (totals[(b, n)], squares[(b, n)]);
                        let bound = session.confidence.sum(half, total, squares);
                        if (Bounded { value: total, bound }).holds(value) { Mark::Flip } else { Mark::Drift }
                    }
                    None => Mark::Drift,
                };
            }
        }
    }
    comparison
}

/// The output: two narrowings of values that the contract fixes, each with its own tie rule.
fn out(session: &mut Session<'_, '_>, mut comparison: Comparison, known: &Trace) -> Comparison {
    let parts = known.f32(TensorId::DownAccParts);
    let (low, high) = (parts.slice(s![..BATCH, ..]), parts.slice(s![BATCH.., ..]));
    let d = &low + &high;
    let h1b = known.widened(TensorId::PostNormPartial, session.rules.policy.at(Site::Residual));
    let device = Arc::clone(&comparison.device);
    let device = device.bf16();

    let down_rule = session.rules.policy.at(Site::Down);
    let wide = Array2::from_shape_fn(d.dim(), |at| round_f32(d[at], down_rule) + h1b[at]);
    let tally = tie_tally(&wide, device, comparison.id, |_, _| true);
    comparison.violated = session.rules.settle(Site::Out, tally);

    let out_rule = session.rules.policy.at(Site::Out);
    let value = |d: f32, h1b: f32, down: Rounding| to_bf16(round_f32(d, down) + h1b, out_rule);
    let mut tally = TieTally::default();
    for ((b, n), &d) in d.indexed_iter() {
        if is_bf16_tie(d) {
            let (even, away) = (value(d, h1b[(b, n)], Rounding::Rne), value(d, h1b[(b, n)], Rounding::TiesAway));
            tally.count(&even, &away, &device[(b, n)], || format!("out[{b}, {n}]"));
        }
    }
    comparison.violated |= session.rules.settle(Site::Down, tally);

    let reference = Array2::from_shape_fn(d.dim(), |at| value(d[at], h1b[at], down_rule));
    for (at, mark) in comparison.marks.indexed_iter_mut() {
        *mark = narrowing_mark(wide[at], device[at], out_rule);
        if *mark == Mark::Drift && is_bf16_tie(d[at]) {
            let other = if down_rule == Rounding::Rne { Rounding::TiesAway } else { Rounding::Rne };
            let wide = round_f32(d[at], other) + h1b[at];
            if narrowing_mark(wide, device[at], out_rule) != Mark::Drift {
                *mark = Mark::Tie;
            }
        }
    }
    comparison.reference = Arc::new(Tensor::Bf16(reference));
    for site in [Site::Down, Site::Out] {
        comparison.notes.extend(session.rules.violation(site).cloned());
    }
    comparison
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_of_large_sums() {
        let sum = (1 << 24) + 1;
        assert_eq!((truncated(sum), away(sum), sum as f32), (16_777_216.0, 16_777_218.0, 16_777_216.0));
        let sum = -((1 << 24) + 3);
        assert_eq!((truncated(sum), away(sum), sum as f32), (-16_777_218.0, -16_777_220.0, -16_777_220.0));
        assert_eq!((truncated(1000), away(1000)), (1000.0, 1000.0));
        let sum = (1 << 26) + 1;
        assert_eq!((truncated(sum), away(sum)), (67_108_864.0, 67_108_864.0));
    }

    #[test]
    fn a_narrowed_element_is_exact_a_tie_or_drift() {
        let tie = 1.019_531_25;
        let (even, away) = (bf16::from_f32(1.015_625), bf16::from_f32(1.023_437_5));
        assert_eq!(narrowing_mark(tie, even, Rounding::Rne), Mark::Exact);
        assert_eq!(narrowing_mark(tie, away, Rounding::Rne), Mark::Tie);
        assert_eq!(narrowing_mark(tie, bf16::from_f32(1.031_25), Rounding::Rne), Mark::Drift);
        assert_eq!(narrowing_mark(1.016, away, Rounding::Rne), Mark::Drift);
        assert_eq!(narrowing_mark(f32::NAN, bf16::NAN, Rounding::Rne), Mark::Exact);
    }
}
