//! Where the repository's suites are.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cases::Suite;

use crate::refusal::Refusal;

const FOLDER: &str = "goldens/suites";

/// The folder of the repository's suites: of the clone that it runs in, or else of the workspace that this program was
/// built from.
pub fn folder() -> Option<PathBuf> {
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|root| root.join(FOLDER));
    let here = std::env::current_dir().ok();
    let above = here.iter().flat_map(|here| here.ancestors()).map(|root| root.join(FOLDER));
    above.chain(built).find(|folder| folder.is_dir())
}

/// The suite files of the repository, sorted by name.
///
/// # Errors
/// There is no repository here, or its folder cannot be read.
pub fn all() -> Result<Vec<PathBuf>, Refusal> {
    let folder = folder().ok_or_else(absent)?;
    let unreadable = |error| Refusal::Request(format!("{}: {error}", folder.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The suite file meant by a name (`default`) or a path (`my/suite.yaml`).
///
/// # Errors
/// No suite has that name; the message lists those there are.
pub fn find(name: &str) -> Result<PathBuf, Refusal> {
    let path = Path::new(name);
    if path.components().count() != 1 || path.extension().is_some() {
        return Ok(path.to_path_buf());
    }
    let files = all()?;
    let named = |file: &&PathBuf| file.file_stem().is_some_and(|stem| stem == name);
    files.iter().find(named).cloned().ok_or_else(|| {
        let known: Vec<_> = files.iter().filter_map(|file| file.file_stem()?.to_str()).collect();
        Refusal::Request(format!("no suite is called `{name}`; the repository has: {}", known.join(", ")))
    })
}

/// The case files of suites and under paths, in the order named, each once.
///
/// # Errors
/// A suite or a path that is not there or holds no case.
pub fn files<'n>(suites: impl IntoIterator<Item = &'n str>, paths: &[PathBuf]) -> Result<Vec<PathBuf>, Refusal> {
    let mut files = Vec::new();
    for name in suites {
        files.extend(Suite::load(&find(name)?)?.bundles);
    }
    for path in paths {
        files.extend(cases::discover(path)?);
    }
    let mut seen = BTreeSet::new();
    files.retain(|file| seen.insert(file.canonicalize().unwrap_or_else(|_| file.clone())));
    Ok(files)
}

fn absent() -> Refusal {
    Refusal::Request(format!(
        "no {FOLDER} here or above, so the repository's suites cannot be found; \
         run inside a clone of the repository, or name bundles, a directory or a suite file"
    ))
}
