//! Files that are whole or not there: written beside their place under a temporary name, then renamed.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Writes `bytes` to `path` so that a reader sees either the old file or the whole new one. A link is
/// followed. A device or a pipe (`/dev/stdout`) cannot be renamed over without destroying it and is
/// written in place.
///
/// # Errors
/// Whatever the file system says: no such directory, no permission, no space.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let target = match fs::metadata(path) {
        Ok(found) if found.is_file() => path.canonicalize()?,
        Ok(_) => return OpenOptions::new().write(true).open(path)?.write_all(bytes),
        Err(_) => path.to_path_buf(),
    };
    let mut file = temporary_beside(&target)?;
    file.write_all(bytes)?;
    file.persist(&target).map_err(|failed| failed.error)?;
    Ok(())
}

/// Writes a new file, whole or not at all; a file that is already there stays as it is.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`], or whatever else the file system says.
pub fn create_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = temporary_beside(path)?;
    file.write_all(bytes)?;
    file.persist_noclobber(path).map_err(|failed| failed.error)?;
    Ok(())
}

/// The same as [`create_atomically`] for what need not be in memory as a whole: `write` gets the file, buffered.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`], whatever `write` says, or whatever else the file system says.
pub fn create_atomically_with(path: &Path, write: impl FnOnce(&mut dyn io::Write) -> io::Result<()>) -> io::Result<()> {
    let mut file = io::BufWriter::with_capacity(1 << 20, temporary_beside(path)?);
    write(&mut file)?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.persist_noclobber(path).map_err(|failed| failed.error)?;
    Ok(())
}

const PREFIX: &str = ".assay-";
const SUFFIX: &str = ".tmp";

/// Whether a file has the name of a temporary one: what an interrupted run leaves behind.
pub(crate) fn is_temporary(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(PREFIX) && name.ends_with(SUFFIX))
}

pub(crate) fn temporary_beside(target: &Path) -> io::Result<tempfile::NamedTempFile> {
    let directory = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    let mut builder = tempfile::Builder::new();
    builder.prefix(PREFIX).suffix(SUFFIX);
    // Temporary files are private by default; a finished one gets what any new file gets.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(directory)
}

/// A directory for files on their way to `directory`, removed with what is still in it when dropped.
pub(crate) fn temporary_directory_in(directory: &Path) -> io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix(PREFIX).suffix(SUFFIX).tempdir_in(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_in_parts_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        let failed = create_atomically_with(&path, |file| {
            file.write_all(b"half")?;
            Err(io::Error::other("no more"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no more");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        create_atomically_with(&path, |file| (0..1000).try_for_each(|_| file.write_all(&[7; 4096]))).unwrap();
        assert_eq!(fs::read(&path).unwrap(), vec![7; 4_096_000]);
        let again = create_atomically_with(&path, |_| Ok(()));
        assert_eq!(again.unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn replaces_whole_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        write_atomically(&path, b"a longer first text").unwrap();
        write_atomically(&path, b"second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_new_file_never_replaces_an_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        create_atomically(&path, b"first").unwrap();
        assert_eq!(create_atomically(&path, b"second").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_missing_directory_is_an_error_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_atomically(&dir.path().join("no/such/a.txt"), b"x").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_and_devices_survive() {
        use std::os::unix::fs::FileTypeExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("a.txt"), dir.path().join("link"));
        write_atomically(&path, b"old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write_atomically(&link, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        write_atomically(Path::new("/dev/null"), b"gone").unwrap();
        assert!(fs::metadata("/dev/null").unwrap().file_type().is_char_device());
    }
}
