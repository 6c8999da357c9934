//! The dumps of many goldens in one directory: each is named as its golden, a bundle's directory or a file. Two for one
//! golden are refused, a golden without one is unjudged, and what is no golden's dump is told, because a typing error
//! looks like that.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::golden::Golden;
use super::judge::empty;
use super::report::TokensReport;

/// What may follow a golden's name in that of its dump.
const KINDS: [&str; 3] = [".json", ".safetensors", ".txt"];
/// Names of a remark before the rest is counted.
const FEW: usize = 20;

/// A directory of dumps, each with its golden.
#[derive(Clone, Debug)]
pub struct Dumps {
    dir: PathBuf,
    /// By golden.
    found: BTreeMap<String, PathBuf>,
    /// The first names of what is no golden's dump.
    strays: BTreeSet<String>,
    /// How many of these there are.
    strays_total: usize,
}

/// Why a directory of dumps is refused.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum DumpsError {
    #[error("{}: cannot be read as a directory of dumps: {error}; name one with --dumps", dir.display())]
    Io { dir: PathBuf, error: io::Error },
    #[error("{}: holds two dumps of the golden `{golden}`, {one} and {other}; leave one of them there", dir.display())]
    Two { dir: PathBuf, golden: String, one: String, other: String },
}

impl Dumps {
    /// Finds the dumps of these goldens in `dir`: `NAME`, a bundle's directory or a file, or `NAME.json`,
    /// `NAME.safetensors` or `NAME.txt`. What begins with a dot is passed over.
    ///
    /// # Errors
    /// The directory cannot be read, or holds two dumps of a golden.
    pub fn list<'a>(dir: &Path, goldens: impl IntoIterator<Item = &'a str>) -> Result<Self, DumpsError> {
        let failed = |error| DumpsError::Io { dir: dir.to_owned(), error };
        let mut named: BTreeMap<&str, BTreeSet<String>> =
            goldens.into_iter().map(|golden| (golden, BTreeSet::new())).collect();
        let (mut strays, mut strays_total) = (BTreeSet::new(), 0);
        for entry in std::fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            // A golden may be called `a.json`: the longer name is the one that is meant.
            let stem = KINDS.iter().find_map(|kind| entry.strip_suffix(kind)).unwrap_or(&entry);
            let golden = if named.contains_key(entry.as_str()) { &entry } else { stem };
            match named.get_mut(golden) {
                Some(names) => drop(names.insert(entry)),
                None if entry.starts_with('.') => {}
                None => {
                    strays_total += 1;
                    strays.insert(entry);
                    if strays.len() > FEW {
                        strays.pop_last();
                    }
                }
            }
        }
        let mut found = BTreeMap::new();
        for (golden, names) in named {
            let mut names = names.into_iter();
            let Some(one) = names.next() else { continue };
            if let Some(other) = names.next() {
                return Err(DumpsError::Two { dir: dir.to_owned(), golden: golden.to_owned(), one, other });
            }
            found.insert(golden.to_owned(), dir.join(one));
        }
        Ok(Self { dir: dir.to_owned(), found, strays, strays_total })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Where the dump of a golden is.
    #[must_use]
    pub fn of(&self, golden: &str) -> Option<&Path> {
        self.found.get(golden).map(PathBuf::as_path)
    }

    /// What is to be said of files that are no golden's dump.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        if self.strays.is_empty() {
            return None;
        }
        let names = self.strays.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = match self.strays_total - self.strays.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let verb = if self.strays_total == 1 { "is the dump" } else { "are the dumps" };
        Some(format!("{}: {names}{more} {verb} of no accepted golden", self.dir.display()))
    }
}

/// The report on a golden that has no dump among these.
#[must_use]
pub fn without_dump(golden: &Golden, dumps: &Dumps) -> TokensReport {
    let mut report = empty(golden, "no dump".to_owned());
    let (dir, name) = (dumps.dir.display(), &golden.name);
    report.remarks.push(format!("{dir} has no dump of it: no {name}, {name}.json, {name}.safetensors or {name}.txt"));
    report
}

#[cfg(test)]
mod tests {
    use super::super::golden::tests::golden;
    use super::*;
    use crate::report::Verdict;

    fn folder(entries: &[&str]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in entries {
            match entry.strip_suffix('/') {
                Some(bundle) => std::fs::create_dir(dir.path().join(bundle)).unwrap(),
                None => std::fs::write(dir.path().join(entry), "1").unwrap(),
            }
        }
        dir
    }

    #[test]
    fn each_golden_has_the_dump_of_its_name() {
        let dir = folder(&["a/", "qwen3-0.6b", "c.json", "c.d.txt", "e.json.safetensors", ".f.json"]);
        let dumps = Dumps::list(dir.path(), ["a", "qwen3-0.6b", "c", "c.d", "e.json", "e", "f"]).unwrap();
        let of = |golden| Some(dumps.of(golden)?.strip_prefix(dir.path()).unwrap().to_str().unwrap());
        assert_eq!([of("a"), of("qwen3-0.6b"), of("c")], [Some("a"), Some("qwen3-0.6b"), Some("c.json")]);
        assert_eq!([of("c.d"), of("e.json"), of("e")], [Some("c.d.txt"), Some("e.json.safetensors"), None]);
        assert_eq!((of("f"), of("g"), dumps.remark()), (None, None, None));
        // A file named as a golden is that golden's, whatever else it might be.
        let dir = folder(&["e.json"]);
        let dumps = Dumps::list(dir.path(), ["e", "e.json"]).unwrap();
        assert!(dumps.of("e").is_none() && dumps.of("e.json").is_some());
        let report = without_dump(&golden(vec![]), &dumps);
        assert_eq!((report.verdict, report.found()), (Verdict::Unjudged, Verdict::Unjudged));
        assert!(report.remarks[0].contains("small.safetensors"), "{}", report.remarks[0]);
    }

    #[test]
    fn two_dumps_of_one_golden_are_refused_by_name() {
        let dir = folder(&["a/", "b.txt", "b.json", "b"]);
        let told = Dumps::list(dir.path(), ["a", "b"]).unwrap_err().to_string();
        assert!(told.contains("golden `b`, b and b.json; leave one"), "{told}");
        assert!(Dumps::list(dir.path(), ["a"]).is_ok());
        assert!(matches!(Dumps::list(&dir.path().join("b"), ["a"]), Err(DumpsError::Io { .. })));
    }

    #[test]
    fn what_belongs_to_no_golden_is_told_and_the_telling_has_an_end() {
        let dir = folder(&["a.json", "standnig.json", "b.csv"]);
        let remark = Dumps::list(dir.path(), ["a", "b"]).unwrap().remark().unwrap();
        assert!(remark.ends_with(": b.csv, standnig.json are the dumps of no accepted golden"), "{remark}");
        let many: Vec<String> = (0..30).map(|n| format!("x{n:02}")).collect();
        let dir = folder(&many.iter().map(String::as_str).collect::<Vec<_>>());
        let remark = Dumps::list(dir.path(), ["a"]).unwrap().remark().unwrap();
        assert!(remark.contains(" x18, x19 and 10 more are"), "{remark}");
        let remark = Dumps::list(dir.path(), many[..29].iter().map(String::as_str)).unwrap().remark().unwrap();
        assert!(remark.ends_with(": x29 is the dump of no accepted golden"), "{remark}");
    }
}
