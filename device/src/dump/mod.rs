//! Dumps: tensors in the files that other tools write and read, as plain arrays of bytes.
//!
//! One type for all formats. [`read`] takes PyTorch's `.pt`, NumPy's `.npy` and `.npz`, safetensors files and sharded
//! directories, and the runtime's argument dumps; the format is found by a file's content. A file is hostile until it
//! is read: whatever it says of itself is checked before memory is taken for it. Nothing is converted and nothing judged.

mod archive;
mod arguments;
mod directory;
mod error;
mod layout;
mod npy;
mod npz;
mod open;
mod pt;
mod tensors_file;

use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde::Deserialize;

pub use error::{DumpError, DumpFault};
pub use open::{Opened, Stored};
pub use pt::PickleFault;

use self::open::Blob;

/// A tensor without a name: element type, shape, and its elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost dimension first; empty for a scalar.
    pub shape: Vec<usize>,
    /// The elements in logical row-major order, little-endian, whatever the file's layout was.
    pub bytes: Vec<u8>,
}

/// A tensor and its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedArray {
    /// Its name: the key in the file, nested ones joined by dots (`layer0.q`); for a bare tensor the file's stem; in a
    /// directory after the file's path without its extension (`out/attn_out`).
    pub name: String,
    /// The tensor.
    pub array: Array,
}

/// What a file or a directory of a format is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Format {
    /// PyTorch's archive: a ZIP file of a pickle and of storages.
    PtZip,
    /// PyTorch's format before that: pickles followed by storages.
    PtLegacy,
    /// One NumPy array.
    Npy,
    /// An archive of NumPy arrays.
    Npz,
    /// A safetensors file.
    Safetensors,
    /// A directory of safetensors files with an index.
    ShardedSafetensors,
    /// A directory of the runtime's argument dump.
    Arguments,
    /// A directory of files of these formats.
    Directory,
}

impl Format {
    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PtZip => "pt",
            Self::PtLegacy => "legacy pt",
            Self::Npy => "npy",
            Self::Npz => "npz",
            Self::Safetensors => "safetensors",
            Self::ShardedSafetensors => "sharded safetensors",
            Self::Arguments => "argument dump",
            Self::Directory => "directory",
        }
    }
}

/// One argument of one task, as the runtime dumped it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArgumentRecord {
    /// Its name in [`Dump::arrays`] or [`Dump::unusable`].
    pub name: String,
    /// The task, as the manifest spells it (`0x...`).
    pub task: String,
    /// Functions of the task; several for one that runs on several kinds of core.
    pub functions: Vec<i64>,
    /// Whether the task reads or writes it.
    pub role: Role,
    /// When it was taken.
    pub stage: Stage,
    /// Place in the task's argument list.
    pub index: usize,
}

/// What a task does with an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// It reads it.
    Input,
    /// It writes it.
    Output,
    /// It does both.
    InOut,
}

/// When an argument was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Before the task ran.
    BeforeDispatch,
    /// After it had run.
    AfterCompletion,
}

/// A record that holds no data one may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable {
    /// Its name.
    pub name: String,
    /// Why: `truncated`, `overwritten` and the like, with what to do.
    pub reason: String,
}

/// All tensors of a file or directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dump {
    /// Where it was read.
    pub path: PathBuf,
    /// What it was.
    pub format: Format,
    /// Whether it is one tensor that the file gives no name.
    pub bare: bool,
    /// The tensors, in the file's own order where it has one.
    pub arrays: Vec<NamedArray>,
    /// Argument dumps: every record, usable or not, in the manifest's order.
    pub records: Vec<ArgumentRecord>,
    /// Argument dumps: records without usable data.
    pub unusable: Vec<Unusable>,
    /// What else a reader should know: records that the runtime dropped.
    pub remarks: Vec<String>,
}

/// What a file cannot say by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadOptions {
    /// Take NumPy's two-byte void (`V2`) and its 16-bit unsigned integers, as which BF16 is saved, for BF16.
    pub bf16: bool,
}

/// Reads a whole dump into memory. [`Opened`] gives its tensors one by one, in place where they lie as asked for.
///
/// # Errors
/// The file cannot be read, is of no known format, or breaks a rule of its format; the message names the file, what is
/// wrong in it and what to do.
pub fn read(path: &Path, options: &ReadOptions) -> Result<Dump, DumpError> {
    Opened::open(path, options).map(Opened::into_dump)
}

/// Opens a file of any format but those of directories from its bytes. `name` stands for its path.
///
/// # Errors
/// As for [`read`].
pub fn open_bytes(bytes: Vec<u8>, name: &str, options: &ReadOptions) -> Result<Opened, DumpError> {
    let path = Path::new(name);
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let found = open::bytes(Blob::Owned(bytes), &stem, options, tensors_file::is_named(path));
    found.map(|found| found.opened(path)).map_err(|fault| DumpError::new(path, fault))
}

/// Opens an argument dump from the bytes of its two files.
///
/// # Errors
/// As for [`read`].
pub fn open_argument_bytes(manifest: &[u8], payload: Option<Vec<u8>>) -> Result<Opened, DumpError> {
    let path = Path::new(arguments::MANIFEST);
    let found = arguments::from_bytes(manifest, payload);
    found.map(|found| found.opened(path)).map_err(|fault| DumpError::new(path, fault))
}

/// Writes a tensor as `.npy`, version 1.0. BF16, which NumPy has no type for, is written as the two-byte void that
/// other writers use.
///
/// # Errors
/// NumPy has no such element type, the bytes are not what the shape takes, or the file system refuses.
pub fn write_npy(path: &Path, array: &Array) -> Result<(), DumpError> {
    write(path, || {
        array.check("array")?;
        let mut bytes = npy::encode_header(array)?;
        bytes.extend(&array.bytes);
        Ok(bytes)
    })
}

/// Writes a tensor as a `.pt` that `torch.load(weights_only=True)` takes.
///
/// # Errors
/// PyTorch has no such element type, the bytes are not what the shape takes, or the file system refuses.
pub fn write_pt(path: &Path, array: &Array) -> Result<(), DumpError> {
    write(path, || {
        array.check("tensor")?;
        pt::encode(array)
    })
}

/// Writes tensors as a safetensors file, ordered by alignment and name.
///
/// # Errors
/// Two tensors of one name, bytes that are not what a shape takes, or the file system refuses.
pub fn write_safetensors(path: &Path, arrays: &[NamedArray]) -> Result<(), DumpError> {
    write(path, || {
        arrays.iter().try_for_each(|named| named.array.check(&named.name))?;
        let (mut bytes, ordered) = tensors_file::encode_header(arrays)?;
        ordered.iter().for_each(|named| bytes.extend(&named.array.bytes));
        Ok(bytes)
    })
}

/// Makes a file's bytes and writes them, whole or not at all.
fn write(path: &Path, encode: impl FnOnce() -> Result<Vec<u8>, DumpFault>) -> Result<(), DumpError> {
    let written = encode().and_then(|bytes| Ok(cases::write_atomically(path, &bytes)?));
    written.map_err(|fault| DumpError::new(path, fault))
}

impl Array {
    /// Refuses bytes that are not what the shape takes.
    fn check(&self, tensor: &str) -> Result<(), DumpFault> {
        let needed = layout::length(tensor, self.dtype, &self.shape)?;
        if needed != self.bytes.len() {
            return Err(DumpFault::Unwritable {
                tensor: tensor.to_owned(),
                found: self.bytes.len(),
                shape: self.shape.clone(),
                dtype: self.dtype.to_string(),
                needed,
            });
        }
        Ok(())
    }
}

impl Role {
    /// The runtime's word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Input => "input",
            Self::Output => "output",
            Self::InOut => "inout",
        }
    }
}

impl Stage {
    /// The runtime's word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::BeforeDispatch => "before_dispatch",
            Self::AfterCompletion => "after_completion",
        }
    }
}

#[cfg(test)]
mod tests;
