//! Faults that people met in the field, by the number that the list of such faults gives them.

use std::collections::BTreeSet;

use assay_tests::{Bench, Device, Token, borrowed, said, small};
use cases::{NewCase, PolicyRequest, new_case};
use goldens::report::Verdict;
use half::bf16;
use ndarray::{Array2, s};
use reference::rounding::{is_bf16_tie, is_code_tie, to_bf16};
use reference::stages::{Context, row_scale, run_all};
use reference::{BATCH, Freedom, LayerInputs, Policy, Rounding, Site, Tensor, TensorId as T};

use super::{Fault, benches, gross, subtle};

const LENGTH_144: &str = "row 0 matches an attended length of 144, not 128";

pub fn faults() -> Vec<Fault> {
    let attn = &["attn_out"];
    vec![
        subtle(
            "B04 INT8 ties away from zero",
            benches::power_of_two_scale,
            &["normed_i8"],
            &["normed_i8: ", "away from zero", "ties to even"],
            |d| {
                let policy = d.policy.clone().with(Site::NormedI8, Rounding::TiesAway);
                d.redo_under(T::NormedI8, &policy);
            },
        ),
        gross("B06a NaN from a zero row", benches::zeros, &["act_scales"], &["row 4", "no floor under amax"], |d| {
            d.map(T::ActScales, |b, _, x| if b == 4 { f32::NAN } else { x });
        }),
        subtle(
            "B06b amax from unused lanes",
            benches::zeros,
            &["act_scales"],
            &["row 4", "larger than any element of the row"],
            |d| {
                d.map(T::ActScales, |b, _, x| if b == 4 { 3.0e4 } else { x });
            },
        ),
        gross(
            "B07 a code wraps",
            benches::two_rows,
            &["normed_i8"],
            &["-128 lies outside the contract's -127..127; sign flipped: wrapped, not clamped", "int8_range"],
            |d| {
                let codes = d.trace.i8(T::NormedI8);
                let (at, _) = codes.indexed_iter().find(|(at, code)| at.0 == 1 && **code == 127).unwrap();
                d.map(T::NormedI8, |b, n, x| if (b, n) == at { -128.0 } else { x });
            },
        ),
        gross(
            "B09 blocks of K exchanged",
            benches::two_rows,
            &["q_proj"],
            &["integer sums", "no matter of precision"],
            |d| {
                let wq = d.inputs.weights.wq;
                let row = |k: usize| match k / 64 {
                    1 => k + 128,
                    3 => k - 128,
                    _ => k,
                };
                let exchanged = Array2::from_shape_fn(wq.dim(), |(k, n)| wq[(row(k), n)]);
                let base = d.inputs;
                let mut inputs = borrowed(&base);
                inputs.weights.wq = exchanged.view();
                d.redo(T::QProj, &inputs);
            },
        ),
        gross(
            "B11a padding rows zero",
            benches::one_row,
            attn,
            &["rows 1-15", "padding row is zero", "row 0 itself is right"],
            |d| {
                d.map(T::AttnOut, |b, _, x| if b >= 1 { 0.0 } else { x });
            },
        ),
        gross(
            "B11b padding rows of another step",
            benches::one_row,
            attn,
            &["rows 1-15", "holds another step's row 0", "row 0 itself is right"],
            |d| {
                let mut earlier = d.clone();
                let tokens = earlier.tokens(0, 139);
                earlier.attend(0, &tokens);
                let earlier = earlier.trace.bf16(T::AttnOut).row(0).to_owned();
                d.map(T::AttnOut, |b, n, x| if b >= 1 { earlier[n].to_f32() } else { x });
            },
        ),
        gross(
            "B13 a padding row overwrites an active row's slot",
            benches::shared_slot,
            &["k_written_values", "v_written_values"],
            &["page", "slot", "KV heads 0-1", "bytes equal what row 15 would write"],
            |d| {
                // A capture knows what a slot holds, not what each of its writers wrote.
                let inputs = d.inputs;
                for id in [T::KRows, T::VRows] {
                    d.redo(id, &inputs).rearrange(id, |b, n| (if b == 0 { 15 } else { b }, n));
                }
            },
        ),
        gross("B16 one page too many, of NaN", benches::boundary_nan, attn, &[LENGTH_144], |d| attend_to(d, 144)),
        gross("B16 one page too many, of zeros", benches::boundary_zeros, attn, &[LENGTH_144], |d| attend_to(d, 144)),
        gross("B16 one page too many, of old keys", benches::boundary_old, attn, &[LENGTH_144], |d| attend_to(d, 144)),
        gross(
            "B18 NaN through masked values",
            benches::poisoned,
            attn,
            &["row 0", "through V", "zero weight times NaN", "slots"],
            |d| {
                d.map(T::AttnOut, |_, _, _| f32::NAN);
            },
        ),
        gross(
            "B19 all weights vanish",
            benches::far_scores,
            attn,
            &["all weights vanished", "running maximum began above"],
            |d| {
                let head = head_of_low_scores_of(d).unwrap();
                let dim = d.inputs.geometry.head_dim;
                d.map(T::AttnOut, |_, n, x| if n / dim == head { 0.0 } else { x });
            },
        ),
        subtle("B21 eight parts added in BF16", benches::two_rows, &["down_acc_parts"], &[], |d| {
            let parts = eight_parts(d, &[0, 1, 2, 3, 4, 5, 6, 7]);
            d.map(T::DownAccParts, |r, n, _| if r < BATCH { parts[(r, n)] } else { 0.0 });
        }),
        subtle("B21 each half in BF16", benches::two_rows, &["down_acc_parts"], &[], |d| {
            let (low, high) = (eight_parts(d, &[0, 1, 2, 3]), eight_parts(d, &[7, 6, 5, 4]));
            d.map(T::DownAccParts, |r, n, _| if r < BATCH { low[(r, n)] } else { high[(r - BATCH, n)] });
        }),
        gross(
            "B27 one head of one row",
            benches::wide,
            attn,
            &["row 5 head 3: all 128 differing channels are zero"],
            |d| {
                d.map(T::AttnOut, |b, n, x| if b == 5 && n / 128 == 3 { 0.0 } else { x });
            },
        ),
        gross("B28 one NaN", benches::recorded, &["out"], &["finite: 1 captured number", "out[9, 100]"], |d| {
            d.map(T::Out, |b, n, x| if (b, n) == (9, 100) { f32::NAN } else { x });
        }),
    ]
}

/// The first row whose largest hidden state is `amax`.
pub fn row_of_amax(inputs: &LayerInputs<'_>, amax: f32) -> Option<usize> {
    let largest = |b: usize| inputs.hidden_states.row(b).iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
    (0..BATCH).find(|&b| largest(b) == amax)
}

/// A head of row 0 all of whose scores lie far below zero.
pub fn head_of_low_scores(bench: &Bench) -> Option<usize> {
    head_of_low_scores_of(&bench.device())
}

fn head_of_low_scores_of(device: &Device<'_>) -> Option<usize> {
    let geometry = device.inputs.geometry;
    let source = reference::stages::KvSource::new(&device.inputs, &device.trace);
    let tokens = device.tokens(0, device.inputs.batch.seq_lens[0]);
    (0..geometry.num_attention_heads).find(|head| {
        let kv_head = head / geometry.group();
        let q = device.trace.bf16(T::AllQPadded).row(kv_head * BATCH + head % geometry.group()).to_owned();
        tokens.iter().all(|&token| {
            let key = source.key(token, kv_head);
            let score: f64 = q.iter().zip(key).map(|(q, k)| q.to_f64() * k.to_f64()).sum();
            score * f64::from(geometry.attention_scale()) < -1e4
        })
    })
}

/// Lets row 0 attend to its first `length` tokens.
fn attend_to(device: &mut Device<'_>, length: usize) {
    let tokens: Vec<Token> = device.tokens(0, length);
    device.attend(0, &tokens);
}

/// The down projection in eighths of K, each narrowed to BF16 and added in BF16 in this order.
fn eight_parts(device: &Device<'_>, order: &[usize]) -> Array2<f32> {
    let (x, w) = (
        device.trace.bf16(T::MlpDownTile).mapv(bf16::to_f32),
        device.inputs.weights.w_down.columns(0..device.inputs.geometry.hidden_size).mapv(bf16::to_f32),
    );
    let part = w.nrows() / 8;
    let mut sum = Array2::<f32>::zeros((BATCH, w.ncols()));
    for &i in order {
        let terms = i * part..(i + 1) * part;
        let product = x.slice(s![.., terms.clone()]).dot(&w.slice(s![terms, ..]));
        sum = (sum + product.mapv(|x| bf16::from_f32(x).to_f32())).mapv(|x| bf16::from_f32(x).to_f32());
    }
    sum
}

#[test]
fn b01_one_tie_went_away_from_zero() {
    // Every product of the first cast is 1.01953125, midway between 1.015625 and 1.0234375.
    let case = assay_tests::with_recipe(
        small(),
        &[
            (cases::Input::HiddenStates, cases::RecipeKind::Ones),
            (cases::Input::InputRmsWeight, cases::RecipeKind::Constant { value: 1.019_531_25 }),
        ],
    );
    let bench = Bench::run(case, &Policy::rne().under(Freedom::Emulated));
    said::passes(&bench.judge(bench.captures.clone(), &PolicyRequest::Rne, &None), "rne");
    let mut device = bench.device();
    device.policy = Policy::rne().under(Freedom::Emulated);
    device.map(T::NormedStates, |b, n, x| if (b, n) == (3, 7) { 1.023_437_5 } else { x });
    let report = bench.judge(device.follow().captures(), &PolicyRequest::Rne, &None);
    assert_eq!(report.verdict, Verdict::Fail);
    assert_eq!(report.first_divergence.as_deref(), Some("normed_states"));
    assert_eq!(said::failing(&report), ["normed_states"]);
    let tensor = said::tensor(&report, "normed_states");
    let worst = tensor.worst.as_ref().unwrap();
    assert_eq!((tensor.explained_ties, tensor.unexplained), (1, 0));
    assert_eq!((worst.index.as_slice(), worst.ulps), ([3, 7].as_slice(), Some(1)));
    assert!(said::words(&report).contains("normed: 1 of 8192 ties went away from zero"), "{}", said::words(&report));
    for later in ["normed_i8", "q_proj", "attn_out", "out"] {
        assert!(report.consequences.iter().any(|name| name == later), "{later}: {:?}", report.consequences);
    }
}

#[test]
fn b04_codes_are_off_by_one_at_ties_only_and_an_ordinary_row_shows_nothing() {
    let bench = benches::power_of_two_scale();
    let row = row_of_amax(&bench.layer(), 3.968_75).unwrap();
    let mut device = bench.device();
    let x = device.trace.bf16(T::NormedStates).mapv(bf16::to_f32);
    assert_eq!(row_scale(x.row(row)).quant, 32.0);
    let distinct = |value: &&f32| is_code_tie(**value * 32.0) && (**value * 32.0).trunc() % 2.0 == 0.0;
    let ties = x.row(row).iter().filter(distinct).count() as u64;
    assert!(ties > 20, "{ties}");
    let policy = device.policy.clone().with(Site::NormedI8, Rounding::TiesAway);
    let report = bench.gate(device.redo_under(T::NormedI8, &policy).follow().captures());
    let codes = said::tensor(&report, "normed_i8");
    assert!(codes.explained_ties >= ties && codes.unexplained == 0, "{codes:?}");
    assert_eq!(codes.worst.as_ref().unwrap().ulps, Some(1));
    assert_eq!(said::tensor(&report, "act_scales").verdict, Verdict::Pass);

    // Ordinary rows have no tie: the same fault changes nothing, and the report says what it could not see.
    let bench = benches::two_rows();
    let mut device = bench.device();
    let report = bench.gate(device.redo_under(T::NormedI8, &policy).follow().captures());
    assert_eq!(report.verdict, Verdict::Pass);
    let remark = |said: &String| said.contains("normed_i8") && said.contains("was not exercised");
    assert!(report.coverage.iter().any(remark), "{:?}", report.coverage);
}

#[test]
fn b06_an_all_zero_row_is_the_floor_and_gives_zero() {
    let bench = benches::zeros();
    let device = bench.device();
    assert!((0..BATCH).all(|b| device.tensor(T::ActScales).get(b, 0) == 1e-4 / 127.0));
    assert!(device.trace.i8(T::NormedI8).iter().all(|&code| code == 0));
    // A device that divides by amax without a floor gives NaN codes' place, and everything after it.
    let mut device = bench.device();
    device.map(T::ActScales, |b, _, x| if b == 4 { 0.0 } else { x });
    let report = bench.gate(device.follow().captures());
    assert!(said::words(&report).contains("row 4 is all zero: no floor under amax"), "{}", said::words(&report));
}

#[test]
fn b11c_padding_rows_that_copy_row_0_pass() {
    let bench = benches::one_row();
    let report = bench.gate(bench.captures.clone());
    assert_eq!(said::check(&report, "padding_rows").verdict, Verdict::Pass);
    // After the residual the rows differ, as they must.
    let device = bench.device();
    let out = device.trace.bf16(T::Out);
    assert_ne!(out.row(0), out.row(1));
}

#[test]
fn b13_a_shared_slot_is_a_warning_where_the_rows_differ() {
    let warned =
        |bench: &Bench| bench.case.warnings().iter().any(|text| text.contains("slot") && text.contains("row 15"));
    assert!(warned(benches::shared_slot()));
    assert!(!warned(benches::replicated()), "serving's padding rows are expected");
}

#[test]
fn b18_nan_in_unused_slots_leaves_a_right_device_alone() {
    let bench = benches::poisoned();
    let report = bench.gate(bench.captures.clone());
    said::passes(&report, "NaN behind the context");
    assert_eq!(said::check(&report, "finite").verdict, Verdict::Pass);
    let layer = bench.layer();
    let slot = layer.batch.slot_of(0, 18).unwrap();
    let row = reference::inputs::cache_row(layer.geometry, slot, 0);
    assert!(layer.cache.k[(row, 0)].is_nan() && layer.cache.v[(row, 0)].is_nan());
    assert!(!report.coverage.iter().any(|remark| remark.contains("NaN leaking")), "{:?}", report.coverage);
}

#[test]
fn b21_two_runs_that_add_in_two_orders_both_fail() {
    let bench = benches::two_rows();
    let run = |order: &[usize]| {
        let mut device = bench.device();
        let parts = eight_parts(&device, order);
        let rule = device.policy.at(Site::Out);
        let h1b = device.trace.bf16(T::PostNormPartial).mapv(bf16::to_f32);
        let out = (parts + h1b).mapv(|x| to_bf16(x, rule));
        device.set(T::Out, Tensor::Bf16(out)).captures()
    };
    let (a, b) = (run(&[0, 1, 2, 3, 4, 5, 6, 7]), run(&[7, 3, 5, 1, 6, 2, 4, 0]));
    assert_ne!(a, b, "the order must matter for this test to mean anything");
    for captures in [a, b] {
        let report = bench.gate(captures);
        assert_eq!(report.first_divergence.as_deref(), Some("out"));
    }
}

#[test]
fn b28_nan_on_both_sides_is_equal_and_still_reported() {
    let bench = benches::two_rows();
    // A NaN that the device made in row 1; every later step gives NaN where the reference does.
    let mut device = bench.device();
    device.map(T::AttnOut, |b, n, x| if (b, n) == (1, 100) { f32::NAN } else { x });
    let report = bench.gate(device.follow().captures());
    assert_eq!(said::failing(&report), ["attn_out"]);
    let out = said::tensor(&report, "out");
    assert!(out.nonfinite > 0 && out.unexplained == 0, "{out:?}");
    assert_eq!(said::check(&report, "finite").verdict, Verdict::Fail);

    // A NaN that the inputs make: row 0's first page is row 1's, whose tail is poisoned.
    let mut case = new_case(NewCase { poison: Some(cases::Poison::KvBeyondContextNan), ..small() }).unwrap();
    if let cases::Kernel::DecodeLayer(decode) = &mut case.kernel {
        let batch = &mut decode.batch;
        batch.block_table[0][0] = batch.block_table[1][0];
    }
    let bench = Bench::emulated(case);
    let report = bench.gate(bench.captures.clone());
    let detail = &said::check(&report, "finite").detail;
    assert_eq!(report.verdict, Verdict::Pass, "{}", said::summary(&report));
    assert!(detail.contains("inputs make"), "{detail}");
    assert!(said::tensor(&report, "attn_out").nonfinite > 0);
    // Another NaN beside them is a fault all the same.
    let mut device = bench.device();
    device.map(T::Out, |b, n, x| if (b, n) == (1, 5) { f32::NAN } else { x });
    let report = bench.gate(device.captures());
    assert_eq!(said::check(&report, "finite").verdict, Verdict::Fail);
    assert_eq!(report.first_divergence.as_deref(), Some("out"));
}

#[test]
fn b52_a_report_counts_and_shows_the_worst() {
    // 16 x 1024 outputs; 38 ties that went the other way, and 2 elements of exactly half.
    let geometry = reference::Geometry { hidden_size: 1024, ..small().geometry };
    let case = new_case(NewCase { geometry, ..small() }).unwrap();
    let policy = Policy::rne().under(Freedom::Emulated);
    let bench = Bench::run(case, &policy);
    let trace = run_all(Context::new(&bench.layer(), &policy));
    let wide = trace.wide(T::Out).unwrap();
    let even = |x: f32| to_bf16(x, Rounding::Rne);
    let ties: BTreeSet<(usize, usize)> = wide
        .indexed_iter()
        .filter(|(_, x)| is_bf16_tie(**x) && even(**x) != to_bf16(**x, Rounding::TiesAway))
        .map(|(at, _)| at)
        .take(38)
        .collect();
    assert_eq!(ties.len(), 38);
    let half = [(3, 1000), (12, 17)];
    let mut device = bench.device();
    device.map(T::Out, |b, n, x| match (b, n) {
        at if half.contains(&at) => 0.5 * x,
        at if ties.contains(&at) => to_bf16(wide[at], Rounding::TiesAway).to_f32(),
        _ => x,
    });
    let report = bench.judge(device.captures(), &PolicyRequest::Rne, &None);
    let out = said::tensor(&report, "out");
    assert_eq!((out.elements, out.exact, out.explained, out.unexplained), (16_384, 16_344, 38, 2));
    assert_eq!((out.nonfinite, out.exactly_half, out.rows_failing.as_slice()), (0, 2, [3, 12].as_slice()));
    let places: BTreeSet<&[usize]> = out.worst_elements.iter().map(|element| element.index.as_slice()).collect();
    assert_eq!(places, BTreeSet::from([[3, 1000].as_slice(), [12, 17].as_slice()]));
    for element in &out.worst_elements {
        let at = (element.index[0], element.index[1]);
        let right = trace.bf16(T::Out)[at];
        assert_eq!((element.reference.0, element.device.0), (right.to_f64(), right.to_f64() / 2.0));
        assert_eq!(element.reference_bits, format!("0x{:04x}", right.to_bits()));
        assert_eq!(element.device_bits, format!("0x{:04x}", bf16::from_f64(right.to_f64() / 2.0).to_bits()));
    }
}
