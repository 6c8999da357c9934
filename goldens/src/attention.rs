//! Attention's output, head by head (`docs/verdicts.md`, Attention): the reference's bits, or bits that
//! the head can have with near-boundary probabilities narrowed the other way, or drift.

use std::sync::Arc;

use half::bf16;
use ndarray::{ArrayView1, ArrayView2, s};
use rayon::prelude::*;
use reference::bounds::analyse_head;
use reference::stages::KvSource;
use reference::{BATCH, Site, Tensor, TensorId, Trace};

use crate::Mark;
use crate::compare::{Session, same_bf16};
use crate::place::counted;
use crate::tally::Comparison;

/// Judges `attn_out` against attention over the device's own queries and cache.
pub fn compare(session: &Session<'_, '_>, mut comparison: Comparison, known: &Trace) -> Comparison {
    let inputs = session.inputs;
    let (geometry, batch) = (inputs.geometry, inputs.batch);
    let (dim, group) = (geometry.head_dim, geometry.group());
    let device = Arc::clone(&comparison.device);
    let device = device.bf16();
    let reference = Arc::clone(&comparison.reference);
    let reference = reference.bf16();
    let source = KvSource::new(inputs, known);
    let policy = &session.rules.policy;

    let heads: Vec<(usize, usize)> =
        (0..batch.active).flat_map(|b| (0..geometry.num_attention_heads).map(move |head| (b, head))).collect();
    let judged: Vec<(Vec<Mark>, Vec<usize>)> = heads
        .par_iter()
        .map(|&(b, head)| {
            let at = s![b, head * dim..(head + 1) * dim];
            let (device, reference) = (device.slice(at), reference.slice(at));
            if device.iter().zip(reference).all(|(&a, &b)| same_bf16(a, b)) {
                return (vec![Mark::Exact; dim], Vec::new());
            }
            let kv_head = head / group;
            let tokens = source.tokens(b, batch.seq_lens[b]);
            let widen = |view: ArrayView1<'_, bf16>| view.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
            let keys: Vec<_> = tokens.iter().map(|&token| widen(source.key(token, kv_head))).collect();
            let values: Vec<_> = tokens.iter().map(|&token| widen(source.value(token, kv_head))).collect();
            let row = (b * geometry.num_key_value_heads + kv_head) * BATCH + head % group;
            let q = known.widened_rows(TensorId::AllQPadded, policy.at(Site::Q), row..row + 1);
            let q = q.iter().copied().collect::<Vec<f32>>();
            let analysis = analyse_head(&q, &keys, &values, geometry.attention_scale(), policy, session.confidence);
            let device: Vec<bf16> = device.iter().copied().collect();
            let verdict = analysis.judge(&device);
            let marks = (0..dim)
                .map(|d| match (same_bf16(device[d], reference[d]), verdict.reached[d]) {
                    (true, _) => Mark::Exact,
                    (false, true) => Mark::Flip,
                    (false, false) => Mark::Drift,
                })
                .collect();
            (marks, verdict.flipped)
        })
        .collect();

    let mut flipped_heads = 0;
    let mut flips = 0;
    for (&(b, head), (marks, flipped)) in heads.iter().zip(&judged) {
        for (d, &mark) in marks.iter().enumerate() {
            comparison.marks[(b, head * dim + d)] = mark;
        }
        if !flipped.is_empty() && !marks.contains(&Mark::Drift) {
            flipped_heads += 1;
            flips += flipped.len();
        }
    }
    if flips > 0 {
        let heads = if flipped_heads == 1 { "1 head".to_owned() } else { format!("{flipped_heads} heads") };
        comparison.notes.push(format!("{heads} explained by {flips} probabilities narrowed to the other neighbour"));
    }

    // Step 8: padding rows are copies of the device's own row 0.
    let mut expected = reference.to_owned();
    let mut wrong = Vec::new();
    for b in batch.active..BATCH {
        expected.row_mut(b).assign(&device.row(0));
        let mut right = true;
        for n in 0..device.ncols() {
            let same = same_bf16(device[(b, n)], device[(0, n)]);
            comparison.marks[(b, n)] = if same { Mark::Exact } else { Mark::Drift };
            right &= same;
        }
        if !right {
            wrong.push(b);
        }
    }
    if !wrong.is_empty() {
        comparison.notes.push(format!(
            "padding {}: {}",
            counted("row", &wrong),
            padding_fault(device, reference.row(0), batch.active, &wrong)
        ));
    }
    comparison.reference = Arc::new(Tensor::Bf16(expected));
    comparison
}

/// What padding rows hold that are not copies of the device's row 0; `row0` is what row 0 should be.
pub fn padding_fault(
    device: ArrayView2<'_, bf16>,
    row0: ArrayView1<'_, bf16>,
    active: usize,
    wrong: &[usize],
) -> String {
    let equal = |a: usize, b: usize| device.row(a).iter().zip(device.row(b)).all(|(&a, &b)| same_bf16(a, b));
    let all = |holds: &dyn Fn(usize) -> bool| wrong.iter().all(|&b| holds(b));
    if all(&|b| device.row(b).iter().all(|&value| value == bf16::ZERO)) {
        return "padding row is zero".to_owned();
    }
    if all(&|b| device.row(b).iter().zip(row0).all(|(&a, &b)| same_bf16(a, b))) {
        return "holds what row 0 should be: it is row 0 that is wrong".to_owned();
    }
    if let Some(other) = (1..active).find(|&other| all(&|b| equal(b, other))) {
        return format!("holds row {other}, not row 0");
    }
    if wrong.len() > 1 && all(&|b| equal(b, wrong[0])) {
        return "holds another step's row 0: all alike, but no row of this step".to_owned();
    }
    "holds something else than row 0 of this step".to_owned()
}
