//! The command line program, as a user runs it, and the library that stands in for AscendCL.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::LazyLock;

/// The program, built once into the folder that this test was built into. As a test of the whole workspace would build it:
/// the same features, so that nothing is built again.
#[must_use]
pub fn assay() -> &'static Path {
    static ASSAY: LazyLock<PathBuf> = LazyLock::new(|| {
        built(&["test", "--no-run", "--workspace", "--test", "cli"])
            .join(format!("assay{}", std::env::consts::EXE_SUFFIX))
    });
    &ASSAY
}

/// Runs the program in a directory, plain and away from what a terminal or a CI sets.
#[must_use]
pub fn run(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(assay());
    command.args(args).current_dir(dir).env_remove("GITHUB_STEP_SUMMARY").env_remove("CLICOLOR_FORCE");
    command.stdin(Stdio::null()).output().unwrap()
}

/// The exit code of a run.
#[must_use]
pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// What a run said on standard error.
#[must_use]
pub fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The library that takes the place of AscendCL, built alike.
#[must_use]
pub fn mock_ascendcl() -> &'static Path {
    use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
    static MOCK: LazyLock<PathBuf> = LazyLock::new(|| {
        built(&["build", "--package", "mock-ascendcl", "--lib"]).join(format!("{DLL_PREFIX}mock_ascendcl{DLL_SUFFIX}"))
    });
    &MOCK
}

/// Has cargo build something, and gives the folder that it is in.
fn built(what: &[&str]) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "test",
        Some(profile) => profile,
    };
    let built = Command::new(env!("CARGO"))
        .args(what)
        .args(["--quiet", "--profile", profile])
        .arg("--target-dir")
        .arg(folder.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(built.success(), "{what:?} does not build");
    folder.to_owned()
}
