//! Goldens from outside: recorded from a synthetic checkpoint, accepted, and checked against dumps that are right, wrong
//! or no dumps at all.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

fn assay_in(ci: &str, args: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_assay"));
    command.args(args).current_dir(dir).env("CI", ci).env_remove("CLICOLOR_FORCE").stdin(Stdio::null());
    command.output().unwrap()
}

fn assay(args: &[&str], dir: &Path) -> Output {
    assay_in("", args, dir)
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

fn answer(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

const RECORD: [&str; 16] = [
    "tokens",
    "record",
    "small",
    "--goldens",
    "g",
    "--model",
    "model",
    "--prompt-ids",
    "1,2,3",
    "--prompt-ids",
    "7",
    "--max-new-tokens",
    "4",
    "--samples",
    "16",
    "--policy=production",
];

#[test]
fn the_life_of_a_golden() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let made = assay(&["model", "synthesize", "model", "--geometry", "mini", "--layers", "1"], dir);
    assert_eq!(code(&made), 0, "{}", stderr(&made));

    // CI writes nothing, and says so before any work.
    let refused = assay_in("true", &RECORD, dir);
    assert!(code(&refused) == 2 && stderr(&refused).contains("CI is set"), "{}", stderr(&refused));
    assert!(!dir.join("g").exists());

    let recorded = assay(&RECORD, dir);
    assert_eq!(code(&recorded), 0, "{}", stderr(&recorded));
    assert!(stdout(&recorded).contains("small: new") && stdout(&recorded).contains("tokens accept small"));
    let review = assay_in("true", &["tokens", "review", "--goldens", "g"], dir);
    assert_eq!(code(&review), 1, "CI sees what is pending: {}", stdout(&review));
    let early = assay(&["tokens", "check", "small", "--goldens", "g", "--model", "model"], dir);
    assert!(code(&early) == 2 && stderr(&early).contains("the golden `small` is pending"), "{}", stderr(&early));
    let no_reason = assay(&["tokens", "accept", "small", "--reason", " ", "--goldens", "g"], dir);
    assert_eq!(code(&no_reason), 2);
    let ci = assay_in("1", &["tokens", "accept", "small", "--reason", "first", "--goldens", "g"], dir);
    assert_eq!(code(&ci), 2);
    let accepted = assay(&["tokens", "accept", "small", "--reason", "first", "--goldens", "g"], dir);
    assert_eq!(code(&accepted), 0, "{}", stderr(&accepted));
    assert_eq!(code(&assay(&["tokens", "review", "--goldens", "g"], dir)), 0);
    let listed = answer(&assay(&["tokens", "list", "--goldens", "g", "--format", "json"], dir));
    assert_eq!((&listed[0]["name"], &listed[0]["state"]), (&json!("small"), &json!("accepted")));

    // The same again is nothing new.
    let again = assay(&RECORD, dir);
    assert!(code(&again) == 0 && stdout(&again).contains("nothing is pending"), "{}", stdout(&again));
    let again = assay(&["tokens", "check", "small", "--goldens", "g", "--model", "model"], dir);
    assert_eq!(code(&again), 0, "{}", stdout(&again));

    // What the reference generates passes.
    let generate: Vec<&str> =
        ["tokens", "generate"].into_iter().chain(RECORD[5..13].iter().copied()).chain(["--format", "json"]).collect();
    let generated = assay(&generate, dir);
    assert_eq!(code(&generated), 0, "{}", stderr(&generated));
    fs::write(dir.join("right.json"), &generated.stdout).unwrap();
    let check = |dump: &str, more: &[&str]| {
        let args = ["tokens", "check", "g/small.yaml", dump, "--goldens", "g", "--format", "json"];
        assay(&[&args[..], more].concat(), dir)
    };
    let right = check("right.json", &[]);
    assert_eq!(code(&right), 0, "{}", stdout(&right));
    let steps = answer(&right)["steps"].as_array().unwrap().clone();
    assert_eq!(steps.len(), 8);
    for key in ["row", "step", "device", "reference", "margin", "verdict"] {
        assert!(steps[0].get(key).is_some(), "{key}");
    }

    // A wrong token fails at its step, and the model judges what follows on the device's own tokens.
    let ids = |row: usize| -> Vec<i64> {
        let rows = &answer(&generated)["rows"];
        rows[row]["token_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap()).collect()
    };
    let mut wrong = ids(0);
    wrong[1] = (wrong[1] + 1) % 3000;
    fs::write(dir.join("wrong.json"), json!([wrong, ids(1)]).to_string()).unwrap();
    let alone = check("wrong.json", &["--before", "right.json"]);
    assert_eq!(code(&alone), 1);
    let report = answer(&alone);
    assert_eq!((&report["findings"][0]["step"], &report["findings"][0]["already_before"]), (&json!(1), &json!(false)));
    assert_eq!(report["steps"][2]["verdict"], "unjudged");
    let followed = answer(&check("wrong.json", &["--model", "model"]));
    assert_eq!(followed["steps"][2]["forced"], true);
    assert_ne!(followed["steps"][2]["verdict"], "unjudged");
    let human = assay(&["tokens", "check", "small", "wrong.json", "--goldens", "g", "--verbose"], dir);
    assert!(stdout(&human).contains("FAIL small") && !stdout(&human).contains('\u{1b}'), "{}", stdout(&human));

    // All zero, padding, and what is no dump.
    fs::write(dir.join("zero.txt"), "0 0 0 0\n0 0 0 0\n").unwrap();
    let zero = answer(&check("zero.txt", &["--before", "zero.txt"]));
    assert_eq!(
        (&zero["findings"][0]["kind"], &zero["findings"][0]["already_before"]),
        (&json!("constant_stream"), &json!(true))
    );
    fs::write(dir.join("garbage.txt"), "1 2 x\n").unwrap();
    let garbage = check("garbage.txt", &[]);
    assert_eq!(code(&garbage), 2);
    assert!(answer(&garbage)["message"].as_str().unwrap().contains("line 1, id 2"));
    fs::write(dir.join("none.safetensors"), [&8u64.to_le_bytes()[..], b"{}      "].concat()).unwrap();
    assert_eq!(code(&check("none.safetensors", &[])), 125);

    // A row that the golden does not have is a wrong request, whatever the dump.
    let row = check("right.json", &["--row", "2"]);
    assert!(code(&row) == 2 && stderr(&row).contains("--row 2: the golden `small` has 2 rows"), "{}", stderr(&row));
    assert_eq!(code(&check("right.json", &["--row", "1"])), 0);

    // Another model is not followed.
    let other = assay(&["model", "synthesize", "other", "--geometry", "mini", "--layers", "1", "--seed", "2"], dir);
    assert_eq!(code(&other), 0);
    let other = check("wrong.json", &["--model", "other"]);
    assert!(code(&other) == 2 && stderr(&other).contains("fingerprint"), "{}", stderr(&other));
}

#[test]
fn files_that_are_no_goldens_are_told_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let made = assay(&["model", "synthesize", "model", "--geometry", "mini", "--layers", "1"], dir);
    assert_eq!(code(&made), 0, "{}", stderr(&made));

    // What cannot be written is found out before the run, which would refuse this prompt.
    let blocked: Vec<&str> = RECORD
        .iter()
        .map(|arg| if *arg == "g" { "model/config.json" } else { arg })
        .map(|arg| if arg == "7" { "999999" } else { arg })
        .collect();
    let blocked = assay(&blocked, dir);
    assert_eq!(code(&blocked), 2);
    assert!(stderr(&blocked).contains("no golden can be written there"), "{}", stderr(&blocked));

    assert_eq!(code(&assay(&RECORD, dir)), 0);
    let accept = || assay(&["tokens", "accept", "small", "--reason", "first", "--goldens", "g"], dir);
    assert_eq!(code(&accept()), 0);
    let review = |more: &[&str]| assay(&[&["tokens", "review", "--goldens", "g"], more].concat(), dir);
    assert_eq!((code(&review(&[])), code(&review(&["small"]))), (0, 0));
    let unknown = review(&["nope"]);
    assert!(code(&unknown) == 2 && stderr(&unknown).contains("no golden is called `nope`"), "{}", stderr(&unknown));
    fs::write(dir.join("g/q.pending.yaml"), "x").unwrap();
    let unread = review(&[]);
    assert!(code(&unread) == 2 && stderr(&unread).contains("q.pending.yaml"), "{}", stderr(&unread));
    fs::remove_file(dir.join("g/q.pending.yaml")).unwrap();

    // A file of another golden's name is no golden.
    let text = fs::read_to_string(dir.join("g/small.yaml")).unwrap();
    fs::write(dir.join("g/copy.yaml"), &text).unwrap();
    for copy in ["copy", "g/copy.yaml"] {
        let orphan = assay(&["tokens", "check", copy, "--goldens", "g", "--model", "model"], dir);
        assert!(code(&orphan) == 2 && stderr(&orphan).contains("golden `small`"), "{}", stderr(&orphan));
    }

    // What the golden says of the model has to be so.
    let again = || assay(&["tokens", "check", "small", "--goldens", "g", "--model", "model"], dir);
    assert_eq!(code(&again()), 0);
    let line = |key: &str| text.lines().find(|line| line.trim_start().starts_with(key)).unwrap().to_owned();
    for (key, put, words) in [
        ("rms_norm_eps", "    rms_norm_eps: 0.25", "rms_norm_eps: 1e-6 in the model, 0.25 in the golden"),
        ("stop_ids", "  stop_ids: [3799]", "and the golden `small` was made with {3799}"),
    ] {
        fs::write(dir.join("g/small.yaml"), text.replacen(&line(key), put, 1)).unwrap();
        let other = again();
        assert!(code(&other) == 2 && stderr(&other).contains(words), "{}", stderr(&other));
    }

    // A file that is broken is recorded again, and replaced by whoever accepts that.
    fs::write(dir.join("g/small.yaml"), &text[..text.len() / 2]).unwrap();
    let broken = again();
    assert!(code(&broken) == 2 && stderr(&broken).contains("record it again"), "{}", stderr(&broken));
    let recorded = assay(&RECORD, dir);
    assert_eq!(code(&recorded), 0, "{}", stderr(&recorded));
    for shown in [&recorded, &review(&[])] {
        assert!(stdout(shown).contains("remark: what is accepted cannot be read"), "{}", stdout(shown));
    }
    assert_eq!((code(&review(&[])), code(&accept()), code(&again())), (1, 0, 0));
    assert_eq!(fs::read_to_string(dir.join("g/small.yaml")).unwrap(), text);
}

#[test]
fn all_goldens_of_a_store_are_run_again_or_followed_by_their_own_model() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (name, seed) in [("model", "1"), ("other", "2"), ("third", "3")] {
        let args = ["model", "synthesize", name, "--geometry", "mini", "--layers", "1", "--seed", seed];
        assert_eq!(code(&assay(&args, dir)), 0);
    }
    for (golden, model) in [("x-small", "model"), ("a-other", "other"), ("small", "model")] {
        let record = RECORD.map(|arg| match arg {
            "small" => golden,
            "model" => model,
            arg => arg,
        });
        assert_eq!(code(&assay(&record, dir)), 0);
        assert_eq!(code(&assay(&["tokens", "accept", golden, "--reason", "first", "--goldens", "g"], dir)), 0);
    }
    let check = |more: &[&str]| {
        let checked = assay(&[&["tokens", "check", "--all", "--goldens", "g", "--format", "json"], more].concat(), dir);
        (code(&checked), answer(&checked))
    };
    let names = |report: &Value| -> Vec<String> {
        report["goldens"].as_array().unwrap().iter().map(|one| one["golden"].as_str().unwrap().to_owned()).collect()
    };

    // Run again: those of the model alone are split, and the others named.
    let (ended, again) = check(&["--model", "model"]);
    assert_eq!((ended, names(&again)), (0, vec!["small".to_owned(), "x-small".to_owned()]));
    assert_eq!(again["remarks"], json!(["goldens of other models than model were not run: a-other (of other)"]));
    let (ended, second) = check(&["--model", "model", "--shard", "2/2"]);
    assert_eq!((ended, names(&second), &second["shard"]["cases_total"]), (0, vec!["x-small".to_owned()], &json!(2)));
    let (ended, none) = check(&["--model", "third"]);
    let words = none["message"].as_str().unwrap();
    assert!(ended == 2 && words.contains("third: is the model of no golden in g"), "{words}");
    assert!(words.contains("a-other (of other), small (of model)"), "{words}");
    let (ended, nothing) = check(&[]);
    assert!(ended == 2 && nothing["message"].as_str().unwrap().contains("--dumps"), "{nothing}");

    // Dumps that leave the goldens: the model follows on its own, and other goldens are judged by themselves.
    fs::create_dir(dir.join("d")).unwrap();
    for dump in ["a-other.json", "small.json", "x-small.json"] {
        fs::write(dir.join("d").join(dump), "[[1, 2, 3, 4], [5, 6, 7, 8]]").unwrap();
    }
    let (ended, judged) = check(&["--dumps", "d", "--model", "model"]);
    assert_eq!((ended, names(&judged).len()), (1, 3));
    let golden = |index: usize| &judged["goldens"][index];
    let remarks = golden(0)["remarks"].to_string();
    assert!(remarks.contains("it is of the model other, and model is another"), "{remarks}");
    assert_eq!(
        (&golden(0)["steps"][1]["verdict"], &golden(1)["steps"][1]["forced"]),
        (&json!("unjudged"), &json!(true))
    );
    assert!(!golden(1)["remarks"].to_string().contains("another"));
    let (ended, third) = check(&["--dumps", "d", "--model", "third"]);
    assert!(ended == 2 && third["message"].as_str().unwrap().contains("of no golden"), "{third}");
}
