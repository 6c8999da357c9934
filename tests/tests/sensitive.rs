//! Cases that can show faults: each fault of the catalogue shows in a case of the sensitive or the default suite,
//! except those that no case can show.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use assay_tests::{Bench, assay, said};
use cases::{Case, PolicyRequest, Suite};
use goldens::power::faults;
use goldens::suggest::suggest;
use rayon::prelude::*;
use reference::{Freedom, Policy, TensorId};

/// Faults that no case can show, and why.
const HIDDEN: &[(&str, &str)] = &[
    ("prob.rne", "a tie of exp moves within the permitted errors of exp"),
    ("attn.rne", "a tie of attention's quotient moves within the permitted errors of exp and reciprocal"),
    ("attention.fma", "it moves results no further than the permitted errors of exp"),
    ("silu.rne", "a tie of silu moves within the permitted errors of exp and reciprocal"),
    ("normed_i8.clamp_missing", "a right scale leaves the clamp nothing to do"),
    ("attn_out_i8.clamp_missing", "a right scale leaves the clamp nothing to do"),
    ("mlp_norm_i8.clamp_missing", "a right scale leaves the clamp nothing to do"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn suite(name: &str) -> Vec<Case> {
    let suite = Suite::load(&root().join(format!("goldens/suites/{name}.yaml"))).unwrap();
    suite.bundles.iter().map(|bundle| Case::load(bundle).unwrap()).collect()
}

#[test]
fn every_fault_shows_in_some_case() {
    let mut cases = suite("sensitive");
    cases
        .extend(suite("default").into_iter().filter(|case| ["mini/full", "mini/active2-dirty"].contains(&&*case.name)));
    let found = suggest(None, &cases, &faults(), &()).unwrap();
    let hidden: Vec<&str> = found.iter().filter(|s| s.shown_by.is_none()).map(|s| s.fault.as_str()).collect();
    let expected: Vec<&str> =
        faults().iter().filter_map(|fault| HIDDEN.iter().map(|(id, _)| *id).find(|id| *id == fault.id)).collect();
    assert_eq!(hidden, expected);
    assert_eq!(expected.len(), HIDDEN.len(), "a hidden fault is none of the catalogue");
    // No case is there for nothing.
    for (index, case) in cases.iter().enumerate().filter(|(_, case)| case.name.starts_with("sensitive/ties")) {
        assert!(found.iter().any(|s| s.shown_by.as_ref().is_some_and(|by| by.index == index)), "{}", case.name);
    }
}

#[test]
fn the_kernels_can_run_the_sensitive_cases() {
    for case in suite("sensitive") {
        assert_eq!(case.geometry.tiling_violations(), Vec::<String>::new(), "{}", case.name);
        assert_eq!(case.warnings(), Vec::<String>::new(), "{}", case.name);
        assert!(fs::read_to_string(&case.path).unwrap().starts_with("# "), "{}: says what it is for", case.name);
    }
}

fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let run = Command::new(assay()).args(arguments).current_dir(root()).output().unwrap();
    (run.status.code(), String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr))
}

#[test]
fn cases_without_captures_are_unjudged() {
    let (code, said) = run(&["gate", "goldens/cases/sensitive/floor.yaml"]);
    assert_eq!(code, Some(125), "{said}");
    assert!(said.contains("captures.safetensors"), "{said}");
}

#[test]
fn a_fault_leads_to_its_case_and_the_case_is_made_smaller() {
    let dir = tempfile::tempdir().unwrap();
    let found = dir.path().join("found");
    let arguments = ["case", "suggest", "--fault", "mlp_norm_i8.floor_missing", "--write", found.to_str().unwrap()];
    let (code, said) = run(&arguments);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("sensitive/floor"), "{said}");
    let case = found.join("sensitive-floor.yaml");
    let small = dir.path().join("small.yaml");
    let (case, output) = (case.to_str().unwrap(), small.to_str().unwrap());
    let shrink = ["case", "shrink", case, "--fault", "mlp_norm_i8.floor_missing", "--tries", "40", "--output", output];
    let (code, said) = run(&shrink);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("still fails at mlp_norm_i8"), "{said}");
    assert_eq!(Case::load(&small).unwrap().active_batch, 1);
    // What is there is not replaced, and what passes is not shrunk.
    assert_eq!(run(&shrink).0, Some(2));
    let passes = ["case", "shrink", case, "--fault", "q_proj.fp32_sums", "--output", output, "--force"];
    assert_eq!(run(&passes).0, Some(2));
}

#[cfg(unix)]
#[test]
fn a_command_is_a_device() {
    // Its outputs are those of other inputs, whatever it is asked to run.
    let dir = tempfile::tempdir().unwrap();
    let mut case = Case::load(&root().join("goldens/bundles/mini/active2")).unwrap();
    case.seed += 1;
    case.inputs_sha256.clear();
    case.final_cache_sha256.clear();
    let (file, output) = (dir.path().join("case.yaml"), dir.path().join("small.yaml"));
    fs::write(&file, case.to_yaml()).unwrap();
    let (file, small) = (file.to_str().unwrap(), output.to_str().unwrap());
    let device = "test -f {case} && cp goldens/bundles/mini/active2/captures.safetensors {out}";
    let (code, said) = run(&["case", "shrink", file, "--run", device, "--tries", "3", "--output", small]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("still fails at normed_states") && said.contains("active rows 2 -> 1"), "{said}");
    assert!(said.contains("3 cases tried") && said.contains("limit of tries"), "{said}");
    let small = Case::load(&output).unwrap();
    assert_eq!((small.active_batch, small.seed), (1, case.seed));
    assert_eq!(small.inputs_sha256.len(), small.inputs().count());
}

#[cfg(unix)]
#[test]
fn a_command_that_gives_nothing_to_judge_is_unjudged() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("small.yaml");
    for (command, words) in [("exit 125", "exited with 125"), ("true", "left no captures.safetensors")] {
        let case = "goldens/cases/sensitive/floor.yaml";
        let (code, said) = run(&["case", "shrink", case, "--run", command, "--output", output.to_str().unwrap()]);
        assert_eq!(code, Some(125), "{said}");
        assert!(said.contains(words), "{said}");
    }
    assert!(!output.exists());
}

#[test]
fn right_devices_pass_in_every_case() {
    for case in suite("sensitive") {
        // Rows of one kind share the errors of an order of adding: what is permitted must know of it.
        (1..=16u64).into_par_iter().for_each(|seed| {
            let policy = Policy::production().under(Freedom::Sampled { seed: seed << 32 });
            let bench = Bench::run(case.clone(), &policy);
            for only in [None, Some([TensorId::Out].into())] {
                said::passes(&bench.judge(bench.captures.clone(), &PolicyRequest::Production, &only), &case.name);
            }
        });
    }
}
