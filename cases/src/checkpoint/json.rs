//! Small JSON files beside the weights: read with a limit, and without losing what is said twice.

use std::collections::BTreeSet;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

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
    serde_json::from_slice::<Once>(&text).map_err(|error| failed(error.into()))?;
    serde_json::from_slice(&text).map(Some).map_err(|error| failed(error.into()))
}

/// Any JSON in which no object gives a key twice, at whatever depth: the last one would win silently.
struct Once;

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Once)
    }
}

impl<'de> Visitor<'de> for Once {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if seen.contains(&key) {
                let key: String = key.chars().take(200).collect();
                return Err(A::Error::custom(format!("gives `{key}` twice; which of the two is meant cannot be told")));
            }
            seen.insert(key);
            map.next_value::<Once>()?;
        }
        Ok(Self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Self, A::Error> {
        while sequence.next_element::<Once>()?.is_some() {}
        Ok(Self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(Self)
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(Self)
    }
}
