//! Attention over the wrong tokens, or computed in another way; padding rows.

use assay_tests::{Device, Token};
use half::bf16;
use reference::{BATCH, PAGE, Rounding, Site, Tensor, TensorId as T};

use super::Plant::Step;
use super::{Fault, benches};

pub fn faults() -> Vec<Fault> {
    let two_rows = benches::two_rows;
    let attn = &["attn_out"];
    vec![
        // Lengths. Row 0 has 300 tokens, row 1 has 77.
        Fault { id: "length-minus-1", on: two_rows, plant: Step(|d| attend_to(d, 0, 299)),
            fails: attn, says: &["row 0 matches an attended length of 299, not 300"], alone: true },
        Fault { id: "length-plus-1", on: two_rows, plant: Step(|d| attend_to(d, 0, 301)),
            fails: attn, says: &["row 0 matches an attended length of 301, not 300"], alone: false },
        Fault { id: "length-plus-16", on: two_rows, plant: Step(|d| attend_to(d, 0, 316)),
            fails: attn, says: &["row 0 matches an attended length of 316, not 300"], alone: true },
        Fault { id: "length-plus-128", on: two_rows, plant: Step(|d| attend_to(d, 0, 428)),
            fails: attn, says: &["row 0 matches an attended length of 428, not 300"], alone: true },
        Fault { id: "tail-mask-missing", on: two_rows, plant: Step(|d| attend_to(d, 1, 80)),
            fails: attn, says: &["row 1 matches an attended length of 80, not 77"], alone: true },
        Fault { id: "last-tile-dropped", on: two_rows, plant: Step(|d| attend_to(d, 1, 64)),
            fails: attn, says: &["row 1 matches an attended length of 64, not 77"], alone: true },
        Fault { id: "page-padded", on: two_rows, plant: Step(|d| attend_to(d, 1, 128)),
            fails: attn, says: &["row 1 matches an attended length of 128, not 77"], alone: true },

        // Places.
        Fault { id: "cache-before-the-step", on: two_rows, plant: Step(|d| {
            let stale: Vec<Token> = d.tokens(1, 77).into_iter().map(|(slot, _)| (slot, None)).collect();
            d.attend(1, &stale);
        }), fails: attn, says: &["row 1 attended to what its slot held before this step"], alone: true },
        Fault { id: "logical-for-physical-pages", on: two_rows, plant: Step(|d| {
            let tokens: Vec<Token> = (0..300).map(|position| (position, None)).collect();
            d.attend(0, &tokens);
        }), fails: attn, says: &["row 0 took logical pages 0-2 for physical ones"], alone: true },
        Fault { id: "stale-page", on: two_rows, plant: Step(|d| {
            let other = d.inputs.batch.block_table[1][3] as usize;
            let mut tokens = d.tokens(0, 300);
            for (offset, token) in tokens[PAGE..2 * PAGE].iter_mut().enumerate() {
                *token = (other * PAGE + offset, None);
            }
            d.attend(0, &tokens);
        }), fails: attn, says: &["row 0 read page", "for its logical page 1"], alone: true },
        Fault { id: "another-row's-context", on: two_rows, plant: Step(|d| {
            let tokens = d.tokens(0, 300);
            d.attend(1, &tokens);
        }), fails: attn, says: &["row 1 attended to row 0's context"], alone: true },
        Fault { id: "first-page-only", on: two_rows, plant: Step(|d| {
            let tokens: Vec<Token> = d.tokens(0, PAGE).iter().copied().cycle().take(300).collect();
            d.attend(0, &tokens);
        }), fails: attn, says: &[], alone: true },

        // Arithmetic.
        Fault { id: "scores-not-scaled", on: two_rows, plant: Step(|d| {
            let mut trace = d.trace.clone();
            let scale = d.inputs.geometry.attention_scale();
            let q = d.trace.bf16(T::AllQPadded).mapv(|x| bf16::from_f32(x.to_f32() / scale));
            trace.force(T::AllQPadded, Tensor::Bf16(q).into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::AttnOut, &inputs, &trace, &policy);
        }), fails: attn, says: &[], alone: true },
        Fault { id: "probabilities-not-narrowed", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(Site::Prob, Rounding::None);
            d.redo_under(T::AttnOut, &policy);
        }), fails: attn, says: &[], alone: false },
        Fault { id: "probabilities-truncated", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(Site::Prob, Rounding::Trunc);
            d.redo_under(T::AttnOut, &policy);
        }), fails: attn, says: &[], alone: false },
        Fault { id: "attention-truncated", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(Site::Attn, Rounding::Trunc);
            d.redo_under(T::AttnOut, &policy);
        }), fails: attn, says: &[], alone: false },
        Fault { id: "kv-heads-exchanged", on: two_rows, plant: Step(|d| {
            let mut trace = d.trace.clone();
            let dim = d.inputs.geometry.head_dim;
            let rows = BATCH * d.inputs.geometry.num_key_value_heads;
            let q = d.trace.bf16(T::AllQPadded);
            // Queries of KV head 0 meet the keys of KV head 1 and the other way round.
            let other = |r: usize| r / rows * rows + (r % rows + BATCH) % rows;
            let q = ndarray::Array2::from_shape_fn(q.dim(), |(r, c)| q[(other(r), c)]);
            trace.force(T::AllQPadded, Tensor::Bf16(q).into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::AttnOut, &inputs, &trace, &policy);
            let half = d.inputs.geometry.q_width() / 2;
            d.rearrange(T::AttnOut, |r, c| (r, (c + half) % (2 * half)));
            debug_assert_eq!(half % dim, 0);
        }), fails: attn, says: &[], alone: true },
        Fault { id: "recorded-head-zeroed", on: benches::recorded, plant: Step(|d| {
            d.map(T::AttnOut, |b, n, x| if b == 1 && n / 128 == 7 { 0.0 } else { x });
        }), fails: attn, says: &["row 1 head 7", "128"], alone: true },
        Fault { id: "recorded-length-plus-16", on: benches::recorded, plant: Step(|d| attend_to(d, 1, 93)),
            fails: attn, says: &["row 1 matches an attended length of 93, not 77"], alone: true },

        // Padding rows.
        Fault { id: "padding-rows-zero", on: two_rows, plant: Step(|d| {
            d.map(T::AttnOut, |b, _, x| if b >= 2 { 0.0 } else { x });
        }), fails: attn, says: &["padding_rows: attn_out rows 2-15: padding row is zero", "row 0 itself is right"],
            alone: true },
        Fault { id: "padding-rows-of-row-1", on: two_rows, plant: Step(|d| {
            d.rearrange(T::AttnOut, |b, n| (if b >= 2 { 1 } else { b }, n));
        }), fails: attn, says: &["padding_rows: attn_out rows 2-15", "row 0 itself is right", "holds row 1's values"],
            alone: true },
        Fault { id: "padding-rows-attend-themselves", on: two_rows, plant: Step(|d| {
            for b in 2..BATCH {
                let tokens = d.tokens(b, d.inputs.batch.seq_lens[b]);
                d.attend(b, &tokens);
            }
        }), fails: attn, says: &["padding_rows: attn_out rows 2-15"], alone: true },
        Fault { id: "last-padding-row-stale", on: two_rows, plant: Step(|d| {
            d.map(T::AttnOut, |b, n, x| if b == 15 { (n as f32).sin() } else { x });
        }), fails: attn, says: &["padding_rows: attn_out row 15", "row 0 itself is right"], alone: true },
        Fault { id: "replicated-padding-rows-zero", on: benches::replicated, plant: Step(|d| {
            d.map(T::AttnOut, |b, _, x| if b >= 2 { 0.0 } else { x });
        }), fails: attn, says: &["padding_rows: attn_out rows 2-15: padding row is zero"], alone: true },
    ]
}

/// Lets a row attend to its first `length` tokens.
fn attend_to(device: &mut Device<'_>, row: usize, length: usize) {
    let tokens = device.tokens(row, length);
    device.attend(row, &tokens);
}
