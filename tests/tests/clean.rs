//! Right devices pass: the recorded bundles, and small cases that the reference itself runs as a device with
//! freedoms and tie rules of its own. Whatever the gate is shown of a right device, it must not fail it.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeSet;

use assay_tests::{Bench, Visible, said};
use cases::{NewCase, Padding, Poison, PolicyRequest, new_case};
use goldens::report::{CaseReport, TensorReport, Verdict};
use proptest::prelude::*;
use proptest::sample::{Index, select, subsequence};
use proptest::strategy::ValueTree as _;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rayon::prelude::*;
use reference::stages::{Context, run_stage, stage_of};
use reference::{Freedom, Geometry, Policy, Rounding, Site, TensorId, Trace};

const RECORDED: [&str; 4] = ["mini/full", "mini/active1", "mini/active2", "mini/active2-dirty"];

/// Tensors whose every bit the contract fixes, given the device's own inputs to their stage.
const EXACT: [&str; 15] = [
    "normed_states",
    "normed_i8",
    "act_scales",
    "q_proj",
    "k_proj",
    "v_proj",
    "v_proj_norm",
    "attn_out_i8",
    "attn_out_scales",
    "attn_proj_fp32",
    "mlp_norm_i8",
    "mlp_act_scales",
    "gate_acc_all",
    "up_acc_all",
    "out",
];

#[test]
fn recorded_bundles_pass_and_what_must_be_exact_is() {
    for name in RECORDED {
        let bench = Bench::recorded(name);
        for policy in [PolicyRequest::Auto, PolicyRequest::Production] {
            let report = bench.judge(bench.captures.clone(), &policy, &None);
            said::passes(&report, name);
            assert_eq!(report.tensors.len(), TensorId::ALL.len() + 2, "{name}: every tensor and both lists of rows");
            for tensor in &report.tensors {
                assert!(tensor.forced, "{name}: {} was judged from its own inputs", tensor.name);
                let must = EXACT.contains(&tensor.name.as_str());
                assert!(!must || tensor.exact == tensor.elements, "{name}: {} {tensor:?}", tensor.name);
            }
            assert!(report.checks.iter().all(|check| check.verdict == Verdict::Pass), "{name}: {:?}", report.checks);
            assert_eq!(
                said::check(&report, "kv_values").detail,
                "values match, and both whole caches match their SHA-256"
            );
        }
    }
}

#[test]
fn under_rne_the_sites_with_ties_fail_by_name_and_no_element_is_drift() {
    for name in RECORDED {
        let bench = Bench::recorded(name);
        let found = bench.judge(bench.captures.clone(), &PolicyRequest::Auto, &None).policy.rules;
        let away: Vec<&String> = found.iter().filter(|(_, rule)| *rule == "ties_away").map(|(site, _)| site).collect();
        assert!(["normed", "out"].iter().all(|site| away.iter().any(|found| found == site)), "{away:?}");

        let report = bench.judge(bench.captures.clone(), &PolicyRequest::Rne, &None);
        assert_eq!(report.verdict, Verdict::Fail, "{name}");
        assert_eq!(report.first_divergence.as_deref(), Some("normed_states"), "{name}");
        assert_eq!(report.policy.violations.len(), away.len(), "{name}: {:?}", report.policy.violations);
        for site in away {
            let named = |violation: &&String| violation.starts_with(&format!("{site}: "));
            let violation = report.policy.violations.iter().find(named);
            assert!(violation.is_some_and(|text| text.contains("away from zero")), "{name}: {site}");
        }
        for tensor in &report.tensors {
            assert_eq!(tensor.unexplained, 0, "{name}: {}", tensor.name);
        }
    }
}

/// The orders of sums that `docs/numerics.md` gives for the emulated device are the ones it used: with them every
/// FP32 sum of its outputs comes out bit for bit.
#[test]
fn the_emulated_orders_reproduce_every_sum_of_the_recorded_bundles() {
    for name in RECORDED {
        let bench = Bench::recorded(name);
        let layer = bench.layer();
        let policy = Policy::production().under(Freedom::Emulated);
        let mut device = Trace::new();
        for (&id, tensor) in &bench.captures.tensors {
            device.force(id, tensor.values().unwrap().clone().into());
        }
        for id in [
            TensorId::InvRmsStates,
            TensorId::QProjNorm,
            TensorId::KProjNorm,
            TensorId::InvRmsTile,
            TensorId::DownAccParts,
        ] {
            let mut trace = device.clone();
            assert!(run_stage(stage_of(id), &Context::new(&layer, &policy), &mut trace));
            assert!(trace.get(id) == device.get(id), "{name}: {}", id.name());
        }
    }
}

#[test]
fn recorded_bundles_pass_by_their_output_alone() {
    for name in RECORDED {
        let bench = Bench::recorded(name);
        let report = bench.judge(bench.captures.clone(), &PolicyRequest::Auto, &only([TensorId::Out]));
        said::passes(&report, name);
        assert_eq!(report.tensors.len(), 1);
        assert!(!said::tensor(&report, "out").forced);
        assert!(report.coverage.iter().any(|remark| remark.contains("sampled devices")), "{:?}", report.coverage);
    }
}

#[test]
fn a_report_does_not_depend_on_threads_or_on_the_run() {
    for only in [None, only([TensorId::Out])] {
        let bench = Bench::recorded("mini/active2-dirty");
        let text = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let report = pool.install(|| bench.judge(bench.captures.clone(), &PolicyRequest::Auto, &only));
            serde_json::to_string(&CaseReport { seconds: 0.0, ..report }).unwrap()
        };
        let first = text(1);
        for threads in [1, 2, 3] {
            assert_eq!(text(threads), first, "{threads} threads");
        }
    }
}

fn only<const N: usize>(tensors: [TensorId; N]) -> Visible {
    Some(BTreeSet::from(tensors))
}

/// A right device, and what is shown of it.
#[derive(Debug)]
struct Right {
    case: NewCase,
    policy: Policy,
    shown: Vec<TensorId>,
}

fn geometry() -> impl Strategy<Value = Geometry> {
    let heads = select(vec![(2, 2), (4, 2), (4, 1), (3, 3), (4, 4), (6, 2)]);
    let sizes = (select(vec![256, 320, 512, 640]), select(vec![32, 64, 128]), select(vec![128, 192, 512]));
    (heads, sizes).prop_map(|((heads, kv), (hidden_size, head_dim, intermediate_size))| Geometry {
        hidden_size,
        num_attention_heads: heads,
        num_key_value_heads: kv,
        head_dim,
        intermediate_size,
        num_hidden_layers: 1,
        vocab_size: 64,
        real_vocab_size: 64,
        rms_norm_eps: 1e-6,
    })
}

/// Tie rules of the sites where a kernel may choose: as production, to even, or chosen site by site.
fn rules() -> impl Strategy<Value = Policy> {
    let free: Vec<Site> = Site::ALL.into_iter().filter(|site| site.ties_are_free()).collect();
    let mixed = subsequence(free.clone(), 0..=free.len())
        .prop_map(|even| even.into_iter().fold(Policy::production(), |policy, site| policy.with(site, Rounding::Rne)));
    prop_oneof![Just(Policy::production()), Just(Policy::rne()), mixed]
}

fn freedom() -> impl Strategy<Value = Freedom> {
    prop_oneof![
        Just(Freedom::Emulated),
        any::<u64>().prop_map(|seed| Freedom::Sampled { seed }),
        any::<u64>().prop_map(|seed| Freedom::Sampled { seed }),
    ]
}

fn right() -> impl Strategy<Value = Right> {
    let contexts = prop::collection::vec(select(vec![1usize, 2, 15, 16, 17, 127, 128, 129, 300]), 1..=4);
    let padding = select(vec![Padding::ReplicateRow0, Padding::Own]);
    let poison = select(vec![None, Some(Poison::KvBeyondContextNan)]);
    let shown = subsequence(TensorId::ALL.to_vec(), 1..TensorId::ALL.len());
    let batch = (contexts, any::<Index>(), padding, poison, 0..1u64 << 32);
    (geometry(), batch, rules(), freedom(), shown).prop_map(|(geometry, batch, rules, freedom, shown)| {
        let (mut seq_lens, full, padding, poison, seed) = batch;
        if full.index(6) == 0 {
            // A full batch: the contexts again and again.
            seq_lens = seq_lens.iter().copied().cycle().take(16).collect();
        }
        let case = NewCase {
            name: "right".to_owned(),
            geometry,
            geometry_name: None,
            layers: 1,
            seed,
            active_batch: seq_lens.len(),
            seq_lens,
            max_seq: 384,
            pages: None,
            padding,
            poison,
        };
        Right { case, policy: rules.under(freedom), shown }
    })
}

/// Devices of the committed test; `ASSAY_DEVICES` asks for more.
fn devices() -> usize {
    std::env::var("ASSAY_DEVICES").ok().and_then(|number| number.parse().ok()).unwrap_or(24)
}

/// What is wrong with the reports on a right device, shown whole, in part, and by its output alone.
fn complaint(number: usize, right: &Right) -> Option<String> {
    let bench = Bench::run(new_case(right.case.clone()).unwrap(), &right.policy);
    let some = right.shown.iter().copied().chain([TensorId::Out]).collect();
    for only in [None, Some(some), only([TensorId::Out])] {
        let report = bench.judge(bench.captures.clone(), &PolicyRequest::Auto, &only);
        let must = |tensor: &&TensorReport| tensor.forced && EXACT.contains(&tensor.name.as_str());
        let right_enough = report.verdict == Verdict::Pass
            && report.tensors.iter().all(|tensor| tensor.unexplained == 0)
            && report.tensors.iter().filter(must).all(|tensor| tensor.exact == tensor.elements);
        if !right_enough {
            return Some(format!("device {number}, shown {only:?}\n{}{right:?}\n", said::summary(&report)));
        }
    }
    None
}

#[test]
fn right_devices_pass_whatever_is_shown_of_them() {
    // The same devices every time: a false alarm is to be found again.
    let mut runner = TestRunner::new_with_rng(Config::default(), TestRng::from_seed(RngAlgorithm::ChaCha, &[16; 32]));
    let devices: Vec<Right> = (0..devices()).map(|_| right().new_tree(&mut runner).unwrap().current()).collect();
    let complaints: Vec<String> =
        devices.par_iter().enumerate().filter_map(|(number, right)| complaint(number, right)).collect();
    assert!(complaints.is_empty(), "{} of {}\n{}", complaints.len(), devices.len(), complaints.join("\n"));
}
