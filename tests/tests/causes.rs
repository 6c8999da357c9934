//! The search for causes: every kind of fault is named where it is in the catalogue, and nothing is named where it is
//! not.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;

use assay_tests::{Bench, Visible, said, small, with_recipe};
use cases::{PolicyRequest, new_case};
use device::Captures;
use goldens::mutant::mutant;
use goldens::power::faults;
use goldens::report::{CaseReport, Verdict};
use rayon::prelude::*;
use reference::deviations::catalogue;
use reference::stages::{Context, run_all};
use reference::{Deviation, Freedom, Policy, Products, Rounding, Site, TensorId};

/// What a device of a recorded case with these faults gives.
fn device(bench: &Bench, ids: &[&str]) -> Captures {
    let faults = faults();
    let planted: Vec<&Deviation> =
        ids.iter().map(|id| faults.iter().find(|fault| fault.id == *id).expect(id)).collect();
    let policy = Policy::production().under(Freedom::Sampled { seed: 41 });
    mutant(&bench.layer(), &policy, &Products::new(), &planted)
}

/// A recorded case without the hashes of its own device's caches.
fn bench(name: &str) -> Bench {
    let recorded = Bench::recorded(name);
    let mut case = recorded.case.clone();
    case.final_cache_sha256.clear();
    Bench::run(case, &Policy::production())
}

fn cause(report: &CaseReport) -> Option<&str> {
    report.cause.as_ref().map(|cause| cause.id.as_str())
}

fn out() -> Visible {
    Some([TensorId::Out].into())
}

/// One fault of each kind, and the tensor at which it is made.
const FAULTS: [(&str, &str); 30] = [
    ("normed.trunc", "normed_states"),
    ("normed.none", "normed_i8"),
    ("normed.gamma_skipped", "normed_states"),
    ("normed_i8.trunc", "normed_i8"),
    ("normed_i8.levels_128", "normed_i8"),
    ("attn_out_i8.amax_tensor", "attn_out_i8"),
    ("q_proj.weight_scale_omitted", "q_proj"),
    ("q_proj.transposed", "q_proj"),
    ("kv_proj.exchanged", "k_proj"),
    ("v_proj.half_dropped", "v_proj"),
    ("attn_proj_fp32.bf16_halves", "attn_proj_fp32"),
    ("k_head_norm.eps_1e-5", "k_proj_norm"),
    ("v_scale.inv_rms_omitted", "v_proj_norm"),
    ("rope.position_0", "all_q_padded"),
    ("rope_q.sin_sign", "all_q_padded"),
    ("rope_k.position_plus_1", "k_written_values"),
    ("kv_cache.int8", "k_written_values"),
    ("cache.slot_plus_1", "k_written_rows"),
    ("attention.length_plus_16", "attn_out"),
    ("attention.length_minus_1", "attn_out"),
    ("attention.logical_page", "attn_out"),
    ("attention.old_not_rescaled", "attn_out"),
    ("attention.sum_unrounded", "attn_out"),
    ("prob.none", "attn_out"),
    ("residual.none", "out"),
    ("residual.early", "mlp_norm_in"),
    ("gate_up.exchanged", "gate_acc_all"),
    ("gate_up.bf16", "gate_acc_all"),
    ("down_acc_parts.half_lost", "down_acc_parts"),
    ("out.rne", "out"),
];

#[test]
fn faults_are_located_and_named() {
    let bench = bench("mini/active2");
    FAULTS.par_iter().for_each(|&(id, tensor)| {
        let report = bench.explain(device(&bench, &[id]), &PolicyRequest::Production, &None);
        assert_eq!(report.verdict, Verdict::Fail, "{id}");
        assert_eq!(report.first_divergence.as_deref(), Some(tensor), "{id}");
        assert_eq!(cause(&report), Some(id), "{:?}", report.explanation);
        let explanation = report.explanation.unwrap();
        assert!(explanation.visible && explanation.candidates[0].id == id, "{id}");
        assert!(explanation.reproduced.elements > 0, "{id}");
    });
}

#[test]
fn faults_are_named_by_out_alone() {
    let bench = bench("mini/full");
    let of_out =
        ["normed.trunc", "prob.none", "attention.length_plus_16", "rope.position_0", "residual.none", "out.trunc"];
    of_out.into_par_iter().for_each(|id| {
        let report = bench.explain(device(&bench, &[id]), &PolicyRequest::Production, &out());
        assert_eq!((report.verdict, report.first_divergence.as_deref()), (Verdict::Fail, Some("out")), "{id}");
        assert_eq!(cause(&report), Some(id), "{:?}", report.explanation);
    });
}

#[test]
fn two_faults_are_named_together() {
    let bench = bench("mini/active2");
    let report = bench.explain(device(&bench, &["q.trunc", "silu.trunc"]), &PolicyRequest::Production, &None);
    assert_eq!(report.first_divergence.as_deref(), Some("all_q_padded"));
    assert_eq!(cause(&report), Some("q.trunc+silu.trunc"), "{:?}", report.explanation);
}

#[test]
fn a_right_device_has_no_cause() {
    let bench = bench("mini/active2");
    for only in [None, out()] {
        let report = bench.explain(device(&bench, &[]), &PolicyRequest::Production, &only);
        said::passes(&report, "right");
        assert!(report.cause.is_none() && !report.explanation.unwrap().visible);
    }
}

#[test]
fn nothing_is_named_for_a_fault_that_is_not_in_the_catalogue() {
    let bench = bench("mini/active2");
    let dim = bench.layer().geometry.head_dim;
    type Plant = fn(&mut assay_tests::Device<'_>, usize);
    let strange: [(&str, &str, Plant); 4] = [
        ("one head of one row zero", "attn_out", |d, dim| {
            d.map(TensorId::AttnOut, |b, n, x| if b == 1 && n / dim == 2 { 0.0 } else { x });
        }),
        ("two tokens too few", "attn_out", |d, _| {
            let length = d.inputs.batch.seq_lens[1] - 2;
            let tokens = d.tokens(1, length);
            d.attend(1, &tokens);
        }),
        ("one element off", "gate_acc_all", |d, _| {
            d.map(TensorId::GateAccAll, |b, n, x| if (b, n) == (0, 17) { x * 1.5 } else { x });
        }),
        ("one element of the output off", "out", |d, _| {
            d.map(TensorId::Out, |b, n, x| if (b, n) == (0, 17) { x + 1.0 } else { x });
        }),
    ];
    for (name, tensor, plant) in strange {
        let mut device = bench.device();
        plant(&mut device, dim);
        let captures = device.follow().captures();
        let report = bench.explain(captures.clone(), &PolicyRequest::Production, &None);
        assert_eq!(report.first_divergence.as_deref(), Some(tensor), "{name}");
        assert_eq!(cause(&report), None, "{name}: {:?}", report.explanation);
        let explanation = report.explanation.unwrap();
        assert!(explanation.visible && explanation.notes.iter().any(|note| note.contains("none")), "{name}");
    }
}

#[test]
fn a_single_tie_that_went_away_from_zero_is_named() {
    // Every product of the first cast is 1.01953125, midway between 1.015625 and 1.0234375.
    let case = with_recipe(
        small(),
        &[
            (cases::Input::HiddenStates, cases::RecipeKind::Ones),
            (cases::Input::InputRmsWeight, cases::RecipeKind::Constant { value: 1.019_531_25 }),
        ],
    );
    let bench = Bench::run(case, &Policy::rne().under(Freedom::Emulated));
    let mut device = bench.device();
    device.policy = Policy::rne().under(Freedom::Emulated);
    device.map(TensorId::NormedStates, |b, n, x| if (b, n) == (3, 7) { 1.023_437_5 } else { x });
    let report = bench.explain(device.follow().captures(), &PolicyRequest::Rne, &None);
    assert_eq!(cause(&report), Some("normed.ties_away"));
    let first = said::tensor(&report, "normed_states").first.as_ref().unwrap();
    assert_eq!((first.element.index.as_slice(), first.row), ([3, 7].as_slice(), 3));
    let found = goldens::bisect::stages(&report);
    let origin = found.first_divergence.unwrap();
    assert_eq!((origin.tensor.as_str(), origin.stage, origin.forced), ("normed_states", "normed", true));
    assert!(found.others.is_empty(), "{:?}", found.others);
    assert!(["normed_i8", "q_proj", "out"].iter().all(|name| found.consequences.iter().any(|c| c == name)));
}

#[test]
fn a_tie_rule_is_named_under_the_rule_that_is_asked_for() {
    let bench = Bench::run(new_case(small()).unwrap(), &Policy::production().under(Freedom::Emulated));
    let report = bench.explain(bench.captures.clone(), &PolicyRequest::Rne, &None);
    assert_eq!(report.verdict, Verdict::Fail);
    let id = cause(&report).unwrap();
    let site = report.first_divergence.as_deref().unwrap();
    let rule = faults().iter().map(|fault| fault.rule).all(|rule| rule != Some((Site::Normed, Rounding::TiesAway)));
    assert!(rule && id.ends_with(".ties_away"), "{id} at {site}");
}

#[test]
fn a_deviation_changes_nothing_before_its_first_stage() {
    let bench = bench("mini/active2");
    let (layer, policy, products) = (bench.layer(), Policy::production(), Products::new());
    let run = |faults: &[&Deviation]| run_all(Context::new(&layer, &policy).sharing(&products).deviating(faults));
    let right = run(&[]);
    let catalogue = catalogue();
    let ids: BTreeSet<&str> = catalogue.iter().map(|deviation| deviation.id.as_str()).collect();
    assert_eq!(ids.len(), catalogue.len(), "names are given once");
    let changing = catalogue.par_iter().filter(|deviation| {
        let faulty = run(&[deviation]);
        let changed = |id: &TensorId| right.get(*id) != faulty.get(*id);
        let first = TensorId::ALL.into_iter().find(changed);
        if let Some(first) = first {
            let stage = deviation.first_stage().unwrap();
            assert!(
                TensorId::ALL.iter().position(|id| *id == first)
                    >= TensorId::ALL.iter().position(|id| *id == stage.writes[0]),
                "{} at {}",
                deviation.id,
                first.name()
            );
            assert!(!deviation.is_asked_by(&policy), "{} is what is asked for", deviation.id);
        }
        first.is_some()
    });
    // The others need data of their own to show.
    assert!(changing.count() * 4 > catalogue.len() * 3);
}
