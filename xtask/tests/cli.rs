//! The program from outside: exit codes, what goes to which stream, and files that are whole or not there.
//! Cases are made by the program itself; none of them has outputs, so the best there is to say is 125.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn assay(args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(args).current_dir(dir).env_remove("GITHUB_STEP_SUMMARY").env_remove("CLICOLOR_FORCE");
    command.stdin(Stdio::null()).output().unwrap()
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn refusal(output: &Output) -> String {
    assert_eq!(code(output), 2, "{}", stderr(output));
    let read: serde_json::Value = serde_json::from_str(&stdout(output)).unwrap();
    let keys: Vec<_> = read.as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["verdict", "message", "cases"]);
    assert_eq!((&read["verdict"], &read["cases"]), (&"error".into(), &serde_json::json!([])));
    read["message"].as_str().unwrap().to_owned()
}

/// A directory with one case without outputs, `a/case.yaml`.
fn with_case() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("a")).unwrap();
    let made = assay(&["case", "new", "--name", "a", "--seq-lens", "130,5", "--output", "a/case.yaml"], dir.path());
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    assert!(made.stdout.is_empty());
    dir
}

#[test]
fn a_case_without_outputs_cannot_be_judged() {
    let dir = with_case();
    for path in ["a", "a/case.yaml", "."] {
        let run = assay(&["gate", path, "--format", "json"], dir.path());
        assert_eq!(code(&run), 125, "{path}: {}", stderr(&run));
        let read: serde_json::Value = serde_json::from_str(&stdout(&run)).unwrap();
        assert_eq!(read["verdict"], "unjudged");
        assert_eq!(read["cases"][0]["name"], "a");
        assert!(read["cases"][0]["path"].as_str().unwrap().ends_with("a/case.yaml"));
        assert!(run.stderr.is_empty(), "no progress in a pipe: {}", stderr(&run));
    }
    let human = stdout(&assay(&["gate", "a"], dir.path()));
    assert!(human.contains("UNJUDGED a") && human.contains("exit code 125"), "{human}");
    assert!(!human.contains('\u{1b}'), "no colour in a pipe: {human:?}");
}

#[test]
fn reports_are_written_beside_standard_output() {
    let dir = with_case();
    let run = assay(&["gate", "a", "--format", "json", "--junit", "r.xml"], dir.path());
    assert_eq!(code(&run), 125);
    let xml = fs::read_to_string(dir.path().join("r.xml")).unwrap();
    assert!(xml.contains("<testsuite name=\"a\"") && xml.contains("<skipped"), "{xml}");

    let summary = dir.path().join("summary.md");
    fs::write(&summary, "before\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(["gate", "a", "--format", "github"]).current_dir(dir.path()).env("GITHUB_STEP_SUMMARY", &summary);
    let run = command.output().unwrap();
    assert_eq!(fs::read_to_string(&summary).unwrap(), format!("before\n{}", stdout(&run)));

    let missing = assay(&["gate", "a", "--junit", "no/such/r.xml"], dir.path());
    assert_eq!(code(&missing), 2);
    assert!(stderr(&missing).contains("no/such is not a directory"), "{}", stderr(&missing));
    assert!(missing.stdout.is_empty());
}

#[test]
fn report_files_replace_no_input() {
    let dir = with_case();
    let captures = dir.path().join("a/captures.safetensors");
    fs::write(&captures, "no captures").unwrap();
    fs::write(dir.path().join("policy.yaml"), "{out: rne}\n").unwrap();
    let case = fs::read(dir.path().join("a/case.yaml")).unwrap();
    for flag in ["--junit", "--html"] {
        for file in ["a/case.yaml", "a/../a/captures.safetensors", "policy.yaml"] {
            let run = assay(&["gate", "a", "--policy", "policy.yaml", flag, file], dir.path());
            assert_eq!(code(&run), 2, "{flag} {file}");
            let said = stderr(&run);
            assert!(said.contains(flag) && said.contains("is an input of this run"), "{said}");
        }
    }
    assert_eq!(fs::read(dir.path().join("a/case.yaml")).unwrap(), case);
    assert_eq!(fs::read_to_string(&captures).unwrap(), "no captures");
    assert_eq!(fs::read_to_string(dir.path().join("policy.yaml")).unwrap(), "{out: rne}\n");
    fs::remove_file(&captures).unwrap();

    let wrong: [(&[&str], &str); 3] = [
        (&["--html", "no/such/r.html"], "no/such is not a directory"),
        (&["--html", "a"], "--html: is a directory"),
        (&["--junit", "r.out", "--html", "./r.out"], "is the file of --junit too"),
    ];
    for (flags, words) in wrong {
        let run = assay(&[&["gate", "a"], flags].concat(), dir.path());
        assert_eq!(code(&run), 2, "{flags:?}");
        assert!(stderr(&run).contains(words), "{}", stderr(&run));
        assert!(run.stdout.is_empty());
    }
    assert!(!dir.path().join("r.out").exists());
}

#[test]
fn a_page_is_written_beside_standard_output() {
    let dir = with_case();
    let run = assay(&["gate", "a", "--format", "json", "--html", "r.html"], dir.path());
    assert_eq!(code(&run), 125);
    let page = fs::read_to_string(dir.path().join("r.html")).unwrap();
    for words in ["<!DOCTYPE html>", "UNJUDGED", "the bundle holds no captures", "contexts", "assay", "--html r.html"] {
        assert!(page.contains(words), "{words}: {page}");
    }
    // A page of an earlier run must not outlive a refused one.
    let run = assay(&["gate", "nowhere", "--html", "r.html"], dir.path());
    assert_eq!(code(&run), 2);
    let page = fs::read_to_string(dir.path().join("r.html")).unwrap();
    assert!(page.contains("Refused") && page.contains("nowhere"), "{page}");
}

#[test]
fn wrong_requests_end_with_2_and_say_so_in_the_format_asked_for() {
    let dir = with_case();
    let cases: [(&[&str], &str); 14] = [
        (&["gate", "nowhere"], "nowhere"),
        (&["gate", "a", "--no-such-flag"], "--no-such-flag"),
        (&["gate", "a", "--tensors", "out,outt"], "outt"),
        (&["gate", "a", "--policy", "sometimes"], "sometimes"),
        (&["gate", "a", "--threads", "0"], "0"),
        (&["gate", "a", "--false-alarm", "2"], "2"),
        (&["gate", "--suite", "no/such/suite.yaml"], "no/such/suite.yaml"),
        (&["case", "show", "nowhere"], "nowhere"),
        (&["bench", "--only", "layer_15b"], "layer_15b"),
        (&["bench", "--peer", "abacus"], "abacus"),
        (&["bench", "--only", "model_14b_rows1"], "--model DIR"),
        (&["bench", "--only", "model_14b_rows1", "--model", "no/such/model"], "no/such/model"),
        (&["bench", "--only", "inputs_14b", "--model", "no/such/model"], "no/such/model"),
        (&["gate", "a", "a/case.yaml", "nowhere"], "nowhere"),
    ];
    for (args, named) in cases {
        let plain = assay(args, dir.path());
        assert_eq!(code(&plain), 2, "{args:?}");
        assert!(plain.stdout.is_empty() && stderr(&plain).contains(named), "{args:?}: {}", stderr(&plain));
        let json = assay(&[args, &["--format", "json"]].concat(), dir.path());
        assert!(refusal(&json).contains(named), "{args:?}");
    }
    assert_eq!(code(&assay(&[], dir.path())), 2);
    assert_eq!(code(&assay(&["--version"], dir.path())), 0);
    assert_eq!(code(&assay(&["gate", "--help"], dir.path())), 0);
}

#[test]
fn an_error_in_a_case_is_shown_in_its_place() {
    let dir = with_case();
    let path = dir.path().join("a/case.yaml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("active_batch: 2", "active_batch: 17")).unwrap();
    let line = 1 + text.lines().position(|line| line.starts_with("active_batch")).unwrap();
    let human = stderr(&assay(&["gate", "a"], dir.path()));
    assert!(human.contains(&format!("case.yaml:{line}:")) && human.contains("active_batch: 17"), "{human}");
    let message = refusal(&assay(&["gate", "a", "--format", "json", "--junit", "r.xml"], dir.path()));
    assert!(message.contains(&format!("case.yaml:{line}:")), "{message}");
    // A JUnit report of an earlier run must not outlive a refused one.
    let xml = fs::read_to_string(dir.path().join("r.xml")).unwrap();
    assert!(xml.contains("<error") && xml.contains("active_batch"), "{xml}");
}

#[test]
fn inputs_that_are_not_what_the_case_says_are_refused() {
    let dir = with_case();
    let path = dir.path().join("a/case.yaml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("seed: 1", "seed: 2")).unwrap();
    let message = refusal(&assay(&["gate", "a", "--format", "json"], dir.path()));
    assert!(message.contains("case.yaml") && message.contains("inputs_sha256"), "{message}");
}

#[test]
fn malformed_captures_are_refused() {
    let dir = with_case();
    fs::write(dir.path().join("a/captures.safetensors"), [0xfc, 255, 255, 255, 255, 255, 255, 255]).unwrap();
    let message = refusal(&assay(&["gate", "a", "--format", "json"], dir.path()));
    assert!(message.contains("captures.safetensors: header length is 18446744073709551612"), "{message}");
}

#[test]
fn a_new_case_never_replaces_a_file_unasked() {
    let dir = with_case();
    let path = dir.path().join("a/case.yaml");
    let before = fs::read(&path).unwrap();
    let args = ["case", "new", "--name", "b", "--seq-lens", "7", "--no-hashes", "--output", "a/case.yaml"];
    let again = assay(&args, dir.path());
    assert_eq!(code(&again), 2);
    assert!(stderr(&again).contains("--force"), "{}", stderr(&again));
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(code(&assay(&[&args[..], &["--force"]].concat(), dir.path())), 0);
    assert!(fs::read_to_string(&path).unwrap().contains("name: b"));
    assert_eq!(fs::read_dir(dir.path().join("a")).unwrap().count(), 1);

    let full = vec!["9"; 16].join(",");
    let printed = stdout(&assay(&["case", "new", "--name", "c", "--seq-lens", &full, "--no-hashes"], dir.path()));
    assert!(printed.contains("padding: own"), "{printed}");
}

#[test]
fn a_case_is_shown() {
    let dir = with_case();
    let shown = stdout(&assay(&["case", "show", "a"], dir.path()));
    assert!(shown.contains("130") && shown.contains("2-15") && shown.contains("hidden_states"), "{shown}");
    let read: serde_json::Value =
        serde_json::from_str(&stdout(&assay(&["case", "show", "a", "--format", "json"], dir.path()))).unwrap();
    assert_eq!(read["rows"][1]["context"], 5);
    assert_eq!(read["hashed_inputs"], 22);
}

#[test]
fn a_reader_that_leaves_early_changes_nothing() {
    let dir = with_case();
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(["gate", "a", "--format", "json"]).current_dir(dir.path());
    let mut run = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(run.stdout.take());
    let output = run.wait_with_output().unwrap();
    assert_eq!(code(&output), 125, "{}", stderr(&output));
    assert!(output.stderr.is_empty(), "{}", stderr(&output));
}

#[test]
fn a_model_is_made_and_inspected() {
    let dir = tempfile::tempdir().unwrap();
    let make = ["model", "synthesize", "--geometry", "mini", "--layers", "1", "m"];
    let made = assay(&make, dir.path());
    assert_eq!(code(&made), 0, "{}", stderr(&made));
    assert!(made.stdout.is_empty() && made.stderr.is_empty(), "no progress in a pipe: {}", stderr(&made));
    let again = assay(&make, dir.path());
    assert_eq!(code(&again), 2);
    assert!(stderr(&again).contains("m: is not empty") && stderr(&again).contains("--force"), "{}", stderr(&again));
    assert_eq!(code(&assay(&[&make[..], &["--force", "--seed", "2"]].concat(), dir.path())), 0);
    for (geometry, layers, told) in
        [("mini", "5", "has 4 layers"), ("14b", "41", "has 40 layers"), ("mini", "0", "1 to 4")]
    {
        let make = ["model", "synthesize", "--geometry", geometry, "--layers", layers, "deeper"];
        let refused = assay(&make, dir.path());
        assert_eq!(code(&refused), 2);
        let message = stderr(&refused);
        assert!(message.contains(&format!("--layers {layers}")) && message.contains(told), "{message}");
        assert!(!dir.path().join("deeper").exists());
    }

    let human = stdout(&assay(&["model", "inspect", "m", "--codes"], dir.path()));
    for part in
        ["hidden 2560", "1 layer,", "0 of 31,457,280 are -128", "model.layers.N.mlp.down_proj.weight", "3799, 3798"]
    {
        assert!(human.contains(part), "{human} lacks {part}");
    }
    let run = assay(&["model", "inspect", "m", "--format", "json"], dir.path());
    let read: serde_json::Value = serde_json::from_str(&stdout(&run)).unwrap();
    assert_eq!(read["geometry"]["num_hidden_layers"], 1);
    assert_eq!(read["shards"][0]["file"], "model.safetensors");
    assert_eq!(read["dtypes"]["I8"]["bytes"], 31_457_280);
    assert_eq!(read["tensors"].as_array().unwrap().len(), 21);
    assert_eq!((&read["remarks"], &read["codes_of_minus_128"]), (&serde_json::json!([]), &serde_json::Value::Null));

    fs::remove_file(dir.path().join("m/config.json")).unwrap();
    let broken = assay(&["model", "inspect", "m", "--format", "json"], dir.path());
    assert!(refusal(&broken).contains("config.json"));
    assert!(refusal(&assay(&["model", "inspect", "nowhere", "--format", "json"], dir.path())).contains("nowhere"));
}

#[test]
fn empty_variables_are_unset_ones_and_threads_have_a_limit() {
    let dir = tempfile::tempdir().unwrap();
    let with = |variables: &[(&str, &str)], args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
        command.args(args).current_dir(dir.path()).envs(variables.iter().copied()).output().unwrap()
    };
    let run = with(&[("ASSAY_KERNELS", ""), ("PYTHON", ""), ("RAYON_NUM_THREADS", "")], &["doctor"]);
    assert_eq!(code(&run), 0, "{}", stderr(&run));
    assert!(stdout(&with(&[("PYTHON", "")], &["bench", "--help"])).contains("[default: python3]"));
    let refused = with(&[("ASSAY_KERNELS", "nosuch")], &["doctor"]);
    assert_eq!(code(&refused), 2);
    assert!(stderr(&refused).contains("ASSAY_KERNELS"), "{}", stderr(&refused));
    for many in ["1025", "99999999", "18446744073709551615", "18446744073709551616", "two"] {
        let refused = with(&[("RAYON_NUM_THREADS", many)], &["doctor"]);
        assert_eq!(code(&refused), 2);
        assert!(stderr(&refused).contains(many) && stderr(&refused).contains("1024"), "{}", stderr(&refused));
    }
    // Refused before floors are measured, with the path and no advice to install anything with it.
    let absent = with(&[("PYTHON", "")], &["bench", "--peer", "torch", "--python", "no/such/python"]);
    assert_eq!(code(&absent), 2);
    assert!(stderr(&absent).contains("no/such/python") && !stderr(&absent).contains("install"), "{}", stderr(&absent));
}

#[cfg(unix)]
#[test]
fn threads_that_the_system_does_not_give_are_a_refusal() {
    // Stacks of so many threads are beyond the address space that is left.
    let limited = "ulimit -v 1500000; exec \"$0\" \"$@\"";
    for (variables, args) in
        [(&[("RAYON_NUM_THREADS", "1024")][..], &["doctor"][..]), (&[], &["gate", "nowhere", "--threads", "1024"])]
    {
        let mut command = Command::new("sh");
        command.args(["-c", limited, env!("CARGO_BIN_EXE_assay")]).args(args).envs(variables.iter().copied());
        let refused = command.output().unwrap();
        assert_eq!(code(&refused), 2, "{}", stderr(&refused));
        assert!(stderr(&refused).contains("threads") && stderr(&refused).contains("cannot be started"));
    }
}

#[test]
fn doctor_answers() {
    let dir = tempfile::tempdir().unwrap();
    let run = assay(&["doctor"], dir.path());
    assert_eq!(code(&run), 0);
    for what in ["version", "CPU features", "threads", "kernels", "suites"] {
        assert!(stdout(&run).lines().any(|line| line.starts_with(what)), "{what}");
    }
}
