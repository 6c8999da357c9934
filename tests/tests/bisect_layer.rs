//! The first layer and step at which drift is made: planted faults are found by complete, sparse and fetched states, right
//! devices are never accused, and what follows from a fault is not named as a cause.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use assay_tests::{Device, TokenRun, assay, deep_run};
use cases::PolicyRequest;
use device::{Bundle, Captures, LayerStates, Moment, state_name, write_layer_states};
use goldens::Job;
use goldens::layerwise::{BisectError, Fetch, FetchError, LayerReport, LayerRequest, Outcome, bisect_layer};
use half::bf16;
use ndarray::{Array2, s};
use rayon::prelude::*;
use reference::stages::run_layer;
use reference::{Freedom, LayerInputs, Policy, Rounding, Site, TensorId, Trace};

const LAYERS: usize = 6;
const STEPS: usize = 5;

/// What is wrong with one layer of one step.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// Keys and queries are rotated as a later position's.
    Rotated,
    /// Every cast truncates.
    Truncated,
    /// A head of attention gives zero.
    HeadOfZeros,
    /// The values of attention are scaled.
    Doubled,
}

fn faulty(fault: Fault, inputs: &LayerInputs<'_>, policy: &Policy) -> Trace {
    match fault {
        Fault::Rotated => {
            let [cos, sin] = [inputs.rope_cos, inputs.rope_sin].map(|table| table.slice_move(s![1.., ..]));
            run_layer(&LayerInputs { rope_cos: cos, rope_sin: sin, ..*inputs }, policy)
        }
        Fault::Truncated => {
            let sites = Site::ALL.into_iter().filter(|site| !site.is_int8());
            run_layer(inputs, &sites.fold(policy.clone(), |policy, site| policy.with(site, Rounding::Trunc)))
        }
        Fault::HeadOfZeros | Fault::Doubled => {
            let dim = inputs.geometry.head_dim;
            let mut device = Device::new(*inputs, run_layer(inputs, policy), policy.clone());
            device.map(TensorId::AttnOut, |_, column, x| match fault {
                Fault::Doubled => 2.0 * x,
                _ if column / dim == 1 => 0.0,
                _ => x,
            });
            device.follow();
            device.trace
        }
    }
}

fn emulated() -> Policy {
    Policy::production().under(Freedom::Emulated)
}

/// A device with faults at some steps and layers.
fn device(seed: u64, policy: &Policy, faults: &[(usize, usize, Fault)]) -> TokenRun {
    TokenRun::play(deep_run(LAYERS, seed, &[9, 5], STEPS), policy, |habits| {
        let faults = faults.to_vec();
        habits.instead = Box::new(move |step, layer, inputs, policy| {
            let fault = faults.iter().find(|&&(s, l, _)| (s, l) == (step, layer))?.2;
            Some(faulty(fault, inputs, policy))
        });
    })
}

/// Some of a device's states.
fn some(run: &TokenRun, keep: impl Fn(usize, Moment) -> bool) -> LayerStates {
    let states = run.states.states.iter().filter(|((layer, moment), _)| keep(*layer, *moment));
    LayerStates { states: states.map(|(&key, values)| (key, values.clone())).collect() }
}

/// What of the bundle is looked at.
#[derive(Clone, Copy, PartialEq)]
enum Shown {
    /// Everything.
    All,
    /// Tokens and no caches or states.
    Tokens,
    /// Tokens and caches, no states.
    Caches,
}

fn bisect(
    run: &TokenRun,
    shown: Shown,
    states: &LayerStates,
    bad: Option<Moment>,
    fetch: Option<&mut dyn Fetch>,
) -> Result<LayerReport, BisectError> {
    let mut captures = run.captures.clone();
    if shown != Shown::All {
        (captures.tokens.prefill_hidden, captures.tokens.decode_hidden) = (None, None);
    }
    if shown == Shown::Tokens {
        (captures.k_written, captures.v_written) = (None, None);
    }
    judge(run, captures, states, bad, fetch, &PolicyRequest::Auto)
}

fn judge(
    run: &TokenRun,
    captures: Captures,
    states: &LayerStates,
    bad: Option<Moment>,
    fetch: Option<&mut dyn Fetch>,
    policy: &PolicyRequest,
) -> Result<LayerReport, BisectError> {
    let bundle = Bundle { dir: PathBuf::new(), case: run.case.clone(), captures: Some(captures) };
    let job = Job::new(&bundle, &run.inputs, policy);
    bisect_layer(&LayerRequest { job, states, bad }, fetch, &())
}

/// Gives a device's states, and counts.
struct Fetcher<'a> {
    run: &'a TokenRun,
    asked: Vec<(usize, Moment)>,
}

impl<'a> Fetcher<'a> {
    fn of(run: &'a TokenRun) -> Self {
        Self { run, asked: Vec::new() }
    }
}

impl Fetch for Fetcher<'_> {
    fn fetch(&mut self, layer: usize, moment: Moment) -> Result<Array2<bf16>, FetchError> {
        self.asked.push((layer, moment));
        Ok(self.run.states.states[&(layer, moment)].clone())
    }
}

fn place(report: &LayerReport) -> (Moment, usize, usize) {
    let drift = report.drift.as_ref().unwrap_or_else(|| panic!("no drift: {report:?}"));
    (drift.step, drift.first_layer, drift.last_layer)
}

const PLANTED: [(usize, usize, Fault); 6] = [
    (0, 0, Fault::Rotated),
    (2, 3, Fault::Rotated),
    (3, 2, Fault::Truncated),
    (1, 4, Fault::HeadOfZeros),
    (4, 5, Fault::Doubled),
    (2, 0, Fault::HeadOfZeros),
];

#[test]
fn complete_states_name_the_layer_and_nothing_behind_it() {
    PLANTED.into_par_iter().for_each(|(step, layer, fault)| {
        let run = device(5, &emulated(), &[(step, layer, fault)]);
        for shown in [Shown::All, Shown::Tokens] {
            let report = bisect(&run, shown, &run.states, None, None).unwrap();
            assert_eq!(report.outcome, Outcome::Located, "{fault:?} {step} {layer}");
            assert_eq!(place(&report), (Moment::Step(step), layer, layer), "{fault:?}: {:#?}", report.drift);
            assert!(!report.later.iter().any(|later| later.own), "{fault:?}: {:?}", report.later);
            let drift = report.drift.unwrap();
            assert!(drift.forced && drift.tensors.iter().all(|tensor| tensor.unexplained > 0), "{drift:?}");
        }
    });
}

#[test]
fn a_second_fault_is_one_of_its_own() {
    let faults = [(1, 2, Fault::HeadOfZeros), (1, 4, Fault::Doubled), (3, 1, Fault::Rotated)];
    let run = device(5, &emulated(), &faults);
    let report = bisect(&run, Shown::All, &run.states, None, None).unwrap();
    assert_eq!(place(&report), (Moment::Step(1), 2, 2));
    let own: Vec<_> = report.later.iter().filter(|later| later.own).map(|later| (later.step, later.layer)).collect();
    assert!(own.contains(&(Moment::Step(1), 4)) && own.contains(&(Moment::Step(3), 1)), "{:?}", report.later);
    assert!(own.iter().all(|place| faults.iter().any(|&(s, l, _)| (Moment::Step(s), l) == *place)), "{own:?}");
}

#[test]
fn sparse_states_name_the_layers_between_them() {
    let run = device(5, &emulated(), &[(2, 3, Fault::HeadOfZeros)]);
    // Without caches, states of layers 1 and 4 leave layers 2 to 4.
    let states = some(&run, |layer, _| layer == 1 || layer == 4);
    let report = bisect(&run, Shown::Tokens, &states, None, None).unwrap();
    assert_eq!(place(&report), (Moment::Step(2), 2, 4));
    let drift = report.drift.unwrap();
    assert!(!drift.forced && drift.next.contains("layer_hidden.2.2"), "{}", drift.next);
    // Cache rows narrow it down: those of layer 4 are the first that follow from the fault.
    let report = bisect(&run, Shown::Caches, &states, None, None).unwrap();
    assert_eq!(place(&report), (Moment::Step(2), 3, 4));
    // Without states a fault is seen as far as it moves later keys and values more than permitted freedoms do.
    let report =
        bisect(&device(5, &emulated(), &[(2, 0, Fault::HeadOfZeros)]), Shown::Caches, &states, None, None).unwrap();
    assert_eq!(place(&report), (Moment::Step(2), 0, 1));
}

#[test]
fn a_fault_of_the_prefill_is_found_there() {
    let run = device(5, &emulated(), &[]);
    let mut states = run.states.clone();
    // One token's state of one layer, with an eighth of it moved.
    let state = states.states.get_mut(&(3, Moment::Prefill)).unwrap();
    state.slice_mut(s![11, ..;8]).mapv_inplace(|x| bf16::from_f32(1.5 * x.to_f32()));
    let report = bisect(&run, Shown::All, &states, None, None).unwrap();
    assert_eq!(place(&report), (Moment::Prefill, 3, 3));
    let drift = report.drift.unwrap();
    assert_eq!((drift.rows, &*drift.places), (vec![1], "row 1, prompt token 2"));
    assert_eq!(drift.tensors[0].worst.as_ref().unwrap().index[0], 11);
}

/// Asks with a fetcher, and counts: nothing is fetched twice, and no more than was said.
fn fetching(run: &TokenRun, shown: Shown, bad: Option<Moment>) -> LayerReport {
    let mut fetcher = Fetcher::of(run);
    let report = bisect(run, shown, &LayerStates::default(), bad, Some(&mut fetcher)).unwrap();
    let (asked, expected) = (fetcher.asked.len(), report.fetches_expected.unwrap());
    assert_eq!(asked, report.fetched.len());
    assert!(asked <= expected, "{asked} fetched, {expected} expected: {:?}", report.remarks);
    fetcher.asked.sort();
    fetcher.asked.dedup();
    assert_eq!(fetcher.asked.len(), asked, "nothing is fetched twice");
    report
}

#[test]
fn few_states_are_fetched() {
    let named: usize = PLANTED
        .into_par_iter()
        .map(|(step, layer, fault)| {
            let run = device(5, &emulated(), &[(step, layer, fault)]);
            let here = (Moment::Step(step), layer, layer);
            let mut named = 0;
            // With the bundle's own last states and caches the step is known, without them it is named; then it is three
            // halvings of six layers, and the states before and after.
            for (shown, bad, most) in [(Shown::All, None, 5), (Shown::Tokens, Some(Moment::Step(step)), 6)] {
                let report = fetching(&run, shown, bad);
                // Permitted freedoms of all layers may hide a fault: then the end is right, and nothing is accused.
                if report.outcome == Outcome::Located {
                    assert_eq!(place(&report), here, "{fault:?} {:?}", report.remarks);
                    assert!(report.drift.as_ref().unwrap().forced);
                    assert!(report.fetches_expected.unwrap() <= most, "{report:?}");
                    named += 1;
                } else {
                    assert_eq!(report.outcome, Outcome::EndIsRight, "{fault:?}");
                }
            }
            named
        })
        .sum();
    assert!(named >= PLANTED.len(), "{named} of {} are seen", 2 * PLANTED.len());
}

#[test]
fn the_first_bad_step_is_found_by_halving() {
    for first in [0, 3] {
        let faults: Vec<_> = (first..STEPS).map(|step| (step, 2, Fault::Doubled)).collect();
        let report = fetching(&device(5, &emulated(), &faults), Shown::Tokens, None);
        assert_eq!(place(&report), (Moment::Step(first), 2, 2), "{:?}", report.remarks);
        // The end, three halvings of six moments, three of six layers, before and after.
        assert_eq!(report.fetches_expected, Some(1 + 3 + 3 + 2));
    }
}

#[test]
fn right_devices_are_never_accused() {
    (0..6u64).into_par_iter().for_each(|seed| {
        let policy = match seed % 3 {
            0 => Policy::production().under(Freedom::Emulated),
            1 => Policy::production().under(Freedom::Sampled { seed: 1000 + seed }),
            _ => Policy::rne().under(Freedom::Sampled { seed: 2000 + seed }),
        };
        let run = device(seed, &policy, &[]);
        let sparse = some(&run, |layer, moment| (layer + seed as usize).is_multiple_of(3) && moment != Moment::Step(1));
        for (shown, states) in [(Shown::All, &run.states), (Shown::Caches, &sparse), (Shown::Tokens, &run.states)] {
            let report = bisect(&run, shown, states, None, None).unwrap();
            assert_eq!(report.outcome, Outcome::NoDrift, "{seed} {policy:?}: {:#?}", report.drift);
        }
        let report = fetching(&run, Shown::Tokens, None);
        assert_eq!((report.outcome, report.fetched.len()), (Outcome::EndIsRight, 1));
    });
}

#[test]
fn another_tie_rule_than_asked_for_is_no_drift_of_a_layer() {
    let run = device(5, &Policy::rne().under(Freedom::Emulated), &[]);
    let ask = |policy| judge(&run, run.captures.clone(), &run.states, None, None, policy).unwrap();
    let report = ask(&PolicyRequest::Production);
    assert_eq!(report.outcome, Outcome::NoDrift, "{:#?}", report.drift);
    assert!(report.remarks.iter().any(|remark| remark.contains("under policy rne")), "{:?}", report.remarks);
}

/// A device whose states are another run's from one layer on.
struct Mixed<'a>(&'a TokenRun, &'a TokenRun);

impl Fetch for Mixed<'_> {
    fn fetch(&mut self, layer: usize, moment: Moment) -> Result<Array2<bf16>, FetchError> {
        let run = if layer == LAYERS - 1 { self.1 } else { self.0 };
        Ok(run.states.states[&(layer, moment)].clone())
    }
}

#[test]
fn what_cannot_be_fetched_or_used_is_said() {
    struct Broken(bool);
    impl Fetch for Broken {
        fn fetch(&mut self, _: usize, _: Moment) -> Result<Array2<bf16>, FetchError> {
            if self.0 { Err(FetchError::Failed("no device".into())) } else { Ok(Array2::default((1, 3))) }
        }
    }
    let run = device(5, &emulated(), &[(2, 3, Fault::HeadOfZeros)]);
    let ask = |fetch: &mut dyn Fetch| bisect(&run, Shown::All, &LayerStates::default(), None, Some(fetch)).unwrap_err();
    let error = ask(&mut Broken(true));
    assert!(matches!(error, BisectError::Fetch { .. }) && error.to_string().contains("no device"), "{error}");
    let error = ask(&mut Broken(false));
    assert!(matches!(error, BisectError::WrongState { .. }) && error.to_string().contains("(2, 512)"), "{error}");
    // The state that a bundle holds, given again with other bits.
    let mut states = run.states.clone();
    states.states.get_mut(&(LAYERS - 1, Moment::Step(1))).unwrap()[(1, 7)] = bf16::NAN;
    let error = bisect(&run, Shown::All, &states, None, None).unwrap_err();
    assert!(matches!(error, BisectError::Contradiction { .. }), "{error}");
    assert!(
        error.to_string().contains("`layer_hidden.5.1`") && error.to_string().contains("row 1, column 7"),
        "{error}"
    );
}

#[test]
fn a_fault_that_the_search_loses_is_looked_for_in_every_layer() {
    // The last states are those of a faulty run, all others those of a right one: the fault is made in the last layer.
    let right = device(5, &emulated(), &[]);
    let wrong = device(5, &emulated(), &[(2, 5, Fault::HeadOfZeros)]);
    let mut fetch = Mixed(&right, &wrong);
    let bad = Some(Moment::Step(2));
    let report = bisect(&right, Shown::Tokens, &LayerStates::default(), bad, Some(&mut fetch)).unwrap();
    assert_eq!(place(&report), (Moment::Step(2), 5, 5));
}

#[test]
fn nothing_to_compare_is_not_judged() {
    let run = device(5, &emulated(), &[]);
    let report = bisect(&run, Shown::Tokens, &LayerStates::default(), None, None).unwrap();
    assert_eq!(report.outcome, Outcome::Unjudged);
    let mut captures = Captures::default();
    let report = judge(&run, captures.clone(), &run.states, None, None, &PolicyRequest::Auto).unwrap();
    assert_eq!(report.outcome, Outcome::Unjudged);
    assert!(report.remarks[0].contains("token_ids"), "{:?}", report.remarks);
    // One cache is enough to tell the tokens that were fed.
    captures.tokens.token_ids = run.captures.tokens.token_ids.clone();
    captures.k_written = run.captures.k_written.clone();
    let report = judge(&run, captures, &run.states, None, None, &PolicyRequest::Auto).unwrap();
    assert_eq!(report.outcome, Outcome::NoDrift);
    assert!(report.cache_rows > 0 && report.remarks.iter().any(|remark| remark.contains("no cache rows of v")));
}

/// A bundle in a directory, with a file for each of its states beside it.
fn written(run: &TokenRun, dir: &Path) {
    fs::create_dir_all(dir.join("bundle")).unwrap();
    fs::create_dir_all(dir.join("states")).unwrap();
    fs::write(dir.join("bundle/case.yaml"), run.case.to_yaml()).unwrap();
    device::write_captures(&dir.join("bundle/captures.safetensors"), &run.captures).unwrap();
    for (&(layer, moment), values) in &run.states.states {
        let one = LayerStates { states: [((layer, moment), values.clone())].into() };
        let file = dir.join("states").join(format!("{}.safetensors", state_name(layer, moment)));
        write_layer_states(&file, &one).unwrap();
    }
}

fn program(dir: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(assay());
    command.args(["bisect", "layer", "bundle"]).args(args).current_dir(dir).stdin(Stdio::null());
    let output = command.env_remove("CLICOLOR_FORCE").output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[cfg(unix)]
#[test]
fn the_program_fetches_keeps_and_names() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let run = device(5, &emulated(), &[(2, 3, Fault::HeadOfZeros)]);
    written(&run, dir);
    let (code, out, err) = program(dir, &["--states", "states"]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(out.contains("Drift is made by layer 3 in decode step 2") && out.contains("layer_hidden.3.2:"), "{out}");

    let copy = "echo fetching; cp states/layer_hidden.{layer}.{step}.safetensors {out}";
    let (code, out, err) = program(dir, &["--fetch", copy, "--keep", "kept", "--format", "json"]);
    assert_eq!(code, 0, "{out}{err}");
    let answer: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(answer["outcome"], "located");
    let drift = &answer["drift"];
    assert_eq!((&drift["step"], &drift["last_layer"]), (&2.into(), &3.into()));
    let fetched: Vec<String> = serde_json::from_value(answer["fetched"].clone()).unwrap();
    assert!(!fetched.is_empty());
    for name in &fetched {
        assert!(dir.join("kept").join(format!("{name}.safetensors")).is_file(), "{name}");
        assert_eq!(fs::read_to_string(dir.join("kept").join(format!("{name}.log"))).unwrap(), "fetching\n");
    }
    // What is kept is not fetched again, and is no other command's.
    fs::rename(dir.join("states"), dir.join("gone")).unwrap();
    let again = program(dir, &["--fetch", copy, "--keep", "kept", "--format", "json"]);
    assert_eq!((again.0, again.1), (0, out));
    let (code, _, err) = program(dir, &["--fetch", "true {layer} {step} {out}", "--keep", "kept"]);
    assert!(code == 2 && err.contains("for another command"), "{err}");
    let (code, _, err) = program(dir, &["--fetch", copy, "--keep", "bundle"]);
    assert!(code == 2 && err.contains("is not empty"), "{err}");

    // Fetches that fail, hang, write nothing or another state.
    fs::rename(dir.join("gone"), dir.join("states")).unwrap();
    for (command, wanted, said) in [
        ("echo no device; exit 3; : {layer} {step} {out}", 125, "having said: no device"),
        ("sleep 600; : {layer} {step} {out}", 125, "took longer than 1 s"),
        ("true {layer} {step} {out}", 125, "did not write"),
        ("cp states/layer_hidden.0.0.safetensors {out}; : {layer} {step}", 2, "does not hold"),
        ("echo short > {out}; : {layer} {step}", 2, "short"),
    ] {
        let (code, out, err) = program(dir, &["--fetch", command, "--timeout", "1", "--format", "json"]);
        assert!(code == wanted && err.contains(said), "{command}: {code} {err}");
        let answer: serde_json::Value = serde_json::from_str(&out).unwrap();
        assert!(answer["message"].as_str().unwrap().contains("layer_hidden.") || wanted == 2, "{out}");
    }
}

#[test]
fn the_program_refuses_what_is_no_state_and_no_search() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let run = device(5, &emulated(), &[]);
    written(&run, dir);
    let (code, out, err) = program(dir, &["--states", "states"]);
    assert!(code == 0 && out.contains("NO DRIFT"), "{out}{err}");
    let (code, out, _) = program(dir, &["--fetch", "false {layer} {step} {out}"]);
    assert!(code == 1 && out.contains("END IS RIGHT"), "{out}");
    for (args, said) in [
        (&["--states", "bundle/captures.safetensors"][..], "unknown tensor"),
        (&["--states", "none"], "none"),
        (&["--fetch", "get {layer} {out}"], "{step}"),
        (&["--fetch", "get {layer} {step} {out}", "--step", "5"], "the run has 5 decode steps"),
        (&["--step", "1"], "--fetch"),
        (&["--policy", "sometimes"], "sometimes"),
    ] {
        let (code, _, err) = program(dir, args);
        assert!(code == 2 && err.contains(said), "{args:?}: {code} {err}");
    }
}
