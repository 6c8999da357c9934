//! `assay gate --run` with runners that replay a recording, fail as devices do, hang, write half a file or none, and
//! give other bits from run to run.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use assay_tests::program::{code, stderr};
use assay_tests::{Bench, assay};
use cases::Input;
use device::{CAPTURES_FILE, Captures, Layout, write_captures};
use reference::TensorId;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Where runs leave what they do not remove.
struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        Self(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn start(&self, args: &[&str]) -> Command {
        let mut command = Command::new(assay());
        command.arg("gate").args(args).current_dir(self.0.path()).stdin(Stdio::null());
        command.env_remove("GITHUB_STEP_SUMMARY").env_remove("CLICOLOR_FORCE").env("TMPDIR", self.path("tmp"));
        command
    }

    /// Runs the gate; nothing is left of it.
    fn gate(&self, args: &[&str]) -> Output {
        let output = self.start(args).output().unwrap();
        assert_eq!(fs::read_dir(self.path("tmp")).unwrap().count(), 0, "nothing is left in the temporary directory");
        output
    }

    /// The exit code and the report on one case.
    fn judge(&self, case: &str, run: &str, more: &[&str]) -> (i32, Value) {
        let case = bundle(case);
        let output = self.gate(&[&["--format", "json", "--run", run, &case], more].concat());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)));
        (code(&output), report)
    }
}

fn bundle(name: &str) -> String {
    Bench::path(name).canonicalize().unwrap().display().to_string()
}

/// Copies the recording of the case.
fn replay() -> String {
    format!("cp {}/{{name}}/captures.safetensors {{outputs}}", bundle("mini/full").strip_suffix("/mini/full").unwrap())
}

/// The first check of the only case.
fn first_check(report: &Value) -> (&str, &str) {
    let check = &report["cases"][0]["checks"][0];
    assert_eq!(check["verdict"], "unjudged");
    (check["name"].as_str().unwrap(), check["detail"].as_str().unwrap())
}

#[test]
fn a_replayed_recording_passes_as_the_recording_does() {
    let scratch = Scratch::new();
    let (code, report) = scratch.judge("mini/active2", &replay(), &["--repeat", "3"]);
    assert_eq!(code, 0, "{report}");
    let case = &report["cases"][0];
    assert_eq!(case["name"], "mini/active2");
    assert!(case["source"].as_str().unwrap().starts_with("of the command `cp "), "{case}");
    let check = case["checks"].as_array().unwrap().iter().find(|check| check["name"] == "repeatable").unwrap();
    assert_eq!(check["verdict"], "pass");
    assert!(check["detail"].as_str().unwrap().ends_with("tensors of 3 runs are equal, bit for bit"), "{check}");
    // A device of another revision than the recorded one is held to the contract, not to the recording.
    let values = case["checks"].as_array().unwrap().iter().find(|check| check["name"] == "kv_values").unwrap();
    assert!(!values["detail"].as_str().unwrap().contains("SHA-256"), "{values}");
}

#[test]
fn suites_shards_and_reports_go_with_a_command() {
    let scratch = Scratch::new();
    let args = ["--suite", "default", "--shard", "2/3", "--explain", "--html", "page.html", "--junit", "cases.xml"];
    let output = scratch.gate(&[&["--run", &replay()], args.as_slice()].concat());
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    let told = String::from_utf8(output.stdout).unwrap();
    assert!(told.contains("PASS mini/active2 ") && told.contains("PASS mini/tokens1 "), "{told}");
    assert!(told.contains("outputs: of the command `cp "), "{told}");
    assert!(fs::read_to_string(scratch.path("page.html")).unwrap().contains("of the command"));
    assert!(scratch.path("cases.xml").exists());
}

#[test]
fn device_errors_are_named_and_are_no_accuracy_failure() {
    let scratch = Scratch::new();
    let run = "echo loading; echo 'aclrtSynchronizeStreamWithTimeout (AICPU) failed: 507018' >&2; exit 1";
    let (code, report) = scratch.judge("mini/active2", run, &[]);
    assert_eq!((code, report["verdict"].as_str()), (125, Some("unjudged")));
    let (name, detail) = first_check(&report);
    assert_eq!(name, "device");
    assert!(detail.starts_with("the device reported RT_AICPU_EXCEPTION (507018): an AI CPU task raised"), "{detail}");
    assert!(detail.contains("the command exited with 1; its last lines: loading | aclrt"), "{detail}");

    let run = "echo 'ret=507018'; echo 'runtime failed: orch_error_code=2 sched_error_code=0'; exit 3";
    let (code, report) = scratch.judge("mini/active2", run, &[]);
    let (_, detail) = first_check(&report);
    assert_eq!(code, 125);
    assert!(detail.starts_with("the device reported HEAP_RING_DEADLOCK (2): the ring"), "{detail}");
    assert!(detail.contains("; also RT_AICPU_EXCEPTION (507018); "), "{detail}");

    let (code, report) = scratch.judge("mini/active2", "echo FATAL: PTO2_ERROR_HEAP_RING_DEADLOCK; false", &[]);
    assert_eq!(code, 125);
    assert!(first_check(&report).1.contains("HEAP_RING_DEADLOCK"), "{report}");

    // Outputs of a device that reported an error are not judged, whatever the runner makes of it.
    let run = format!("{}; echo ret=507015", replay());
    let (code, report) = scratch.judge("mini/active2", &run, &[]);
    assert_eq!(code, 125);
    assert!(first_check(&report).1.contains("the command ended well all the same"), "{report}");
}

#[test]
fn a_runner_that_fails_hangs_or_writes_nothing_is_unjudged() {
    let scratch = Scratch::new();
    let (code, report) = scratch.judge("mini/active2", "echo 1; echo two >&2; exit 7", &[]);
    assert_eq!(code, 125);
    assert_eq!(first_check(&report), ("run", "the command exited with 7; its last lines: 1 | two"));
    let (code, report) = scratch.judge("mini/active2", "exit 138", &[]);
    assert_eq!(code, 125);
    assert!(first_check(&report).1.contains("may have been 507018 RT_AICPU_EXCEPTION"), "{report}");
    let (code, report) = scratch.judge("mini/active2", "no-such-runner {inputs}", &[]);
    assert_eq!(code, 125);
    assert!(first_check(&report).1.contains("exited with 127"), "{report}");

    let (code, report) = scratch.judge("mini/active2", "true", &[]);
    assert_eq!(code, 125);
    assert!(first_check(&report).1.starts_with("the command ended well and wrote no outputs"), "{report}");

    let started = Instant::now();
    let late = scratch.path("late");
    let run = format!("echo still here; sh -c 'sleep 4; touch {}' & sleep 60", late.display());
    let (code, report) = scratch.judge("mini/active2", &run, &["--timeout", "1"]);
    assert!(started.elapsed() < Duration::from_secs(30));
    assert_eq!(code, 125);
    let detail = first_check(&report).1;
    assert!(detail.starts_with("the command took longer than 1 s and was ended"), "{detail}");
    assert!(detail.ends_with("its last lines: still here"), "{detail}");
    sleep(Duration::from_secs(4));
    assert!(!late.exists(), "what the command started has ended with it");
}

#[test]
fn a_file_that_is_half_written_or_of_another_case_is_refused() {
    let scratch = Scratch::new();
    let half = format!("{}; truncate -s 100000 {{outputs}}", replay());
    for (run, what) in [
        (half.as_str(), "the file is cut short"),
        ("echo nothing > {outputs}", "cut short"),
        (&format!("cp {}/captures.safetensors {{outputs}}", bundle("mini/tokens1")), "unknown tensor"),
    ] {
        let (code, report) = scratch.judge("mini/active2", run, &[]);
        assert_eq!((code, report["verdict"].as_str()), (2, Some("error")), "{run}");
        let message = report["message"].as_str().unwrap();
        assert!(message.contains(what) && message.contains("--keep DIR"), "{message}");
    }
    // It stops at once: the second case is not run.
    let run = format!("echo {{name}} >> {}; echo > {{outputs}}", scratch.path("ran").display());
    let (first, second) = (bundle("mini/active1"), bundle("mini/active2"));
    assert_eq!(code(&scratch.gate(&["--run", &run, &first, &second])), 2);
    assert_eq!(fs::read_to_string(scratch.path("ran")).unwrap(), "mini/active1\n");
}

#[test]
fn a_failure_wins_over_a_fault_of_the_device_and_that_over_a_pass() {
    let scratch = Scratch::new();
    let bench = Bench::recorded("mini/active1");
    let mut device = bench.device();
    device.map(TensorId::AttnProjFp32, |row, column, x| if (row, column) == (0, 5) { x + 1.0 } else { x });
    write_captures(&scratch.path("wrong"), &device.captures()).unwrap();
    let run = format!(
        "case {{name}} in mini/active1) cp {} {{outputs}} ;; mini/full) exit 1 ;; *) {} ;; esac",
        scratch.path("wrong").display(),
        replay()
    );
    let cases = ["mini/active2", "mini/full", "mini/active1"].map(bundle);
    let of = |cases: &[String]| {
        let mut args = vec!["--run", &run];
        args.extend(cases.iter().map(String::as_str));
        let output = scratch.gate(&args);
        (code(&output), String::from_utf8(output.stdout).unwrap())
    };
    assert_eq!(of(&cases[..1]).0, 0);
    let (code, told) = of(&cases[..2]);
    assert_eq!(code, 125, "{told}");
    assert!(told.contains("UNJUDGED mini/full") && told.contains("Not judged: the command exited with 1"), "{told}");
    let (code, told) = of(&cases);
    assert_eq!(code, 1, "{told}");
    assert!(told.contains("First divergence: attn_proj_fp32"), "{told}");
}

#[test]
fn a_kernel_that_gives_other_bits_from_run_to_run_fails_by_name() {
    let scratch = Scratch::new();
    let bench = Bench::recorded("mini/active1");
    // Right each time: one bit of a sum whose order is free.
    let mut device = bench.device();
    device.nudge(TensorId::InvRmsStates, |row, _| u32::from(row == 3)).follow();
    write_captures(&scratch.path("other"), &device.captures()).unwrap();
    let seen = scratch.path("seen");
    let run = format!(
        "if [ -e {0} ]; then cp {1} {{outputs}}; else {2}; touch {0}; fi",
        seen.display(),
        scratch.path("other").display(),
        replay()
    );
    let (code, report) = scratch.judge("mini/active1", &run, &["--repeat", "3"]);
    assert_eq!(code, 1, "{report}");
    let case = &report["cases"][0];
    let check = case["checks"].as_array().unwrap().iter().find(|check| check["name"] == "repeatable").unwrap();
    assert_eq!((check["verdict"].as_str(), case["first_divergence"].as_str()), (Some("fail"), Some("inv_rms_states")));
    let detail = check["detail"].as_str().unwrap();
    assert!(detail.starts_with("run 2 and run 1 differ at inv_rms_states: 1 of 16 elements, first [3, 0]"), "{detail}");

    // One that fails in a later run cannot be said to repeat.
    let run = format!("if [ -e {0} ]; then exit 9; else {1}; touch {0}; fi", scratch.path("once").display(), replay());
    let (code, report) = scratch.judge("mini/active1", &run, &["--repeat", "2"]);
    assert_eq!(code, 125, "{report}");
    assert!(report["cases"][0]["coverage"][0].as_str().unwrap().starts_with("run 2 of 2: the command exited with 9"));
}

#[test]
fn every_run_starts_from_the_same_inputs_and_leaves_nothing_behind() {
    let scratch = Scratch::new();
    // Works in place: it writes into its inputs, and fails where it finds its own mark in them.
    let marked = "if tail -c 4 {inputs} | grep -q MARK; then echo marked; exit 9; fi; printf MARK >> {inputs}";
    let counted = "ls $(dirname {outputs}) | grep -c captures";
    let run = format!("{marked}; {}; {counted} >> {}", replay(), scratch.path("counts").display());
    let (code, report) = scratch.judge("mini/active1", &run, &["--repeat", "4"]);
    assert_eq!(code, 0, "{report}");
    // The first run's, which the others are compared with, and the run's own.
    assert_eq!(fs::read_to_string(scratch.path("counts")).unwrap(), "1\n2\n2\n2\n");
}

#[test]
fn a_command_that_takes_its_log_away_is_unjudged_and_a_link_is_kept_as_what_it_leads_to() {
    let scratch = Scratch::new();
    let (code, report) = scratch.judge("mini/active1", &format!("{}; rm $(dirname {{outputs}})/log", replay()), &[]);
    let (name, detail) = first_check(&report);
    assert_eq!((code, name), (125, "run"));
    assert!(detail.contains("log") && detail.contains("cannot be read any more"), "{detail}");

    let kept = scratch.path("kept");
    let run = replay().replacen("cp ", "ln -s ", 1);
    let (code, report) = scratch.judge("mini/active1", &run, &["--keep", kept.to_str().unwrap()]);
    assert_eq!(code, 0, "{report}");
    let file = kept.join("mini_active1").join(CAPTURES_FILE);
    assert!(fs::symlink_metadata(&file).unwrap().is_file());
}

#[test]
fn coloured_errors_are_seen_and_counts_are_none() {
    let scratch = Scratch::new();
    let says = |text: &str| format!("{}; printf '{text}'", replay());
    let (code, report) = scratch.judge("mini/active1", &says(r"\033[31mERROR: ret=\033[0m507018\n"), &[]);
    assert_eq!((code, first_check(&report).0), (125, "device"));
    let (code, report) = scratch.judge("mini/active1", &says(r"10 of 20\rret=507015\n"), &[]);
    assert_eq!((code, first_check(&report).0), (125, "device"));
    let long = format!("{}; head -c 70000 /dev/zero | tr '\\0' x; echo ' 507018 bytes'", replay());
    let (code, report) = scratch.judge("mini/active1", &long, &[]);
    assert_eq!(code, 0, "{report}");
    // What any program ends with says nothing of a device.
    let (code, report) = scratch.judge("mini/active1", "exit 1", &[]);
    assert_eq!(code, 125);
    assert!(!first_check(&report).1.contains("107009"), "{report}");
}

/// The reference as a runner: it reads whole inputs and gives whole caches.
fn whole_caches(inputs: &Path) -> Vec<u8> {
    let bench = Bench::recorded("mini/active2");
    let bytes = fs::read(inputs).unwrap();
    let given = SafeTensors::deserialize(&bytes).unwrap();
    let recorded = fs::read(Bench::path("mini/active2").join(CAPTURES_FILE)).unwrap();
    let recorded = SafeTensors::deserialize(&recorded).unwrap();
    let mut tensors = vec![("out".to_owned(), recorded.tensor("out").unwrap().data().to_vec(), vec![16, 2560])];
    for (input, written) in [(Input::KCache, &bench.captures.k_written), (Input::VCache, &bench.captures.v_written)] {
        let view = given.tensor(input.name()).unwrap();
        assert_eq!(view.data(), bench.inputs.bytes(input).unwrap());
        let (mut cache, written) = (view.data().to_vec(), written.as_ref().unwrap());
        let (rows, values) = (written.rows.values().unwrap(), written.values.values().unwrap());
        for (&row, values) in rows.iter().zip(values.rows()) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let at = row as usize * bytes.len();
            cache[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        tensors.push((input.name().to_owned(), cache, view.shape().to_vec()));
    }
    let views = tensors
        .iter()
        .map(|(name, bytes, shape)| (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

#[test]
fn whole_caches_are_judged_and_what_is_kept_is_a_bundle() {
    let scratch = Scratch::new();
    // First the inputs alone, for this test to play the kernel; the directory that is kept says how it went.
    let inputs = scratch.path("given");
    let (first, _) = scratch.judge("mini/active2", &format!("cp {{inputs}} {}", inputs.display()), &[]);
    assert_eq!(first, 125);
    fs::write(scratch.path("made"), whole_caches(&inputs)).unwrap();
    let run = format!("echo said; cp {} $ASSAY_OUTPUTS", scratch.path("made").display());
    let (code_, report) = scratch.judge("mini/active2", &run, &["--keep", "kept"]);
    assert_eq!(code_, 0, "{report}");
    let names: Vec<&str> =
        report["cases"][0]["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"k_written_rows") && names.contains(&"v_written_values"), "{names:?}");

    let kept = scratch.path("kept/mini_active2");
    assert_eq!(fs::read_to_string(kept.join("log")).unwrap(), "said\n");
    let bench = Bench::recorded("mini/active2");
    let captures = Captures::open(&kept.join(CAPTURES_FILE), &bench.case.geometry, &Layout::of(&bench.case)).unwrap();
    assert_eq!(captures.k_written, bench.captures.k_written);
    assert_eq!(code(&scratch.gate(&["kept"])), 0);
    // It is not written over.
    let again = scratch.gate(&["--run", &run, "--keep", "kept", &bundle("mini/active2")]);
    assert_eq!(code(&again), 2);
    assert!(stderr(&again).contains("is not empty"), "{}", stderr(&again));
}

#[test]
fn flags_of_a_command_come_with_one() {
    let scratch = Scratch::new();
    for args in [["--repeat", "2"], ["--timeout", "5"], ["--keep", "kept"], ["--run", " "]] {
        let output = scratch.gate(&[&args[..], &[&bundle("mini/active2")]].concat());
        assert_eq!(code(&output), 2, "{args:?}");
    }
    assert!(!scratch.path("kept").exists());
}

#[test]
fn an_interrupt_ends_the_command_and_leaves_nothing() {
    let scratch = Scratch::new();
    let (running, survived) = (scratch.path("running"), scratch.path("survived"));
    let run = format!("touch {}; sleep 5; touch {}", running.display(), survived.display());
    let case = bundle("mini/active2");
    let mut gate = scratch.start(&["--run", &run, "--keep", "kept", &case]);
    let child = gate.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !running.exists() {
        assert!(started.elapsed() < Duration::from_secs(60), "the command does not start");
        sleep(Duration::from_millis(20));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(code(&output), 125, "{}", stderr(&output));
    assert_eq!(fs::read_dir(scratch.path("tmp")).unwrap().count(), 0);
    assert_eq!(fs::read_dir(scratch.path("kept")).unwrap().count(), 0);
    sleep(Duration::from_secs(5));
    assert!(!survived.exists());
}
