//! A directory as a dump: an argument dump, a sharded checkpoint, or files of any format, as golden directories hold
//! them (`in/q.pt`, `out/attn_out.pt`), each tensor named by its file's path in it.

use std::path::{Path, PathBuf};

use super::error::{DumpError, DumpFault};
use super::open::{Found, file};
use super::{Format, ReadOptions, arguments, tensors_file};

/// Most files of a directory: a system maps some ten thousand.
const MOST_FILES: usize = 10_000;
/// Directories below directories.
const DEEPEST: usize = 8;
/// Extensions of the formats that are read.
const EXTENSIONS: [&str; 5] = ["pt", "pth", "npy", "npz", "safetensors"];

/// Finds what a directory holds.
pub(super) fn find(path: &Path, options: &ReadOptions) -> Result<Found, DumpError> {
    for manifest in [path.join(arguments::MANIFEST), path.join("args_dump").join(arguments::MANIFEST)] {
        if manifest.is_file() {
            return arguments::find(&manifest);
        }
    }
    let entries = list(path)?;
    let indexes: Vec<&PathBuf> = entries.iter().filter(|entry| tensors_file::is_index(entry)).collect();
    match indexes.as_slice() {
        [] => {}
        [index] => return tensors_file::sharded(index),
        [_, second, ..] => {
            let fault =
                DumpFault::Index("stands beside another index; which of the two is meant cannot be told".into());
            return Err(DumpError::new(second, fault));
        }
    }
    let mut files = Vec::new();
    gather(path, entries, DEEPEST, &mut files)?;
    if files.is_empty() {
        return Err(DumpError::new(path, DumpFault::EmptyDirectory));
    }
    let mut found = Found::new(Format::Directory, Vec::new());
    for entry in files {
        let below = entry.strip_prefix(path).unwrap_or(&entry).with_extension("");
        let parts: Vec<String> = below.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        found.join(&parts.join("/"), file(&entry, options)?);
    }
    found.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let twice = found.tensors.windows(2).find_map(|pair| match pair {
        [one, other] if one.name == other.name => Some(one.name.clone()),
        _ => None,
    });
    twice.map_or(Ok(found), |name| Err(DumpError::new(path, DumpFault::Twice(name))))
}

/// What lies in a directory, by name.
fn list(path: &Path) -> Result<Vec<PathBuf>, DumpError> {
    let failed = |error: std::io::Error| DumpError::new(path, error);
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        entries.push(entry.map_err(failed)?.path());
    }
    entries.sort();
    Ok(entries)
}

fn gather(root: &Path, entries: Vec<PathBuf>, depth: usize, files: &mut Vec<PathBuf>) -> Result<(), DumpError> {
    for entry in entries {
        let known = entry.extension().and_then(|extension| extension.to_str());
        // Links to directories are not followed: they may lead in circles.
        if entry.symlink_metadata().is_ok_and(|found| found.is_dir()) {
            if depth > 0 {
                gather(root, list(&entry)?, depth - 1, files)?;
            }
        } else if known.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
            files.push(entry);
        }
        if files.len() > MOST_FILES {
            return Err(DumpError::new(root, DumpFault::ManyFiles { most: MOST_FILES }));
        }
    }
    Ok(())
}
