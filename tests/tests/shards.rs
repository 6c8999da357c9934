//! A run split with `--shard` and joined with `assay report merge` says what the whole run says; what is missing or
//! does not belong together is never a pass.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::Output;

use assay_tests::Bench;
use assay_tests::program::{code, run, stderr};
use serde_json::Value;

/// Cases in an order that is not that of their names.
const CASES: [&str; 4] = ["mini/full", "mini/active1", "mini/active2-dirty", "mini/active2"];

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Runs one shard in `dir`; its reports are `N.json` and `N.xml`.
fn shard(dir: &Path, index: usize, count: usize, cases: &[&str], more: &[&str]) -> (i32, Value) {
    let paths: Vec<String> = cases.iter().map(|case| Bench::path(case).display().to_string()).collect();
    let (of, junit) = (format!("{index}/{count}"), format!("{index}.xml"));
    let mut args = vec!["gate", "--shard", &of, "--format", "json", "--junit", &junit];
    args.extend(paths.iter().map(String::as_str));
    args.extend(more);
    let ran = run(dir, &args);
    fs::write(dir.join(format!("{index}.json")), &ran.stdout).unwrap();
    (code(&ran), serde_json::from_slice(&ran.stdout).unwrap_or_else(|_| panic!("{}", stderr(&ran))))
}

fn names(report: &Value) -> Vec<&str> {
    report["cases"].as_array().unwrap().iter().map(|case| case["name"].as_str().unwrap()).collect()
}

/// The report without wall times.
fn untimed(mut case: Value) -> Value {
    case["seconds"] = 0.into();
    case
}

#[test]
fn shards_are_split_by_name_and_joined_to_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (one, first) = shard(dir, 1, 3, &CASES, &[]);
    // Another machine has its files in another order.
    let mut turned = CASES;
    turned.reverse();
    let (two, second) = shard(dir, 2, 3, &turned, &[]);
    let (three, third) = shard(dir, 3, 3, &CASES, &[]);
    assert_eq!([one, two, three], [0, 0, 0]);
    assert_eq!(names(&first), ["mini/full", "mini/active1"]);
    assert_eq!((names(&second), names(&third)), (vec!["mini/active2"], vec!["mini/active2-dirty"]));
    assert_eq!(first["shard"], serde_json::json!({"index": 1, "count": 3, "cases_total": 4}));

    let files = ["2.json", "3.json", "1.json"];
    let joined = run(dir, &[&["report", "merge", "--output", "all.json", "--junit", "all.xml"], &files[..]].concat());
    assert_eq!(code(&joined), 0, "{}", stderr(&joined));
    assert!(stdout(&joined).contains("3 shards joined\n4 cases: 4 passed. PASS"), "{}", stdout(&joined));
    let all: Value = serde_json::from_str(&fs::read_to_string(dir.join("all.json")).unwrap()).unwrap();
    assert_eq!(all["merged"], serde_json::json!({"count": 3, "cases_total": 4, "missing": []}));
    let whole = run(dir, &["gate", "--format", "json", Bench::path("mini/full").to_str().unwrap()]);
    let whole: Value = serde_json::from_slice(&whole.stdout).unwrap();
    assert_eq!(whole.get("shard"), None);
    let full = all["cases"].as_array().unwrap().iter().find(|case| case["name"] == "mini/full").unwrap();
    assert_eq!(untimed(full.clone()), untimed(whole["cases"][0].clone()));
    assert_eq!(names(&all), ["mini/active1", "mini/active2", "mini/active2-dirty", "mini/full"]);
    // Joined in another order, it is the same report, to the byte.
    let again = run(dir, &["report", "merge", "1.json", "2.json", "3.json", "--format", "json"]);
    assert_eq!(stdout(&again), fs::read_to_string(dir.join("all.json")).unwrap());
    let xml = fs::read_to_string(dir.join("all.xml")).unwrap();
    assert_eq!(xml.matches("<testsuite ").count(), 4);

    let junit = run(dir, &["report", "merge", "--junit", "joined.xml", "3.xml", "1.xml", "2.xml"]);
    assert_eq!(code(&junit), 0, "{}", stderr(&junit));
    assert_eq!(fs::read_to_string(dir.join("joined.xml")).unwrap().matches("<testsuite ").count(), 4);
    let github = run(dir, &["report", "merge", "--format", "github", "1.json", "2.json", "3.json"]);
    assert!(stdout(&github).contains("4 cases: 4 passed (exit code 0"), "{}", stdout(&github));
}

#[test]
fn a_missing_shard_is_no_pass_and_a_failure_is_one_without_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let cases = &CASES[..2];
    assert_eq!(shard(dir, 1, 2, cases, &[]).0, 0);
    let part = run(dir, &["report", "merge", "1.json", "--junit", "part.xml"]);
    assert_eq!(code(&part), 125);
    let told = "1 of 2 shards joined, 1 of 2 cases; shard 2 is missing";
    assert!(stdout(&part).contains(told), "{}", stdout(&part));
    assert!(fs::read_to_string(dir.join("part.xml")).unwrap().contains("<testsuite name=\"shard 2/2\""));
    assert_eq!(code(&run(dir, &["report", "merge", "1.xml", "--junit", "part.xml"])), 125);

    let (failed, _) = shard(dir, 2, 2, cases, &["--policy", "rne"]);
    assert_eq!(failed, 1);
    assert_eq!(code(&run(dir, &["report", "merge", "2.json"])), 1);
    assert_eq!(code(&run(dir, &["report", "merge", "1.json", "2.json"])), 1);
    assert_eq!(code(&run(dir, &["report", "merge", "1.xml", "2.xml", "--junit", "all.xml"])), 1);
}

#[test]
fn an_empty_shard_ends_well_and_the_whole_is_judged_by_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let cases = &CASES[1..2];
    let (ended, empty) = shard(dir, 2, 2, cases, &[]);
    assert_eq!((ended, &empty["verdict"], names(&empty)), (0, &"unjudged".into(), vec![]));
    let human = run(dir, &["gate", "--shard", "2/2", Bench::path(CASES[1]).to_str().unwrap()]);
    assert!(
        stdout(&human).contains("shard 2/2: 0 of 1 case\nno case. UNJUDGED (exit code 0: no case"),
        "{}",
        stdout(&human)
    );
    assert_eq!(code(&run(dir, &["report", "merge", "2.json"])), 125);
    assert_eq!(code(&run(dir, &["report", "merge", "2.xml", "--junit", "all.xml"])), 125);
    assert_eq!(shard(dir, 1, 2, cases, &[]).0, 0);
    assert_eq!(code(&run(dir, &["report", "merge", "2.json", "1.json"])), 0);
    assert_eq!(code(&run(dir, &["report", "merge", "2.xml", "1.xml", "--junit", "all.xml"])), 0);
}

#[test]
fn reports_that_do_not_belong_together_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let cases = &CASES[..2];
    for index in [1, 2] {
        shard(dir, index, 2, cases, &[]);
    }
    let first = fs::read_to_string(dir.join("1.json")).unwrap();
    let write = |name: &str, text: &str| fs::write(dir.join(name), text).unwrap();
    write("three.json", &first.replace("\"count\": 2", "\"count\": 3"));
    write("total.json", &first.replace("\"cases_total\": 2", "\"cases_total\": 3"));
    write("same.json", &first.replace("\"index\": 1", "\"index\": 2"));
    write("lies.json", &first.replacen("\"pass\"", "\"fail\"", 1));
    write("cut.json", &first[..first.len() / 2]);
    write("list.json", "[]");
    write("refused.json", "{\"verdict\": \"error\", \"message\": \"a.yaml: wrong\", \"cases\": []}");
    fs::write(dir.join("bytes.json"), [0xff, 0xfe]).unwrap();
    for (files, words) in [
        (&["1.json", "three.json"][..], "3 shards"),
        (&["1.json", "total.json"], "3 cases"),
        (&["1.json", "1.json"], "is shard 1, and so is 1.json"),
        (&["1.json", "same.json"], "`mini/active1`"),
        (&["lies.json", "2.json"], "says `fail`"),
        (&["2.json", "cut.json"], "cut.json:"),
        (&["list.json"], "list.json:1:"),
        (&["refused.json"], "a.yaml: wrong"),
        (&["bytes.json"], "byte 0"),
        (&["nowhere.json"], "nowhere.json"),
        (&["1.json", "2.xml"], "one kind"),
        (&["1.xml"], "--junit"),
        (&["1.json", "2.json", "--output", "1.json"], "is an input"),
        (&["1.json", "--junit", "no/such.xml"], "no is not a directory"),
    ] {
        let refused = run(dir, &[&["report", "merge", "--format", "json"], files].concat());
        assert_eq!(code(&refused), 2, "{files:?}: {}", stdout(&refused));
        let report: Value = serde_json::from_slice(&refused.stdout).unwrap();
        assert_eq!(report["verdict"], "error");
        assert!(report["message"].as_str().unwrap().contains(words), "{files:?}: {}", report["message"]);
    }
    for shard in ["0/2", "3/2", "2", "1/0", "x/y"] {
        let refused = run(dir, &["gate", "--shard", shard, Bench::path(CASES[0]).to_str().unwrap()]);
        assert_eq!(code(&refused), 2);
        assert!(stderr(&refused).contains("2/4"), "{}", stderr(&refused));
    }
}

/// A store of three goldens `a`, `b` and `c`, copies of the carried one, in `dir/g`; the ids of each, as JSON.
fn store(dir: &Path) -> String {
    let carried = Bench::path("../tokens/mini-tokens2.yaml");
    let text = fs::read_to_string(&carried).unwrap();
    fs::create_dir_all(dir.join("g")).unwrap();
    fs::create_dir_all(dir.join("d")).unwrap();
    for name in ["a", "b", "c"] {
        let own = text.replacen("name: \"mini-tokens2\"", &format!("name: \"{name}\""), 1);
        fs::write(dir.join("g").join(format!("{name}.yaml")), own).unwrap();
    }
    let goldens = goldens::tokens::Store::new(&dir.join("g"), true).standards().unwrap();
    let ids: Vec<_> = goldens[0].rows.iter().map(|row| row.token_ids()).collect();
    serde_json::to_string(&ids).unwrap()
}

/// Checks the goldens of `dir/g` by the dumps of `dir/d`.
fn check(dir: &Path, more: &[&str]) -> Output {
    run(dir, &[&["tokens", "check", "--all", "--goldens", "g", "--dumps", "d"], more].concat())
}

/// One shard of that; its reports are `N.json` and `N.xml`.
fn golden_shard(dir: &Path, index: usize, count: usize) -> i32 {
    let (of, junit) = (format!("{index}/{count}"), format!("{index}.xml"));
    let ran = check(dir, &["--shard", &of, "--format", "json", "--junit", &junit]);
    fs::write(dir.join(format!("{index}.json")), &ran.stdout).unwrap();
    code(&ran)
}

fn golden_names(report: &Value) -> Vec<&str> {
    report["goldens"].as_array().unwrap().iter().map(|golden| golden["golden"].as_str().unwrap()).collect()
}

#[test]
fn goldens_are_split_by_name_and_joined_to_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let right = store(dir);
    for dump in ["a.json", "b", "c.txt", "d.json"] {
        fs::write(dir.join("d").join(dump), &right).unwrap();
    }
    let whole = check(dir, &["--format", "json"]);
    assert_eq!(code(&whole), 0, "{}", stderr(&whole));
    let whole: Value = serde_json::from_slice(&whole.stdout).unwrap();
    assert_eq!((golden_names(&whole), whole.get("shard")), (vec!["a", "b", "c"], None));
    assert_eq!(whole["remarks"], serde_json::json!(["d: d.json is the dump of no accepted golden"]));

    assert_eq!([1, 2].map(|index| golden_shard(dir, index, 2)), [0, 0]);
    let first: Value = serde_json::from_str(&fs::read_to_string(dir.join("1.json")).unwrap()).unwrap();
    assert_eq!(first["shard"], serde_json::json!({"index": 1, "count": 2, "cases_total": 3}));
    assert_eq!(golden_names(&first), ["a", "c"]);
    let joined = run(dir, &["report", "merge", "2.json", "1.json", "--output", "all.json", "--junit", "all.xml"]);
    assert_eq!(code(&joined), 0, "{}", stderr(&joined));
    let words = "2 shards joined\n3 goldens: 3 passed. PASS (exit code 0: every golden passed)\n";
    assert!(stdout(&joined).ends_with(words), "{}", stdout(&joined));
    let mut all: Value = serde_json::from_str(&fs::read_to_string(dir.join("all.json")).unwrap()).unwrap();
    let merged = all.as_object_mut().unwrap().remove("merged");
    assert_eq!(merged, Some(serde_json::json!({"count": 2, "cases_total": 3, "missing": []})));
    assert_eq!(all, whole);
    assert_eq!(fs::read_to_string(dir.join("all.xml")).unwrap().matches("<testsuite ").count(), 3);
    let junit = run(dir, &["report", "merge", "1.xml", "2.xml", "--junit", "joined.xml"]);
    assert_eq!((code(&junit), stdout(&junit).starts_with("3 goldens joined: ")), (0, true), "{}", stdout(&junit));

    // A missing shard is no pass, and a failure is one without it; a shard of no golden ends well.
    for report in [&["1.json"][..], &["1.xml", "--junit", "part.xml"]] {
        let part = run(dir, &[&["report", "merge"], report].concat());
        assert_eq!(code(&part), 125);
        assert!(stdout(&part).contains("shard 2 is missing") || stdout(&part).contains("shard 2 of 2 is missing"));
    }
    fs::write(dir.join("d/b"), right.replacen('[', "[[1],", 1)).unwrap();
    assert_eq!([golden_shard(dir, 2, 2), golden_shard(dir, 4, 4)], [1, 0]);
    assert_eq!(code(&run(dir, &["report", "merge", "2.json"])), 1);
    assert_eq!(code(&run(dir, &["report", "merge", "2.xml", "--junit", "part.xml"])), 1);

    // Reports that do not belong together: of other splits, and of other commands.
    let (ended, _) = shard(dir, 2, 2, &CASES[..2], &[]);
    assert_eq!(ended, 0);
    for (files, words) in [
        (&["1.json", "4.json"][..], "3 goldens, and 1.json of one split into 2"),
        (&["1.json", "2.json"], "2.json: is a report of `assay gate`"),
        (&["1.xml", "2.xml", "--junit", "x.xml"], "2.xml: is a report of `assay gate`"),
        (&["1.json", "1.json"], "name each shard once"),
        (&["1.json", "--format", "github"], "no summary"),
    ] {
        let refused = run(dir, &[&["report", "merge"], files].concat());
        assert!(code(&refused) == 2 && stderr(&refused).contains(words), "{files:?}: {}", stderr(&refused));
    }
}

#[test]
fn goldens_without_a_dump_are_unjudged_and_unclear_dumps_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let right = store(dir);
    let put = |name: &str, text: &str| fs::write(dir.join("d").join(name), text).unwrap();
    put("a.json", &right);
    // A recorded device that took the other id of a near tie, as a bundle.
    fs::create_dir(dir.join("d/b")).unwrap();
    fs::copy(Bench::path("mini/tokens2").join("captures.safetensors"), dir.join("d/b/captures.safetensors")).unwrap();
    let part = check(dir, &["--junit", "all.xml"]);
    assert_eq!(code(&part), 125, "{}", stderr(&part));
    let text = stdout(&part);
    assert!(text.contains("PASS a ") && text.contains("UNJUDGED b ") && text.contains("UNJUDGED c  no dump"), "{text}");
    assert!(text.contains("no c, c.json, c.safetensors or c.txt"), "{text}");
    assert!(
        text.ends_with("3 goldens: 2 could not be judged, 1 passed. UNJUDGED (exit code 125: could not be judged)\n")
    );
    let xml = fs::read_to_string(dir.join("all.xml")).unwrap();
    assert_eq!((xml.matches("<testsuite ").count(), xml.matches("<skipped").count()), (3, 3), "{xml}");

    // A failure wins over what cannot be judged.
    put("c.txt", "1 1 1\n1 1 1\n");
    assert_eq!(code(&check(dir, &[])), 1);
    let refused = |more: &[&str], words: &str| {
        let refused = check(dir, &[&["--format", "json"], more].concat());
        assert_eq!(code(&refused), 2, "{words}: {}", stdout(&refused));
        let report: Value = serde_json::from_slice(&refused.stdout).unwrap();
        assert!(report["message"].as_str().unwrap().contains(words), "{words}: {}", report["message"]);
    };
    for junit in ["d/x.xml", "g/a.yaml", "d/b/captures.safetensors"] {
        refused(&["--junit", junit], "which this run reads");
    }
    refused(&["--junit", "no/x.xml"], "no is not a directory");
    // What is malformed is refused before anything is judged, and the refusal is reported.
    put("c.txt", "1 x\n");
    refused(&["--junit", "all.xml"], "line 1, id 1");
    assert!(fs::read_to_string(dir.join("all.xml")).unwrap().contains("<error"));
    // Another machine need not hold it.
    assert_eq!(code(&check(dir, &["--shard", "2/3"])), 125);
    put("c.json", &right);
    refused(&["--shard", "2/3"], "two dumps of the golden `c`, c.json and c.txt");
    fs::remove_file(dir.join("d/c.txt")).unwrap();
    fs::write(dir.join("g/b.yaml"), "x").unwrap();
    refused(&["--shard", "1/3"], "b.yaml");
    for file in ["a.yaml", "b.yaml", "c.yaml"] {
        fs::remove_file(dir.join("g").join(file)).unwrap();
    }
    refused(&[], "no accepted golden");
    let neither = run(dir, &["tokens", "check", "a", "--all"]);
    assert!(code(&neither) == 2 && stderr(&neither).contains("cannot be used with"), "{}", stderr(&neither));
    assert_eq!(code(&run(dir, &["tokens", "check"])), 2);
    let one = run(dir, &["tokens", "check", "a", "--shard", "1/2"]);
    assert!(code(&one) == 2 && stderr(&one).contains("cannot be used with"), "{}", stderr(&one));
}
