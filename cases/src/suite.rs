//! Suites, which list bundles in a YAML file, and the search for case files under a path.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::case::CASE_FILE;
use crate::error::{CaseError, Document, read_text};
use crate::schema::RawSuite;

/// A named list of bundles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suite {
    /// The suite file.
    pub path: PathBuf,
    /// Its name.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// Bundle directories or case files, resolved against the suite file's directory, in file order.
    pub bundles: Vec<PathBuf>,
}

impl Suite {
    /// Reads a suite file.
    ///
    /// # Errors
    /// An unreadable or malformed file, an empty list, a bundle listed twice or not there.
    pub fn load(path: &Path) -> Result<Self, CaseError> {
        let text = read_text(path)?;
        let document = Document::new(path, &text);
        let raw: RawSuite = document.read()?;
        let suite = Self::from_raw(&raw, &document)?;
        for (bundle, listed) in suite.bundles.iter().zip(&raw.bundles.value) {
            if !bundle.exists() {
                let message = format!("bundles: {} does not exist", bundle.display());
                let help = "bundles are named relative to the suite file";
                return Err(document.error(listed.referenced, message, help));
            }
        }
        Ok(suite)
    }

    /// Reads the text of a suite file, without a look at the bundles; `path` is where the text came from.
    ///
    /// # Errors
    /// A malformed text, an empty list, a bundle listed twice.
    pub fn parse(text: &str, path: &Path) -> Result<Self, CaseError> {
        let document = Document::new(path, text);
        Self::from_raw(&document.read()?, &document)
    }

    fn from_raw(raw: &RawSuite, document: &Document<'_>) -> Result<Self, CaseError> {
        if raw.name.value.trim().is_empty() {
            return Err(document.error(raw.name.referenced, "name: expected some text", "write a short name"));
        }
        if raw.bundles.value.is_empty() {
            return Err(document.error(
                raw.bundles.referenced,
                "bundles: the list is empty",
                "list at least one bundle",
            ));
        }
        let base = document.path().parent().unwrap_or(Path::new(""));
        let mut bundles: Vec<PathBuf> = Vec::with_capacity(raw.bundles.value.len());
        for listed in &raw.bundles.value {
            let bundle = base.join(&listed.value);
            if bundles.contains(&bundle) {
                let message = format!("bundles: {:?} is listed twice", listed.value);
                return Err(document.error(listed.referenced, message, "keep one of the two"));
            }
            bundles.push(bundle);
        }
        let (name, description) = (raw.name.value.clone(), raw.description.clone());
        Ok(Self { path: document.path().to_owned(), name, description, bundles })
    }
}

/// Why a search found no case.
#[derive(Debug, Error)]
pub enum DiscoverError {
    /// The path, or something under it, cannot be read.
    #[error("{}: cannot look for cases there: {source}", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A directory without a case.
    #[error("{}: no {CASE_FILE} in this directory or below; name a case file, a bundle, or a directory of bundles", .0.display())]
    NothingFound(PathBuf),
    /// Directories nested without end.
    #[error("{}: directories are nested more than {MAX_DEPTH} deep; name the bundles themselves", .0.display())]
    TooDeep(PathBuf),
}

/// Deepest search below the path given. It ends searches in directories that are linked into themselves.
const MAX_DEPTH: usize = 16;

/// The case files that `path` stands for: itself, when it is a file; the `case.yaml` of a bundle; or those of
/// every bundle below a directory, sorted by path. Hidden directories and linked directories below `path`
/// are not searched.
///
/// # Errors
/// An unreadable path, or a directory without any case.
pub fn discover(path: &Path) -> Result<Vec<PathBuf>, DiscoverError> {
    let unreadable = |source| DiscoverError::Unreadable { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut found = Vec::new();
    search(path, 0, &mut found)?;
    if found.is_empty() { Err(DiscoverError::NothingFound(path.to_owned())) } else { Ok(found) }
}

fn search(directory: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), DiscoverError> {
    let file = directory.join(CASE_FILE);
    // A bundle holds no further bundles.
    if file.is_file() {
        found.push(file);
        return Ok(());
    }
    if depth == MAX_DEPTH {
        return Err(DiscoverError::TooDeep(directory.to_owned()));
    }
    let unreadable = |source| DiscoverError::Unreadable { path: directory.to_owned(), source };
    let mut below = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if !hidden && entry.file_type().map_err(unreadable)?.is_dir() {
            below.push(entry.path());
        }
    }
    below.sort();
    below.iter().try_for_each(|directory| search(directory, depth + 1, found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn suites_resolve_bundles_against_their_own_directory() {
        let text = "name: small\ndescription: two\nbundles:\n  - ../bundles/a\n  - b\n";
        let suite = Suite::parse(text, Path::new("suites/small.yaml")).unwrap();
        assert_eq!(suite.bundles, [PathBuf::from("suites/../bundles/a"), PathBuf::from("suites/b")]);
        assert_eq!((suite.name.as_str(), suite.description.as_str()), ("small", "two"));
    }

    #[test]
    fn faults_are_located() {
        for (text, place, words) in [
            ("name: a\nbundles: []\n", "s.yaml:2:10", "empty"),
            ("name: a\nbundles: [x, y, x]\n", "s.yaml:2:17", "twice"),
            ("name: ''\nbundles: [x]\n", "s.yaml:1:7", "name"),
            ("name: a\n", "s.yaml:1:1", "bundles"),
            ("name: a\nbundles: [x]\nextra: 1\n", "s.yaml:3:1", "extra"),
        ] {
            let error = Suite::parse(text, Path::new("s.yaml")).unwrap_err().to_string();
            assert!(error.starts_with(place) && error.contains(words), "{error}");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s.yaml");
        fs::write(&path, "name: a\nbundles:\n  - x\n").unwrap();
        let error = Suite::load(&path).unwrap_err();
        assert_eq!(error.line(), Some(3));
        assert!(error.to_string().contains("does not exist"), "{error}");
    }

    #[test]
    fn searches_are_sorted_and_never_empty() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        assert!(matches!(discover(root), Err(DiscoverError::NothingFound(_))));
        assert!(matches!(discover(&root.join("none")), Err(DiscoverError::Unreadable { .. })));
        for bundle in ["b/two", "a", "b/one", ".hidden", "a/inner"] {
            fs::create_dir_all(root.join(bundle)).unwrap();
            fs::write(root.join(bundle).join(CASE_FILE), "").unwrap();
        }
        let expected: Vec<PathBuf> = ["a", "b/one", "b/two"].map(|bundle| root.join(bundle).join(CASE_FILE)).into();
        assert_eq!(discover(root).unwrap(), expected);
        assert_eq!(discover(&root.join("a")).unwrap(), expected[..1]);
        assert_eq!(discover(&expected[1]).unwrap(), expected[1..2]);
    }
}
