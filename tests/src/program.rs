//! The command line program, as a user runs it, and the library that stands in for AscendCL.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The program, built once into the folder that this test was built into.
#[must_use]
pub fn assay() -> &'static Path {
    static ASSAY: LazyLock<PathBuf> = LazyLock::new(|| {
        built(&["--workspace", "--bin", "assay"]).join(format!("assay{}", std::env::consts::EXE_SUFFIX))
    });
    &ASSAY
}

/// The library that takes the place of AscendCL, built alike.
#[must_use]
pub fn mock_ascendcl() -> &'static Path {
    use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
    static MOCK: LazyLock<PathBuf> = LazyLock::new(|| {
        built(&["--package", "mock-ascendcl", "--lib"]).join(format!("{DLL_PREFIX}mock_ascendcl{DLL_SUFFIX}"))
    });
    &MOCK
}

/// Builds what is asked for, and gives the folder that it is in. As part of the workspace, so that nothing that the tests
/// were built with is built again with other features.
fn built(what: &[&str]) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.ancestors().nth(2).unwrap();
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "test",
        Some(profile) => profile,
    };
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--profile", profile])
        .args(what)
        .arg("--target-dir")
        .arg(folder.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stdin(Stdio::null())
        .status()
        .unwrap();
    assert!(built.success(), "{what:?} does not build");
    folder.to_owned()
}
