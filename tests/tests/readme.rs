//! The README tells the truth: each `console` block is run in the repository and has to print what it shows,
//! times aside.

// Helpers of tests are no tests to clippy.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use assay_tests::assay;
use similar::TextDiff;

/// Command lines of the `console` blocks with what they are shown to print.
fn shown(readme: &str) -> Vec<(String, String)> {
    let blocks = readme.split("```console\n").skip(1).map(|block| block.split("```").next().unwrap());
    blocks
        .map(|block| {
            let (command, output) = block.split_once('\n').unwrap();
            (command.strip_prefix("$ ").unwrap().to_owned(), output.to_owned())
        })
        .collect()
}

/// The text with every time in seconds (`0.46 s` at the end of a line) replaced.
fn untimed(text: &str) -> String {
    let line = |line: &str| match line.strip_suffix(" s").and_then(|rest| rest.rsplit_once(' ')) {
        Some((before, time)) if time.parse::<f64>().is_ok() => format!("{before} [time]"),
        _ => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[test]
fn every_command_shown_prints_what_is_shown() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let blocks = shown(&fs::read_to_string(root.join("README.md")).unwrap());
    assert!(blocks.len() >= 2, "the README shows a run that passes and one that fails");
    for (command, output) in blocks {
        let arguments = command.strip_prefix("cargo xtask ").expect("commands are run through cargo xtask");
        let run = Command::new(assay())
            .args(arguments.split(' '))
            .current_dir(&root)
            .env_remove("GITHUB_STEP_SUMMARY")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let printed = String::from_utf8(run.stdout).unwrap();
        let (shown, printed) = (untimed(output.trim_end()), untimed(printed.trim_end()));
        let diff = TextDiff::from_lines(&shown, &printed);
        assert!(shown == printed, "{command} prints something else than the README shows:\n{}", diff.unified_diff());
    }
}
