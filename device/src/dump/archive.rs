//! Members of a ZIP archive, where they lie in the file. PyTorch's and NumPy's archives are stored member by member, so
//! that a tensor can be read in place; what is compressed is taken out within a budget.

use std::io::{Cursor, Read as _};
use std::ops::Range;

use zip::{CompressionMethod, ZipArchive};

use super::error::DumpFault;
use super::open::Budget;

/// An archive whose directory has been read.
pub(super) struct Archive<'a> {
    bytes: &'a [u8],
    zip: ZipArchive<Cursor<&'a [u8]>>,
    /// Its members in the directory's order.
    pub members: Vec<Member>,
}

/// A member of an archive.
pub(super) struct Member {
    /// Its name.
    pub name: String,
    /// Bytes when taken out.
    pub size: usize,
    place: Place,
    checksum: u32,
}

#[derive(Clone)]
enum Place {
    Stored(Range<usize>),
    Deflated,
}

/// A member's bytes.
pub(super) enum Content {
    /// They lie there in the file.
    InPlace(Range<usize>),
    /// They were compressed.
    Inflated(Vec<u8>),
}

fn unreadable(error: &zip::result::ZipError) -> DumpFault {
    DumpFault::Archive(error.to_string())
}

impl<'a> Archive<'a> {
    /// Reads the directory, and checks every member's place.
    pub fn open(bytes: &'a [u8]) -> Result<Self, DumpFault> {
        let mut zip = ZipArchive::new(Cursor::new(bytes)).map_err(|error| unreadable(&error))?;
        if zip.offset() != 0 {
            return Err(DumpFault::ArchiveOffset(zip.offset()));
        }
        if zip.metadata().has_duplicate_names() {
            return Err(DumpFault::Archive("two of its members have one name".into()));
        }
        let mut members = Vec::new();
        for index in 0..zip.len() {
            let file = zip.by_index_raw(index).map_err(|error| unreadable(&error))?;
            let name = file.name().map_err(|error| unreadable(&error))?.into_owned();
            let refused = |why: String| DumpFault::Member { member: name.clone(), why };
            if file.encrypted() {
                return Err(refused("is encrypted".into()));
            }
            let begin = file.data_start().ok_or_else(|| refused("lies nowhere in the archive".into()))?;
            let end = begin.checked_add(file.compressed_size());
            let range = end.filter(|&end| end <= bytes.len() as u64).map(|end| begin as usize..end as usize);
            let Some(range) = range else {
                let (size, length) = (file.compressed_size(), bytes.len());
                return Err(refused(format!(
                    "is {size} bytes long and begins at byte {begin}, which leads beyond the file of {length} bytes"
                )));
            };
            let place = match file.compression() {
                CompressionMethod::Stored if file.size() != file.compressed_size() => {
                    let (size, stored) = (file.size(), file.compressed_size());
                    return Err(refused(format!("is stored and has two lengths, {size} and {stored} bytes")));
                }
                CompressionMethod::Stored => Place::Stored(range),
                CompressionMethod::Deflated => Place::Deflated,
                other => return Err(refused(format!("is compressed by {other}; expected stored or deflated"))),
            };
            let checksum = file.crc32();
            let Ok(size) = usize::try_from(file.size()) else {
                return Err(refused(format!("is {} bytes long, more than this machine addresses", file.size())));
            };
            members.push(Member { name: name.clone(), size, place, checksum });
        }
        Ok(Self { bytes, zip, members })
    }

    /// The bytes of a member: where they lie, or taken out within the budget. A checksum of 0 is that of a writer which
    /// was told to compute none, where `may_lack_checksum` says that the format has such writers.
    pub fn content(
        &mut self,
        index: usize,
        may_lack_checksum: bool,
        budget: &mut Budget,
    ) -> Result<Content, DumpFault> {
        let Some(member) = self.members.get(index) else {
            return Err(DumpFault::Archive(format!("has no member {index}")));
        };
        let refused = |why: &str| DumpFault::Member { member: member.name.clone(), why: why.to_owned() };
        match &member.place {
            Place::Stored(range) => {
                let content = self.bytes.get(range.clone()).unwrap_or_default();
                let unchecked = may_lack_checksum && member.checksum == 0;
                if !unchecked && crc32fast::hash(content) != member.checksum {
                    return Err(refused("does not have the checksum that the archive gives for it: it was changed"));
                }
                Ok(Content::InPlace(range.clone()))
            }
            Place::Deflated => {
                budget.take(&member.name, member.size as u64)?;
                let file = self.zip.by_index(index).map_err(|error| unreadable(&error))?;
                let mut content = Vec::new();
                // One byte more than stated shows a member that lies about its length.
                let read = file.take(member.size as u64 + 1).read_to_end(&mut content);
                read.map_err(|error| refused(&format!("cannot be decompressed: {error}")))?;
                if content.len() != member.size {
                    return Err(refused(&format!("does not decompress to the {} bytes it states", member.size)));
                }
                Ok(Content::Inflated(content))
            }
        }
    }

    /// The bytes of content.
    pub fn bytes<'c>(&self, content: &'c Content) -> &'c [u8]
    where
        'a: 'c,
    {
        match content {
            Content::InPlace(range) => self.bytes.get(range.clone()).unwrap_or_default(),
            Content::Inflated(bytes) => bytes,
        }
    }
}
