//! `assay export` writes what other tools take, the kernel library's golden-data directory to the file; `assay import`
//! makes their dumps bundles, by name, by map or by content, and guesses at nothing.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use assay_tests::Bench;
use assay_tests::program::{code, run, stderr};
use cases::Input;
use device::dump::{Array, NamedArray, ReadOptions, read, write_safetensors};
use device::{Bundle, Captured, input_tensors, tensor_bytes};
use reference::TensorId;
use safetensors::Dtype;
use serde_json::{Value, json};

/// What the library's decode layer takes, in the order of its parameters.
const TAKEN: [&str; 26] = [
    "hidden_states",
    "input_rms_weight",
    "wq",
    "wk",
    "wv",
    "wq_scale",
    "wk_scale",
    "wv_scale",
    "q_norm_weight",
    "k_norm_weight",
    "seq_lens",
    "active_batch",
    "block_table",
    "slot_mapping",
    "rope_cos",
    "rope_sin",
    "k_cache",
    "v_cache",
    "wo",
    "wo_scale",
    "w_gate",
    "w_up",
    "w_gate_scale",
    "w_up_scale",
    "w_down",
    "post_rms_weight",
];
/// What it writes: its output, and the caches in place.
const WRITTEN: [&str; 3] = ["out", "k_cache", "v_cache"];

fn bundle(name: &str) -> String {
    Bench::path(name).canonicalize().unwrap().display().to_string()
}

/// Files below a directory, sorted.
fn files(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            found.extend(files(&path).into_iter().map(|file| format!("{name}/{file}")));
        } else {
            found.push(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    found.sort();
    found
}

/// The tensors of a case's inputs and of a device's outputs as entries of a dump.
fn entries(bench: &Bench) -> BTreeMap<&'static str, Array> {
    let mut entries = BTreeMap::new();
    for tensor in input_tensors(&bench.case, &bench.inputs) {
        entries
            .insert(tensor.name, Array { dtype: tensor.dtype, shape: tensor.shape, bytes: tensor.bytes.into_owned() });
    }
    for (id, captured) in &bench.captures.tensors {
        let Captured::Values(tensor) = captured else { panic!("{id:?}") };
        let (dtype, shape) = (device::file_type(id.dtype()), id.shape(&bench.case.geometry).to_vec());
        entries.insert(id.name(), Array { dtype, shape, bytes: tensor_bytes(tensor) });
    }
    entries
}

/// A scratch directory with a dump of some tensors, each under another name.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn dump(&self, arrays: &[(&str, &Array)]) {
        let named: Vec<NamedArray> =
            arrays.iter().map(|&(name, array)| NamedArray { name: name.to_owned(), array: array.clone() }).collect();
        write_safetensors(&self.path("dump.safetensors"), &named).unwrap();
    }

    /// Imports the dump for mini/active2; nothing is left of what is refused.
    fn import(&self, more: &[&str]) -> Output {
        self.import_of("dump.safetensors", more)
    }

    fn import_of(&self, dump: &str, more: &[&str]) -> Output {
        let before = files(self.0.path()).len();
        let case = bundle("mini/active2");
        let output = run(self.0.path(), &[&["import", dump, "--case", &case, "--to", "made"], more].concat());
        match code(&output) {
            0 => assert_eq!(files(&self.path("made")), ["captures.safetensors", "case.yaml"]),
            _ => assert_eq!(files(self.0.path()).len(), before, "{}", stderr(&output)),
        }
        output
    }

    /// Why the dump is refused.
    fn refused(&self, more: &[&str]) -> String {
        let output = self.import(more);
        assert_eq!(code(&output), 2, "{}", String::from_utf8_lossy(&output.stdout));
        stderr(&output)
    }
}

fn bench() -> &'static Bench {
    Bench::recorded("mini/active2")
}

#[test]
fn a_golden_directory_holds_what_the_library_loads_and_nothing_else() {
    let scratch = Scratch::new();
    let args = ["export", &bundle("mini/active2"), "--to", "golden", "--format", "golden"];
    let output = run(scratch.0.path(), &args);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "mini/active2: 26 inputs and 3 outputs of the reference in golden\n"
    );
    let mut expected: Vec<String> = TAKEN.iter().map(|name| format!("in/{name}.pt")).collect();
    expected.extend(WRITTEN.iter().map(|name| format!("out/{name}.pt")));
    expected.sort();
    assert_eq!(files(&scratch.path("golden")), expected);

    let entries = entries(bench());
    let load = |file: &str| read(&scratch.path("golden").join(file), &ReadOptions::default()).unwrap();
    for name in TAKEN {
        let dump = load(&format!("in/{name}.pt"));
        assert!(dump.bare, "{name}: one tensor a file");
        assert_eq!(dump.arrays[0].array, entries[name], "{name}");
    }
    let (out, k) = (load("out/out.pt"), load("out/k_cache.pt"));
    assert_eq!((out.arrays[0].array.dtype, out.arrays[0].array.shape.as_slice()), (Dtype::BF16, &[16, 2560][..]));
    let before = bench().inputs.bytes(Input::KCache).unwrap();
    let rows = |bytes: &[u8]| bytes.chunks_exact(256).map(<[u8]>::to_vec).collect::<Vec<_>>();
    let changed = rows(&k.arrays[0].array.bytes).iter().zip(rows(before)).filter(|(a, b)| *a != b).count();
    assert_eq!(changed, 8, "two rows, four heads");
    // The reference is its own kernel: what it wrote passes.
    let output = scratch.import_of("golden", &[]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    assert_eq!(code(&run(scratch.0.path(), &["gate", "made"])), 0);
    // Nothing is written over.
    let again = run(scratch.0.path(), &args);
    assert_eq!(code(&again), 2);
    assert!(stderr(&again).contains("--to golden: is there"), "{}", stderr(&again));
}

#[test]
fn other_forms_hold_the_devices_outputs_too() {
    let scratch = Scratch::new();
    let export = |args: &[&str]| {
        let case = bundle("mini/active2");
        let output = run(scratch.0.path(), &[&["export", &case, "--outputs", "device"], args].concat());
        (code(&output), stderr(&output))
    };
    assert_eq!(export(&["--to", "npy", "--format", "npy", "--scalars", "active_batch"]).0, 0);
    let npy = scratch.path("npy");
    assert_eq!(files(&npy).len(), 26 + 25 + 2);
    let load = |file: &str| read(&npy.join(file), &ReadOptions { bf16: true }).unwrap().arrays.remove(0).array;
    assert_eq!(load("in/active_batch.npy").shape, [0; 0]);
    let entries = entries(bench());
    assert_eq!(
        (load("out/out.npy"), load("out/act_scales.npy")),
        (entries["out"].clone(), entries["act_scales"].clone())
    );
    let output = scratch.import_of("npy", &["--bf16"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let made = Bundle::open(&scratch.path("made")).unwrap();
    assert_eq!(made.captures.unwrap().tensors, bench().captures.tensors);

    assert_eq!(export(&["--to", "tensors", "--format", "safetensors"]).0, 0);
    assert_eq!(files(&scratch.path("tensors")), ["inputs.safetensors", "outputs.safetensors"]);
    let (refused, why) = export(&["--to", "x", "--scalars", "seq_lens"]);
    assert!(
        refused == 2 && why.contains("seq_lens: is no input of one element") && why.contains("active_batch"),
        "{why}"
    );
    let tokens = run(scratch.0.path(), &["export", &bundle("mini/tokens1"), "--to", "x"]);
    assert!(code(&tokens) == 2 && stderr(&tokens).contains("only a decode layer's"), "{}", stderr(&tokens));
    assert!(!scratch.path("x").exists());
}

#[test]
fn entries_without_names_are_known_by_their_content_and_the_evidence_is_shown() {
    let scratch = Scratch::new();
    let entries = entries(bench());
    let picked = ["wk", "out", "attn_out", "v_proj", "hidden_states", "k_proj", "mlp_norm_i8", "inv_rms_states"];
    let names: Vec<String> = (0..picked.len()).map(|n| format!("arg{n}")).collect();
    let mut dump: Vec<(&str, &Array)> =
        names.iter().map(String::as_str).zip(picked.iter().map(|name| &entries[name])).collect();
    let scrap = Array { dtype: Dtype::F32, shape: vec![16, 512], bytes: vec![0; 4 * 16 * 512] };
    dump.push(("scrap", &scrap));
    scratch.dump(&dump);
    let output = scratch.import(&["--format", "json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for entry in report["entries"].as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        let Some(number) = name.strip_prefix("arg") else {
            assert_eq!((entry["taken"].as_str(), entry["tensor"].as_str()), (Some("nothing"), None), "{entry}");
            continue;
        };
        let expected = picked[number.parse::<usize>().unwrap()];
        assert_eq!(entry["tensor"], expected, "{entry}");
        assert_eq!(entry["candidates"][0]["tensor"], expected, "{entry}");
        assert_eq!(entry["taken"], if Input::from_name(expected).is_some() { "input" } else { "output" });
    }
    let attn = report["entries"].as_array().unwrap().iter().find(|entry| entry["tensor"] == "k_proj").unwrap();
    assert_eq!(attn["candidates"][0]["equal"], attn["candidates"][0]["elements"]);
    assert!(attn["candidates"][1]["relative"].as_f64().unwrap() > 0.3, "{attn}");
    let made = Bundle::open(&scratch.path("made")).unwrap().captures.unwrap();
    assert_eq!(made.tensors[&TensorId::AttnOut], bench().captures.tensors[&TensorId::AttnOut]);
    assert_eq!(made.tensors.len(), 6);
    assert_eq!(code(&run(scratch.0.path(), &["gate", "made"])), 0);
}

#[test]
fn a_wrong_device_is_imported_and_fails_where_it_is_wrong() {
    let scratch = Scratch::new();
    let mut device = bench().device();
    device.map(TensorId::AttnProjFp32, |row, column, x| if (row, column) == (0, 5) { x + 9.0 } else { x }).follow();
    let mut wrong = entries(bench());
    for (id, captured) in &device.captures().tensors {
        let Captured::Values(tensor) = captured else { continue };
        wrong.get_mut(id.name()).unwrap().bytes = tensor_bytes(tensor);
    }
    scratch.dump(&[("a", &wrong["out"]), ("b", &wrong["attn_proj_fp32"]), ("c", &wrong["attn_out"])]);
    let output = scratch.import(&[]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.contains("by its content") && told.contains("next best"), "{told}");
    let gate = run(scratch.0.path(), &["gate", "made"]);
    assert_eq!(code(&gate), 1);
    let told = String::from_utf8(gate.stdout).unwrap();
    assert!(told.contains("First divergence: attn_proj_fp32"), "{told}");
}

/// Columns of a table.
fn columns(table: &Array, from: usize, to: usize) -> Array {
    let row = 4 * table.shape[1];
    let bytes = table.bytes.chunks_exact(row).flat_map(|row| &row[4 * from..4 * to]).copied().collect();
    Array { dtype: table.dtype, shape: vec![table.shape[0], to - from], bytes }
}

#[test]
fn tables_that_cannot_be_told_apart_are_refused_and_named() {
    let scratch = Scratch::new();
    let entries = entries(bench());
    let (cos, sin) = (&entries["rope_cos"], &entries["rope_sin"]);
    let halves = [columns(cos, 0, 64), columns(sin, 0, 64), columns(cos, 64, 128), columns(sin, 64, 128)];
    // The order of the kernel's arguments: cosines and sines by turns.
    let mut dump: Vec<(&str, &Array)> = ["a1", "a2", "a3", "a4"].into_iter().zip(&halves).collect();
    dump.push(("a7", &entries["out"]));
    scratch.dump(&dump);
    let why = scratch.refused(&[]);
    assert!(why.contains("`a1`, `a3` are each one of rope_cos.lo and rope_cos.hi"), "{why}");
    assert!(why.contains("`a2`, `a4` are each one of rope_sin.lo and rope_sin.hi") && why.contains("--map"), "{why}");

    let map = |text: &str| {
        fs::write(scratch.path("map.yaml"), text).unwrap();
        ["--map", "map.yaml"]
    };
    let right = map("a1: rope_cos.lo\na2: rope_sin.lo\na3: rope_cos.hi\na4: rope_sin.hi\n");
    assert_eq!(code(&scratch.import(&right)), 0);
    fs::remove_dir_all(scratch.path("made")).unwrap();
    // As one reads them who expects all cosines first.
    let wrong = map("a1: rope_cos.lo\na2: rope_cos.hi\na3: rope_sin.lo\na4: rope_sin.hi\n");
    let why = scratch.refused(&wrong);
    assert!(why.contains("`a2` is not the rope_cos.hi that the case describes"), "{why}");
    assert!(why.contains("with `a4` beside it cos^2 + sin^2 is not 1 at"), "{why}");
}

#[test]
fn names_and_contents_that_contradict_each_other_are_refused() {
    let scratch = Scratch::new();
    let entries = entries(bench());
    let with = |dump: &[(&str, &Array)]| {
        scratch.dump(dump);
        scratch.refused(&[])
    };
    let why = with(&[("k_proj", &entries["v_proj"]), ("out", &entries["out"])]);
    assert!(why.contains("`k_proj` is called k_proj and holds v_proj: 8192 of 8192 elements"), "{why}");
    let why = with(&[("q_norm_weight", &entries["k_norm_weight"]), ("out", &entries["out"])]);
    assert!(
        why.contains("`q_norm_weight` is not the q_norm_weight that") && why.contains("holds k_norm_weight"),
        "{why}"
    );

    let mut other = entries["wk"].clone();
    other.bytes[70_000] ^= 1;
    let why = with(&[("step0.wk", &other), ("out", &entries["out"])]);
    assert!(why.contains("1 of 1310720 elements differ, first [136, 368]"), "{why}");
    let f32s = Array { dtype: Dtype::F32, shape: vec![16, 2560], bytes: vec![0; 4 * 16 * 2560] };
    let why = with(&[("out", &f32s)]);
    assert!(why.contains("`out` is F32 [16, 2560], but out is BF16 [16, 2560]"), "{why}");
    let mut late = entries["out"].clone();
    late.bytes[0] ^= 1;
    let why = with(&[("a", &entries["out"]), ("b", &late)]);
    assert!(why.contains("`a` and `b` are both out and differ"), "{why}");
    let why = with(&[("a", &f32s), ("b", &f32s)]);
    assert!(
        why.contains("no output of the case was found") && why.contains("a, b of F32 [16, 2560] cannot be told"),
        "{why}"
    );

    fs::write(scratch.path("map.yaml"), "nowhere: out\n").unwrap();
    assert!(scratch.refused(&["--map", "map.yaml"]).contains("`nowhere`, which is no entry"));
    fs::write(scratch.path("map.yaml"), "a: outt\n").unwrap();
    assert!(scratch.refused(&["--map", "map.yaml"]).contains("`outt`, which is no tensor"));
    // Equal ones are one; what the map leaves out is left out.
    fs::write(scratch.path("map.yaml"), "b: ignore\n").unwrap();
    scratch.dump(&[("a", &entries["out"]), ("b", &late), ("c", &entries["out"])]);
    assert_eq!(code(&scratch.import(&["--map", "map.yaml"])), 0);
}

/// An argument dump: each record a name of the contract, its role and stage, and what becomes of it.
fn arguments(dir: &Path, records: &[(&Array, &str, &str, &str)]) {
    fs::create_dir_all(dir).unwrap();
    let mut payload = Vec::new();
    let args: Vec<Value> = records
        .iter()
        .enumerate()
        .map(|(index, (array, role, stage, fate))| {
            let begin = payload.len();
            payload.extend(&array.bytes);
            let dtype = match array.dtype {
                Dtype::BF16 => "bfloat16",
                Dtype::F32 => "float32",
                _ => "int8",
            };
            let mut stride = 1;
            let mut strides: Vec<usize> = array.shape.iter().rev().map(|size| (stride, stride *= size).0).collect();
            strides.reverse();
            json!({
                "task_id": format!("0x{index:x}"), "func_id": [3], "role": role, "stage": stage, "arg_index": 0,
                "kind": "tensor", "dtype": dtype, "shape": array.shape, "strides": strides, "start_offset": 0,
                "is_contiguous": true, "truncated": *fate == "truncated", "overwritten": *fate == "overwritten",
                "bin_offset": begin, "bin_size": array.bytes.len(),
            })
        })
        .collect();
    let count = |fate: &str| records.iter().filter(|record| record.3 == fate).count();
    let manifest = json!({
        "run_dir": "x", "bin_format": {"type": "logical_contiguous", "byte_order": "little_endian"},
        "dump_args_level": 2, "total_args": args.len(), "truncated_args": count("truncated"), "dropped_records": 1,
        "dropped_overwrite": count("overwritten"), "bin_file": "args.bin", "args": args,
    });
    fs::write(dir.join("args_dump.json"), serde_json::to_vec(&manifest).unwrap()).unwrap();
    fs::write(dir.join("args.bin"), payload).unwrap();
}

#[test]
fn records_that_the_runtime_gave_up_are_no_data() {
    let scratch = Scratch::new();
    let entries = entries(bench());
    let (out, attn, k) = (&entries["out"], &entries["attn_out"], &entries["k_cache"]);
    let mut after = k.clone();
    let written = bench().captures.k_written.as_ref().unwrap();
    let (rows, values) = (written.rows.values().unwrap(), written.values.values().unwrap());
    let patch = |cache: &mut Array, count: usize| {
        for (&row, values) in rows.iter().zip(values.rows()).take(count) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            cache.bytes[row as usize * 256..(row as usize + 1) * 256].copy_from_slice(&bytes);
        }
    };
    let mut half = k.clone();
    patch(&mut half, 3);
    patch(&mut after, rows.len());
    let stale = Array { bytes: vec![0x3f; out.bytes.len()], ..out.clone() };
    arguments(
        &scratch.path("args_dump"),
        &[
            (k, "inout", "before_dispatch", ""),
            (&half, "inout", "after_completion", ""),
            (&after, "inout", "after_completion", ""),
            (&stale, "output", "before_dispatch", ""),
            (attn, "output", "after_completion", "truncated"),
            (out, "output", "after_completion", ""),
            (&entries["k_proj"], "output", "after_completion", "overwritten"),
        ],
    );
    let output = scratch.import_of("args_dump", &["--format", "json"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let made = Bundle::open(&scratch.path("made")).unwrap().captures.unwrap();
    assert_eq!(made.tensors.keys().copied().collect::<Vec<_>>(), [TensorId::Out]);
    assert_eq!(made.k_written, bench().captures.k_written, "of a cache the latest, which holds all rows");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let why = |n: usize| report["entries"][n]["why"].as_str().unwrap().to_owned();
    assert!(why(5).contains("truncated") && why(6).contains("overwritten"), "{report}");
    assert!(!report["remarks"].as_array().unwrap().is_empty(), "{report}");
    // What the runtime gave up is not made data by a map either.
    let cut = report["entries"][5]["name"].as_str().unwrap();
    fs::write(scratch.path("map.yaml"), format!("{cut:?}: attn_out\n")).unwrap();
    fs::remove_dir_all(scratch.path("made")).unwrap();
    let output = scratch.import_of("args_dump", &["--map", "map.yaml"]);
    assert_eq!(code(&output), 2);
    assert!(stderr(&output).contains("holds no usable data for it"), "{}", stderr(&output));
}

#[test]
fn captures_of_our_own_keep_the_rows_written_into_caches() {
    let scratch = Scratch::new();
    let bytes = fs::read(Bench::path("mini/active2").join(device::CAPTURES_FILE)).unwrap();
    fs::write(scratch.path("dump.safetensors"), &bytes).unwrap();
    let output = scratch.import(&[]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let made = Bundle::open(&scratch.path("made")).unwrap().captures.unwrap();
    assert_eq!((&made.k_written, &made.v_written), (&bench().captures.k_written, &bench().captures.v_written));

    // Called so, and something else.
    let entries = entries(bench());
    scratch.dump(&[("out", &entries["out"]), ("k_written_rows", &entries["out"])]);
    fs::remove_dir_all(scratch.path("made")).unwrap();
    let said = scratch.refused(&[]);
    assert!(said.contains("`k_written_rows` is BF16 [16, 2560]") && said.contains("I64 of 1 dimensions"), "{said}");
}

#[test]
fn a_cache_that_nobody_wrote_is_not_taken_for_an_input() {
    let scratch = Scratch::new();
    let entries = entries(bench());
    scratch.dump(&[("out", &entries["out"]), ("k_cache", &entries["k_cache"])]);
    let said = scratch.refused(&[]);
    assert!(said.contains("`k_cache` is k_cache as it was before the run") && said.contains("`ignore`"), "{said}");
    // Where the user says that it is one, it is.
    fs::write(scratch.path("map.yaml"), "k_cache: ignore\n").unwrap();
    let output = scratch.import(&["--map", "map.yaml"]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
}
