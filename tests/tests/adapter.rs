//! The runner for the kernel library: its selftest, its dry run behind the gate, and a stand-in for the library, for
//! which PyTorch has to be there. The test runs the interpreter that `ASSAY_PYTHON` names (else `python3`) and skips
//! what that cannot run. No kernel is run: the runner is not verified on hardware.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use assay_tests::{Bench, assay};
use serde_json::Value;

/// A library whose kernel copies its input, and writes a cache row that it must not.
const RUNTIME: &str = "class RunConfig:\n    def __init__(self, **options):\n        self.options = options\n";
const BACKEND: &str =
    "class BackendType:\n    Ascend910B, Ascend950 = 1, 2\n\ndef set_backend_type(backend):\n    pass\n";
const KERNEL: &str = r#"
HIDDEN = 2560
def _decode_layer_test_entry(
    hidden_states, input_rms_weight, wq, wk, wv, wq_scale, wk_scale, wv_scale, q_norm_weight, k_norm_weight, seq_lens,
    active_batch, block_table, slot_mapping, rope_cos, rope_sin, k_cache, v_cache, wo, wo_scale, w_gate, w_up,
    w_gate_scale, w_up_scale, w_down, post_rms_weight, out,
):
    assert active_batch.item() == 2 and out.isnan().all()
    out.copy_(hidden_states)
    k_cache[5] = 1.5
class Compiled:
    output_dir = "."
    def __init__(self, entry):
        self.entry = entry
    def compile(self, *values, config):
        return self
    def __call__(self, *values, config):
        assert config.options["device_id"] == 3
        self.entry(*values)
_decode_layer_test_entry = Compiled(_decode_layer_test_entry)
"#;

fn interpreter() -> String {
    std::env::var("ASSAY_PYTHON").ok().filter(|name| !name.is_empty()).unwrap_or("python3".to_owned())
}

fn python(args: &[&str]) -> Option<Output> {
    let mut command = Command::new(interpreter());
    command.env("PYTHONDONTWRITEBYTECODE", "1").args(args).stdin(Stdio::null()).output().ok()
}

/// The runner, where there is an interpreter for it.
fn runner() -> Option<PathBuf> {
    let script =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/adapters/qwen3_decode.py").canonicalize().unwrap();
    let found = python(&["-c", "import sys; sys.exit(sys.version_info < (3, 8))"]);
    if found.is_some_and(|found| found.status.success()) {
        return Some(script);
    }
    eprintln!("skipped: there is no Python 3.8");
    None
}

/// Judges what the runner makes of mini/active2.
fn gate(script: &Path, options: &str) -> (i32, Value) {
    let (python, script) = (interpreter(), script.display());
    let run = format!("PYTHONDONTWRITEBYTECODE=1 {python} '{script}' {options} --in {{inputs}} --out {{outputs}}");
    let mut command = Command::new(assay());
    command.args(["gate", "--format", "json", "--run", &run]).arg(Bench::path("mini/active2"));
    let output = command.env_remove("GITHUB_STEP_SUMMARY").stdin(Stdio::null()).output().unwrap();
    (output.status.code().unwrap(), serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn the_runner_passes_its_selftest() {
    let Some(script) = runner() else { return };
    let output = python(&[script.to_str().unwrap(), "--selftest"]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8(output.stdout).unwrap().ends_with("selftest: all well (no kernel was run)\n"));
}

#[test]
fn a_dry_run_gives_outputs_that_are_judged_and_fail() {
    let Some(script) = runner() else { return };
    let (code, report) = gate(&script, "--dry-run");
    assert_eq!((code, report["cases"][0]["first_divergence"].as_str()), (1, Some("k_written_rows")), "{report}");
    // Without a library there is no kernel, and that is no failure of one.
    let (code, report) = gate(&script, "");
    assert_eq!(code, 125);
    let detail = report["cases"][0]["checks"][0]["detail"].as_str().unwrap();
    assert!(detail.contains("error: --library: name the directory"), "{detail}");
}

#[test]
fn a_stand_in_for_the_library_is_called_as_the_library_is() {
    let Some(script) = runner() else { return };
    if !python(&["-c", "import torch"]).is_some_and(|found| found.status.success()) {
        eprintln!("skipped: {} has no PyTorch", interpreter());
        return;
    }
    let library = tempfile::tempdir().unwrap();
    let (pypto, models) = (library.path().join("pypto"), library.path().join("models/qwen3/14b"));
    fs::create_dir_all(&pypto).unwrap();
    fs::create_dir_all(&models).unwrap();
    for (file, text) in [("__init__.py", ""), ("backend.py", BACKEND), ("runtime.py", RUNTIME)] {
        fs::write(pypto.join(file), text).unwrap();
    }
    let kernel = models.join("decode_layer_a8w8.py");
    fs::write(&kernel, KERNEL).unwrap();
    let options = format!("--library '{}' -d 3", library.path().display());
    let (code, report) = gate(&script, &options);
    assert_eq!(code, 1, "{report}");
    let checks = report["cases"][0]["checks"].as_array().unwrap();
    let rows = checks.iter().find(|check| check["name"] == "kv_written_rows").unwrap();
    assert_eq!(rows["verdict"], "fail", "{rows}");
    let tensor = |name: &str| {
        report["cases"][0]["tensors"].as_array().unwrap().iter().find(|tensor| tensor["name"] == name).unwrap().clone()
    };
    assert_eq!(tensor("k_written_rows")["elements"].as_u64().map(|count| count > 0), Some(true));
    assert_eq!(tensor("out")["nonfinite"], 0, "out was written");

    // Kernels are built for their sizes, and revisions differ in what they take.
    fs::write(&kernel, KERNEL.replace("HIDDEN = 2560", "HIDDEN = 5120")).unwrap();
    let (code, report) = gate(&script, &options);
    let detail = report["cases"][0]["checks"][0]["detail"].as_str().unwrap();
    assert!(code == 125 && detail.contains("built for hidden_size 5120, the case has 2560"), "{detail}");
    fs::write(&kernel, KERNEL.replace("wo, wo_scale", "k_cache_scale, wo, wo_scale")).unwrap();
    let (code, report) = gate(&script, &options);
    let detail = report["cases"][0]["checks"][0]["detail"].as_str().unwrap();
    assert!(code == 125 && detail.contains("the entry takes k_cache_scale"), "{detail}");
}
