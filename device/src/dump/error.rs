//! What is wrong with a dump.

use std::path::{Path, PathBuf};

use thiserror::Error;

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
    pub(crate) fn new(path: &Path, fault: DumpFault) -> Self {
        Self { path: path.to_path_buf(), fault: Box::new(fault) }
    }
}

/// What is wrong with a dump.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
#[non_exhaustive]
pub enum DumpFault {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(
        "is no dump of a known format; expected .pt, .npy, .npz, .safetensors, a directory of safetensors files with \
         an index, or an argument dump with args_dump.json"
    )]
    Unknown,
}
