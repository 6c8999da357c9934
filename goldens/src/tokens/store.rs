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
    #[error("{}: no golden can be written there: {error}; name another directory with --goldens", path.display())]
    NotWritable { path: PathBuf, error: io::Error },
    #[error("`{0}` is no name of a golden; use letters, digits, `-`, `_` and `.`, and begin with a letter or digit")]
    Name(String),
    #[error("the environment variable CI is set: goldens are {0} by people, at their own machines, never by CI")]
    Ci(&'static str),
    #[error("a golden is accepted for a reason: --reason is empty")]
    NoReason,
    #[error("nothing is pending for `{name}`; record it first. {known}")]
    NothingPending { name: String, known: String },
    #[error("the golden `{name}` is pending: look at it with tokens review, then accept it with tokens accept")]
    NotAccepted { name: String },
    #[error("{}: holds no accepted golden; record one and accept it, or name another directory with --goldens", dir.display())]
    Empty { dir: PathBuf },
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

/// What is accepted under a name.
#[derive(Debug, Default)]
pub struct Standing {
    /// The golden.
    pub golden: Option<Golden>,
    /// Why what stands in its file is none.
    pub unread: Option<GoldenError>,
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
    /// Its file cannot be read, or is no golden that was accepted under this name.
    pub fn accepted(&self, name: &str) -> Result<Option<Golden>, StoreError> {
        self.read(name, ACCEPTED)
    }

    /// The accepted golden of this name, for what is to replace it: a file that is none stands in nobody's way.
    ///
    /// # Errors
    /// A name that no golden can have.
    pub fn standing(&self, name: &str) -> Result<Standing, StoreError> {
        match self.accepted(name) {
            Ok(golden) => Ok(Standing { golden, unread: None }),
            Err(StoreError::Golden(error)) => Ok(Standing { golden: None, unread: Some(error) }),
            Err(error) => Err(error),
        }
    }

    /// The pending golden of this name.
    ///
    /// # Errors
    /// Its file cannot be read, or is no golden of this name.
    pub fn pending(&self, name: &str) -> Result<Option<Golden>, StoreError> {
        self.read(name, PENDING)
    }

    /// The pending golden of a name, or all of them, by name; without those that say what is accepted already.
    ///
    /// # Errors
    /// A pending file that cannot be read as the golden of its name; a name under which there is nothing at all.
    pub fn proposals(&self, name: Option<&str>) -> Result<Vec<Golden>, StoreError> {
        let names = match name {
            Some(name) => vec![name.to_owned()],
            None => self.files()?.iter().filter_map(|file| file.strip_suffix(PENDING).map(str::to_owned)).collect(),
        };
        let mut proposals = Vec::new();
        for name in names {
            let Standing { golden: accepted, unread } = self.standing(&name)?;
            match self.pending(&name)? {
                Some(pending) if accepted.as_ref().is_some_and(|accepted| same(accepted, &pending)) => {}
                Some(pending) => proposals.push(pending),
                None if accepted.is_none() && unread.is_none() => {
                    return Err(StoreError::Unknown { name, known: self.known(&[State::Accepted, State::Pending]) });
                }
                None => {}
            }
        }
        Ok(proposals)
    }

    /// The accepted golden of a name, or the one in a file, which may be pending.
    ///
    /// # Errors
    /// There is none, and the message says which there are; the file is an orphan.
    pub fn find(&self, name_or_file: &str) -> Result<Golden, StoreError> {
        let path = Path::new(name_or_file);
        if path.components().count() > 1 || path.extension().is_some_and(|kind| kind == "yaml") {
            return Ok(open(path)?.0);
        }
        match self.accepted(name_or_file)? {
            Some(golden) => Ok(golden),
            None if self.pending(name_or_file).is_ok_and(|pending| pending.is_some()) => {
                Err(StoreError::NotAccepted { name: name_or_file.to_owned() })
            }
            None => Err(StoreError::Unknown { name: name_or_file.to_owned(), known: self.known(&[State::Accepted]) }),
        }
    }

    /// Every accepted golden, sorted by name. A file of an accepted golden's name that is none is refused: what it was to
    /// hold devices to would go by unseen.
    ///
    /// # Errors
    /// There is none; a `NAME.yaml` cannot be read as the accepted golden of its name.
    pub fn standards(&self) -> Result<Vec<Golden>, StoreError> {
        let files = self.files()?;
        let accepted = |file: &&String| file.ends_with(ACCEPTED) && !file.ends_with(PENDING) && !file.starts_with('.');
        let mut goldens = Vec::new();
        for file in files.iter().filter(accepted) {
            goldens.push(open(&self.dir.join(file))?.0);
        }
        if goldens.is_empty() {
            return Err(StoreError::Empty { dir: self.dir.clone() });
        }
        goldens.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(goldens)
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
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

    /// Makes the directory, and sees whether the pending golden of this name can be written to it, before hours of work
    /// are spent on it.
    ///
    /// # Errors
    /// As [`Store::check_writable`]; what the file system says.
    pub fn prepare(&self, name: &str) -> Result<(), StoreError> {
        self.check_writable(name)?;
        let path = self.path(name, PENDING)?;
        let failed = |error| StoreError::NotWritable { path: path.clone(), error };
        if std::fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            return Err(failed(io::Error::other("it is not a regular file")));
        }
        std::fs::create_dir_all(&self.dir).map_err(failed)?;
        // Named as what an interrupted run leaves.
        let probe = self.dir.join(format!(".assay-{name}.tmp"));
        device::write_atomically(&probe, b"").map_err(failed)?;
        std::fs::remove_file(&probe).map_err(failed)
    }

    /// Writes a golden as pending, unless the accepted one says the same; a proposal made before is replaced.
    ///
    /// # Errors
    /// In CI; what the file system says.
    pub fn record(&self, golden: &Golden) -> Result<Recorded, StoreError> {
        self.check_writable(&golden.name)?;
        let path = self.path(&golden.name, PENDING)?;
        let failed = |error| StoreError::Io { path: path.clone(), error };
        if self.standing(&golden.name)?.golden.is_some_and(|accepted| same(&accepted, golden)) {
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
            return Err(StoreError::NothingPending { name: name.to_owned(), known: self.known(&[State::Pending]) });
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
        let mut entries: Vec<Entry> = self.files()?.iter().map(|file| self.entry(file)).collect();
        entries.sort_by(|a, b| (a.state, &a.name).cmp(&(b.state, &b.name)));
        Ok(entries)
    }

    /// Names of the files, sorted.
    fn files(&self) -> Result<BTreeSet<String>, StoreError> {
        let failed = |error| StoreError::Io { path: self.dir.clone(), error };
        let files = match std::fs::read_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
            files => files.map_err(failed)?,
        };
        let mut names = BTreeSet::new();
        for file in files {
            names.insert(file.map_err(failed)?.file_name().to_string_lossy().into_owned());
        }
        Ok(names)
    }

    fn entry(&self, file: &str) -> Entry {
        let path = self.dir.join(file);
        let orphan = |detail: String| Entry { name: file.to_owned(), state: State::Orphan, path: path.clone(), detail };
        if file.starts_with(".assay-") {
            return orphan("left by an interrupted run; remove it".to_owned());
        }
        let (golden, state) = match open(&path) {
            Ok(found) => found,
            Err(error) => return orphan(format!("{}; {}", error.message, error.help)),
        };
        let rows = golden.rows.len();
        let detail = match (state, &golden.accepted) {
            (State::Accepted, Some(Accepted { reason, date })) => format!("{date}: {reason}"),
            _ => match self.accepted(&golden.name) {
                Ok(Some(accepted)) if same(&accepted, &golden) => {
                    return orphan(format!("says what `{}` says already; remove it", golden.name));
                }
                Ok(Some(_)) => "differs from the accepted one; see it with `tokens review`".to_owned(),
                _ => "new; see it with `tokens review`".to_owned(),
            },
        };
        let detail = format!("{detail} ({rows} {})", if rows == 1 { "row" } else { "rows" });
        Entry { name: golden.name, state, path, detail }
    }

    fn known(&self, states: &[State]) -> String {
        let entries = self.list().unwrap_or_default();
        let mut names: Vec<&str> =
            entries.iter().filter(|entry| states.contains(&entry.state)).map(|entry| entry.name.as_str()).collect();
        names.dedup();
        match names.as_slice() {
            [] => format!("{} has none", self.dir.display()),
            names => format!("{} has: {}", self.dir.display(), names.join(", ")),
        }
    }

    fn path(&self, name: &str, suffix: &str) -> Result<PathBuf, StoreError> {
        if !is_name(name) {
            return Err(StoreError::Name(name.chars().take(100).collect()));
        }
        Ok(self.dir.join(format!("{name}{suffix}")))
    }

    fn read(&self, name: &str, suffix: &str) -> Result<Option<Golden>, StoreError> {
        let path = self.path(name, suffix)?;
        if path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(None);
        }
        Ok(Some(open(&path)?.0))
    }
}

/// Whether a golden may be called so.
fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let begins = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    let ends = name.ends_with(".pending") || name.ends_with(ACCEPTED);
    begins && name.chars().all(plain) && !ends && name.len() <= 100
}

/// Whether two goldens say the same: who accepted them and which program wrote them does not count.
fn same(one: &Golden, other: &Golden) -> bool {
    let plain = |golden: &Golden| Golden { accepted: None, tool: String::new(), ..golden.clone() }.to_yaml();
    plain(one) == plain(other)
}

/// The golden in a file, and whether it is accepted or pending, which its name says. What is under another name than
/// its own, or was never accepted, is no golden.
fn open(path: &Path) -> Result<(Golden, State), GoldenError> {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    let (name, state) = match (file.strip_suffix(PENDING), file.strip_suffix(ACCEPTED)) {
        (Some(name), _) => (name, State::Pending),
        (None, Some(name)) => (name, State::Accepted),
        (None, None) => {
            let message = "is no golden: its name is neither NAME.yaml nor NAME.pending.yaml";
            return Err(GoldenError::file(path, message, "name an existing golden"));
        }
    };
    let golden = parse(path)?;
    if golden.name != name {
        let message = format!("holds the golden `{}`", golden.name);
        return Err(GoldenError::file(path, message, "rename the file or record it under this name"));
    }
    if !is_name(name) {
        let message = format!("`{name}` is no name of a golden");
        return Err(GoldenError::file(path, message, "record it under letters, digits, `-`, `_` and `.`"));
    }
    if state == State::Accepted && golden.accepted.is_none() {
        let message = "was never accepted";
        return Err(GoldenError::file(path, message, "record it, and accept it with a reason"));
    }
    Ok((golden, state))
}

fn parse(path: &Path) -> Result<Golden, GoldenError> {
    let failed = |why: String| GoldenError::file(path, why, "name an existing golden, or restore the file");
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

fn leap(year: u64) -> bool {
    year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
}

/// Whether a text is a day as [`date`] writes it.
pub(super) fn is_date(text: &str) -> bool {
    let number = |part: &str| part.bytes().all(|digit| digit.is_ascii_digit()).then(|| part.parse::<u64>().ok())?;
    let parts: Vec<&str> = text.split('-').collect();
    let &[year, month, day] = &parts[..] else { return false };
    if [year.len(), month.len(), day.len()] != [4, 2, 2] {
        return false;
    }
    let (Some(year), Some(month), Some(day)) = (number(year), number(month), number(day)) else { return false };
    let days = match month {
        2 => 28 + u64::from(leap(year)),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return false,
    };
    (1..=days).contains(&day)
}

/// The day, `YYYY-MM-DD` in UTC, of a time in seconds since 1970.
#[must_use]
pub fn date(seconds: u64) -> String {
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
        let mut golden = golden(vec![row(&[1], Stop::MaxNewTokens, steps)]);
        (golden.name, golden.limits.max_new_tokens) = (name.to_owned(), 1);
        golden
    }

    #[test]
    fn a_golden_is_pending_until_it_is_accepted_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("tokens"), false);
        assert_eq!(store.list().unwrap(), []);
        let Recorded::Pending(path) = store.record(&small("a", 9.0)).unwrap() else { panic!("nothing is pending") };
        assert!(path.ends_with("tokens/a.pending.yaml"));
        assert!(store.find("a").unwrap_err().to_string().contains("the golden `a` is pending"));
        assert!(store.find("b").unwrap_err().to_string().contains("no golden is called `b`"));
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
        put("故宫.yaml", &small("故宫", 9.0).to_yaml());
        std::os::unix::fs::symlink("nowhere", dir.path().join("nothing.yaml")).unwrap();
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
            ("broken.yaml", "goldens are written by `tokens record`"),
            ("nothing.yaml", "cannot be read"),
            ("notes.txt", "no golden"),
            (".assay-x.tmp", "interrupted"),
        ] {
            let (state, _, detail) = find(file);
            assert!(*state == State::Orphan && detail.contains(words), "{file}: {detail}");
            assert_eq!(detail.matches("cannot be read").count(), usize::from(file == "nothing.yaml"), "{detail}");
        }
        // What is an orphan there is no golden to any command, by name or by file.
        for (name, words) in [("moved", "golden `b`"), ("raw", "never accepted"), ("故宫", "no name of a golden")] {
            for asked in [name.to_owned(), dir.path().join(format!("{name}.yaml")).display().to_string()] {
                let error = store.find(&asked).unwrap_err().to_string();
                assert!(error.contains(words), "{error}");
            }
        }
        let file = |name: &str| store.find(&dir.path().join(name).display().to_string());
        assert_eq!(file("a.pending.yaml").unwrap(), small("a", 8.0));
        assert_eq!(file("b.yaml").unwrap().name, "b");
        assert!(file("notes.txt").unwrap_err().to_string().contains("neither NAME.yaml nor"));
        put("c.pending.yaml", &small("b", 9.0).to_yaml());
        assert!(store.accept("c", "why", "2026-01-01").unwrap_err().to_string().contains("golden `b`"));
    }

    #[test]
    fn nothing_is_pending_only_where_every_pending_file_was_read() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("tokens"), false);
        assert_eq!(store.proposals(None).unwrap(), []);
        store.record(&small("a", 9.0)).unwrap();
        store.record(&small("b", 9.0)).unwrap();
        store.accept("b", "why", "2026-01-01").unwrap();
        assert_eq!(store.proposals(None).unwrap(), [small("a", 9.0)]);
        assert_eq!(store.proposals(Some("b")).unwrap(), []);
        let unknown = store.proposals(Some("nope")).unwrap_err().to_string();
        assert!(unknown.contains("no golden is called `nope`") && unknown.ends_with("has: b, a"), "{unknown}");
        let put = |name: &str, text: &str| std::fs::write(dir.path().join("tokens").join(name), text).unwrap();
        // What is accepted already changes nothing.
        put("b.pending.yaml", &small("b", 9.0).to_yaml());
        assert_eq!(store.proposals(None).unwrap(), [small("a", 9.0)]);
        for (text, words) in [("x".to_owned(), "q.pending.yaml"), (small("a", 9.0).to_yaml(), "golden `a`")] {
            put("q.pending.yaml", &text);
            for error in [store.proposals(None).unwrap_err(), store.proposals(Some("q")).unwrap_err()] {
                assert!(error.to_string().contains(words), "{error}");
            }
        }
    }

    #[test]
    fn a_file_that_is_no_golden_is_replaced_like_one() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), false);
        std::fs::write(dir.path().join("a.yaml"), "format: [").unwrap();
        assert!(store.find("a").is_err());
        let standing = store.standing("a").unwrap();
        assert!(standing.golden.is_none() && standing.unread.unwrap().to_string().contains("a.yaml"));
        assert!(matches!(store.record(&small("a", 9.0)).unwrap(), Recorded::Pending(_)));
        assert_eq!(store.proposals(Some("a")).unwrap(), [small("a", 9.0)]);
        store.accept("a", "restored", "2026-01-01").unwrap();
        assert_eq!(store.find("a").unwrap().rows, small("a", 9.0).rows);
    }

    #[test]
    fn a_directory_that_takes_no_golden_is_found_out_before() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("tokens"), false);
        store.prepare("a").unwrap();
        assert_eq!(std::fs::read_dir(dir.path().join("tokens")).unwrap().count(), 0);
        std::fs::create_dir(dir.path().join("tokens/a.pending.yaml")).unwrap();
        assert!(store.prepare("a").unwrap_err().to_string().contains("not a regular file"));
        std::fs::write(dir.path().join("file"), "x").unwrap();
        for below in ["file", "file/tokens"] {
            let error = Store::new(&dir.path().join(below), false).prepare("a").unwrap_err().to_string();
            assert!(error.contains("no golden can be written there") && error.contains("--goldens"), "{error}");
        }
        let store = Store::new(&dir.path().join("ci"), true);
        assert!(matches!(store.prepare("a"), Err(StoreError::Ci(_))) && !dir.path().join("ci").exists());
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
            assert!(is_date(day));
        }
        for none in ["", "yesterday", "2026-1-01", "2026-13-01", "2026-00-10", "2026-04-31", "2026-02-29", "2026-01-0x"]
        {
            assert!(!is_date(none), "{none}");
        }
        assert!(!is_date("2026-01-00") && !is_date("+026-01-01") && !is_date("2026-01-01-01"));
    }
}
