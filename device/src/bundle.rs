//! A recorded bundle: the case that was run beside what the device produced.

use std::path::{Path, PathBuf};

use cases::{Case, CaseError, Kernel};
use reference::PAGE;
use thiserror::Error;

use crate::captures::{CaptureError, Captures, Layout};

/// Name of the captures in a bundle's directory.
pub const CAPTURES_FILE: &str = "captures.safetensors";

/// A case and, where the device gave any, its outputs.
#[derive(Debug)]
pub struct Bundle {
    /// Directory of the case file.
    pub dir: PathBuf,
    /// What was run.
    pub case: Case,
    /// What came out; `None` when the directory holds no captures.
    pub captures: Option<Captures>,
}

/// A bundle that cannot be used.
#[derive(Debug, Error)]
pub enum BundleError {
    /// The case file is wrong.
    #[error(transparent)]
    Case(#[from] CaseError),
    /// The captures are malformed.
    #[error(transparent)]
    Captures(#[from] CaptureError),
}

impl Bundle {
    /// Reads the bundle at `path`, a directory or the case file in it.
    ///
    /// # Errors
    /// The case file is wrong, or there are captures and they are malformed.
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        let case = Case::load(path)?;
        let dir = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) }.to_path_buf();
        let file = dir.join(CAPTURES_FILE);
        // A link to nowhere is there, and opening it says what is wrong with it.
        let captures = match file.symlink_metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            _ => Some(Captures::open(&file, &case.geometry, &Layout::of(&case))?),
        };
        Ok(Self { dir, case, captures })
    }
}

impl Layout {
    /// What a capture of this case may hold.
    #[must_use]
    pub fn of(case: &Case) -> Self {
        let cache_rows = case.layers * case.pages * case.geometry.num_key_value_heads * PAGE;
        match &case.kernel {
            Kernel::DecodeLayer(_) => Self::DecodeLayer { cache_rows },
            Kernel::Tokens(tokens) => Self::Tokens {
                rows: tokens.prompts.len(),
                decode_steps: tokens.decode_steps,
                prompt_tokens: tokens.prompts.iter().map(Vec::len).sum(),
                cache_rows,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use cases::{NewCase, new_case};

    use super::*;

    fn bundle() -> (tempfile::TempDir, Case) {
        let dir = tempfile::tempdir().unwrap();
        let case = new_case(NewCase::named("t", "mini").unwrap()).unwrap();
        std::fs::write(dir.path().join("case.yaml"), case.to_yaml()).unwrap();
        (dir, case)
    }

    #[test]
    fn a_bundle_opens_by_directory_and_by_case_file() {
        let (dir, case) = bundle();
        let captures = Captures { metadata: [("a".into(), "b".into())].into(), ..Captures::default() };
        crate::write_captures(&dir.path().join(CAPTURES_FILE), &captures).unwrap();
        for path in [dir.path().to_path_buf(), dir.path().join("case.yaml")] {
            let bundle = Bundle::open(&path).unwrap();
            assert_eq!(bundle.case.name, case.name);
            assert_eq!(bundle.dir, dir.path());
            assert_eq!(bundle.captures.as_ref(), Some(&captures));
        }
    }

    #[test]
    fn missing_captures_are_no_error_and_broken_ones_are() {
        let (dir, _) = bundle();
        assert_eq!(Bundle::open(dir.path()).unwrap().captures, None);
        std::fs::write(dir.path().join(CAPTURES_FILE), b"not safetensors").unwrap();
        let message = Bundle::open(dir.path()).unwrap_err().to_string();
        assert!(message.contains(CAPTURES_FILE) && message.contains("header length"), "{message}");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nowhere_is_not_the_same_as_no_captures() {
        let (dir, _) = bundle();
        std::os::unix::fs::symlink("nowhere", dir.path().join(CAPTURES_FILE)).unwrap();
        assert!(matches!(Bundle::open(dir.path()), Err(BundleError::Captures(_))));
    }

    #[test]
    fn the_layout_follows_the_case() {
        let (_, case) = bundle();
        let rows = case.pages * case.geometry.num_key_value_heads * 128;
        assert_eq!(Layout::of(&case), Layout::DecodeLayer { cache_rows: rows });
    }
}
