//! Errors that point into a YAML file: the file, the line, the rule in words, and what to do.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_yaml::{Error as YamlError, Location, MessageFormatter as _, NonFiniteFloatPolicy, UserMessageFormatter};
use thiserror::Error;

/// What is wrong with a case, suite or policy file. Its text reads `path:line:column: message; help`;
/// the accessors give the parts that a front end needs to show the place in its context.
#[derive(Clone, Error)]
pub struct CaseError(Box<Parts>);

#[derive(Clone)]
struct Parts {
    path: PathBuf,
    text: Arc<str>,
    place: Option<Place>,
    message: String,
    help: Option<String>,
}

#[derive(Clone, Debug)]
struct Place {
    line: usize,
    column: usize,
    span: Option<Range<usize>>,
}

impl CaseError {
    /// An error about a whole file.
    #[must_use]
    pub(crate) fn file(path: &Path, message: impl Into<String>, help: impl Into<String>) -> Self {
        let (path, text) = (path.to_owned(), Arc::from(""));
        Self(Box::new(Parts { path, text, place: None, message: message.into(), help: Some(help.into()) }))
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The file's text; empty where it could not be read.
    #[must_use]
    pub fn source_text(&self) -> &str {
        &self.0.text
    }

    /// Line of the fault, from 1.
    #[must_use]
    pub fn line(&self) -> Option<usize> {
        self.0.place.as_ref().map(|place| place.line)
    }

    /// Column of the fault in characters, from 1.
    #[must_use]
    pub fn column(&self) -> Option<usize> {
        self.0.place.as_ref().map(|place| place.column)
    }

    /// Bytes of [`Self::source_text`] that are at fault.
    #[must_use]
    pub fn span(&self) -> Option<Range<usize>> {
        self.0.place.as_ref().and_then(|place| place.span.clone())
    }

    /// The rule and what was found instead.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What to do about it.
    #[must_use]
    pub fn help(&self) -> Option<&str> {
        self.0.help.as_deref()
    }
}

impl fmt::Display for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.0.path.display())?;
        if let Some(Place { line, column, .. }) = self.0.place {
            write!(f, "{line}:{column}:")?;
        }
        write!(f, " {}", self.0.message)?;
        match &self.0.help {
            Some(help) => write!(f, "; {help}"),
            None => Ok(()),
        }
    }
}

/// The text of the error, without that of the file.
impl fmt::Debug for CaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CaseError({self})")
    }
}

/// A file being read: makes errors that point into it.
pub(crate) struct Document<'a> {
    path: &'a Path,
    text: &'a str,
}

impl<'a> Document<'a> {
    /// A document whose `text` was read from `path`.
    pub(crate) fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, text }
    }

    /// Where the document was read from.
    pub(crate) fn path(&self) -> &Path {
        self.path
    }

    /// Reads the document as one value of type `T`.
    pub(crate) fn read<T: serde::de::DeserializeOwned>(&self) -> Result<T, CaseError> {
        // Numbers are judged by the rules on each key. A key that is skipped may hold any text, `1e999` too.
        let options = serde_yaml::options! { non_finite_float_policy: NonFiniteFloatPolicy::PassThrough };
        serde_yaml::from_str_with_options(self.text, options).map_err(|error| self.syntax(&error))
    }

    /// An error at `location`.
    pub(crate) fn error(&self, location: Location, message: impl Into<String>, help: impl Into<String>) -> CaseError {
        self.build(Some(location), message.into(), Some(help.into()))
    }

    fn build(&self, location: Option<Location>, message: String, help: Option<String>) -> CaseError {
        let place = location.filter(|location| location.line() > 0).map(|location| Place {
            line: location.line() as usize,
            column: location.column() as usize,
            span: self.span(location),
        });
        CaseError(Box::new(Parts { path: self.path.to_owned(), text: Arc::from(self.text), place, message, help }))
    }

    /// The bytes of a location, kept inside the text and on character boundaries.
    fn span(&self, location: Location) -> Option<Range<usize>> {
        // The parser counts from behind a byte-order mark.
        let shift = if self.text.starts_with('\u{FEFF}') { '\u{FEFF}'.len_utf8() } else { 0 };
        let start = usize::try_from(location.span().byte_offset()?).ok()?.checked_add(shift)?;
        let end = start.checked_add(usize::try_from(location.span().byte_len()?).ok()?)?.min(self.text.len());
        self.text.get(start..end).map(|_| start..end)
    }

    /// A YAML error, in this crate's words where the library's are not about the file.
    fn syntax(&self, error: &YamlError) -> CaseError {
        let error = error.without_snippet();
        let keys = |expected: &[&str]| format!("remove it; the keys known here are {}", expected.join(", "));
        let (message, help) = match error {
            YamlError::SerdeUnknownField { field, expected, .. } => {
                (format!("unknown key {field:?}"), Some(keys(expected)))
            }
            YamlError::SerdeMissingField { field, .. } => {
                (format!("missing key {field:?}"), Some(format!("add a line `{field}: ...`")))
            }
            YamlError::DuplicateMappingKey { key, .. } => {
                let key = key.as_deref().unwrap_or("a key");
                (format!("{key:?} is given twice"), Some("keep one of the two".to_owned()))
            }
            YamlError::Eof { .. } => ("the file is empty".to_owned(), Some("write a mapping of keys".to_owned())),
            YamlError::SerdeInvalidType { unexpected, expected, .. }
            | YamlError::SerdeInvalidValue { unexpected, expected, .. } => {
                (format!("expected {expected}, found {unexpected}"), None)
            }
            YamlError::InvalidScalar { ty, location } => {
                let expected = match *ty {
                    "u64" => "a whole number from 0 to 18446744073709551615",
                    "i64" => "a whole number of at most 64 bits",
                    "floating point" => "a number",
                    other => other,
                };
                let found = self.span(*location).and_then(|span| self.text.get(span)).unwrap_or("something else");
                (format!("expected {expected}, found {found:?}"), None)
            }
            YamlError::Unexpected { expected, .. } => {
                let expected = match *expected {
                    "mapping start" => "a mapping of keys",
                    "sequence start" => "a list",
                    "string scalar" => "a single value",
                    other => other,
                };
                (format!("expected {expected}"), None)
            }
            other => (UserMessageFormatter.format_message(other).trim().to_owned(), None),
        };
        let help = help.or_else(|| Some("docs/bundles.md says what each key holds".to_owned()));
        self.build(error.location(), message, help)
    }
}

/// Largest YAML file that is read: more than the longest prompts need.
const LARGEST_FILE: u64 = 1 << 20;

/// Reads a YAML file as text.
pub(crate) fn read_text(path: &Path) -> Result<String, CaseError> {
    let failed = |error: std::io::Error| {
        CaseError::file(path, format!("cannot read the file: {error}"), "name an existing, readable YAML file")
    };
    let metadata = std::fs::metadata(path).map_err(failed)?;
    if !metadata.is_file() {
        return Err(CaseError::file(path, "not a regular file", "name a YAML file"));
    }
    if metadata.len() > LARGEST_FILE {
        let message = format!("{} bytes, more than the {LARGEST_FILE} that a YAML file may have", metadata.len());
        return Err(CaseError::file(path, message, "is this the right file?"));
    }
    let bytes = std::fs::read(path).map_err(failed)?;
    String::from_utf8(bytes).map_err(|error| {
        let message = format!("not UTF-8 text from byte {}", error.utf8_error().valid_up_to());
        CaseError::file(path, message, "is this the right file?")
    })
}
