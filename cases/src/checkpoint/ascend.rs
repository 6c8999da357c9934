//! `quant_model_description.json`, by which the Ascend compressor declares what it wrote: a word for every tensor, and
//! a few keys about the whole. Every key and every word has to be known, and has to agree with what the tensor is.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::config::{demand, holds};
use super::error::{CheckpointError, CheckpointFault};
use super::shards::Shards;
use super::{json, layout};

/// Which tensors are quantized, and how.
pub const DESCRIPTION_FILE: &str = "quant_model_description.json";
/// Which shard holds which tensor.
pub const INDEX_FILE: &str = "quant_model_weights.safetensors.index.json";
/// The weights of a checkpoint without shards.
pub const SINGLE_FILE: &str = "quant_model_weights.safetensors";

/// INT8 weights with a scale a channel; activations quantized token by token as they come.
const DYNAMIC: &str = "W8A8_DYNAMIC";
/// Not quantized.
const FLOAT: &str = "FLOAT";

/// The words of a description, by tensor.
#[derive(Debug)]
pub struct Description {
    path: PathBuf,
    words: BTreeMap<String, String>,
}

impl Description {
    /// Whether `dir` holds a description.
    pub fn is_in(dir: &Path) -> bool {
        dir.join(DESCRIPTION_FILE).symlink_metadata().is_ok()
    }

    /// Reads the description in `dir`; refuses every scheme but W8A8 as the contract computes it.
    pub fn read(dir: &Path) -> Result<Self, CheckpointError> {
        let path = dir.join(DESCRIPTION_FILE);
        let map: Map<String, Value> = json::read(&path)?.unwrap_or_default();
        let words = words(map).map_err(|fault| CheckpointError::new(&path, fault))?;
        Ok(Self { path, words })
    }

    /// Refuses a word for what is in no shard, and a tensor without a word.
    pub fn check_covers(&self, shards: &Shards) -> Result<(), CheckpointError> {
        let absent = self.words.keys().find(|tensor| !shards.tensors.contains_key(*tensor));
        let undescribed = shards.tensors.keys().find(|tensor| !self.words.contains_key(*tensor));
        let fault = match (absent, undescribed) {
            (Some(tensor), _) => CheckpointFault::Missing { tensor: tensor.clone(), searched: shards.searched() },
            (None, Some(tensor)) => CheckpointFault::Undescribed { tensor: tensor.clone() },
            (None, None) => return Ok(()),
        };
        Err(CheckpointError::new(&self.path, fault))
    }
}

/// The words for tensors, once the keys about the whole are known to say what the contract computes.
fn words(mut map: Map<String, Value>) -> Result<BTreeMap<String, String>, CheckpointFault> {
    let mut take = |key: &str| map.shift_remove(key).filter(|value| !value.is_null());
    let empty = || Value::Object(Map::new());
    let kind = take("model_quant_type").unwrap_or_else(|| "missing".into());
    demand("model_quant_type", &kind, &DYNAMIC.into())?;
    for (key, expected) in
        [("version", "1.0.0".into()), ("group_size", 0.into()), ("metadata", empty()), ("optional", empty())]
    {
        if let Some(found) = take(key) {
            demand(key, &found, &expected)?;
        }
    }
    let mut words = BTreeMap::new();
    for (key, value) in map.into_iter().filter(|(_, value)| !value.is_null()) {
        let projection = layout::is_of_projection(&key);
        let expected = if projection { DYNAMIC } else { FLOAT };
        let named_as_a_tensor = key.contains('.');
        match value {
            Value::String(word) if word == expected && named_as_a_tensor => words.insert(key, word),
            other if !named_as_a_tensor => {
                return Err(holds(&key, &other, "no such key: what it means for the model is not known"));
            }
            other => {
                let why = if projection { "every projection of the layers is INT8" } else { "it is not quantized" };
                return Err(holds(&key, &other, format!("{expected:?}: {why}")));
            }
        };
    }
    Ok(words)
}
