//! Contract checks: what holds for every correct kernel whatever the numbers are.

use std::collections::{BTreeMap, BTreeSet};

use bytemuck::cast_slice;
use cases::Input;
use half::bf16;
use ndarray::{ArrayView2, Axis, s};
use rayon::prelude::*;
use reference::inputs::cache_row;
use reference::stages::run_layer;
use reference::{BATCH, LayerInputs, TILE, Tensor, TensorId};
use sha2::{Digest, Sha256};

use crate::Mark;
use crate::attention::padding_fault;
use crate::coverage::{poisoned_slots, slots_name};
use crate::evidence::{CacheEvidence, Evidence};
use crate::judge::Walk;
use crate::place::{counted, number, place};
use crate::report::{Check, Element, Number, TensorReport, Verdict};
use crate::tally::{Comparison, cache_row_name};

/// Checks that every report on a decode layer has.
pub const ALWAYS: [&str; 5] = ["padding_rows", "kv_written_rows", "kv_values", "row_independence", "finite"];

/// Everything the checks look at.
pub struct Evidenced<'a, 'd> {
    /// Its inputs.
    pub inputs: &'a LayerInputs<'d>,
    /// What the device gave.
    pub evidence: &'a Evidence,
    /// What the comparison found.
    pub walk: &'a Walk,
    /// Whether padding rows hold row 0's data.
    pub replicated: bool,
    /// SHA-256 of the whole caches after the run, where stated.
    pub final_caches: &'a BTreeMap<Input, String>,
}

/// A check, and the tensor at which it failed.
pub struct Finding {
    /// The check.
    pub check: Check,
    /// The tensor at which it failed, when it is about one.
    pub tensor: Option<&'static str>,
}

impl Finding {
    /// Names the tensor.
    fn at(self, tensor: &'static str) -> Self {
        Self { tensor: Some(tensor), ..self }
    }
}

/// All checks, in the order in which they are documented.
pub fn all(e: &Evidenced<'_, '_>) -> Vec<Finding> {
    let mut checks = vec![
        padding_rows(e),
        kv_written_rows(e),
        kv_values(e),
        row_independence(e),
        finite(e),
        int8_range(e),
        tiling(e),
    ];
    checks.extend(work_items(e));
    checks
}

fn check(name: &str, verdict: Verdict, detail: impl Into<String>) -> Finding {
    Finding { check: Check { name: name.to_owned(), verdict, detail: detail.into() }, tensor: None }
}

/// Padding rows of `attn_out` equal row 0, bit for bit (step 8).
fn padding_rows(e: &Evidenced<'_, '_>) -> Finding {
    const NAME: &str = "padding_rows";
    let active = e.inputs.batch.active;
    if active == BATCH {
        return check(NAME, Verdict::Pass, "no padding rows in this batch");
    }
    let Some(tensor) = e.evidence.tensors.get(&TensorId::AttnOut) else {
        return check(NAME, Verdict::Unjudged, e.evidence.absent("attn_out"));
    };
    let device = tensor.bf16();
    let wrong: Vec<usize> = (active..BATCH).filter(|&b| row_differs(tensor, b, 0)).collect();
    if wrong.is_empty() {
        let rows = counted("row", &(active..BATCH).collect::<Vec<_>>());
        return check(NAME, Verdict::Pass, format!("attn_out {rows} equal row 0, bit for bit"));
    }
    let row0 = e.walk.comparisons.iter().find(|c| c.id == TensorId::AttnOut);
    let row0_right = row0.is_some_and(|c| !c.drifting_rows(e.inputs).contains(&0));
    let reference = row0.map_or(device.row(0), |c| c.reference.bf16().index_axis_move(Axis(0), 0));
    let what = padding_fault(device, reference, active, &wrong);
    let about_row0 = if row0_right { "row 0 itself is right" } else { "row 0 itself drifts too" };
    let detail = format!("attn_out {}: {what}; {about_row0}", counted("row", &wrong));
    check(NAME, Verdict::Fail, detail).at(TensorId::AttnOut.name())
}

fn row_differs(tensor: &Tensor, a: usize, b: usize) -> bool {
    let columns = tensor.shape()[1];
    (0..columns)
        .any(|c| tensor.bits(a, c) != tensor.bits(b, c) && !(tensor.get(a, c).is_nan() && tensor.get(b, c).is_nan()))
}

/// The cache rows that the step writes: the slots of all 16 rows, every KV head.
pub fn expected_rows(inputs: &LayerInputs<'_>) -> BTreeSet<usize> {
    let heads = inputs.geometry.num_key_value_heads;
    let slots = inputs.batch.slots.iter();
    slots.flat_map(|&slot| (0..heads).map(move |head| cache_row(inputs.geometry, slot, head))).collect()
}

/// Cache rows written against the slots' rows. A row that was to be written with the bytes it already had
/// is rightly not listed.
pub fn written_rows(
    id: TensorId,
    cache: &CacheEvidence,
    inputs: &LayerInputs<'_>,
    comparisons: &[Comparison],
) -> TensorReport {
    let name = if id == TensorId::KRows { "k_written_rows" } else { "v_written_rows" };
    let expected = expected_rows(inputs);
    let dim = inputs.geometry.head_dim;
    // Unlisted places whose old bytes are not what belongs there were marked as skipped.
    let marks = comparisons.iter().find(|c| c.id == id).map(|c| &c.marks);
    let mut missing = Vec::new();
    let source_trace = reference::Trace::new();
    let source = reference::stages::KvSource::new(inputs, &source_trace);
    for b in (0..BATCH).filter(|&b| source.writer(inputs.batch.slots[b]) == Some(b)) {
        for head in 0..inputs.geometry.num_key_value_heads {
            let row = cache_row(inputs.geometry, inputs.batch.slots[b], head);
            let skipped = marks.is_some_and(|m| (head * dim..(head + 1) * dim).any(|c| m[(b, c)] == Mark::Skipped));
            if !cache.position.contains_key(&row) && skipped {
                missing.push(row);
            }
        }
    }
    missing.sort_unstable();
    let unexpected: Vec<usize> = cache.position.keys().copied().filter(|row| !expected.contains(row)).collect();
    let wrong = missing.len().max(unexpected.len()) + cache.out_of_range.len() + cache.repeated.len();

    let mut notes = Vec::new();
    if !unexpected.is_empty() {
        notes.push(format!(
            "{} written that no slot of this batch names: {}",
            number(unexpected.len(), "cache row", "cache rows"),
            named(&unexpected, inputs)
        ));
    }
    if !missing.is_empty() {
        let rows = number(missing.len(), "cache row", "cache rows");
        notes.push(format!("{rows} not written: {}", named(&missing, inputs)));
    }
    if let Some(shift) = common_shift(&missing, &unexpected, inputs) {
        notes.insert(0, format!("written at slot {shift:+} from where the batch's slot_mapping says"));
    }
    if !cache.out_of_range.is_empty() {
        notes.push(format!("rows outside the cache of {}: {:?}", inputs.cache.k.nrows(), cache.out_of_range));
    }
    if !cache.repeated.is_empty() {
        notes.push(format!("listed more than once: {}", named(&cache.repeated, inputs)));
    }
    let pages: BTreeSet<usize> = unexpected
        .iter()
        .chain(&missing)
        .map(|&row| reference::inputs::cache_place(inputs.geometry, row).0 / reference::PAGE)
        .collect();
    let rows: BTreeSet<usize> = missing
        .iter()
        .filter_map(|&row| source.writer(reference::inputs::cache_place(inputs.geometry, row).0))
        .collect();
    // Rows written where none belongs beside rows that were missed, then rows that do not exist.
    let pairs = (0..missing.len().max(unexpected.len())).map(|i| (unexpected.get(i), missing.get(i)));
    let mut worst: Vec<Element> = pairs
        .map(|(written, missed)| {
            let position = written.and_then(|row| cache.position.get(row)).copied();
            row_element(position, written.map(|&row| row as i64), missed.map(|&row| row as i64))
        })
        .collect();
    worst.extend(cache.out_of_range.iter().map(|&row| row_element(None, Some(row), None)));
    worst.truncate(5);
    let elements = expected.len() as u64 + wrong.saturating_sub(missing.len()) as u64;
    TensorReport {
        forced: true,
        elements,
        exact: elements - (wrong as u64).min(elements),
        unexplained: wrong as u64,
        worst: worst.first().cloned(),
        worst_elements: worst,
        rows_failing: rows.into_iter().collect(),
        pages_failing: pages.into_iter().collect(),
        notes,
        ..TensorReport::new(name, if wrong == 0 { Verdict::Pass } else { Verdict::Fail })
    }
}

/// A cache row written and the one that belongs there; either may be absent.
pub fn row_element(position: Option<usize>, written: Option<i64>, belongs: Option<i64>) -> Element {
    let number = |row: Option<i64>| Number(row.map_or(f64::NAN, |row| row as f64));
    let bits = |row: Option<i64>| row.map_or_else(|| "absent".to_owned(), |row| format!("0x{row:016x}"));
    Element {
        index: position.into_iter().collect(),
        device: number(written),
        reference: number(belongs),
        device_bits: bits(written),
        reference_bits: bits(belongs),
        ulps: None,
    }
}

/// The first few cache rows by name.
fn named(rows: &[usize], inputs: &LayerInputs<'_>) -> String {
    let mut names: Vec<String> =
        rows.iter().take(3).map(|&row| format!("row {row} ({})", cache_row_name(inputs, row))).collect();
    if rows.len() > 3 {
        names.push(format!("and {} more", rows.len() - 3));
    }
    names.join(", ")
}

/// The distance in slots between rows written and rows missed, when it is the same for all.
fn common_shift(missing: &[usize], unexpected: &[usize], inputs: &LayerInputs<'_>) -> Option<i64> {
    if missing.is_empty() || missing.len() != unexpected.len() {
        return None;
    }
    let slot = |row: usize| reference::inputs::cache_place(inputs.geometry, row).0 as i64;
    let mut missing: Vec<i64> = missing.iter().map(|&row| slot(row)).collect();
    let mut unexpected: Vec<i64> = unexpected.iter().map(|&row| slot(row)).collect();
    missing.sort_unstable();
    unexpected.sort_unstable();
    let shift = unexpected[0] - missing[0];
    missing.iter().zip(&unexpected).all(|(m, u)| u - m == shift).then_some(shift)
}

/// The report on a tensor whose element type is not the contract's.
pub fn wrong_dtype(id: TensorId, found: &str) -> TensorReport {
    let rows = found.strip_suffix(" rows");
    let name = match (id, rows) {
        (TensorId::KRows, Some(_)) => "k_written_rows",
        (TensorId::VRows, Some(_)) => "v_written_rows",
        _ => id.name(),
    };
    let expected = if rows.is_some() { "INT64" } else { id.dtype().name() };
    TensorReport {
        notes: vec![format!(
            "element type {}, where the contract has {expected}; values are never converted",
            rows.unwrap_or(found)
        )],
        ..TensorReport::new(name, Verdict::Fail)
    }
}

/// Exactly the slots' cache rows were written.
fn kv_written_rows(e: &Evidenced<'_, '_>) -> Finding {
    const NAME: &str = "kv_written_rows";
    let mut failures = Vec::new();
    let mut judged = 0;
    for id in [TensorId::KRows, TensorId::VRows] {
        if let Some(found) = e.evidence.wrong_dtype.get(&id).filter(|found| found.ends_with(" rows")) {
            failures.push(format!("{}: {found}", id.name()));
        }
        if let Some(cache) = e.evidence.cache(id) {
            judged += 1;
            let report = written_rows(id, cache, e.inputs, &e.walk.comparisons);
            if report.verdict == Verdict::Fail {
                failures.push(format!("{}: {}", report.name, report.notes.join("; ")));
            }
        }
    }
    let expected = expected_rows(e.inputs).len();
    match (failures.is_empty(), judged) {
        (false, _) => check(NAME, Verdict::Fail, failures.join("; ")),
        (true, 0) => check(NAME, Verdict::Unjudged, e.evidence.absent("k_written_rows and v_written_rows")),
        (true, 1) => check(NAME, Verdict::Unjudged, "only one of the two caches was looked at; that one is right"),
        _ => check(NAME, Verdict::Pass, format!("exactly the {expected} rows of the batch's slots, in both caches")),
    }
}

/// The values written are right, and the whole caches are what the case says they were afterwards.
fn kv_values(e: &Evidenced<'_, '_>) -> Finding {
    const NAME: &str = "kv_values";
    let mut failures = Vec::new();
    let mut tensor = None;
    let (mut judged, mut hashed) = (0, 0);
    let caches =
        [(TensorId::KRows, Input::KCache, e.inputs.cache.k), (TensorId::VRows, Input::VCache, e.inputs.cache.v)];
    // Whole caches are much to hash: both at once.
    let hashes: Vec<Option<String>> = caches
        .par_iter()
        .map(|&(id, input, before)| {
            let cache = e.evidence.cache(id).filter(|_| e.final_caches.contains_key(&input))?;
            Some(final_hash(before, &cache.position, cache.values.view()))
        })
        .collect();
    for ((id, input, _), found) in caches.into_iter().zip(hashes) {
        if let Some(found) = e.evidence.wrong_dtype.get(&id) {
            failures.push(format!("{}: element type {found}", id.name()));
        }
        if e.evidence.cache(id).is_none() {
            continue;
        }
        judged += 1;
        if let Some(comparison) = e.walk.comparisons.iter().find(|c| c.id == id && c.fails()) {
            let rows = comparison.drifting_rows(e.inputs);
            let notes =
                if comparison.notes.is_empty() { String::new() } else { format!(" ({})", comparison.notes.join("; ")) };
            failures.push(format!("{}: {}{notes}", id.name(), counted("row", &rows)));
            tensor = tensor.or(Some(id.name()));
        }
        if let Some((stated, found)) = e.final_caches.get(&input).zip(found) {
            hashed += 1;
            if found != *stated {
                tensor = tensor.or(Some(id.name()));
                failures.push(format!(
                    "final_cache_sha256 of {}: the cache before the step with the captured rows written gives {found}, \
                     the case states {stated}: some other row changed, or these rows are not what was left",
                    input.name()
                ));
            }
        }
    }
    match (failures.is_empty(), judged) {
        (false, _) => Finding { tensor, ..check(NAME, Verdict::Fail, failures.join("; ")) },
        (true, 0) => check(NAME, Verdict::Unjudged, e.evidence.absent("k_written_values and v_written_values")),
        (true, 1) => check(NAME, Verdict::Unjudged, "only one of the two caches was looked at; that one is right"),
        _ if hashed == 2 => check(NAME, Verdict::Pass, "values match, and both whole caches match their SHA-256"),
        _ => check(NAME, Verdict::Pass, "values match"),
    }
}

/// SHA-256 of a cache with the captured rows written into it: row `row` holds `values[position[row]]`.
pub fn final_hash(
    before: ArrayView2<'_, bf16>,
    position: &BTreeMap<usize, usize>,
    values: ArrayView2<'_, bf16>,
) -> String {
    let mut hasher = Sha256::new();
    let mut update = |rows: ArrayView2<'_, bf16>| match rows.as_slice() {
        Some(values) => hasher.update(cast_slice::<bf16, u8>(values)),
        None => rows.rows().into_iter().for_each(|row| hasher.update(cast_slice::<bf16, u8>(&row.to_vec()))),
    };
    let mut at = 0;
    for (&row, &index) in position {
        update(before.slice(s![at..row, ..]));
        update(values.slice(s![index..=index, ..]));
        at = row + 1;
    }
    update(before.slice(s![at.., ..]));
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// No row depends on another row's contents: rows with equal inputs have equal outputs, and no drifting row
/// holds what belongs to another row.
fn row_independence(e: &Evidenced<'_, '_>) -> Finding {
    const NAME: &str = "row_independence";
    let batch = e.inputs.batch;
    if e.replicated && batch.active < BATCH {
        for comparison in e.walk.comparisons.iter().filter(|c| !matches!(c.id, TensorId::KRows | TensorId::VRows)) {
            // Queries are rotated by a row's own position, which padding rows may have.
            let moved = |b: usize| comparison.id == TensorId::AllQPadded && batch.seq_lens[b] != batch.seq_lens[0];
            let wrong: Vec<usize> =
                (batch.active..BATCH).filter(|&b| !moved(b) && batch_row_differs(comparison, e.inputs, b)).collect();
            if !wrong.is_empty() {
                let detail = format!(
                    "{}: {} given row 0's inputs, but did not give row 0's bits",
                    comparison.id.name(),
                    counted("row", &wrong)
                );
                return check(NAME, Verdict::Fail, detail).at(comparison.id.name());
            }
        }
    }
    let exchanged: Vec<String> = e
        .walk
        .comparisons
        .iter()
        .flat_map(|c| {
            c.notes.iter().filter(|note| note.contains("holds row")).map(|note| format!("{}: {note}", c.id.name()))
        })
        .collect();
    if !exchanged.is_empty() {
        return check(NAME, Verdict::Fail, exchanged.join("; "));
    }
    let drifting: BTreeSet<usize> = e.walk.comparisons.iter().flat_map(|c| c.drifting_rows(e.inputs)).collect();
    if drifting.is_empty() {
        check(NAME, Verdict::Pass, "every row is what its own inputs give, computed without the other rows")
    } else {
        let rows: Vec<usize> = drifting.into_iter().collect();
        check(NAME, Verdict::Unjudged, format!("drift in {}: what it depends on is not known", counted("row", &rows)))
    }
}

/// Whether batch row `b` of a tensor differs from row 0 where both have the same inputs.
fn batch_row_differs(comparison: &Comparison, inputs: &LayerInputs<'_>, b: usize) -> bool {
    let tensor = &comparison.device;
    let rows = tensor.shape()[0];
    let of = |row: usize| place(comparison.id, inputs.geometry, row, 0).row;
    let mine: Vec<usize> = (0..rows).filter(|&row| of(row) == b).collect();
    let first: Vec<usize> = (0..rows).filter(|&row| of(row) == 0).collect();
    mine.iter().zip(&first).any(|(&a, &b)| row_differs(tensor, a, b))
}

/// Nothing is non-finite unless the inputs make it so.
fn finite(e: &Evidenced<'_, '_>) -> Finding {
    const NAME: &str = "finite";
    let bad = |tensor: &Tensor, row: usize, column: usize| !tensor.get(row, column).is_finite();
    let mut total = 0;
    let mut first: Option<(&Comparison, usize, usize)> = None;
    let mut reference = None;
    let mut made_by_inputs = 0u64;
    for comparison in &e.walk.comparisons {
        for ((row, column), &mark) in comparison.marks.indexed_iter() {
            if mark == Mark::Skipped || !bad(&comparison.device, row, column) {
                continue;
            }
            let trace = reference.get_or_insert_with(|| run_layer(e.inputs, &e.walk.rules.policy));
            if trace.get(comparison.id).is_some_and(|tensor| bad(tensor, row, column)) {
                made_by_inputs += 1;
                continue;
            }
            total += 1;
            first = first.or(Some((comparison, row, column)));
        }
    }
    let Some((comparison, row, column)) = first else {
        let detail = match made_by_inputs {
            0 => "every captured number is finite".to_owned(),
            n => format!("{n} numbers are not finite, where the inputs make the reference so too"),
        };
        return check(NAME, Verdict::Pass, detail);
    };
    let at = place(comparison.id, e.inputs.geometry, row, column);
    let mut detail = format!(
        "{} not finite where the inputs give finite numbers; first {}[{row}, {column}] (row {})",
        number(total, "captured number is", "captured numbers are"),
        comparison.id.name(),
        at.row
    );
    let slots = poisoned_slots(e.inputs, at.row.min(e.inputs.batch.active - 1), true);
    if comparison.id >= TensorId::AttnOut && !slots.is_empty() {
        detail.push_str(&format!("; NaN entered through V from {}", slots_name(&slots)));
    }
    check(NAME, Verdict::Fail, detail).at(comparison.id.name())
}

/// INT8 activation codes lie within -127..127, whatever the reference says.
fn int8_range(e: &Evidenced<'_, '_>) -> Finding {
    const NAME: &str = "int8_range";
    let mut judged = false;
    let mut first = None;
    let mut wrong = Vec::new();
    for (id, tensor) in &e.evidence.tensors {
        let Tensor::I8(codes) = tensor.as_ref() else { continue };
        judged = true;
        for ((row, column), _) in codes.indexed_iter().filter(|(_, code)| **code == i8::MIN) {
            wrong.push(format!("{}[{row}, {column}]", id.name()));
            first = first.or(Some(id.name()));
        }
    }
    match (wrong.len(), judged) {
        (0, false) => check(NAME, Verdict::Unjudged, e.evidence.absent("every INT8 tensor")),
        (0, true) => check(NAME, Verdict::Pass, "every captured code lies within -127..127"),
        (n, _) => {
            wrong.truncate(3);
            let detail = format!(
                "{}, outside the contract's -127..127, first {}: wrapped, not clamped, if the value is positive",
                number(n, "code is -128", "codes are -128"),
                wrong.join(", ")
            );
            Finding { tensor: first, ..check(NAME, Verdict::Fail, detail) }
        }
    }
}

/// The production kernels' tiling rules. They bind those kernels, not the reference.
fn tiling(e: &Evidenced<'_, '_>) -> Finding {
    let broken = e.inputs.geometry.tiling_violations();
    if broken.is_empty() {
        return check("tiling", Verdict::Pass, "the geometry fits the production kernels' tiles");
    }
    let detail = format!("the production kernels cannot run this geometry; it breaks {}", broken.join("; "));
    check("tiling", Verdict::Unjudged, detail)
}

/// Work-item counts, where captured.
fn work_items(e: &Evidenced<'_, '_>) -> Option<Finding> {
    let batch = e.inputs.batch;
    let heads = e.inputs.geometry.num_key_value_heads as u64;
    let tiles: u64 = batch.seq_lens[..batch.active].iter().map(|n| n.div_ceil(TILE) as u64).sum();
    let expected = [tiles * heads, batch.active as u64 * heads];
    let names = ["attention_work_items", "online_softmax_work_items"];
    let captured = e.evidence.work_items;
    if captured == [None, None] {
        return None;
    }
    let wrong: Vec<String> = (0..2)
        .filter_map(|i| {
            captured[i].filter(|&n| n != expected[i]).map(|n| format!("{}: {n}, expected {}", names[i], expected[i]))
        })
        .collect();
    Some(if wrong.is_empty() {
        check("work_items", Verdict::Pass, "work-item counts are those of the active rows")
    } else {
        check("work_items", Verdict::Fail, wrong.join("; "))
    })
}
