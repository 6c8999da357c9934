//! What can be wrong with a checkpoint, told by file, tensor and key.

use std::path::{Path, PathBuf};

use reference::geometry::GeometryError;
use safetensors::SafeTensorError;
use thiserror::Error;

use crate::header::HeaderError;

/// A checkpoint that cannot be used.
#[derive(Debug, Error)]
#[error("{}: {}", path.display(), cut(&fault.to_string(), SAID))]
pub struct CheckpointError {
    /// The file at fault, or the directory where no single file is.
    pub path: PathBuf,
    /// What is wrong with it.
    #[source]
    pub fault: Box<CheckpointFault>,
}

impl CheckpointError {
    pub(super) fn new(path: &Path, fault: impl Into<CheckpointFault>) -> Self {
        Self { path: path.to_path_buf(), fault: Box::new(fault.into()) }
    }
}

/// Characters of a message about a file at most: names and values are the file's, and may be millions long.
const SAID: usize = 2000;

/// The text, or its beginning where it is longer than `most` characters.
pub(super) fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{} ...", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

/// What is wrong with a checkpoint.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum CheckpointFault {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error("is not a directory; name the directory that holds config.json and the weights")]
    NotADirectory,
    #[error(
        "is missing; a checkpoint directory holds {config} and the weights, in {single} or in shards with {index}",
        config = super::CONFIG_FILE, single = super::SINGLE_FILE, index = super::INDEX_FILE
    )]
    NoConfig,
    #[error("is not a regular file")]
    NotAFile,
    #[error("is {length} bytes long, more than the {limit} that such a file may have")]
    TooLong { length: u64, limit: u64 },
    #[error("is not the JSON that is expected here: {0}")]
    Json(#[from] serde_json::Error),
    #[error("`{0}` is given twice; which of the two is meant cannot be told")]
    Twice(String),
    #[error("{key}: {found}; expected {expected}")]
    Config { key: String, found: String, expected: String },
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    #[error("holds neither `{index}` nor `{single}`; a checkpoint has one of the two")]
    NoWeights { index: &'static str, single: &'static str },
    #[error("holds both `{index}` and `{single}`, and which is meant cannot be told; remove one")]
    TwoKinds { index: &'static str, single: &'static str },
    #[error("has no word for tensor `{tensor}`, which the shards hold")]
    Undescribed { tensor: String },
    #[error("weight_map: tensor `{tensor}` lies in `{shard}`, which is no name of a file beside the index")]
    ShardName { tensor: String, shard: String },
    #[error("weight_map is empty")]
    EmptyIndex,
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("is not a valid safetensors file: {0}")]
    Format(#[from] SafeTensorError),
    #[error("lacks tensor `{tensor}`, which the index says it holds")]
    Absent { tensor: String },
    #[error("holds tensor `{tensor}`, which the index {}", match listed {
        Some(shard) => format!("says lies in `{shard}`"),
        None => "does not list".to_owned(),
    })]
    Unlisted { tensor: String, listed: Option<String> },
    #[error("tensor `{tensor}` is in no shard; searched {searched}")]
    Missing { tensor: String, searched: String },
    #[error(
        "tensor `{tensor}` is in no shard, though `{weight}` holds INT8 codes that need their scale; searched {searched}"
    )]
    MissingScale { tensor: String, weight: String, searched: String },
    #[error(
        "tensor `{tensor}` is in no shard, and config.json does not tie the head to the embedding; set \
         tie_word_embeddings to true if the embedding is the head, or add the shard that holds it; searched {searched}"
    )]
    MissingHead { tensor: String, searched: String },
    #[error(
        "tensor `{tensor}` is a scale, but `{weight}` has type {found} and no codes to scale; {by}; searched {searched}"
    )]
    NeedlessScale { tensor: String, weight: String, found: String, by: String, searched: String },
    #[error("tensor `{tensor}` is not part of this model: {why}")]
    Unexpected { tensor: String, why: String },
    #[error("tensor `{tensor}` has type {found}; {expected}")]
    DType { tensor: String, found: String, expected: String },
    #[error("tensor `{tensor}` has shape {found:?}; config.json makes it {expected:?}")]
    Shape { tensor: String, found: Vec<usize>, expected: Vec<usize> },
    #[error("tensor `{tensor}`: element {index} is {value}; {rule}")]
    Value { tensor: String, index: usize, value: f32, rule: &'static str },
}

impl CheckpointFault {
    /// The tensor that is there and is at fault.
    pub(super) fn tensor(&self) -> Option<&str> {
        match self {
            Self::NeedlessScale { tensor, .. }
            | Self::Unexpected { tensor, .. }
            | Self::DType { tensor, .. }
            | Self::Shape { tensor, .. }
            | Self::Value { tensor, .. } => Some(tensor),
            Self::MissingScale { weight, .. } => Some(weight),
            _ => None,
        }
    }
}
