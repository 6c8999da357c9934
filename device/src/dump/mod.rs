//! Dumps: tensors in the files that other tools write and read, as plain arrays of bytes.
//!
//! One type for all formats. [`read`] takes PyTorch's `.pt`, NumPy's `.npy` and `.npz`, safetensors files and sharded
//! directories, and the runtime's argument dumps; the format is found by a file's content. A file is hostile until it
//! is read: whatever it says of itself is checked before memory is taken for it. Nothing is converted and nothing judged.

mod error;

use std::path::{Path, PathBuf};

use safetensors::Dtype;

pub use error::{DumpError, DumpFault};

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
    /// Its name: the key in the file, nested ones joined by dots (`layer0.q`); for a bare tensor the file's stem.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// It reads it.
    Input,
    /// It writes it.
    Output,
    /// It does both.
    InOut,
}

/// When an argument was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// Take NumPy's two-byte void (`V2`), as which BF16 is saved, for BF16.
    pub bf16: bool,
}

/// Reads a whole dump.
///
/// # Errors
/// The file cannot be read, is of no known format, or breaks a rule of its format; the message names the file, what is
/// wrong in it and what to do.
pub fn read(path: &Path, _options: &ReadOptions) -> Result<Dump, DumpError> {
    Err(DumpError::new(path, DumpFault::Unknown))
}

/// Writes a tensor as `.npy`, version 1.0. BF16, which NumPy has no type for, is written as the two-byte void that
/// other writers use.
///
/// # Errors
/// NumPy has no such element type, the bytes are not what the shape takes, or the file system refuses.
pub fn write_npy(path: &Path, _array: &Array) -> Result<(), DumpError> {
    Err(DumpError::new(path, DumpFault::Unknown))
}

/// Writes a tensor as a `.pt` that `torch.load(weights_only=True)` takes.
///
/// # Errors
/// PyTorch has no such element type, the bytes are not what the shape takes, or the file system refuses.
pub fn write_pt(path: &Path, _array: &Array) -> Result<(), DumpError> {
    Err(DumpError::new(path, DumpFault::Unknown))
}

/// Writes tensors as a safetensors file, ordered by alignment and name.
///
/// # Errors
/// Two tensors of one name, bytes that are not what a shape takes, or the file system refuses.
pub fn write_safetensors(path: &Path, _arrays: &[NamedArray]) -> Result<(), DumpError> {
    Err(DumpError::new(path, DumpFault::Unknown))
}
