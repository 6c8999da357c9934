//! Steps computed in another way than the contract says: norms, quantization, projections, rotation, MLP.

use assay_tests::Device;
use half::bf16;
use ndarray::{Array1, Array2, s};
use reference::kernels::matmul_i8;
use reference::rounding::to_bf16;
use reference::{BATCH, Rounding, Site, Tensor, TensorId as T};

use super::Plant::Step;
use super::{Fault, benches};

pub fn faults() -> Vec<Fault> {
    let two_rows = benches::two_rows;
    vec![
        // Norms.
        Fault { id: "input-gamma-skipped", on: two_rows, plant: Step(|d| {
            let ones = Array1::ones(d.inputs.geometry.hidden_size);
            let mut inputs = d.inputs;
            inputs.weights.input_rms_weight = ones.view();
            d.redo(T::NormedStates, &inputs);
        }), fails: &["normed_states"], says: &[], alone: true },
        Fault { id: "post-gamma-skipped", on: two_rows, plant: Step(|d| {
            let ones = Array1::ones(d.inputs.geometry.hidden_size);
            let mut inputs = d.inputs;
            inputs.weights.post_rms_weight = ones.view();
            d.redo(T::MlpNormIn, &inputs);
        }), fails: &["mlp_norm_in"], says: &[], alone: true },
        Fault { id: "q-gamma-skipped", on: two_rows, plant: Step(|d| {
            let ones = Array1::ones(d.inputs.geometry.head_dim);
            let mut inputs = d.inputs;
            inputs.weights.q_norm_weight = ones.view();
            d.redo(T::QProjNorm, &inputs);
        }), fails: &["q_proj_norm"], says: &[], alone: true },
        Fault { id: "k-gamma-skipped", on: two_rows, plant: Step(|d| {
            let ones = Array1::ones(d.inputs.geometry.head_dim);
            let mut inputs = d.inputs;
            inputs.weights.k_norm_weight = ones.view();
            d.redo(T::KProjNorm, &inputs);
        }), fails: &["k_proj_norm"], says: &[], alone: false },
        Fault { id: "input-eps", on: two_rows, plant: Step(|d| redo_with_eps(d, T::InvRmsStates)),
            fails: &["inv_rms_states"], says: &[], alone: false },
        Fault { id: "head-eps", on: two_rows, plant: Step(|d| redo_with_eps(d, T::QProjNorm)),
            fails: &["q_proj_norm"], says: &[], alone: false },
        Fault { id: "post-eps", on: two_rows, plant: Step(|d| redo_with_eps(d, T::InvRmsTile)),
            fails: &["inv_rms_tile"], says: &[], alone: false },
        Fault { id: "rms-of-half-the-columns", on: two_rows, plant: Step(|d| {
            let columns = d.inputs.geometry.hidden_size / 2;
            let x = d.inputs.hidden_states.mapv(bf16::to_f32);
            let eps = d.inputs.geometry.rms_norm_eps;
            let mean = |b: usize| x.slice(s![b, ..columns]).iter().map(|x| x * x).sum::<f32>() / columns as f32;
            d.map(T::InvRmsStates, |b, _, _| 1.0 / (mean(b) + eps).sqrt());
        }), fails: &["inv_rms_states"], says: &[], alone: true },
        Fault { id: "v-not-divided-by-the-rms", on: two_rows, plant: Step(|d| {
            let proj = d.tensor(T::VProj).clone();
            d.set(T::VProjNorm, proj);
        }), fails: &["v_proj_norm"], says: &[], alone: true },
        Fault { id: "residual-rounded-early", on: two_rows, plant: Step(|d| {
            let gamma = d.inputs.weights.post_rms_weight;
            let h1b = d.trace.bf16(T::PostNormPartial).mapv(bf16::to_f32);
            let rule = d.policy.at(Site::MlpIn);
            d.set(T::MlpNormIn, Tensor::Bf16((h1b * gamma).mapv(|x| to_bf16(x, rule))));
        }), fails: &["mlp_norm_in"], says: &[], alone: false },
        Fault { id: "residual-missing-before-the-mlp", on: two_rows, plant: Step(|d| {
            let proj = d.trace.f32(T::AttnProjFp32).to_owned();
            d.map(T::PostNormPartial, |b, n, _| proj[(b, n)]);
        }), fails: &["post_norm_partial"], says: &[], alone: true },

        // Quantization.
        Fault { id: "amax-over-128", on: two_rows, plant: Step(|d| {
            d.map(T::ActScales, |_, _, scale| scale * 127.0 / 128.0);
        }), fails: &["act_scales"], says: &[], alone: true },
        Fault { id: "128-for-127-without-a-clamp", on: two_rows, plant: Step(|d| {
            let (x, scales) = (d.trace.bf16(T::NormedStates).to_owned(), d.trace.f32(T::ActScales).to_owned());
            let code = |b: usize, n: usize| x[(b, n)].to_f32() / scales[(b, 0)] * (128.0 / 127.0);
            // A cast that wraps: +128 becomes -128.
            d.map(T::NormedI8, |b, n, _| f32::from(code(b, n).round_ties_even() as i32 as i8));
        }), fails: &["normed_i8"], says: &["-128", "wrapped", "int8_range"], alone: true },
        Fault { id: "one-code-of-minus-128", on: two_rows, plant: Step(|d| {
            d.map(T::MlpNormI8, |b, n, x| if (b, n) == (1, 9) { -128.0 } else { x });
        }), fails: &["mlp_norm_i8"], says: &["mlp_norm_i8[1, 9]", "-128", "outside"], alone: false },
        Fault { id: "reciprocal-scale", on: two_rows, plant: Step(|d| {
            d.map(T::MlpActScales, |_, _, scale| 1.0 / scale);
        }), fails: &["mlp_act_scales"], says: &["reciprocal"], alone: true },
        Fault { id: "amax-of-half-the-row", on: two_rows, plant: Step(|d| {
            let x = d.trace.bf16(T::AttnOut).mapv(|x| x.to_f32().abs());
            let half = x.ncols() / 2;
            d.map(T::AttnOutScales, |b, _, _| x.slice(s![b, ..half]).iter().copied().fold(1e-4, f32::max) / 127.0);
        }), fails: &["attn_out_scales"], says: &["misses"], alone: false },
        Fault { id: "codes-truncated", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(Site::NormedI8, Rounding::Trunc);
            d.redo_under(T::NormedI8, &policy);
        }), fails: &["normed_i8"], says: &[], alone: true },
        Fault { id: "normed-truncated", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(Site::Normed, Rounding::Trunc);
            d.redo_under(T::NormedStates, &policy);
        }), fails: &["normed_states"], says: &[], alone: false },

        // Projections.
        Fault { id: "column-scale-omitted", on: two_rows, plant: Step(|d| {
            let ones = Array1::ones(d.inputs.geometry.q_width());
            let mut inputs = d.inputs;
            inputs.weights.wq_scale = ones.view();
            d.redo(T::QProj, &inputs);
        }), fails: &["q_proj"], says: &["no matter of precision"], alone: true },
        Fault { id: "activation-scale-omitted", on: two_rows, plant: Step(|d| {
            let scales = d.trace.f32(T::ActScales).to_owned();
            d.map(T::VProj, |b, _, x| x / scales[(b, 0)]);
        }), fails: &["v_proj"], says: &["no matter of precision"], alone: true },
        Fault { id: "activation-scale-first", on: two_rows, plant: Step(|d| {
            let acc = matmul_i8(d.trace.i8(T::MlpNormI8), d.inputs.weights.w_up);
            let (w, act) = (d.inputs.weights.w_up_scale, d.trace.f32(T::MlpActScales).to_owned());
            d.map(T::UpAccAll, |b, n, _| (acc[(b, n)] as f32 * act[(b, 0)]) * w[n]);
        }), fails: &["up_acc_all"], says: &["no matter of precision"], alone: false },
        Fault { id: "fp32-sums", on: benches::large_sums, plant: Step(|d| {
            let (codes, w) = (d.trace.i8(T::NormedI8).to_owned(), d.inputs.weights.wq);
            let (scale, act) = (d.inputs.weights.wq_scale, d.trace.f32(T::ActScales).to_owned());
            let product = |b: usize, n: usize, k: usize| f32::from(codes[(b, k)]) * f32::from(w[(k, n)]);
            let sum = |b: usize, n: usize| (0..w.nrows()).fold(0f32, |sum, k| sum + product(b, n, k));
            d.map(T::QProj, |b, n, _| (sum(b, n) * scale[n]) * act[(b, 0)]);
        }), fails: &["q_proj"], says: &["no matter of precision"], alone: false },
        Fault { id: "k-and-v-weights-exchanged", on: two_rows, plant: Step(|d| {
            let mut inputs = d.inputs;
            (inputs.weights.wk, inputs.weights.wv) = (d.inputs.weights.wv, d.inputs.weights.wk);
            d.redo(T::KProj, &inputs).redo(T::VProj, &inputs);
        }), fails: &["k_proj", "v_proj"], says: &["no matter of precision"], alone: true },
        Fault { id: "q-and-k-weights-exchanged", on: benches::one_to_one, plant: Step(|d| {
            let mut inputs = d.inputs;
            (inputs.weights.wq, inputs.weights.wk) = (d.inputs.weights.wk, d.inputs.weights.wq);
            d.redo(T::QProj, &inputs).redo(T::KProj, &inputs);
        }), fails: &["q_proj", "k_proj"], says: &["no matter of precision"], alone: true },
        Fault { id: "gate-and-up-exchanged", on: two_rows, plant: Step(|d| {
            let (gate, up) = (d.tensor(T::GateAccAll).clone(), d.tensor(T::UpAccAll).clone());
            d.set(T::GateAccAll, up).set(T::UpAccAll, gate);
        }), fails: &["gate_acc_all", "up_acc_all"], says: &[], alone: true },
        Fault { id: "last-block-of-k-dropped", on: two_rows, plant: Step(|d| {
            let mut w = d.inputs.weights.wo.to_owned();
            let rows = w.nrows();
            w.slice_mut(s![rows - 64.., ..]).fill(0);
            let mut inputs = d.inputs;
            inputs.weights.wo = w.view();
            d.redo(T::AttnProjFp32, &inputs);
        }), fails: &["attn_proj_fp32"], says: &["no matter of precision"], alone: true },
        Fault { id: "last-columns-unwritten", on: two_rows, plant: Step(|d| {
            let columns = d.inputs.geometry.hidden_size;
            d.map(T::AttnProjFp32, |_, n, x| if n >= columns - 64 { 0.0 } else { x });
        }), fails: &["attn_proj_fp32"], says: &[], alone: true },

        // Rotation.
        Fault { id: "q-position-zero", on: two_rows, plant: Step(|d| rotate_at(d, T::AllQPadded, |_| 0)),
            fails: &["all_q_padded"], says: &["rotation by position 0, expected 299", "position 0, expected 76"],
            alone: true },
        Fault { id: "q-position-off-by-one", on: two_rows, plant: Step(|d| rotate_at(d, T::AllQPadded, |at| at + 1)),
            fails: &["all_q_padded"], says: &["rotation by position 300, expected 299"], alone: true },
        Fault { id: "k-position-zero", on: two_rows, plant: Step(|d| rotate_at(d, T::KRows, |_| 0)),
            fails: &["k_written_values"], says: &["rotation by position 0, expected 299"], alone: false },
        Fault { id: "k-position-off-by-one", on: two_rows, plant: Step(|d| rotate_at(d, T::KRows, |at| at + 1)),
            fails: &["k_written_values"], says: &["rotation by position 300, expected 299"], alone: false },
        Fault { id: "q-sign-of-sin", on: two_rows, plant: Step(|d| {
            let sin = d.inputs.rope_sin.mapv(|x| -x);
            let mut inputs = d.inputs;
            inputs.rope_sin = sin.view();
            d.redo(T::AllQPadded, &inputs);
        }), fails: &["all_q_padded"], says: &["sign of sin"], alone: true },
        Fault { id: "k-not-rotated", on: two_rows, plant: Step(|d| {
            let k = d.trace.f32(T::KProjNorm).to_owned();
            d.map(T::KRows, |b, n, _| k[(b, n)]);
        }), fails: &["k_written_values"], says: &[], alone: false },
        Fault { id: "q-pairs-interleaved", on: two_rows, plant: Step(|d| {
            let dim = d.inputs.geometry.head_dim;
            d.rearrange(T::AllQPadded, |r, c| (r, if c % 2 == 0 { c / 2 } else { dim / 2 + c / 2 }));
        }), fails: &["all_q_padded"], says: &[], alone: true },

        // MLP.
        Fault { id: "post-rms-skipped-in-gate", on: two_rows, plant: Step(|d| {
            let ones = Tensor::F32(Array2::ones((BATCH, 1)));
            let mut trace = d.trace.clone();
            trace.force(T::InvRmsTile, ones.into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::MlpDownTile, &inputs, &trace, &policy);
        }), fails: &["mlp_down_tile"], says: &[], alone: true },
        Fault { id: "silu-without-its-gate", on: two_rows, plant: Step(|d| {
            let (up, inv) = (d.trace.f32(T::UpAccAll).to_owned(), d.trace.f32(T::InvRmsTile).to_owned());
            d.map(T::MlpDownTile, |b, n, _| up[(b, n)] * inv[(b, 0)]);
        }), fails: &["mlp_down_tile"], says: &[], alone: true },
        Fault { id: "k-split-dropped", on: two_rows, plant: Step(|d| {
            let parts = d.trace.f32(T::DownAccParts).to_owned();
            d.map(T::DownAccParts, |r, n, x| if r < BATCH { x + parts[(r + BATCH, n)] } else { 0.0 });
        }), fails: &["down_acc_parts"], says: &[], alone: false },
        Fault { id: "second-half-of-k-missing", on: two_rows, plant: Step(|d| {
            let mut trace = d.trace.clone();
            let parts = trace.f32(T::DownAccParts).to_owned();
            let first = Array2::from_shape_fn(parts.dim(), |(r, n)| if r < BATCH { parts[(r, n)] } else { 0.0 });
            trace.force(T::DownAccParts, Tensor::F32(first).into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::Out, &inputs, &trace, &policy);
        }), fails: &["out"], says: &["only the first half of K was added"], alone: true },
        Fault { id: "halves-narrowed-before-they-are-added", on: two_rows, plant: Step(|d| {
            let parts = d.trace.f32(T::DownAccParts).mapv(|x| bf16::from_f32(x).to_f32());
            let mut trace = d.trace.clone();
            trace.force(T::DownAccParts, Tensor::F32(parts).into());
            let (inputs, policy) = (d.inputs, d.policy.clone());
            d.redo_as(T::Out, &inputs, &trace, &policy);
        }), fails: &["out"], says: &["narrowed to BF16 before they were added"], alone: false },
        Fault { id: "residual-missing-in-the-output", on: two_rows, plant: Step(|d| {
            let parts = d.trace.f32(T::DownAccParts).to_owned();
            d.map(T::Out, |b, n, _| parts[(b, n)] + parts[(b + BATCH, n)]);
        }), fails: &["out"], says: &["the residual was not added"], alone: true },
        Fault { id: "sum-not-narrowed-before-the-residual", on: two_rows, plant: Step(|d| {
            let policy = d.policy.clone().with(Site::Down, Rounding::None);
            d.redo_under(T::Out, &policy);
        }), fails: &["out"], says: &[], alone: false },
        Fault { id: "down-ties-away", on: two_rows, plant: Step(|d| {
            // Sums with nothing below BF16's tie, so that ties are met.
            let policy = d.policy.clone().with(Site::Down, Rounding::TiesAway);
            d.map(T::DownAccParts, |r, _, x| if r < BATCH { bf16::from_f32(x).to_f32() } else { 0.0 });
            d.nudge(T::DownAccParts, |r, _| if r < BATCH { 0x8000 } else { 0 });
            d.redo_under(T::Out, &policy);
        }), fails: &["down_acc_parts", "out"], says: &["down: ", "away from zero"], alone: false },
    ]
}

/// Runs a norm again with another `eps`.
fn redo_with_eps(device: &mut Device<'_>, id: T) {
    let mut geometry = device.inputs.geometry.clone();
    geometry.rms_norm_eps = 1e-5;
    let mut inputs = device.inputs;
    inputs.geometry = &geometry;
    device.redo(id, &inputs);
}

/// Rotates again at other positions.
fn rotate_at(device: &mut Device<'_>, id: T, position: fn(usize) -> usize) {
    let mut batch = device.inputs.batch.clone();
    for length in &mut batch.seq_lens {
        *length = position(*length - 1) + 1;
    }
    let mut inputs = device.inputs;
    inputs.batch = &batch;
    device.redo(id, &inputs);
}
