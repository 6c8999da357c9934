//! The runtime's argument dumps: a manifest of records, and one file of their payloads. A payload is the logical view of
//! an argument, gathered, so that strides and offsets say where it came from and not how to read it. A record whose
//! payload the runtime cut, overwrote or gave up is named with the reason, and its bytes are never given as data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;

use super::error::{DumpError, DumpFault};
use super::layout::{Layout, length};
use super::open::{Blob, Budget, Found, Stored, map};
use super::tensors_file::is_plain_name;
use super::{ArgumentRecord, Format, Role, Stage, Unusable};

/// Name of the manifest.
pub(super) const MANIFEST: &str = "args_dump.json";
/// Longest manifest read: a hundred thousand records.
const LONGEST_MANIFEST: u64 = 32 << 20;

/// Whether a file's name is that of a manifest.
pub(super) fn is_manifest(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == MANIFEST)
}

#[derive(Deserialize)]
struct Manifest {
    bin_format: BinFormat,
    total_args: Option<u64>,
    #[serde(default)]
    truncated_args: u64,
    #[serde(default)]
    dropped_records: u64,
    #[serde(default)]
    dropped_overwrite: u64,
    #[serde(default)]
    host_discarded_args: u64,
    #[serde(default)]
    metadata_discarded_records: u64,
    #[serde(default)]
    counts_unknown: bool,
    bin_file: Option<String>,
    args: Vec<Record>,
}

#[derive(Deserialize)]
struct BinFormat {
    r#type: String,
    byte_order: String,
}

#[derive(Deserialize)]
struct Record {
    run_epoch: Option<u64>,
    task_id: String,
    func_id: Functions,
    role: Role,
    stage: Stage,
    arg_index: usize,
    #[serde(default)]
    kind: Kind,
    dtype: String,
    #[serde(default)]
    shape: Vec<usize>,
    value: Option<Value>,
    #[serde(default)]
    truncated: bool,
    #[serde(default)]
    overwritten: bool,
    #[serde(default)]
    host_discarded: bool,
    #[serde(default)]
    arg_index_ambiguous: bool,
    #[serde(default)]
    bin_offset: u64,
    #[serde(default)]
    bin_size: u64,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Functions {
    One(i64),
    Several(Vec<i64>),
}

#[derive(Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Kind {
    #[default]
    Tensor,
    Scalar,
}

/// A scalar as the manifest prints it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Value {
    Bool(bool),
    Signed(i64),
    Unsigned(u64),
    Other(serde::de::IgnoredAny),
}

/// Opens an argument dump by its manifest.
pub(super) fn find(path: &Path) -> Result<Found, DumpError> {
    let failed = |fault: DumpFault| DumpError::new(path, fault);
    let manifest = read(path).map_err(failed)?;
    let payload = match &manifest.bin_file {
        None => None,
        Some(name) if !is_plain_name(name) => {
            let what = format!("bin_file is {name:?}; expected the name of a file beside the manifest");
            return Err(failed(DumpFault::Manifest(what)));
        }
        Some(name) => {
            let bin = path.parent().unwrap_or(Path::new("")).join(name);
            let empty = std::fs::metadata(&bin).is_ok_and(|found| found.is_file() && found.len() == 0);
            // No record may have a payload, as with level 3 of a run without tensors.
            if empty { None } else { Some(map(&bin).map_err(|fault| DumpError::new(&bin, fault))?) }
        }
    };
    records(manifest, payload.map(Blob::Mapped)).map_err(failed)
}

fn read(path: &Path) -> Result<Manifest, DumpFault> {
    let length = std::fs::metadata(path)?.len();
    if length > LONGEST_MANIFEST {
        return Err(DumpFault::Manifest(format!("is {length} bytes long; at most {LONGEST_MANIFEST} are read")));
    }
    parse(&std::fs::read(path)?)
}

fn parse(text: &[u8]) -> Result<Manifest, DumpFault> {
    let manifest: Manifest = serde_json::from_slice(text).map_err(|error| DumpFault::Manifest(error.to_string()))?;
    let BinFormat { r#type, byte_order } = &manifest.bin_format;
    if r#type != "logical_contiguous" || byte_order != "little_endian" {
        return Err(DumpFault::Manifest(format!(
            "bin_format is {:?}, {:?}; expected \"logical_contiguous\", \"little_endian\"",
            clip(r#type),
            clip(byte_order)
        )));
    }
    let listed = manifest.args.len();
    let marked = |marked: fn(&Record) -> bool| manifest.args.iter().filter(|record| marked(record)).count() as u64;
    for (field, count, marked) in [
        ("truncated_args", manifest.truncated_args, marked(|record| record.truncated)),
        ("host_discarded_args", manifest.host_discarded_args, marked(|record| record.host_discarded)),
    ] {
        if count > marked {
            let what =
                format!("{field} is {count}, but {marked} records say so; which of the others is cannot be told");
            return Err(DumpFault::Manifest(what));
        }
    }
    match manifest.total_args {
        Some(total) if total != listed as u64 => {
            Err(DumpFault::Manifest(format!("total_args is {total}, but args lists {listed} records")))
        }
        _ => Ok(manifest),
    }
}

/// Opens a manifest and payload that are in memory.
pub(super) fn from_bytes(manifest: &[u8], payload: Option<Vec<u8>>) -> Result<Found, DumpFault> {
    records(parse(manifest)?, payload.map(Blob::Owned))
}

fn records(manifest: Manifest, payload: Option<Blob>) -> Result<Found, DumpFault> {
    let epochs: BTreeSet<Option<u64>> = manifest.args.iter().map(|record| record.run_epoch).collect();
    let held = payload.as_ref().map_or(0, |blob| blob.bytes().len());
    let mut found = Found::new(Format::Arguments, payload.into_iter().collect());
    let (mut names, mut places) = (BTreeSet::new(), BTreeMap::new());
    for (number, record) in manifest.args.iter().enumerate() {
        let name = record.name(epochs.len() > 1);
        let refused = |what: String| DumpFault::Record { record: number, name: clip(&name).to_owned(), what };
        if !names.insert(name.clone()) {
            return Err(refused("is listed twice; which of the two is meant cannot be told".into()));
        }
        match record.content(&name, held, manifest.bin_file.is_some()).map_err(refused)? {
            Content::Unusable(reason) => found.unusable.push(Unusable { name: name.clone(), reason }),
            Content::Payload(dtype, place) => {
                let layout = Layout::dense(&name, dtype, &record.shape, place, (false, false))?;
                if place.1 > 0
                    && let Some(other) = places.insert(place.0, (place.1, number))
                {
                    return Err(refused(format!("has the payload of record {}", other.1)));
                }
                found.tensors.push(Stored::new(name.clone(), dtype, record.shape.clone(), 0, layout));
            }
            Content::Scalar(dtype, bytes) => {
                let layout = Layout::dense(&name, dtype, &[], (0, bytes.len()), (false, false))?;
                found.blobs.push(Blob::Owned(bytes));
                let blob = found.blobs.len() - 1;
                found.tensors.push(Stored::new(name.clone(), dtype, Vec::new(), blob, layout));
            }
        }
        found.records.push(record.argument(name));
    }
    let mut end = (0usize, 0usize);
    for (&begin, &(size, number)) in &places {
        if begin < end.0 {
            let (name, other) = (found.records.get(number).map(|record| record.name.clone()), end.1);
            let what = format!("has a payload from byte {begin} on, inside that of record {other}");
            return Err(DumpFault::Record { record: number, name: name.unwrap_or_default(), what });
        }
        end = (begin.saturating_add(size), number);
    }
    let mut budget = Budget::of(held.saturating_add(manifest.args.len() * 16));
    found.tensors.iter().try_for_each(|tensor| budget.take(&tensor.name, tensor.length() as u64))?;
    found.remarks = remarks(&manifest);
    Ok(found)
}

/// What is missing and has no record that could be named.
fn remarks(manifest: &Manifest) -> Vec<String> {
    let counts = [
        (manifest.dropped_records, "records were dropped by the runtime and are not listed"),
        (manifest.dropped_overwrite, "records were dropped because others overwrote them, and are not listed"),
        (manifest.metadata_discarded_records, "records were discarded without their metadata and are not listed"),
    ];
    let mut remarks: Vec<String> =
        counts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    if manifest.counts_unknown {
        remarks.push("the runtime could not count what it dropped; records may be missing".into());
    }
    remarks
}

/// What a record gives.
enum Content {
    Unusable(String),
    /// Element type, and first byte and bytes of the payload.
    Payload(Dtype, (usize, usize)),
    Scalar(Dtype, Vec<u8>),
}

impl Record {
    fn name(&self, with_epoch: bool) -> String {
        let epoch = self.run_epoch.filter(|_| with_epoch).map(|epoch| format!("run{epoch}.")).unwrap_or_default();
        let (role, stage) = (self.role.name(), self.stage.name());
        format!("{epoch}{}.arg{}.{role}.{stage}", self.task_id, self.arg_index)
    }

    fn argument(&self, name: String) -> ArgumentRecord {
        let functions = match &self.func_id {
            Functions::One(function) => vec![*function],
            Functions::Several(functions) => functions.clone(),
        };
        let (task, role, stage, index) = (self.task_id.clone(), self.role, self.stage, self.arg_index);
        ArgumentRecord { name, task, functions, role, stage, index }
    }

    fn content(&self, name: &str, held: usize, has_file: bool) -> Result<Content, String> {
        let unusable = |reason: &str| Ok(Content::Unusable(reason.to_owned()));
        if self.truncated {
            return unusable(
                "truncated: the payload did not fit the dump's buffer; enlarge it, or dump fewer arguments",
            );
        }
        if self.overwritten {
            return unusable(
                "overwritten: the dump's buffer wrapped before the payload was read; dump fewer arguments",
            );
        }
        if self.host_discarded {
            return unusable("discarded on the host: its payload was not written; dump fewer arguments");
        }
        if self.arg_index_ambiguous {
            return unusable("ambiguous: the runtime cannot tell which argument it is; mark it once in the dump");
        }
        if self.kind == Kind::Scalar {
            return Ok(self.scalar());
        }
        let Some(dtype) = dtype(&self.dtype) else {
            return Ok(Content::Unusable(format!("element type {:?} is not known", clip(&self.dtype))));
        };
        let needed = length(name, dtype, &self.shape).map_err(|fault| fault.to_string())?;
        if !has_file {
            return unusable("without payload: the dump's level selected none (bin_file is null); raise the level");
        }
        if self.bin_size != needed as u64 {
            return Err(format!(
                "bin_size is {}, but shape {:?} of {} takes {needed} bytes",
                self.bin_size, self.shape, self.dtype
            ));
        }
        let end = self.bin_offset.checked_add(self.bin_size);
        if needed > 0 && end.is_none_or(|end| end > held as u64) {
            return Err(format!(
                "its payload is at byte {} and takes {needed}, but the file of payloads holds {held}: it is cut short",
                self.bin_offset
            ));
        }
        // An empty payload may lie anywhere.
        let begin = if needed == 0 { 0 } else { self.bin_offset as usize };
        Ok(Content::Payload(dtype, (begin, needed)))
    }

    /// Scalars have no payload: the manifest prints them. Whole numbers are what they were.
    fn scalar(&self) -> Content {
        let printed = || Content::Unusable(format!("scalar of {}: the manifest prints it in few digits", self.dtype));
        let (Some(dtype), Some(value)) = (dtype(&self.dtype), &self.value) else { return printed() };
        let value = match *value {
            Value::Bool(value) => i128::from(value),
            Value::Signed(value) => value.into(),
            Value::Unsigned(value) => value.into(),
            Value::Other(_) => return printed(),
        };
        let bytes = match dtype {
            Dtype::BOOL => (value == 0 || value == 1).then(|| vec![value as u8]),
            Dtype::I32 => i32::try_from(value).ok().map(|value| value.to_le_bytes().to_vec()),
            Dtype::U32 => u32::try_from(value).ok().map(|value| value.to_le_bytes().to_vec()),
            Dtype::I64 => i64::try_from(value).ok().map(|value| value.to_le_bytes().to_vec()),
            Dtype::U64 => u64::try_from(value).ok().map(|value| value.to_le_bytes().to_vec()),
            _ => return printed(),
        };
        let beyond = || Content::Unusable(format!("scalar of {}: {value} is none", self.dtype));
        bytes.map_or_else(beyond, |bytes| Content::Scalar(dtype, bytes))
    }
}

/// The runtime's names of element types, in either case.
fn dtype(name: &str) -> Option<Dtype> {
    const NAMES: [(&str, Dtype); 13] = [
        ("float32", Dtype::F32),
        ("float16", Dtype::F16),
        ("bfloat16", Dtype::BF16),
        ("float64", Dtype::F64),
        ("int8", Dtype::I8),
        ("int16", Dtype::I16),
        ("int32", Dtype::I32),
        ("int64", Dtype::I64),
        ("uint8", Dtype::U8),
        ("uint16", Dtype::U16),
        ("uint32", Dtype::U32),
        ("uint64", Dtype::U64),
        ("bool", Dtype::BOOL),
    ];
    let of_eight_bits = [("fp8e4m3fn", Dtype::F8_E4M3), ("fp8e8m0", Dtype::F8_E8M0)];
    let mut known = NAMES.iter().chain(&of_eight_bits);
    known.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|&(_, dtype)| dtype)
}

/// The beginning of a text that a message repeats.
fn clip(text: &str) -> &str {
    text.char_indices().nth(100).map_or(text, |(end, _)| text.get(..end).unwrap_or_default())
}

#[cfg(test)]
mod tests;
