//! What drift looks like, in words: patterns that people met in the field, each tested on the device's own
//! bits. A note never changes a verdict.

use std::collections::{BTreeMap, BTreeSet};

use half::bf16;
use ndarray::s;
use reference::inputs::cache_row;
use reference::stages::{KvSource, attend, row_scale};
use reference::{BATCH, PAGE, Policy, Rounding, Site, TILE, TensorId, Trace};

use crate::Mark;
use crate::compare::{Session, same_bf16};
use crate::coverage::{poisoned_slots, slots_name};
use crate::place::{counted, number, place, ranges};
use crate::tally::{Comparison, ulps};

/// Adds what can be said of a comparison's drift.
pub fn explain(comparison: &mut Comparison, session: &Session<'_, '_>, known: &Trace) {
    if !comparison.drifts() {
        return;
    }
    use TensorId as T;
    let mut notes = match comparison.id {
        T::NormedI8 | T::AttnOutI8 | T::MlpNormI8 => codes(comparison),
        T::ActScales | T::AttnOutScales | T::MlpActScales => scales(comparison, session, known),
        T::QProj | T::KProj | T::VProj | T::AttnProjFp32 | T::GateAccAll | T::UpAccAll => {
            vec![
                "the integer sums or their two scales differ: every operation here is exact, so this is no matter of \
                  precision"
                    .to_owned(),
            ]
        }
        T::AttnOut => attention(comparison, session, known),
        T::KRows | T::VRows => cache_rows(comparison, session, known),
        T::AllQPadded => rotation(comparison, session, known, T::QProjNorm),
        T::Out => out(comparison, known),
        _ => Vec::new(),
    };
    notes.extend(shape(comparison, session));
    // The cause before what the comparison itself noted, such as ties that a fault made look mixed.
    notes.append(&mut comparison.notes);
    comparison.notes = notes;
}

/// Patterns that any tensor can show, behind a gap too.
pub fn shape(comparison: &Comparison, session: &Session<'_, '_>) -> Vec<String> {
    let geometry = session.inputs.geometry;
    let (device, reference) = (&comparison.device, &comparison.reference);
    let mut notes = Vec::new();
    let drift: Vec<(usize, usize)> =
        comparison.marks.indexed_iter().filter(|(_, m)| **m == Mark::Drift).map(|(at, _)| at).collect();

    // Zeroed heads, or zeroed rows where there are no heads.
    let mut zeroed: BTreeMap<(usize, Option<usize>), usize> = BTreeMap::new();
    for &(row, column) in drift.iter().filter(|&&(row, column)| device.get(row, column) == 0.0) {
        let at = place(comparison.id, geometry, row, column);
        *zeroed.entry((at.row, at.head)).or_default() += 1;
    }
    let whole: Vec<((usize, Option<usize>), usize)> = zeroed
        .into_iter()
        .filter(|&((row, head), _)| {
            let block = |&(r, c): &(usize, usize)| {
                let at = place(comparison.id, geometry, r, c);
                (at.row, at.head) == (row, head)
            };
            let mut elements = comparison.marks.indexed_iter().map(|(at, _)| at).filter(block).peekable();
            elements.peek().is_some() && elements.all(|(r, c)| device.get(r, c) == 0.0)
        })
        .collect();
    for &((row, head), count) in whole.iter().take(3) {
        notes.push(match head {
            Some(head) => format!("row {row} head {head}: all {count} differing channels are zero"),
            None => format!("row {row}: all {count} differing elements are zero"),
        });
    }
    if whole.len() > 3 {
        notes.push(format!("and {} more zeroed blocks", whole.len() - 3));
    }

    // One relation that holds at every drifting element.
    let relation = |holds: &dyn Fn(f32, f32) -> bool| {
        drift.iter().all(|&(row, column)| holds(device.get(row, column), reference.get(row, column)))
    };
    if relation(&|d, r| d == -r && r != 0.0) {
        notes.push("every drifting element is the negative of what it should be".to_owned());
    } else if let Some(factor) = common_factor(comparison, &drift) {
        notes.push(format!("every drifting element is {factor} times what it should be"));
    } else if drift.len() > 1
        && drift.iter().all(|&(r, c)| ulps(comparison.id.dtype(), device.bits(r, c), reference.bits(r, c)) == 1)
    {
        notes.push("every drifting element is off by exactly one step of its type".to_owned());
    }

    // FP32 numbers that BF16 can hold, all of them: chance gives one in 65,536.
    let narrow = |&(r, c): &(usize, usize)| device.bits(r, c) & 0xFFFF == 0 && device.get(r, c) != 0.0;
    if comparison.id.dtype() == reference::DType::F32 && drift.len() >= 8 && drift.iter().all(narrow) {
        notes.push(
            "every drifting value is a BF16 number: narrowed, or added up in BF16 (matches BF16 adds)".to_owned(),
        );
    }

    // Rows or heads that hold another one's values.
    if let Some(found) = exchanged_rows(comparison, session) {
        notes.push(found);
    }
    if let Some(found) = exchanged_heads(comparison, session) {
        notes.push(found);
    }
    notes
}

/// A power-of-two or otherwise constant factor between the device and the reference, exact to one part in 2^7
/// for BF16 and 2^20 for FP32, at every drifting element.
fn common_factor(comparison: &Comparison, drift: &[(usize, usize)]) -> Option<f64> {
    let ratio = |&(row, column): &(usize, usize)| {
        let (d, r) = (f64::from(comparison.device.get(row, column)), f64::from(comparison.reference.get(row, column)));
        (r != 0.0 && d.is_finite()).then(|| d / r)
    };
    let ratios: Vec<f64> = drift.iter().filter_map(ratio).collect();
    if ratios.len() < 4 || ratios.len() < drift.len() {
        return None;
    }
    let mut sorted = ratios.clone();
    sorted.sort_by(f64::total_cmp);
    let median = sorted[sorted.len() / 2];
    let slack = match comparison.id.dtype() {
        reference::DType::Bf16 => 2f64.powi(-7),
        reference::DType::I8 => return None,
        _ => 2f64.powi(-20),
    };
    let steady = ratios.iter().all(|ratio| (ratio / median - 1.0).abs() <= slack);
    // A factor within rounding of one says nothing.
    (steady && (median - 1.0).abs() > 2.0 * slack).then(|| {
        let rounded = (median * 1024.0).round() / 1024.0;
        if (rounded / median - 1.0).abs() <= slack { rounded } else { median }
    })
}

/// A drifting row that holds, bit for bit, what belongs to another row.
fn exchanged_rows(comparison: &Comparison, session: &Session<'_, '_>) -> Option<String> {
    let (device, reference) = (&comparison.device, &comparison.reference);
    let columns = device.shape()[1];
    // Padded queries have sixteen rows a head; their exchange shows in the heads.
    if columns < 8 || comparison.id == TensorId::AllQPadded {
        return None;
    }
    let equal = |a: usize, b: usize| (0..columns).all(|c| device.bits(a, c) == reference.bits(b, c));
    let mut found = Vec::new();
    let rows = comparison.drifting_rows(session.inputs);
    // Attention's padding rows are copies of the device's row 0, no rows of their own.
    let others = if comparison.id == TensorId::AttnOut { session.inputs.batch.active } else { BATCH };
    for &row in &rows {
        if (0..columns).all(|c| device.get(row, c) == 0.0) || (0..columns).any(|c| device.get(row, c).is_nan()) {
            continue;
        }
        // A replica of the row itself is no other row.
        let hidden = session.inputs.hidden_states;
        let foreign = |&other: &usize| other != row && hidden.row(other) != hidden.row(row);
        if let Some(other) = (0..others).filter(foreign).find(|&other| equal(row, other)) {
            found.push(format!("row {row} holds row {other}'s values"));
        }
    }
    (!found.is_empty()).then(|| found.join(", "))
}

/// A drifting head that holds, bit for bit, what belongs to another head of its row.
fn exchanged_heads(comparison: &Comparison, session: &Session<'_, '_>) -> Option<String> {
    let geometry = session.inputs.geometry;
    let dim = geometry.head_dim;
    let (device, reference) = (&comparison.device, &comparison.reference);
    let heads = match comparison.id {
        TensorId::AttnOut | TensorId::QProj | TensorId::QProjNorm => geometry.num_attention_heads,
        TensorId::KRows | TensorId::VRows | TensorId::KProj | TensorId::VProj | TensorId::KProjNorm => {
            geometry.num_key_value_heads
        }
        _ => return None,
    };
    let equal = |row: usize, a: usize, b: usize| {
        (0..dim).all(|d| device.bits(row, a * dim + d) == reference.bits(row, b * dim + d))
    };
    let mut pairs: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    let drifting: BTreeSet<(usize, usize)> = comparison
        .marks
        .indexed_iter()
        .filter(|(_, mark)| **mark == Mark::Drift)
        .map(|((row, column), _)| (row, column / dim))
        .collect();
    for (row, head) in drifting {
        if (0..dim).all(|d| device.get(row, head * dim + d) == 0.0) {
            continue;
        }
        if let Some(other) = (0..heads).find(|&other| other != head && equal(row, head, other)) {
            pairs.entry((head, other)).or_default().push(row);
        }
    }
    let texts: Vec<String> = pairs
        .iter()
        .take(4)
        .map(|((head, other), rows)| format!("head {head} has head {other}'s values in {}", counted("row", rows)))
        .collect();
    (!texts.is_empty()).then(|| texts.join(", "))
}

fn codes(comparison: &Comparison) -> Vec<String> {
    let mut notes = Vec::new();
    let (device, reference) = (&comparison.device, &comparison.reference);
    let drift = || comparison.marks.indexed_iter().filter(|(_, m)| **m == Mark::Drift).map(|(at, _)| at);
    let wrapped: Vec<(usize, usize)> = drift().filter(|&(r, c)| device.get(r, c) == -128.0).collect();
    if let Some((r, c)) = wrapped.first() {
        let flipped = wrapped.iter().all(|&(r, c)| reference.get(r, c) > 0.0);
        let how = if flipped { "; sign flipped: wrapped, not clamped" } else { "" };
        notes.push(format!(
            "{}, first at [{r}, {c}]: -128 lies outside the contract's -127..127{how}",
            number(wrapped.len(), "code is -128", "codes are -128")
        ));
    }
    notes
}

fn scales(comparison: &Comparison, session: &Session<'_, '_>, known: &Trace) -> Vec<String> {
    let (source, site) = match comparison.id {
        TensorId::ActScales => (TensorId::NormedStates, Site::Normed),
        TensorId::AttnOutScales => (TensorId::AttnOut, Site::Attn),
        _ => (TensorId::MlpNormIn, Site::MlpIn),
    };
    let x = known.widened(source, session.rules.policy.at(site));
    let mut notes = Vec::new();
    for row in comparison.drifting_rows(session.inputs) {
        let (device, values) = (comparison.device.get(row, 0), x.row(row));
        let amax = values.iter().fold(0f32, |amax, value| amax.max(value.abs()));
        let expected = row_scale(values).act;
        let meant = f64::from(device) * 127.0;
        if amax == 0.0 && (device.is_nan() || device == 0.0) {
            notes.push(format!("row {row} is all zero: no floor under amax"));
        } else if meant > f64::from(amax) * (1.0 + 1e-6) && amax < 1e-4 {
            notes.push(format!(
                "row {row}: amax {meant:e} is larger than any element of the row and than the floor of 1e-4"
            ));
        } else if let Some(divisor) = [128.0, 127.5, 255.0].into_iter().find(|d| device == amax / d) {
            notes.push(format!("row {row}: amax was divided by {divisor}, not by 127"));
        } else if expected * device == 1.0 || device == 127.0 / amax {
            notes.push(format!("row {row}: holds 127 / amax, the reciprocal of what belongs here"));
        } else if meant > f64::from(amax) * (1.0 + 1e-6) {
            notes.push(format!("row {row}: amax {meant} is larger than any element of the row ({amax})"));
        } else if meant < f64::from(amax) * (1.0 - 1e-6) {
            let held = values.iter().filter(|v| f64::from(v.abs()) > meant * (1.0 + 1e-6)).count();
            notes.push(format!("row {row}: amax {meant} misses {held} larger elements of the row (largest {amax})"));
        }
        if notes.len() == 4 {
            break;
        }
    }
    notes
}

/// Hypotheses about an attention row: which tokens were attended.
fn attention(comparison: &Comparison, session: &Session<'_, '_>, known: &Trace) -> Vec<String> {
    let inputs = session.inputs;
    let (geometry, batch) = (inputs.geometry, inputs.batch);
    let (dim, group) = (geometry.head_dim, geometry.group());
    let device = comparison.device.bf16();
    let policy = &session.rules.policy;
    let mut notes = Vec::new();
    let rows: Vec<usize> = comparison.drifting_rows(inputs).into_iter().filter(|&b| b < batch.active).collect();
    for &b in rows.iter().take(3) {
        // NaN through V.
        let slots = poisoned_slots(inputs, b, true);
        let nonfinite = (0..device.ncols()).any(|n| !device[(b, n)].is_finite());
        if nonfinite && !slots.is_empty() {
            let keys = poisoned_slots(inputs, b, false);
            let about_keys = if keys.is_empty() {
                String::new()
            } else {
                "; K is not finite there either, but the mask replaces those scores, so that K did no harm".to_owned()
            };
            notes.push(format!(
                "row {b} is contaminated through V by unused {} beyond its context of {}: zero weight times NaN{about_keys}",
                slots_name(&slots),
                batch.seq_lens[b]
            ));
            continue;
        }
        // One drifting head stands for the row.
        let Some(head) = (0..geometry.num_attention_heads)
            .find(|head| (0..dim).any(|d| comparison.marks[(b, head * dim + d)] == Mark::Drift))
        else {
            continue;
        };
        let kv_head = head / group;
        let at = head % group * dim;
        let mine = device.slice(s![b, head * dim..(head + 1) * dim]);
        let source = KvSource::new(inputs, known);
        // Few mismatches are enough: narrowed probabilities may still flip.
        let matches_under = |policy: &Policy, tokens: &[(usize, Option<usize>)]| {
            let values = attend(inputs, policy, known, tokens, b, kv_head);
            let rule = policy.at(Site::Attn);
            let hits =
                (0..dim).filter(|&d| same_bf16(reference::rounding::to_bf16(values[at + d], rule), mine[d])).count();
            hits * 10 >= dim * 9
        };
        let matches = |tokens: &[(usize, Option<usize>)]| matches_under(policy, tokens);
        let context = batch.seq_lens[b];
        let blocks = batch.block_table[b].iter().take_while(|&&page| page >= 0).count();
        let lengths = [
            context.wrapping_sub(1),
            context + 1,
            context.next_multiple_of(TILE),
            context + TILE,
            context.next_multiple_of(PAGE),
            context + PAGE,
            context.saturating_sub(TILE),
            context / TILE * TILE,
            context.saturating_sub(PAGE),
        ];
        let length = lengths
            .into_iter()
            .filter(|&n| n >= 1 && n != context && n <= blocks * PAGE)
            .find(|&n| matches(&source.tokens(b, n)));
        if let Some(length) = length {
            notes.push(format!("row {b} matches an attended length of {length}, not {context}"));
            continue;
        }
        // The cache as it was before this step.
        let stale: Vec<(usize, Option<usize>)> =
            source.tokens(b, context).into_iter().map(|(slot, _)| (slot, None)).collect();
        if matches(&stale) {
            notes.push(format!("row {b} attended to what its slot held before this step wrote it"));
            continue;
        }
        // Logical for physical pages, and one wrong page.
        let pages = inputs.cache.k.nrows() / (geometry.num_key_value_heads * PAGE);
        let walk = |page_of: &dyn Fn(usize) -> usize| -> Vec<(usize, Option<usize>)> {
            (0..context)
                .map(|position| {
                    let slot = page_of(position / PAGE) * PAGE + position % PAGE;
                    (slot, source.writer(slot))
                })
                .collect()
        };
        if context.div_ceil(PAGE) <= pages && matches(&walk(&|block| block)) {
            notes.push(format!("row {b} took logical pages 0-{} for physical ones", (context - 1) / PAGE));
            continue;
        }
        let table = &batch.block_table[b];
        let page = |block: usize| usize::try_from(table[block]).unwrap_or(0);
        let stale_page = (0..context.div_ceil(PAGE)).find_map(|wrong| {
            let others = batch.block_table.iter().flatten().filter_map(|&p| usize::try_from(p).ok());
            let others: BTreeSet<usize> = others.filter(|&p| p != page(wrong) && p < pages).collect();
            let context_ok = others.len() * context <= 1 << 16;
            others
                .into_iter()
                .filter(|_| context_ok)
                .find(|&other| matches(&walk(&|block| if block == wrong { other } else { page(block) })))
                .map(|other| (wrong, other))
        });
        if let Some((block, other)) = stale_page {
            notes.push(format!(
                "row {b} read page {other} for its logical page {block}, where the block table says {}",
                page(block)
            ));
            continue;
        }
        // Another row's context.
        let other = (0..batch.active)
            .filter(|&other| other != b)
            .find(|&other| matches(&source.tokens(other, batch.seq_lens[other])));
        if let Some(other) = other {
            notes.push(format!("row {b} attended to row {other}'s context"));
            continue;
        }
        // The same tokens under another treatment of the probabilities.
        let tokens = source.tokens(b, context);
        let treatments = [
            (Rounding::None, "probabilities were not narrowed to BF16 before they were summed"),
            (Rounding::Trunc, "probabilities were truncated to BF16, not rounded"),
        ];
        let treated = treatments.into_iter().find(|&(rule, _)| {
            rule != policy.at(Site::Prob) && matches_under(&policy.clone().with(Site::Prob, rule), &tokens)
        });
        if let Some((_, text)) = treated {
            notes.push(format!("row {b}: {text}"));
            continue;
        }
        // Weights that vanished.
        if mine.iter().all(|&value| value == bf16::ZERO) {
            let highest = highest_score(session, known, b, head);
            if highest < -1e3 {
                notes.push(format!(
                    "row {b}: all weights vanished: every real score lies below {highest:.4e}, so the running maximum \
                     began above every one of them"
                ));
            }
        }
    }
    if rows.len() > 3 {
        notes.push(format!("{} drift as well", counted("row", &rows[3..])));
    }
    notes
}

/// The largest score of one head.
fn highest_score(session: &Session<'_, '_>, known: &Trace, b: usize, head: usize) -> f64 {
    let inputs = session.inputs;
    let geometry = inputs.geometry;
    let source = KvSource::new(inputs, known);
    let row = (b * geometry.num_key_value_heads + head / geometry.group()) * BATCH + head % geometry.group();
    let q = known.widened_rows(TensorId::AllQPadded, session.rules.policy.at(Site::Q), row..row + 1);
    let score = |token| {
        let key = source.key(token, head / geometry.group());
        let dot: f64 = q.iter().zip(key).map(|(&a, b)| f64::from(a) * b.to_f64()).sum();
        dot * f64::from(geometry.attention_scale())
    };
    source.tokens(b, inputs.batch.seq_lens[b]).into_iter().map(score).fold(f64::NEG_INFINITY, f64::max)
}

/// Hypotheses about written cache rows: another row's bytes, the other cache's bytes, another position.
fn cache_rows(comparison: &Comparison, session: &Session<'_, '_>, known: &Trace) -> Vec<String> {
    let inputs = session.inputs;
    let (geometry, batch) = (inputs.geometry, inputs.batch);
    let dim = geometry.head_dim;
    let device = comparison.device.bf16();
    let rows = comparison.drifting_rows(inputs);
    let mut notes = Vec::new();
    let is_key = comparison.id == TensorId::KRows;
    let writes = comparison.reference.bf16();
    let other = known.f32(if is_key { TensorId::VProjNorm } else { TensorId::KProjNorm });
    for &b in rows.iter().take(4) {
        let heads: Vec<usize> = (0..geometry.num_key_value_heads)
            .filter(|head| (0..dim).any(|d| comparison.marks[(b, head * dim + d)] == Mark::Drift))
            .collect();
        let holds = |expected: &dyn Fn(usize) -> bf16| {
            heads.iter().all(|head| (0..dim).all(|d| device[(b, head * dim + d)] == expected(head * dim + d)))
        };
        let slot = batch.slots[b];
        let at = format!("page {}, slot {slot}, KV heads {}", slot / PAGE, ranges(&heads));
        if let Some(writer) = (0..BATCH).find(|&w| w != b && holds(&|n| writes[(w, n)])) {
            notes.push(format!("{at}: bytes equal what row {writer} would write; row {b} belongs there"));
        } else if other.nrows() == BATCH && holds(&|n| bf16::from_f32(other[(b, n)])) {
            let (mine, theirs) = if is_key { ("K", "V") } else { ("V", "K") };
            notes.push(format!("{at}: the {mine} cache holds what belongs to {theirs} (before rotation)"));
        } else if holds(&|n| {
            let row = cache_row(geometry, slot, n / dim);
            if is_key { inputs.cache.v[(row, n % dim)] } else { inputs.cache.k[(row, n % dim)] }
        }) {
            notes.push(format!("{at}: bytes of the other cache before this step"));
        } else {
            notes.push(format!("wrong values at {at}"));
        }
    }
    if is_key {
        notes.extend(rotation(comparison, session, known, TensorId::KProjNorm));
    }
    notes
}

/// Whether drifting queries or keys are the rotation by another position.
fn rotation(comparison: &Comparison, session: &Session<'_, '_>, known: &Trace, source: TensorId) -> Vec<String> {
    let inputs = session.inputs;
    let geometry = inputs.geometry;
    let (dim, half) = (geometry.head_dim, geometry.head_dim / 2);
    let x = known.f32(source);
    if x.nrows() != BATCH {
        return Vec::new();
    }
    let rule = session.rules.policy.at(if source == TensorId::KProjNorm { Site::KCache } else { Site::Q });
    let heads = x.ncols() / dim;
    let device = comparison.device.bf16();
    let element = |b: usize, head: usize, d: usize| {
        if source == TensorId::KProjNorm {
            device[(b, head * dim + d)]
        } else {
            let row = (b * geometry.num_key_value_heads + head / geometry.group()) * BATCH + head % geometry.group();
            device[(row, d)]
        }
    };
    let mut notes = Vec::new();
    if source == TensorId::QProjNorm {
        let mut drift = comparison.marks.indexed_iter().filter(|(_, mark)| **mark == Mark::Drift);
        if drift.any(|((row, _), _)| row % BATCH >= geometry.group()) {
            notes.push("rows after the last query of a KV head are not zero".to_owned());
        }
    }
    for b in comparison.drifting_rows(inputs).into_iter().take(4) {
        let position = inputs.batch.position(b);
        let rotated = |head: usize, d: usize, at: usize, sign: f32| {
            let (cos, sin) = (inputs.rope_cos[(at, d)], sign * inputs.rope_sin[(at, d)]);
            let (lo, hi) = (x[(b, head * dim + d % half)], x[(b, head * dim + half + d % half)]);
            if d < half { lo * cos - hi * sin } else { hi * cos + lo * sin }
        };
        let matches = |at: usize, sign: f32| {
            at < inputs.rope_cos.nrows()
                && (0..heads).all(|head| {
                    (0..dim).all(|d| {
                        same_bf16(element(b, head, d), reference::rounding::to_bf16(rotated(head, d, at, sign), rule))
                    })
                })
        };
        let others = [0, position + 1, position.wrapping_sub(1), position / PAGE * PAGE, position % PAGE];
        if let Some(at) = others.into_iter().find(|&at| at != position && matches(at, 1.0)) {
            notes.push(format!("row {b} equals the rotation by position {at}, expected {position}"));
        } else if !matches(position, 1.0) && matches(position, -1.0) {
            notes.push(format!("row {b} is rotated the other way: the sign of sin is exchanged"));
        }
    }
    notes
}

/// Hypotheses about the output: the two halves of K added in BF16, the residual left out.
fn out(comparison: &Comparison, known: &Trace) -> Vec<String> {
    let parts = known.f32(TensorId::DownAccParts);
    let h1b = known.bf16(TensorId::PostNormPartial);
    if parts.nrows() != 2 * BATCH || h1b.nrows() != BATCH {
        return Vec::new();
    }
    let device = comparison.device.bf16();
    type Value<'a> = &'a dyn Fn(usize, usize) -> f32;
    let hypotheses: [(&str, Value<'_>); 3] = [
        ("the two FP32 parts were narrowed to BF16 before they were added", &|b, n| {
            let narrow = |x: f32| bf16::from_f32(x).to_f32();
            narrow(narrow(parts[(b, n)]) + narrow(parts[(BATCH + b, n)])) + h1b[(b, n)].to_f32()
        }),
        ("the residual was not added", &|b, n| parts[(b, n)] + parts[(BATCH + b, n)]),
        ("only the first half of K was added", &|b, n| bf16::from_f32(parts[(b, n)]).to_f32() + h1b[(b, n)].to_f32()),
    ];
    let drift: Vec<(usize, usize)> =
        comparison.marks.indexed_iter().filter(|(_, m)| **m == Mark::Drift).map(|(at, _)| at).collect();
    let near = |value: f32, device: bf16| {
        let narrow = bf16::from_f32(value);
        ulps(reference::DType::Bf16, u32::from(narrow.to_bits()), u32::from(device.to_bits())) <= 1
    };
    hypotheses
        .into_iter()
        .filter(|(_, value)| {
            drift.iter().filter(|&&(b, n)| near(value(b, n), device[(b, n)])).count() * 20 >= drift.len() * 19
        })
        .filter(|_| drift.len() > 8)
        .map(|(text, _)| format!("the drifting elements match: {text}"))
        .take(1)
        .collect()
}
