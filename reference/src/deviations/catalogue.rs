//! The table of deviations. Names are `site.what`; a description follows "the device".

use std::sync::Arc;

use half::bf16;
use ndarray::{Array1, Array2, ArrayView1, Axis};

use super::attention::{Attention, Combine, Padding, attended, padded};
use super::changes::{batch, edited, eps, inputs, narrowed, reading, recast, replaced, rounding, unnarrowed};
use super::project::{Halves, Sums, bf16_activations, column_first, down, projected};
use super::quantize::{Amax, Quantization, Scale, quantized};
use super::rope::{Rotation, rotated};
use super::{Call, Change, Deviation};
use crate::elementary::exp;
use crate::geometry::{BATCH, PAGE, TILE};
use crate::inputs::{Batch, LayerInputs};
use crate::policy::Site;
use crate::rounding::{Rounding, round_f32, to_code};
use crate::stages::{Output, STAGES, row_scale};
use crate::tensor::{Tensor, TensorId as T};

/// An entry of the table.
fn entry(id: &str, site: &'static str, stages: &[&'static str], description: &str, change: Change) -> Deviation {
    let (id, description) = (id.to_owned(), description.to_owned());
    Deviation {
        id,
        site,
        description,
        stages: stages.to_vec(),
        reads: Vec::new(),
        change,
        freely: false,
        rule: None,
        written: None,
    }
}

impl Deviation {
    /// The same entry, which also reads these tensors.
    fn reads(self, reads: &[T]) -> Self {
        Self { reads: reads.to_vec(), ..self }
    }

    /// The same entry, which adds up FP32 numbers in an order that is the device's own.
    fn freely(self) -> Self {
        Self { freely: true, ..self }
    }

    /// The same entry, which also writes cache rows by other slots.
    fn written_by(self, written: fn(&Batch, &LayerInputs<'_>) -> Batch) -> Self {
        Self { written: Some(written), ..self }
    }
}

/// Every deviation that is known, in the order of the contract's steps.
#[must_use]
pub fn catalogue() -> Vec<Deviation> {
    let mut table = Vec::new();
    table.extend(Site::ALL.into_iter().flat_map(roundings));
    table.extend(norms());
    for (stage, codes, scales) in [
        ("quantize_normed", "normed_i8", "act_scales"),
        ("quantize_attn", "attn_out_i8", "attn_out_scales"),
        ("quantize_mlp", "mlp_norm_i8", "mlp_act_scales"),
    ] {
        table.extend(quantizations(stage, codes, scales));
    }
    for (stage, tensor) in [
        ("q_projection", "q_proj"),
        ("k_projection", "k_proj"),
        ("v_projection", "v_proj"),
        ("output_projection", "attn_proj_fp32"),
        ("gate_projection", "gate_acc_all"),
        ("up_projection", "up_acc_all"),
    ] {
        table.extend(projections(stage, tensor));
    }
    table.extend(weights());
    for (name, tensor, stages) in [
        ("rope_q", "all_q_padded", &["rope_q"][..]),
        ("rope_k", "k_written_values", &["rope_k"][..]),
        ("rope", "all_q_padded", &["rope_q", "rope_k"][..]),
    ] {
        table.extend(rotations(name, tensor, stages));
    }
    table.extend(caches());
    table.extend(attentions());
    table.extend(padding());
    table.extend(mlp());
    table
}

/// Every rounding rule at a cast site; that which is asked for is no deviation.
fn roundings(site: Site) -> Vec<Deviation> {
    let Some(stage) = STAGES.iter().find(|stage| stage.sites.contains(&site)) else { return Vec::new() };
    // Probabilities and the down projection's sum are narrowed inside a stage that stores another cast's results.
    let stored = !matches!(site, Site::Prob | Site::Down);
    let mut table = Vec::new();
    for rule in Rounding::ALL {
        let description = match rule {
            Rounding::Rne => "sends ties to even",
            Rounding::TiesAway => "sends ties away from zero",
            Rounding::Trunc => "truncates toward zero where the contract rounds to nearest",
            // A layer hands its output on in BF16, attention reads K and V from BF16 caches, and codes are integers.
            Rounding::None if site.is_int8() || matches!(site, Site::Out | Site::KCache | Site::VCache) => continue,
            Rounding::None => "does not narrow: later steps see the FP32 values",
        };
        let readers = STAGES.iter().filter(|reader| {
            rule == Rounding::None && stored && reader.reads.iter().any(|id| stage.writes.contains(id))
        });
        let stages: Vec<&'static str> = std::iter::once(stage.name).chain(readers.map(|reader| reader.name)).collect();
        let change = if rule == Rounding::None && stored { unnarrowed(site) } else { rounding(site, rule) };
        let id = format!("{}.{}", site.name(), rule.name());
        let description = format!("{description}, at {}", site.name());
        let deviation = entry(&id, site.name(), &stages, &description, change);
        table.push(Deviation { rule: Some((site, rule)), ..deviation });
    }
    table
}

/// Steps 1, 2, 5 and 10: norms, their weights and scalars.
fn norms() -> Vec<Deviation> {
    let skipped = "does not multiply by the norm's weight";
    let mut table = vec![
        entry(
            "normed.gamma_skipped",
            "normed",
            &["normed"],
            skipped,
            ones(|i, ones| i.weights.input_rms_weight = ones),
        ),
        entry("normed.gamma_post", "normed", &["normed"], "multiplies by the other norm's weight (post_rms_weight)", {
            inputs(|i| i.weights.input_rms_weight = i.weights.post_rms_weight)
        }),
        entry("q_head_norm.gamma_skipped", "q_proj_norm", &["q_head_norm"], skipped, {
            ones(|i, ones| i.weights.q_norm_weight = ones)
        }),
        entry("k_head_norm.gamma_skipped", "k_proj_norm", &["k_head_norm"], skipped, {
            ones(|i, ones| i.weights.k_norm_weight = ones)
        }),
        entry(
            "qk_head_norm.gammas_exchanged",
            "q_proj_norm",
            &["q_head_norm", "k_head_norm"],
            "takes the head norm's weights of q and k for each other",
            inputs(|i| {
                let w = &mut i.weights;
                (w.q_norm_weight, w.k_norm_weight) = (w.k_norm_weight, w.q_norm_weight);
            }),
        ),
        entry("mlp_in.gamma_skipped", "mlp_in", &["mlp_in"], skipped, ones(|i, ones| i.weights.post_rms_weight = ones)),
        entry(
            "mlp_in.gamma_input",
            "mlp_in",
            &["mlp_in"],
            "multiplies by the other norm's weight (input_rms_weight)",
            inputs(|i| i.weights.post_rms_weight = i.weights.input_rms_weight),
        ),
    ];
    for (norm, tensor, stage) in [
        ("inv_rms", "inv_rms_states", "inv_rms"),
        ("q_head_norm", "q_proj_norm", "q_head_norm"),
        ("k_head_norm", "k_proj_norm", "k_head_norm"),
        ("post_inv", "inv_rms_tile", "post_inv"),
    ] {
        let (id, description) = (format!("{norm}.eps_1e-5"), "adds an eps of 1e-5 under the root, not 1e-6");
        table.push(entry(&id, tensor, &[stage], description, eps(1e-5)));
        let (id, description) = (format!("{norm}.eps_missing"), "adds no eps under the root");
        table.push(entry(&id, tensor, &[stage], description, eps(0.0)));
    }
    for (id, tensor, stage) in [
        ("q_head_norm.inv_rms_omitted", "q_proj_norm", "q_head_norm"),
        ("k_head_norm.inv_rms_omitted", "k_proj_norm", "k_head_norm"),
        ("v_scale.inv_rms_omitted", "v_proj_norm", "v_scale"),
    ] {
        let description = "does not multiply the projection by inv_rms";
        table.push(entry(id, tensor, &[stage], description, reading(T::InvRmsStates, unit_scalars)));
    }
    let h1_rounded = "goes on from the residual sum rounded to BF16 where the contract keeps it in FP32";
    table.push(entry(
        "residual.early",
        "mlp_in",
        &["mlp_in", "post_inv"],
        h1_rounded,
        with_h1(|call, b, n| {
            let rule = call.context.policy.at(Site::Residual);
            round_f32(call.trace.f32(T::AttnProjFp32)[(b, n)] + hidden(call, b, n), rule)
        }),
    ));
    let description = "does not add the residual after attention";
    table.push(entry("residual.missing", "residual", &["residual", "mlp_in", "post_inv"], description, {
        with_h1(|call, b, n| call.trace.f32(T::AttnProjFp32)[(b, n)])
    }));
    table
}

/// Steps 3, 9 and 11: row quantization.
fn quantizations(stage: &'static str, codes: &'static str, scales: &'static str) -> Vec<Deviation> {
    let contract = Quantization::default();
    let of = |what: &str, site, description, how| {
        entry(&format!("{codes}.{what}"), site, &[stage], description, quantized(how))
    };
    vec![
        of(
            "levels_128",
            scales,
            "scales by 128 where the contract has 127",
            Quantization { levels: 128.0, ..contract },
        ),
        of("levels_128_unclamped", codes, "scales by 128 without a clamp, so that the largest codes wrap to -128", {
            Quantization { levels: 128.0, clamped: false, ..contract }
        }),
        of("clamp_missing", codes, "does not clamp codes to -127..127", Quantization { clamped: false, ..contract }),
        of("floor_missing", scales, "puts no floor of 1e-4 under amax", Quantization { floor: 0.0, ..contract }),
        of("amax_signed", scales, "takes the largest value of a row, not the largest magnitude", {
            Quantization { amax: Amax::Signed, ..contract }
        }),
        of("amax_tensor", scales, "takes the largest magnitude of the whole tensor, not the row's", {
            Quantization { amax: Amax::Tensor, ..contract }
        }),
        of("scale_reciprocal", scales, "multiplies amax by 1/127 where the contract divides", {
            Quantization { act: Scale::Reciprocal, ..contract }
        }),
        of("quant_reciprocal", codes, "multiplies by the reciprocal of the activation scale, not by 127/amax", {
            Quantization { quant: Scale::Reciprocal, ..contract }
        }),
        of("quant_divided", codes, "divides by the activation scale where the contract multiplies by 127/amax", {
            Quantization { quant: Scale::Quotient, ..contract }
        }),
    ]
}

/// Steps 4, 9 and 11: INT8 projections.
fn projections(stage: &'static str, tensor: &'static str) -> Vec<Deviation> {
    let of =
        |what: &str, description, change| entry(&format!("{tensor}.{what}"), tensor, &[stage], description, change);
    vec![
        of("weight_scale_omitted", "leaves the weight's column scale out", {
            projected(Sums::Exact, |acc, _, act| acc * act)
        }),
        of("act_scale_omitted", "leaves the activation's row scale out", projected(Sums::Exact, |acc, w, _| acc * w)),
        of("row_scale_first", "multiplies by the row's scale first, then by the column's", {
            projected(Sums::Exact, |acc, w, act| (acc * act) * w)
        }),
        of("scales_multiplied", "multiplies the two scales with each other first", {
            projected(Sums::Exact, |acc, w, act| acc * (w * act))
        }),
        of("fp32_sums", "adds up FP32 products where the contract has exact INT32 sums", {
            projected(Sums::Fp32, column_first)
        }),
        of("half_dropped", "adds up the first half of K only", projected(Sums::FirstHalf, column_first)),
        of("tail_dropped", "loses the last 128 terms of K", projected(Sums::WithoutTail, column_first)),
        of("bf16_halves", "splits K in two and narrows each half's sum to BF16", {
            projected(Sums::Bf16Halves, column_first)
        }),
    ]
}

/// Weights taken for one another.
fn weights() -> Vec<Deviation> {
    let transposed = "reads the square weight transposed";
    let mut table = vec![
        entry(
            "q_proj.transposed",
            "q_proj",
            &["q_projection"],
            transposed,
            inputs(|i| {
                if i.weights.wq.is_square() {
                    i.weights.wq = i.weights.wq.reversed_axes();
                }
            }),
        ),
        entry(
            "attn_proj_fp32.transposed",
            "attn_proj_fp32",
            &["output_projection"],
            transposed,
            inputs(|i| {
                if i.weights.wo.is_square() {
                    i.weights.wo = i.weights.wo.reversed_axes();
                }
            }),
        ),
        entry(
            "kv_proj.exchanged",
            "k_proj",
            &["k_projection", "v_projection"],
            "takes the weights of k and v for each other",
            inputs(|i| {
                let w = &mut i.weights;
                (w.wk, w.wv) = (w.wv, w.wk);
                (w.wk_scale, w.wv_scale) = (w.wv_scale, w.wk_scale);
            }),
        ),
        entry(
            "gate_up.exchanged",
            "gate_acc_all",
            &["gate_projection", "up_projection"],
            "takes the weights of gate and up for each other",
            inputs(|i| {
                let w = &mut i.weights;
                (w.w_gate, w.w_up) = (w.w_up, w.w_gate);
                (w.w_gate_scale, w.w_up_scale) = (w.w_up_scale, w.w_gate_scale);
            }),
        ),
    ];
    let description = "computes gate and up from BF16 activations and weights, as prefill does, not from INT8 codes";
    table.push(
        entry("gate_up.bf16", "gate_acc_all", &["gate_projection", "up_projection"], description, {
            replaced(bf16_activations)
        })
        .reads(&[T::MlpNormIn])
        .freely(),
    );
    table
}

/// Step 6: rotation of queries, keys, or both.
fn rotations(name: &str, tensor: &'static str, stages: &[&'static str]) -> Vec<Deviation> {
    let of = |what: &str, description, change| entry(&format!("{name}.{what}"), tensor, stages, description, change);
    let mut table = vec![
        of("position_minus_1", "rotates by the position before the token's", {
            batch(|batch, _| batch.seq_lens.iter_mut().for_each(|len| *len = len.saturating_sub(1).max(1)))
        }),
        of("position_plus_1", "rotates by the position after the token's", {
            batch(|batch, inputs| {
                let most = inputs.rope_cos.nrows();
                batch.seq_lens.iter_mut().for_each(|len| *len = (*len + 1).min(most));
            })
        }),
        of("position_0", "rotates by position 0, which is not at all", batch(|batch, _| batch.seq_lens = [1; BATCH])),
    ];
    for (what, description, how) in [
        ("sin_sign", "rotates the other way round (the sign of the sine)", Rotation::Back),
        ("halves_exchanged", "stores the two halves of a head in each other's place", Rotation::HalvesExchanged),
        ("interleaved", "rotates neighbouring columns instead of the two halves of a head", Rotation::Interleaved),
        ("tables_exchanged", "takes sine and cosine for each other", Rotation::TablesExchanged),
        ("fma", "fuses a product of the rotation into the addition", Rotation::Fused),
    ] {
        table.push(of(what, description, rotated(how)));
    }
    table
}

/// Step 6: what is written into the caches, and where.
fn caches() -> Vec<Deviation> {
    let int8 = "keeps what it writes as INT8 with a scale a head, as the older cache did";
    let exchanged = "writes keys into the value cache and values into the key cache";
    vec![
        entry("k_cache.int8", "k_written_values", &["rope_k"], int8, edited(int8_heads)),
        entry("v_cache.int8", "v_written_values", &["write_v"], int8, edited(int8_heads)),
        entry("kv_cache.int8", "k_written_values", &["rope_k", "write_v"], int8, edited(int8_heads)),
        entry("kv_cache.exchanged", "k_written_values", &["rope_k", "write_v"], exchanged, {
            Box::new(|call| {
                let keys = call.stage.writes.contains(&T::KRows);
                let (other, id, site) =
                    if keys { ("write_v", T::KRows, Site::KCache) } else { ("rope_k", T::VRows, Site::VCache) };
                let Some(stage) = STAGES.iter().find(|stage| stage.name == other) else { return Vec::new() };
                let outputs = (stage.run)(&call.context.keeping_wide(), call.trace);
                let wide = outputs.into_iter().find_map(|output| output.wide).unwrap_or_default();
                narrowed(call.context, id, site, wide)
            })
        })
        .reads(&[T::KProjNorm, T::VProjNorm]),
        entry("cache.slot_plus_1", "k_written_rows", &["attention"], "writes K and V one slot too far", {
            batch(|batch, inputs| *batch = next_slots(batch, inputs))
        })
        .written_by(next_slots),
        entry(
            "cache.logical_page",
            "k_written_rows",
            &["attention"],
            "writes K and V into the page of the logical block's number, not the one in the block table",
            batch(|batch, inputs| *batch = logical_slots(batch, inputs)),
        )
        .written_by(logical_slots),
    ]
}

/// Step 7.
fn attentions() -> Vec<Deviation> {
    let of = |what: &str, description: &str, change| {
        entry(&format!("attention.{what}"), "attn_out", &["attention"], description, change)
    };
    let lengths: [(&str, &str, Change); 6] = [
        ("length_minus_1", "attends to one token too few", lengths(|len| len.saturating_sub(1).max(1))),
        ("length_plus_1", "attends to one token too many", lengths(|len| len + 1)),
        ("length_plus_16", "attends to a tile of 16 tokens too many", lengths(|len| len + TILE)),
        ("length_plus_128", "attends to a page of 128 tokens too many", lengths(|len| len + PAGE)),
        ("length_tile", "attends to the whole of its last tile: the mask is missing", {
            lengths(|len| len.next_multiple_of(TILE))
        }),
        ("length_page", "attends to the whole of its last page", lengths(|len| len.next_multiple_of(PAGE))),
    ];
    let mut table: Vec<Deviation> =
        lengths.into_iter().map(|(what, description, change)| of(what, description, change)).collect();
    table.push(of("logical_page", "reads the page of the logical block's number, not the one in the block table", {
        batch(|batch, inputs| {
            let pages = inputs.cache.k.nrows() / (PAGE * inputs.geometry.num_key_value_heads).max(1);
            for row in &mut batch.block_table {
                for (block, page) in row.iter_mut().enumerate().filter(|(_, page)| **page >= 0) {
                    *page = block.min(pages.saturating_sub(1)) as i32;
                }
            }
        })
    }));
    let contract = Attention::default();
    let combined = |combine| Attention { combine, ..contract };
    for (what, description, how) in [
        ("old_not_rescaled", "does not rescale earlier tiles to the new maximum", combined(Combine::OldNotRescaled)),
        ("new_not_rescaled", "does not rescale a new tile to the maximum so far", combined(Combine::NewNotRescaled)),
        ("sum_not_rescaled", "adds up the sums of tiles without rescaling them", combined(Combine::SumNotRescaled)),
        ("last_sum", "divides by the sum of the last tile alone", combined(Combine::LastSum)),
        ("fma", "fuses products into additions where tiles are combined", combined(Combine::Fused)),
        ("sum_unrounded", "adds up probabilities before they are narrowed to BF16", {
            Attention { sum_unrounded: true, ..contract }
        }),
        ("scale_omitted", "does not multiply scores by D^-0.5", Attention { scale: Some(|_| 1.0), ..contract }),
        ("scale_1_over_d", "multiplies scores by 1/D, not by D^-0.5", {
            Attention { scale: Some(|dim| 1.0 / dim as f32), ..contract }
        }),
        ("heads_in_turn", "gives KV heads to query heads in turn, not group by group", {
            Attention { heads_in_turn: true, ..contract }
        }),
    ] {
        table.push(of(what, description, attended(how)));
    }
    table
}

/// Step 8.
fn padding() -> Vec<Deviation> {
    let of = |what: &str, description: &str, change| {
        entry(&format!("padding.{what}"), "attn_out", &["attention"], description, change)
    };
    vec![
        of("zero", "leaves padding rows zero", padded(Padding::Zero)),
        of("not_filled", "does not fill padding rows: they hold what poisoned memory held", padded(Padding::NotFilled)),
        of("stale", "leaves row 0 of the step before in padding rows", padded(Padding::Stale)),
        of("last_row", "copies the last active row into padding rows", padded(Padding::LastRow)),
        of("row_1", "copies row 1 into padding rows", padded(Padding::Row1)),
        of("active_ignored", "ignores active_batch: padding rows have attention of their own", {
            batch(|batch, _| batch.active = BATCH)
        }),
        of("active_plus_1", "takes one row too many for active", {
            batch(|batch, _| batch.active = (batch.active + 1).min(BATCH))
        }),
        of("active_minus_1", "takes one row too few for active", {
            batch(|batch, _| batch.active = batch.active.saturating_sub(1).max(1))
        }),
    ]
}

/// Steps 12 and 13.
fn mlp() -> Vec<Deviation> {
    let down_parts = |what: &str, description, halves| {
        entry(&format!("down_acc_parts.{what}"), "down_acc_parts", &["down"], description, down(halves))
    };
    vec![
        entry("silu.post_inv_omitted", "mlp_down_tile", &["silu"], "does not multiply gate and up by post_inv", {
            reading(T::InvRmsTile, unit_scalars)
        }),
        entry("silu.gate_lost", "mlp_down_tile", &["silu"], "multiplies up by the sigmoid alone, without the gate", {
            edited(|call, output| {
                let (gate, inv) = (call.trace.f32(T::GateAccAll), call.trace.f32(T::InvRmsTile));
                let up = call.trace.f32(T::UpAccAll);
                let freedom = call.context.policy.freedom;
                recast(output, call.context.policy.at(Site::Silu), |(b, n), _| {
                    let g = gate[(b, n)] * inv[(b, 0)];
                    (1.0 / (exp(-g, freedom) + 1.0)) * (up[(b, n)] * inv[(b, 0)])
                });
            })
        }),
        down_parts("unsplit", "has one accumulator over all of K where the contract has two halves", Halves::Unsplit),
        down_parts("half_lost", "loses the second half of K", Halves::SecondLost),
        down_parts("bf16_halves", "narrows each half's sum to BF16 before they are added", Halves::Bf16),
        entry("out.residual_missing", "out", &["out"], "does not add the residual after the MLP", {
            reading(T::PostNormPartial, |call| {
                Tensor::Bf16(Array2::from_elem(call.trace.bf16(T::PostNormPartial).dim(), bf16::ZERO))
            })
        }),
        entry(
            "out.residual_of_input",
            "out",
            &["out"],
            "adds the layer's input after the MLP, not the sum after attention",
            reading(T::PostNormPartial, |call| Tensor::Bf16(call.context.inputs.hidden_states.to_owned())),
        ),
    ]
}

/// A stage over weights of ones in the place of a vector.
fn ones(set: for<'a> fn(&mut LayerInputs<'a>, ArrayView1<'a, f32>)) -> Change {
    Box::new(move |call| {
        let geometry = call.context.inputs.geometry;
        // A vector that is too long serves every norm.
        let ones = Array1::from_elem(geometry.hidden_size.max(geometry.head_dim), 1.0);
        let mut inputs = call.context.inputs.view();
        set(&mut inputs, ones.view());
        call.run_on(&inputs)
    })
}

/// A stage that sees another residual sum after attention, `h1(call, b, n)`.
fn with_h1(h1: fn(&Call<'_, '_, '_>, usize, usize) -> f32) -> Change {
    Box::new(move |call| {
        let values = Array2::from_shape_fn(call.trace.f32(T::AttnProjFp32).dim(), |(b, n)| h1(call, b, n));
        // The sum stands in the projection's place, over a layer's input of zeros.
        let zeros = Array2::from_elem(call.context.inputs.hidden_states.dim(), bf16::ZERO);
        let inputs = LayerInputs { hidden_states: zeros.view(), ..call.context.inputs.view() };
        let mut trace = call.trace.clone();
        trace.force(T::AttnProjFp32, Arc::new(Tensor::F32(values)));
        Call { context: &call.context.over(&inputs, call.context.policy), trace: &trace, ..*call }.run()
    })
}

/// An element of the layer's input.
fn hidden(call: &Call<'_, '_, '_>, b: usize, n: usize) -> f32 {
    call.context.inputs.hidden_states[(b, n)].to_f32()
}

/// One for every row, in the place of a scalar a row.
fn unit_scalars(_: &Call<'_, '_, '_>) -> Tensor {
    Tensor::F32(Array2::from_elem((BATCH, 1), 1.0))
}

/// Written rows as they come back from INT8 codes with a scale a head.
fn int8_heads(call: &Call<'_, '_, '_>, output: &mut Output) {
    let site = if output.id == T::KRows { Site::KCache } else { Site::VCache };
    let dim = call.context.inputs.geometry.head_dim;
    let Some(wide) = output.wide.clone() else { return };
    let mut held = wide.clone();
    for mut row in held.rows_mut() {
        for mut head in row.axis_chunks_iter_mut(Axis(0), dim) {
            let scale = row_scale(head.view());
            head.mapv_inplace(|x| f32::from(to_code(x * scale.quant, Rounding::Rne)) * scale.act);
        }
    }
    recast(output, call.context.policy.at(site), |at, _| held[at]);
}

/// Attention over another length.
fn lengths(of: fn(usize) -> usize) -> Change {
    batch(move |batch, _| batch.seq_lens.iter_mut().for_each(|len| *len = of(*len)))
}

/// Every row's slot, one further; after the last comes the first.
fn next_slots(batch: &Batch, inputs: &LayerInputs<'_>) -> Batch {
    let slots = inputs.cache.k.nrows() / inputs.geometry.num_key_value_heads.max(1);
    Batch { slots: batch.slots.map(|slot| if slot + 1 < slots { slot + 1 } else { 0 }), ..batch.clone() }
}

/// Every row's slot by the number of its logical block.
fn logical_slots(batch: &Batch, inputs: &LayerInputs<'_>) -> Batch {
    let slots = inputs.cache.k.nrows() / inputs.geometry.num_key_value_heads.max(1);
    let slots = std::array::from_fn(|b| batch.position(b).min(slots.saturating_sub(1)));
    Batch { slots, ..batch.clone() }
}
