//! `assay bisect commit` on a repository with a fault planted in one commit, one that does not build and one whose runs
//! disagree. Whatever happens, the repository is as it was.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(unix)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use assay_tests::{Bench, assay};
use device::{CAPTURES_FILE, write_captures};
use reference::TensorId;
use serde_json::Value;

/// Commits of the scratch repository, `c1` the first.
const COMMITS: usize = 40;
/// The one that breaks the kernel.
const BAD: usize = 27;
/// The ones that `git bisect` tries first: it does not build, and its runs disagree.
const BROKEN: usize = 20;
const FLAKY: usize = 21;

/// What the kernel is in these tests: it leaves a right bundle or a wrong one.
const CAPTURE: &str = r#"
set -e
cd "$(dirname "$0")"
pick=good
case "$(cat "$KERNEL")" in
*flaky*)
    runs=$(($(cat runs 2>/dev/null || echo 0) + 1))
    echo $runs > runs
    [ $((runs % 2)) = 0 ] || pick=bad ;;
*bad*) pick=bad ;;
*fault*) exit 3 ;;
*malformed*) pick=malformed ;;
*hang*) touch hanging; sleep 60; touch survived ;;
esac
cp $pick/* "$ASSAY_OUT"
"#;

/// A scratch repository beside bundles and a capture script.
struct Scratch {
    dir: tempfile::TempDir,
    hashes: Vec<String>,
}

fn command(program: impl AsRef<std::ffi::OsStr>, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(dir).stdin(Stdio::null());
    // Whoever runs this test has settings of their own, or none.
    command.envs([("GIT_CONFIG_GLOBAL", "/dev/null"), ("GIT_CONFIG_NOSYSTEM", "1")]);
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GITHUB_STEP_SUMMARY", "CLICOLOR_FORCE"] {
        command.env_remove(name);
    }
    command
}

impl Scratch {
    /// A repository whose kernel says in commit `n`, counted from 1, what `kernel` gives for it.
    fn new(commits: usize, kernel: impl Fn(usize) -> &'static str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bench = Bench::recorded("mini/active1");
        for name in ["good", "bad", "malformed"] {
            let folder = dir.path().join(name);
            fs::create_dir(&folder).unwrap();
            for file in ["case.yaml", CAPTURES_FILE] {
                fs::copy(Bench::path("mini/active1").join(file), folder.join(file)).unwrap();
            }
        }
        let mut device = bench.device();
        device.map(TensorId::AttnProjFp32, |row, column, x| if (row, column) == (0, 5) { x + 1.0 } else { x });
        write_captures(&dir.path().join("bad").join(CAPTURES_FILE), &device.captures()).unwrap();
        fs::write(dir.path().join("malformed").join(CAPTURES_FILE), "no tensors").unwrap();
        fs::write(dir.path().join("capture.sh"), CAPTURE).unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        fs::create_dir(dir.path().join("kernel")).unwrap();
        let mut scratch = Self { dir, hashes: Vec::new() };
        scratch.git(&["init", "--quiet", "--initial-branch", "main"]);
        for n in 1..=commits {
            fs::write(scratch.repository().join("kernel.txt"), format!("{n} {}\n", kernel(n))).unwrap();
            scratch.git(&["add", "kernel.txt"]);
            scratch.git(&["commit", "--quiet", "--message", &format!("c{n}: a change")]);
            scratch.hashes.push(scratch.git(&["rev-parse", "HEAD"]));
        }
        scratch
    }

    fn repository(&self) -> PathBuf {
        self.dir.path().join("kernel")
    }

    fn hash(&self, n: usize) -> &str {
        &self.hashes[n - 1]
    }

    fn git(&self, args: &[&str]) -> String {
        let mut git = command("git", &self.repository());
        let identity = [("NAME", "Ada"), ("EMAIL", "ada@example.org"), ("DATE", "2026-01-02T03:04:05Z")];
        for (what, value) in identity {
            git.env(format!("GIT_AUTHOR_{what}"), value).env(format!("GIT_COMMITTER_{what}"), value);
        }
        let output = git.args(args).output().unwrap();
        assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    fn start(&self, args: &[&str]) -> Command {
        let mut bisect = command(assay(), &self.repository());
        let script = format!("KERNEL=$PWD/kernel.txt sh '{}'", self.dir.path().join("capture.sh").display());
        bisect.args(["bisect", "commit", "--capture", &script]).args(args);
        bisect.env("TMPDIR", self.dir.path().join("tmp"));
        bisect
    }

    fn bisect(&self, args: &[&str]) -> Output {
        self.start(args).output().unwrap()
    }

    /// Everything that a search could leave behind: branch and index, changes, work trees, refs, temporary files.
    fn state(&self) -> String {
        let mut state: Vec<String> = [
            &["symbolic-ref", "HEAD"][..],
            &["rev-parse", "HEAD"],
            &["status", "--porcelain"],
            &["worktree", "list", "--porcelain"],
            &["for-each-ref"],
            &["stash", "list"],
        ]
        .into_iter()
        .map(|args| self.git(args))
        .collect();
        let files = fs::read_dir(self.dir.path().join("tmp")).unwrap().map(|entry| entry.unwrap().file_name());
        state.extend(files.map(|name| name.to_string_lossy().into_owned()));
        let git = fs::read_dir(self.repository().join(".git")).unwrap().map(|entry| entry.unwrap().file_name());
        let bisect = git.map(|name| name.to_string_lossy().into_owned()).filter(|name| name.starts_with("BISECT"));
        state.extend(bisect);
        state.join("\n")
    }
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

fn read(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}{}", stdout(output), stderr(output)))
}

#[test]
fn the_commit_that_broke_it_is_found_past_one_that_does_not_build_and_a_flaky_one() {
    let scratch = Scratch::new(COMMITS, |n| match n {
        BROKEN => "broken",
        FLAKY => "flaky",
        n if n >= BAD => "bad",
        _ => "good",
    });
    fs::write(scratch.repository().join("untracked"), "mine").unwrap();
    let before = scratch.state();
    // The build leaves a file, and changes one that every commit has.
    let build = "echo building; touch built; ! grep broken kernel.txt && echo >> kernel.txt";
    let run = scratch.bisect(&["--good", scratch.hash(1), "--build", build, "--format", "json"]);
    assert_eq!(code(&run), 0, "{}{}", stdout(&run), stderr(&run));
    assert_eq!(stderr(&run), "", "no progress in a pipe");
    assert_eq!(scratch.state(), before);

    let report = read(&run);
    assert_eq!((&report["verdict"], &report["outcome"]), (&"pass".into(), &"first_bad".into()));
    let first = &report["first_bad"];
    assert_eq!(first["hash"], scratch.hash(BAD));
    assert_eq!(first["subject"], format!("c{BAD}: a change"));
    assert_eq!(first["author"], "Ada <ada@example.org>");
    assert!(first["date"].as_str().unwrap().starts_with("2026-01-02T03:04:05"));
    assert_eq!(report["first_divergence"], "attn_proj_fp32");
    assert!(report["detail"].as_str().unwrap().contains("1 of 40,960 elements drifts"), "{}", report["detail"]);
    assert_eq!((&report["cause"], &report["suspects"]), (&Value::Null, &serde_json::json!([])));

    let tried = report["tried"].as_array().unwrap();
    assert!(tried.len() < 12, "{} commits tried", tried.len());
    let of = |n: usize| tried.iter().find(|tried| tried["commit"]["hash"] == scratch.hash(n)).unwrap();
    assert_eq!(
        (&tried[0]["commit"]["hash"], &tried[1]["commit"]["hash"]),
        (&first_hash(&scratch), &last_hash(&scratch))
    );
    let marks =
        |n: usize| of(n)["runs"].as_array().unwrap().iter().map(|run| run["verdict"].clone()).collect::<Vec<_>>();
    assert_eq!((&of(BROKEN)["verdict"], marks(BROKEN)), (&"skip".into(), vec![]));
    assert!(of(BROKEN)["reason"].as_str().unwrap().contains("does not build"));
    assert_eq!((&of(FLAKY)["verdict"], &of(FLAKY)["flaky"]), (&"skip".into(), &true.into()));
    assert_eq!(marks(FLAKY), ["bad", "good", "bad", "good"]);
    assert_eq!(of(FLAKY)["reason"], "flaky: 2 of 4 runs failed, 2 passed");
    assert_eq!((marks(BAD), marks(BAD - 1)), (vec!["bad".into(), "bad".into()], vec!["good".into(), "good".into()]));
    let log = fs::read_to_string(of(BAD)["log"].as_str().unwrap()).unwrap();
    assert!(log.contains("building") && log.contains("capture.sh") && log.contains("run 2: bad"), "{log}");

    let human = stdout(&scratch.bisect(&["--good", scratch.hash(1), "--build", build]));
    assert!(
        human.contains(&format!("the first bad commit is {} c{BAD}: a change", &scratch.hash(BAD)[..12])),
        "{human}"
    );
    assert!(human.contains("First divergence: attn_proj_fp32") && human.contains("exit code 0"), "{human}");
}

fn first_hash(scratch: &Scratch) -> Value {
    scratch.hash(1).into()
}

fn last_hash(scratch: &Scratch) -> Value {
    scratch.hash(COMMITS).into()
}

#[test]
fn ends_that_are_not_what_they_are_said_to_be_search_nothing() {
    let scratch = Scratch::new(6, |n| match n {
        1 => "fault",
        2 => "bad",
        6 => "flaky",
        _ => "good",
    });
    let before = scratch.state();
    for (good, bad, expected, outcome, words) in [
        (2, 5, 1, "good_end_fails", "the good end"),
        (3, 5, 1, "bad_end_passes", "the bad end"),
        (1, 5, 125, "end_not_judged", "exited with 3"),
        (3, 6, 125, "end_not_judged", "flaky"),
    ] {
        let run = scratch.bisect(&["--good", scratch.hash(good), "--bad", scratch.hash(bad), "--format", "json"]);
        assert_eq!(code(&run), expected, "{}{}", stdout(&run), stderr(&run));
        let report = read(&run);
        assert_eq!((&report["outcome"], &report["first_bad"]), (&outcome.into(), &Value::Null));
        let message = report["message"].as_str().unwrap();
        let end = if bad == 5 && outcome != "bad_end_passes" { good } else { bad };
        assert!(message.contains(words) && message.contains(&scratch.hash(end)[..12]), "{message}");
        assert!(report["tried"].as_array().unwrap().len() <= 2);
        assert_eq!(scratch.state(), before);
    }
    // A build that fails everywhere judges nothing, and leaves nothing.
    let run = scratch.bisect(&["--good", scratch.hash(3), "--bad", scratch.hash(5), "--build", "touch x; exit 7"]);
    assert_eq!(code(&run), 125);
    assert!(stdout(&run).contains("the build command exited with 7"), "{}", stdout(&run));
    assert_eq!(scratch.state(), before);
}

#[test]
fn what_cannot_be_judged_hides_the_answer_and_is_listed() {
    let scratch = Scratch::new(6, |n| match n {
        1 | 2 => "good",
        3 | 4 => "fault",
        _ => "bad",
    });
    let run = scratch.bisect(&["--good", scratch.hash(1), "--format", "json", "--repeat", "1"]);
    assert_eq!(code(&run), 125, "{}", stderr(&run));
    let report = read(&run);
    assert_eq!((&report["outcome"], &report["first_bad"]), (&"suspects".into(), &Value::Null));
    let suspects: Vec<_> = report["suspects"].as_array().unwrap().iter().map(|commit| commit["hash"].clone()).collect();
    assert_eq!(suspects, [5, 4, 3].map(|n| Value::from(scratch.hash(n))));
    assert_eq!(report["first_divergence"], "attn_proj_fp32");
}

#[test]
fn a_malformed_bundle_ends_the_search_or_is_skipped() {
    let scratch = Scratch::new(5, |n| match n {
        3 => "malformed",
        n if n > 3 => "bad",
        _ => "good",
    });
    let before = scratch.state();
    let ended = scratch.bisect(&["--good", scratch.hash(1), "--format", "json"]);
    assert_eq!(code(&ended), 2, "{}", stderr(&ended));
    let report = read(&ended);
    let message = report["message"].as_str().unwrap();
    assert_eq!((&report["verdict"], &report["outcome"]), (&"error".into(), &"malformed".into()));
    assert!(message.contains(&scratch.hash(3)[..12]) && message.contains("captures.safetensors"), "{message}");
    assert_eq!(scratch.state(), before);
    let skipped = read(&scratch.bisect(&["--good", scratch.hash(1), "--format", "json", "--skip-malformed"]));
    assert_eq!(skipped["outcome"], "suspects");
    assert_eq!(skipped["suspects"].as_array().unwrap().len(), 2);
}

#[test]
fn a_case_and_options_of_the_gate_are_passed_on() {
    let scratch = Scratch::new(3, |n| if n == 3 { "bad" } else { "good" });
    let case = Bench::path("mini/active1").join("case.yaml");
    let with = ["--case", case.to_str().unwrap(), "--good", scratch.hash(1), "--format", "json"];
    let capture = format!(
        "d=good; ! grep -q bad kernel.txt || d=bad; cp '{}'/$d/{CAPTURES_FILE} {{out}}; test -f {{case}}; test {{commit}} \
         = $ASSAY_COMMIT",
        scratch.dir.path().display()
    );
    let run = |gate: &[&str]| {
        let mut bisect = command(assay(), &scratch.repository());
        bisect.args(["bisect", "commit", "--capture", &capture]).args(with).args(gate);
        bisect.env("TMPDIR", scratch.dir.path().join("tmp")).output().unwrap()
    };
    let found = run(&[]);
    assert_eq!(
        (code(&found), read(&found)["first_bad"]["hash"].as_str()),
        (0, Some(scratch.hash(3))),
        "{}",
        stderr(&found)
    );
    // The fault does not show in the tensor that is looked at.
    let blind = run(&["--", "--tensors", "normed_states"]);
    assert_eq!(read(&blind)["outcome"], "bad_end_passes");
    for gate in
        [&["--", "--format", "human"][..], &["--", "somewhere"], &["--", "--no-such-option"], &["--", "--junit=x"]]
    {
        let refused = run(gate);
        assert_eq!(code(&refused), 2, "{gate:?}");
        assert!(read(&refused)["message"].as_str().unwrap().contains("behind `--`"), "{}", stdout(&refused));
    }
}

#[test]
fn with_first_parents_alone_the_merge_is_named_and_clean_builds_start_from_scratch() {
    let scratch = Scratch::new(2, |_| "good");
    let change = |kernel: &str, branch: &str| {
        fs::write(scratch.repository().join("kernel.txt"), kernel).unwrap();
        scratch.git(&["commit", "--quiet", "--all", "--message", branch]);
        scratch.git(&["rev-parse", "HEAD"])
    };
    scratch.git(&["checkout", "--quiet", "-b", "side"]);
    let broke = change("bad\n", "side");
    change("bad still\n", "more of side");
    scratch.git(&["checkout", "--quiet", "main"]);
    scratch.git(&["merge", "--quiet", "--no-ff", "--message", "merge side", "side"]);
    let merge = scratch.git(&["rev-parse", "HEAD"]);
    // A build that finds what an earlier one left fails; only a clean tree has none.
    let with =
        ["--good", scratch.hash(1), "--format", "json", "--repeat", "1", "--build", "! test -e left && touch left"];
    let found = |more: &[&str]| read(&scratch.bisect(&[&with, more].concat()));
    assert_eq!(found(&["--clean"])["first_bad"]["hash"], broke);
    assert_eq!(found(&["--clean", "--first-parent"])["first_bad"]["hash"], merge);
    assert_eq!(found(&[])["outcome"], "end_not_judged");
}

#[test]
fn wrong_requests_are_refused_before_anything_runs() {
    let scratch = Scratch::new(3, |_| "good");
    let [first, last] = [1, 3].map(|n| scratch.hash(n));
    let refusal = |args: &[&str]| {
        let run = scratch.bisect(&[args, &["--format", "json"]].concat());
        assert_eq!(code(&run), 2, "{}", stdout(&run));
        read(&run)["message"].as_str().unwrap().to_owned()
    };
    assert!(refusal(&["--good", "nowhere"]).contains("--good nowhere"));
    assert!(refusal(&["--good", "--all"]).contains("--all"));
    assert!(refusal(&["--good", last]).contains("the same commit"));
    assert!(refusal(&["--good", last, "--bad", first]).contains("no ancestor"));
    assert!(refusal(&["--good", first, "--repeat", "0"]).contains("--repeat"));
    assert!(refusal(&["--good", first, "--case", "no.yaml"]).contains("no.yaml"));
    assert!(refusal(&["--good", first, "--repo", "no-such"]).contains("no-such"));
    assert!(
        refusal(&["--good", first, "--repo", scratch.dir.path().to_str().unwrap()]).contains("not a git repository")
    );

    fs::write(scratch.repository().join("kernel.txt"), "changed").unwrap();
    let told = refusal(&["--good", first]);
    assert!(told.contains("kernel.txt") && told.contains("commit or stash"), "{told}");
    assert_eq!(fs::read_to_string(scratch.repository().join("kernel.txt")).unwrap(), "changed");
    scratch.git(&["checkout", "kernel.txt"]);

    scratch.git(&["bisect", "start"]);
    assert!(refusal(&["--good", first]).contains("git bisect reset"));
    scratch.git(&["bisect", "reset"]);
}

fn wait(what: &str, ready: impl Fn() -> bool) {
    let started = Instant::now();
    while !ready() {
        assert!(started.elapsed() < Duration::from_secs(60), "{what} does not come");
        sleep(Duration::from_millis(20));
    }
}

fn signal(child: &Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn a_search_that_is_ended_leaves_everything_as_it_was() {
    let scratch = Scratch::new(9, |n| match n {
        5 => "hang",
        n if n > 5 => "bad",
        _ => "good",
    });
    let before = scratch.state();
    let hanging = scratch.dir.path().join("hanging");
    for name in ["-INT", "-TERM"] {
        let _ = fs::remove_file(&hanging);
        let mut bisect = scratch.start(&["--good", scratch.hash(1), "--format", "json"]);
        let child = bisect.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait("the commit that hangs", || hanging.exists());
        assert_ne!(scratch.state(), before, "a work tree is there while it runs");
        signal(&child, name);
        let started = Instant::now();
        let ended = child.wait_with_output().unwrap();
        assert!(started.elapsed() < Duration::from_secs(30), "it does not wait for the capture");
        assert_eq!(code(&ended), 125, "{}", stderr(&ended));
        let report = read(&ended);
        assert_eq!((&report["outcome"], report["tried"].as_array().unwrap().len()), (&"interrupted".into(), 2));
        assert_eq!(scratch.state(), before, "{name}");
    }
    // What hangs is skipped when its time is over; its neighbours tell that it may be the one.
    let run = scratch.bisect(&["--good", scratch.hash(1), "--format", "json", "--timeout", "10", "--repeat", "1"]);
    let report = read(&run);
    assert_eq!(report["outcome"], "suspects", "{report}");
    let hung =
        report["tried"].as_array().unwrap().iter().find(|tried| tried["commit"]["hash"] == scratch.hash(5)).unwrap();
    assert_eq!(hung["reason"], "the capture command took longer than 10 s");
    assert_eq!(scratch.state(), before);
    assert!(!scratch.dir.path().join("survived").exists());
}
