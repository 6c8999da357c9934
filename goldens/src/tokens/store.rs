//! Where goldens live: `NAME.yaml` is accepted, `NAME.pending.yaml` beside it waits for somebody to say why it should
//! be. Nothing is accepted without a reason, and in CI nothing is written (`docs/tokens.md`, The life of a golden).

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use thiserror::Error;

use super::golden::{Accepted, Golden};
use super::yaml::GoldenError;

const ACCEPTED: &str = ".yaml";
const PENDING: &str = ".pending.yaml";
/// Longest golden that is read: 16 rows of thousands of steps.
const LONGEST: u64 = 64 << 20;

/// A directory of goldens.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    ci: bool,
}

/// Why a store refuses.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum StoreError {
    #[error(transparent)]
    Golden(#[from] GoldenError),
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("`{0}` is no name of a golden; use letters, digits, `-`, `_` and `.`, and begin with a letter or digit")]
    Name(String),
    #[error("the environment variable CI is set: goldens are {0} by people, at their own machines, never by CI")]
    Ci(&'static str),
    #[error("a golden is accepted for a reason: --reason is empty")]
    NoReason,
    #[error("nothing is pending for `{name}`; record it first. {known}")]
    NothingPending { name: String, known: String },
    #[error("no golden is called `{name}`. {known}")]
    Unknown { name: String, known: String },
}

/// What recording did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// The accepted golden says the same; nothing is pending.
    Unchanged,
    /// It waits in this file.
    Pending(PathBuf),
}

/// What a file of a store is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, PartialOrd, Ord)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A standard.
    Accepted,
    /// A proposal.
    Pending,
    /// Neither: nothing reads it, or nothing can.
    Orphan,
}

/// A file of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// Name of the golden, or of the file where it is none.
    pub name: String,
    /// What it is.
    pub state: State,
    /// The file.
    pub path: PathBuf,
    /// Why it was accepted, what is to be done with it.
    pub detail: String,
}

impl Store {
    /// The goldens in `dir`, which need not be there yet. With `ci`, nothing is written.
    #[must_use]
    pub fn new(dir: &Path, ci: bool) -> Self {
        Self { dir: dir.to_owned(), ci }
    }

    /// The accepted golden of this name.
    ///
    /// # Errors
    /// Its file cannot be read, or is no golden.
    pub fn accepted(&self, name: &str) -> Result<Option<Golden>, StoreError> {
        self.read(name, ACCEPTED)
    }

    /// The pending golden of this name.
    ///
    /// # Errors
    /// Its file cannot be read, or is no golden.
    pub fn pending(&self, name: &str) -> Result<Option<Golden>, StoreError> {
        self.read(name, PENDING)
    }

    /// The accepted golden of a name, or the one in a file.
    ///
    /// # Errors
    /// There is none; the message says which there are.
    pub fn find(&self, name_or_file: &str) -> Result<Golden, StoreError> {
        let path = Path::new(name_or_file);
        if path.components().count() > 1 || path.extension().is_some_and(|kind| kind == "yaml") {
            return Ok(open(path)?);
        }
        match self.accepted(name_or_file)? {
            Some(golden) => Ok(golden),
            None => Err(StoreError::Unknown { name: name_or_file.to_owned(), known: self.known(State::Accepted) }),
        }
    }

    /// Whether recording and accepting would be refused, before hours of work are spent on it.
    ///
    /// # Errors
    /// In CI, or under a name that no golden can have.
    pub fn check_writable(&self, name: &str) -> Result<(), StoreError> {
        if self.ci {
            return Err(StoreError::Ci("recorded"));
        }
        self.path(name, PENDING).map(drop)
    }

    /// Writes a golden as pending, unless the accepted one says the same; a proposal made before is replaced.
    ///
    /// # Errors
    /// In CI; what the file system says; an accepted golden that cannot be read.
    pub fn record(&self, golden: &Golden) -> Result<Recorded, StoreError> {
        self.check_writable(&golden.name)?;
        let path = self.path(&golden.name, PENDING)?;
        let failed = |error| StoreError::Io { path: path.clone(), error };
        if self.accepted(&golden.name)?.is_some_and(|accepted| same(&accepted, golden)) {
            return match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
                _ => Ok(Recorded::Unchanged),
            };
        }
        std::fs::create_dir_all(&self.dir).map_err(failed)?;
        let pending = Golden { accepted: None, ..golden.clone() };
        device::write_atomically(&path, pending.to_yaml().as_bytes()).map_err(failed)?;
        Ok(Recorded::Pending(path))
    }

    /// Makes the pending golden of a name the standard. `date` is today's, `YYYY-MM-DD`.
    ///
    /// # Errors
    /// In CI, without a reason, with nothing pending; what the file system says.
    pub fn accept(&self, name: &str, reason: &str, date: &str) -> Result<PathBuf, StoreError> {
        if self.ci {
            return Err(StoreError::Ci("accepted"));
        }
        let reason = reason.trim();
        if reason.is_empty() {
            return Err(StoreError::NoReason);
        }
        let pending = self.pending(name)?;
        let Some(golden) = pending else {
            return Err(StoreError::NothingPending { name: name.to_owned(), known: self.known(State::Pending) });
        };
        let accepted = Some(Accepted { reason: reason.to_owned(), date: date.to_owned() });
        let (path, before) = (self.path(name, ACCEPTED)?, self.path(name, PENDING)?);
        let text = Golden { accepted, ..golden }.to_yaml();
        device::write_atomically(&path, text.as_bytes())
            .map_err(|error| StoreError::Io { path: path.clone(), error })?;
        std::fs::remove_file(&before).map_err(|error| StoreError::Io { path: before, error })?;
        Ok(path)
    }

    /// Every file of the store, sorted by state and name. An orphan is a file that no command reads: no golden, a golden
    /// under another name than its own, a proposal that says what is accepted already, what an interrupted run left.
    ///
    /// # Errors
    /// The directory cannot be read. One that is not there is empty.
    pub fn list(&self) -> Result<Vec<Entry>, StoreError> {
        let failed = |error| StoreError::Io { path: self.dir.clone(), error };
        let files = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            files => files.map_err(failed)?,
        };
        let mut names = BTreeSet::new();
        for file in files {
            names.insert(file.map_err(failed)?.file_name());
        }
        let mut entries: Vec<Entry> = names.iter().map(|name| self.entry(&name.to_string_lossy())).collect();
        entries.sort_by(|a, b| (a.state, &a.name).cmp(&(b.state, &b.name)));
        Ok(entries)
    }

    fn entry(&self, file: &str) -> Entry {
        let path = self.dir.join(file);
        let orphan = |detail: String| Entry { name: file.to_owned(), state: State::Orphan, path: path.clone(), detail };
        if file.starts_with(".assay-") {
            return orphan("left by an interrupted run; remove it".to_owned());
        }
        let (name, state) = match (file.strip_suffix(PENDING), file.strip_suffix(ACCEPTED)) {
            (Some(name), _) => (name, State::Pending),
            (None, Some(name)) => (name, State::Accepted),
            (None, None) => return orphan("is no golden: expected NAME.yaml or NAME.pending.yaml".to_owned()),
        };
        let golden = match open(&path) {
            Ok(golden) => golden,
            Err(error) => return orphan(format!("cannot be read: {}", error.message)),
        };
        if golden.name != name {
            return orphan(format!("holds the golden `{}`; rename the file or record it under this name", golden.name));
        }
        let rows = golden.rows.len();
        let detail = match (state, &golden.accepted) {
            (State::Pending, _) => match self.accepted(name) {
                Ok(Some(accepted)) if same(&accepted, &golden) => {
                    return orphan(format!("says what `{name}` says already; remove it"));
                }
                Ok(Some(_)) => "differs from the accepted one; see it with `tokens review`".to_owned(),
                _ => "new; see it with `tokens review`".to_owned(),
            },
            (_, Some(Accepted { reason, date })) => format!("{date}: {reason}"),
            (_, None) => return orphan("was never accepted; record it, and accept it with a reason".to_owned()),
        };
        let detail = format!("{detail} ({rows} {})", if rows == 1 { "row" } else { "rows" });
        Entry { name: name.to_owned(), state, path, detail }
    }

    fn known(&self, state: State) -> String {
        let entries = self.list().unwrap_or_default();
        let names: Vec<&str> =
            entries.iter().filter(|entry| entry.state == state).map(|entry| entry.name.as_str()).collect();
        match names.as_slice() {
            [] => format!("{} has none", self.dir.display()),
            names => format!("{} has: {}", self.dir.display(), names.join(", ")),
        }
    }

    fn path(&self, name: &str, suffix: &str) -> Result<PathBuf, StoreError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !begins
            || !name.chars().all(plain)
            || name.ends_with(".pending")
            || name.ends_with(ACCEPTED)
            || name.len() > 100
        {
            return Err(StoreError::Name(name.chars().take(100).collect()));
        }
        Ok(self.dir.join(format!("{name}{suffix}")))
    }

    fn read(&self, name: &str, suffix: &str) -> Result<Option<Golden>, StoreError> {
        let path = self.path(name, suffix)?;
        if path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(None);
        }
        Ok(Some(open(&path)?))
    }
}

/// Whether two goldens say the same: who accepted them and which program wrote them does not count.
fn same(one: &Golden, other: &Golden) -> bool {
    let plain = |golden: &Golden| Golden { accepted: None, tool: String::new(), ..golden.clone() }.to_yaml();
    plain(one) == plain(other)
}

fn open(path: &Path) -> Result<Golden, GoldenError> {
    let failed = |why: String| GoldenError::file(path, why, "name an existing golden");
    let metadata = std::fs::metadata(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    if !metadata.is_file() {
        return Err(failed("is not a regular file".to_owned()));
    }
    if metadata.len() > LONGEST {
        return Err(failed(format!("is {} bytes long, more than the {LONGEST} of a golden", metadata.len())));
    }
    let bytes = std::fs::read(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|_| failed("is not UTF-8 text".to_owned()))?;
    Golden::parse(&text, path)
}

/// The day, `YYYY-MM-DD` in UTC, of a time in seconds since 1970.
#[must_use]
pub fn date(seconds: u64) -> String {
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let (mut days, mut year) = (seconds / 86_400, 1970);
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 1;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year:04}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::super::golden::Stop;
    use super::super::golden::tests::{golden, row, step};
    use super::*;

    fn small(name: &str, logit: f32) -> Golden {
        let steps = vec![step(&[(5, logit, 0.0), (7, 2.5, 0.1)])];
        Golden { name: name.into(), ..golden(vec![row(&[1], Stop::MaxNewTokens, steps)]) }
    }

    #[test]
    fn a_golden_is_pending_until_it_is_accepted_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("tokens"), false);
        assert_eq!(store.list().unwrap(), []);
        let Recorded::Pending(path) = store.record(&small("a", 9.0)).unwrap() else { panic!("nothing is pending") };
        assert!(path.ends_with("tokens/a.pending.yaml"));
        assert!(store.find("a").unwrap_err().to_string().contains("no golden is called `a`"));
        assert!(matches!(store.accept("a", " \n", "2026-01-01"), Err(StoreError::NoReason)));
        store.accept("a", " first ", "2026-01-01").unwrap();
        let accepted = store.find("a").unwrap();
        assert_eq!(accepted.accepted, Some(Accepted { reason: "first".into(), date: "2026-01-01".into() }));
        assert!(!path.exists());
        assert!(matches!(store.accept("a", "again", "2026-01-01"), Err(StoreError::NothingPending { .. })));
        // The same again is nothing new, and takes back a proposal.
        assert!(matches!(store.record(&small("a", 8.0)).unwrap(), Recorded::Pending(_)));
        assert_eq!(store.record(&small("a", 9.0)).unwrap(), Recorded::Unchanged);
        assert!(!path.exists());
        assert_eq!(store.find("a").unwrap(), accepted);
    }

    #[test]
    fn in_ci_nothing_is_written() {
        let dir = tempfile::tempdir().unwrap();
        Store::new(dir.path(), false).record(&small("a", 9.0)).unwrap();
        let before = std::fs::read(dir.path().join("a.pending.yaml")).unwrap();
        let store = Store::new(dir.path(), true);
        assert!(store.record(&small("a", 1.0)).unwrap_err().to_string().contains("CI is set"));
        assert!(store.accept("a", "reason", "2026-01-01").unwrap_err().to_string().contains("CI is set"));
        assert_eq!(std::fs::read(dir.path().join("a.pending.yaml")).unwrap(), before);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn every_file_is_listed_as_what_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), false);
        for name in ["b", "a"] {
            store.record(&small(name, 9.0)).unwrap();
            store.accept(name, "why", "2026-01-01").unwrap();
        }
        store.record(&small("a", 8.0)).unwrap();
        store.record(&small("new", 8.0)).unwrap();
        let put = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        put("b.pending.yaml", &small("b", 9.0).to_yaml());
        put("moved.yaml", &small("b", 9.0).to_yaml());
        put("raw.yaml", &small("raw", 9.0).to_yaml());
        put("broken.yaml", "format: [");
        put("notes.txt", "x");
        put(".assay-x.tmp", "x");
        let listed: Vec<(State, String, String)> =
            store.list().unwrap().into_iter().map(|entry| (entry.state, entry.name, entry.detail)).collect();
        let find = |name: &str| listed.iter().find(|entry| entry.1 == name).unwrap();
        assert_eq!(listed.iter().filter(|entry| entry.0 == State::Accepted).count(), 2);
        assert_eq!(listed.iter().filter(|entry| entry.0 == State::Pending).count(), 2);
        assert_eq!((find("a").0, find("a").2.as_str()), (State::Accepted, "2026-01-01: why (1 row)"));
        assert!(find("new").2.starts_with("new;"));
        for (file, words) in [
            ("b.pending.yaml", "says already"),
            ("moved.yaml", "golden `b`"),
            ("raw.yaml", "never accepted"),
            ("broken.yaml", "cannot be read"),
            ("notes.txt", "no golden"),
            (".assay-x.tmp", "interrupted"),
        ] {
            let (state, _, detail) = find(file);
            assert!(*state == State::Orphan && detail.contains(words), "{file}: {detail}");
        }
    }

    #[test]
    fn names_stay_in_the_directory() {
        let store = Store::new(Path::new("nowhere"), false);
        for name in ["", "../a", "a/b", ".a", "a b", "a.pending", "a.yaml", "故宫"] {
            assert!(matches!(store.pending(name), Err(StoreError::Name(_))), "{name}");
        }
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, day) in [
            (0, "1970-01-01"),
            (951_782_399, "2000-02-28"),
            (951_782_400, "2000-02-29"),
            (951_868_800, "2000-03-01"),
            (1_798_761_599, "2026-12-31"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date(seconds), day);
        }
    }
}
