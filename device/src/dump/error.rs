//! What is wrong with a dump.

use std::path::{Path, PathBuf};

use cases::header::HeaderError;
use safetensors::SafeTensorError;
use thiserror::Error;

use super::pt::PickleFault;

/// A dump that cannot be read or written.
#[derive(Debug, Error)]
#[error("{}: {fault}", path.display())]
pub struct DumpError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Box<DumpFault>,
}

impl DumpError {
    pub(crate) fn new(path: &Path, fault: impl Into<DumpFault>) -> Self {
        Self { path: path.to_path_buf(), fault: Box::new(fault.into()) }
    }
}

/// What is wrong with a dump.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
#[non_exhaustive]
pub enum DumpFault {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("is not a regular file or directory")]
    NotAFile,
    #[error("changed its length while it was being opened")]
    Changed,
    #[error(
        "is no dump of a known format; expected .pt, .npy, .npz, .safetensors, a directory of such files, or an \
         argument dump with args_dump.json"
    )]
    Unknown,
    #[error("is empty, 0 bytes long; whatever should have written it did not")]
    Empty,
    #[error("directory holds no dump: no .pt, .npy, .npz, .safetensors or args_dump.json, here or below")]
    EmptyDirectory,
    #[error("directory holds more than {most} files; name a directory further down")]
    ManyFiles { most: usize },

    #[error("holds two tensors named `{0}`; which of the two is meant cannot be told")]
    Twice(String),
    #[error("holds more than {most} tensors, which no dump of a kernel does")]
    ManyTensors { most: usize },
    #[error("tensor `{tensor}`: the product of shape {shape:?} overflows")]
    Overflow { tensor: String, shape: Vec<usize> },
    #[error("tensor `{tensor}` has {rank} dimensions; at most {most} are read")]
    Rank { tensor: String, rank: usize, most: usize },
    #[error("tensor `{tensor}`: shape {shape:?} takes {needed} bytes, but the file holds {held} for it{}", cut(*needed, *held))]
    Size { tensor: String, shape: Vec<usize>, needed: u64, held: u64 },
    #[error(
        "tensor `{tensor}`: shape {shape:?}, strides {strides:?} and offset {offset} lead beyond its storage of {held} \
         elements"
    )]
    Beyond { tensor: String, shape: Vec<usize>, strides: Vec<usize>, offset: usize, held: usize },
    #[error(
        "tensor `{tensor}`: with it the tensors take {taken} bytes, more than {most}, which is as much as a file of \
         {length} bytes is given; save copies of views and expanded tensors (.contiguous()) or uncompressed archives"
    )]
    Budget { tensor: String, taken: u64, most: u64, length: u64 },
    #[error(
        "tensor `{tensor}` has element type {dtype}, {why}; expected one of BOOL, U8 to U64, I8 to I64, F8, F16, \
         BF16, F32, F64, C64"
    )]
    Type { tensor: String, dtype: String, why: &'static str },

    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("is not a valid safetensors file: {0}")]
    Format(#[from] SafeTensorError),
    #[error("index: {0}")]
    Index(String),
    #[error("index puts tensor `{tensor}` into `{shard}`, which {why}")]
    Shard { tensor: String, shard: String, why: &'static str },
    #[error("index does not list tensor `{tensor}` of `{shard}` there; the index is of another checkpoint")]
    Unlisted { tensor: String, shard: String },

    #[error("is no archive that can be read: {0}; it may be cut short")]
    Archive(String),
    #[error("archive is preceded by {0} bytes of something else; expected the archive alone")]
    ArchiveOffset(u64),
    #[error("archive member `{member}` {why}")]
    Member { member: String, why: String },
    #[error(
        "archive holds neither data.pkl, as PyTorch's do, nor .npy members, as NumPy's do; it begins with `{first}`"
    )]
    ForeignArchive { first: String },
    #[error(
        "archive holds more than one pickle, `{first}` and `{second}`; PyTorch writes one, and which of the two is meant cannot be told"
    )]
    TwoPickles { first: String, second: String },

    #[error(transparent)]
    Pickle(#[from] PickleFault),
    #[error("pickle member `{member}` is {found} bytes long; at most {most} are read")]
    LongPickle { member: String, found: u64, most: u64 },
    #[error("was saved on a {0}-endian machine; expected little-endian")]
    Endian(String),
    #[error("storage `{key}`: {what}")]
    Storage { key: String, what: String },
    #[error("{left} bytes are left behind the last storage; something was appended to the file")]
    Appended { left: usize },
    #[error("is a pickle that torch.save did not write; expected PyTorch's magic number at its start")]
    ForeignPickle,

    #[error("{0}")]
    Npy(String),
    #[error(
        "descr is '{0}', two bytes that NumPy has no type for; if they are BF16 say so with --bf16 (nothing is \
         guessed: read as half precision, 1.0 would be 1.875)"
    )]
    Void(String),

    #[error("args_dump.json: {0}")]
    Manifest(String),
    #[error("args_dump.json: record {record} ({name}): {what}")]
    Record { record: usize, name: String, what: String },

    #[error("tensor `{tensor}` holds {found} bytes, but its shape {shape:?} of {dtype} takes {needed}")]
    Unwritable { tensor: String, found: usize, shape: Vec<usize>, dtype: String, needed: usize },
    #[error("element type {dtype} cannot be written as {format}; {advice}")]
    Unsupported { dtype: String, format: &'static str, advice: &'static str },
}

/// What a shorter file than expected means.
fn cut(needed: u64, held: u64) -> &'static str {
    if held < needed { "; it is cut short" } else { "; something was appended to it" }
}
