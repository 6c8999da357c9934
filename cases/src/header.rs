//! The header of a safetensors file, read strictly.
//!
//! The format's own reader has the last word on a file; this pass comes before it, reads nothing but the
//! header, and exists because that reader keeps the last of two equal names in silence and rarely says
//! which tensor is wrong. It holds no more memory than the header itself.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;

use safetensors::Dtype;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Bytes of the length field before the header.
pub const LENGTH_BYTES: u64 = 8;

/// Longest header read. A capture's is a few thousand bytes, a large model's a hundred thousand, that of one with hundreds
/// of experts in each layer some millions.
pub const LONGEST_HEADER: u64 = 16 << 20;

const METADATA: &str = "__metadata__";

/// One tensor of the header.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// First byte and the byte after the last, counted from the end of the header.
    pub data_offsets: (usize, usize),
}

/// A header whose tensors tile the file's data exactly.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// Tensors by name.
    pub tensors: BTreeMap<String, Entry>,
    /// The free-form `__metadata__`.
    pub metadata: BTreeMap<String, String>,
}

/// A header as it is written. The format's own writer keeps metadata in hash order; this one is deterministic.
#[derive(Serialize)]
struct Written<'a> {
    #[serde(rename = "__metadata__", skip_serializing_if = "BTreeMap::is_empty")]
    metadata: &'a BTreeMap<String, String>,
    #[serde(flatten)]
    tensors: &'a BTreeMap<String, Entry>,
}

/// What is wrong with a header.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum HeaderError {
    #[error("cannot be read: {0}")]
    Io(#[from] std::io::Error),
    #[error("is {0} bytes long; a safetensors file begins with a header length of 8 bytes, so this one is cut short")]
    Short(u64),
    #[error(
        "header length is {length}, but {left} bytes follow it; the file is cut short, or is not a safetensors file"
    )]
    Length { length: u64, left: u64 },
    #[error("header length is {length}, more than the {LONGEST_HEADER} bytes that one may need")]
    TooLong { length: u64 },
    #[error("header is not what safetensors prescribes: {0}")]
    Json(#[from] serde_json::Error),
    #[error("header names `{0}` twice; which of the two is meant cannot be told")]
    Twice(String),
    #[error("tensor `{tensor}`: the product of shape {shape:?} overflows")]
    Overflow { tensor: String, shape: Vec<usize> },
    #[error("tensor `{tensor}`: data_offsets {offsets:?} end before they begin")]
    Reversed { tensor: String, offsets: (usize, usize) },
    #[error(
        "tensor `{tensor}`: shape {shape:?} of {dtype} takes {needed} bytes, but its data_offsets {offsets:?} hold {held}"
    )]
    Size { tensor: String, shape: Vec<usize>, dtype: String, needed: usize, offsets: (usize, usize), held: usize },
    #[error("tensor `{tensor}`: data_offsets begin at {begin}, inside tensor `{other}`, which ends at {end}")]
    Overlap { tensor: String, begin: usize, other: String, end: usize },
    #[error("tensor `{tensor}`: data_offsets begin at {begin}, which leaves a hole after byte {end}")]
    Hole { tensor: String, begin: usize, end: usize },
    #[error("holds {found} bytes of data, but its header describes {described}; {}", if found < described {
        "the file is cut short"
    } else {
        "something was appended to it"
    })]
    DataLength { found: u64, described: u64 },
}

impl Header {
    /// Reads and checks the header of a file of `length` bytes, from its first byte.
    ///
    /// # Errors
    /// The first rule of the format that the file breaks, with the tensor and the field.
    pub fn read(mut file: impl Read, length: u64) -> Result<Self, HeaderError> {
        let left = length.checked_sub(LENGTH_BYTES).ok_or(HeaderError::Short(length))?;
        let mut prefix = [0; LENGTH_BYTES as usize];
        file.read_exact(&mut prefix)?;
        let header = u64::from_le_bytes(prefix);
        if header > left {
            return Err(HeaderError::Length { length: header, left });
        }
        if header > LONGEST_HEADER {
            return Err(HeaderError::TooLong { length: header });
        }
        let mut text = Vec::new();
        file.take(header).read_to_end(&mut text)?;
        let raw: Raw = serde_json::from_slice(&text)?;
        let metadata = unique(raw.metadata)?;
        let tensors = unique(raw.tensors)?;
        if raw.metadata_keys > 1 {
            return Err(HeaderError::Twice(METADATA.into()));
        }
        let described = tile(&tensors)? as u64;
        let found = left - header;
        if described != found {
            return Err(HeaderError::DataLength { found, described });
        }
        Ok(Self { tensors, metadata })
    }

    /// The bytes before the tensors' data: length and JSON, padded so that the data begin at a multiple of 8.
    ///
    /// # Errors
    /// None that a header of strings and numbers can cause.
    pub fn encode(&self) -> Result<Vec<u8>, HeaderError> {
        let mut json = serde_json::to_vec(&Written { metadata: &self.metadata, tensors: &self.tensors })?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend(json);
        Ok(bytes)
    }

    /// Bytes of all tensors' data, which are the last of the file.
    #[must_use]
    pub fn data_length(&self) -> usize {
        self.tensors.values().map(|entry| entry.data_offsets.1).max().unwrap_or(0)
    }
}

/// Checks that the tensors follow one another without hole or overlap, each as long as its shape says.
/// Returns the bytes they take.
fn tile(tensors: &BTreeMap<String, Entry>) -> Result<usize, HeaderError> {
    let mut ordered: Vec<_> = tensors.iter().collect();
    ordered.sort_by_key(|(_, entry)| entry.data_offsets);
    let (mut end, mut other) = (0, "");
    for (name, entry) in ordered {
        let tensor = || name.clone();
        let (begin, stop) = entry.data_offsets;
        let held = stop
            .checked_sub(begin)
            .ok_or_else(|| HeaderError::Reversed { tensor: tensor(), offsets: (begin, stop) })?;
        let bits = entry
            .shape
            .iter()
            .try_fold(entry.dtype.bitsize(), |product, &size| product.checked_mul(size))
            .ok_or_else(|| HeaderError::Overflow { tensor: tensor(), shape: entry.shape.clone() })?;
        let needed = bits.div_ceil(8);
        if held != needed {
            let (shape, dtype) = (entry.shape.clone(), entry.dtype.to_string());
            return Err(HeaderError::Size { tensor: tensor(), shape, dtype, needed, offsets: (begin, stop), held });
        }
        if begin < end {
            return Err(HeaderError::Overlap { tensor: tensor(), begin, other: other.into(), end });
        }
        if begin > end {
            return Err(HeaderError::Hole { tensor: tensor(), begin, end });
        }
        (end, other) = (stop, name);
    }
    Ok(end)
}

/// A map of the pairs, unless a name comes twice.
fn unique<T>(pairs: Vec<(String, T)>) -> Result<BTreeMap<String, T>, HeaderError> {
    let mut map = BTreeMap::new();
    for (name, value) in pairs {
        if map.contains_key(&name) {
            return Err(HeaderError::Twice(name));
        }
        map.insert(name, value);
    }
    Ok(map)
}

/// A map of strings, refused where a name comes twice.
///
/// # Errors
/// It is no object of strings, or a name comes twice.
pub fn unique_strings<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, String>, D::Error> {
    unique(Pairs::deserialize(deserializer)?.0).map_err(serde::de::Error::custom)
}

/// The header's JSON with every pair kept, repeated ones too.
#[derive(Default)]
struct Raw {
    tensors: Vec<(String, Entry)>,
    metadata: Vec<(String, String)>,
    metadata_keys: usize,
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Raw;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
                let mut raw = Raw::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        raw.metadata_keys += 1;
                        raw.metadata.extend(map.next_value::<Pairs>()?.0);
                    } else {
                        raw.tensors.push((name, map.next_value()?));
                    }
                }
                Ok(raw)
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

struct Pairs(Vec<(String, String)>);

impl<'de> Deserialize<'de> for Pairs {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;
        impl<'de> Visitor<'de> for Strings {
            type Value = Pairs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs, A::Error> {
                let mut pairs = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    pairs.push(pair);
                }
                Ok(Pairs(pairs))
            }
        }
        deserializer.deserialize_map(Strings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.resize(bytes.len() + data, 7);
        bytes
    }

    fn refusal(bytes: &[u8]) -> String {
        let error = Header::read(bytes, bytes.len() as u64).unwrap_err();
        // Whatever this pass refuses for its structure is either refused by the format's reader too, or is
        // one of the two things that reader lets through.
        let stricter = matches!(error, HeaderError::Twice(_) | HeaderError::TooLong { .. } | HeaderError::Json(_));
        assert!(stricter || safetensors::SafeTensors::deserialize(bytes).is_err(), "{error}");
        error.to_string()
    }

    #[test]
    fn a_good_header_is_read() {
        let header = r#"{"__metadata__":{"a":"1"},"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let bytes = file(header, 8);
        let header = Header::read(&bytes[..], bytes.len() as u64).unwrap();
        assert_eq!(header.tensors["x"].shape, [2]);
        assert_eq!(header.metadata["a"], "1");
    }

    #[test]
    fn a_model_of_many_experts_is_read() {
        let tensor = |n: usize| {
            format!(
                r#""model.layers.{}.mlp.experts.{}.weight":{{"dtype":"I8","shape":[1],"data_offsets":[{n},{}]}}"#,
                n / 256,
                n % 256,
                n + 1
            )
        };
        let tensors: Vec<String> = (0..20_000).map(tensor).collect();
        let bytes = file(&format!("{{{}}}", tensors.join(",")), tensors.len());
        assert!(bytes.len() > 1 << 20);
        assert_eq!(Header::read(&bytes[..], bytes.len() as u64).unwrap().tensors.len(), tensors.len());
    }

    #[test]
    fn hostile_headers_are_refused_by_name() {
        let one = |shape: &str, offsets: &str| format!(r#"{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}"#);
        let cases: Vec<(Vec<u8>, &[&str])> = vec![
            (vec![], &["0 bytes long"]),
            (vec![1, 2, 3], &["3 bytes long"]),
            ((u64::MAX - 3).to_le_bytes().to_vec(), &["header length is 18446744073709551612"]),
            ((1u64 << 63).to_le_bytes().to_vec(), &["header length is 9223372036854775808"]),
            (file(&" ".repeat(17 << 20), 0), &["header length is 17825792", "more than"]),
            (file(&"[".repeat(200_000), 0), &["not what safetensors prescribes"]),
            (file(&format!(r#"{{"x":{}"#, "[".repeat(200_000)), 0), &["not what safetensors prescribes"]),
            (file(&format!(r#"{{"x":{{"dtype":{}"#, "[".repeat(200_000)), 0), &["not what"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[4294967296,4294967296]", "[0,8]")), 8), &["`x`", "overflows"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[18446744073709551616]", "[0,8]")), 8), &["not what"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[-1]", "[0,8]")), 8), &["not what"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[2]", "[8,0]")), 8), &["`x`", "end before"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[3]", "[0,8]")), 8), &["`x`", "takes 12 bytes", "hold 8"]),
            (
                file(&format!(r#"{{"x":{},"y":{}}}"#, one("[2]", "[0,8]"), one("[2]", "[4,12]")), 12),
                &["`y`", "begin at 4", "inside tensor `x`"],
            ),
            (
                file(&format!(r#"{{"x":{},"y":{}}}"#, one("[2]", "[0,8]"), one("[2]", "[12,20]")), 20),
                &["`y`", "hole after byte 8"],
            ),
            (file(&format!(r#"{{"x":{0},"x":{0}}}"#, one("[2]", "[0,8]")), 8), &["names `x` twice"]),
            (
                file(&format!(r#"{{"x":{},"\u0078":{}}}"#, one("[2]", "[0,8]"), one("[2]", "[8,16]")), 16),
                &["names `x` twice"],
            ),
            (file(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0), &["names `a` twice"]),
            (file(r#"{"__metadata__":{},"__metadata__":{}}"#, 0), &["names `__metadata__` twice"]),
            (file(r#"{"__metadata__":{"a":1}}"#, 0), &["not what"]),
            (
                file(r#"{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 8),
                &["duplicate field `dtype`"],
            ),
            (file(r#"{"x":{"dtype":"F7","shape":[2],"data_offsets":[0,8]}}"#, 8), &["F7"]),
            (file(r#"{"x":{"dtype":"F32","shape":[2]}}"#, 8), &["data_offsets"]),
            (file(&format!(r#"{{"x":{}}} trailing"#, one("[2]", "[0,8]")), 8), &["not what"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[2]", "[0,8]")), 7), &["7 bytes of data", "cut short"]),
            (file(&format!(r#"{{"x":{}}}"#, one("[2]", "[0,8]")), 9), &["9 bytes of data", "appended"]),
            (file("{\"\u{0}", 0), &["not what"]),
        ];
        for (bytes, expected) in cases {
            let message = refusal(&bytes);
            for text in expected {
                assert!(message.contains(text), "{message:?} lacks {text:?}");
            }
        }
    }
}
