//! The command line program, as a user runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The program, built once into the folder that this test was built into.
#[must_use]
pub fn assay() -> &'static Path {
    static ASSAY: LazyLock<PathBuf> = LazyLock::new(|| {
        let test = std::env::current_exe().unwrap();
        let folder = test.ancestors().nth(2).unwrap();
        let profile = match folder.file_name().and_then(|name| name.to_str()) {
            Some("debug") | None => "test",
            Some(profile) => profile,
        };
        let built = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--package", "xtask", "--bin", "assay", "--profile", profile, "--target-dir"])
            .arg(folder.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stdin(Stdio::null())
            .status()
            .unwrap();
        assert!(built.success(), "the program does not build");
        folder.join(format!("assay{}", std::env::consts::EXE_SUFFIX))
    });
    &ASSAY
}
