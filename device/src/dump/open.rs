//! A dump whose directory has been read and whose tensors have not: what they are, and where their bytes lie. Files are
//! mapped, so that a tensor that lies in its file as it is asked for costs no copy.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use cases::Mapped;
use safetensors::Dtype;

use super::error::{DumpError, DumpFault};
use super::layout::Layout;
use super::{ArgumentRecord, Array, Dump, Format, NamedArray, ReadOptions, Unusable};
use super::{arguments, directory, npy, npz, pt, tensors_file};

/// Most tensors of a dump.
const MOST_TENSORS: usize = 1 << 18;

/// A dump, opened.
#[derive(Debug)]
pub struct Opened {
    /// Where it is.
    pub path: PathBuf,
    /// What it is.
    pub format: Format,
    /// Whether it is one tensor that the file gives no name.
    pub bare: bool,
    /// Its tensors, as in [`Dump::arrays`].
    pub tensors: Vec<Stored>,
    /// As in [`Dump::records`].
    pub records: Vec<ArgumentRecord>,
    /// As in [`Dump::unusable`].
    pub unusable: Vec<Unusable>,
    /// As in [`Dump::remarks`].
    pub remarks: Vec<String>,
    blobs: Vec<Blob>,
}

/// A tensor of an opened dump.
#[derive(Clone, Debug)]
pub struct Stored {
    /// Its name, as in [`NamedArray::name`].
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    blob: usize,
    layout: Layout,
}

impl Stored {
    /// Bytes of its elements.
    #[must_use]
    pub fn length(&self) -> usize {
        self.layout.length()
    }

    pub(super) fn new(name: String, dtype: Dtype, shape: Vec<usize>, blob: usize, layout: Layout) -> Self {
        Self { name, dtype, shape, blob, layout }
    }

    /// The same tensor in a dump whose blobs begin at `first`, under a name there.
    pub(super) fn moved(self, name: String, first: usize) -> Self {
        Self { name, blob: self.blob + first, ..self }
    }
}

/// Bytes that tensors lie in.
#[derive(Debug)]
pub(super) enum Blob {
    /// A mapped file.
    Mapped(Mapped),
    /// A member of an archive that was compressed.
    Owned(Vec<u8>),
}

impl Blob {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(mapped) => mapped.bytes(),
            Self::Owned(bytes) => bytes,
        }
    }
}

/// What a file may make this program hold: eight times its own length and 32 MiB. Views of one storage, expanded tensors
/// and compressed members hold more than the file does, and nothing but this ends them.
#[derive(Debug)]
pub(super) struct Budget {
    taken: u64,
    most: u64,
    length: u64,
}

impl Budget {
    pub fn of(length: usize) -> Self {
        let length = length as u64;
        Self { taken: 0, most: length.saturating_mul(8).saturating_add(32 << 20), length }
    }

    pub fn take(&mut self, tensor: &str, bytes: u64) -> Result<(), DumpFault> {
        self.taken = self.taken.saturating_add(bytes);
        if self.taken > self.most {
            let (taken, most, length) = (self.taken, self.most, self.length);
            return Err(DumpFault::Budget { tensor: tensor.to_owned(), taken, most, length });
        }
        Ok(())
    }
}

/// What a reader finds in a file.
#[derive(Debug)]
pub(super) struct Found {
    pub format: Format,
    pub bare: bool,
    pub tensors: Vec<Stored>,
    pub records: Vec<ArgumentRecord>,
    pub unusable: Vec<Unusable>,
    pub remarks: Vec<String>,
    pub blobs: Vec<Blob>,
}

impl Found {
    pub fn new(format: Format, blobs: Vec<Blob>) -> Self {
        let (tensors, records, unusable, remarks) = Default::default();
        Self { format, bare: false, tensors, records, unusable, remarks, blobs }
    }

    /// The same under its path.
    pub fn opened(self, path: &Path) -> Opened {
        let Self { format, bare, tensors, records, unusable, remarks, blobs } = self;
        Opened { path: path.to_path_buf(), format, bare, tensors, records, unusable, remarks, blobs }
    }

    /// Takes what another file holds, its names under `prefix`.
    pub fn join(&mut self, prefix: &str, other: Self) {
        let first = self.blobs.len();
        let name = |tensor: &str| match (other.bare, prefix.is_empty()) {
            (true, _) => prefix.to_owned(),
            (false, true) => tensor.to_owned(),
            (false, false) => format!("{prefix}.{tensor}"),
        };
        for tensor in other.tensors {
            let name = name(&tensor.name);
            self.tensors.push(tensor.moved(name, first));
        }
        self.remarks.extend(other.remarks.into_iter().map(|remark| format!("{prefix}: {remark}")));
        self.blobs.extend(other.blobs);
    }

    /// Refuses equal names and more than a file may hold.
    fn check(&self, budget: &mut Budget) -> Result<(), DumpFault> {
        if self.tensors.len() > MOST_TENSORS {
            return Err(DumpFault::ManyTensors { most: MOST_TENSORS });
        }
        let mut names = BTreeSet::new();
        for tensor in &self.tensors {
            if !names.insert(tensor.name.as_str()) {
                return Err(DumpFault::Twice(tensor.name.clone()));
            }
            budget.take(&tensor.name, tensor.length() as u64)?;
        }
        Ok(())
    }
}

impl Opened {
    /// Opens a dump, and reads of it what is needed to say what it holds.
    ///
    /// # Errors
    /// As for [`super::read`].
    pub fn open(path: &Path, options: &ReadOptions) -> Result<Self, DumpError> {
        Ok(find(path, options)?.opened(path))
    }

    /// The elements of one of its tensors, in logical row-major order, little-endian.
    #[must_use]
    pub fn bytes(&self, tensor: &Stored) -> Cow<'_, [u8]> {
        let blob = self.blobs.get(tensor.blob).map(Blob::bytes).unwrap_or_default();
        tensor.layout.bytes(blob, tensor.dtype, &tensor.shape)
    }

    /// All of it, in memory.
    #[must_use]
    pub fn into_dump(self) -> Dump {
        let array = |tensor: &Stored| NamedArray {
            name: tensor.name.clone(),
            array: Array { dtype: tensor.dtype, shape: tensor.shape.clone(), bytes: self.bytes(tensor).into_owned() },
        };
        let arrays = self.tensors.iter().map(array).collect();
        let Self { path, format, bare, records, unusable, remarks, .. } = self;
        Dump { path, format, bare, arrays, records, unusable, remarks }
    }
}

fn find(path: &Path, options: &ReadOptions) -> Result<Found, DumpError> {
    let failed = |fault: DumpFault| DumpError::new(path, fault);
    let metadata = std::fs::metadata(path).map_err(|error| failed(error.into()))?;
    if metadata.is_dir() {
        directory::find(path, options)
    } else if metadata.is_file() {
        file(path, options)
    } else {
        // Opening a pipe would wait for its writer.
        Err(failed(DumpFault::NotAFile))
    }
}

/// Maps a file.
pub(super) fn map(path: &Path) -> Result<Mapped, DumpFault> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(DumpFault::NotAFile);
    }
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    if length == 0 {
        return Err(DumpFault::Empty);
    }
    let mapped = Mapped::open(&file)?;
    if mapped.bytes().len() as u64 != length {
        return Err(DumpFault::Changed);
    }
    Ok(mapped)
}

/// Opens one file by what it holds.
pub(super) fn file(path: &Path, options: &ReadOptions) -> Result<Found, DumpError> {
    let failed = |fault: DumpFault| DumpError::new(path, fault);
    let blob = Blob::Mapped(map(path).map_err(failed)?);
    let begin = blob.bytes().get(..64.min(blob.bytes().len())).unwrap_or_default();
    if looks_like_json(begin) && !tensors_file::looks_like_one(blob.bytes()) {
        return if arguments::is_manifest(path) {
            arguments::find(path)
        } else if tensors_file::is_index(path) {
            tensors_file::sharded(path)
        } else {
            Err(failed(DumpFault::Unknown))
        };
    }
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    bytes(blob, &stem, options, tensors_file::is_named(path)).map_err(failed)
}

/// Opens the bytes of one file. `stem` names a tensor that the file gives no name.
pub(super) fn bytes(blob: Blob, stem: &str, options: &ReadOptions, is_safetensors: bool) -> Result<Found, DumpFault> {
    let bytes = blob.bytes();
    let mut budget = Budget::of(bytes.len());
    let found = if bytes.starts_with(npy::MAGIC) {
        npy::find(blob, stem, options)
    } else if bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(b"PK\x05\x06") {
        if pt::is_archive(bytes)? {
            pt::archive(blob, stem, &mut budget)
        } else {
            npz::find(blob, options, &mut budget)
        }
    } else if tensors_file::looks_like_one(bytes) || is_safetensors {
        // Before pickles: the length of a header may begin with the bytes that a pickle begins with.
        tensors_file::find(blob)
    } else if pt::is_pickle(bytes) {
        pt::legacy(blob, stem)
    } else {
        Err(DumpFault::Unknown)
    }?;
    // What was decompressed is in it already; the tensors in it are not held twice.
    found.check(&mut Budget::of(found.blobs.iter().map(|blob| blob.bytes().len()).sum()))?;
    Ok(found)
}

fn looks_like_json(bytes: &[u8]) -> bool {
    bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{')
}
