//! The safetensors files of a checkpoint: which there are, and where each tensor lies in them. Files are mapped, not
//! read, and every claim of an index or a header is checked before a byte of data is looked at.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

use super::error::{CheckpointError, CheckpointFault};
use super::json;
use super::layout::Form;
use crate::header::{Header, unique_strings};
use crate::mapped::Mapped;

/// One file of weights.
#[derive(Debug)]
pub struct Shard {
    /// Where it is.
    pub path: PathBuf,
    /// Its bytes.
    pub(super) mapped: Mapped,
    /// Tensors in it.
    pub tensors: usize,
}

impl Shard {
    /// Length of the file in bytes.
    #[must_use]
    pub fn length(&self) -> usize {
        self.mapped.bytes().len()
    }
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
pub struct Place {
    /// Index of its shard.
    pub shard: usize,
    /// Its bytes in the file.
    pub range: Range<usize>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
}

/// All files of weights.
#[derive(Debug)]
pub struct Shards {
    pub files: Vec<Shard>,
    pub tensors: BTreeMap<String, Place>,
    /// Bytes of all tensors, where the index says it.
    pub stated_size: Option<u64>,
}

#[derive(Deserialize)]
struct Index {
    #[serde(default)]
    metadata: IndexMetadata,
    #[serde(deserialize_with = "unique_strings")]
    weight_map: BTreeMap<String, String>,
}

#[derive(Default, Deserialize)]
struct IndexMetadata {
    total_size: Option<serde_json::Number>,
}

impl Shards {
    /// Maps the files of the checkpoint in `dir`: those of its index, or its single file.
    pub fn open(dir: &Path, form: Form) -> Result<Self, CheckpointError> {
        let (index, single) = form.files();
        let (index_path, single_path) = (dir.join(index), dir.join(single));
        let found: Option<Index> = json::read(&index_path)?;
        match (found, single_path.symlink_metadata().is_ok()) {
            (None, false) => Err(CheckpointError::new(dir, CheckpointFault::NoWeights { index, single })),
            (Some(_), true) => Err(CheckpointError::new(dir, CheckpointFault::TwoKinds { index, single })),
            (None, true) => {
                let mut shards = Self { files: vec![], tensors: BTreeMap::new(), stated_size: None };
                shards.add(single_path, |_, _| Ok(()))?;
                Ok(shards)
            }
            (Some(found), false) => Self::indexed(dir, &index_path, found),
        }
    }

    fn indexed(dir: &Path, index_path: &Path, index: Index) -> Result<Self, CheckpointError> {
        let mut by_shard: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, shard) in &index.weight_map {
            if !is_plain_name(shard) {
                let fault = CheckpointFault::ShardName { tensor: tensor.clone(), shard: shard.clone() };
                return Err(CheckpointError::new(index_path, fault));
            }
            by_shard.entry(shard).or_default().push(tensor);
        }
        if by_shard.is_empty() {
            return Err(CheckpointError::new(index_path, CheckpointFault::EmptyIndex));
        }
        let stated_size = index.metadata.total_size.and_then(|size| size.as_u64());
        let mut shards = Self { files: vec![], tensors: BTreeMap::new(), stated_size };
        for (shard, listed) in by_shard {
            shards.add(dir.join(shard), |path, header| {
                if let Some(absent) = listed.iter().find(|tensor| !header.tensors.contains_key(**tensor)) {
                    return Err(CheckpointError::new(path, CheckpointFault::Absent { tensor: (*absent).to_owned() }));
                }
                for tensor in header.tensors.keys() {
                    let listed = index.weight_map.get(tensor);
                    if listed.is_none_or(|listed| listed != shard) {
                        let fault = CheckpointFault::Unlisted { tensor: tensor.clone(), listed: listed.cloned() };
                        return Err(CheckpointError::new(path, fault));
                    }
                }
                Ok(())
            })?;
        }
        Ok(shards)
    }

    /// Maps one more file once `check` has seen its header.
    fn add(
        &mut self,
        path: PathBuf,
        check: impl FnOnce(&Path, &Header) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let (header, mapped) = open_file(&path).map_err(|fault| CheckpointError::new(&path, fault))?;
        check(&path, &header)?;
        let (shard, begin) = (self.files.len(), mapped.bytes().len() - header.data_length());
        let tensors = header.tensors.len();
        for (name, entry) in header.tensors {
            let range = begin + entry.data_offsets.0..begin + entry.data_offsets.1;
            self.tensors.insert(name, Place { shard, range, dtype: entry.dtype, shape: entry.shape });
        }
        self.files.push(Shard { path, mapped, tensors });
        Ok(())
    }

    /// The bytes of a tensor.
    pub fn bytes(&self, place: &Place) -> &[u8] {
        // Places are made from headers that were checked against the files' lengths.
        self.files.get(place.shard).and_then(|shard| shard.mapped.bytes().get(place.range.clone())).unwrap_or_default()
    }

    /// The error of a fault in the checkpoint in `dir`: of the shard that holds the tensor at fault, if one does.
    pub fn at_fault(&self, dir: &Path, fault: CheckpointFault) -> CheckpointError {
        let shard = fault.tensor().and_then(|tensor| self.path_of(tensor));
        CheckpointError::new(shard.unwrap_or(dir), fault)
    }

    /// The file that holds a tensor.
    fn path_of(&self, tensor: &str) -> Option<&Path> {
        Some(&self.files.get(self.tensors.get(tensor)?.shard)?.path)
    }

    /// Asks the system to begin reading a tensor.
    pub fn will_need(&self, place: &Place) {
        if let Some(shard) = self.files.get(place.shard) {
            shard.mapped.will_need(&place.range);
        }
    }

    /// The names of all files, for messages about what none of them holds.
    pub fn searched(&self) -> String {
        let name = |shard: &Shard| shard.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        self.files.iter().map(name).collect::<Vec<_>>().join(", ")
    }
}

/// Whether a name stays in its directory: one plain component on any system.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    let one = matches!((components.next(), components.next()), (Some(Component::Normal(_)), None));
    one && !name.contains(['/', '\\', ':', '\0'])
}

/// Maps a file whose header describes it to the last byte. Links are followed, as model hubs store shards behind
/// links; what they lead to must be a regular file.
fn open_file(path: &Path) -> Result<(Header, Mapped), CheckpointFault> {
    // Asked before opening: opening a pipe waits for its writer.
    if !std::fs::metadata(path)?.is_file() {
        return Err(CheckpointFault::NotAFile);
    }
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    let header = Header::read(&file, length)?;
    let mapped = Mapped::open(&file)?;
    // The format's own reader has the last word on the header.
    SafeTensors::read_metadata(mapped.bytes())?;
    if mapped.bytes().len() as u64 != length {
        return Err(std::io::Error::other("changed its length while it was being opened").into());
    }
    Ok((header, mapped))
}
