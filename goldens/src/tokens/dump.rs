//! What a device generated, from whatever it was written to: a bundle or its captures, JSON, or lines of ids
//! (`docs/tokens.md`, Dumps). Ids are taken as they are, for the judge to judge; what is not a list of whole numbers
//! is refused by its place.

use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use cases::header::{Header, HeaderError};
use safetensors::Dtype;
use serde_json::Value;
use thiserror::Error;

/// Key of the seconds of each step in the metadata of captures: a JSON list.
pub const STEP_SECONDS: &str = "step_seconds";
/// Name of the ids in captures.
const TOKEN_IDS: &str = "token_ids";
/// An id that fills a row which ended before others.
const FILLER: i64 = -1;
/// Longest file of text or JSON: millions of ids.
const LONGEST: u64 = 64 << 20;

/// Generated ids of each row, and how long each token took where it is said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dump {
    /// Where they were read from.
    pub path: PathBuf,
    /// The ids, one row a prompt, without what fills the ends of rows.
    pub rows: Vec<Vec<i64>>,
    /// Seconds of each token, in lists of any length: a row's, or those of steps that all rows shared.
    pub seconds: Vec<Vec<f64>>,
}

/// A dump that cannot be judged.
#[derive(Debug, Error)]
#[error("{}: {fault}", path.display())]
pub struct DumpError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: DumpFault,
}

/// What is wrong with a dump.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum DumpFault {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is not a regular file")]
    NotAFile,
    #[error("is {length} bytes long, more than the {LONGEST} of a dump; is this the right file?")]
    TooLong { length: u64 },
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Not judged, rather than refused.
    #[error("holds no `{TOKEN_IDS}`: the device's tokens were not captured")]
    NoTokens,
    /// A failure of the device's output, not of the request.
    #[error("`{TOKEN_IDS}` has the element type {0}; the contract has I64")]
    DType(String),
    #[error("`{TOKEN_IDS}` has shape {0:?}; expected [rows, steps]")]
    Shape(Vec<usize>),
    #[error("is not UTF-8 text from byte {0}; name a bundle, captures, JSON or lines of token ids")]
    NotText(usize),
    #[error("is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{place}: {found}; expected {expected}")]
    Place { place: String, found: String, expected: &'static str },
}

impl Dump {
    /// Reads a dump: the directory of a bundle, a safetensors file, JSON or lines of ids.
    ///
    /// # Errors
    /// The file cannot be read or is none of these; the message names the place.
    pub fn read(path: &Path) -> Result<Self, DumpError> {
        let file = if path.is_dir() { path.join(device::CAPTURES_FILE) } else { path.to_owned() };
        let read = || {
            // Asked before opening: opening a pipe waits for its writer.
            if !std::fs::metadata(&file)?.is_file() {
                return Err(DumpFault::NotAFile);
            }
            if file.extension().is_some_and(|kind| kind == "safetensors") { captures(&file) } else { text(&file) }
        };
        match read() {
            Ok(dump) => Ok(Self { path: path.to_owned(), ..dump }),
            Err(fault) => Err(DumpError { path: file, fault }),
        }
    }

    /// Reads the text of a dump: JSON where it begins with a bracket, else lines of ids.
    ///
    /// # Errors
    /// The text is neither; the message names the place.
    pub fn parse(text: &str) -> Result<Self, DumpFault> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let dump =
            if text.trim_start().starts_with(['[', '{']) { json(&serde_json::from_str(text)?)? } else { lines(text)? };
        if dump.rows.is_empty() {
            return Err(place("the whole file", "no row of ids", "at least one"));
        }
        Ok(dump)
    }

    /// Seconds a token: the median over all tokens that have a time.
    #[must_use]
    pub fn median_seconds(&self) -> Option<f64> {
        let mut all: Vec<f64> = self.seconds.iter().flatten().copied().collect();
        all.sort_by(f64::total_cmp);
        let middle = all.len() / 2;
        let upper = all.get(middle).copied()?;
        if all.len() % 2 == 1 { Some(upper) } else { all.get(middle - 1).map(|lower| 0.5 * (lower + upper)) }
    }
}

fn place(place: impl Into<String>, found: impl Into<String>, expected: &'static str) -> DumpFault {
    let found: String = found.into();
    let short: String = found.chars().take(60).collect();
    let found = if short.len() < found.len() { format!("{short} ...") } else { short };
    DumpFault::Place { place: place.into(), found, expected }
}

fn text(path: &Path) -> Result<Dump, DumpFault> {
    let length = std::fs::metadata(path)?.len();
    if length > LONGEST {
        return Err(DumpFault::TooLong { length });
    }
    let bytes = std::fs::read(path)?;
    let text = String::from_utf8(bytes).map_err(|error| DumpFault::NotText(error.utf8_error().valid_up_to()))?;
    Dump::parse(&text)
}

/// `token_ids` of a safetensors file. Its other tensors are no matter here.
fn captures(path: &Path) -> Result<Dump, DumpFault> {
    let mut file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    let header = Header::read(&mut file, length)?;
    let entry = header.tensors.get(TOKEN_IDS).ok_or(DumpFault::NoTokens)?;
    if entry.dtype != Dtype::I64 {
        return Err(DumpFault::DType(entry.dtype.to_string()));
    }
    let &[rows, steps] = &entry.shape[..] else { return Err(DumpFault::Shape(entry.shape.clone())) };
    if rows == 0 || steps == 0 {
        return Err(DumpFault::Shape(entry.shape.clone()));
    }
    let begin = length - header.data_length() as u64 + entry.data_offsets.0 as u64;
    file.seek(SeekFrom::Start(begin))?;
    // The header was checked against the file's length.
    let mut bytes = vec![0; entry.data_offsets.1 - entry.data_offsets.0];
    file.read_exact(&mut bytes)?;
    let (ids, _) = bytes.as_chunks::<8>();
    let ids: Vec<i64> = ids.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
    let seconds = match header.metadata.get(STEP_SECONDS) {
        Some(list) => vec![times(&serde_json::from_str(list)?, &format!("metadata `{STEP_SECONDS}`"))?],
        None => Vec::new(),
    };
    Ok(Dump { path: PathBuf::new(), rows: ids.chunks(steps).map(|row| unfilled(row.to_vec())).collect(), seconds })
}

/// The row without what fills its end.
fn unfilled(mut row: Vec<i64>) -> Vec<i64> {
    while row.last() == Some(&FILLER) {
        row.pop();
    }
    row
}

/// A list of ids, a list of such lists, or what `tokens generate` prints.
fn json(value: &Value) -> Result<Dump, DumpFault> {
    let mut dump = Dump::default();
    match value {
        Value::Array(items) if items.iter().any(Value::is_array) => {
            for (row, ids) in items.iter().enumerate() {
                dump.rows.push(id_list(ids, &format!("row {row}"))?);
            }
        }
        Value::Array(items) if items.is_empty() => {}
        Value::Array(_) => dump.rows.push(id_list(value, "row 0")?),
        Value::Object(object) => {
            let rows = object.get("rows").and_then(Value::as_array);
            let expected = "a list under `rows`, each entry with `token_ids`";
            for (row, entry) in rows.ok_or_else(|| place("the object", "no list `rows`", expected))?.iter().enumerate()
            {
                let ids =
                    entry.get(TOKEN_IDS).ok_or_else(|| place(format!("row {row}"), "no `token_ids`", expected))?;
                dump.rows.push(id_list(ids, &format!("row {row}"))?);
                match entry.get("seconds") {
                    None | Some(Value::Null) => {}
                    Some(list) => dump.seconds.push(times(list, &format!("row {row}, seconds"))?),
                }
            }
        }
        other => return Err(place("the whole file", other.to_string(), "a list of token ids")),
    }
    Ok(dump)
}

fn id_list(value: &Value, at: &str) -> Result<Vec<i64>, DumpFault> {
    let list = value.as_array().ok_or_else(|| place(at, value.to_string(), "a list of token ids"))?;
    let id = |(step, id): (usize, &Value)| {
        id.as_i64().ok_or_else(|| place(format!("{at}, step {step}"), id.to_string(), "a token id, a whole number"))
    };
    list.iter().enumerate().map(id).collect::<Result<_, _>>().map(unfilled)
}

fn times(value: &Value, at: &str) -> Result<Vec<f64>, DumpFault> {
    let list = value.as_array().ok_or_else(|| place(at, value.to_string(), "a list of seconds"))?;
    let time = |(step, time): (usize, &Value)| {
        let seconds = time.as_f64().filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
        seconds.ok_or_else(|| place(format!("{at}, step {step}"), time.to_string(), "seconds, a number of 0 or more"))
    };
    list.iter().enumerate().map(time).collect()
}

/// One row a line, ids apart by commas or blanks. Empty lines are none.
fn lines(text: &str) -> Result<Dump, DumpFault> {
    let mut dump = Dump::default();
    for (number, line) in text.lines().enumerate() {
        let mut row = Vec::new();
        for word in line.split([',', ' ', '\t', '\r']).filter(|word| !word.is_empty()) {
            let id = word.parse().map_err(|_| {
                place(
                    format!("line {}, id {}", number + 1, row.len()),
                    format!("{word:?}"),
                    "a token id, a whole number",
                )
            })?;
            row.push(id);
        }
        if !row.is_empty() {
            dump.rows.push(unfilled(row));
        }
    }
    Ok(dump)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use cases::header::Entry;
    use proptest::prelude::*;

    use super::*;

    fn rows(text: &str) -> Vec<Vec<i64>> {
        Dump::parse(text).unwrap().rows
    }

    fn refused(text: &str) -> String {
        Dump::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn every_form_gives_the_same_rows() {
        let expected = vec![vec![5, 7, 0], vec![9]];
        for text in [
            "[[5, 7, 0], [9]]",
            "5 7 0\n9\n",
            "5,7, 0\r\n\n 9 \n",
            "\u{feff}5\t7\t0\n9 -1 -1",
            r#"{"rows": [{"prompt_ids": [1], "token_ids": [5, 7, 0], "text": "x"}, {"token_ids": [9, -1, -1]}]}"#,
        ] {
            assert_eq!(rows(text), expected, "{text}");
        }
        assert_eq!(rows("[5, 7]"), [[5, 7]]);
        assert_eq!(rows("-9223372036854775808"), [[i64::MIN]]);
        assert_eq!(rows("[[]]"), [[0i64; 0]]);
    }

    #[test]
    fn garbage_is_refused_by_place() {
        for (text, words) in [
            ("", "no row"),
            ("[]", "no row"),
            ("5 7\n8 x 9\n", "line 2, id 1: \"x\""),
            ("5 1.5", "line 1, id 1"),
            ("9223372036854775808", "line 1, id 0"),
            ("[5, 1.5]", "row 0, step 1: 1.5"),
            ("[[5], [1e3]]", "row 1, step 0"),
            ("[[5], 6]", "row 1: 6; expected a list"),
            ("[[[5]]]", "row 0, step 0"),
            ("[true]", "row 0, step 0: true"),
            ("{\"rows\": [{}]}", "row 0: no `token_ids`"),
            ("{\"token_ids\": [1]}", "no list `rows`"),
            ("{\"rows\": [{\"token_ids\": [1], \"seconds\": [-1]}]}", "row 0, seconds, step 0: -1"),
            ("[5, 7", "is not JSON"),
        ] {
            let message = refused(text);
            assert!(message.contains(words), "{text}: {message}");
        }
        assert!(refused(&"x".repeat(5000)).len() < 200);
    }

    #[test]
    fn the_median_is_over_all_tokens() {
        let read =
            |seconds: &str| Dump::parse(&format!("{{\"rows\": [{{\"token_ids\": [1], \"seconds\": {seconds}}}]}}"));
        assert_eq!(read("[4, 1, 2]").unwrap().median_seconds(), Some(2.0));
        assert_eq!(read("[4, 1, 2, 3]").unwrap().median_seconds(), Some(2.5));
        assert_eq!(read("[]").unwrap().median_seconds(), None);
        assert_eq!(read("null").unwrap().median_seconds(), None);
    }

    fn captured(dtype: Dtype, shape: &[usize], ids: &[i64], metadata: &[(&str, &str)]) -> tempfile::TempDir {
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let before = Entry { dtype: Dtype::U8, shape: vec![3], data_offsets: (0, 3) };
        let entry = Entry { dtype, shape: shape.to_vec(), data_offsets: (3, 3 + bytes.len()) };
        let tensors = BTreeMap::from([("other".to_owned(), before), (TOKEN_IDS.to_owned(), entry)]);
        let metadata = metadata.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let mut file = Header { tensors, metadata }.encode().unwrap();
        file.extend([1, 2, 3]);
        file.extend(bytes);
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(device::CAPTURES_FILE), file).unwrap();
        dir
    }

    #[test]
    fn captures_are_read_by_directory_and_by_file() {
        let dir = captured(Dtype::I64, &[2, 3], &[5, 7, 0, 9, -1, -1], &[(STEP_SECONDS, "[0.5, 0.25, 1]")]);
        for path in [dir.path().to_owned(), dir.path().join(device::CAPTURES_FILE)] {
            let dump = Dump::read(&path).unwrap();
            assert_eq!((&dump.rows, &dump.path), (&vec![vec![5, 7, 0], vec![9]], &path));
            assert_eq!(dump.median_seconds(), Some(0.5));
        }
    }

    #[test]
    fn captures_that_are_not_tokens_are_told_apart() {
        let fault = |dir: tempfile::TempDir| Dump::read(dir.path()).unwrap_err().fault;
        assert!(matches!(fault(captured(Dtype::U64, &[1, 2], &[1, 2], &[])), DumpFault::DType(_)));
        assert!(matches!(fault(captured(Dtype::I64, &[2], &[1, 2], &[])), DumpFault::Shape(_)));
        assert!(matches!(fault(captured(Dtype::I64, &[0, 2], &[], &[])), DumpFault::Shape(_)));
        let dir = captured(Dtype::I64, &[1, 1], &[1], &[(STEP_SECONDS, "[\"x\"]")]);
        assert!(fault(dir).to_string().contains("step_seconds"));
        let empty = tempfile::tempdir().unwrap();
        let file = Header::default().encode().unwrap();
        std::fs::write(empty.path().join(device::CAPTURES_FILE), file).unwrap();
        assert!(matches!(fault(empty), DumpFault::NoTokens));
        assert!(matches!(fault(tempfile::tempdir().unwrap()), DumpFault::Io(_)));
    }

    proptest! {
        #[test]
        fn lists_are_read_back(rows in prop::collection::vec(prop::collection::vec(0i64..200_000, 1..9), 1..5)) {
            prop_assert_eq!(&self::rows(&serde_json::to_string(&rows).unwrap()), &rows);
            let lines: Vec<String> = rows.iter().map(|row| row.iter().map(i64::to_string).collect::<Vec<_>>().join(" ")).collect();
            prop_assert_eq!(&self::rows(&lines.join("\n")), &rows);
        }

        #[test]
        fn no_text_is_a_crash(text in "[\\[\\]{}\":,0-9a-e.\\- \n]{0,60}") {
            if let Ok(dump) = Dump::parse(&text) {
                prop_assert!(!dump.rows.is_empty());
            }
        }
    }
}
