//! Files mapped into memory: the one place of the project that asks the system for a mapping.

use std::fs::File;
use std::io;
use std::ops::Range;

use memmap2::Mmap;

/// A whole file as bytes. Its pages are the system's file cache: they are read when touched, and taken away again
/// when memory is needed for something else.
#[derive(Debug)]
pub struct Mapped(Mmap);

impl Mapped {
    /// Maps a file for reading. The file may be closed afterwards.
    ///
    /// # Errors
    /// What the system says, for instance that the file cannot be mapped.
    pub fn open(file: &File) -> io::Result<Self> {
        // SAFETY: the mapping is for reading, and its bytes are only ever read as integers and BF16 patterns, for
        // which every bit pattern is a value. What remains is that another process may change the file while it is
        // mapped: the numbers read are then the old or the new ones, and where it is cut short the system ends this
        // process; neither writes to memory. Reading 16 GB of weights into memory of our own is no alternative.
        unsafe { Mmap::map(file) }.map(Self)
    }

    /// The file's bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Asks the system to begin reading some bytes ahead of their use. It is a hint: a system that does not take it
    /// reads them when they are touched.
    pub fn will_need(&self, range: &Range<usize>) {
        #[cfg(unix)]
        if range.start < range.end && range.end <= self.0.len() {
            let _ = self.0.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_outlives_its_file_and_takes_any_hint() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, b"weights").unwrap();
        let mapped = Mapped::open(&File::open(&path).unwrap()).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mapped.bytes(), b"weights");
        for range in [0..7, 3..5, 3..3, 5..900] {
            mapped.will_need(&range);
        }
        assert_eq!(mapped.bytes(), b"weights");
    }
}
