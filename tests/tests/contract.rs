//! The command's contract, through the program itself: exit codes, the JSON object, and what a bundle that is
//! wrong in one way ends with.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

use assay_tests::{Bench, assay, small};
use cases::new_case;
use device::CAPTURES_FILE;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

static RIGHT: LazyLock<Bench> = LazyLock::new(|| Bench::emulated(new_case(small()).unwrap()));

/// A folder with a right bundle, `right`, and one to be broken, `bundle`.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["right", "bundle"] {
        RIGHT.write(&folder.path().join(name));
    }
    folder
}

fn gate(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(assay());
    command.arg("gate").args(args).current_dir(folder).env_remove("GITHUB_STEP_SUMMARY").stdin(Stdio::null());
    command.output().unwrap()
}

/// The exit code and the JSON object of a run.
fn json(folder: &Path, args: &[&str]) -> (i32, Value) {
    let output = gate(folder, &[args, &["--format", "json"]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    let read = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    (output.status.code().unwrap(), read)
}

type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Changes the tensors of `bundle/captures.safetensors`, whatever the contract says of them.
fn rewrite(folder: &Path, change: impl FnOnce(&mut Raw)) {
    let path = folder.join("bundle").join(CAPTURES_FILE);
    let bytes = fs::read(&path).unwrap();
    let mut raw: Raw = SafeTensors::deserialize(&bytes)
        .unwrap()
        .iter()
        .map(|(name, view)| (name.to_owned(), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect();
    change(&mut raw);
    let views = raw
        .iter()
        .map(|(name, (dtype, shape, data))| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Changes the text of `bundle/case.yaml`.
fn retext(folder: &Path, from: &str, to: &str) -> usize {
    let path = folder.join("bundle/case.yaml");
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(&path, text.replacen(from, to, 1)).unwrap();
    1 + text.lines().position(|line| line.contains(from)).unwrap_or(0)
}

/// Adds 1 to the first byte of a tensor.
fn touch(raw: &mut Raw, name: &str) {
    let data = &mut raw.get_mut(name).unwrap().2;
    data[0] ^= 0x01;
}

#[test]
fn a_right_bundle_ends_with_0_and_says_everything_the_contract_lists() {
    let folder = folder();
    let (code, read) = json(folder.path(), &["right"]);
    assert_eq!((code, &read["verdict"]), (0, &Value::from("pass")));
    let case = &read["cases"][0];
    assert_eq!(case["name"], "small");
    assert!(case["path"].as_str().unwrap().contains("right"));
    assert!(case["seconds"].as_f64().unwrap() > 0.0);
    assert_eq!((&case["first_divergence"], &case["cause"]), (&Value::Null, &Value::Null));
    let names: Vec<&str> = case["checks"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap()).collect();
    for check in ["padding_rows", "kv_written_rows", "kv_values", "row_independence", "finite"] {
        assert!(names.contains(&check), "{check}: {names:?}");
    }
    for check in case["checks"].as_array().unwrap() {
        assert!(["pass", "unjudged"].contains(&check["verdict"].as_str().unwrap()) && check["detail"].is_string());
    }
    assert_eq!(case["tensors"].as_array().unwrap().len(), 29);
    for tensor in case["tensors"].as_array().unwrap() {
        assert!(tensor["name"].is_string() && tensor["verdict"] == "pass" && tensor["forced"].is_boolean(), "{tensor}");
        let count = |key: &str| tensor[key].as_u64().unwrap_or_else(|| panic!("{key}: {tensor}"));
        assert_eq!(count("exact") + count("explained") + count("unexplained"), count("elements"), "{tensor}");
        assert_eq!((count("nonfinite"), count("unexplained")), (0, 0));
        assert!(tensor["rows_failing"].as_array().unwrap().is_empty());
        assert!(tensor["worst"].is_null() || tensor["worst"]["index"].is_array());
    }
    let policy = &case["policy"];
    assert_eq!(policy["asked"], "auto");
    assert_eq!(policy["rules"]["out"], "ties_away");
    let words = ["rne", "ties_away", "trunc", "none", "not exercised"];
    for (site, rule) in policy["rules"].as_object().unwrap() {
        assert!(words.contains(&rule.as_str().unwrap()), "{site}: {rule}");
    }
    assert!(policy["ties"]["out"].as_u64().unwrap() > 100);
    assert!(case["coverage"].as_array().unwrap().iter().all(Value::is_string));
    assert!(!case["coverage"].as_array().unwrap().is_empty());
}

#[test]
fn a_fault_ends_with_1_and_the_first_divergence() {
    let folder = folder();
    // The sign of row 0's first element.
    rewrite(folder.path(), |raw| raw.get_mut("attn_out").unwrap().2[1] ^= 0x80);
    let (code, read) = json(folder.path(), &["bundle"]);
    assert_eq!((code, &read["verdict"]), (1, &Value::from("fail")));
    let case = &read["cases"][0];
    assert_eq!((&case["verdict"], &case["first_divergence"]), (&Value::from("fail"), &Value::from("attn_out")));
    let named = |tensor: &&Value| tensor["name"] == "attn_out";
    let tensor = case["tensors"].as_array().unwrap().iter().find(named).unwrap();
    let worst = &tensor["worst"];
    assert_eq!(worst["index"], serde_json::json!([0, 0]));
    assert_eq!(worst["device"].as_f64().unwrap(), -worst["reference"].as_f64().unwrap());
    assert!(tensor["rows_failing"].as_array().unwrap().contains(&Value::from(0)), "{tensor}");
}

#[test]
fn numbers_that_json_cannot_hold_are_words() {
    let folder = folder();
    rewrite(folder.path(), |raw| {
        let out = &mut raw.get_mut("out").unwrap().2;
        out[..6].copy_from_slice(&[0xc0, 0x7f, 0x80, 0x7f, 0x80, 0xff]);
    });
    let (code, read) = json(folder.path(), &["bundle"]);
    let case = &read["cases"][0];
    let out = case["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == "out").unwrap();
    assert_eq!((code, &out["nonfinite"]), (1, &Value::from(3)));
    let devices: Vec<&Value> = out["worst_elements"].as_array().unwrap().iter().map(|e| &e["device"]).collect();
    assert_eq!(devices, ["NaN", "Infinity", "-Infinity"]);
    let finite = case["checks"].as_array().unwrap().iter().find(|check| check["name"] == "finite").unwrap();
    assert_eq!(finite["verdict"], "fail");
}

#[test]
fn what_is_missing_is_not_judged() {
    let folder = folder();
    rewrite(folder.path(), |raw| {
        raw.remove("out");
    });
    assert_eq!(json(folder.path(), &["bundle"]).0, 125, "without out");
    rewrite(folder.path(), Raw::clear);
    assert_eq!(json(folder.path(), &["bundle"]).0, 125, "without any tensor");
    fs::remove_file(folder.path().join("bundle").join(CAPTURES_FILE)).unwrap();
    let (code, read) = json(folder.path(), &["bundle"]);
    assert_eq!((code, &read["verdict"], &read["cases"][0]["verdict"]), (125, &"unjudged".into(), &"unjudged".into()));
}

#[test]
fn a_fault_in_an_output_that_is_left_counts_although_out_is_missing() {
    let folder = folder();
    rewrite(folder.path(), |raw| {
        raw.remove("out");
        touch(raw, "normed_i8");
    });
    assert_eq!(json(folder.path(), &["bundle"]).0, 1);
}

#[test]
fn missing_cache_rows_leave_their_checks_unjudged_beside_a_pass() {
    for cache in ["k", "v"] {
        let folder = folder();
        rewrite(folder.path(), |raw| raw.retain(|name, _| !name.starts_with(&format!("{cache}_written"))));
        let (code, read) = json(folder.path(), &["bundle"]);
        assert_eq!((code, &read["verdict"]), (0, &Value::from("pass")), "{read:#}");
        let case = &read["cases"][0];
        for name in ["kv_written_rows", "kv_values"] {
            let check = case["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap();
            assert_eq!(check["verdict"], "unjudged", "{check}");
        }
        let remark = format!("{cache}_written_rows");
        assert!(case["coverage"].as_array().unwrap().iter().any(|said| said.as_str().unwrap().contains(&remark)));
    }
}

#[test]
fn a_wrong_type_is_a_failure_and_a_wrong_shape_or_name_is_malformed() {
    let folder = folder();
    rewrite(folder.path(), |raw| {
        let (dtype, _, data) = raw.get_mut("out").unwrap();
        (*dtype, *data) = (Dtype::F32, data.iter().flat_map(|byte| [*byte, 0]).collect());
    });
    let (code, read) = json(folder.path(), &["bundle"]);
    assert_eq!((code, &read["cases"][0]["first_divergence"]), (1, &Value::from("out")));

    type Break = fn(&mut Raw);
    let broken: [(Break, &str); 4] = [
        (|raw| raw.get_mut("act_scales").unwrap().1 = vec![4, 4], "act_scales"),
        (|raw| raw.get_mut("normed_i8").unwrap().1.reverse(), "normed_i8"),
        (
            |raw| {
                let out = raw["out"].clone();
                raw.insert("output".to_owned(), out);
            },
            "output",
        ),
        (|raw| raw.retain(|name, _| name != "k_written_values"), "k_written_values"),
    ];
    for (change, named) in broken {
        RIGHT.write(&folder.path().join("bundle"));
        rewrite(folder.path(), change);
        let (code, read) = json(folder.path(), &["bundle"]);
        refused(code, &read, &["captures.safetensors", named]);
    }
}

#[test]
fn one_scalar_a_row_may_come_as_a_vector_or_as_a_column() {
    let folder = folder();
    rewrite(folder.path(), |raw| {
        for (name, shape) in [("inv_rms_states", vec![16, 1]), ("act_scales", vec![16]), ("inv_rms_tile", vec![16])] {
            raw.get_mut(name).unwrap().1 = shape;
        }
    });
    assert_eq!(json(folder.path(), &["bundle"]).0, 0);
}

/// Asserts the object of a refused request.
fn refused(code: i32, read: &Value, named: &[&str]) {
    assert_eq!((code, &read["verdict"], &read["cases"]), (2, &"error".into(), &serde_json::json!([])));
    let message = read["message"].as_str().unwrap();
    for name in named {
        assert!(message.contains(name), "{name}: {message}");
    }
}

#[test]
fn inputs_that_are_not_the_ones_stated_are_refused() {
    let folder = folder();
    retext(folder.path(), "seed: 7", "seed: 8");
    let (code, read) = json(folder.path(), &["bundle"]);
    refused(code, &read, &["case.yaml", "inputs_sha256"]);
    // One wrong input stops the whole run, wherever it stands.
    let (code, read) = json(folder.path(), &["right", "bundle"]);
    refused(code, &read, &["case.yaml"]);
}

#[test]
fn a_malformed_case_names_its_file_and_line() {
    for (from, to, words) in [
        ("active_batch: 2", "active_batch: 17", "active_batch"),
        ("seed: 7", "seed: 7\nsede: 8", "sede"),
        ("max_seq: 512", "max_seq: [", ""),
        ("kernel: decode_layer", "kernel: prefill", "prefill"),
        ("wq: {recipe: int8_normal", "wq: {recipe: int8_norm", "int8_norm"),
        ("padding: own", "padding: zeros", "zeros"),
    ] {
        let folder = folder();
        let line = retext(folder.path(), from, to);
        let (code, read) = json(folder.path(), &["bundle"]);
        refused(code, &read, &["bundle/case.yaml:", words]);
        let message = read["message"].as_str().unwrap();
        let stated: usize = message.split("case.yaml:").nth(1).unwrap().split(':').next().unwrap().parse().unwrap();
        // An unclosed bracket is found where the text goes on, an added key on the line that was added.
        assert!(stated >= line && (stated <= line + 1 || to.ends_with('[')), "line {line}: {message}");
        // A person is told the same, on standard error.
        let output = gate(folder.path(), &["bundle"]);
        assert!(output.stdout.is_empty() && String::from_utf8(output.stderr).unwrap().contains("case.yaml"));
    }
}

#[test]
fn several_cases_end_with_the_worst() {
    let folder = folder();
    let path = folder.path();
    for name in ["wrong", "outless"] {
        RIGHT.write(&path.join("bundle"));
        rewrite(path, |raw| match name {
            "wrong" => touch(raw, "q_proj"),
            _ => {
                raw.remove("out");
            }
        });
        fs::rename(path.join("bundle"), path.join(name)).unwrap();
    }
    let code = |args: &[&str]| json(path, args).0;
    assert_eq!(code(&["right", "right"]), 0);
    assert_eq!(code(&["right", "outless"]), 125);
    assert_eq!(code(&["outless", "wrong"]), 1);
    assert_eq!(code(&["wrong", "right"]), 1);
    assert_eq!(code(&["wrong", "nowhere"]), 2);
    let (all, read) = json(path, &["."]);
    let names: Vec<&str> = read["cases"].as_array().unwrap().iter().map(|c| c["verdict"].as_str().unwrap()).collect();
    assert_eq!((all, names), (1, vec!["unjudged", "pass", "fail"]), "a directory is searched in order of names");
}

#[test]
fn a_policy_can_be_asked_for_by_name_by_file_and_by_the_case() {
    let folder = folder();
    let path = folder.path();
    let asked = |read: &Value| read["cases"][0]["policy"]["asked"].clone();
    for (policy, expected) in [("auto", 0), ("production", 0), ("rne", 1)] {
        let (code, read) = json(path, &["right", "--policy", policy]);
        assert_eq!((code, asked(&read)), (expected, policy.into()));
    }
    fs::write(path.join("rules.yaml"), "out: rne\n").unwrap();
    let (code, read) = json(path, &["right", "--policy", "rules.yaml"]);
    assert_eq!((code, asked(&read)), (1, "rules.yaml".into()));
    assert_eq!(read["cases"][0]["first_divergence"], "out");
    fs::write(path.join("rules.yaml"), "out: rne\nattention: rne\n").unwrap();
    let (code, read) = json(path, &["right", "--policy", "rules.yaml"]);
    refused(code, &read, &["rules.yaml:2", "attention"]);

    retext(path, "padding: own", "padding: own\npolicy: rne");
    assert_eq!(json(path, &["bundle"]).0, 1);
    // The flag wins over the case.
    assert_eq!(json(path, &["bundle", "--policy", "production"]).0, 0);
}

#[test]
fn the_recorded_suite_passes() {
    // From any folder: the suite is the repository's.
    let folder = tempfile::tempdir().unwrap();
    let (code, read) = json(folder.path(), &[]);
    assert_eq!(code, 0, "{read:#}");
    let cases = read["cases"].as_array().unwrap();
    let names: Vec<&str> = cases.iter().map(|case| case["name"].as_str().unwrap()).collect();
    let layers = ["mini/full", "mini/active1", "mini/active2", "mini/active2-dirty"];
    assert_eq!(names, [&layers[..], &["mini/tokens1", "mini/tokens2"]].concat());
}
