//! Checkpoints on their way to disk: which tensor goes into which shard and where, and how a directory becomes a
//! checkpoint all at once. Files are written into a temporary directory and moved when the last of them is whole, so
//! that a run that is refused, fails or is interrupted leaves no mixture that opens.

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Map, Value, json};
use thiserror::Error;

use super::ascend::{DESCRIPTION_FILE, INDEX_FILE as ASCEND_INDEX_FILE, SINGLE_FILE as ASCEND_SINGLE_FILE};
use super::{CONFIG_FILE, INDEX_FILE, SINGLE_FILE};
use crate::atomic::{is_temporary, temporary_directory_in};
use crate::header::{Entry, Header, HeaderError};

/// Largest shard, as hubs like them; a single larger tensor has a shard of its own.
pub const SHARD: usize = 4_000_000_000;

/// Why a checkpoint cannot be written.
#[derive(Debug, Error)]
#[allow(missing_docs)] // Each variant and its fields are spelled out by the message.
pub enum WriteError {
    #[error("{}: is not empty; name a new directory, or ask for its files to be replaced", .0.display())]
    NotEmpty(PathBuf),
    #[error("{}: is being written by another process; let it end, or name another directory", .0.display())]
    Busy(PathBuf),
    #[error(
        "{}: the checkpoint takes {} MB, but the file system has {} MB free; make room{}",
        path.display(), needed.div_ceil(1_000_000), free / 1_000_000,
        if *beside { " (what the directory holds stays until the new one is whole, and needs its room)" } else { "" }
    )]
    Space { path: PathBuf, needed: u64, free: u64, beside: bool },
    #[error("{}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("header: {0}")]
    Header(#[from] HeaderError),
}

/// What the file system says of a path, as an error of ours.
pub fn at(path: &Path) -> impl FnOnce(io::Error) -> WriteError + use<> {
    let path = path.to_path_buf();
    move |error| WriteError::Io { path, error }
}

/// Makes `dir` a checkpoint. `write` puts the files, whose tensors take `total` bytes, into the directory it is given
/// and returns their names, `config.json` last. `dir` is made when it is not there; what it holds is replaced only
/// where `replace` says so, and stays as it was until all files are whole, and so it does when the request is refused
/// or the writing fails. While files are moved there is no `config.json`.
///
/// # Errors
/// A directory in use, too little space, what the file system says, or what `write` says.
pub fn write_whole<E: From<WriteError>>(
    dir: &Path,
    replace: bool,
    total: u64,
    write: impl FnOnce(&Path) -> Result<Vec<String>, E>,
) -> Result<(), E> {
    let made: Vec<&Path> = dir
        .ancestors()
        .take_while(|above| !above.as_os_str().is_empty() && above.symlink_metadata().is_err())
        .collect();
    fs::create_dir_all(dir).map_err(at(dir))?;
    let _lock = lock(dir)?;
    let done = write_locked(dir, replace, total, write);
    if done.is_err() {
        // Directories that were made for nothing; what somebody else has put something into stays. The lock is still
        // held: without it, an empty directory may be one that another run has just begun with.
        for directory in made {
            let _ = fs::remove_dir(directory);
        }
    }
    done
}

fn write_locked<E: From<WriteError>>(
    dir: &Path,
    replace: bool,
    total: u64,
    write: impl FnOnce(&Path) -> Result<Vec<String>, E>,
) -> Result<(), E> {
    let leftovers = prepare(dir, replace)?;
    // Left by runs that were interrupted: nobody writes them any more, and their room is ours.
    let freed: u64 = leftovers.iter().map(|path| size(path)).sum();
    let free = fs4::available_space(dir).map_err(at(dir))?.saturating_add(freed);
    check_space(dir, total, free, replace)?;
    for path in leftovers {
        remove(&path).map_err(at(&path))?;
    }
    let staging = temporary_directory_in(dir).map_err(at(dir))?;
    let names = write(staging.path())?;

    // What makes a directory a checkpoint of one kind or another goes first, `config.json` before all.
    let kinds = [CONFIG_FILE, DESCRIPTION_FILE, INDEX_FILE, SINGLE_FILE, ASCEND_INDEX_FILE, ASCEND_SINGLE_FILE];
    for name in kinds {
        let path = dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&path)(error).into()),
            _ => {}
        }
    }
    for name in names {
        let path = dir.join(&name);
        fs::rename(staging.path().join(&name), &path).map_err(at(&path))?;
    }
    Ok(staging.close().map_err(at(dir))?)
}

/// Holds the directory itself for this process until the file is closed, so that no lock is left behind by a run that
/// was interrupted. `None` on systems and file systems that have no such locks.
fn lock(dir: &Path) -> Result<Option<File>, WriteError> {
    let Ok(directory) = File::open(dir) else { return Ok(None) };
    match directory.try_lock() {
        Ok(()) => Ok(Some(directory)),
        Err(TryLockError::WouldBlock) => Err(WriteError::Busy(dir.to_path_buf())),
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

/// Refuses a directory in use; what interrupted runs left behind in one that may be used.
fn prepare(dir: &Path, replace: bool) -> Result<Vec<PathBuf>, WriteError> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<Result<Vec<_>, _>>).map_err(at(dir))?;
    if !entries.is_empty() && !replace {
        return Err(WriteError::NotEmpty(dir.to_path_buf()));
    }
    Ok(entries.iter().filter(|entry| is_temporary(&entry.file_name())).map(fs::DirEntry::path).collect())
}

/// Bytes of a file, or of the files in a directory; what cannot be read counts nothing.
fn size(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(entries) => entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|file| file.len()).sum(),
        Err(_) => path.symlink_metadata().map_or(0, |file| file.len()),
    }
}

fn remove(path: &Path) -> io::Result<()> {
    if path.symlink_metadata()?.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }
}

/// Refuses what would fill the file system, with the numbers.
fn check_space(path: &Path, needed: u64, free: u64, beside: bool) -> Result<(), WriteError> {
    if needed <= free { Ok(()) } else { Err(WriteError::Space { path: path.to_path_buf(), needed, free, beside }) }
}

/// A tensor that is going to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
}

impl Slot {
    /// Bytes of the tensor.
    pub fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Which tensors go into which shard: in the order given, and within a shard what has the most bytes an element first,
/// so that it is aligned.
pub fn shards(slots: Vec<Slot>) -> Vec<Vec<Slot>> {
    let mut shards: Vec<Vec<Slot>> = Vec::new();
    let mut filled = 0;
    for slot in slots {
        match shards.last_mut() {
            Some(shard) if filled + slot.bytes() <= SHARD => {
                filled += slot.bytes();
                shard.push(slot);
            }
            _ => {
                filled = slot.bytes();
                shards.push(vec![slot]);
            }
        }
    }
    for shard in &mut shards {
        shard.sort_by_key(|slot| std::cmp::Reverse(slot.dtype.bitsize()));
    }
    shards
}

fn header(slots: &[Slot]) -> Header {
    let mut header = Header { metadata: [("format".to_owned(), "pt".to_owned())].into(), ..Header::default() };
    let mut end = 0;
    for slot in slots {
        let begin = end;
        end += slot.bytes();
        let entry = Entry { dtype: slot.dtype, shape: slot.shape.clone(), data_offsets: (begin, end) };
        header.tensors.insert(slot.name.clone(), entry);
    }
    header
}

/// The shards of a checkpoint, open for their tensors in any order.
pub struct Output<'a> {
    dir: PathBuf,
    files: Vec<(String, File)>,
    /// Shard, first byte and bytes of each tensor.
    places: BTreeMap<String, (usize, u64, u64)>,
    written: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Output<'a> {
    /// Makes the shards of these tensors in `dir`, with nothing but their headers. `progress` is told the bytes
    /// written so far and those of all tensors.
    pub fn create(dir: &Path, slots: Vec<Slot>, progress: &'a mut dyn FnMut(u64, u64)) -> Result<Self, WriteError> {
        let shards = shards(slots);
        let mut output =
            Self { dir: dir.to_path_buf(), files: vec![], places: BTreeMap::new(), written: 0, total: 0, progress };
        for (index, slots) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => SINGLE_FILE.to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            let path = dir.join(&name);
            let header = header(slots).encode()?;
            let mut file = File::create(&path).map_err(at(&path))?;
            file.write_all(&header).map_err(at(&path))?;
            let mut begin = header.len() as u64;
            for slot in slots {
                let bytes = slot.bytes() as u64;
                output.places.insert(slot.name.clone(), (index, begin, bytes));
                begin += bytes;
                output.total += bytes;
            }
            output.files.push((name, file));
        }
        Ok(output)
    }

    /// Writes some bytes of a tensor, which begin at its byte `offset`.
    pub fn put(&mut self, tensor: &str, offset: usize, bytes: &[u8]) -> Result<(), WriteError> {
        let place = self.places.get(tensor).filter(|(_, _, size)| (offset + bytes.len()) as u64 <= *size);
        let place = place.and_then(|(shard, begin, _)| Some((self.files.get_mut(*shard)?, begin + offset as u64)));
        let Some(((name, file), position)) = place else {
            let error = io::Error::other(format!("no room was planned for tensor `{tensor}`"));
            return Err(at(&self.dir)(error));
        };
        file.seek(SeekFrom::Start(position))
            .and_then(|_| file.write_all(bytes))
            .map_err(|error| WriteError::Io { path: self.dir.join(&*name), error })?;
        self.written += bytes.len() as u64;
        (self.progress)(self.written, self.total);
        Ok(())
    }

    /// Writes the index where there are several shards; the names of all files.
    pub fn finish(self) -> Result<Vec<String>, WriteError> {
        let mut names: Vec<String> = self.files.iter().map(|(name, _)| name.clone()).collect();
        if names.len() > 1 {
            let shard = |index: usize| names.get(index).cloned().unwrap_or_default();
            let map: Map<String, Value> =
                self.places.iter().map(|(tensor, (index, ..))| (tensor.clone(), shard(*index).into())).collect();
            let index = json!({ "metadata": { "total_size": self.total }, "weight_map": map });
            names.push(write_json(&self.dir, INDEX_FILE, &index)?);
        }
        Ok(names)
    }
}

/// Writes a small JSON file; its name.
pub fn write_json(dir: &Path, name: &str, value: &Value) -> Result<String, WriteError> {
    let path = dir.join(name);
    fs::write(&path, format!("{value:#}\n")).map_err(at(&path))?;
    Ok(name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_space_is_told_in_numbers() {
        check_space(Path::new("d"), 10, 10, false).unwrap();
        let message = check_space(Path::new("d"), 16_300_000_001, 5_000_000_000, false).unwrap_err().to_string();
        assert!(message.contains("takes 16301 MB") && message.contains("5000 MB free"), "{message}");
    }

    #[test]
    fn tensors_are_written_in_any_order_and_only_where_they_have_room() {
        let slot = |name: &str, dtype, elements| Slot { name: name.into(), dtype, shape: vec![elements] };
        let dir = tempfile::tempdir().unwrap();
        let mut seen = Vec::new();
        let mut progress = |written, total| seen.push((written, total));
        let slots = vec![slot("codes", Dtype::I8, 3), slot("scales", Dtype::F32, 2)];
        let mut output = Output::create(dir.path(), slots, &mut progress).unwrap();
        output.put("codes", 1, &[2, 3]).unwrap();
        output.put("scales", 0, &[7; 8]).unwrap();
        output.put("codes", 0, &[1]).unwrap();
        assert!(output.put("codes", 2, &[4, 5]).unwrap_err().to_string().contains("`codes`"));
        assert!(output.put("other", 0, &[]).unwrap_err().to_string().contains("`other`"));
        assert_eq!(output.finish().unwrap(), [SINGLE_FILE]);
        assert_eq!(seen, [(2, 11), (10, 11), (11, 11)]);
        let file = fs::read(dir.path().join(SINGLE_FILE)).unwrap();
        let header = Header::read(&file[..], file.len() as u64).unwrap();
        assert_eq!(header.tensors["scales"].data_offsets, (0, 8));
        assert_eq!(file[file.len() - 11..], [7, 7, 7, 7, 7, 7, 7, 7, 1, 2, 3]);
    }
}
