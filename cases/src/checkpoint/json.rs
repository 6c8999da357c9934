//! Small JSON files beside the weights: read with a limit, and without losing what is said twice.

use std::path::Path;

use serde::de::DeserializeOwned;

use super::error::{CheckpointError, CheckpointFault};

/// Longest such file. The index of a large model is some hundred thousand bytes.
const LONGEST: u64 = 16 << 20;

/// Reads a file as `T`; `None` where there is none.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, CheckpointError> {
    let failed = |fault: CheckpointFault| CheckpointError::new(path, fault);
    // A link to nowhere is there, and opening it says what is wrong with it.
    if path.symlink_metadata().is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound) {
        return Ok(None);
    }
    let metadata = std::fs::metadata(path).map_err(|error| failed(error.into()))?;
    if !metadata.is_file() {
        return Err(failed(CheckpointFault::NotAFile));
    }
    if metadata.len() > LONGEST {
        return Err(failed(CheckpointFault::TooLong { length: metadata.len(), limit: LONGEST }));
    }
    let text = std::fs::read(path).map_err(|error| failed(error.into()))?;
    serde_json::from_slice(&text).map(Some).map_err(|error| failed(error.into()))
}
