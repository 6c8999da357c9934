//! safetensors: single files, and directories of several with an index that says which tensor lies in which.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use cases::header::{Entry, Header, LONGEST_HEADER};
use safetensors::SafeTensors;
use serde::Deserialize;

use super::error::{DumpError, DumpFault};
use super::layout::{Layout, length};
use super::open::{Blob, Found, Stored, map};
use super::{Format, NamedArray};

const EXTENSION: &str = "safetensors";
const INDEX: &str = ".safetensors.index.json";
/// Longest index read: that of a model of a hundred thousand tensors.
const LONGEST_INDEX: u64 = 16 << 20;

/// Whether a file's name says that it is one.
pub(super) fn is_named(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == EXTENSION)
}

/// Whether a file's name is that of an index.
pub(super) fn is_index(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(INDEX))
}

/// Whether bytes begin as a safetensors file does: with a possible length, and a JSON object behind it.
pub(super) fn looks_like_one(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return false };
    u64::from_le_bytes(*length) <= LONGEST_HEADER && rest.first() == Some(&b'{')
}

/// Finds the tensors of one file.
pub(super) fn find(blob: Blob) -> Result<Found, DumpFault> {
    let bytes = blob.bytes();
    let header = Header::read(bytes, bytes.len() as u64)?;
    // The format's own reader has the last word on the header.
    SafeTensors::read_metadata(bytes)?;
    let begin = bytes.len() - header.data_length();
    let mut tensors = Vec::new();
    for (name, entry) in header.tensors {
        let (first, end) = entry.data_offsets;
        let place = (begin + first, end - first);
        let layout = Layout::dense(&name, entry.dtype, &entry.shape, place, (false, false))?;
        tensors.push(Stored::new(name, entry.dtype, entry.shape, 0, layout));
    }
    Ok(Found { tensors, ..Found::new(Format::Safetensors, vec![blob]) })
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Opens the files that an index names.
pub(super) fn sharded(index: &Path) -> Result<Found, DumpError> {
    let failed = |fault: DumpFault| DumpError::new(index, fault);
    let weight_map = read_index(index).map_err(failed)?;
    let directory = index.parent().unwrap_or(Path::new(""));
    let mut shards: BTreeMap<&str, usize> = BTreeMap::new();
    for (tensor, shard) in &weight_map {
        if !is_plain_name(shard) {
            let (tensor, shard) = (tensor.clone(), shard.clone());
            let why = "is no plain file name; shards lie beside their index";
            return Err(failed(DumpFault::Shard { tensor, shard, why }));
        }
        *shards.entry(shard).or_default() += 1;
    }
    let mut found = Found::new(Format::ShardedSafetensors, Vec::new());
    for (shard, listed) in shards {
        let path = directory.join(shard);
        let file = map(&path).and_then(|mapped| find(Blob::Mapped(mapped)));
        let file = file.map_err(|fault| DumpError::new(&path, fault))?;
        for tensor in &file.tensors {
            if weight_map.get(&tensor.name).is_none_or(|other| other != shard) {
                let (tensor, shard) = (tensor.name.clone(), shard.to_owned());
                return Err(failed(DumpFault::Unlisted { tensor, shard }));
            }
        }
        // Every tensor of the file is listed there, so that fewer of them than are listed lack one.
        if file.tensors.len() < listed {
            let holds = |tensor: &str| file.tensors.iter().any(|held| held.name == tensor);
            let absent = weight_map.iter().find(|(tensor, other)| *other == shard && !holds(tensor));
            let tensor = absent.map(|(tensor, _)| tensor.clone()).unwrap_or_default();
            let why = "does not hold it; the index is of another checkpoint";
            return Err(failed(DumpFault::Shard { tensor, shard: shard.to_owned(), why }));
        }
        found.join("", file);
    }
    found.tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, DumpFault> {
    let length = std::fs::metadata(path)?.len();
    if length > LONGEST_INDEX {
        return Err(DumpFault::Index(format!("is {length} bytes long; at most {LONGEST_INDEX} are read")));
    }
    let text = std::fs::read(path)?;
    let index: Index = serde_json::from_slice(&text).map_err(|error| DumpFault::Index(error.to_string()))?;
    if index.weight_map.is_empty() {
        return Err(DumpFault::Index("weight_map is empty; expected the file of each tensor".into()));
    }
    Ok(index.weight_map)
}

/// Whether a name stays in its directory: one plain component on any system.
pub(super) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    one && !name.contains(['/', '\\', ':', '\0'])
}

/// The bytes of a file up to its data, and the order in which tensors follow it: from the widest element type to the
/// narrowest, then by name, which leaves each aligned to its elements.
pub(super) fn encode_header(arrays: &[NamedArray]) -> Result<(Vec<u8>, Vec<&NamedArray>), DumpFault> {
    let mut ordered: Vec<&NamedArray> = arrays.iter().collect();
    ordered.sort_by(|left, right| {
        let width = |named: &NamedArray| named.array.dtype.bitsize();
        width(right).cmp(&width(left)).then_with(|| left.name.cmp(&right.name))
    });
    let mut header = Header::default();
    let mut end = 0usize;
    for NamedArray { name, array } in &ordered {
        length(name, array.dtype, &array.shape)?;
        if name == "__metadata__" {
            let why = "is the name of the file's own metadata and can be no tensor's".to_owned();
            return Err(DumpFault::Member { member: name.clone(), why });
        }
        let begin = end;
        end = end.saturating_add(array.bytes.len());
        let entry = Entry { dtype: array.dtype, shape: array.shape.clone(), data_offsets: (begin, end) };
        if header.tensors.insert(name.clone(), entry).is_some() {
            return Err(DumpFault::Twice(name.clone()));
        }
    }
    Ok((header.encode()?, ordered))
}
