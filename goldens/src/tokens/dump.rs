//! What a device generated, from whatever it was written to: a bundle or its captures, JSON, or lines of ids
//! (`docs/tokens.md`, Dumps). Ids are taken as they are, for the judge to judge; what is not a list of whole numbers
//! is refused by its place.

use std::fmt;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use cases::header::{Entry, Header, HeaderError};
use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use thiserror::Error;

use super::golden::Golden;

/// Key of the seconds of each step in the metadata of captures: a JSON list.
pub const STEP_SECONDS: &str = "step_seconds";
/// Name of the ids in captures and in JSON.
const TOKEN_IDS: &str = "token_ids";
/// Name of the prompts there.
const PROMPT_IDS: &str = "prompt_ids";
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
    /// Prompts of the rows, where the dump carries them.
    pub prompts: Vec<Option<Vec<i64>>>,
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
    pub fault: Box<DumpFault>,
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
    Json(serde_json::Error),
    #[error("{0}; remove one of the two")]
    Twice(serde_json::Error),
    #[error(
        "`{PROMPT_IDS}` is {found}; expected I64 [rows, tokens] with the {rows} rows of `{TOKEN_IDS}`, or none at all"
    )]
    Prompts { found: String, rows: usize },
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
            Err(fault) => Err(DumpError { path: file, fault: Box::new(fault) }),
        }
    }

    /// Reads the text of a dump: JSON where it begins with a bracket, else lines of ids.
    ///
    /// # Errors
    /// The text is neither; the message names the place.
    pub fn parse(text: &str) -> Result<Self, DumpFault> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let dump = if text.trim_start().starts_with(['[', '{']) { json(&value(text)?)? } else { lines(text)? };
        if dump.rows.is_empty() {
            return Err(place("the whole file", "no row of ids", "at least one"));
        }
        Ok(dump)
    }

    /// Refuses a dump that carries other prompts than the golden's: its tokens answer another question. With `row`, a
    /// dump of one row is taken to be it.
    ///
    /// # Errors
    /// The first row whose prompt differs.
    pub fn check_prompts(&self, golden: &Golden, row: Option<usize>) -> Result<(), DumpError> {
        for (index, prompt) in self.prompts.iter().enumerate() {
            let of = row.filter(|_| self.rows.len() == 1).unwrap_or(index);
            let (Some(prompt), Some(expected)) = (prompt, golden.rows.get(of)) else { continue };
            if !prompt.iter().map(|id| usize::try_from(*id).ok()).eq(expected.prompt_ids.iter().map(|id| Some(*id))) {
                let found = format!("prompt_ids {prompt:?}");
                let fault = place(format!("row {index}"), found, "the prompt of the golden's row");
                return Err(DumpError { path: self.path.clone(), fault: Box::new(fault) });
            }
        }
        Ok(())
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

/// JSON of which no object has a key twice: which of the two was meant nobody knows.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("JSON")
            }

            fn visit_unit<E>(self) -> Result<Value, E> {
                Ok(Value::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_str<E>(self, value: &str) -> Result<Value, E> {
                Ok(value.into())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
                let mut items = Vec::new();
                while let Some(Unique(item)) = list.next_element()? {
                    items.push(item);
                }
                Ok(Value::Array(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut object = serde_json::Map::new();
                while let Some(key) = map.next_key::<String>()? {
                    if object.contains_key(&key) {
                        let short: String = key.chars().take(40).collect();
                        return Err(A::Error::custom(format!("the key {short:?} is given twice")));
                    }
                    let Unique(value) = map.next_value()?;
                    object.insert(key, value);
                }
                Ok(Value::Object(object))
            }
        }
        deserializer.deserialize_any(Any).map(Self)
    }
}

fn value(text: &str) -> Result<Value, DumpFault> {
    match serde_json::from_str(text) {
        Ok(Unique(value)) => Ok(value),
        // The only thing that is JSON and is refused.
        Err(error) if error.is_data() => Err(DumpFault::Twice(error)),
        Err(error) => Err(DumpFault::Json(error)),
    }
}

/// `token_ids` of a safetensors file, and `prompt_ids` where it is there. Its other tensors are no matter here.
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
    let data = length - header.data_length() as u64;
    let ids = read_ids(&mut file, data, entry)?;
    let prompts = match header.tensors.get(PROMPT_IDS) {
        Some(prompts) => match prompts.shape[..] {
            [count, most] if count == rows && most > 0 && prompts.dtype == Dtype::I64 => {
                let ids = read_ids(&mut file, data, prompts)?;
                ids.chunks(most).map(|prompt| Some(unfilled(prompt.to_vec()))).collect()
            }
            _ => return Err(DumpFault::Prompts { found: format!("{} {:?}", prompts.dtype, prompts.shape), rows }),
        },
        None => Vec::new(),
    };
    let seconds = match header.metadata.get(STEP_SECONDS) {
        Some(list) => {
            let at = format!("metadata `{STEP_SECONDS}`");
            let list = value(list).map_err(|fault| place(&at, fault.to_string(), "a JSON list of seconds"))?;
            vec![times(&list, &at, steps, steps)?]
        }
        None => Vec::new(),
    };
    let rows = ids.chunks(steps).map(|row| unfilled(row.to_vec())).collect();
    Ok(Dump { rows, prompts, seconds, ..Dump::default() })
}

/// The numbers of an I64 tensor; data begin at byte `data`.
fn read_ids(file: &mut std::fs::File, data: u64, entry: &Entry) -> Result<Vec<i64>, DumpFault> {
    file.seek(SeekFrom::Start(data + entry.data_offsets.0 as u64))?;
    // The header was checked against the file's length.
    let mut bytes = vec![0; entry.data_offsets.1 - entry.data_offsets.0];
    file.read_exact(&mut bytes)?;
    let (ids, _) = bytes.as_chunks::<8>();
    Ok(ids.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
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
                let written = ids.as_array().map_or(0, Vec::len);
                let ids = id_list(ids, &format!("row {row}"))?;
                let tokens = ids.len();
                dump.rows.push(ids);
                let prompt = entry.get(PROMPT_IDS).map(|ids| id_list(ids, &format!("row {row}, prompt_ids")));
                dump.prompts.push(prompt.transpose()?);
                match entry.get("seconds") {
                    None | Some(Value::Null) => {}
                    Some(list) => dump.seconds.push(times(list, &format!("row {row}, seconds"), tokens, written)?),
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

/// Seconds of tokens, one for each of `tokens`, or for each of the ids that were `written`, what fills the row's end
/// included; `null` stands for one that was not timed.
fn times(value: &Value, at: &str, tokens: usize, written: usize) -> Result<Vec<f64>, DumpFault> {
    let list = value.as_array().ok_or_else(|| place(at, value.to_string(), "a list of seconds"))?;
    if list.len() != tokens && list.len() != written {
        let found = format!("{} entries for a row of {written}", list.len());
        return Err(place(at, found, "seconds for every token, null where they are not known"));
    }
    let time = |(step, time): (usize, &Value)| {
        let seconds = time.as_f64().filter(|seconds| seconds.is_finite() && *seconds >= 0.0);
        seconds.ok_or_else(|| place(format!("{at}, step {step}"), time.to_string(), "seconds, a number of 0 or more"))
    };
    list.iter().enumerate().filter(|(_, time)| !time.is_null()).map(time).collect()
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
            ("{\"rows\": [{\"token_ids\": [1], \"seconds\": [1, 2]}]}", "row 0, seconds: 2 entries for a row of 1"),
            ("{\"rows\": [{\"token_ids\": [1, 2], \"seconds\": []}]}", "row 0, seconds: 0 entries for a row of 2"),
            ("{\"rows\": [], \"rows\": [{\"token_ids\": [1]}]}", "the key \"rows\" is given twice at line 1 column"),
            ("{\"rows\": [{\"token_ids\": [1], \"token_ids\": [2]}]}", "the key \"token_ids\" is given twice"),
            ("{\"rows\": [{\"token_ids\": [1], \"x\": {\"a\": 1, \"a\": 1}}]}", "the key \"a\" is given twice"),
        ] {
            let message = refused(text);
            assert!(message.contains(words), "{text}: {message}");
        }
        assert!(refused(&"x".repeat(5000)).len() < 200);
    }

    #[test]
    fn another_prompt_is_refused() {
        use crate::tokens::Stop;
        use crate::tokens::golden::tests::{golden, row, step};
        let of = |prompt: &[usize]| row(prompt, Stop::MaxNewTokens, vec![step(&[(1, 1.0, 0.0)])]);
        let golden = golden(vec![of(&[1, 2]), of(&[3])]);
        let dump =
            |prompt: &str| Dump::parse(&format!("{{\"rows\": [{{\"prompt_ids\": {prompt}, \"token_ids\": [1]}}]}}"));
        assert!(dump("[1, 2]").unwrap().check_prompts(&golden, None).is_ok());
        assert!(dump("[3]").unwrap().check_prompts(&golden, Some(1)).is_ok());
        assert!(Dump::parse("[1]").unwrap().check_prompts(&golden, None).is_ok());
        for prompt in ["[3]", "[1]", "[1, 2, 3]", "[-1, 2]", "[]"] {
            let message = dump(prompt).unwrap().check_prompts(&golden, None).unwrap_err().to_string();
            assert!(message.contains("row 0: prompt_ids"), "{message}");
        }
        assert!(dump("[\"a\"]").unwrap_err().to_string().contains("row 0, prompt_ids, step 0"));
    }

    #[test]
    fn the_median_is_over_all_tokens() {
        let read = |ids: &str, seconds: &str| {
            let dump = Dump::parse(&format!("{{\"rows\": [{{\"token_ids\": {ids}, \"seconds\": {seconds}}}]}}"));
            dump.unwrap().median_seconds()
        };
        assert_eq!(read("[1, 1, 1]", "[4, 1, 2]"), Some(2.0));
        assert_eq!(read("[1, 1, 1]", "[4, null, 2]"), Some(3.0));
        assert_eq!(read("[1, 1, 1, 1]", "[4, 1, 2, 3]"), Some(2.5));
        assert_eq!(read("[]", "[]"), None);
        assert_eq!(read("[1]", "null"), None);
        // What fills the end of a row may have a time, and need not.
        assert_eq!(read("[1, 1, -1]", "[4, 1]"), Some(2.5));
        assert_eq!(read("[1, 1, -1]", "[4, 1, 2]"), Some(2.0));
    }

    fn captured(dtype: Dtype, shape: &[usize], ids: &[i64], metadata: &[(&str, &str)]) -> tempfile::TempDir {
        captured_with(dtype, shape, ids, metadata, None)
    }

    fn captured_with(
        dtype: Dtype,
        shape: &[usize],
        ids: &[i64],
        metadata: &[(&str, &str)],
        prompts: Option<(Dtype, &[usize], &[i64])>,
    ) -> tempfile::TempDir {
        let mut bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let before = Entry { dtype: Dtype::U8, shape: vec![3], data_offsets: (0, 3) };
        let entry = Entry { dtype, shape: shape.to_vec(), data_offsets: (3, 3 + bytes.len()) };
        let mut tensors = BTreeMap::from([("other".to_owned(), before), (TOKEN_IDS.to_owned(), entry)]);
        if let Some((dtype, shape, ids)) = prompts {
            let begin = 3 + bytes.len();
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            let entry = Entry { dtype, shape: shape.to_vec(), data_offsets: (begin, 3 + bytes.len()) };
            tensors.insert(PROMPT_IDS.to_owned(), entry);
        }
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
        let fault = |dir: tempfile::TempDir| *Dump::read(dir.path()).unwrap_err().fault;
        assert!(matches!(fault(captured(Dtype::U64, &[1, 2], &[1, 2], &[])), DumpFault::DType(_)));
        assert!(matches!(fault(captured(Dtype::I64, &[2], &[1, 2], &[])), DumpFault::Shape(_)));
        assert!(matches!(fault(captured(Dtype::I64, &[0, 2], &[], &[])), DumpFault::Shape(_)));
        let dir = captured(Dtype::I64, &[1, 1], &[1], &[(STEP_SECONDS, "[\"x\"]")]);
        assert!(fault(dir).to_string().contains("step_seconds"));
        for (list, words) in [
            ("nope", "metadata `step_seconds`: is not JSON"),
            ("[1, 2]", "metadata `step_seconds`: 2 entries for a row of 1"),
            ("{}", "metadata `step_seconds`: {}; expected a list of seconds"),
        ] {
            let message = fault(captured(Dtype::I64, &[1, 1], &[1], &[(STEP_SECONDS, list)])).to_string();
            assert!(message.contains(words), "{message}");
        }
        let empty = tempfile::tempdir().unwrap();
        let file = Header::default().encode().unwrap();
        std::fs::write(empty.path().join(device::CAPTURES_FILE), file).unwrap();
        assert!(matches!(fault(empty), DumpFault::NoTokens));
        assert!(matches!(fault(tempfile::tempdir().unwrap()), DumpFault::Io(_)));
    }

    #[test]
    fn captures_carry_prompts_too() {
        use crate::tokens::Stop;
        use crate::tokens::golden::tests::{golden, row, step};
        let of = |prompt: &[usize]| row(prompt, Stop::MaxNewTokens, vec![step(&[(1, 1.0, 0.0)])]);
        let golden = golden(vec![of(&[5, 6, 7]), of(&[1])]);
        let read = |dtype, shape: &[usize], prompts: &[i64]| {
            let dir = captured_with(Dtype::I64, &[2, 1], &[1, 1], &[], Some((dtype, shape, prompts)));
            Dump::read(dir.path())
        };
        let right = read(Dtype::I64, &[2, 4], &[5, 6, 7, -1, 1, -1, -1, -1]).unwrap();
        assert_eq!(right.prompts, [Some(vec![5, 6, 7]), Some(vec![1])]);
        assert!(right.check_prompts(&golden, None).is_ok());
        let other = read(Dtype::I64, &[2, 4], &[5, 6, 7, -1, 2, -1, -1, -1]).unwrap();
        let message = other.check_prompts(&golden, None).unwrap_err().to_string();
        assert!(message.contains("row 1: prompt_ids [2]"), "{message}");
        for (dtype, shape) in [(Dtype::U64, vec![2, 1]), (Dtype::I64, vec![2]), (Dtype::I64, vec![1, 2])] {
            let message = read(dtype, &shape, &[5, 1]).unwrap_err().to_string();
            assert!(message.contains("`prompt_ids` is") && message.contains("the 2 rows"), "{message}");
        }
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
