//! Attention over the wrong tokens, or computed in another way; padding rows.

use assay_tests::{Device, Token};
use half::bf16;
use reference::{BATCH, PAGE, Rounding, Site, Tensor, TensorId as T};

use super::{Fault, benches, gross, subtle};

pub fn faults() -> Vec<Fault> {
    let two_rows = benches::two_rows;
    let attn = &["attn_out"];
    vec![
        // Lengths. Row 0 has 140 tokens, row 1 has 77.
        gross("length-minus-1", two_rows, attn, &["row 0 matches an attended length of 139, not 140"], |d| {
            attend_to(d, 0, 139)
        }),
        gross("length-plus-1", two_rows, attn, &["row 0 matches an attended length of 141, not 140"], |d| {
            attend_to(d, 0, 141)
        }),
        gross("length-plus-16", two_rows, attn, &["row 0 matches an attended length of 156, not 140"], |d| {
            attend_to(d, 0, 156)
        }),
        gross("length-plus-128", two_rows, attn, &["row 0 matches an attended length of 268, not 140"], |d| {
            attend_to(d, 0, 268)
        }),
        gross("tail-mask-missing", two_rows, attn, &["row 1 matches an attended length of 80, not 77"], |d| {
            attend_to(d, 1, 80)
        }),
        gross("last-tile-dropped", two_rows, attn, &["row 1 matches an attended length of 64, not 77"], |d| {
            attend_to(d, 1, 64)
        }),
        gross("page-padded", two_rows, attn, &["row 1 matches an attended length of 128, not 77"], |d| {
            attend_to(d, 1, 128)
        }),
        // Places.
        gross(
            "cache-before-the-step",
            two_rows,
            attn,
            &["row 1 attended to what its slot held before this step"],
            |d| {
                let stale: Vec<Token> = d.tokens(1, 77).into_iter().map(|(slot, _)| (slot, None)).collect();
                d.attend(1, &stale);
            },
        ),
        gross("logical-for-physical-pages", two_rows, attn, &["row 0 took logical pages 0-1 for physical ones"], |d| {
            let tokens: Vec<Token> = (0..140).map(|position| (position, None)).collect();
            d.attend(0, &tokens);
        }),
        gross("stale-page", two_rows, attn, &["row 0 read page", "for its logical page 1"], |d| {
            let other = d.inputs.batch.block_table[1][3] as usize;
            let mut tokens = d.tokens(0, 140);
            for (offset, token) in tokens[PAGE..].iter_mut().enumerate() {
                *token = (other * PAGE + offset, None);
            }
            d.attend(0, &tokens);
        }),
        gross("another-row's-context", two_rows, attn, &["row 1 attended to row 0's context"], |d| {
            let tokens = d.tokens(0, 140);
            d.attend(1, &tokens);
        }),
        gross("first-page-only", two_rows, attn, &[], |d| {
            let tokens: Vec<Token> = d.tokens(0, PAGE).iter().copied().cycle().take(140).collect();
            d.attend(0, &tokens);
        }),
        // Arithmetic.
        gross("scores-not-scaled", two_rows, attn, &[], |d| {
            let mut trace = d.trace.clone();
            let scale = d.inputs.geometry.attention_scale();
            let q = d.trace.bf16(T::AllQPadded).mapv(|x| bf16::from_f32(x.to_f32() / scale));
            trace.force(T::AllQPadded, Tensor::Bf16(q).into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::AttnOut, &inputs, &trace, &policy);
        }),
        gross("probabilities-not-narrowed", two_rows, attn, &[], |d| {
            let policy = d.policy.clone().with(Site::Prob, Rounding::None);
            d.redo_under(T::AttnOut, &policy);
        }),
        gross("probabilities-truncated", two_rows, attn, &[], |d| {
            let policy = d.policy.clone().with(Site::Prob, Rounding::Trunc);
            d.redo_under(T::AttnOut, &policy);
        }),
        gross("attention-truncated", two_rows, attn, &[], |d| {
            let policy = d.policy.clone().with(Site::Attn, Rounding::Trunc);
            d.redo_under(T::AttnOut, &policy);
        }),
        gross("kv-heads-exchanged", two_rows, attn, &[], |d| {
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
        }),
        gross("recorded-head-zeroed", benches::recorded, attn, &["row 1 head 7", "128"], |d| {
            d.map(T::AttnOut, |b, n, x| if b == 1 && n / 128 == 7 { 0.0 } else { x });
        }),
        gross(
            "recorded-length-plus-16",
            benches::recorded,
            attn,
            &["row 1 matches an attended length of 93, not 77"],
            |d| attend_to(d, 1, 93),
        ),
        gross("recorded-length-minus-1", benches::recorded, attn, &["row 0 matches an attended length of 129"], |d| {
            attend_to(d, 0, 129)
        }),
        subtle("recorded-probabilities-not-narrowed", benches::recorded, attn, &[], |d| {
            let policy = d.policy.clone().with(Site::Prob, Rounding::None);
            d.redo_under(T::AttnOut, &policy);
        }),
        // Padding rows.
        gross(
            "padding-rows-zero",
            two_rows,
            attn,
            &["padding_rows: attn_out rows 2-15: padding row is zero", "row 0 itself is right"],
            |d| {
                d.map(T::AttnOut, |b, _, x| if b >= 2 { 0.0 } else { x });
            },
        ),
        gross(
            "padding-rows-of-row-1",
            two_rows,
            attn,
            &["padding_rows: attn_out rows 2-15", "row 0 itself is right", "holds row 1's values"],
            |d| {
                d.rearrange(T::AttnOut, |b, n| (if b >= 2 { 1 } else { b }, n));
            },
        ),
        gross("padding-rows-attend-themselves", two_rows, attn, &["padding_rows: attn_out rows 2-15"], |d| {
            for b in 2..BATCH {
                let tokens = d.tokens(b, d.inputs.batch.seq_lens[b]);
                d.attend(b, &tokens);
            }
        }),
        gross(
            "last-padding-row-stale",
            two_rows,
            attn,
            &["padding_rows: attn_out row 15", "row 0 itself is right"],
            |d| {
                d.map(T::AttnOut, |b, n, x| if b == 15 { (n as f32).sin() } else { x });
            },
        ),
        gross(
            "replicated-padding-rows-zero",
            benches::replicated,
            attn,
            &["padding_rows: attn_out rows 2-15: padding row is zero"],
            |d| {
                d.map(T::AttnOut, |b, _, x| if b >= 2 { 0.0 } else { x });
            },
        ),
    ]
}

/// Lets a row attend to its first `length` tokens.
fn attend_to(device: &mut Device<'_>, row: usize, length: usize) {
    let tokens = device.tokens(row, length);
    device.attend(row, &tokens);
}
