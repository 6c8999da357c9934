//! PyTorch's `.pt`: an archive of one pickle and of storages, or, before version 1.6, pickles followed by storages. Tensors
//! are views of storages, with offsets and strides; several may share one.

mod globals;
mod opcodes;
mod pickle;
mod write;

use std::collections::BTreeMap;

use safetensors::Dtype;

pub use pickle::PickleFault;
pub(super) use write::encode;

use self::globals::Global;
use self::pickle::{Object, Pickle, Value};
use super::Format;
use super::archive::{Archive, Content};
use super::error::DumpFault;
use super::layout::{Layout, element_size};
use super::open::{Blob, Budget, Found, Stored};

/// Longest pickle of an archive: that of a model of fifty thousand tensors.
const LONGEST_PICKLE: u64 = 16 << 20;
/// Dicts and lists in one another.
const DEEPEST: usize = 64;
/// Most values of all kinds that are named.
const MOST_NAMED: usize = 1 << 20;
/// Most tensors.
const MOST_TENSORS: usize = 1 << 16;
/// Most dimensions of all tensors together: one value may be named many times over.
const MOST_DIMENSIONS: usize = 1 << 19;
/// Longest name of a tensor, with the keys that lead to it.
const LONGEST_NAME: usize = 512;
/// Values that are no tensors and that a remark names.
const FEW: usize = 5;
/// The integer that the first pickle of the old format holds.
const MAGIC: [u8; 10] = [0x6C, 0xFC, 0x9C, 0x46, 0xF9, 0x20, 0x6A, 0xA8, 0x50, 0x19];
/// Version of the old format.
const LEGACY_VERSION: i64 = 1001;

/// Whether an archive is PyTorch's: it holds a pickle.
pub(super) fn is_archive(bytes: &[u8]) -> Result<bool, DumpFault> {
    Ok(Archive::open(bytes)?.members.iter().any(|member| member.name.ends_with(".pkl")))
}

/// Whether bytes begin as a pickle does.
pub(super) fn is_pickle(bytes: &[u8]) -> bool {
    matches!(bytes, [0x80, 0..=5, ..])
}

/// Where the elements of a storage lie.
#[derive(Clone, Copy, Debug)]
struct Place {
    blob: usize,
    /// First byte.
    begin: usize,
    /// Bytes.
    length: usize,
}

/// What a persistent id says of a storage.
struct Storage<'a> {
    key: &'a str,
    /// Element type; bytes where the storage has none.
    dtype: Dtype,
    elements: usize,
    /// First element and elements of a part of it.
    part: Option<(usize, usize)>,
}

impl Storage<'_> {
    fn refused(&self, what: String) -> DumpFault {
        DumpFault::Storage { key: self.key.to_owned(), what }
    }

    /// Bytes that it takes.
    fn length(&self) -> Result<usize, DumpFault> {
        let size = element_size(self.key, self.dtype)?;
        let overflow = || self.refused(format!("is declared with {} elements of {size} bytes", self.elements));
        self.elements.checked_mul(size).ok_or_else(overflow)
    }
}

/// Finds the tensors of an archive.
pub(super) fn archive(blob: Blob, stem: &str, budget: &mut Budget) -> Result<Found, DumpFault> {
    let mut owned = Vec::new();
    let found = {
        let bytes = blob.bytes();
        let mut archive = Archive::open(bytes)?;
        let (index, prefix) = pickle_of(&archive)?;
        let (name, size) =
            archive.members.get(index).map(|member| (member.name.clone(), member.size)).unwrap_or_default();
        if size as u64 > LONGEST_PICKLE {
            return Err(DumpFault::LongPickle { member: name, found: size as u64, most: LONGEST_PICKLE });
        }
        let members: BTreeMap<String, usize> =
            archive.members.iter().enumerate().map(|(index, member)| (member.name.clone(), index)).collect();
        let content = archive.content(index, true, budget)?;
        let big_endian = match members.get(&format!("{prefix}byteorder")) {
            None => false,
            Some(&index) => {
                let content = archive.content(index, true, budget)?;
                match archive.bytes(&content) {
                    b"little" => false,
                    b"big" => true,
                    other => return Err(DumpFault::Endian(String::from_utf8_lossy(other).chars().take(20).collect())),
                }
            }
        };
        let text = match &content {
            Content::InPlace(range) => bytes.get(range.clone()).unwrap_or_default(),
            Content::Inflated(bytes) => bytes,
        };
        let pickle = Pickle::read(text, 0)?;
        if pickle.end != text.len() {
            return Err(DumpFault::Appended { left: text.len() - pickle.end });
        }
        let mut places: BTreeMap<String, Place> = BTreeMap::new();
        let mut locate = |storage: &Storage<'_>| {
            let length = storage.length()?;
            let place = match places.get(storage.key) {
                Some(&place) => place,
                None => {
                    let index = members.get(&format!("{prefix}data/{}", storage.key));
                    let index = *index.ok_or_else(|| storage.refused("is no member of the archive".into()))?;
                    let place = match archive.content(index, true, budget)? {
                        Content::InPlace(range) => Place { blob: 0, begin: range.start, length: range.len() },
                        Content::Inflated(bytes) => {
                            let length = bytes.len();
                            owned.push(Blob::Owned(bytes));
                            Place { blob: owned.len(), begin: 0, length }
                        }
                    };
                    places.insert(storage.key.to_owned(), place);
                    place
                }
            };
            if place.length != length {
                let (elements, dtype, held) = (storage.elements, storage.dtype, place.length);
                return Err(storage.refused(format!(
                    "is declared with {elements} elements of {dtype}, {length} bytes, but its member holds {held}"
                )));
            }
            Ok(place)
        };
        walk(&pickle, stem, big_endian, &mut locate)?
    };
    let mut blobs = vec![blob];
    blobs.extend(owned);
    let Walked { bare, tensors, remarks } = found;
    Ok(Found { bare, tensors, remarks, ..Found::new(Format::PtZip, blobs) })
}

/// The archive's one pickle, and what names of members begin with.
fn pickle_of(archive: &Archive<'_>) -> Result<(usize, String), DumpFault> {
    let mut pickles = archive.members.iter().enumerate().filter(|(_, member)| member.name.ends_with(".pkl"));
    let Some((index, first)) = pickles.next() else {
        let first = archive.members.first().map(|member| member.name.clone()).unwrap_or_default();
        return Err(DumpFault::ForeignArchive { first });
    };
    if let Some((_, second)) = pickles.next() {
        return Err(DumpFault::TwoPickles { first: first.name.clone(), second: second.name.clone() });
    }
    match first.name.strip_suffix("data.pkl") {
        Some(prefix) if prefix.is_empty() || prefix.ends_with('/') => Ok((index, prefix.to_owned())),
        _ => {
            let why = "is a pickle; expected the one named data.pkl, as torch.save names it".to_owned();
            Err(DumpFault::Member { member: first.name.clone(), why })
        }
    }
}

/// Finds the tensors of a file of the old format.
pub(super) fn legacy(blob: Blob, stem: &str) -> Result<Found, DumpFault> {
    let bytes = blob.bytes();
    let magic = Pickle::read(bytes, 0)?;
    if magic.long(magic.root) != Some(&MAGIC) {
        return Err(DumpFault::ForeignPickle);
    }
    let version = Pickle::read(bytes, magic.end)?;
    if !matches!(version.root, Value::Int(LEGACY_VERSION)) {
        return Err(DumpFault::ForeignPickle);
    }
    let system = Pickle::read(bytes, version.end)?;
    let Some(Object::Dict(facts)) = system.object(system.root) else { return Err(DumpFault::ForeignPickle) };
    let big = |&(key, value): &(Value, Value)| {
        system.text(key) == Some("little_endian") && !matches!(value, Value::Bool(true))
    };
    if facts.iter().any(big) {
        return Err(DumpFault::Endian("big".into()));
    }
    let pickle = Pickle::read(bytes, system.end)?;
    let keys = Pickle::read(bytes, pickle.end)?;
    let (places, end) = legacy_storages(bytes, &pickle, &keys)?;
    if end != bytes.len() {
        return Err(DumpFault::Appended { left: bytes.len() - end });
    }
    let mut locate = |storage: &Storage<'_>| {
        let place = places.get(storage.key).copied();
        let place = place.ok_or_else(|| storage.refused("is not in the file's list of storages".into()))?;
        match storage.length()? {
            length if length == place.length => Ok(place),
            length => Err(storage.refused(format!("is declared with {length} bytes and with {}", place.length))),
        }
    };
    let Walked { bare, tensors, remarks } = walk(&pickle, stem, false, &mut locate)?;
    Ok(Found { bare, tensors, remarks, ..Found::new(Format::PtLegacy, vec![blob]) })
}

/// Places of the storages behind the pickles, and the byte behind the last of them.
fn legacy_storages(
    bytes: &[u8],
    pickle: &Pickle<'_>,
    keys: &Pickle<'_>,
) -> Result<(BTreeMap<String, Place>, usize), DumpFault> {
    let mut declared: BTreeMap<&str, usize> = BTreeMap::new();
    for values in pickle.storages() {
        let storage = storage(pickle, values)?;
        declared.insert(storage.key, storage.length()?);
    }
    let list = keys.sequence(keys.root).ok_or(DumpFault::ForeignPickle)?;
    let (mut places, mut at) = (BTreeMap::new(), keys.end);
    for &key in list {
        let key = keys.text(key).ok_or(DumpFault::ForeignPickle)?;
        let refused = |what: String| DumpFault::Storage { key: key.to_owned(), what };
        let Some(&length) = declared.get(key) else {
            return Err(refused("is in the file, but nothing says of which type".into()));
        };
        let rest = bytes.get(at..).unwrap_or_default();
        let cut = || refused(format!("takes {length} bytes, but the file ends before: it is cut short"));
        let (count, data) = rest.split_first_chunk::<8>().ok_or_else(cut)?;
        let count = u64::from_le_bytes(*count);
        // Counted in elements, or in bytes for a storage without a type.
        let size = (length as u64).checked_div(count).unwrap_or(1);
        if count.checked_mul(size) != Some(length as u64) || !matches!(size, 1 | 2 | 4 | 8) {
            return Err(refused(format!("is declared with {length} bytes, but is written with {count} elements")));
        }
        if data.len() < length {
            return Err(cut());
        }
        if places.insert(key.to_owned(), Place { blob: 0, begin: at + 8, length }).is_some() {
            return Err(refused("is in the file twice".into()));
        }
        at += 8 + length;
    }
    Ok((places, at))
}

/// What the tuple of a persistent id says.
fn storage<'p>(pickle: &Pickle<'p>, values: &[Value]) -> Result<Storage<'p>, DumpFault> {
    let refused = |what: &str| DumpFault::Storage { key: "?".into(), what: what.to_owned() };
    let (&[tag, kind, key, _location, elements], view) = (match values {
        [rest @ .., view] if rest.len() == 5 => (rest, Some(*view)),
        rest => (rest, None),
    }) else {
        return Err(refused("is described by another number of values than 5 or 6"));
    };
    if pickle.text(tag) != Some("storage") {
        return Err(refused("is described by a persistent id that does not begin with 'storage'"));
    }
    let dtype = match pickle.object(kind) {
        Some(&Object::Global(Global::Storage(dtype))) => dtype,
        Some(Object::Global(Global::Untyped)) => Dtype::U8,
        _ => return Err(refused("is of no known storage type")),
    };
    let key = pickle.text(key).ok_or_else(|| refused("has a key that is no text"))?;
    let refused = |what: &str| DumpFault::Storage { key: key.to_owned(), what: what.to_owned() };
    let elements = pickle.size(elements).ok_or_else(|| refused("has no number of elements"))?;
    let part = match view {
        None | Some(Value::None) => None,
        Some(view) => match pickle.sequence(view) {
            Some(&[_, offset, count]) => {
                let part = pickle.size(offset).zip(pickle.size(count));
                Some(part.ok_or_else(|| refused("is a view whose place is no number"))?)
            }
            _ => return Err(refused("is a view that is described by another number of values than 3")),
        },
    };
    Ok(Storage { key, dtype, elements, part })
}

/// What a walk through a pickle's value found.
#[derive(Default)]
struct Walked {
    bare: bool,
    tensors: Vec<Stored>,
    remarks: Vec<String>,
}

type Locate<'l> = dyn FnMut(&Storage<'_>) -> Result<Place, DumpFault> + 'l;

/// Names all tensors of a pickle.
fn walk(pickle: &Pickle<'_>, stem: &str, big_endian: bool, locate: &mut Locate<'_>) -> Result<Walked, DumpFault> {
    let mut walk =
        Walk { pickle, big_endian, locate, seen: 0, dimensions: 0, tensors: Vec::new(), others: 0, first: Vec::new() };
    let bare = matches!(pickle.object(pickle.root), Some(Object::Tensor(..)));
    walk.value(pickle.root, if bare { stem } else { "" }, 0)?;
    let mut remarks = Vec::new();
    if walk.others > 0 {
        let more = if walk.others > walk.first.len() { ", ..." } else { "" };
        remarks.push(format!("{} values are no tensors: {}{more}", walk.others, walk.first.join(", ")));
    }
    Ok(Walked { bare, tensors: walk.tensors, remarks })
}

struct Walk<'w, 'p, 'l> {
    pickle: &'w Pickle<'p>,
    big_endian: bool,
    locate: &'w mut Locate<'l>,
    seen: usize,
    dimensions: usize,
    tensors: Vec<Stored>,
    others: usize,
    first: Vec<String>,
}

impl Walk<'_, '_, '_> {
    fn value(&mut self, value: Value, name: &str, depth: usize) -> Result<(), DumpFault> {
        self.seen += 1;
        if self.seen > MOST_NAMED {
            return Err(PickleFault::Limit { what: "values", most: MOST_NAMED }.into());
        }
        if depth > DEEPEST {
            return Err(PickleFault::Limit { what: "dicts and lists in one another", most: DEEPEST }.into());
        }
        if name.len() > LONGEST_NAME {
            return Err(PickleFault::Limit { what: "bytes of names that lead to a value", most: LONGEST_NAME }.into());
        }
        let pickle = self.pickle;
        let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
        match pickle.object(value) {
            Some(&Object::Tensor(global, ref values)) => self.tensor(global, values, name, 0)?,
            Some(Object::Tuple(values) | Object::List(values)) => {
                for (index, &value) in values.iter().enumerate() {
                    self.value(value, &below(&index.to_string()), depth + 1)?;
                }
            }
            Some(Object::Dict(pairs)) => {
                for &(key, value) in pairs {
                    let key = match key {
                        Value::Int(key) => key.to_string(),
                        key => pickle.text(key).map(str::to_owned).ok_or(PickleFault::Malformed {
                            what: "a dict has a key that is neither text nor a whole number",
                            at: pickle.end,
                        })?,
                    };
                    self.value(value, &below(&key), depth + 1)?;
                }
            }
            Some(Object::Global(_) | Object::Storage(_)) | None => {
                self.others += 1;
                if self.first.len() < FEW {
                    let name = if name.is_empty() { "the file's one value" } else { name };
                    self.first.push(name.chars().take(80).collect());
                }
            }
        }
        Ok(())
    }

    fn tensor(&mut self, global: Global, values: &[Value], name: &str, depth: usize) -> Result<(), DumpFault> {
        let pickle = self.pickle;
        let malformed = |what| PickleFault::Malformed { what, at: pickle.end };
        let no_hooks = |hooks| match pickle.object(hooks) {
            Some(Object::Dict(pairs)) if pairs.is_empty() => Ok(()),
            None if matches!(hooks, Value::None) => Ok(()),
            _ => Err(malformed("a tensor has hooks; expected none, as torch.save writes them")),
        };
        let (base, rest) = match (global, values) {
            (Global::RebuildParameter, &[tensor, _, hooks]) => {
                no_hooks(hooks)?;
                return match pickle.object(tensor) {
                    Some(&Object::Tensor(global, ref values)) if depth == 0 => self.tensor(global, values, name, 1),
                    _ => Err(malformed("a parameter is made of what is no tensor").into()),
                };
            }
            (Global::RebuildTensor2, &[a, b, c, d, _, hooks, ref rest @ ..]) => {
                no_hooks(hooks)?;
                ((a, b, c, d, None), rest)
            }
            (Global::RebuildTensor3, &[a, b, c, d, _, hooks, dtype, ref rest @ ..]) => {
                no_hooks(hooks)?;
                ((a, b, c, d, Some(dtype)), rest)
            }
            _ => return Err(malformed("a tensor is made of too few values").into()),
        };
        match *rest {
            [] | [Value::None] => {}
            // Conjugated and negated views say so here, and their storage holds other numbers than they do.
            [metadata] if matches!(pickle.object(metadata), Some(Object::Dict(pairs)) if pairs.is_empty()) => {}
            _ => return Err(malformed("a tensor is a lazy view (conj, neg); save what .resolve_conj() gives").into()),
        }
        let (values, offset, shape, strides, dtype) = base;
        let Some(Object::Storage(values)) = pickle.object(values) else {
            return Err(malformed("a tensor is made of what is no storage").into());
        };
        let storage = storage(pickle, values)?;
        let dtype = match dtype.map(|dtype| pickle.object(dtype)) {
            None => storage.dtype,
            Some(Some(&Object::Global(Global::Type(dtype)))) => dtype,
            Some(_) => return Err(malformed("a tensor has an element type that is none").into()),
        };
        let place = (self.locate)(&storage)?;
        let size = element_size(name, dtype)?;
        let unit = element_size(name, storage.dtype)?;
        let (skipped, held) = match storage.part {
            None => (0, place.length),
            Some((offset, count)) => {
                let bytes = offset.checked_mul(unit).zip(count.checked_mul(unit));
                let inside = bytes.filter(|(at, held)| at.checked_add(*held).is_some_and(|end| end <= place.length));
                inside.ok_or_else(|| storage.refused("has a view that leads beyond it".into()))?
            }
        };
        let (Some(offset), Some(shape), Some(strides)) =
            (pickle.size(offset), pickle.sizes(shape), pickle.sizes(strides))
        else {
            return Err(malformed("a tensor's offset, shape or strides are no whole numbers from 0 on").into());
        };
        let place_of = (place.begin + skipped, held / size);
        let layout = Layout::strided(name, dtype, &shape, &strides, offset, place_of, self.big_endian)?;
        self.dimensions += shape.len();
        if self.tensors.len() >= MOST_TENSORS {
            return Err(PickleFault::Limit { what: "tensors", most: MOST_TENSORS }.into());
        }
        if self.dimensions > MOST_DIMENSIONS {
            return Err(PickleFault::Limit { what: "dimensions of tensors", most: MOST_DIMENSIONS }.into());
        }
        self.tensors.push(Stored::new(name.to_owned(), dtype, shape, place.blob, layout));
        Ok(())
    }
}

#[cfg(test)]
mod tests;
