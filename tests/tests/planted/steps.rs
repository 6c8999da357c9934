//! Steps computed in another way than the contract says: norms, quantization, projections, rotation, MLP.

use std::ops::Range;

use assay_tests::{Device, borrowed};
use half::bf16;
use ndarray::{Array1, Array2, s};
use reference::kernels::matmul_i8;
use reference::rounding::to_bf16;
use reference::{BATCH, Rounding, Site, Tensor, TensorId as T};

use super::{Fault, benches, gross, subtle};

pub fn faults() -> Vec<Fault> {
    let two_rows = benches::two_rows;
    vec![
        // Norms.
        gross("input-gamma-skipped", two_rows, &["normed_states"], &[], |d| {
            let ones = Array1::ones(d.inputs.geometry.hidden_size);
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.weights.input_rms_weight = ones.view();
            d.redo(T::NormedStates, &inputs);
        }),
        gross("post-gamma-skipped", two_rows, &["mlp_norm_in"], &[], |d| {
            let ones = Array1::ones(d.inputs.geometry.hidden_size);
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.weights.post_rms_weight = ones.view();
            d.redo(T::MlpNormIn, &inputs);
        }),
        gross("q-gamma-skipped", two_rows, &["q_proj_norm"], &[], |d| {
            let ones = Array1::ones(d.inputs.geometry.head_dim);
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.weights.q_norm_weight = ones.view();
            d.redo(T::QProjNorm, &inputs);
        }),
        gross("k-gamma-skipped", two_rows, &["k_proj_norm"], &[], |d| {
            let ones = Array1::ones(d.inputs.geometry.head_dim);
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.weights.k_norm_weight = ones.view();
            d.redo(T::KProjNorm, &inputs);
        }),
        subtle("input-eps", two_rows, &["inv_rms_states"], &[], |d| redo_with_eps(d, T::InvRmsStates)),
        subtle("head-eps", two_rows, &["q_proj_norm"], &[], |d| redo_with_eps(d, T::QProjNorm)),
        subtle("post-eps", two_rows, &["inv_rms_tile"], &[], |d| redo_with_eps(d, T::InvRmsTile)),
        gross("rms-of-half-the-columns", two_rows, &["inv_rms_states"], &[], |d| {
            let columns = d.inputs.geometry.hidden_size / 2;
            let x = d.inputs.hidden_states.mapv(bf16::to_f32);
            let eps = d.inputs.geometry.rms_norm_eps;
            let mean = |b: usize| x.slice(s![b, ..columns]).iter().map(|x| x * x).sum::<f32>() / columns as f32;
            d.map(T::InvRmsStates, |b, _, _| 1.0 / (mean(b) + eps).sqrt());
        }),
        gross("v-not-divided-by-the-rms", two_rows, &["v_proj_norm"], &[], |d| {
            let proj = d.tensor(T::VProj).clone();
            d.set(T::VProjNorm, proj);
        }),
        gross("residual-rounded-early", two_rows, &["mlp_norm_in"], &[], |d| {
            let gamma = d.inputs.weights.post_rms_weight;
            let h1b = d.trace.bf16(T::PostNormPartial).mapv(bf16::to_f32);
            let rule = d.policy.at(Site::MlpIn);
            d.set(T::MlpNormIn, Tensor::Bf16((h1b * gamma).mapv(|x| to_bf16(x, rule))));
        }),
        gross("residual-missing-before-the-mlp", two_rows, &["post_norm_partial"], &[], |d| {
            let proj = d.trace.f32(T::AttnProjFp32).to_owned();
            d.map(T::PostNormPartial, |b, n, _| proj[(b, n)]);
        }),
        // Quantization.
        subtle("amax-over-128", two_rows, &["act_scales"], &["divided by 128, not by 127"], |d| {
            let x = d.trace.bf16(T::NormedStates).mapv(|x| x.to_f32().abs());
            d.map(T::ActScales, |b, _, _| x.row(b).iter().copied().fold(1e-4, f32::max) / 128.0);
        }),
        gross("128-for-127-without-a-clamp", two_rows, &["normed_i8"], &["-128", "wrapped", "int8_range"], |d| {
            let (x, scales) = (d.trace.bf16(T::NormedStates).to_owned(), d.trace.f32(T::ActScales).to_owned());
            let code = |b: usize, n: usize| x[(b, n)].to_f32() / scales[(b, 0)] * (128.0 / 127.0);
            // A cast that wraps: +128 becomes -128.
            d.map(T::NormedI8, |b, n, _| f32::from(code(b, n).round_ties_even() as i32 as i8));
        }),
        gross("one-code-of-minus-128", two_rows, &["mlp_norm_i8"], &["mlp_norm_i8[1, 9]", "-128", "outside"], |d| {
            d.map(T::MlpNormI8, |b, n, x| if (b, n) == (1, 9) { -128.0 } else { x });
        }),
        gross("reciprocal-scale", two_rows, &["mlp_act_scales"], &["reciprocal"], |d| {
            d.map(T::MlpActScales, |_, _, scale| 1.0 / scale);
        }),
        subtle("amax-of-half-the-row", two_rows, &["attn_out_scales"], &["misses"], |d| {
            let x = d.trace.bf16(T::AttnOut).mapv(|x| x.to_f32().abs());
            let half = x.ncols() / 2;
            let amax = |b: usize, n: Range<usize>| x.slice(s![b, n]).iter().copied().fold(1e-4, f32::max);
            d.map(T::AttnOutScales, |b, _, _| amax(b, 0..half).min(amax(b, half..2 * half)) / 127.0);
        }),
        gross("codes-truncated", two_rows, &["normed_i8"], &[], |d| {
            let policy = d.policy.clone().with(Site::NormedI8, Rounding::Trunc);
            d.redo_under(T::NormedI8, &policy);
        }),
        gross("normed-truncated", two_rows, &["normed_states"], &[], |d| {
            let policy = d.policy.clone().with(Site::Normed, Rounding::Trunc);
            d.redo_under(T::NormedStates, &policy);
        }),
        // Projections.
        gross("column-scale-omitted", two_rows, &["q_proj"], &["no matter of precision"], |d| {
            let ones = Array1::ones(d.inputs.geometry.q_width());
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.weights.wq_scale = ones.view();
            d.redo(T::QProj, &inputs);
        }),
        gross("activation-scale-omitted", two_rows, &["v_proj"], &["no matter of precision"], |d| {
            let scales = d.trace.f32(T::ActScales).to_owned();
            d.map(T::VProj, |b, _, x| x / scales[(b, 0)]);
        }),
        subtle("activation-scale-first", two_rows, &["up_acc_all"], &["no matter of precision"], |d| {
            let acc = matmul_i8(d.trace.i8(T::MlpNormI8), d.inputs.weights.w_up);
            let (w, act) = (d.inputs.weights.w_up_scale, d.trace.f32(T::MlpActScales).to_owned());
            d.map(T::UpAccAll, |b, n, _| (acc[(b, n)] as f32 * act[(b, 0)]) * w[n]);
        }),
        subtle("fp32-sums", benches::large_sums, &["q_proj"], &["no matter of precision"], |d| {
            let (codes, w) = (d.trace.i8(T::NormedI8).to_owned(), d.inputs.weights.wq);
            let (scale, act) = (d.inputs.weights.wq_scale, d.trace.f32(T::ActScales).to_owned());
            let product = |b: usize, n: usize, k: usize| f32::from(codes[(b, k)]) * f32::from(w[(k, n)]);
            let sum = |b: usize, n: usize| (0..w.nrows()).fold(0f32, |sum, k| sum + product(b, n, k));
            d.map(T::QProj, |b, n, _| (sum(b, n) * scale[n]) * act[(b, 0)]);
        }),
        gross("k-and-v-weights-exchanged", two_rows, &["k_proj", "v_proj"], &["no matter of precision"], |d| {
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            (inputs.weights.wk, inputs.weights.wv) = (d.inputs.weights.wv, d.inputs.weights.wk);
            d.redo(T::KProj, &inputs).redo(T::VProj, &inputs);
        }),
        gross(
            "q-and-k-weights-exchanged",
            benches::one_to_one,
            &["q_proj", "k_proj"],
            &["no matter of precision"],
            |d| {
                let base = d.inputs;
                let mut inputs = borrowed(&base);
                (inputs.weights.wq, inputs.weights.wk) = (d.inputs.weights.wk, d.inputs.weights.wq);
                d.redo(T::QProj, &inputs).redo(T::KProj, &inputs);
            },
        ),
        gross("gate-and-up-exchanged", two_rows, &["gate_acc_all", "up_acc_all"], &[], |d| {
            let (gate, up) = (d.tensor(T::GateAccAll).clone(), d.tensor(T::UpAccAll).clone());
            d.set(T::GateAccAll, up).set(T::UpAccAll, gate);
        }),
        gross("last-block-of-k-dropped", two_rows, &["attn_proj_fp32"], &["no matter of precision"], |d| {
            let mut w = d.inputs.weights.wo.to_owned();
            let rows = w.nrows();
            w.slice_mut(s![rows - 64.., ..]).fill(0);
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.weights.wo = w.view();
            d.redo(T::AttnProjFp32, &inputs);
        }),
        gross("last-columns-unwritten", two_rows, &["attn_proj_fp32"], &[], |d| {
            let columns = d.inputs.geometry.hidden_size;
            d.map(T::AttnProjFp32, |_, n, x| if n >= columns - 64 { 0.0 } else { x });
        }),
        // Rotation.
        gross(
            "q-position-zero",
            two_rows,
            &["all_q_padded"],
            &["rotation by position 0, expected 139", "position 0, expected 76"],
            |d| rotate_at(d, T::AllQPadded, |_| 0),
        ),
        gross("q-position-off-by-one", two_rows, &["all_q_padded"], &["rotation by position 140, expected 139"], |d| {
            rotate_at(d, T::AllQPadded, |at| at + 1)
        }),
        gross("k-position-zero", two_rows, &["k_written_values"], &["rotation by position 0, expected 139"], |d| {
            rotate_at(d, T::KRows, |_| 0)
        }),
        gross(
            "k-position-off-by-one",
            two_rows,
            &["k_written_values"],
            &["rotation by position 140, expected 139"],
            |d| rotate_at(d, T::KRows, |at| at + 1),
        ),
        gross("q-sign-of-sin", two_rows, &["all_q_padded"], &["sign of sin"], |d| {
            let sin = d.inputs.rope_sin.mapv(|x| -x);
            let base = d.inputs;
            let mut inputs = borrowed(&base);
            inputs.rope_sin = sin.view();
            d.redo(T::AllQPadded, &inputs);
        }),
        gross("k-not-rotated", two_rows, &["k_written_values"], &[], |d| {
            let k = d.trace.f32(T::KProjNorm).to_owned();
            d.map(T::KRows, |b, n, _| k[(b, n)]);
        }),
        gross("q-pairs-interleaved", two_rows, &["all_q_padded"], &[], |d| {
            let dim = d.inputs.geometry.head_dim;
            d.rearrange(T::AllQPadded, |r, c| (r, if c % 2 == 0 { c / 2 } else { dim / 2 + c / 2 }));
        }),
        // MLP.
        gross("post-rms-skipped-in-gate", two_rows, &["mlp_down_tile"], &[], |d| {
            let ones = Tensor::F32(Array2::ones((BATCH, 1)));
            let mut trace = d.trace.clone();
            trace.force(T::InvRmsTile, ones.into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::MlpDownTile, &inputs, &trace, &policy);
        }),
        gross("silu-without-its-gate", two_rows, &["mlp_down_tile"], &[], |d| {
            let (up, inv) = (d.trace.f32(T::UpAccAll).to_owned(), d.trace.f32(T::InvRmsTile).to_owned());
            d.map(T::MlpDownTile, |b, n, _| up[(b, n)] * inv[(b, 0)]);
        }),
        subtle("k-split-dropped", two_rows, &["down_acc_parts"], &[], |d| {
            let parts = d.trace.f32(T::DownAccParts).to_owned();
            d.map(T::DownAccParts, |r, n, x| if r < BATCH { x + parts[(r + BATCH, n)] } else { 0.0 });
        }),
        gross("second-half-of-k-missing", two_rows, &["out"], &["only the first half of K was added"], |d| {
            let mut trace = d.trace.clone();
            let parts = trace.f32(T::DownAccParts).to_owned();
            let first = Array2::from_shape_fn(parts.dim(), |(r, n)| if r < BATCH { parts[(r, n)] } else { 0.0 });
            trace.force(T::DownAccParts, Tensor::F32(first).into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::Out, &inputs, &trace, &policy);
        }),
        subtle(
            "halves-narrowed-before-they-are-added",
            two_rows,
            &["out"],
            &["narrowed to BF16 before they were added"],
            |d| {
                let parts = d.trace.f32(T::DownAccParts).mapv(|x| bf16::from_f32(x).to_f32());
                let mut trace = d.trace.clone();
                trace.force(T::DownAccParts, Tensor::F32(parts).into());
                let (inputs, policy) = (d.inputs, d.policy.clone());
                d.redo_as(T::Out, &inputs, &trace, &policy);
            },
        ),
        gross("residual-missing-in-the-output", two_rows, &["out"], &["the residual was not added"], |d| {
            let parts = d.trace.f32(T::DownAccParts).to_owned();
            d.map(T::Out, |b, n, _| parts[(b, n)] + parts[(b + BATCH, n)]);
        }),
        subtle("sum-not-narrowed-before-the-residual", two_rows, &["out"], &[], |d| {
            let policy = d.policy.clone().with(Site::Down, Rounding::None);
            d.redo_under(T::Out, &policy);
        }),
        gross("down-ties-away", two_rows, &["down_acc_parts", "out"], &["down: ", "away from zero"], |d| {
            // Sums with nothing below BF16's tie, so that ties are met.
            let policy = d.policy.clone().with(Site::Down, Rounding::TiesAway);
            d.map(T::DownAccParts, |r, _, x| if r < BATCH { bf16::from_f32(x).to_f32() } else { 0.0 });
            d.nudge(T::DownAccParts, |r, _| if r < BATCH { 0x8000 } else { 0 });
            d.redo_under(T::Out, &policy);
        }),
    ]
}

/// Runs a norm again with another `eps`.
fn redo_with_eps(device: &mut Device<'_>, id: T) {
    let mut geometry = device.inputs.geometry.clone();
    geometry.rms_norm_eps = 1e-5;
    let base = device.inputs;
    let mut inputs = borrowed(&base);
    inputs.geometry = &geometry;
    device.redo(id, &inputs);
}

/// Rotates again at other positions.
fn rotate_at(device: &mut Device<'_>, id: T, position: fn(usize) -> usize) {
    let mut batch = device.inputs.batch.clone();
    for length in &mut batch.seq_lens {
        *length = position(*length - 1) + 1;
    }
    let base = device.inputs;
    let mut inputs = borrowed(&base);
    inputs.batch = &batch;
    device.redo(id, &inputs);
}
