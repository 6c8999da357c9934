//! `assay inspect` and `assay diff` from outside: what they say of files of several formats, and exit codes.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use device::dump::{Array, NamedArray, write_npy, write_pt, write_safetensors};
use safetensors::Dtype;
use serde_json::{Value, json};

fn assay(args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(args).current_dir(dir).env_remove("CLICOLOR_FORCE");
    command.stdin(Stdio::null()).output().unwrap()
}

/// Exit code and what standard output says.
fn run(args: &[&str], dir: &Path) -> (i32, String) {
    let output = assay(args, dir);
    (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
}

fn in_json(args: &[&str], dir: &Path) -> (i32, Value) {
    let (code, text) = run(&[args, &["--format", "json"]].concat(), dir);
    (code, serde_json::from_str(&text).unwrap())
}

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/samples")
}

fn f32s(shape: &[usize], values: &[f32]) -> Array {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    Array { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
}

#[test]
fn inspect_says_what_every_sample_holds() {
    let mut hashes = 0;
    for kind in ["pt", "npy"] {
        let dir = samples().join(kind);
        let manifest: Value = serde_json::from_slice(&fs::read(dir.join("manifest.json")).unwrap()).unwrap();
        let listed = manifest["files"].as_array().unwrap();
        let (refused, good): (Vec<&Value>, Vec<&Value>) =
            listed.iter().partition(|sample| sample["file"].as_str().unwrap().starts_with("refuse."));
        let mut files: Vec<&str> = good.iter().map(|sample| sample["file"].as_str().unwrap()).collect();
        files.dedup();
        let mut args = vec!["inspect", "--bf16"];
        args.extend(&files);
        let (code, answer) = in_json(&args, &dir);
        assert_eq!(code, 0);
        for file in answer["files"].as_array().unwrap() {
            for tensor in file["tensors"].as_array().unwrap() {
                let expected = good.iter().find(|sample| {
                    sample["file"] == file["path"] && (sample["name"].is_null() || sample["name"] == tensor["name"])
                });
                let expected = expected.unwrap();
                assert_eq!((&tensor["sha256"], &tensor["shape"]), (&expected["sha256"], &expected["shape"]));
                hashes += 1;
            }
        }
        for sample in refused {
            let file = sample["file"].as_str().unwrap();
            let (code, answer) = in_json(&["inspect", file], &dir);
            assert_eq!((code, &answer["verdict"]), (2, &json!("error")), "{file}");
            assert!(answer["message"].as_str().unwrap().starts_with(file), "{answer}");
        }
    }
    assert!(hashes > 90);
}

#[test]
fn extremes_and_names_are_as_documented() {
    let dir = tempfile::tempdir().unwrap();
    let special = f32s(&[2, 2], &[1.5, f32::NAN, f32::NEG_INFINITY, -0.0]);
    write_pt(&dir.path().join("scale.pt"), &special).unwrap();
    write_npy(&dir.path().join("none.npy"), &f32s(&[0, 4], &[])).unwrap();
    let (code, answer) = in_json(&["inspect", "scale.pt", "none.npy"], dir.path());
    assert_eq!(code, 0);
    let scale = &answer["files"][0]["tensors"][0];
    assert_eq!(scale["name"], "scale");
    assert_eq!((&scale["dtype"], &scale["shape"]), (&json!("F32"), &json!([2, 2])));
    assert_eq!((&scale["min"], &scale["max"], &scale["nonfinite"]), (&json!("-Infinity"), &json!(1.5), &json!(2)));
    let none = &answer["files"][1]["tensors"][0];
    assert_eq!((&none["min"], &none["max"], &none["nonfinite"]), (&Value::Null, &Value::Null, &json!(0)));
    let (_, text) = run(&["inspect", "scale.pt"], dir.path());
    assert!(text.contains("scale.pt  pt\n") && text.contains("-Infinity"), "{text}");
}

#[test]
fn dumps_of_any_formats_are_compared() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let one = f32s(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let mut other = one.clone();
    other.bytes[8..12].copy_from_slice(&1.5f32.to_le_bytes());
    write_pt(&at("a.pt"), &one).unwrap();
    write_npy(&at("b.npy"), &one).unwrap();
    write_npy(&at("c.npy"), &other).unwrap();
    let named = |array: &Array, name: &str| NamedArray { name: name.into(), array: array.clone() };
    write_safetensors(&at("d.safetensors"), &[named(&one, "a"), named(&one, "z")]).unwrap();

    let (code, text) = run(&["diff", "a.pt", "b.npy"], dir.path());
    assert_eq!((code, text.lines().next()), (0, Some("EQUAL a.pt and b.npy")));

    let (code, answer) = in_json(&["diff", "a.pt", "c.npy"], dir.path());
    assert_eq!((code, &answer["verdict"]), (1, &json!("fail")));
    let tensor = &answer["tensors"][0];
    assert_eq!((&tensor["elements"], &tensor["differing"]), (&json!(6), &json!(1)));
    assert_eq!(tensor["patterns"]["exactly_half"], 1);
    let worst = &tensor["worst"][0];
    assert_eq!((&worst["index"], &worst["a"], &worst["b"]), (&json!([0, 2]), &json!(3.0), &json!(1.5)));
    assert_eq!((&worst["a_bits"], &worst["ulps"]), (&json!("0x40400000"), &json!(1 << 23)));
    let (_, text) = run(&["diff", "a.pt", "c.npy"], dir.path());
    assert!(text.contains("1 of 6 elements differ: 1 by more than 255"), "{text}");
    assert!(text.contains("1 is exactly half in the second"), "{text}");
    assert!(text.contains("[0, 2]: 3 (0x40400000) and 1.5 (0x3fc00000), 8,388,608 ULPs apart"), "{text}");
    assert!(text.ends_with("(exit code 1: the dumps differ)\n"), "{text}");

    let (code, answer) = in_json(&["diff", "a.pt", "d.safetensors"], dir.path());
    assert_eq!((code, &answer["only_b"]), (1, &json!(["z"])));
    let (code, answer) = in_json(&["diff", "a.pt", "no.pt"], dir.path());
    assert_eq!((code, &answer["verdict"]), (2, &json!("error")));
}

#[test]
fn memory_saved_as_it_lay_is_told_from_other_values() {
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<f32> = (0..12).map(|at| at as f32).collect();
    let columns: Vec<f32> = (0..12).map(|at| rows[(at % 3) * 4 + at / 3]).collect();
    write_npy(&dir.path().join("a.npy"), &f32s(&[3, 4], &rows)).unwrap();
    write_npy(&dir.path().join("b.npy"), &f32s(&[3, 4], &columns)).unwrap();
    let (code, text) = run(&["diff", "a.npy", "b.npy"], dir.path());
    assert_eq!(code, 1);
    assert!(text.contains("same values, column-major order"), "{text}");
}

#[test]
fn a_directory_of_a_golden_is_compared_with_another() {
    let dir = tempfile::tempdir().unwrap();
    for side in ["golden", "ours"] {
        for part in ["in", "out"] {
            fs::create_dir_all(dir.path().join(side).join(part)).unwrap();
        }
        let value = if side == "ours" { 2.5 } else { 2.0 };
        write_pt(&dir.path().join(side).join("in/x.pt"), &f32s(&[1], &[1.0])).unwrap();
        write_pt(&dir.path().join(side).join("out/y.pt"), &f32s(&[], &[value])).unwrap();
    }
    let (code, answer) = in_json(&["diff", "golden", "ours"], dir.path());
    let verdicts: Vec<_> = answer["tensors"].as_array().unwrap().iter().map(|t| (&t["name"], &t["verdict"])).collect();
    assert_eq!(code, 1);
    assert_eq!(verdicts, [(&json!("in/x"), &json!("pass")), (&json!("out/y"), &json!("fail"))]);
}

#[test]
fn records_without_data_are_never_compared_as_data() {
    let dir = tempfile::tempdir().unwrap();
    for (side, truncated) in [("a", false), ("b", true)] {
        let record = |index: usize, truncated: bool| {
            json!({
                "task_id": "0x0000000000000001", "func_id": [0], "role": "output", "stage": "after_completion",
                "arg_index": index, "kind": "tensor", "dtype": "float32", "shape": [2], "strides": [1],
                "start_offset": 0, "is_contiguous": true, "truncated": truncated, "overwritten": false,
                "bin_offset": 8 * index, "bin_size": 8,
            })
        };
        let manifest = json!({
            "bin_format": {"type": "logical_contiguous", "byte_order": "little_endian"},
            "total_args": 2, "dropped_records": 0, "bin_file": "args.bin",
            "args": [record(0, false), record(1, truncated)],
        });
        fs::create_dir(dir.path().join(side)).unwrap();
        fs::write(dir.path().join(side).join("args_dump.json"), manifest.to_string()).unwrap();
        fs::write(dir.path().join(side).join("args.bin"), [1; 16]).unwrap();
    }
    assert_eq!(run(&["diff", "a", "a"], dir.path()).0, 0);
    let (code, answer) = in_json(&["diff", "a", "b"], dir.path());
    assert_eq!((code, &answer["verdict"]), (125, &json!("unjudged")));
    let said = answer["not_compared"][0].as_str().unwrap();
    assert!(said.starts_with("0x0000000000000001.arg1.output.after_completion: in the second: truncated"), "{said}");
    let (code, answer) = in_json(&["inspect", "b"], dir.path());
    assert_eq!((code, answer["files"][0]["tensors"].as_array().unwrap().len()), (0, 1));
    assert_eq!(answer["files"][0]["unusable"][0]["name"], "0x0000000000000001.arg1.output.after_completion");
}

#[test]
fn bf16_in_numpy_is_read_where_it_is_said() {
    let (code, answer) = in_json(&["inspect", "bf16_ml_dtypes.npy"], &samples().join("npy"));
    assert_eq!(code, 2);
    assert!(answer["message"].as_str().unwrap().contains("--bf16"), "{answer}");
    let (code, answer) = in_json(&["inspect", "bf16_ml_dtypes.npy", "--bf16"], &samples().join("npy"));
    assert_eq!((code, &answer["files"][0]["tensors"][0]["dtype"]), (0, &json!("BF16")));
}
